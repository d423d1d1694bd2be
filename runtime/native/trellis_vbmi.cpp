// Trellis rows on x86-64 machines with AVX-512 and VBMI: as trellis_avx512.cpp has them, but for how windows are cut
// out of the stream and looked up. Inputs and sums have the same form.
#if defined(__x86_64__)

// What is shared with other targets comes first: compiled for this one, the linker might hand it to them.
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2"))),    \
    apply_to = function)
#else
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2,prefer-vector-width=512")
// GCC 12 takes the registers that its own headers leave undefined on purpose for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#define MOE_PACK_VECTOR_FLOATS 16
#define MOE_PACK_VBMI

#include "affine_avx512.h"
#include "trellis_avx512.h"
#include "trellis_kernels.h"

#include "rows_avx512.h"

namespace moe_pack {

const TrellisKernels vbmi_trellis_kernels = {
    prepared_digit_bytes, prepare_digits, dot_rows, add_rows, decode_row,
};

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
