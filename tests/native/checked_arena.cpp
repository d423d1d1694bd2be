// The arena for fuzzing: each array an allocation of its own, so that sanitizers see what lies outside of it.
//
// Behind an array lie the floats that kernels may read and never write, which is looked at; an array's bytes are junk
// that differs each time, so that a result made of them does too.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "arena.h"
#include "cases.h"
#include "random.h"

namespace moe_pack {
namespace {

constexpr size_t kReadPastBytes = sizeof(float) * kReadPastFloats;

}  // namespace

Arena::~Arena() { reset(); }

void* Arena::take_bytes(size_t num_bytes) {
    static std::atomic<uint64_t> number{0};
    void* block = nullptr;
    if (posix_memalign(&block, 64, num_bytes + kReadPastBytes) != 0) return nullptr;
    Random junk(number++);
    for (size_t i = 0; i < num_bytes; i += 8) {
        uint64_t eight = junk.next();
        std::memcpy(static_cast<char*>(block) + i, &eight, num_bytes - i < 8 ? num_bytes - i : 8);
    }
    std::memset(static_cast<char*>(block) + num_bytes, 0xff, kReadPastBytes);
    blocks_.push_back(block);
    sizes_.push_back(num_bytes);
    return block;
}

void Arena::reset() {
    for (size_t i = 0; i < blocks_.size(); i++) {
        const auto* behind = static_cast<const unsigned char*>(blocks_[i]) + sizes_[i];
        for (size_t j = 0; j < kReadPastBytes; j++)
            if (behind[j] != 0xff) fail("an array of %zu bytes was written %zu bytes behind its end", sizes_[i], j);
        std::free(blocks_[i]);
    }
    blocks_.clear();
    sizes_.clear();
}

}  // namespace moe_pack
