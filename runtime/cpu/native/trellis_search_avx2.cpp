// The search through a trellis for x86-64 machines with AVX2: what compilers make of it.
#if defined(__x86_64__)

#include "trellis_search.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi2")
#endif

#include "trellis_steps.h"

namespace moe_pack {

const SearchRows search_rows_avx2 = search_rows<PlainLanes>;

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
