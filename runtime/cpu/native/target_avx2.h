// From here to target_end.h functions are compiled for AVX2, FMA and F16C, and with MOE_PACK_AVX_VNNI for that too. What is shared with other targets stands
// before: compiled for this one, the linker might hand it to them.
#if defined(__clang__) && defined(MOE_PACK_AVX_VNNI)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2,avxvnni"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#elif defined(MOE_PACK_AVX_VNNI)
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif

#include <immintrin.h>

#define MOE_PACK_VECTOR_FLOATS 8
