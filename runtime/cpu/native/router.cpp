#include "router.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe_pack {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The order in which torch sorts: NaNs are the largest.
inline bool is_before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The largest values' places, best first, among equals the lowest; `taken` has room for a mark each.
template <class Use>
void largest(const float* values, int32_t count, int32_t wanted, float* taken, const Use& use) {
    std::fill(taken, taken + count, 0.0f);
    for (int32_t k = 0; k < wanted; k++) {
        int32_t best = -1;
        for (int32_t i = 0; i < count; i++)
            if (taken[i] == 0.0f && (best < 0 || is_before(values[i], values[best]))) best = i;
        taken[best] = 1.0f;
        use(k, best);
    }
}

void softmax(const float* logits, int32_t count, float* scores) {
    float most = kNever, sum = 0.0f;
    for (int32_t i = 0; i < count; i++) most = is_before(logits[i], most) ? logits[i] : most;
    for (int32_t i = 0; i < count; i++) sum += scores[i] = std::exp(logits[i] - most);
    for (int32_t i = 0; i < count; i++) scores[i] /= sum;
}

// ln(1 + e^v), which float32 cannot tell from v where v is large. A NaN stays one.
inline float softplus(float v) { return v > 20.0f ? v : std::log1p(std::exp(v)); }

// Scores of the groups that do not stay become the lowest of all.
void keep_best_groups(const RouterWork& work, float* scores, float* room) {
    int32_t size = work.num_experts / work.num_groups;
    int32_t deciding = std::min(size, work.kind == RouterKind::sigmoid_topk ? 2 : 1);
    float *strength = room, *marks = room + work.num_groups;
    for (int32_t g = 0; g < work.num_groups; g++) {
        const float* group = scores + g * size;
        float sum = 0.0f;
        largest(group, size, deciding, marks, [&](int32_t, int32_t i) { sum += group[i]; });
        strength[g] = sum;
    }
    float* stays = room + work.num_groups;
    largest(strength, work.num_groups, work.num_chosen_groups, stays, [](int32_t, int32_t) {});
    for (int32_t g = 0; g < work.num_groups; g++)
        if (stays[g] == 0.0f) std::fill(scores + g * size, scores + (g + 1) * size, kNever);
}

// The largest, then the largest of those left, ...; a weight is the share among those near it.
void mix_sparsely(const RouterWork& work, const float* logits, float* room, int64_t* experts, float* weights) {
    int32_t num_experts = work.num_experts;
    float* marks = room + num_experts;
    float *running = room, *near = room + 2 * num_experts;
    std::copy(logits, logits + num_experts, running);
    for (int32_t k = 0; k < work.num_chosen; k++) {
        largest(running, num_experts, 1, marks, [&](int32_t, int32_t i) { experts[k] = i; });
        float most = running[experts[k]];
        for (int32_t i = 0; i < num_experts; i++) {
            bool is_far = (most - logits[i]) / std::max(std::fabs(logits[i]), most) > 2.0f * work.jitter;
            near[i] = is_far ? kNever : running[i];
        }
        softmax(near, num_experts, near);
        weights[k] = near[experts[k]];
        running[experts[k]] = kNever;
    }
}

void route_token(const RouterWork& work, const float* logits, float* room, int64_t* experts, float* weights) {
    int32_t num_experts = work.num_experts;
    if (work.kind == RouterKind::sparsemixer) return mix_sparsely(work, logits, room, experts, weights);
    float *scores = room, *deciding = room + num_experts, *marks = room + 2 * num_experts;
    if (work.kind == RouterKind::topk_softmax) {
        largest(logits, num_experts, work.num_chosen, marks, [&](int32_t k, int32_t i) {
            experts[k] = i;
            scores[k] = logits[i];
        });
        softmax(scores, work.num_chosen, weights);
        return;
    }
    if (work.kind == RouterKind::softmax_topk)
        softmax(logits, num_experts, scores);
    else if (work.kind == RouterKind::sqrtsoftplus_topk)
        for (int32_t i = 0; i < num_experts; i++) scores[i] = std::sqrt(softplus(logits[i]));
    else
        for (int32_t i = 0; i < num_experts; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    const float* ranking = work.kind == RouterKind::topk_sigmoid ? logits : scores;
    for (int32_t i = 0; i < num_experts; i++) deciding[i] = work.bias ? ranking[i] + work.bias[i] : ranking[i];
    if (work.num_groups > 1) keep_best_groups(work, deciding, marks);
    largest(deciding, num_experts, work.num_chosen, marks, [&](int32_t k, int32_t i) {
        experts[k] = i;
        weights[k] = scores[i];
    });
}

}  // namespace

void route(const RouterWork& work, float* room, int64_t* experts, float* weights) {
    for (int32_t t = 0; t < work.num_tokens; t++) {
        float* chosen = weights + (size_t)t * work.num_chosen;
        const float* logits = work.logits + (size_t)t * work.num_experts;
        route_token(work, logits, room, experts + (size_t)t * work.num_chosen, chosen);
        float sum = work.least_sum;
        for (int32_t k = 0; k < work.num_chosen; k++) sum += chosen[k];
        for (int32_t k = 0; k < work.num_chosen; k++)
            chosen[k] = (work.least_sum < 0.0f ? chosen[k] : chosen[k] / sum) * work.factor;
    }
}

}  // namespace moe_pack
