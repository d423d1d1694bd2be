// Attention of grouped queries over a key-value cache. All sizes have been checked.
//
// Softmax is taken block by block of positions, with the largest score so far (2112.05682, 2205.14135): no table of
// all scores is made. Blocks depend on sizes alone, never on threads.
#pragma once

#include <cstdint>

#include "cached_rows.h"
#include "experts.h"

namespace moe_pack {

// T new tokens of one layer, and the cache that they enter after `start` others. Query head h attends to the keys and
// values of head h / (num_heads / num_kv_heads). Position p lies in place p % places: what the new tokens see, and they
// themselves, have places enough.
struct AttentionWork {
    int32_t num_heads, num_kv_heads, head_dim, num_tokens;
    int32_t places, start;   // of the cache; positions before the first new one
    int32_t window;          // positions that one sees at most, itself included; 0: all before it
    int32_t num_angles;      // pairs of a head's values that are rotated, at most head_dim / 2
    bool interleaved;        // pairs are neighbours, else halves apart
    float scale, eps;
    const float *q, *k, *v;         // [T, heads, head_dim], as projected
    const float *q_norm, *k_norm;   // [head_dim], of each head's root-mean-square norm; or null
    const float *cosines, *sines;   // [T, num_angles]
    const float* sinks;             // [num_heads], scores that no value belongs to; or null
    CachedRows rows;                // how head_dim values are stored
    uint8_t *keys, *values;         // [kv heads, places, rows.row_bytes]
};

// Norms and rotates queries and keys, puts keys and values into the cache; out [T, num_heads, head_dim]: the attention.
Outcome attend(Pool& pool, const AttentionWork& work, float* out);

}  // namespace moe_pack
