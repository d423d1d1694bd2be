// The layers of a decoder, each computed by one call: the operations of its halves one after the other, without Python.
//
// Every value is that of the separate operations (attention.h, experts.h, norm.h, router.h, rows.h), to the bit. All
// sizes have been checked.
#pragma once

#include <cstdint>
#include <vector>

#include "cached_rows.h"
#include "experts.h"
#include "products.h"
#include "router.h"

namespace moe_pack {

// An expert's rows; `records` are null until it is set.
struct LayerExpert {
    ExpertLayout layout;
    Rows selector, records, extra;
    float threshold;
    const uint8_t *selector_panels = nullptr, *record_panels = nullptr;  // as in ExpertWork
};

// What a layer computes with:
//     x += factor * o(attend(q(n), k(n), v(n))),         n = norm(x)
//     x += factor * (sum of experts(m) + unrouted(m)),   m = norm(x)
struct LayerWeights {
    int32_t d, num_heads, num_kv_heads, head_dim;
    int32_t window;              // positions that one sees at most; 0: all
    bool is_chunked;             // the window does not slide
    bool interleaved;            // as in AttentionWork
    bool norms_projections;      // q_norm and k_norm are of whole projections, not of each head
    float scale, eps, factor;    // factor: of what a half adds
    const float *attention_norm, *mlp_norm;    // [d]
    const float *q_norm, *k_norm, *sinks;      // or null
    DenseMatrix q, k, v, o;      // none: Python has run the first half
    DenseMatrix router;          // none: Python routes, or the layer has no experts
    RouterWork routing;          // what depends on tokens is left out
    DenseMatrix up, gate, down;  // what runs for every token: the shared expert, or a dense one; or none
    DenseMatrix shared_router;   // a row, the sigmoid of whose product scales the shared expert; or none
    ExpertLayout unrouted;       // its neuron function, and whether it has a gate
    std::vector<LayerExpert> experts;
    const float *rotation_in, *rotation_out, *hartley;  // of rotated layers, as in RotationWork; or null
};

// A sequence's keys and values of the layer.
struct SequenceCache {
    CachedRows rows;
    uint8_t *keys, *values;
    int32_t places, start;
};

// The tokens of a pass, equally many of each sequence, and what a call writes. Null: not wanted, or there is none.
struct LayerPass {
    int32_t num_tokens, num_sequences, num_angles;
    const SequenceCache* caches;
    const float *cosines, *sines;  // [T, num_angles]
    float* x;                      // [T, d]: hidden states, changed
    float* inputs;                 // [T, d]: what router and experts get
    float* unrouted;               // [T, d]
    int64_t* experts;              // [T, k]
    float* weights;                // [T, k]
};

// Memory for what lies between the operations of a layer, grown as calls need it and kept.
class LayerRoom {
  public:
    ~LayerRoom();
    LayerRoom() = default;
    LayerRoom(const LayerRoom&) = delete;
    LayerRoom& operator=(const LayerRoom&) = delete;
    // Drops all arrays, and makes space for so many floats in `count` arrays. False if there is no memory.
    bool reset(size_t num_floats, int count);
    // The next array of the space, aligned to 64 bytes.
    float* take(size_t num_floats);

  private:
    float* block_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

// The first half, if it has attention, the norm of the second, its router, and what runs for every token.
Outcome run_first_half(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room);

// Whether all experts that were chosen are set.
bool are_set(const LayerWeights& layer, const LayerPass& pass);

// The rest: routed experts, which are all set, and the residual sum.
Outcome run_second_half(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room);

// y[t] *= sigmoid(logits[t]), for y [tokens, d].
void scale_by_sigmoid(const float* logits, int32_t num_tokens, int32_t d, float* y);

// out[i] = h of neuron i from `up` and `gate`, n values each; without a gate it is null.
Outcome activate(Pool& pool, const ExpertLayout& layout, const float* gate, const float* up, size_t n, float* out);

}  // namespace moe_pack
