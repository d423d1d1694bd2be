// What one instruction set provides: arithmetic on the bytes of rows (docs/pack.md, sections 7 and 8).
//
// No checking, no threads, no allocation: callers have validated every size (layout.cpp) and own all memory. One
// table of functions an instruction set; `best_kernels` chooses at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cached_rows.h"

namespace moe_pack {

// The numbers of a pack's index (docs/pack.md, section 5) up to `last`, and plain values that no pack has.
enum class Codec : int32_t { bf16 = 1, affine, fp8, e5m2, mxfp4, trellis, last = trellis, f16 = 64, f32 };

// The one format of a codec that keeps what a source holds.
struct Source {
    Codec codec;
    int32_t width, group, scale_bits;
};

constexpr Source kSources[] = {{Codec::fp8, 8, 128, 32}, {Codec::e5m2, 8, 0, 8}, {Codec::mxfp4, 4, 32, 8}};

// One matrix's share of a row of `num_cols` weights: its codes, and elsewhere in the row its scales, zeros, and then its
// float32 bias if it has one. Kernels get rows from where their part's codes begin.
struct Part {
    Codec codec;
    int32_t width;       // bits a code: 1, 2, 3, 4, 8 with affine; bits of two, 4 to 8, with trellis
    int32_t group;       // weights a group: 16, 32, 64, 128, or num_cols
    int32_t scale_bits;  // affine, trellis, 16: scales and zeros are float16; 8: bytes, with a float16 multiplier each
    int32_t num_cols;
    int32_t num_groups;
    int32_t code_bytes;
    int32_t scale_bytes;
    int32_t zero_bytes;  // as many as of scales, with affine
    int32_t scales_at;   // where scales begin, from the first code on
    bool has_bias;

    int32_t bias_at() const { return scales_at + scale_bytes + zero_bytes; }
};

constexpr int32_t kBlock = 64;         // codes lie in planar blocks of this many

// Columns that share a scale: a group, or a block where groups are longer.
inline int32_t unit_of(const Part& part) { return part.group < kBlock ? part.group : kBlock; }

constexpr int32_t kLineBytes = 64;     // of a cache line
constexpr int32_t kMaxTile = 64;       // rows a call of a kernel at most
constexpr int32_t kMaxOdd = 1023;      // the largest odd factor of a hidden size that kernels rotate
constexpr int32_t kReadPastFloats = 32;  // that may be read, never used, behind an array of the arena

// Rows whose bytes are wanted soon: while row r of a call is read, `num_bytes` from `rows[r]` on are prefetched.
struct Ahead {
    const uint8_t* const* rows;
    int32_t num_bytes;
};

// One token of one head of a recurrence: q and k [num_keys], v and out [num_values]; `decay` of key i is at
// i * decay_step. `corrects`: the delta rule, with this rate.
struct HeadToken {
    int32_t num_keys, num_values;
    const float *q, *k, *v, *decay;
    int32_t decay_step;
    bool corrects;
    float rate;
    float* out;
    const float* ahead;  // a state of the same size, wanted soon, or null
};

// Some channels of a convolution of tokens; rows of x, state and out are `stride` floats apart. kernel: [channels,
// taps], at most 64 taps; state: the last taps - 1 inputs, oldest first, replaced by those after the tokens.
struct Channels {
    int32_t num_tokens, num_channels, num_taps;
    size_t stride;
    const float *x, *kernel, *bias;
    float *state, *out;
};

struct RoundedKernels;
struct PanelKernels;

struct Kernels {
    const char* name;

    // Bytes of a token's inputs in the form in which `dot_rows` wants them for this part, a multiple of 64.
    // Parts of one codec, width and group share a form, and so do all of one codec but affine and trellis.
    size_t (*prepared_bytes)(const Part& part);

    // Brings float32 [num_cols] into that form. What is not finite makes every product NaN.
    void (*prepare)(const Part& part, const float* x, void* prepared);

    // out[r] = row r . x (+ its bias), in float32. `rows[r]` is where its codes begin; `prepared` is aligned to 64.
    // `work`: `work_floats(part)` floats, aligned to 64.
    void (*dot_rows)(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                     const Ahead& ahead, float* work, float* out);
    size_t (*work_floats)(const Part& part);

    // Floats of a sum of rows in whatever order this instruction set finds best, a multiple of 16.
    size_t (*sum_floats)(const Part& part);

    // sum += h[r] * row r for each of `num_rows` rows; `sum` aligned to 64. Of a call's factors h[r] * scale those of a
    // group may be rounded to 2^-24 of their largest; one that is not finite may make all of the group's columns NaNs.
    void (*add_rows)(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h,
                     const Ahead& ahead, float* work, float* sum);

    // out[c] += weight * (sum's column c), for columns `start` to `stop`, both multiples of 64 or num_cols.
    void (*finish_sum)(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out);

    // Columns `start` to `stop` of a row (multiples of 64, or num_cols), in float32, natural order, exactly
    // `(code - zero) * scale`, or `code * scale`.
    void (*decode)(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out);

    // out[t * out_stride + r] += w[r] . x[t] over n columns, for decoded rows w[r * w_stride] and tokens
    // x[t * x_stride]. n is any number; nothing behind it is read.
    void (*dots)(const float* w, int32_t num_rows, size_t w_stride, const float* x, int32_t num_tokens,
                 size_t x_stride, int32_t n, float* out, size_t out_stride);

    // y[t * y_stride + c] += sum over r of h[t * h_stride + r] * w[r * w_stride + c], rows one after the other.
    // Of w, kReadPastFloats behind the last row may be read.
    void (*add)(const float* w, int32_t num_rows, size_t w_stride, const float* h, int32_t num_tokens,
                size_t h_stride, int32_t n, float* y, size_t y_stride);

    // x[i] = e^(x[i] - largest) for n values, where `largest` is first raised to the largest of them; gives their sum.
    // What is -infinity becomes 0, a NaN stays one. x has room for n values rounded up to 16: what follows is lost.
    float (*exponentials)(float* x, int32_t n, float* largest);

    // Rows of bfloat16 or codes of a key-value cache, one behind the other, to floats; codes as they are stored, rotated.
    // out[r * stride]: room for whole blocks, which may be more than the row's width.
    void (*decode_cached)(const CachedRows& rows, const uint8_t* from, int32_t num_rows, float* out, size_t stride);

    // out = R (scale * x) if `is_scaled_first`, else scale * (R x), for d floats each; `out` is neither of the others.
    // R is the rotation of docs/model.md, for d = m 2^k: m is odd, at most kMaxOdd, and d / m at least 64.
    // `hartley`: [m, m], not read if m is 1.
    void (*rotate)(const float* x, const float* scale, bool is_scaled_first, int32_t d, int32_t m, const float* hartley,
                   float* out);

    // state [num_keys, num_values] = decay * state + k * written, with `written` v, or rate * (v - k (decay * state));
    // then out = q state.
    void (*recur)(const HeadToken& token, float* state);

    // out[t] = bias + sum over taps of kernel[tap] * input[t + tap], where the state's inputs come before x.
    void (*convolve)(const Channels& channels);

    // Products with rounded inputs for many tokens (rounded.h); null: this instruction set has none.
    const RoundedKernels* rounded;

    // Products with rows in panels (panels.h); null: this instruction set has none, and rows stay as they are.
    const PanelKernels* panels;
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
// For all parts but trellises.
extern const Kernels avx2_kernels;    // AVX2, FMA, F16C
extern const Kernels avx512_kernels;  // AVX-512 F, BW, DQ, VL, VNNI

// What takes a part of codec trellis in their place: the rest of such a part's is theirs.
struct TrellisKernels {
    decltype(Kernels::prepared_bytes) prepared_bytes;
    decltype(Kernels::prepare) prepare;
    decltype(Kernels::dot_rows) dot_rows;
    decltype(Kernels::add_rows) add_rows;
    decltype(Kernels::decode) decode;
};
extern const TrellisKernels avx2_trellis_kernels, avx512_trellis_kernels;
extern const TrellisKernels vbmi_trellis_kernels;  // and AVX-512 VBMI
#endif

// The fastest this machine has, at most the one named `limit` ("portable", "neon", "avx2", "avx512", "avx512vbmi"; null:
// no limit).
const Kernels* best_kernels(const char* limit);

}  // namespace moe_pack
