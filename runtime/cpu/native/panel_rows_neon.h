// Panels' inputs, factors, and rows as they lie, for Arm, with the bits of AVX2; internal linkage as in vector.h.
//
// Products in panels are where time goes: what is here is plain, and the compiler makes vectors of its loops.
#pragma once

#include <arm_neon.h>

#include "panel_forms.h"

namespace moe_pack {
namespace {

inline int32_t nearest(float value) { return vcvtns_s32_f32(value); }  // ties to even

// Digits of 4-bit inputs are positive with 128 added to each: bytes of the sum.
constexpr int32_t kBias = 0x808080;
inline int8_t digit_of(int32_t biased, int k) { return int8_t((biased >> 8 * k & 255) ^ 128); }

// Prepares a token's inputs: `store`(fixed, block) stores those of a block, and returns their sum.
template <class Store>
inline void prepare_blocks(const Part& part, const float* x, void* prepared, Store store) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    static_cast<float*>(prepared)[0] = finite ? peak : __builtin_nanf("");
    auto* block = static_cast<int8_t*>(prepared) + kHeaderBytes;
    const int32_t block_bytes = input_bytes(part.width);
    float* sums = reinterpret_cast<float*>(block + size_t(block_bytes) * part.num_groups);
    __builtin_memset(block, 0, size_t(block_bytes) * part.num_groups + 4 * padded_groups(part));
    if (!finite || peak == 0.0f) return;
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // the inverse of the smallest floats would be infinite
    const float steps = kPeak / (peak * lift);
    for (int32_t b = 0; b < part.num_groups; ++b, x += kBlock, block += block_bytes) {
        int32_t fixed[kBlock];
        for (int32_t c = 0; c < kBlock; ++c) {
            fixed[c] = nearest(x[c] * lift * steps);
        }
        sums[b] = float(store(fixed, block));
    }
}

void prepare_digits(const Part& part, const float* x, void* prepared) {
    prepare_blocks(part, x, prepared, [](const int32_t* fixed, int8_t* digits) {
        int32_t sum = 0;
        for (int32_t c = 0; c < kBlock; ++c) {
            for (int k = 0; k < kDigits; ++k) {
                digits[k * kBlock + c] = digit_of(fixed[c] + kBias, k);
            }
            sum += fixed[c];
        }
        return sum;
    });
}

void prepare_words(const Part& part, const float* x, void* prepared) {
    prepare_blocks(part, x, prepared, [](const int32_t* fixed, int8_t* words) {
        return store_words<3>(fixed, reinterpret_cast<int16_t*>(words));
    });
}

template <int DIGITS>
void prepare_panel(const Part& part, const float* x, void* prepared) {
    static_assert(DIGITS == kDigits, "inputs are not rounded");
    (part.width == 4 ? prepare_digits : prepare_words)(part, x, prepared);
}

// -- Rows of 4 bits as they lie, with the bits that panels give ---------------------------------------------------------

// The codes of a block of a row.
inline void load_nibbles(const uint8_t* from, int8_t codes[kBlock]) {
    for (int32_t i = 0; i < kBlock / 2; ++i) {
        codes[i] = int8_t(from[i] & 15);
        codes[kBlock / 2 + i] = int8_t(from[i] >> 4);
    }
}

inline float half_at(const uint8_t* from) {
    __fp16 half;
    __builtin_memcpy(&half, from, sizeof half);
    return half;
}

inline int32_t dot_digits(const int8_t* codes, const int8_t* digits) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int32_t i = 0; i < kBlock; i += 16) {
        sum = vdotq_s32(sum, vld1q_s8(codes + i), vld1q_s8(digits + i));
    }
    return vaddvq_s32(sum);
}

// As dot_panel.
template <class Sums, int DIGITS>
void dot_whole_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                    const Ahead& ahead, float*, float* out) {
    const float peak = *static_cast<const float*>(prepared);
    const auto* inputs = static_cast<const int8_t*>(prepared) + kHeaderBytes;
    const auto* sums = reinterpret_cast<const float*>(inputs + size_t(kDigitBytes) * part.num_groups);
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        float totals[kTotals] = {};
        for (int32_t g = 0; g < part.num_groups; ++g) {
            prefetch.line();
            int8_t codes[kBlock];
            load_nibbles(rows[r] + g * 32, codes);
            const int8_t* digits = inputs + g * kDigitBytes;
            const int32_t low = (dot_digits(codes, digits + kBlock) << 8) + dot_digits(codes, digits);
            const int32_t high = dot_digits(codes, digits + 2 * kBlock);
            const float sum = __builtin_fmaf(float(high), 65536.0f, float(low));
            const uint8_t* scale = rows[r] + part.scales_at + 2 * g;
            const float centered = __builtin_fmaf(-half_at(scale + part.scale_bytes), sums[g], sum);
            totals[g % kTotals] = __builtin_fmaf(centered, half_at(scale), totals[g % kTotals]);
        }
        for (int32_t half = kTotals / 2; half > 0; half /= 2) {
            for (int32_t i = 0; i < half; ++i) {
                totals[i] += totals[i + half];
            }
        }
        out[r] = totals[0] * (1.0f / kPeak) * peak;
        prefetch.rest();
    }
}

// -- Sums of down rows -------------------------------------------------------------------------------------------------

template <class ScalesOf>
void TileFactors::take(const ScalesOf& scales_of, int32_t num_rows, int32_t num_groups, const float* h, float* zeros,
                       float top, PanelAhead ahead) {
    float factors[kMaxTile][kTotals] = {}, peak[kTotals];
    bool has_fault[kTotals] = {};
    for (float& each : peak) {
        each = kLeastPeak;
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        if (r % 2 == 0) fetch(ahead, kLineBytes);
        const uint8_t *scales = scales_of.scales(r), *stored_zeros = scales_of.zeros(r);
        for (int32_t g = 0; g < num_groups; ++g) {
            const float factor = half_at(scales + 2 * g) * h[r];
            zeros[g] = __builtin_fmaf(factor, half_at(stored_zeros + 2 * g), zeros[g]);
            const float size = __builtin_fabsf(factor);
            peak[g] = size > peak[g] ? size : peak[g];
            has_fault[g] |= !(size < __builtin_inff());
            factors[r][g] = factor;
        }
    }
    for (int32_t g = 0; g < kTotals; ++g) {
        units[g] = has_fault[g] ? __builtin_nanf("") : peak[g] * (1.0f / top);
        peak[g] = top / peak[g];
    }
    for (int32_t four = 0; 4 * four < num_rows; ++four) {
        for (int32_t g = 0; g < kTotals; ++g) {
            int8_t bytes[kDigits][4];
            for (int i = 0; i < 4; ++i) {
                const int32_t biased = nearest(factors[4 * four + i][g] * peak[g]) + kBias;
                for (int k = 0; k < kDigits; ++k) {
                    bytes[k][i] = digit_of(biased, k);
                }
            }
            for (int k = 0; k < kDigits; ++k) {
                __builtin_memcpy(&digits[four][k][g], bytes[k], 4);
            }
        }
    }
}

void finish_whole_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    const float* zeros = sum + part.num_cols;
    for (int32_t c = start; c < stop; ++c) {
        out[c] = __builtin_fmaf(sum[c] - zeros[c / kBlock], weight, out[c]);
    }
}

}  // namespace
}  // namespace moe_pack
