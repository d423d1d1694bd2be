// Panels with NEON, where processors add up products of four bytes (FEAT_DotProd): from Cortex-A76 and Neoverse N1 on.
#if defined(__aarch64__) && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))

#include "panels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "panel_rows_neon.h"

#include "panel_dots.h"

namespace moe_pack {
namespace {

// Registers of four double words.
struct Neon {
    using Ints = int32x4_t;
    using Floats = float32x4_t;
    static constexpr int32_t lanes = 4;

    // As many as leave their sums in 32 registers.
    static constexpr int tokens_at_once(int width, int) { return width == 4 ? 2 : 1; }

    static Ints zero() { return vdupq_n_s32(0); }
    static Ints load(const void* from) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(from))); }
    static Ints broadcast(const void* word) { return vdupq_n_s32(word_at(word)); }
    static Ints low_nibbles(Ints bytes) {
        return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(bytes), vdupq_n_u8(15)));
    }
    static Ints high_nibbles(Ints bytes) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(bytes), 4)); }
    static Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
    static Ints times_256(Ints ints) { return vshlq_n_s32(ints, 8); }

    // Codes of 4 bits are the same with a sign.
    static Ints dot_bytes(Ints sum, Ints codes, Ints digits) {
        return vdotq_s32(sum, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(digits));
    }

    static Floats floats(Ints ints) { return vcvtq_f32_s32(ints); }
    static Floats halves(const void* from) { return vcvt_f32_f16(vld1_f16(static_cast<const __fp16*>(from))); }
    static Floats set(float value) { return vdupq_n_f32(value); }
    static Floats load_floats(const float* from) { return vld1q_f32(from); }
    static void store_floats(float* to, Floats values) { vst1q_f32(to, values); }
    static void store_anywhere(float* to, Floats values) { vst1q_f32(to, values); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
};

struct NeonSums : DotSums<Neon> {
    // A byte of each row times a digit of its factor: plain, for rows that have no panels yet.
    template <int DIGITS>
    static void add_group(const uint8_t* const* rows, int32_t count, int32_t group, const GroupDigits& factors, float unit,
                          float* sum) {
        int32_t low[kBlock] = {}, high[kBlock] = {};
        for (int32_t r = 0; r < count; ++r) {
            int8_t codes[kBlock];
            load_nibbles(rows[r] + 32 * group, codes);
            int32_t digits[kDigits];
            for (int k = 0; k < kDigits; ++k) {
                digits[k] = static_cast<const int8_t*>(factors.word(k, r / 4))[r % 4];
            }
            const auto both = int16_t(digits[0]), middle = int16_t(digits[1]), top = int16_t(digits[2]);
            for (int32_t c = 0; c < kBlock; ++c) {
                low[c] += codes[c] * both + codes[c] * middle * 256;
                high[c] += codes[c] * top;
            }
        }
        for (int32_t c = 0; c < kBlock; c += Neon::lanes) {
            add_columns<Neon, DIGITS>(vld1q_s32(low + c), vld1q_s32(high + c), unit, sum + c);
        }
    }

    // Sums of a line's columns 0 and 2, and of 1 and 3, are added at the end.
    template <int DIGITS, int TOKENS>
    static void add_bytes(const uint8_t* lines, const uint8_t* soon, const BlockWords (&words)[TOKENS],
                          BlockSums<Neon> (&sums)[TOKENS]) {
        constexpr int count = BlockSums<Neon>::count;
        int32x4_t low[TOKENS][count][2], high[TOKENS][count][2];
        for (int t = 0; t < TOKENS; ++t) {
            for (int v = 0; v < count; ++v) {
                low[t][v][0] = low[t][v][1] = high[t][v][0] = high[t][v][1] = Neon::zero();
            }
        }
#pragma GCC unroll 1
        for (int j = 0; j < kBlock / 4; ++j) {
            fetch_line(soon + j * kLineBytes);
#pragma GCC unroll 4
            for (int v = 0; v < count; ++v) {
                const uint16x8_t codes = vld1q_u16(reinterpret_cast<const uint16_t*>(lines + j * kLineBytes + 16 * v));
                const int16x8_t even = vreinterpretq_s16_u16(vandq_u16(codes, vdupq_n_u16(255)));
                const int16x8_t odd = vreinterpretq_s16_u16(vshrq_n_u16(codes, 8));
                for (int t = 0; t < TOKENS; ++t) {
                    add_words(low[t][v], even, words[t].even_low(j));
                    add_words(low[t][v], odd, words[t].odd_low(j));
                    add_words(high[t][v], even, words[t].even_high(j));
                    add_words(high[t][v], odd, words[t].odd_high(j));
                }
            }
        }
        for (int t = 0; t < TOKENS; ++t) {
            for (int v = 0; v < count; ++v) {
                sums[t].low[v] = vpaddq_s32(low[t][v][0], low[t][v][1]);
                sums[t].high[v] = vpaddq_s32(high[t][v][0], high[t][v][1]);
            }
        }
    }

  private:
    // Products of two rows' words go to the first sum, of the other two's to the second.
    static void add_words(int32x4_t (&sums)[2], int16x8_t codes, const void* both) {
        const int16x8_t factors = vreinterpretq_s16_s32(Neon::broadcast(both));
        sums[0] = vmlal_s16(sums[0], vget_low_s16(codes), vget_low_s16(factors));
        sums[1] = vmlal_high_s16(sums[1], codes, factors);
    }
};

constexpr PanelKernels kKernels = panel_kernels<Neon, NeonSums>();

}  // namespace

const PanelKernels* neon_panel_kernels() { return &kKernels; }

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif

#elif defined(__aarch64__)

#include "panels.h"

namespace moe_pack {

const PanelKernels* neon_panel_kernels() { return nullptr; }

}  // namespace moe_pack

#endif
