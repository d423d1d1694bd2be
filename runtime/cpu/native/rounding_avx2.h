// Values rounded to codes of one digit of 8 bits, or of two, with AVX2.
//
// For kernels_avx2.cpp and rounded_avx2.cpp, as codes_avx2.h is.
#pragma once

#include <immintrin.h>

#include "codes_avx2.h"
#include "rounding.h"

namespace moe_pack {
namespace {

inline __m256i magnitudes(__m256 values) {
    return _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7fffffff));
}

inline uint32_t largest_lane(__m256i lanes) {
    alignas(32) uint32_t values[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), lanes);
    uint32_t found = 0;
    for (uint32_t value : values) found = value > found ? value : found;
    return found;
}

// The bits of the largest magnitude of a block; infinity and NaNs are larger than all numbers.
inline uint32_t largest_bits(const float* block) {
    __m256i largest = _mm256_setzero_si256();
    for (int32_t c = 0; c < kBlock; c += 8) largest = _mm256_max_epu32(largest, magnitudes(_mm256_loadu_ps(block + c)));
    return largest_lane(largest);
}

inline int32_t lanes_sum(__m256i lanes) {
    alignas(32) int32_t values[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), lanes);
    int32_t sum = 0;
    for (int32_t value : values) sum += value;
    return sum;
}

// Codes of eight values; zeros where `inverse` is zero, whatever the values.
inline __m256i codes_of(__m256 values, float inverse) {
    if (inverse == 0.0f) return _mm256_setzero_si256();
    return _mm256_cvtps_epi32(_mm256_mul_ps(values, _mm256_set1_ps(inverse)));
}

// Sixteen values of at most 16 bits, in their order.
inline __m256i as_words(__m256i first, __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
}

// Sixteen bytes, of words that fit them.
inline void store_bytes(__m256i words, int8_t* to) {
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

// Bytes of sixteen codes, a digit each; digits are `stride` apart, the higher one first.
template <int DIGITS>
inline void store_digits(__m256i first, __m256i second, int8_t* to, size_t stride) {
    const __m256i words = as_words(first, second);
    if constexpr (DIGITS == 1) {
        store_bytes(words, to);
    } else {
        const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(words, _mm256_set1_epi16(128)), 8);
        store_bytes(high, to);
        store_bytes(_mm256_sub_epi16(words, _mm256_slli_epi16(high, 8)), to + stride);
    }
}

}  // namespace
}  // namespace moe_pack
