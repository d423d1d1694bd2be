#include "layout.h"

#include <cstring>

#include "panels.h"

namespace moe_pack {
namespace {

const Source* source_of(Codec codec) {
    for (const Source& source : kSources)
        if (source.codec == codec) return &source;
    return nullptr;
}

const char* read_part(const int32_t* n, int32_t num_cols, int32_t selector_row_bytes, int32_t record_row_bytes,
                      PlacedPart* placed) {
    *placed = {};
    int32_t codec = n[0], width = n[1], group = n[2], scale_bits = n[3], offset = n[4];
    int32_t scales_offset = n[5], has_bias = n[6], place = n[7];
    if (place < 0 || place > 2) return "a part is neither in selector nor in record";
    placed->place = (Place)place;
    if (placed->place == Place::none) return nullptr;
    const bool is_plain = codec == (int32_t)Codec::f16 || codec == (int32_t)Codec::f32;
    if (!is_plain && (codec < (int32_t)Codec::bf16 || codec > (int32_t)Codec::last)) return "unknown codec";
    if (has_bias < 0 || has_bias > 1) return "a part has a bias or not";
    Part& part = placed->part;
    part.codec = (Codec)codec;
    part.num_cols = num_cols;
    part.has_bias = has_bias == 1;
    if (part.codec == Codec::affine || part.codec == Codec::trellis) {
        const bool is_affine = part.codec == Codec::affine;
        if (is_affine && width != 1 && width != 2 && width != 3 && width != 4 && width != 8) return "unknown width";
        if (!is_affine && (width < 4 || width > 8)) return "unknown width";
        if (group != 0 && group != 16 && group != 32 && group != 64 && group != 128) return "unknown group";
        if (scale_bits != 8 && scale_bits != 16) return "unknown scale_bits";
        if (num_cols % kBlock) return "rows of codes are multiples of 64";
        if (group && num_cols % group) return "groups do not divide rows";
        part.width = width;
        part.group = group ? group : num_cols;
        part.scale_bits = scale_bits;
        part.num_groups = num_cols / part.group;
        part.code_bytes = (int32_t)((int64_t)num_cols * width / (is_affine ? 8 : 16));
        part.scale_bytes = scale_bits == 16 ? 2 * part.num_groups : 2 + part.num_groups;
        part.zero_bytes = is_affine ? part.scale_bytes : 0;
    } else if (const Source* source = source_of(part.codec)) {
        if (width != source->width) return "the codec has another width";
        if (group != source->group) return "the codec has another group";
        if (scale_bits != source->scale_bits) return "the codec has another scale_bits";
        if (num_cols % kBlock) return "rows of codes are multiples of 64";
        part.width = width;
        part.group = group ? group : num_cols;
        part.scale_bits = scale_bits;
        part.num_groups = (num_cols + part.group - 1) / part.group;
        part.code_bytes = (int32_t)((int64_t)num_cols * width / 8);
        part.scale_bytes = part.num_groups * scale_bits / 8;
    } else {
        part.width = part.codec == Codec::f32 ? 32 : 16;
        part.group = num_cols;
        part.code_bytes = num_cols * (part.width / 8);
    }
    int32_t row_bytes = placed->place == Place::selector ? selector_row_bytes : record_row_bytes;
    if (offset < 0 || (int64_t)offset + part.code_bytes > row_bytes) return "a part does not fit its row";
    int64_t end = (int64_t)scales_offset + part.scale_bytes + part.zero_bytes + 4 * has_bias;
    if (scales_offset < 0 || end > row_bytes) return "a part's scales do not fit its row";
    placed->offset = offset;
    part.scales_at = scales_offset - offset;
    return nullptr;
}

bool is_in(const PlacedPart& part, Place place) { return part.place == place; }

// Which matrices the selector holds and which the record is the kind's to say (docs/pack.md, section 6).
const char* check_kind(const ExpertLayout& e) {
    Place up = Place::record, gate = Place::record;
    if (e.selector == Selector::up || e.selector == Selector::both) up = Place::selector;
    if (e.selector == Selector::gate || e.selector == Selector::both) gate = Place::selector;
    if (!e.has_gate() && e.selector != Selector::up && e.selector != Selector::none) return "no gate to select by";
    if (!is_in(e.up, up) || (e.has_gate() && !is_in(e.gate, gate)) || !is_in(e.down, Place::record))
        return "a part is not where its selector kind puts it";
    return nullptr;
}

}  // namespace

const char* read_expert_layout(const int32_t* numbers, size_t count, ExpertLayout* layout) {
    if (count != (size_t)kExpertNumbers) return "an expert's layout has another number of values";
    ExpertLayout e = {};
    e.num_cols = numbers[0];
    e.num_rows = numbers[1];
    e.selector_row_bytes = numbers[3];
    e.record_row_bytes = numbers[4];
    if (e.num_cols < 1 || e.num_cols > kMaxCols || e.num_rows < 1 || e.num_rows > kMaxRows) return "sizes out of range";
    e.extra_row_bytes = numbers[5];
    if (numbers[2] < 0 || numbers[2] > 3) return "unknown selector kind";
    if (numbers[6] < 0 || numbers[6] > 6) return "unknown neuron function";
    if (e.selector_row_bytes < 0 || e.record_row_bytes < 0 || e.extra_row_bytes < 0) return "sizes out of range";
    if (e.extra_row_bytes && e.extra_row_bytes / 4 < e.num_cols) return "the row of extra values is too short";
    e.selector = (Selector)numbers[2];
    e.function = (Function)numbers[6];
    std::memcpy(&e.limit, numbers + 7, 4);
    if (e.has_limit() ? !(e.limit > 0.0f) : numbers[7] != 0) return "the limit does not go with the neuron function";
    PlacedPart* parts[3] = {&e.gate, &e.up, &e.down};
    for (int i = 0; i < 3; i++) {
        const char* fault =
            read_part(numbers + kHeadNumbers + i * kPartNumbers, e.num_cols, e.selector_row_bytes, e.record_row_bytes, parts[i]);
        if (fault) return fault;
    }
    if (const char* fault = check_kind(e)) return fault;
    if ((e.function == Function::clamped_swiglu || e.has_limit()) && !e.has_gate()) return "the neuron function needs a gate";
    *layout = e;
    return nullptr;
}

const char* read_rows_layout(const int32_t* numbers, size_t count, RowsLayout* layout) {
    if (count != (size_t)kRowsNumbers) return "a layout of rows has another number of values";
    if (numbers[0] < 1 || numbers[0] > kMaxCols || numbers[1] < 0) return "sizes out of range";
    if (numbers[2] < 0 || numbers[2] > 1) return "in panels or not";
    layout->row_bytes = numbers[1];
    layout->in_panels = numbers[2];
    const char* fault = read_part(numbers + 3, numbers[0], 0, numbers[1], &layout->part);
    if (fault) return fault;
    if (layout->in_panels && (layout->part.offset != 0 || !can_panel(layout->part.part, layout->row_bytes, 0)))
        return "such rows have no panels";
    return is_in(layout->part, Place::record) ? nullptr : "rows hold their part";
}

}  // namespace moe_pack
