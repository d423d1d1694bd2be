// The search through a trellis for x86-64 machines with AVX2: 16 values in two registers.
#if defined(__x86_64__)

#include "trellis_search.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi2")
#endif

#include <immintrin.h>

#include "trellis_steps.h"

namespace moe_pack {
namespace {

struct Avx2Lanes {
    struct Floats {
        __m256 low, high;
    };
    struct Ints {
        __m256i low, high;
    };
    using Mask = Floats;
    static Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    static Ints load(const int32_t* from) {
        const __m256i* at = reinterpret_cast<const __m256i*>(from);
        return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
    }
    static Ints load(const uint8_t* from) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
    }
    static void store(float* to, Floats value) {
        _mm256_storeu_ps(to, value.low);
        _mm256_storeu_ps(to + 8, value.high);
    }
    static void store(int32_t* to, Ints value) {
        __m256i* at = reinterpret_cast<__m256i*>(to);
        _mm256_storeu_si256(at, value.low);
        _mm256_storeu_si256(at + 1, value.high);
    }
    static void store(uint8_t* to, Ints value) {
        alignas(32) int32_t values[kLanes];
        store(values, value);
        for (int32_t i = 0; i < kLanes; ++i) to[i] = uint8_t(values[i]);
    }
    static Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
    static Ints all(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
    static Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
    static Floats subtract(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
    static Floats times(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
    static Floats magnitude(Floats a) {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
    }
    static Mask less(Floats a, Floats b) {
        return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
    }
    static Floats choose(Mask mask, Floats yes, Floats no) {
        return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
    }
    static Ints choose(Mask mask, Ints yes, Ints no) {
        const __m256i low = _mm256_castps_si256(mask.low), high = _mm256_castps_si256(mask.high);
        return {_mm256_blendv_epi8(no.low, yes.low, low), _mm256_blendv_epi8(no.high, yes.high, high)};
    }
    static Ints exclusive_or(Ints a, Ints b) {
        return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
    }
    static Ints masked(Ints a, int32_t bits) {
        const __m256i mask = _mm256_set1_epi32(bits);
        return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
    }
    static Ints shifted(Ints a, int32_t bits) { return {_mm256_srai_epi32(a.low, bits), _mm256_srai_epi32(a.high, bits)}; }

    // Moves a bit of each index to the sign, which selects in `blendv`.
    static __m256 bit(__m256i index, int shift) { return _mm256_castsi256_ps(_mm256_slli_epi32(index, shift)); }
    static __m256 permuted(Floats table, __m256i index) {
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                                _mm256_permutevar8x32_ps(table.high, index), bit(index, 28));
    }
    static Floats permute(Floats table, Ints index) {
        return {permuted(table, index.low), permuted(table, index.high)};
    }
    static Ints permute(Ints table, Ints index) {
        const Floats bits = {_mm256_castsi256_ps(table.low), _mm256_castsi256_ps(table.high)};
        return {_mm256_castps_si256(permuted(bits, index.low)), _mm256_castps_si256(permuted(bits, index.high))};
    }
    static Floats permute(Floats first, Floats second, Ints index) {
        return {_mm256_blendv_ps(permuted(first, index.low), permuted(second, index.low), bit(index.low, 27)),
                _mm256_blendv_ps(permuted(first, index.high), permuted(second, index.high), bit(index.high, 27))};
    }

    static int32_t least(const int32_t* keys) { return PlainLanes::least(keys); }
    static int32_t count(const int32_t* keys, int32_t limit) { return PlainLanes::count(keys, limit); }
    static int32_t gather(const int32_t* keys, const int32_t* origins, int32_t limit, int32_t ties, int32_t* costs,
                          int32_t* kept) {
        return PlainLanes::gather(keys, origins, limit, ties, costs, kept);
    }
};

}  // namespace

const SearchRows search_rows_avx2 = search_rows<Avx2Lanes>;

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
