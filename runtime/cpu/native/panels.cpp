#include "panels.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

namespace moe_pack {
namespace {

constexpr uint32_t kLowHalves = 0x0f0f0f0f;

uint32_t load_word(const uint8_t* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

void store_word(uint8_t* to, uint32_t word) { std::memcpy(to, &word, sizeof word); }

// A row's codes of a block of 4 bits: byte j has columns j and j + 32. Lines j and j + 4 of a panel have what two of
// its double words have.
void place_nibbles(const uint8_t* codes, uint8_t* lines) {
    for (int j = 0; j < 4; j++) {
        const uint32_t first = load_word(codes + 8 * j), second = load_word(codes + 8 * j + 4);
        store_word(lines + j * kLineBytes, (first & kLowHalves) | (second & kLowHalves) << 4);
        store_word(lines + (j + 4) * kLineBytes, (first >> 4 & kLowHalves) | (second & ~kLowHalves));
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
    const int32_t block_bytes = panel_block_bytes(part), code_bytes = part.width * 8;
    for (int32_t r = 0; r < kPanelRows; r++) {
        const uint8_t* scales = rows[r] + part.scales_at;
        for (int32_t b = 0; b < part.num_groups; b++) {
            const uint8_t* codes = rows[r] + (size_t)b * code_bytes;
            uint8_t *lines = panel + (size_t)b * block_bytes, *end = lines + code_bytes * kPanelRows;
            if (part.width == 4)
                place_nibbles(codes, lines + 4 * r);
            else
                for (int j = 0; j < kBlock / 4; j++) std::memcpy(lines + j * kLineBytes + 4 * r, codes + 4 * j, 4);
            std::memcpy(end + 2 * r, scales + 2 * b, 2);
            std::memcpy(end + 2 * (kPanelRows + r), scales + part.scale_bytes + 2 * b, 2);
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

// Four words of four bytes, transposed: byte i of word k becomes byte k of word i.
void transpose(uint32_t words[4]) {
    constexpr uint32_t even = 0x00ff00ff;
    const uint32_t a = (words[0] & even) | (words[1] & even) << 8, b = (words[0] >> 8 & even) | (words[1] & ~even);
    const uint32_t c = (words[2] & even) | (words[3] & even) << 8, d = (words[2] >> 8 & even) | (words[3] & ~even);
    words[0] = (a & 0xffff) | c << 16;
    words[1] = (b & 0xffff) | d << 16;
    words[2] = a >> 16 | (c & 0xffff0000);
    words[3] = b >> 16 | (d & 0xffff0000);
}

// A group's columns of 64 rows of down, four panels. Byte j of a row has columns j and j + 32.
void make_down_panels(const uint8_t* const* rows, int32_t group, uint8_t* panels) {
    for (int32_t eight = 0; eight < kMaxTile / 8; eight++)
        for (int32_t c = 0; c < 32; c += 4) {
            uint32_t first[4], second[4];  // of rows 0 to 3 of the eight, and of 4 to 7
            for (int i = 0; i < 4; i++) {
                first[i] = load_word(rows[8 * eight + i] + group * 32 + c);
                second[i] = load_word(rows[8 * eight + 4 + i] + group * 32 + c);
            }
            transpose(first);
            transpose(second);
            uint8_t* line = panels + c / kPanelRows * kDownPanelBytes + eight * kLineBytes + c % kPanelRows * 4;
            for (int i = 0; i < 4; i++) {
                const uint32_t low = (first[i] & kLowHalves) | (second[i] & kLowHalves) << 4;
                const uint32_t high = (first[i] >> 4 & kLowHalves) | (second[i] & ~kLowHalves);
                store_word(line + 4 * i, low);
                store_word(line + 2 * kDownPanelBytes + 4 * i, high);
            }
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
