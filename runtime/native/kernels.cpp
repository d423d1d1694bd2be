// Which instruction set's kernels this machine can run.
#include "kernels.h"

#include <cstring>

namespace moe_pack {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};  // slowest first
constexpr int kNumNames = 3;

// The kernels of a name, or null where this machine lacks their instructions.
const Kernels* usable(int name_idx) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (name_idx == 2) {
        const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni");
        return has ? &avx512_kernels : nullptr;
    }
    if (name_idx == 1) {
        const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
        return has ? &avx2_kernels : nullptr;
    }
#endif
    return name_idx == 0 ? &portable_kernels : nullptr;
}

}  // namespace

const Kernels* best_kernels(const char* limit) {
    int name_idx = kNumNames - 1;
    while (limit != nullptr && name_idx >= 0 && std::strcmp(kNames[name_idx], limit) != 0) {
        --name_idx;
    }
    for (; name_idx >= 0; --name_idx) {
        if (const Kernels* kernels = usable(name_idx)) {
            return kernels;
        }
    }
    return nullptr;
}

}  // namespace moe_pack
