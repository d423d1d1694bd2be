// Trellis rows with AVX2: windows cut out of the stream, what they stand for, products, sums of rows.
//
// For kernels_avx2.cpp alone, as codes_avx2.h is. Values are signed bytes, whose products with digits of inputs are
// exact; sums of rows are floats in natural order.
#pragma once

#include <immintrin.h>

#include "affine_avx2.h"

namespace moe_pack {
namespace {

// -- Values ----------------------------------------------------------------------------------------------------------

// How the windows of even (or odd) columns are cut out of 16 columns' bytes and the one before: two bytes go to each
// word, and a factor moves the window to the word's top.
struct alignas(32) Cut {
    uint8_t from[2][32];
    uint16_t factors[2][16];

    constexpr explicit Cut(int width) : from(), factors() {
        for (int i = 0; i < 32; ++i) {
            const int parity = i / 16, word = i % 8, lane = i % 16 / 8;
            const int begin = 8 + word * width + (parity == 1 ? width : width / 2) - kWindowBits;
            from[parity][16 * lane + 2 * word] = uint8_t(begin / 8);
            from[parity][16 * lane + 2 * word + 1] = uint8_t(begin / 8 + 1);
            factors[parity][8 * lane + word] = uint16_t(1 << (16 - kWindowBits - begin % 8));
        }
    }
};

// A table in pieces of 16 values, each but the first less (by exclusive or) the piece before.
struct alignas(16) Pieces {
    uint8_t bytes[8][16];

    constexpr Pieces(int width, int parity) : bytes() {
        for (int i = 0; i < kWindows; ++i) {
            const int8_t* value = trellis_table(width, parity) + i;
            bytes[i / 16][i % 16] = uint8_t(i < 16 ? *value : *value ^ value[-16]);
        }
    }
};

template <int W>
constexpr Cut kCut = Cut(W);
template <int W, int PARITY>
constexpr Pieces kPieces = Pieces(W, PARITY);

// Signed bytes for windows. A shuffle gives zero for bytes that have become negative, and else looks at four bits: as
// many pieces add up to the value as the window is beyond.
template <int W, int PARITY>
inline __m256i values_of(__m256i windows) {
    const Pieces& pieces = kPieces<W, PARITY>;
    __m256i values = _mm256_shuffle_epi8(load_twice(pieces.bytes[0]), windows);
    for (int i = 1; i < 8; ++i) {
        windows = _mm256_sub_epi8(windows, _mm256_set1_epi8(16));
        values = _mm256_xor_si256(values, _mm256_shuffle_epi8(load_twice(pieces.bytes[i]), windows));
    }
    return values;
}

// A block's values, signed bytes: in each word those of a column of its first half and of the same of its second.
struct Values {
    __m256i even, odd;  // columns

    // In natural order, of one half.
    __m256i half(int i) const {
        const __m256i low = _mm256_set1_epi16(0x00ff);
        return i == 0 ? _mm256_or_si256(_mm256_and_si256(even, low), _mm256_slli_epi16(odd, 8))
                      : _mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_andnot_si256(low, odd));
    }

    // As words, those of even (or odd) columns of one half.
    __m256i words(int half, int parity) const {
        const __m256i& both = parity == 0 ? even : odd;
        return _mm256_srai_epi16(half == 0 ? _mm256_slli_epi16(both, 8) : both, 8);
    }
};

// From the byte before a block on. Reads 15 bytes behind three quarters of the block.
template <int W>
inline Values load_values(const uint8_t* from) {
    const __m256i low = _mm256_set1_epi16(0x00ff);
    __m256i words[2][2], windows[2];
    for (int half = 0; half < 2; ++half) {
        const uint8_t* at = from + 2 * W * half;
        const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + W));
        const __m256i stream = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
        for (int parity = 0; parity < 2; ++parity) {
            const __m256i two = _mm256_shuffle_epi8(stream, load_bytes(kCut<W>.from[parity]));
            words[parity][half] = _mm256_mullo_epi16(two, load_bytes(kCut<W>.factors[parity]));
        }
    }
    for (int parity = 0; parity < 2; ++parity) {
        const __m256i first = _mm256_srli_epi16(words[parity][0], 9);
        windows[parity] = _mm256_or_si256(first, _mm256_andnot_si256(low, _mm256_srli_epi16(words[parity][1], 1)));
    }
    return {values_of<W, 0>(windows[0]), values_of<W, W % 2>(windows[1])};
}

// A block's values, wherever it lies in its row.
template <int W>
inline Values values_of_block(const Part& part, const uint8_t* row, int32_t block) {
    if (block == 0 || (block + 1) * kBlock == part.num_cols) {
        return load_values<W>(PaddedBlock(row, block, 4 * W).bytes);
    }
    return load_values<W>(row + block * 4 * W - 1);
}

// -- Rows times inputs -----------------------------------------------------------------------------------------------

// Prepared inputs: header, then 24-bit fixed point in two signed digits of 12 bits, words, by block, digit, half and
// parity of columns.
constexpr int32_t kTrellisBlock = 2 * kBlock;  // words of a block: 64 high digits, 64 low

size_t prepared_trellis_bytes(const Part& part) { return kHeaderBytes + 4 * size_t(part.num_cols); }

void prepare_trellis(const Part& part, const float* x, void* prepared) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    *static_cast<float*>(prepared) = finite ? peak : __builtin_nanf("");
    int16_t* digits = reinterpret_cast<int16_t*>(static_cast<uint8_t*>(prepared) + kHeaderBytes);
    if (!finite || peak == 0.0f) {
        __builtin_memset(digits, 0, 4 * size_t(part.num_cols));
        return;
    }
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // as for codes
    const float steps = kPeak / (peak * lift);
    for (int32_t block = 0; block < part.num_cols; block += kBlock, digits += kTrellisBlock) {
        for (int32_t c = 0; c < kBlock; c += 8) {
            const __m256 lifted = _mm256_mul_ps(_mm256_loadu_ps(x + block + c), _mm256_set1_ps(lift));
            const __m256i fixed = _mm256_cvtps_epi32(_mm256_mul_ps(lifted, _mm256_set1_ps(steps)));
            const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(fixed, _mm256_set1_epi32(2048)), 12);
            const __m256i low = _mm256_sub_epi32(fixed, _mm256_slli_epi32(high, 12));
            const __m256i packed = _mm256_packs_epi32(high, low);  // columns 0 to 3 of both, 4 to 7 of both
            alignas(32) int16_t words[16];
            _mm256_store_si256(reinterpret_cast<__m256i*>(words), packed);
            for (int i = 0; i < 16; ++i) {
                const int digit = i / 4 % 2, col = c + i / 8 * 4 + i % 4;
                digits[digit * kBlock + col / 32 * 32 + col % 2 * 16 + col % 32 / 2] = words[i];
            }
        }
    }
}

// Values times one digit of inputs, of one half of a block or of both; each of eight sums takes four columns of a half.
// Those of 16 columns are in one lane.
template <int HALVES>
inline __m256 times_digit(const __m256i words[2][2], const int16_t* digits) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 2 * HALVES; ++i) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words[i / 2][i % 2], load_bytes(digits + 16 * i)));
    }
    return _mm256_cvtepi32_ps(sum);  // exact
}

template <int HALVES>
inline __m256 trellis_products(const __m256i words[2][2], const int16_t* digits) {
    const __m256 high = times_digit<HALVES>(words, digits), low = times_digit<HALVES>(words, digits + kBlock);
    return _mm256_fmadd_ps(high, _mm256_set1_ps(4096.0f), low);
}

template <int W, int UNIT>
float dot_trellis(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float* work) {
    const float peak = *static_cast<const float*>(prepared);
    const int16_t* digits = reinterpret_cast<const int16_t*>(static_cast<const uint8_t*>(prepared) + kHeaderBytes);
    for (int32_t g = 0; g < part.num_groups; g += 8) {
        _mm256_store_ps(work + g, load_eight(part, row + part.code_bytes, g, false));
    }
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t b = 0; b < num_blocks; ++b, digits += kTrellisBlock) {
        prefetch.line();
        const Values values = values_of_block<W>(part, row, b);
        const __m256i words[2][2] = {{values.words(0, 0), values.words(0, 1)},
                                     {values.words(1, 0), values.words(1, 1)}};
        if constexpr (UNIT == kBlock) {
            const __m256 scale = _mm256_set1_ps(work[b >> shift]);
            sums[0] = _mm256_fmadd_ps(trellis_products<2>(words, digits), scale, sums[0]);
        } else {
            for (int v = 0; v < 2; ++v) {
                const __m256 half = trellis_products<1>(words + v, digits + 32 * v);
                sums[v] = _mm256_fmadd_ps(half, half_scales<UNIT>(work, b, v), sums[v]);
            }
        }
    }
    return lanes_total(_mm256_add_ps(sums[0], sums[1])) * (1.0f / kPeak) * peak;
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// Eight signed bytes as floats.
inline __m256 load_signed(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

inline void store_values(const Values& values, int8_t* to) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), values.half(0));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32), values.half(1));
}

template <int W, int UNIT>
void add_trellis(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, Prefetch* prefetches,
                 float* work, float* sum) {
    const size_t stride = padded_groups(part);
    for (int32_t r = 0; r < num_rows; ++r) {
        for (int32_t g = 0; g < part.num_groups; g += 8) {
            const __m256 scale = load_eight(part, rows[r] + part.code_bytes, g, false);
            _mm256_store_ps(work + r * stride + g, _mm256_mul_ps(scale, _mm256_set1_ps(h[r])));
        }
    }
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    for (int32_t b = 0; b < num_blocks; ++b) {
        __m256 sums[8];
        for (int v = 0; v < 8; ++v) {
            sums[v] = _mm256_load_ps(sum + b * kBlock + 8 * v);
        }
        for (int32_t r = 0; r < num_rows; ++r) {
            prefetches[r].line();
            alignas(32) int8_t values[kBlock];
            store_values(values_of_block<W>(part, rows[r], b), values);
            const float* scales = work + r * stride + (UNIT == kBlock ? b >> shift : b * (kBlock / UNIT));
            for (int v = 0; v < 8; ++v) {
                const __m256 scale = _mm256_set1_ps(scales[UNIT == kBlock ? 0 : 8 * v / UNIT]);
                sums[v] = _mm256_fmadd_ps(load_signed(values + 8 * v), scale, sums[v]);
            }
        }
        for (int v = 0; v < 8; ++v) {
            _mm256_store_ps(sum + b * kBlock + 8 * v, sums[v]);
        }
    }
}

template <int W>
void decode_windows(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const int32_t unit = unit_of(part);
    const int32_t group_shift = part.num_groups == 1 ? 31 : __builtin_ctz(uint32_t(part.group));
    __m256 scale = _mm256_setzero_ps();
    for (int32_t block = start; block < stop; block += kBlock) {
        alignas(32) int8_t values[kBlock];
        store_values(values_of_block<W>(part, row, block / kBlock), values);
        for (int32_t first = 0; first < kBlock; first += 8) {
            if (first % unit == 0) {
                scale = load_group(part, row + part.code_bytes, (block + first) >> group_shift, false);
            }
            _mm256_storeu_ps(out + (block - start) + first, _mm256_mul_ps(load_signed(values + first), scale));
        }
    }
}

}  // namespace
}  // namespace moe_pack
