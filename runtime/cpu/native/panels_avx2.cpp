// Panels with AVX2: codes of 4 bits times three digits in bytes, of 8 bits times two of 12 bits in words.
//
// As with rows, an input is 24-bit fixed point relative to the token's largest, and the sum over a group is exact.
#if defined(__x86_64__)

#include "panels.h"

#include "target_avx2.h"

#include "affine_avx2.h"

namespace moe_pack {
namespace {

constexpr int32_t kHalves = 2;           // of a line: rows 0 to 7, and 8 to 15
constexpr int32_t kTotals = 8;           // blocks b, b + 8, b + 16, … of a row have a sum of their own

inline __m256i broadcast_word(const void* from) {
    int32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return _mm256_set1_epi32(word);
}

// Keeps a sum where it is: reordered, the additions of a loop would need more registers than there are.
inline void stay(__m256i& sum) { asm("" : "+x"(sum)); }

inline void fetch(PanelAhead& ahead, int32_t num_bytes) {
    if (ahead.at == nullptr) return;
    for (int32_t line = 0; line < num_bytes; line += kLineBytes) {
        __builtin_prefetch(ahead.at + line);
    }
    ahead.pass(num_bytes);
}

// Sums of a block's products, of eight rows each: high << SHIFT + low.
struct BlockSums {
    __m256i low[kHalves], high[kHalves];
};

// -- 4 bits: the digits of a block are those of prepare_digits ---------------------------------------------------------

// Where the digits of four inputs are: those of a block's inputs 4 q to 4 q + 3.
struct BlockDigits {
    const int8_t* digits;
    const int8_t* word(int k, int q) const { return digits + k * kBlock + 4 * q; }
};

template <int WIDTH>
struct PanelInputs;

template <>
struct PanelInputs<4> {
    static constexpr int32_t block_bytes = kDigitBytes;
    static constexpr float high_unit = 65536.0f;

    // Sums of int16 are at most 8 * 2 * 15 * 128.
    template <class Digits>
    static inline void add(const uint8_t* lines, const Digits& digits, BlockSums& sums) {
        const __m256i nibble = _mm256_set1_epi8(15);
        for (int quarter = 0; quarter < 2; ++quarter) {
            __m256i pairs[kHalves][kDigits];
            for (int k = 0; k < kDigits; ++k) {
                pairs[0][k] = pairs[1][k] = _mm256_setzero_si256();
            }
#pragma GCC unroll 1
            for (int j = 4 * quarter; j < 4 * quarter + 4; ++j) {
                const uint8_t* line = lines + j * kLineBytes;
                const __m256i first = load_bytes(line), second = load_bytes(line + 32);
                const __m256i low[kHalves] = {_mm256_and_si256(first, nibble), _mm256_and_si256(second, nibble)};
                const __m256i high[kHalves] = {_mm256_and_si256(_mm256_srli_epi16(first, 4), nibble),
                                               _mm256_and_si256(_mm256_srli_epi16(second, 4), nibble)};
#pragma GCC unroll 3
                for (int k = 0; k < kDigits; ++k) {
                    const __m256i of_low = broadcast_word(digits.word(k, 2 * j));
                    const __m256i of_high = broadcast_word(digits.word(k, 2 * j + 1));
#pragma GCC unroll 2
                    for (int v = 0; v < kHalves; ++v) {
                        const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low[v], of_low),
                                                              _mm256_maddubs_epi16(high[v], of_high));
                        pairs[v][k] = _mm256_add_epi16(pairs[v][k], both);
                        stay(pairs[v][k]);
                    }
                }
            }
            const __m256i ones = _mm256_set1_epi16(1), to_middle = _mm256_set1_epi16(256);
            for (int v = 0; v < kHalves; ++v) {
                const __m256i fine = _mm256_add_epi32(_mm256_madd_epi16(pairs[v][1], to_middle),
                                                      _mm256_madd_epi16(pairs[v][0], ones));
                const __m256i coarse = _mm256_madd_epi16(pairs[v][2], ones);
                sums.low[v] = quarter == 0 ? fine : _mm256_add_epi32(sums.low[v], fine);
                sums.high[v] = quarter == 0 ? coarse : _mm256_add_epi32(sums.high[v], coarse);
            }
        }
    }
};

// -- 8 bits: 64 low words, then 64 high ones, of every four columns the first and third, then the second and fourth ------

template <>
struct PanelInputs<8> {
    static constexpr int32_t block_bytes = 4 * kBlock;
    static constexpr float high_unit = 4096.0f;

    static inline void add(const uint8_t* lines, const BlockDigits& words, BlockSums& sums) {
        const __m256i low_byte = _mm256_set1_epi16(255);
        for (int v = 0; v < kHalves; ++v) {
            sums.low[v] = sums.high[v] = _mm256_setzero_si256();
        }
#pragma GCC unroll 1
        for (int j = 0; j < kBlock / 4; ++j) {
            const int8_t* own = words.digits + 8 * j;
            const __m256i even_low = broadcast_word(own), odd_low = broadcast_word(own + 4);
            const __m256i even_high = broadcast_word(own + 2 * kBlock), odd_high = broadcast_word(own + 2 * kBlock + 4);
#pragma GCC unroll 2
            for (int v = 0; v < kHalves; ++v) {
                const __m256i codes = load_bytes(lines + j * kLineBytes + 32 * v);
                const __m256i even = _mm256_and_si256(codes, low_byte), odd = _mm256_srli_epi16(codes, 8);
                const __m256i low = _mm256_add_epi32(_mm256_madd_epi16(even, even_low), _mm256_madd_epi16(odd, odd_low));
                const __m256i high =
                    _mm256_add_epi32(_mm256_madd_epi16(even, even_high), _mm256_madd_epi16(odd, odd_high));
                sums.low[v] = _mm256_add_epi32(sums.low[v], low);
                sums.high[v] = _mm256_add_epi32(sums.high[v], high);
                stay(sums.low[v]);
                stay(sums.high[v]);
            }
        }
    }
};

// A block of fixed-point inputs as words, and their sum.
inline int32_t store_words(const int32_t* fixed, int16_t* words) {
    int32_t sum = 0;
    for (int32_t c = 0; c < kBlock; c += 4) {
        for (int i = 0; i < 4; ++i) {
            const int32_t value = fixed[c + i], low = ((value + 2048) & 4095) - 2048;
            const int place = c + 2 * (i % 2) + i / 2;
            words[place] = int16_t(low);
            words[kBlock + place] = int16_t((value - low) >> 12);
            sum += value;
        }
    }
    return sum;
}

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
        sums[b] = float(store_words(fixed, words + size_t(2) * b * kBlock));
    }
}

// -- Products --------------------------------------------------------------------------------------------------------

template <int WIDTH>
void dot_panel(const Part& part, const uint8_t* panel, PanelAhead& ahead, const uint8_t* prepared, float* out) {
    using P = PanelInputs<WIDTH>;
    const int32_t block_bytes = WIDTH * 8 * kPanelRows + kPanelScaleBytes;
    const auto* inputs = reinterpret_cast<const int8_t*>(prepared) + kHeaderBytes;
    const auto* sums = reinterpret_cast<const float*>(inputs + size_t(P::block_bytes) * part.num_groups);
    alignas(32) float totals[kTotals][kPanelRows] = {};
    for (int32_t b = 0; b < part.num_groups; ++b, panel += block_bytes, inputs += P::block_bytes) {
        fetch(ahead, block_bytes);
        BlockSums block;
        P::add(panel, BlockDigits{inputs}, block);
        const uint8_t* scales = panel + WIDTH * 8 * kPanelRows;
        for (int v = 0; v < kHalves; ++v) {
            const auto* from = reinterpret_cast<const __m128i*>(scales + 16 * v);
            const __m256 scale = _mm256_cvtph_ps(_mm_load_si128(from)), zero = _mm256_cvtph_ps(_mm_load_si128(from + 2));
            const __m256 codes = _mm256_fmadd_ps(_mm256_cvtepi32_ps(block.high[v]), _mm256_set1_ps(P::high_unit),
                                                 _mm256_cvtepi32_ps(block.low[v]));
            float* total = totals[b % kTotals] + 8 * v;
            const __m256 centered = _mm256_fnmadd_ps(zero, _mm256_set1_ps(sums[b]), codes);
            _mm256_store_ps(total, _mm256_fmadd_ps(centered, scale, _mm256_load_ps(total)));
        }
    }
    const float peak = *reinterpret_cast<const float*>(prepared);
    for (int32_t half = kTotals / 2; half > 0; half /= 2) {  // as lanes_total adds
        for (int32_t i = 0; i < half; ++i) {
            for (int32_t r = 0; r < kPanelRows; ++r) {
                totals[i][r] += totals[i + half][r];
            }
        }
    }
    for (int32_t r = 0; r < kPanelRows; ++r) {
        out[r] = totals[0][r] * (1.0f / kPeak) * peak;
    }
}

size_t panel_prepared_bytes(const Part& part) {
    const size_t inputs = part.width == 4 ? PanelInputs<4>::block_bytes : PanelInputs<8>::block_bytes;
    return round_up(kHeaderBytes + inputs * part.num_groups + 4 * padded_groups(part), 64);
}

void prepare_panel(const Part& part, const float* x, void* prepared) {
    (part.width == 4 ? prepare_digits : prepare_words)(part, x, prepared);
}

void dot_panels(const Part& part, const uint8_t* panels, size_t stride, int32_t count, const void* prepared,
                PanelAhead& ahead, float* out) {
    const auto dot = part.width == 4 ? dot_panel<4> : dot_panel<8>;
    for (int32_t p = 0; p < count; ++p) {
        dot(part, panels + p * stride, ahead, static_cast<const uint8_t*>(prepared), out + kPanelRows * p);
    }
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
float dot_whole_row(const Part& part, const uint8_t* row, const void* prepared, Prefetch& prefetch) {
    const Inputs inputs(part, prepared);
    const __m256i ones = _mm256_set1_epi16(1), to_middle = _mm256_set1_epi16(256);
    const uint8_t* scales = row + part.scales_at;
    __m256 totals = _mm256_setzero_ps();
    for (int32_t first = 0; first < part.num_groups; first += kTotals) {
        __m256i low[kTotals], high[kTotals];
        for (int32_t i = 0; i < kTotals; ++i) {
            if (first + i >= part.num_groups) {
                low[i] = high[i] = _mm256_setzero_si256();
                continue;
            }
            prefetch.line();
            const Codes codes = load_codes<4>(row + (first + i) * 32);
            const int8_t* digits = inputs.digits + (first + i) * kDigitBytes;
            __m256i pairs[kDigits];
            for (int k = 0; k < kDigits; ++k) {
                pairs[k] = add_products(codes.half, 2, digits + k * kBlock);
            }
            low[i] = _mm256_add_epi32(_mm256_madd_epi16(pairs[1], to_middle), _mm256_madd_epi16(pairs[0], ones));
            high[i] = _mm256_madd_epi16(pairs[2], ones);
        }
        const __m256 codes = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of_lanes(high)), _mm256_set1_ps(65536.0f),
                                             _mm256_cvtepi32_ps(sums_of_lanes(low)));
        const __m256 scale = load_eight(part, scales, first, false);
        const __m256 zero = load_eight(part, scales + part.scale_bytes, first, true);
        const __m256 centered = _mm256_fnmadd_ps(zero, _mm256_load_ps(inputs.sums + first), codes);
        totals = _mm256_fmadd_ps(centered, scale, totals);
    }
    return lanes_total(totals) * (1.0f / kPeak) * inputs.peak;
}

void dot_whole_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                    const Ahead& ahead, float*, float* out) {
    for (int32_t r = 0; r < num_rows; ++r) {
        Prefetch prefetch(ahead, r);
        out[r] = dot_whole_row(part, rows[r], prepared, prefetch);
        prefetch.rest();
    }
}

// -- Sums of down rows -------------------------------------------------------------------------------------------------

constexpr int32_t kFours = kMaxTile / 4;
constexpr float kLeastPeak = 0x1p-103f;  // of factors: smaller ones count as far as they are no smaller than 2^-24 of it

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

// Where scales and zeros of a tile's rows are from a group on: in rows, or behind one another.
struct ScalesOfRows {
    const Part& part;
    const uint8_t* const* rows;
    int32_t group;
    const uint8_t* scales(int32_t r) const { return rows[r] + part.scales_at + 2 * group; }
    const uint8_t* zeros(int32_t r) const { return scales(r) + part.scale_bytes; }
};

struct ScalesOfTile {
    const uint8_t* first;
    int32_t num_groups;
    const uint8_t* scales(int32_t r) const { return first + 2 * r * num_groups; }
    const uint8_t* zeros(int32_t r) const { return scales(kMaxTile + r); }
};

// What the rows of a tile are multiplied with in eight groups: h * scale as 24-bit fixed point, relative to the largest of
// a group.
struct TileFactors {
    alignas(32) int32_t digits[kFours][kDigits][kTotals];
    alignas(32) float units[kTotals];

    // `num_groups`: at most eight. zeros[g] += h * scale * zero.
    template <class ScalesOf>
    TileFactors(const ScalesOf& scales_of, int32_t num_rows, int32_t num_groups, const float* h, float* zeros) {
        __m256 factors[kMaxTile], peak = _mm256_set1_ps(kLeastPeak), zero_sum = _mm256_load_ps(zeros);
        __m256 faults = _mm256_setzero_ps();  // NaN where a factor is not finite
        const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
        for (int32_t r = 0; r < num_rows; ++r) {
            const __m256 factor =
                _mm256_mul_ps(load_halves(scales_of.scales(r), num_groups), _mm256_broadcast_ss(h + r));
            zero_sum = _mm256_fmadd_ps(factor, load_halves(scales_of.zeros(r), num_groups), zero_sum);
            peak = _mm256_max_ps(_mm256_and_ps(factor, magnitude), peak);
            faults = _mm256_fmadd_ps(factor, _mm256_setzero_ps(), faults);
            factors[r] = factor;
        }
        for (int32_t r = num_rows; r % 4; ++r) {
            factors[r] = _mm256_setzero_ps();
        }
        _mm256_store_ps(zeros, zero_sum);
        _mm256_store_ps(units, _mm256_add_ps(_mm256_mul_ps(peak, _mm256_set1_ps(1.0f / kPeak)), faults));
        const __m256 steps = _mm256_div_ps(_mm256_set1_ps(kPeak), peak);
        for (int32_t four = 0; 4 * four < num_rows; ++four) {
            __m256i fixed[4];
            for (int i = 0; i < 4; ++i) {
                fixed[i] = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(factors[4 * four + i], steps)),
                                            _mm256_set1_epi32(0x808080));  // as in split_block
            }
            store_words(fixed, digits[four]);
        }
    }
};

// The digits of a group's factors, as PanelInputs takes them.
struct GroupDigits {
    const TileFactors& factors;
    int32_t lane;
    const int32_t* word(int k, int q) const { return &factors.digits[q][k][lane]; }
};

// sum[c] += (high * 65536 + low) * unit, for eight columns.
inline void add_eight(__m256i low, __m256i high, float unit, float* sum) {
    const __m256 codes =
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_set1_ps(65536.0f), _mm256_cvtepi32_ps(low));
    _mm256_store_ps(sum, _mm256_fmadd_ps(codes, _mm256_set1_ps(unit), _mm256_load_ps(sum)));
}

// A group's columns of pairs of rows: bytes of both rows, one after the other, times both factors' digits.
void add_group_of_rows(const uint8_t* const* rows, int32_t count, int32_t group, const TileFactors& factors, int32_t lane,
                       Prefetch* prefetches, float* sum) {
    constexpr int32_t PAIRS = 8;  // whose sums fit int16: 8 * 2 * 15 * 128
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi32(1), to_middle = _mm256_set1_epi32(0x00010100);
    __m256i low[8], high[8];
    for (int i = 0; i < 8; ++i) {
        low[i] = high[i] = _mm256_setzero_si256();
    }
    for (int32_t first = 0; 2 * first < count; first += PAIRS) {
        __m256i pairs[4][kDigits];
        for (auto& digits : pairs) {
            for (__m256i& sums : digits) {
                sums = _mm256_setzero_si256();
            }
        }
        for (int32_t p = first; p < first + PAIRS && 2 * p < count; ++p) {
            const bool has_both = 2 * p + 1 < count;
            prefetches[2 * p].line();
            const __m256i one = load_bytes(rows[2 * p] + 32 * group);
            const __m256i other = has_both ? load_bytes(rows[2 * p + 1] + 32 * group) : _mm256_setzero_si256();
            if (has_both) {
                prefetches[2 * p + 1].line();
            }
            const __m256i near = _mm256_unpacklo_epi8(one, other), far = _mm256_unpackhi_epi8(one, other);
            const __m256i codes[4] = {_mm256_and_si256(near, nibble), _mm256_and_si256(far, nibble),
                                      _mm256_and_si256(_mm256_srli_epi16(near, 4), nibble),
                                      _mm256_and_si256(_mm256_srli_epi16(far, 4), nibble)};
            for (int k = 0; k < kDigits; ++k) {
                int16_t both;
                __builtin_memcpy(&both, reinterpret_cast<const int16_t*>(&factors.digits[p / 2][k][lane]) + p % 2, 2);
                const __m256i digits = _mm256_set1_epi16(both);
                for (int i = 0; i < 4; ++i) {
                    pairs[i][k] = _mm256_add_epi16(pairs[i][k], _mm256_maddubs_epi16(codes[i], digits));
                }
            }
        }
        for (int i = 0; i < 4; ++i) {
            const __m256i* of = pairs[i];
            low[2 * i] = _mm256_add_epi32(low[2 * i], _mm256_madd_epi16(_mm256_unpacklo_epi16(of[1], of[0]), to_middle));
            low[2 * i + 1] =
                _mm256_add_epi32(low[2 * i + 1], _mm256_madd_epi16(_mm256_unpackhi_epi16(of[1], of[0]), to_middle));
            high[2 * i] = _mm256_add_epi32(high[2 * i], _mm256_madd_epi16(_mm256_unpacklo_epi16(of[2], of[2]), ones));
            high[2 * i + 1] =
                _mm256_add_epi32(high[2 * i + 1], _mm256_madd_epi16(_mm256_unpackhi_epi16(of[2], of[2]), ones));
        }
    }
    // Register 2 i + j has columns 4 j to 4 j + 3 of the eight from `at` on, and those 16 further.
    for (int i = 0; i < 4; ++i) {
        float* to = sum + 32 * (i / 2) + 8 * (i % 2);
        add_eight(_mm256_permute2x128_si256(low[2 * i], low[2 * i + 1], 0x20),
                  _mm256_permute2x128_si256(high[2 * i], high[2 * i + 1], 0x20), factors.units[lane], to);
        add_eight(_mm256_permute2x128_si256(low[2 * i], low[2 * i + 1], 0x31),
                  _mm256_permute2x128_si256(high[2 * i], high[2 * i + 1], 0x31), factors.units[lane], to + 16);
    }
}

void add_whole_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
                    float*, float* sum) {
    Prefetch prefetches[kMaxTile];
    for (int32_t r = 0; r < num_rows; ++r) {
        prefetches[r] = Prefetch(ahead, r);
    }
    for (int32_t first = 0; first < part.num_groups; first += kTotals) {
        const int32_t count = part.num_groups - first < kTotals ? part.num_groups - first : kTotals;
        const TileFactors factors(ScalesOfRows{part, rows, first}, num_rows, count, h, sum + part.num_cols + first);
        for (int32_t lane = 0; lane < count; ++lane) {
            const int32_t group = first + lane;
            add_group_of_rows(rows, num_rows, group, factors, lane, prefetches, sum + group * kBlock);
        }
    }
    for (int32_t r = 0; r < num_rows; ++r) {
        prefetches[r].rest();
    }
}

void add_panels(const Part& part, const uint8_t* tile, const float* h, PanelAhead& ahead, float* sum) {
    for (int32_t first = 0; first < part.num_groups; first += kDownGroups) {
        const int32_t count = part.num_groups - first < kDownGroups ? part.num_groups - first : kDownGroups;
        const int32_t scale_bytes = 2 * 2 * kMaxTile * count;
        const TileFactors factors(ScalesOfTile{tile, count}, kMaxTile, count, h, sum + part.num_cols + first);
        fetch(ahead, scale_bytes);
        tile += scale_bytes;
        for (int32_t lane = 0; lane < count; ++lane) {
            float* to = sum + (first + lane) * kBlock;
            for (int32_t col = 0; col < kBlock; col += kPanelRows, tile += kDownPanelBytes) {
                fetch(ahead, kDownPanelBytes);
                BlockSums block;
                PanelInputs<4>::add(tile, GroupDigits{factors, lane}, block);
                for (int v = 0; v < kHalves; ++v) {
                    add_eight(block.low[v], block.high[v], factors.units[lane], to + col + 8 * v);
                }
            }
        }
    }
}

size_t whole_sum_floats(const Part& part) { return round_up(size_t(part.num_cols), 16) + padded_groups(part); }

void finish_whole_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    const float* zeros = sum + part.num_cols;
    for (int32_t c = start; c < stop; c += 8) {
        const __m256 total = _mm256_sub_ps(_mm256_load_ps(sum + c), _mm256_set1_ps(zeros[c / kBlock]));
        _mm256_storeu_ps(out + c, _mm256_fmadd_ps(total, _mm256_set1_ps(weight), _mm256_loadu_ps(out + c)));
    }
}

}  // namespace

const PanelKernels avx2_panel_kernels = {
    panel_prepared_bytes, prepare_panel,    dot_panels,       dot_whole_rows,
    add_whole_rows,       add_panels,       whole_sum_floats, finish_whole_sum,
};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
