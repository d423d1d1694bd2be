// Panels with AVX2 and what has more: codes of 4 bits times three digits in bytes, of 8 bits times two of 12 bits in words.
//
// As with rows, an input is 24-bit fixed point relative to the token's largest, and the sum over a group is exact. Every
// instruction set takes the same sums in the same order: all give the same bits. A file that includes this has set its
// target and defines a table of kernels by `panel_kernels`, from how it adds up products, and from the registers in which
// it does: internal linkage as in vector.h.
#pragma once

#include "affine_avx2.h"
#include "panels.h"

namespace moe_pack {
namespace {

constexpr int32_t kTotals = 8;  // blocks b, b + 8, b + 16, … of a row have a sum of their own

inline int32_t word_at(const void* from) {
    int32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return word;
}

// Registers of eight double words, one for each of 8 rows (or columns of down).
struct Ymm {
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr int32_t lanes = 8;

    // Tokens at once, whose sums leave registers to what they share.
    static constexpr int tokens_at_once(int width, int digits) {
        return width == 4 ? (digits == 2 ? 2 : 1) : digits == 2 ? 4 : 2;
    }

    static Ints zero() { return _mm256_setzero_si256(); }
    static Ints load(const void* from) { return load_bytes(from); }
    static Ints broadcast(const void* word) { return _mm256_set1_epi32(word_at(word)); }
    static Ints low_nibbles(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
    static Ints high_nibbles(Ints bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }
    static Ints even_bytes(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(255)); }
    static Ints odd_bytes(Ints bytes) { return _mm256_srli_epi16(bytes, 8); }
    static Floats floats(Ints ints) { return _mm256_cvtepi32_ps(ints); }
    static Floats halves(const void* from) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from))); }
    static Floats set(float value) { return _mm256_set1_ps(value); }
    static Floats load_floats(const float* from) { return _mm256_load_ps(from); }
    static void store_floats(float* to, Floats values) { _mm256_store_ps(to, values); }
    static void store_anywhere(float* to, Floats values) { _mm256_storeu_ps(to, values); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
};

inline void fetch(PanelAhead& ahead, int32_t num_bytes) {
    if (ahead.at == nullptr) return;
    for (int32_t line = 0; line < num_bytes; line += kLineBytes) {
        fetch_line(ahead.at + line);
    }
    ahead.pass(num_bytes);
}

// Lines that a kernel prefetches one by one as it goes: the 17 of a block of 8 bits all at once would wait for each other.
// Where nothing is wanted, its own.
inline const uint8_t* wanted(PanelAhead& ahead, const uint8_t* own, int32_t num_bytes) {
    const uint8_t* lines = ahead.at;
    if (lines == nullptr) return own;
    ahead.pass(num_bytes);
    return lines;
}

// Sums of a block's products with 16 rows: high * high_unit(WIDTH) + low.
template <class R>
struct BlockSums {
    static constexpr int count = kPanelRows / R::lanes;
    typename R::Ints low[count], high[count];
};

constexpr float kRoundedTop = 32421.0f;  // of inputs and factors of two digits
constexpr float top_of(int digits) { return digits == 3 ? kPeak : kRoundedTop; }

constexpr float high_unit(int width) { return width == 4 ? 65536.0f : 4096.0f; }

// The two sums as one.
template <class R, int WIDTH, int DIGITS>
inline typename R::Floats total_of(typename R::Ints low, typename R::Ints high) {
    if constexpr (DIGITS == 2) return R::floats(low);
    return R::multiply_add(R::floats(high), R::set(high_unit(WIDTH)), R::floats(low));
}

constexpr int32_t input_bytes(int width) { return width == 4 ? kDigitBytes : 4 * kBlock; }  // of a block

// Inputs for 4 bits: the digits of a block as prepare_digits has them; those of inputs 4 q to 4 q + 3 are a word.
struct BlockDigits {
    const int8_t* digits;
    const void* word(int k, int q) const { return digits + k * kBlock + 4 * q; }
};

// For 8 bits: 64 low words, then 64 high ones, or with two digits 64 words; of every four columns the first and third,
// then the second and fourth.
struct BlockWords {
    const int8_t* words;
    const void* even_low(int j) const { return words + 8 * j; }
    const void* odd_low(int j) const { return words + 8 * j + 4; }
    const void* even_high(int j) const { return words + 2 * kBlock + 8 * j; }
    const void* odd_high(int j) const { return words + 2 * kBlock + 8 * j + 4; }
};

// A block of fixed-point inputs as words, and their sum.
template <int DIGITS>
inline int32_t store_words(const int32_t* fixed, int16_t* words) {
    int32_t sum = 0;
    for (int32_t c = 0; c < kBlock; c += 4) {
        for (int i = 0; i < 4; ++i) {
            const int32_t value = fixed[c + i], low = DIGITS == 3 ? ((value + 2048) & 4095) - 2048 : value;
            const int place = c + 2 * (i % 2) + i / 2;
            words[place] = int16_t(low);
            words[kBlock + place] = int16_t((value - low) >> 12);
            sum += value;
        }
    }
    return sum;
}

void prepare_words(const Part& part, const float* x, void* prepared) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    float* header = static_cast<float*>(prepared);
    header[0] = finite ? peak : __builtin_nanf("");
    auto* words = reinterpret_cast<int16_t*>(static_cast<int8_t*>(prepared) + kHeaderBytes);
    float* sums = reinterpret_cast<float*>(words + 2 * part.num_cols);
    if (!finite || peak == 0.0f) {
        __builtin_memset(words, 0, size_t(4) * part.num_cols + 4 * size_t(part.num_groups));
        return;
    }
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // as in prepare_digits
    const __m256 steps = _mm256_set1_ps(kPeak / (peak * lift));
    for (int32_t b = 0; b < part.num_groups; ++b) {
        int32_t fixed[kBlock];
        for (int32_t c = 0; c < kBlock; c += 8) {
            const __m256 lifted = _mm256_mul_ps(_mm256_loadu_ps(x + b * kBlock + c), _mm256_set1_ps(lift));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(fixed + c), _mm256_cvtps_epi32(_mm256_mul_ps(lifted, steps)));
        }
        sums[b] = float(store_words<3>(fixed, words + size_t(2) * b * kBlock));
    }
}

// Inputs of two digits are relative to the largest of a block of 64, as in rounded.h. What a step of the block stands
// for lies where third digits would be.
constexpr int32_t kUnitAt = 2 * kBlock;

inline float unit_at(const int8_t* block) {
    float unit;
    __builtin_memcpy(&unit, block + kUnitAt, sizeof unit);
    return unit;
}

void prepare_rounded(const Part& part, const float* x, void* prepared) {
    const bool finite = is_finite(largest_magnitude(x, part.num_cols));
    static_cast<float*>(prepared)[0] = finite ? 1.0f : __builtin_nanf("");
    const int32_t block_bytes = input_bytes(part.width);
    auto* block = static_cast<int8_t*>(prepared) + kHeaderBytes;
    float* sums = reinterpret_cast<float*>(block + size_t(block_bytes) * part.num_groups);
    __builtin_memset(block, 0, size_t(block_bytes) * part.num_groups + 4 * padded_groups(part));
    for (int32_t b = 0; finite && b < part.num_groups; ++b, x += kBlock, block += block_bytes) {
        const float peak = largest_magnitude(x, kBlock);
        if (peak == 0.0f) continue;
        const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // as in prepare_digits
        int32_t fixed[kBlock], sum = 0;
        int8_t digits[kDigitBytes];
        split_block(x, lift, kRoundedTop / (peak * lift), fixed, digits);
        if (part.width == 4) {
            __builtin_memcpy(block, digits, 2 * kBlock);
            for (int32_t value : fixed) {
                sum += value;
            }
        } else {
            int16_t words[2 * kBlock];
            sum = store_words<2>(fixed, words);
            __builtin_memcpy(block, words, 2 * kBlock);
        }
        sums[b] = float(sum);
        const float unit = peak * (1.0f / kRoundedTop);
        __builtin_memcpy(block + kUnitAt, &unit, sizeof unit);
    }
}

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

template <int DIGITS>
void prepare_panel(const Part& part, const float* x, void* prepared) {
    const auto prepare = DIGITS == 2 ? prepare_rounded : part.width == 4 ? prepare_digits : prepare_words;
    prepare(part, x, prepared);
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

// -- Rows of 4 bits as they lie, with the bits that panels give ---------------------------------------------------------

// The sums of eight registers' lanes, in their order.
inline __m256i sums_of_lanes(const __m256i registers[8]) {
    __m256i pairs[4], fours[2];
    for (int i = 0; i < 4; ++i) {
        pairs[i] = _mm256_hadd_epi32(registers[2 * i], registers[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        fours[i] = _mm256_hadd_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                            _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

// As dot_panel, with a lane for each of its totals.
template <class Sums, int DIGITS>
float dot_whole_row(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch) {
    const Inputs inputs(part, prepared);
    const uint8_t* scales = row + part.scales_at;
    __m256 totals = _mm256_setzero_ps();
    for (int32_t first = 0; first < part.num_groups; first += kTotals) {
        __m256i low[kTotals], high[kTotals];
        alignas(32) float units[kTotals] = {};
        for (int32_t i = 0; i < kTotals; ++i) {
            if (first + i >= part.num_groups) {
                low[i] = high[i] = _mm256_setzero_si256();
                continue;
            }
            units[i] = unit_at(inputs.digits + (first + i) * kDigitBytes);
            prefetch.line();
            const Codes codes = load_codes<4>(row + (first + i) * 32);
            Sums::template add_row<DIGITS>(codes, inputs.digits + (first + i) * kDigitBytes, low[i], high[i]);
        }
        const __m256 codes = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of_lanes(high)), _mm256_set1_ps(65536.0f),
                                             _mm256_cvtepi32_ps(sums_of_lanes(low)));
        __m256 scale = load_eight(part, scales, first, false);
        if constexpr (DIGITS == 2) {
            scale = _mm256_mul_ps(scale, _mm256_load_ps(units));
        }
        const __m256 zero = load_eight(part, scales + part.scale_bytes, first, true);
        const __m256 centered = _mm256_fnmadd_ps(zero, _mm256_load_ps(inputs.sums + first), codes);
        totals = _mm256_fmadd_ps(centered, scale, totals);
    }
    return lanes_total(totals) * (DIGITS == 3 ? 1.0f / kPeak : 1.0f) * inputs.peak;
}

template <class Sums, int DIGITS>
void dot_whole_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                    const Ahead& ahead, float*, float* out) {
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        out[r] = dot_whole_row<Sums, DIGITS>(part, rows[r], prepared, prefetch);
        prefetch.rest();
    }
}

// -- Sums of down rows -------------------------------------------------------------------------------------------------

constexpr int32_t kFours = kMaxTile / 4;
constexpr float kLeastPeak = 0x1p-103f;  // of factors: smaller ones count as far as they are no smaller than 2^-24 of it

// Up to eight float16, and zeros.
inline __m256 load_halves(const uint8_t* from, int32_t count) {
    uint8_t padded[16] = {};
    if (count < kTotals) {
        __builtin_memcpy(padded, from, 2 * size_t(count));
        from = padded;
    }
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The digits of four rows' factors, made positive by a bias: byte k of each in one double word.
inline void store_words(const __m256i fixed[4], int32_t digits[kDigits][kTotals]) {
    const __m256i odd_bytes = _mm256_set1_epi16(int16_t(0xff00));
    __m256i even[2], odd[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i one = fixed[2 * i], other = fixed[2 * i + 1];
        even[i] = _mm256_blendv_epi8(one, _mm256_slli_epi32(other, 8), odd_bytes);
        odd[i] = _mm256_blendv_epi8(_mm256_srli_epi32(one, 8), other, odd_bytes);
    }
    const __m256i words[kDigits] = {_mm256_blend_epi16(even[0], _mm256_slli_epi32(even[1], 16), 0xaa),
                                    _mm256_blend_epi16(odd[0], _mm256_slli_epi32(odd[1], 16), 0xaa),
                                    _mm256_blend_epi16(_mm256_srli_epi32(even[0], 16), even[1], 0xaa)};
    for (int k = 0; k < kDigits; ++k) {
        const __m256i digit = _mm256_xor_si256(words[k], _mm256_set1_epi8(-128));
        _mm256_store_si256(reinterpret_cast<__m256i*>(digits[k]), digit);
    }
}

// Where scales and zeros of a tile's rows are from a group on: in rows, or behind one another.
struct ScalesOfRows {
    const Part& part;
    const uint8_t* const* rows;
    int32_t group;
    const uint8_t* scales(int32_t r) const { return rows[r] + part.scales_at + 2 * group; }
    const uint8_t* zeros(int32_t r) const { return scales(r) + part.scale_bytes; }
};

struct ScalesOfTile {
    const uint8_t* first;
    int32_t num_groups;
    const uint8_t* scales(int32_t r) const { return first + 2 * r * num_groups; }
    const uint8_t* zeros(int32_t r) const { return scales(kMaxTile + r); }
};

// What the rows of a tile are multiplied with in eight groups: h * scale in fixed point, relative to the largest of a group.
struct TileFactors {
    alignas(32) int32_t digits[kFours][kDigits][kTotals];
    alignas(32) float units[kTotals];

    // `num_groups`: at most eight. zeros[g] += h * scale * zero. `top`: what the largest becomes. `ahead`: fetched by
    // lines as rows are.
    template <class ScalesOf>
    void take(const ScalesOf& scales_of, int32_t num_rows, int32_t num_groups, const float* h, float* zeros, float top,
              PanelAhead ahead = {}) {
        __m256 factors[kMaxTile], peak = _mm256_set1_ps(kLeastPeak), zero_sum = _mm256_load_ps(zeros);
        __m256 faults = _mm256_setzero_ps();  // bits where a factor is not finite
        const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
        const __m256 infinity = _mm256_set1_ps(__builtin_inff());
        for (int32_t r = 0; r < num_rows; ++r) {
            if (r % 2 == 0) fetch(ahead, kLineBytes);
            const __m256 factor =
                _mm256_mul_ps(load_halves(scales_of.scales(r), num_groups), _mm256_broadcast_ss(h + r));
            zero_sum = _mm256_fmadd_ps(factor, load_halves(scales_of.zeros(r), num_groups), zero_sum);
            const __m256 size = _mm256_and_ps(factor, magnitude);
            peak = _mm256_max_ps(size, peak);
            faults = _mm256_or_ps(faults, _mm256_cmp_ps(size, infinity, _CMP_NLT_UQ));
            factors[r] = factor;
        }
        for (int32_t r = num_rows; r % 4; ++r) {
            factors[r] = _mm256_setzero_ps();
        }
        _mm256_store_ps(zeros, zero_sum);
        _mm256_store_ps(units, _mm256_or_ps(_mm256_mul_ps(peak, _mm256_set1_ps(1.0f / top)), faults));
        const __m256 steps = _mm256_div_ps(_mm256_set1_ps(top), peak);
        for (int32_t four = 0; 4 * four < num_rows; ++four) {
            __m256i fixed[4];
            for (int i = 0; i < 4; ++i) {
                fixed[i] = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(factors[4 * four + i], steps)),
                                            _mm256_set1_epi32(0x808080));  // as in split_block
            }
            store_words(fixed, digits[four]);
        }
    }
};

// The digits of a group's factors, as PanelInputs takes them.
struct GroupDigits {
    const TileFactors* factors;
    int32_t lane;
    const void* word(int k, int q) const { return &factors->digits[q][k][lane]; }
};

// sum[c] += (high * 65536 + low) * unit, for the columns of a register.
template <class R, int DIGITS>
inline void add_columns(typename R::Ints low, typename R::Ints high, float unit, float* sum) {
    const auto codes = total_of<R, 4, DIGITS>(low, high);
    R::store_floats(sum, R::multiply_add(codes, R::set(unit), R::load_floats(sum)));
}

// Adds 16 columns of two registers in the order of unpacked bytes: the first has the columns 0 to 3 and 16 to 19 of those
// from `sum` on, the second 4 to 7 and 20 to 23.
template <int DIGITS>
inline void add_unpacked(const __m256i low[2], const __m256i high[2], float unit, float* sum) {
    const __m256i near = _mm256_permute2x128_si256(low[0], low[1], 0x20), far = _mm256_permute2x128_si256(low[0], low[1], 0x31);
    add_columns<Ymm, DIGITS>(near, _mm256_permute2x128_si256(high[0], high[1], 0x20), unit, sum);
    add_columns<Ymm, DIGITS>(far, _mm256_permute2x128_si256(high[0], high[1], 0x31), unit, sum + 16);
}

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

void finish_whole_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    const float* zeros = sum + part.num_cols;
    for (int32_t c = start; c < stop; c += 8) {
        const __m256 total = _mm256_sub_ps(_mm256_load_ps(sum + c), _mm256_set1_ps(zeros[c / kBlock]));
        _mm256_storeu_ps(out + c, _mm256_fmadd_ps(total, _mm256_set1_ps(weight), _mm256_loadu_ps(out + c)));
    }
}

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
