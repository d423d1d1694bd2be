#include "module_search.h"

#include "trellis_search.h"

namespace moe_pack {
namespace {

constexpr int kMaxSteps = 1 << 15;  // of a piece of a row

// The buffers of a call.
struct GivenSearch {
    Buffer<const float> weights, targets, scales, importance, factor, first_levels, second_levels;
    Copied<uint8_t> hash, starts;
    Buffer<uint8_t> codes, ends;
    Buffer<float> values;

    bool take(PyObject* const* from) {
        return weights.take(from[0], "weights") && targets.take(from[1], "targets") && scales.take(from[2], "scales") &&
               importance.take(from[3], "importance") && factor.take(from[4], "factor") && hash.take(from[5], "hash") &&
               first_levels.take(from[6], "first levels") && second_levels.take(from[7], "second levels") &&
               starts.take(from[8], "starts") && codes.take(from[9], "codes", true) &&
               values.take(from[10], "values", true) && ends.take(from[11], "ends", true);
    }

    // Whether all sizes fit; what follows from them is set.
    bool fit(TrellisWork* work) const {
        const size_t rows = starts.size(), columns = 2 * size_t(work->num_steps), kept = work->num_kept;
        if (rows > kMaxTokens) return refuse("starts", "too many rows") != nullptr;
        if (!has_size("weights", weights.size(), rows * columns) || !has_size("targets", targets.size(), rows * columns) ||
            !has_size("scales", scales.size(), rows * columns) ||
            !has_size("importance", importance.size(), columns) || !has_size("hash", hash.size(), 3 * kNibbles) ||
            !has_size("codes", codes.size(), rows * kept) || !has_size("values", values.size(), rows * 2 * kept) ||
            !has_size("ends", ends.size(), rows))
            return false;
        if (factor.values() != nullptr && !has_size("factor", factor.size(), columns * columns)) return false;
        const size_t sizes[2] = {first_levels.size(), second_levels.size()};
        for (int half = 0; half < 2; half++) {
            if (sizes[half] != kNibbles && sizes[half] != 2 * kNibbles && sizes[half] != kMostLevels * kNibbles)
                return refuse("levels", "expected 16, 32 or 64") != nullptr;
            work->num_levels[half] = (int32_t)(sizes[half] / kNibbles);
        }
        if (sizes[1] != sizes[0] && sizes[1] != 2 * sizes[0])
            return refuse("levels", "expected as many of the second weight as of the first, or twice as many") != nullptr;
        work->num_rows = (int32_t)rows;
        return true;
    }
};

}  // namespace

PyObject* search_codes(PyObject*, PyObject* arguments) {
    PyObject* from[12];
    const char* limit;
    TrellisWork work = {};
    if (!PyArg_ParseTuple(arguments, "ziiOOOOOOOOOOOO:search_trellis", &limit, &work.num_steps, &work.num_kept,
                          &from[0], &from[1], &from[2], &from[3], &from[4], &from[5], &from[6], &from[7], &from[8],
                          &from[9], &from[10], &from[11]))
        return nullptr;
    if (best_kernels(limit) == nullptr)
        return refuse("instruction set", "expected portable, neon, avx2, avx512 or avx512vbmi");
    if (work.num_steps < 1 || work.num_steps > kMaxSteps) return refuse("steps", "expected 1 to 32768");
    if (work.num_kept < 0 || work.num_kept > work.num_steps) return refuse("kept", "more steps than there are");
    GivenSearch given;
    if (!given.take(from) || !given.fit(&work)) return nullptr;
    if (work.num_rows == 0) Py_RETURN_NONE;
    work.weights = given.weights.values();
    work.targets = given.targets.values();
    work.scales = given.scales.values();
    work.importance = given.importance.values();
    work.factor = given.factor.values();
    work.hash = given.hash.values();
    work.levels[0] = given.first_levels.values();
    work.levels[1] = given.second_levels.values();
    work.starts = given.starts.values();
    work.codes = given.codes.values();
    work.values = given.values.values();
    work.ends = given.ends.values();
    return unlocked([&] {
        search_trellis(limit, work);
        return Outcome::done;
    });
}

}  // namespace moe_pack
