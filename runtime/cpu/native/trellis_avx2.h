// Trellis rows with AVX2: what selects levels, levels as codes, products, sums of rows.
//
// For trellis_avx2.cpp alone, as codes_avx2.h is for kernels_avx2.cpp. Codes are multiplied as affine ones are; their
// zero, the same in all groups, is taken off the products of each lane (`TrellisInputs`), or off sums of rows.
#pragma once

#include <immintrin.h>

#include "affine_avx2.h"

namespace moe_pack {
namespace {

// -- Codes -----------------------------------------------------------------------------------------------------------

// A block's nibbles, those of even steps in the low lane, of odd ones in the high lane: first columns are in order.
inline __m256i load_nibbles(const uint8_t* block) {
    const __m256i places = _mm256_srlv_epi64(load_twice(block), _mm256_setr_epi64x(0, 0, 4, 4));
    return _mm256_and_si256(places, _mm256_set1_epi8(15));
}

// The hashes of a block's steps from its nibbles and those of the block before (of which the last two count).
inline __m256i hashes_of(__m256i newest, __m256i before) {
    const __m256i oldest = _mm256_alignr_epi8(newest, before, 15);
    const __m256i middle = _mm256_permute2x128_si256(newest, oldest, 0x03);  // odd steps before even ones
    const __m256i of_newest = _mm256_shuffle_epi8(load_twice(kTrellisHash[0]), newest);
    const __m256i of_middle = _mm256_shuffle_epi8(load_twice(kTrellisHash[1]), middle);
    const __m256i of_oldest = _mm256_shuffle_epi8(load_twice(kTrellisHash[2]), oldest);
    return _mm256_xor_si256(_mm256_xor_si256(of_newest, of_middle), of_oldest);
}

// The codes of sets' levels in half a block. A shift moves what selects a level to the top of its byte.
template <int W, int HALF>
inline __m256i codes_of_sets(__m256i sets, const uint8_t* refinements) {
    constexpr int BITS = refinement_bits(W, HALF);
    const TrellisCodes& codes = kTrellisCodes<W, HALF>;
    __m256i levels[1 << BITS];
    for (int u = 0; u < 1 << BITS; ++u) {
        levels[u] = _mm256_shuffle_epi8(load_twice(codes.of + 16 * u), sets);
    }
    if constexpr (BITS == 0) {
        return levels[0];
    } else if constexpr (BITS == 1) {
        int32_t four;
        __builtin_memcpy(&four, refinements, sizeof four);
        const __m256i second = _mm256_sllv_epi32(_mm256_set1_epi32(four), _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
        return _mm256_blendv_epi8(levels[0], levels[1], second);
    } else {
        const __m256i all = load_four_times(refinements);
        const __m256i odd = _mm256_sllv_epi64(all, _mm256_setr_epi64x(7, 5, 3, 1));
        const __m256i high = _mm256_sllv_epi64(all, _mm256_setr_epi64x(6, 4, 2, 0));
        return _mm256_blendv_epi8(_mm256_blendv_epi8(levels[0], levels[1], odd),
                                  _mm256_blendv_epi8(levels[2], levels[3], odd), high);
    }
}

template <int W>
inline Codes codes_of_nibbles(__m256i newest, __m256i before, const uint8_t* refinements) {
    const __m256i hashes = hashes_of(newest, before), low = _mm256_set1_epi8(15);
    const __m256i first = _mm256_and_si256(hashes, low);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(hashes, 4), low);
    return {{codes_of_sets<W, 0>(first, refinements),
             codes_of_sets<W, 1>(second, refinements + 4 * refinement_bits(W, 0))}};
}

// A row's blocks, one after the other.
template <int W>
struct TrellisBlocks {
    const uint8_t *nibbles, *refinements;
    __m256i before;

    TrellisBlocks(const Part& part, const uint8_t* row, int32_t first)
        : nibbles(row + first * kNibbleBytes),
          refinements(row + refinements_at(part, first)),
          before(first == 0 ? _mm256_setzero_si256() : load_nibbles(nibbles - kNibbleBytes)) {}

    Codes next() {
        const __m256i newest = load_nibbles(nibbles);
        const Codes codes = codes_of_nibbles<W>(newest, before, refinements);
        before = newest;
        nibbles += kNibbleBytes;
        refinements += refinement_bytes(W);
        return codes;
    }
};

// -- Rows times inputs -----------------------------------------------------------------------------------------------

// Whether both halves of a block are multiplied in the same lanes: they have one scale, and eight products of codes less
// their zero fit 32 bits (8 * 32 * kPeak < 2^31; what exceeds them before, the subtraction brings back).
constexpr bool joins_halves(int two_bits, int32_t unit) { return unit == kBlock && !has_wide_levels(two_bits); }

// Prepared inputs: header (their peak; their sum, an integer), digits by block, then what lanes of products have too
// much: the zero of codes times the sum of a lane's columns, 16 lanes a block or, where halves are joined, 8. With one
// scale a row there are none of these, and the sum of all serves.
struct TrellisInputs {
    float peak;
    int64_t sum;
    const int8_t* digits;
    const int32_t* zeros;

    TrellisInputs(const Part& part, const void* prepared)
        : peak(*static_cast<const float*>(prepared)),
          sum(static_cast<const int64_t*>(prepared)[1]),
          digits(static_cast<const int8_t*>(prepared) + kHeaderBytes),
          zeros(reinterpret_cast<const int32_t*>(digits + kDigits * part.num_cols)) {}

    static size_t num_zeros(const Part& part) {
        if (part.num_groups == 1) {
            return 0;
        }
        return size_t(part.num_cols) / (joins_halves(part.width, unit_of(part)) ? 8 : 4);
    }
};

size_t prepared_trellis_bytes(const Part& part) {
    return round_up(kHeaderBytes + size_t(kDigits) * part.num_cols + 4 * TrellisInputs::num_zeros(part), 64);
}

void prepare_trellis(const Part& part, const float* x, void* prepared) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    *static_cast<float*>(prepared) = finite ? peak : __builtin_nanf("");
    int64_t& sum = static_cast<int64_t*>(prepared)[1];
    sum = 0;
    int8_t* digits = static_cast<int8_t*>(prepared) + kHeaderBytes;
    int32_t* zeros = reinterpret_cast<int32_t*>(digits + kDigits * part.num_cols);
    const size_t num_zeros = TrellisInputs::num_zeros(part);
    __builtin_memset(zeros, 0, 4 * num_zeros);
    if (!finite || peak == 0.0f) {
        __builtin_memset(digits, 0, size_t(kDigits) * part.num_cols);
        return;
    }
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // as for codes
    const float steps = kPeak / (peak * lift);
    const int32_t lanes = joins_halves(part.width, unit_of(part)) ? 8 : 16;
    for (int32_t block = 0; block < part.num_cols; block += kBlock, zeros += lanes) {
        int32_t fixed[kBlock];
        split_block(x + block, lift, steps, fixed, digits + block * kDigits);
        for (int32_t c = 0; c < kBlock; c += 4) {
            const int32_t four = fixed[c] + fixed[c + 1] + fixed[c + 2] + fixed[c + 3];
            sum += four;
            if (num_zeros > 0) {
                uint32_t& zero = reinterpret_cast<uint32_t*>(zeros)[c / 4 % lanes];  // which may exceed 31 bits
                zero += uint32_t(trellis_zero(part.width)) * uint32_t(four);
            }
        }
    }
}

// One row with one scale: products of each digit are added up to the row's end. A lane's are at most 8 * 124 * 128 a
// block, which with kMaxCols is below 2^31.
template <int W>
float dot_one_scale(const Part& part, const uint8_t* row, const TrellisInputs& inputs, Prefetch& prefetch) {
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t* digits = inputs.digits;
    __m256i sums[kDigits] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    TrellisBlocks<W> blocks(part, row, 0);
    for (int32_t c = 0; c < part.num_cols; c += kBlock, digits += kDigitBytes) {
        prefetch.line();
        const Codes codes = blocks.next();
        for (int k = 0; k < kDigits; ++k) {
            if constexpr (has_wide_levels(W)) {
                for (int v = 0; v < 2; ++v) {
                    const __m256i pairs = _mm256_maddubs_epi16(codes.half[v], load_bytes(digits + k * kBlock + 32 * v));
                    sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(pairs, ones));
                }
            } else {
                const __m256i pairs = add_products(codes.half, 2, digits + k * kBlock);
                sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    int64_t total = 0;
    for (int k = kDigits - 1; k >= 0; --k) {
        alignas(32) int32_t lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums[k]);
        total *= 256;
        for (int32_t lane : lanes) {
            total += lane;
        }
    }
    const __m256 scale = load_group(part, row + part.scales_at, 0, false);
    return float(double(total - trellis_zero(W) * inputs.sum) * _mm256_cvtss_f32(scale) * (1.0 / kPeak) * inputs.peak);
}

template <int W, int UNIT>
float dot_trellis(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch, float* work) {
    constexpr int WIDTH = trellis_of(W);
    const TrellisInputs inputs(part, prepared);
    if (UNIT == kBlock && part.num_groups == 1) {
        return dot_one_scale<W>(part, row, inputs, prefetch);
    }
    for (int32_t g = 0; g < part.num_groups; g += 8) {
        _mm256_store_ps(work + g, load_eight(part, row + part.scales_at, g, false));
    }
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    const int8_t* digits = inputs.digits;
    const int32_t* zeros = inputs.zeros;
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    TrellisBlocks<W> blocks(part, row, 0);
    for (int32_t b = 0; b < num_blocks; ++b, digits += kDigitBytes) {
        prefetch.line();
        const Codes codes = blocks.next();
        if constexpr (joins_halves(W, UNIT)) {
            const __m256 scale = _mm256_set1_ps(work[b >> shift]);
            sums[0] = _mm256_fmadd_ps(products<WIDTH, 2>(codes.half, digits, zeros), scale, sums[0]);
            zeros += 8;
        } else {
            for (int v = 0; v < 2; ++v, zeros += 8) {
                const __m256 half = products<WIDTH, 1>(codes.half + v, digits + 32 * v, zeros);
                __m256 scale;
                if constexpr (UNIT == kBlock) {
                    scale = _mm256_set1_ps(work[b >> shift]);
                } else {
                    scale = half_scales<UNIT>(work, b, v);
                }
                sums[v] = _mm256_fmadd_ps(half, scale, sums[v]);
            }
        }
    }
    return lanes_total(_mm256_add_ps(sums[0], sums[1])) * (1.0f / kPeak) * inputs.peak;
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// Sums as of affine rows whose codes are bytes.
template <int W, int UNIT>
void add_trellis(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, Prefetch* prefetches,
                 float* work, float* sum) {
    const size_t stride = padded_groups(part);
    float* zeros = sum + part.num_cols;
    for (int32_t r = 0; r < num_rows; ++r) {
        for (int32_t g = 0; g < part.num_groups; g += 8) {
            const __m256 scale = load_eight(part, rows[r] + part.scales_at, g, false);
            const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(h[r]));
            _mm256_store_ps(work + r * stride + g, factor);
            const __m256 zero = _mm256_set1_ps(float(trellis_zero(W)));
            _mm256_store_ps(zeros + g, _mm256_fmadd_ps(factor, zero, _mm256_load_ps(zeros + g)));
        }
    }
    __m256i before[kBatch];
    for (__m256i& none : before) {
        none = _mm256_setzero_si256();
    }
    const int32_t num_blocks = part.num_cols / kBlock, shift = block_shift(part);
    for (int32_t b = 0; b < num_blocks; ++b) {
        float* sum_block = sum + b * kBlock;
        __m256 sums[kSumRegisters];
        for (int i = 0; i < kSumRegisters; ++i) {
            sums[i] = _mm256_load_ps(sum_block + 8 * i);
        }
        for (int32_t r = 0; r < num_rows; ++r) {
            prefetches[r].line();
            const __m256i newest = load_nibbles(rows[r] + b * kNibbleBytes);
            const Codes codes = codes_of_nibbles<W>(newest, before[r], rows[r] + refinements_at(part, b));
            before[r] = newest;
            const float* scales = work + r * stride;
            for (int v = 0; v < 2; ++v) {
                __m256 scale;
                if constexpr (UNIT == kBlock) {
                    scale = _mm256_set1_ps(scales[b >> shift]);
                } else {
                    scale = half_scales<UNIT>(scales, b, v);
                }
                for (int byte = 0; byte < 4; ++byte) {
                    __m256& register_sum = sums[4 * v + byte];
                    const __m256 spread = spread_codes<trellis_of(W)>(codes.half[v], v, byte);
                    register_sum = _mm256_fmadd_ps(spread, scale, register_sum);
                }
            }
        }
        for (int i = 0; i < kSumRegisters; ++i) {
            _mm256_store_ps(sum_block + 8 * i, sums[i]);
        }
    }
}

template <int W>
void decode_blocks(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    const int32_t unit = unit_of(part);
    const int32_t group_shift = part.num_groups == 1 ? 31 : __builtin_ctz(uint32_t(part.group));
    __m256 scale = _mm256_setzero_ps();
    TrellisBlocks<W> blocks(part, row, start / kBlock);
    for (int32_t block = start; block < stop; block += kBlock, out += kBlock) {
        const Codes codes = blocks.next();
        for (int32_t first = 0; first < kBlock; first += 16) {
            if (first % unit == 0) {
                scale = load_group(part, row + part.scales_at, (block + first) >> group_shift, false);
            }
            const __m256i half = _mm256_sub_epi8(codes.half[first / 32], _mm256_set1_epi8(int8_t(trellis_zero(W))));
            const __m128i sixteen = first % 32 == 0 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
            const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(sixteen));
            const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(sixteen, 8)));
            _mm256_storeu_ps(out + first, _mm256_mul_ps(low, scale));
            _mm256_storeu_ps(out + first + 8, _mm256_mul_ps(high, scale));
        }
    }
}

}  // namespace
}  // namespace moe_pack
