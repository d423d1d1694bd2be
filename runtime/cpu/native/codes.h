// A row's bytes as numbers, plainly: what every instruction set does alike (docs/pack.md, section 8).
//
// Internal linkage throughout, for the reason given in vector.h. Loops are of fixed length where they can be, so that
// compilers turn them into vector code for the target of the including file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "trellis_tables.h"

namespace moe_pack {
namespace {

inline uint16_t load_u16(const uint8_t* from) {
    uint16_t loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

inline float as_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float load_float(const uint8_t* from) {
    float loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

inline float bf16_to_float(uint16_t stored) { return as_float(uint32_t{stored} << 16); }

// Exact. Without branches, and without float32 subnormals, which some modes flush to zero.
inline float half_to_float(uint16_t stored) {
    const uint32_t sign = (stored & 0x8000u) << 16;
    const uint32_t magnitude = (stored & 0x7fffu) << 13;
    const uint32_t normal = magnitude + 0x38000000u;
    const uint32_t special = magnitude | 0x7f800000u;
    const uint32_t subnormal = as_bits(as_float(magnitude + 0x38800000u) - as_float(0x38800000u));
    const uint32_t finite = magnitude < 0x00800000u ? subnormal : normal;
    return as_float(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// One group's scale or zero from the bytes where the scales or zeros begin.
inline float stored_scale(const Part& part, const uint8_t* scales, int32_t group) {
    return part.scale_bits == 16 ? half_to_float(load_u16(scales + 2 * group))
                                 : half_to_float(load_u16(scales)) * float(scales[2 + group]);
}

inline float stored_zero(const Part& part, const uint8_t* zeros, int32_t group) {
    return part.scale_bits == 16 ? half_to_float(load_u16(zeros + 2 * group))
                                 : half_to_float(load_u16(zeros)) * float(int8_t(zeros[2 + group]));
}

// All scales and zeros of a row, `num_groups` floats each.
inline void load_scales(const Part& part, const uint8_t* row, float* scales, float* zeros) {
    const uint8_t* stored_scales = row + part.scales_at;
    const uint8_t* stored_zeros = stored_scales + part.scale_bytes;
    if (part.scale_bits == 16) {
        for (int32_t g = 0; g < part.num_groups; ++g) {
            scales[g] = half_to_float(load_u16(stored_scales + 2 * g));
            zeros[g] = half_to_float(load_u16(stored_zeros + 2 * g));
        }
        return;
    }
    const float scale_step = half_to_float(load_u16(stored_scales));
    const float zero_step = half_to_float(load_u16(stored_zeros));
    for (int32_t g = 0; g < part.num_groups; ++g) {
        scales[g] = scale_step * float(stored_scales[2 + g]);
        zeros[g] = zero_step * float(int8_t(stored_zeros[2 + g]));
    }
}

inline float row_bias(const Part& part, const uint8_t* row) {
    return part.has_bias ? load_float(row + part.bias_at()) : 0.0f;
}

// One plane: byte j holds codes j, j + 8 BITS, ... from bit 0 up.
template <int BITS>
inline void unpack_plane(const uint8_t* __restrict plane, uint8_t* __restrict codes) {
    constexpr int RUN = 8 * BITS;
    for (int place = 0; place < 8 / BITS; ++place) {
        for (int j = 0; j < RUN; ++j) {
            codes[place * RUN + j] = uint8_t((plane[j] >> (place * BITS)) & ((1 << BITS) - 1));
        }
    }
}

// The 64 codes of a block, in natural order.
template <int WIDTH>
inline void unpack_block(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    if constexpr (WIDTH == 3) {
        uint8_t high[kBlock];
        unpack_plane<2>(block, codes);
        unpack_plane<1>(block + 16, high);
        for (int j = 0; j < kBlock; ++j) {
            codes[j] = uint8_t(codes[j] | (high[j] << 2));
        }
    } else {
        unpack_plane<WIDTH>(block, codes);
    }
}

template <int WIDTH>
inline void decode_affine(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* __restrict out) {
    const uint8_t* scales = row + part.scales_at;
    const uint8_t* zeros = scales + part.scale_bytes;
    // Left unknown to the compiler, which would unroll 16 steps instead of making vectors of them.
    const int32_t run = part.group < kBlock ? part.group : kBlock;
    uint8_t codes[kBlock];
    for (int32_t block = start; block < stop; block += kBlock) {
        unpack_block<WIDTH>(row + block / 8 * WIDTH, codes);
        for (int32_t first = 0; first < kBlock; first += run) {
            const int32_t group = (block + first) / part.group;
            const float scale = stored_scale(part, scales, group);
            const float zero = stored_zero(part, zeros, group);
            float* __restrict to = out + (block - start) + first;
            const uint8_t* from = codes + first;
            for (int32_t j = 0; j < run; ++j) {
                to[j] = (float(from[j]) - zero) * scale;
            }
        }
    }
}

// -- Codes of few bits that are floats themselves --------------------------------------------------------------------

// E4M3, one place up and its exponent in the place of a half's: the half is 2^-8 times as large. No number is 1.875.
constexpr float kE4m3Unit = 256.0f;

inline float e4m3_to_float(uint8_t code) {
    const float magnitude = half_to_float(uint16_t((code & 0x7f) << 7)) * kE4m3Unit;
    const uint32_t bits = (code & 0x7f) == 0x7f ? 0x7fc00000u : as_bits(magnitude);
    return as_float(bits | uint32_t(code & 0x80) << 24);
}

// Inputs of E5M2's products are so small that these are no larger than inputs themselves may be.
constexpr float kE5m2Share = 0x1p-16f;

inline float share_of_inputs(Codec codec) { return codec == Codec::e5m2 ? kE5m2Share : 1.0f; }

inline float e5m2_to_float(uint8_t code) { return half_to_float(uint16_t(code << 8)); }

constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// E8M0: 2^(byte - 127), of which byte 255 is no number. The smallest is a float32 subnormal.
inline float power_of_two(uint8_t byte) {
    const uint32_t ends = byte == 0 || byte == 255 ? 0x00400000u : 0;
    return as_float(uint32_t{byte} << 23 | ends);
}

// The same in two factors that are none: a weight times the one, then the other, is exact where modes flush subnormals.
struct PowerOfTwo {
    float first, second;

    explicit PowerOfTwo(uint8_t byte)
        : first(byte < 128 ? 0x1p-64f : 1.0f), second(power_of_two(uint8_t(byte < 128 ? byte + 64 : byte))) {}
};

// factor * 2^(byte - 127): in double, where neither is too large or too small.
inline float times_power(double factor, uint8_t byte) {
    const uint64_t bits = uint64_t(byte + (1023 - 127)) << 52;
    double power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return byte == 255 ? __builtin_nanf("") : float(factor * power);
}

inline uint8_t largest_byte(const uint8_t* bytes, int32_t count) {
    uint8_t largest = 0;
    for (int32_t i = 0; i < count; ++i) {
        largest = bytes[i] > largest ? bytes[i] : largest;
    }
    return largest;
}

constexpr int32_t kFp8Group = 128, kMxGroup = 32;

// Where codes are multiplied as integers, E2M1's are looked up: as (code - kE2m1Zero) * kE2m1Unit they are affine. This
// takes a width's place in templates.
constexpr int kE2m1 = -4;
constexpr int32_t kE2m1Zero = 12;
constexpr float kE2m1Unit = 0.5f;

constexpr int32_t bits_of(int width) { return width == kE2m1 ? 4 : width; }

// A trellis whose two weights have so many bits: this takes a width's place there as well. Its codes are levels made
// positive by trellis_zero: at most 61, or 124 where levels have 7 bits.
constexpr int trellis_of(int two_bits) { return 16 + two_bits; }
constexpr bool is_trellis(int width) { return width > 16; }
constexpr bool has_wide_levels(int two_bits) { return two_bits > 6; }
constexpr int32_t trellis_zero(int two_bits) { return has_wide_levels(two_bits) ? 64 : 32; }

// The codes of a trellis's levels in a half of each block, level `u` of set `p` at 16 u + p.
struct alignas(64) TrellisCodes {
    uint8_t of[64];

    constexpr TrellisCodes(int width, int half) : of() {
        for (int i = 0; i < 16 << refinement_bits(width, half); ++i) {
            of[i] = uint8_t(trellis_level(width, half, i) + trellis_zero(width));
        }
    }
};

template <int W, int HALF>
constexpr TrellisCodes kTrellisCodes = TrellisCodes(W, HALF);

// Whether a part's codes are multiplied as integers, with scales and zeros.
inline bool is_affine(const Part& part) { return part.codec == Codec::affine || part.codec == Codec::mxfp4; }

// Whether they are, perhaps without zeros.
inline bool has_digits(const Part& part) { return is_affine(part) || part.codec == Codec::trellis; }

// The float32 scale of a group of an fp8 row.
inline float fp8_scale(const Part& part, const uint8_t* row, int32_t group) {
    return load_float(row + part.scales_at + 4 * group);
}

inline void decode_fp8(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* __restrict out) {
    for (int32_t block = start; block < stop; block += kBlock) {
        const float scale = fp8_scale(part, row, block / kFp8Group);
        for (int32_t c = block; c < block + kBlock; ++c) {
            out[c - start] = e4m3_to_float(row[c]) * scale;
        }
    }
}

inline void decode_e5m2(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* __restrict out) {
    const PowerOfTwo scale(row[part.scales_at]);
    for (int32_t c = start; c < stop; ++c) {
        out[c - start] = e5m2_to_float(row[c]) * scale.first * scale.second;
    }
}

inline void decode_mxfp4(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* __restrict out) {
    uint8_t codes[kBlock];
    for (int32_t block = start; block < stop; block += kBlock) {
        unpack_block<4>(row + block / 2, codes);
        for (int32_t first = 0; first < kBlock; first += kMxGroup) {
            const PowerOfTwo scale(row[part.scales_at + (block + first) / kMxGroup]);
            for (int32_t j = first; j < first + kMxGroup; ++j) {
                out[block - start + j] = kE2m1Values[codes[j]] * scale.first * scale.second;
            }
        }
    }
}

// -- Trellises -------------------------------------------------------------------------------------------------------

// Of a row's codes, nibbles come first, kNibbleBytes a block; then, a block's together, what selects levels in sets.
constexpr int32_t kNibbleBytes = kBlock / 4;

constexpr int32_t refinement_bytes(int width) { return 4 * (width - 4); }

// Where a block's are, from the first code on.
inline size_t refinements_at(const Part& part, int32_t block) {
    return size_t(part.num_cols / 4 + block * refinement_bytes(part.width));
}

// Which of its set's levels column `c` of half a block has.
template <int BITS>
inline int32_t refinement_of(const uint8_t* half, int32_t c) {
    if constexpr (BITS == 0) {
        return 0;
    } else {
        constexpr int32_t RUN = 4 * BITS;  // bytes; each has the bits of columns so far apart
        return half[c % RUN] >> BITS * (c / RUN) & ((1 << BITS) - 1);
    }
}

// The hashes of a block's steps, by their first columns.
inline void trellis_hashes(const uint8_t* nibbles, bool is_first, uint8_t* __restrict hashes) {
    for (int j = 0; j < kNibbleBytes; ++j) {
        const uint8_t now = nibbles[j], before = is_first && j == 0 ? 0 : nibbles[j - 1];
        hashes[j] = kTrellisHash[0][now & 15] ^ kTrellisHash[1][before >> 4] ^ kTrellisHash[2][before & 15];
        hashes[j + 16] = kTrellisHash[0][now >> 4] ^ kTrellisHash[1][now & 15] ^ kTrellisHash[2][before >> 4];
    }
}

template <int WIDTH>
inline void decode_trellis(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* __restrict out) {
    const int32_t run = part.group < kBlock ? part.group : kBlock;
    for (int32_t block = start / kBlock; block * kBlock < stop; ++block) {
        uint8_t hashes[32];
        trellis_hashes(row + block * kNibbleBytes, block == 0, hashes);
        const uint8_t* first = row + refinements_at(part, block);
        const uint8_t* second = first + 4 * refinement_bits(WIDTH, 0);
        float* to = out + (block * kBlock - start);
        for (int32_t c = 0; c < 32; ++c) {
            const int32_t u = refinement_of<refinement_bits(WIDTH, 0)>(first, c);
            const int32_t v = refinement_of<refinement_bits(WIDTH, 1)>(second, c);
            to[c] = float(trellis_level(WIDTH, 0, 16 * u + (hashes[c] & 15)));
            to[c + 32] = float(trellis_level(WIDTH, 1, 16 * v + (hashes[c] >> 4)));
        }
        for (int32_t c = 0; c < kBlock; c += run) {
            const float scale = stored_scale(part, row + part.scales_at, (block * kBlock + c) / part.group);
            for (int32_t i = c; i < c + run; ++i) {
                to[i] *= scale;
            }
        }
    }
}

// Kernels::decode.
inline void decode(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* __restrict out) {
    switch (part.codec) {
        case Codec::bf16:
            for (int32_t c = start; c < stop; ++c) {
                out[c - start] = bf16_to_float(load_u16(row + 2 * c));
            }
            return;
        case Codec::f16:
            for (int32_t c = start; c < stop; ++c) {
                out[c - start] = half_to_float(load_u16(row + 2 * c));
            }
            return;
        case Codec::f32:
            __builtin_memcpy(out, row + 4 * size_t(start), 4 * size_t(stop - start));
            return;
        case Codec::fp8: return decode_fp8(part, row, start, stop, out);
        case Codec::e5m2: return decode_e5m2(part, row, start, stop, out);
        case Codec::mxfp4: return decode_mxfp4(part, row, start, stop, out);
        case Codec::trellis:
            switch (part.width) {
                case 4: return decode_trellis<4>(part, row, start, stop, out);
                case 5: return decode_trellis<5>(part, row, start, stop, out);
                case 6: return decode_trellis<6>(part, row, start, stop, out);
                case 7: return decode_trellis<7>(part, row, start, stop, out);
                default: return decode_trellis<8>(part, row, start, stop, out);
            }
        case Codec::affine:
            break;
    }
    switch (part.width) {
        case 1: return decode_affine<1>(part, row, start, stop, out);
        case 2: return decode_affine<2>(part, row, start, stop, out);
        case 3: return decode_affine<3>(part, row, start, stop, out);
        case 4: return decode_affine<4>(part, row, start, stop, out);
        default: return decode_affine<8>(part, row, start, stop, out);
    }
}

// Infinite or a NaN if one of the floats is: as integers, those are the largest.
inline float largest_magnitude(const float* x, int32_t n) {
    uint32_t largest = 0;
    for (int32_t c = 0; c < n; ++c) {
        const uint32_t magnitude = as_bits(x[c]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return as_float(largest);
}

inline bool is_finite(float value) { return (as_bits(value) & 0x7fffffffu) < 0x7f800000u; }

// A row's floats times `unit`, and zeros up to a multiple of 16; NaNs if one is not finite.
inline void prepare_floats(const Part& part, const float* x, float unit, float* __restrict prepared) {
    const bool finite = is_finite(largest_magnitude(x, part.num_cols));
    for (int32_t c = 0; c < part.num_cols; ++c) {
        prepared[c] = finite ? x[c] * unit : __builtin_nanf("");
    }
    for (int32_t c = part.num_cols; c % 16 != 0; ++c) {
        prepared[c] = 0.0f;
    }
}

inline size_t round_up(size_t count, size_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// The bytes wanted next while one row is read, from the lowest line on.
struct Prefetch {
    const uint8_t* at = nullptr;
    const uint8_t* stop = nullptr;

    Prefetch() = default;
    Prefetch(const Ahead& ahead, int32_t row_idx) {
        if (ahead.num_bytes > 0) {
            at = ahead.rows[row_idx];
            stop = at + ahead.num_bytes;
            at -= reinterpret_cast<uintptr_t>(at) % kLineBytes;
        }
    }

    void line() {
        if (at < stop) {
            // Into the first level and, what it cannot hold, the second: asked for that alone, less comes (Zen 5).
            __builtin_prefetch(at, 0, 3);
            at += kLineBytes;
        }
    }

    void lines(int32_t count) {
        for (int32_t i = 0; i < count; ++i) {
            line();
        }
    }

    void rest() {
        while (at < stop) {
            line();
        }
    }
};

}  // namespace
}  // namespace moe_pack
