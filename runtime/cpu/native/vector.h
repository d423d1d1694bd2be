// Products of small float matrices, exponentials and rotations, written once with vector extensions for every instruction set.
//
// A file that includes this first defines MOE_PACK_VECTOR_FLOATS, the floats in a register: 16 with AVX-512, 8 with
// AVX2 and FMA, 4 for anything else.
// All names have internal linkage: shared by name between files compiled for different targets, the linker would keep
// one copy, perhaps the one that this machine cannot run. For the same reason nothing here uses templates of std.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

#if MOE_PACK_VECTOR_FLOATS > 4
#include <immintrin.h>
#endif

namespace moe_pack {
namespace {

constexpr int32_t kVector = MOE_PACK_VECTOR_FLOATS;
// Sums of a tile: 4 * 4 where there are 32 registers, 3 * 4 where there are 16.
constexpr int kTileWide = 4;  // tokens of either
constexpr int kTileNarrow = kVector == 16 ? 4 : 3;  // rows of `dots`, vectors of `add`

typedef float Vector __attribute__((vector_size(4 * MOE_PACK_VECTOR_FLOATS)));
typedef uint32_t Words __attribute__((vector_size(4 * MOE_PACK_VECTOR_FLOATS)));
typedef float Quad __attribute__((vector_size(16)));

inline Vector load_vector(const float* from) {
    Vector loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

inline void store_vector(float* to, Vector stored) { __builtin_memcpy(to, &stored, sizeof stored); }

// a * b + c, fused where the instruction set can: flags forbid compilers to fuse on their own.
inline Vector multiply_add(Vector a, Vector b, Vector c) {
#if MOE_PACK_VECTOR_FLOATS == 16
    return _mm512_fmadd_ps(a, b, c);
#elif MOE_PACK_VECTOR_FLOATS == 8
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// Subtracting zero leaves every float as it is, so that compilers reduce this to the broadcast.
inline Vector broadcast(float value) { return value - Vector{}; }

// The first `count` floats of a register, and zeros; no others are read.
inline Vector load_first(const float* from, int32_t count) {
    if (count == kVector) {
        return load_vector(from);
    }
    float padded[kVector] = {};
    __builtin_memcpy(padded, from, count * sizeof(float));
    return load_vector(padded);
}

inline float lane_sum(Vector vector) {
    Quad quads[kVector / 4];
    __builtin_memcpy(quads, &vector, sizeof quads);
    for (int32_t half = kVector / 8; half > 0; half /= 2) {
        for (int32_t i = 0; i < half; ++i) {
            quads[i] += quads[i + half];
        }
    }
    return (quads[0][0] + quads[0][2]) + (quads[0][1] + quads[0][3]);
}

template <int ROWS, int TOKENS>
inline void dots_tile(const float* w, size_t w_stride, const float* x, size_t x_stride, int32_t n, float* out,
                      size_t out_stride) {
    Vector sums[ROWS][TOKENS] = {};
    Vector inputs[TOKENS];
    int32_t c = 0;
    for (; c + kVector <= n; c += kVector) {
        for (int t = 0; t < TOKENS; ++t) {
            inputs[t] = load_vector(x + t * x_stride + c);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vector weights = load_vector(w + r * w_stride + c);
            for (int t = 0; t < TOKENS; ++t) {
                sums[r][t] = multiply_add(weights, inputs[t], sums[r][t]);
            }
        }
    }
    if (c < n) {
        // Nothing past the end: tokens are the caller's, and a page may end there.
        for (int t = 0; t < TOKENS; ++t) {
            inputs[t] = load_first(x + t * x_stride + c, n - c);
        }
        for (int r = 0; r < ROWS; ++r) {
            const Vector weights = load_first(w + r * w_stride + c, n - c);
            for (int t = 0; t < TOKENS; ++t) {
                sums[r][t] = multiply_add(weights, inputs[t], sums[r][t]);
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t) {
        for (int r = 0; r < ROWS; ++r) {
            out[t * out_stride + r] += lane_sum(sums[r][t]);
        }
    }
}

// `num_tokens` tokens, at most TOKENS: the template counts down to the tile that fits.
template <int ROWS, int TOKENS>
inline void dots_tokens(const float* w, size_t w_stride, const float* x, int32_t num_tokens, size_t x_stride,
                        int32_t n, float* out, size_t out_stride) {
    if constexpr (TOKENS > 1) {
        if (num_tokens < TOKENS) {
            dots_tokens<ROWS, TOKENS - 1>(w, w_stride, x, num_tokens, x_stride, n, out, out_stride);
            return;
        }
    }
    dots_tile<ROWS, TOKENS>(w, w_stride, x, x_stride, n, out, out_stride);
}

// `num_rows` rows, at most ROWS, with all tokens.
template <int ROWS>
inline void dots_rows(const float* w, int32_t num_rows, size_t w_stride, const float* x, int32_t num_tokens,
                      size_t x_stride, int32_t n, float* out, size_t out_stride) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS) {
            dots_rows<ROWS - 1>(w, num_rows, w_stride, x, num_tokens, x_stride, n, out, out_stride);
            return;
        }
    }
    for (int32_t t = 0; t < num_tokens; t += kTileWide) {
        dots_tokens<ROWS, kTileWide>(w, w_stride, x + t * x_stride, num_tokens - t, x_stride, n,
                                     out + t * out_stride, out_stride);
    }
}

// Kernels::dots. Columns are taken in pieces of which a hundred rows and tokens stay in the second level of cache.
inline void dots(const float* w, int32_t num_rows, size_t w_stride, const float* x, int32_t num_tokens,
                 size_t x_stride, int32_t n, float* out, size_t out_stride) {
    constexpr int32_t PIECE = 1024;
    for (int32_t c = 0; c < n; c += PIECE) {
        const int32_t piece = n - c < PIECE ? n - c : PIECE;
        for (int32_t r = 0; r < num_rows; r += kTileNarrow) {
            dots_rows<kTileNarrow>(w + r * w_stride + c, num_rows - r, w_stride, x + c, num_tokens, x_stride, piece,
                                   out + r, out_stride);
        }
    }
}

inline void store_first(float* to, Vector stored, int32_t count) {
    if (count == kVector) {
        store_vector(to, stored);
    } else {
        __builtin_memcpy(to, &stored, count * sizeof(float));
    }
}

// `last` of the tile's floats in its last vector exist; of `w` the others are read, of `y` never.
template <int TOKENS, int VECTORS>
inline void add_tile(const float* w, int32_t num_rows, size_t w_stride, const float* h, size_t h_stride, int32_t last,
                     float* y, size_t y_stride) {
    constexpr int END = VECTORS - 1;
    Vector sums[TOKENS][VECTORS] = {};
    for (int t = 0; t < TOKENS; ++t) {
        for (int v = 0; v < END; ++v) {
            sums[t][v] = load_vector(y + t * y_stride + v * kVector);
        }
        sums[t][END] = load_first(y + t * y_stride + END * kVector, last);
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        Vector weights[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            weights[v] = load_vector(w + r * w_stride + v * kVector);
        }
        for (int t = 0; t < TOKENS; ++t) {
            const Vector value = broadcast(h[t * h_stride + r]);
            for (int v = 0; v < VECTORS; ++v) {
                sums[t][v] = multiply_add(weights[v], value, sums[t][v]);
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t) {
        for (int v = 0; v < END; ++v) {
            store_vector(y + t * y_stride + v * kVector, sums[t][v]);
        }
        store_first(y + t * y_stride + END * kVector, sums[t][END], last);
    }
}

// `num_tokens` tokens, at most TOKENS.
template <int TOKENS, int VECTORS>
inline void add_tokens(const float* w, int32_t num_rows, size_t w_stride, const float* h, int32_t num_tokens,
                       size_t h_stride, int32_t last, float* y, size_t y_stride) {
    if constexpr (TOKENS > 1) {
        if (num_tokens < TOKENS) {
            add_tokens<TOKENS - 1, VECTORS>(w, num_rows, w_stride, h, num_tokens, h_stride, last, y, y_stride);
            return;
        }
    }
    add_tile<TOKENS, VECTORS>(w, num_rows, w_stride, h, h_stride, last, y, y_stride);
}

// `num_cols` columns, at most VECTORS vectors of them, with all tokens.
template <int VECTORS>
inline void add_cols(const float* w, int32_t num_rows, size_t w_stride, const float* h, int32_t num_tokens,
                     size_t h_stride, int32_t num_cols, float* y, size_t y_stride) {
    if constexpr (VECTORS > 1) {
        if (num_cols <= (VECTORS - 1) * kVector) {
            add_cols<VECTORS - 1>(w, num_rows, w_stride, h, num_tokens, h_stride, num_cols, y, y_stride);
            return;
        }
    }
    const int32_t last = num_cols - (VECTORS - 1) * kVector;
    for (int32_t t = 0; t < num_tokens;) {
        // A token alone would keep too few sums to hide the latency of additions.
        const int32_t left = num_tokens - t;
        const int32_t tile = left == kTileWide + 1 ? kTileWide - 1 : left;
        add_tokens<kTileWide, VECTORS>(w, num_rows, w_stride, h + t * h_stride, tile, h_stride, last,
                                       y + t * y_stride, y_stride);
        t += tile < kTileWide ? tile : kTileWide;
    }
}

// A tile's columns of several rows, one row after the other.
inline void pack_tile(const float* w, int32_t num_rows, size_t w_stride, int32_t num_cols, float* packed) {
    for (int32_t r = 0; r < num_rows; ++r) {
        for (int32_t c = 0; c < num_cols; c += kVector) {
            store_vector(packed + r * kTileNarrow * kVector + c, load_vector(w + r * w_stride + c));
        }
    }
}

// Kernels::add. Rows whose stride is a power of two would push each other out of the cache while many tokens read
// them: their tile is copied first.
inline void add(const float* w, int32_t num_rows, size_t w_stride, const float* h, int32_t num_tokens,
                size_t h_stride, int32_t n, float* y, size_t y_stride) {
    constexpr int32_t TILE = kTileNarrow * kVector, PACKED_ROWS = 64, PACKED_TOKENS = 8;
    alignas(64) float packed[PACKED_ROWS * TILE];
    const bool packs = num_tokens >= PACKED_TOKENS;
    for (int32_t c = 0; c < n; c += TILE) {
        const int32_t tile = n - c < TILE ? n - c : TILE;
        for (int32_t r = 0; r < num_rows; r += PACKED_ROWS) {
            const int32_t count = num_rows - r < PACKED_ROWS ? num_rows - r : PACKED_ROWS;
            const float* rows = w + r * w_stride + c;
            if (packs) {
                pack_tile(rows, count, w_stride, tile, packed);
            }
            add_cols<kTileNarrow>(packs ? packed : rows, count, packs ? TILE : w_stride, h + r, num_tokens, h_stride,
                                  tile, y + c, y_stride);
        }
    }
}

// e^x for x up to 0, within one unit in the last place: 2^power * e^rest, with |rest| <= ln(2) / 2. Below -87, where
// floats lose precision, zero; a NaN stays one. Source: the polynomial of Cephes' expf.
inline Vector exponential(Vector x) {
    // Added, it leaves the nearest integer in the low bits.
    const Vector rounder = broadcast(12582912.0f);
    const Vector shifted = multiply_add(x, broadcast(1.44269504f), rounder);
    const Vector power = shifted - rounder;
    // ln(2) in two parts, of which the first times any power is exact.
    const Vector high = multiply_add(power, broadcast(-0.693359375f), x);
    const Vector rest = multiply_add(power, broadcast(2.12194440e-4f), high);
    Vector sum = broadcast(1.9875691500e-4f);
    sum = multiply_add(sum, rest, broadcast(1.3981999507e-3f));
    sum = multiply_add(sum, rest, broadcast(8.3334519073e-3f));
    sum = multiply_add(sum, rest, broadcast(4.1665795894e-2f));
    sum = multiply_add(sum, rest, broadcast(1.6666665459e-1f));
    sum = multiply_add(sum, rest, broadcast(5.0000001201e-1f));
    sum = multiply_add(sum, rest * rest, rest) + broadcast(1.0f);
    Words exponent;
    __builtin_memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent << 23) + 0x3f800000u;
    Vector scale;
    __builtin_memcpy(&scale, &exponent, sizeof scale);
    return x < broadcast(-87.0f) ? Vector{} : sum * scale;
}

// Kernels::exponentials.
inline float exponentials(float* x, int32_t n, float* largest) {
    const float infinity = __builtin_inff();
    for (int32_t i = n; i % kVector; ++i) {
        x[i] = -infinity;
    }
    Vector most = broadcast(*largest);
    for (int32_t i = 0; i < n; i += kVector) {
        const Vector values = load_vector(x + i);
        most = values > most ? values : most;  // a NaN is not
    }
    for (int32_t lane = 0; lane < kVector; ++lane) {
        *largest = most[lane] > *largest ? most[lane] : *largest;
    }
    const Vector shift = broadcast(*largest == -infinity ? 0.0f : *largest);
    Vector sum = {};
    for (int32_t i = 0; i < n; i += kVector) {
        const Vector values = exponential(load_vector(x + i) - shift);
        store_vector(x + i, values);
        sum += values;
    }
    return lane_sum(sum);
}

// Lane i has the value of lane i ^ STRIDE.
template <uint32_t STRIDE>
inline Vector swapped(Vector vector) {
#if defined(__clang__)
    Vector result;
    for (uint32_t lane = 0; lane < kVector; ++lane) {
        result[lane] = vector[lane ^ STRIDE];
    }
    return result;
#else
    Words places;
    for (uint32_t lane = 0; lane < kVector; ++lane) {
        places[lane] = lane ^ STRIDE;
    }
    return __builtin_shuffle(vector, places);
#endif
}

// The stages of the Hadamard transform within a register: a + b in lanes without the stride's bit, a - b in others.
template <uint32_t STRIDE>
inline Vector hadamard_lanes(Vector vector) {
    if constexpr (STRIDE < kVector) {
        Vector signs;
        for (uint32_t lane = 0; lane < kVector; ++lane) {
            signs[lane] = lane & STRIDE ? -1.0f : 1.0f;
        }
        return hadamard_lanes<2 * STRIDE>(multiply_add(vector, signs, swapped<STRIDE>(vector)));
    }
    return vector;
}

constexpr int32_t kHadamardBlock = 64;  // the least size, which is done in registers

// x = Hadamard transform of x, without its factor; n is a power of two from kHadamardBlock on.
inline void hadamard(float* x, int32_t n) {
    constexpr int32_t VECTORS = kHadamardBlock / kVector;
    for (int32_t start = 0; start < n; start += kHadamardBlock) {
        Vector block[VECTORS];
        for (int32_t v = 0; v < VECTORS; ++v) {
            block[v] = hadamard_lanes<1>(load_vector(x + start + v * kVector));
        }
        for (int32_t stride = 1; stride < VECTORS; stride *= 2) {
            for (int32_t v = 0; v < VECTORS; ++v) {
                if (!(v & stride)) {
                    const Vector a = block[v], b = block[v + stride];
                    block[v] = a + b;
                    block[v + stride] = a - b;
                }
            }
        }
        for (int32_t v = 0; v < VECTORS; ++v) {
            store_vector(x + start + v * kVector, block[v]);
        }
    }
    int32_t stride = kHadamardBlock;
    for (; 4 * stride <= n; stride *= 4) {  // two stages a pass
        for (int32_t start = 0; start < n; start += 4 * stride) {
            for (float* at = x + start; at < x + start + stride; at += kVector) {
                const Vector a = load_vector(at), b = load_vector(at + stride);
                const Vector c = load_vector(at + 2 * stride), d = load_vector(at + 3 * stride);
                const Vector ab = a + b, ba = a - b, cd = c + d, dc = c - d;
                store_vector(at, ab + cd);
                store_vector(at + stride, ba + dc);
                store_vector(at + 2 * stride, ab - cd);
                store_vector(at + 3 * stride, ba - dc);
            }
        }
    }
    if (stride < n) {
        for (float* at = x; at < x + stride; at += kVector) {
            const Vector a = load_vector(at), b = load_vector(at + stride);
            store_vector(at, a + b);
            store_vector(at + stride, a - b);
        }
    }
}

// x = matrix x, for x [m, n] and the symmetric matrix [m, m]; n is a multiple of kVector, m at most kMaxOdd.
inline void transform_first_axis(const float* matrix, int32_t m, int32_t n, float* x) {
    constexpr int32_t AT_ONCE = 4;  // sums
    alignas(64) float column[kMaxOdd * kVector];
    for (int32_t c = 0; c < n; c += kVector) {
        for (int32_t j = 0; j < m; ++j) {
            store_vector(column + j * kVector, load_vector(x + size_t(j) * n + c));
        }
        for (int32_t i = 0; i < m; i += AT_ONCE) {
            const int32_t count = m - i < AT_ONCE ? m - i : AT_ONCE;
            const float* row[AT_ONCE];
            for (int32_t s = 0; s < AT_ONCE; ++s) {
                row[s] = matrix + size_t(s < count ? i + s : i) * m;
            }
            Vector sums[AT_ONCE] = {};
            for (int32_t j = 0; j < m; ++j) {
                const Vector values = load_vector(column + j * kVector);
                for (int32_t s = 0; s < AT_ONCE; ++s) {
                    sums[s] = multiply_add(values, broadcast(row[s][j]), sums[s]);
                }
            }
            for (int32_t s = 0; s < count; ++s) {
                store_vector(x + size_t(i + s) * n + c, sums[s]);
            }
        }
    }
}

// Kernels::rotate.
inline void rotate(const float* x, const float* scale, bool is_scaled_first, int32_t d, int32_t m, const float* hartley,
                   float* out) {
    const int32_t n = d / m;
    const Vector factor = broadcast(1.0f / __builtin_sqrtf(float(n)));
    for (int32_t c = 0; c < d; c += kVector) {
        const Vector values = load_vector(x + c) * factor;
        store_vector(out + c, is_scaled_first ? values * load_vector(scale + c) : values);
    }
    for (int32_t j = 0; j < m; ++j) {
        hadamard(out + size_t(j) * n, n);
    }
    if (m > 1) {
        transform_first_axis(hartley, m, n, out);
    }
    if (!is_scaled_first) {
        for (int32_t c = 0; c < d; c += kVector) {
            store_vector(out + c, load_vector(out + c) * load_vector(scale + c));
        }
    }
}

}  // namespace
}  // namespace moe_pack
