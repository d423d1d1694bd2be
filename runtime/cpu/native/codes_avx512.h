// Rows as AVX-512 registers: chunks of codes, scales by the unit, their weights (docs/pack.md, section 8).
//
// For kernels_avx512.cpp alone, which includes it once its target is set; internal linkage as in vector.h.
#pragma once

#include <immintrin.h>

#include "codes.h"
#include "vector.h"

#define MOE_PACK_INLINE __attribute__((always_inline))

namespace moe_pack {
namespace {

// Of a row (of rows), their sum, and a row decoded: what row_kernels.h and trellis_kernels.h choose.
using DotRow = void (*)(const Part&, const uint8_t* const*, int32_t, const void*, const Ahead&, float*);
using AddRow = decltype(Kernels::add_rows);
using DecodeRow = void (*)(const Part&, const uint8_t*, int32_t, int32_t, float*);

// use(Index<0>), ..., use(Index<N - 1>): unlike those of a loop, indices are constants before registers are given out,
// and arrays of registers stay in them (GCC 12).
template <int I>
struct Index {
    static constexpr int value = I;
};

template <int N, class Use>
MOE_PACK_INLINE inline void unrolled(const Use& use) {
    if constexpr (N > 0) {
        unrolled<N - 1>(use);
        use(Index<N - 1>{});
    }
}

inline __mmask16 first_lanes_mask(int32_t count) { return count >= 16 ? 0xffff : __mmask16((1u << count) - 1); }

constexpr int32_t planes_of(int width) {
    return is_trellis(width) ? 4 : width == 3 ? 4 : 8 / bits_of(width);
}

// As many blocks as planes: 64 bytes of codes with most widths, of which each shift gives a plane of 64 codes. A plane
// has one run of codes of each block. A trellis's chunks are those of codes of 2 bits.
template <int WIDTH>
struct Chunk {
    static constexpr int planes = planes_of(WIDTH);
    static constexpr int run = kBlock / planes;
    static constexpr int cols = kBlock * planes;
    static constexpr int code_bytes = planes * 8 * bits_of(WIDTH);
};

inline int32_t planes_of(const Part& part) {
    return planes_of(part.codec == Codec::trellis ? trellis_of(part.width) : part.width);
}

inline int32_t num_chunks(const Part& part) {
    const int32_t cols = kBlock * planes_of(part);
    return (part.num_cols + cols - 1) / cols;
}

// -- Scales ----------------------------------------------------------------------------------------------------------

inline int32_t num_units(const Part& part) { return part.num_cols / unit_of(part); }

struct alignas(64) Lanes {
    int32_t lane[16];
};

// How units lie in a chunk. Its planes fall into sets whose lanes, of four codes each, belong to the same units.
template <int WIDTH, int UNIT>
struct Units {
    using C = Chunk<WIDTH>;
    static constexpr int a_chunk = C::cols / UNIT;
    static constexpr int planes_each = UNIT < C::run ? 1 : UNIT / C::run < C::planes ? UNIT / C::run : C::planes;
    static constexpr int sets = C::planes / planes_each;
    static constexpr int registers = a_chunk > 16 ? 2 : 1;  // of a span: the units that are loaded at once
    static constexpr int a_span = 16 * registers;
    static constexpr int span_chunks = a_span / a_chunk;

    // The unit within the first chunk of a span, lane by lane.
    static constexpr Lanes lanes_of(int set) {
        Lanes lanes = {};
        for (int i = 0; i < 16; ++i) {
            const int place = 4 * i / C::run, col = C::run * set * planes_each + 4 * i % C::run;
            lanes.lane[i] = (place * kBlock + col) / UNIT;
        }
        return lanes;
    }
    template <int SET>
    static constexpr Lanes kLanes = lanes_of(SET);

    template <int SET>
    static __m512i index(int32_t chunk_in_span) {
        return _mm512_add_epi32(_mm512_load_si512(kLanes<SET>.lane), _mm512_set1_epi32(chunk_in_span * a_chunk));
    }

    // Of a span's units, those of a set.
    static __m512 spread(const __m512* units, __m512i index) {
        if constexpr (registers == 2) {
            return _mm512_permutex2var_ps(units[0], index, units[1]);
        } else {
            return _mm512_permutexvar_ps(index, units[0]);
        }
    }
};

// A row's scales and zeros, 16 units at a time. Scales of mxfp4 are those over 2^(top - 127), for a `top` that none
// exceeds.
struct StoredScales {
    const uint8_t *scales, *zeros;
    const Part& part;
    int32_t top;

    StoredScales(const Part& of, const uint8_t* row, int32_t of_top = 127)
        : scales(row + of.scales_at), zeros(scales + of.scale_bytes), part(of), top(of_top) {}

    // Zeros after the last group. `is_signed`: zeros of groups.
    static __m512 load_groups(const Part& part, const uint8_t* stored, int32_t first, __mmask16 mask, bool is_signed) {
        if (part.scale_bits == 16) {
            return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, stored + 2 * first));
        }
        const __m128i bytes = _mm_maskz_loadu_epi8(mask, stored + 2 + first);
        const __m512i steps = is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
        return _mm512_mul_ps(_mm512_cvtepi32_ps(steps), _mm512_set1_ps(_cvtsh_ss(load_u16(stored))));
    }

    // E8M0; what is below 2^-126 is zero, but for the smallest of all.
    __m512 load_powers(int32_t first, __mmask16 mask) const {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, scales + first));
        const __m512i moved = _mm512_add_epi32(bytes, _mm512_set1_epi32(127 - top));
        const __m512i powers = _mm512_slli_epi32(_mm512_max_epi32(moved, _mm512_setzero_si512()), 23);
        const __mmask16 is_end = _mm512_cmpeq_epi32_mask(moved, _mm512_setzero_si512()) |
                                 _mm512_cmpeq_epi32_mask(moved, _mm512_set1_epi32(255));
        const __m512i ended = _mm512_mask_or_epi32(powers, is_end, powers, _mm512_set1_epi32(0x00400000));
        return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(mask, ended));
    }

    void load(int32_t first_unit, __m512* scale, __m512* zero) const {
        if (part.codec == Codec::mxfp4) {
            const int32_t left = part.num_groups - first_unit;
            *scale = load_powers(first_unit, left <= 0 ? 0 : first_lanes_mask(left));
            *zero = _mm512_set1_ps(float(kE2m1Zero) * kE2m1Unit);
        } else if (part.num_groups == 1) {
            *scale = _mm512_broadcastss_ps(_mm512_castps512_ps128(load_groups(part, scales, 0, 1, false)));
            *zero = _mm512_broadcastss_ps(_mm512_castps512_ps128(load_groups(part, zeros, 0, 1, true)));
        } else if (part.group == 2 * kBlock) {
            const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            const int32_t first = first_unit / 2;
            const __mmask16 mask = first_lanes_mask(part.num_groups - first) & 0xff;
            *scale = _mm512_permutexvar_ps(twice, load_groups(part, scales, first, mask, false));
            *zero = _mm512_permutexvar_ps(twice, load_groups(part, zeros, first, mask, true));
        } else {
            const int32_t left = part.num_groups - first_unit;
            const __mmask16 mask = left <= 0 ? 0 : first_lanes_mask(left);
            *scale = load_groups(part, scales, first_unit, mask, false);
            *zero = load_groups(part, zeros, first_unit, mask, true);
        }
    }

    // Of a trellis, which has no zeros.
    __m512 load(int32_t first_unit) const {
        if (part.num_groups == 1) {
            return _mm512_broadcastss_ps(_mm512_castps512_ps128(load_groups(part, scales, 0, 1, false)));
        }
        if (part.group == 2 * kBlock) {
            const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            const int32_t first = first_unit / 2;
            const __mmask16 mask = first_lanes_mask(part.num_groups - first) & 0xff;
            return _mm512_permutexvar_ps(twice, load_groups(part, scales, first, mask, false));
        }
        const int32_t left = part.num_groups - first_unit;
        return load_groups(part, scales, first_unit, left <= 0 ? 0 : first_lanes_mask(left), false);
    }
};

// -- Codes -----------------------------------------------------------------------------------------------------------

// Twice each of E2M1's numbers, made positive.
inline __m512i e2m1_codes(__m512i nibbles) {
    const __m128i codes = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(codes), nibbles);
}

// A chunk's codes; those behind the row are zero. (Of a trellis: trellis_avx512.h.)
template <int WIDTH, bool IS_TRELLIS = is_trellis(WIDTH)>
struct Codes {
    __m512i low, high;  // high: third bits, with 3-bit codes, in the places of the low ones' first bits

    // Of a chunk's bytes from `from` on, `num_bytes` belong to the row.
    MOE_PACK_INLINE Codes(const uint8_t* from, int32_t num_bytes) {
        if constexpr (WIDTH == 3) {
            const __mmask64 here = num_bytes >= 64 ? ~0ull : (1ull << num_bytes) - 1;
            const __mmask32 behind = num_bytes >= 96 ? ~0u : num_bytes > 64 ? (1u << (num_bytes - 64)) - 1 : 0;
            const __m512i a = _mm512_maskz_loadu_epi8(here, from);
            const __m512i b = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(behind, from + 64));
            low = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 3, 4, 6, 7, 9, 10), b);
            high = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 2, 5, 5, 8, 8, 11, 11), b);
            // Codes 8 to 15 of a plane have their third bits one place above those of 0 to 7.
            high = _mm512_srlv_epi64(high, _mm512_setr_epi64(0, 1, 0, 1, 0, 1, 0, 1));
        } else {
            low = num_bytes >= 64 ? _mm512_loadu_si512(from)
                                  : _mm512_maskz_loadu_epi8((1ull << num_bytes) - 1, from);
        }
    }

    // The 64 codes of a plane, a byte each.
    template <int PLANE>
    __m512i plane() const {
        if constexpr (WIDTH == 8) {
            return low;
        } else if constexpr (WIDTH == kE2m1) {
            const __m512i shifted = PLANE > 0 ? _mm512_srli_epi16(low, 4) : low;
            return e2m1_codes(_mm512_and_si512(shifted, _mm512_set1_epi8(15)));
        } else if constexpr (WIDTH == 3) {
            const __m512i two = PLANE > 0 ? _mm512_srli_epi16(low, 2 * PLANE) : low;
            const __m512i third = PLANE > 1   ? _mm512_srli_epi16(high, 2 * PLANE - 2)
                                  : PLANE > 0 ? high
                                              : _mm512_slli_epi16(high, 2);
            const __m512i three = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), two, third, 0xca);
            return _mm512_and_si512(three, _mm512_set1_epi8(7));
        } else {
            const __m512i shifted = PLANE > 0 ? _mm512_srli_epi16(low, WIDTH * PLANE) : low;
            return _mm512_and_si512(shifted, _mm512_set1_epi8((1 << WIDTH) - 1));
        }
    }
};

// A row's chunks, one after the other.
template <int WIDTH, bool IS_TRELLIS = is_trellis(WIDTH)>
struct Chunks {
    const uint8_t* at;
    int32_t left;

    MOE_PACK_INLINE Chunks(const Part& part, const uint8_t* row) : at(row), left(part.code_bytes) {}

    MOE_PACK_INLINE bool more() const { return left > 0; }

    MOE_PACK_INLINE Codes<WIDTH> next() {
        const Codes<WIDTH> codes(at, left);
        at += Chunk<WIDTH>::code_bytes;
        left -= Chunk<WIDTH>::code_bytes;
        return codes;
    }
};

// 16 bytes of each of four rows: every double word has those of one place.
inline __m512i interleaved(__m512i rows) {
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(places, rows), bytes);
}

MOE_PACK_INLINE inline __m512i sixteen_of_four(const uint8_t* const rows[4], size_t at) {
    const auto load = [&](int r) MOE_PACK_INLINE {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + at));
    };
    __m512i all = _mm512_castsi128_si512(load(0));
    all = _mm512_mask_broadcast_i32x4(all, 0x00f0, load(1));
    all = _mm512_mask_broadcast_i32x4(all, 0x0f00, load(2));
    return interleaved(_mm512_mask_broadcast_i32x4(all, 0xf000, load(3)));
}

// Eight bytes of each of four rows, twice, the second time shifted: places 2 q are 16 codes of one bit each.
MOE_PACK_INLINE inline __m512i eight_of_four(const uint8_t* const rows[4], size_t at) {
    const auto load = [&](int r) MOE_PACK_INLINE {
        int64_t eight;
        __builtin_memcpy(&eight, rows[r] + at, sizeof eight);
        return eight;
    };
    __m512i all = _mm512_set1_epi64(load(0));
    all = _mm512_mask_set1_epi64(all, 0x0c, load(1));
    all = _mm512_mask_set1_epi64(all, 0x30, load(2));
    all = _mm512_mask_set1_epi64(all, 0xc0, load(3));
    return interleaved(_mm512_srlv_epi64(all, _mm512_setr_epi64(0, 1, 0, 1, 0, 1, 0, 1)));
}

// What codes_of_four's register q must be divided by: codes are taken where they stand in their bytes, E2M1's as they
// are looked up.
template <int WIDTH>
constexpr int32_t places_of_four(int q) {
    if (WIDTH == kE2m1) return int32_t(1 / kE2m1Unit);
    return WIDTH == 8 || is_trellis(WIDTH) ? 1 : WIDTH == 4 ? (q < 2 ? 1 : 16) : WIDTH == 3 && q == 3 ? 16 : 1 << 2 * q;
}

// A block of four rows from byte `at` on: register q has columns 16 q on, a double word each, a byte a row.
template <int WIDTH>
MOE_PACK_INLINE inline void codes_of_four(const uint8_t* const rows[4], size_t at, __m512i codes[4]) {
    if constexpr (WIDTH == 8) {
        unrolled<4>([&](auto q) MOE_PACK_INLINE { codes[q.value] = sixteen_of_four(rows, at + 16 * q.value); });
    } else if constexpr (WIDTH == 4) {
        const __m512i low = _mm512_set1_epi8(15);
        unrolled<2>([&](auto q) MOE_PACK_INLINE {
            const __m512i both = sixteen_of_four(rows, at + 16 * q.value);
            codes[q.value] = _mm512_and_si512(both, low);
            codes[q.value + 2] = _mm512_andnot_si512(low, both);
        });
    } else if constexpr (WIDTH == kE2m1) {
        const __m512i low = _mm512_set1_epi8(15);
        unrolled<2>([&](auto q) MOE_PACK_INLINE {
            const __m512i both = sixteen_of_four(rows, at + 16 * q.value);
            codes[q.value] = e2m1_codes(_mm512_and_si512(both, low));
            codes[q.value + 2] = e2m1_codes(_mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        });
    } else if constexpr (WIDTH == 3) {
        const __m512i two = sixteen_of_four(rows, at), one = eight_of_four(rows, at + 16);
        const __m512i third = _mm512_slli_epi16(one, 2);  // of the last 16 codes it is where it would be lost
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            const __m512i low = q.value == 3 ? _mm512_srli_epi16(two, 2) : two, high = q.value == 3 ? one : third;
            constexpr int32_t place = places_of_four<WIDTH>(decltype(q)::value);
            codes[q.value] = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3 * place), low, high, 0xca);
            codes[q.value] = _mm512_and_si512(codes[q.value], _mm512_set1_epi8(7 * place));
        });
    } else {
        const __m512i all = WIDTH == 2 ? sixteen_of_four(rows, at) : eight_of_four(rows, at);
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            constexpr int32_t mask = ((1 << WIDTH) - 1) * places_of_four<WIDTH>(decltype(q)::value);
            codes[q.value] = _mm512_and_si512(all, _mm512_set1_epi8(int8_t(mask)));
        });
    }
}

// Codes of rows taken four at a time (`four` is their number), one block after the other. A trellis's needs the block
// before: trellis_avx512.h.
template <int WIDTH, bool IS_TRELLIS = is_trellis(WIDTH)>
struct Fours {
    MOE_PACK_INLINE explicit Fours(const Part&) {}

    MOE_PACK_INLINE void codes(const uint8_t* const rows[4], int32_t /*four*/, int32_t block,
                               __m512i codes[4]) {
        codes_of_four<WIDTH>(rows, size_t(block) * 8 * bits_of(WIDTH), codes);
    }
};

// -- Weights ---------------------------------------------------------------------------------------------------------

inline __m512i load_sixteen(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Eight bytes twice, the second time shifted by a place: 16 codes of the lowest bits, one of 1-bit planes.
inline __m512i load_eight_twice(const uint8_t* from) {
    int64_t eight;
    __builtin_memcpy(&eight, from, sizeof eight);
    return _mm512_cvtepu8_epi32(_mm_set_epi64x((eight >> 1) & 0x7f7f7f7f7f7f7f7f, eight));
}

// The codes of a block, 16 a register; with less than 8 bits only the lowest ones of each lane count.
template <int WIDTH>
MOE_PACK_INLINE inline void block_codes(const uint8_t* block, __m512i codes[4]) {
    if constexpr (WIDTH == 8) {
        unrolled<4>([&](auto q) MOE_PACK_INLINE { codes[q.value] = load_sixteen(block + 16 * q.value); });
    } else if constexpr (WIDTH == 4) {
        codes[0] = load_sixteen(block);
        codes[1] = load_sixteen(block + 16);
        codes[2] = _mm512_srli_epi32(codes[0], 4);
        codes[3] = _mm512_srli_epi32(codes[1], 4);
    } else {
        const __m512i ones = WIDTH == 2 ? __m512i{} : load_eight_twice(WIDTH == 3 ? block + 16 : block);
        const __m512i twos = WIDTH == 1 ? ones : load_sixteen(block);
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            codes[q.value] = _mm512_srli_epi32(twos, 2 * q.value);
            if constexpr (WIDTH == 3) {
                const __m512i third = _mm512_slli_epi32(_mm512_srli_epi32(ones, 2 * q.value), 2);
                codes[q.value] = _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), codes[q.value], third, 0xca);
            }
        });
    }
}

// One group's scale (or zero, `is_signed`) in all lanes.
inline __m512 load_group(const Part& part, const uint8_t* stored, int32_t group, bool is_signed) {
    if (part.scale_bits == 16) {
        return _mm512_set1_ps(_cvtsh_ss(load_u16(stored + 2 * group)));
    }
    const int32_t steps = is_signed ? int8_t(stored[2 + group]) : stored[2 + group];
    return _mm512_set1_ps(_cvtsh_ss(load_u16(stored)) * float(steps));
}

template <int WIDTH>
void decode_codes(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const StoredScales stored(part, row);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // All codes there are, again and again: lookups use the lowest four bits.
    const __m512 all = _mm512_cvtepi32_ps(_mm512_and_si512(lanes, _mm512_set1_epi32((1 << (WIDTH & 7)) - 1)));
    const int32_t unit = unit_of(part);
    const int32_t group_shift = part.num_groups == 1 ? 31 : __builtin_ctz(uint32_t(part.group));
    __m512 scale = _mm512_setzero_ps(), zero = scale, weights = scale;
    for (int32_t block = start; block < stop; block += kBlock) {
        __m512i codes[4];
        block_codes<WIDTH>(row + block / 8 * WIDTH, codes);
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            if (16 * q.value % unit == 0) {
                const int32_t group = (block + 16 * q.value) >> group_shift;
                scale = load_group(part, stored.scales, group, false);
                zero = load_group(part, stored.zeros, group, true);
                weights = _mm512_mul_ps(_mm512_sub_ps(all, zero), scale);
            }
            __m512 sixteen;
            if constexpr (WIDTH == 8) {
                sixteen = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(codes[q.value]), zero), scale);
            } else {
                sixteen = _mm512_permutexvar_ps(codes[q.value], weights);
            }
            _mm512_storeu_ps(out + (block - start) + 16 * q.value, sixteen);
        });
    }
}

inline void decode_e2m1(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const __m512 numbers = _mm512_loadu_ps(kE2m1Values);
    for (int32_t block = start; block < stop; block += kBlock) {
        __m512i codes[4];
        block_codes<4>(row + block / 2, codes);
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            const PowerOfTwo scale(row[part.scales_at + (block + 16 * q.value) / kMxGroup]);
            const __m512 scaled = _mm512_mul_ps(numbers, _mm512_set1_ps(scale.first));
            const __m512 weights = _mm512_mul_ps(scaled, _mm512_set1_ps(scale.second));
            _mm512_storeu_ps(out + (block - start) + 16 * q.value, _mm512_permutexvar_ps(codes[q.value], weights));
        });
    }
}

// -- What comes next -------------------------------------------------------------------------------------------------

// The bytes wanted next, row after row.
struct PrefetchRows {
    const uint8_t* const* rows;  // after the one in hand
    int32_t left, num_bytes;     // of them, and of each
    const uint8_t *at = nullptr, *stop = nullptr;

    MOE_PACK_INLINE PrefetchRows(const Ahead& ahead, int32_t num_rows)
        : rows(ahead.rows), left(ahead.num_bytes > 0 ? num_rows : 0), num_bytes(ahead.num_bytes) {
        next();
    }

    MOE_PACK_INLINE void next() {
        if (left > 0) {
            --left;
            at = *rows++;
            stop = at + num_bytes;
            at -= reinterpret_cast<uintptr_t>(at) % kLineBytes;
        }
    }

    // Up to MOST lines of one row, perhaps some behind it.
    template <int MOST>
    MOE_PACK_INLINE void lines(int32_t count) {
        if (at < stop) {
            unrolled<MOST>([&](auto i) MOE_PACK_INLINE {
                if (i.value < count) {
                    __builtin_prefetch(at + i.value * kLineBytes, 0, 3);
                }
            });
            at += count * kLineBytes;
        } else {
            next();
        }
    }

    void rest() {
        while (at < stop || left > 0) {
            lines<1>(1);
        }
    }
};

}  // namespace
}  // namespace moe_pack
