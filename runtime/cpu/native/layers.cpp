#include "layers.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "norm.h"
#include "rotation.h"
#include "products.h"
#include "tiles.h"

namespace moe_pack {
namespace {

constexpr size_t kAloneValues = 1 << 14;    // of neurons, likewise
constexpr size_t kActivateValues = 1 << 12;  // a thread takes at once

size_t padded(size_t num_floats) { return (num_floats + kReadPastFloats + 15) / 16 * 16; }

// ---- what lies between products -----------------------------------------------------------------------------------

void norm_rows(Pool& pool, const float* x, const float* weight, int32_t num_rows, int32_t n, float eps, float* out) {
    for (int32_t r = 0; r < num_rows; r++)
        rms_norm_row(pool.kernels(), x + (size_t)r * n, weight, n, eps, out + (size_t)r * n);
}

void add_residual(const float* y, size_t count, float factor, float* x) {
    for (size_t i = 0; i < count; i++) x[i] += factor == 1.0f ? y[i] : y[i] * factor;
}

Outcome attend_each(Pool& pool, const LayerWeights& layer, const LayerPass& pass, const float* q, const float* k,
                    const float* v, float* out) {
    AttentionWork work = {};
    work.num_heads = layer.num_heads;
    work.num_kv_heads = layer.num_kv_heads;
    work.head_dim = layer.head_dim;
    work.num_tokens = pass.num_tokens / pass.num_sequences;
    work.num_angles = pass.num_angles;
    work.interleaved = layer.interleaved;
    work.scale = layer.scale;
    work.sinks = layer.sinks;
    if (!layer.norms_projections && layer.q_norm != nullptr) {
        work.q_norm = layer.q_norm;
        work.k_norm = layer.k_norm;
        work.eps = layer.eps;
    }
    const size_t width = (size_t)layer.num_heads * layer.head_dim;
    const size_t kv_width = (size_t)layer.num_kv_heads * layer.head_dim;
    Outcome found = Outcome::done;
    for (int32_t s = 0; found == Outcome::done && s < pass.num_sequences; s++) {
        const SequenceCache& cache = pass.caches[s];
        const size_t first = (size_t)s * work.num_tokens;
        work.places = cache.places;
        work.start = cache.start;
        work.window = layer.is_chunked && layer.window ? cache.start % layer.window + 1 : layer.window;
        work.q = q + first * width;
        work.k = k + first * kv_width;
        work.v = v + first * kv_width;
        work.cosines = pass.cosines + first * pass.num_angles;
        work.sines = pass.sines + first * pass.num_angles;
        work.rows = cache.rows;
        work.keys = cache.keys;
        work.values = cache.values;
        found = attend(pool, work, out + first * width);
    }
    return found;
}

// x += attention(norm(x))
Outcome run_attention(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room) {
    const size_t tokens = pass.num_tokens, q_floats = tokens * layer.q.num_rows, kv_floats = tokens * layer.k.num_rows;
    float *normed = room.take(tokens * layer.d), *q = room.take(q_floats), *k = room.take(kv_floats);
    float *v = room.take(kv_floats), *mixed = room.take(q_floats), *y = room.take(tokens * layer.d);
    norm_rows(pool, pass.x, layer.attention_norm, pass.num_tokens, layer.d, layer.eps, normed);
    Products projected(pool, normed, pass.num_tokens);
    projected.add(layer.q, q);
    projected.add(layer.k, k);
    projected.add(layer.v, v);
    Outcome found = projected.run();
    if (found != Outcome::done) return found;
    if (layer.norms_projections && layer.q_norm != nullptr) {
        norm_rows(pool, q, layer.q_norm, pass.num_tokens, layer.q.num_rows, layer.eps, q);
        norm_rows(pool, k, layer.k_norm, pass.num_tokens, layer.k.num_rows, layer.eps, k);
    }
    found = attend_each(pool, layer, pass, q, k, v, mixed);
    if (found != Outcome::done) return found;
    Products output(pool, mixed, pass.num_tokens);
    output.add(layer.o, y);
    found = output.run();
    if (found == Outcome::done) add_residual(y, tokens * layer.d, layer.factor, pass.x);
    return found;
}

// The router's choice, and the output of what runs for every token.
Outcome run_inputs(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room) {
    const size_t tokens = pass.num_tokens, f = layer.up.num_rows;
    float *logits = room.take(tokens * layer.router.num_rows), *marks = room.take(4 * (size_t)layer.router.num_rows);
    float *up = room.take(tokens * f), *gate = room.take(tokens * f), *shares = room.take(tokens);
    norm_rows(pool, pass.x, layer.mlp_norm, pass.num_tokens, layer.d, layer.eps, pass.inputs);
    Products products(pool, pass.inputs, pass.num_tokens);
    products.add(layer.router, logits);
    products.add(layer.up, up);
    products.add(layer.gate, gate);
    products.add(layer.shared_router, shares);
    Outcome found = products.run();
    if (found != Outcome::done) return found;
    if (layer.router.rows != nullptr) {
        RouterWork routing = layer.routing;
        routing.num_tokens = pass.num_tokens;
        routing.logits = logits;
        route(routing, marks, pass.experts, pass.weights);
    }
    if (layer.down.rows == nullptr) return Outcome::done;
    found = activate(pool, layer.unrouted, layer.gate.rows == nullptr ? nullptr : gate, up, tokens * f, up);
    if (found != Outcome::done) return found;
    Products output(pool, up, pass.num_tokens);
    output.add(layer.down, pass.unrouted);
    found = output.run();
    if (found == Outcome::done && layer.shared_router.rows != nullptr)
        scale_by_sigmoid(shares, pass.num_tokens, layer.d, pass.unrouted);
    return found;
}

// ---- experts ------------------------------------------------------------------------------------------------------

// A token's place among those of an expert. A weight of zero: the expert does not run.
struct Chosen {
    int64_t expert, token;
    float weight;
};

std::vector<Chosen> chosen_of(const LayerWeights& layer, const LayerPass& pass) {
    const int32_t k = layer.routing.num_chosen;
    std::vector<Chosen> chosen;
    chosen.reserve((size_t)pass.num_tokens * k);
    for (int64_t t = 0; t < pass.num_tokens; t++)
        for (int64_t i = t * k; i < (t + 1) * k; i++)
            if (pass.weights[i] != 0.0f) chosen.push_back({pass.experts[i], t, pass.weights[i]});
    // By number, so that sums have one order; a token's own order stays among those of an expert.
    std::stable_sort(chosen.begin(), chosen.end(),
                     [](const Chosen& a, const Chosen& b) { return a.expert < b.expert; });
    return chosen;
}

// y += the weighted outputs of the chosen experts for their inputs.
Outcome run_chosen(Pool& pool, const LayerWeights& layer, const LayerPass& pass, const float* inputs, float* y) {
    const std::vector<Chosen> chosen = chosen_of(layer, pass);
    std::vector<int64_t> tokens(chosen.size());
    std::vector<float> weights(chosen.size());
    std::vector<ExpertWork> works;
    works.reserve(chosen.size());
    for (size_t i = 0; i < chosen.size(); i++) {
        tokens[i] = chosen[i].token;
        weights[i] = chosen[i].weight;
        if (i && chosen[i].expert == chosen[i - 1].expert) {
            works.back().num_tokens++;
            continue;
        }
        const LayerExpert& expert = layer.experts[chosen[i].expert];
        ExpertWork work = {&expert.layout, expert.selector, expert.records, expert.threshold,
                           1,              &tokens[i],      &weights[i]};
        work.extra = expert.extra;
        work.selector_panels = expert.selector_panels;
        work.record_panels = expert.record_panels;
        works.push_back(work);
    }
    return run_experts(pool, works.data(), (int32_t)works.size(), inputs, y);
}

RotationWork rotation_of(const LayerWeights& layer, const LayerPass& pass, const float* x, bool is_input) {
    RotationWork work = {};
    work.x = x;
    work.scale = is_input ? layer.rotation_in : layer.rotation_out;
    work.hartley = layer.hartley;
    work.num_rows = pass.num_tokens;
    work.d = layer.d;
    work.m = layer.d / (layer.d & -layer.d);
    work.is_scaled_first = is_input;
    return work;
}

// y = the weighted outputs of the chosen experts, in the coordinates of hidden states.
Outcome run_routed(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room, float* y) {
    const size_t count = (size_t)pass.num_tokens * layer.d;
    const bool is_rotated = layer.rotation_in != nullptr;
    float *rotated = room.take(is_rotated ? count : 0), *sum = is_rotated ? room.take(count) : y;
    std::fill_n(sum, count, 0.0f);
    if (!is_rotated) return run_chosen(pool, layer, pass, pass.inputs, sum);
    Outcome found = rotate_rows(pool, rotation_of(layer, pass, pass.inputs, true), rotated);
    if (found == Outcome::done) found = run_chosen(pool, layer, pass, rotated, sum);
    return found == Outcome::done ? rotate_rows(pool, rotation_of(layer, pass, sum, false), y) : found;
}

}  // namespace

// ---- room ---------------------------------------------------------------------------------------------------------

LayerRoom::~LayerRoom() { std::free(block_); }

bool LayerRoom::reset(size_t num_floats, int count) {
    const size_t wanted = padded(num_floats) + (size_t)count * padded(16);
    used_ = 0;
    if (wanted <= size_) return true;
    std::free(block_);
    block_ = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * wanted));
    size_ = block_ == nullptr ? 0 : wanted;
    return block_ != nullptr;
}

float* LayerRoom::take(size_t num_floats) {
    float* place = block_ + used_;
    used_ += padded(num_floats);
    return place;
}

// ---- layers -------------------------------------------------------------------------------------------------------

Outcome run_first_half(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room) {
    const size_t attention = 2 * (size_t)layer.d + 2 * (size_t)layer.q.num_rows + 2 * (size_t)layer.k.num_rows;
    const size_t inputs = 1 + layer.router.num_rows + 2 * (size_t)layer.up.num_rows;
    const size_t num_floats = pass.num_tokens * std::max(attention, inputs) + 4 * (size_t)layer.router.num_rows;
    if (!room.reset(num_floats, 6)) return Outcome::no_memory;
    Outcome found = layer.q.rows == nullptr ? Outcome::done : run_attention(pool, layer, pass, room);
    if (found != Outcome::done) return found;
    room.reset(num_floats, 6);
    return run_inputs(pool, layer, pass, room);
}

bool are_set(const LayerWeights& layer, const LayerPass& pass) {
    const size_t count = layer.router.rows == nullptr ? 0 : (size_t)pass.num_tokens * layer.routing.num_chosen;
    for (size_t i = 0; i < count; i++)
        if (layer.experts[pass.experts[i]].records.first == nullptr && pass.weights[i] != 0.0f) return false;
    return true;
}

Outcome run_second_half(Pool& pool, const LayerWeights& layer, const LayerPass& pass, LayerRoom& room) {
    const size_t count = (size_t)pass.num_tokens * layer.d;
    if (layer.experts.empty()) {
        add_residual(pass.unrouted, count, layer.factor, pass.x);
        return Outcome::done;
    }
    if (!room.reset(3 * count, 3)) return Outcome::no_memory;
    float* y = room.take(count);
    Outcome found = run_routed(pool, layer, pass, room, y);
    if (found != Outcome::done) return found;
    for (size_t i = 0; pass.unrouted != nullptr && i < count; i++) y[i] += pass.unrouted[i];
    add_residual(y, count, layer.factor, pass.x);
    return Outcome::done;
}

void scale_by_sigmoid(const float* logits, int32_t num_tokens, int32_t d, float* y) {
    for (int32_t t = 0; t < num_tokens; t++) {
        const float share = 1.0f / (1.0f + std::exp(-logits[t]));
        for (int32_t c = 0; c < d; c++) y[(size_t)t * d + c] *= share;
    }
}

// ---- neurons ------------------------------------------------------------------------------------------------------

Outcome activate(Pool& pool, const ExpertLayout& layout, const float* gate, const float* up, size_t n, float* out) {
    struct Neurons {
        const ExpertLayout& layout;
        const float *gate, *up;
        size_t n;
        float* out;
    } context = {layout, gate, up, n, out};
    const Pool::Work item = [](void* context, int item, int, int) {
        auto& c = *static_cast<Neurons*>(context);
        const size_t first = item * kActivateValues, stop = std::min(c.n, first + kActivateValues);
        for (size_t i = first; i < stop; i++) c.out[i] = selected(c.layout, c.up, c.gate, (int32_t)i);
    };
    const int count = (int)((n + kActivateValues - 1) / kActivateValues);
    std::lock_guard<std::mutex> lock(pool.one_job());
    const bool whole = n < kAloneValues ? pool.run_alone(count, item, &context) : pool.run(count, item, &context);
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
