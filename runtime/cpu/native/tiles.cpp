#include "tiles.h"

namespace moe_pack {
namespace {

// A tile's rows from where a part begins in them.
struct Begins {
    const uint8_t* at[kManyRows];

    Begins(const PlacedPart& part, const uint8_t* const* rows, int32_t count) {
        for (int32_t r = 0; r < count; r++) at[r] = rows[r] + part.offset;
    }
};

}  // namespace

const float* FewTokens::dot(const PlacedPart& part, const uint8_t* const* rows, int32_t count, const void* x,
                            const Ahead& ahead, float* out) const {
    if (count) kernels_.dot_rows(part.part, Begins(part, rows, count).at, count, x, ahead, scratch_.work, out);
    return out;
}

void FewTokens::select(const uint8_t* const* rows, int32_t count, const Inputs& x, const Ahead& ahead,
                       float* a) const {
    const Ahead nothing = {nullptr, 0};
    bool up = layout_.up.place == Place::selector, gate = layout_.gate.place == Place::selector;
    const float* u = up ? dot(layout_.up, rows, count, x.up, ahead, scratch_.values[0]) : nullptr;
    const float* g = gate ? dot(layout_.gate, rows, count, x.gate, up ? nothing : ahead, scratch_.values[1]) : nullptr;
    for (int32_t r = 0; r < count; r++) a[r] = selected(layout_, u, g, r);
}

void FewTokens::neurons(const uint8_t* const* records, int32_t count, const Inputs& x, const float* a,
                        const uint8_t* runs, float threshold, const Ahead ahead[2], float* h) const {
    const uint8_t* rows[kMaxTile];
    const uint8_t *first_rows[kMaxTile], *second_rows[kMaxTile];
    const uint8_t* const* first = ahead[0].num_bytes ? ahead[0].rows : records;
    const uint8_t* const* second = ahead[1].num_bytes ? ahead[1].rows : records;
    int32_t places[kMaxTile], n = 0;
    for (int32_t r = 0; r < count; r++) {
        h[r] = 0.0f;
        if (runs != nullptr && !runs[r]) continue;
        rows[n] = records[r];
        first_rows[n] = first[r];
        second_rows[n] = second[r];
        places[n++] = r;
    }
    const Ahead before = {first_rows, ahead[0].num_bytes}, then = {second_rows, ahead[1].num_bytes};
    bool up = layout_.up.place == Place::record, gate = layout_.gate.place == Place::record;
    const float* u = up ? dot(layout_.up, rows, n, x.up, before, scratch_.values[0]) : nullptr;
    const float* g = gate ? dot(layout_.gate, rows, n, x.gate, up ? then : before, scratch_.values[1]) : nullptr;
    for (int32_t i = 0; i < n; i++) {
        float& value = h[places[i]];
        value = a == nullptr ? selected(layout_, u, g, i) : completed(layout_, a[places[i]], u, g, i);
        if (a == nullptr && !runs_at(value, threshold)) value = 0.0f;
    }
}

void FewTokens::add(const uint8_t* const* records, int32_t count, const float* h, const Ahead& ahead,
                    float* sum) const {
    const uint8_t* rows[kMaxTile];
    const uint8_t* ahead_rows[kMaxTile];
    float factors[kMaxTile];
    int32_t n = 0;
    for (int32_t r = 0; r < count; r++) {
        if (h[r] == 0.0f) continue;
        rows[n] = records[r] + layout_.down.offset;
        ahead_rows[n] = ahead.num_bytes ? ahead.rows[n] : nullptr;
        factors[n++] = h[r];
    }
    if (n) kernels_.add_rows(layout_.down.part, rows, n, factors, {ahead_rows, ahead.num_bytes}, scratch_.work, sum);
}

const float* ManyTokens::dots(const PlacedPart& part, const uint8_t* const* rows, int32_t count, float* out) const {
    size_t d = layout_.num_cols;
    Begins begins(part, rows, count);
    for (int32_t r = 0; r < count; r++) {
        float bias = bias_of(part.part, begins.at[r]);
        for (int32_t t = 0; t < num_tokens_; t++) out[t * kManyRows + r] = bias;
    }
    for (int32_t start = 0; start < layout_.num_cols; start += kManyCols) {
        int32_t stop = std::min(layout_.num_cols, start + kManyCols);
        for (int32_t r = 0; r < count; r++)
            kernels_.decode(part.part, begins.at[r], start, stop, scratch_.decoded + r * kManyCols);
        kernels_.dots(scratch_.decoded, count, kManyCols, x_ + start, num_tokens_, d, stop - start, out, kManyRows);
    }
    return out;
}

const float* ManyTokens::select(const uint8_t* const* rows, int32_t count) const {
    bool up = layout_.up.place == Place::selector, gate = layout_.gate.place == Place::selector;
    const float* u = up ? dots(layout_.up, rows, count, scratch_.values[0]) : nullptr;
    const float* g = gate ? dots(layout_.gate, rows, count, scratch_.values[1]) : nullptr;
    for (int32_t t = 0; t < num_tokens_; t++)
        for (int32_t i = t * kManyRows; i < t * kManyRows + count; i++) scratch_.h[i] = selected(layout_, u, g, i);
    return scratch_.h;
}

const float* ManyTokens::neurons(const uint8_t* const* records, const int32_t* neurons, int32_t count, const float* a,
                                 const uint8_t* runs, size_t stride, float threshold) const {
    bool up = layout_.up.place == Place::record, gate = layout_.gate.place == Place::record;
    const float* u = up ? dots(layout_.up, records, count, scratch_.values[0]) : nullptr;
    const float* g = gate ? dots(layout_.gate, records, count, scratch_.values[1]) : nullptr;
    for (int32_t t = 0; t < num_tokens_; t++)
        for (int32_t r = 0; r < count; r++) {
            int32_t i = t * kManyRows + r;
            float& value = scratch_.h[i];
            if (runs == nullptr) {
                value = selected(layout_, u, g, i);
                if (!runs_at(value, threshold)) value = 0.0f;
                continue;
            }
            size_t place = t * stride + neurons[r];
            value = runs[place] ? completed(layout_, a[place], u, g, i) : 0.0f;
        }
    return scratch_.h;
}

void ManyTokens::add(const uint8_t* const* records, int32_t count, const float* h, float* sum) const {
    Begins begins(layout_.down, records, count);
    for (int32_t start = 0; start < layout_.num_cols; start += kManyCols) {
        int32_t stop = std::min(layout_.num_cols, start + kManyCols);
        for (int32_t r = 0; r < count; r++)
            kernels_.decode(layout_.down.part, begins.at[r], start, stop, scratch_.decoded + r * kManyCols);
        kernels_.add(scratch_.decoded, count, kManyCols, h, num_tokens_, kManyRows, stop - start, sum + start,
                     layout_.num_cols);
    }
}

}  // namespace moe_pack
