// Rows of floats with AVX-512: of 32 and 16 bits, and the 8-bit codes that are floats themselves.
//
// For kernels_avx512.cpp alone, as codes_avx512.h is.
#pragma once

#include <immintrin.h>

#include "codes_avx512.h"

namespace moe_pack {
namespace {

// -- Weights ---------------------------------------------------------------------------------------------------------

// 16 weights of a float codec from column `c` on; zeros where there are none.
template <Codec CODEC>
inline __m512 load_weights(const uint8_t* row, int32_t c, __mmask16 mask) {
    if constexpr (CODEC == Codec::f32) {
        return _mm512_maskz_loadu_ps(mask, row + 4 * size_t(c));
    } else {
        const __m256i stored = _mm256_maskz_loadu_epi16(mask, row + 2 * size_t(c));
        return CODEC == Codec::f16
                   ? _mm512_cvtph_ps(stored)
                   : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
    }
}

// 32 codes that are floats of 8 bits, as halves. E4M3's are 2^-8 times as large (codes.h).
template <Codec CODEC>
MOE_PACK_INLINE inline __m512i load_halves(const uint8_t* from) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if constexpr (CODEC == Codec::e5m2) {
        return _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
    } else {
        const __m512i placed = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
        const __m256i unsigned_none = _mm256_set1_epi8(0x7f);
        const __mmask32 is_none = _mm256_cmpeq_epi8_mask(_mm256_and_si256(bytes, unsigned_none), unsigned_none);
        const __m512i halves = _mm512_and_si512(placed, _mm512_set1_epi16(int16_t(0xbf80)));
        return _mm512_mask_blend_epi16(is_none, halves, _mm512_set1_epi16(0x7fff));
    }
}

// 64 such codes as floats, 16 a register.
template <Codec CODEC>
MOE_PACK_INLINE inline void load_floats(const uint8_t* from, __m512 floats[4]) {
    unrolled<2>([&](auto i) MOE_PACK_INLINE {
        const __m512i halves = load_halves<CODEC>(from + 32 * i.value);
        floats[2 * i.value] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        floats[2 * i.value + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    });
}

template <Codec CODEC>
void decode_halves(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    constexpr bool IS_FP8 = CODEC == Codec::fp8;
    const PowerOfTwo power(IS_FP8 ? 0 : row[part.scales_at]);
    for (int32_t block = start; block < stop; block += kBlock) {
        __m512 floats[4];
        load_floats<CODEC>(row + block, floats);
        const __m512 first = _mm512_set1_ps(IS_FP8 ? kE4m3Unit : power.first);
        const __m512 second = _mm512_set1_ps(IS_FP8 ? fp8_scale(part, row, block / kFp8Group) : power.second);
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            const __m512 weights = _mm512_mul_ps(_mm512_mul_ps(floats[q.value], first), second);
            _mm512_storeu_ps(out + (block - start) + 16 * q.value, weights);
        });
    }
}

template <Codec CODEC>
void decode_floats(const Part&, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    for (int32_t c = start; c < stop; c += 16) {
        const __mmask16 mask = first_lanes_mask(stop - c);
        _mm512_mask_storeu_ps(out + (c - start), mask, load_weights<CODEC>(row, c, mask));
    }
}

// -- Rows times inputs -----------------------------------------------------------------------------------------------

template <Codec CODEC>
float dot_row_of_floats(const Part& part, const uint8_t* row, const float* x, Prefetch prefetch) {
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    int32_t c = 0;
    for (; c + 64 <= part.num_cols; c += 64) {
        prefetch.lines(CODEC == Codec::f32 ? 4 : 2);
        unrolled<4>([&](auto v) MOE_PACK_INLINE {
            const __m512 weights = load_weights<CODEC>(row, c + 16 * v.value, 0xffff);
            sums[v.value] = _mm512_fmadd_ps(weights, _mm512_load_ps(x + c + 16 * v.value), sums[v.value]);
        });
    }
    for (; c < part.num_cols; c += 16) {
        const __m512 weights = load_weights<CODEC>(row, c, first_lanes_mask(part.num_cols - c));
        sums[0] = _mm512_fmadd_ps(weights, _mm512_load_ps(x + c), sums[0]);
    }
    prefetch.rest();
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

template <Codec CODEC>
void dot_floats(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                const Ahead& ahead, float* out) {
    for (int32_t r = 0; r < num_rows; ++r) {
        const float* x = static_cast<const float*>(prepared);
        out[r] = dot_row_of_floats<CODEC>(part, rows[r], x, Prefetch(ahead, r)) + row_bias(part, rows[r]);
    }
}

template <Codec CODEC>
float dot_row_of_halves(const Part& part, const uint8_t* row, const float* x, Prefetch prefetch) {
    __m512 totals[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int32_t first = 0; first < part.num_cols; first += part.group) {
        const int32_t stop = part.num_cols - first < part.group ? part.num_cols : first + part.group;
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int32_t c = first; c < stop; c += kBlock) {
            prefetch.line();
            __m512 floats[4];
            load_floats<CODEC>(row + c, floats);
            unrolled<4>([&](auto v) MOE_PACK_INLINE {
                sums[v.value] = _mm512_fmadd_ps(floats[v.value], _mm512_load_ps(x + c + 16 * v.value), sums[v.value]);
            });
        }
        const __m512 scale = _mm512_set1_ps(CODEC == Codec::fp8 ? fp8_scale(part, row, first / kFp8Group) : 1.0f);
        unrolled<4>([&](auto v) MOE_PACK_INLINE {
            totals[v.value] = _mm512_fmadd_ps(sums[v.value], scale, totals[v.value]);
        });
    }
    prefetch.rest();
    const float total = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(totals[0], totals[1]),
                                                           _mm512_add_ps(totals[2], totals[3])));
    return CODEC == Codec::fp8 ? total * kE4m3Unit : times_power(double(total) / kE5m2Share, row[part.scales_at]);
}

template <Codec CODEC>
void dot_halves(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                const Ahead& ahead, float* out) {
    for (int32_t r = 0; r < num_rows; ++r) {
        const float* x = static_cast<const float*>(prepared);
        out[r] = dot_row_of_halves<CODEC>(part, rows[r], x, Prefetch(ahead, r)) + row_bias(part, rows[r]);
    }
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// Columns `c` on, in VECTORS registers in natural order; in the last one those of `last` exist.
template <Codec CODEC, int VECTORS>
MOE_PACK_INLINE inline void add_cols_of_floats(const uint8_t* const* rows, int32_t num_rows, const float* h,
                                               PrefetchRows& prefetch, int32_t c, __mmask16 last, float* sum) {
    __m512 sums[VECTORS];
    unrolled<VECTORS>([&](auto v) MOE_PACK_INLINE { sums[v.value] = _mm512_load_ps(sum + c + 16 * v.value); });
    for (int32_t r = 0; r < num_rows; ++r) {
        prefetch.lines<VECTORS>(CODEC == Codec::f32 ? VECTORS : (VECTORS + 1) / 2);
        unrolled<VECTORS>([&](auto v) MOE_PACK_INLINE {
            const __mmask16 mask = v.value + 1 < VECTORS ? 0xffff : last;
            const __m512 weights = load_weights<CODEC>(rows[r], c + 16 * v.value, mask);
            sums[v.value] = _mm512_fmadd_ps(weights, _mm512_set1_ps(h[r]), sums[v.value]);
        });
    }
    unrolled<VECTORS>([&](auto v) MOE_PACK_INLINE { _mm512_store_ps(sum + c + 16 * v.value, sums[v.value]); });
}

template <Codec CODEC>
void add_floats(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
                float*, float* sum) {
    PrefetchRows prefetch(ahead, num_rows);
    int32_t c = 0;
    for (; c + 64 <= part.num_cols; c += 64) {
        add_cols_of_floats<CODEC, 4>(rows, num_rows, h, prefetch, c, 0xffff, sum);
    }
    for (; c < part.num_cols; c += 16) {
        add_cols_of_floats<CODEC, 1>(rows, num_rows, h, prefetch, c, first_lanes_mask(part.num_cols - c), sum);
    }
    prefetch.rest();
}

// What multiplies a row's codes in the block at column `c`.
template <Codec CODEC>
inline float factor_of(const Part& part, const uint8_t* row, int32_t c, float h) {
    return h * (CODEC == Codec::fp8 ? fp8_scale(part, row, c / kFp8Group) : power_of_two(row[part.scales_at]));
}

// In natural order; with fp8 2^-8 times as large, which is how codes come.
template <Codec CODEC>
void add_halves(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
                float*, float* sum) {
    PrefetchRows prefetch(ahead, num_rows);
    for (int32_t c = 0; c < part.num_cols; c += kBlock) {
        __m512 sums[4];
        unrolled<4>([&](auto v) MOE_PACK_INLINE { sums[v.value] = _mm512_load_ps(sum + c + 16 * v.value); });
        for (int32_t r = 0; r < num_rows; ++r) {
            prefetch.lines<1>(1);
            __m512 floats[4];
            load_floats<CODEC>(rows[r] + c, floats);
            const __m512 factor = _mm512_set1_ps(factor_of<CODEC>(part, rows[r], c, h[r]));
            unrolled<4>([&](auto v) MOE_PACK_INLINE {
                sums[v.value] = _mm512_fmadd_ps(floats[v.value], factor, sums[v.value]);
            });
        }
        unrolled<4>([&](auto v) MOE_PACK_INLINE { _mm512_store_ps(sum + c + 16 * v.value, sums[v.value]); });
    }
    prefetch.rest();
}

}  // namespace
}  // namespace moe_pack
