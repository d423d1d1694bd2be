// From here to target_end.h functions are compiled for AVX-512 (F, BW, DQ, VL, VNNI), and with MOE_PACK_VBMI for VBMI
// too. What is shared with other targets stands before: compiled for this one, the linker might hand it to them.
#if defined(__clang__) && defined(MOE_PACK_VBMI)
#pragma clang attribute push(                                                                                  \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2"))),    \
    apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(                                                                         \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2"))),      \
    apply_to = function)
#else
#if defined(MOE_PACK_VBMI)
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,bmi2,prefer-vector-width=512")
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2,prefer-vector-width=512")
#endif
// GCC 12 takes the registers that its own headers leave undefined on purpose for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#define MOE_PACK_VECTOR_FLOATS 16
