// Layouts in the numbers that Python hands over: legal ones, and such as were tampered with.
#pragma once

#include <vector>

#include "layout.h"
#include "random.h"

namespace moe_pack {

// A layout's numbers; `tampered` with, they may still be legal.
struct Numbers {
    std::vector<int32_t> values;
    bool tampered = false;
};

// What a case may cost: products of inputs and weights.
constexpr int64_t kMaxProducts = 300'000;
constexpr int64_t kMaxBytes = 2 << 20;

struct Sizes {
    int32_t num_cols, num_rows, num_tokens;
};
Sizes random_sizes(Random& random);

// An expert of 64 or 128 neurons, or rows, may have the form that panels take.
Numbers random_expert(Random& random, const Sizes& sizes);
Numbers random_rows(Random& random, const Sizes& sizes);

// Fails the run if what was accepted does not keep its promises: parts inside rows, sizes that were asked for.
void check_expert(const ExpertLayout& layout, const std::vector<int32_t>& numbers);
void check_rows(const RowsLayout& layout, const std::vector<int32_t>& numbers);

// The largest legal sizes are accepted, and the next larger refused; they are not run.
void check_limits();

}  // namespace moe_pack
