// Threads of our own: they share out the items of one job at a time, wait spinning for a moment, then asleep.
//
// What an item computes never depends on which thread took it, nor on how many there are.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "arena.h"
#include "kernels.h"

namespace moe_pack {

// Between two looks at a value that another thread changes.
inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    // `threads` at work on a job, the caller's among them.
    Pool(int threads, const Kernels& kernels);
    // Ends the threads. A forked child has none of them; there nothing but memory is given back.
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Calls work(context, item, next, worker) once for each of `count` items: `next` is the item this thread will
    // have afterwards, or -1. False if a map was cut under one of them; the others are done or left out.
    using Work = void (*)(void* context, int item, int next, int worker);
    bool run(int count, Work work, void* context);

    // The same by this thread alone: as `run` does in a forked child.
    bool run_alone(int count, Work work, void* context);

    // After an operation the threads wait spinning for so long before they sleep. `kSpin` is longer than what lies
    // between two operations of a layer, and shorter than anybody notices.
    static constexpr std::chrono::microseconds kSpin{100};
    void spin_for(std::chrono::microseconds time) { spin_us_ = time.count(); }

    // Whether each token is computed as if it were alone, to the bit, however many there are: tokens of several sequences
    // must not change one another's answers.
    bool are_tokens_alone() const { return are_tokens_alone_; }
    void take_tokens_alone(bool alone) { are_tokens_alone_ = alone; }

    // The digits of 8 bits to which operations on many tokens round inputs (rounded.h); 0: they do not. If they do,
    // panels, and rows that give the same bits, round those of all tokens to two digits.
    int digits() const { return digits_; }
    bool rounds() const { return digits_ > 0; }
    // Gives what kernels can.
    int take_digits(int digits) { return digits_ = exact_.all.rounded == nullptr ? 0 : digits; }

    // Those for experts whose neurons all run (panels.h).
    const Kernels& whole_kernels() const { return chosen().whole; }

    int threads() const { return (int)threads_.workers.size() + 1; }
    const Kernels& kernels() const { return chosen().all; }

    // Held by the caller of `run` for as long as it uses the arena. Who forks while another thread holds it must not
    // use the pool in the child, where nothing would release it.
    std::mutex& one_job() { return one_job_; }
    Arena& arena() { return arena_; }

  private:
    void start(int count, Work work, void* context);
    void serve(int worker);
    void take_items(int worker);

    // Of the process that made them. Destroyed in another, a condition variable would wait for those asleep on it, and
    // threads would be taken for such as have their numbers there.
    struct Threads {
        std::vector<std::thread> workers;
        std::mutex sleep;
        std::condition_variable wake;
    };

    struct Chosen {
        Kernels all, whole;
    };
    const Chosen& chosen() const { return rounds() ? rounded_ : exact_; }

    const Chosen exact_, rounded_;
    Threads& threads_;
    std::mutex one_job_;
    Arena arena_;
    std::atomic<bool> are_tokens_alone_{false};
    std::atomic<int> digits_{0};
    std::atomic<uint32_t> job_{0};
    std::atomic<int> asleep_{0}, next_item_{0}, at_work_{0};
    std::atomic<int64_t> spin_us_{kSpin.count()};
    std::atomic<bool> open_{false}, stop_{false}, cut_{false};
    int count_ = 0;
    Work work_ = nullptr;
    void* context_ = nullptr;
    int owner_;  // process: threads do not survive a fork
};

}  // namespace moe_pack
