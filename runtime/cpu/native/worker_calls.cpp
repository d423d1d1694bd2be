#include "worker_calls.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace moe_pack {

WorkerCalls::WorkerCalls(const CallBuffers& buffers, std::chrono::milliseconds limit)
    : buffers_(buffers), limit_(limit), sync_(*new Sync), owner_(getpid()) {
    for (int32_t place = 0; place < buffers.num_places; place++) arguments_.push_back({this, place});
}

WorkerCalls::~WorkerCalls() {
    if (is_forked()) return;
    close();
    delete &sync_;
}

bool WorkerCalls::is_forked() const { return getpid() != owner_; }

bool WorkerCalls::is_anything_left(int32_t place) const {
    const int32_t* counts = buffers_.counts + (size_t)place * buffers_.k;
    return std::any_of(counts, counts + buffers_.k, [](int32_t count) { return count != 0; });
}

// Whether no answer is missing; where one is missing after the limit, the place has a fault.
bool WorkerCalls::await_idle(std::unique_lock<std::mutex>& lock, int32_t place) {
    const auto ended = [&] { return is_closed_ || state_ == State::idle; };
    if (!sync_.answered.wait_for(lock, limit_, ended)) fault_ = place;
    return !is_closed_ && state_ == State::idle;
}

void WorkerCalls::call(int32_t place) noexcept {
    if (is_forked()) return;
    std::lock_guard<std::mutex> one_call(sync_.one_call);
    std::unique_lock<std::mutex> lock(sync_.state);
    if (is_closed_ || fault_ != kNone) return;
    // The answer to an earlier call, which came too late, may still be written to `y`.
    if (!await_idle(lock, place)) return;
    if (!is_anything_left(place)) {
        std::fill_n(buffers_.y, buffers_.d, 0.0f);
        return;
    }
    place_ = place;
    state_ = State::asked;
    sync_.asked.notify_one();
    await_idle(lock, place);
}

int32_t WorkerCalls::next() {
    if (is_forked()) return kNone;
    std::unique_lock<std::mutex> lock(sync_.state);
    if (state_ == State::taken) {
        state_ = State::idle;
        sync_.answered.notify_all();
    }
    sync_.asked.wait(lock, [&] { return is_closed_ || state_ == State::asked; });
    if (is_closed_) return kNone;
    state_ = State::taken;
    return place_;
}

void WorkerCalls::close() {
    if (is_forked()) return;
    {
        std::lock_guard<std::mutex> lock(sync_.state);
        is_closed_ = true;
        sync_.asked.notify_all();
        sync_.answered.notify_all();
    }
    std::lock_guard<std::mutex> one_call(sync_.one_call);
}

int32_t WorkerCalls::take_fault() {
    if (is_forked()) return kNone;
    std::lock_guard<std::mutex> lock(sync_.state);
    return std::exchange(fault_, kNone);
}

}  // namespace moe_pack

extern "C" void moe_pack_worker_call(void* argument) {
    const auto& at = *static_cast<moe_pack::WorkerCalls::Argument*>(argument);
    at.calls->call(at.place);
}
