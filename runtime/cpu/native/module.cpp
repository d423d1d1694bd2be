// The Python face of the kernels: the module, and the operations on rows. Those of layers are in module_layers.cpp, whole
// layers in module_decode.cpp, the host's share of a GPU's experts in module_host.cpp, the reading of files in
// module_reads.cpp, and the search for codes in module_search.cpp.
#include <cstring>

#include "arguments.h"
#include "extent.h"
#include "guard.h"
#include "module_decode.h"
#include "module_host.h"
#include "module_layers.h"
#include "module_reads.h"
#include "module_search.h"
#include "panels.h"
#include "products.h"
#include "rows.h"

namespace moe_pack {

PyObject* cut_error;

}  // namespace moe_pack

namespace {

using namespace moe_pack;

constexpr int kMaxThreads = 1024;

// ---- pool ---------------------------------------------------------------------------------------------------------

void free_pool(PyObject* capsule) { delete static_cast<Pool*>(PyCapsule_GetPointer(capsule, kPoolName)); }

PyObject* open_pool(PyObject*, PyObject* arguments) {
    int threads;
    const char* limit;
    if (!PyArg_ParseTuple(arguments, "iz:open_pool", &threads, &limit)) return nullptr;
    if (threads < 1 || threads > kMaxThreads) return refuse("threads", "expected 1 to 1024");
    const Kernels* kernels = best_kernels(limit);
    if (kernels == nullptr) return refuse("instruction set", "expected portable, neon, avx2, avx512 or avx512vbmi");
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

PyObject* take_tokens_alone(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    int alone;
    if (!PyArg_ParseTuple(arguments, "Op:take_tokens_alone", &capsule, &alone)) return nullptr;
    Pool* pool = pool_of(capsule);
    if (pool == nullptr) return nullptr;
    pool->take_tokens_alone(alone);
    Py_RETURN_NONE;
}

PyObject* take_digits(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    int digits;
    if (!PyArg_ParseTuple(arguments, "Oi:take_digits", &capsule, &digits)) return nullptr;
    Pool* pool = pool_of(capsule);
    if (pool == nullptr) return nullptr;
    if (digits < 0 || digits > 2) return refuse("digits", "expected 0 to 2");
    return PyLong_FromLong(pool->take_digits(digits));
}

// ---- rows in one piece or in pages --------------------------------------------------------------------------------

// Rows that Python gives: a buffer of them, or `(arena, slots, slot_bytes, head_bytes, page_bytes, begin)` where they
// lie in pages: page p of the extent from `head_bytes` on in slot `slots[p]` of the arena, row 0 at byte `begin`.
class HeldRows {
  public:
    bool take(PyObject* from, const char* name, size_t row_bytes) {
        if (!PyTuple_Check(from)) {
            if (!bytes_.take(from, name)) return false;
            rows_ = Rows(bytes_.values());
            row_bytes_ = row_bytes;
            num_rows_ = row_bytes ? bytes_.size() / row_bytes : 0;
            return true;
        }
        PyObject *arena, *slot_idx;
        Py_ssize_t slot_bytes, head_bytes, page_bytes, begin;
        Copied<int32_t> slots;
        if (!PyArg_ParseTuple(from, "OOnnnn:pages", &arena, &slot_idx, &slot_bytes, &head_bytes, &page_bytes, &begin) ||
            !bytes_.take(arena, "arena") || !slots.take(slot_idx, "slots"))
            return false;
        constexpr Py_ssize_t most = (Py_ssize_t)1 << 24;  // of a page; an extent of 2^40 bytes has exact places then
        if (page_bytes < 2 || page_bytes > most) return refuse("page_bytes", "expected 2 to 16 MiB") != nullptr;
        if (head_bytes < (Py_ssize_t)row_bytes || page_bytes < (Py_ssize_t)row_bytes || row_bytes == 0)
            return refuse(name, "a row is longer than a page or the room before it") != nullptr;
        if (head_bytes > most || slot_bytes < head_bytes + page_bytes || slot_bytes > 2 * most)
            return refuse("slot_bytes", "less than a page and the room before it") != nullptr;
        if (begin < 0 || begin > ((Py_ssize_t)1 << 40) || slots.size() > ((size_t)1 << 40) / page_bytes)
            return refuse("slots", "an extent has 2^40 bytes at most") != nullptr;
        size_t slots_there = bytes_.size() / slot_bytes, size = slots.size() * (size_t)page_bytes;
        if (!all_below("slots", slots.values(), slots.size(), slots_there)) return false;
        for (size_t i = 0; i < slots.size(); i++)
            pages_.push_back(bytes_.values() + (size_t)slots.values()[i] * slot_bytes + head_bytes);
        rows_ = Rows(pages_.data(), page_bytes, begin);
        num_rows_ = (size_t)begin < size ? (size - begin) / row_bytes : 0;
        return true;
    }
    const Rows& rows() const { return rows_; }
    size_t num_rows() const { return num_rows_; }
    bool has(const char* name, size_t wanted) const {
        if (rows_.pages == nullptr) return has_size(name, bytes_.size(), wanted * row_bytes_);
        if (num_rows_ >= wanted) return true;
        PyErr_Format(PyExc_ValueError, "%s: %zu rows, expected %zu", name, num_rows_, wanted);
        return false;
    }

  private:
    Buffer<const uint8_t> bytes_;
    std::vector<const uint8_t*> pages_;
    Rows rows_;
    size_t num_rows_ = 0, row_bytes_ = 0;
};

// The selector's rows: none where its kind has none.
bool take_selector(HeldRows& rows, PyObject* from, const ExpertLayout& layout) {
    size_t row_bytes = layout.selector == Selector::none ? 0 : layout.selector_row_bytes;
    if (row_bytes == 0 && from == Py_None) return true;
    return rows.take(from, "selector", row_bytes) && rows.has("selector", layout.num_rows);
}

// The one row of extra values: none where the layout has none.
bool take_extra(HeldRows& rows, PyObject* from, const ExpertLayout& layout) {
    if (layout.extra_row_bytes == 0) return from == Py_None || refuse("extra", "the layout has none") != nullptr;
    return rows.take(from, "extra", layout.extra_row_bytes) && rows.has("extra", 1);
}

// ---- experts ------------------------------------------------------------------------------------------------------

bool are_below(const char* name, const Copied<int64_t>& places, size_t limit, const char* fault) {
    for (size_t i = 0; i < places.size(); i++)
        if (places.values()[i] < 0 || (uint64_t)places.values()[i] >= limit) return refuse(name, fault) != nullptr;
    return true;
}

// A selector of a call, with what it borrows.
struct GivenSelector {
    ExpertLayout layout;
    HeldRows selector;
    Copied<int64_t> tokens;
    Buffer<float> a;
    Buffer<uint8_t> runs;
    Buffer<int32_t> neurons;
    float threshold;

    bool take(PyObject* tuple, size_t num_tokens, int32_t d) {
        PyObject *numbers, *rows, *token_idx, *a_out, *runs_out, *neurons_out;
        if (!PyArg_ParseTuple(tuple, "OOfOOOO:selector", &numbers, &rows, &threshold, &token_idx, &a_out, &runs_out,
                              &neurons_out))
            return false;
        if (!take_layout(numbers, &layout) || !take_selector(selector, rows, layout) ||
            !tokens.take(token_idx, "tokens") || !a.take(a_out, "a", true) || !runs.take(runs_out, "runs", true) ||
            !neurons.take(neurons_out, "neurons", true))
            return false;
        if (layout.num_cols != d) return refuse("layout", "its rows are not as long as x's") != nullptr;
        if (tokens.size() > kMaxTokens) return refuse("tokens", "too many") != nullptr;
        size_t f = layout.num_rows;
        return has_size("a", a.size(), tokens.size() * f) && has_size("runs", runs.size(), tokens.size() * f) &&
               has_size("neurons", neurons.size(), f) && are_below("tokens", tokens, num_tokens, "one is not in x");
    }
    SelectorWork work() const {
        return {&layout,  selector.rows(), threshold,        (int32_t)tokens.size(), tokens.values(),
                a.values(), runs.values(),   neurons.values()};
    }
};

// One expert of a call, with what it borrows.
struct GivenExpert {
    ExpertLayout layout;
    HeldRows selector, records, extra;
    Copied<int64_t> tokens, outputs;
    Buffer<const float> weights, a;
    Buffer<const uint8_t> runs;
    Copied<int32_t> neurons;
    GivenPanels panels;
    bool is_selected;
    float threshold;

    bool take(PyObject* tuple, size_t num_tokens, size_t num_outputs, int32_t d) {
        PyObject *layout_numbers, *selector_rows, *record_rows, *extra_row, *panel_rows, *token_idx, *router_weights;
        PyObject *output_idx = Py_None, *a_in = Py_None, *runs_in = Py_None, *neuron_idx = Py_None;
        if (!PyArg_ParseTuple(tuple, "OOOOOfOO|OOOO:expert", &layout_numbers, &selector_rows, &record_rows, &extra_row,
                              &panel_rows, &threshold, &token_idx, &router_weights, &output_idx, &a_in, &runs_in, &neuron_idx))
            return false;
        is_selected = neuron_idx != Py_None;
        if (!take_layout(layout_numbers, &layout) || !take_selector(selector, selector_rows, layout) ||
            !records.take(record_rows, "records", layout.record_row_bytes) || !take_extra(extra, extra_row, layout) ||
            !tokens.take(token_idx, "tokens") || !weights.take(router_weights, "weights") ||
            !outputs.take(output_idx == Py_None ? token_idx : output_idx, "outputs") || !a.take(a_in, "a") ||
            !runs.take(runs_in, "runs") || !neurons.take(neuron_idx, "neurons") || !panels.take(panel_rows, layout))
            return false;
        if (layout.num_cols != d) return refuse("layout", "its rows are not as long as x's") != nullptr;
        if (!records.has("records", layout.num_rows) || !has_size("weights", weights.size(), tokens.size()) ||
            !has_size("outputs", outputs.size(), tokens.size()))
            return false;
        if (tokens.size() > kMaxTokens) return refuse("tokens", "too many") != nullptr;
        return are_below("tokens", tokens, num_tokens, "one is not in x") &&
               are_below("outputs", outputs, num_outputs, "one is not in y") && (!is_selected || fits_selection());
    }
    // What a selector told before: of all its neurons, and the records that may be read.
    bool fits_selection() const {
        if (layout.selector == Selector::none) return refuse("neurons", "the layout has no selector") != nullptr;
        size_t f = layout.num_rows;
        if (neurons.size() > f) return refuse("neurons", "more than the expert has") != nullptr;
        return has_size("a", a.size(), tokens.size() * f) && has_size("runs", runs.size(), tokens.size() * f) &&
               all_below("neurons", neurons.values(), neurons.size(), f);
    }
    ExpertWork work() const {
        ExpertWork work = {&layout,         selector.rows(), records.rows(), threshold, (int32_t)tokens.size(),
                           tokens.values(), weights.values(), outputs.values(), extra.rows()};
        panels.give(layout, &work.selector_panels, &work.record_panels);
        if (!is_selected) return work;
        static const int32_t none = 0;  // of no neurons: not null, which would ask the selector
        work.a = a.values();
        work.runs = runs.values();
        work.neurons = neurons.size() ? neurons.values() : &none;
        work.num_neurons = (int32_t)neurons.size();
        return work;
    }
};

PyObject* experts(PyObject*, PyObject* arguments) {
    PyObject *capsule, *given, *inputs, *outputs;
    int d, apart = 0;  // apart: y has rows of its own, which every expert names
    if (!PyArg_ParseTuple(arguments, "OO!OOi|p:experts", &capsule, &PyList_Type, &given, &inputs, &outputs, &d, &apart))
        return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x;
    Buffer<float> y;
    if (pool == nullptr || !x.take(inputs, "x") || !y.take(outputs, "y", true)) return nullptr;
    if (d < 1 || x.size() % d) return refuse("x", "expected whole tokens");
    int32_t num_tokens;
    if (!count_tokens("x", x.size(), d, &num_tokens) || (!apart && !has_size("y", y.size(), x.size()))) return nullptr;
    if (y.size() % d) return refuse("y", "expected whole tokens");
    std::vector<GivenExpert> held;
    auto take = [&](GivenExpert& one, PyObject* tuple) { return one.take(tuple, num_tokens, y.size() / d, d); };
    if (!take_each(given, "experts", held, take)) return nullptr;
    std::vector<ExpertWork> works;
    for (const GivenExpert& one : held) works.push_back(one.work());
    return unlocked([&] { return run_experts(*pool, works.data(), (int32_t)works.size(), x.values(), y.values()); });
}

PyObject* select(PyObject*, PyObject* arguments) {
    PyObject *capsule, *given, *inputs;
    int d;
    if (!PyArg_ParseTuple(arguments, "OO!Oi:select", &capsule, &PyList_Type, &given, &inputs, &d)) return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x;
    if (pool == nullptr || !x.take(inputs, "x")) return nullptr;
    if (d < 1) return refuse("x", "expected whole tokens");
    int32_t num_tokens;
    std::vector<GivenSelector> held;
    auto take = [&](GivenSelector& one, PyObject* tuple) { return one.take(tuple, num_tokens, d); };
    if (!count_tokens("x", x.size(), d, &num_tokens) || !take_each(given, "selectors", held, take)) return nullptr;
    std::vector<SelectorWork> works;
    for (const GivenSelector& one : held) works.push_back(one.work());
    PyObject* done = unlocked([&] { return select_neurons(*pool, works.data(), (int32_t)works.size(), x.values()); });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    PyObject* counts = PyList_New(works.size());
    for (size_t i = 0; counts != nullptr && i < works.size(); i++) {
        PyObject* count = PyLong_FromLong(works[i].num_neurons);
        if (count == nullptr || PyList_SetItem(counts, i, count) != 0) {
            Py_DECREF(counts);
            return nullptr;
        }
    }
    return counts;
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// Rows of one part.
struct GivenRows {
    Copied<int32_t> numbers;
    Buffer<const uint8_t> rows;
    RowsLayout layout;
    size_t num_rows;

    // Whether kernels can multiply them.
    bool suit(const Kernels& kernels) const {
        return !layout.in_panels || kernels.panels != nullptr || refuse("layout", "these kernels have no panels");
    }

    bool take(PyObject* layout_numbers, PyObject* held_rows) {
        if (!numbers.take(layout_numbers, "layout") || !rows.take(held_rows, "rows")) return false;
        if (const char* fault = read_rows_layout(numbers.values(), numbers.size(), &layout))
            return refuse("layout", fault) != nullptr;
        num_rows = rows.size() / layout.row_bytes;
        if (num_rows > (size_t)kMaxRows) return refuse("rows", "too many") != nullptr;
        if (layout.in_panels && num_rows % kPanelRows) return refuse("rows", "no whole panels") != nullptr;
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
    if (!given.suit(pool->kernels()) || !count_tokens("x", x.size(), given.layout.part.part.num_cols, &tokens) ||
        !has_size("out", out.size(), tokens * given.num_rows))
        return nullptr;
    return unlocked([&] {
        return multiply(*pool, given.layout, given.rows.values(), (int32_t)given.num_rows, x.values(),
                        tokens, out.values());
    });
}

PyObject* dense_each(PyObject*, PyObject* arguments) {
    struct Given {
        GivenRows rows;
        Buffer<float> out;
        DenseMatrix matrix;
    };
    PyObject *capsule, *list, *inputs;
    if (!PyArg_ParseTuple(arguments, "OO!O:dense_each", &capsule, &PyList_Type, &list, &inputs)) return nullptr;
    Pool* pool = pool_of(capsule);
    Buffer<const float> x;
    if (pool == nullptr || !x.take(inputs, "x")) return nullptr;
    const Py_ssize_t count = PyList_Size(list);
    if (count < 1 || count > kMostProducts) return refuse("matrices", "expected 1 to 4");
    Given each[kMostProducts];
    int32_t tokens = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tuple = PyList_GetItem(list, i), *numbers, *held_rows, *outputs;
        Given& given = each[i];
        if (tuple == nullptr || !PyTuple_Check(tuple)) return refuse("matrices", "expected tuples");
        Py_INCREF(tuple);
        const bool taken = PyArg_ParseTuple(tuple, "OOO:matrix", &numbers, &held_rows, &outputs) &&
                           given.rows.take(numbers, held_rows) && given.out.take(outputs, "out", true);
        Py_DECREF(tuple);
        if (!taken || !given.rows.suit(pool->kernels()) ||
            !count_tokens("x", x.size(), given.rows.layout.part.part.num_cols, &tokens) ||
            !has_size("out", given.out.size(), tokens * given.rows.num_rows))
            return nullptr;
        given.matrix = {given.rows.layout, given.rows.rows.values(), (int32_t)given.rows.num_rows};
    }
    return unlocked([&] {
        Products products(*pool, x.values(), tokens);
        for (Py_ssize_t i = 0; i < count; i++) products.add(each[i].matrix, each[i].out.values());
        return products.run();
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
    if (given.layout.in_panels) return refuse("layout", "rows are in panels");
    return unlocked([&] {
        return decode(*pool, given.layout, given.rows.values(), (int32_t)given.num_rows, out.values());
    });
}

PyObject* expert_to_panels(PyObject*, PyObject* arguments) {
    PyObject *numbers, *held_selector, *held_records, *held_panels;
    if (!PyArg_ParseTuple(arguments, "OOOO:panel_expert", &numbers, &held_selector, &held_records, &held_panels))
        return nullptr;
    struct Given {
        ExpertLayout layout;
        HeldRows selector, records;
        Buffer<uint8_t> panels;
    } given;
    const ExpertLayout& layout = given.layout;
    if (!take_layout(numbers, &given.layout) || !take_selector(given.selector, held_selector, layout) ||
        !given.records.take(held_records, "records", layout.record_row_bytes) ||
        !given.records.has("records", layout.num_rows) || !given.panels.take(held_panels, "panels", true))
        return nullptr;
    if (!can_panel(layout)) return refuse("layout", "has no panels");
    if (!has_size("panels", given.panels.size(), expert_panel_bytes(layout))) return nullptr;
    bool whole = false;
    Py_BEGIN_ALLOW_THREADS;
    whole = guarded(
        [](void* context) {
            const auto& g = *static_cast<const Given*>(context);
            uint8_t *selector = g.panels.values(), *records = selector + selector_panel_bytes(g.layout);
            for (int32_t tile = 0; tile < g.layout.num_rows / kMaxTile; tile++)
                make_tile(g.layout, g.selector.rows(), g.records.rows(), tile,
                          panel_in(selector + (size_t)tile * kMaxTile * g.layout.selector_row_bytes),
                          panel_in(records + (size_t)tile * kMaxTile * g.layout.record_row_bytes));
        },
        &given);
    Py_END_ALLOW_THREADS;
    return finished(whole ? Outcome::done : Outcome::cut);
}

PyObject* panels_of_expert(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers;
    float threshold;
    if (!PyArg_ParseTuple(arguments, "OOf:expert_panel_bytes", &capsule, &numbers, &threshold)) return nullptr;
    Pool* pool = pool_of(capsule);
    ExpertLayout layout;
    if (pool == nullptr || !take_layout(numbers, &layout)) return nullptr;
    const bool has = pool->kernels().panels != nullptr && runs_whole(layout, threshold);
    return PyLong_FromSize_t(has ? expert_panel_bytes(layout) : 0);
}

PyObject* rows_to_panels(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *held_rows;
    if (!PyArg_ParseTuple(arguments, "OOO:put_in_panels", &capsule, &numbers, &held_rows)) return nullptr;
    Pool* pool = pool_of(capsule);
    Copied<int32_t> given;
    Buffer<uint8_t> rows;
    RowsLayout layout;
    if (pool == nullptr || !given.take(numbers, "layout") || !rows.take(held_rows, "rows", true)) return nullptr;
    if (const char* fault = read_rows_layout(given.values(), given.size(), &layout)) return refuse("layout", fault);
    const size_t num_rows = rows.size() / layout.row_bytes;
    if (num_rows > (size_t)kMaxRows) return refuse("rows", "too many");
    if (layout.in_panels) return refuse("layout", "rows are in panels already");
    if (!has_size("rows", rows.size(), num_rows * layout.row_bytes)) return nullptr;
    const PlacedPart& part = layout.part;
    if (pool->kernels().panels == nullptr || part.offset || !can_panel(part.part, layout.row_bytes, (int32_t)num_rows))
        Py_RETURN_FALSE;
    PyObject* done = unlocked([&] { return put_in_panels(*pool, layout, rows.values(), (int32_t)num_rows); });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    Py_RETURN_TRUE;
}

PyObject* rows_of_panels(PyObject*, PyObject* arguments) {
    PyObject *capsule, *numbers, *held_rows, *place_idx, *outputs;
    if (!PyArg_ParseTuple(arguments, "OOOOO:take_rows", &capsule, &numbers, &held_rows, &place_idx, &outputs))
        return nullptr;
    Pool* pool = pool_of(capsule);
    GivenRows given;
    Copied<int32_t> places;
    Buffer<uint8_t> out;
    if (pool == nullptr || !given.take(numbers, held_rows) || !places.take(place_idx, "places") ||
        !out.take(outputs, "out", true))
        return nullptr;
    if (!given.layout.in_panels) return refuse("layout", "rows are in no panels");
    if (places.size() > kMaxTokens) return refuse("places", "too many");
    if (!has_size("out", out.size(), places.size() * given.layout.row_bytes) ||
        !all_below("places", places.values(), places.size(), given.num_rows))
        return nullptr;
    return unlocked([&] {
        return take_rows(*pool, given.layout, given.rows.values(), places.values(), (int32_t)places.size(), out.values());
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

// Of an extent in pages: its first `num_bytes`.
PyObject* checksum_pages_of(PyObject*, PyObject* arguments) {
    PyObject *capsule, *held;
    Py_ssize_t num_bytes;
    if (!PyArg_ParseTuple(arguments, "OO!n:checksum_pages", &capsule, &PyTuple_Type, &held, &num_bytes)) return nullptr;
    Pool* pool = pool_of(capsule);
    HeldRows extent;
    if (pool == nullptr || !extent.take(held, "extent", 1)) return nullptr;
    if (num_bytes < 0 || (size_t)num_bytes > extent.num_rows()) return refuse("num_bytes", "more than the pages hold");
    uint32_t found = 0;
    PyObject* done = unlocked([&] { return checksum_pages(*pool, extent.rows(), num_bytes, &found); });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    return PyLong_FromUnsignedLong(found);
}

// The arena is written, where no row lies whole: a buffer that may be written is asked for to say so.
PyObject* stitch_rows(PyObject*, PyObject* arguments) {
    PyObject* held;
    Py_ssize_t num_rows, row_bytes;
    if (!PyArg_ParseTuple(arguments, "O!nn:stitch", &PyTuple_Type, &held, &num_rows, &row_bytes)) return nullptr;
    if (row_bytes < 1 || num_rows < 0) return refuse("row_bytes", "expected at least 1");
    HeldRows rows;
    Buffer<uint8_t> arena;
    PyObject* memory = PyTuple_GetItem(held, 0);
    if (memory == nullptr || !arena.take(memory, "arena", true) || !rows.take(held, "rows", row_bytes) ||
        !rows.has("rows", num_rows))
        return nullptr;
    stitch(rows.rows(), num_rows, row_bytes);
    Py_RETURN_NONE;
}

PyObject* damaged_row_of(PyObject*, PyObject* arguments) {
    PyObject *capsule, *held, *row_idx;
    Py_ssize_t row_bytes, crc_offset;
    if (!PyArg_ParseTuple(arguments, "OOOnn:damaged_row", &capsule, &held, &row_idx, &row_bytes, &crc_offset))
        return nullptr;
    if (row_bytes < 4 || crc_offset < 0 || crc_offset > row_bytes - 4)
        return refuse("crc_offset", "expected it within a row");
    Pool* pool = pool_of(capsule);
    HeldRows rows;
    Copied<int32_t> wanted;
    if (pool == nullptr || !rows.take(held, "rows", row_bytes) || !wanted.take(row_idx, "wanted") ||
        !all_below("wanted", wanted.values(), wanted.size(), rows.num_rows()))
        return nullptr;
    int32_t found = -1;
    PyObject* done = unlocked([&] {
        return find_damaged(*pool, rows.rows(), wanted.values(), (int32_t)wanted.size(), row_bytes, crc_offset, &found);
    });
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    return PyLong_FromLong(found);
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
    {"take_tokens_alone", caught<take_tokens_alone>, METH_VARARGS, "take_tokens_alone(pool, alone)"},
    {"take_digits", caught<take_digits>, METH_VARARGS, "take_digits(pool, digits)"},
    {"experts", caught<experts>, METH_VARARGS,
     "experts(pool, [(layout, selector, records, extra, panels, threshold, tokens, weights[, outputs[, a, runs, "
     "neurons]])], "
     "x, y, d, apart=False)"},
    {"select", caught<select>, METH_VARARGS,
     "select(pool, [(layout, selector, threshold, tokens, a, runs, neurons)], x, d) -> [int]"},
    {"dense", caught<dense>, METH_VARARGS, "dense(pool, layout, rows, x, out)"},
    {"dense_each", caught<dense_each>, METH_VARARGS, "dense_each(pool, [(layout, rows, out)], x)"},
    {"decode", caught<decode_rows>, METH_VARARGS, "decode(pool, layout, rows, out)"},
    {"expert_panel_bytes", caught<panels_of_expert>, METH_VARARGS, "expert_panel_bytes(pool, layout, threshold) -> int"},
    {"panel_expert", caught<expert_to_panels>, METH_VARARGS, "panel_expert(layout, selector, records, panels)"},
    {"put_in_panels", caught<rows_to_panels>, METH_VARARGS, "put_in_panels(pool, layout, rows) -> bool"},
    {"take_rows", caught<rows_of_panels>, METH_VARARGS, "take_rows(pool, layout, rows, places, out)"},
    {"checksum", caught<of_bytes<uint32_t, checksum>>, METH_VARARGS, "checksum(pool, bytes) -> int"},
    {"read", caught<of_bytes<uint64_t, read_only>>, METH_VARARGS, "read(pool, bytes) -> int"},
    {"checksum_pages", caught<checksum_pages_of>, METH_VARARGS, "checksum_pages(pool, extent, num_bytes) -> int"},
    {"stitch", caught<stitch_rows>, METH_VARARGS, "stitch(rows, num_rows, row_bytes)"},
    {"damaged_row", caught<damaged_row_of>, METH_VARARGS,
     "damaged_row(pool, rows, wanted, row_bytes, crc_offset) -> int, -1 if none is"},
    {"gather", caught<gather_rows>, METH_VARARGS, "gather(pool, rows, row_bytes, places, out)"},
    {"attend", caught<attend_heads>, METH_VARARGS,
     "attend(pool, q, k, v, q_norm, k_norm, cosines, sines, keys, values, sinks, out, num_heads, num_kv_heads, head_dim, "
     "start, window, scale, eps, interleaved, kind)"},
    {"route", caught<route_tokens>, METH_VARARGS,
     "route(pool, logits, bias, experts, weights, kind, num_experts, chosen, groups, chosen_groups, least_sum, factor, "
     "jitter)"},
    {"rotate", caught<rotate_all>, METH_VARARGS, "rotate(pool, x, scale, is_scaled_first, hartley, out)"},
    {"recur", caught<recur_heads>, METH_VARARGS,
     "recur(pool, q, k, v, log_decay, rate, recurrent, out, num_key_heads, num_heads, keys, values)"},
    {"convolve", caught<convolve_channels>, METH_VARARGS, "convolve(pool, x, kernel, bias, state, out, taps)"},
    {"gated_delta", caught<gated_delta_heads>, METH_VARARGS,
     "gated_delta(pool, qkv, z, steps, rates, kernel, a_log, dt_bias, norm, conv, recurrent, mixed, out, num_key_heads, "
     "num_heads, keys, values, taps, is_sigmoid, eps)"},
    {"rms_norm", caught<norm_rows>, METH_VARARGS, "rms_norm(pool, x, weight, eps, out)"},
    {"scale_by_sigmoid", caught<scale_rows>, METH_VARARGS, "scale_by_sigmoid(pool, logits, y, d)"},
    {"activate", caught<activate_neurons>, METH_VARARGS, "activate(pool, gate, up, function, limit_bits, out)"},
    {"open_layers", caught<open_layers>, METH_VARARGS, "open_layers(num_layers) -> capsule"},
    {"set_layer", caught<set_layer>, METH_VARARGS, "set_layer(layers, layer, numbers, floats, vectors, matrices)"},
    {"set_layer_expert", caught<set_layer_expert>, METH_VARARGS,
     "set_layer_expert(layers, layer, expert, layout, selector, records, extra, threshold)"},
    {"set_layer_panels", caught<set_layer_panels>, METH_VARARGS, "set_layer_panels(layers, layer, expert, panels)"},
    {"begin_layer", caught<begin_layer>, METH_VARARGS,
     "begin_layer(pool, layers, layer, x, inputs, unrouted, experts, weights, cosines, sines, [(keys, values, start, kind)])"},
    {"run_layers", caught<run_layers>, METH_VARARGS,
     "run_layers(pool, layers, first, x, inputs, unrouted, experts, weights, [(cosines, sines, [(keys, values, start, "
     "kind)])]) -> int, how many are complete; -1 - n if the map of the next was cut"},
    {"end_layer", caught<end_layer>, METH_VARARGS,
     "end_layer(pool, layers, layer, x, inputs, unrouted, experts, weights)"},
    {"search_trellis", caught<search_codes>, METH_VARARGS,
     "search_trellis(limit, steps, kept, weights, targets, scales, importance, factor, hash, first levels, second levels, "
     "starts, codes, values, ends)"},
    {"open_reader", caught<open_reader>, METH_VARARGS,
     "open_reader(memory, threads, direct, max_read_bytes) -> capsule"},
    {"add_file", caught<add_file>, METH_VARARGS, "add_file(reader, descriptor) -> (file, bytes)"},
    {"submit_reads", caught<submit_reads>, METH_VARARGS,
     "submit_reads(reader, file, offsets, places, sizes, urgent) -> ticket"},
    {"row_pieces", caught<row_pieces>, METH_VARARGS,
     "row_pieces(neurons, has_block, page_places, begin, row_bytes, first_block, page_blocks, gap_blocks, offset) -> "
     "(blocks, offsets, places, sizes), int64 each"},
    {"wait_reads", caught<wait_reads>, METH_VARARGS, "wait_reads(reader, ticket) -> None | (file, at, error)"},
    {"are_read", caught<are_read>, METH_VARARGS, "are_read(reader, ticket) -> bool"},
    {"promote_reads", caught<promote_reads>, METH_VARARGS, "promote_reads(reader, ticket)"},
    {"cancel_reads", caught<cancel_reads>, METH_VARARGS, "cancel_reads(reader, ticket) -> bool"},
    {"read_stats", caught<read_stats>, METH_VARARGS,
     "read_stats(reader) -> (bytes_urgent, bytes_ahead, num_reads, busy_ns)"},
    {"close_reader", caught<close_reader>, METH_VARARGS, "close_reader(reader)"},
    {"open_share", caught<open_share>, METH_VARARGS,
     "open_share(pool, [(layout, selector, records, threshold)], num_experts, num_tokens, x, weights, experts, counts, "
     "neurons, a, y) -> capsule"},
    {"run_share", caught<run_share>, METH_VARARGS, "run_share(share, place)"},
    {"share_counts", caught<share_counts>, METH_O,
     "share_counts(share) -> (experts, neurons, record_bytes, busy_ns)"},
    {"take_share_fault", caught<take_share_fault>, METH_O,
     "take_share_fault(share) -> None | (fault, layer, expert)"},
    {"open_calls", caught<open_calls>, METH_VARARGS,
     "open_calls(flag, counts, y, num_tokens, k, limit_ms) -> capsule"},
    {"serve_calls", caught<serve_calls>, METH_VARARGS, "serve_calls(calls, share)"},
    {"next_call", caught<next_call>, METH_O, "next_call(calls) -> place | None"},
    {"take_call_fault", caught<take_call_fault>, METH_O, "take_call_fault(calls) -> place | None"},
    {"close_calls", caught<close_calls>, METH_O, "close_calls(calls)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    cut_error = PyErr_NewException("moe_pack.runtime.cpu._native.MapCutError", nullptr, nullptr);
    if (cut_error == nullptr || PyModule_AddObjectRef(module, "MapCutError", cut_error) != 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
