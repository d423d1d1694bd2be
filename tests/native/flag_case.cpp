// Calls through a flag: a fake GPU in a thread replays graphs of calls, another thread answers them. What the two exchange
// is plain memory, so that ThreadSanitizer sees every access that the flag does not order.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "cases.h"
#include "flag_calls.h"

namespace moe_pack {
namespace {

constexpr auto kLong = std::chrono::milliseconds(100'000);

struct Call {
    int32_t place, num_tokens;
};

struct Given {
    std::atomic<int32_t> flag{0};
    CallBuffers sizes;
    Exact<int32_t> counts;
    Exact<float> x, y;
    std::vector<Call> graph;

    Given(Random& random, int32_t num_tokens, int32_t num_places, int32_t k, int32_t d)
        : sizes{&flag, nullptr, nullptr, num_tokens, num_places, k, d},
          counts(random, (size_t)num_tokens * num_places * k),
          x(random, (size_t)num_tokens * d),
          y(random, (size_t)num_tokens * d) {
        sizes.counts = counts.get();
        sizes.y = y.get();
        for (int64_t left = random.between(1, 4); left > 0; left--)
            graph.push_back({(int32_t)random.between(0, num_places - 1), (int32_t)random.between(1, num_tokens)});
        fill(random);
    }
    // What the GPU hands over before a call: other numbers each time.
    void fill(Random& random) {
        for (size_t i = 0; i < counts.size(); i++) counts[i] = random.chance(40) ? (int32_t)random.between(-1, 3) : 0;
        for (size_t i = 0; i < x.size(); i++) x[i] = (float)random.between(1, 1000);
    }
    bool is_left(int32_t at) const {
        for (int32_t i = 0; i < sizes.k; i++)
            if (counts[(size_t)at * sizes.k + i] != 0) return true;
        return false;
    }
    // What the CPU makes of it.
    float computed(int32_t at, int32_t column) const {
        return x[(size_t)(at / sizes.num_places) * sizes.d + column] + (float)at;
    }
    int32_t number(const Call& call) const { return (call.num_tokens - 1) * sizes.num_places + call.place + 1; }
    void check(const Call& call) const {
        for (int32_t token = 0; token < call.num_tokens; token++)
            for (int32_t column = 0, at = token * sizes.num_places + call.place; column < sizes.d; column++)
                require(y[(size_t)token * sizes.d + column] == (is_left(at) ? computed(at, column) : 0.0f),
                        "the answer of a call");
    }
};

// The thread that answers. `is_late`: whether it takes longer than the limit, until it is told to go on.
struct Answerer {
    FlagCalls& calls;
    Given& given;
    std::atomic<bool> is_late{false};
    std::atomic<int> num_begun{0}, num_done{0};

    void run(uint64_t seed) {
        Random random(seed);
        for (int32_t at; (at = calls.next()) != FlagCalls::kNone;) {
            require(at >= 0 && at < given.sizes.num_tokens * given.sizes.num_places, "a place of a token");
            require(given.is_left(at), "something is left at a place that is asked for");
            num_begun++;
            if (random.chance(10)) usleep((useconds_t)random.between(1, 300));
            while (is_late) usleep(50);
            for (int32_t column = 0; column < given.sizes.d; column++)
                given.y[(size_t)(at / given.sizes.num_places) * given.sizes.d + column] = given.computed(at, column);
            num_done++;
        }
    }
};

// As a stream does: the number after all that was written before, then the wait.
void ask(Given& given, const Call& call) {
    given.flag.store(given.number(call), std::memory_order_release);
    while (given.flag.load(std::memory_order_acquire) != 0) std::this_thread::yield();
}

// Graphs one after the other, with nothing between them: the next is queued before the last ends.
void replay(Random& random, Given& given) {
    for (int64_t left = random.between(1, 12); left > 0; left--)
        for (const Call& call : given.graph) {
            given.fill(random);
            if (random.chance(5)) usleep((useconds_t)random.between(1, 30'000));  // then nobody spins any more
            ask(given, call);
            given.check(call);
        }
}

// A call that is not answered in time, with the rest of its token, and the next token.
void run_late(Random& random, Given& given, FlagCalls& calls, Answerer& answerer) {
    Call late = given.graph[0];
    late.num_tokens = 1;
    given.counts.fill(1);
    answerer.is_late = true;
    ask(given, late);
    for (const Call& call : given.graph) ask(given, call);  // of the same token
    if (random.chance(50)) {
        require(calls.take_fault() == late.place, "the place that was waited for");
        ask(given, given.graph[0]);  // of the next token, while the first call is still at work
    }
    require(calls.take_fault() == given.graph[0].place, "the place that was waited for");
    require(calls.take_fault() == FlagCalls::kNone, "a fault is told once");
    require(answerer.num_begun <= 1, "nothing else is computed meanwhile");
    answerer.is_late = false;
    while (answerer.num_done < 1) usleep(50);
}

void close_in_child(FlagCalls& calls) {
#if !defined(__SANITIZE_THREAD__) && !defined(MOE_PACK_EMULATED)  // which do not bear threads behind a fork
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const bool is_none = calls.next() == FlagCalls::kNone && calls.take_fault() == FlagCalls::kNone;
        calls.close();
        calls.~FlagCalls();
        _exit(is_none ? 0 : 1);
    }
    int status = 0;
    require(child > 0 && waitpid(child, &status, 0) == child, "a child is started");
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child closes calls and ends");
#else
    (void)calls;
#endif
}

}  // namespace

void play_flags(Random& random) {
    Given given(random, (int32_t)random.between(1, 3), (int32_t)random.between(1, 5), (int32_t)random.between(1, 3),
                (int32_t)random.between(1, 40));
    const bool is_late = random.chance(30);
    auto calls = std::make_unique<FlagCalls>(given.sizes, is_late ? std::chrono::milliseconds(2) : kLong);
    Answerer answerer{*calls, given};
    std::thread answering([&, seed = random.next()] { answerer.run(seed); });
    if (is_late) {
        run_late(random, given, *calls, answerer);
    } else {
        std::thread gpu([&, seed = random.next()] {
            Random own(seed);
            replay(own, given);
        });
        gpu.join();
        require(calls->take_fault() == FlagCalls::kNone, "no call waited too long");
    }
    if (random.chance(20)) {
        given.flag = random.pick({-1, INT32_MIN, INT32_MAX, given.sizes.num_tokens * given.sizes.num_places + 1});
        while (given.flag != 0) std::this_thread::yield();
        require(calls->take_fault() == 0, "a number of no call is a fault");
    }
    if (random.chance(10)) close_in_child(*calls);
    answerer.is_late = random.chance(50);
    given.counts.fill(1);
    std::thread waiting([&] { ask(given, given.graph[0]); });
    while (random.chance(50)) usleep(100);
    if (answerer.is_late && !is_late)
        while (given.flag == 0) std::this_thread::yield();  // so that it waits when the calls are closed
    else
        waiting.join();
    calls->close();
    if (waiting.joinable()) waiting.join();
    require(given.flag == 0, "nobody waits once the calls are closed");
    answerer.is_late = false;
    answering.join();
}

void flag_case(Random& random, Pools&, Counts& counts) {
    play_flags(random);
    counts.accepted++;
}

}  // namespace moe_pack
