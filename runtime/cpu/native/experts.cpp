#include <numeric>

#include "job.h"
#include "panels.h"
#include "rounded.h"

namespace moe_pack {
namespace {

constexpr size_t kPartialBytes = 16 << 20;  // of experts' unfinished sums at once

void run_few(Job& job, int number, int next_item, int worker) {
    const Item& item = job.items[number];
    const Call& call = job.calls[item.call];
    size_t floats = call.kernels->sum_floats(call.layout().down.part);
    float* sums = sums_of(call, item, floats);
    if (call.in_panels) return run_panels(job, call, item, sums, next_item, worker);
    FewTokens few(*call.kernels, call.layout(), job.scratch[worker]);
    int32_t tile = few_rows(call), end = item.first + item.count;
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

Call call_of(const Pool& pool, const ExpertWork& work, int32_t first_token, int32_t num_tokens) {
    Call call = {};
    call.work = &work;
    call.kernels = &pool.kernels();
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

// Of the neurons given, the runs; of all others, none. What is known of a whole expert then says the rest.
void list_all(Job& job, Call& call) {
    const size_t f = call.layout().num_rows;
    const int32_t *given = call.neurons, count = call.num_neurons;
    const uint8_t* runs = call.runs;
    call.neurons = job.take<int32_t>(f);
    call.runs = job.take<uint8_t>(call.num_tokens * f);
    if (job.no_memory) return;
    std::iota(call.neurons, call.neurons + f, 0);
    std::memset(call.runs, 0, call.num_tokens * f);
    for (int32_t k = 0; k < count; k++)
        for (int32_t t = 0; t < call.num_tokens; t++) call.runs[t * f + given[k]] = runs[t * f + given[k]];
    call.num_neurons = count ? f : 0;
    call.readable = count ? call.work->records.at(given[0], call.layout().record_row_bytes) : nullptr;
}

// Whether few tokens of an expert get sums over all its neurons: not where a list alone says which of them are wanted.
bool is_whole(const Pool& pool, const ExpertWork& work) {
    const bool is_listed = work.neurons != nullptr && work.runs == nullptr;
    return pool.kernels().panels != nullptr && !is_listed && runs_whole(*work.layout, work.threshold);
}

// So many tokens of an expert go one by one. Whether it is in panels says nothing: panels come at any time.
int32_t few_tokens(const Pool& pool, const ExpertWork& work) {
    if (pool.are_tokens_alone()) return work.num_tokens;
    return is_whole(pool, work) ? kFewOfWhole : kFewTokens;
}

// Some of a work's tokens.
struct Tokens {
    const ExpertWork* work;
    int32_t first, count;
};

Outcome run_few_calls(Pool& pool, const Tokens* some, int32_t count, const float* x, float* y) {
    pool.arena().reset();
    Job job(pool, x, y, false);
    job.calls = job.take<Call>(count);
    auto* layouts = job.take<const ExpertLayout*>(count);
    if (job.no_memory) return Outcome::no_memory;
    for (int32_t i = 0; i < count; i++) {
        const Tokens& tokens = some[i];
        Call& call = job.calls[i] = call_of(pool, *tokens.work, tokens.first, tokens.count);
        layouts[i] = tokens.work->layout;
        if (is_whole(pool, *tokens.work)) {
            call.is_whole = true;
            call.kernels = &pool.whole_kernels();
            if (call.is_selected) {
                list_all(job, call);
            } else if (tokens.work->record_panels != nullptr) {
                call.in_panels = call.is_selected = true;
                call.num_neurons = call.layout().num_rows;
            }
        } else if (call.is_selected && tokens.count < tokens.work->num_tokens) {
            list_given(job, call);
        }
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

// As many experts with few tokens side by side as their unfinished sums allow.
class FewCalls {
  public:
    FewCalls(Pool& pool, const float* x, float* y) : pool_(pool), x_(x), y_(y) {}

    Outcome add(const Tokens& tokens) {
        const ExpertLayout& layout = *tokens.work->layout;
        int32_t share = kItemTiles * tile_rows(layout.record_row_bytes);
        size_t sum_bytes = sizeof(float) * pool_.kernels().sum_floats(layout.down.part);
        size_t num_bytes = (layout.num_rows / share + 1) * tokens.count * sum_bytes;
        Outcome found = Outcome::done;
        if (count_ == kMostCalls || (count_ && num_bytes_ + num_bytes > kPartialBytes)) found = run();
        num_bytes_ += num_bytes;
        some_[count_++] = tokens;
        return found;
    }

    Outcome run() {
        Outcome found = count_ ? run_few_calls(pool_, some_, count_, x_, y_) : Outcome::done;
        count_ = 0;
        num_bytes_ = 0;
        return found;
    }

  private:
    Pool& pool_;
    const float* x_;
    float* y_;
    Tokens some_[kMostCalls];
    int32_t count_ = 0;
    size_t num_bytes_ = 0;
};

// Tokens at once: as equal numbers as `most` allows, in whole fours.
int32_t equal_share(int32_t num_tokens, int32_t most) {
    const int32_t shares = (num_tokens + most - 1) / most, each = (num_tokens + shares - 1) / shares;
    return (each + 3) / 4 * 4;
}

Outcome run_rounded_calls(Pool& pool, const ExpertWork& work, const float* x, float* y) {
    const int32_t step = equal_share(work.num_tokens, kRoundedTokens);
    for (int32_t first = 0; first < work.num_tokens; first += step) {
        pool.arena().reset();
        Job job(pool, x, y, true);
        Call call = call_of(pool, work, first, std::min(step, work.num_tokens - first));
        if (call.is_selected) list_given(job, call);
        if (job.no_memory) return Outcome::no_memory;
        const bool whole = run_rounded(job, call);
        if (!whole || job.no_memory) return outcome(job, whole);
    }
    return Outcome::done;
}

Outcome run_many_calls(Pool& pool, const ExpertWork& work, const float* x, float* y) {
    if (pool.rounds() && can_round(*work.layout)) return run_rounded_calls(pool, work, x, y);
    for (int32_t first = 0; first < work.num_tokens; first += kManyTokens) {
        pool.arena().reset();
        Job job(pool, x, y, true);
        Call call = call_of(pool, work, first, std::min(kManyTokens, work.num_tokens - first));
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
Call selection_of(const Pool& pool, SelectorWork& wanted, ExpertWork& work, int32_t first_token, int32_t num_tokens) {
    work.layout = wanted.layout;
    work.selector = wanted.selector;
    work.threshold = wanted.threshold;
    size_t first = (size_t)first_token * wanted.layout->num_rows;
    Call call = {};
    call.work = &work;
    call.kernels = &pool.kernels();
    call.num_tokens = num_tokens;
    call.tokens = wanted.tokens + first_token;
    call.a = wanted.a == nullptr ? nullptr : wanted.a + first;
    call.runs = wanted.runs + first;
    call.neurons = wanted.neurons;
    return call;
}

struct SelectorTokens {
    SelectorWork* wanted;
    int32_t first, count;
};

Outcome select_few_calls(Pool& pool, const SelectorTokens* some, int32_t count, const float* x) {
    pool.arena().reset();
    Job job(pool, x, nullptr, false);
    job.calls = job.take<Call>(count);
    auto* works = job.take<ExpertWork>(count);
    auto* layouts = job.take<const ExpertLayout*>(count);
    if (job.no_memory) return Outcome::no_memory;
    for (int32_t i = 0; i < count; i++) {
        const SelectorTokens& tokens = some[i];
        works[i] = {};
        job.calls[i] = selection_of(pool, *tokens.wanted, works[i], tokens.first, tokens.count);
        if (is_whole(pool, works[i])) job.calls[i].kernels = &pool.whole_kernels();
        if (tokens.count < tokens.wanted->num_tokens) job.calls[i].neurons = nullptr;  // the others' too
        layouts[i] = tokens.wanted->layout;
    }
    job.num_calls = count;
    take_scratch(job, layouts, count);
    prepare_inputs(job);
    return job.no_memory ? Outcome::no_memory : outcome(job, select(job));
}

Outcome select_many_calls(Pool& pool, SelectorWork& wanted, const float* x) {
    const bool rounds = pool.rounds() && can_round(*wanted.layout);
    const int32_t step = rounds ? equal_share(wanted.num_tokens, kRoundedTokens) : kManyTokens;
    for (int32_t first = 0; first < wanted.num_tokens; first += step) {
        pool.arena().reset();
        Job job(pool, x, nullptr, true);
        ExpertWork work = {};
        Call call = selection_of(pool, wanted, work, first, std::min(step, wanted.num_tokens - first));
        if (rounds) {
            Outcome found = outcome(job, select_rounded(job, call));
            if (found != Outcome::done) return found;
            continue;
        }
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
    const bool alone = pool.are_tokens_alone();
    FewCalls few(pool, x, y);
    for (int32_t i = 0; i < num_works; i++) {
        const ExpertWork& work = works[i];
        Outcome found = Outcome::done;
        if (work.num_tokens > few_tokens(pool, work)) {
            found = few.run();
            if (found == Outcome::done) found = run_many_calls(pool, work, x, y);
            if (found != Outcome::done) return found;
            continue;
        }
        // Alone, a token's neurons are in tiles of their own: which others run would change its sums.
        const bool in_panels = work.record_panels != nullptr && is_whole(pool, work) && work.neurons == nullptr;
        const int32_t step = in_panels ? kPanelTokens : alone ? 1 : kFewTokens;
        for (int32_t first = 0; first < work.num_tokens; first += step) {
            found = few.add({&work, first, std::min(step, work.num_tokens - first)});
            if (found != Outcome::done) return found;
        }
    }
    return few.run();
}

Outcome select_neurons(Pool& pool, SelectorWork* works, int32_t num_works, const float* x) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    SelectorTokens few[kMostCalls];
    int32_t num_few = 0;
    for (int32_t i = 0; i < num_works; i++) {
        SelectorWork& work = works[i];
        ExpertWork expert = {};
        expert.layout = work.layout;
        expert.threshold = work.threshold;
        expert.num_tokens = work.num_tokens;
        Outcome found = Outcome::done;
        if (work.num_tokens && !has_selector(*work.layout)) {
            std::memset(work.runs, 1, (size_t)work.num_tokens * work.layout->num_rows);
            continue;
        }
        if (work.num_tokens > few_tokens(pool, expert)) {
            found = select_many_calls(pool, work, x);
            if (found != Outcome::done) return found;
            continue;
        }
        for (int32_t first = 0; first < work.num_tokens; first += kFewTokens) {
            few[num_few++] = {&work, first, std::min(kFewTokens, work.num_tokens - first)};
            if (num_few < kMostCalls) continue;
            found = select_few_calls(pool, few, num_few, x);
            num_few = 0;
            if (found != Outcome::done) return found;
        }
    }
    if (num_few) {
        Outcome found = select_few_calls(pool, few, num_few, x);
        if (found != Outcome::done) return found;
    }
    for (int32_t i = 0; i < num_works; i++) {
        ExpertWork work = {};
        Call all = selection_of(pool, works[i], work, 0, works[i].num_tokens);
        if (all.num_tokens) list_running(all);
        works[i].num_neurons = all.num_neurons;
    }
    return Outcome::done;
}

}  // namespace moe_pack
