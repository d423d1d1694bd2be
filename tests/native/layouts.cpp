#include "layouts.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>

#include "cases.h"

namespace moe_pack {
namespace {

enum { kCodec, kWidth, kGroup, kScaleBits, kOffset, kScales, kBias, kPlace };

// Of the codecs that keep what sources hold.
bool is_source(int32_t codec) { return codec >= (int)Codec::fp8 && codec <= (int)Codec::mxfp4; }

int64_t code_bytes_of(const int32_t* part, int64_t num_cols) {
    if (part[kCodec] == (int)Codec::trellis) return num_cols * part[kWidth] / 16;
    if (part[kCodec] == (int)Codec::affine || is_source(part[kCodec])) return num_cols * part[kWidth] / 8;
    return num_cols * (part[kCodec] == (int)Codec::f32 ? 4 : 2);
}

// Of scales and zeros, and of the bias.
int64_t end_bytes_of(const int32_t* part, int64_t num_cols) {
    int64_t groups = part[kGroup] ? num_cols / part[kGroup] : 1;
    int64_t scales = part[kScaleBits] == 16 ? 2 * groups : 2 + groups;
    switch ((Codec)part[kCodec]) {
        case Codec::fp8: scales = 4 * ((num_cols + 127) / 128); break;
        case Codec::e5m2: scales = 1; break;
        case Codec::mxfp4: scales = num_cols / 32; break;
        case Codec::affine: scales *= 2; break;
        case Codec::trellis: break;
        default: scales = 0;
    }
    return scales + 4 * part[kBias];
}

void random_part(Random& random, int32_t num_cols, Place place, int32_t* part) {
    bool affine = num_cols % kBlock == 0 && random.chance(75);
    part[kCodec] = affine ? (int)Codec::affine : random.pick({(int)Codec::bf16, (int)Codec::f16, (int)Codec::f32});
    part[kWidth] = affine ? random.pick({1, 2, 3, 4, 8}) : 16;
    part[kGroup] = affine ? random.pick({0, 16, 32, 64, 128}) : 0;
    if (part[kGroup] && num_cols % part[kGroup]) part[kGroup] = 64;
    part[kScaleBits] = random.pick({8, 16});
    if (affine && random.chance(30)) {
        part[kCodec] = (int)Codec::trellis;
        part[kWidth] = (int32_t)random.between(4, 8);
    }
    if (num_cols % kBlock == 0 && random.chance(30)) {
        const Source& source = kSources[random.between(0, 2)];
        std::copy_n(std::array{(int32_t)source.codec, source.width, source.group, source.scale_bits}.begin(), 4, part);
    }
    part[kBias] = random.chance(30);
    part[kPlace] = (int)place;
}

// A part that may be in panels, of so many bits.
void panel_part(int32_t width, Place place, int32_t* part) {
    std::copy_n(std::array{(int32_t)Codec::affine, width, kBlock, 16, 0, 0, 0, (int32_t)place}.begin(), kPartNumbers, part);
}

// Gives parts of one place their offsets and those of their scales, in any order, with gaps or without; returns the
// bytes of a row. As Python has them, the codes of all come first.
int32_t place_parts(Random& random, int32_t* parts, int count, int32_t num_cols, Place place) {
    bool usual = random.chance(50);
    int order[6] = {0, 1, 2, 3, 4, 5};
    for (int i = 0; i < 2 * count; i++) order[i] = i;
    for (int i = 0; i < 2 * count && !usual; i++) std::swap(order[i], order[random.between(0, 2 * count - 1)]);
    int64_t end = 0;
    for (int i = 0; i < 2 * count; i++) {
        int32_t* part = parts + order[i] % count * kPartNumbers;
        bool codes = order[i] < count;
        if (part[kPlace] != (int)place) continue;
        if (usual && codes) end = (end + 15) / 16 * 16;
        if (!usual && random.chance(10)) end += random.between(1, 5);
        part[codes ? kOffset : kScales] = (int32_t)end;
        end += codes ? code_bytes_of(part, num_cols) : end_bytes_of(part, num_cols);
    }
    // None behind the last part: what reads past it reads past the row, and at last past the rows.
    return (int32_t)(end + (random.chance(60) ? 0 : random.between(1, 20)));
}

void tamper(Random& random, Numbers* numbers) {
    if (!random.chance(30)) return;
    numbers->tampered = true;
    if (random.chance(5)) numbers->values.resize(random.between(0, (int64_t)numbers->values.size() + 2));
    for (int64_t times = random.between(1, 2); times > 0 && !numbers->values.empty(); times--) {
        int32_t& value = numbers->values[random.between(0, (int64_t)numbers->values.size() - 1)];
        switch (random.between(0, 7)) {
            case 0: value = value == INT_MAX ? value : value + 1; break;
            case 1: value = value == INT_MIN ? value : value - 1; break;
            case 2: value = value == INT_MIN ? value : -value; break;
            case 3: value = random.pick({INT_MIN, INT_MAX, -1, 0, 1, 2, 3, 4}); break;
            case 4: value = random.pick({kMaxCols, kMaxCols + 1, kMaxRows, kMaxRows + 1}); break;
            case 5: value = (int32_t)random.next(); break;
            case 6: value = (int32_t)random.between(0, 300); break;
            default: value = (int32_t)std::clamp<int64_t>(4 * (int64_t)value, INT_MIN, INT_MAX);
        }
    }
}

void check_part(const PlacedPart& placed, const int32_t* n, int64_t num_cols, int64_t row_bytes) {
    if (placed.place == Place::none) return;
    const Part& part = placed.part;
    bool coded = part.codec == Codec::affine || part.codec == Codec::trellis || is_source(n[kCodec]);
    int64_t codes = code_bytes_of(n, num_cols), end = end_bytes_of(n, num_cols), scales = placed.offset + part.scales_at;
    require(part.num_cols == num_cols && part.code_bytes == codes, "codes of a part");
    require(part.bias_at() + 4 * n[kBias] - part.scales_at == end, "bytes of scales, zeros and bias");
    require(placed.offset == n[kOffset] && placed.offset >= 0 && placed.offset + codes <= row_bytes, "place of codes");
    require(scales == n[kScales] && scales >= 0 && scales + end <= row_bytes, "place of scales");
    if (!coded) return;
    require(num_cols % kBlock == 0, "rows of codes");
    if (part.codec == Codec::fp8) return require(part.num_groups == (num_cols + 127) / 128, "groups of fp8");
    require( part.group > 0 && part.num_groups * (int64_t)part.group == num_cols, "groups");
}

}  // namespace

Sizes random_sizes(Random& random) {
    Sizes sizes = {};
    sizes.num_tokens = random.pick({0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 33, 63, 64, 65, 66, 127, 128, 130, 140});
    if (random.chance(70))
        sizes.num_cols = kBlock * (int32_t)(random.chance(60) ? random.between(1, 4) : random.between(1, 20));
    else
        sizes.num_cols = (int32_t)(random.chance(50) ? random.between(1, 70) : random.between(1, 1200));
    int64_t most = std::max<int64_t>(kMaxProducts / (std::max(sizes.num_tokens, 1) * sizes.num_cols), 1);
    sizes.num_rows = (int32_t)random.between(1, std::min<int64_t>(most, random.pick({1, 40, 200, 1200})));
    if (sizes.num_cols % kBlock == 0 && most >= 2 * kMaxTile && random.chance(30))
        sizes.num_rows = kMaxTile * (int32_t)random.between(1, 2);
    return sizes;
}

Numbers random_expert(Random& random, const Sizes& sizes) {
    Numbers made;
    made.values.assign(kExpertNumbers, 0);
    int32_t *n = made.values.data(), *parts = n + kHeadNumbers, d = sizes.num_cols;
    n[0] = d;
    n[1] = sizes.num_rows;
    bool has_gate = random.chance(75);
    n[2] = (int32_t)(has_gate ? random.between(0, 3) : random.between(0, 1));
    bool up = n[2] == (int)Selector::up || n[2] == (int)Selector::both, gate = n[2] >= (int)Selector::gate;
    if (has_gate) random_part(random, d, gate ? Place::selector : Place::record, parts);
    random_part(random, d, up ? Place::selector : Place::record, parts + kPartNumbers);
    random_part(random, d, Place::record, parts + 2 * kPartNumbers);
    const bool has_panels = d % kBlock == 0 && sizes.num_rows % kMaxTile == 0 && random.chance(70);
    for (int32_t* part = parts; has_panels && part < n + kExpertNumbers; part += kPartNumbers)
        if (part[kPlace] != (int)Place::none) panel_part(4, (Place)part[kPlace], part);
    n[3] = place_parts(random, parts, 3, d, Place::selector);
    n[4] = place_parts(random, parts, 3, d, Place::record);
    for (int place : {3, 4})
        if (has_panels && n[place] > 0) n[place] += 4;  // of a checksum, which leaves room for panels
    n[5] = random.chance(40) ? 4 * d + (int32_t)random.between(0, 20) : 0;
    n[6] = has_gate ? (int32_t)random.between(0, 6) : random.pick({0, 1, 3, 4});
    const float limit = random.pick({0.01f, 1.0f, 7.0f, 100.0f});
    if (n[6] >= (int)Function::clipped_silu) std::memcpy(n + 7, &limit, 4);
    tamper(random, &made);
    return made;
}

Numbers random_rows(Random& random, const Sizes& sizes) {
    Numbers made;
    made.values.assign(kRowsNumbers, 0);
    int32_t* n = made.values.data();
    n[0] = sizes.num_cols;
    random_part(random, sizes.num_cols, Place::record, n + 3);
    if (sizes.num_cols % kBlock == 0 && random.chance(30)) panel_part(random.pick({4, 8}), Place::record, n + 3);
    n[1] = place_parts(random, n + 3, 1, sizes.num_cols, Place::record);
    if (random.chance(30)) n[1] += 4 + random.pick({0, 16});  // of a checksum and padding, which leave room for panels
    tamper(random, &made);
    return made;
}

void check_expert(const ExpertLayout& layout, const std::vector<int32_t>& n) {
    require((int)n.size() == kExpertNumbers, "numbers of an expert");
    require(layout.num_cols == n[0] && n[0] >= 1 && n[0] <= kMaxCols, "columns");
    require(layout.num_rows == n[1] && n[1] >= 1 && n[1] <= kMaxRows, "rows");
    require(layout.selector_bytes() == (uint64_t)n[1] * (uint64_t)n[3] && n[3] >= 0, "bytes of the selector");
    require(layout.records_bytes() == (uint64_t)n[1] * (uint64_t)n[4] && n[4] >= 1, "bytes of the records");
    const PlacedPart* parts[3] = {&layout.gate, &layout.up, &layout.down};
    for (int i = 0; i < 3; i++) {
        require((int)parts[i]->place == n[kHeadNumbers + i * kPartNumbers + kPlace], "where a part lies");
        check_part(*parts[i], &n[kHeadNumbers + i * kPartNumbers], n[0],
                   parts[i]->place == Place::selector ? n[3] : n[4]);
    }
    require(layout.down.place == Place::record && layout.up.place != Place::none, "up and down");
    require(layout.selector == Selector::none || n[3] >= 1, "a selector has bytes");
    require(layout.extra_row_bytes == n[5] && (n[5] == 0 || n[5] / 4 >= n[0]), "bytes of the extra values");
    require((int)layout.function == n[6] && n[6] >= 0 && n[6] <= 6, "the neuron function");
    require(layout.has_limit() == (n[6] >= 5) && (layout.has_limit() ? layout.limit > 0 : n[7] == 0), "the limit");
    require((layout.function != Function::clamped_swiglu && n[6] < 5) || layout.has_gate(), "a gate where it is needed");
}

void check_rows(const RowsLayout& layout, const std::vector<int32_t>& n) {
    require((int)n.size() == kRowsNumbers && layout.row_bytes == n[1] && n[1] >= 1, "numbers of rows");
    require(layout.part.place == Place::record, "rows hold their part");
    check_part(layout.part, &n[3], n[0], n[1]);
    require(n[2] == 0 || n[2] == 1, "rows are in panels or not");
    if (n[2] == 0) return;
    const int32_t* part = &n[3];
    require(part[kCodec] == (int)Codec::affine && part[kGroup] == kBlock && part[kScaleBits] == 16 && !part[kBias] &&
                (part[kWidth] == 4 || part[kWidth] == 8) && part[kOffset] == 0,
            "a part that has panels");
    require(n[1] % 4 == 0 && 16 * (int64_t)n[1] >= 16 * (code_bytes_of(part, n[0]) + end_bytes_of(part, n[0])) + 63, "room for a panel");
}

namespace {

// The codecs that keep what sources hold have one format each.
void check_sources() {
    for (const auto& [codec, width, group, scale_bits] : kSources) {
        std::vector<int32_t> rows = {kMaxCols, INT_MAX, 0, (int)codec, width, group, scale_bits, 1000, 7, 1, 2};
        RowsLayout made;
        require(read_rows_layout(rows.data(), rows.size(), &made) == nullptr, "the longest rows of a source");
        check_rows(made, rows);
        for (const Kernels* kernels : instruction_sets()) {
            const Part& part = made.part.part;
            require(kernels->prepared_bytes(part) < (64u << 20), "memory for the longest inputs of a source");
            require(kernels->sum_floats(part) >= (size_t)kMaxCols, "memory for the longest sum of a source");
        }
        int64_t codes = made.part.part.code_bytes, end = made.part.part.bias_at() + 4 - made.part.part.scales_at;
        for (int place : {4, 5, 6}) {
            std::vector<int32_t> other = rows;
            other[place] += 8;
            require(read_rows_layout(other.data(), other.size(), &made) != nullptr, "another format is refused");
        }
        for (const auto& [place, bytes] : {std::pair(7, codes), std::pair(8, end)}) {
            std::vector<int32_t> last = rows;
            last[place] = (int32_t)(INT_MAX - bytes);
            require(read_rows_layout(last.data(), last.size(), &made) == nullptr, "at the end of the longest rows");
            last[place]++;
            require(read_rows_layout(last.data(), last.size(), &made) != nullptr, "a byte behind is refused");
        }
    }
}

}  // namespace

void check_limits() {
    // No gate; up in f32 behind nothing, down behind it.
    std::vector<int32_t> numbers = {kMaxCols, kMaxRows, 0, 0, INT_MAX, INT_MAX, 1, 0};
    numbers.insert(numbers.end(), {0, 0, 0, 0, 0, 0, 0, 0});
    numbers.insert(numbers.end(), {(int)Codec::f32, 0, 0, 0, 0, 0, 0, 2});
    numbers.insert(numbers.end(), {(int)Codec::f32, 0, 0, 0, 4 * kMaxCols, 0, 0, 2});
    ExpertLayout layout;
    require(read_expert_layout(numbers.data(), numbers.size(), &layout) == nullptr, "the largest expert");
    check_expert(layout, numbers);
    for (int place : {0, 1}) {
        std::vector<int32_t> larger = numbers;
        larger[place]++;
        require(read_expert_layout(larger.data(), larger.size(), &layout) != nullptr, "a larger expert is refused");
    }
    for (Codec codec : {Codec::bf16, Codec::affine, Codec::f16, Codec::f32, Codec::trellis})
        for (int width : {1, 2, 3, 4, 5, 6, 7, 8})
            for (int group : {0, 16, 128}) {
                if (codec == Codec::affine && width > 4 && width < 8) continue;
                if (codec == Codec::trellis && width < 4) continue;
                std::vector<int32_t> rows = {kMaxCols, INT_MAX, 0, (int)codec, width, group, 8, 1000, 7, 1, 2};
                RowsLayout made;
                require(read_rows_layout(rows.data(), rows.size(), &made) == nullptr, "the longest rows");
                check_rows(made, rows);
                for (const Kernels* kernels : instruction_sets()) {
                    const Part& part = made.part.part;
                    require(kernels->prepared_bytes(part) < (64u << 20), "memory for the longest inputs");
                    require(kernels->work_floats(part) < (256u << 20), "memory for the longest rows");
                    require(kernels->sum_floats(part) >= (size_t)kMaxCols, "memory for the longest sum");
                }
            }
    check_sources();
}

}  // namespace moe_pack
