// A job over experts: its calls, shared out in items, and their phases, for few tokens and for many.
//
// For experts.cpp. A phase is run by the pool's threads; what it allocates is the arena's.
#pragma once

#include "experts.h"
#include "panels.h"
#include "tiles.h"

namespace moe_pack {

constexpr int32_t kMostTokens = kPanelTokens;  // of a call; kFewTokens of those whose expert is not in panels
constexpr int32_t kItemTiles = 2;  // a sum of few tokens is of so many tiles at least

// An expert at work on some tokens.
struct Call {
    const ExpertWork* work;
    const Kernels* kernels;
    bool in_panels;
    bool is_whole;  // all neurons run, and `neurons` are all: those of which nothing is wanted, by `runs`, are not read
    int32_t num_tokens;
    const int64_t* tokens;   // of x
    const int64_t* outputs;  // of y
    const float* weights;
    float* a;           // [tokens, f]; null without a selector, and so is `runs`
    uint8_t* runs;      // [tokens, f]
    int32_t* neurons;   // [f]: those that run for any token
    int32_t num_neurons;
    bool is_selected;       // the neurons are given, and the two or the next
    const float* listed_a;  // [neurons], of one token for which all these run
    float* partial;         // [items, tokens, sum]
    int32_t num_items, item_neurons;
    Inputs inputs[kMostTokens];
    const uint8_t* readable;  // a record that may be read, where not all may

    const ExpertLayout& layout() const { return *work->layout; }
};

struct Item {
    int32_t call, first, count;
};

// What all phases of a job share.
struct Job {
    Pool& pool;
    Arena& arena;
    const Kernels& kernels;  // of many tokens; those of few are their call's
    const float* x;
    float* y;
    Scratch* scratch;  // one a thread
    Call* calls;
    int32_t num_calls;
    Item* items;
    int32_t num_items;
    float* finished;  // [thread, d]: a token's output, of which a thread has some columns at a time
    const bool many;  // tokens share decoded rows, however few a pass has left: sums are in the order of columns
    bool no_memory = false;

    Job(Pool& p, const float* inputs, float* outputs, bool are_many)
        : pool(p), arena(p.arena()), kernels(p.kernels()), x(inputs), y(outputs), many(are_many) {}

    template <class T>
    T* take(size_t count) {
        T* place = arena.take<T>(std::max<size_t>(count, 1));
        no_memory |= place == nullptr;
        return place;
    }

    template <void (*phase)(Job&, int, int, int)>
    bool run(int count, bool alone = false) {
        const Pool::Work work = [](void* job, int item, int next, int worker) {
            phase(*static_cast<Job*>(job), item, next, worker);
        };
        return alone ? pool.run_alone(count, work, this) : pool.run(count, work, this);
    }
};

inline bool has_selector(const ExpertLayout& layout) { return layout.selector != Selector::none; }

// Memory for each thread.
void take_scratch(Job& job, const ExpertLayout* const* layouts, int32_t count);

// The inputs of few tokens in the forms that their parts want; parts and experts of one form share it.
void prepare_inputs(Job& job);

// The neurons that run for any token, rising.
void list_running(Call& call);

// `a`, `runs` and `neurons` of every call that was not given them. False if a map was cut.
bool select(Job& job);

// The inputs of a call's tokens side by side; from here on its tokens are 0 to T - 1 of these.
const float* gather_inputs(Job& job, const Call& call);

constexpr int32_t kMostCalls = 256;  // of few tokens, side by side

// Neurons of a call that a thread takes at once.
inline int32_t few_rows(const Call& call) {
    return call.is_whole ? kMaxTile : tile_rows(call.layout().record_row_bytes);
}

// Shares of the neurons listed, and space for their sums.
void share_records(Job& job);

// Some records' rows, and those of the records that come after them.
struct Records {
    const uint8_t *rows[kManyRows], *next[kManyRows];
    int32_t num_fetched;  // the first of them, by this thread with the tile before

    Records(const Job& job, const Call& call, const Item& item, int32_t first, int32_t count, int next_item,
            int worker);
};

// An item of a call whose expert is in panels: selector and records of its tiles, for all tokens (whole.cpp).
void run_panels(const Job& job, const Call& call, const Item& item, float* sums, int next_item, int worker);

// h of some records for one of few tokens. Meanwhile the first of the next records come, each whole and one after the
// other: processors fetch the rest of what they see come in order themselves, and have more room for it than for what
// they are told to fetch.
void neurons_few(const FewTokens& few, const Call& call, const Records& records, int32_t first, int32_t count,
                 int32_t t, float* h);

// Adds their down rows. Meanwhile the rest of the next records come.
void add_few(const FewTokens& few, const Call& call, const Records& records, int32_t count, int32_t t, const float* h,
             float* sum);

// The item's share of its call's sums, `floats` a token, at zero.
float* sums_of(const Call& call, const Item& item, size_t floats);

// y += every call's shares, weighted. False if a map was cut.
bool finish(Job& job);

// The same of one call whose parts `can_round`, with inputs rounded to 8 bits (rounded.cpp); and its selection alone.
bool run_rounded(Job& job, Call& call);
bool select_rounded(Job& job, Call& call);
bool can_round(const ExpertLayout& layout);

inline Outcome outcome(const Job& job, bool whole) {
    return job.no_memory ? Outcome::no_memory : whole ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
