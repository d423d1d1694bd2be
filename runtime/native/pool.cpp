#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <system_error>

#include "guard.h"

namespace moe_pack {
namespace {

// Longer than what lies between two jobs of a layer, shorter than anybody notices.
constexpr auto kSpin = std::chrono::microseconds(100);

constexpr int kSpinsBeforeYield = 4000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Arena::~Arena() {
    for (void* block : blocks_) std::free(block);
}

void* Arena::take_bytes(size_t num_bytes) {
    num_bytes = (num_bytes + 127) / 64 * 64;  // a line between neighbors: kernels may look past an array's end
    if (blocks_.empty() || used_ + num_bytes > sizes_.back()) {
        size_t size = num_bytes > (1u << 20) ? num_bytes : 1u << 20;
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
    if (blocks_.size() > 1) {  // one block for all of it, next time
        size_t all = 0;
        for (size_t i = 0; i < blocks_.size(); i++) {
            all += sizes_[i];
            std::free(blocks_[i]);
        }
        blocks_.clear();
        sizes_.clear();
        if (void* block = std::aligned_alloc(64, all)) {
            blocks_.push_back(block);
            sizes_.push_back(all);
        }
    }
    used_ = 0;
}

Pool::Pool(int threads, const Kernels& kernels) : kernels_(kernels), owner_(getpid()) {
    install_guard();
    try {
        for (int worker = 1; worker < threads; worker++) workers_.emplace_back([this, worker] { serve(worker); });
    } catch (const std::system_error&) {
        // The system gives no more threads: those there are do all the work.
    }
}

Pool::~Pool() {
    if (getpid() != owner_) {
        for (auto& worker : workers_) worker.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_ = true;
        job_++;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::start(int count, Work work, void* context) {
    count_ = count;
    work_ = work;
    context_ = context;
    next_item_ = 0;
    cut_ = false;
}

bool Pool::run_alone(int count, Work work, void* context) {
    start(count, work, context);
    take_items(0);
    return !cut_;
}

bool Pool::run(int count, Work work, void* context) {
    if (count < 2 || workers_.empty() || getpid() != owner_) return run_alone(count, work, context);
    start(count, work, context);
    open_ = true;
    job_++;
    if (asleep_ > 0) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    take_items(0);
    // Who wakes only now finds the job closed, and is not waited for.
    open_ = false;
    for (int spins = 0; at_work_ > 0; spins++) {
        if (spins < kSpinsBeforeYield)
            pause();
        else
            sched_yield();  // another program has the core that our worker needs
    }
    return !cut_;
}

void Pool::take_items(int worker) {
    struct Taken {
        Pool* pool;
        int item, next, worker;
    };
    Taken taken{this, next_item_++, -1, worker};
    while (taken.item < count_ && !cut_) {
        int claimed = next_item_++;
        taken.next = claimed < count_ ? claimed : -1;
        bool whole = guarded(
            [](void* context) {
                auto* t = static_cast<Taken*>(context);
                t->pool->work_(t->pool->context_, t->item, t->next, t->worker);
            },
            &taken);
        if (!whole) cut_ = true;
        taken.item = claimed;
    }
}

void Pool::serve(int worker) {
    uint32_t done = 0;
    while (true) {
        auto until = std::chrono::steady_clock::now() + kSpin;
        while (job_ == done && std::chrono::steady_clock::now() < until) pause();
        if (job_ == done) {
            std::unique_lock<std::mutex> lock(sleep_);
            asleep_++;
            wake_.wait(lock, [&] { return job_ != done; });
            asleep_--;
        }
        done = job_;
        if (stop_) return;
        at_work_++;
        if (open_) take_items(worker);
        at_work_--;
    }
}

}  // namespace moe_pack
