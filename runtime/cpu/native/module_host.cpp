#include "module_host.h"

#include <memory>

#include "flag_calls.h"
#include "host_share.h"

namespace moe_pack {
namespace {

constexpr const char* kShareName = "moe_pack.runtime.cpu._native.HostShare";
constexpr const char* kCallsName = "moe_pack.runtime.cpu._native.FlagCalls";
constexpr size_t kMaxLayers = 1 << 16, kMaxPlaces = 1 << 20;  // places of all tokens
constexpr int kMaxShareTokens = 256;
constexpr int kMaxLimit = 1 << 24;  // milliseconds

// An expert of a layer, with the rows it borrows.
struct GivenShareExpert {
    ShareExpert expert;
    Buffer<const uint8_t> selector, records;

    bool take(PyObject* tuple, int32_t d, size_t f) {
        PyObject *numbers, *selector_rows, *record_rows;
        ExpertLayout& layout = expert.layout;
        if (!PyArg_ParseTuple(tuple, "OOOf:expert", &numbers, &selector_rows, &record_rows, &expert.threshold))
            return false;
        if (!take_layout(numbers, &layout) || !selector.take(selector_rows, "selector") ||
            !records.take(record_rows, "records"))
            return false;
        if (layout.num_cols != d) return refuse("layout", "its rows are not as long as x") != nullptr;
        if ((size_t)layout.num_rows > f) return refuse("layout", "more neurons than a list has space for") != nullptr;
        const size_t selector_bytes = layout.selector == Selector::none ? 0 : layout.selector_bytes();
        layout.extra_row_bytes = 0;  // the GPU adds the row
        expert.selector = Rows(selector.values());
        expert.records = Rows(records.values());
        return has_size("selector", selector.size(), selector_bytes) &&
               has_size("records", records.size(), layout.records_bytes());
    }
};

// A share and all that it borrows. The share goes first.
struct GivenShare {
    PyObject* pool = nullptr;
    std::vector<GivenShareExpert> experts;
    Buffer<const float> x, weights, a;
    Buffer<const int32_t> chosen, counts, neurons;
    Buffer<float> y;
    std::unique_ptr<HostShare> share;

    ~GivenShare() {
        share.reset();
        Py_XDECREF(pool);
    }
    bool take(PyObject* const* from) {
        return x.take(from[0], "x") && weights.take(from[1], "weights") && chosen.take(from[2], "experts") &&
               counts.take(from[3], "counts") && neurons.take(from[4], "neurons") && a.take(from[5], "a") &&
               y.take(from[6], "y", true);
    }
    // Whether all sizes fit `num_layers` and `num_tokens`; those that follow from them are set.
    bool fit(size_t num_layers, size_t num_tokens, ShareSizes* sizes) const {
        const size_t d = x.size() / num_tokens, k = weights.size() / num_tokens;
        if (d < 1 || d > (size_t)kMaxCols) return refuse("x", "sizes out of range") != nullptr;
        if (k < 1 || k > (size_t)kMaxShareExperts) return refuse("weights", "expected 1 to 256") != nullptr;
        const size_t of_tokens = num_tokens * k, f = a.size() / of_tokens, num_places = counts.size() / of_tokens;
        if (f < 1 || f > (size_t)kMaxRows) return refuse("a", "sizes out of range") != nullptr;
        if (num_layers < 1 || num_places < 1 || num_places % num_layers != 0 || num_places > kMaxPlaces / num_tokens)
            return refuse("counts", "sizes out of range") != nullptr;
        *sizes = {(int32_t)d, (int32_t)k, (int32_t)f, (int32_t)num_layers, (int32_t)num_tokens, (int32_t)num_places};
        return has_size("x", x.size(), num_tokens * d) && has_size("y", y.size(), num_tokens * d) &&
               has_size("weights", weights.size(), of_tokens) && has_size("experts", chosen.size(), of_tokens) &&
               has_size("a", a.size(), of_tokens * f) && has_size("counts", counts.size(), of_tokens * num_places) &&
               has_size("neurons", neurons.size(), of_tokens * num_places * f);
    }
    ShareBuffers buffers() const {
        return {x.values(),       weights.values(), chosen.values(), counts.values(),
                neurons.values(), a.values(),       y.values()};
    }
};

void free_share(PyObject* capsule) { delete static_cast<GivenShare*>(PyCapsule_GetPointer(capsule, kShareName)); }

HostShare* share_of(PyObject* capsule) {
    auto* given = static_cast<GivenShare*>(PyCapsule_GetPointer(capsule, kShareName));
    return given == nullptr ? nullptr : given->share.get();
}

// Calls and what they borrow. The calls go first.
struct GivenCalls {
    Buffer<int32_t> flag;
    Buffer<const int32_t> counts;
    Buffer<float> y;
    std::unique_ptr<FlagCalls> calls;

    ~GivenCalls() { calls.reset(); }
};

void free_calls(PyObject* capsule) { delete static_cast<GivenCalls*>(PyCapsule_GetPointer(capsule, kCallsName)); }

FlagCalls* calls_of(PyObject* capsule) {
    auto* given = static_cast<GivenCalls*>(PyCapsule_GetPointer(capsule, kCallsName));
    return given == nullptr ? nullptr : given->calls.get();
}

PyObject* place_or_none(int32_t place) {
    if (place == FlagCalls::kNone) Py_RETURN_NONE;
    return PyLong_FromLong(place);
}

}  // namespace

PyObject* open_share(PyObject*, PyObject* arguments) {
    PyObject *pool_capsule, *list, *numbers, *from[7];
    int num_tokens;
    if (!PyArg_ParseTuple(arguments, "OO!OiOOOOOOO:open_share", &pool_capsule, &PyList_Type, &list, &numbers,
                          &num_tokens, from, from + 1, from + 2, from + 3, from + 4, from + 5, from + 6))
        return nullptr;
    Pool* pool = pool_of(pool_capsule);
    Copied<int32_t> num_experts;
    ShareSizes sizes;
    auto given = std::make_unique<GivenShare>();
    if (pool == nullptr || !num_experts.take(numbers, "num_experts") || !given->take(from)) return nullptr;
    if (num_experts.size() > kMaxLayers) return refuse("num_experts", "too many layers");
    if (num_tokens < 1 || num_tokens > kMaxShareTokens) return refuse("num_tokens", "expected 1 to 256");
    if (!given->fit(num_experts.size(), num_tokens, &sizes)) return nullptr;
    auto take = [&](GivenShareExpert& one, PyObject* tuple) { return one.take(tuple, sizes.d, sizes.f); };
    if (!take_each(list, "experts", given->experts, take)) return nullptr;
    std::vector<std::vector<ShareExpert>> layers(num_experts.size());
    size_t next = 0;
    for (size_t layer_idx = 0; layer_idx < layers.size(); layer_idx++)
        for (int32_t i = 0; i < num_experts.values()[layer_idx] && next < given->experts.size(); i++)
            layers[layer_idx].push_back(given->experts[next++].expert);
    size_t wanted = 0;
    for (size_t i = 0; i < num_experts.size(); i++) wanted += std::max(num_experts.values()[i], 0);
    if (!has_size("experts", given->experts.size(), wanted)) return nullptr;
    given->share = std::make_unique<HostShare>(*pool, sizes, std::move(layers), given->buffers());
    Py_INCREF(pool_capsule);
    given->pool = pool_capsule;
    PyObject* capsule = PyCapsule_New(given.get(), kShareName, free_share);
    if (capsule != nullptr) given.release();
    return capsule;
}

PyObject* run_share(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    int at;
    if (!PyArg_ParseTuple(arguments, "Oi:run_share", &capsule, &at)) return nullptr;
    HostShare* share = share_of(capsule);
    if (share == nullptr) return nullptr;
    if (at < 0 || at >= share->num_computed()) return refuse("place", "there is none of this number");
    Py_BEGIN_ALLOW_THREADS;
    share->compute(at);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* share_counts(PyObject*, PyObject* capsule) {
    HostShare* share = share_of(capsule);
    if (share == nullptr) return nullptr;
    const ShareCounts counts = share->counts();
    return Py_BuildValue("LLLL", (long long)counts.experts, (long long)counts.neurons, (long long)counts.record_bytes,
                         (long long)counts.busy_ns);
}

PyObject* take_share_fault(PyObject*, PyObject* capsule) {
    HostShare* share = share_of(capsule);
    if (share == nullptr) return nullptr;
    const HostShare::Fault found = share->take_fault();
    if (found.fault == ShareFault::none) Py_RETURN_NONE;
    return Py_BuildValue("iii", (int)found.fault, (int)found.layer_idx, (int)found.expert_idx);
}

PyObject* open_calls(PyObject*, PyObject* arguments) {
    PyObject *flag, *counts, *y;
    int num_tokens, k, limit_ms;
    if (!PyArg_ParseTuple(arguments, "OOOiii:open_calls", &flag, &counts, &y, &num_tokens, &k, &limit_ms))
        return nullptr;
    auto given = std::make_unique<GivenCalls>();
    if (!given->flag.take(flag, "flag", true) || !given->counts.take(counts, "counts") || !given->y.take(y, "y", true))
        return nullptr;
    if (num_tokens < 1 || num_tokens > kMaxShareTokens) return refuse("num_tokens", "expected 1 to 256");
    const size_t d = given->y.size() / num_tokens, num_counts = given->counts.size();
    if (k < 1 || k > kMaxShareExperts) return refuse("k", "expected 1 to 256");
    const size_t num_places = num_counts / num_tokens / k;
    if (num_places < 1 || num_places > kMaxPlaces / num_tokens) return refuse("counts", "sizes out of range");
    if (d < 1 || d > (size_t)kMaxCols) return refuse("y", "sizes out of range");
    if (limit_ms < 0 || limit_ms > kMaxLimit) return refuse("limit", "expected 0 to 16777216 milliseconds");
    if (!has_size("flag", given->flag.size(), 1) || !has_size("y", given->y.size(), num_tokens * d) ||
        !has_size("counts", num_counts, num_tokens * num_places * k))
        return nullptr;
    static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t) && std::atomic<int32_t>::is_always_lock_free);
    auto* word = reinterpret_cast<std::atomic<int32_t>*>(given->flag.values());
    const CallBuffers buffers = {word,       given->counts.values(), given->y.values(),
                                 num_tokens, (int32_t)num_places,    k,
                                 (int32_t)d};
    given->calls = std::make_unique<FlagCalls>(buffers, std::chrono::milliseconds(limit_ms));
    PyObject* capsule = PyCapsule_New(given.get(), kCallsName, free_calls);
    if (capsule != nullptr) given.release();
    return capsule;
}

// Returns when the calls are closed; until then the thread does not have the interpreter's lock.
PyObject* serve_calls(PyObject*, PyObject* arguments) {
    PyObject *calls_capsule, *share_capsule;
    if (!PyArg_ParseTuple(arguments, "OO:serve_calls", &calls_capsule, &share_capsule)) return nullptr;
    FlagCalls* calls = calls_of(calls_capsule);
    HostShare* share = calls == nullptr ? nullptr : share_of(share_capsule);
    if (share == nullptr) return nullptr;
    if (calls->buffers().num_tokens * calls->buffers().num_places != share->num_computed())
        return refuse("share", "it has other places");
    Py_BEGIN_ALLOW_THREADS;
    for (int32_t at; (at = calls->next()) != FlagCalls::kNone;) share->compute(at);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* next_call(PyObject*, PyObject* capsule) {
    FlagCalls* calls = calls_of(capsule);
    if (calls == nullptr) return nullptr;
    int32_t place;
    Py_BEGIN_ALLOW_THREADS;
    place = calls->next();
    Py_END_ALLOW_THREADS;
    return place_or_none(place);
}

PyObject* take_call_fault(PyObject*, PyObject* capsule) {
    FlagCalls* calls = calls_of(capsule);
    return calls == nullptr ? nullptr : place_or_none(calls->take_fault());
}

PyObject* close_calls(PyObject*, PyObject* capsule) {
    FlagCalls* calls = calls_of(capsule);
    if (calls == nullptr) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    calls->close();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

}  // namespace moe_pack
