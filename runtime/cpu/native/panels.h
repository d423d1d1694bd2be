// Panels: rows that are never skipped, 16 side by side, so that a product needs no sums across a register.
//
// A panel takes the place of 16 rows. It begins at the first multiple of 64 bytes there, and has a block for every 64
// columns: of affine codes in groups of 64
//     4 bit    8 lines of 64 bytes: double word r of line j has row r's columns 8 j to 8 j + 3 in the low halves of its
//              bytes, and 8 j + 4 to 8 j + 7 in the high halves
//     8 bit    16 lines: double word r of line j has row r's columns 4 j to 4 j + 3
// and then 16 scales and 16 zeros, float16. The checksum of a row and its padding, of which a panel has none, leave
// space enough to begin at such a multiple.
#pragma once

#include "layout.h"

namespace moe_pack {

constexpr int32_t kPanelRows = 16;
constexpr int32_t kPanelTokens = 8;  // of a call whose expert is in panels
constexpr int32_t kPanelScaleBytes = 2 * 2 * kPanelRows;  // of a block: scales and zeros

inline int32_t panel_block_bytes(const Part& part) { return part.width * 8 * kPanelRows + kPanelScaleBytes; }
inline size_t panel_bytes(const Part& part) { return (size_t)part.num_groups * panel_block_bytes(part); }

// Whether rows of a part can be in panels: `row_bytes` of each are the part's, and `num_rows` are whole panels.
bool can_panel(const Part& part, int32_t row_bytes, int32_t num_rows);

// An expert in panels has kMaxTile neurons where their rows lay, those of its selector's and those of its records: gate's
// and up's panels of 16 neurons, the first before the second where both are, and then down's. Down has for each eight
// groups of columns the scales of the neurons, one neuron's eight after the other's, their zeros likewise, and panels of
// 16 columns: a line has 16 columns of 8 neurons, where those of gate and up have 16 neurons' 8 columns.
constexpr int32_t kDownGroups = 8;
constexpr int32_t kDownPanelBytes = kMaxTile / 8 * kLineBytes;
inline size_t down_tile_bytes(const Part& part) {
    return (size_t)kMaxTile * (part.code_bytes + part.scale_bytes + part.zero_bytes);
}

// Whether an expert can be in panels.
bool can_panel(const ExpertLayout& layout);

// An expert's panels take the bytes of its rows: first the selector's.
inline size_t selector_panel_bytes(const ExpertLayout& layout) {
    return layout.selector == Selector::none ? 0 : layout.selector_bytes();
}
inline size_t expert_panel_bytes(const ExpertLayout& layout) {
    return selector_panel_bytes(layout) + layout.records_bytes();
}

// Whether all neurons of an expert run whatever their activations, so that sums are those of panels: no threshold, and a
// function that few values make zero.
bool runs_whole(const ExpertLayout& layout, float threshold);

// Puts tile `number` of an expert's neurons into panels.
void make_tile(const ExpertLayout& layout, const Rows& selector, const Rows& records, int32_t number,
               uint8_t* selector_tile, uint8_t* records_tile);

// The panel in the place of 16 rows from `rows` on.
template <class Byte>
Byte* panel_in(Byte* rows) {
    return rows + (-(uintptr_t)rows & (kLineBytes - 1));
}

// Puts 16 rows of a part into a panel. The rows lie elsewhere.
void make_panel(const Part& part, const uint8_t* const* rows, uint8_t* panel);

// Row r of a panel as it was, without what is behind its zeros.
void take_row(const Part& part, const uint8_t* panel, int32_t r, uint8_t* row);

// The same of a matrix in panels.
inline void take_row_of(const RowsLayout& layout, const uint8_t* rows, int32_t number, uint8_t* row) {
    const size_t first = (size_t)(number / kPanelRows * kPanelRows) * layout.row_bytes;
    take_row(layout.part.part, panel_in(rows + first), number % kPanelRows, row);
}

// Panels that are wanted soon: a line for each that is read, from `at` up to `stop`, and then from `next` on. Null: none.
struct PanelAhead {
    const uint8_t *at = nullptr, *stop = nullptr, *next = nullptr;

    // What comes kAheadBytes behind the panels from `first` to `end`, and then what begins at `next`.
    PanelAhead() = default;
    PanelAhead(const uint8_t* first, const uint8_t* end, const uint8_t* then) : at(first), stop(end), next(then) {
        pass(kAheadBytes);
    }
    void pass(int32_t num_bytes) {
        at += num_bytes;
        if (at < stop) return;
        at = next == nullptr ? nullptr : next + (at - stop);
        stop = reinterpret_cast<const uint8_t*>(UINTPTR_MAX);
    }

    static constexpr int32_t kAheadBytes = 6144;
};

// Into the second level of cache, from where panels come faster than when lines are fetched into the first.
inline void fetch_line(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// What one instruction set provides.
struct PanelKernels {
    // As in Kernels: a token's inputs in the form in which `dot` wants them.
    size_t (*prepared_bytes)(const Part& part);
    void (*prepare)(const Part& part, const float* x, void* prepared);

    // outs[t][r]: the rows of `count` panels, `stride` bytes apart, times token t, as if it were alone.
    void (*dot)(const Part& part, const uint8_t* panels, size_t stride, int32_t count, const void* const* prepared,
                float* const* outs, int32_t num_tokens, PanelAhead& ahead);

    // The rest is of parts of 4 bits, of experts whose neurons all run (`can_panel` of their layout): kernels of the
    // same names in Kernels, for rows as they lie, and the sum of a tile of down rows in panels, kMaxTile of them, for
    // tokens whose sums are `floats` apart. Both give the same bits.
    decltype(Kernels::dot_rows) dot_rows;
    decltype(Kernels::add_rows) add_rows;
    void (*add)(const Part& part, const uint8_t* tile, const float* h, int32_t num_tokens, PanelAhead& ahead,
                float* sums, size_t floats);
    decltype(Kernels::sum_floats) sum_floats;
    decltype(Kernels::finish_sum) finish_sum;

    // The same with inputs and factors of two digits, 16 bits, in place of three; null in those.
    const PanelKernels* rounded;
};

#if defined(__x86_64__)
extern const PanelKernels avx2_panel_kernels;
extern const PanelKernels avx512_panel_kernels;
const PanelKernels* avx_vnni_panel_kernels();  // null: the compiler does not know them
#elif defined(__aarch64__)
const PanelKernels* neon_panel_kernels();  // with products of bytes (FEAT_DotProd); null likewise
#endif

}  // namespace moe_pack
