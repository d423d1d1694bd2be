// Rows of affine codes times one token whose inputs are rounded to 8 bits, with AVX2.
//
// For kernels_avx2.cpp alone. As dot_affine of affine_avx2.h, with one digit, and a scale for each block of inputs.
#pragma once

#include "affine_avx2.h"
#include "rounding_avx2.h"

namespace moe_pack {
namespace {

// Prepared inputs: codes by block; the scale of each block; and for each group the sum of its blocks' scales times sums
// of codes, zeros after the last.
struct RoundedInputs {
    const int8_t* digits;
    const float *scales, *sums;

    RoundedInputs(const Part& part, const void* prepared)
        : digits(static_cast<const int8_t*>(prepared)),
          scales(reinterpret_cast<const float*>(digits + size_t(part.num_cols))),
          sums(scales + round_up(size_t(part.num_cols / kBlock), 16)) {}

    static size_t num_bytes(const Part& part) {
        return size_t(part.num_cols) +
               4 * (round_up(size_t(part.num_cols / kBlock), 16) + padded_groups(part));
    }
};

void prepare_rounded(const Part& part, const float* x, void* prepared) {
    const RoundedInputs inputs(part, prepared);
    int8_t* digits = const_cast<int8_t*>(inputs.digits);
    float *scales = const_cast<float*>(inputs.scales), *sums = const_cast<float*>(inputs.sums);
    __builtin_memset(sums, 0, 4 * padded_groups(part));
    for (int32_t block = 0; block < part.num_cols; block += kBlock, digits += kBlock) {
        const Rounding<1> rounding(largest_bits(x + block));
        *scales++ = rounding.scale;
        for (int32_t c = 0; c < kBlock; c += 16) {
            const __m256i low = codes_of(_mm256_loadu_ps(x + block + c), rounding.inverse);
            const __m256i high = codes_of(_mm256_loadu_ps(x + block + c + 8), rounding.inverse);
            store_digits<1>(low, high, digits + c, kBlock);
            const int32_t sum = lanes_sum(_mm256_add_epi32(low, high));
            sums[(block + c) / part.group] += rounding.scale * float(sum);
        }
    }
}

// Codes times inputs, of one half of a block or of both, exactly; each of eight floats sums four columns of each half.
// Sums of int16 are at most 4 * 28 * 128, as of `products`; of int32 8 * 255 * 127.
template <int WIDTH, int HALVES>
inline __m256 rounded_products(const __m256i* codes, const int8_t* digits) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (WIDTH != 8) {
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(add_products(codes, HALVES, digits), ones));
    } else {
        // Products of whole bytes would saturate int16.
        const __m256i nibble = _mm256_set1_epi8(15), sixteens = _mm256_set1_epi16(16);
        __m256i low[HALVES], high[HALVES];
        for (int v = 0; v < HALVES; ++v) {
            low[v] = _mm256_and_si256(codes[v], nibble);
            high[v] = _mm256_and_si256(_mm256_srli_epi16(codes[v], 4), nibble);
        }
        const __m256i low_pairs = add_products(low, HALVES, digits), high_pairs = add_products(high, HALVES, digits);
        return _mm256_cvtepi32_ps(
            _mm256_add_epi32(_mm256_madd_epi16(high_pairs, sixteens), _mm256_madd_epi16(low_pairs, ones)));
    }
}

template <int WIDTH, int UNIT>
float dot_rounded(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float* work) {
    const RoundedInputs inputs(part, prepared);
    const __m256 zeros = zeros_share(part, row, inputs.sums, work);
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    const int8_t* digits = inputs.digits;
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t b = 0; b < num_blocks; ++b, digits += kBlock) {
        prefetch.line();
        const Codes codes = load_codes<WIDTH>(row + b * 8 * bits_of(WIDTH));
        if constexpr (UNIT == kBlock) {
            const __m256 scale = _mm256_set1_ps(work[b >> shift] * inputs.scales[b]);
            sums[0] = _mm256_fmadd_ps(rounded_products<WIDTH, 2>(codes.half, digits), scale, sums[0]);
        } else {
            const __m256 own = _mm256_set1_ps(inputs.scales[b]);
            for (int v = 0; v < 2; ++v) {
                const __m256 half = rounded_products<WIDTH, 1>(codes.half + v, digits + 32 * v);
                const __m256 scale = _mm256_mul_ps(half_scales<UNIT>(work, b, v), own);
                sums[v] = _mm256_fmadd_ps(half, scale, sums[v]);
            }
        }
    }
    const __m256 sum = _mm256_add_ps(sums[0], sums[1]);
    return lanes_total(_mm256_fmsub_ps(sum, _mm256_set1_ps(code_unit(WIDTH)), zeros));
}

void dot_rounded_rows(DotRow dot, const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                      const Ahead& ahead, float* work, float* out) {
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        out[r] = dot(part, rows[r], prepared, prefetch, work) + row_bias(part, rows[r]);
        prefetch.rest();
    }
}

}  // namespace
}  // namespace moe_pack
