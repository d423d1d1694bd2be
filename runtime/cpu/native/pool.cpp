#include "pool.h"

#include <sched.h>
#include <unistd.h>

#include <exception>

#include "guard.h"
#include "panels.h"

namespace moe_pack {
namespace {

constexpr int kSpinsBeforeYield = 4000;
constexpr int kSpinsOfWorker = 400;  // some 20 us: operations of one call follow each other within less

Kernels whole(Kernels kernels) {
    const PanelKernels* panels = kernels.panels;
    if (panels == nullptr) return kernels;
    kernels.prepared_bytes = panels->prepared_bytes;
    kernels.prepare = panels->prepare;
    kernels.dot_rows = panels->dot_rows;
    kernels.add_rows = panels->add_rows;
    kernels.sum_floats = panels->sum_floats;
    kernels.finish_sum = panels->finish_sum;
    return kernels;
}

// Panels of inputs with two digits.
Kernels rounded(Kernels kernels) {
    if (kernels.panels != nullptr) kernels.panels = kernels.panels->rounded;
    return kernels;
}

}  // namespace

Pool::Pool(int threads, const Kernels& kernels)
    : exact_{kernels, whole(kernels)}, rounded_{rounded(kernels), whole(rounded(kernels))},
      threads_(*new Threads), owner_(getpid()) {
    install_guard();
    try {
        for (int worker = 1; worker < threads; worker++)
            threads_.workers.emplace_back([this, worker] { serve(worker); });
    } catch (const std::exception&) {
        // The system gives no more threads, or no more memory: those there are do all the work.
    }
}

Pool::~Pool() {
    if (getpid() != owner_) return;
    {
        std::lock_guard<std::mutex> lock(threads_.sleep);
        stop_ = true;
        job_++;
    }
    threads_.wake.notify_all();
    for (auto& worker : threads_.workers) worker.join();
    delete &threads_;
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
    if (count < 2 || threads_.workers.empty() || getpid() != owner_) return run_alone(count, work, context);
    start(count, work, context);
    open_ = true;
    job_++;
    if (asleep_ > 0) {
        std::lock_guard<std::mutex> lock(threads_.sleep);
        threads_.wake.notify_all();
    }
    take_items(0);
    // Who wakes only now finds the job closed, and is not waited for.
    open_ = false;
    for (int spins = 0; at_work_ > 0; spins++) {
        if (spins < kSpinsBeforeYield)
            spin_pause();
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
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
        for (int spins = 0; job_ == done && std::chrono::steady_clock::now() < until; spins++) {
            if (spins < kSpinsOfWorker)
                spin_pause();
            else
                sched_yield();  // where other programs have the other cores, the caller may need this one
        }
        if (job_ == done) {
            std::unique_lock<std::mutex> lock(threads_.sleep);
            asleep_++;
            threads_.wake.wait(lock, [&] { return job_ != done; });
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
