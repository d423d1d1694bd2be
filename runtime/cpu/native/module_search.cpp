#include "module_search.h"

#include "trellis_search.h"

namespace moe_pack {
namespace {

constexpr int kMaxColumns = 1 << 16;  // of a piece of a row

// The buffers of a call.
struct GivenSearch {
    Buffer<const float> weights, targets, scales, importance, factor, tables;
    Copied<uint8_t> starts;
    Buffer<uint8_t> codes, windows;
    Buffer<float> values;

    bool take(PyObject* const* from) {
        return weights.take(from[0], "weights") && targets.take(from[1], "targets") && scales.take(from[2], "scales") &&
               importance.take(from[3], "importance") && factor.take(from[4], "factor") &&
               tables.take(from[5], "tables") && starts.take(from[6], "starts") &&
               codes.take(from[7], "codes", true) && values.take(from[8], "values", true) &&
               windows.take(from[9], "windows", true);
    }

    // Whether all sizes fit; what follows from them is set.
    bool fit(TrellisWork* work) const {
        const size_t rows = starts.size(), columns = work->num_cols, kept = work->num_kept;
        if (rows > kMaxTokens) return refuse("starts", "too many rows") != nullptr;
        if (!has_size("weights", weights.size(), rows * columns) || !has_size("targets", targets.size(), rows * columns) ||
            !has_size("scales", scales.size(), rows * columns) || !has_size("tables", tables.size(), 2 * kStates) ||
            !has_size("codes", codes.size(), rows * kept) || !has_size("values", values.size(), rows * kept) ||
            !has_size("windows", windows.size(), rows))
            return false;
        if (importance.size() != columns && !has_size("importance", importance.size(), rows * columns)) return false;
        if (factor.values() != nullptr && !has_size("factor", factor.size(), columns * columns)) return false;
        for (size_t row = 0; row < rows; row++)
            if (starts.values()[row] >= kStates) return refuse("starts", "expected states of 7 bits") != nullptr;
        work->num_rows = (int32_t)rows;
        work->importance_stride = importance.size() == columns ? 0 : columns;
        return true;
    }
};

}  // namespace

PyObject* search_codes(PyObject*, PyObject* arguments) {
    PyObject* from[10];
    const char* limit;
    TrellisWork work = {};
    if (!PyArg_ParseTuple(arguments, "ziiiOOOOOOOOOO:search_trellis", &limit, &work.num_cols, &work.num_kept,
                          &work.width, &from[0], &from[1], &from[2], &from[3], &from[4], &from[5], &from[6], &from[7],
                          &from[8], &from[9]))
        return nullptr;
    if (best_kernels(limit) == nullptr)
        return refuse("instruction set", "expected portable, avx2, avx512 or avx512vbmi");
    if (work.num_cols < 1 || work.num_cols > kMaxColumns) return refuse("columns", "expected 1 to 65536");
    if (work.num_kept < 0 || work.num_kept > work.num_cols) return refuse("kept", "more columns than there are");
    if (work.width < 3 || work.width > 8) return refuse("width", "expected 3 to 8");
    GivenSearch given;
    if (!given.take(from) || !given.fit(&work)) return nullptr;
    if (work.num_rows == 0) Py_RETURN_NONE;
    work.weights = given.weights.values();
    work.targets = given.targets.values();
    work.scales = given.scales.values();
    work.importance = given.importance.values();
    work.factor = given.factor.values();
    work.tables = given.tables.values();
    work.starts = given.starts.values();
    work.codes = given.codes.values();
    work.values = given.values.values();
    work.windows = given.windows.values();
    return unlocked([&] {
        search_trellis(limit, work);
        return Outcome::done;
    });
}

}  // namespace moe_pack
