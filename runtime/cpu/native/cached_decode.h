// Decodes rows of a key-value cache into floats: plain loops, which compilers make vector code of for each target.
//
// Included behind vector.h, whose MOE_PACK_VECTOR_FLOATS says for which; all names have internal linkage, as there.
#pragma once

#include "cached_rows.h"
#include "codes.h"

namespace moe_pack {
namespace {

inline float half_value(const uint8_t* from) {
#if MOE_PACK_VECTOR_FLOATS > 4
    return _cvtsh_ss(load_u16(from));
#else
    return half_to_float(load_u16(from));
#endif
}

// BLOCK: the codes of a block, or 0 where only `block` says it: with a constant, compilers unroll.
template <int BLOCK>
inline void decode_q8_block(const uint8_t* codes, float scale, int32_t block, float* out) {
    const int32_t count = BLOCK ? BLOCK : block;
    for (int32_t i = 0; i < count; ++i) {
        out[i] = float(int8_t(codes[i])) * scale;
    }
}

template <int BLOCK>
inline void decode_q4_block(const uint8_t* codes, float scale, float minimum, int32_t block, float* out) {
    const int32_t half = (BLOCK ? BLOCK : block) / 2;
    for (int32_t i = 0; i < half; ++i) {
        out[i] = float(codes[i] & 15) * scale + minimum;
    }
    for (int32_t i = 0; i < half; ++i) {
        out[half + i] = float(codes[i] >> 4) * scale + minimum;
    }
}

#if MOE_PACK_VECTOR_FLOATS > 4
// 16 codes, a signed byte each, as floats times a scale plus a minimum. Compilers make no good vector code of the loops.
inline void store_codes(__m128i codes, float scale, float minimum, float* out) {
#if MOE_PACK_VECTOR_FLOATS == 16
    const __m512 floats = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    _mm512_storeu_ps(out, _mm512_fmadd_ps(floats, _mm512_set1_ps(scale), _mm512_set1_ps(minimum)));
#else
    const __m256 scales = _mm256_set1_ps(scale), minima = _mm256_set1_ps(minimum);
    const __m256 first = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    const __m256 second = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
    _mm256_storeu_ps(out, _mm256_fmadd_ps(first, scales, minima));
    _mm256_storeu_ps(out + 8, _mm256_fmadd_ps(second, scales, minima));
#endif
}

template <>
inline void decode_q8_block<kCacheBlock>(const uint8_t* codes, float scale, int32_t, float* out) {
    store_codes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), scale, 0.0f, out);
    store_codes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16)), scale, 0.0f, out + 16);
}

template <>
inline void decode_q4_block<kCacheBlock>(const uint8_t* codes, float scale, float minimum, int32_t, float* out) {
    const __m128i low = _mm_set1_epi8(15), bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    store_codes(_mm_and_si128(bytes, low), scale, minimum, out);
    store_codes(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), scale, minimum, out + 16);
}
#endif

// Blocks of a row; `out` has room for all of its blocks.
template <int BLOCK>
inline void decode_codes(const CachedRows& rows, const uint8_t* from, float* out) {
    const uint8_t* scales = from + size_t(rows.num_blocks) * rows.code_bytes;
    const uint8_t* minima = scales + 2 * rows.num_blocks;
    for (int32_t b = 0; b < rows.num_blocks; ++b) {
        const uint8_t* codes = from + size_t(b) * rows.code_bytes;
        const float scale = half_value(scales + 2 * b);
        if (rows.kind == CacheKind::q8) {
            decode_q8_block<BLOCK>(codes, scale, rows.block, out + b * rows.block);
        } else {
            decode_q4_block<BLOCK>(codes, scale, half_value(minima + 2 * b), rows.block, out + b * rows.block);
        }
    }
}

inline void decode_bf16(const uint8_t* from, int32_t width, float* out) {
    for (int32_t i = 0; i < width; ++i) {
        out[i] = bf16_to_float(load_u16(from + 2 * i));
    }
}

void decode_cached(const CachedRows& rows, const uint8_t* from, int32_t num_rows, float* out, size_t stride) {
    for (int32_t r = 0; r < num_rows; ++r) {
        const uint8_t* row = from + r * rows.row_bytes;
        float* to = out + r * stride;
        if (rows.kind == CacheKind::bf16) {
            decode_bf16(row, rows.width, to);
        } else if (rows.block == kCacheBlock) {
            decode_codes<kCacheBlock>(rows, row, to);
        } else {
            decode_codes<0>(rows, row, to);
        }
    }
}

}  // namespace
}  // namespace moe_pack
