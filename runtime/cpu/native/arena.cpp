#include "arena.h"

#include <cstdlib>
#include <new>

#include "kernels.h"

namespace moe_pack {
namespace {

constexpr size_t kBlockBytes = 1 << 20;  // at least
constexpr size_t kReadPastBytes = sizeof(float) * kReadPastFloats;

}  // namespace

Arena::~Arena() {
    for (void* block : blocks_) std::free(block);
}

void* Arena::take_bytes(size_t num_bytes) {
    num_bytes = (num_bytes + kReadPastBytes + 63) / 64 * 64;
    if (blocks_.empty() || used_ + num_bytes > sizes_.back()) {
        size_t size = num_bytes > kBlockBytes ? num_bytes : kBlockBytes;
        try {  // if both have space, neither throws below
            blocks_.reserve(blocks_.size() + 1);
            sizes_.reserve(sizes_.size() + 1);
        } catch (const std::bad_alloc&) {
            return nullptr;
        }
        void* block = std::aligned_alloc(64, size);
        if (block == nullptr) return nullptr;
        blocks_.push_back(block);
        sizes_.push_back(size);
        used_ = 0;
    }
    void* place = static_cast<char*>(blocks_.back()) + used_;
    used_ += num_bytes;
    return place;
}

void Arena::reset() {
    used_ = 0;
    if (blocks_.size() < 2) return;
    // One block for all of it, next time.
    size_t all = 0;
    for (size_t size : sizes_) all += size;
    for (void* block : blocks_) std::free(block);
    blocks_.clear();
    sizes_.clear();
    if (void* block = std::aligned_alloc(64, all)) {
        blocks_.push_back(block);  // both have space for it
        sizes_.push_back(all);
    }
}

}  // namespace moe_pack
