// Trellis rows on x86-64 machines with AVX2, FMA and F16C.
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

#include "trellis_avx2.h"
#include "trellis_kernels.h"

#include "rows_avx2.h"

namespace moe_pack {

const TrellisKernels avx2_trellis_kernels = {
    prepared_trellis_bytes, prepare_trellis, dot_rows, add_rows, decode_row,
};

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
