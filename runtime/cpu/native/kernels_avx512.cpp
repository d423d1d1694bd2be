// Kernels for x86-64 machines with AVX-512 (F, BW, DQ, VL, VNNI): codes are multiplied as integers, 64 at a time.
//
// Inputs become 24-bit fixed point, three signed bytes (digits) each, whose products with codes are exact; so do the
// factors of rows that are added.
#if defined(__x86_64__)

#include "kernels.h"
#include "panels.h"
#include "rounded.h"

#include "target_avx512.h"

#include "affine_avx512.h"
#include "codes_avx512.h"
#include "floats_avx512.h"
#include "recurrence_vector.h"
#include "cached_decode.h"

namespace moe_pack {
namespace {

size_t prepared_bytes(const Part& part) {
    return is_affine(part) ? prepared_digit_bytes(part) : 4 * round_up(size_t(part.num_cols), 16);
}

void prepare(const Part& part, const float* x, void* prepared) {
    if (is_affine(part)) {
        prepare_digits(part, x, prepared);
    } else {
        prepare_floats(part, x, share_of_inputs(part.codec), static_cast<float*>(prepared));
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

}  // namespace
}  // namespace moe_pack

#include "row_kernels.h"
#include "rows_avx512.h"

namespace moe_pack {

const Kernels avx512_kernels = {
    "avx512", prepared_bytes, prepare, dot_rows, work_floats, sum_floats, add_rows, finish_sum, decode_row, dots, add,
    exponentials, decode_cached, rotate, recur, convolve, &avx512_rounded_kernels, &avx512_panel_kernels,
};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
