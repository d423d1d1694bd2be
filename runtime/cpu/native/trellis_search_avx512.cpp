// The search through a trellis for x86-64 machines with AVX-512 (F, BW, DQ, VL): 16 states a register.
#if defined(__x86_64__)

#include "trellis_search.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi2,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wuninitialized"  // as in kernels_avx512.cpp
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "trellis_steps.h"

namespace moe_pack {
namespace {

struct Avx512Lanes {
    template <int kBits>
    static void choose(const float* costs, Parents<kBits>* parents) {
        const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
        __m512 best[kStates / kLanes];
        __m512i oldest[kStates / kLanes];
        for (int32_t v = 0; v < kStates / kLanes; ++v) {
            best[v] = _mm512_load_ps(costs + v * kLanes);
            oldest[v] = _mm512_setzero_si512();
        }
        // The better of every two neighbours, then of every two of these.
        int32_t count = kStates / kLanes;
        for (int bit = 0; bit < kBits; ++bit) {
            const int32_t half = count > 1 ? count / 2 : 1;
            for (int32_t v = 0; v < half; ++v) {
                const int32_t a = 2 * v, b = count > 1 ? 2 * v + 1 : 0;
                const __m512 even = _mm512_permutex2var_ps(best[a], evens, best[b]);
                const __m512 odd = _mm512_permutex2var_ps(best[a], odds, best[b]);
                const __m512i low = _mm512_permutex2var_epi32(oldest[a], evens, oldest[b]);
                const __m512i high = _mm512_permutex2var_epi32(oldest[a], odds, oldest[b]);
                const __mmask16 is_odd = _mm512_cmp_ps_mask(odd, even, _CMP_LT_OQ);
                best[v] = _mm512_mask_mov_ps(even, is_odd, odd);
                oldest[v] = _mm512_mask_or_epi32(low, is_odd, high, _mm512_set1_epi32(1 << bit));
            }
            count = half;
        }
        for (int32_t v = 0; v < count; ++v) {
            _mm512_store_ps(parents->costs + v * kLanes, best[v]);
            _mm512_store_si512(parents->oldest + v * kLanes, oldest[v]);
        }
    }

    template <int kFrom>
    static __m512 permuted(const float* held, __m512i sources) {
        const __m512 first = _mm512_load_ps(held);
        if (kFrom <= kLanes) {
            return _mm512_permutexvar_ps(sources, first);
        }
        const __m512 low = _mm512_permutex2var_ps(first, sources, _mm512_load_ps(held + kLanes));
        if (kFrom == 2 * kLanes) {
            return low;
        }
        const __m512 third = _mm512_load_ps(held + 2 * kLanes), fourth = _mm512_load_ps(held + 3 * kLanes);
        const __mmask16 is_high = _mm512_test_epi32_mask(sources, _mm512_set1_epi32(2 * kLanes));
        return _mm512_mask_mov_ps(low, is_high, _mm512_permutex2var_ps(third, sources, fourth));
    }

    template <int kFrom, int kTo>
    static void carry(float* errors, const float* factor, int32_t num_slots, const int32_t* sources, float* sums) {
        constexpr int32_t kVectors = whole_lanes(kTo) / kLanes;
        __m512i from[kVectors];
        __m512 added[kSums][kVectors];
        for (int32_t v = 0; v < kVectors; ++v) {
            from[v] = _mm512_load_si512(sources + v * kLanes);
            for (int32_t part = 0; part < kSums; ++part) {
                added[part][v] = _mm512_setzero_ps();
            }
        }
        for (int32_t slot = 0; slot < num_slots; slot += kSums) {
            for (int32_t part = 0; part < kSums; ++part) {
                float* held = errors + (slot + part) * kMostParents;
                const __m512 times = _mm512_set1_ps(factor[slot + part]);
                __m512 carried[kVectors];
                for (int32_t v = 0; v < kVectors; ++v) {
                    carried[v] = permuted<kFrom>(held, from[v]);
                }
                for (int32_t v = 0; v < kVectors; ++v) {
                    _mm512_store_ps(held + v * kLanes, carried[v]);
                    added[part][v] = _mm512_add_ps(added[part][v], _mm512_mul_ps(carried[v], times));
                }
            }
        }
        for (int32_t v = 0; v < kVectors; ++v) {
            const __m512 sum = _mm512_add_ps(_mm512_add_ps(added[0][v], added[1][v]),
                                             _mm512_add_ps(added[2][v], added[3][v]));
            _mm512_store_ps(sums + v * kLanes, sum);
        }
    }

    static int32_t cheapest(const float* costs) {
        __m512 least = _mm512_load_ps(costs);
        for (int32_t v = 1; v < kStates / kLanes; ++v) {
            least = _mm512_min_ps(least, _mm512_load_ps(costs + v * kLanes));
        }
        const __m512 best = _mm512_set1_ps(_mm512_reduce_min_ps(least));
        for (int32_t v = 0; v < kStates / kLanes; ++v) {
            const unsigned found = _mm512_cmp_ps_mask(_mm512_load_ps(costs + v * kLanes), best, _CMP_EQ_OQ);
            if (found != 0) {
                return v * kLanes + __builtin_ctz(found);
            }
        }
        return 0;  // costs that are no numbers
    }
};

}  // namespace

const SearchRows search_rows_avx512 = search_rows<Avx512Lanes>;

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
