// Rows of affine codes times one token whose inputs are rounded to 8 bits, with AVX-512.
//
// For kernels_avx512.cpp alone. As dot_row of affine_avx512.h, with one digit, and a scale for each block of inputs:
// it multiplies the block's scale of weights, so it costs nothing.
#pragma once

#include "affine_avx512.h"
#include "rounding_avx512.h"

namespace moe_pack {
namespace {

// Prepared inputs: digits by chunk and plane; then the scale of each unit's block, and its scale times the sum of its
// codes, zeros after the last.
struct RoundedInputs {
    const uint8_t* digits;
    const float *scales, *sums;

    RoundedInputs(const Part& part, const void* prepared)
        : digits(static_cast<const uint8_t*>(prepared)),
          scales(reinterpret_cast<const float*>(digits + digit_bytes(part))),
          sums(scales + padded_units(part)) {}

    static size_t digit_bytes(const Part& part) { return size_t(num_chunks(part)) * planes_of(part) * kBlock; }

    static size_t num_bytes(const Part& part) { return digit_bytes(part) + 8 * padded_units(part); }
};

// Codes of 16 columns go where their plane's are, or two planes', where runs are of 8.
inline void store_plane_codes(__m512i codes, int32_t col, int32_t run, uint8_t* block_digits) {
    const __m128i bytes = _mm512_cvtepi32_epi8(codes);
    uint8_t* to = block_digits + col / run * kBlock + col % run;
    if (run >= 16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + kBlock), _mm_srli_si128(bytes, 8));
    }
}

void prepare_rounded(const Part& part, const float* x, void* prepared) {
    const RoundedInputs inputs(part, prepared);
    uint8_t* digits = const_cast<uint8_t*>(inputs.digits);
    float *scales = const_cast<float*>(inputs.scales), *sums = const_cast<float*>(inputs.sums);
    const int32_t planes = planes_of(part), run = kBlock / planes, unit = unit_of(part);
    if (part.num_cols % (kBlock * planes) != 0) {
        __builtin_memset(digits, 0, RoundedInputs::digit_bytes(part));
    }
    __builtin_memset(scales, 0, 8 * padded_units(part));
    for (int32_t block = 0; block * kBlock < part.num_cols; ++block) {
        uint8_t* to = digits + block / planes * planes * kBlock + block % planes * run;
        __m512 values[4];
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            values[q.value] = _mm512_loadu_ps(x + block * kBlock + 16 * q.value);
        });
        const Rounding<1> rounding(largest_bits(values));
        __m512i sum = _mm512_setzero_si512();
        for (int32_t q = 0; q < 4; ++q) {
            const __m512i codes = codes_of(values[q], rounding.inverse);
            store_plane_codes(codes, 16 * q, run, to);
            sum = _mm512_add_epi32(sum, codes);
            if (16 * (q + 1) % unit == 0) {
                *scales++ = rounding.scale;
                *sums++ = rounding.scale * float(_mm512_reduce_add_epi32(sum));
                sum = _mm512_setzero_si512();
            }
        }
    }
}

// A lane adds up four columns of each of COUNT planes, exactly: at most 4 * 255 * 127.
template <int WIDTH, int FIRST, int COUNT>
MOE_PACK_INLINE inline __m512 rounded_products(const Codes<WIDTH>& codes, const uint8_t* digits) {
    __m512i sum = _mm512_setzero_si512();
    unrolled<COUNT>([&](auto i) MOE_PACK_INLINE {
        const __m512i plane = codes.template plane<FIRST + decltype(i)::value>();
        sum = _mm512_dpbusd_epi32(sum, plane, _mm512_loadu_si512(digits + (FIRST + i.value) * kBlock));
    });
    return _mm512_cvtepi32_ps(sum);
}

template <int WIDTH, int UNIT>
float dot_rounded_row(const Part& part, const uint8_t* row, const RoundedInputs& inputs, Prefetch prefetch) {
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
        // As in dot_row, processors fetch ahead what they see one instruction load in order. A number of steps that the
        // compiler does not know keeps it from writing them out.
        int32_t steps = U::span_chunks;
        asm("" : "+r"(steps));
        for (int32_t c = 0; c < steps && chunks.more(); ++c) {
            prefetch.line();
            const Codes<WIDTH> codes = chunks.next();
            unrolled<U::sets>([&](auto set) MOE_PACK_INLINE {
                constexpr int SET = decltype(set)::value, FIRST = SET * U::planes_each;
                const __m512 scale = U::spread(scales, U::template index<SET>(c));
                const __m512 products = rounded_products<WIDTH, FIRST, U::planes_each>(codes, digits);
                sum = _mm512_fmadd_ps(products, scale, sum);
            });
            digits += C::planes * kBlock;
        }
    }
    prefetch.rest();
    return _mm512_reduce_add_ps(_mm512_sub_ps(sum, zeros));
}

template <int WIDTH, int UNIT>
void dot_rounded(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                 const Ahead& ahead, float* out) {
    const RoundedInputs inputs(part, prepared);
    for (int32_t r = 0; r < num_rows; ++r) {
        out[r] = dot_rounded_row<WIDTH, UNIT>(part, rows[r], inputs, Prefetch(ahead, r)) + row_bias(part, rows[r]);
    }
}

void dot_rounded_rows(DotRow dot, const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                      const Ahead& ahead, float*, float* out) {
    dot(part, rows, num_rows, prepared, ahead, out);
}

}  // namespace
}  // namespace moe_pack
