// Experts: whole and of some neurons, by one thread and by several, against plain loops where the numbers are sane.
#include <algorithm>
#include <deque>
#include <numeric>

#include "cases.h"
#include "job.h"
#include "layouts.h"
#include "panels.h"
#include "plain.h"
#include "tiles.h"

namespace moe_pack {
namespace {

// An expert with its bytes, and what is asked of it.
struct Given {
    ExpertLayout layout;
    bool sane;
    float threshold;
    Exact<uint8_t> selector, records, extra;
    Exact<int64_t> tokens;
    Exact<float> weights;

    Given(Random& random, const ExpertLayout& read, bool is_sane, size_t num_x, size_t num_tokens)
        : layout(read),
          sane(is_sane),
          selector(random, has_rows() ? layout.selector_bytes() : 0),
          records(random, layout.records_bytes()),
          extra(random, layout.extra_row_bytes),
          tokens(random, num_x ? num_tokens : 0),
          weights(random, tokens.size()) {
        threshold = sane ? random.pick({0.0f, 0.01f, 0.1f, 1.0f, 100.0f})
                         : random.pick({0.0f, 0.5f, -1.0f, NAN, INFINITY, -INFINITY, 1e-40f});
        if (can_panel(layout) && random.chance(70)) threshold = 0.0f;
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = random.between(0, (int64_t)num_x - 1);
        sane ? fill_inputs(random, weights.get(), weights.size()) : fill_wild(random, weights.get(), weights.size());
        for (int32_t c = 0; sane && layout.extra_row_bytes && c < layout.num_cols; c++) {
            const float value = random.real(-0.5f, 0.5f);
            std::memcpy(extra.get() + 4 * c, &value, 4);
        }
        for (int32_t r = 0; sane && r < layout.num_rows; r++)
            for (const PlacedPart* part : {&layout.gate, &layout.up, &layout.down}) make_sane(random, *part, row(*part, r));
    }
    bool has_rows() const { return layout.selector != Selector::none; }
    const uint8_t* row(const PlacedPart& part, int32_t row_idx) const {
        if (part.place == Place::selector) return selector.get() + (size_t)row_idx * layout.selector_row_bytes;
        return records.get() + (size_t)row_idx * layout.record_row_bytes;
    }
    uint8_t* row(const PlacedPart& part, int32_t row_idx) {
        return const_cast<uint8_t*>(static_cast<const Given*>(this)->row(part, row_idx));
    }
    PlainRow plain(const PlacedPart& part, int32_t row_idx) {
        return part.place == Place::none ? PlainRow{} : plain_row(part, row(part, row_idx));
    }
    // What is added to column `c` of a token's output.
    float bias(size_t c) const {
        float value = 0.0f;
        if (layout.extra_row_bytes) std::memcpy(&value, extra.get() + 4 * c, 4);
        return value;
    }
    ExpertWork work() const {
        return {&layout,      selector.get(), records.get(), threshold,  (int32_t)tokens.size(),
                tokens.get(), weights.get(),  nullptr,       extra.get()};
    }
};

// The same rows in pages, each an array of its own: the last ends with the rows.
class Paged {
  public:
    Paged(Random& random, const Exact<uint8_t>& rows, size_t row_bytes)
        : begin_(random.between(0, 99)), page_bytes_(random.between(row_bytes + 1, 2 * row_bytes + 100)) {
        const size_t end = begin_ + rows.size();
        for (size_t first = 0; rows.size() > 0 && first < end; first += page_bytes_) {
            const size_t stop = std::min(end, first + page_bytes_), before = std::min(row_bytes, first);
            Exact<uint8_t>& page = pages_.emplace_back(random, row_bytes + stop - first);
            const size_t from = std::max(first - before, begin_);
            if (from < stop) std::memcpy(page.get() + row_bytes + from - first, rows.get() + from - begin_, stop - from);
            places_.push_back(page.get() + row_bytes);
        }
    }
    Rows rows() const { return places_.empty() ? Rows() : Rows(places_.data(), page_bytes_, begin_); }

  private:
    size_t begin_, page_bytes_;
    std::deque<Exact<uint8_t>> pages_;
    std::vector<const uint8_t*> places_;
};

// The same rows in panels, each tile of 64 neurons where panels.h says.
class Panels {
  public:
    Panels(Random& random, const Given& given)
        : layout_(given.layout), selector_(random, given.selector.size()), records_(random, given.records.size()) {
        for (int32_t number = 0; number < layout_.num_rows / 64; number++) {
            uint8_t* selector = tile(selector_, layout_.selector_row_bytes, number);
            uint8_t* records = tile(records_, layout_.record_row_bytes, number);
            make_tile(layout_, given.selector.get(), given.records.get(), number, selector, records);
            const uint8_t* at[3] = {nullptr, selector, records};
            for (const PlacedPart* part : {&layout_.gate, &layout_.up}) check_rows(given, number, *part, at);
            check_down(given, number, at[2]);
        }
    }
    void give(ExpertWork* work) const {
        work->selector_panels = selector_.get();
        work->record_panels = records_.get();
    }

  private:
    static uint8_t* tile(Exact<uint8_t>& bytes, size_t row_bytes, size_t number) {
        if (bytes.size() == 0) return nullptr;
        uint8_t* begin = bytes.get() + 64 * row_bytes * number;
        while ((uintptr_t)begin % kLineBytes) begin++;
        return begin;
    }
    void check_rows(const Given& given, int32_t number, const PlacedPart& placed, const uint8_t** at) const {
        if (placed.place == Place::none) return;
        const uint8_t*& panel = at[(int)placed.place];
        for (int32_t first = 64 * number; first < 64 * (number + 1); first += 16) {
            const uint8_t* rows[16];
            for (int32_t r = 0; r < 16; r++) rows[r] = given.row(placed, first + r) + placed.offset;
            check_panel(placed.part, rows, panel);
            panel += 16 * (placed.part.code_bytes + 2 * placed.part.scale_bytes);
        }
    }
    // For each eight groups of columns: scales of all neurons, zeros of all, and then lines of eight neurons' 16 columns.
    void check_down(const Given& given, int32_t number, const uint8_t* at) const {
        const Part& part = layout_.down.part;
        for (int32_t first = 0; first < part.num_groups; first += 8) {
            const int32_t count = std::min(8, part.num_groups - first);
            const uint8_t* lines = at + 2 * 2 * 64 * count;
            for (int32_t r = 0; r < 64; r++) {
                const uint8_t* row = given.row(layout_.down, 64 * number + r) + layout_.down.offset;
                const uint8_t* scales = row + part.scales_at + 2 * first;
                require(std::memcmp(at + 2 * count * r, scales, 2 * count) == 0, "scales of down in panels");
                require(std::memcmp(at + 2 * count * (64 + r), scales + part.scale_bytes, 2 * count) == 0,
                        "zeros of down in panels");
                for (int32_t c = 0; c < 64 * count; c++) {
                    const uint8_t byte = lines[c / 16 * 512 + r / 8 * 64 + c % 16 * 4 + r % 4];
                    require((byte >> 4 * (r % 8 / 4) & 15) == plain_code(part, row, 64 * first + c), "a code of down");
                }
            }
            at = lines + 4 * 512 * count;
        }
    }

    const ExpertLayout& layout_;
    Exact<uint8_t> selector_, records_;
};

// What a selector tells of tokens.
struct Told {
    Exact<float> a;
    Exact<uint8_t> runs;
    Exact<int32_t> neurons;
    int32_t num_neurons = 0;

    Told(Random& random, size_t num_tokens, const ExpertLayout& layout)
        : a(random, num_tokens * layout.num_rows),
          runs(random, num_tokens * layout.num_rows),
          neurons(random, layout.num_rows) {}
};

// A neuron's rows, and what they do to an input that may be rounded to so many digits.
struct Neuron {
    const ExpertLayout& layout;
    int digits;
    PlainRow gate, up, down;

    Neuron(Given& given, int32_t j, int of_digits)
        : layout(given.layout),
          digits(of_digits),
          gate(given.plain(layout.gate, j)),
          up(given.plain(layout.up, j)),
          down(given.plain(layout.down, j)) {}

    // What the rows at a place say, times what is known.
    Near at(Place place, Near known, const float* x) const {
        if (layout.up.place == place) {
            const Near product = plain_dot(up, x, digits);
            known = product_of(known, layout.has_gate() ? factor_of(layout, product) : product);
        }
        if (layout.gate.place == place) known = product_of(known, activation_of(layout, plain_dot(gate, x, digits)));
        return layout.up.place == place && !layout.has_gate() ? activation_of(layout, known) : known;
    }
    Near a(const float* x) const { return at(Place::selector, exactly(1), x); }
    Near h(const Near& a, const float* x) const { return at(Place::record, a, x); }
};

void check_select(Given& given, int digits, const Exact<float>& x, const Told& found, size_t num_tokens) {
    const ExpertLayout& layout = given.layout;
    size_t f = layout.num_rows, d = layout.num_cols;
    int32_t count = 0;
    for (size_t j = 0; j < f; j++) {
        bool any = false;
        for (size_t t = 0; t < num_tokens; t++) any |= found.runs[t * f + j] != 0;
        if (any) require(count < found.num_neurons && found.neurons[count++] == (int32_t)j, "neurons that run");
    }
    require(count == found.num_neurons, "number of neurons that run");
    for (size_t i = 0; i < num_tokens * f; i++)
        require(found.runs[i] == (given.has_rows() ? runs_at(found.a[i], given.threshold) : 1), "which neurons run");
    if (!given.sane || !given.has_rows()) return;
    for (size_t j = 0; j < f; j++) {
        Neuron neuron(given, (int32_t)j, digits);
        for (size_t t = 0; t < num_tokens; t++) {
            Near a = neuron.a(x.get() + t * d);
            if (!a.holds(found.a[t * f + j]))
                fail("a[%zu, %zu] is %.9g, expected %.9g", t, j, found.a[t * f + j], a.value);
        }
    }
}

// y += factor * h * down row, of one neuron and one token.
void add_plain(std::vector<Near>& y, size_t begin, double factor, const Near& h, const PlainRow& down) {
    for (size_t c = 0; c < down.weights.size(); c++) {
        Near& to = y[begin + c];
        double size = std::fabs(h.value) + h.slack;
        to.value += factor * h.value * down.weights[c];
        to.slack += std::fabs(factor) * (h.slack * std::fabs(down.weights[c]) + 6e-6 * size * down.magnitudes[c]) + 1e-36;
    }
}

// How far a token's sums may be off because what neurons' rows are multiplied with is rounded: h times a
// row's scale, for each unit of columns, relative to the largest of some rows.
class RoundedSums {
  public:
    RoundedSums(const Pool& pool, const ExpertLayout& layout, size_t num_tokens)
        : d_(layout.num_cols),
          share_(rounding_share(pool.digits())),
          rounds_(pool.rounds() && !pool.are_tokens_alone() && num_tokens > kFewTokens && can_round(layout)),
          largest_(rounds_ ? num_tokens * d_ : 0),
          codes_(largest_.size()) {}

    void add(size_t token, const Near& h, const PlainRow& down) {
        const double size = std::fabs(h.value) + h.slack;
        for (size_t c = 0; rounds_ && size > 0 && c < d_; c++) {
            if (down.steps[c] == 0) continue;
            double& largest = largest_[token * d_ + c];
            largest = std::max(largest, size * down.steps[c]);
            codes_[token * d_ + c] += (std::fabs(down.weights[c]) + 1e-4 * down.magnitudes[c]) / down.steps[c];
        }
    }
    void widen(std::vector<Near>& y, size_t begin, double factor, size_t token) const {
        for (size_t c = 0; rounds_ && c < d_; c++) {
            const size_t place = token * d_ + c;
            y[begin + c].slack += std::fabs(factor) * (share_ * largest_[place] + kLeastRounded) * codes_[place];
        }
    }

  private:
    size_t d_;
    double share_;
    bool rounds_;
    std::vector<double> largest_, codes_;  // [tokens, d]
};

void check_outputs(const std::vector<Near>& expected, const Exact<float>& y, const char* name) {
    for (size_t i = 0; i < expected.size(); i++)
        if (!expected[i].holds(y[i]))
            fail("%s: y[%zu] is %.9g, expected %.9g within %.3g", name, i, y[i], expected[i].value, expected[i].slack);
}

// Some neurons, each once, of those that run for any token or of all: a runtime may bring more.
std::vector<int32_t> some_neurons(Random& random, const Told& told, int32_t num_rows) {
    std::vector<int32_t> chosen;
    const bool all = random.chance(20);
    const int percent = random.pick({1, 30, 100});
    for (int32_t j = 0; j < num_rows; j++) {
        const bool is_in = std::binary_search(told.neurons.get(), told.neurons.get() + told.num_neurons, j);
        if ((is_in || all) && random.chance(percent)) chosen.push_back(j);
    }
    for (size_t i = 0, any = random.chance(10); any && i < chosen.size(); i++)
        std::swap(chosen[i], chosen[random.between(0, (int64_t)chosen.size() - 1)]);
    return chosen;
}

// The records of these neurons, and bytes that are no numbers in place of all others.
void keep_records(const Given& given, const std::vector<int32_t>& neurons, Exact<uint8_t>& records) {
    const size_t row_bytes = given.layout.record_row_bytes;
    std::memset(records.get(), 0xff, records.size());
    for (size_t j : neurons) std::memcpy(records.get() + j * row_bytes, given.records.get() + j * row_bytes, row_bytes);
}

// The expert for all tokens, of some neurons that a selector has told of, whose records alone are there.
void run_part(Random& random, Pool& alone, Pool& several, Given& given, const Exact<float>& x, const Told& told,
              const std::vector<int64_t>& tokens, Counts& counts) {
    const ExpertLayout& layout = given.layout;
    const size_t f = layout.num_rows, d = layout.num_cols;
    const std::vector<int32_t> listed = some_neurons(random, told, layout.num_rows);
    Exact<int32_t> neurons(random, listed.size());
    std::copy(listed.begin(), listed.end(), neurons.get());
    Exact<uint8_t> records(random, given.records.size());
    keep_records(given, listed, records);
    Exact<float> weights(random, tokens.size());
    given.sane ? fill_inputs(random, weights.get(), weights.size()) : fill_wild(random, weights.get(), weights.size());
    static const int32_t none = 0;  // of no neurons: not null, which would ask the selector
    ExpertWork work = {&layout,       given.selector.get(), records.get(), given.threshold, (int32_t)tokens.size(),
                       tokens.data(), weights.get(),        nullptr,       given.extra.get()};
    work.a = told.a.get();
    work.runs = told.runs.get();
    work.neurons = listed.empty() ? &none : neurons.get();
    work.num_neurons = (int32_t)listed.size();
    Exact<float> y(random, x.size()), other(random, x.size());
    for (auto [pool, to] : {std::pair(&alone, &y), std::pair(&several, &other)}) {
        to->fill(0.0f);
        require(run_experts(*pool, &work, 1, x.get(), to->get()) == Outcome::done, "experts of neurons are done");
    }
    require(y.same_bits(other), "the same bits for any number of threads, of neurons");
    if (!given.sane) return;
    counts.compared++;
    std::vector<Near> expected(y.size());
    RoundedSums rounded(alone, layout, tokens.size());
    for (size_t i = 0; i < y.size(); i++) {
        const double bias = (double)weights[i / d] * given.bias(i % d);
        expected[i] = {bias, 1e-6 * std::fabs(bias)};
    }
    for (int32_t j : listed) {
        Neuron neuron(given, j, alone.digits());
        for (size_t t = 0; t < tokens.size(); t++) {
            if (!told.runs[t * f + j]) continue;
            const Near h = neuron.h(exactly(told.a[t * f + j]), x.get() + t * d);
            add_plain(expected, t * d, weights[t], h, neuron.down);
            rounded.add(t, h, neuron.down);
        }
    }
    for (size_t t = 0; t < tokens.size(); t++) rounded.widen(expected, t * d, weights[t], t);
    check_outputs(expected, y, "neurons");
}

// Selection for all tokens, by one thread and by several; then the expert of some neurons.
void run_selection(Random& random, Pool& alone, Pool& several, Given& given, const Exact<float>& x, size_t num_tokens,
                   Counts& counts) {
    const ExpertLayout& layout = given.layout;
    Told first(random, num_tokens, layout), second(random, num_tokens, layout);
    std::vector<int64_t> tokens(num_tokens);
    std::iota(tokens.begin(), tokens.end(), 0);
    for (auto [pool, to] : {std::pair(&alone, &first), std::pair(&several, &second)}) {
        SelectorWork work = {&layout,       given.selector.get(), given.threshold,  (int32_t)num_tokens,
                             tokens.data(), to->a.get(),          to->runs.get(),   to->neurons.get()};
        require(select_neurons(*pool, &work, 1, x.get()) == Outcome::done, "selection is done");
        to->num_neurons = work.num_neurons;
    }
    require(first.runs.same_bits(second.runs) && (!given.has_rows() || first.a.same_bits(second.a)),
            "the same bits for any number of threads, in selection");
    check_select(given, alone.digits(), x, first, num_tokens);
    if (given.has_rows()) run_part(random, alone, several, given, x, first, tokens, counts);
}

// y += the expert. Where it hangs on a rounding whether a neuron runs, both will do.
void add_expert(const Pool& pool, Given& given, const Exact<float>& x, std::vector<Near>& y) {
    size_t d = given.layout.num_cols;
    RoundedSums rounded(pool, given.layout, given.tokens.size());
    for (size_t i = 0; i < given.tokens.size(); i++)
        for (size_t c = 0; c < d; c++) {
            const double added = (double)given.weights[i] * given.bias(c);
            Near& to = y[given.tokens[i] * d + c];
            to = {to.value + added, to.slack + 1e-6 * std::fabs(added)};
        }
    for (int32_t j = 0; j < given.layout.num_rows; j++) {
        Neuron neuron(given, j, pool.digits());
        for (size_t i = 0; i < given.tokens.size(); i++) {
            const float* input = x.get() + given.tokens[i] * d;
            Near a = neuron.a(input), h = neuron.h(a, input), decides = given.has_rows() ? a : h;
            double size = std::fabs(decides.value);
            if (size + decides.slack < given.threshold) continue;
            if (size - decides.slack < given.threshold) h = {0, std::fabs(h.value) + h.slack};
            add_plain(y, given.tokens[i] * d, given.weights[i], h, neuron.down);
            rounded.add(i, h, neuron.down);
        }
    }
    for (size_t i = 0; i < given.tokens.size(); i++) rounded.widen(y, given.tokens[i] * d, given.weights[i], i);
}

// Selectors first, all at once, then the experts with what they told: the same bits.
void run_selected(Random& random, Pool& pool, std::vector<ExpertWork> works, const Exact<float>& x,
                  const Exact<float>& before, const Exact<float>& whole) {
    std::vector<SelectorWork> selectors;
    std::deque<Told> told;
    for (const ExpertWork& work : works) {
        Told& to = told.emplace_back(random, (size_t)work.num_tokens, *work.layout);
        selectors.push_back({work.layout, work.selector, work.threshold, work.num_tokens, work.tokens, to.a.get(),
                             to.runs.get(), to.neurons.get()});
    }
    int32_t count = (int32_t)works.size();
    require(select_neurons(pool, selectors.data(), count, x.get()) == Outcome::done, "selection is done");
    for (int32_t i = 0; i < count; i++) {
        if (works[i].layout->selector == Selector::none) continue;
        works[i].a = selectors[i].a;
        works[i].runs = selectors[i].runs;
        works[i].neurons = selectors[i].neurons;
        works[i].num_neurons = selectors[i].num_neurons;
    }
    Exact<float> y(random, x.size());
    y.copy_from(before);
    require(run_experts(pool, works.data(), count, x.get(), y.get()) == Outcome::done, "experts are done");
    require(y.same_bits(whole), "the same bits for neurons that were selected before");
}

// Rows in pages: the same bits.
void run_paged(Random& random, Pool& pool, const std::vector<Given>& experts, const Exact<float>& x,
               const Exact<float>& before, const Exact<float>& whole) {
    std::vector<ExpertWork> works;
    std::deque<Paged> pages;
    for (const Given& given : experts) {
        ExpertWork work = given.work();
        work.selector = pages.emplace_back(random, given.selector, given.layout.selector_row_bytes).rows();
        work.records = pages.emplace_back(random, given.records, given.layout.record_row_bytes).rows();
        works.push_back(work);
    }
    Exact<float> y(random, x.size());
    y.copy_from(before);
    require(run_experts(pool, works.data(), (int32_t)works.size(), x.get(), y.get()) == Outcome::done,
            "experts in pages are done");
    require(y.same_bits(whole), "the same bits for rows in pages");
}

// The same values from panels, of those experts that have them; all experts' are made and looked at.
void run_panels(Random& random, Pool& alone, Pool& several, const std::vector<Given>& experts,
                std::vector<ExpertWork> works, const Exact<float>& x, const Exact<float>& before,
                const Exact<float>& whole, bool sane) {
    std::deque<Panels> panels;
    for (size_t i = 0; i < experts.size(); i++)
        if (can_panel(experts[i].layout) && random.chance(80)) panels.emplace_back(random, experts[i]).give(&works[i]);
    if (panels.empty()) return;
    for (Pool* pool : {&alone, &several}) {
        Exact<float> y(random, x.size());
        y.copy_from(before);
        require(run_experts(*pool, works.data(), (int32_t)works.size(), x.get(), y.get()) == Outcome::done,
                "experts in panels are done");
        // A row that is left out because its neuron is zero may have a scale that is no number.
        for (size_t i = 0; i < y.size(); i++)
            if (!same_value(y[i], whole[i]) && (sane || !std::isnan(y[i])))
                fail("y[%zu] from panels is %.9g, from rows %.9g", i, y[i], whole[i]);
    }
}

void run_whole(Random& random, Pool& alone, Pool& several, std::vector<Given>& experts, const Exact<float>& x,
               Counts& counts) {
    std::vector<ExpertWork> works;
    for (const Given& given : experts) works.push_back(given.work());
    Exact<float> y(random, x.size()), other(random, x.size());
    fill_inputs(random, y.get(), y.size());
    other.copy_from(y);
    Exact<float> before(random, x.size());
    before.copy_from(y);
    std::vector<Near> expected(y.size());
    bool sane = true;
    for (const Given& given : experts) sane = sane && given.sane;
    for (size_t i = 0; i < y.size(); i++) expected[i] = {y[i], 1e-6 * std::fabs(y[i])};
    int32_t count = (int32_t)works.size();
    require(run_experts(alone, works.data(), count, x.get(), y.get()) == Outcome::done, "experts are done");
    require(run_experts(several, works.data(), count, x.get(), other.get()) == Outcome::done, "experts are done");
    require(y.same_bits(other), "the same bits for any number of threads");
    run_selected(random, several, works, x, before, y);
    run_paged(random, several, experts, x, before, y);
    run_panels(random, alone, several, experts, works, x, before, y, sane);
    if (!sane) return;
    for (Given& given : experts) add_expert(alone, given, x, expected);
    counts.compared++;
    check_outputs(expected, y, "experts");
}

}  // namespace

void expert_case(Random& random, Pools& pools, Counts& counts) {
    Sizes sizes = random_sizes(random);
    size_t set_idx = pools.any_set(random);
    const TwoPools both(random, pools, set_idx);
    Pool &alone = both.alone, &several = both.several;
    bool sane = random.chance(60);
    int64_t num_experts = random.chance(60) ? 1 : random.between(0, 6);
    std::vector<Given> experts;
    int64_t products = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        if (e) sizes.num_rows = (int32_t)random.between(1, sizes.num_rows);
        Numbers numbers = random_expert(random, sizes);
        ExpertLayout layout;
        const char* fault = read_expert_layout(numbers.values.data(), numbers.values.size(), &layout);
        fault == nullptr ? counts.accepted++ : counts.refused++;
        require(fault == nullptr || numbers.tampered, fault ? fault : "");
        if (fault != nullptr) continue;
        check_expert(layout, numbers.values);
        // Tampering may change the columns, and make an expert as large as a disk.
        products += (int64_t)layout.num_rows * layout.num_cols * std::max(sizes.num_tokens, 1);
        if (layout.num_cols != sizes.num_cols || layout.selector_bytes() + layout.records_bytes() > (size_t)kMaxBytes ||
            layout.extra_row_bytes > kMaxBytes ||
            products > 2 * kMaxProducts)
            continue;
        bool few = random.chance(60);
        experts.emplace_back(random, layout, sane && !numbers.tampered, sizes.num_tokens,
                             few ? random.between(0, 3) : random.between(0, sizes.num_tokens));
    }
    Exact<float> x(random, (size_t)sizes.num_tokens * sizes.num_cols);
    sane ? fill_inputs(random, x.get(), x.size()) : fill_wild(random, x.get(), x.size());
    for (Given& given : experts) run_selection(random, alone, several, given, x, sizes.num_tokens, counts);
    run_whole(random, alone, several, experts, x, counts);
}

}  // namespace moe_pack
