// Which instruction set's kernels this machine can run.
#include "cpu_features.h"
#include "kernels.h"
#include "panels.h"

#include <cstring>

namespace moe_pack {
namespace {

enum Name { kPortable, kNeon, kAvx2, kAvx512, kAvx512Vbmi, kNumNames };  // slowest first
constexpr const char* kNames[kNumNames] = {"portable", "neon", "avx2", "avx512", "avx512vbmi"};

#if defined(__x86_64__)

// Kernels for all parts.
template <const Kernels& MOST, const TrellisKernels& TRELLIS>
struct All {
    static bool is_trellis(const Part& part) { return part.codec == Codec::trellis; }

    static size_t prepared_bytes(const Part& part) {
        return is_trellis(part) ? TRELLIS.prepared_bytes(part) : MOST.prepared_bytes(part);
    }

    static void prepare(const Part& part, const float* x, void* prepared) {
        (is_trellis(part) ? TRELLIS.prepare : MOST.prepare)(part, x, prepared);
    }

    static void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                         const Ahead& ahead, float* work, float* out) {
        const auto dot = is_trellis(part) ? TRELLIS.dot_rows : MOST.dot_rows;
        dot(part, rows, num_rows, prepared, ahead, work, out);
    }

    static void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h,
                         const Ahead& ahead, float* work, float* sum) {
        (is_trellis(part) ? TRELLIS.add_rows : MOST.add_rows)(part, rows, num_rows, h, ahead, work, sum);
    }

    static void decode(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
        (is_trellis(part) ? TRELLIS.decode : MOST.decode)(part, row, start, stop, out);
    }

    // `panels`: null for those of MOST.
    static const Kernels* named(const char* name, const PanelKernels* panels = nullptr) {
        static const Kernels all = [=] {
            Kernels made = MOST;
            if (panels != nullptr) made.panels = panels;
            made.name = name;
            made.prepared_bytes = prepared_bytes;
            made.prepare = prepare;
            made.dot_rows = dot_rows;
            made.add_rows = add_rows;
            made.decode = decode;
            return made;
        }();
        return &all;
    }
};

#endif

// The kernels of a name, or null where this machine lacks their instructions.
const Kernels* usable(int name_idx) {
#if defined(__x86_64__)
    if (name_idx >= kAvx512) {
        const bool has = cpu_features().avx512f && cpu_features().avx512bw &&
                         cpu_features().avx512dq && cpu_features().avx512vl &&
                         cpu_features().avx512vnni;
        if (!has || (name_idx == kAvx512Vbmi && !cpu_features().avx512vbmi)) {
            return nullptr;
        }
        return name_idx == kAvx512Vbmi ? All<avx512_kernels, vbmi_trellis_kernels>::named(kNames[kAvx512Vbmi])
                                       : All<avx512_kernels, avx512_trellis_kernels>::named(kNames[kAvx512]);
    }
    if (name_idx == kAvx2) {
        const bool has = cpu_features().avx2 && cpu_features().fma &&
                         cpu_features().f16c && cpu_features().bmi2;
        const PanelKernels* panels = cpu_features().avx_vnni ? avx_vnni_panel_kernels() : nullptr;  // of the same bits
        return has ? All<avx2_kernels, avx2_trellis_kernels>::named(kNames[kAvx2], panels) : nullptr;
    }
#elif defined(__aarch64__)
    if (name_idx == kNeon && has_dot_products() && neon_panel_kernels() != nullptr) {
        static const Kernels neon = [] {
            Kernels made = portable_kernels;
            made.name = kNames[kNeon];
            made.panels = neon_panel_kernels();
            return made;
        }();
        return &neon;
    }
#endif
    return name_idx == kPortable ? &portable_kernels : nullptr;
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
