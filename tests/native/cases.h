// The kinds of cases, and what they share.
#pragma once

#include <memory>
#include <vector>

#include "pool.h"
#include "random.h"

namespace moe_pack {

// Ends the program: says what is wrong, and the seed that repeats it.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

inline void require(bool holds, const char* what) {
    if (!holds) fail("%s", what);
}

// Returns when every thread of the pool has begun to work. A thread allocates memory while it starts, and a fork at that
// moment leaves AddressSanitizer's allocator locked in the child.
void await_threads(Pool& pool);

// Those this machine can run, slowest first.
const std::vector<const Kernels*>& instruction_sets();

// Pools of 1 to 4 threads of an instruction set, opened when they are first wanted. Each time they compute exactly, and
// tokens together.
class Pools {
  public:
    Pool& alone(size_t set_idx) { return open(set_idx, 1); }
    Pool& several(Random& random, size_t set_idx) { return open(set_idx, (int)random.between(2, 4)); }
    size_t any_set(Random& random) { return (size_t)random.between(0, (int64_t)instruction_sets().size() - 1); }

  private:
    Pool& open(size_t set_idx, int threads);

    std::unique_ptr<Pool> pools_[4][4];
};

// Two pools of one instruction set that compute alike.
struct TwoPools {
    Pool &alone, &several;

    // Of any set, with any numerics: inputs rounded or not, tokens together or each as if it were alone.
    TwoPools(Random& random, Pools& pools, size_t set_idx)
        : alone(pools.alone(set_idx)), several(pools.several(random, set_idx)) {
        const int digits = random.pick({0, 1, 2});
        const bool are_tokens_alone = random.chance(10);
        for (Pool* pool : {&alone, &several}) {
            pool->take_digits(digits);
            pool->take_tokens_alone(are_tokens_alone);
        }
    }
};

struct Counts {
    int64_t cases = 0, accepted = 0, refused = 0, compared = 0, cut = 0;
};

// Some experts' layouts, read; the accepted ones run, whole and of some neurons.
void expert_case(Random& random, Pools& pools, Counts& counts);

// Rows of one part: products and decoding.
void rows_case(Random& random, Pools& pools, Counts& counts);

// Attention and norms against plain sums.
void attention_case(Random& random, Pools& pools, Counts& counts);

// A layer of a decoder, whole and as its operations one by one.
void layer_case(Random& random, Pools& pools, Counts& counts);

// Checksums, gathering, reading.
void bytes_case(Random& random, Pools& pools, Counts& counts);

// Work on a map whose file is cut: the work ends as it should, and the next is whole.
void cut_case(Random& random, Pools& pools, Counts& counts);

// Pools opened, used by several threads, closed; used in a forked child.
void pool_case(Random& random, Pools& pools, Counts& counts);

// The host's share of a GPU's experts, with right and wrong requests.
void share_case(Random& random, Pools& pools, Counts& counts);

// Calls through a flag that a thread answers, or not in time, or that are closed; `play_flags` is one of them.
void play_flags(Random& random);
void flag_case(Random& random, Pools& pools, Counts& counts);

// Files read by several threads, cancelled, cut, closed while they are.
void reader_case(Random& random, Pools& pools, Counts& counts);

}  // namespace moe_pack
