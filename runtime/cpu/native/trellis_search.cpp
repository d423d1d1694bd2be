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

// Column t's factors of the columns before it whose errors paths hold: all but t - 1's, whose errors come last.
void lay_out_factor(const TrellisWork& work, float* out) {
    for (int32_t t = 0; t < work.num_cols; ++t) {
        float* slots = out + size_t(t) * kSurvivorColumns;
        for (int32_t u = t < kSurvivorColumns ? 0 : t - kSurvivorColumns + 1; u < t - 1; ++u) {
            slots[u % kSurvivorColumns] = work.factor[size_t(u) * work.num_cols + t];
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
    const size_t columns = size_t(work.num_cols) + kAlignment;  // so that all parts begin at a multiple of 64 bytes
    const size_t padded = columns / kAlignment * kAlignment, oldest = padded * kMostParents / sizeof(float);
    const size_t factor = work.factor == nullptr ? 0 : padded * kSurvivorColumns;
    const size_t floats = oldest + padded + factor + kSurvivorColumns * kMostParents;
    std::unique_ptr<float[], Aligned> held(
        static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t(kAlignment))));
    TrellisRoom room = {reinterpret_cast<uint8_t*>(held.get()), held.get() + oldest, held.get() + oldest + padded,
                        held.get() + oldest + padded + factor};
    if (work.factor != nullptr) {
        std::memset(room.factor, 0, factor * sizeof(float));
        lay_out_factor(work, room.factor);
    }
    best_search(limit)(work, room);
}

}  // namespace moe_pack
