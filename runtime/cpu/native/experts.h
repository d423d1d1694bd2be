// Experts over tokens: select neurons, compute those that run, add up their down rows (docs/model.md).
//
// Selection can be a call of its own (a runtime that brings rows in between). All sizes have been checked. Whatever the
// number of threads, the same values are added in the same order.
#pragma once

#include <cstdint>

#include "layout.h"
#include "pool.h"

namespace moe_pack {

enum class Outcome { done, cut, no_memory };  // cut: a map lost a page that was read

// An expert and its tokens: rows of x, with the router's weights, and the rows of y to add to (null: the same).
struct ExpertWork {
    const ExpertLayout* layout;
    Rows selector, records;
    float threshold;
    int32_t num_tokens;
    const int64_t* tokens;
    const float* weights;
    const int64_t* outputs = nullptr;
    Rows extra = {};  // one row: what is added to each token's output; where the layout has it
    // What the selector told of these tokens, [tokens, f], and the neurons that run for any of them, rising, at most:
    // no other record is read. `neurons` is null: the selector is asked.
    const float* a = nullptr;
    const uint8_t* runs = nullptr;
    const int32_t* neurons = nullptr;
    int32_t num_neurons = 0;
    // Instead of `a` and `runs`, for one token: [num_neurons], of `neurons` alone, which all run. Without a selector
    // all three are null.
    const float* listed_a = nullptr;
    int32_t* num_read = nullptr;  // if given, the number of records that are read is added to it
    const uint8_t *selector_panels = nullptr, *record_panels = nullptr;  // the same in panels (panels.h); null: not there
};

// y[output] += weight * expert(x[token]) for every expert and each of its tokens. x, y: float32 [tokens, d].
Outcome run_experts(Pool& pool, const ExpertWork* works, int32_t num_works, const float* x, float* y);

// A selector and its tokens, rows of x; what it tells goes to `a` [tokens, f], `runs` u8 [tokens, f] and `neurons`
// [f]: those that run for any token, rising, `num_neurons` of them. Without a selector all may run, and `a` is not
// written.
struct SelectorWork {
    const ExpertLayout* layout;
    Rows selector;
    float threshold;
    int32_t num_tokens;
    const int64_t* tokens;
    float* a;
    uint8_t* runs;
    int32_t* neurons;
    int32_t num_neurons = 0;
};
Outcome select_neurons(Pool& pool, SelectorWork* works, int32_t num_works, const float* x);

}  // namespace moe_pack
