// Experts and dense rows over many tokens whose inputs are rounded to 8 bits.
#include "rounded.h"

#include "job.h"
#include "panels.h"
#include "rows.h"

namespace moe_pack {

bool can_round(const Part& part) {
    const bool has_integers =
        part.codec == Codec::affine || part.codec == Codec::mxfp4 || part.codec == Codec::trellis;
    return has_integers && part.num_cols % kBlock == 0;
}

bool can_round(const ExpertLayout& layout) {
    for (const PlacedPart* part : {&layout.gate, &layout.up, &layout.down})
        if (part->place != Place::none && !can_round(part->part)) return false;
    return true;
}

namespace {

constexpr int32_t kRoundCols = 512;  // that a thread rounds at once
constexpr int32_t kSumCols = 512;    // that a thread adds up at once

// How inputs are rounded for a part's rows.
struct Form {
    int32_t unit, digits;

    bool operator==(const Form& other) const { return unit == other.unit && digits == other.digits; }
};

Form form_of(const RoundedKernels& kernels, const Part& part, int32_t digits) {
    return {unit_of(part), kernels.digits_for(part, digits)};
}

RoundedTokens take_tokens(Arena& arena, int32_t num_cols, const Form& form, int32_t num_tokens) {
    const size_t blocks = num_cols / kBlock, count = blocks * num_tokens;
    RoundedTokens tokens = {num_tokens, form.unit, form.digits, nullptr, nullptr, nullptr};
    tokens.codes = arena.take<int8_t>(count * form.digits * kBlock);
    tokens.scales = arena.take<float>(count);
    tokens.sums = arena.take<float>(count * (kBlock / form.unit));
    return tokens;
}

bool has_all(const RoundedTokens& tokens) {
    return tokens.codes != nullptr && tokens.scales != nullptr && tokens.sums != nullptr;
}

struct Rounding {
    const RoundedKernels& kernels;
    const float* const* x;
    int32_t num_cols;
    const RoundedTokens* tokens;
};

bool round_all(Pool& pool, Rounding& rounding) {
    auto item = [](void* context, int item, int, int) {
        auto& r = *static_cast<Rounding*>(context);
        const int32_t first = item * kRoundCols, stop = std::min(r.num_cols, first + kRoundCols);
        r.kernels.round(r.x, first, stop, *r.tokens);
    };
    return pool.run((rounding.num_cols + kRoundCols - 1) / kRoundCols, item, &rounding);
}

// Memory of one thread.
struct RoundedScratch {
    float* values[2];  // [tokens, kDotRows]
    void* add;
    float* sums;  // [tokens, kSumCols]
};

// A call in the forms that its phases want.
struct RoundedCall {
    Job& job;
    Call& call;
    const RoundedKernels& kernels;
    RoundedTokens tokens[2];  // of gate, and of up; the second may be the first
    RoundedScratch* scratch;
    float* h;  // [tokens, neurons that run]

    const RoundedTokens& tokens_of(const PlacedPart& part) const { return tokens[&part == &call.layout().up]; }

    // Products of rows with all tokens, and biases: [tokens, kDotRows]; null for a part that is elsewhere.
    float* dots(const PlacedPart& part, Place place, const uint8_t* const* rows, int32_t count, float* out) const {
        if (part.place != place) return nullptr;
        const uint8_t* begins[kDotRows] = {};
        for (int32_t r = 0; r < count; r++) begins[r] = rows[r] + part.offset;
        kernels.dot(part.part, begins, count, tokens_of(part), out);
        if (part.part.has_bias)
            for (int32_t r = 0; r < count; r++) {
                const float bias = bias_of(part.part, begins[r]);
                for (int32_t t = 0; t < call.num_tokens; t++) out[t * kDotRows + r] += bias;
            }
        return out;
    }
};

// Replaces values [tokens, kDotRows], of which `count` of a token exist, by their activations. Those of silu are taken
// together: e^-|v| of all of them, then v or v e^-|v| over 1 + e^-|v|.
void activate(const RoundedCall& c, float* values, int32_t count) {
    const ExpertLayout& layout = c.call.layout();
    alignas(64) float powers[kDotRows];
    for (int32_t t = 0; t < c.call.num_tokens; t++, values += kDotRows) {
        if (layout.function != Function::silu) {
            for (int32_t r = 0; r < count; r++) values[r] = activation(layout, values[r]);
            continue;
        }
        float largest = 0.0f;
        for (int32_t r = 0; r < count; r++) powers[r] = -std::fabs(values[r]);
        c.job.kernels.exponentials(powers, count, &largest);
        for (int32_t r = 0; r < count; r++) {
            const float share = values[r] < 0.0f ? powers[r] : 1.0f;
            values[r] = values[r] * share / (1.0f + powers[r]);
        }
    }
}

// Products of a tile's up and gate rows where they are, those that the layout's function gets replaced by its values.
struct TileValues {
    const float *up, *activated;  // of up alone where there is no gate: `activated` alone

    TileValues(const RoundedCall& c, Place place, const uint8_t* const* rows, int32_t count, RoundedScratch& scratch) {
        const ExpertLayout& layout = c.call.layout();
        float *u = c.dots(layout.up, place, rows, count, scratch.values[0]);
        float *g = c.dots(layout.gate, place, rows, count, scratch.values[1]);
        float* given = layout.has_gate() ? g : u;
        if (given != nullptr) activate(c, given, count);
        up = layout.has_gate() ? u : nullptr;
        activated = given;
    }

    // As `selected` and `completed` of tiles.h.
    float selected(const ExpertLayout& layout, int32_t i) const {
        if (activated == nullptr) return factor(layout, up[i]);
        return up == nullptr ? activated[i] : activated[i] * factor(layout, up[i]);
    }
    float completed(const ExpertLayout& layout, float a, int32_t i) const {
        if (activated != nullptr) return activated[i] * a;
        return up == nullptr ? a : a * factor(layout, up[i]);
    }
};

void select_tile(RoundedCall& c, int32_t first, int32_t count, int worker) {
    const ExpertLayout& layout = c.call.layout();
    const uint8_t* rows[kDotRows];
    for (int32_t r = 0; r < count; r++) rows[r] = c.call.work->selector.at(first + r, layout.selector_row_bytes);
    const TileValues values(c, Place::selector, rows, count, c.scratch[worker]);
    for (int32_t t = 0; t < c.call.num_tokens; t++) {
        const size_t begin = (size_t)t * layout.num_rows + first;
        for (int32_t r = 0; r < count; r++) {
            c.call.a[begin + r] = values.selected(layout, t * kDotRows + r);
            c.call.runs[begin + r] = runs_at(c.call.a[begin + r], c.call.work->threshold);
        }
    }
}

void neurons_tile(RoundedCall& c, int32_t first, int32_t count, int worker) {
    const Call& call = c.call;
    const ExpertLayout& layout = call.layout();
    const uint8_t* rows[kDotRows];
    for (int32_t r = 0; r < count; r++)
        rows[r] = call.work->records.at(call.neurons[first + r], layout.record_row_bytes);
    const TileValues values(c, Place::record, rows, count, c.scratch[worker]);
    for (int32_t t = 0; t < call.num_tokens; t++) {
        float* h = c.h + (size_t)t * call.num_neurons + first;
        for (int32_t r = 0; r < count; r++) {
            const int32_t i = t * kDotRows + r;
            if (call.runs == nullptr) {
                h[r] = values.selected(layout, i);
                if (!runs_at(h[r], call.work->threshold)) h[r] = 0.0f;
                continue;
            }
            const size_t place = (size_t)t * layout.num_rows + call.neurons[first + r];
            h[r] = call.runs[place] ? values.completed(layout, call.a[place], i) : 0.0f;
        }
    }
}

// Some columns of all neurons' down rows, and of the outputs.
void sum_cols(RoundedCall& c, int32_t start, int worker) {
    const Call& call = c.call;
    const ExpertLayout& layout = call.layout();
    const int32_t d = layout.num_cols, stop = std::min(d, start + kSumCols), n = call.num_neurons;
    RoundedScratch& scratch = c.scratch[worker];
    const uint8_t *rows[2][kAddRows];
    auto list = [&](int32_t first, const uint8_t** to) {
        for (int32_t r = 0; r < std::min(kAddRows, n - first); r++)
            to[r] = call.work->records.at(call.neurons[first + r], layout.record_row_bytes) + layout.down.offset;
    };
    std::memset(scratch.sums, 0, sizeof(float) * call.num_tokens * kSumCols);
    list(0, rows[0]);
    for (int32_t first = 0, turn = 0; first < n; first += kAddRows, turn ^= 1) {
        const int32_t count = std::min(kAddRows, n - first), left = n - first - count;
        if (left > 0) list(first + count, rows[turn ^ 1]);
        const RowsToAdd added = {layout.down.part, rows[turn], left >= count ? rows[turn ^ 1] : nullptr, count};
        const int32_t digits = c.kernels.digits_for(layout.down.part, c.job.pool.digits());
        const Outputs h = {c.h + first, (size_t)n, digits};
        c.kernels.add(added, h, call.num_tokens, start, stop, scratch.add, scratch.sums, kSumCols);
    }
    const size_t extra_bytes = layout.extra_row_bytes;
    const uint8_t* extra = extra_bytes ? call.work->extra.at(0, extra_bytes) + sizeof(float) * start : nullptr;
    for (int32_t t = 0; t < call.num_tokens; t++) {
        const float* sum = scratch.sums + t * kSumCols;
        float* to = c.job.y + call.outputs[t] * d + start;
        for (int32_t i = 0; i < stop - start; i++) {
            float value = 0.0f;
            if (extra != nullptr) std::memcpy(&value, extra + sizeof(float) * i, sizeof value);
            to[i] += call.weights[t] * (value + sum[i]);
        }
    }
}

template <void (*tile)(RoundedCall&, int32_t, int32_t, int)>
bool each_tile(RoundedCall& call, int32_t num_rows) {
    struct Tiles {
        RoundedCall& call;
        int32_t num_rows;
    } tiles = {call, num_rows};
    auto item = [](void* context, int item, int, int worker) {
        auto& t = *static_cast<Tiles*>(context);
        const int32_t first = item * kDotRows;
        tile(t.call, first, std::min(kDotRows, t.num_rows - first), worker);
    };
    return call.job.pool.run((num_rows + kDotRows - 1) / kDotRows, item, &tiles);
}

bool add_all(RoundedCall& call) {
    auto item = [](void* context, int item, int, int worker) {
        sum_cols(*static_cast<RoundedCall*>(context), item * kSumCols, worker);
    };
    return call.job.pool.run((call.call.layout().num_cols + kSumCols - 1) / kSumCols, item, &call);
}

// The tokens' inputs for gate and up, and the threads' memory. False if a map was cut.
bool begin(RoundedCall& c) {
    Job& job = c.job;
    const Call& call = c.call;
    const ExpertLayout& layout = call.layout();
    const float** x = job.take<const float*>(call.num_tokens);
    for (int32_t t = 0; !job.no_memory && t < call.num_tokens; t++) x[t] = job.x + call.tokens[t] * layout.num_cols;
    const Form up = form_of(c.kernels, layout.up.part, job.pool.digits());
    const Form gate = layout.has_gate() ? form_of(c.kernels, layout.gate.part, job.pool.digits()) : up;
    for (int i = 0; i < 2 && !job.no_memory; i++) {
        if (i == 1 && gate == up) {
            c.tokens[1] = c.tokens[0];
            break;
        }
        c.tokens[i] = take_tokens(job.arena, layout.num_cols, i ? up : gate, call.num_tokens);
        job.no_memory |= !has_all(c.tokens[i]);
        Rounding rounding = {c.kernels, x, layout.num_cols, &c.tokens[i]};
        if (!job.no_memory && !round_all(job.pool, rounding)) return false;
    }
    c.scratch = job.take<RoundedScratch>(job.pool.threads());
    for (int worker = 0; !job.no_memory && worker < job.pool.threads(); worker++) {
        RoundedScratch& scratch = c.scratch[worker];
        for (float*& values : scratch.values) values = job.take<float>(call.num_tokens * kDotRows);
        scratch.add = job.take<uint8_t>(c.kernels.add_bytes);
        scratch.sums = job.take<float>(call.num_tokens * kSumCols);
    }
    return true;
}

bool select_rounded(RoundedCall& c) {
    Job& job = c.job;
    Call& call = c.call;
    if (call.is_selected) return true;
    const size_t f = call.layout().num_rows;
    if (call.neurons == nullptr) call.neurons = job.take<int32_t>(f + 1);
    if (has_selector(call.layout()) && call.a == nullptr) {
        call.a = job.take<float>(call.num_tokens * f);
        call.runs = job.take<uint8_t>(call.num_tokens * f);
    }
    if (job.no_memory) return true;
    if (has_selector(call.layout()) && !each_tile<select_tile>(c, f)) return false;
    list_running(call);
    return true;
}

}  // namespace

bool select_rounded(Job& job, Call& call) {
    RoundedCall rounded = {job, call, *job.kernels.rounded, {}, nullptr, nullptr};
    return begin(rounded) && (job.no_memory || select_rounded(rounded));
}

bool run_rounded(Job& job, Call& call) {
    RoundedCall rounded = {job, call, *job.kernels.rounded, {}, nullptr, nullptr};
    if (!begin(rounded)) return false;
    if (job.no_memory) return true;
    if (!select_rounded(rounded)) return false;
    if (int32_t* num_read = call.work->num_read) *num_read += call.num_neurons;
    rounded.h = job.take<float>((size_t)call.num_tokens * call.num_neurons);
    if (job.no_memory) return true;
    return each_tile<neurons_tile>(rounded, call.num_neurons) && add_all(rounded);
}

Outcome multiply_rounded(Pool& pool, const RowsLayout& layout, const uint8_t* rows, int32_t num_rows, const float* x,
                         int32_t num_tokens, float* out) {
    struct Multiply {
        const RoundedKernels& kernels;
        const RowsLayout& layout;
        const uint8_t* rows;
        int32_t num_rows;
        RoundedTokens tokens;
        float* totals;  // [thread, tokens, kDotRows]
        float* out;
        uint8_t* taken;  // [thread, kDotRows, row]: out of panels; null: rows are in none
    } m = {*pool.kernels().rounded, layout, rows, num_rows, {}, nullptr, nullptr, nullptr};
    const Part& part = layout.part.part;
    Arena& arena = pool.arena();
    for (int32_t first = 0; first < num_tokens; first += kRoundedTokens) {
        arena.reset();
        const int32_t count = std::min(kRoundedTokens, num_tokens - first);
        m.out = out + (size_t)first * num_rows;
        const float** inputs = arena.take<const float*>(count);
        m.tokens = take_tokens(arena, part.num_cols, form_of(m.kernels, part, pool.digits()), count);
        m.totals = arena.take<float>((size_t)pool.threads() * count * kDotRows);
        if (layout.in_panels) m.taken = arena.take<uint8_t>((size_t)pool.threads() * kDotRows * layout.row_bytes);
        if (inputs == nullptr || !has_all(m.tokens) || m.totals == nullptr) return Outcome::no_memory;
        if (layout.in_panels && m.taken == nullptr) return Outcome::no_memory;
        for (int32_t t = 0; t < count; t++) inputs[t] = x + (size_t)(first + t) * part.num_cols;
        Rounding rounding = {m.kernels, inputs, part.num_cols, &m.tokens};
        if (!round_all(pool, rounding)) return Outcome::cut;
        auto item = [](void* context, int item, int, int worker) {
            auto& m = *static_cast<Multiply*>(context);
            const Part& part = m.layout.part.part;
            const int32_t first = item * kDotRows, count = std::min(kDotRows, m.num_rows - first);
            const uint8_t* begins[kDotRows];
            const size_t row_bytes = m.layout.row_bytes;
            uint8_t* taken = m.taken + worker * kDotRows * row_bytes;
            for (int32_t r = 0; r < count; r++) {
                begins[r] = m.taken == nullptr ? m.rows + (first + r) * row_bytes : taken + r * row_bytes;
                if (m.taken != nullptr) take_row_of(m.layout, m.rows, first + r, taken + r * row_bytes);
                begins[r] += m.layout.part.offset;
            }
            float* totals = m.totals + (size_t)worker * m.tokens.num_tokens * kDotRows;
            m.kernels.dot(part, begins, count, m.tokens, totals);
            for (int32_t t = 0; t < m.tokens.num_tokens; t++)
                for (int32_t r = 0; r < count; r++)
                    m.out[(size_t)t * m.num_rows + first + r] = totals[t * kDotRows + r] + bias_of(part, begins[r]);
        };
        if (!pool.run((num_rows + kDotRows - 1) / kDotRows, item, &m)) return Outcome::cut;
    }
    return Outcome::done;
}

}  // namespace moe_pack
