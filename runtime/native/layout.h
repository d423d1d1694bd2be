// How rows are laid out, as the Python side describes it in numbers; checked before any byte is touched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace moe_pack {

constexpr int32_t kMaxCols = 1 << 20, kMaxRows = 1 << 24;
constexpr int kPartNumbers = 7;  // codec, width, group (0: the row), scale_bits, offset, has_bias, place

enum class Place : int32_t { none = 0, selector = 1, record = 2 };

// A part, and where it begins in its row.
struct PlacedPart {
    Part part;
    int32_t offset;
    Place place;
};

enum class Selector : int32_t { none = 0, up = 1, gate = 2, both = 3 };

constexpr int kExpertNumbers = 5 + 3 * kPartNumbers;  // d, f, selector, bytes of a selector row, of a record; parts

// An expert's rows: gate, up and down, the first of which some families lack.
struct ExpertLayout {
    int32_t num_cols, num_rows;
    Selector selector;
    int32_t selector_row_bytes, record_row_bytes;
    PlacedPart gate, up, down;

    size_t selector_bytes() const { return (size_t)num_rows * selector_row_bytes; }
    size_t records_bytes() const { return (size_t)num_rows * record_row_bytes; }
    bool has_gate() const { return gate.place != Place::none; }
};

constexpr int kRowsNumbers = 2 + kPartNumbers;  // columns, bytes of a row; the part

// Rows of one part: a dense matrix.
struct RowsLayout {
    int32_t row_bytes;
    PlacedPart part;
};

// Null if the numbers make sense, else what is wrong with them.
const char* read_expert_layout(const int32_t* numbers, size_t count, ExpertLayout* layout);
const char* read_rows_layout(const int32_t* numbers, size_t count, RowsLayout* layout);

}  // namespace moe_pack
