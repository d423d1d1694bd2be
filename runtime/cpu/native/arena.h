// Memory for a pool's jobs, grown as they need it and kept.
#pragma once

#include <cstddef>
#include <vector>

namespace moe_pack {

// Arrays are aligned to 64 bytes, and kReadPastFloats may be read behind each. One job at a time.
class Arena {
  public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Space for `count` values; valid until `reset`. Null if there is no memory.
    template <class T>
    T* take(size_t count) {
        return static_cast<T*>(take_bytes(count * sizeof(T)));
    }
    void reset();

  private:
    void* take_bytes(size_t num_bytes);

    std::vector<void*> blocks_;
    std::vector<size_t> sizes_;
    size_t used_ = 0;  // of the last block
};

}  // namespace moe_pack
