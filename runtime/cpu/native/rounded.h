// Products with inputs rounded to 16 bits or 8, for many tokens: what one instruction set provides (docs/kernels.md,
// "Rounded inputs").
//
// A token's inputs are rounded by blocks of 64 columns, and neurons' outputs by rows of a tile: code times scale, with a
// scale for each. Codes of weights are multiplied as they are, so nothing else is rounded. As kernels.h: no checking, no
// threads, no allocation.
#pragma once

#include "kernels.h"

namespace moe_pack {

constexpr int32_t kRoundedTokens = 128;  // at once
constexpr int32_t kDotRows = 64;         // that are multiplied with tokens at once
constexpr int32_t kAddRows = 128;        // that are added up at once

// Sums of products are integers of 32 bits. A code is at most 255 (a trellis's 124), a rounded value at most 127 with one
// digit and 127 * 256 with two (rounding.h); a block's columns or a tile's rows are added up. While two digits are added
// one after the other, the lower one, from -128 on, can exceed the value by 128.
constexpr int64_t kMostCode = 255, kMostRounded = 127 * 256, kMostLowDigit = 128;
constexpr int64_t kMostAdded = kAddRows > kBlock ? kAddRows : kBlock;
static_assert(kMostAdded * kMostCode * (kMostRounded + kMostLowDigit) <= INT32_MAX, "sums of products fit");

// Inputs of tokens: `codes` [blocks, tokens, digits, 64], of one digit or of two, the higher one first; `scales` [blocks,
// tokens]; `sums` of codes [units, tokens], where a unit is a group or a block, the shorter of the two. Aligned to 64
// bytes.
struct RoundedTokens {
    int32_t num_tokens, unit, digits;
    int8_t* codes;
    float *scales, *sums;
};

// Up to kAddRows rows, and those that come next, as many, or null.
struct RowsToAdd {
    const Part& part;
    const uint8_t *const *rows, *const *ahead;
    int32_t count;
};

// What they are multiplied with, tokens `stride` apart, to be rounded to so many digits.
struct Outputs {
    const float* values;
    size_t stride;
    int32_t digits;
};

struct RoundedKernels {
    // The digits to which inputs for rows of a part are rounded where `digits` are asked for: no fewer.
    int32_t (*digits_for)(const Part& part, int32_t digits);

    // Columns `first` to `stop`, multiples of 64, of tokens x[t]. What is not finite makes every product NaN; where no
    // input of a block reaches 2^-100 all count as zero.
    void (*round)(const float* const* x, int32_t first, int32_t stop, const RoundedTokens& tokens);

    // totals [tokens, kDotRows]: rows times tokens, at most kDotRows rows.
    void (*dot)(const Part& part, const uint8_t* const* rows, int32_t num_rows, const RoundedTokens& tokens,
                float* totals);

    // out[t * stride + c - start] += sum over r of h[t, r] * row r's column c, for columns `start` to `stop`, multiples
    // of 64, and at most kRoundedTokens tokens. `work`: `add_bytes`, aligned to 64.
    void (*add)(const RowsToAdd& rows, const Outputs& h, int32_t num_tokens, int32_t start, int32_t stop, void* work,
                float* out, size_t stride);
    size_t add_bytes;
};

// Whether rows of a part can be multiplied with rounded tokens: those whose codes are integers.
bool can_round(const Part& part);

#if defined(__x86_64__)
extern const RoundedKernels avx512_rounded_kernels;
extern const RoundedKernels avx2_rounded_kernels;
#endif

}  // namespace moe_pack
