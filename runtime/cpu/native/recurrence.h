// Recurrences over tokens and short convolutions, whose states live on between calls. All sizes have been checked.
//
// The twins in torch are in runtime/model/compute/recurrence.py. A head belongs to one thread, which runs its tokens one
// after the other: the state of a head stays in the cache meanwhile.
#pragma once

#include <cstdint>

#include "experts.h"

namespace moe_pack {

// T tokens: q and k [T, key heads, keys], v and out [T, heads, values]. Head h uses queries and keys of head
// h / (heads / key heads). log_decay: [T, heads], or [T, heads, keys] if `by_key`. rate: [T, heads]; null: no delta
// rule. recurrent: [heads, keys, values].
struct RecurrenceWork {
    int32_t num_tokens, num_key_heads, num_heads, num_keys, num_values;
    bool by_key;
    const float *q, *k, *v, *log_decay, *rate;
    float* recurrent;
};
Outcome recur(Pool& pool, const RecurrenceWork& work, float* out);

// x, out: [T, channels]. kernel: [channels, taps]. bias: [channels], or null. state: [taps - 1, channels].
// `activates`: silu comes behind.
struct ConvolutionWork {
    int32_t num_tokens, num_channels, num_taps;
    const float *x, *kernel, *bias;
    float* state;
    bool activates;
};
Outcome convolve(Pool& pool, const ConvolutionWork& work, float* out);

// Gated DeltaNet between its products with the layer's input and the one that ends it: Operations.gated_delta in Python.
// qkv: [T, 2 key heads * keys + heads * values]; z: [T, heads * values]; steps and rates: [T, heads]; kernel: [channels
// of qkv, taps]; a_log and dt_bias: [heads]; norm: [values]; conv: [taps - 1, channels]; recurrent: [heads, keys, values].
struct DeltaWork {
    int32_t num_tokens, num_key_heads, num_heads, num_keys, num_values, num_taps;
    bool is_sigmoid;  // the gate of z; else silu
    float eps;        // of the norm
    const float *qkv, *z, *steps, *rates, *kernel, *a_log, *dt_bias, *norm;
    float *conv, *recurrent;

    size_t key_width() const { return (size_t)num_key_heads * num_keys; }
    size_t value_width() const { return (size_t)num_heads * num_values; }
    size_t num_channels() const { return 2 * key_width() + value_width(); }
};
// mixed: [T, channels], for what the convolution gives. out: [T, heads * values].
Outcome gated_delta(Pool& pool, const DeltaWork& work, float* mixed, float* out);

}  // namespace moe_pack
