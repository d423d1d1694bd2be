#include "job.h"

namespace moe_pack {
namespace {

constexpr int32_t kFewItems = 32;      // a sum of few tokens: the expert in so many shares, at most
constexpr int32_t kManyItems = 16;     // of many
constexpr int32_t kFinishCols = 512;   // columns of y, or floats of sums, that a thread adds up at once
constexpr size_t kAloneValues = 1 << 14;  // one thread adds up, or lists, so many before another has begun

size_t floats_of(const Job& job, const PlacedPart& part) {
    return part.place == Place::none ? 0 : job.kernels.work_floats(part.part);
}

}  // namespace

void take_scratch(Job& job, const ExpertLayout* const* layouts, int32_t count) {
    size_t work = 16;
    for (int32_t i = 0; i < count; i++) {
        for (const PlacedPart* part : {&layouts[i]->gate, &layouts[i]->up, &layouts[i]->down})
            work = std::max(work, floats_of(job, *part));
    }
    size_t values = job.many ? kManyTokens * kManyRows : kMaxTile;
    job.scratch = job.take<Scratch>(job.pool.threads());
    for (int worker = 0; !job.no_memory && worker < job.pool.threads(); worker++) {
        Scratch& scratch = job.scratch[worker];
        scratch.work = job.take<float>(work);
        for (float*& place : scratch.values) place = job.take<float>(values);
        scratch.h = job.take<float>(values);
        scratch.whole = job.many ? nullptr : job.take<float>(3 * kPanelTokens * kMaxTile);
        scratch.decoded = job.many ? job.take<float>(kManyRows * kManyCols) : nullptr;
        scratch.fetched = nullptr;
        scratch.num_fetched = 0;
    }
}

namespace {

// A token's inputs as each part that meets them wants them; parts and experts of one form share it.
struct Form {
    const Kernels* kernels;
    const Part* part;
    int64_t token;
    void* prepared;
};

void prepare_form(Job& job, Form* forms, int32_t& count, const Kernels& kernels, const PlacedPart& part, int64_t token,
                  const void** place) {
    *place = nullptr;
    if (part.place == Place::none || job.no_memory) return;
    for (int32_t i = 0; i < count && *place == nullptr; i++)
        if (forms[i].token == token && forms[i].kernels == &kernels && same_form(*forms[i].part, part.part)) *place = forms[i].prepared;
    if (*place != nullptr) return;
    auto* memory = job.take<uint8_t>(kernels.prepared_bytes(part.part));
    if (job.no_memory) return;
    kernels.prepare(part.part, job.x + token * part.part.num_cols, memory);
    forms[count++] = {&kernels, &part.part, token, memory};
    *place = memory;
}

}  // namespace

void prepare_inputs(Job& job) {
    size_t most = 0;
    for (int32_t c = 0; c < job.num_calls; c++) most += 2 * job.calls[c].num_tokens;
    Form* forms = job.take<Form>(most);
    int32_t count = 0;
    for (int32_t c = 0; c < job.num_calls && !job.no_memory; c++) {
        Call& call = job.calls[c];
        for (int32_t t = 0; t < call.num_tokens; t++) {
            prepare_form(job, forms, count, *call.kernels, call.layout().gate, call.tokens[t], &call.inputs[t].gate);
            prepare_form(job, forms, count, *call.kernels, call.layout().up, call.tokens[t], &call.inputs[t].up);
        }
    }
}

// ---- shares -------------------------------------------------------------------------------------------------------

namespace {

// Items of `each(call)` neurons: all rows before selection, those that run after it.
template <class Each>
void share_out(Job& job, bool selected, const Each& each) {
    size_t count = 0;
    auto number = [&](const Call& call) { return selected ? call.num_neurons : call.layout().num_rows; };
    for (int32_t c = 0; c < job.num_calls; c++)
        count += (number(job.calls[c]) + each(job.calls[c]) - 1) / each(job.calls[c]);
    job.items = job.take<Item>(count);
    job.num_items = 0;
    for (int32_t c = 0, end = 0; c < job.num_calls && !job.no_memory; c = end) {
        // Calls of one expert take turns: what one has brought into the cache is there for the next.
        int32_t most = 0;
        for (end = c; end < job.num_calls && job.calls[end].work == job.calls[c].work; end++) {
            Call& call = job.calls[end];
            if (!selected && (call.is_selected || !has_selector(call.layout()))) continue;
            call.item_neurons = each(call);
            call.num_items = (number(call) + call.item_neurons - 1) / call.item_neurons;
            most = std::max(most, call.num_items);
        }
        for (int32_t share = 0; share < most; share++) {
            for (int32_t k = c; k < end; k++) {
                const Call& call = job.calls[k];
                const int32_t first = share * call.item_neurons;
                if (share < call.num_items)
                    job.items[job.num_items++] = {k, first, std::min(call.item_neurons, number(call) - first)};
            }
        }
    }
}

// Neurons a share: from the layout and their number alone, so that sums are the same for any number of threads.
int32_t share_of(const Call& call, bool many) {
    int32_t tile = many ? kManyRows : few_rows(call), least = many ? 1 : kItemTiles;
    int32_t most = many ? kManyItems : kFewItems, tiles = (call.num_neurons + tile - 1) / tile;
    return tile * std::max(least, (tiles + most - 1) / most);
}

}  // namespace

void share_records(Job& job) {
    share_out(job, true, [&](const Call& call) { return share_of(call, job.many); });
    for (int32_t c = 0; !job.no_memory && c < job.num_calls; c++) {
        Call& call = job.calls[c];
        const Part& down = call.layout().down.part;
        size_t size = job.many ? down.num_cols : call.kernels->sum_floats(down);
        call.partial = job.take<float>((size_t)call.num_items * call.num_tokens * size);
    }
}

// ---- selection ----------------------------------------------------------------------------------------------------

namespace {

void mark_running(const Call& call, int32_t token, int32_t first, int32_t count) {
    size_t begin = (size_t)token * call.layout().num_rows + first;
    for (size_t i = begin; i < begin + count; i++) call.runs[i] = runs_at(call.a[i], call.work->threshold);
}

const uint8_t* selector_row(const Call& call, int32_t row) {
    return call.work->selector.at(row, call.layout().selector_row_bytes);
}

void select_few(Job& job, int number, int next_item, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    const ExpertLayout& layout = call.layout();
    size_t row_bytes = layout.selector_row_bytes;
    const uint8_t *rows[kMaxTile], *ahead[kMaxTile];
    const Item& then = job.items[next_item < 0 ? number : next_item];
    const Call& next = job.calls[then.call];
    int32_t distance = ahead_rows(row_bytes);
    for (int32_t r = 0; r < item.count; r++) {
        int32_t behind = r + distance - item.count;
        rows[r] = selector_row(call, item.first + r);
        ahead[r] = behind < 0 ? selector_row(call, item.first + r + distance)
                              : selector_row(next, then.first + std::min(behind, then.count - 1));
    }
    FewTokens few(*call.kernels, layout, job.scratch[worker]);
    for (int32_t t = 0; t < call.num_tokens; t++) {
        Ahead fetched = {ahead, t == 0 ? (int32_t)row_bytes : 0};
        few.select(rows, item.count, call.inputs[t], fetched, call.a + (size_t)t * layout.num_rows + item.first);
        mark_running(call, t, item.first, item.count);
    }
}

void select_many(Job& job, int number, int, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    const ExpertLayout& layout = call.layout();
    const uint8_t* rows[kManyRows];
    for (int32_t r = 0; r < item.count; r++) rows[r] = selector_row(call, item.first + r);
    ManyTokens many(job.kernels, layout, job.scratch[worker], job.x, call.num_tokens);
    const float* a = many.select(rows, item.count);
    for (int32_t t = 0; t < call.num_tokens; t++) {
        std::memcpy(call.a + (size_t)t * layout.num_rows + item.first, a + t * kManyRows, 4 * item.count);
        mark_running(call, t, item.first, item.count);
    }
}

}  // namespace

void list_running(Call& call) {
    int32_t f = call.layout().num_rows, count = 0;
    for (int32_t i = 0; i < f; i++) {
        uint8_t any = call.runs == nullptr || call.is_whole;
        for (int32_t t = 0; t < call.num_tokens && call.runs; t++) any |= call.runs[(size_t)t * f + i];
        call.neurons[count] = i;
        count += any;
    }
    call.num_neurons = count;
}

namespace {

void list_call(Job& job, int number, int, int) {
    if (!job.calls[number].is_selected) list_running(job.calls[number]);
}

}  // namespace

bool select(Job& job) {
    for (int32_t c = 0; c < job.num_calls; c++) {
        Call& call = job.calls[c];
        if (call.is_selected) continue;
        size_t f = call.layout().num_rows;
        bool any = has_selector(call.layout());
        if (any && call.a == nullptr) {
            call.a = job.take<float>(call.num_tokens * f);
            call.runs = job.take<uint8_t>(call.num_tokens * f);
        }
        if (call.neurons == nullptr) call.neurons = job.take<int32_t>(f + 1);
    }
    share_out(job, false, [&](const Call& call) {
        return job.many ? kManyRows : tile_rows(call.layout().selector_row_bytes);
    });
    if (job.no_memory) return true;
    if (!(job.many ? job.run<select_many>(job.num_items) : job.run<select_few>(job.num_items))) return false;
    size_t num_listed = 0;
    for (int32_t c = 0; c < job.num_calls; c++)
        if (!job.calls[c].is_selected) num_listed += job.calls[c].layout().num_rows;
    return job.run<list_call>(job.num_calls, num_listed <= kAloneValues);
}

const float* gather_inputs(Job& job, const Call& call) {
    size_t d = call.layout().num_cols;
    float* gathered = job.take<float>(call.num_tokens * d);
    for (int32_t t = 0; !job.no_memory && t < call.num_tokens; t++)
        std::memcpy(gathered + t * d, job.x + call.tokens[t] * d, sizeof(float) * d);
    return gathered;
}

// ---- records ------------------------------------------------------------------------------------------------------

namespace {

// Whether a neuron runs for any of the call's tokens.
bool is_wanted(const Call& call, int32_t neuron) {
    uint8_t any = 0;
    for (int32_t t = 0; t < call.num_tokens; t++) any |= call.runs[(size_t)t * call.layout().num_rows + neuron];
    return any;
}

// The record of the k-th of a call's neurons.
const uint8_t* record_of(const Call& call, int32_t k) {
    if (call.readable != nullptr && !is_wanted(call, call.neurons[k])) return call.readable;
    return call.work->records.at(call.neurons[k], call.layout().record_row_bytes);
}

// The parts of a record: so many operations share the fetching of what comes next, a part's bytes a row.
int32_t num_parts(const ExpertLayout& layout) {
    return 1 + (layout.up.place == Place::record) + (layout.gate.place == Place::record);
}

// What the `number`-th operation on `count` records fetches: of every `parts` rows, one of the next records. Where the
// tile before was shorter, or there was none, nobody has fetched all records of this one: their first products fetch
// the rest of them, a little ahead, and the sum of rows all of the next.
Ahead share_of_next(const Records& records, const ExpertLayout& layout, int32_t count, int32_t number,
                    const uint8_t** ahead) {
    constexpr int32_t distance = 4;
    int32_t parts = num_parts(layout), row_bytes = layout.record_row_bytes, piece = (row_bytes + parts - 1) / parts;
    if (records.num_fetched < count) {
        if (number == parts - 1) return {records.next, row_bytes};
        const int32_t left = count - records.num_fetched, steps = std::max(count - distance, 1);
        for (int32_t r = 0; r < count; r++) {
            const int32_t k = records.num_fetched ? records.num_fetched + r * left / steps : r + distance;
            ahead[r] = records.rows[std::min(k, count - 1)];
        }
        return {ahead, number == 0 ? row_bytes : 0};
    }
    int32_t k = count * number / parts, begin = 0;
    for (int32_t r = 0; r < count; r++) {
        ahead[r] = records.next[k] + begin;
        begin += piece;
        if (begin >= row_bytes) {
            begin = 0;
            k++;
        }
    }
    return {ahead, piece};
}

}  // namespace

Records::Records(const Job& job, const Call& call, const Item& item, int32_t first, int32_t count, int next_item,
                 int worker) {
    const Call* then = &call;
    int32_t from = first + count, left = item.first + item.count - from;
    if (left <= 0 && next_item >= 0 && !job.calls[job.items[next_item].call].in_panels) {
        then = &job.calls[job.items[next_item].call];
        from = job.items[next_item].first;
        left = job.items[next_item].count;
    }
    for (int32_t r = 0; r < count; r++) {
        rows[r] = record_of(call, first + r);
        next[r] = left > 0 ? record_of(*then, from + std::min(r, left - 1)) : rows[r];
    }
    Scratch& scratch = job.scratch[worker];
    num_fetched = scratch.fetched == rows[0] ? scratch.num_fetched : 0;
    scratch.fetched = next[0];
    scratch.num_fetched = std::min(count, left);
}

void neurons_few(const FewTokens& few, const Call& call, const Records& records, int32_t first, int32_t count,
                 int32_t t, float* h) {
    const ExpertLayout& layout = call.layout();
    float a[kMaxTile];
    uint8_t runs[kMaxTile];
    const bool is_listed = call.listed_a != nullptr, has_a = is_listed || call.runs != nullptr;
    for (int32_t r = 0; has_a && r < count; r++) {
        size_t place = (size_t)t * layout.num_rows + call.neurons[first + r];
        a[r] = is_listed ? call.listed_a[first + r] : call.a[place];
        runs[r] = is_listed || call.runs[place];
    }
    const uint8_t* ahead[2][kMaxTile];
    Ahead fetched[2] = {};
    for (int32_t i = 0; t == 0 && i + 1 < num_parts(layout); i++)
        fetched[i] = share_of_next(records, layout, count, i, ahead[i]);
    few.neurons(records.rows, count, call.inputs[t], has_a ? a : nullptr, has_a ? runs : nullptr,
                call.work->threshold, fetched, h);
}

void add_few(const FewTokens& few, const Call& call, const Records& records, int32_t count, int32_t t, const float* h,
             float* sum) {
    const uint8_t* ahead[kMaxTile];
    Ahead fetched = {};
    if (t == call.num_tokens - 1)
        fetched = share_of_next(records, call.layout(), count, num_parts(call.layout()) - 1, ahead);
    few.add(records.rows, count, h, fetched, sum);
}

float* sums_of(const Call& call, const Item& item, size_t floats) {
    float* sums = call.partial + (size_t)(item.first / call.item_neurons) * call.num_tokens * floats;
    std::memset(sums, 0, sizeof(float) * call.num_tokens * floats);
    return sums;
}

// ---- the end ------------------------------------------------------------------------------------------------------

namespace {

// Floats of a sum of a call's token.
size_t size_of_sum(const Job& job, const Call& call) {
    const Part& down = call.layout().down.part;
    return job.many ? (size_t)down.num_cols : call.kernels->sum_floats(down);
}

// Some floats of every token's shares, added up in their order to the first share.
void join_shares(Job& job, int number, int, int) {
    for (int32_t c = 0; c < job.num_calls; c++) {
        const Call& call = job.calls[c];
        const size_t size = size_of_sum(job, call), start = (size_t)number * kFinishCols;
        const size_t stop = std::min(size, start + kFinishCols), stride = call.num_tokens * size;
        for (int32_t t = 0; t < call.num_tokens; t++) {
            float* sum = call.partial + t * size;
            for (int32_t item = 1; item < call.num_items; item++) {
                const float* other = sum + item * stride;
                for (size_t i = start; i < stop; i++) sum[i] += other[i];
            }
        }
    }
}

// Some columns of y: every call's tokens, call after call, each with the expert's extra values and its sum, which is
// brought into the order of columns.
void add_outputs(Job& job, int number, int, int worker) {
    const int32_t d = job.calls[0].layout().num_cols, start = number * kFinishCols;
    const int32_t stop = std::min(d, start + kFinishCols);
    float* out = job.finished + (size_t)worker * d;
    for (int32_t c = 0; c < job.num_calls; c++) {
        const Call& call = job.calls[c];
        const size_t extra_bytes = call.layout().extra_row_bytes, size = size_of_sum(job, call);
        for (int32_t t = 0; t < call.num_tokens; t++) {
            if (extra_bytes)
                std::memcpy(out + start, call.work->extra.at(0, extra_bytes) + sizeof(float) * start,
                            sizeof(float) * (stop - start));
            else
                std::memset(out + start, 0, sizeof(float) * (stop - start));
            const float* sum = call.partial + t * size;
            if (call.num_items && job.many)
                for (int32_t i = start; i < stop; i++) out[i] += sum[i];
            else if (call.num_items)
                call.kernels->finish_sum(call.layout().down.part, sum, 1.0f, start, stop, out);
            float* to = job.y + call.outputs[t] * d;
            for (int32_t i = start; i < stop; i++) to[i] += call.weights[t] * out[i];
        }
    }
}

}  // namespace

bool finish(Job& job) {
    const int32_t d = job.calls[0].layout().num_cols;
    size_t largest = 0, num_values = 0;  // of a sum whose shares are to be added up; of all tokens
    for (int32_t c = 0; c < job.num_calls; c++) {
        const Call& call = job.calls[c];
        if (call.num_items > 1) largest = std::max(largest, size_of_sum(job, call));
        num_values += (size_t)call.num_tokens * d;
    }
    job.finished = job.take<float>((size_t)job.pool.threads() * d);
    if (job.no_memory) return true;
    if (!job.run<join_shares>((int)((largest + kFinishCols - 1) / kFinishCols))) return false;
    return job.run<add_outputs>((d + kFinishCols - 1) / kFinishCols, num_values <= kAloneValues);
}

}  // namespace moe_pack
