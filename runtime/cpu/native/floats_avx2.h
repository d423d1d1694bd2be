// Rows of floats with AVX2: of 32 and 16 bits, and the 8-bit codes that are floats themselves.
//
// For kernels_avx2.cpp alone, as codes_avx2.h is.
#pragma once

#include <immintrin.h>

#include "codes_avx2.h"

namespace moe_pack {
namespace {

// -- Weights ----------------------------------------------------------------------------------------------------------

// Eight weights of a float codec from column `c` on; zeros from the `count`-th on.
template <Codec CODEC>
inline __m256 load_weights(const uint8_t* row, int32_t c, int32_t count) {
    constexpr size_t BYTES = CODEC == Codec::f32 ? 4 : 2;
    const uint8_t* from = row + BYTES * c;
    uint8_t padded[32];
    if (count < 8) {
        __builtin_memset(padded, 0, sizeof padded);
        __builtin_memcpy(padded, from, BYTES * count);
        from = padded;
    }
    if constexpr (CODEC == Codec::f32) {
        return _mm256_castsi256_ps(load_bytes(from));
    } else {
        const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return CODEC == Codec::f16 ? _mm256_cvtph_ps(stored)
                                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16));
    }
}

// 64 codes that are floats of 8 bits, as halves: columns 0 to 7 and 16 to 23, 8 to 15 and 24 to 31, and so the others.
// E4M3's are 2^-8 times as large (codes.h).
struct Halves {
    __m256i of[4];

    // The eight floats from column 8 v on.
    __m256 floats(int v) const {
        const __m256i sixteen = of[v / 4 * 2 + v % 2];
        return _mm256_cvtph_ps(v % 4 < 2 ? _mm256_castsi256_si128(sixteen) : _mm256_extracti128_si256(sixteen, 1));
    }
};

template <Codec CODEC>
inline Halves load_halves(const uint8_t* from) {
    const __m256i bytes[2] = {load_bytes(from), load_bytes(from + 32)}, none = _mm256_setzero_si256();
    Halves halves;
    for (int i = 0; i < 4; ++i) {
        halves.of[i] = i % 2 == 0 ? _mm256_unpacklo_epi8(none, bytes[i / 2]) : _mm256_unpackhi_epi8(none, bytes[i / 2]);
    }
    if constexpr (CODEC == Codec::fp8) {
        for (int i = 0; i < 4; ++i) {
            halves.of[i] = _mm256_and_si256(_mm256_srai_epi16(halves.of[i], 1), _mm256_set1_epi16(int16_t(0xbf80)));
        }
        const __m256i most = _mm256_set1_epi8(0x7f);
        const __m256i largest = _mm256_max_epu8(_mm256_and_si256(bytes[0], most), _mm256_and_si256(bytes[1], most));
        if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, most)) != 0, 0)) {
            for (int i = 0; i < 4; ++i) {
                const __m256i is_none = _mm256_cmpeq_epi8(_mm256_and_si256(bytes[i / 2], most), most);
                const __m256i wide = i % 2 == 0 ? _mm256_unpacklo_epi8(is_none, is_none)
                                                : _mm256_unpackhi_epi8(is_none, is_none);
                halves.of[i] = _mm256_or_si256(halves.of[i], _mm256_and_si256(wide, _mm256_set1_epi16(0x7fff)));
            }
        }
    }
    return halves;
}

template <Codec CODEC>
void decode_halves(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    constexpr bool IS_FP8 = CODEC == Codec::fp8;
    const PowerOfTwo power(IS_FP8 ? 0 : row[part.scales_at]);
    for (int32_t block = start; block < stop; block += kBlock) {
        const Halves halves = load_halves<CODEC>(row + block);
        const __m256 first = _mm256_set1_ps(IS_FP8 ? kE4m3Unit : power.first);
        const __m256 second = _mm256_set1_ps(IS_FP8 ? fp8_scale(part, row, block / kFp8Group) : power.second);
        for (int v = 0; v < 8; ++v) {
            _mm256_storeu_ps(out + (block - start) + 8 * v,
                             _mm256_mul_ps(_mm256_mul_ps(halves.floats(v), first), second));
        }
    }
}

template <Codec CODEC>
void decode_floats(const Part&, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    for (int32_t c = start; c < stop; c += 8) {
        const int32_t count = stop - c < 8 ? stop - c : 8;
        store_first(out + (c - start), load_weights<CODEC>(row, c, count), count);
    }
}

// -- Rows times inputs -----------------------------------------------------------------------------------------------

template <Codec CODEC>
float dot_halves(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float*) {
    const float* x = static_cast<const float*>(prepared);
    __m256 totals[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t first = 0; first < part.num_cols; first += part.group) {
        const int32_t stop = part.num_cols - first < part.group ? part.num_cols : first + part.group;
        __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int32_t c = first; c < stop; c += kBlock) {
            prefetch.line();
            const Halves halves = load_halves<CODEC>(row + c);
            for (int v = 0; v < 8; ++v) {
                sums[v % 4] = _mm256_fmadd_ps(halves.floats(v), _mm256_load_ps(x + c + 8 * v), sums[v % 4]);
            }
        }
        const float scale = CODEC == Codec::fp8 ? fp8_scale(part, row, first / kFp8Group) : 1.0f;
        for (int v = 0; v < 4; ++v) {
            totals[v] = _mm256_fmadd_ps(sums[v], _mm256_set1_ps(scale), totals[v]);
        }
    }
    const float total = lanes_total(_mm256_add_ps(_mm256_add_ps(totals[0], totals[1]),
                                                  _mm256_add_ps(totals[2], totals[3])));
    return CODEC == Codec::fp8 ? total * kE4m3Unit : times_power(double(total) / kE5m2Share, row[part.scales_at]);
}

template <Codec CODEC>
float dot_floats(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float*) {
    const float* x = static_cast<const float*>(prepared);
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int32_t c = 0;
    for (; c + 32 <= part.num_cols; c += 32) {
        prefetch.line();
        for (int v = 0; v < 4; ++v) {
            const __m256 weights = load_weights<CODEC>(row, c + 8 * v, 8);
            sums[v] = _mm256_fmadd_ps(weights, _mm256_load_ps(x + c + 8 * v), sums[v]);
        }
    }
    for (; c < part.num_cols; c += 8) {
        const __m256 weights = load_weights<CODEC>(row, c, part.num_cols - c);
        sums[0] = _mm256_fmadd_ps(weights, _mm256_load_ps(x + c), sums[0]);
    }
    return lanes_total(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// Columns `c` on, in VECTORS registers in natural order; in the last one `last` of them exist.
template <Codec CODEC, int VECTORS>
inline void add_chunk(const uint8_t* const* rows, int32_t num_rows, const float* h, Prefetch* prefetches, int32_t c,
                      int32_t last, float* sum) {
    __m256 sums[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        sums[v] = _mm256_load_ps(sum + c + 8 * v);
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        prefetches[r].line();
        prefetches[r].line();
        for (int v = 0; v < VECTORS; ++v) {
            const __m256 weights = load_weights<CODEC>(rows[r], c + 8 * v, v + 1 < VECTORS ? 8 : last);
            sums[v] = _mm256_fmadd_ps(weights, _mm256_set1_ps(h[r]), sums[v]);
        }
    }
    for (int v = 0; v < VECTORS; ++v) {
        _mm256_store_ps(sum + c + 8 * v, sums[v]);
    }
}

template <Codec CODEC>
void add_floats(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, Prefetch* prefetches,
                float*, float* sum) {
    int32_t c = 0;
    for (; c + 64 <= part.num_cols; c += 64) {
        add_chunk<CODEC, 8>(rows, num_rows, h, prefetches, c, 8, sum);
    }
    for (; c < part.num_cols; c += 8) {
        add_chunk<CODEC, 1>(rows, num_rows, h, prefetches, c, part.num_cols - c, sum);
    }
}

// What multiplies a row's codes in the block at column `c`.
template <Codec CODEC>
inline float factor_of(const Part& part, const uint8_t* row, int32_t c, float h) {
    return h * (CODEC == Codec::fp8 ? fp8_scale(part, row, c / kFp8Group) : power_of_two(row[part.scales_at]));
}

// In natural order; with fp8 2^-8 times as large, which is how codes come.
template <Codec CODEC>
void add_halves(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, Prefetch* prefetches,
                float*, float* sum) {
    for (int32_t c = 0; c < part.num_cols; c += kBlock) {
        __m256 sums[8];
        for (int v = 0; v < 8; ++v) {
            sums[v] = _mm256_load_ps(sum + c + 8 * v);
        }
        for (int32_t r = 0; r < num_rows; ++r) {
            prefetches[r].line();
            const Halves halves = load_halves<CODEC>(rows[r] + c);
            const __m256 factor = _mm256_set1_ps(factor_of<CODEC>(part, rows[r], c, h[r]));
            for (int v = 0; v < 8; ++v) {
                sums[v] = _mm256_fmadd_ps(halves.floats(v), factor, sums[v]);
            }
        }
        for (int v = 0; v < 8; ++v) {
            _mm256_store_ps(sum + c + 8 * v, sums[v]);
        }
    }
}

}  // namespace
}  // namespace moe_pack
