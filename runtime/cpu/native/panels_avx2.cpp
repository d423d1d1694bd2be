// Panels with AVX2: products of bytes are added up in words, before these would overflow.
#if defined(__x86_64__)

#include "panels.h"

#include "target_avx2.h"

#include "panel_rows_avx2.h"

#include "panel_kernels.h"

namespace moe_pack {
namespace {

// Keeps a sum where it is: reordered, the additions of a loop would need more registers than there are.
inline void stay(__m256i& sum) { asm("" : "+x"(sum)); }

struct Avx2Sums {
    // Sums of int16 are at most 8 * 2 * 15 * 128.
    template <int DIGITS, int TOKENS, class Digits>
    static void add_nibbles(const uint8_t* lines, const Digits (&digits)[TOKENS], BlockSums<Ymm> (&sums)[TOKENS]) {
        for (int half = 0; half < 2; ++half) {
            __m256i pairs[TOKENS][2][DIGITS];
            for (int t = 0; t < TOKENS; ++t) {
                for (int k = 0; k < DIGITS; ++k) {
                    pairs[t][0][k] = pairs[t][1][k] = _mm256_setzero_si256();
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const int j = 4 * half + i;
                const __m256i first = load_bytes(lines + j * kLineBytes), second = load_bytes(lines + j * kLineBytes + 32);
                const __m256i low[2] = {Ymm::low_nibbles(first), Ymm::low_nibbles(second)};
                const __m256i high[2] = {Ymm::high_nibbles(first), Ymm::high_nibbles(second)};
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 3
                    for (int k = 0; k < DIGITS; ++k) {
                        const __m256i of_low = Ymm::broadcast(digits[t].word(k, 2 * j));
                        const __m256i of_high = Ymm::broadcast(digits[t].word(k, 2 * j + 1));
#pragma GCC unroll 2
                        for (int v = 0; v < 2; ++v) {
                            const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low[v], of_low),
                                                                  _mm256_maddubs_epi16(high[v], of_high));
                            pairs[t][v][k] = _mm256_add_epi16(pairs[t][v][k], both);
                            stay(pairs[t][v][k]);
                        }
                    }
                }
            }
            const __m256i ones = _mm256_set1_epi16(1), to_middle = _mm256_set1_epi16(256);
            for (int t = 0; t < TOKENS; ++t) {
                for (int v = 0; v < 2; ++v) {
                    const __m256i* of = pairs[t][v];
                    const __m256i fine =
                        _mm256_add_epi32(_mm256_madd_epi16(of[1], to_middle), _mm256_madd_epi16(of[0], ones));
                    const __m256i coarse = DIGITS == 3 ? _mm256_madd_epi16(of[DIGITS - 1], ones) : Ymm::zero();
                    sums[t].low[v] = half == 0 ? fine : _mm256_add_epi32(sums[t].low[v], fine);
                    sums[t].high[v] = half == 0 ? coarse : _mm256_add_epi32(sums[t].high[v], coarse);
                }
            }
        }
    }

    template <int DIGITS>
    static void add_row(const Codes& codes, const int8_t* digits, __m256i& low, __m256i& high) {
        const __m256i ones = _mm256_set1_epi16(1), to_middle = _mm256_set1_epi16(256);
        __m256i pairs[DIGITS];
        for (int k = 0; k < DIGITS; ++k) {
            pairs[k] = add_products(codes.half, 2, digits + k * kBlock);
        }
        low = _mm256_add_epi32(_mm256_madd_epi16(pairs[1], to_middle), _mm256_madd_epi16(pairs[0], ones));
        high = DIGITS == 3 ? _mm256_madd_epi16(pairs[DIGITS - 1], ones) : Ymm::zero();
    }

    // Pairs of rows: bytes of both, one after the other, times both factors' digits.
    template <int DIGITS>
    static void add_group(const uint8_t* const* rows, int32_t count, int32_t group, const GroupDigits& factors, float unit,
                          float* sum) {
        constexpr int32_t PAIRS = 8;  // whose sums fit int16: 8 * 2 * 15 * 128
        const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi32(1), to_middle = _mm256_set1_epi32(0x00010100);
        __m256i low[8], high[8];
        for (int i = 0; i < 8; ++i) {
            low[i] = high[i] = _mm256_setzero_si256();
        }
        for (int32_t first = 0; 2 * first < count; first += PAIRS) {
            __m256i pairs[4][DIGITS];
            for (auto& digits : pairs) {
                for (__m256i& sums : digits) {
                    sums = _mm256_setzero_si256();
                }
            }
            for (int32_t p = first; p < first + PAIRS && 2 * p < count; ++p) {
                const bool has_both = 2 * p + 1 < count;
                const __m256i one = load_bytes(rows[2 * p] + 32 * group);
                const __m256i other = has_both ? load_bytes(rows[2 * p + 1] + 32 * group) : _mm256_setzero_si256();
                const __m256i near = _mm256_unpacklo_epi8(one, other), far = _mm256_unpackhi_epi8(one, other);
                const __m256i codes[4] = {_mm256_and_si256(near, nibble), _mm256_and_si256(far, nibble),
                                          _mm256_and_si256(_mm256_srli_epi16(near, 4), nibble),
                                          _mm256_and_si256(_mm256_srli_epi16(far, 4), nibble)};
                for (int k = 0; k < DIGITS; ++k) {
                    int16_t both;
                    __builtin_memcpy(&both, static_cast<const int16_t*>(factors.word(k, p / 2)) + p % 2, 2);
                    const __m256i digits = _mm256_set1_epi16(both);
                    for (int i = 0; i < 4; ++i) {
                        pairs[i][k] = _mm256_add_epi16(pairs[i][k], _mm256_maddubs_epi16(codes[i], digits));
                    }
                }
            }
            for (int i = 0; i < 4; ++i) {
                const __m256i* of = pairs[i];
                low[2 * i] = _mm256_add_epi32(low[2 * i], _mm256_madd_epi16(_mm256_unpacklo_epi16(of[1], of[0]), to_middle));
                low[2 * i + 1] =
                    _mm256_add_epi32(low[2 * i + 1], _mm256_madd_epi16(_mm256_unpackhi_epi16(of[1], of[0]), to_middle));
                if constexpr (DIGITS == 3) {
                    high[2 * i] =
                        _mm256_add_epi32(high[2 * i], _mm256_madd_epi16(_mm256_unpacklo_epi16(of[2], of[2]), ones));
                    high[2 * i + 1] =
                        _mm256_add_epi32(high[2 * i + 1], _mm256_madd_epi16(_mm256_unpackhi_epi16(of[2], of[2]), ones));
                }
            }
        }
        for (int i = 0; i < 4; ++i) {
            add_unpacked<DIGITS>(low + 2 * i, high + 2 * i, unit, sum + 32 * (i / 2) + 8 * (i % 2));
        }
    }

    template <int DIGITS, int TOKENS>
    static void add_bytes(const uint8_t* lines, const uint8_t* soon, const BlockWords (&words)[TOKENS],
                          BlockSums<Ymm> (&sums)[TOKENS]) {
        for (int t = 0; t < TOKENS; ++t) {
            for (int v = 0; v < 2; ++v) {
                sums[t].low[v] = sums[t].high[v] = _mm256_setzero_si256();
            }
        }
#pragma GCC unroll 1
        for (int j = 0; j < kBlock / 4; ++j) {
            fetch_line(soon + j * kLineBytes);
            __m256i even[2], odd[2];
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const __m256i codes = load_bytes(lines + j * kLineBytes + 32 * v);
                even[v] = Ymm::even_bytes(codes);
                odd[v] = Ymm::odd_bytes(codes);
            }
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) {
                add_words(even, odd, words[t].even_low(j), words[t].odd_low(j), sums[t].low);
                if constexpr (DIGITS == 3) add_words(even, odd, words[t].even_high(j), words[t].odd_high(j), sums[t].high);
            }
        }
    }

  private:
    static void add_words(const __m256i even[2], const __m256i odd[2], const void* even_words, const void* odd_words,
                          __m256i sums[2]) {
        const __m256i of_even = Ymm::broadcast(even_words), of_odd = Ymm::broadcast(odd_words);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(even[v], of_even), _mm256_madd_epi16(odd[v], of_odd));
            sums[v] = _mm256_add_epi32(sums[v], both);
            stay(sums[v]);
        }
    }
};

constexpr PanelKernels kRounded = panel_kernels<Ymm, Avx2Sums, 2>();

}  // namespace

const PanelKernels avx2_panel_kernels = panel_kernels<Ymm, Avx2Sums>(&kRounded);

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
