#include "module_decode.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "layers.h"
#include "panels.h"

namespace moe_pack {
namespace {

constexpr const char* kLayersName = "moe_pack.runtime.cpu._native.Layers";
constexpr int kMaxLayers = 1 << 16, kMaxHeads = 1 << 16, kMaxRouted = 1 << 20;
constexpr int32_t kMaxWidth = 1 << 24;  // of heads together: a token's queries
constexpr int kNumVectors = 9, kNumMatrices = 9;

// In the order in which Python gives them.
enum LayerNumber { kD, kHeads, kKvHeads, kHeadDim, kWindow, kIsChunked, kInterleaved, kNormsProjections, kFunction,
                   kLimitBits, kRouter, kExperts, kChosen, kGroups, kChosenGroups, kNumNumbers };
enum LayerFloat { kScale, kEps, kFactor, kLeastSum, kRouterFactor, kJitter, kNumFloats };

// A dense matrix, with the buffers that it borrows.
struct GivenMatrix {
    Buffer<const uint8_t> rows;
    Buffer<const float> bias;

    // `num_cols`: of the matrix; 0: any.
    bool take(PyObject* from, const char* name, size_t num_cols, DenseMatrix* matrix) {
        if (from == Py_None) return true;
        PyObject *layout_numbers, *held_rows, *biases;
        Copied<int32_t> numbers;
        if (!PyTuple_Check(from)) return refuse(name, "expected a tuple") != nullptr;
        if (!PyArg_ParseTuple(from, "OOO:matrix", &layout_numbers, &held_rows, &biases) ||
            !numbers.take(layout_numbers, "layout") || !rows.take(held_rows, name) || !bias.take(biases, "bias"))
            return false;
        if (const char* fault = read_rows_layout(numbers.values(), numbers.size(), &matrix->layout))
            return refuse("layout", fault) != nullptr;
        const size_t num_rows = rows.size() / matrix->layout.row_bytes;
        if (num_rows < 1 || num_rows > (size_t)kMaxWidth) return refuse(name, "too many rows, or none") != nullptr;
        if (matrix->layout.in_panels && num_rows % kPanelRows) return refuse(name, "no whole panels") != nullptr;
        if (num_cols && !has_size(name, matrix->layout.part.part.num_cols, num_cols)) return false;
        if (bias.values() != nullptr && !has_size("bias", bias.size(), num_rows)) return false;
        matrix->rows = rows.values();
        matrix->num_rows = (int32_t)num_rows;
        matrix->bias = bias.values();
        return has_size(name, rows.size(), num_rows * matrix->layout.row_bytes);
    }
};

// The rows that an expert borrows.
struct GivenLayerExpert {
    Buffer<const uint8_t> selector, records, extra;
    std::unique_ptr<GivenPanels> panels;
};

// A layer and what it borrows.
struct GivenLayer {
    LayerWeights weights = {};
    Buffer<const float> vectors[kNumVectors];
    GivenMatrix matrices[kNumMatrices];
    std::vector<std::unique_ptr<GivenLayerExpert>> experts;
    bool has_panels = false;

    // Whether kernels can multiply its matrices.
    bool suits(const Pool& pool) const {
        return !has_panels || pool.kernels().panels != nullptr || refuse("layout", "these kernels have no panels");
    }

    bool take(PyObject* layout_numbers, PyObject* float_values, PyObject* vector_tuple, PyObject* matrix_tuple) {
        Copied<int32_t> numbers;
        Copied<float> floats;
        if (!numbers.take(layout_numbers, "numbers") || !floats.take(float_values, "floats") ||
            !has_size("numbers", numbers.size(), kNumNumbers) || !has_size("floats", floats.size(), kNumFloats))
            return false;
        const int32_t* n = numbers.values();
        for (int i : {kHeads, kKvHeads, kHeadDim})
            if (n[i] < 1 || n[i] > kMaxHeads) return refuse("heads", "sizes out of range") != nullptr;
        if (n[kD] < 1 || n[kD] > kMaxCols || n[kWindow] < 0 || (int64_t)n[kHeads] * n[kHeadDim] > kMaxWidth)
            return refuse("numbers", "sizes out of range") != nullptr;
        if (n[kHeads] % n[kKvHeads]) return refuse("heads", "keys are not shared by as many queries each") != nullptr;
        if (n[kFunction] < 0 || n[kFunction] > (int32_t)Function::capped_silu)
            return refuse("function", "expected 0 to 6") != nullptr;
        take_numbers(n, floats.values());
        return take_vectors(vector_tuple, n) && take_matrices(matrix_tuple) && take_routing(n, floats.values());
    }

  private:
    void take_numbers(const int32_t* n, const float* f) {
        LayerWeights& w = weights;
        w.d = n[kD];
        w.num_heads = n[kHeads];
        w.num_kv_heads = n[kKvHeads];
        w.head_dim = n[kHeadDim];
        w.window = n[kWindow];
        w.is_chunked = n[kIsChunked];
        w.interleaved = n[kInterleaved];
        w.norms_projections = n[kNormsProjections];
        w.scale = f[kScale];
        w.eps = f[kEps];
        w.factor = f[kFactor];
        w.unrouted.function = (Function)n[kFunction];
        std::memcpy(&w.unrouted.limit, &n[kLimitBits], sizeof(float));
    }
    bool take_vectors(PyObject* tuple, const int32_t* n) {
        LayerWeights& w = weights;
        const size_t heads = w.norms_projections ? w.num_heads : 1, kv_heads = w.norms_projections ? w.num_kv_heads : 1;
        const size_t odd = w.d / (w.d & -w.d);  // factor of d
        const size_t sizes[] = {(size_t)w.d, (size_t)w.d, heads * w.head_dim, kv_heads * w.head_dim,
                                (size_t)w.num_heads, (size_t)n[kExperts], (size_t)w.d, (size_t)w.d, odd * odd};
        const char* const names[] = {"attention_norm", "mlp_norm", "q_norm", "k_norm", "sinks", "router_bias",
                                     "rotation_in", "rotation_out", "hartley"};
        if (PyTuple_Size(tuple) != kNumVectors) return refuse("vectors", "expected nine") != nullptr;
        for (int i = 0; i < kNumVectors; i++) {
            if (!vectors[i].take(PyTuple_GetItem(tuple, i), names[i])) return false;
            if (vectors[i].values() == nullptr && i > 1) continue;
            if (!has_size(names[i], vectors[i].size(), sizes[i])) return false;
        }
        w.attention_norm = vectors[0].values();
        w.mlp_norm = vectors[1].values();
        w.q_norm = vectors[2].values();
        w.k_norm = vectors[3].values();
        w.sinks = vectors[4].values();
        w.routing.bias = vectors[5].values();
        w.rotation_in = vectors[6].values();
        w.rotation_out = vectors[7].values();
        w.hartley = vectors[8].values();
        const int num_rotations = (w.rotation_in != nullptr) + (w.rotation_out != nullptr) + (w.hartley != nullptr);
        if (num_rotations != 0 && (num_rotations != 3 || w.d % 64 || odd > (size_t)kMaxOdd))
            return refuse("rotation", "expected all of a size that kernels rotate, or none") != nullptr;
        if ((w.q_norm == nullptr) != (w.k_norm == nullptr))
            return refuse("norms", "of queries and of keys, or of neither") != nullptr;
        return true;
    }
    bool take_matrices(PyObject* tuple) {
        LayerWeights& w = weights;
        DenseMatrix* const found[] = {&w.q,  &w.k,    &w.v,    &w.o,            &w.router,
                                      &w.up, &w.gate, &w.down, &w.shared_router};
        const char* const names[] = {"q", "k", "v", "o", "router", "up", "gate", "down", "shared_router"};
        const size_t d = w.d, width = (size_t)w.num_heads * w.head_dim, kv_width = (size_t)w.num_kv_heads * w.head_dim;
        if (PyTuple_Size(tuple) != kNumMatrices) return refuse("matrices", "expected nine") != nullptr;
        for (int i = 0; i < kNumMatrices; i++) {
            const size_t num_cols = i == 3 ? width : i == 7 ? 0 : d;
            if (!matrices[i].take(PyTuple_GetItem(tuple, i), names[i], num_cols, found[i])) return false;
            has_panels |= found[i]->rows != nullptr && found[i]->layout.in_panels;
            if (i < 4 && (found[i]->rows == nullptr) != (w.q.rows == nullptr))
                return refuse(names[i], "all four of attention, or none") != nullptr;
            if (i < 4 && found[i]->rows != nullptr && !has_size(names[i], found[i]->num_rows, i == 0 ? width : i == 3 ? d : kv_width)) return false;
        }
        w.unrouted.gate.place = w.gate.rows == nullptr ? Place::none : Place::record;
        if ((w.up.rows == nullptr) != (w.down.rows == nullptr) || (w.gate.rows != nullptr && w.up.rows == nullptr))
            return refuse("up", "with down, or neither") != nullptr;
        if (w.shared_router.rows != nullptr && w.down.rows == nullptr)
            return refuse("shared_router", "with down, or neither") != nullptr;
        if (w.shared_router.rows != nullptr && !has_size("shared_router", w.shared_router.num_rows, 1)) return false;
        if (w.down.rows == nullptr) return true;
        return has_size("down", w.down.num_rows, d) &&
               has_size("down", w.down.layout.part.part.num_cols, w.up.num_rows) &&
               (w.gate.rows == nullptr || has_size("gate", w.gate.num_rows, w.up.num_rows));
    }
    bool take_routing(const int32_t* n, const float* f) {
        if (weights.router.rows == nullptr) return true;
        RouterWork& r = weights.routing;
        r.kind = (RouterKind)n[kRouter];
        r.num_experts = n[kExperts];
        r.num_chosen = n[kChosen];
        r.num_groups = n[kGroups];
        r.num_chosen_groups = n[kChosenGroups];
        r.least_sum = f[kLeastSum];
        r.factor = f[kRouterFactor];
        r.jitter = f[kJitter];
        if (n[kRouter] < 0 || n[kRouter] > (int)RouterKind::topk_sigmoid)
            return refuse("kind", "expected 0 to 5") != nullptr;
        if (r.num_experts < 1 || r.num_experts > kMaxRouted) return refuse("experts", "expected 1 to 2^20") != nullptr;
        if (r.num_chosen < 1 || r.num_chosen > r.num_experts)
            return refuse("chosen", "more than there are, or none") != nullptr;
        if (r.num_groups < 1 || r.num_experts % r.num_groups) return refuse("groups", "not of equal size") != nullptr;
        if (r.num_chosen_groups < 1 || r.num_chosen_groups > r.num_groups)
            return refuse("chosen groups", "more than there are, or none") != nullptr;
        weights.experts.resize(r.num_experts);
        experts.resize(r.num_experts);
        return has_size("router", weights.router.num_rows, r.num_experts);
    }
};

// The layers of a model. A call brings the threads that compute them.
struct GivenLayers {
    std::vector<std::unique_ptr<GivenLayer>> layers;
    std::mutex one_call;
    LayerRoom room;
};

void free_layers(PyObject* capsule) { delete static_cast<GivenLayers*>(PyCapsule_GetPointer(capsule, kLayersName)); }

GivenLayers* layers_of(PyObject* capsule) {
    return static_cast<GivenLayers*>(PyCapsule_GetPointer(capsule, kLayersName));
}

GivenLayer* layer_of(GivenLayers* given, int idx) {
    if (idx >= 0 && (size_t)idx < given->layers.size() && given->layers[idx] != nullptr)
        return given->layers[idx].get();
    refuse("layer", "there is none of this number");
    return nullptr;
}

// What a call reads and writes.
struct GivenPass {
    Buffer<float> x, inputs, unrouted, weights;
    Buffer<int64_t> experts;
    Buffer<const float> cosines, sines;
    std::vector<std::unique_ptr<Buffer<uint8_t>>> cached;
    std::vector<SequenceCache> caches;
    // The router's choice, where experts are taken by it: nobody else can change it meanwhile.
    std::vector<int64_t> own_experts;
    std::vector<float> own_weights;
    size_t first_chosen = 0;  // of a call for several layers
    LayerPass pass = {};

    // The same from a call for several layers; `chosen` counts values of experts so far.
    bool share(const LayerWeights& layer, const GivenPass& of_all, size_t* chosen) {
        if (!count_tokens("x", of_all.x.size(), layer.d, &pass.num_tokens) || !has_tokens(layer)) return false;
        const size_t tokens = pass.num_tokens;
        if (layer.experts.empty() && layer.down.rows == nullptr)
            return refuse("layer", "has nothing in its second half") != nullptr;
        if (!has_size("inputs", of_all.inputs.size(), of_all.x.size()) ||
            !has_size("unrouted", of_all.unrouted.size(), of_all.x.size()))
            return false;
        pass.x = of_all.x.values();
        pass.inputs = of_all.inputs.values();
        pass.unrouted = layer.down.rows == nullptr ? nullptr : of_all.unrouted.values();
        if (layer.router.rows == nullptr) return true;
        first_chosen = *chosen;
        *chosen += tokens * layer.routing.num_chosen;
        if (of_all.experts.size() < *chosen || of_all.weights.size() < *chosen)
            return refuse("experts", "fewer than the layers choose") != nullptr;
        own_experts.resize(tokens * layer.routing.num_chosen);
        own_weights.resize(own_experts.size());
        use_own();
        return true;
    }

    // Hands the choice over to the buffers of the call.
    void tell(const GivenPass& of_all) const {
        std::copy(own_experts.begin(), own_experts.end(), of_all.experts.values() + first_chosen);
        std::copy(own_weights.begin(), own_weights.end(), of_all.weights.values() + first_chosen);
    }

    // Takes the choice from Python as it is now.
    void copy_choice() {
        own_experts.assign(experts.values(), experts.values() + experts.size());
        own_weights.assign(weights.values(), weights.values() + weights.size());
        use_own();
    }

    void use_own() {
        pass.experts = own_experts.data();
        pass.weights = own_weights.data();
    }

    bool has_tokens(const LayerWeights& layer) const {
        const size_t tokens = pass.num_tokens, most = std::max(layer.num_heads, layer.routing.num_chosen);
        return (tokens >= 1 && tokens * most <= kMaxTokens) || refuse("x", "too many tokens, or none") != nullptr;
    }

    // What both halves use.
    bool take(const LayerWeights& layer, PyObject* const* from) {
        if (!x.take(from[0], "x", true) || !inputs.take(from[1], "inputs", true) ||
            !unrouted.take(from[2], "unrouted", true) || !experts.take(from[3], "experts", true) ||
            !weights.take(from[4], "weights", true) || !count_tokens("x", x.size(), layer.d, &pass.num_tokens))
            return false;
        const size_t tokens = pass.num_tokens;
        const size_t chosen = layer.router.rows == nullptr ? 0 : tokens * layer.routing.num_chosen;
        if (!has_tokens(layer)) return false;
        pass.x = x.values();
        pass.inputs = inputs.values();
        pass.unrouted = layer.down.rows == nullptr ? nullptr : unrouted.values();  // an empty buffer is somewhere, too
        pass.experts = experts.values();
        pass.weights = weights.values();
        return has_size("inputs", inputs.size(), x.size()) &&
               has_size("unrouted", unrouted.size(), layer.down.rows == nullptr ? 0 : x.size()) &&
               has_size("experts", experts.size(), chosen) && has_size("weights", weights.size(), chosen);
    }

    bool take_angles(const LayerWeights& layer, PyObject* cosine, PyObject* sine) {
        if (!cosines.take(cosine, "cosines") || !sines.take(sine, "sines")) return false;
        const size_t num_angles = cosines.size() / pass.num_tokens;
        if (num_angles > (size_t)layer.head_dim / 2)
            return refuse("cosines", "more than a head has pairs of values") != nullptr;
        pass.num_angles = (int32_t)num_angles;
        pass.cosines = cosines.values();
        pass.sines = sines.values();
        return has_size("cosines", cosines.size(), pass.num_tokens * num_angles) &&
               has_size("sines", sines.size(), cosines.size());
    }

    bool take_cache(const LayerWeights& layer, PyObject* tuple) {
        PyObject *keys, *values;
        Py_ssize_t start;
        int kind;
        if (!PyArg_ParseTuple(tuple, "OOni:cache", &keys, &values, &start, &kind)) return false;
        if (kind < 0 || kind > (int)CacheKind::q4) return refuse("kind", "expected 0 to 3") != nullptr;
        cached.push_back(std::make_unique<Buffer<uint8_t>>());
        Buffer<uint8_t>& own_keys = *cached.back();
        cached.push_back(std::make_unique<Buffer<uint8_t>>());
        Buffer<uint8_t>& own_values = *cached.back();
        if (!own_keys.take(keys, "keys", true) || !own_values.take(values, "values", true)) return false;
        const CachedRows rows = cached_rows((CacheKind)kind, layer.head_dim);
        if (rows.kind == CacheKind::f32 && (!is_aligned(own_keys) || !is_aligned(own_values)))
            return refuse("keys", "floats that are not aligned") != nullptr;
        const size_t kv_bytes = layer.num_kv_heads * rows.row_bytes, places = own_keys.size() / kv_bytes;
        const size_t tokens = pass.num_tokens / pass.num_sequences;
        if (places > kMaxTokens) return refuse("keys", "too many positions") != nullptr;
        if (!has_size("keys", own_keys.size(), places * kv_bytes) ||
            !has_size("values", own_values.size(), own_keys.size()))
            return false;
        if (start < 0 || (size_t)start >= kMaxTokens) return refuse("start", "expected 0 to 2^30 - 1") != nullptr;
        const size_t window = layer.window, seen = window && window <= (size_t)start ? window - 1 : start;
        if (seen > places || tokens > places - seen)
            return refuse("start", "what the new tokens see is not within the cache") != nullptr;
        caches.push_back({rows, own_keys.values(), own_values.values(), (int32_t)places, (int32_t)start});
        return true;
    }

    bool take_caches(const LayerWeights& layer, PyObject* list) {
        const Py_ssize_t count = PyList_Size(list);
        if (layer.q.rows == nullptr) return count == 0 || refuse("caches", "the layer has no attention") != nullptr;
        if (count < 1 || count > pass.num_tokens || pass.num_tokens % count)
            return refuse("caches", "not equally many tokens of each sequence") != nullptr;
        if (layer.is_chunked && count != pass.num_tokens)
            return refuse("caches", "chunks are of one token of a sequence") != nullptr;
        pass.num_sequences = (int32_t)count;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject* tuple = PyList_GetItem(list, i);
            if (tuple == nullptr || !PyTuple_Check(tuple)) return refuse("caches", "expected tuples") != nullptr;
            Py_INCREF(tuple);
            const bool taken = take_cache(layer, tuple);
            Py_DECREF(tuple);
            if (!taken) return false;
        }
        pass.caches = caches.data();
        return true;
    }

    // Of experts that Python gives.
    bool are_experts_known(const LayerWeights& layer) const {
        for (int64_t expert : own_experts)
            if (expert < 0 || expert >= layer.routing.num_experts)
                return refuse("experts", "one is not of the layer") != nullptr;
        return true;
    }

  private:
    static bool is_aligned(const Buffer<uint8_t>& cached) { return (uintptr_t)cached.values() % alignof(float) == 0; }
};

// A layer of a call for several.
struct GivenStep {
    GivenLayer* layer;
    GivenPass own;
};

}  // namespace

PyObject* open_layers(PyObject*, PyObject* arguments) {
    int num_layers;
    if (!PyArg_ParseTuple(arguments, "i:open_layers", &num_layers)) return nullptr;
    if (num_layers < 0 || num_layers > kMaxLayers) return refuse("layers", "expected 0 to 2^16");
    auto given = std::make_unique<GivenLayers>();
    given->layers.resize(num_layers);
    PyObject* capsule = PyCapsule_New(given.get(), kLayersName, free_layers);
    if (capsule != nullptr) given.release();
    return capsule;
}

PyObject* set_layer(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *floats, *vectors, *matrices;
    int idx;
    if (!PyArg_ParseTuple(arguments, "OiOOO!O!:set_layer", &capsule, &idx, &numbers, &floats, &PyTuple_Type, &vectors,
                          &PyTuple_Type, &matrices))
        return nullptr;
    GivenLayers* given = layers_of(capsule);
    if (given == nullptr) return nullptr;
    if (idx < 0 || (size_t)idx >= given->layers.size() || given->layers[idx] != nullptr)
        return refuse("layer", "there is none of this number, or it is set");
    auto layer = std::make_unique<GivenLayer>();
    if (!layer->take(numbers, floats, vectors, matrices)) return nullptr;
    given->layers[idx] = std::move(layer);
    Py_RETURN_NONE;
}

PyObject* set_layer_expert(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *selector, *records, *extra;
    int idx, number;
    LayerExpert expert;
    if (!PyArg_ParseTuple(arguments, "OiiOOOOf:set_layer_expert", &capsule, &idx, &number, &numbers, &selector,
                          &records, &extra, &expert.threshold))
        return nullptr;
    GivenLayers* given = layers_of(capsule);
    GivenLayer* layer = given == nullptr ? nullptr : layer_of(given, idx);
    if (layer == nullptr) return nullptr;
    if (number < 0 || (size_t)number >= layer->experts.size() || layer->experts[number] != nullptr)
        return refuse("expert", "there is none of this number, or it is set");
    auto rows = std::make_unique<GivenLayerExpert>();
    ExpertLayout& layout = expert.layout;
    if (!take_layout(numbers, &layout) || !rows->selector.take(selector, "selector") ||
        !rows->records.take(records, "records") || !rows->extra.take(extra, "extra"))
        return nullptr;
    if (layout.num_cols != layer->weights.d) return refuse("layout", "its rows are not as long as x's");
    const size_t selector_bytes = layout.selector == Selector::none ? 0 : layout.selector_bytes();
    if (!has_size("selector", rows->selector.size(), selector_bytes) ||
        !has_size("records", rows->records.size(), layout.records_bytes()) ||
        !has_size("extra", rows->extra.size(), layout.extra_row_bytes))
        return nullptr;
    expert.selector = Rows(rows->selector.values());
    expert.records = Rows(rows->records.values());
    expert.extra = Rows(rows->extra.values());
    layer->weights.experts[number] = expert;
    layer->experts[number] = std::move(rows);
    Py_RETURN_NONE;
}

PyObject* set_layer_panels(PyObject*, PyObject* arguments) {
    PyObject *capsule, *held;
    int idx, number;
    if (!PyArg_ParseTuple(arguments, "OiiO:set_layer_panels", &capsule, &idx, &number, &held)) return nullptr;
    GivenLayers* given = layers_of(capsule);
    GivenLayer* layer = given == nullptr ? nullptr : layer_of(given, idx);
    if (layer == nullptr) return nullptr;
    if (number < 0 || (size_t)number >= layer->experts.size() || layer->experts[number] == nullptr)
        return refuse("expert", "it is not set");
    if (layer->experts[number]->panels != nullptr) return refuse("panels", "they are set");
    LayerExpert& expert = layer->weights.experts[number];
    auto panels = std::make_unique<GivenPanels>();
    if (!panels->take(held, expert.layout)) return nullptr;
    const GivenPanels& taken = *(layer->experts[number]->panels = std::move(panels));
    Py_BEGIN_ALLOW_THREADS;
    {
        std::lock_guard<std::mutex> lock(given->one_call);
        taken.give(expert.layout, &expert.selector_panels, &expert.record_panels);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* begin_layer(PyObject*, PyObject* arguments) {
    PyObject *pool_capsule, *capsule, *from[5], *cosines, *sines, *caches;
    int idx;
    if (!PyArg_ParseTuple(arguments, "OOiOOOOOOOO!:begin_layer", &pool_capsule, &capsule, &idx, &from[0], &from[1],
                          &from[2], &from[3], &from[4], &cosines, &sines, &PyList_Type, &caches))
        return nullptr;
    Pool* pool = pool_of(pool_capsule);
    GivenLayers* given = pool == nullptr ? nullptr : layers_of(capsule);
    GivenLayer* layer = given == nullptr ? nullptr : layer_of(given, idx);
    GivenPass taken;
    if (layer == nullptr || !layer->suits(*pool) || !taken.take(layer->weights, from) ||
        !taken.take_angles(layer->weights, cosines, sines) || !taken.take_caches(layer->weights, caches))
        return nullptr;
    return unlocked([&] {
        std::lock_guard<std::mutex> lock(given->one_call);
        return run_first_half(*pool, layer->weights, taken.pass, given->room);
    });
}

PyObject* run_layers(PyObject*, PyObject* arguments) {
    PyObject *pool_capsule, *capsule, *hidden, *list;
    int first;
    GivenPass shared;  // its experts and weights are of all layers, one after the other
    PyObject *inputs, *unrouted, *experts, *router_weights;
    if (!PyArg_ParseTuple(arguments, "OOiOOOOOO!:run_layers", &pool_capsule, &capsule, &first, &hidden, &inputs,
                          &unrouted, &experts, &router_weights, &PyList_Type, &list))
        return nullptr;
    Pool* pool = pool_of(pool_capsule);
    GivenLayers* given = pool == nullptr ? nullptr : layers_of(capsule);
    if (given == nullptr || !shared.x.take(hidden, "x", true) || !shared.inputs.take(inputs, "inputs", true) ||
        !shared.unrouted.take(unrouted, "unrouted", true) || !shared.experts.take(experts, "experts", true) ||
        !shared.weights.take(router_weights, "weights", true))
        return nullptr;
    const Py_ssize_t count = PyList_Size(list);
    std::vector<std::unique_ptr<GivenStep>> steps;
    size_t chosen = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* tuple = PyList_GetItem(list, i);
        PyObject *cosines, *sines, *caches;
        GivenLayer* layer = layer_of(given, first + (int)i);
        if (layer == nullptr || tuple == nullptr || !layer->suits(*pool)) return nullptr;
        if (!PyTuple_Check(tuple)) return refuse("steps", "expected tuples");
        steps.push_back(std::make_unique<GivenStep>());
        GivenStep& step = *steps.back();
        step.layer = layer;
        Py_INCREF(tuple);
        const bool taken = PyArg_ParseTuple(tuple, "OOO!:step", &cosines, &sines, &PyList_Type, &caches) &&
                           step.own.share(layer->weights, shared, &chosen) &&
                           step.own.take_angles(layer->weights, cosines, sines) &&
                           step.own.take_caches(layer->weights, caches);
        Py_DECREF(tuple);
        if (!taken) return nullptr;
    }
    if (!has_size("experts", shared.experts.size(), chosen) || !has_size("weights", shared.weights.size(), chosen))
        return nullptr;
    long complete = 0;
    bool is_cut = false;
    PyObject* done = unlocked([&] {
        std::lock_guard<std::mutex> lock(given->one_call);
        for (const auto& step : steps) {
            const LayerWeights& layer = step->layer->weights;
            Outcome found = run_first_half(*pool, layer, step->own.pass, given->room);
            step->own.tell(shared);
            if (found == Outcome::done && !are_set(layer, step->own.pass)) break;
            if (found == Outcome::done) found = run_second_half(*pool, layer, step->own.pass, given->room);
            is_cut = found == Outcome::cut;
            if (is_cut) break;
            if (found != Outcome::done) return found;
            complete++;
        }
        return Outcome::done;
    });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    return PyLong_FromLong(is_cut ? -1 - complete : complete);
}

PyObject* end_layer(PyObject*, PyObject* arguments) {
    PyObject *pool_capsule, *capsule, *from[5];
    int idx;
    if (!PyArg_ParseTuple(arguments, "OOiOOOOO:end_layer", &pool_capsule, &capsule, &idx, &from[0], &from[1], &from[2],
                          &from[3], &from[4]))
        return nullptr;
    Pool* pool = pool_of(pool_capsule);
    GivenLayers* given = pool == nullptr ? nullptr : layers_of(capsule);
    GivenLayer* layer = given == nullptr ? nullptr : layer_of(given, idx);
    GivenPass taken;
    if (layer == nullptr || !taken.take(layer->weights, from)) return nullptr;
    taken.copy_choice();
    if (!taken.are_experts_known(layer->weights)) return nullptr;
    if (!are_set(layer->weights, taken.pass)) return refuse("experts", "one is not set");
    if (layer->experts.empty() && taken.pass.unrouted == nullptr)
        return refuse("layer", "has nothing in its second half");
    return unlocked([&] {
        std::lock_guard<std::mutex> lock(given->one_call);
        return run_second_half(*pool, layer->weights, taken.pass, given->room);
    });
}

PyObject* scale_rows(PyObject*, PyObject* arguments) {
    PyObject *capsule, *shares, *outputs;
    int d;
    if (!PyArg_ParseTuple(arguments, "OOOi:scale_by_sigmoid", &capsule, &shares, &outputs, &d)) return nullptr;
    Buffer<const float> logits;
    Buffer<float> y;
    if (pool_of(capsule) == nullptr || !logits.take(shares, "logits") || !y.take(outputs, "y", true)) return nullptr;
    int32_t tokens;
    if (d < 1 || d > kMaxCols) return refuse("d", "out of range");
    if (!count_tokens("y", y.size(), d, &tokens) || !has_size("logits", logits.size(), tokens)) return nullptr;
    return unlocked([&] {
        scale_by_sigmoid(logits.values(), tokens, d, y.values());
        return Outcome::done;
    });
}

PyObject* activate_neurons(PyObject*, PyObject* arguments) {
    PyObject *capsule, *gates, *ups, *outputs;
    int function, limit_bits;
    if (!PyArg_ParseTuple(arguments, "OOOiiO:activate", &capsule, &gates, &ups, &function, &limit_bits, &outputs))
        return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> gate, up;
    Buffer<float> out;
    if (pool == nullptr || !gate.take(gates, "gate") || !up.take(ups, "up") || !out.take(outputs, "out", true))
        return nullptr;
    if (function < 0 || function > (int)Function::capped_silu) return refuse("function", "expected 0 to 6");
    if (up.size() > kMaxTokens || (gate.values() && !has_size("gate", gate.size(), up.size())) ||
        !has_size("out", out.size(), up.size()))
        return PyErr_Occurred() ? nullptr : refuse("up", "too many values");
    ExpertLayout layout = {};
    layout.function = (Function)function;
    layout.gate.place = gate.values() == nullptr ? Place::none : Place::record;
    std::memcpy(&layout.limit, &limit_bits, sizeof(float));
    return unlocked([&] { return activate(*pool, layout, gate.values(), up.values(), up.size(), out.values()); });
}

}  // namespace moe_pack
