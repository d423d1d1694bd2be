// The host's share of a GPU's experts: right requests against `run_experts`, and any numbers in what a GPU writes.
#include <algorithm>
#include <climits>
#include <cstring>
#include <deque>
#include <thread>

#include "cases.h"
#include "host_share.h"
#include "layouts.h"
#include "panels.h"

namespace moe_pack {
namespace {

// Experts of all layers, with their bytes, and the buffers of a share.
struct Given {
    ShareSizes sizes;
    std::vector<std::vector<ShareExpert>> layers;
    std::vector<Exact<uint8_t>> rows;
    Exact<float> x, weights, a, y;
    Exact<int32_t> experts, counts, neurons;

    Given(Random& random, const ShareSizes& s)
        : sizes(s),
          x(random, (size_t)s.num_tokens * s.d),
          weights(random, (size_t)s.num_tokens * s.k),
          a(random, (size_t)s.num_tokens * s.k * s.f),
          y(random, (size_t)s.num_tokens * s.d),
          experts(random, (size_t)s.num_tokens * s.k),
          counts(random, (size_t)s.num_tokens * s.num_places * s.k),
          neurons(random, (size_t)s.num_tokens * s.num_places * s.k * s.f) {}

    void add_expert(Random& random, const ExpertLayout& layout, size_t layer_idx) {
        const size_t selector_bytes = layout.selector == Selector::none ? 0 : layout.selector_bytes();
        rows.emplace_back(random, selector_bytes);
        const Rows selector(rows.back().get());
        rows.emplace_back(random, layout.records_bytes());
        const float threshold = can_panel(layout) ? 0.0f : random.pick({0.0f, 0.5f, NAN, INFINITY});
        layers[layer_idx].push_back({layout, selector, rows.back().get(), threshold});
    }
    ShareBuffers buffers() {
        return {x.get(), weights.get(), experts.get(), counts.get(), neurons.get(), a.get(), y.get()};
    }
    int32_t* list(int32_t at, int32_t p) { return neurons.get() + ((size_t)at * sizes.k + p) * sizes.f; }
    // Of a token's place: its layer's experts, the token's numbers, and its counts.
    std::vector<ShareExpert>& layer(int32_t at) { return layers[at % sizes.num_layers]; }
    size_t first(int32_t at) const { return (size_t)(at / sizes.num_places) * sizes.k; }
    int32_t* counts_of(int32_t at) { return counts.get() + (size_t)at * sizes.k; }
    float* y_of(int32_t at) { return y.get() + (size_t)(at / sizes.num_places) * sizes.d; }
};

// What a GPU asks for when it is right.
void ask(Random& random, Given& given, int32_t at) {
    const auto& layer = given.layer(at);
    int32_t* experts = given.experts.get() + given.first(at);
    for (int32_t p = 0; p < given.sizes.k; p++) {
        experts[p] = (int32_t)random.between(0, (int64_t)layer.size() - 1);
        const int32_t num_rows = layer[experts[p]].layout.num_rows;
        int32_t* list = given.list(at, p);
        int32_t count = 0;
        const int percent = random.pick({0, 10, 50, 100});
        for (int32_t i = 0; i < num_rows; i++)
            if (random.chance(percent)) list[count++] = i;
        given.counts_of(at)[p] = random.chance(30) ? kWholeExpert : count;
    }
}

// The same through `run_experts`.
void run_plainly(Random& random, Pool& pool, Given& given, int32_t at, Exact<float>& y) {
    const ShareSizes& sizes = given.sizes;
    const size_t first = given.first(at);
    std::vector<ExpertWork> works;
    std::deque<Exact<float>> a;
    std::deque<Exact<uint8_t>> runs;
    const int64_t token = 0;
    for (int32_t p = 0; p < sizes.k; p++) {
        const int32_t count = given.counts_of(at)[p];
        if (count == 0) continue;
        const ShareExpert& expert = given.layer(at)[given.experts[first + p]];
        ExpertWork work = {&expert.layout, expert.selector, expert.records,      expert.threshold,
                           1,              &token,          given.weights.get() + first + p};
        if (count != kWholeExpert) {
            work.neurons = given.list(at, p);
            work.num_neurons = count;
            if (expert.layout.selector != Selector::none) {
                work.a = a.emplace_back(random, expert.layout.num_rows).get();
                work.runs = runs.emplace_back(random, expert.layout.num_rows).get();
                // Where no neuron is below a threshold, sums may be over all of them; a share has lists alone.
                work.threshold = 1.0f;
            }
            for (int32_t i = 0; work.a && i < count; i++) {
                a.back()[work.neurons[i]] = given.a[(first + p) * sizes.f + i];
                runs.back()[work.neurons[i]] = 1;
            }
        }
        works.push_back(work);
    }
    y.fill(0.0f);
    require(run_experts(pool, works.data(), (int32_t)works.size(),
                        given.x.get() + (size_t)(at / sizes.num_places) * sizes.d, y.get()) == Outcome::done,
            "experts of lists are done");
}

bool is_zero(const float* y, int32_t d) {
    return std::all_of(y, y + d, [](float value) { return value == 0.0f; });
}

// Anything in a number that a GPU writes.
void tamper(Random& random, Given& given, int32_t at) {
    const ShareSizes& sizes = given.sizes;
    const int32_t p = (int32_t)random.between(0, sizes.k - 1);
    int32_t* places[] = {given.experts.get() + given.first(at) + p, given.counts_of(at) + p,
                         given.list(at, p) + random.between(0, sizes.f - 1)};
    int32_t& value = *places[random.between(0, 2)];
    value = random.chance(50) ? (int32_t)random.next()
                              : random.pick({INT_MIN, INT_MAX, -2, -1, 0, 1, sizes.f - 1, sizes.f, sizes.f + 1, value ^ 1});
}

bool is_right(Given& given, int32_t at) {
    const auto& layer = given.layer(at);
    for (int32_t p = 0; p < given.sizes.k; p++) {
        const int32_t count = given.counts_of(at)[p], expert_idx = given.experts[given.first(at) + p];
        if (count == 0) continue;
        if (expert_idx < 0 || expert_idx >= (int32_t)layer.size()) return false;
        const int32_t num_rows = layer[expert_idx].layout.num_rows, *list = given.list(at, p);
        if (count == kWholeExpert) continue;
        if (count < 0 || count > num_rows) return false;
        for (int32_t i = 0; i < count; i++)
            if (list[i] < 0 || list[i] >= num_rows || (i && list[i] <= list[i - 1])) return false;
    }
    return true;
}

}  // namespace

void share_case(Random& random, Pools& pools, Counts& counts) {
    Sizes sizes = random_sizes(random);
    sizes.num_tokens = 1;
    const size_t set_idx = pools.any_set(random);
    Pool &alone = pools.alone(set_idx), &several = pools.several(random, set_idx);
    const auto num_layers = (int32_t)random.between(1, 3);
    const ShareSizes share_sizes = {sizes.num_cols, (int32_t)random.between(1, 4),
                                    sizes.num_rows + (int32_t)random.between(0, 3), num_layers,
                                    (int32_t)random.between(1, 2), num_layers * (int32_t)random.between(1, 2)};
    Given given(random, share_sizes);
    given.layers.resize(num_layers);
    given.rows.reserve(64);
    for (int32_t layer_idx = 0; layer_idx < num_layers; layer_idx++)
        for (int64_t left = random.between(1, 3); left > 0; left--) {
            Sizes of = sizes;
            if (left > 1 && random.chance(50)) of.num_rows = (int32_t)random.between(1, sizes.num_rows);
            Numbers numbers = random_expert(random, of);
            while (numbers.tampered) numbers = random_expert(random, of);
            ExpertLayout layout;
            require(read_expert_layout(numbers.values.data(), numbers.values.size(), &layout) == nullptr, "a layout");
            layout.extra_row_bytes = 0;
            given.add_expert(random, layout, layer_idx);
        }
    random.chance(50) ? fill_inputs(random, given.x.get(), given.x.size()) : fill_wild(random, given.x.get(), given.x.size());
    fill_inputs(random, given.weights.get(), given.weights.size());
    fill_inputs(random, given.a.get(), given.a.size());
    HostShare share(several, share_sizes, given.layers, given.buffers());
    Exact<float> expected(random, share_sizes.d);
    for (int round = 0; round < 4; round++) {
        const auto at = (int32_t)random.between(0, share_sizes.num_tokens * share_sizes.num_places - 1);
        ask(random, given, at);
        for (int64_t times = random.chance(50) ? random.between(1, 3) : 0; times > 0; times--) tamper(random, given, at);
        if (random.chance(50))
            share.compute(at);
        else
            std::thread([&] { share.compute(at); }).join();
        const HostShare::Fault fault = share.take_fault();
        const bool right = is_right(given, at);
        right ? counts.accepted++ : counts.refused++;
        require(right == (fault.fault == ShareFault::none), "what is wrong is a fault, and nothing else");
        require(right || (fault.layer_idx == at % num_layers && fault.expert_idx < share_sizes.k), "the place of a fault");
        if (right)
            run_plainly(random, alone, given, at, expected);
        else
            require(is_zero(given.y_of(at), share_sizes.d), "the output of a fault is zero");
        if (right)
            require(std::memcmp(given.y_of(at), expected.get(), sizeof(float) * share_sizes.d) == 0,
                    "a share has the bits of its experts");
        require(share.take_fault().fault == ShareFault::none, "a fault is told once");
    }
    const ShareCounts computed = share.counts();
    require(computed.experts >= 0 && computed.neurons >= 0 && computed.record_bytes >= 0 && computed.busy_ns >= 0,
            "what is counted is not negative");
}

}  // namespace moe_pack
