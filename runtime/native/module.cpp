// The Python face of the kernels: the module, and the operations on rows. Those of layers are in module_layers.cpp, and
// the reading of files in module_reads.cpp.
#include <cstring>

#include "arguments.h"
#include "guard.h"
#include "module_layers.h"
#include "module_reads.h"
#include "rows.h"

namespace moe_pack {

PyObject* cut_error;

}  // namespace moe_pack

namespace {

using namespace moe_pack;

constexpr int kMaxThreads = 1024;
constexpr size_t kMaxExperts = 1 << 20;

bool take_layout(PyObject* from, ExpertLayout* layout) {
    Copied<int32_t> numbers;
    if (!numbers.take(from, "layout")) return false;
    const char* fault = read_expert_layout(numbers.values(), numbers.size(), layout);
    return fault == nullptr || refuse("layout", fault) != nullptr;
}

// ---- pool ---------------------------------------------------------------------------------------------------------

void free_pool(PyObject* capsule) { delete static_cast<Pool*>(PyCapsule_GetPointer(capsule, kPoolName)); }

PyObject* open_pool(PyObject*, PyObject* arguments) {
    int threads;
    const char* limit;
    if (!PyArg_ParseTuple(arguments, "iz:open_pool", &threads, &limit)) return nullptr;
    if (threads < 1 || threads > kMaxThreads) return refuse("threads", "expected 1 to 1024");
    const Kernels* kernels = best_kernels(limit);
    if (kernels == nullptr) return refuse("instruction set", "expected portable, avx2 or avx512");
    Pool* pool = new (std::nothrow) Pool(threads, *kernels);
    if (pool == nullptr) return PyErr_NoMemory();
    PyObject* capsule = PyCapsule_New(pool, kPoolName, free_pool);
    if (capsule == nullptr) delete pool;
    return capsule;
}

PyObject* instruction_set(PyObject*, PyObject* capsule) {
    Pool* pool = pool_of(capsule);
    return pool == nullptr ? nullptr : PyUnicode_FromString(pool->kernels().name);
}

// ---- experts ------------------------------------------------------------------------------------------------------

// One expert of a call, with what it borrows.
struct GivenExpert {
    ExpertLayout layout;
    Buffer<const uint8_t> selector, records;
    Copied<int64_t> tokens;
    Buffer<const float> weights;
    float threshold;

    bool take(PyObject* tuple, size_t num_tokens, int32_t d) {
        PyObject *layout_numbers, *selector_rows, *record_rows, *token_idx, *router_weights;
        if (!PyArg_ParseTuple(tuple, "OOOfOO:expert", &layout_numbers, &selector_rows, &record_rows, &threshold,
                              &token_idx, &router_weights))
            return false;
        if (!take_layout(layout_numbers, &layout) || !selector.take(selector_rows, "selector") ||
            !records.take(record_rows, "records") || !tokens.take(token_idx, "tokens") ||
            !weights.take(router_weights, "weights"))
            return false;
        if (layout.num_cols != d) return refuse("layout", "its rows are not as long as x's") != nullptr;
        if (!has_size("selector", selector.size(), layout.selector_bytes()) ||
            !has_size("records", records.size(), layout.records_bytes()) ||
            !has_size("weights", weights.size(), tokens.size()))
            return false;
        if (tokens.size() > kMaxTokens) return refuse("tokens", "too many") != nullptr;
        for (size_t i = 0; i < tokens.size(); i++)
            if (tokens.values()[i] < 0 || (uint64_t)tokens.values()[i] >= num_tokens)
                return refuse("tokens", "one is not in x") != nullptr;
        return true;
    }
    ExpertWork work() const {
        return {&layout,  selector.values(), records.values(), threshold, (int32_t)tokens.size(),
                tokens.values(), weights.values()};
    }
};

PyObject* experts(PyObject*, PyObject* arguments) {
    PyObject *capsule, *given, *inputs, *outputs;
    int d;
    if (!PyArg_ParseTuple(arguments, "OO!OOi:experts", &capsule, &PyList_Type, &given, &inputs, &outputs, &d))
        return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x;
    Buffer<float> y;
    if (pool == nullptr || !x.take(inputs, "x") || !y.take(outputs, "y", true)) return nullptr;
    if (d < 1 || x.size() % d) return refuse("x", "expected whole tokens");
    int32_t num_tokens;
    if (!count_tokens("x", x.size(), d, &num_tokens) || !has_size("y", y.size(), x.size())) return nullptr;
    size_t count = PyList_Size(given);
    if (count > kMaxExperts) return refuse("experts", "too many");
    std::vector<GivenExpert> held(count);
    std::vector<ExpertWork> works(count);
    for (size_t i = 0; i < count; i++) {
        PyObject* tuple = PyList_GetItem(given, i);
        if (tuple == nullptr || !PyTuple_Check(tuple)) return refuse("experts", "expected tuples");
        // Ours while it is read: numbers may be objects whose conversion changes the list.
        Py_INCREF(tuple);
        bool taken = held[i].take(tuple, num_tokens, d);
        Py_DECREF(tuple);
        if (!taken) return nullptr;
        works[i] = held[i].work();
    }
    return unlocked([&] { return run_experts(*pool, works.data(), (int32_t)count, x.values(), y.values()); });
}

PyObject* select(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *rows, *inputs, *a_out, *runs_out, *neurons_out;
    float threshold;
    if (!PyArg_ParseTuple(arguments, "OOOfOOOO:select", &capsule, &numbers, &rows, &threshold, &inputs, &a_out,
                          &runs_out, &neurons_out))
        return nullptr;
    Pool* pool = pool_of(capsule);
    ExpertLayout layout;
    Buffer<const uint8_t> selector;
    Buffer<const float> x;
    Buffer<float> a;
    Buffer<uint8_t> runs;
    Buffer<int32_t> neurons;
    if (pool == nullptr || !take_layout(numbers, &layout) || !selector.take(rows, "selector") || !x.take(inputs, "x") ||
        !a.take(a_out, "a", true) || !runs.take(runs_out, "runs", true) || !neurons.take(neurons_out, "neurons", true))
        return nullptr;
    size_t f = layout.num_rows;
    int32_t tokens, count = 0;
    if (!count_tokens("x", x.size(), layout.num_cols, &tokens) ||
        !has_size("selector", selector.size(), layout.selector_bytes()) || !has_size("a", a.size(), tokens * f) ||
        !has_size("runs", runs.size(), tokens * f) || !has_size("neurons", neurons.size(), f + 1))
        return nullptr;
    PyObject* done = unlocked([&] {
        return select_neurons(*pool, layout, selector.values(), threshold, tokens, x.values(), a.values(),
                              runs.values(), neurons.values(), &count);
    });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    return PyLong_FromLong(count);
}

// What both steps after selection are given.
struct GivenNeurons {
    ExpertLayout layout;
    Buffer<const uint8_t> records;
    Copied<int32_t> neurons, places;

    bool take(PyObject* numbers, PyObject* record_rows, PyObject* neuron_idx, PyObject* place_idx) {
        if (!take_layout(numbers, &layout) || !records.take(record_rows, "records") ||
            !neurons.take(neuron_idx, "neurons") || !places.take(place_idx, "places"))
            return false;
        size_t row_bytes = layout.record_row_bytes;
        if (row_bytes == 0 || records.size() % row_bytes) return refuse("records", "expected whole rows") != nullptr;
        if (neurons.size() > (size_t)layout.num_rows) return refuse("neurons", "more than the expert has") != nullptr;
        return has_size("places", places.size(), neurons.size()) &&
               all_below("neurons", neurons.values(), neurons.size(), layout.num_rows) &&
               all_below("places", places.values(), places.size(), records.size() / row_bytes);
    }
    NeuronsWork work(float threshold, int32_t num_tokens) const {
        return {&layout,          records.values(), threshold, num_tokens, (int32_t)neurons.size(),
                neurons.values(), places.values()};
    }
};

PyObject* neurons(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *rows, *neuron_idx, *place_idx, *inputs, *a_in, *runs_in, *h_out;
    float threshold;
    if (!PyArg_ParseTuple(arguments, "OOOOOfOOOO:neurons", &capsule, &numbers, &rows, &neuron_idx, &place_idx,
                          &threshold, &inputs, &a_in, &runs_in, &h_out))
        return nullptr;
    Pool* pool = pool_of(capsule);
    GivenNeurons given;
    Buffer<const float> x, a;
    Buffer<const uint8_t> runs;
    Buffer<float> h;
    if (pool == nullptr || !given.take(numbers, rows, neuron_idx, place_idx) || !x.take(inputs, "x") ||
        !a.take(a_in, "a") || !runs.take(runs_in, "runs") || !h.take(h_out, "h", true))
        return nullptr;
    size_t f = given.layout.selector == Selector::none ? 0 : given.layout.num_rows;
    int32_t tokens;
    if (!count_tokens("x", x.size(), given.layout.num_cols, &tokens) || !has_size("a", a.size(), tokens * f) ||
        !has_size("runs", runs.size(), tokens * f) || !has_size("h", h.size(), tokens * given.neurons.size()))
        return nullptr;
    return unlocked([&] {
        return run_neurons(*pool, given.work(threshold, tokens), x.values(), a.values(), runs.values(), h.values());
    });
}

PyObject* accumulate(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *rows, *neuron_idx, *place_idx, *h_in, *outputs;
    if (!PyArg_ParseTuple(arguments, "OOOOOOO:accumulate", &capsule, &numbers, &rows, &neuron_idx, &place_idx, &h_in,
                          &outputs))
        return nullptr;
    Pool* pool = pool_of(capsule);
    GivenNeurons given;
    Buffer<const float> h;
    Buffer<float> y;
    if (pool == nullptr || !given.take(numbers, rows, neuron_idx, place_idx) || !h.take(h_in, "h") ||
        !y.take(outputs, "y", true))
        return nullptr;
    int32_t tokens;
    if (!count_tokens("y", y.size(), given.layout.num_cols, &tokens) ||
        !has_size("h", h.size(), tokens * given.neurons.size()))
        return nullptr;
    return unlocked([&] { return add_neurons(*pool, given.work(0.0f, tokens), h.values(), y.values()); });
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// Rows of one part.
struct GivenRows {
    Copied<int32_t> numbers;
    Buffer<const uint8_t> rows;
    RowsLayout layout;
    size_t num_rows;

    bool take(PyObject* layout_numbers, PyObject* held_rows) {
        if (!numbers.take(layout_numbers, "layout") || !rows.take(held_rows, "rows")) return false;
        if (const char* fault = read_rows_layout(numbers.values(), numbers.size(), &layout))
            return refuse("layout", fault) != nullptr;
        num_rows = rows.size() / layout.row_bytes;
        if (num_rows > (size_t)kMaxRows) return refuse("rows", "too many") != nullptr;
        return has_size("rows", rows.size(), num_rows * layout.row_bytes);
    }
};

PyObject* dense(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *held_rows, *inputs, *outputs;
    if (!PyArg_ParseTuple(arguments, "OOOOO:dense", &capsule, &numbers, &held_rows, &inputs, &outputs)) return nullptr;
    Pool* pool = pool_of(capsule);
    GivenRows given;
    Buffer<const float> x;
    Buffer<float> out;
    if (pool == nullptr || !given.take(numbers, held_rows) || !x.take(inputs, "x") || !out.take(outputs, "out", true))
        return nullptr;
    int32_t tokens;
    if (!count_tokens("x", x.size(), given.layout.part.part.num_cols, &tokens) ||
        !has_size("out", out.size(), tokens * given.num_rows))
        return nullptr;
    return unlocked([&] {
        return multiply(*pool, given.layout, given.rows.values(), (int32_t)given.num_rows, x.values(),
                        tokens, out.values());
    });
}

PyObject* decode_rows(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *held_rows, *outputs;
    if (!PyArg_ParseTuple(arguments, "OOOO:decode", &capsule, &numbers, &held_rows, &outputs)) return nullptr;
    Pool* pool = pool_of(capsule);
    GivenRows given;
    Buffer<float> out;
    if (pool == nullptr || !given.take(numbers, held_rows) || !out.take(outputs, "out", true) ||
        !has_size("out", out.size(), given.num_rows * given.layout.part.part.num_cols))
        return nullptr;
    return unlocked([&] {
        return decode(*pool, given.layout, given.rows.values(), (int32_t)given.num_rows, out.values());
    });
}

// A number for bytes in one piece.
template <class Number, Outcome (*find)(Pool&, const uint8_t*, size_t, Number*)>
PyObject* of_bytes(PyObject*, PyObject* arguments) {
    PyObject *capsule, *held;
    if (!PyArg_ParseTuple(arguments, "OO", &capsule, &held)) return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const uint8_t> bytes;
    if (pool == nullptr || !bytes.take(held, "bytes")) return nullptr;
    Number found = 0;
    PyObject* done = unlocked([&] { return find(*pool, bytes.values(), bytes.size(), &found); });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    return PyLong_FromUnsignedLongLong(found);
}

PyObject* row_checksums(PyObject*, PyObject* arguments) {
    PyObject *capsule, *held, *outputs;
    Py_ssize_t row_bytes, num_bytes;
    if (!PyArg_ParseTuple(arguments, "OOnnO:row_checksums", &capsule, &held, &row_bytes, &num_bytes, &outputs))
        return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const uint8_t> rows;
    Buffer<uint32_t> out;
    if (pool == nullptr || !rows.take(held, "rows") || !out.take(outputs, "out", true)) return nullptr;
    if (row_bytes < 1 || num_bytes < 0 || num_bytes > row_bytes) return refuse("num_bytes", "expected 0 to row_bytes");
    size_t count = rows.size() / row_bytes;
    if (count > (size_t)kMaxRows) return refuse("rows", "too many");
    if (!has_size("rows", rows.size(), count * row_bytes) || !has_size("out", out.size(), count)) return nullptr;
    return unlocked([&] {
        return checksum_rows(*pool, rows.values(), (int32_t)count, row_bytes, num_bytes, out.values());
    });
}

PyObject* gather_rows(PyObject*, PyObject* arguments) {
    PyObject *capsule, *held, *place_idx, *outputs;
    Py_ssize_t row_bytes;
    if (!PyArg_ParseTuple(arguments, "OOnOO:gather", &capsule, &held, &row_bytes, &place_idx, &outputs)) return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const uint8_t> rows;
    Copied<int32_t> places;
    Buffer<uint8_t> out;
    if (pool == nullptr || !rows.take(held, "rows") || !places.take(place_idx, "places") ||
        !out.take(outputs, "out", true))
        return nullptr;
    if (row_bytes < 1) return refuse("row_bytes", "expected at least 1");
    size_t count = rows.size() / row_bytes, num_bytes;
    if (places.size() > kMaxTokens || __builtin_mul_overflow(places.size(), (size_t)row_bytes, &num_bytes))
        return refuse("places", "too many");
    if (!has_size("rows", rows.size(), count * row_bytes) || !has_size("out", out.size(), num_bytes) ||
        !all_below("places", places.values(), places.size(), count))
        return nullptr;
    return unlocked([&] {
        return gather(*pool, rows.values(), row_bytes, places.values(), (int32_t)places.size(), out.values());
    });
}

PyMethodDef methods[] = {
    {"open_pool", caught<open_pool>, METH_VARARGS, "open_pool(threads, limit) -> capsule"},
    {"instruction_set", caught<instruction_set>, METH_O, "instruction_set(pool) -> str"},
    {"experts", caught<experts>, METH_VARARGS,
     "experts(pool, [(layout, selector, records, threshold, tokens, weights)], x, y, d)"},
    {"select", caught<select>, METH_VARARGS, "select(pool, layout, selector, threshold, x, a, runs, neurons) -> int"},
    {"neurons", caught<neurons>, METH_VARARGS,
     "neurons(pool, layout, records, neurons, places, threshold, x, a, runs, h)"},
    {"accumulate", caught<accumulate>, METH_VARARGS, "accumulate(pool, layout, records, neurons, places, h, y)"},
    {"dense", caught<dense>, METH_VARARGS, "dense(pool, layout, rows, x, out)"},
    {"decode", caught<decode_rows>, METH_VARARGS, "decode(pool, layout, rows, out)"},
    {"checksum", caught<of_bytes<uint32_t, checksum>>, METH_VARARGS, "checksum(pool, bytes) -> int"},
    {"read", caught<of_bytes<uint64_t, read_only>>, METH_VARARGS, "read(pool, bytes) -> int"},
    {"row_checksums", caught<row_checksums>, METH_VARARGS, "row_checksums(pool, rows, row_bytes, num_bytes, out)"},
    {"gather", caught<gather_rows>, METH_VARARGS, "gather(pool, rows, row_bytes, places, out)"},
    {"attend", caught<attend_heads>, METH_VARARGS,
     "attend(pool, q, k, v, q_norm, k_norm, cosines, sines, keys, values, out, num_heads, num_kv_heads, head_dim, "
     "start, window, scale, eps, interleaved)"},
    {"route", caught<route_tokens>, METH_VARARGS,
     "route(pool, logits, bias, experts, weights, kind, num_experts, chosen, groups, chosen_groups, least_sum, factor, "
     "jitter)"},
    {"rms_norm", caught<norm_rows>, METH_VARARGS, "rms_norm(pool, x, weight, eps, out)"},
    {"open_reader", caught<open_reader>, METH_VARARGS, "open_reader(memory, threads, direct, block_bytes) -> capsule"},
    {"add_file", caught<add_file>, METH_VARARGS, "add_file(reader, descriptor) -> (file, bytes)"},
    {"submit_reads", caught<submit_reads>, METH_VARARGS,
     "submit_reads(reader, file, offsets, places, sizes, urgent) -> ticket"},
    {"wait_reads", caught<wait_reads>, METH_VARARGS, "wait_reads(reader, ticket) -> None | (file, at, error)"},
    {"are_read", caught<are_read>, METH_VARARGS, "are_read(reader, ticket) -> bool"},
    {"promote_reads", caught<promote_reads>, METH_VARARGS, "promote_reads(reader, ticket)"},
    {"cancel_reads", caught<cancel_reads>, METH_VARARGS, "cancel_reads(reader, ticket) -> bool"},
    {"read_stats", caught<read_stats>, METH_VARARGS,
     "read_stats(reader) -> (bytes_urgent, bytes_ahead, num_reads, busy_ns)"},
    {"close_reader", caught<close_reader>, METH_VARARGS, "close_reader(reader)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    cut_error = PyErr_NewException("moe_pack.runtime._native.MapCutError", nullptr, nullptr);
    if (cut_error == nullptr || PyModule_AddObjectRef(module, "MapCutError", cut_error) != 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
