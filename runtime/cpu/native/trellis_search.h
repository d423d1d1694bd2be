// The cheapest path through the states of a trellis's stream (docs/format.md, section 8): the codes of rows of weights.
// All sizes have been checked. `calib/quantize/trellis.py` says what is found, and has the twin in torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_pack {

constexpr int32_t kStates = 128;         // of the stream's last 7 bits
constexpr int32_t kSurvivorColumns = 64;  // whose errors a path corrects for itself
constexpr int32_t kMostParents = 64;      // groups of states whose paths go on together

// Rows [num_rows, num_cols] in, the codes of their first `num_kept` columns out.
struct TrellisWork {
    int32_t num_rows, num_cols, num_kept;
    int32_t width;                       // 3 to 8: bits of two weights
    const float *weights, *targets, *scales;
    const float* importance;
    size_t importance_stride;            // num_cols, or 0: one row for all
    const float* factor;                 // [num_cols, num_cols], or null: no feedback
    const float* tables;                 // [2, kStates]: of even columns, of odd ones
    const uint8_t* starts;               // [num_rows], below kStates
    uint8_t* codes;                      // [num_rows, num_kept]
    float* values;                       // [num_rows, num_kept]
    uint8_t* windows;                    // [num_rows]
};

// Memory of a call, aligned to 64 bytes.
struct TrellisRoom {
    uint8_t* oldest;   // [num_cols, kMostParents]: the bits that leave the state before, of the cheapest path
    float* targets;    // [num_cols], with the errors of columns before that are settled
    float* factor;     // [num_cols, kSurvivorColumns]: column u's at u % kSurvivorColumns, 0 but for those needed
    float* errors;     // [kSurvivorColumns, kMostParents]: those of paths
};

using SearchRows = void (*)(const TrellisWork& work, const TrellisRoom& room);
extern const SearchRows search_rows_portable;
#if defined(__x86_64__)
extern const SearchRows search_rows_avx2;
extern const SearchRows search_rows_avx512;
#endif

// Finds the codes of all rows with the best instruction set up to `limit` (kernels.h), all of which find the same.
// Its memory is some 320 bytes a column. Throws std::bad_alloc.
void search_trellis(const char* limit, const TrellisWork& work);

}  // namespace moe_pack
