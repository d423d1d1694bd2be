// Rotations of float rows (docs/model.md). All sizes have been checked.
#pragma once

#include <cstdint>

#include "experts.h"

namespace moe_pack {

// Of rows [num_rows, d], with the arguments of Kernels::rotate.
struct RotationWork {
    const float *x, *scale, *hartley;
    int32_t num_rows, d, m;
    bool is_scaled_first;
};

Outcome rotate_rows(Pool& pool, const RotationWork& work, float* out);

}  // namespace moe_pack
