// Random cases for the kernels of runtime/cpu/native, to be run under sanitizers (`make fuzz`).
//
//   fuzz [--seconds N] [--cases N] [--seed S]
//
// Case i is made from seed S + i alone. What fails says the seed that repeats it: `fuzz --seed S --cases 1`.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <string>

#include "cases.h"
#include "layouts.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace moe_pack {
namespace {

constexpr unsigned kHangSeconds = 120;  // no case takes one, but on a busy machine under a sanitizer

// For whoever ends the program: its name, and the seed of the case that runs.
const char* program;
uint64_t current_seed;

void say_seed() {
    auto seed = (unsigned long long)current_seed;
    std::fprintf(stderr, "fuzz: failed; repeat it with %s --seed %llu --cases 1\n", program, seed);
}

void on_signal(int number) {
    std::fprintf(stderr, "fuzz: %s\n", number == SIGALRM ? "a case does not end" : "aborted");
    say_seed();
    _exit(1);
}

void run_case(uint64_t seed, Pools& pools, Counts& counts) {
    current_seed = seed;
    alarm(kHangSeconds);
    Random random(seed);
    int64_t kind = random.between(1, 100);
    auto run = kind <= 32   ? expert_case
               : kind <= 40 ? share_case
               : kind <= 60 ? rows_case
               : kind <= 72 ? attention_case
               : kind <= 82 ? layer_case
               : kind <= 90 ? bytes_case
               : kind <= 94 ? cut_case
               : kind <= 95 ? flag_case
               : kind <= 97 ? pool_case
                            : reader_case;
    run(random, pools, counts);
    counts.cases++;
}

}  // namespace

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fprintf(stderr, "fuzz: ");
    std::vfprintf(stderr, format, arguments);
    std::fprintf(stderr, "\n");
    va_end(arguments);
    say_seed();
    _exit(1);
}

const std::vector<const Kernels*>& instruction_sets() {
    static const std::vector<const Kernels*> sets = [] {
        std::vector<const Kernels*> found;
        for (const char* name : {"portable", "neon", "avx2", "avx512", "avx512vbmi"}) {
            const Kernels* kernels = best_kernels(name);
            if (found.empty() || found.back() != kernels) found.push_back(kernels);
        }
        return found;
    }();
    return sets;
}

Pool& Pools::open(size_t set_idx, int threads) {
    std::unique_ptr<Pool>& pool = pools_[set_idx][threads - 1];
    if (!pool) {
        pool = std::make_unique<Pool>(threads, *instruction_sets()[set_idx]);
        await_threads(*pool);
    }
    pool->take_digits(0);
    pool->take_tokens_alone(false);
    return *pool;
}

void await_threads(Pool& pool) {
    std::atomic<int> missing{pool.threads()};
    auto item = [](void* context, int, int, int) {
        auto& missing = *static_cast<std::atomic<int>*>(context);
        missing--;
        while (missing > 0) sched_yield();  // so that no thread takes another's item
    };
    std::lock_guard<std::mutex> lock(pool.one_job());
    require(pool.run(2 * pool.threads(), item, &missing), "every thread takes an item, and claims its next");
}

}  // namespace moe_pack

// UndefinedBehaviorSanitizer asks for this; it would exit without telling anybody.
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options() {
    return "abort_on_error=1:print_stacktrace=1";
}

int main(int count, char** arguments) {
    using namespace moe_pack;
    using Clock = std::chrono::steady_clock;
    program = arguments[0];
    long long seconds = 0, cases = 0;
    uint64_t seed = (uint64_t)std::chrono::system_clock::now().time_since_epoch().count() % 1'000'000'000;
    for (int i = 1; i + 1 < count; i += 2) {
        std::string name = arguments[i];
        if (name == "--seconds") seconds = std::stoll(arguments[i + 1]);
        if (name == "--cases") cases = std::stoll(arguments[i + 1]);
        if (name == "--seed") seed = std::stoull(arguments[i + 1]);
    }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    __sanitizer_set_death_callback(say_seed);
#endif
    std::signal(SIGALRM, on_signal);
    std::signal(SIGABRT, on_signal);
    check_limits();
    std::string names;
    for (const Kernels* kernels : instruction_sets()) names += std::string(" ") + kernels->name;
    Counts counts;
    {
        Pools pools;
        const auto end = Clock::now() + std::chrono::seconds(seconds);
        for (uint64_t i = 0; (cases && i < (uint64_t)cases) || Clock::now() < end; i++) run_case(seed + i, pools, counts);
    }
    alarm(0);
    std::printf("fuzz:%s: %lld cases from seed %llu on\n", names.c_str(), (long long)counts.cases,
                (unsigned long long)seed);
    std::printf("    %lld layouts accepted, %lld refused; %lld compared with plain sums, %lld cut while read\n",
                (long long)counts.accepted, (long long)counts.refused, (long long)counts.compared,
                (long long)counts.cut);
    return counts.cases > 0 ? 0 : 1;
}
