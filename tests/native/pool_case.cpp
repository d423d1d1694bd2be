// Threads, forks, and maps whose file is cut.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "cases.h"
#include "experts.h"
#include "layouts.h"
#include "plain.h"
#include "rows.h"

namespace moe_pack {
namespace {

// Items seen, by no more than one thread each.
struct Seen {
    std::vector<int> times;
    int threads;
};

void run_job(Pool& pool, int count, bool alone) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    Seen seen = {std::vector<int>(count), pool.threads()};
    auto item = [](void* context, int item, int next, int worker) {
        auto& s = *static_cast<Seen*>(context);
        require(worker >= 0 && worker < s.threads, "a worker's number");
        require(next == -1 || (next > item && next < (int)s.times.size()), "the next item");
        s.times[item]++;
    };
    require(alone ? pool.run_alone(count, item, &seen) : pool.run(count, item, &seen), "a job is whole");
    for (int times : seen.times) require(times == 1, "every item is done once");
}

void run_jobs(Pool& pool, uint64_t seed) {
    Random random(seed);
    for (int i = 0; i < 30; i++) {
        run_job(pool, random.pick({0, 1, 2, 3, 20, 1000}), random.chance(10));
        if (random.chance(10)) usleep((useconds_t)random.between(1, 300));  // workers spin, fall asleep, or are asleep
    }
}

// A child has none of its parent's threads: their pool works there, and is closed, and so is another.
void run_in_child(Pool& pool, uint64_t seed) {
#if !defined(__SANITIZE_THREAD__) && !defined(MOE_PACK_EMULATED)  // which do not bear threads behind a fork
    pid_t child = fork();
    if (child == 0) {
        alarm(60);  // not the parent's: it would leave a child behind that waits forever
        run_jobs(pool, seed);
        auto* own = new Pool(3, pool.kernels());
        run_jobs(*own, seed);
        pool.~Pool();
        run_jobs(*own, seed + 1);
        delete own;
        _exit(0);
    }
    int status = 0;
    require(child > 0 && waitpid(child, &status, 0) == child, "a child is started");
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child works and ends");
#endif
    run_jobs(pool, seed + 2);
}

// Bytes in a file of their own, mapped.
class Mapped {
  public:
    explicit Mapped(const std::vector<uint8_t>& bytes) : num_bytes_(bytes.size()), file_(memfd_create("fuzz", 0)) {
        require(file_ >= 0 && ftruncate(file_, (off_t)num_bytes_) == 0, "a file is made");
        at_ = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        require(at_ != MAP_FAILED, "a file is mapped");
        std::memcpy(at_, bytes.data(), num_bytes_);
    }
    ~Mapped() {
        munmap(at_, num_bytes_);
        close(file_);
    }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;

    const uint8_t* bytes() const { return static_cast<const uint8_t*>(at_); }
    void cut(size_t num_bytes) { require(ftruncate(file_, (off_t)num_bytes) == 0, "a file is cut"); }

  private:
    size_t num_bytes_;
    int file_;
    void* at_;
};

}  // namespace

void pool_case(Random& random, Pools&, Counts&) {
    Pool* pool = new Pool((int)random.between(1, 6), *instruction_sets()[0]);
    uint64_t seed = random.next();
    std::vector<std::thread> users;
    for (int64_t i = random.between(0, 3); i > 0; i--) users.emplace_back([pool, seed, i] { run_jobs(*pool, seed + i); });
    run_jobs(*pool, seed);
    for (std::thread& user : users) user.join();
    if (random.chance(30)) {
        await_threads(*pool);
        run_in_child(*pool, seed);
    }
    delete pool;
}

void cut_case(Random& random, Pools& pools, Counts& counts) {
#if defined(__SANITIZE_THREAD__)
    // Its signal handler blocks all signals, which a jump out of it leaves blocked: the second fault would be the last.
    return;
#endif
    Sizes sizes = random_sizes(random);
    size_t set_idx = pools.any_set(random);
    Pool& pool = random.chance(50) ? pools.alone(set_idx) : pools.several(random, set_idx);
    Numbers numbers = random_expert(random, sizes);
    ExpertLayout layout;
    if (numbers.tampered || sizes.num_tokens == 0) return;
    require(read_expert_layout(numbers.values.data(), numbers.values.size(), &layout) == nullptr, "a legal layout");
    size_t selector_bytes = layout.selector == Selector::none ? 0 : layout.selector_bytes();
    const size_t rows_bytes = selector_bytes + layout.records_bytes();
    std::vector<uint8_t> bytes(rows_bytes + layout.extra_row_bytes);
    for (uint8_t& byte : bytes) byte = (uint8_t)random.next();
    Mapped whole(bytes), lost(bytes);
    lost.cut(random.between(0, (int64_t)(bytes.size() - 1) / 4096) * 4096);

    Exact<float> x(random, (size_t)sizes.num_tokens * sizes.num_cols), y(random, x.size()), again(random, x.size());
    fill_inputs(random, x.get(), x.size());
    Exact<int64_t> tokens(random, sizes.num_tokens);
    Exact<float> weights(random, sizes.num_tokens);
    for (size_t t = 0; t < tokens.size(); t++) tokens[t] = (int64_t)t;
    weights.fill(1.0f);
    auto run = [&](const Mapped& from, Exact<float>& to) {
        to.fill(0.0f);
        ExpertWork work = {&layout, from.bytes(), from.bytes() + selector_bytes, 0.0f, sizes.num_tokens, tokens.get(),
                           weights.get(), nullptr, from.bytes() + rows_bytes};
        return run_experts(pool, &work, 1, x.get(), to.get());
    };
    uint32_t sum = 0;
    uint64_t parity = 0;
    require(run(whole, y) == Outcome::done, "experts of a whole file");
    // Rows that do not run and gaps between parts are not read, so that not every cut is met.
    Outcome met = run(lost, again);
    require(met == Outcome::cut || met == Outcome::done, "experts of a cut file");
    counts.cut += met == Outcome::cut;
    require(checksum(pool, lost.bytes(), bytes.size(), &sum) == Outcome::cut, "a cut file's checksum");
    require(bytes.size() % 4096 % 256 != 0 || read_only(pool, lost.bytes(), bytes.size(), &parity) == Outcome::cut,
            "reading a cut file");
    Exact<uint8_t> out(random, bytes.size());
    const int32_t first = 0;
    require(gather(pool, lost.bytes(), bytes.size(), &first, 1, out.get()) == Outcome::cut, "gathering from a cut file");
    require(run(whole, again) == Outcome::done && y.same_bits(again), "what follows a cut file is as before");
    require(checksum(pool, whole.bytes(), bytes.size(), &sum) == Outcome::done, "a whole file's checksum");
    require(sum == plain_crc(bytes.data(), bytes.size()), "a checksum behind a cut one");
}

}  // namespace moe_pack
