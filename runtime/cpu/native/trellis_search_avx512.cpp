// The search through a trellis for x86-64 machines with AVX-512 (F, BW, DQ, VL): 16 values a register.
#if defined(__x86_64__)

#include "trellis_search.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,popcnt,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wuninitialized"  // as in kernels_avx512.cpp
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "trellis_steps.h"

namespace moe_pack {
namespace {

struct Avx512Lanes {
    using Floats = __m512;
    using Ints = __m512i;
    using Mask = __mmask16;
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static Ints load(const int32_t* from) { return _mm512_loadu_si512(from); }
    static Ints load(const uint8_t* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
    static void store(int32_t* to, Ints value) { _mm512_storeu_si512(to, value); }
    static void store(uint8_t* to, Ints value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value));
    }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Ints all(int32_t value) { return _mm512_set1_epi32(value); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
    static Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static Floats choose(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
    static Ints choose(Mask mask, Ints yes, Ints no) { return _mm512_mask_mov_epi32(no, mask, yes); }
    static Ints exclusive_or(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
    static Ints masked(Ints a, int32_t bits) { return _mm512_and_si512(a, _mm512_set1_epi32(bits)); }
    static Ints shifted(Ints a, int32_t bits) { return _mm512_srai_epi32(a, bits); }
    static Floats permute(Floats table, Ints index) { return _mm512_permutexvar_ps(index, table); }
    static Ints permute(Ints table, Ints index) { return _mm512_permutexvar_epi32(index, table); }
    static Floats permute(Floats first, Floats second, Ints index) {
        return _mm512_permutex2var_ps(first, index, second);
    }

    static int32_t least(const int32_t* keys) {
        __m512i found = _mm512_load_si512(keys);
        for (int32_t i = kLanes; i < kStates; i += kLanes) found = _mm512_min_epi32(found, _mm512_load_si512(keys + i));
        return _mm512_reduce_min_epi32(found);
    }

    static int32_t count(const int32_t* keys, int32_t limit) {
        const __m512i limits = _mm512_set1_epi32(limit);
        int32_t found = 0;
        for (int32_t i = 0; i < kStates; i += 4 * kLanes) {
            uint64_t below = 0;
            for (int32_t v = 3; v >= 0; --v)
                below = below << kLanes | _mm512_cmplt_epi32_mask(_mm512_load_si512(keys + i + v * kLanes), limits);
            found += int32_t(__builtin_popcountll(below));
        }
        return found;
    }

    static int32_t gather(const int32_t* keys, const int32_t* origins, int32_t limit, int32_t ties, int32_t* costs,
                          int32_t* kept) {
        const __m512i limits = _mm512_set1_epi32(limit), sixteen = _mm512_set1_epi32(kLanes);
        __m512i states = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        int32_t found = 0;
        for (int32_t i = 0; i < kStates; i += kLanes) {
            const __m512i some = _mm512_load_si512(keys + i);
            unsigned chosen = _mm512_cmplt_epi32_mask(some, limits);
            if (ties > 0) {
                for (unsigned tied = _mm512_cmpeq_epi32_mask(some, limits); tied != 0 && ties > 0; --ties) {
                    chosen |= tied & -tied;
                    tied &= tied - 1;
                }
            }
            const __m512i of_states = _mm512_or_si512(_mm512_load_si512(origins + i), states);
            _mm512_storeu_si512(costs + found, _mm512_maskz_compress_epi32(__mmask16(chosen), some));
            _mm512_storeu_si512(kept + found, _mm512_maskz_compress_epi32(__mmask16(chosen), of_states));
            found += __builtin_popcount(chosen);
            states = _mm512_add_epi32(states, sixteen);
        }
        return found;
    }
};

}  // namespace

const SearchRows search_rows_avx512 = search_rows<Avx512Lanes>;

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
