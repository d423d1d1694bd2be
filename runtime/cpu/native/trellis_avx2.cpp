// Trellis rows on x86-64 machines with AVX2, FMA and F16C.
#if defined(__x86_64__)

#include "kernels.h"

#include "target_avx2.h"

#include "trellis_avx2.h"
#include "trellis_kernels.h"

#include "rows_avx2.h"

namespace moe_pack {

const TrellisKernels avx2_trellis_kernels = {
    prepared_trellis_bytes, prepare_trellis, dot_rows, add_rows, decode_row,
};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
