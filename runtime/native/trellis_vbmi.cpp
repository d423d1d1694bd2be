// Trellis rows on x86-64 machines with AVX-512 and VBMI: as kernels_avx512.cpp has them, but for how windows are cut
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

namespace moe_pack {
namespace {

using DotRow = void (*)(const Part&, const uint8_t* const*, int32_t, const void*, const Ahead&, float*);
using AddRow = decltype(Kernels::add_rows);
using DecodeRow = void (*)(const Part&, const uint8_t*, int32_t, int32_t, float*);

}  // namespace
}  // namespace moe_pack

#include "trellis_kernels.h"

namespace moe_pack {
namespace {

void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared, const Ahead& ahead,
              float*, float* out) {
    trellis_kernels(part).dot(part, rows, num_rows, prepared, ahead, out);
}

void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
              float* work, float* sum) {
    if (num_rows > 0) {
        trellis_kernels(part).add(part, rows, num_rows, h, ahead, work, sum);
    }
}

void decode_row(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    trellis_kernels(part).decode(part, row, start, stop, out);
}

}  // namespace

const TrellisKernels vbmi_trellis_kernels = {dot_rows, add_rows, decode_row};

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
