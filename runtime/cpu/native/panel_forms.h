// Panels: what their kernels for all instruction sets share, the forms of inputs and of factors.
//
// Internal linkage as in vector.h.
#pragma once

#include "digits.h"
#include "panels.h"

namespace moe_pack {
namespace {

constexpr int32_t kTotals = 8;  // blocks b, b + 8, b + 16, … of a row have a sum of their own

inline int32_t word_at(const void* from) {
    int32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return word;
}

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

// Inputs of two digits are relative to the largest of a block of 64, as in rounded.h. What a step of the block stands
// for lies where third digits would be.
constexpr int32_t kUnitAt = 2 * kBlock;

inline float unit_at(const int8_t* block) {
    float unit;
    __builtin_memcpy(&unit, block + kUnitAt, sizeof unit);
    return unit;
}

// -- Sums of down rows -------------------------------------------------------------------------------------------------

constexpr int32_t kFours = kMaxTile / 4;
constexpr float kLeastPeak = 0x1p-103f;  // of factors: smaller ones count as far as they are no smaller than 2^-24 of it

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
              PanelAhead ahead = {});
};

// The digits of a group's factors, a word of each four rows as BlockDigits has them.
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

}  // namespace
}  // namespace moe_pack
