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
struct ConvolutionWork {
    int32_t num_tokens, num_channels, num_taps;
    const float *x, *kernel, *bias;
    float* state;
};
Outcome convolve(Pool& pool, const ConvolutionWork& work, float* out);

}  // namespace moe_pack
