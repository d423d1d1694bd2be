// Kernels for x86-64 machines with AVX-512 (F, BW, DQ, VL, VNNI): codes are multiplied as integers, 64 at a time.
//
// Inputs become 24-bit fixed point, three signed bytes (digits) each, whose products with codes are exact; so do the
// factors of rows that are added.
#if defined(__x86_64__)

// What is shared with other targets comes first: compiled for this one, the linker might hand it to them.
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                         \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2"))),      \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2,prefer-vector-width=512")
// GCC 12 takes the registers that its own headers leave undefined on purpose for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#define MOE_PACK_VECTOR_FLOATS 16

#include "affine_avx512.h"
#include "codes_avx512.h"
#include "floats_avx512.h"
#include "trellis_avx512.h"

namespace moe_pack {
namespace {

size_t prepared_bytes(const Part& part) {
    if (!has_digits(part)) {
        return 4 * round_up(size_t(part.num_cols), 16);
    }
    return kHeaderBytes + Inputs::digit_bytes(part) + 4 * Inputs::num_sums(part);
}

void prepare(const Part& part, const float* x, void* prepared) {
    if (has_digits(part)) {
        prepare_digits(part, x, prepared);
    } else {
        prepare_floats(part, x, part.codec == Codec::e5m2 ? kE5m2Share : 1.0f, static_cast<float*>(prepared));
    }
}

size_t work_floats(const Part& part) {
    return has_digits(part) ? sizeof(Factors) / sizeof(float) : kReadPastFloats;
}

// Columns in their order; with codes, sums of scale * code, and then scale * zero summed for each unit.
size_t sum_floats(const Part& part) {
    const size_t zeros = is_affine(part) ? padded_units(part) : 0;
    return round_up(size_t(part.num_cols), 16) + zeros;
}

void finish_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    const float* zeros = sum + round_up(size_t(part.num_cols), 16);
    const int32_t unit = is_affine(part) ? unit_of(part) : 16;
    const float share = part.codec == Codec::fp8 ? weight * kE4m3Unit : weight;
    for (int32_t c = start; c < stop; c += 16) {
        const __mmask16 mask = first_lanes_mask(stop - c);
        __m512 total = _mm512_maskz_loadu_ps(mask, sum + c);
        if (is_affine(part)) {
            total = _mm512_sub_ps(total, _mm512_set1_ps(zeros[c / unit]));
        }
        const __m512 old = _mm512_maskz_loadu_ps(mask, out + c);
        _mm512_mask_storeu_ps(out + c, mask, _mm512_fmadd_ps(total, _mm512_set1_ps(share), old));
    }
}

// -- Any part --------------------------------------------------------------------------------------------------------

using DotRow = void (*)(const Part&, const uint8_t* const*, int32_t, const void*, const Ahead&, float*);
using AddRow = decltype(Kernels::add_rows);
using DecodeRow = void (*)(const Part&, const uint8_t*, int32_t, int32_t, float*);

}  // namespace
}  // namespace moe_pack

#include "row_kernels.h"

namespace moe_pack {
namespace {

void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared, const Ahead& ahead,
              float*, float* out) {
    row_kernels(part).dot(part, rows, num_rows, prepared, ahead, out);
}

void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
              float* work, float* sum) {
    if (num_rows > 0) {
        row_kernels(part).add(part, rows, num_rows, h, ahead, work, sum);
    }
}

}  // namespace

const Kernels avx512_kernels = {
    "avx512", prepared_bytes, prepare, dot_rows, work_floats, sum_floats, add_rows, finish_sum, decode_row, dots, add,
    exponentials,
};

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
