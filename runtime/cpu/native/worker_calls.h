// Calls from a CUDA graph that a thread of Python answers.
//
// The driver's thread hands over the number of a place, and waits here for the answer: it never takes the interpreter's
// lock. The thread that answers waits here too, without that lock. So a thread that holds the lock while it waits for the
// GPU delays a call, and ends it by the time limit at worst.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace moe_pack {

// The memory of the calls, which outlives them.
struct CallBuffers {
    const int32_t* counts;  // [places, k], what is left to the CPU; a call with zeros alone is not handed over
    float* y;               // [d], which such a call fills with zeros
    int32_t num_places, k, d;
};

class WorkerCalls {
  public:
    // What `moe_pack_worker_call` takes.
    struct Argument {
        WorkerCalls* calls;
        int32_t place;
    };
    static constexpr int32_t kNone = -1;  // in place of a place

    // `limit`: how long a call waits for its answer. Throws std::bad_alloc.
    WorkerCalls(const CallBuffers& buffers, std::chrono::milliseconds limit);
    // In a forked child, which has no thread that answers, nothing but memory is given back.
    ~WorkerCalls();
    WorkerCalls(const WorkerCalls&) = delete;
    WorkerCalls& operator=(const WorkerCalls&) = delete;

    // Returns when the place is answered, the calls are closed, or the limit is over, which is a fault. While there is a
    // fault, calls return at once. Any thread may call it, one at a time is handed over.
    void call(int32_t place) noexcept;

    // Answers the place that it returned before, and waits for the next; `kNone` once the calls are closed. One thread
    // calls it.
    int32_t next();

    // Ends all waits, now and later; returns when no call is left.
    void close();

    // The place of the call that was not answered in time; `kNone` if all were since the last time.
    int32_t take_fault();

    // Lives as long as this.
    Argument* argument(int32_t place) { return &arguments_[place]; }
    int32_t num_places() const { return buffers_.num_places; }

  private:
    enum class State { idle, asked, taken };

    // Destroyed in a process that does not have the threads, a condition variable would wait for those asleep on it.
    struct Sync {
        std::mutex one_call, state;
        std::condition_variable asked, answered;
    };

    bool is_forked() const;
    bool is_anything_left(int32_t place) const;
    bool await_idle(std::unique_lock<std::mutex>& lock, int32_t place);

    const CallBuffers buffers_;
    const std::chrono::milliseconds limit_;
    std::vector<Argument> arguments_;  // [places]
    Sync& sync_;
    // Under the lock of `state`.
    State state_ = State::idle;
    int32_t place_ = kNone, fault_ = kNone;
    bool is_closed_ = false;
    const int owner_;  // process
};

}  // namespace moe_pack

// The function that CUDA calls. `argument`: of `WorkerCalls::argument`.
extern "C" void moe_pack_worker_call(void* argument);
