#include "trellis_search.h"

#include <cstring>
#include <memory>
#include <new>

#include "kernels.h"
#include "trellis_steps.h"

namespace moe_pack {
namespace {

constexpr size_t kAlignment = 64;

struct Aligned {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(kAlignment)); }
};

void lay_out_factor(const TrellisWork& work, float* out) {
    const size_t columns = 2 * size_t(work.num_steps);
    for (int32_t step = 0; step < work.num_steps; ++step) {
        for (int32_t u = step < kOwnSteps ? 0 : step - kOwnSteps + 1; u < step - 1; ++u) {
            float* of_step = out + (size_t(step) * kOwnSteps + u % kOwnSteps) * 4;
            for (int32_t half = 0; half < 2; ++half) {
                const float* from = work.factor + (2 * size_t(u) + half) * columns + 2 * size_t(step);
                of_step[2 * half] = from[0];
                of_step[2 * half + 1] = from[1];
            }
        }
    }
}

SearchRows best_search(const char* limit) {
#if defined(__x86_64__)
    const char* name = best_kernels(limit)->name;
    if (std::strncmp(name, "avx512", 6) == 0) return search_rows_avx512;  // with VBMI or without
    if (std::strcmp(name, "avx2") == 0) return search_rows_avx2;
#else
    (void)limit;
#endif
    return search_rows_portable;
}

}  // namespace

const SearchRows search_rows_portable = search_rows<PlainLanes>;

void search_trellis(const char* limit, const TrellisWork& work) {
    // Rounded up, so that all parts begin at a multiple of 64 bytes.
    const size_t steps = (size_t(work.num_steps) + kAlignment - 1) / kAlignment * kAlignment;
    const size_t bytes = steps * kFreePaths, targets = 2 * steps;
    const size_t factor = work.factor == nullptr ? 0 : steps * kOwnSteps * 4;
    const size_t floats = 2 * bytes / sizeof(float) + targets + factor + kOwnSteps * 2 * kFedPaths;
    std::unique_ptr<float[], Aligned> memory(
        static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(kAlignment))));
    uint8_t* parents = reinterpret_cast<uint8_t*>(memory.get());
    float* after = memory.get() + 2 * bytes / sizeof(float);
    const TrellisWorkspace workspace = {parents, parents + bytes, after, after + targets, after + targets + factor};
    if (work.factor != nullptr) {
        std::memset(workspace.factor, 0, factor * sizeof(float));
        lay_out_factor(work, workspace.factor);
    }
    best_search(limit)(work, workspace);
}

}  // namespace moe_pack
