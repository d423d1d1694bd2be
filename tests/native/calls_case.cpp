// Calls that a thread answers: several callers, short limits, closing while they wait, a forked child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "cases.h"
#include "layouts.h"
#include "worker_calls.h"

namespace moe_pack {
namespace {

constexpr auto kLong = std::chrono::milliseconds(100'000), kShort = std::chrono::milliseconds(1);

struct Given {
    CallBuffers sizes;
    Exact<int32_t> counts;
    Exact<float> y;

    Given(Random& random, int32_t num_places, int32_t k, int32_t d)
        : sizes{nullptr, nullptr, num_places, k, d}, counts(random, (size_t)num_places * k), y(random, d) {
        for (size_t i = 0; i < counts.size(); i++) counts[i] = random.chance(40) ? (int32_t)random.between(-1, 3) : 0;
        sizes.counts = counts.get();
        sizes.y = y.get();
    }
    bool asks(int32_t place) const {
        for (int32_t i = 0; i < sizes.k; i++)
            if (sizes.counts[place * sizes.k + i] != 0) return true;
        return false;
    }
};

// Answers until the calls are closed: writes the place everywhere, now and then late.
void answer(WorkerCalls& calls, Given& given, uint64_t seed, std::atomic<int>& num_answered) {
    Random random(seed);
    for (int32_t place; (place = calls.next()) != WorkerCalls::kNone;) {
        require(place >= 0 && place < given.sizes.num_places && given.asks(place), "a place that asks");
        if (random.chance(20)) usleep((useconds_t)random.between(1, 3000));
        for (int32_t i = 0; i < given.sizes.d; i++) given.sizes.y[i] = (float)place;
        num_answered++;
    }
}

void close_in_child(WorkerCalls& calls) {
#if !defined(__SANITIZE_THREAD__)  // which does not bear threads behind a fork
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        moe_pack_worker_call(calls.argument(0));
        calls.close();
        calls.~WorkerCalls();
        _exit(0);
    }
    int status = 0;
    require(child > 0 && waitpid(child, &status, 0) == child, "a child is started");
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child closes calls and ends");
#else
    (void)calls;
#endif
}

}  // namespace

void calls_case(Random& random, Pools&, Counts& counts) {
    Given given(random, (int32_t)random.between(1, 5), (int32_t)random.between(1, 3), (int32_t)random.between(1, 40));
    const bool is_short = random.chance(30), closes_early = random.chance(30);
    std::atomic<int> num_answered{0}, num_asked{0};
    auto calls = std::make_unique<WorkerCalls>(given.sizes, is_short ? kShort : kLong);
    std::thread worker(answer, std::ref(*calls), std::ref(given), random.next(), std::ref(num_answered));
    std::vector<std::thread> callers;
    const bool is_alone = random.chance(50);
    for (int64_t left = is_alone ? 1 : random.between(2, 3); left > 0; left--)
        callers.emplace_back([&, seed = random.next()] {
            Random own(seed);
            for (int i = 0; i < 20; i++) {
                const auto place = (int32_t)own.between(0, given.sizes.num_places - 1);
                moe_pack_worker_call(calls->argument(place));
                num_asked += given.asks(place);
                if (!is_alone || is_short || closes_early) continue;
                const float expected = given.asks(place) ? (float)place : 0.0f;
                for (int32_t j = 0; j < given.sizes.d; j++) require(given.y[j] == expected, "the answer of a call");
            }
        });
    const int32_t fault = calls->take_fault();
    require(fault == WorkerCalls::kNone || is_short, "only short limits are faults");
    if (closes_early) {
        usleep((useconds_t)random.between(0, 2000));
        calls->close();
    }
    for (std::thread& caller : callers) caller.join();
    if (random.chance(5)) close_in_child(*calls);
    calls->close();
    worker.join();
    if (!is_short && !closes_early) {
        require(num_answered == num_asked, "every call is answered once");
        require(calls->take_fault() == WorkerCalls::kNone, "no call waited too long");
    }
    require(num_answered <= num_asked, "no call is answered twice");
    calls.reset();
    counts.accepted++;
}

}  // namespace moe_pack
