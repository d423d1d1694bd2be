// Rows of a part, where `row_kernels` says by which functions: included behind row_kernels.h or trellis_kernels.h.
#pragma once

#include "codes_avx2.h"

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
}  // namespace moe_pack
