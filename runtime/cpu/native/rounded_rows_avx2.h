// Rows of affine codes times one token whose inputs are rounded to 16 or 8 bits, with AVX2.
//
// For kernels_avx2.cpp alone. As dot_affine of affine_avx2.h, with fewer digits, and a scale for each block of inputs.
#pragma once

#include "affine_avx2.h"
#include "rounding_avx2.h"

namespace moe_pack {
namespace {

// Prepared inputs: digits by block, the higher one first; the scale of each block; and for each group the sum of its
// blocks' scales times sums of codes, zeros after the last.
template <int DIGITS>
struct RoundedInputs {
    const int8_t* digits;
    const float *scales, *sums;

    RoundedInputs(const Part& part, const void* prepared)
        : digits(static_cast<const int8_t*>(prepared)),
          scales(reinterpret_cast<const float*>(digits + size_t(DIGITS) * part.num_cols)),
          sums(scales + round_up(size_t(part.num_cols / kBlock), 16)) {}

    static size_t num_bytes(const Part& part) {
        return size_t(DIGITS) * part.num_cols +
               4 * (round_up(size_t(part.num_cols / kBlock), 16) + padded_groups(part));
    }
};

template <int DIGITS>
void prepare_rounded(const Part& part, const float* x, void* prepared) {
    const RoundedInputs<DIGITS> inputs(part, prepared);
    int8_t* digits = const_cast<int8_t*>(inputs.digits);
    float *scales = const_cast<float*>(inputs.scales), *sums = const_cast<float*>(inputs.sums);
    __builtin_memset(sums, 0, 4 * padded_groups(part));
    for (int32_t block = 0; block < part.num_cols; block += kBlock, digits += DIGITS * kBlock) {
        const Rounding<DIGITS> rounding(largest_bits(x + block));
        *scales++ = rounding.scale;
        for (int32_t c = 0; c < kBlock; c += 16) {
            const __m256i low = rounding.codes_of(_mm256_loadu_ps(x + block + c));
            const __m256i high = rounding.codes_of(_mm256_loadu_ps(x + block + c + 8));
            store_digits<DIGITS>(low, high, digits + c, kBlock);
            const int32_t sum = lanes_sum(_mm256_add_epi32(low, high));
            sums[(block + c) / part.group] += rounding.scale * float(sum);
        }
    }
}

// Codes times inputs, of one half of a block or of both, exactly; each of eight floats sums four columns of each half.
// Sums of int16 are at most 4 * 28 * 128, as of `products`; of int32 8 * 255 * (127 * 256 + 128) < 2^31.
template <int DIGITS, int WIDTH, int HALVES>
inline __m256 rounded_products(const __m256i* codes, const int8_t* digits) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    for (int k = 0; k < DIGITS; ++k) {
        const __m256i weight = k + 1 < DIGITS ? _mm256_set1_epi16(256) : ones;
        if constexpr (WIDTH != 8) {
            const __m256i pairs = add_products(codes, HALVES, digits + k * kBlock);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, weight));
        } else {
            // Products of whole bytes would saturate int16.
            const __m256i nibble = _mm256_set1_epi8(15);
            __m256i low[HALVES], high[HALVES];
            for (int v = 0; v < HALVES; ++v) {
                low[v] = _mm256_and_si256(codes[v], nibble);
                high[v] = _mm256_and_si256(_mm256_srli_epi16(codes[v], 4), nibble);
            }
            const __m256i low_pairs = add_products(low, HALVES, digits + k * kBlock);
            const __m256i high_pairs = add_products(high, HALVES, digits + k * kBlock);
            const __m256i both = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(high_pairs, ones), 4),
                                                  _mm256_madd_epi16(low_pairs, ones));
            sum = _mm256_add_epi32(sum, k + 1 < DIGITS ? _mm256_slli_epi32(both, 8) : both);
        }
    }
    return _mm256_cvtepi32_ps(sum);
}

template <int DIGITS, int WIDTH, int UNIT>
float dot_rounded(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float* work) {
    const RoundedInputs<DIGITS> inputs(part, prepared);
    const __m256 zeros = zeros_share(part, row, inputs.sums, work);
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    const int8_t* digits = inputs.digits;
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t b = 0; b < num_blocks; ++b, digits += DIGITS * kBlock) {
        prefetch.line();
        const Codes codes = load_codes<WIDTH>(row + b * 8 * bits_of(WIDTH));
        if constexpr (UNIT == kBlock) {
            const __m256 scale = _mm256_set1_ps(work[b >> shift] * inputs.scales[b]);
            sums[0] = _mm256_fmadd_ps(rounded_products<DIGITS, WIDTH, 2>(codes.half, digits), scale, sums[0]);
        } else {
            const __m256 own = _mm256_set1_ps(inputs.scales[b]);
            for (int v = 0; v < 2; ++v) {
                const __m256 half = rounded_products<DIGITS, WIDTH, 1>(codes.half + v, digits + 32 * v);
                const __m256 scale = _mm256_mul_ps(half_scales<UNIT>(work, b, v), own);
                sums[v] = _mm256_fmadd_ps(half, scale, sums[v]);
            }
        }
    }
    const __m256 sum = _mm256_add_ps(sums[0], sums[1]);
    return lanes_total(_mm256_fmsub_ps(sum, _mm256_set1_ps(code_unit(WIDTH)), zeros));
}

// Whether this part's products are taken with rounded inputs, unless kernels are asked for exact ones.
inline bool has_rounded(const Part& part) { return part.codec == Codec::affine; }

template <int DIGITS, int WIDTH>
DotRow rounded_dot_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return dot_rounded<DIGITS, WIDTH, 16>;
        case 32: return dot_rounded<DIGITS, WIDTH, 32>;
        default: return dot_rounded<DIGITS, WIDTH, kBlock>;
    }
}

template <int DIGITS>
DotRow rounded_dot(const Part& part) {
    switch (part.width) {
        case 1: return rounded_dot_of<DIGITS, 1>(part);
        case 2: return rounded_dot_of<DIGITS, 2>(part);
        case 3: return rounded_dot_of<DIGITS, 3>(part);
        case 4: return rounded_dot_of<DIGITS, 4>(part);
        default: return rounded_dot_of<DIGITS, 8>(part);
    }
}

template <int DIGITS>
void dot_rounded_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                      const Ahead& ahead, float* work, float* out) {
    const DotRow dot = rounded_dot<DIGITS>(part);
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        out[r] = dot(part, rows[r], prepared, prefetch, work) + row_bias(part, rows[r]);
        prefetch.rest();
    }
}

}  // namespace
}  // namespace moe_pack
