// Panels with AVX2 and what has more: codes of 4 bits times three digits in bytes, of 8 bits times two of 12 bits in words.
//
// As with rows, an input is 24-bit fixed point relative to the token's largest, and the sum over a group is exact. Every
// instruction set takes the same sums in the same order: all give the same bits. A file that includes this has set its
// target and defines a table of kernels by `panel_kernels`, from how it adds up products, and from the registers in which
// it does: internal linkage as in vector.h. Before this it includes its rows, panel_rows_avx2.h or panel_rows_neon.h.
#pragma once

#include "panel_forms.h"

namespace moe_pack {
namespace {

// -- Products --------------------------------------------------------------------------------------------------------

// A token's inputs, prepared, and where its products go.
struct PanelToken {
    const int8_t* inputs;
    const float* sums;
    float peak;
    float* out;

    PanelToken() = default;
    PanelToken(const Part& part, const void* prepared, float* to)
        : inputs(static_cast<const int8_t*>(prepared) + kHeaderBytes),
          sums(reinterpret_cast<const float*>(inputs + size_t(input_bytes(part.width)) * part.num_groups)),
          peak(*static_cast<const float*>(prepared)), out(to) {}
};

// Each token's sums are those that it has alone.
template <class R, class Sums, int WIDTH, int DIGITS, int TOKENS>
void dot_panel(const Part& part, const uint8_t* panel, PanelAhead& all_ahead, const PanelToken* tokens) {
    PanelAhead ahead = all_ahead;  // in registers
    constexpr int32_t code_bytes = WIDTH * 8 * kPanelRows, block_bytes = code_bytes + kPanelScaleBytes;
    alignas(64) float totals[TOKENS][kTotals][kPanelRows];
    for (int t = 0; t < TOKENS; ++t) {
        for (int32_t i = 0; i < kTotals * kPanelRows; i += R::lanes) {
            R::store_floats(totals[t][0] + i, R::set(0.0f));
        }
    }
    const int8_t* inputs[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
        inputs[t] = tokens[t].inputs;
    }
    for (int32_t b = 0; b < part.num_groups; ++b, panel += block_bytes) {
        BlockSums<R> blocks[TOKENS];
        if constexpr (WIDTH == 4) {
            fetch(ahead, block_bytes);
            BlockDigits digits[TOKENS];
            for (int t = 0; t < TOKENS; ++t) {
                digits[t].digits = inputs[t];
            }
            Sums::template add_nibbles<DIGITS, TOKENS>(panel, digits, blocks);
        } else {
            BlockWords words[TOKENS];
            for (int t = 0; t < TOKENS; ++t) {
                words[t].words = inputs[t];
            }
            const uint8_t* soon = wanted(ahead, panel, block_bytes);
            Sums::template add_bytes<DIGITS, TOKENS>(panel, soon, words, blocks);
            fetch_line(soon + code_bytes);
        }
        const uint8_t* scales = panel + code_bytes;
        for (int v = 0; v < BlockSums<R>::count; ++v) {
            const auto scale_of_all = R::halves(scales + 2 * R::lanes * v);
            const auto zero = R::halves(scales + 2 * (kPanelRows + R::lanes * v));
            for (int t = 0; t < TOKENS; ++t) {
                auto scale = scale_of_all;
                if constexpr (DIGITS == 2) {
                    scale = R::multiply(scale, R::set(unit_at(inputs[t])));
                }
                const auto codes = total_of<R, WIDTH, DIGITS>(blocks[t].low[v], blocks[t].high[v]);
                float* total = totals[t][b % kTotals] + R::lanes * v;
                const auto centered = R::subtract_product(zero, R::set(tokens[t].sums[b]), codes);
                R::store_floats(total, R::multiply_add(centered, scale, R::load_floats(total)));
            }
        }
        for (int t = 0; t < TOKENS; ++t) {
            inputs[t] += input_bytes(WIDTH);
        }
    }
    all_ahead = ahead;
    const float step = DIGITS == 3 ? 1.0f / kPeak : 1.0f;
    for (int t = 0; t < TOKENS; ++t) {
        auto& total = totals[t];
        for (int32_t half = kTotals / 2; half > 0; half /= 2) {  // as lanes_total adds
            for (int32_t i = 0; i < half; ++i) {
                for (int32_t r = 0; r < kPanelRows; ++r) {
                    total[i][r] += total[i + half][r];
                }
            }
        }
        float* out = tokens[t].out;
        for (int32_t r = 0; r < kPanelRows; r += R::lanes) {
            const auto stepped = R::multiply(R::load_floats(total[0] + r), R::set(step));
            R::store_anywhere(out + r, R::multiply(stepped, R::set(tokens[t].peak)));
        }
    }
}

size_t panel_prepared_bytes(const Part& part) {
    return round_up(kHeaderBytes + size_t(input_bytes(part.width)) * part.num_groups + 4 * padded_groups(part), 64);
}

// Calls `some`(tokens, first) for all tokens, for as many at once as AT_ONCE and registers allow: 4, 2 or 1.
template <int AT_ONCE, class Some>
inline void by_tokens(int32_t num_tokens, Some& some) {
    int32_t t = 0;
    if constexpr (AT_ONCE >= 4) {
        for (; t + 4 <= num_tokens; t += 4) {
            some.template run<4>(t);
        }
    }
    if constexpr (AT_ONCE >= 2) {
        for (; t + 2 <= num_tokens; t += 2) {
            some.template run<2>(t);
        }
    }
    for (; t < num_tokens; ++t) {
        some.template run<1>(t);
    }
}

template <class R, class Sums, int WIDTH, int DIGITS>
struct PanelDots {
    const Part& part;
    const uint8_t* panel;
    const PanelToken* tokens;
    PanelAhead& ahead;

    template <int TOKENS>
    void run(int32_t first) {
        PanelAhead nothing;
        dot_panel<R, Sums, WIDTH, DIGITS, TOKENS>(part, panel, first == 0 ? ahead : nothing, tokens + first);
    }
};

template <class R, class Sums, int WIDTH, int DIGITS>
void dot_panels_of(const Part& part, const uint8_t* panels, size_t stride, int32_t count, PanelToken* tokens,
                   int32_t num_tokens, PanelAhead& ahead) {
    for (int32_t p = 0; p < count; ++p) {
        PanelDots<R, Sums, WIDTH, DIGITS> dots{part, panels + p * stride, tokens, ahead};
        by_tokens<R::tokens_at_once(WIDTH, DIGITS)>(num_tokens, dots);
        for (int32_t t = 0; t < num_tokens; ++t) {
            tokens[t].out += kPanelRows;
        }
    }
}

template <class R, class Sums, int DIGITS>
void dot_panels(const Part& part, const uint8_t* panels, size_t stride, int32_t count, const void* const* prepared,
                float* const* outs, int32_t num_tokens, PanelAhead& ahead) {
    const auto dot = part.width == 4 ? dot_panels_of<R, Sums, 4, DIGITS> : dot_panels_of<R, Sums, 8, DIGITS>;
    PanelAhead nothing;
    for (int32_t first = 0; first < num_tokens; first += kPanelTokens) {
        PanelToken tokens[kPanelTokens];
        const int32_t some = num_tokens - first < kPanelTokens ? num_tokens - first : kPanelTokens;
        for (int32_t t = 0; t < some; ++t) {
            tokens[t] = PanelToken(part, prepared[first + t], outs[first + t]);
        }
        dot(part, panels, stride, count, tokens, some, first == 0 ? ahead : nothing);
    }
}

// -- Sums of down rows -------------------------------------------------------------------------------------------------

template <class Sums, int DIGITS>
void add_whole_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
                    float*, float* sum) {
    // One row after the other: processors then fetch the rest of it themselves.
    Prefetch prefetch;
    int32_t num_fetched = 0;
    const int32_t lines = num_rows * (ahead.num_bytes / kLineBytes + 1) / part.num_groups + 1;  // while a group is added
    for (int32_t first = 0; first < part.num_groups; first += kTotals) {
        const int32_t count = part.num_groups - first < kTotals ? part.num_groups - first : kTotals;
        TileFactors factors;
        factors.take(ScalesOfRows{part, rows, first}, num_rows, count, h, sum + part.num_cols + first, top_of(DIGITS));
        for (int32_t lane = 0; lane < count; ++lane) {
            const int32_t group = first + lane;
            for (int32_t line = 0; line < lines; ++line) {
                if (prefetch.at >= prefetch.stop && num_fetched < num_rows) {
                    prefetch = Prefetch(ahead, num_fetched++);
                }
                prefetch.line();
            }
            Sums::template add_group<DIGITS>(rows, num_rows, group, GroupDigits{&factors, lane}, factors.units[lane],
                                             sum + group * kBlock);
        }
    }
    prefetch.rest();
    while (num_fetched < num_rows) {
        Prefetch(ahead, num_fetched++).rest();
    }
}

template <class R, class Sums, int DIGITS>
struct PanelSums {
    const Part& part;
    const uint8_t* first_tile;
    const float* h;
    float* sums;
    size_t floats;
    PanelAhead& all_ahead;

    template <int TOKENS>
    void run(int32_t first_token) {
        PanelAhead nothing, &ahead = first_token == 0 ? all_ahead : nothing;
        const uint8_t* tile = first_tile;
        const float* own_h = h + size_t(first_token) * kMaxTile;
        float* own_sums = sums + first_token * floats;
        for (int32_t first = 0; first < part.num_groups; first += kDownGroups) {
            const int32_t count = part.num_groups - first < kDownGroups ? part.num_groups - first : kDownGroups;
            const int32_t scale_bytes = 2 * 2 * kMaxTile * count;
            TileFactors factors[TOKENS];
            const PanelAhead scales_ahead = ahead;
            if (ahead.at != nullptr) ahead.pass(scale_bytes);
            for (int t = 0; t < TOKENS; ++t) {
                factors[t].take(ScalesOfTile{tile, count}, kMaxTile, count, own_h + t * kMaxTile,
                                own_sums + t * floats + part.num_cols + first, top_of(DIGITS),
                                t == 0 ? scales_ahead : nothing);
            }
            tile += scale_bytes;
            for (int32_t lane = 0; lane < count; ++lane) {
                GroupDigits digits[TOKENS];
                for (int t = 0; t < TOKENS; ++t) {
                    digits[t] = GroupDigits{factors + t, lane};
                }
                float* to = own_sums + (first + lane) * kBlock;
                for (int32_t col = 0; col < kBlock; col += kPanelRows, tile += kDownPanelBytes) {
                    fetch(ahead, kDownPanelBytes);
                    BlockSums<R> blocks[TOKENS];
                    Sums::template add_nibbles<DIGITS, TOKENS>(tile, digits, blocks);
                    for (int t = 0; t < TOKENS; ++t) {
                        for (int v = 0; v < BlockSums<R>::count; ++v) {
                            add_columns<R, DIGITS>(blocks[t].low[v], blocks[t].high[v], factors[t].units[lane],
                                                   to + t * floats + col + R::lanes * v);
                        }
                    }
                }
            }
        }
    }
};

template <class R, class Sums, int DIGITS>
void add_panels(const Part& part, const uint8_t* tile, const float* h, int32_t num_tokens, PanelAhead& ahead,
                float* sums, size_t floats) {
    PanelSums<R, Sums, DIGITS> all{part, tile, h, sums, floats, ahead};
    by_tokens<R::tokens_at_once(4, DIGITS)>(num_tokens, all);
}

size_t whole_sum_floats(const Part& part) { return round_up(size_t(part.num_cols), 16) + padded_groups(part); }

// How an instruction set adds up products is `Sums`, in registers `R`. `rounded`: those of two digits.
template <class R, class Sums, int DIGITS = 3>
constexpr PanelKernels panel_kernels(const PanelKernels* rounded = nullptr) {
    return {panel_prepared_bytes,         prepare_panel<DIGITS>,
            dot_panels<R, Sums, DIGITS>,  dot_whole_rows<Sums, DIGITS>,
            add_whole_rows<Sums, DIGITS>, add_panels<R, Sums, DIGITS>,
            whole_sum_floats,             finish_whole_sum,
            rounded};
}

}  // namespace
}  // namespace moe_pack
