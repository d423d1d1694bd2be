// The search through a trellis, written once for every instruction set. `Lanes` has what compilers do not vectorise well.
//
// A state is 7 bits, the newest highest. A column adds `bits` to it: from parent groups of 2^bits states that differ in
// their lowest (oldest) bits alone, of which one path goes on, to children of the same group number in their lowest bits.
// All names have internal linkage (vector.h says why). Every sum is in a fixed order, and nothing is fused.
#pragma once

#include <cstddef>
#include <cstdint>

#include "trellis_search.h"

namespace moe_pack {
namespace {

constexpr int32_t kStateBits = 7;
constexpr int32_t kLanes = 16;
constexpr int32_t kSums = 4;  // slot s is added up in sum s % 4

constexpr int32_t num_parents(int bits) { return kStates >> bits; }
constexpr int32_t whole_lanes(int32_t count) { return count < kLanes ? kLanes : count; }

// One row's paths.
struct Paths {
    alignas(64) float costs[kStates];
    alignas(64) float newest[kStates];  // errors of the last column
    int32_t num_cols;
    const TrellisWork* work;
    const TrellisRoom* room;
    const float *weights, *scales, *importance;
};

// What a step's parents are told: the cheapest path's cost, which of the group's states it comes from, its target.
template <int kBits>
struct Parents {
    alignas(64) float costs[whole_lanes(num_parents(kBits))];
    alignas(64) int32_t oldest[whole_lanes(num_parents(kBits))];
    alignas(64) float targets[whole_lanes(num_parents(kBits))];
};

struct PlainLanes {
    // The cheapest of each group of 2^kBits costs, the first of equal ones.
    template <int kBits>
    static void choose(const float* costs, Parents<kBits>* parents) {
        for (int32_t i = 0; i < num_parents(kBits); ++i) {
            const float* group = costs + (i << kBits);
            float best = group[0];
            int32_t oldest = 0;
            for (int32_t a = 1; a < 1 << kBits; ++a) {
                oldest = group[a] < best ? a : oldest;
                best = group[a] < best ? group[a] : best;
            }
            parents->costs[i] = best;
            parents->oldest[i] = oldest;
        }
    }

    // Errors in `num_slots` slots (a multiple of kSums) go on to `kTo` parents from those of `kFrom` that `sources` says;
    // sums[i] = the sum of errors times `factor`, by slots.
    template <int kFrom, int kTo>
    static void carry(float* errors, const float* factor, int32_t num_slots, const int32_t* sources, float* sums) {
        float added[kSums][kTo] = {};
        for (int32_t slot = 0; slot < num_slots; slot += kSums) {
            for (int32_t part = 0; part < kSums; ++part) {
                float* held = errors + (slot + part) * kMostParents;
                float carried[kTo];
                for (int32_t i = 0; i < kTo; ++i) {
                    carried[i] = held[sources[i]];
                }
                for (int32_t i = 0; i < kTo; ++i) {
                    held[i] = carried[i];
                    added[part][i] += carried[i] * factor[slot + part];
                }
            }
        }
        for (int32_t i = 0; i < kTo; ++i) {
            sums[i] = (added[0][i] + added[1][i]) + (added[2][i] + added[3][i]);
        }
    }

    // The first of the lowest costs.
    static int32_t cheapest(const float* costs) {
        int32_t best = 0;
        for (int32_t state = 1; state < kStates; ++state) {
            best = costs[state] < costs[best] ? state : best;
        }
        return best;
    }
};

// The error of the column that is now kSurvivorColumns back is the best path's: its corrections join the targets of
// columns from t on, and paths that made another end.
template <int kPrevious, class Lanes>
void settle(Paths* paths, int32_t t) {
    constexpr int32_t kGroups = num_parents(kPrevious);
    const float* __restrict made = paths->room->errors + (t % kSurvivorColumns) * kMostParents;
    const float kept = made[Lanes::cheapest(paths->costs) & (kGroups - 1)];
    float* __restrict costs = paths->costs;
    for (int32_t first = 0; first < kStates; first += kGroups) {
        for (int32_t i = 0; i < kGroups; ++i) {
            costs[first + i] = made[i] == kept ? costs[first + i] : __builtin_inff();
        }
    }
    const float* __restrict factor = paths->work->factor + size_t(t - kSurvivorColumns) * paths->num_cols;
    float* __restrict targets = paths->room->targets;
    for (int32_t j = t; j < paths->num_cols; ++j) {
        targets[j] += kept * factor[j];
    }
}

// Each parent's target: the column's, and the corrections of its path's own errors.
template <int kBits, int kPrevious, class Lanes>
void correct(Paths* paths, int32_t t, Parents<kBits>* parents) {
    constexpr int32_t kGroups = num_parents(kBits);
    const TrellisRoom& room = *paths->room;
    alignas(64) float sums[whole_lanes(kGroups)];
    alignas(64) int32_t sources[whole_lanes(kGroups)] = {};
    alignas(64) float last[whole_lanes(kGroups)];
    for (int32_t i = 0; i < kGroups; ++i) {
        const int32_t state = (i << kBits) + parents->oldest[i];
        sources[i] = state & (num_parents(kPrevious) - 1);
        last[i] = paths->newest[state];
    }
    const int32_t num_slots = t < kSurvivorColumns ? (t + kSums - 1) / kSums * kSums : kSurvivorColumns;
    const float* factor = room.factor + size_t(t) * kSurvivorColumns;
    Lanes::template carry<num_parents(kPrevious), kGroups>(room.errors, factor, num_slots, sources, sums);
    const float next = t > 0 ? paths->work->factor[size_t(t - 1) * paths->num_cols + t] : 0.0f;
    float* held = room.errors + ((t + kSurvivorColumns - 1) % kSurvivorColumns) * kMostParents;
    for (int32_t i = 0; i < kGroups; ++i) {
        held[i] = last[i];
        parents->targets[i] = room.targets[t] + (sums[i] + last[i] * next);
    }
}

// Each state's cost and error from those of its parent group. `restrict`: or compilers check that nothing overlaps.
template <int kGroups, bool kFed>
void score(Paths* paths, int32_t t, const float* __restrict before, const float* __restrict targets) {
    const float weight = paths->weights[t], scale = paths->scales[t], importance = paths->importance[t];
    const float* __restrict table = paths->work->tables + (t % 2) * kStates;
    float* __restrict costs = paths->costs;
    float* __restrict newest = paths->newest;
    for (int32_t first = 0; first < kStates; first += kGroups) {
        for (int32_t i = 0; i < kGroups; ++i) {
            const float value = scale * table[first + i], miss = targets[i] - value;
            costs[first + i] = before[i] + (importance * miss) * miss;
            if (kFed) {
                newest[first + i] = weight - value;
            }
        }
    }
}

template <int kBits, int kPrevious, bool kFed, class Lanes>
void step(Paths* paths, int32_t t) {
    constexpr int32_t kGroups = num_parents(kBits);
    if (kFed && t >= kSurvivorColumns) {
        settle<kPrevious, Lanes>(paths, t);
    }
    Parents<kBits> parents;
    Lanes::template choose<kBits>(paths->costs, &parents);
    uint8_t* oldest = paths->room->oldest + size_t(t) * kMostParents;
    for (int32_t i = 0; i < kGroups; ++i) {
        oldest[i] = uint8_t(parents.oldest[i]);
    }
    if (kFed) {
        correct<kBits, kPrevious, Lanes>(paths, t, &parents);
    } else {
        for (int32_t i = 0; i < kGroups; ++i) {
            parents.targets[i] = paths->room->targets[t];
        }
    }
    score<kGroups, kFed>(paths, t, parents.costs, parents.targets);
}

// The codes of the cheapest path, and what a reader makes of them.
template <int kEven, int kOdd>
void trace(const Paths& paths, int32_t last, int32_t row) {
    const TrellisWork& work = *paths.work;
    uint8_t* codes = work.codes + size_t(row) * work.num_kept;
    float* values = work.values + size_t(row) * work.num_kept;
    int32_t state = last;
    for (int32_t t = paths.num_cols - 1; t >= 0; --t) {
        const int32_t bits = t % 2 ? kOdd : kEven, group = state & (num_parents(bits) - 1);
        if (t < work.num_kept) {
            codes[t] = uint8_t(state >> (kStateBits - bits));
        }
        state = group << bits | paths.room->oldest[size_t(t) * kMostParents + group];
    }
    int32_t window = work.starts[row];
    for (int32_t t = 0; t < work.num_kept; ++t) {
        const int32_t bits = t % 2 ? kOdd : kEven;
        window = (window >> bits | codes[t] << (kStateBits - bits)) & (kStates - 1);  // whoever else writes codes
        values[t] = work.tables[(t % 2) * kStates + window];
    }
    work.windows[row] = uint8_t(window);
}

template <int kEven, int kOdd, bool kFed, class Lanes>
void search_row(const TrellisWork& work, const TrellisRoom& room, int32_t row) {
    const size_t at = size_t(row) * work.num_cols;
    Paths paths;
    paths.num_cols = work.num_cols;
    paths.work = &work;
    paths.room = &room;
    paths.weights = work.weights + at;
    paths.scales = work.scales + at;
    paths.importance = work.importance + size_t(row) * work.importance_stride;
    for (int32_t state = 0; state < kStates; ++state) {
        paths.costs[state] = state == work.starts[row] ? 0.0f : __builtin_inff();
        paths.newest[state] = 0.0f;
    }
    if (work.num_cols > 0) {
        __builtin_memcpy(room.targets, work.targets + at, sizeof(float) * work.num_cols);
    }
    if (kFed) {
        __builtin_memset(room.errors, 0, sizeof(float) * kSurvivorColumns * kMostParents);
    }
    for (int32_t t = 0; t + 1 < work.num_cols; t += 2) {
        step<kEven, kOdd, kFed, Lanes>(&paths, t);
        step<kOdd, kEven, kFed, Lanes>(&paths, t + 1);
    }
    if (work.num_cols % 2) {
        step<kEven, kOdd, kFed, Lanes>(&paths, work.num_cols - 1);
    }
    trace<kEven, kOdd>(paths, Lanes::cheapest(paths.costs), row);
}

template <int kEven, int kOdd, class Lanes>
void search_width(const TrellisWork& work, const TrellisRoom& room) {
    for (int32_t row = 0; row < work.num_rows; ++row) {
        if (work.factor != nullptr) {
            search_row<kEven, kOdd, true, Lanes>(work, room, row);
        } else {
            search_row<kEven, kOdd, false, Lanes>(work, room, row);
        }
    }
}

template <class Lanes>
void search_rows(const TrellisWork& work, const TrellisRoom& room) {
    switch (work.width) {
        case 3: return search_width<1, 2, Lanes>(work, room);
        case 4: return search_width<2, 2, Lanes>(work, room);
        case 5: return search_width<2, 3, Lanes>(work, room);
        case 6: return search_width<3, 3, Lanes>(work, room);
        case 7: return search_width<3, 4, Lanes>(work, room);
        default: return search_width<4, 4, Lanes>(work, room);
    }
}

}  // namespace
}  // namespace moe_pack
