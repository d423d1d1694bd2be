#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "norm.h"

namespace moe_pack {
namespace {

constexpr int32_t kQueries = 64;     // at once: pairs of a token and a query head, of one key head
constexpr int32_t kPositions = 256;  // at once: with their queries' scores they stay in the second level of cache
constexpr int32_t kAhead = 16;       // positions whose values are brought while as many keys are multiplied
constexpr int32_t kMaxPieces = 128;  // of all heads together, where positions are split
constexpr double kAloneProducts = 128 << 10;   // of a query's and a key's value: less is done before a thread is awake
constexpr int64_t kAloneFloats = 16 << 10;     // the same, of keys and values that enter the cache
constexpr int32_t kTile = 32;        // rows of a cache that are decoded at once: they stay in the first level of cache
constexpr int32_t kPad = 16;                   // floats: a multiple of every instruction set's register

// Softmax so far of some queries: what has been added up, relative to the largest score.
struct Softmax {
    float* largest;  // [kQueries]
    float* sums;     // [kQueries]
    float* mixed;    // [kQueries, head_dim]: values times e^(score - largest)
};

// Memory of one thread.
struct Scratch {
    Softmax softmax;
    float* queries;  // [kQueries, head_dim]
    float* scores;   // [kQueries, kPositions]
    float* values;   // [kPositions, padded head_dim], where head_dim is no multiple of kPad
    float *wrapped_keys, *wrapped_values;  // [kPositions, head_dim], where the cache is a ring
    float* tile;     // [kTile, padded head_dim], where the cache is not of floats
};

struct Attention {
    const Kernels& kernels;
    const AttentionWork& work;
    float* out;
    int32_t group;       // query heads of a key head
    int32_t num_pairs;   // of a token and a head of the group
    int32_t num_blocks;  // of up to kQueries pairs
    // Positions are split only where there is one block of queries: its pieces are joined at the end.
    int32_t num_pieces, piece_positions;
    size_t stride;     // floats of a decoded row, a multiple of kPad
    float* signs;      // [head_dim], of the rotation of codes
    Scratch* scratch;  // one a thread
    Softmax* pieces;   // [kv heads, num_pieces]

    // The positions that a new token sees: from this one to its own.
    int32_t first_seen(int32_t token) const {
        return work.window == 0 ? 0 : std::max(0, work.start + token + 1 - work.window);
    }
    int32_t end_seen(int32_t token) const { return work.start + token + 1; }
    // Where a position's keys begin in the cache, in bytes; its values lie alike.
    size_t place(int32_t kv_head, int32_t position) const {
        return ((size_t)kv_head * work.places + position % work.places) * work.rows.row_bytes;
    }
    const float* floats(const uint8_t* cached, int32_t kv_head, int32_t position) const {
        return reinterpret_cast<const float*>(cached + place(kv_head, position));
    }
    bool is_float() const { return work.rows.kind == CacheKind::f32; }
    bool wraps() const { return work.start + work.num_tokens > work.places; }
};

// A token's head, normed, rotated and scaled.
void prepare_head(const Attention& a, const float* head, const float* norm, int32_t token, float scale, float* out) {
    const AttentionWork& w = a.work;
    if (norm != nullptr)
        rms_norm_row(a.kernels, head, norm, w.head_dim, w.eps, out);
    else
        std::memcpy(out, head, sizeof(float) * w.head_dim);
    const float *cosines = w.cosines + (size_t)token * w.num_angles, *sines = w.sines + (size_t)token * w.num_angles;
    const int32_t step = w.interleaved ? 2 : 1, apart = w.interleaved ? 1 : w.num_angles;
    for (int32_t i = 0; i < w.num_angles; i++) {
        float first = out[i * step], second = out[i * step + apart];
        out[i * step] = first * cosines[i] - second * sines[i];
        out[i * step + apart] = second * cosines[i] + first * sines[i];
    }
    for (int32_t c = 0; scale != 1.0f && c < w.head_dim; c++) out[c] *= scale;
}

// A token's keys and values into the cache.
void enter_item(void* context, int token, int, int worker) {
    auto& a = *static_cast<Attention*>(context);
    const AttentionWork& w = a.work;
    float* row = a.scratch[worker].queries;
    for (int32_t h = 0; h < w.num_kv_heads; h++) {
        const size_t from = ((size_t)token * w.num_kv_heads + h) * w.head_dim;
        const size_t to = a.place(h, w.start + token);
        prepare_head(a, w.k + from, w.k_norm, token, 1.0f, row);
        if (w.rows.is_coded()) rotate_cached(row, a.signs, w.head_dim);
        encode_cached(w.rows, row, w.keys + to);
        std::memcpy(row, w.v + from, sizeof(float) * w.head_dim);
        if (w.rows.is_coded()) rotate_cached(row, a.signs, w.head_dim);
        encode_cached(w.rows, row, w.values + to);
    }
}

// `count` positions of keys or values one after the other, where some lie at the end of the ring and the others at its
// beginning.
const float* unwrapped(const Attention& a, const uint8_t* cached, int32_t kv_head, int32_t position, int32_t count,
                       float* room) {
    const size_t d = a.work.head_dim, first = std::min(count, a.work.places - position % a.work.places);
    std::memcpy(room, a.floats(cached, kv_head, position), sizeof(float) * first * d);
    const float* others = a.floats(cached, kv_head, position + (int32_t)first);
    std::memcpy(room + first * d, others, sizeof(float) * (count - first) * d);
    return room;
}

// `count` positions of keys or values that are not floats, at most kTile, into the thread's tile.
void decode_tile(const Attention& a, const uint8_t* cached, int32_t kv_head, int32_t position, int32_t count,
                 const Scratch& scratch) {
    for (int32_t done = 0; done < count;) {
        const int32_t place = (position + done) % a.work.places, some = std::min(count - done, a.work.places - place);
        a.kernels.decode_cached(a.work.rows, cached + a.place(kv_head, position + done), some,
                                scratch.tile + done * a.stride, a.stride);
        done += some;
    }
}

// Brings positions into the second level of cache, as far as they lie one after the other.
void prefetch(const Attention& a, const uint8_t* cached, int32_t kv_head, int32_t position, int32_t count) {
    const int32_t some = std::min(count, a.work.places - position % a.work.places);
    const uint8_t* from = cached + a.place(kv_head, position);
    for (size_t i = 0; i < some * a.work.rows.row_bytes; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
}

// What kernels may read behind the last row is ours.
const float* padded_values(const Attention& a, const float* values, int32_t count, const Scratch& scratch,
                           size_t* stride) {
    const size_t d = a.work.head_dim;
    *stride = (d + kPad - 1) / kPad * kPad;
    if (*stride == d) return values;
    for (int32_t p = 0; p < count; p++) std::memcpy(scratch.values + p * *stride, values + p * d, sizeof(float) * d);
    return scratch.values;
}

// Scores [num_queries, kPositions] of `count` positions. The cache is cold, and what comes from it most of the work for
// one token: values are on their way while keys are multiplied.
void score(const Attention& a, const float* keys, const float* values, int32_t count, int32_t num_queries,
           const Scratch& scratch) {
    const size_t d = a.work.head_dim;
    std::fill_n(scratch.scores, (size_t)num_queries * kPositions, 0.0f);
    for (int32_t p = 0; p < count; p += kAhead) {
        const int32_t some = std::min(kAhead, count - p), next = std::min(kAhead, count - p - some);
        for (size_t c = p * d; c < (p + some) * d; c += kLineBytes / sizeof(float)) __builtin_prefetch(values + c, 0, 2);
        for (size_t c = (p + some) * d; c < (p + some + next) * d; c += kLineBytes / sizeof(float))
            __builtin_prefetch(keys + c, 0, 2);
        a.kernels.dots(keys + p * d, some, d, scratch.queries, num_queries, d, a.work.head_dim, scratch.scores + p,
                       kPositions);
    }
}

// The same for a cache that is not of floats, tile by tile.
void score_tiles(const Attention& a, int32_t kv_head, int32_t position, int32_t count, int32_t num_queries,
                 const Scratch& scratch) {
    std::fill_n(scratch.scores, (size_t)num_queries * kPositions, 0.0f);
    for (int32_t p = 0; p < count; p += kTile) {
        const int32_t some = std::min(kTile, count - p), next = std::min(kTile, count - p - some);
        prefetch(a, a.work.values, kv_head, position + p, some);
        if (next > 0) prefetch(a, a.work.keys, kv_head, position + p + some, next);
        decode_tile(a, a.work.keys, kv_head, position + p, some, scratch);
        a.kernels.dots(scratch.tile, some, a.stride, scratch.queries, num_queries, a.work.head_dim, a.work.head_dim,
                       scratch.scores + p, kPositions);
    }
}

// Adds values times e^(score - largest) of `count` positions.
void add_values(const Attention& a, int32_t kv_head, int32_t position, int32_t count, int32_t num_queries,
                const float* values, const Scratch& scratch, const Softmax& softmax) {
    const size_t d = a.work.head_dim;
    if (a.is_float()) {
        size_t stride;
        values = padded_values(a, values, count, scratch, &stride);
        a.kernels.add(values, count, stride, scratch.scores, num_queries, kPositions, a.work.head_dim, softmax.mixed, d);
        return;
    }
    for (int32_t p = 0; p < count; p += kTile) {
        const int32_t some = std::min(kTile, count - p);
        decode_tile(a, a.work.values, kv_head, position + p, some, scratch);
        a.kernels.add(scratch.tile, some, a.stride, scratch.scores + p, num_queries, kPositions, a.work.head_dim,
                      softmax.mixed, d);
    }
}

// Adds `count` positions to the softmax of `num_queries` queries, whose pairs begin with `first`.
void add_positions(const Attention& a, int32_t kv_head, int32_t position, int32_t count, int32_t first,
                   int32_t num_queries, const Scratch& scratch, const Softmax& softmax) {
    const size_t d = a.work.head_dim;
    const float *keys = nullptr, *values = nullptr;
    if (!a.is_float()) {
        score_tiles(a, kv_head, position, count, num_queries, scratch);
    } else {
        keys = a.floats(a.work.keys, kv_head, position), values = a.floats(a.work.values, kv_head, position);
        if (position % a.work.places + count > a.work.places) {
            keys = unwrapped(a, a.work.keys, kv_head, position, count, scratch.wrapped_keys);
            values = unwrapped(a, a.work.values, kv_head, position, count, scratch.wrapped_values);
        }
        score(a, keys, values, count, num_queries, scratch);
    }
    for (int32_t i = 0; i < num_queries; i++) {
        float* scores = scratch.scores + (size_t)i * kPositions;
        const int32_t token = (first + i) / a.group;
        const int32_t from = std::clamp(a.first_seen(token) - position, 0, count);
        const int32_t to = std::clamp(a.end_seen(token) - position, from, count);
        std::fill(scores, scores + from, -INFINITY);
        std::fill(scores + to, scores + count, -INFINITY);
        const float before = softmax.largest[i];
        const float sum = a.kernels.exponentials(scores, count, &softmax.largest[i]);
        if (softmax.largest[i] == before) {
            softmax.sums[i] += sum;
            continue;
        }
        const float factor = std::exp(before - softmax.largest[i]);
        softmax.sums[i] = softmax.sums[i] * factor + sum;
        for (size_t c = 0; c < d; c++) softmax.mixed[i * d + c] *= factor;
    }
    add_values(a, kv_head, position, count, num_queries, values, scratch, softmax);
}

// A pair's attention from one softmax or several, joined by their largest scores.
void finish_pair(const Attention& a, const Softmax* pieces, int32_t num_pieces, int32_t i, float* out) {
    const size_t d = a.work.head_dim;
    float largest = -INFINITY, sum = 0.0f;
    for (int32_t p = 0; p < num_pieces; p++) largest = std::max(largest, pieces[p].largest[i]);
    for (int32_t p = 0; p < num_pieces; p++) {
        const float factor = num_pieces == 1 ? 1.0f : std::exp(pieces[p].largest[i] - largest);
        const float* mixed = pieces[p].mixed + i * d;
        sum += factor * pieces[p].sums[i];
        for (size_t c = 0; c < d; c++) out[c] = factor * mixed[c] + (p == 0 ? 0.0f : out[c]);
    }
    const float share = 1.0f / sum;
    for (size_t c = 0; c < d; c++) out[c] *= share;
    if (a.work.rows.is_coded()) rotate_cached_back(out, a.signs, a.work.head_dim);
}

void finish(const Attention& a, int32_t kv_head, int32_t first, int32_t count, const Softmax* pieces,
            int32_t num_pieces) {
    for (int32_t i = 0; i < count; i++) {
        const size_t token = (first + i) / a.group, head = kv_head * a.group + (first + i) % a.group;
        finish_pair(a, pieces, num_pieces, i, a.out + (token * a.work.num_heads + head) * a.work.head_dim);
    }
}

// A piece of the positions that a block of a key head's queries sees.
void attend_item(void* context, int item, int, int worker) {
    auto& a = *static_cast<Attention*>(context);
    const AttentionWork& w = a.work;
    const int32_t piece = item % a.num_pieces, block = item / a.num_pieces % a.num_blocks;
    const int32_t kv_head = item / a.num_pieces / a.num_blocks;
    const int32_t first = block * kQueries, count = std::min(kQueries, a.num_pairs - first);
    const Scratch& scratch = a.scratch[worker];
    const Softmax& softmax = a.num_pieces == 1 ? scratch.softmax : a.pieces[kv_head * a.num_pieces + piece];
    for (int32_t i = 0; i < count; i++) {
        const size_t token = (first + i) / a.group, head = kv_head * a.group + (first + i) % a.group;
        float* query = scratch.queries + (size_t)i * w.head_dim;
        prepare_head(a, w.q + (token * w.num_heads + head) * w.head_dim, w.q_norm, (int32_t)token, w.scale, query);
        if (w.rows.is_coded()) rotate_cached(query, a.signs, w.head_dim);
        // A sink is of the first piece: seen before all positions, with a value of zero.
        const float sink = w.sinks != nullptr && piece == 0 ? w.sinks[head] : -INFINITY;
        softmax.largest[i] = sink;
        softmax.sums[i] = sink == -INFINITY ? 0.0f : 1.0f;
    }
    std::fill_n(softmax.mixed, (size_t)count * w.head_dim, 0.0f);
    const int32_t seen = a.first_seen(first / a.group) + piece * a.piece_positions;
    const int32_t end = std::min(a.end_seen((first + count - 1) / a.group), seen + a.piece_positions);
    for (int32_t position = seen; position < end; position += kPositions)
        add_positions(a, kv_head, position, std::min(kPositions, end - position), first, count, scratch, softmax);
    if (a.num_pieces == 1) finish(a, kv_head, first, count, &softmax, 1);
}

bool take_softmax(Arena& arena, size_t head_dim, Softmax* softmax) {
    softmax->largest = arena.take<float>(kQueries);
    softmax->sums = arena.take<float>(kQueries);
    softmax->mixed = arena.take<float>(kQueries * head_dim);
    return softmax->largest != nullptr && softmax->sums != nullptr && softmax->mixed != nullptr;
}

bool take_memory(Pool& pool, Attention* a) {
    Arena& arena = pool.arena();
    arena.reset();
    const size_t d = a->work.head_dim;
    const size_t num_pieces = a->num_pieces == 1 ? 0 : (size_t)a->work.num_kv_heads * a->num_pieces;
    a->scratch = arena.take<Scratch>(pool.threads());
    a->pieces = arena.take<Softmax>(num_pieces);
    a->signs = arena.take<float>(d);
    if (a->scratch == nullptr || a->pieces == nullptr || a->signs == nullptr) return false;
    fill_signs(a->signs, a->work.head_dim);
    const bool wraps = a->is_float() && a->wraps(), pads = a->is_float() && d % kPad;
    for (size_t i = 0; i < num_pieces; i++)
        if (!take_softmax(arena, d, &a->pieces[i])) return false;
    for (int i = 0; i < pool.threads(); i++) {
        Scratch& scratch = a->scratch[i];
        scratch.queries = arena.take<float>(kQueries * d);
        scratch.scores = arena.take<float>((size_t)kQueries * kPositions);
        scratch.values = arena.take<float>(pads ? kPositions * (d + kPad) : 0);
        scratch.wrapped_keys = arena.take<float>(wraps ? kPositions * d : 0);
        scratch.wrapped_values = arena.take<float>(wraps ? kPositions * d : 0);
        scratch.tile = arena.take<float>(a->is_float() ? 0 : kTile * a->stride);
        if (scratch.tile == nullptr || scratch.queries == nullptr || scratch.scores == nullptr || scratch.values == nullptr ||
            scratch.wrapped_keys == nullptr || scratch.wrapped_values == nullptr || !take_softmax(arena, d, &scratch.softmax))
            return false;
    }
    return true;
}

}  // namespace

Outcome attend(Pool& pool, const AttentionWork& w, float* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    const int32_t group = w.num_heads / w.num_kv_heads, num_pairs = w.num_tokens * group;
    const int32_t num_blocks = (num_pairs + kQueries - 1) / kQueries;
    const size_t blocks = std::max((size_t)w.head_dim, (size_t)w.rows.num_blocks * w.rows.block);
    const size_t stride = (blocks + kPad - 1) / kPad * kPad;
    Attention a = {pool.kernels(), w, out, group, num_pairs, num_blocks, 1, w.places, stride, nullptr, nullptr, nullptr};
    const int32_t num_seen = w.start + w.num_tokens - a.first_seen(0);
    if (num_blocks == 1) {
        const int32_t each = std::max(1, kMaxPieces / w.num_kv_heads);
        a.piece_positions = ((num_seen + each - 1) / each + kPositions - 1) / kPositions * kPositions;
        a.num_pieces = (num_seen + a.piece_positions - 1) / a.piece_positions;
    }
    if (!take_memory(pool, &a)) return Outcome::no_memory;
    const int64_t entered = (int64_t)w.num_tokens * w.num_kv_heads * w.head_dim;
    const double products = (double)num_pairs * w.num_kv_heads * w.head_dim * num_seen;
    const int count = w.num_kv_heads * num_blocks * a.num_pieces;
    bool whole = entered < kAloneFloats ? pool.run_alone(w.num_tokens, enter_item, &a)
                                        : pool.run(w.num_tokens, enter_item, &a);
    whole = whole && (products < kAloneProducts ? pool.run_alone(count, attend_item, &a)
                                                : pool.run(count, attend_item, &a));
    for (int32_t h = 0; whole && a.num_pieces > 1 && h < w.num_kv_heads; h++)
        finish(a, h, 0, num_pairs, a.pieces + h * a.num_pieces, a.num_pieces);
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
