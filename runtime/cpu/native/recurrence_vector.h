// A head's recurrence and a short convolution, written once with vector extensions for every instruction set.
//
// A file includes this after vector.h, which says why all names have internal linkage.
#pragma once

#include "vector.h"

namespace moe_pack {
namespace {

// Vectors of a state's row at once: what is read and what is written stay in registers.
constexpr int kStateVectors = kVector == 16 ? 8 : 4;
constexpr int32_t kMaxTaps = 64;

// One head and one token, of `VECTORS` vectors of the values. The state's columns come from memory once: the second
// pass finds them in the cache.
template <int VECTORS>
inline void recur_columns(const HeadToken& t, float* state, int32_t first) {
    Vector written[VECTORS], read[VECTORS] = {};
    for (int j = 0; j < VECTORS; ++j) {
        written[j] = load_vector(t.v + first + j * kVector);
    }
    if (t.corrects) {
        Vector answer[VECTORS] = {};
        const float* row = state + first;
        for (int32_t i = 0; i < t.num_keys; ++i, row += t.num_values) {
            const Vector key = broadcast(t.k[i] * t.decay[i * t.decay_step]);
            for (int j = 0; j < VECTORS; ++j) {
                answer[j] = multiply_add(load_vector(row + j * kVector), key, answer[j]);
            }
        }
        for (int j = 0; j < VECTORS; ++j) {
            written[j] = broadcast(t.rate) * (written[j] - answer[j]);
        }
    }
    float* row = state + first;
    // What the thread has next is on its way while this is computed.
    const float* ahead = t.ahead == nullptr ? row : t.ahead + first;
    for (int32_t i = 0; i < t.num_keys; ++i, row += t.num_values, ahead += t.num_values) {
        for (int j = 0; j < VECTORS * kVector; j += kLineBytes / int(sizeof(float))) {
            __builtin_prefetch(ahead + j, 1, 2);
        }
        const Vector key = broadcast(t.k[i]), query = broadcast(t.q[i]), decay = broadcast(t.decay[i * t.decay_step]);
        for (int j = 0; j < VECTORS; ++j) {
            const Vector after = multiply_add(key, written[j], decay * load_vector(row + j * kVector));
            store_vector(row + j * kVector, after);
            read[j] = multiply_add(query, after, read[j]);
        }
    }
    for (int j = 0; j < VECTORS; ++j) {
        store_vector(t.out + first + j * kVector, read[j]);
    }
}

// The same of one value.
inline void recur_column(const HeadToken& t, float* state, int32_t column) {
    float written = t.v[column], read = 0.0f;
    if (t.corrects) {
        float answer = 0.0f;
        for (int32_t i = 0; i < t.num_keys; ++i) {
            answer += t.k[i] * t.decay[i * t.decay_step] * state[size_t(i) * t.num_values + column];
        }
        written = t.rate * (written - answer);
    }
    for (int32_t i = 0; i < t.num_keys; ++i) {
        float& at = state[size_t(i) * t.num_values + column];
        at = t.k[i] * written + t.decay[i * t.decay_step] * at;
        read += t.q[i] * at;
    }
    t.out[column] = read;
}

// As many columns as there are in whole vectors, widest tiles first; gives the first column that is left.
template <int VECTORS>
inline int32_t recur_tiles(const HeadToken& t, float* state, int32_t first) {
    for (; first + VECTORS * kVector <= t.num_values; first += VECTORS * kVector) {
        recur_columns<VECTORS>(t, state, first);
    }
    if constexpr (VECTORS > 1) {
        return recur_tiles<VECTORS / 2>(t, state, first);
    }
    return first;
}

// Kernels::recur.
inline void recur(const HeadToken& token, float* state) {
    for (int32_t column = recur_tiles<kStateVectors>(token, state, 0); column < token.num_values; ++column) {
        recur_column(token, state, column);
    }
}

// Kernels::convolve. Channels are taken some vectors at a time, so that a token's inputs are in few lines of the cache.
inline void convolve(const Channels& c) {
    constexpr int32_t WIDTH = 16 * kVector;
    alignas(64) float taps[kMaxTaps * WIDTH];  // [taps, WIDTH]
    const int32_t num_before = c.num_taps - 1;
    for (int32_t first = 0; first < c.num_channels; first += WIDTH) {
        const int32_t width = c.num_channels - first < WIDTH ? c.num_channels - first : WIDTH;
        for (int32_t channel = 0; channel < width; ++channel) {
            for (int32_t tap = 0; tap < c.num_taps; ++tap) {
                taps[tap * WIDTH + channel] = c.kernel[size_t(first + channel) * c.num_taps + tap];
            }
        }
        // Input `at`, counted from the first that the state has.
        const auto input = [&](int32_t at) {
            return (at < num_before ? c.state + size_t(at) * c.stride : c.x + size_t(at - num_before) * c.stride) + first;
        };
        for (int32_t token = 0; token < c.num_tokens; ++token) {
            for (int32_t at = 0; at < width; at += kVector) {
                const int32_t count = width - at < kVector ? width - at : kVector;
                Vector sum = {};
                for (int32_t tap = 0; tap < c.num_taps; ++tap) {
                    const Vector weights = load_first(taps + tap * WIDTH + at, count);
                    sum = multiply_add(weights, load_first(input(token + tap) + at, count), sum);
                }
                if (c.bias != nullptr) {
                    sum += load_first(c.bias + first + at, count);
                }
                store_first(c.out + size_t(token) * c.stride + first + at, sum, count);
            }
        }
        for (int32_t row = 0; row < num_before; ++row) {
            __builtin_memmove(c.state + size_t(row) * c.stride + first, input(c.num_tokens + row),
                              width * sizeof(float));
        }
    }
}

}  // namespace
}  // namespace moe_pack
