// A tile: some neurons of an expert, and what is computed for them by one thread at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "layout.h"
#include "pool.h"

namespace moe_pack {

constexpr int32_t kFewTokens = 3;    // so many go one by one, from rows in cache; more share decoded rows
constexpr int32_t kFewOfWhole = 4;   // likewise, where all neurons run: in panels twice as many would pay, in rows fewer
constexpr int32_t kFewOfDense = 32;  // likewise, of a dense matrix in panels
constexpr int32_t kManyTokens = 64;  // at once
constexpr int32_t kManyRows = 128;   // decoded at once, so many columns of them: with as many columns of the tokens
constexpr int32_t kManyCols = 512;   // they stay in the second level of cache
constexpr int32_t kTileBytes = 256 << 10;  // of rows: what stays in the second level of cache
constexpr int32_t kAheadBytes = 8192;  // how far before its use a row is fetched

// A neuron's h is activation(g) * factor(u), or activation(u) without a gate. A NaN stays one.
inline float at_most(float v, float limit) { return v > limit ? limit : v; }
inline float within(float v, float limit) { return v < -limit ? -limit : at_most(v, limit); }
inline float silu(float v) { return v / (1.0f + std::exp(-v)); }

inline float activation(const ExpertLayout& layout, float v) {
    switch (layout.function) {
        case Function::silu: return silu(v);
        case Function::relu: return v < 0.0f ? 0.0f : v;
        case Function::relu2: return v < 0.0f ? 0.0f : v * v;
        case Function::clipped_silu: return silu(at_most(v, layout.limit));
        case Function::capped_silu: return at_most(silu(v), layout.limit);
        case Function::gelu_tanh:  // (1 + tanh(z)) / 2 is the sigmoid of 2 z, here 2 sqrt(2 / pi) (v + 0.044715 v^3)
            return v / (1.0f + std::exp(-1.5957691216f * v * (1.0f + 0.044715f * v * v)));
        case Function::clamped_swiglu: break;
    }
    const float clamped = at_most(v, 7.0f);
    return clamped / (1.0f + std::exp(-1.702f * clamped));
}
inline float factor(const ExpertLayout& layout, float u) {
    if (layout.has_limit()) return within(u, layout.limit);
    return layout.function == Function::clamped_swiglu ? within(u, 7.0f) + 1.0f : u;
}

// `a` of neuron i from what its selector rows give: null where the selector has no such row.
inline float selected(const ExpertLayout& layout, const float* u, const float* g, int32_t i) {
    if (g == nullptr) return layout.has_gate() ? factor(layout, u[i]) : activation(layout, u[i]);
    return u == nullptr ? activation(layout, g[i]) : activation(layout, g[i]) * factor(layout, u[i]);
}

// h of neuron i that runs from `a` of its selector rows and what its records give: null where they have no such row.
inline float completed(const ExpertLayout& layout, float a, const float* u, const float* g, int32_t i) {
    if (g != nullptr) return activation(layout, g[i]) * a;
    return u == nullptr ? a : a * factor(layout, u[i]);
}

// Neither zero nor below the threshold; a NaN runs, and is seen.
inline bool runs_at(float a, float threshold) { return a != 0.0f && !(std::fabs(a) < threshold); }

// Neurons a tile with rows of this size: at most 64, and no more than a cache holds.
inline int32_t tile_rows(int64_t row_bytes) {
    return (int32_t)std::clamp<int64_t>(kTileBytes / std::max<int64_t>(row_bytes, 1), 8, kMaxTile);
}

// How many rows ahead of the one being multiplied rows are fetched, where they lie one after the other.
inline int32_t ahead_rows(int64_t row_bytes) {
    return (int32_t)std::clamp<int64_t>(kAheadBytes / std::max<int64_t>(row_bytes, 1), 2, 16);
}

// Whether two parts want their inputs in the same form.
inline bool same_form(const Part& a, const Part& b) {
    if (a.codec != b.codec || a.num_cols != b.num_cols) return false;
    const bool any = a.codec != Codec::affine && a.codec != Codec::trellis;
    return any || (a.width == b.width && a.group == b.group);
}

// A token's inputs in the forms that an expert's parts want.
struct Inputs {
    const void* gate;
    const void* up;
};

// Memory of one thread.
struct Scratch {
    float* work;      // for kernels
    float* values[2]; // [kMaxTile], or [kManyTokens, kManyRows]
    float* h;         // the same
    float* decoded;   // [kManyRows, kManyCols], for many tokens
    float* whole;     // [3, tokens of a call in panels, kMaxTile]
    const uint8_t* fetched;  // the row that begins the tile whose bytes were fetched last
    int32_t num_fetched;     // rows of that tile
};

// One token and up to kMaxTile neurons whose records (or selector rows) are `rows`.
class FewTokens {
  public:
    FewTokens(const Kernels& kernels, const ExpertLayout& layout, const Scratch& scratch)
        : kernels_(kernels), layout_(layout), scratch_(scratch) {}

    // `a` of selector rows.
    void select(const uint8_t* const* rows, int32_t count, const Inputs& x, const Ahead& ahead, float* a) const;

    // h from records: `a` of the selector and whether each runs; without a selector both are null. `ahead`: of each
    // product that is taken.
    void neurons(const uint8_t* const* records, int32_t count, const Inputs& x, const float* a, const uint8_t* runs,
                 float threshold, const Ahead ahead[2], float* h) const;

    // sum += h times down rows; rows whose h is zero are left out.
    void add(const uint8_t* const* records, int32_t count, const float* h, const Ahead& ahead, float* sum) const;

  private:
    const float* dot(const PlacedPart& part, const uint8_t* const* rows, int32_t count, const void* x,
                     const Ahead& ahead, float* out) const;

    const Kernels& kernels_;
    const ExpertLayout& layout_;
    const Scratch& scratch_;
};

// Up to kManyTokens tokens [T, d] and kManyRows neurons: rows are decoded once for all.
class ManyTokens {
  public:
    ManyTokens(const Kernels& kernels, const ExpertLayout& layout, const Scratch& scratch, const float* x,
               int32_t num_tokens)
        : kernels_(kernels), layout_(layout), scratch_(scratch), x_(x), num_tokens_(num_tokens) {}

    // `a` [T, kManyRows] of selector rows, in scratch.
    const float* select(const uint8_t* const* rows, int32_t count) const;

    // h [T, kManyRows] of records, in scratch. `a` and `runs` of a token are `stride` apart; `neurons` are places there.
    const float* neurons(const uint8_t* const* records, const int32_t* neurons, int32_t count, const float* a,
                         const uint8_t* runs, size_t stride, float threshold) const;

    // sum [T, d] += h [T, kManyRows] times down rows.
    void add(const uint8_t* const* records, int32_t count, const float* h, float* sum) const;

  private:
    const float* dots(const PlacedPart& part, const uint8_t* const* rows, int32_t count, float* out) const;

    const Kernels& kernels_;
    const ExpertLayout& layout_;
    const Scratch& scratch_;
    const float* x_;
    int32_t num_tokens_;
};

// What a part's bias adds to a row's product.
inline float bias_of(const Part& part, const uint8_t* begin) {
    float bias = 0.0f;
    if (part.has_bias) std::memcpy(&bias, begin + part.bias_at(), 4);
    return bias;
}

}  // namespace moe_pack
