// Kernels for x86-64 machines with AVX2, FMA and F16C: codes are multiplied as integers, 32 bytes at a time.
//
// Inputs become 24-bit fixed point, three signed bytes (digits) each, whose products with codes are exact. Sums over
// rows are taken in an order of columns that costs no shuffles; `finish_sum` undoes it.
#if defined(__x86_64__)

#include "kernels.h"
#include "panels.h"
#include "rounded.h"

#include "target_avx2.h"

#include "affine_avx2.h"
#include "codes_avx2.h"
#include "floats_avx2.h"
#include "cached_decode.h"
#include "recurrence_vector.h"

namespace moe_pack {
namespace {

size_t prepared_bytes(const Part& part) {
    if (!is_affine(part)) {
        return 4 * round_up(size_t(part.num_cols), 16);
    }
    return round_up(kHeaderBytes + size_t(kDigits) * part.num_cols + 4 * sums_of_inputs(part), 64);
}

void prepare(const Part& part, const float* x, void* prepared) {
    if (is_affine(part)) {
        prepare_digits(part, x, prepared);
    } else {
        prepare_floats(part, x, share_of_inputs(part.codec), static_cast<float*>(prepared));
    }
}

size_t work_floats(const Part& part) {
    return has_digits(part) ? kBatch * padded_groups(part) + kReadPastFloats : kReadPastFloats;
}

size_t sum_floats(const Part& part) {
    const size_t zeros = has_digits(part) ? padded_groups(part) : 0;
    return round_up(size_t(part.num_cols), 16) + zeros;
}

void finish_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    if (has_digits(part)) {
        const int width = part.codec == Codec::mxfp4 ? kE2m1 : part.codec == Codec::trellis ? 8 : part.width;
        for (int32_t c = start; c < stop; c += 32) {
            finish_half(part, width, sum, c, weight, out);
        }
        return;
    }
    const float share = part.codec == Codec::fp8 ? weight * kE4m3Unit : weight;
    for (int32_t c = start; c < stop; ++c) {
        out[c] += share * sum[c];
    }
}

}  // namespace
}  // namespace moe_pack

#include "row_kernels.h"
#include "rows_avx2.h"

namespace moe_pack {

const Kernels avx2_kernels = {
    "avx2", prepared_bytes, prepare, dot_rows, work_floats, sum_floats, add_rows, finish_sum, decode_row, dots, add,
    exponentials, decode_cached, rotate, recur, convolve, &avx2_rounded_kernels, &avx2_panel_kernels,
};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
