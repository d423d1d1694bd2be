// Threads of our own: they share out the items of one job at a time, wait spinning for a moment, then asleep.
//
// What an item computes never depends on which thread took it, nor on how many there are.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace moe_pack {

// Memory for the jobs, grown as they need it and kept. Aligned to 64 bytes.
class Arena {
  public:
    ~Arena();
    // Room for `count` values; valid until `reset`. Null if there is no memory.
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

class Pool {
  public:
    // `threads` at work on a job, the caller's among them.
    Pool(int threads, const Kernels& kernels);
    ~Pool();

    // Calls work(context, item, next, worker) once for each of `count` items: `next` is the item this thread will
    // have afterwards, or -1. False if a map was cut under one of them; the others are done or left out.
    using Work = void (*)(void* context, int item, int next, int worker);
    bool run(int count, Work work, void* context);

    // The same by this thread alone.
    bool run_alone(int count, Work work, void* context);

    int threads() const { return (int)workers_.size() + 1; }
    const Kernels& kernels() const { return kernels_; }

    // Held by the caller of `run` for as long as it uses the arena.
    std::mutex& one_job() { return one_job_; }
    Arena& arena() { return arena_; }

  private:
    void start(int count, Work work, void* context);
    void serve(int worker);
    void take_items(int worker);

    const Kernels& kernels_;
    std::vector<std::thread> workers_;
    std::mutex one_job_, sleep_;
    std::condition_variable wake_;
    Arena arena_;
    std::atomic<uint32_t> job_{0};
    std::atomic<int> asleep_{0}, next_item_{0}, at_work_{0};
    std::atomic<bool> open_{false}, stop_{false}, cut_{false};
    int count_ = 0;
    Work work_ = nullptr;
    void* context_ = nullptr;
    int owner_;  // process: threads do not survive a fork
};

}  // namespace moe_pack
