// Calls of the CPU by a GPU, through a flag in page-locked memory.
//
// The flag is 0 while nobody waits. The GPU writes what the CPU needs, then the number of a call to the flag, and waits
// until it is 0 again. One thread takes the call, writes the answer to `y`, then 0 to the flag. So each side writes only
// when the other waits for it, a flag has one word, and a graph that is replayed finds it as it was: 0.
//
// A second thread sees to it that the GPU never waits longer than the limit, whatever the first one does: it answers in
// its place, and keeps the call as a fault. No wait here needs the interpreter's lock.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace moe_pack {

// The memory of the calls, which outlives them. T tokens have P places each; that of token t at place p is t * P + p.
struct CallBuffers {
    std::atomic<int32_t>* flag;
    const int32_t* counts;  // [T * P, k], what is left to the CPU; where all are zero, the answer is zeros
    float* y;               // [T, d]
    int32_t num_tokens, num_places, k, d;
};

class FlagCalls {
  public:
    static constexpr int32_t kNone = -1;  // in place of a place

    // `limit`: how long the GPU waits for an answer. Throws std::bad_alloc, or std::system_error without a thread.
    FlagCalls(const CallBuffers& buffers, std::chrono::milliseconds limit);
    // In a forked child, which has none of the threads, nothing but memory is given back.
    ~FlagCalls();
    FlagCalls(const FlagCalls&) = delete;
    FlagCalls& operator=(const FlagCalls&) = delete;

    // Ends the work on the place that it returned before, and waits for the next, of which something is left to the CPU;
    // `kNone` once the calls are closed. One thread calls it. While there is a fault, calls are answered unread.
    int32_t next();

    // Ends all waits. No GPU may call any more, but one that waits now gets an answer.
    void close();

    // The place, of its first token, for which the GPU waited too long; `kNone` if for none since the last time.
    int32_t take_fault();

    const CallBuffers& buffers() const { return buffers_; }

  private:
    using Clock = std::chrono::steady_clock;

    // Destroyed in a process that does not have the threads, a condition variable would wait for those asleep on it.
    struct Watchdog {
        std::mutex state;
        std::condition_variable wake;
        std::thread thread;
    };

    bool is_forked() const;
    bool is_anything_left(int32_t at) const;
    int32_t await_number() const;
    bool take();
    void answer();
    void watch();

    const CallBuffers buffers_;
    const std::chrono::milliseconds limit_;
    const int owner_;  // process
    std::atomic<bool> is_closed_{false};
    // Of the thread that calls `next`: the places of the call at work are next_, next_ + P, ... before end_.
    int32_t next_ = 0, end_ = 0;
    Watchdog& watchdog_;
    // Under the lock of `state`.
    bool is_at_work_ = false, is_late_ = false;  // late: the GPU has its answer from the watchdog
    int32_t fault_ = kNone;
    Clock::time_point deadline_;
};

}  // namespace moe_pack
