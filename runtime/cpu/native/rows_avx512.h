// Rows of a part, where `row_kernels` says by which functions: included behind row_kernels.h or trellis_kernels.h.
#pragma once

#include "codes_avx512.h"

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
}  // namespace moe_pack
