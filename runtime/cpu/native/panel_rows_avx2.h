// Panels' inputs, factors, and rows as they lie, with AVX2; internal linkage as in vector.h.
#pragma once

#include "affine_avx2.h"
#include "panel_forms.h"

namespace moe_pack {
namespace {

// Registers of eight double words, one for each of 8 rows (or columns of down).
struct Ymm {
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr int32_t lanes = 8;

    // Tokens at once, whose sums leave registers to what they share.
    static constexpr int tokens_at_once(int width, int digits) {
        return width == 4 ? (digits == 2 ? 2 : 1) : digits == 2 ? 4 : 2;
    }

    static Ints zero() { return _mm256_setzero_si256(); }
    static Ints load(const void* from) { return load_bytes(from); }
    static Ints broadcast(const void* word) { return _mm256_set1_epi32(word_at(word)); }
    static Ints low_nibbles(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
    static Ints high_nibbles(Ints bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }
    static Ints even_bytes(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(255)); }
    static Ints odd_bytes(Ints bytes) { return _mm256_srli_epi16(bytes, 8); }
    static Floats floats(Ints ints) { return _mm256_cvtepi32_ps(ints); }
    static Floats halves(const void* from) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from))); }
    static Floats set(float value) { return _mm256_set1_ps(value); }
    static Floats load_floats(const float* from) { return _mm256_load_ps(from); }
    static void store_floats(float* to, Floats values) { _mm256_store_ps(to, values); }
    static void store_anywhere(float* to, Floats values) { _mm256_storeu_ps(to, values); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
};

void prepare_words(const Part& part, const float* x, void* prepared) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    float* header = static_cast<float*>(prepared);
    header[0] = finite ? peak : __builtin_nanf("");
    auto* words = reinterpret_cast<int16_t*>(static_cast<int8_t*>(prepared) + kHeaderBytes);
    float* sums = reinterpret_cast<float*>(words + 2 * part.num_cols);
    if (!finite || peak == 0.0f) {
        __builtin_memset(words, 0, size_t(4) * part.num_cols + 4 * size_t(part.num_groups));
        return;
    }
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // as in prepare_digits
    const __m256 steps = _mm256_set1_ps(kPeak / (peak * lift));
    for (int32_t b = 0; b < part.num_groups; ++b) {
        int32_t fixed[kBlock];
        for (int32_t c = 0; c < kBlock; c += 8) {
            const __m256 lifted = _mm256_mul_ps(_mm256_loadu_ps(x + b * kBlock + c), _mm256_set1_ps(lift));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(fixed + c), _mm256_cvtps_epi32(_mm256_mul_ps(lifted, steps)));
        }
        sums[b] = float(store_words<3>(fixed, words + size_t(2) * b * kBlock));
    }
}

void prepare_rounded(const Part& part, const float* x, void* prepared) {
    const bool finite = is_finite(largest_magnitude(x, part.num_cols));
    static_cast<float*>(prepared)[0] = finite ? 1.0f : __builtin_nanf("");
    const int32_t block_bytes = input_bytes(part.width);
    auto* block = static_cast<int8_t*>(prepared) + kHeaderBytes;
    float* sums = reinterpret_cast<float*>(block + size_t(block_bytes) * part.num_groups);
    __builtin_memset(block, 0, size_t(block_bytes) * part.num_groups + 4 * padded_groups(part));
    for (int32_t b = 0; finite && b < part.num_groups; ++b, x += kBlock, block += block_bytes) {
        const float peak = largest_magnitude(x, kBlock);
        if (peak == 0.0f) continue;
        const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;  // as in prepare_digits
        int32_t fixed[kBlock], sum = 0;
        int8_t digits[kDigitBytes];
        split_block(x, lift, kRoundedTop / (peak * lift), fixed, digits);
        if (part.width == 4) {
            __builtin_memcpy(block, digits, 2 * kBlock);
            for (int32_t value : fixed) {
                sum += value;
            }
        } else {
            int16_t words[2 * kBlock];
            sum = store_words<2>(fixed, words);
            __builtin_memcpy(block, words, 2 * kBlock);
        }
        sums[b] = float(sum);
        const float unit = peak * (1.0f / kRoundedTop);
        __builtin_memcpy(block + kUnitAt, &unit, sizeof unit);
    }
}

template <int DIGITS>
void prepare_panel(const Part& part, const float* x, void* prepared) {
    const auto prepare = DIGITS == 2 ? prepare_rounded : part.width == 4 ? prepare_digits : prepare_words;
    prepare(part, x, prepared);
}

// -- Rows of 4 bits as they lie, with the bits that panels give ---------------------------------------------------------

// The sums of eight registers' lanes, in their order.
inline __m256i sums_of_lanes(const __m256i registers[8]) {
    __m256i pairs[4], fours[2];
    for (int i = 0; i < 4; ++i) {
        pairs[i] = _mm256_hadd_epi32(registers[2 * i], registers[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        fours[i] = _mm256_hadd_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                            _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

// As dot_panel, with a lane for each of its totals.
template <class Sums, int DIGITS>
float dot_whole_row(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch) {
    const Inputs inputs(part, prepared);
    const uint8_t* scales = row + part.scales_at;
    __m256 totals = _mm256_setzero_ps();
    for (int32_t first = 0; first < part.num_groups; first += kTotals) {
        __m256i low[kTotals], high[kTotals];
        alignas(32) float units[kTotals] = {};
        for (int32_t i = 0; i < kTotals; ++i) {
            if (first + i >= part.num_groups) {
                low[i] = high[i] = _mm256_setzero_si256();
                continue;
            }
            units[i] = unit_at(inputs.digits + (first + i) * kDigitBytes);
            prefetch.line();
            const Codes codes = load_codes<4>(row + (first + i) * 32);
            Sums::template add_row<DIGITS>(codes, inputs.digits + (first + i) * kDigitBytes, low[i], high[i]);
        }
        const __m256 codes = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of_lanes(high)), _mm256_set1_ps(65536.0f),
                                             _mm256_cvtepi32_ps(sums_of_lanes(low)));
        __m256 scale = load_eight(part, scales, first, false);
        if constexpr (DIGITS == 2) {
            scale = _mm256_mul_ps(scale, _mm256_load_ps(units));
        }
        const __m256 zero = load_eight(part, scales + part.scale_bytes, first, true);
        const __m256 centered = _mm256_fnmadd_ps(zero, _mm256_load_ps(inputs.sums + first), codes);
        totals = _mm256_fmadd_ps(centered, scale, totals);
    }
    return lanes_total(totals) * (DIGITS == 3 ? 1.0f / kPeak : 1.0f) * inputs.peak;
}

template <class Sums, int DIGITS>
void dot_whole_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                    const Ahead& ahead, float*, float* out) {
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        out[r] = dot_whole_row<Sums, DIGITS>(part, rows[r], prepared, prefetch);
        prefetch.rest();
    }
}

// -- Sums of down rows -------------------------------------------------------------------------------------------------

// Up to eight float16, and zeros.
inline __m256 load_halves(const uint8_t* from, int32_t count) {
    uint8_t padded[16] = {};
    if (count < kTotals) {
        __builtin_memcpy(padded, from, 2 * size_t(count));
        from = padded;
    }
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The digits of four rows' factors, made positive by a bias: byte k of each in one double word.
inline void store_words(const __m256i fixed[4], int32_t digits[kDigits][kTotals]) {
    const __m256i odd_bytes = _mm256_set1_epi16(int16_t(0xff00));
    __m256i even[2], odd[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i one = fixed[2 * i], other = fixed[2 * i + 1];
        even[i] = _mm256_blendv_epi8(one, _mm256_slli_epi32(other, 8), odd_bytes);
        odd[i] = _mm256_blendv_epi8(_mm256_srli_epi32(one, 8), other, odd_bytes);
    }
    const __m256i words[kDigits] = {_mm256_blend_epi16(even[0], _mm256_slli_epi32(even[1], 16), 0xaa),
                                    _mm256_blend_epi16(odd[0], _mm256_slli_epi32(odd[1], 16), 0xaa),
                                    _mm256_blend_epi16(_mm256_srli_epi32(even[0], 16), even[1], 0xaa)};
    for (int k = 0; k < kDigits; ++k) {
        const __m256i digit = _mm256_xor_si256(words[k], _mm256_set1_epi8(-128));
        _mm256_store_si256(reinterpret_cast<__m256i*>(digits[k]), digit);
    }
}

template <class ScalesOf>
void TileFactors::take(const ScalesOf& scales_of, int32_t num_rows, int32_t num_groups, const float* h, float* zeros,
                       float top, PanelAhead ahead) {
    __m256 factors[kMaxTile], peak = _mm256_set1_ps(kLeastPeak), zero_sum = _mm256_load_ps(zeros);
    __m256 faults = _mm256_setzero_ps();  // bits where a factor is not finite
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 infinity = _mm256_set1_ps(__builtin_inff());
    for (int32_t r = 0; r < num_rows; ++r) {
        if (r % 2 == 0) fetch(ahead, kLineBytes);
        const __m256 factor =
            _mm256_mul_ps(load_halves(scales_of.scales(r), num_groups), _mm256_broadcast_ss(h + r));
        zero_sum = _mm256_fmadd_ps(factor, load_halves(scales_of.zeros(r), num_groups), zero_sum);
        const __m256 size = _mm256_and_ps(factor, magnitude);
        peak = _mm256_max_ps(size, peak);
        faults = _mm256_or_ps(faults, _mm256_cmp_ps(size, infinity, _CMP_NLT_UQ));
        factors[r] = factor;
    }
    for (int32_t r = num_rows; r % 4; ++r) {
        factors[r] = _mm256_setzero_ps();
    }
    _mm256_store_ps(zeros, zero_sum);
    _mm256_store_ps(units, _mm256_or_ps(_mm256_mul_ps(peak, _mm256_set1_ps(1.0f / top)), faults));
    const __m256 steps = _mm256_div_ps(_mm256_set1_ps(top), peak);
    for (int32_t four = 0; 4 * four < num_rows; ++four) {
        __m256i fixed[4];
        for (int i = 0; i < 4; ++i) {
            fixed[i] = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(factors[4 * four + i], steps)),
                                        _mm256_set1_epi32(0x808080));  // as in split_block
        }
        store_words(fixed, digits[four]);
    }
}

// Adds 16 columns of two registers in the order of unpacked bytes: the first has the columns 0 to 3 and 16 to 19 of those
// from `sum` on, the second 4 to 7 and 20 to 23.
template <int DIGITS>
inline void add_unpacked(const __m256i low[2], const __m256i high[2], float unit, float* sum) {
    const __m256i near = _mm256_permute2x128_si256(low[0], low[1], 0x20), far = _mm256_permute2x128_si256(low[0], low[1], 0x31);
    add_columns<Ymm, DIGITS>(near, _mm256_permute2x128_si256(high[0], high[1], 0x20), unit, sum);
    add_columns<Ymm, DIGITS>(far, _mm256_permute2x128_si256(high[0], high[1], 0x31), unit, sum + 16);
}

void finish_whole_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    const float* zeros = sum + part.num_cols;
    for (int32_t c = start; c < stop; c += 8) {
        const __m256 total = _mm256_sub_ps(_mm256_load_ps(sum + c), _mm256_set1_ps(zeros[c / kBlock]));
        _mm256_storeu_ps(out + c, _mm256_fmadd_ps(total, _mm256_set1_ps(weight), _mm256_loadu_ps(out + c)));
    }
}

}  // namespace
}  // namespace moe_pack
