#include "recurrence.h"

#include <algorithm>
#include <cmath>

namespace moe_pack {
namespace {

constexpr int64_t kAloneFloats = 64 << 10;  // of states, or of inputs: less is done before another thread is awake
constexpr int32_t kChannels = 512;          // of a convolution, at once

struct Recurrence {
    const Kernels& kernels;
    const RecurrenceWork& work;
    float* out;
    float** decays;  // of one thread: room for a decay each key
};

// All tokens of a head.
void recur_item(void* context, int head, int next, int worker) {
    auto& r = *static_cast<Recurrence*>(context);
    const RecurrenceWork& w = r.work;
    const size_t key_head = head / (w.num_heads / w.num_key_heads);
    const size_t size = (size_t)w.num_keys * w.num_values;
    float* state = w.recurrent + head * size;
    const float* ahead = next < 0 ? nullptr : w.recurrent + next * size;
    float* decay = r.decays[worker];
    for (size_t token = 0; token < (size_t)w.num_tokens; token++) {
        const size_t key = (token * w.num_key_heads + key_head) * w.num_keys, place = token * w.num_heads + head;
        if (w.by_key) {
            std::copy_n(w.log_decay + place * w.num_keys, w.num_keys, decay);
            float largest = 0.0f;  // decays are not above 1
            r.kernels.exponentials(decay, w.num_keys, &largest);
        } else {
            *decay = std::exp(w.log_decay[place]);
        }
        const HeadToken given = {w.num_keys, w.num_values, w.q + key, w.k + key, w.v + place * w.num_values,
                                 decay, w.by_key ? 1 : 0, w.rate != nullptr, w.rate ? w.rate[place] : 0.0f,
                                 r.out + place * w.num_values,
                                 token + 1 == (size_t)w.num_tokens ? ahead : nullptr};
        r.kernels.recur(given, state);
    }
}

struct Convolution {
    const Kernels& kernels;
    const ConvolutionWork& work;
    float* out;
};

void convolve_item(void* context, int item, int, int) {
    auto& c = *static_cast<Convolution*>(context);
    const ConvolutionWork& w = c.work;
    const int32_t first = item * kChannels, count = std::min(kChannels, w.num_channels - first);
    c.kernels.convolve({w.num_tokens, count, w.num_taps, (size_t)w.num_channels, w.x + first,
                        w.kernel + (size_t)first * w.num_taps, w.bias ? w.bias + first : nullptr, w.state + first,
                        c.out + first});
}

}  // namespace

Outcome recur(Pool& pool, const RecurrenceWork& w, float* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    Arena& arena = pool.arena();
    arena.reset();
    Recurrence r = {pool.kernels(), w, out, arena.take<float*>(pool.threads())};
    if (r.decays == nullptr) return Outcome::no_memory;
    for (int i = 0; i < pool.threads(); i++) {
        r.decays[i] = arena.take<float>(w.num_keys);
        if (r.decays[i] == nullptr) return Outcome::no_memory;
    }
    const double floats = (double)w.num_tokens * w.num_heads * w.num_keys * w.num_values;
    const bool whole = floats < kAloneFloats ? pool.run_alone(w.num_heads, recur_item, &r)
                                             : pool.run(w.num_heads, recur_item, &r);
    return whole ? Outcome::done : Outcome::cut;
}

Outcome convolve(Pool& pool, const ConvolutionWork& w, float* out) {
    std::lock_guard<std::mutex> lock(pool.one_job());
    Convolution c = {pool.kernels(), w, out};
    const int count = (w.num_channels + kChannels - 1) / kChannels;
    const bool is_small = (int64_t)w.num_tokens * w.num_channels < kAloneFloats;
    const bool whole = is_small ? pool.run_alone(count, convolve_item, &c) : pool.run(count, convolve_item, &c);
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
