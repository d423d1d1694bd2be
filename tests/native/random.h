// Chance for the fuzzing of runtime/native: numbers from a seed, and memory that ends where it says.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace moe_pack {

// The same numbers from the same seed, on any machine (splitmix64).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    // From `low` to `high`, both included.
    int64_t between(int64_t low, int64_t high) { return low + (int64_t)(next() % (uint64_t)(high - low + 1)); }
    bool chance(int percent) { return between(1, 100) <= percent; }
    float real(float low, float high) { return low + (high - low) * (float)(next() >> 40) * 0x1p-24f; }
    float sign() { return chance(50) ? 1.0f : -1.0f; }

    template <class T>
    T pick(std::initializer_list<T> from) {
        return from.begin()[between(0, (int64_t)from.size() - 1)];
    }

  private:
    uint64_t state_;
};

// An array of its own allocation, at whose end it ends: a sanitizer sees any byte read or written behind it. Some end
// where a page does that must not be touched: what sanitizers do not look at, as loads with a mask, is found there. An
// empty one is null. It begins anywhere that suits its type, or a `unit` of so many bytes.
template <class T>
class Exact {
  public:
    Exact(Random& random, size_t count, size_t unit = sizeof(T)) : count_(count) {
        if (count == 0) return;
        const size_t lead = random.chance(50) ? 0 : unit * random.between(1, 15);
        if (random.chance(30) && count * sizeof(T) <= kMostGuarded) {
            take_pages(count * sizeof(T));
        } else {
            block_ = static_cast<uint8_t*>(std::malloc(lead + count * sizeof(T)));
            if (block_ == nullptr) std::abort();
            values_ = reinterpret_cast<T*>(block_ + lead);
        }
        // Whatever a call should write and does not is found: two such arrays differ.
        auto* bytes = reinterpret_cast<uint8_t*>(values_);
        size_t i = 0, num_bytes = count * sizeof(T);
        for (; i + 8 <= num_bytes; i += 8) {
            uint64_t eight = random.next();
            std::memcpy(bytes + i, &eight, 8);
        }
        for (; i < num_bytes; i++) bytes[i] = (uint8_t)random.next();
    }
    ~Exact() {
        if (mapped_bytes_ > 0)
            munmap(block_, mapped_bytes_);
        else
            std::free(block_);
    }
    Exact(const Exact&) = delete;
    Exact(Exact&& other) noexcept
        : block_(other.block_), mapped_bytes_(other.mapped_bytes_), values_(other.values_), count_(other.count_) {
        other.block_ = nullptr;
        other.mapped_bytes_ = 0;
        other.values_ = nullptr;
        other.count_ = 0;
    }
    Exact& operator=(const Exact&) = delete;

    T* get() { return values_; }
    const T* get() const { return values_; }
    size_t size() const { return count_; }
    T& operator[](size_t i) { return values_[i]; }
    const T& operator[](size_t i) const { return values_[i]; }
    void copy_from(const Exact& other) {
        if (count_) std::memcpy(values_, other.values_, count_ * sizeof(T));
    }
    void fill(T value) {
        for (size_t i = 0; i < count_; i++) values_[i] = value;
    }
    bool same_bits(const Exact& other) const {
        return count_ == other.count_ && (count_ == 0 || std::memcmp(values_, other.values_, count_ * sizeof(T)) == 0);
    }

  private:
    static constexpr size_t kPageBytes = 4096, kMostGuarded = 8 << 20;

    void take_pages(size_t num_bytes) {
        const size_t held = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
        mapped_bytes_ = held + kPageBytes;
        void* at = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED || mprotect(static_cast<uint8_t*>(at) + held, kPageBytes, PROT_NONE) != 0) std::abort();
        block_ = static_cast<uint8_t*>(at);
        values_ = reinterpret_cast<T*>(block_ + held - num_bytes);
    }

    uint8_t* block_ = nullptr;
    size_t mapped_bytes_ = 0;  // of a block that is no allocation
    T* values_ = nullptr;
    size_t count_;
};

// x as a model has it: of about 1, sometimes zero, sometimes much larger or smaller.
inline void fill_inputs(Random& random, float* x, size_t count) {
    const float unit = random.pick({1.0f, 1.0f, 1.0f, 100.0f, 0.001f});
    const bool sparse = random.chance(20);
    for (size_t i = 0; i < count; i++) x[i] = sparse && random.chance(80) ? 0.0f : unit * random.real(-1.0f, 1.0f);
}

// Floats among which is anything: NaNs, infinities, subnormals, the largest.
inline void fill_wild(Random& random, float* x, size_t count) {
    const int share = random.pick({0, 1, 5, 100});
    fill_inputs(random, x, count);
    for (size_t i = 0; i < count; i++)
        if (random.chance(share)) x[i] = random.sign() * random.pick({NAN, INFINITY, 3e38f, 1e-40f, 1e-30f, 1e20f, 0.0f});
}

}  // namespace moe_pack
