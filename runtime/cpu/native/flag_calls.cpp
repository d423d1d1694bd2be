#include "flag_calls.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "pool.h"

namespace moe_pack {
namespace {

using std::chrono::milliseconds;

constexpr int kSpinsBeforeYield = 4000;  // some 100 us: a layer's calls follow each other within less
// After the last call: longer than from one token to the next. Later the thread sleeps an eighth of the time since, so
// that an idle server takes no CPU, and the first call after a while waits a little.
constexpr auto kAwake = milliseconds(20), kMostAsleep = milliseconds(10);
constexpr auto kFaultPeriod = milliseconds(1);  // in which the watchdog answers the rest of a lost token

}  // namespace

FlagCalls::FlagCalls(const CallBuffers& buffers, milliseconds limit)
    : buffers_(buffers), limit_(limit), owner_(getpid()), watchdog_(*new Watchdog) {
    try {
        watchdog_.thread = std::thread([this] { watch(); });
    } catch (...) {
        delete &watchdog_;
        throw;
    }
}

FlagCalls::~FlagCalls() {
    if (is_forked()) return;
    close();
    delete &watchdog_;
}

bool FlagCalls::is_forked() const { return getpid() != owner_; }

bool FlagCalls::is_anything_left(int32_t at) const {
    const int32_t* counts = buffers_.counts + (size_t)at * buffers_.k;
    return std::any_of(counts, counts + buffers_.k, [](int32_t count) { return count != 0; });
}

// What the GPU has written to the flag; 0 once the calls are closed.
int32_t FlagCalls::await_number() const {
    const auto start = Clock::now();
    for (int64_t spins = 0; !is_closed_; spins++) {
        const int32_t number = buffers_.flag->load(std::memory_order_acquire);
        if (number != 0) return number;
        if (spins < kSpinsBeforeYield) {
            spin_pause();
            continue;
        }
        const auto idle = Clock::now() - start;
        if (idle < kAwake)
            sched_yield();
        else
            std::this_thread::sleep_for(std::min<Clock::duration>(idle / 8, kMostAsleep));
    }
    return 0;
}

// The next call, of which `next_` and `end_` are the places; false once the calls are closed.
bool FlagCalls::take() {
    const int32_t number = await_number();
    std::lock_guard<std::mutex> lock(watchdog_.state);
    if (is_closed_) return false;
    // A number of no call is answered as a fault: what a GPU writes is not trusted.
    const bool is_call = number > 0 && number <= buffers_.num_tokens * buffers_.num_places;
    if (!is_call && fault_ == kNone) fault_ = 0;
    if (fault_ != kNone) {
        buffers_.flag->store(0, std::memory_order_release);
        return true;
    }
    next_ = (number - 1) % buffers_.num_places;
    end_ = number;
    is_at_work_ = true;
    deadline_ = Clock::now() + limit_;
    return true;
}

void FlagCalls::answer() {
    std::lock_guard<std::mutex> lock(watchdog_.state);
    if (is_at_work_ && !is_late_ && !is_closed_) buffers_.flag->store(0, std::memory_order_release);
    is_at_work_ = is_late_ = false;
}

int32_t FlagCalls::next() {
    while (!is_forked()) {
        for (; next_ < end_; next_ += buffers_.num_places) {
            if (is_anything_left(next_)) return std::exchange(next_, next_ + buffers_.num_places);
            std::fill_n(buffers_.y + (size_t)(next_ / buffers_.num_places) * buffers_.d, buffers_.d, 0.0f);
        }
        answer();
        if (!take()) break;
    }
    return kNone;
}

void FlagCalls::watch() {
    std::unique_lock<std::mutex> lock(watchdog_.state);
    while (!is_closed_) {
        const auto period = std::clamp<Clock::duration>(limit_ / 8, kFaultPeriod, std::chrono::seconds(1));
        watchdog_.wake.wait_for(lock, fault_ == kNone ? period : kFaultPeriod);
        const int32_t number = buffers_.flag->load(std::memory_order_relaxed);
        if (!is_at_work_ || number == 0 || (fault_ == kNone && Clock::now() < deadline_)) continue;
        if (fault_ == kNone) fault_ = (number - 1) % buffers_.num_places;
        is_late_ = true;
        buffers_.flag->store(0, std::memory_order_release);
    }
}

void FlagCalls::close() {
    if (is_forked()) return;
    {
        std::lock_guard<std::mutex> lock(watchdog_.state);
        is_closed_ = true;
        buffers_.flag->store(0, std::memory_order_release);
        watchdog_.wake.notify_all();
    }
    if (watchdog_.thread.joinable()) watchdog_.thread.join();
}

int32_t FlagCalls::take_fault() {
    if (is_forked()) return kNone;
    std::lock_guard<std::mutex> lock(watchdog_.state);
    deadline_ = Clock::now() + limit_;  // of the next call, if the one at work is late
    return std::exchange(fault_, kNone);
}

}  // namespace moe_pack
