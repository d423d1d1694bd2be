// The search through a trellis, written once for every instruction set. `Lanes` computes on 16 floats or integers.
//
// Included by one source file for each instruction set, after its `Lanes`. All names have internal linkage (vector.h
// says why). Every sum is in a fixed order, and nothing is fused.
#pragma once

#include "trellis_search.h"

namespace moe_pack {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kLanes = 16;

struct PlainLanes {
    struct Floats {
        float at[kLanes];
    };
    struct Ints {
        int32_t at[kLanes];
    };
    using Mask = Ints;
    template <class To, class Compute>
    static To each(Compute compute) {
        To result;
        for (int32_t i = 0; i < kLanes; ++i) result.at[i] = compute(i);
        return result;
    }
    static Floats load(const float* from) {
        return each<Floats>([&](int32_t i) { return from[i]; });
    }
    static Ints load(const int32_t* from) {
        return each<Ints>([&](int32_t i) { return from[i]; });
    }
    static Ints load(const uint8_t* from) {
        return each<Ints>([&](int32_t i) { return int32_t(from[i]); });
    }
    static void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }
    static void store(int32_t* to, Ints value) { __builtin_memcpy(to, &value, sizeof value); }
    static void store(uint8_t* to, Ints value) {  // the lowest bytes
        for (int32_t i = 0; i < kLanes; ++i) to[i] = uint8_t(value.at[i]);
    }
    static Floats all(float value) {
        return each<Floats>([&](int32_t) { return value; });
    }
    static Ints all(int32_t value) {
        return each<Ints>([&](int32_t) { return value; });
    }
    static Floats add(Floats a, Floats b) {
        return each<Floats>([&](int32_t i) { return a.at[i] + b.at[i]; });
    }
    static Floats subtract(Floats a, Floats b) {
        return each<Floats>([&](int32_t i) { return a.at[i] - b.at[i]; });
    }
    static Floats times(Floats a, Floats b) {
        return each<Floats>([&](int32_t i) { return a.at[i] * b.at[i]; });
    }
    static Floats magnitude(Floats a) {
        return each<Floats>([&](int32_t i) { return __builtin_fabsf(a.at[i]); });
    }
    static Mask less(Floats a, Floats b) {
        return each<Mask>([&](int32_t i) { return a.at[i] < b.at[i] ? -1 : 0; });
    }
    template <class Values>
    static Values choose(Mask mask, Values yes, Values no) {
        return each<Values>([&](int32_t i) { return mask.at[i] != 0 ? yes.at[i] : no.at[i]; });
    }
    static Ints exclusive_or(Ints a, Ints b) {
        return each<Ints>([&](int32_t i) { return a.at[i] ^ b.at[i]; });
    }
    static Ints masked(Ints a, int32_t bits) {
        return each<Ints>([&](int32_t i) { return a.at[i] & bits; });
    }
    static Ints shifted(Ints a, int32_t bits) {  // to the right
        return each<Ints>([&](int32_t i) { return a.at[i] >> bits; });
    }
    // table[i & 15]
    template <class Values>
    static Values permute(Values table, Ints index) {
        return each<Values>([&](int32_t i) { return table.at[index.at[i] & 15]; });
    }
    // The same of 32 values.
    static Floats permute(Floats first, Floats second, Ints index) {
        return each<Floats>([&](int32_t i) {
            return index.at[i] & 16 ? second.at[index.at[i] & 15] : first.at[index.at[i] & 15];
        });
    }
    static int32_t least(const int32_t* keys) {
        int32_t found = keys[0];
        for (int32_t i = 1; i < kStates; ++i) found = keys[i] < found ? keys[i] : found;
        return found;
    }
    // How many keys are below a limit.
    static int32_t count(const int32_t* keys, int32_t limit) {
        int32_t found = 0;
        for (int32_t i = 0; i < kStates; ++i) found += keys[i] < limit;
        return found;
    }
    // Writes the costs and origins of the keys below a limit, in their order, and of the first `ties` equal to it; up to
    // 16 values more than that are written. Returns how many.
    static int32_t gather(const int32_t* keys, const int32_t* origins, int32_t limit, int32_t ties, int32_t* costs,
                          int32_t* kept) {
        int32_t found = 0;
        for (int32_t i = 0; i < kStates; ++i) {
            const bool tied = keys[i] == limit && ties > 0;
            ties -= tied;
            costs[found] = keys[i];
            kept[found] = origins[i] | i;
            found += tied || keys[i] < limit;
        }
        return found;
    }
};

// The paths of one row that go on, in the order of their states; those after `count` cost infinity.
template <int32_t kPaths>
struct Survivors {
    int32_t count;
    int32_t spread;  // between the least cost and the most, as bits, at a step that had to choose
    alignas(64) int32_t costs[kPaths + kLanes];    // floats, not negative: their bits are in the same order
    alignas(64) int32_t origins[kPaths + kLanes];  // the number of the path before, then the last three nibbles
    alignas(64) float targets[2][kPaths];          // of the next step; until it begins, what errors add to them
};

// Of each state after a step, the cheapest path.
struct Candidates {
    alignas(64) int32_t costs[kStates];
    alignas(64) int32_t origins[kStates];  // as of survivors, but the last two nibbles, which say the state
};

inline float as_float(int32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// One row. `kFirst`, `kSecond`: levels of a set of a step's first weight, and of its second.
template <class Lanes, int32_t kFirst, int32_t kSecond, bool kFed>
struct Row {
    using Floats = typename Lanes::Floats;
    using Ints = typename Lanes::Ints;
    using Mask = typename Lanes::Mask;
    static constexpr int32_t kPaths = kFed ? kFedPaths : kFreePaths;
    static constexpr int32_t kVectors = kPaths / kLanes;

    const TrellisWork& work;
    const TrellisWorkspace& workspace;
    const float *weights, *scales;
    Ints newest, middle, oldest;  // hashes
    Survivors<kPaths> survivors;

    // What is common to all paths at a step.
    struct Step {
        Floats first[kFirst], second[kSecond];  // scaled levels of the sets
        float first_weight, second_weight, first_importance, second_importance, own;
    };

    // The level nearest to a target, of equals the first.
    struct Nearest {
        Floats miss, value;
        Ints number;  // in its bits of a code
    };

    template <int32_t kCount, int32_t kBit, class Level>
    static Nearest nearest(Floats target, Level level) {
        Nearest found = {Lanes::subtract(target, level(0)), level(0), Lanes::all(int32_t(0))};
        for (int32_t u = 1; u < kCount; ++u) {
            const Floats value = level(u), miss = Lanes::subtract(target, value);
            const Mask nearer = Lanes::less(Lanes::magnitude(miss), Lanes::magnitude(found.miss));
            found.miss = Lanes::choose(nearer, miss, found.miss);
            found.value = Lanes::choose(nearer, value, found.value);
            found.number = Lanes::choose(nearer, Lanes::all(u << kBit), found.number);
        }
        return found;
    }

    static Floats weighted(float importance, Floats miss) {
        return Lanes::times(Lanes::times(Lanes::all(importance), miss), miss);
    }

    size_t columns() const { return 2 * size_t(work.num_steps); }

    Step step_of(int32_t t) const {
        Step step;
        for (int32_t u = 0; u < kFirst; ++u)
            step.first[u] = Lanes::times(Lanes::all(scales[2 * t]), Lanes::load(work.levels[0] + u * kNibbles));
        for (int32_t u = 0; u < kSecond; ++u)
            step.second[u] = Lanes::times(Lanes::all(scales[2 * t + 1]), Lanes::load(work.levels[1] + u * kNibbles));
        step.first_weight = weights[2 * t];
        step.second_weight = weights[2 * t + 1];
        step.first_importance = work.importance[2 * t];
        step.second_importance = work.importance[2 * t + 1];
        step.own = kFed ? work.factor[2 * size_t(t) * columns() + 2 * t + 1] : 0.0f;
        return step;
    }

    void start(uint8_t state) {
        for (int32_t i = 0; i < kPaths; ++i) survivors.costs[i] = kInfinityBits;
        for (int32_t i = 0; i < kPaths; ++i) survivors.origins[i] = 0;
        survivors.costs[0] = 0;
        survivors.origins[0] = state;
        survivors.count = 1;
        survivors.spread = 1;
        for (auto& targets : survivors.targets)
            for (float& target : targets) target = 0.0f;
        if (kFed) __builtin_memset(workspace.errors, 0, sizeof(float) * kOwnSteps * 2 * kFedPaths);
    }

    void set_targets(int32_t t) {
        for (int32_t half = 0; half < 2; ++half) {
            const float target = workspace.targets[2 * t + half];
            for (float& sum : survivors.targets[half]) sum = kFed ? target + sum : target;
        }
    }

    // The survivor of least cost, of equals the first.
    int32_t cheapest() const {
        int32_t best = 0;
        for (int32_t i = 1; i < survivors.count; ++i)
            best = survivors.costs[i] < survivors.costs[best] ? i : best;
        return best;
    }

    // Of step t - kOwnSteps, the best path's errors correct later targets from now on, and paths that made others end.
    void settle(int32_t t) {
        const float* made = workspace.errors + t % kOwnSteps * 2 * kFedPaths;
        const int32_t best = cheapest();
        const float first = made[best], second = made[kFedPaths + best];
        for (int32_t i = 0; i < kPaths; ++i) {
            const bool same = (made[i] == first) & (made[kFedPaths + i] == second);
            survivors.costs[i] = same ? survivors.costs[i] : kInfinityBits;
        }
        const float* factor = work.factor + 2 * size_t(t - kOwnSteps) * columns();
        const float* next = factor + columns();
        for (size_t j = 2 * size_t(t); j < columns(); ++j)
            workspace.targets[j] = (workspace.targets[j] + first * factor[j]) + second * next[j];
    }

    // The cheapest path to each state.
    void extend(const Step& step, Candidates* candidates) const {
        for (int32_t i = 0; i < kStates; ++i) candidates->costs[i] = kInfinityBits;
        Floats first, second;
        if (!kFed) {
            first = weighted(step.first_importance, nearest_first(step, Lanes::all(survivors.targets[0][0])).miss);
            const Floats target = Lanes::all(survivors.targets[1][0]);
            const auto level = [&](int32_t u) { return step.second[u]; };
            second = weighted(step.second_importance, nearest<kSecond, 6>(target, level).miss);
        }
        for (int32_t i = 0; i < survivors.count; ++i) {
            const int32_t state = survivors.origins[i] % kStates, last = state % kNibbles, before = state / kNibbles;
            const Floats cost = Lanes::all(as_float(survivors.costs[i]));
            const Ints sets = Lanes::exclusive_or(
                newest, Lanes::all(int32_t(work.hash[kNibbles + last] ^ work.hash[2 * kNibbles + before])));
            const Ints second_sets = Lanes::shifted(sets, 4);
            Floats sum;
            if (kFed) {
                const Nearest chosen = nearest_first(step, Lanes::all(survivors.targets[0][i]));
                const Floats base = Lanes::add(cost, weighted(step.first_importance, chosen.miss));
                const Floats error = Lanes::subtract(Lanes::all(step.first_weight), chosen.value);
                const Floats target = Lanes::add(Lanes::all(survivors.targets[1][i]),
                                                 Lanes::times(error, Lanes::all(step.own)));
                const Floats miss = nearest_second(step, Lanes::permute(target, sets), second_sets).miss;
                sum = Lanes::add(Lanes::permute(base, sets), weighted(step.second_importance, miss));
            } else {
                sum = Lanes::add(Lanes::add(cost, Lanes::permute(first, sets)), Lanes::permute(second, second_sets));
            }
            float* costs = reinterpret_cast<float*>(candidates->costs) + last * kNibbles;
            int32_t* origins = candidates->origins + last * kNibbles;
            const Floats best = Lanes::load(costs);
            const Mask better = Lanes::less(sum, best);
            Lanes::store(costs, Lanes::choose(better, sum, best));
            Lanes::store(origins, Lanes::choose(better, Lanes::all(i << 12 | before << 8), Lanes::load(origins)));
        }
    }

    static Nearest nearest_first(const Step& step, Floats target) {
        return nearest<kFirst, 4>(target, [&](int32_t u) { return step.first[u]; });
    }

    static Nearest nearest_second(const Step& step, Floats target, Ints sets) {
        return nearest<kSecond, 6>(target, [&](int32_t u) { return Lanes::permute(step.second[u], sets); });
    }

    // The cheapest candidates survive, of equals those of lower states.
    void select(const Candidates& candidates) {
        const int32_t* keys = candidates.costs;
        int32_t limit = kInfinityBits, ties = 0;
        int32_t above = Lanes::count(keys, limit);
        if (above > kPaths) {
            // Fewer than kPaths keys are below `low`, and `above` > kPaths below `high`.
            const int32_t least = Lanes::least(keys);
            int64_t low = least, high = limit, guess = int64_t(least) + survivors.spread;
            int32_t below = 0;
            for (bool linear = true;; linear = !linear) {
                if (guess <= low) guess = low + 1;
                if (guess >= high) guess = high - 1;
                if (guess == low) {  // keys of `low` are tied
                    limit = int32_t(low);
                    ties = kPaths - below;
                    break;
                }
                const int32_t found = Lanes::count(keys, int32_t(guess));
                if (found == kPaths) {
                    limit = int32_t(guess);
                    break;
                }
                if (found < kPaths) {
                    low = guess;
                    below = found;
                } else {
                    high = guess;
                    above = found;
                }
                if (high == kInfinityBits)
                    guess = least + 2 * (guess - least);
                else if (linear)
                    guess = low + (high - low) * (kPaths - below) / (above - below);
                else
                    guess = low + (high - low) / 2;
            }
            const int64_t spread = int64_t(limit) - least;
            survivors.spread = spread < 1 ? 1 : spread < kInfinityBits ? int32_t(spread) : kInfinityBits;
        }
        survivors.count = Lanes::gather(keys, candidates.origins, limit, ties, survivors.costs, survivors.origins);
        if (survivors.count == 0) {  // costs that are no numbers: any path is as good
            survivors.costs[0] = kInfinityBits;
            survivors.origins[0] = 0;
            survivors.count = 1;
        }
        for (int32_t i = survivors.count; i < kPaths; ++i) {
            survivors.costs[i] = kInfinityBits;
            survivors.origins[i] = 0;
        }
    }

    // The codes of a step's survivors, and their errors, [2, kPaths].
    void read(int32_t t, const Step& step, float* errors) const {
        uint8_t *parents = workspace.parents + size_t(t) * kFreePaths, *codes = workspace.codes + size_t(t) * kFreePaths;
        const Floats first = Lanes::load(survivors.targets[0]), second = Lanes::load(survivors.targets[1]);
        for (int32_t v = 0; v < kVectors; ++v) {
            const Ints origin = Lanes::load(survivors.origins + v * kLanes), from = Lanes::shifted(origin, 12);
            const Ints sets = Lanes::exclusive_or(
                Lanes::exclusive_or(Lanes::permute(newest, origin), Lanes::permute(middle, Lanes::shifted(origin, 4))),
                Lanes::permute(oldest, Lanes::shifted(origin, 8)));
            const Floats target = kFed ? Lanes::permute(first, Lanes::load(survivors.targets[0] + kLanes), from) : first;
            const Nearest low = nearest<kFirst, 4>(target, [&](int32_t u) { return Lanes::permute(step.first[u], sets); });
            const Floats error = Lanes::subtract(Lanes::all(step.first_weight), low.value);
            Floats next = second;
            if (kFed)
                next = Lanes::add(Lanes::permute(second, Lanes::load(survivors.targets[1] + kLanes), from),
                                  Lanes::times(error, Lanes::all(step.own)));
            const Nearest high = nearest_second(step, next, Lanes::shifted(sets, 4));
            if (kFed) {
                Lanes::store(errors + v * kLanes, error);
                Lanes::store(errors + kPaths + v * kLanes,
                             Lanes::subtract(Lanes::all(step.second_weight), high.value));
            }
            Lanes::store(parents + v * kLanes, from);
            const Ints numbers = Lanes::exclusive_or(low.number, high.number);
            Lanes::store(codes + v * kLanes, Lanes::exclusive_or(Lanes::masked(origin, kNibbles - 1), numbers));
        }
    }

    // The errors of steps before t go on with their paths; they are added up for the targets of step t + 1.
    void carry(int32_t t, const float* made) {
        const float* factor = workspace.factor + size_t(t + 1) * kOwnSteps * 4;
        const Ints from[2] = {Lanes::shifted(Lanes::load(survivors.origins), 12),
                              Lanes::shifted(Lanes::load(survivors.origins + kLanes), 12)};
        Floats sums[2][2][2];  // by half of the step, half of the earlier step, vector
        for (auto& half : sums)
            for (auto& earlier : half) earlier[0] = earlier[1] = Lanes::all(0.0f);
        const int32_t num_slots = t < kOwnSteps ? t : kOwnSteps;
        for (int32_t slot = 0; slot < num_slots; ++slot) {
            for (int32_t earlier = 0; earlier < 2; ++earlier) {
                float* errors = workspace.errors + (2 * slot + earlier) * kFedPaths;
                const Floats first = Lanes::load(errors), second = Lanes::load(errors + kLanes);
                const float* times = factor + 4 * slot + 2 * earlier;
                for (int32_t v = 0; v < 2; ++v) {
                    const Floats carried = Lanes::permute(first, second, from[v]);
                    Lanes::store(errors + v * kLanes, carried);
                    for (int32_t half = 0; half < 2; ++half)
                        sums[half][earlier][v] =
                            Lanes::add(sums[half][earlier][v], Lanes::times(carried, Lanes::all(times[half])));
                }
            }
        }
        const float* next = work.factor + 2 * size_t(t) * columns() + 2 * (t + 1);
        float* slot = workspace.errors + t % kOwnSteps * 2 * kFedPaths;
        for (int32_t v = 0; v < 2; ++v) {
            const Floats first = Lanes::load(made + v * kLanes), second = Lanes::load(made + kPaths + v * kLanes);
            for (int32_t half = 0; half < 2; ++half) {
                Floats sum = Lanes::add(sums[half][0][v], sums[half][1][v]);
                sum = Lanes::add(sum, Lanes::times(first, Lanes::all(next[half])));
                sum = Lanes::add(sum, Lanes::times(second, Lanes::all(next[columns() + half])));
                Lanes::store(survivors.targets[half] + v * kLanes, sum);
            }
            Lanes::store(slot + v * kLanes, first);
            Lanes::store(slot + kFedPaths + v * kLanes, second);
        }
    }

    // The codes of the cheapest path, and the levels that a reader finds for them.
    void trace(int32_t row) const {
        uint8_t* codes = work.codes + size_t(row) * work.num_kept;
        float* values = work.values + size_t(row) * 2 * work.num_kept;
        int32_t path = cheapest();
        for (int32_t t = work.num_steps - 1; t >= 0; --t) {
            if (t < work.num_kept) codes[t] = workspace.codes[size_t(t) * kFreePaths + path];
            path = workspace.parents[size_t(t) * kFreePaths + path];
        }
        int32_t state = work.starts[row];
        for (int32_t t = 0; t < work.num_kept; ++t) {
            const int32_t code = codes[t], nibble = code % kNibbles;
            const uint8_t *middle_hash = work.hash + kNibbles, *oldest_hash = middle_hash + kNibbles;
            const int32_t hash = work.hash[nibble] ^ middle_hash[state % kNibbles] ^ oldest_hash[state / kNibbles];
            // Other threads of the caller may write codes meanwhile.
            const int32_t low = (code >> 4 & 3) % kFirst, high = (code >> 6) % kSecond;
            values[2 * t] = work.levels[0][low * kNibbles + hash % kNibbles];
            values[2 * t + 1] = work.levels[1][high * kNibbles + hash / kNibbles];
            state = state % kNibbles * kNibbles + nibble;
        }
        work.ends[row] = uint8_t(state);
    }

    void search(int32_t row) {
        newest = Lanes::load(work.hash);
        middle = Lanes::load(work.hash + kNibbles);
        oldest = Lanes::load(work.hash + 2 * kNibbles);
        if (work.num_steps > 0)
            __builtin_memcpy(workspace.targets, work.targets + size_t(row) * columns(), sizeof(float) * columns());
        start(work.starts[row]);
        Candidates candidates;
        alignas(64) float errors[2 * kPaths];
        for (int32_t t = 0; t < work.num_steps; ++t) {
            if (kFed && t >= kOwnSteps) settle(t);
            set_targets(t);
            const Step step = step_of(t);
            extend(step, &candidates);
            select(candidates);
            read(t, step, errors);
            if (kFed && t + 1 < work.num_steps) carry(t, errors);
        }
        trace(row);
    }
};

template <class Lanes, int32_t kFirst, int32_t kSecond, bool kFed>
void search_fed(const TrellisWork& work, const TrellisWorkspace& workspace) {
    for (int32_t row = 0; row < work.num_rows; ++row) {
        const size_t at = size_t(row) * 2 * work.num_steps;
        Row<Lanes, kFirst, kSecond, kFed> paths = {work, workspace, work.weights + at, work.scales + at, {}, {}, {}, {}};
        paths.search(row);
    }
}

template <class Lanes, int32_t kFirst, int32_t kSecond>
void search_levels(const TrellisWork& work, const TrellisWorkspace& workspace) {
    if (work.factor != nullptr)
        search_fed<Lanes, kFirst, kSecond, true>(work, workspace);
    else
        search_fed<Lanes, kFirst, kSecond, false>(work, workspace);
}

template <class Lanes>
void search_rows(const TrellisWork& work, const TrellisWorkspace& workspace) {
    const int32_t first = work.num_levels[0], second = work.num_levels[1];
    if (second == 1) return search_levels<Lanes, 1, 1>(work, workspace);
    if (first == 1) return search_levels<Lanes, 1, 2>(work, workspace);
    if (second == 2) return search_levels<Lanes, 2, 2>(work, workspace);
    if (first == 2) return search_levels<Lanes, 2, 4>(work, workspace);
    return search_levels<Lanes, 4, 4>(work, workspace);
}

}  // namespace
}  // namespace moe_pack
