#include "panels.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace moe_pack {
namespace {

constexpr uint32_t kLowHalves = 0x0f0f0f0f;

uint32_t load_word(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

void store_word(uint8_t* to, uint32_t word) { std::memcpy(to, &word, sizeof word); }

// Four double words of one row, or one double word of four rows.
typedef uint32_t Four __attribute__((vector_size(16)));

Four load_four(const uint8_t* from) {
    Four words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

void store_four(uint8_t* to, Four words) { std::memcpy(to, &words, sizeof words); }

// Lanes of both registers in turn: those of their first halves, and of their second ones.
template <class Lane>
void interleave(Four a, Four b, Four& first, Four& second) {
#if defined(__x86_64__)
    const __m128i x = (__m128i)a, y = (__m128i)b;
    if constexpr (sizeof(Lane) == 1) {
        first = (Four)_mm_unpacklo_epi8(x, y), second = (Four)_mm_unpackhi_epi8(x, y);
    } else if constexpr (sizeof(Lane) == 2) {
        first = (Four)_mm_unpacklo_epi16(x, y), second = (Four)_mm_unpackhi_epi16(x, y);
    } else {
        first = (Four)_mm_unpacklo_epi32(x, y), second = (Four)_mm_unpackhi_epi32(x, y);
    }
#else
    constexpr int count = 16 / sizeof(Lane);
    Lane lanes[2][count], in_turn[2 * count];
    std::memcpy(lanes[0], &a, 16);
    std::memcpy(lanes[1], &b, 16);
    for (int i = 0; i < 2 * count; i++) in_turn[i] = lanes[i % 2][i / 2];
    std::memcpy(&first, in_turn, 16);
    std::memcpy(&second, in_turn + count, 16);
#endif
}

// Word i of row k becomes word k of register i.
void transpose_words(Four rows[4]) {
    Four near[2], far[2];
    interleave<uint32_t>(rows[0], rows[2], near[0], far[0]);
    interleave<uint32_t>(rows[1], rows[3], near[1], far[1]);
    interleave<uint32_t>(near[0], near[1], rows[0], rows[1]);
    interleave<uint32_t>(far[0], far[1], rows[2], rows[3]);
}

// Low halves of the bytes of both, and high ones.
Four low_halves(Four first, Four second) { return (first & kLowHalves) | (second & kLowHalves) << 4; }
Four high_halves(Four first, Four second) { return (first >> 4 & kLowHalves) | (second & ~kLowHalves); }

// Four rows' codes of a block of 4 bits: byte j of each has columns j and j + 32. Lines j and j + 4 of a panel have what
// two of a row's double words have.
void place_nibbles(const uint8_t* const* rows, size_t at, uint8_t* lines) {
    for (int j = 0; j < 4; j += 2) {
        Four words[4];
        for (int i = 0; i < 4; i++) words[i] = load_four(rows[i] + at + 8 * j);
        transpose_words(words);
        for (int k = 0; k < 2; k++) {
            uint8_t* line = lines + (j + k) * kLineBytes;
            store_four(line, low_halves(words[2 * k], words[2 * k + 1]));
            store_four(line + 4 * kLineBytes, high_halves(words[2 * k], words[2 * k + 1]));
        }
    }
}

// The same of 8 bits: line j has column 4 j and the three after it.
void place_bytes(const uint8_t* const* rows, size_t at, uint8_t* lines) {
    for (int j = 0; j < kBlock / 4; j += 4) {
        Four words[4];
        for (int i = 0; i < 4; i++) words[i] = load_four(rows[i] + at + 4 * j);
        transpose_words(words);
        for (int k = 0; k < 4; k++) store_four(lines + (j + k) * kLineBytes, words[k]);
    }
}

void take_nibbles(const uint8_t* lines, uint8_t* codes) {
    for (int j = 0; j < 4; j++) {
        const uint32_t low = load_word(lines + j * kLineBytes), high = load_word(lines + (j + 4) * kLineBytes);
        store_word(codes + 8 * j, (low & kLowHalves) | (high & kLowHalves) << 4);
        store_word(codes + 8 * j + 4, (low >> 4 & kLowHalves) | (high & ~kLowHalves));
    }
}

}  // namespace

bool can_panel(const Part& part, int32_t row_bytes, int32_t num_rows) {
    if (part.codec != Codec::affine || part.group != kBlock || part.scale_bits != 16 || part.has_bias) return false;
    if ((part.width != 4 && part.width != 8) || num_rows % kPanelRows) return false;
    // Panels are as far from each other as their rows, and all begin at a multiple of 64 bytes. One that does not begin
    // at its first row's first byte still ends before the last one's end.
    const size_t stride = (size_t)row_bytes * kPanelRows;
    return stride % kLineBytes == 0 && stride >= panel_bytes(part) + kLineBytes - 1;
}

void make_panel(const Part& part, const uint8_t* const* rows, uint8_t* panel) {
    const int32_t code_bytes = part.width * 8;
    for (int32_t b = 0; b < part.num_groups; b++, panel += panel_block_bytes(part)) {
        for (int32_t r = 0; r < kPanelRows; r += 4)
            (part.width == 4 ? place_nibbles : place_bytes)(rows + r, (size_t)b * code_bytes, panel + 4 * r);
        uint8_t* end = panel + code_bytes * kPanelRows;
        for (int32_t r = 0; r < kPanelRows; r++) {
            const uint8_t* scale = rows[r] + part.scales_at + 2 * b;
            std::memcpy(end + 2 * r, scale, 2);
            std::memcpy(end + 2 * (kPanelRows + r), scale + part.scale_bytes, 2);
        }
    }
}

void take_row(const Part& part, const uint8_t* panel, int32_t r, uint8_t* row) {
    const int32_t block_bytes = panel_block_bytes(part), code_bytes = part.width * 8;
    uint8_t* scales = row + part.scales_at;
    for (int32_t b = 0; b < part.num_groups; b++) {
        const uint8_t *lines = panel + (size_t)b * block_bytes, *end = lines + code_bytes * kPanelRows;
        uint8_t* codes = row + (size_t)b * code_bytes;
        if (part.width == 4)
            take_nibbles(lines + 4 * r, codes);
        else
            for (int j = 0; j < kBlock / 4; j++) std::memcpy(codes + 4 * j, lines + j * kLineBytes + 4 * r, 4);
        std::memcpy(scales + 2 * b, end + 2 * r, 2);
        std::memcpy(scales + part.scale_bytes + 2 * b, end + 2 * (kPanelRows + r), 2);
    }
}

bool can_panel(const ExpertLayout& layout) {
    constexpr int32_t any_length = INT32_MAX / kLineBytes * kLineBytes;
    size_t bytes[3] = {};  // of a tile's panels, by place
    if (layout.num_rows % kMaxTile) return false;
    for (const PlacedPart* placed : {&layout.gate, &layout.up, &layout.down}) {
        if (placed->place == Place::none) continue;
        const Part& part = placed->part;
        const bool is_down = placed == &layout.down;
        if (part.width != 4 || !can_panel(part, any_length, 0)) return false;
        bytes[(int)placed->place] += is_down ? down_tile_bytes(part) : panel_bytes(part) * (kMaxTile / kPanelRows);
    }
    // As for a matrix: a tile ends within its rows wherever it begins.
    const auto fits = [](size_t row_bytes, size_t num_bytes) {
        return num_bytes == 0 || row_bytes * kMaxTile >= num_bytes + kLineBytes - 1;
    };
    return fits(layout.selector_row_bytes, bytes[1]) && fits(layout.record_row_bytes, bytes[2]);
}

bool runs_whole(const ExpertLayout& layout, float threshold) {
    return threshold == 0.0f && layout.function != Function::relu && layout.function != Function::relu2 && can_panel(layout);
}

namespace {

// A line with the bytes of four registers side by side.
void place_columns(const Four bytes[4], uint8_t* line) {
    Four pairs[4], columns[4];
    interleave<uint8_t>(bytes[0], bytes[1], pairs[0], pairs[1]);
    interleave<uint8_t>(bytes[2], bytes[3], pairs[2], pairs[3]);
    for (int i = 0; i < 2; i++) interleave<uint16_t>(pairs[i], pairs[2 + i], columns[2 * i], columns[2 * i + 1]);
    for (int i = 0; i < 4; i++) store_four(line + 16 * i, columns[i]);
}

// A group's columns of 64 rows of down, four panels. Byte j of a row has columns j and j + 32.
void make_down_panels(const uint8_t* const* rows, int32_t group, uint8_t* panels) {
    for (int32_t eight = 0; eight < kMaxTile / 8; eight++)
        for (int32_t c = 0; c < 32; c += kPanelRows) {
            Four low[4], high[4];  // of rows i and i + 4 of the eight
            for (int i = 0; i < 4; i++) {
                const Four first = load_four(rows[8 * eight + i] + group * 32 + c);
                const Four second = load_four(rows[8 * eight + 4 + i] + group * 32 + c);
                low[i] = low_halves(first, second);
                high[i] = high_halves(first, second);
            }
            uint8_t* line = panels + c / kPanelRows * kDownPanelBytes + eight * kLineBytes;
            place_columns(low, line);
            place_columns(high, line + 2 * kDownPanelBytes);
        }
}

void make_down(const Part& part, const uint8_t* const* rows, uint8_t* tile) {
    for (int32_t first = 0; first < part.num_groups; first += kDownGroups) {
        const int32_t count = std::min(kDownGroups, part.num_groups - first);
        for (int32_t bytes_at : {part.scales_at, part.scales_at + part.scale_bytes})
            for (int32_t r = 0; r < kMaxTile; r++, tile += 2 * count)
                std::memcpy(tile, rows[r] + bytes_at + 2 * first, 2 * count);
        for (int32_t group = first; group < first + count; group++, tile += 4 * kDownPanelBytes)
            make_down_panels(rows, group, tile);
    }
}

}  // namespace

void make_tile(const ExpertLayout& layout, const Rows& selector, const Rows& records, int32_t number,
               uint8_t* selector_tile, uint8_t* records_tile) {
    uint8_t* to[3] = {nullptr, selector_tile, records_tile};
    for (const PlacedPart* placed : {&layout.gate, &layout.up, &layout.down}) {
        if (placed->place == Place::none) continue;
        const bool is_selector = placed->place == Place::selector;
        const uint8_t* rows[kMaxTile];
        for (int32_t r = 0; r < kMaxTile; r++) {
            const size_t row = (size_t)number * kMaxTile + r;
            rows[r] = (is_selector ? selector.at(row, layout.selector_row_bytes)
                                   : records.at(row, layout.record_row_bytes)) + placed->offset;
        }
        uint8_t*& at = to[(int)placed->place];
        if (placed == &layout.down) {
            make_down(placed->part, rows, at);
            continue;
        }
        for (int32_t r = 0; r < kMaxTile; r += kPanelRows, at += panel_bytes(placed->part))
            make_panel(placed->part, rows + r, at);
    }
}

}  // namespace moe_pack
