// Layers of a decoder, each half a call, against the same operations one by one: the same values.
#include <algorithm>
#include <deque>

#include "attention.h"
#include "cases.h"
#include "layers.h"
#include "layouts.h"
#include "norm.h"
#include "panels.h"
#include "plain.h"
#include "rotation.h"
#include "rows.h"

namespace moe_pack {
namespace {

// Memory that a layer borrows.
class Held {
  public:
    Held(Random& random, Pool& pool, bool sane) : random_(random), pool_(pool), sane_(sane) {}

    float* floats(size_t count) {
        Exact<float>& made = floats_.emplace_back(random_, count);
        (sane_ ? fill_inputs : fill_wild)(random_, made.get(), made.size());
        return made.get();
    }
    uint8_t* bytes(size_t count, size_t unit) { return bytes_.emplace_back(random_, count, unit).get(); }

    DenseMatrix matrix(int32_t num_rows, int32_t num_cols) {
        DenseMatrix made;
        Numbers numbers;
        do numbers = random_rows(random_, {num_cols, num_rows, 1});
        while (numbers.tampered);
        require(read_rows_layout(numbers.values.data(), numbers.values.size(), &made.layout) == nullptr, "legal rows");
        uint8_t* rows = bytes((size_t)num_rows * made.layout.row_bytes, 1);
        for (int32_t r = 0; sane_ && r < num_rows; r++)
            make_sane(random_, made.layout.part, rows + (size_t)r * made.layout.row_bytes);
        made.rows = rows;
        made.num_rows = num_rows;
        if (may_panel() && made.layout.part.offset == 0 && can_panel(made.layout.part.part, made.layout.row_bytes, num_rows)) {
            require(put_in_panels(pool_, made.layout, rows, num_rows) == Outcome::done, "a matrix is put in panels");
            made.layout.in_panels = true;
        }
        made.bias = random_.chance(30) ? floats(num_rows) : nullptr;
        return made;
    }
    LayerExpert expert(int32_t d) {
        LayerExpert made = {};
        Numbers numbers;
        const int32_t num_rows = random_.chance(30) ? kMaxTile : (int32_t)random_.between(1, 40);
        do numbers = random_expert(random_, {d, num_rows, 1});
        while (numbers.tampered);
        ExpertLayout& layout = made.layout;
        require(read_expert_layout(numbers.values.data(), numbers.values.size(), &layout) == nullptr, "a legal layout");
        uint8_t* selector = bytes(layout.selector == Selector::none ? 0 : layout.selector_bytes(), 1);
        uint8_t* records = bytes(layout.records_bytes(), 1);
        made.selector = Rows(selector);
        made.records = Rows(records);
        made.extra = Rows(bytes(layout.extra_row_bytes, 1));
        made.threshold = random_.pick({0.0f, 0.1f, 1.0f});
        if (can_panel(layout) && may_panel()) add_panels(selector, records, &made);
        return made;
    }

  private:
    bool may_panel() { return pool_.kernels().panels != nullptr && random_.chance(60); }

    // Panels of sane rows: one that is left out because its neuron is zero must have a scale that is a number.
    void add_panels(uint8_t* selector, uint8_t* records, LayerExpert* made) {
        const ExpertLayout& layout = made->layout;
        for (const PlacedPart* part : {&layout.gate, &layout.up, &layout.down})
            for (int32_t r = 0; r < layout.num_rows; r++)
                make_sane(random_, *part, part->place == Place::selector ? selector + r * (size_t)layout.selector_row_bytes
                                                                         : records + r * (size_t)layout.record_row_bytes);
        uint8_t* selector_panels = bytes(selector_panel_bytes(layout), 1);
        uint8_t* record_panels = bytes(layout.records_bytes(), 1);
        for (int32_t tile = 0; tile < layout.num_rows / kMaxTile; tile++)
            make_tile(layout, made->selector, made->records, tile,
                      panel_in(selector_panels + (size_t)tile * kMaxTile * layout.selector_row_bytes),
                      panel_in(record_panels + (size_t)tile * kMaxTile * layout.record_row_bytes));
        made->selector_panels = selector_panels;
        made->record_panels = record_panels;
        made->threshold = 0.0f;
    }

    Random& random_;
    Pool& pool_;
    bool sane_;
    std::deque<Exact<float>> floats_;
    std::deque<Exact<uint8_t>> bytes_;
};

RouterWork random_routing(Random& random) {
    RouterWork made = {};
    made.kind = (RouterKind)random.between(0, 5);
    made.num_groups = (int32_t)random.between(1, 3);
    made.num_experts = made.num_groups * (int32_t)random.between(1, 4);
    made.num_chosen = (int32_t)random.between(1, made.num_experts);
    made.num_chosen_groups = (int32_t)random.between(1, made.num_groups);
    made.least_sum = random.pick({-1.0f, 0.0f, 1e-20f});
    made.factor = random.pick({1.0f, 2.5f, 0.0f});
    made.jitter = 0.1f;
    return made;
}

LayerWeights random_layer(Random& random, Held& held) {
    LayerWeights w = {};
    w.d = random.chance(70) ? kBlock * (int32_t)random.between(1, 3) : (int32_t)random.between(1, 100);
    w.num_kv_heads = (int32_t)random.between(1, 3);
    w.num_heads = w.num_kv_heads * (int32_t)random.between(1, 3);
    w.head_dim = random.chance(50) ? random.pick({16, 32, 64}) : (int32_t)random.between(1, 40);
    w.window = random.chance(50) ? 0 : (int32_t)random.between(1, 30);
    w.is_chunked = random.chance(20);
    w.interleaved = random.chance(50);
    w.norms_projections = random.chance(30);
    w.scale = 0.25f;
    w.eps = 1e-5f;
    w.factor = random.pick({1.0f, 1.0f, 0.5f});
    w.attention_norm = held.floats(w.d);
    w.mlp_norm = held.floats(w.d);
    const int32_t width = w.num_heads * w.head_dim, kv_width = w.num_kv_heads * w.head_dim;
    if (random.chance(40)) {
        w.q_norm = held.floats(w.norms_projections ? width : w.head_dim);
        w.k_norm = held.floats(w.norms_projections ? kv_width : w.head_dim);
    }
    w.sinks = random.chance(30) ? held.floats(w.num_heads) : nullptr;
    w.q = held.matrix(width, w.d);
    w.k = held.matrix(kv_width, w.d);
    w.v = held.matrix(kv_width, w.d);
    w.o = held.matrix(w.d, width);
    if (random.chance(75)) {
        w.routing = random_routing(random);
        w.routing.bias = random.chance(30) ? held.floats(w.routing.num_experts) : nullptr;
        w.router = held.matrix(w.routing.num_experts, w.d);
        for (int32_t e = 0; e < w.routing.num_experts; e++)
            w.experts.push_back(random.chance(5) ? LayerExpert{} : held.expert(w.d));
    }
    if (w.router.rows == nullptr || random.chance(50)) {
        const int32_t f = random.chance(50) ? kBlock : (int32_t)random.between(1, 90);
        w.up = held.matrix(f, w.d);
        w.down = held.matrix(w.d, f);
        if (random.chance(70)) w.gate = held.matrix(f, w.d);
        w.unrouted.function = (Function)random.between(0, 6);
        w.unrouted.limit = 1.0f;
        w.unrouted.gate.place = w.gate.rows == nullptr ? Place::none : Place::record;
    }
    if (w.d % kBlock == 0 && random.chance(40)) {
        const int32_t odd = w.d / (w.d & -w.d);
        w.rotation_in = held.floats(w.d);
        w.rotation_out = held.floats(w.d);
        w.hartley = held.floats((size_t)odd * odd);
    }
    return w;
}

// The arrays of a pass.
struct Arrays {
    Exact<float> x, inputs, unrouted, weights;
    Exact<int64_t> experts;
    std::deque<Exact<uint8_t>> cached;  // keys, then values, of each sequence
    std::vector<SequenceCache> caches;

    Arrays(Random& random, const LayerWeights& w, size_t num_tokens)
        : x(random, num_tokens * w.d),
          inputs(random, x.size()),
          unrouted(random, w.down.rows == nullptr ? 0 : x.size()),
          weights(random, num_tokens * w.routing.num_chosen),
          experts(random, weights.size()) {}

    void add_cache(Random& random, const LayerWeights& w, SequenceCache cache, const Exact<uint8_t>* from) {
        const size_t num_bytes = (size_t)w.num_kv_heads * cache.places * cache.rows.row_bytes;
        const size_t unit = cache.rows.kind == CacheKind::f32 ? sizeof(float) : 1;
        for (uint8_t** place : {&cache.keys, &cache.values}) {
            Exact<uint8_t>& made = cached.emplace_back(random, num_bytes, unit);
            *place = made.get();
            if (from != nullptr) made.copy_from(*from++);
        }
        caches.push_back(cache);
    }
    LayerPass pass(int32_t num_tokens, int32_t num_angles, const float* cosines, const float* sines) {
        return {num_tokens, (int32_t)caches.size(), num_angles, caches.data(), cosines, sines,
                x.get(), inputs.get(), unrouted.get(), experts.get(), weights.get()};
    }
};

void same_floats(const Exact<float>& a, const Exact<float>& b, const char* name) {
    for (size_t i = 0; i < a.size(); i++)
        if (!same_value(a[i], b[i])) fail("%s [%zu] of a layer is %.9g, one by one %.9g", name, i, a[i], b[i]);
}

using Floats = std::vector<float>;

// The operations of a layer one by one.
class OneByOne {
  public:
    OneByOne(Pool& pool, const LayerWeights& layer, const LayerPass& pass)
        : pool_(pool), w_(layer), p_(pass), count_((size_t)pass.num_tokens * layer.d) {}

    void first_half() {
        const Floats normed = norm(p_.x, w_.attention_norm, w_.d);
        Floats q = product(w_.q, normed), k = product(w_.k, normed), v = product(w_.v, normed), mixed(q.size());
        if (w_.norms_projections && w_.q_norm != nullptr) {
            q = norm(q.data(), w_.q_norm, w_.q.num_rows);
            k = norm(k.data(), w_.k_norm, w_.k.num_rows);
        }
        for (int32_t s = 0; s < p_.num_sequences; s++) attend_sequence(s, q, k, v, mixed);
        add(product(w_.o, mixed));
        const Floats inputs = norm(p_.x, w_.mlp_norm, w_.d);
        std::copy(inputs.begin(), inputs.end(), p_.inputs);
        if (w_.router.rows != nullptr) {
            const Floats logits = product(w_.router, inputs);
            RouterWork routing = w_.routing;
            routing.num_tokens = p_.num_tokens;
            routing.logits = logits.data();
            Floats room(4 * (size_t)routing.num_experts);
            route(routing, room.data(), p_.experts, p_.weights);
        }
        if (w_.down.rows == nullptr) return;
        Floats up = product(w_.up, inputs), gate;
        if (w_.gate.rows != nullptr) gate = product(w_.gate, inputs);
        Floats h(up.size());
        const float* gates = w_.gate.rows == nullptr ? nullptr : gate.data();
        done(activate(pool_, w_.unrouted, gates, up.data(), up.size(), h.data()));
        const Floats found = product(w_.down, h);
        std::copy(found.begin(), found.end(), p_.unrouted);
    }

    void second_half() {
        Floats y(count_);
        if (!w_.experts.empty()) {
            Floats rotated(p_.inputs, p_.inputs + count_);
            if (w_.rotation_in != nullptr) rotated = rotate(rotated, true);
            run(rotated, y);
            if (w_.rotation_in != nullptr) y = rotate(y, false);
        }
        for (size_t i = 0; w_.down.rows != nullptr && i < count_; i++)
            y[i] = w_.experts.empty() ? p_.unrouted[i] : y[i] + p_.unrouted[i];
        add(y);
    }

  private:
    static void done(Outcome found) { require(found == Outcome::done, "an operation of a layer is done"); }

    Floats norm(const float* x, const float* weight, int32_t n) {
        Floats out((size_t)p_.num_tokens * n);
        done(rms_norm(pool_, x, weight, p_.num_tokens, n, w_.eps, out.data()));
        return out;
    }
    Floats product(const DenseMatrix& m, const Floats& x) {
        Floats out((size_t)p_.num_tokens * m.num_rows);
        done(multiply(pool_, m.layout, m.rows, m.num_rows, x.data(), p_.num_tokens, out.data()));
        for (size_t i = 0; m.bias != nullptr && i < out.size(); i++) out[i] += m.bias[i % m.num_rows];
        return out;
    }
    void add(const Floats& y) {
        for (size_t i = 0; i < count_; i++) p_.x[i] += w_.factor == 1.0f ? y[i] : y[i] * w_.factor;
    }
    void attend_sequence(int32_t s, const Floats& q, const Floats& k, const Floats& v, Floats& mixed) {
        const SequenceCache& cache = p_.caches[s];
        AttentionWork work = {};
        work.num_heads = w_.num_heads;
        work.num_kv_heads = w_.num_kv_heads;
        work.head_dim = w_.head_dim;
        work.num_tokens = p_.num_tokens / p_.num_sequences;
        work.places = cache.places;
        work.start = cache.start;
        work.window = w_.is_chunked && w_.window ? cache.start % w_.window + 1 : w_.window;
        work.num_angles = p_.num_angles;
        work.interleaved = w_.interleaved;
        work.scale = w_.scale;
        work.eps = w_.eps;
        work.q_norm = w_.norms_projections ? nullptr : w_.q_norm;
        work.k_norm = w_.norms_projections ? nullptr : w_.k_norm;
        work.sinks = w_.sinks;
        work.rows = cache.rows;
        work.keys = cache.keys;
        work.values = cache.values;
        const size_t first = (size_t)s * work.num_tokens;
        work.q = q.data() + first * w_.q.num_rows;
        work.k = k.data() + first * w_.k.num_rows;
        work.v = v.data() + first * w_.v.num_rows;
        work.cosines = p_.cosines + first * p_.num_angles;
        work.sines = p_.sines + first * p_.num_angles;
        done(attend(pool_, work, mixed.data() + first * w_.q.num_rows));
    }
    Floats rotate(const Floats& x, bool is_first) {
        Floats out(x.size());
        const float* scale = is_first ? w_.rotation_in : w_.rotation_out;
        const RotationWork work = {x.data(), scale, w_.hartley, p_.num_tokens, w_.d, w_.d / (w_.d & -w_.d), is_first};
        done(rotate_rows(pool_, work, out.data()));
        return out;
    }
    // All experts at once, in their order.
    void run(const Floats& inputs, Floats& y) {
        std::deque<std::pair<std::vector<int64_t>, Floats>> given;
        std::vector<ExpertWork> works;
        for (size_t e = 0; e < w_.experts.size(); e++) {
            auto& [tokens, weights] = given.emplace_back();
            for (size_t i = 0; i < (size_t)p_.num_tokens * w_.routing.num_chosen; i++) {
                if (p_.experts[i] != (int64_t)e || p_.weights[i] == 0.0f) continue;
                tokens.push_back((int64_t)i / w_.routing.num_chosen);
                weights.push_back(p_.weights[i]);
            }
            if (tokens.empty()) continue;
            const LayerExpert& expert = w_.experts[e];
            works.push_back({&expert.layout, expert.selector, expert.records, expert.threshold, (int32_t)tokens.size(),
                             tokens.data(), weights.data(), nullptr, expert.extra});
        }
        done(run_experts(pool_, works.data(), (int32_t)works.size(), inputs.data(), y.data()));
    }

    Pool& pool_;
    const LayerWeights& w_;
    const LayerPass& p_;
    size_t count_;
};

SequenceCache random_cache(Random& random, const LayerWeights& w, int32_t tokens, CacheKind kind) {
    SequenceCache made = {};
    made.rows = cached_rows(kind, w.head_dim);
    made.start = random.chance(30) ? 0 : (int32_t)random.between(0, 80);
    const bool ring = w.window > 0 && random.chance(60);
    made.places = (ring ? std::min(made.start, w.window - 1) : made.start) + tokens + (int32_t)random.between(0, 3);
    return made;
}

}  // namespace

void layer_case(Random& random, Pools& pools, Counts& counts) {
    const TwoPools both(random, pools, pools.any_set(random));
    const bool sane = random.chance(60);
    Held held(random, both.several, sane);
    const LayerWeights layer = random_layer(random, held);
    const int32_t num_sequences = (int32_t)random.between(1, 3);
    const int32_t each = layer.is_chunked ? 1 : random.pick({1, 1, 1, 2, 3, 5}), num_tokens = num_sequences * each;
    const int32_t num_angles = (int32_t)random.between(0, layer.head_dim / 2);
    Arrays whole(random, layer, num_tokens), parts(random, layer, num_tokens);
    (sane ? fill_inputs : fill_wild)(random, whole.x.get(), whole.x.size());
    parts.x.copy_from(whole.x);
    const CacheKind kind = random.pick({CacheKind::f32, CacheKind::bf16, CacheKind::q8, CacheKind::q4});
    for (int32_t s = 0; s < num_sequences; s++) {
        const SequenceCache cache = random_cache(random, layer, each, kind);
        whole.add_cache(random, layer, cache, nullptr);
        parts.add_cache(random, layer, cache, &whole.cached[2 * (size_t)s]);
    }
    const float* cosines = held.floats((size_t)num_tokens * num_angles);
    const float* sines = held.floats((size_t)num_tokens * num_angles);
    const LayerPass pass = whole.pass(num_tokens, num_angles, cosines, sines);
    const LayerPass other = parts.pass(num_tokens, num_angles, cosines, sines);
    LayerRoom room;
    OneByOne expected(both.alone, layer, other);
    require(run_first_half(both.several, layer, pass, room) == Outcome::done, "the first half of a layer is done");
    expected.first_half();
    same_floats(whole.inputs, parts.inputs, "inputs");
    same_floats(whole.unrouted, parts.unrouted, "unrouted");
    same_floats(whole.weights, parts.weights, "weights");
    require(whole.experts.same_bits(parts.experts), "a layer chooses the same experts");
    for (size_t i = 0; sane && i < whole.cached.size(); i++)
        require(whole.cached[i].same_bits(parts.cached[i]), "a layer's cache");
    counts.compared++;
    if (are_set(layer, pass)) {
        require(run_second_half(both.several, layer, pass, room) == Outcome::done, "the second half is done");
        expected.second_half();
    }
    same_floats(whole.x, parts.x, "x");
}

}  // namespace moe_pack
