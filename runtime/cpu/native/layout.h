// How rows are laid out, as the Python side describes it in numbers; checked before any byte is touched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace moe_pack {

constexpr int32_t kMaxCols = 1 << 20, kMaxRows = 1 << 24;

// codec, width, group (0: the row), scale_bits, offset of codes, of scales, has_bias, place
constexpr int kPartNumbers = 8;

enum class Place : int32_t { none = 0, selector = 1, record = 2 };

// A part, and where its codes begin in its row.
struct PlacedPart {
    Part part;
    int32_t offset;
    Place place;
};

enum class Selector : int32_t { none = 0, up = 1, gate = 2, both = 3 };
// docs/model.md, "Expert"
enum class Function : int32_t {
    silu = 0,
    relu = 1,
    clamped_swiglu = 2,
    relu2 = 3,
    gelu_tanh = 4,
    clipped_silu = 5,
    capped_silu = 6,
};

// d, f, selector, bytes of a selector row, of a record, of the row of extra values (0: none), function, bits of its
// limit; parts
constexpr int kHeadNumbers = 8;
constexpr int kExpertNumbers = kHeadNumbers + 3 * kPartNumbers;

// An expert's rows: gate, up and down, the first of which some families lack.
struct ExpertLayout {
    int32_t num_cols, num_rows;
    Selector selector;
    int32_t selector_row_bytes, record_row_bytes, extra_row_bytes;
    Function function;
    float limit;  // of the functions that have one
    PlacedPart gate, up, down;

    size_t selector_bytes() const { return (size_t)num_rows * selector_row_bytes; }
    size_t records_bytes() const { return (size_t)num_rows * record_row_bytes; }
    bool has_gate() const { return gate.place != Place::none; }
    bool has_limit() const { return function == Function::clipped_silu || function == Function::capped_silu; }
};

// Rows of one length: in one piece, or in the pages of an extent.
//
// A page holds `page_bytes` of the extent, from `pages[p]` on. A row that begins in one and ends in the next lies whole
// in the space before the next (extent.h, `stitch`).
struct Rows {
    const uint8_t* first = nullptr;
    const uint8_t* const* pages = nullptr;
    size_t begin = 0;  // of row 0 in the extent
    size_t page_bytes = 0;
    uint64_t reciprocal = 0;  // of page_bytes, in units of 2^-64: rounded up, exact below 2^64 / page_bytes

    Rows() = default;
    Rows(const uint8_t* in_one_piece) : first(in_one_piece) {}
    Rows(const uint8_t* const* of_pages, size_t bytes_of_each, size_t from)
        : pages(of_pages), begin(from), page_bytes(bytes_of_each), reciprocal(UINT64_MAX / bytes_of_each + 1) {}
    const uint8_t* at(size_t row, size_t row_bytes) const {
        if (pages == nullptr) return first + row * row_bytes;
        size_t start = begin + row * row_bytes;
        size_t page = (size_t)((unsigned __int128)(start + row_bytes - 1) * reciprocal >> 64);
        return pages[page] + ((ptrdiff_t)start - (ptrdiff_t)(page * page_bytes));
    }
};

constexpr int kRowsNumbers = 3 + kPartNumbers;  // columns, bytes of a row, whether in panels; the part

// Rows of one part: a dense matrix.
struct RowsLayout {
    int32_t row_bytes;
    bool in_panels;  // 16 rows each (panels.h)
    PlacedPart part;
};

// Returns null if the numbers make sense, else what is wrong with them.
const char* read_expert_layout(const int32_t* numbers, size_t count, ExpertLayout* layout);
const char* read_rows_layout(const int32_t* numbers, size_t count, RowsLayout* layout);

}  // namespace moe_pack
