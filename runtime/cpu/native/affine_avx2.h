// Rows of integer codes (affine, and mxfp4) with AVX2: inputs as digits, products, sums of rows.
//
// For kernels_avx2.cpp alone, as codes_avx2.h is. Inputs become 24-bit fixed point, three signed bytes (digits) each,
// whose products with codes are exact. Sums over rows are taken in an order of columns that costs no shuffles;
// `finish_half` undoes it.
#pragma once

#include <immintrin.h>

#include "codes_avx2.h"
#include "digits.h"

namespace moe_pack {
namespace {

// Groups are numbered `block >> block_shift` where they are no smaller than a block.
int32_t block_shift(const Part& part) { return part.num_groups == 1 ? 31 : part.group == 2 * kBlock ? 1 : 0; }

// -- Inputs ----------------------------------------------------------------------------------------------------------

// Prepared affine inputs: header, digits by block, then their sum in each group as floats, zeros after the last.
// For E2M1, instead of these sums: of every four columns, times the zero of codes, so that weights of zero give zero.
struct Inputs {
    const int8_t* digits;
    const float* sums;
    const int32_t* fours;
    float peak;

    Inputs(const Part& part, const void* prepared)
        : digits(static_cast<const int8_t*>(prepared) + kHeaderBytes),
          sums(reinterpret_cast<const float*>(digits + kDigits * part.num_cols)),
          fours(reinterpret_cast<const int32_t*>(sums)),
          peak(*static_cast<const float*>(prepared)) {}
};

size_t sums_of_inputs(const Part& part) {
    return part.codec == Codec::mxfp4 ? size_t(part.num_cols) / 4 : padded_groups(part);
}

// One digit of 32 fixed-point inputs: bits `shift` to `shift + 7` of each, as signed bytes.
inline __m256i digit_of(const __m256i fixed[4], int shift) {
    const __m256i low = _mm256_set1_epi32(0xff);
    __m256i bytes[4];
    for (int i = 0; i < 4; ++i) {
        bytes[i] = _mm256_and_si256(_mm256_srli_epi32(fixed[i], shift), low);
    }
    const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(bytes[0], bytes[1]),
                                               _mm256_packus_epi32(bytes[2], bytes[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return _mm256_xor_si256(ordered, _mm256_set1_epi8(-128));
}

// The digits of a block of inputs; their fixed-point values go to `fixed_inputs`.
inline void split_block(const float* x, float lift, float steps, int32_t* fixed_inputs, int8_t* digits) {
    // Adding 128 to each digit makes all of them positive: they are then the bytes of the sum.
    const __m256i bias = _mm256_set1_epi32(0x808080);
    for (int half = 0; half < 2; ++half) {
        __m256i fixed[4];
        for (int i = 0; i < 4; ++i) {
            const int32_t c = 32 * half + 8 * i;
            const __m256 lifted = _mm256_mul_ps(_mm256_loadu_ps(x + c), _mm256_set1_ps(lift));
            fixed[i] = _mm256_cvtps_epi32(_mm256_mul_ps(lifted, _mm256_set1_ps(steps)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(fixed_inputs + c), fixed[i]);
            fixed[i] = _mm256_add_epi32(fixed[i], bias);
        }
        for (int k = 0; k < kDigits; ++k) {
            int8_t* to = digits + k * kBlock + 32 * half;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), digit_of(fixed, 8 * k));
        }
    }
}

void prepare_digits(const Part& part, const float* x, void* prepared) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    float* header = static_cast<float*>(prepared);
    header[0] = finite ? peak : __builtin_nanf("");
    int8_t* digits = static_cast<int8_t*>(prepared) + kHeaderBytes;
    float* sums = reinterpret_cast<float*>(digits + kDigits * part.num_cols);
    const size_t num_sums = sums_of_inputs(part);
    if (!finite || peak == 0.0f) {
        __builtin_memset(digits, 0, size_t(kDigits) * part.num_cols + 4 * num_sums);
        return;
    }
    // The inverse of the smallest floats would be infinite.
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;
    const float steps = kPeak / (peak * lift);
    const int32_t unit = unit_of(part);
    int64_t sum = 0;
    for (int32_t block = 0; block < part.num_cols; block += kBlock) {
        int32_t fixed[kBlock];
        split_block(x + block, lift, steps, fixed, digits + block * kDigits);
        if (part.codec == Codec::mxfp4) {
            int32_t* fours = reinterpret_cast<int32_t*>(sums) + block / 4;
            for (int32_t c = 0; c < kBlock; c += 4) {
                fours[c / 4] = kE2m1Zero * (fixed[c] + fixed[c + 1] + fixed[c + 2] + fixed[c + 3]);
            }
            continue;
        }
        for (int32_t first = 0; first < kBlock; first += unit) {
            int32_t unit_sum = 0;
            for (int32_t c = first; c < first + unit; ++c) {
                unit_sum += fixed[c];
            }
            sum += unit_sum;
            const int32_t stop = block + first + unit;
            if (stop % part.group == 0) {
                sums[stop / part.group - 1] = float(sum);
                sum = 0;
            }
        }
    }
    for (size_t g = size_t(part.num_groups); part.codec == Codec::affine && g < num_sums; ++g) {
        sums[g] = 0.0f;
    }
}

// -- Rows times inputs -----------------------------------------------------------------------------------------------

inline __m256i add_products(const __m256i* codes, int num_codes, const int8_t* digits) {
    __m256i pairs = _mm256_maddubs_epi16(codes[0], load_bytes(digits));
    if (num_codes == 2) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[1], load_bytes(digits + 32)));
    }
    return pairs;
}

// Codes times inputs, of one half of a block or of both; each of eight floats sums four columns of each half.
// Sums of int16 are at most 4 * 28 * 128, of int32 8 * 28 * kPeak < 2^31 up to 4 bits. (Of a trellis: trellis_avx2.h.)
// `fours`: what E2M1's or a trellis's zero gives too much.
template <int WIDTH, int HALVES>
inline __m256 products(const __m256i* codes, const int8_t* digits, const int32_t* fours = nullptr) {
    const __m256i ones = _mm256_set1_epi16(1), to_middle = _mm256_set1_epi16(256);
    __m256i pairs[kDigits];
    if constexpr (WIDTH != 8) {
        for (int k = 0; k < kDigits; ++k) {
            pairs[k] = add_products(codes, HALVES, digits + k * kBlock);
        }
        const __m256i fine = _mm256_add_epi32(_mm256_madd_epi16(pairs[1], to_middle),
                                              _mm256_madd_epi16(pairs[0], ones));
        const __m256i coarse = _mm256_slli_epi32(_mm256_madd_epi16(pairs[2], to_middle), 8);
        __m256i sum = _mm256_add_epi32(coarse, fine);
        if constexpr (WIDTH == kE2m1 || is_trellis(WIDTH)) {
            sum = _mm256_sub_epi32(sum, load_bytes(fours));
        }
        return _mm256_cvtepi32_ps(sum);
    } else {
        // Products of whole bytes would saturate int16.
        const __m256i nibble = _mm256_set1_epi8(15), sixteens = _mm256_set1_epi16(16);
        __m256i low[HALVES], high[HALVES], sums[kDigits];
        for (int v = 0; v < HALVES; ++v) {
            low[v] = _mm256_and_si256(codes[v], nibble);
            high[v] = _mm256_and_si256(_mm256_srli_epi16(codes[v], 4), nibble);
        }
        for (int k = 0; k < kDigits; ++k) {
            const __m256i low_pairs = add_products(low, HALVES, digits + k * kBlock);
            const __m256i high_pairs = add_products(high, HALVES, digits + k * kBlock);
            sums[k] = _mm256_add_epi32(_mm256_madd_epi16(high_pairs, sixteens), _mm256_madd_epi16(low_pairs, ones));
        }
        const __m256i fine = _mm256_add_epi32(_mm256_slli_epi32(sums[1], 8), sums[0]);
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[2]), _mm256_set1_ps(65536.0f), _mm256_cvtepi32_ps(fine));
    }
}

// What multiplies half a block: its scale, or with groups of 16 that of either 128-bit lane.
template <int UNIT>
inline __m256 half_scales(const float* scales, int32_t block_idx, int half) {
    if constexpr (UNIT == 32) {
        return _mm256_set1_ps(scales[2 * block_idx + half]);
    } else {
        const __m128 four = _mm_loadu_ps(scales + 4 * block_idx);
        const __m256i lanes = half == 0 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)
                                        : _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3);
        return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(four), lanes);
    }
}

// The row's scales go to `scales`; returns scale * zero * (sum of inputs) over its groups, in eight parts.
inline __m256 zeros_share(const Part& part, const uint8_t* row, const float* input_sums, float* scales) {
    const uint8_t* stored_scales = row + part.scales_at;
    __m256 share = _mm256_setzero_ps();
    for (int32_t g = 0; g < part.num_groups; g += 8) {
        const __m256 scale = load_eight(part, stored_scales, g, false);
        const __m256 zero = load_eight(part, stored_scales + part.scale_bytes, g, true);
        _mm256_store_ps(scales + g, scale);
        share = _mm256_fmadd_ps(_mm256_mul_ps(scale, zero), _mm256_load_ps(input_sums + g), share);
    }
    return share;
}

template <int WIDTH, int UNIT>
float dot_affine(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float* work) {
    const Inputs inputs(part, prepared);
    __m256 zeros = _mm256_setzero_ps();
    uint8_t top = 0;  // of mxfp4: the exponent that scales are relative to
    if constexpr (WIDTH == kE2m1) {
        const uint8_t* scales = row + part.scales_at;
        top = largest_byte(scales, part.num_groups);
        for (int32_t g = 0; g < part.num_groups; g += 8) {
            _mm256_store_ps(work + g, load_shares(part, scales, g, top));
        }
    } else {
        zeros = zeros_share(part, row, inputs.sums, work);
    }
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t b = 0; b < num_blocks; ++b) {
        prefetch.line();
        const Codes codes = load_codes<WIDTH>(row + b * 8 * bits_of(WIDTH));
        const int8_t* digits = inputs.digits + b * kDigitBytes;
        if constexpr (UNIT == kBlock) {
            const __m256 scale = _mm256_set1_ps(work[b >> shift]);
            sums[0] = _mm256_fmadd_ps(products<WIDTH, 2>(codes.half, digits), scale, sums[0]);
        } else {
            for (int v = 0; v < 2; ++v) {
                const int32_t* fours = inputs.fours + 16 * b + 8 * v;
                const __m256 half = products<WIDTH, 1>(codes.half + v, digits + 32 * v, fours);
                sums[v] = _mm256_fmadd_ps(half, half_scales<UNIT>(work, b, v), sums[v]);
            }
        }
    }
    const __m256 sum = _mm256_add_ps(sums[0], sums[1]);
    const __m256 total = _mm256_fmsub_ps(sum, _mm256_set1_ps(code_unit(WIDTH)), zeros);
    if constexpr (WIDTH == kE2m1) {
        return times_power(double(lanes_total(total)) * (1.0 / kPeak) * inputs.peak, top);
    }
    return lanes_total(total) * (1.0f / kPeak) * inputs.peak;
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// A sum of affine rows: for each block eight registers of sums of codes, then scale * zero summed for each group.
// Register 4 v + b holds, in lane i, column 32 v + 4 i + b times 2^sum_exponent: byte b of a double word of codes
// becomes a float where it stands, without a shift.
constexpr int32_t kSumRegisters = 8;

constexpr bool is_shifted(int width, int half, int byte) { return byte == 3 && !(width == 4 && half == 0); }

constexpr int sum_exponent(int width, int half, int byte) {
    const int place = is_shifted(width, half, byte) ? 0 : 8 * byte + (width == 4 ? 4 * half : 0);
    return place + (width == 3 ? 2 : width == kE2m1 ? 1 : 0);
}

// Eight codes of a double word each, times 2^sum_exponent. Only a top byte would be negative, so it is shifted down.
template <int WIDTH>
inline __m256 spread_codes(__m256i codes, int half, int byte) {
    if (is_shifted(WIDTH, half, byte)) {
        return _mm256_cvtepi32_ps(_mm256_srli_epi32(codes, WIDTH == 4 ? 28 : 24));
    }
    const int mask = WIDTH == 4 ? 15 << (8 * byte + 4 * half) : 255 << (8 * byte);
    return _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(mask)));
}

// scales[g] = h * scale, and zeros += h * scale * zero.
template <int WIDTH>
inline void add_zeros(const Part& part, const uint8_t* row, float h, float* scales, float* zeros) {
    const uint8_t* stored_scales = row + part.scales_at;
    for (int32_t g = 0; g < part.num_groups; g += 8) {
        __m256 scale, zero;
        if constexpr (WIDTH == kE2m1) {
            scale = load_powers(part, stored_scales, g);
            zero = _mm256_set1_ps(float(kE2m1Zero) * kE2m1Unit);
        } else {
            scale = load_eight(part, stored_scales, g, false);
            zero = load_eight(part, stored_scales + part.scale_bytes, g, true);
        }
        scale = _mm256_mul_ps(scale, _mm256_set1_ps(h));
        _mm256_store_ps(scales + g, scale);
        _mm256_store_ps(zeros + g, _mm256_fmadd_ps(scale, zero, _mm256_load_ps(zeros + g)));
    }
}

template <int WIDTH, int UNIT>
void add_affine(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, Prefetch* prefetches,
                float* work, float* sum) {
    const size_t stride = padded_groups(part);
    for (int32_t r = 0; r < num_rows; ++r) {
        add_zeros<WIDTH>(part, rows[r], h[r], work + r * stride, sum + part.num_cols);
    }
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    for (int32_t b = 0; b < num_blocks; ++b) {
        float* sum_block = sum + b * kBlock;
        __m256 sums[kSumRegisters];
        for (int i = 0; i < kSumRegisters; ++i) {
            sums[i] = _mm256_load_ps(sum_block + 8 * i);
        }
        for (int32_t r = 0; r < num_rows; ++r) {
            prefetches[r].line();
            const uint8_t* block = rows[r] + b * 8 * bits_of(WIDTH);
            const float* scales = work + r * stride;
            Codes codes;
            if constexpr (WIDTH == 4) {
                codes.half[0] = codes.half[1] = load_bytes(block);
            } else {
                codes = load_codes<WIDTH>(block);
            }
            for (int v = 0; v < 2; ++v) {
                __m256 scale;
                if constexpr (UNIT == kBlock) {
                    scale = _mm256_set1_ps(scales[b >> shift]);
                } else {
                    scale = half_scales<UNIT>(scales, b, v);
                }
                for (int byte = 0; byte < 4; ++byte) {
                    __m256& register_sum = sums[4 * v + byte];
                    register_sum = _mm256_fmadd_ps(spread_codes<WIDTH>(codes.half[v], v, byte), scale, register_sum);
                }
            }
        }
        for (int i = 0; i < kSumRegisters; ++i) {
            _mm256_store_ps(sum_block + 8 * i, sums[i]);
        }
    }
}

// Four registers of sums, column 4 i + b in lane i of register b, to natural order.
inline void transpose(__m256 sums[4]) {
    const __m256 low_01 = _mm256_unpacklo_ps(sums[0], sums[1]), low_23 = _mm256_unpacklo_ps(sums[2], sums[3]);
    const __m256 high_01 = _mm256_unpackhi_ps(sums[0], sums[1]), high_23 = _mm256_unpackhi_ps(sums[2], sums[3]);
    const __m256 columns_0 = _mm256_shuffle_ps(low_01, low_23, _MM_SHUFFLE(1, 0, 1, 0));    // 0 to 3, 16 to 19
    const __m256 columns_4 = _mm256_shuffle_ps(low_01, low_23, _MM_SHUFFLE(3, 2, 3, 2));    // 4 to 7, 20 to 23
    const __m256 columns_8 = _mm256_shuffle_ps(high_01, high_23, _MM_SHUFFLE(1, 0, 1, 0));  // 8 to 11, 24 to 27
    const __m256 columns_12 = _mm256_shuffle_ps(high_01, high_23, _MM_SHUFFLE(3, 2, 3, 2));
    sums[0] = _mm256_permute2f128_ps(columns_0, columns_4, 0x20);
    sums[1] = _mm256_permute2f128_ps(columns_8, columns_12, 0x20);
    sums[2] = _mm256_permute2f128_ps(columns_0, columns_4, 0x31);
    sums[3] = _mm256_permute2f128_ps(columns_8, columns_12, 0x31);
}

// 32 columns from `c` on, of codes of a width or of E2M1.
inline void finish_half(const Part& part, int width, const float* sum, int32_t c, float weight, float* out) {
    const int half = c % kBlock / 32;
    __m256 sums[4];
    for (int byte = 0; byte < 4; ++byte) {
        const uint32_t exponent = uint32_t(sum_exponent(width, half, byte));
        const __m256 factor = _mm256_set1_ps(as_float((127 - exponent) << 23));
        sums[byte] = _mm256_mul_ps(_mm256_load_ps(sum + c + 8 * byte), factor);
    }
    transpose(sums);
    for (int v = 0; v < 4; ++v) {
        const __m256 zeros = _mm256_set1_ps(sum[part.num_cols + (c + 8 * v) / part.group]);
        const __m256 total = _mm256_sub_ps(sums[v], zeros);
        const __m256 old = _mm256_loadu_ps(out + c + 8 * v);
        _mm256_storeu_ps(out + c + 8 * v, _mm256_fmadd_ps(total, _mm256_set1_ps(weight), old));
    }
}

}  // namespace
}  // namespace moe_pack
