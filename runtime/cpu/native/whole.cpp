// Experts in panels, for few tokens: selector and records of a tile in one go, since all neurons run.
#include "job.h"
#include "panels.h"

namespace moe_pack {
namespace {

// A tile of neurons in panels, and the tile that comes next.
struct Tile {
    const uint8_t *selector, *records;

    Tile(const Call& call, int32_t first) {
        const ExpertLayout& layout = call.layout();
        const ExpertWork& work = *call.work;
        selector = panel_in(work.selector_panels + (size_t)first * layout.selector_row_bytes);
        records = panel_in(work.record_panels + (size_t)first * layout.record_row_bytes);
    }
    const uint8_t* begin(const ExpertLayout& layout) const { return has_selector(layout) ? selector : records; }
};

// The products of a tile's gate and up with a call's tokens, and what they make of them.
class TilePass {
  public:
    TilePass(const Job& job, const Call& call, const Tile& tile, const uint8_t* next, int worker)
        : call_(call), layout_(call.layout()), panels_(*job.kernels.panels), tile_(tile) {
        float* values = job.scratch[worker].whole;
        gate_ = layout_.has_gate() ? values : nullptr;
        up_ = values + kPanelTokens * kMaxTile;
        h_ = up_ + kPanelTokens * kMaxTile;
        const size_t selector = bytes_of(Place::selector), records = bytes_of(Place::record);
        if (has_selector(layout_)) selector_ahead_ = PanelAhead(tile.selector, tile.selector + selector, tile.records);
        records_ahead_ = PanelAhead(tile.records, tile.records + records, next);
    }

    void run(float* sums, size_t floats) {
        const uint8_t *selector = tile_.selector, *records = tile_.records;
        for (const PlacedPart* placed : {&layout_.gate, &layout_.up}) {
            if (placed->place == Place::none) continue;
            const bool is_selector = placed->place == Place::selector;
            const uint8_t*& at = is_selector ? selector : records;
            dot(*placed, at, is_selector ? selector_ahead_ : records_ahead_);
            at += panel_bytes(placed->part) * (kMaxTile / kPanelRows);
        }
        for (int32_t t = 0; t < call_.num_tokens; t++) activate(t);
        panels_.add(layout_.down.part, records, h_, call_.num_tokens, records_ahead_, sums, floats);
    }

  private:
    size_t bytes_of(Place place) const {
        size_t num_bytes = place == Place::record ? down_tile_bytes(layout_.down.part) : 0;
        for (const PlacedPart* placed : {&layout_.gate, &layout_.up})
            if (placed->place == place) num_bytes += panel_bytes(placed->part) * (kMaxTile / kPanelRows);
        return num_bytes;
    }

    void dot(const PlacedPart& placed, const uint8_t* at, PanelAhead& ahead) {
        const bool is_gate = &placed == &layout_.gate;
        const void* prepared[kPanelTokens];
        float* outs[kPanelTokens];
        for (int32_t t = 0; t < call_.num_tokens; t++) {
            prepared[t] = is_gate ? call_.inputs[t].gate : call_.inputs[t].up;
            outs[t] = (is_gate ? gate_ : up_) + t * kMaxTile;
        }
        panels_.dot(placed.part, at, panel_bytes(placed.part), kMaxTile / kPanelRows, prepared, outs, call_.num_tokens, ahead);
    }

    // h of a token, as FewTokens has it: `a` of the selector that is zero leaves its neuron out.
    void activate(int32_t t) {
        const auto in = [&](const PlacedPart& placed, float* values, Place place) {
            return placed.place == place ? values + t * kMaxTile : nullptr;
        };
        const float *u_of_a = in(layout_.up, up_, Place::selector), *g_of_a = in(layout_.gate, gate_, Place::selector);
        const float *u = in(layout_.up, up_, Place::record), *g = in(layout_.gate, gate_, Place::record);
        float* h = h_ + t * kMaxTile;
        for (int32_t r = 0; r < kMaxTile; r++) {
            const bool selects = has_selector(layout_);
            const float a = selects ? selected(layout_, u_of_a, g_of_a, r) : selected(layout_, u, g, r);
            h[r] = !runs_at(a, 0.0f) ? 0.0f : selects ? completed(layout_, a, u, g, r) : a;
        }
    }

    const Call& call_;
    const ExpertLayout& layout_;
    const PanelKernels& panels_;
    const Tile& tile_;
    float *gate_, *up_, *h_;
    PanelAhead selector_ahead_, records_ahead_;
};

}  // namespace

void run_panels(const Job& job, const Call& call, const Item& item, float* sums, int next_item, int worker) {
    const size_t floats = call.kernels->sum_floats(call.layout().down.part);
    const int32_t end = item.first + item.count;
    for (int32_t first = item.first; first < end; first += kMaxTile) {
        const uint8_t* next = nullptr;
        if (first + kMaxTile < end) {
            next = Tile(call, first + kMaxTile).begin(call.layout());
        } else if (next_item >= 0) {
            const Item& then = job.items[next_item];
            const Call& after = job.calls[then.call];
            if (after.in_panels) next = Tile(after, then.first).begin(after.layout());
        }
        const Tile tile(call, first);
        TilePass(job, call, tile, next, worker).run(sums, floats);
    }
}

}  // namespace moe_pack
