// One step at a time: for a runtime that brings rows in between.
#include "job.h"

namespace moe_pack {
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

    StepJob(Pool& pool, const ExpertLayout& layout, const float* x, float* y, int32_t num_tokens)
        : Job(pool, x, y, num_tokens > kFewTokens) {
        work.layout = &layout;
        call.work = &work;
        call.num_tokens = num_tokens;
        call.tokens = call.outputs = tokens;
        call.weights = weights;
        calls = &call;
        num_calls = 1;
        for (int32_t t = 0; t < num_tokens; t++) {
            tokens[t] = t;
            weights[t] = 1.0f;
        }
        pool.arena().reset();
        take_scratch(*this, &work.layout, 1);
    }

    void take_records(const NeuronsWork& given) {
        work.records = given.records;
        work.extra = given.extra;
        work.threshold = given.threshold;
        call.neurons = const_cast<int32_t*>(given.neurons);
        call.num_neurons = given.num_neurons;
        call.places = given.places;
        share_records(*this);
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
        Records records(job, call, item, first, count, next_item, worker);
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
        Records records(job, call, item, first, count, next_item, worker);
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

namespace {

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
