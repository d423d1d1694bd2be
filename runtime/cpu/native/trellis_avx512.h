// Trellis rows as AVX-512 registers: windows cut out of the stream, and what they stand for (docs/format.md).
//
// For the files that codes_avx512.h is for. MOE_PACK_VBMI says that their target has VBMI: it cuts windows out of 64
// bits at any place, and looks bytes up. Without it both are done by words. Values are made positive (kTrellisZero).
#pragma once

#include <immintrin.h>

#include "codes_avx512.h"

namespace moe_pack {
namespace {

// -- Places ----------------------------------------------------------------------------------------------------------

// Where windows lie in a stream of which two columns have W bits.
template <int W>
struct Stream {
    static constexpr bool has_two_tables = W % 2 == 1;
    static constexpr int planes = planes_of(trellis_of(W));
    static constexpr int part_bytes = planes * W / 2;  // of the chunk's eight parts

    // The first bit of a column's window, counted from that of column 0.
    static constexpr int begin(int col) { return col / 2 * W + (col % 2 ? W : W / 2) - kWindowBits; }

    // The column, within its part, whose window is the i-th of a plane's eight: a plane has one table.
    static constexpr int col_of(int plane, int i) {
        return has_two_tables ? plane / 2 * 16 + 2 * i + plane % 2 : 8 * plane + i;
    }

    // Whether a plane's windows lie in the 64 bits that begin with the byte before its part.
    static constexpr bool is_low(int plane) { return 8 + begin(col_of(plane, 7)) + kWindowBits <= 64; }

    // The first bit of the i-th window of a plane in these 64 bits, or in the 64 that begin with its part.
    static constexpr int place(int plane, int i) { return (is_low(plane) ? 8 : 0) + begin(col_of(plane, i)); }
};

struct alignas(64) Bytes {
    uint8_t byte[64];

    __m512i loaded() const { return _mm512_load_si512(byte); }
};

struct alignas(64) Shorts {
    uint16_t word[32];

    __m512i loaded() const { return _mm512_load_si512(word); }
};

// Half of a table: the values of windows below 64, or the others.
struct Half {
    Bytes bytes;

    constexpr Half(int width, int parity, int half) : bytes() {
        for (int i = 0; i < 64; ++i) {
            bytes.byte[i] = uint8_t(trellis_table(width, parity)[64 * half + i] + kTrellisZero);
        }
    }
};

template <int W, int PARITY, int HALF>
constexpr Half kValues = Half(W, PARITY, HALF);

// Whether the sums of a block's columns are taken with even columns first, then odd ones: where these have tables of
// their own, and the block one scale.
#if defined(MOE_PACK_VBMI)
template <int WIDTH, int UNIT>
constexpr bool kSplits = is_trellis(WIDTH) && WIDTH % 2 == 1 && UNIT == kBlock;
#else
template <int WIDTH, int UNIT>
constexpr bool kSplits = false;
#endif

#if defined(MOE_PACK_VBMI)

// -- With VBMI -------------------------------------------------------------------------------------------------------

template <int W, int PARITY>
MOE_PACK_INLINE inline __m512i values_of(__m512i windows) {
    const __m512i low = kValues<W, PARITY, 0>.bytes.loaded(), high = kValues<W, PARITY, 1>.bytes.loaded();
    return _mm512_permutex2var_epi8(low, windows, high);
}

// Which bytes go where, so that each 64 bits hold their eight windows, and where these begin in them.
struct Cut {
    Bytes from, shifts;

    MOE_PACK_INLINE __m512i windows(__m512i stream) const {
        return _mm512_multishift_epi64_epi8(shifts.loaded(), _mm512_permutexvar_epi8(from.loaded(), stream));
    }
};

// A block's 64 columns in natural order, from its bytes and the one before.
template <int W>
constexpr Cut cut_of_block() {
    Cut cut = {};
    for (int i = 0; i < 64; ++i) {
        const int first = i / 8 * W / 2;
        cut.from.byte[i] = uint8_t(first + i % 8);
        cut.shifts.byte[i] = uint8_t(8 + Stream<W>::begin(i) - 8 * first);
    }
    return cut;
}

// A block of two rows lies in the register's halves, and before each the byte that precedes it. What is cut out are 32
// columns of both, a column's two windows in a word: those from `FIRST` on, all or every other one. Every other four
// words are of the second half of these columns: unpacked with two other rows, columns are in order.
template <int W, int FIRST, int STEP>
constexpr Cut cut_of_two() {
    Cut cut = {};
    for (int i = 0; i < 64; ++i) {
        const int word = i / 16 * 4 + i / 8 % 2 * 16, col = FIRST + STEP * (word + i % 8 / 2);
        const int first = (8 + Stream<W>::begin(FIRST + STEP * word)) / 8;
        cut.from.byte[i] = uint8_t(first + i % 4 + i % 8 / 4 * 32);
        cut.shifts.byte[i] = uint8_t(8 + Stream<W>::begin(col) - 8 * first + i % 2 * 32);
    }
    return cut;
}

template <int W>
constexpr Cut kBlockCut = cut_of_block<W>();
template <int W, int FIRST, int STEP>
constexpr Cut kTwoCut = cut_of_two<W, FIRST, STEP>();

// Even bytes' (or words') values are those of even columns, odd ones' of odd columns.
template <int W>
MOE_PACK_INLINE inline __m512i values_of_both(__m512i windows, __mmask64 is_odd) {
    const __m512i even = values_of<W, 0>(windows);
    return W % 2 == 0 ? even : _mm512_mask_blend_epi8(is_odd, even, values_of<W, 1>(windows));
}

template <int W>
MOE_PACK_INLINE inline __m512i block_values(const uint8_t* block, bool is_first) {
    constexpr __mmask64 there = (2ull << 4 * W) - 1;
    const __m512i stream = _mm512_maskz_loadu_epi8(is_first ? there - 1 : there, block - 1);
    return values_of_both<W>(kBlockCut<W>.windows(stream), 0xaaaaaaaaaaaaaaaa);
}

// A block of two rows from byte `at` on, or half of it, and each time the byte before.
template <int NUM_BYTES>
MOE_PACK_INLINE inline __m512i two_of(const uint8_t* const rows[2], size_t at, bool is_first) {
    constexpr __mmask32 there = (2ull << NUM_BYTES) - 1;
    const __mmask32 mask = is_first ? there - 1 : there;
    const __m256i first = _mm256_maskz_loadu_epi8(mask, rows[0] + at - 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_maskz_loadu_epi8(mask, rows[1] + at - 1), 1);
}

// A block of four rows from byte `at` on, as codes_of_four has them; `SPLITS`: but first even columns, then odd ones.
template <int W, bool SPLITS>
MOE_PACK_INLINE inline void trellis_of_four(const uint8_t* const rows[4], size_t at, __m512i codes[4]) {
    constexpr bool in_one = 4 * W < 32;
    __m512i streams[2];
    if constexpr (in_one) {
        unrolled<2>([&](auto i) MOE_PACK_INLINE { streams[i.value] = two_of<4 * W>(rows + 2 * i.value, at, at == 0); });
    }
    unrolled<2>([&](auto half) MOE_PACK_INLINE {
        constexpr int HALF = decltype(half)::value, STEP = SPLITS ? 2 : 1;
        constexpr int FIRST = SPLITS ? HALF : in_one ? 32 * HALF : 0;
        __m512i pairs[2];
        unrolled<2>([&](auto i) MOE_PACK_INLINE {
            if constexpr (!in_one) {
                streams[i.value] = two_of<2 * W>(rows + 2 * i.value, at + 2 * W * HALF, HALF == 0 && at == 0);
            }
            const __m512i windows = kTwoCut<W, FIRST, STEP>.windows(streams[i.value]);
            pairs[i.value] = SPLITS ? values_of<W, W % 2 * HALF>(windows)
                                    : values_of_both<W>(windows, 0xcccccccccccccccc);
        });
        codes[2 * HALF] = _mm512_unpacklo_epi16(pairs[0], pairs[1]);
        codes[2 * HALF + 1] = _mm512_unpackhi_epi16(pairs[0], pairs[1]);
    });
}

// Bytes 8 i on: those of part i of a chunk, and the one before, or eight of its own.
template <int W>
MOE_PACK_INLINE inline __m512i parts_of(__m512i stream) {
    if constexpr (Stream<W>::part_bytes == 8) {
        return stream;
    } else {
        constexpr auto from = [] {
            Bytes made = {};
            for (int i = 0; i < 64; ++i) {
                made.byte[i] = uint8_t(i / 8 * Stream<W>::part_bytes + i % 8);
            }
            return made;
        };
        static constexpr Bytes kFrom = from();
        return _mm512_permutexvar_epi8(kFrom.loaded(), stream);
    }
}

template <int W, int PLANE>
MOE_PACK_INLINE inline __m512i plane_values(__m512i parts) {
    constexpr auto shifts = [] {
        Bytes made = {};
        for (int i = 0; i < 64; ++i) {
            made.byte[i] = uint8_t(Stream<W>::place(PLANE, i % 8));
        }
        return made;
    };
    static constexpr Bytes kShifts = shifts();
    return values_of<W, W % 2 * (PLANE % 2)>(_mm512_multishift_epi64_epi8(kShifts.loaded(), parts));
}

#else

// -- Without ---------------------------------------------------------------------------------------------------------

// How windows are cut out of each 16 bytes as words: even bytes' of the result, then odd ones'. Two bytes go to each
// word; a window's lowest bit is where `lowest` says, and the others are the word's lowest after a shift.
struct Cut {
    Bytes from[2];
    Shorts lowest[2], shifts[2];

    constexpr Cut() : from(), lowest(), shifts() {}

    // Byte i of the result has the window that begins with this bit of its 16 bytes.
    constexpr void set(int i, int bit) {
        const int word = i / 2;
        from[i % 2].byte[2 * word] = uint8_t(bit / 8);
        from[i % 2].byte[2 * word + 1] = uint8_t(bit / 8 < 15 ? bit / 8 + 1 : 0x80);
        lowest[i % 2].word[word] = uint16_t(1 << bit % 8);
        shifts[i % 2].word[word] = uint16_t(bit % 8 + 1);
    }
};

// What the windows of even bytes, or of odd ones, stand for, there; what is in the others is to be left out.
template <int W, int PARITY, int TABLE>
MOE_PACK_INLINE inline __m512i values_of(const Cut& cut, __m512i stream) {
    const __m512i words = _mm512_shuffle_epi8(stream, cut.from[PARITY].loaded());
    const __m512i high = _mm512_srlv_epi16(words, cut.shifts[PARITY].loaded());
    const __m512i low_half = kValues<W, TABLE, 0>.bytes.loaded(), high_half = kValues<W, TABLE, 1>.bytes.loaded();
    const __m512i pairs = _mm512_permutex2var_epi16(low_half, high, high_half);
    const __mmask32 is_second = _mm512_test_epi16_mask(words, cut.lowest[PARITY].loaded());
    return PARITY == 0 ? _mm512_mask_srli_epi16(pairs, is_second, pairs, 8)
                       : _mm512_mask_slli_epi16(pairs, ~is_second, pairs, 8);
}

template <int W, int EVEN, int ODD>
MOE_PACK_INLINE inline __m512i values_of_both(const Cut& cut, __m512i stream) {
    const __m512i even = values_of<W, 0, EVEN>(cut, stream), odd = values_of<W, 1, ODD>(cut, stream);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), even, odd, 0xca);
}

// Which words go where, so that each 16 bytes hold what its windows need.
template <int STRIDE_NUMERATOR>
MOE_PACK_INLINE inline __m512i lanes_of(__m512i stream) {
    constexpr auto from = [] {
        Shorts made = {};
        for (int i = 0; i < 32; ++i) {
            made.word[i] = uint16_t((i / 8 * STRIDE_NUMERATOR / 2 + i % 8) % 32);
        }
        return made;
    };
    static constexpr Shorts kFrom = from();
    return _mm512_permutexvar_epi16(kFrom.loaded(), stream);
}

// A block's 64 columns in natural order, from its bytes and the one before: 16 columns are W bytes.
template <int W>
constexpr Cut cut_of_block() {
    Cut cut;
    for (int i = 0; i < 64; ++i) {
        cut.set(i, 8 + Stream<W>::begin(i) - i / 16 * W / 2 * 16);
    }
    return cut;
}

template <int W>
constexpr Cut kBlockCut = cut_of_block<W>();

template <int W>
MOE_PACK_INLINE inline __m512i block_values(const uint8_t* block, bool is_first) {
    constexpr __mmask64 there = (2ull << 4 * W) - 1;
    const __m512i stream = _mm512_maskz_loadu_epi8(is_first ? there - 1 : there, block - 1);
    return values_of_both<W, 0, W % 2>(kBlockCut<W>, lanes_of<W>(stream));
}

// A block of four rows from byte `at` on, as codes_of_four has them.
template <int W, bool SPLITS>
MOE_PACK_INLINE inline void trellis_of_four(const uint8_t* const rows[4], size_t at, __m512i codes[4]) {
    __m512i blocks[4];
    unrolled<4>([&](auto r) MOE_PACK_INLINE { blocks[r.value] = block_values<W>(rows[r.value] + at, at == 0); });
    __m512i quarters[4];  // of each 16 columns
    unrolled<2>([&](auto half) MOE_PACK_INLINE {
        const auto two = [&](int i) MOE_PACK_INLINE {
            return half.value == 0 ? _mm512_unpacklo_epi8(blocks[i], blocks[i + 1])
                                   : _mm512_unpackhi_epi8(blocks[i], blocks[i + 1]);
        };
        const __m512i first = two(0), second = two(2);
        quarters[2 * half.value] = _mm512_unpacklo_epi16(first, second);
        quarters[2 * half.value + 1] = _mm512_unpackhi_epi16(first, second);
    });
    __m512i halves[4];
    unrolled<2>([&](auto i) MOE_PACK_INLINE {
        halves[2 * i.value] = _mm512_shuffle_i32x4(quarters[2 * i.value], quarters[2 * i.value + 1], 0x44);
        halves[2 * i.value + 1] = _mm512_shuffle_i32x4(quarters[2 * i.value], quarters[2 * i.value + 1], 0xee);
    });
    unrolled<2>([&](auto i) MOE_PACK_INLINE {
        codes[2 * i.value] = _mm512_shuffle_i32x4(halves[i.value], halves[i.value + 2], 0x88);
        codes[2 * i.value + 1] = _mm512_shuffle_i32x4(halves[i.value], halves[i.value + 2], 0xdd);
    });
}

template <int W>
MOE_PACK_INLINE inline __m512i parts_of(__m512i stream) {
    if constexpr (Stream<W>::part_bytes == 8) {
        return stream;
    } else {
        return lanes_of<2 * Stream<W>::part_bytes>(stream);
    }
}

template <int W, int PLANE>
MOE_PACK_INLINE inline __m512i plane_values(__m512i parts) {
    constexpr auto cut = [] {
        Cut made;
        for (int i = 0; i < 64; ++i) {
            made.set(i, i % 16 / 8 * 8 * Stream<W>::part_bytes + Stream<W>::place(PLANE, i % 8));
        }
        return made;
    };
    static constexpr Cut kCut = cut();
    constexpr int table = W % 2 * (PLANE % 2);
    return values_of_both<W, table, table>(kCut, parts);
}

#endif

// -- Rows ------------------------------------------------------------------------------------------------------------

// A chunk's bytes, and the one before: eight parts, a plane having eight columns of each.
template <int WIDTH>
struct Codes<WIDTH, true> {
    static constexpr int W = WIDTH - trellis_of(0);
    __m512i low, high;

    // Of a chunk's bytes from `from` on, `num_bytes` belong to the row.
    MOE_PACK_INLINE Codes(const uint8_t* from, int32_t num_bytes, bool is_first) {
        if (num_bytes >= 64 && !is_first) {
            low = parts_of<W>(_mm512_loadu_si512(from - 1));
        } else {
            const __mmask64 there = num_bytes >= 63 ? ~0ull : (2ull << num_bytes) - 1;
            low = parts_of<W>(_mm512_maskz_loadu_epi8(is_first ? there & ~1ull : there, from - 1));
        }
        if constexpr (!Stream<W>::is_low(Stream<W>::planes - 1)) {
            high = num_bytes >= 64 ? _mm512_loadu_si512(from)
                                   : _mm512_maskz_loadu_epi8((1ull << num_bytes) - 1, from);
        }
    }

    // What the windows of a plane stand for, a byte each.
    template <int PLANE>
    __m512i plane() const {
        return plane_values<W, PLANE>(Stream<W>::is_low(PLANE) ? low : high);
    }
};

template <int W>
void decode_windows(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const int32_t unit = unit_of(part);
    const int32_t group_shift = part.num_groups == 1 ? 31 : __builtin_ctz(uint32_t(part.group));
    __m512 scale = _mm512_setzero_ps();
    for (int32_t block = start; block < stop; block += kBlock) {
        const __m512i values = block_values<W>(row + block / kBlock * 4 * W, block == 0);
        const __m512i centred = _mm512_xor_si512(values, _mm512_set1_epi8(int8_t(kTrellisZero)));
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            constexpr int Q = decltype(q)::value;
            if (16 * Q % unit == 0) {
                scale = load_group(part, row + part.code_bytes, (block + 16 * Q) >> group_shift, false);
            }
            const __m512 sixteen = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(centred, Q)));
            _mm512_storeu_ps(out + (block - start) + 16 * Q, _mm512_mul_ps(sixteen, scale));
        });
    }
}

}  // namespace
}  // namespace moe_pack
