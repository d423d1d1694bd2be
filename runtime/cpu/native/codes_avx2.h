// Rows as AVX2 registers: scales, codes in natural order, their weights (docs/pack.md, section 8).
//
// For kernels_avx2.cpp alone, which includes it once its target is set; internal linkage as in vector.h.
#pragma once

#include <immintrin.h>

#include "codes.h"
#include "vector.h"

namespace moe_pack {
namespace {

// Of a row (of rows), their sum, and a row decoded: what row_kernels.h and trellis_kernels.h choose.
using DotRow = float (*)(const Part&, const uint8_t*, const void*, Prefetch&, float*);
using AddRow = void (*)(const Part&, const uint8_t* const*, int32_t, const float*, Prefetch*, float*, float*);
using DecodeRow = void (*)(const Part&, const uint8_t*, int32_t, int32_t, float*);

constexpr int32_t kBatch = 4;  // rows added while a chunk of the sum is in registers

inline __m256i load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline float lanes_total(__m256 lanes) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Eight scales (or zeros, `is_signed`) from group `first` on; zeros after the last group.
inline __m256 load_eight(const Part& part, const uint8_t* stored, int32_t first, bool is_signed) {
    const bool is_bytes = part.scale_bits == 8;
    const uint8_t* from = is_bytes ? stored + 2 + first : stored + 2 * first;
    const int32_t count = part.num_groups - first;
    uint8_t padded[16] = {};
    if (count < 8) {
        __builtin_memcpy(padded, from, is_bytes ? count : 2 * count);
        from = padded;
    }
    if (!is_bytes) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m256i steps = is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(steps), _mm256_set1_ps(_cvtsh_ss(load_u16(stored))));
}

// E8M0 bytes of eight groups from group `first` on; zeros after the last group.
inline __m256i load_exponents(const Part& part, const uint8_t* stored, int32_t first) {
    const uint8_t* from = stored + first;
    const int32_t count = part.num_groups - first;
    uint8_t padded[8] = {};
    if (count < 8) {
        __builtin_memcpy(padded, from, size_t(count));
        from = padded;
    }
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

// Scales of eight groups of mxfp4, as power_of_two has them.
inline __m256 load_powers(const Part& part, const uint8_t* stored, int32_t first) {
    const __m256i exponents = load_exponents(part, stored, first);
    const __m256i is_end = _mm256_or_si256(_mm256_cmpeq_epi32(exponents, _mm256_setzero_si256()),
                                           _mm256_cmpeq_epi32(exponents, _mm256_set1_epi32(255)));
    const __m256i ends = _mm256_and_si256(is_end, _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(exponents, 23), ends));
}

// The same over 2^(top - 127), for a `top` that none exceeds: what is below 2^-126 of that is zero.
inline __m256 load_shares(const Part& part, const uint8_t* stored, int32_t first, uint8_t top) {
    const __m256i moved = _mm256_add_epi32(load_exponents(part, stored, first), _mm256_set1_epi32(127 - top));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_max_epi32(moved, _mm256_setzero_si256()), 23));
}

// Codes to be multiplied are 4 times as large with 3 bits, which saves shifts.
constexpr float code_unit(int32_t width) { return width == kE2m1 ? kE2m1Unit : width == 3 ? 0.25f : 1.0f; }

// Twice each of E2M1's numbers, made positive, in both halves of a register.
inline __m256i e2m1_codes(__m256i nibbles) {
    const __m128i codes = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), nibbles);
}

inline __m256i load_twice(const uint8_t* from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline __m256i load_four_times(const uint8_t* from) {
    int64_t eight;
    __builtin_memcpy(&eight, from, sizeof eight);
    return _mm256_set1_epi64x(eight);
}

struct Codes {
    __m256i half[2];  // u8 codes 0 to 31 and 32 to 63
};

// The codes of a block in natural order, times 4 with 3 bits. Reads the block's bytes and no others.
template <int WIDTH>
inline Codes load_codes(const uint8_t* block) {
    if constexpr (WIDTH == 8) {
        return {{load_bytes(block), load_bytes(block + 32)}};
    } else if constexpr (WIDTH == 4) {
        const __m256i both = load_bytes(block), low = _mm256_set1_epi8(15);
        return {{_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 4), low)}};
    } else if constexpr (WIDTH == kE2m1) {
        const Codes nibbles = load_codes<4>(block);
        return {{e2m1_codes(nibbles.half[0]), e2m1_codes(nibbles.half[1])}};
    } else if constexpr (WIDTH == 3) {
        const __m256i pairs = load_twice(block), tops = load_four_times(block + 16);
        const __m256i pair = _mm256_set1_epi8(3 << 2), top = _mm256_set1_epi8(1 << 4);
        const __m256i pairs_0 = _mm256_sllv_epi64(pairs, _mm256_setr_epi64x(2, 2, 0, 0));
        const __m256i pairs_1 = _mm256_srlv_epi64(pairs, _mm256_setr_epi64x(2, 2, 4, 4));
        const __m256i tops_0 = _mm256_sllv_epi64(tops, _mm256_setr_epi64x(4, 3, 2, 1));
        const __m256i tops_1 = _mm256_srlv_epi64(tops, _mm256_setr_epi64x(0, 1, 2, 3));
        return {{_mm256_or_si256(_mm256_and_si256(pairs_0, pair), _mm256_and_si256(tops_0, top)),
                 _mm256_or_si256(_mm256_and_si256(pairs_1, pair), _mm256_and_si256(tops_1, top))}};
    } else if constexpr (WIDTH == 2) {
        const __m256i low = _mm256_set1_epi8(3);
        const __m256i places = _mm256_srlv_epi64(load_twice(block), _mm256_setr_epi64x(0, 0, 2, 2));
        return {{_mm256_and_si256(places, low), _mm256_and_si256(_mm256_srli_epi16(places, 4), low)}};
    } else {
        const __m256i low = _mm256_set1_epi8(1);
        const __m256i places = _mm256_srlv_epi64(load_four_times(block), _mm256_setr_epi64x(0, 1, 2, 3));
        return {{_mm256_and_si256(places, low), _mm256_and_si256(_mm256_srli_epi16(places, 4), low)}};
    }
}

// One group's scale (or zero, `is_signed`) in all lanes.
inline __m256 load_group(const Part& part, const uint8_t* stored, int32_t group, bool is_signed) {
    if (part.scale_bits == 16) {
        return _mm256_set1_ps(_cvtsh_ss(load_u16(stored + 2 * group)));
    }
    const int32_t steps = is_signed ? int8_t(stored[2 + group]) : stored[2 + group];
    return _mm256_set1_ps(_cvtsh_ss(load_u16(stored)) * float(steps));
}

// `(code - zero) * scale` of sixteen codes, bytes; rounded after each.
inline void decode_sixteen(__m128i codes, __m256 scale, __m256 zero, float* out) {
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)));
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_sub_ps(low, zero), scale));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_sub_ps(high, zero), scale));
}

template <int WIDTH>
void decode_codes(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const uint8_t* scales = row + part.scales_at;
    const uint8_t* zeros = scales + part.scale_bytes;
    const int32_t unit = unit_of(part);
    const int32_t group_shift = part.num_groups == 1 ? 31 : __builtin_ctz(uint32_t(part.group));
    __m256 scale = _mm256_setzero_ps(), zero = _mm256_setzero_ps();
    for (int32_t block = start; block < stop; block += kBlock) {
        const Codes codes = load_codes<WIDTH>(row + block / 8 * WIDTH);
        for (int32_t first = 0; first < kBlock; first += 16) {
            if (first % unit == 0) {
                const int32_t group = (block + first) >> group_shift;
                scale = load_group(part, scales, group, false);
                zero = load_group(part, zeros, group, true);
            }
            // Back to a unit of 1: the bits that a byte loses to its neighbor are zero.
            const __m256i half = WIDTH == 3 ? _mm256_srli_epi16(codes.half[first / 32], 2) : codes.half[first / 32];
            const __m128i sixteen = first % 32 == 0 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
            decode_sixteen(sixteen, scale, zero, out + (block - start) + first);
        }
    }
}

inline void decode_e2m1(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const __m256 magnitudes = _mm256_loadu_ps(kE2m1Values);
    const __m256i sign = _mm256_set1_epi32(int32_t(0x80000000u));
    for (int32_t block = start; block < stop; block += kBlock) {
        const Codes codes = load_codes<4>(row + block / 2);
        for (int v = 0; v < 2; ++v) {
            const PowerOfTwo scale(row[part.scales_at + block / kMxGroup + v]);
            const __m256 scaled = _mm256_mul_ps(magnitudes, _mm256_set1_ps(scale.first));
            const __m256 weights = _mm256_mul_ps(scaled, _mm256_set1_ps(scale.second));
            const __m128i low = _mm256_castsi256_si128(codes.half[v]), high = _mm256_extracti128_si256(codes.half[v], 1);
            const __m128i eights[4] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
            for (int i = 0; i < 4; ++i) {
                const __m256i eight = _mm256_cvtepu8_epi32(eights[i]);
                const __m256i signs = _mm256_and_si256(_mm256_slli_epi32(eight, 28), sign);
                const __m256 looked_up = _mm256_permutevar8x32_ps(weights, eight);
                _mm256_storeu_ps(out + (block - start) + 32 * v + 8 * i,
                                 _mm256_xor_ps(looked_up, _mm256_castsi256_ps(signs)));
            }
        }
    }
}

}  // namespace
}  // namespace moe_pack
