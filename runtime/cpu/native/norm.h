// Root-mean-square norms of float rows. All sizes have been checked.
#pragma once

#include <cstdint>

#include "experts.h"

namespace moe_pack {

// out = weight * x / rms(x), of one row of n values; `out` may be `x`.
void rms_norm_row(const Kernels& kernels, const float* x, const float* weight, int32_t n, float eps, float* out);

// The same of rows [num_rows, n].
Outcome rms_norm(Pool& pool, const float* x, const float* weight, int32_t num_rows, int32_t n, float eps, float* out);

}  // namespace moe_pack
