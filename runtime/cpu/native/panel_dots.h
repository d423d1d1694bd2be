// Sums of a block's products where an instruction adds the products of four bytes to a double word.
#pragma once

#include "panel_kernels.h"

namespace moe_pack {
namespace {

// `R` has dot_bytes(sum, codes, digits), add and times_256, and registers as panel_kernels.h wants them.
template <class R>
struct DotSums {
    template <int DIGITS, int TOKENS, class Digits>
    static void add_nibbles(const uint8_t* lines, const Digits (&digits)[TOKENS], BlockSums<R> (&sums)[TOKENS]) {
        constexpr int count = BlockSums<R>::count, chains = TOKENS == 1 ? 2 : 1;  // of a sum: shorter ones where registers allow
        typename R::Ints of[TOKENS][count][DIGITS][chains];
        for (auto& token : of) {
            for (auto& rows : token) {
                for (auto& digit : rows) {
                    for (auto& chain : digit) {
                        chain = R::zero();
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int j = 0; j < 8; ++j) {
#pragma GCC unroll 4
            for (int v = 0; v < count; ++v) {
                const auto codes = R::load(lines + j * kLineBytes + 4 * R::lanes * v);
                const auto low = R::low_nibbles(codes), high = R::high_nibbles(codes);
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 3
                    for (int k = 0; k < DIGITS; ++k) {
                        auto& to = of[t][v][k];
                        to[0] = R::dot_bytes(to[0], low, R::broadcast(digits[t].word(k, 2 * j)));
                        to[chains - 1] = R::dot_bytes(to[chains - 1], high, R::broadcast(digits[t].word(k, 2 * j + 1)));
                    }
                }
            }
        }
        for (int t = 0; t < TOKENS; ++t) {
            for (int v = 0; v < count; ++v) {
                typename R::Ints whole[DIGITS];
                for (int k = 0; k < DIGITS; ++k) {
                    whole[k] = chains == 2 ? R::add(of[t][v][k][0], of[t][v][k][chains - 1]) : of[t][v][k][0];
                }
                sums[t].low[v] = R::add(R::times_256(whole[1]), whole[0]);
                sums[t].high[v] = DIGITS == 3 ? whole[DIGITS - 1] : R::zero();
            }
        }
    }
};

}  // namespace
}  // namespace moe_pack
