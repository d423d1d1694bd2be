// Values rounded to codes of one digit of 8 bits, or of two, with AVX-512.
//
// For kernels_avx512.cpp and rounded_avx512.cpp, as codes_avx512.h is.
#pragma once

#include <immintrin.h>

#include "codes_avx512.h"
#include "rounding.h"

namespace moe_pack {
namespace {

// The bits of the largest magnitude; infinity and NaNs are larger than all numbers.
inline uint32_t largest_bits(const __m512 values[4]) {
    __m512i largest = _mm512_setzero_si512();
    unrolled<4>([&](auto q) MOE_PACK_INLINE {
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(values[q.value])));
    });
    return _mm512_reduce_max_epu32(largest);
}

// Codes of 16 values; zeros where `inverse` is zero, whatever the values.
inline __m512i codes_of(__m512 values, float inverse) {
    const __mmask16 some = inverse == 0.0f ? 0 : 0xffff;
    return _mm512_maskz_cvtps_epi32(some, _mm512_mul_ps(values, _mm512_set1_ps(inverse)));
}

// Bytes of codes, a digit each; digits are `stride` apart, the higher one first.
template <int DIGITS>
inline void store_digits(__m512i codes, int8_t* to, size_t stride) {
    if constexpr (DIGITS == 1) {
        _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
    } else {
        const __m512i biased = _mm512_add_epi32(codes, _mm512_set1_epi32(128));
        const __m128i low = _mm_xor_si128(_mm512_cvtepi32_epi8(biased), _mm_set1_epi8(-128));
        _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_srai_epi32(biased, 8)));
        _mm_store_si128(reinterpret_cast<__m128i*>(to + stride), low);
    }
}

}  // namespace
}  // namespace moe_pack
