// Which instruction set's kernels this machine can run.
#include "kernels.h"

#include <cstring>

namespace moe_pack {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512vbmi"};  // slowest first
constexpr int kNumNames = 4;

#if defined(__x86_64__)

void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared, const Ahead& ahead,
              float* work, float* out) {
    const bool is_trellis = part.codec == Codec::trellis;
    const auto dot = is_trellis ? vbmi_trellis_kernels.dot_rows : avx512_kernels.dot_rows;
    dot(part, rows, num_rows, prepared, ahead, work, out);
}

void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
              float* work, float* sum) {
    const bool is_trellis = part.codec == Codec::trellis;
    const auto add = is_trellis ? vbmi_trellis_kernels.add_rows : avx512_kernels.add_rows;
    add(part, rows, num_rows, h, ahead, work, sum);
}

void decode(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const auto decode_row = part.codec == Codec::trellis ? vbmi_trellis_kernels.decode : avx512_kernels.decode;
    decode_row(part, row, start, stop, out);
}

// AVX-512's kernels with what VBMI does otherwise.
const Kernels* with_vbmi() {
    static const Kernels kernels = [] {
        Kernels made = avx512_kernels;
        made.name = "avx512vbmi";
        made.dot_rows = dot_rows;
        made.add_rows = add_rows;
        made.decode = decode;
        return made;
    }();
    return &kernels;
}

#endif

// The kernels of a name, or null where this machine lacks their instructions.
const Kernels* usable(int name_idx) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (name_idx >= 2) {
        const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni");
        if (name_idx == 3) {
            return has && __builtin_cpu_supports("avx512vbmi") ? with_vbmi() : nullptr;
        }
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
