// Kernels for x86-64 machines with AVX2, FMA and F16C: codes are multiplied as integers, 32 bytes at a time.
//
// Inputs become 24-bit fixed point, three signed bytes (digits) each, whose products with codes are exact. Sums over
// rows are taken in an order of columns that costs no shuffles; `finish_sum` undoes it.
#if defined(__x86_64__)

// What is shared with other targets comes first: compiled for this one, the linker might hand it to them.
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif

#include <immintrin.h>

#define MOE_PACK_VECTOR_FLOATS 8

#include "affine_avx2.h"
#include "codes_avx2.h"
#include "floats_avx2.h"
#include "trellis_avx2.h"

namespace moe_pack {
namespace {

constexpr int32_t kBatch = 4;  // rows added while a chunk of the sum is in registers

size_t prepared_bytes(const Part& part) {
    if (part.codec == Codec::trellis) {
        return prepared_trellis_bytes(part);
    }
    if (!is_affine(part)) {
        return 4 * round_up(size_t(part.num_cols), 16);
    }
    return round_up(kHeaderBytes + size_t(kDigits) * part.num_cols + 4 * sums_of_inputs(part), 64);
}

void prepare(const Part& part, const float* x, void* prepared) {
    if (part.codec == Codec::trellis) {
        prepare_trellis(part, x, prepared);
    } else if (is_affine(part)) {
        prepare_digits(part, x, prepared);
    } else {
        prepare_floats(part, x, part.codec == Codec::e5m2 ? kE5m2Share : 1.0f, static_cast<float*>(prepared));
    }
}

size_t work_floats(const Part& part) {
    return has_digits(part) ? kBatch * padded_groups(part) + kReadPastFloats : kReadPastFloats;
}

size_t sum_floats(const Part& part) {
    const size_t zeros = is_affine(part) ? padded_groups(part) : 0;
    return round_up(size_t(part.num_cols), 16) + zeros;
}

void finish_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    if (is_affine(part)) {
        const int width = part.codec == Codec::mxfp4 ? kE2m1 : part.width;
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

// -- Any part --------------------------------------------------------------------------------------------------------

using DotRow = float (*)(const Part&, const uint8_t*, const void*, Prefetch&, float*);
using AddRow = void (*)(const Part&, const uint8_t* const*, int32_t, const float*, Prefetch*, float*, float*);
using DecodeRow = void (*)(const Part&, const uint8_t*, int32_t, int32_t, float*);

}  // namespace
}  // namespace moe_pack

#include "row_kernels.h"

namespace moe_pack {
namespace {

void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared, const Ahead& ahead,
              float* work, float* out) {
    const DotRow dot = row_kernels(part).dot;
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        out[r] = dot(part, rows[r], prepared, prefetch, work) + row_bias(part, rows[r]);
        prefetch.rest();
    }
}

void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
              float* work, float* sum) {
    const AddRow add_batch = row_kernels(part).add;
    for (int32_t first = 0; first < num_rows; first += kBatch) {
        const int32_t batch = num_rows - first < kBatch ? num_rows - first : kBatch;
        Prefetch prefetches[kBatch];
        for (int32_t r = 0; r < batch; ++r) {
            prefetches[r] = Prefetch(ahead, first + r);
        }
        add_batch(part, rows + first, batch, h + first, prefetches, work, sum);
        for (int32_t r = 0; r < batch; ++r) {
            prefetches[r].rest();
        }
    }
}

}  // namespace

const Kernels avx2_kernels = {
    "avx2", prepared_bytes, prepare, dot_rows, work_floats, sum_floats, add_rows, finish_sum, decode_row, dots, add,
    exponentials,
};

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
