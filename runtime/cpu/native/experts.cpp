#include "job.h"

namespace moe_pack {
namespace {

constexpr size_t kPartialBytes = 16 << 20;  // of experts' unfinished sums at once

void run_few(Job& job, int number, int next_item, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    size_t floats = job.kernels.sum_floats(call.layout().down.part);
    float* sums = sums_of(call, item, floats);
    FewTokens few(job.kernels, call.layout(), job.scratch[worker]);
    int32_t tile = tile_rows(call.layout().record_row_bytes), end = item.first + item.count;
    for (int32_t first = item.first; first < end; first += tile) {
        int32_t count = std::min(tile, end - first);
        Records records(job, call, item, first, count, next_item, worker);
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
        Records records(job, call, item, first, count, next_item, worker);
        const float* h = many.neurons(records.rows, call.neurons + first, count, call.a, call.runs,
                                      call.layout().num_rows, call.work->threshold);
        many.add(records.rows, count, h, sums);
    }
}

bool run_records(Job& job) {
    for (int32_t c = 0; c < job.num_calls; c++)
        if (int32_t* num_read = job.calls[c].work->num_read) *num_read += job.calls[c].num_neurons;
    share_records(job);
    if (job.no_memory) return true;
    return job.many ? job.run<run_many>(job.num_items) : job.run<run_few>(job.num_items);
}

Call call_of(const ExpertWork& work, int32_t first_token, int32_t num_tokens) {
    Call call = {};
    call.work = &work;
    call.num_tokens = num_tokens;
    call.tokens = work.tokens + first_token;
    call.outputs = (work.outputs ? work.outputs : work.tokens) + first_token;
    call.weights = work.weights + first_token;
    if (work.neurons != nullptr) {
        size_t first = (size_t)first_token * work.layout->num_rows;
        call.is_selected = true;
        call.listed_a = work.listed_a;
        if (work.runs != nullptr) {
            call.a = const_cast<float*>(work.a) + first;
            call.runs = const_cast<uint8_t*>(work.runs) + first;
        }
        call.neurons = const_cast<int32_t*>(work.neurons);
        call.num_neurons = work.num_neurons;
    }
    return call;
}

// The neurons given for all tokens that run for some of this call's.
void list_given(Job& job, Call& call) {
    const ExpertWork& work = *call.work;
    size_t f = call.layout().num_rows;
    call.neurons = job.take<int32_t>(work.num_neurons);
    call.num_neurons = 0;
    for (int32_t k = 0; !job.no_memory && k < work.num_neurons; k++) {
        uint8_t any = 0;
        for (int32_t t = 0; t < call.num_tokens; t++) any |= call.runs[t * f + work.neurons[k]];
        call.neurons[call.num_neurons] = work.neurons[k];
        call.num_neurons += any != 0;
    }
}

Outcome run_few_calls(Pool& pool, const ExpertWork* const* works, int32_t count, const float* x, float* y) {
    pool.arena().reset();
    Job job(pool, x, y, false);
    job.calls = job.take<Call>(count);
    auto* layouts = job.take<const ExpertLayout*>(count);
    if (job.no_memory) return Outcome::no_memory;
    for (int32_t i = 0; i < count; i++) {
        job.calls[i] = call_of(*works[i], 0, works[i]->num_tokens);
        layouts[i] = works[i]->layout;
    }
    job.num_calls = count;
    take_scratch(job, layouts, count);
    prepare_inputs(job);
    if (job.no_memory) return Outcome::no_memory;
    bool whole = select(job);
    if (whole && !job.no_memory) whole = run_records(job);
    if (whole && !job.no_memory) whole = finish(job);
    return outcome(job, whole);
}

Outcome run_many_calls(Pool& pool, const ExpertWork& work, const float* x, float* y) {
    for (int32_t first = 0; first < work.num_tokens; first += kManyTokens) {
        pool.arena().reset();
        Job job(pool, x, y, true);
        Call call = call_of(work, first, std::min(kManyTokens, work.num_tokens - first));
        job.calls = &call;
        job.num_calls = 1;
        take_scratch(job, &work.layout, 1);
        job.x = gather_inputs(job, call);
        if (call.is_selected) list_given(job, call);
        if (job.no_memory) return Outcome::no_memory;
        bool whole = select(job);
        if (whole && !job.no_memory) whole = run_records(job);
        if (whole && !job.no_memory) whole = finish(job);
        if (!whole || job.no_memory) return outcome(job, whole);
    }
    return Outcome::done;
}

// A call that stops after selection; its results go where they are wanted.
Call selection_of(SelectorWork& wanted, ExpertWork& work, int32_t first_token, int32_t num_tokens) {
    work.layout = wanted.layout;
    work.selector = wanted.selector;
    work.threshold = wanted.threshold;
    size_t first = (size_t)first_token * wanted.layout->num_rows;
    Call call = {};
    call.work = &work;
    call.num_tokens = num_tokens;
    call.tokens = wanted.tokens + first_token;
    call.a = wanted.a == nullptr ? nullptr : wanted.a + first;
    call.runs = wanted.runs + first;
    call.neurons = wanted.neurons;
    return call;
}

Outcome select_few_calls(Pool& pool, SelectorWork* const* wanted, int32_t count, const float* x) {
    pool.arena().reset();
    Job job(pool, x, nullptr, false);
    job.calls = job.take<Call>(count);
    auto* works = job.take<ExpertWork>(count);
    auto* layouts = job.take<const ExpertLayout*>(count);
    if (job.no_memory) return Outcome::no_memory;
    for (int32_t i = 0; i < count; i++) {
        works[i] = {};
        job.calls[i] = selection_of(*wanted[i], works[i], 0, wanted[i]->num_tokens);
        layouts[i] = wanted[i]->layout;
    }
    job.num_calls = count;
    take_scratch(job, layouts, count);
    prepare_inputs(job);
    return job.no_memory ? Outcome::no_memory : outcome(job, select(job));
}

Outcome select_many_calls(Pool& pool, SelectorWork& wanted, const float* x) {
    for (int32_t first = 0; first < wanted.num_tokens; first += kManyTokens) {
        pool.arena().reset();
        Job job(pool, x, nullptr, true);
        ExpertWork work = {};
        Call call = selection_of(wanted, work, first, std::min(kManyTokens, wanted.num_tokens - first));
        job.calls = &call;
        job.num_calls = 1;
        take_scratch(job, &wanted.layout, 1);
        job.x = gather_inputs(job, call);
        if (job.no_memory) return Outcome::no_memory;
        Outcome found = outcome(job, select(job));
        if (found != Outcome::done) return found;
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
            const ExpertWork* few[kMostCalls];
            int32_t count = 0;
            for (size_t num_bytes = 0; i < num_works && count < kMostCalls && works[i].num_tokens <= kFewTokens; i++) {
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

Outcome select_neurons(Pool& pool, SelectorWork* works, int32_t num_works, const float* x) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    SelectorWork* few[kMostCalls];
    int32_t num_few = 0;
    for (int32_t i = 0; i < num_works; i++) {
        SelectorWork& work = works[i];
        Outcome found = Outcome::done;
        if (work.num_tokens && !has_selector(*work.layout))
            std::memset(work.runs, 1, (size_t)work.num_tokens * work.layout->num_rows);
        else if (work.num_tokens > kFewTokens)
            found = select_many_calls(pool, work, x);
        else if (work.num_tokens)
            few[num_few++] = &work;
        if (found == Outcome::done && num_few && (num_few == kMostCalls || i + 1 == num_works)) {
            found = select_few_calls(pool, few, num_few, x);
            num_few = 0;
        }
        if (found != Outcome::done) return found;
    }
    for (int32_t i = 0; i < num_works; i++) {
        ExpertWork work = {};
        Call all = selection_of(works[i], work, 0, works[i].num_tokens);
        if (all.num_tokens) list_running(all);
        works[i].num_neurons = all.num_neurons;
    }
    return Outcome::done;
}

}  // namespace moe_pack
