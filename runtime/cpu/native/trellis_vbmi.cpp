// Trellis rows on x86-64 machines with AVX-512 and VBMI: as trellis_avx512.cpp has them, but for how levels are looked
// up. Inputs and sums have the same form.
#if defined(__x86_64__)

#include "kernels.h"

#define MOE_PACK_VBMI
#include "target_avx512.h"

#include "affine_avx512.h"
#include "trellis_avx512.h"
#include "trellis_kernels.h"

#include "rows_avx512.h"

namespace moe_pack {

const TrellisKernels vbmi_trellis_kernels = {
    prepared_digit_bytes, prepare_digits, dot_rows, add_rows, decode_row,
};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
