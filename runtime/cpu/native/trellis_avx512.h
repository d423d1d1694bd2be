// Trellis rows as AVX-512 registers: what selects levels, and levels as codes (docs/pack.md, section 8).
//
// For the files that codes_avx512.h is for. MOE_PACK_VBMI says that their target has VBMI, which looks bytes up among
// 64 and needs no masks. Codes are levels made positive (`trellis_zero`).
#pragma once

#include <immintrin.h>

#include "codes_avx512.h"

namespace moe_pack {
namespace {

// -- Lookups ---------------------------------------------------------------------------------------------------------

struct alignas(64) Bytes {
    uint8_t byte[64];

    __m512i loaded() const { return _mm512_load_si512(byte); }
};

// So many bytes again and again.
constexpr Bytes repeated(const uint8_t* table, int count) {
    Bytes made = {};
    for (int i = 0; i < 64; ++i) {
        made.byte[i] = table[i % count];
    }
    return made;
}

template <int NUMBER>
constexpr Bytes kHash = repeated(kTrellisHash[NUMBER], 16);

// The lowest of the bits that select a level in its set, in bytes that have a column's: 16 columns of half a block, in
// each 128 bits a byte a column, or (`FOURS`) four, one a row.
template <int BITS, int SIXTEEN, bool FOURS>
constexpr int bit_of(int byte) {
    const int column = 16 * SIXTEEN + (FOURS ? byte / 4 : byte % 16);
    return BITS * (column / (4 * BITS));
}

#if defined(MOE_PACK_VBMI)

// Nibbles, and sets of levels, are the lowest four bits of bytes; what is above does not count.
MOE_PACK_INLINE inline __m512i low_nibbles(__m512i bytes) { return bytes; }
MOE_PACK_INLINE inline __m512i high_nibbles(__m512i bytes) { return _mm512_srli_epi16(bytes, 4); }

MOE_PACK_INLINE inline __m512i looked_up(const Bytes& table, __m512i nibbles) {
    return _mm512_permutexvar_epi8(nibbles, table.loaded());
}

template <int W, int HALF>
constexpr Bytes kCodes = repeated(kTrellisCodes<W, HALF>.of, 16 << refinement_bits(W, HALF));

// Which bits of 64 go to each byte, so that those that select a level are above the four of its set.
template <int BITS, int SIXTEEN, bool FOURS>
constexpr Bytes shifts() {
    Bytes made = {};
    for (int i = 0; i < 64; ++i) {
        made.byte[i] = uint8_t((8 * (i % 8) + bit_of<BITS, SIXTEEN, FOURS>(i) - 4) & 63);
    }
    return made;
}

template <int BITS, int SIXTEEN, bool FOURS>
constexpr Bytes kShifts = shifts<BITS, SIXTEEN, FOURS>();

// The codes of sets' levels.
template <int W, int HALF, int SIXTEEN, bool FOURS>
MOE_PACK_INLINE inline __m512i codes_of_sets(__m512i sets, __m512i refinements) {
    constexpr int BITS = refinement_bits(W, HALF);
    __m512i numbers = sets;
    if constexpr (BITS > 0) {
        const __m512i chosen = _mm512_multishift_epi64_epi8(kShifts<BITS, SIXTEEN, FOURS>.loaded(), refinements);
        numbers = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), sets, chosen, 0xca);
    }
    return looked_up(kCodes<W, HALF>, numbers);
}

#else

MOE_PACK_INLINE inline __m512i low_nibbles(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
MOE_PACK_INLINE inline __m512i high_nibbles(__m512i bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }

MOE_PACK_INLINE inline __m512i looked_up(const Bytes& table, __m512i nibbles) {
    return _mm512_shuffle_epi8(table.loaded(), nibbles);
}

template <int W, int HALF, int LEVEL>
constexpr Bytes kCodes = repeated(kTrellisCodes<W, HALF>.of + 16 * LEVEL, 16);

template <int BITS, int SIXTEEN, bool FOURS>
constexpr Bytes masks(int bit) {
    Bytes made = {};
    for (int i = 0; i < 64; ++i) {
        made.byte[i] = uint8_t(1 << (bit_of<BITS, SIXTEEN, FOURS>(i) + bit));
    }
    return made;
}

template <int BITS, int SIXTEEN, bool FOURS, int BIT>
constexpr Bytes kMasks = masks<BITS, SIXTEEN, FOURS>(BIT);

// The codes of sets' levels.
template <int W, int HALF, int SIXTEEN, bool FOURS>
MOE_PACK_INLINE inline __m512i codes_of_sets(__m512i sets, __m512i refinements) {
    constexpr int BITS = refinement_bits(W, HALF);
    __m512i codes = looked_up(kCodes<W, HALF, 0>, sets);
    if constexpr (BITS > 0) {
        const __mmask64 odd = _mm512_test_epi8_mask(refinements, kMasks<BITS, SIXTEEN, FOURS, 0>.loaded());
        codes = _mm512_mask_shuffle_epi8(codes, odd, kCodes<W, HALF, 1>.loaded(), sets);
        if constexpr (BITS > 1) {
            const __mmask64 high = _mm512_test_epi8_mask(refinements, kMasks<BITS, SIXTEEN, FOURS, 1>.loaded());
            __m512i others = looked_up(kCodes<W, HALF, 2>, sets);
            others = _mm512_mask_shuffle_epi8(others, odd, kCodes<W, HALF, 3>.loaded(), sets);
            codes = _mm512_mask_mov_epi8(codes, high, others);
        }
    }
    return codes;
}

#endif

// The hashes of steps from their nibbles, those of the steps before, and those of the steps before these.
MOE_PACK_INLINE inline __m512i hashes_of(__m512i newest, __m512i middle, __m512i oldest) {
    return _mm512_ternarylogic_epi32(looked_up(kHash<0>, newest), looked_up(kHash<1>, middle),
                                     looked_up(kHash<2>, oldest), 0x96);
}

// -- A row -----------------------------------------------------------------------------------------------------------

// A chunk's codes: plane q has columns 16 q to 16 q + 15 of each of its four blocks.
template <int WIDTH>
struct Codes<WIDTH, true> {
    __m512i planes[4];

    template <int PLANE>
    __m512i plane() const {
        return planes[PLANE];
    }
};

// A row's chunks from any block on.
template <int WIDTH>
struct Chunks<WIDTH, true> {
    static constexpr int W = WIDTH - trellis_of(0);
    const uint8_t *nibbles, *refinements;
    int32_t left;  // blocks
    bool is_first;

    MOE_PACK_INLINE Chunks(const Part& part, const uint8_t* row, int32_t block = 0)
        : nibbles(row + block * kNibbleBytes),
          refinements(row + refinements_at(part, block)),
          left(part.num_cols / kBlock - block),
          is_first(block == 0) {}

    MOE_PACK_INLINE bool more() const { return left > 0; }

    MOE_PACK_INLINE Codes<WIDTH> next() {
        const __mmask64 here = left >= 4 ? ~0ull : (1ull << left * kNibbleBytes) - 1;
        const __m512i bytes = _mm512_maskz_loadu_epi8(here, nibbles);
        const __m512i before = _mm512_maskz_loadu_epi8(is_first ? here & ~1ull : here, nibbles - 1);
        const __m512i even = low_nibbles(bytes), odd = high_nibbles(bytes), last_odd = high_nibbles(before);
        const __m512i even_hashes = hashes_of(even, last_odd, low_nibbles(before));
        const __m512i odd_hashes = hashes_of(odd, even, last_odd);
        const __m512i stored = load_refinements();
        const __m512i first = of_half<0>(stored), second = of_half<1>(stored);
        const Codes<WIDTH> codes = {{codes_of_sets<W, 0, 0, false>(low_nibbles(even_hashes), first),
                                     codes_of_sets<W, 0, 1, false>(low_nibbles(odd_hashes), first),
                                     codes_of_sets<W, 1, 0, false>(high_nibbles(even_hashes), second),
                                     codes_of_sets<W, 1, 1, false>(high_nibbles(odd_hashes), second)}};
        nibbles += 4 * kNibbleBytes;
        refinements += 4 * refinement_bytes(W);
        left -= 4;
        is_first = false;
        return codes;
    }

  private:
    // Of four blocks, one after the other.
    MOE_PACK_INLINE __m512i load_refinements() const {
        if constexpr (W == 4) {
            return _mm512_setzero_si512();
        } else {
            constexpr int WORDS = W - 4;  // a block
            const __mmask16 here = __mmask16((1u << WORDS * (left < 4 ? left : 4)) - 1);
            return _mm512_maskz_loadu_epi32(here, refinements);
        }
    }

    // Half a block's 4 bytes (or 8) as often as they fit in its 16.
    template <int HALF>
    static MOE_PACK_INLINE __m512i of_half(__m512i stored) {
        constexpr int BITS = refinement_bits(W, HALF), FIRST = HALF * refinement_bits(W, 0), WORDS = W - 4;
        if constexpr (BITS == 0) {
            return stored;
        } else {
            const __m512i from = _mm512_setr_epi32(
                FIRST, FIRST + 1 % BITS, FIRST, FIRST + 1 % BITS, WORDS + FIRST, WORDS + FIRST + 1 % BITS,
                WORDS + FIRST, WORDS + FIRST + 1 % BITS, 2 * WORDS + FIRST, 2 * WORDS + FIRST + 1 % BITS,
                2 * WORDS + FIRST, 2 * WORDS + FIRST + 1 % BITS, 3 * WORDS + FIRST, 3 * WORDS + FIRST + 1 % BITS,
                3 * WORDS + FIRST, 3 * WORDS + FIRST + 1 % BITS);
            return _mm512_permutexvar_epi32(from, stored);
        }
    }
};

// -- Four rows -------------------------------------------------------------------------------------------------------

// Rows taken four at a time, block by block; what precedes a block's nibbles stays from one to the next.
template <int WIDTH>
struct Fours<WIDTH, true> {
    static constexpr int W = WIDTH - trellis_of(0);
    const Part& part;
    __m512i before[kMaxTile / 4][2];  // nibbles of even steps of the block before, and of odd ones: the last ones count

    MOE_PACK_INLINE explicit Fours(const Part& of) : part(of) {
        for (auto& both : before) {
            both[0] = both[1] = _mm512_setzero_si512();
        }
    }

    MOE_PACK_INLINE void codes(const uint8_t* const rows[4], int32_t four, int32_t block, __m512i codes[4]) {
        const __m512i bytes = sixteen_of_four(rows, size_t(block) * kNibbleBytes);
        const __m512i even = low_nibbles(bytes), odd = high_nibbles(bytes);
        const __m512i last_even = _mm512_alignr_epi32(even, before[four][0], 15);
        const __m512i last_odd = _mm512_alignr_epi32(odd, before[four][1], 15);
        before[four][0] = even;
        before[four][1] = odd;
        const __m512i hashes[2] = {hashes_of(even, last_odd, last_even), hashes_of(odd, even, last_odd)};
        const __m512i stored = load_refinements(rows, block);
        const __m512i first = of_half<0>(stored), second = of_half<1>(stored);
        unrolled<2>([&](auto i) MOE_PACK_INLINE {
            constexpr int SIXTEEN = decltype(i)::value;
            codes[SIXTEEN] = codes_of_sets<W, 0, SIXTEEN, true>(low_nibbles(hashes[SIXTEEN]), first);
            codes[SIXTEEN + 2] = codes_of_sets<W, 1, SIXTEEN, true>(high_nibbles(hashes[SIXTEEN]), second);
        });
    }

  private:
    // A block's refinements of four rows: every double word has a byte of each.
    MOE_PACK_INLINE __m512i load_refinements(const uint8_t* const rows[4], int32_t block) const {
        const size_t at = refinements_at(part, block);
        if constexpr (W == 4) {
            return _mm512_setzero_si512();
        } else if constexpr (W == 5) {
            int32_t words[4];
            unrolled<4>([&](auto r) MOE_PACK_INLINE { __builtin_memcpy(words + r.value, rows[r.value] + at, 4); });
            const __m128i all = _mm_setr_epi32(words[0], words[1], words[2], words[3]);
            return _mm512_castsi128_si512(
                _mm_shuffle_epi8(all, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
        } else if constexpr (W == 6) {
            int64_t words[4];
            unrolled<4>([&](auto r) MOE_PACK_INLINE { __builtin_memcpy(words + r.value, rows[r.value] + at, 8); });
            return interleaved(_mm512_setr_epi64(words[0], 0, words[1], 0, words[2], 0, words[3], 0));
        } else if constexpr (W == 7) {
            __m512i all = _mm512_castsi128_si512(_mm_maskz_loadu_epi32(7, rows[0] + at));
            all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi32(7, rows[1] + at), 1);
            all = _mm512_inserti32x4(all, _mm_maskz_loadu_epi32(7, rows[2] + at), 2);
            return interleaved(_mm512_inserti32x4(all, _mm_maskz_loadu_epi32(7, rows[3] + at), 3));
        } else {
            return sixteen_of_four(rows, at);
        }
    }

    // Half a block's 4 double words (or 8) as often as they fit.
    template <int HALF>
    static MOE_PACK_INLINE __m512i of_half(__m512i stored) {
        constexpr int BITS = refinement_bits(W, HALF), LANE = HALF * refinement_bits(W, 0);  // where they begin
        if constexpr (BITS == 0) {
            return stored;
        } else {
            return _mm512_shuffle_i32x4(stored, stored, LANE * 0x55 + (BITS == 2 ? 0x44 : 0));
        }
    }
};

// -- Weights ---------------------------------------------------------------------------------------------------------

template <int W>
void decode_blocks(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const int32_t unit = unit_of(part);
    const int32_t group_shift = part.num_groups == 1 ? 31 : __builtin_ctz(uint32_t(part.group));
    __m512 scale = _mm512_setzero_ps();
    Chunks<trellis_of(W)> chunks(part, row, start / kBlock);
    alignas(64) int8_t levels[4][4][16];  // by plane and block
    for (int32_t block = start; block < stop; block += kBlock, out += kBlock) {
        const int32_t lane = (block - start) / kBlock % 4;
        if (lane == 0) {
            const Codes<trellis_of(W)> codes = chunks.next();
            unrolled<4>([&](auto q) MOE_PACK_INLINE {
                const __m512i zero = _mm512_set1_epi8(int8_t(trellis_zero(W)));
                _mm512_store_si512(levels[q.value], _mm512_sub_epi8(codes.planes[q.value], zero));
            });
        }
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            if (16 * q.value % unit == 0) {
                scale = load_group(part, row + part.scales_at, (block + 16 * q.value) >> group_shift, false);
            }
            const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(levels[q.value][lane]));
            const __m512 whole = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen));
            _mm512_storeu_ps(out + 16 * q.value, _mm512_mul_ps(whole, scale));
        });
    }
}

}  // namespace
}  // namespace moe_pack
