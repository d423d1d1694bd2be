#include "recurrence.h"

#include <algorithm>
#include <cmath>

#include "norm.h"

namespace moe_pack {
namespace {

constexpr int64_t kAloneFloats = 64 << 10;  // of states, or of inputs: less is done before another thread is awake
constexpr int64_t kAloneActivated = 4 << 10;  // of inputs that silu follows, which takes longer
constexpr int32_t kChannels = 512;          // of a convolution, at once
constexpr float kLengthEps = 1e-6f;         // of queries' and keys' lengths; no config names it

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

// out = sigmoid(x), of n values.
void sigmoids(const Kernels& kernels, const float* x, int32_t n, float* out) {
    for (int32_t i = 0; i < n; i++) out[i] = -std::fabs(x[i]);
    float largest = 0.0f;  // none is above zero
    kernels.exponentials(out, n, &largest);
    for (int32_t i = 0; i < n; i++) out[i] = (x[i] < 0.0f ? out[i] : 1.0f) / (1.0f + out[i]);
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
    if (!w.activates) return;
    float shares[kChannels];
    for (int32_t t = 0; t < w.num_tokens; t++) {
        float* y = c.out + (size_t)t * w.num_channels + first;
        sigmoids(c.kernels, y, count, shares);
        for (int32_t i = 0; i < count; i++) y[i] *= shares[i];
    }
}

// out = scale * x / |x|, of n values.
void unit(const Kernels& kernels, const float* x, int32_t n, float scale, float* out) {
    float squares = 0.0f;
    kernels.dots(x, 1, 0, x, 1, 0, n, &squares, 0);
    const float factor = scale / std::sqrt(squares + kLengthEps);
    for (int32_t i = 0; i < n; i++) out[i] = x[i] * factor;
}

// Room of a thread: a head's query and key, and the shares of its gate.
struct DeltaRoom {
    float *q, *k, *shares;
};

struct Delta {
    const Kernels& kernels;
    const DeltaWork& work;
    const float* mixed;
    float* out;
    DeltaRoom* rooms;
};

// All tokens of a head.
void delta_item(void* context, int head, int next, int worker) {
    auto& d = *static_cast<Delta*>(context);
    const DeltaWork& w = d.work;
    const DeltaRoom& room = d.rooms[worker];
    const size_t key_at = (size_t)(head / (w.num_heads / w.num_key_heads)) * w.num_keys;
    const size_t size = (size_t)w.num_keys * w.num_values;
    float* state = w.recurrent + head * size;
    const float* ahead = next < 0 ? nullptr : w.recurrent + next * size;
    for (size_t token = 0; token < (size_t)w.num_tokens; token++) {
        const float *row = d.mixed + token * w.num_channels(), *v = row + 2 * w.key_width() + (size_t)head * w.num_values;
        unit(d.kernels, row + key_at, w.num_keys, 1.0f / std::sqrt((float)w.num_keys), room.q);
        unit(d.kernels, row + w.key_width() + key_at, w.num_keys, 1.0f, room.k);
        const size_t place = token * w.num_heads + head;
        const float input = w.steps[place] + w.dt_bias[head];
        const float step = input > 20.0f ? input : std::log1p(std::exp(input));  // softplus, as torch has it
        const float decay = std::exp(-std::exp(w.a_log[head]) * step), rate = 1.0f / (1.0f + std::exp(-w.rates[place]));
        float* y = d.out + place * w.num_values;
        const HeadToken given = {w.num_keys, w.num_values, room.q, room.k, v, &decay, 0, true, rate, y,
                                 token + 1 == (size_t)w.num_tokens ? ahead : nullptr};
        d.kernels.recur(given, state);
        rms_norm_row(d.kernels, y, w.norm, w.num_values, w.eps, y);
        const float* z = w.z + place * w.num_values;
        sigmoids(d.kernels, z, w.num_values, room.shares);
        for (int32_t i = 0; i < w.num_values; i++) y[i] *= w.is_sigmoid ? room.shares[i] : z[i] * room.shares[i];
    }
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
    const bool is_small = (int64_t)w.num_tokens * w.num_channels < (w.activates ? kAloneActivated : kAloneFloats);
    const bool whole = is_small ? pool.run_alone(count, convolve_item, &c) : pool.run(count, convolve_item, &c);
    return whole ? Outcome::done : Outcome::cut;
}

Outcome gated_delta(Pool& pool, const DeltaWork& w, float* mixed, float* out) {
    ConvolutionWork convolution = {w.num_tokens, (int32_t)w.num_channels(), w.num_taps, w.qkv, w.kernel, nullptr, w.conv,
                                   true};
    const Outcome found = convolve(pool, convolution, mixed);
    if (found != Outcome::done) return found;
    std::lock_guard<std::mutex> lock(pool.one_job());
    Arena& arena = pool.arena();
    arena.reset();
    Delta d = {pool.kernels(), w, mixed, out, arena.take<DeltaRoom>(pool.threads())};
    if (d.rooms == nullptr) return Outcome::no_memory;
    for (int i = 0; i < pool.threads(); i++) {
        DeltaRoom& room = d.rooms[i];
        room = {arena.take<float>(w.num_keys), arena.take<float>(w.num_keys), arena.take<float>((w.num_values + 15) / 16 * 16)};
        if (room.q == nullptr || room.k == nullptr || room.shares == nullptr) return Outcome::no_memory;
    }
    const double floats = (double)w.num_tokens * w.value_width() * w.num_keys;
    const bool whole = floats < kAloneFloats ? pool.run_alone(w.num_heads, delta_item, &d)
                                             : pool.run(w.num_heads, delta_item, &d);
    return whole ? Outcome::done : Outcome::cut;
}

}  // namespace moe_pack
