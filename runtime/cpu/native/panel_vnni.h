// Sums of a block's products by VNNI, which adds the products of four bytes, or of two words, to a double word.
#pragma once

#include "panel_rows_avx2.h"

#include "panel_dots.h"

namespace moe_pack {
namespace {

// `R` has what DotSums wants, and dot_words(sum, codes, words); `Y` has dot_bytes for eight double words.
template <class R, class Y>
struct VnniSums : DotSums<R> {
    template <int DIGITS>
    static void add_row(const Codes& codes, const int8_t* digits, __m256i& low, __m256i& high) {
        __m256i sums[DIGITS];
        for (int k = 0; k < DIGITS; ++k) {
            const __m256i first = Y::dot_bytes(Y::zero(), codes.half[0], load_bytes(digits + k * kBlock));
            sums[k] = Y::dot_bytes(first, codes.half[1], load_bytes(digits + k * kBlock + 32));
        }
        low = _mm256_add_epi32(_mm256_slli_epi32(sums[1], 8), sums[0]);
        high = DIGITS == 3 ? sums[DIGITS - 1] : Y::zero();
    }

    // Fours of rows: a double word has a byte of each, times the four factors' digits.
    template <int DIGITS>
    static void add_group(const uint8_t* const* rows, int32_t count, int32_t group, const GroupDigits& factors, float unit,
                          float* sum) {
        for (int i = 0; i < 2; ++i) {
            __m256i sums[2][2][DIGITS];  // of low halves and of high ones, of the two registers that lie side by side
            for (int k = 0; k < DIGITS; ++k) {
                sums[0][0][k] = sums[0][1][k] = sums[1][0][k] = sums[1][1][k] = Y::zero();
            }
            for (int32_t four = 0; 4 * four < count; ++four) {
                __m256i row[4];
                for (int r = 0; r < 4; ++r) {
                    row[r] = 4 * four + r < count ? load_bytes(rows[4 * four + r] + 32 * group) : Y::zero();
                }
                const __m256i pairs[2] = {
                    i == 0 ? _mm256_unpacklo_epi8(row[0], row[1]) : _mm256_unpackhi_epi8(row[0], row[1]),
                    i == 0 ? _mm256_unpacklo_epi8(row[2], row[3]) : _mm256_unpackhi_epi8(row[2], row[3])};
                const __m256i fours[2] = {_mm256_unpacklo_epi16(pairs[0], pairs[1]),
                                          _mm256_unpackhi_epi16(pairs[0], pairs[1])};
                for (int k = 0; k < DIGITS; ++k) {
                    const __m256i digits = Y::broadcast(factors.word(k, four));
                    for (int s = 0; s < 2; ++s) {
                        sums[0][s][k] = Y::dot_bytes(sums[0][s][k], Y::low_nibbles(fours[s]), digits);
                        sums[1][s][k] = Y::dot_bytes(sums[1][s][k], Y::high_nibbles(fours[s]), digits);
                    }
                }
            }
            for (int half = 0; half < 2; ++half) {
                __m256i low[2], high[2];
                for (int s = 0; s < 2; ++s) {
                    low[s] = _mm256_add_epi32(_mm256_slli_epi32(sums[half][s][1], 8), sums[half][s][0]);
                    high[s] = DIGITS == 3 ? sums[half][s][DIGITS - 1] : Y::zero();
                }
                add_unpacked<DIGITS>(low, high, unit, sum + 32 * half + 8 * i);
            }
        }
    }

    template <int DIGITS, int TOKENS>
    static void add_bytes(const uint8_t* lines, const uint8_t* soon, const BlockWords (&words)[TOKENS],
                          BlockSums<R> (&sums)[TOKENS]) {
        constexpr int count = BlockSums<R>::count, chains = TOKENS == 1 ? 2 : 1;
        typename R::Ints low[TOKENS][count][chains], high[TOKENS][count][chains];
        for (int t = 0; t < TOKENS; ++t) {
            for (int v = 0; v < count; ++v) {
                for (int i = 0; i < chains; ++i) {
                    low[t][v][i] = high[t][v][i] = R::zero();
                }
            }
        }
#pragma GCC unroll 2
        for (int j = 0; j < kBlock / 4; ++j) {
            __builtin_prefetch(soon + j * kLineBytes);  // into the first level, which is faster here
#pragma GCC unroll 2
            for (int v = 0; v < count; ++v) {
                const auto codes = R::load(lines + j * kLineBytes + 4 * R::lanes * v);
                const auto even = R::even_bytes(codes), odd = R::odd_bytes(codes);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) {
                    auto &l = low[t][v], &h = high[t][v];
                    l[0] = R::dot_words(l[0], even, R::broadcast(words[t].even_low(j)));
                    l[chains - 1] = R::dot_words(l[chains - 1], odd, R::broadcast(words[t].odd_low(j)));
                    if constexpr (DIGITS == 3) {
                        h[0] = R::dot_words(h[0], even, R::broadcast(words[t].even_high(j)));
                        h[chains - 1] = R::dot_words(h[chains - 1], odd, R::broadcast(words[t].odd_high(j)));
                    }
                }
            }
        }
        for (int t = 0; t < TOKENS; ++t) {
            for (int v = 0; v < count; ++v) {
                sums[t].low[v] = chains == 2 ? R::add(low[t][v][0], low[t][v][chains - 1]) : low[t][v][0];
                sums[t].high[v] = chains == 2 ? R::add(high[t][v][0], high[t][v][chains - 1]) : high[t][v][0];
            }
        }
    }
};

}  // namespace
}  // namespace moe_pack
