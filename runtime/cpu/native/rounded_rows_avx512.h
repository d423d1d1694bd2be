// Rows of affine codes times one token whose inputs are rounded to 16 or 8 bits, with AVX-512.
//
// For kernels_avx512.cpp alone. As dot_row of affine_avx512.h, with fewer digits, and a scale for each block of inputs:
// it multiplies the block's scale of weights, so it costs nothing.
#pragma once

#include "affine_avx512.h"
#include "rounding_avx512.h"

namespace moe_pack {
namespace {

// Prepared inputs: digits by chunk and plane; then the scale of each unit's block, and its scale times the sum of its
// codes, zeros after the last.
template <int DIGITS>
struct RoundedInputs {
    static constexpr int32_t plane_bytes = DIGITS * kBlock;

    const uint8_t* digits;
    const float *scales, *sums;

    RoundedInputs(const Part& part, const void* prepared)
        : digits(static_cast<const uint8_t*>(prepared)),
          scales(reinterpret_cast<const float*>(digits + digit_bytes(part))),
          sums(scales + padded_units(part)) {}

    static size_t digit_bytes(const Part& part) { return size_t(num_chunks(part)) * planes_of(part) * plane_bytes; }

    static size_t num_bytes(const Part& part) { return digit_bytes(part) + 8 * padded_units(part); }
};

// Digits of 16 columns go where their plane's are, or two planes', where runs are of 8.
template <int DIGITS>
inline void store_plane_digits(__m512i codes, int32_t col, int32_t run, uint8_t* block_digits) {
    alignas(16) int8_t digits[DIGITS][16];
    store_digits<DIGITS>(codes, digits[0], 16);
    uint8_t* to = block_digits + col / run * RoundedInputs<DIGITS>::plane_bytes + col % run;
    for (int k = 0; k < DIGITS; ++k, to += kBlock) {
        if (run >= 16) {
            __builtin_memcpy(to, digits[k], 16);
        } else {
            __builtin_memcpy(to, digits[k], 8);
            __builtin_memcpy(to + RoundedInputs<DIGITS>::plane_bytes, digits[k] + 8, 8);
        }
    }
}

template <int DIGITS>
void prepare_rounded(const Part& part, const float* x, void* prepared) {
    const RoundedInputs<DIGITS> inputs(part, prepared);
    uint8_t* digits = const_cast<uint8_t*>(inputs.digits);
    float *scales = const_cast<float*>(inputs.scales), *sums = const_cast<float*>(inputs.sums);
    const int32_t planes = planes_of(part), run = kBlock / planes, unit = unit_of(part);
    if (part.num_cols % (kBlock * planes) != 0) {
        __builtin_memset(digits, 0, RoundedInputs<DIGITS>::digit_bytes(part));
    }
    __builtin_memset(scales, 0, 8 * padded_units(part));
    for (int32_t block = 0; block * kBlock < part.num_cols; ++block) {
        uint8_t* to = digits + block / planes * planes * inputs.plane_bytes + block % planes * run;
        __m512 values[4];
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            values[q.value] = _mm512_loadu_ps(x + block * kBlock + 16 * q.value);
        });
        const Rounding<DIGITS> rounding(largest_bits(values));
        __m512i sum = _mm512_setzero_si512();
        for (int32_t q = 0; q < 4; ++q) {
            const __m512i codes = codes_of(values[q], rounding.inverse);
            store_plane_digits<DIGITS>(codes, 16 * q, run, to);
            sum = _mm512_add_epi32(sum, codes);
            if (16 * (q + 1) % unit == 0) {
                *scales++ = rounding.scale;
                *sums++ = rounding.scale * float(_mm512_reduce_add_epi32(sum));
                sum = _mm512_setzero_si512();
            }
        }
    }
}

// A lane adds up four columns of each of COUNT planes, exactly: at most 8 * 4 * 32512 with 1 bit, 4 * 255 * 32512 with 8,
// which is far below 2^31.
template <int DIGITS, int WIDTH, int FIRST, int COUNT>
MOE_PACK_INLINE inline __m512 rounded_products(const Codes<WIDTH>& codes, const uint8_t* digits) {
    __m512i sums[DIGITS];
    unrolled<DIGITS>([&](auto k) MOE_PACK_INLINE { sums[k.value] = _mm512_setzero_si512(); });
    unrolled<COUNT>([&](auto i) MOE_PACK_INLINE {
        const __m512i plane = codes.template plane<FIRST + decltype(i)::value>();
        unrolled<DIGITS>([&](auto k) MOE_PACK_INLINE {
            const uint8_t* inputs =
                digits + (FIRST + i.value) * RoundedInputs<DIGITS>::plane_bytes + k.value * kBlock;
            sums[k.value] = _mm512_dpbusd_epi32(sums[k.value], plane, _mm512_loadu_si512(inputs));
        });
    });
    const __m512i sum = DIGITS == 1 ? sums[0] : _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[DIGITS - 1]);
    return _mm512_cvtepi32_ps(sum);
}

template <int DIGITS, int WIDTH, int UNIT>
float dot_rounded_row(const Part& part, const uint8_t* row, const RoundedInputs<DIGITS>& inputs, Prefetch prefetch) {
    using C = Chunk<WIDTH>;
    using U = Units<WIDTH, UNIT>;
    const StoredScales stored(part, row);
    const uint8_t* digits = inputs.digits;
    Chunks<WIDTH> chunks(part, row);
    int32_t unit = 0;
    __m512 sum = _mm512_setzero_ps(), zeros = sum;
    while (chunks.more()) {
        __m512 scales[U::registers];
        unrolled<U::registers>([&](auto i) MOE_PACK_INLINE {
            __m512 scale, zero;
            stored.load(unit, &scale, &zero);
            zeros = _mm512_fmadd_ps(_mm512_mul_ps(scale, zero), _mm512_loadu_ps(inputs.sums + unit), zeros);
            scales[i.value] = _mm512_mul_ps(scale, _mm512_loadu_ps(inputs.scales + unit));
            unit += 16;
        });
        for (int32_t c = 0; c < U::span_chunks && chunks.more(); ++c) {
            prefetch.line();
            const Codes<WIDTH> codes = chunks.next();
            unrolled<U::sets>([&](auto set) MOE_PACK_INLINE {
                constexpr int SET = decltype(set)::value, FIRST = SET * U::planes_each;
                const __m512 scale = U::spread(scales, U::template index<SET>(c));
                const __m512 products = rounded_products<DIGITS, WIDTH, FIRST, U::planes_each>(codes, digits);
                sum = _mm512_fmadd_ps(products, scale, sum);
            });
            digits += C::planes * inputs.plane_bytes;
        }
    }
    prefetch.rest();
    return _mm512_reduce_add_ps(_mm512_sub_ps(sum, zeros));
}

template <int DIGITS, int WIDTH, int UNIT>
void dot_rounded(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                 const Ahead& ahead, float* out) {
    const RoundedInputs<DIGITS> inputs(part, prepared);
    for (int32_t r = 0; r < num_rows; ++r) {
        out[r] = dot_rounded_row<DIGITS, WIDTH, UNIT>(part, rows[r], inputs, Prefetch(ahead, r)) + row_bias(part, rows[r]);
    }
}

template <int DIGITS, int WIDTH>
DotRow rounded_dot_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return dot_rounded<DIGITS, WIDTH, 16>;
        case 32: return dot_rounded<DIGITS, WIDTH, 32>;
        default: return dot_rounded<DIGITS, WIDTH, kBlock>;
    }
}

// Whether this part's products are taken with rounded inputs, unless kernels are asked for exact ones.
inline bool has_rounded(const Part& part) { return part.codec == Codec::affine; }

template <int DIGITS>
void dot_rounded_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                      const Ahead& ahead, float* out) {
    switch (part.width) {
        case 1: return rounded_dot_of<DIGITS, 1>(part)(part, rows, num_rows, prepared, ahead, out);
        case 2: return rounded_dot_of<DIGITS, 2>(part)(part, rows, num_rows, prepared, ahead, out);
        case 3: return rounded_dot_of<DIGITS, 3>(part)(part, rows, num_rows, prepared, ahead, out);
        case 4: return rounded_dot_of<DIGITS, 4>(part)(part, rows, num_rows, prepared, ahead, out);
        default: return rounded_dot_of<DIGITS, 8>(part)(part, rows, num_rows, prepared, ahead, out);
    }
}

}  // namespace
}  // namespace moe_pack
