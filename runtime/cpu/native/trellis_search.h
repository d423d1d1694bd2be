// A cheap path through the states of a trellis (docs/pack.md, section 8): the codes of rows of weights.
// All sizes have been checked. `calib/quantize/trellis.py` says what is searched for, and has the twin in torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_pack {

constexpr int32_t kNibbles = 16;
constexpr int32_t kStates = kNibbles * kNibbles;  // the last two nibbles: the newest, plus 16 times the one before
constexpr int32_t kMostLevels = 4;                // of a set
constexpr int32_t kOwnSteps = 32;                 // whose errors a path corrects itself
constexpr int32_t kFedPaths = 32;                 // that go on after a step, with a factor
constexpr int32_t kFreePaths = 64;                // and without

// Rows of 2 num_steps columns in, the codes of their first `num_kept` steps out.
struct TrellisWork {
    int32_t num_rows, num_steps, num_kept;
    int32_t num_levels[2];                    // of a set of a step's first weight, of its second
    const float *weights, *targets, *scales;  // [num_rows, 2 num_steps]
    const float* importance;                  // [2 num_steps]
    const float* factor;                      // [2 num_steps, 2 num_steps], or null: no feedback
    const uint8_t* hash;                      // [3, 16]: of a step's nibble, of the one before, of the one before that
    const float* levels[2];                   // [num_levels, 16] each
    const uint8_t* starts;                    // [num_rows]: the states before step 0
    uint8_t* codes;                           // [num_rows, num_kept]
    float* values;                            // [num_rows, 2 num_kept]
    uint8_t* ends;                            // [num_rows]: the states after step num_kept - 1
};

// Memory of a call, aligned to 64 bytes. Survivors are numbered in the order of their states.
struct TrellisWorkspace {
    uint8_t* parents;  // [num_steps, kFreePaths]: of each survivor of a step, its number before the step
    uint8_t* codes;    // [num_steps, kFreePaths]
    float* targets;    // [2 num_steps], with the corrections of settled steps
    float* factor;     // [num_steps, kOwnSteps, 2, 2]: of the steps whose errors paths have when a step begins, but the
                       // last; step u's at u % kOwnSteps, by column of step u, then of the step
    float* errors;     // [kOwnSteps, 2, kFedPaths]: of survivors
};

using SearchRows = void (*)(const TrellisWork& work, const TrellisWorkspace& workspace);

extern const SearchRows search_rows_portable;
#if defined(__x86_64__)
extern const SearchRows search_rows_avx2;
extern const SearchRows search_rows_avx512;
#endif

// Finds the codes of all rows with the best instruction set up to `limit` (kernels.h), all of which find the same.
// Its memory is some 650 bytes a step with a factor, and 140 without. Throws std::bad_alloc.
void search_trellis(const char* limit, const TrellisWork& work);

}  // namespace moe_pack
