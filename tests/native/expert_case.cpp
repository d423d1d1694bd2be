// Experts: whole and in steps, by one thread and by several, against plain loops where the numbers are sane.
#include <algorithm>
#include <deque>
#include <numeric>

#include "cases.h"
#include "layouts.h"
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
    uint8_t* row(const PlacedPart& part, int32_t row_idx) {
        if (part.place == Place::selector) return selector.get() + (size_t)row_idx * layout.selector_row_bytes;
        return records.get() + (size_t)row_idx * layout.record_row_bytes;
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

// What the single steps give for an expert and tokens.
struct Steps {
    Exact<float> a, h, y;
    Exact<uint8_t> runs;
    Exact<int32_t> neurons;
    int32_t num_neurons = 0;

    Steps(Random& random, size_t num_tokens, const ExpertLayout& layout, size_t num_h)
        : a(random, num_tokens * layout.num_rows),
          h(random, num_tokens * num_h),
          y(random, num_tokens * layout.num_cols),
          runs(random, num_tokens * layout.num_rows),
          neurons(random, layout.num_rows) {
        y.fill(0.0f);
    }
};

// Some neurons in their order, and where their records lie: in place, or brought side by side in any order.
struct Brought {
    Exact<int32_t> neurons, places;
    Exact<uint8_t> records;

    Brought(Random& random, Given& given, const int32_t* from, int32_t count)
        : neurons(random, count), places(random, count), records(random, (size_t)count * given.layout.record_row_bytes) {
        size_t row_bytes = given.layout.record_row_bytes;
        for (int32_t i = 0; i < count; i++) {
            neurons[i] = from[i];
            places[i] = i;
        }
        for (int32_t i = count - 1; i > 0; i--) std::swap(places[i], places[random.between(0, i)]);
        for (int32_t i = 0; i < count; i++)
            std::memcpy(records.get() + places[i] * row_bytes, given.records.get() + neurons[i] * row_bytes, row_bytes);
    }
};

// A neuron's rows, and what they do to an input.
struct Neuron {
    const ExpertLayout& layout;
    PlainRow gate, up, down;

    Neuron(Given& given, int32_t j)
        : layout(given.layout),
          gate(given.plain(layout.gate, j)),
          up(given.plain(layout.up, j)),
          down(given.plain(layout.down, j)) {}

    // What the rows at a place say, times what is known.
    Near at(Place place, Near known, const float* x) const {
        if (layout.up.place == place) known = product_of(known, layout.has_gate() ? factor_of(layout.function, plain_dot(up, x))
                                                                                   : plain_dot(up, x));
        if (layout.gate.place == place) known = product_of(known, activation_of(layout.function, plain_dot(gate, x)));
        return layout.up.place == place && !layout.has_gate() ? activation_of(layout.function, known) : known;
    }
    Near a(const float* x) const { return at(Place::selector, exactly(1), x); }
    Near h(const Near& a, const float* x) const { return at(Place::record, a, x); }
};

void check_select(Given& given, const Exact<float>& x, const Steps& found, size_t num_tokens) {
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
        Neuron neuron(given, (int32_t)j);
        for (size_t t = 0; t < num_tokens; t++) {
            Near a = neuron.a(x.get() + t * d);
            if (!a.holds(found.a[t * f + j]))
                fail("a[%zu, %zu] is %.9g, expected %.9g", t, j, found.a[t * f + j], a.value);
        }
    }
}

void check_h(Given& given, const Exact<float>& x, const Steps& found, const Brought& brought, size_t num_tokens) {
    size_t n = brought.neurons.size(), f = given.layout.num_rows, d = given.layout.num_cols;
    for (size_t k = 0; k < n; k++) {
        int32_t j = brought.neurons[k];
        Neuron neuron(given, j);
        for (size_t t = 0; t < num_tokens; t++) {
            float h = found.h[t * n + k];
            Near expected = neuron.h(exactly(given.has_rows() ? found.a[t * f + j] : 1), x.get() + t * d);
            bool off = given.has_rows() ? !found.runs[t * f + j]
                                        : std::fabs(expected.value) - expected.slack < given.threshold;
            bool on = given.has_rows() ? !off : std::fabs(expected.value) + expected.slack >= given.threshold;
            if (!(off && h == 0.0f) && !(on && expected.holds(h)))
                fail("h[%zu, %zu] is %.9g, expected %.9g", t, k, h, expected.value);
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

void check_outputs(const std::vector<Near>& expected, const Exact<float>& y, const char* name) {
    for (size_t i = 0; i < expected.size(); i++)
        if (!expected[i].holds(y[i]))
            fail("%s: y[%zu] is %.9g, expected %.9g within %.3g", name, i, y[i], expected[i].value, expected[i].slack);
}

void require_same(const Steps& a, const Steps& b) {
    require(a.y.same_bits(b.y) && a.h.same_bits(b.h), "the same bits for any number of threads, in steps");
}

// Selection, then the neurons it names, then their down rows: by one thread and by several.
void run_steps(Random& random, Pool& alone, Pool& several, Given& given, const Exact<float>& x, size_t num_tokens,
               Counts& counts) {
    const ExpertLayout& layout = given.layout;
    int32_t tokens = (int32_t)num_tokens;
    Steps first(random, num_tokens, layout, 0);
    Steps second(random, num_tokens, layout, 0);
    std::vector<int64_t> in_order(num_tokens);
    std::iota(in_order.begin(), in_order.end(), 0);
    for (auto [pool, to] : {std::pair(&alone, &first), std::pair(&several, &second)}) {
        SelectorWork work = {&layout, given.selector.get(), given.threshold, tokens, in_order.data(), to->a.get(),
                             to->runs.get(), to->neurons.get()};
        require(select_neurons(*pool, &work, 1, x.get()) == Outcome::done, "selection is done");
        to->num_neurons = work.num_neurons;
    }
    require(first.runs.same_bits(second.runs) && (!given.has_rows() || first.a.same_bits(second.a)),
            "the same bits for any number of threads, in selection");
    check_select(given, x, first, num_tokens);
    // Those selected, or any others: a runtime may bring more.
    std::vector<int32_t> chosen;
    for (int32_t j = 0, all = random.chance(20); j < layout.num_rows; j++) {
        bool is_in = std::binary_search(first.neurons.get(), first.neurons.get() + first.num_neurons, j);
        if (is_in || all) chosen.push_back(j);
    }
    if (random.chance(10)) chosen.resize(random.between(0, (int64_t)chosen.size()));
    for (size_t i = 0, any = random.chance(10); any && i < chosen.size(); i++)
        chosen[i] = (int32_t)random.between(0, layout.num_rows - 1);
    Brought brought(random, given, chosen.data(), (int32_t)chosen.size());
    Steps one(random, num_tokens, layout, chosen.size()), other(random, num_tokens, layout, chosen.size());
    NeuronsWork work = {&layout, brought.records.get(), given.threshold, tokens, (int32_t)chosen.size(),
                        brought.neurons.get(), brought.places.get(), given.extra.get()};
    for (auto [pool, to] : {std::pair(&alone, &one), std::pair(&several, &other)}) {
        to->a.copy_from(first.a);
        to->runs.copy_from(first.runs);
        require(run_neurons(*pool, work, x.get(), to->a.get(), to->runs.get(), to->h.get()) == Outcome::done, "h is done");
        require(add_neurons(*pool, work, to->h.get(), to->y.get()) == Outcome::done, "y is done");
    }
    require_same(one, other);
    if (!given.sane) return;
    counts.compared++;
    check_h(given, x, one, brought, num_tokens);
    std::vector<Near> y(one.y.size());
    for (size_t i = 0; i < y.size(); i++) {
        const double bias = given.bias(i % layout.num_cols);
        y[i] = {bias, 1e-6 * std::fabs(bias)};
    }
    for (size_t k = 0; k < chosen.size(); k++) {
        Neuron neuron(given, chosen[k]);
        for (size_t t = 0; t < num_tokens; t++)
            add_plain(y, t * layout.num_cols, 1, exactly(one.h[t * chosen.size() + k]), neuron.down);
    }
    check_outputs(y, one.y, "steps");
}

// y += the expert. Where it hangs on a rounding whether a neuron runs, both will do.
void add_expert(Given& given, const Exact<float>& x, std::vector<Near>& y) {
    size_t d = given.layout.num_cols;
    for (size_t i = 0; i < given.tokens.size(); i++)
        for (size_t c = 0; c < d; c++) {
            const double added = (double)given.weights[i] * given.bias(c);
            Near& to = y[given.tokens[i] * d + c];
            to = {to.value + added, to.slack + 1e-6 * std::fabs(added)};
        }
    for (int32_t j = 0; j < given.layout.num_rows; j++) {
        Neuron neuron(given, j);
        for (size_t i = 0; i < given.tokens.size(); i++) {
            const float* input = x.get() + given.tokens[i] * d;
            Near a = neuron.a(input), h = neuron.h(a, input), decides = given.has_rows() ? a : h;
            double size = std::fabs(decides.value);
            if (size + decides.slack < given.threshold) continue;
            if (size - decides.slack < given.threshold) h = {0, std::fabs(h.value) + h.slack};
            add_plain(y, given.tokens[i] * d, given.weights[i], h, neuron.down);
        }
    }
}

// Selectors first, all at once, then the experts with what they told: the same bits.
void run_selected(Random& random, Pool& pool, std::vector<ExpertWork> works, const Exact<float>& x,
                  const Exact<float>& before, const Exact<float>& whole) {
    std::vector<SelectorWork> selectors;
    std::deque<Steps> told;
    for (const ExpertWork& work : works) {
        Steps& to = told.emplace_back(random, (size_t)work.num_tokens, *work.layout, 0);
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
    if (!sane) return;
    for (Given& given : experts) add_expert(given, x, expected);
    counts.compared++;
    check_outputs(expected, y, "experts");
}

}  // namespace

void expert_case(Random& random, Pools& pools, Counts& counts) {
    Sizes sizes = random_sizes(random);
    size_t set_idx = pools.any_set(random);
    Pool &alone = pools.alone(set_idx), &several = pools.several(random, set_idx);
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
    for (Given& given : experts) run_steps(random, alone, several, given, x, sizes.num_tokens, counts);
    run_whole(random, alone, several, experts, x, counts);
}

}  // namespace moe_pack
