#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>

namespace moe_pack {

// Instructions that the CPU and the system support. Not __builtin_cpu_supports: its answer comes from the compiler's
// run-time library, and zig's says no to everything.
struct CpuFeatures {
    bool pclmul = false, sse41 = false, fma = false, f16c = false;
    bool avx2 = false, bmi2 = false;
    bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false, avx512vnni = false, avx512vbmi = false;
    bool avx_vnni = false;

    CpuFeatures() {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        pclmul = c >> 1 & 1, sse41 = c >> 19 & 1;
        if (!(c >> 27 & 1)) return;  // the system does not say which registers it saves
        uint32_t saved, high;
        asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        const bool has_ymm = (saved & 0x06) == 0x06, has_zmm = (saved & 0xe6) == 0xe6;
        fma = has_ymm && (c >> 12 & 1), f16c = has_ymm && (c >> 29 & 1);
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        bmi2 = b >> 8 & 1, avx2 = has_ymm && (b >> 5 & 1);
        avx512f = has_zmm && (b >> 16 & 1), avx512dq = has_zmm && (b >> 17 & 1), avx512bw = has_zmm && (b >> 30 & 1);
        avx512vl = has_zmm && (b >> 31 & 1), avx512vbmi = has_zmm && (c >> 1 & 1), avx512vnni = has_zmm && (c >> 11 & 1);
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) avx_vnni = has_ymm && (a >> 4 & 1);
    }
};

inline const CpuFeatures& cpu_features() {
    static const CpuFeatures features;
    return features;
}

}  // namespace moe_pack
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace moe_pack {

// Whether the CPU adds up products of four bytes (FEAT_DotProd), as Apple's all do.
inline bool has_dot_products() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
    return true;
#endif
}

}  // namespace moe_pack
#endif
