#include "experts.h"

#include "tiles.h"

namespace moe_pack {
namespace {

constexpr size_t kPartialBytes = 16 << 20;  // of experts' unfinished sums at once
constexpr int32_t kItemTiles = 2;           // a sum of few tokens is of so many tiles
constexpr int32_t kManyItems = 16;          // a sum of many tokens: the expert in so many shares, at most
constexpr int32_t kFinishCols = 512;        // columns of y a thread adds to at once
constexpr int32_t kAheadBytes = 4096;       // how far before its use a selector row is fetched

// An expert at work on some tokens.
struct Call {
    const ExpertWork* work;
    int32_t num_tokens;
    const int64_t* tokens;
    const float* weights;
    float* a;           // [tokens, f]; null without a selector, and so is `runs`
    uint8_t* runs;      // [tokens, f]
    int32_t* neurons;   // [f]: those that run for any token
    int32_t num_neurons;
    const int32_t* places;  // rows of the records of `neurons`; null: where they lie in the pack
    float* partial;         // [items, tokens, sum]
    int32_t num_items, item_neurons;
    Inputs inputs[kFewTokens];

    const ExpertLayout& layout() const { return *work->layout; }
};

struct Item {
    int32_t call, first, count;
};

// What all phases of a job share.
struct Job {
    Pool& pool;
    Arena& arena;
    const Kernels& kernels;
    const float* x;
    float* y;
    Scratch* scratch;  // one a thread
    Call* calls;
    int32_t num_calls;
    Item* items;
    int32_t num_items;
    float* finished;  // [call, token, d]
    int64_t* places;  // where a call's first token lies in `finished`
    bool no_memory = false;

    Job(Pool& p, const float* inputs, float* outputs)
        : pool(p), arena(p.arena()), kernels(p.kernels()), x(inputs), y(outputs) {}

    template <class T>
    T* take(size_t count) {
        T* place = arena.take<T>(std::max<size_t>(count, 1));
        no_memory |= place == nullptr;
        return place;
    }

    template <void (*phase)(Job&, int, int, int)>
    bool run(int count) {
        return pool.run(count, [](void* job, int item, int next, int worker) {
            phase(*static_cast<Job*>(job), item, next, worker);
        }, this);
    }
};

bool has_selector(const ExpertLayout& layout) { return layout.selector != Selector::none; }

size_t floats_of(const Job& job, const PlacedPart& part) {
    return part.place == Place::none ? 0 : job.kernels.work_floats(part.part);
}

// Memory for each thread; `many` for decoded rows too.
void take_scratch(Job& job, const ExpertLayout* const* layouts, int32_t count, bool many) {
    size_t work = 16, cols = 1;
    for (int32_t i = 0; i < count; i++) {
        for (const PlacedPart* part : {&layouts[i]->gate, &layouts[i]->up, &layouts[i]->down})
            work = std::max(work, floats_of(job, *part));
        cols = std::max<size_t>(cols, layouts[i]->num_cols);
    }
    size_t values = many ? kManyTokens * kManyRows : kMaxTile;
    job.scratch = job.take<Scratch>(job.pool.threads());
    for (int worker = 0; !job.no_memory && worker < job.pool.threads(); worker++) {
        Scratch& scratch = job.scratch[worker];
        scratch.work = job.take<float>(work);
        for (float*& place : scratch.values) place = job.take<float>(values);
        scratch.h = job.take<float>(values);
        scratch.decoded = many ? job.take<float>(kManyRows * cols) : nullptr;
    }
}

// A token's inputs as each part that meets them wants them; parts and experts of one form share it.
struct Form {
    const Part* part;
    int64_t token;
    void* prepared;
};

void prepare_form(Job& job, Form* forms, int32_t& count, const PlacedPart& part, int64_t token, const void** place) {
    *place = nullptr;
    if (part.place == Place::none || job.no_memory) return;
    for (int32_t i = 0; i < count && *place == nullptr; i++)
        if (forms[i].token == token && same_form(*forms[i].part, part.part)) *place = forms[i].prepared;
    if (*place != nullptr) return;
    auto* memory = job.take<uint8_t>(job.kernels.prepared_bytes(part.part));
    if (job.no_memory) return;
    job.kernels.prepare(part.part, job.x + token * part.part.num_cols, memory);
    forms[count++] = {&part.part, token, memory};
    *place = memory;
}

void prepare_inputs(Job& job) {
    size_t most = 0;
    for (int32_t c = 0; c < job.num_calls; c++) most += 2 * job.calls[c].num_tokens;
    Form* forms = job.take<Form>(most);
    int32_t count = 0;
    for (int32_t c = 0; c < job.num_calls && !job.no_memory; c++) {
        Call& call = job.calls[c];
        for (int32_t t = 0; t < call.num_tokens; t++) {
            prepare_form(job, forms, count, call.layout().gate, call.tokens[t], &call.inputs[t].gate);
            prepare_form(job, forms, count, call.layout().up, call.tokens[t], &call.inputs[t].up);
        }
    }
}

// Items of `each(call)` neurons: all rows before selection, those that run after it.
template <class Each>
void share_out(Job& job, bool selected, const Each& each) {
    size_t count = 0;
    auto number = [&](const Call& call) { return selected ? call.num_neurons : call.layout().num_rows; };
    for (int32_t c = 0; c < job.num_calls; c++) count += (number(job.calls[c]) + each(job.calls[c]) - 1) / each(job.calls[c]);
    job.items = job.take<Item>(count);
    job.num_items = 0;
    for (int32_t c = 0; c < job.num_calls && !job.no_memory; c++) {
        Call& call = job.calls[c];
        if (!selected && !has_selector(call.layout())) continue;
        int32_t size = each(call), first_item = job.num_items;
        for (int32_t first = 0; first < number(call); first += size)
            job.items[job.num_items++] = {c, first, std::min(size, number(call) - first)};
        call.num_items = job.num_items - first_item;
        call.item_neurons = size;
    }
}

// ---- selection ----------------------------------------------------------------------------------------------------

void mark_running(const Call& call, int32_t token, int32_t first, int32_t count) {
    size_t begin = (size_t)token * call.layout().num_rows + first;
    for (size_t i = begin; i < begin + count; i++) call.runs[i] = runs_at(call.a[i], call.work->threshold);
}

void select_few(Job& job, int number, int, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    const ExpertLayout& layout = call.layout();
    size_t row_bytes = layout.selector_row_bytes;
    const uint8_t *rows[kMaxTile], *ahead[kMaxTile];
    int32_t distance = std::clamp<int32_t>(kAheadBytes / (int32_t)row_bytes, 2, 16);
    for (int32_t r = 0; r < item.count; r++) {
        rows[r] = call.work->selector + (item.first + r) * row_bytes;
        ahead[r] = call.work->selector + std::min(item.first + r + distance, layout.num_rows - 1) * row_bytes;
    }
    FewTokens few(job.kernels, layout, job.scratch[worker]);
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
    for (int32_t r = 0; r < item.count; r++)
        rows[r] = call.work->selector + (size_t)(item.first + r) * layout.selector_row_bytes;
    ManyTokens many(job.kernels, layout, job.scratch[worker], job.x, call.num_tokens);
    const float* a = many.select(rows, item.count);
    for (int32_t t = 0; t < call.num_tokens; t++) {
        std::memcpy(call.a + (size_t)t * layout.num_rows + item.first, a + t * kManyRows, 4 * item.count);
        mark_running(call, t, item.first, item.count);
    }
}

// The neurons that run for any token, rising.
void list_running(Call& call) {
    int32_t f = call.layout().num_rows, count = 0;
    for (int32_t i = 0; i < f; i++) {
        uint8_t any = call.runs == nullptr;
        for (int32_t t = 0; t < call.num_tokens && call.runs; t++) any |= call.runs[(size_t)t * f + i];
        call.neurons[count] = i;
        count += any;
    }
    call.num_neurons = count;
}

bool select(Job& job, bool many) {
    for (int32_t c = 0; c < job.num_calls; c++) {
        Call& call = job.calls[c];
        size_t f = call.layout().num_rows;
        bool any = has_selector(call.layout());
        if (any && call.a == nullptr) {
            call.a = job.take<float>(call.num_tokens * f);
            call.runs = job.take<uint8_t>(call.num_tokens * f);
        }
        if (call.neurons == nullptr) call.neurons = job.take<int32_t>(f + 1);
    }
    share_out(job, false, [many](const Call& call) {
        return many ? kManyRows : tile_rows(call.layout().selector_row_bytes);
    });
    if (job.no_memory) return true;
    if (!(many ? job.run<select_many>(job.num_items) : job.run<select_few>(job.num_items))) return false;
    for (int32_t c = 0; c < job.num_calls; c++) list_running(job.calls[c]);
    return true;
}

// ---- records ------------------------------------------------------------------------------------------------------

// The record of the k-th of a call's neurons.
const uint8_t* record_of(const Call& call, int32_t k) {
    int32_t row = call.places ? call.places[k] : call.neurons[k];
    return call.work->records + (size_t)row * call.layout().record_row_bytes;
}

// Where the bytes lie that a record's products need: before its down row, which comes last.
int32_t product_bytes(const ExpertLayout& layout) { return layout.down.offset; }

// Some records' rows, and the first bytes of those that come after them.
struct Records {
    const uint8_t *rows[kMaxTile], *down[kMaxTile], *next[kMaxTile];

    Records(const Job& job, const Call& call, const Item& item, int32_t first, int32_t count, int next_item) {
        const ExpertLayout& layout = call.layout();
        const Call* then = &call;
        int32_t from = first + count, left = item.first + item.count - from;
        if (left <= 0 && next_item >= 0) {
            then = &job.calls[job.items[next_item].call];
            from = job.items[next_item].first;
            left = job.items[next_item].count;
        }
        for (int32_t r = 0; r < count; r++) {
            rows[r] = record_of(call, first + r);
            down[r] = rows[r] + layout.down.offset;
            next[r] = left > 0 ? record_of(*then, from + std::min(r, left - 1)) : rows[r];
        }
    }
};

// h of some records for one of few tokens. While products are taken, the down rows come.
void neurons_few(const FewTokens& few, const Call& call, const Records& records, int32_t first, int32_t count, int32_t t,
                 float* h) {
    const ExpertLayout& layout = call.layout();
    float a[kMaxTile];
    uint8_t runs[kMaxTile];
    for (int32_t r = 0; call.runs && r < count; r++) {
        size_t place = (size_t)t * layout.num_rows + call.neurons[first + r];
        a[r] = call.a[place];
        runs[r] = call.runs[place];
    }
    int32_t down_bytes = t == 0 ? layout.record_row_bytes - layout.down.offset : 0;
    few.neurons(records.rows, count, call.inputs[t], call.runs ? a : nullptr, call.runs ? runs : nullptr,
                call.work->threshold, {records.down, down_bytes}, h);
}

// Adds their down rows. Meanwhile the next records' products come.
void add_few(const FewTokens& few, const Call& call, const Records& records, int32_t count, int32_t t, const float* h,
             float* sum) {
    const ExpertLayout& layout = call.layout();
    int32_t next_bytes = product_bytes(layout) ? product_bytes(layout) : layout.record_row_bytes;
    bool last = t == call.num_tokens - 1;
    few.add(records.rows, count, h, {records.next, last ? next_bytes : 0}, sum);
}

float* sums_of(const Call& call, const Item& item, size_t floats) {
    float* sums = call.partial + (size_t)(item.first / call.item_neurons) * call.num_tokens * floats;
    std::memset(sums, 0, sizeof(float) * call.num_tokens * floats);
    return sums;
}

void run_few(Job& job, int number, int next_item, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    size_t floats = job.kernels.sum_floats(call.layout().down.part);
    float* sums = sums_of(call, item, floats);
    FewTokens few(job.kernels, call.layout(), job.scratch[worker]);
    int32_t tile = tile_rows(call.layout().record_row_bytes), end = item.first + item.count;
    for (int32_t first = item.first; first < end; first += tile) {
        int32_t count = std::min(tile, end - first);
        Records records(job, call, item, first, count, next_item);
        for (int32_t t = 0; t < call.num_tokens; t++) {
            float h[kMaxTile];
            neurons_few(few, call, records, first, count, t, h);
            add_few(few, call, records, count, t, h, sums + t * floats);
        }
    }
}

void run_many(Job& job, int number, int next_item, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    float* sums = sums_of(call, item, call.layout().num_cols);
    ManyTokens many(job.kernels, call.layout(), job.scratch[worker], job.x, call.num_tokens);
    int32_t end = item.first + item.count;
    for (int32_t first = item.first; first < end; first += kManyRows) {
        int32_t count = std::min(kManyRows, end - first);
        Records records(job, call, item, first, count, next_item);
        const float* h = many.neurons(records.rows, call.neurons + first, count, call.a, call.runs,
                                      call.layout().num_rows, call.work->threshold);
        many.add(records.rows, count, h, kManyRows, sums);
    }
}

// ---- the end ------------------------------------------------------------------------------------------------------

// One token of one call: its shares added up, in their order, and brought into the order of columns.
void join_shares(Job& job, int number, int, int) {
    int32_t c = 0;
    while (c + 1 < job.num_calls && job.places[c + 1] <= number) c++;
    const Call& call = job.calls[c];
    const Part& down = call.layout().down.part;
    bool few = call.num_tokens <= kFewTokens;
    size_t d = down.num_cols, t = number - job.places[c], size = few ? job.kernels.sum_floats(down) : d;
    float* out = job.finished + (size_t)number * d;
    std::memset(out, 0, sizeof(float) * d);
    if (call.num_items == 0) return;
    float* sum = call.partial + t * size;
    for (int32_t item = 1; item < call.num_items; item++) {
        const float* other = call.partial + ((size_t)item * call.num_tokens + t) * size;
        for (size_t i = 0; i < size; i++) sum[i] += other[i];
    }
    if (few)
        job.kernels.finish_sum(down, sum, 1.0f, 0, (int32_t)d, out);
    else
        std::memcpy(out, sum, sizeof(float) * d);
}

// Some columns of y: every call's tokens, call after call.
void add_outputs(Job& job, int number, int, int) {
    size_t d = job.calls[0].layout().num_cols, start = (size_t)number * kFinishCols;
    size_t stop = std::min(d, start + kFinishCols);
    for (int32_t c = 0; c < job.num_calls; c++) {
        const Call& call = job.calls[c];
        for (int32_t t = 0; t < call.num_tokens; t++) {
            const float* from = job.finished + (job.places[c] + t) * d;
            float* to = job.y + call.tokens[t] * d;
            for (size_t i = start; i < stop; i++) to[i] += call.weights[t] * from[i];
        }
    }
}

bool finish(Job& job) {
    int64_t tokens = 0;
    job.places = job.take<int64_t>(job.num_calls);
    for (int32_t c = 0; !job.no_memory && c < job.num_calls; c++) {
        job.places[c] = tokens;
        tokens += job.calls[c].num_tokens;
    }
    size_t d = job.calls[0].layout().num_cols;
    job.finished = job.take<float>(tokens * d);
    if (job.no_memory) return true;
    if (!job.run<join_shares>((int)tokens)) return false;
    return job.run<add_outputs>((int)((d + kFinishCols - 1) / kFinishCols));
}

// Neurons a share: from the layout and their number alone, so that sums are the same for any number of threads.
int32_t share_of(const Call& call, bool many) {
    if (!many) return kItemTiles * tile_rows(call.layout().record_row_bytes);
    int32_t tiles = (call.num_neurons + kManyRows - 1) / kManyRows;
    return kManyRows * std::max(1, (tiles + kManyItems - 1) / kManyItems);
}

// Shares of the neurons listed, and room for their sums.
void share_records(Job& job, bool many) {
    share_out(job, true, [many](const Call& call) { return share_of(call, many); });
    for (int32_t c = 0; !job.no_memory && c < job.num_calls; c++) {
        Call& call = job.calls[c];
        const Part& down = call.layout().down.part;
        size_t size = many ? down.num_cols : job.kernels.sum_floats(down);
        call.partial = job.take<float>((size_t)call.num_items * call.num_tokens * size);
    }
}

bool run_records(Job& job, bool many) {
    share_records(job, many);
    if (job.no_memory) return true;
    return many ? job.run<run_many>(job.num_items) : job.run<run_few>(job.num_items);
}

// ---- whole jobs ---------------------------------------------------------------------------------------------------

Outcome outcome(const Job& job, bool whole) {
    return job.no_memory ? Outcome::no_memory : whole ? Outcome::done : Outcome::cut;
}

Call call_of(const ExpertWork& work, int32_t first_token, int32_t num_tokens) {
    Call call = {};
    call.work = &work;
    call.num_tokens = num_tokens;
    call.tokens = work.tokens + first_token;
    call.weights = work.weights + first_token;
    return call;
}

// The inputs of a call's tokens side by side; from here on its tokens are 0 to T - 1 of these.
const float* gather_inputs(Job& job, const Call& call) {
    size_t d = call.layout().num_cols;
    float* gathered = job.take<float>(call.num_tokens * d);
    for (int32_t t = 0; !job.no_memory && t < call.num_tokens; t++)
        std::memcpy(gathered + t * d, job.x + call.tokens[t] * d, sizeof(float) * d);
    return gathered;
}

Outcome run_few_calls(Pool& pool, const ExpertWork* const* works, int32_t count, const float* x, float* y) {
    pool.arena().reset();
    Job job(pool, x, y);
    job.calls = job.take<Call>(count);
    auto* layouts = job.take<const ExpertLayout*>(count);
    if (job.no_memory) return Outcome::no_memory;
    for (int32_t i = 0; i < count; i++) {
        job.calls[i] = call_of(*works[i], 0, works[i]->num_tokens);
        layouts[i] = works[i]->layout;
    }
    job.num_calls = count;
    take_scratch(job, layouts, count, false);
    prepare_inputs(job);
    if (job.no_memory) return Outcome::no_memory;
    bool whole = select(job, false);
    if (whole && !job.no_memory) whole = run_records(job, false);
    if (whole && !job.no_memory) whole = finish(job);
    return outcome(job, whole);
}

Outcome run_many_calls(Pool& pool, const ExpertWork& work, const float* x, float* y) {
    for (int32_t first = 0; first < work.num_tokens; first += kManyTokens) {
        pool.arena().reset();
        Job job(pool, x, y);
        Call call = call_of(work, first, std::min(kManyTokens, work.num_tokens - first));
        job.calls = &call;
        job.num_calls = 1;
        take_scratch(job, &work.layout, 1, true);
        job.x = gather_inputs(job, call);
        if (job.no_memory) return Outcome::no_memory;
        bool whole = select(job, true);
        if (whole && !job.no_memory) whole = run_records(job, true);
        if (whole && !job.no_memory) whole = finish(job);
        if (!whole || job.no_memory) return outcome(job, whole);
    }
    return Outcome::done;
}

}  // namespace

Outcome run_experts(Pool& pool, const ExpertWork* works, int32_t num_works, const float* x, float* y) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    int32_t i = 0;
    while (i < num_works) {
        Outcome found = Outcome::done;
        if (works[i].num_tokens > kFewTokens) {
            found = run_many_calls(pool, works[i++], x, y);
        } else {
            // As many experts with few tokens side by side as their unfinished sums allow.
            constexpr int32_t most = 256;
            const ExpertWork* few[most];
            int32_t count = 0;
            for (size_t num_bytes = 0; i < num_works && count < most && works[i].num_tokens <= kFewTokens; i++) {
                const ExpertLayout& layout = *works[i].layout;
                int32_t share = kItemTiles * tile_rows(layout.record_row_bytes);
                size_t sum_bytes = sizeof(float) * pool.kernels().sum_floats(layout.down.part);
                num_bytes += (layout.num_rows / share + 1) * works[i].num_tokens * sum_bytes;
                if (count && num_bytes > kPartialBytes) break;
                if (works[i].num_tokens) few[count++] = &works[i];
            }
            if (count) found = run_few_calls(pool, few, count, x, y);
        }
        if (found != Outcome::done) return found;
    }
    return Outcome::done;
}

// ---- one step at a time -------------------------------------------------------------------------------------------

namespace {

// h, of which each phase reads or writes its tokens' part.
struct Step {
    float* h;
    size_t stride;
};

// A step's job: one call whose tokens are rows 0 to T - 1 of what it is given.
struct StepJob : Job {
    Call call = {};
    ExpertWork work = {};
    Step step = {};
    int64_t tokens[kManyTokens];
    float weights[kManyTokens];
    bool many;

    StepJob(Pool& pool, const ExpertLayout& layout, const float* x, float* y, int32_t num_tokens)
        : Job(pool, x, y), many(num_tokens > kFewTokens) {
        work.layout = &layout;
        call.work = &work;
        call.num_tokens = num_tokens;
        call.tokens = tokens;
        call.weights = weights;
        calls = &call;
        num_calls = 1;
        for (int32_t t = 0; t < num_tokens; t++) {
            tokens[t] = t;
            weights[t] = 1.0f;
        }
        pool.arena().reset();
        take_scratch(*this, &work.layout, 1, many);
    }

    void take_records(const NeuronsWork& given) {
        work.records = given.records;
        work.threshold = given.threshold;
        call.neurons = const_cast<int32_t*>(given.neurons);
        call.num_neurons = given.num_neurons;
        call.places = given.places;
        share_records(*this, many);
    }
};

void step_neurons(Job& base, int number, int next_item, int worker) {
    auto& job = static_cast<StepJob&>(base);
    const Item& item = job.items[number];
    const Call& call = job.call;
    FewTokens few(job.kernels, call.layout(), job.scratch[worker]);
    ManyTokens many(job.kernels, call.layout(), job.scratch[worker], job.x, call.num_tokens);
    int32_t tile = job.many ? kManyRows : tile_rows(call.layout().record_row_bytes), end = item.first + item.count;
    for (int32_t first = item.first; first < end; first += tile) {
        int32_t count = std::min(tile, end - first);
        Records records(job, call, item, first, count, next_item);
        const float* found = nullptr;
        if (job.many)
            found = many.neurons(records.rows, call.neurons + first, count, call.a, call.runs, call.layout().num_rows,
                                 call.work->threshold);
        for (int32_t t = 0; t < call.num_tokens; t++) {
            float* h = job.step.h + t * job.step.stride + first;
            if (job.many)
                std::memcpy(h, found + t * kManyRows, sizeof(float) * count);
            else
                neurons_few(few, call, records, first, count, t, h);
        }
    }
}

void step_add(Job& base, int number, int next_item, int worker) {
    auto& job = static_cast<StepJob&>(base);
    const Item& item = job.items[number];
    const Call& call = job.call;
    const Part& down = call.layout().down.part;
    size_t floats = job.many ? down.num_cols : job.kernels.sum_floats(down);
    float* sums = sums_of(call, item, floats);
    FewTokens few(job.kernels, call.layout(), job.scratch[worker]);
    ManyTokens many(job.kernels, call.layout(), job.scratch[worker], job.x, call.num_tokens);
    int32_t tile = job.many ? kManyRows : tile_rows(call.layout().record_row_bytes), end = item.first + item.count;
    for (int32_t first = item.first; first < end; first += tile) {
        int32_t count = std::min(tile, end - first);
        Records records(job, call, item, first, count, next_item);
        const float* h = job.step.h + first;
        if (job.many) many.add(records.rows, count, h, job.step.stride, sums);
        for (int32_t t = 0; !job.many && t < call.num_tokens; t++)
            add_few(few, call, records, count, t, h + t * job.step.stride, sums + t * floats);
    }
}

// Calls `step(first token, tokens)` for tokens some at a time, until one fails.
template <class Do>
Outcome in_passes(Pool& pool, int32_t num_tokens, const Do& step) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    for (int32_t first = 0; first < num_tokens; first += kManyTokens) {
        Outcome found = step(first, std::min(kManyTokens, num_tokens - first));
        if (found != Outcome::done) return found;
    }
    return Outcome::done;
}

}  // namespace

Outcome select_neurons(Pool& pool, const ExpertLayout& layout, const uint8_t* selector, float threshold,
                       int32_t num_tokens, const float* x, float* a, uint8_t* runs, int32_t* neurons,
                       int32_t* num_neurons) {
    size_t d = layout.num_cols, f = layout.num_rows;
    if (has_selector(layout)) {
        Outcome found = in_passes(pool, num_tokens, [&](int32_t first, int32_t count) {
            StepJob job(pool, layout, x + first * d, nullptr, count);
            job.work.selector = selector;
            job.work.threshold = threshold;
            job.call.a = a + first * f;
            job.call.runs = runs + first * f;
            job.call.neurons = neurons;
            if (!job.many) prepare_inputs(job);
            if (job.no_memory) return Outcome::no_memory;
            return outcome(job, select(job, job.many));
        });
        if (found != Outcome::done) return found;
    } else {
        std::memset(runs, 1, num_tokens * f);
    }
    Call all = {};
    ExpertWork work = {};
    work.layout = &layout;
    all.work = &work;
    all.num_tokens = num_tokens;
    all.runs = runs;
    all.neurons = neurons;
    list_running(all);
    *num_neurons = all.num_neurons;
    return Outcome::done;
}

Outcome run_neurons(Pool& pool, const NeuronsWork& given, const float* x, const float* a, const uint8_t* runs,
                    float* h) {
    size_t d = given.layout->num_cols, f = given.layout->num_rows;
    return in_passes(pool, given.num_tokens, [&](int32_t first, int32_t count) {
        StepJob job(pool, *given.layout, x + first * d, nullptr, count);
        job.take_records(given);
        if (has_selector(*given.layout)) {
            job.call.a = const_cast<float*>(a) + first * f;
            job.call.runs = const_cast<uint8_t*>(runs) + first * f;
        }
        job.step = {h + (size_t)first * given.num_neurons, (size_t)given.num_neurons};
        if (!job.many) prepare_inputs(job);
        if (job.no_memory) return Outcome::no_memory;
        return outcome(job, job.run<step_neurons>(job.num_items));
    });
}

Outcome add_neurons(Pool& pool, const NeuronsWork& given, const float* h, float* y) {
    size_t d = given.layout->num_cols;
    return in_passes(pool, given.num_tokens, [&](int32_t first, int32_t count) {
        StepJob job(pool, *given.layout, nullptr, y + first * d, count);
        job.take_records(given);
        job.step = {const_cast<float*>(h) + (size_t)first * given.num_neurons, (size_t)given.num_neurons};
        if (job.no_memory) return Outcome::no_memory;
        bool whole = job.run<step_add>(job.num_items);
        if (whole) whole = finish(job);
        return outcome(job, whole);
    });
}

}  // namespace moe_pack
