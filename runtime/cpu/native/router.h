// Which experts tokens go to, from their router's logits. All sizes have been checked.
#pragma once

#include <cstdint>

namespace moe_pack {

enum class RouterKind : int32_t {
    softmax_topk = 0,
    topk_softmax = 1,
    sigmoid_topk = 2,
    sparsemixer = 3,
    sqrtsoftplus_topk = 4,
    topk_sigmoid = 5
};

struct RouterWork {
    RouterKind kind;
    int32_t num_experts, num_chosen, num_groups, num_chosen_groups;
    float least_sum;  // added to the sum that weights are divided by; below zero: they are not divided
    float factor;
    float jitter;  // of sparsemixer
    int32_t num_tokens;
    const float* logits;  // [T, experts]
    const float* bias;    // [experts], for choosing alone; may be null
};

// experts, weights: [T, chosen], best first, ties to the lowest index. `room`: of 4 * experts floats.
void route(const RouterWork& work, float* room, int64_t* experts, float* weights);

}  // namespace moe_pack
