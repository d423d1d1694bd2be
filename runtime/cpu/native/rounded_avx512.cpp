// Inputs rounded to 8 bits, with AVX-512 VNNI: one instruction multiplies four columns of 16 rows with a token's, or
// four rows of 16 columns with its factors.
#if defined(__x86_64__)

#include "rounded.h"

#include "target_avx512.h"

#include "codes_avx512.h"
#include "rounding_avx512.h"
#include "trellis_avx512.h"

namespace moe_pack {
namespace {

constexpr int32_t kTokensAtOnce = 4;  // 4 tokens and 64 rows: 16 registers of sums
constexpr int32_t kSpan = 16;         // units whose scales are loaded at once
constexpr int32_t kPanelBytes = 256;  // of a step: four registers
constexpr int32_t kAheadCodes = 192;  // how far before their use codes are fetched

typedef int32_t Ints __attribute__((vector_size(64)));  // as in affine_avx512.h

// -- Inputs ----------------------------------------------------------------------------------------------------------

template <int DIGITS>
void round_digits(const float* const* x, int32_t first, int32_t stop, const RoundedTokens& tokens) {
    const int32_t units = kBlock / tokens.unit;
    for (int32_t block = first / kBlock; block * kBlock < stop; ++block) {
        for (int32_t t = 0; t < tokens.num_tokens; ++t) {
            const size_t place = size_t(block) * tokens.num_tokens + t;
            __m512 values[4];
            __m512i sums[4];
            unrolled<4>([&](auto q) MOE_PACK_INLINE {
                values[q.value] = _mm512_loadu_ps(x[t] + block * kBlock + 16 * q.value);
            });
            const Rounding<DIGITS> rounding(largest_bits(values));
            tokens.scales[place] = rounding.scale;
            unrolled<4>([&](auto q) MOE_PACK_INLINE {
                sums[q.value] = codes_of(values[q.value], rounding.inverse);
                store_digits<DIGITS>(sums[q.value], tokens.codes + place * DIGITS * kBlock + 16 * q.value, kBlock);
            });
            for (int32_t unit = 0, q = 0; unit < units; ++unit) {
                __m512i sum = sums[q++];
                for (int32_t c = 16; c < tokens.unit; c += 16) sum = _mm512_add_epi32(sum, sums[q++]);
                tokens.sums[size_t(block * units + unit) * tokens.num_tokens + t] = float(_mm512_reduce_add_epi32(sum));
            }
        }
    }
}

void round(const float* const* x, int32_t first, int32_t stop, const RoundedTokens& tokens) {
    (tokens.digits == 1 ? round_digits<1> : round_digits<2>)(x, first, stop, tokens);
}

// -- Scales ----------------------------------------------------------------------------------------------------------

// Registers' columns become their rows.
inline void transpose(__m512 rows[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_castps_si512(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
        a[i + 1] = _mm512_castps_si512(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    }
    for (int i = 0; i < 16; i += 4) {
        for (int k = 0; k < 2; ++k) {
            b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + 2 + k]);
            b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + 2 + k]);
        }
    }
    for (int k = 0; k < 4; ++k) {
        const __m512i low = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x44), high = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xee);
        const __m512i then = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x44);
        const __m512i last = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xee);
        rows[k] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low, then, 0x88));
        rows[4 + k] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(low, then, 0xdd));
        rows[8 + k] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(high, last, 0x88));
        rows[12 + k] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(high, last, 0xdd));
    }
}

// Scales and zeros of kSpan units of rows: a weight is scale * (code - zero).
template <int ROWS>
struct alignas(64) Span {
    float scales[kSpan][ROWS], zeros[kSpan][ROWS];

    template <int WIDTH>
    void load(const Part& part, const uint8_t* const* rows, int32_t num_rows, int32_t first_unit) {
        for (int32_t r = 0; r < num_rows; r += 16) {
            __m512 scale[16], zero[16];
            for (int32_t i = 0; i < 16; ++i) {
                const StoredScales stored(part, rows[r + i]);
                if constexpr (is_trellis(WIDTH)) {
                    scale[i] = stored.load(first_unit);
                } else {
                    stored.load(first_unit, &scale[i], &zero[i]);
                }
                if constexpr (WIDTH == kE2m1) scale[i] = _mm512_mul_ps(scale[i], _mm512_set1_ps(kE2m1Unit));
            }
            transpose(scale);
            for (int32_t u = 0; u < kSpan; ++u) _mm512_store_ps(scales[u] + r, scale[u]);
            if constexpr (!is_trellis(WIDTH) && WIDTH != kE2m1) {
                transpose(zero);
                for (int32_t u = 0; u < kSpan; ++u) _mm512_store_ps(zeros[u] + r, zero[u]);
            } else {
                const float same = WIDTH == kE2m1 ? float(kE2m1Zero) : float(trellis_zero(part.width));
                for (int32_t u = 0; u < kSpan; ++u) _mm512_store_ps(zeros[u] + r, _mm512_set1_ps(same));
            }
        }
    }
};

// -- Codes -----------------------------------------------------------------------------------------------------------

// A block of four rows, codes where they are 1 to 255: register q has columns 16 q on, a double word each, a byte a row.
template <int WIDTH>
MOE_PACK_INLINE inline void plain_codes(Fours<WIDTH>& fours, const uint8_t* const* rows, int32_t four, int32_t block,
                                        __m512i codes[4]) {
    fours.codes(rows, four, block, codes);
    unrolled<4>([&](auto q) MOE_PACK_INLINE {
        constexpr int32_t place = WIDTH == kE2m1 ? 1 : places_of_four<WIDTH>(decltype(q)::value);
        if constexpr (place > 1) codes[q.value] = _mm512_srli_epi16(codes[q.value], __builtin_ctz(place));
    });
}

// The lines that a block of later columns has, and a trellis's refinements.
template <int WIDTH>
MOE_PACK_INLINE inline void fetch(const Part& part, const uint8_t* row, int32_t block) {
    constexpr int32_t block_bytes = is_trellis(WIDTH) ? kNibbleBytes : 8 * bits_of(WIDTH);
    __builtin_prefetch(row + block * block_bytes + kAheadCodes, 0, 3);
    if constexpr (WIDTH == 8) __builtin_prefetch(row + block * block_bytes + kAheadCodes + kLineBytes, 0, 3);
    if constexpr (is_trellis(WIDTH) && WIDTH > trellis_of(4)) {
        __builtin_prefetch(row + refinements_at(part, block) + kAheadCodes, 0, 3);
    }
}

// A block of 64 rows for products: step s has columns 4 s on, register v rows 16 v on, a double word each.
template <int WIDTH>
void pack_dots(const Part& part, Fours<WIDTH>& fours, const uint8_t* const* rows, int32_t block, uint8_t* panel) {
    const __m512i by_row = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int32_t v = 0; v < 4; ++v) {
        for (int32_t r = 0; r < 16; ++r) fetch<WIDTH>(part, rows[16 * v + r], block);
        __m512i codes[4][4];
        unrolled<4>([&](auto i) MOE_PACK_INLINE {
            plain_codes<WIDTH>(fours, rows + 16 * v + 4 * i.value, 4 * v + i.value, block, codes[i.value]);
        });
        unrolled<4>([&](auto q) MOE_PACK_INLINE {
            __m512i of[4];  // rows 4 i on: a lane has four columns, a double word of it a row
            unrolled<4>([&](auto i) MOE_PACK_INLINE {
                of[i.value] = _mm512_shuffle_epi8(codes[i.value][q.value], by_row);
            });
            const __m512i low = _mm512_shuffle_i32x4(of[0], of[1], 0x44), high = _mm512_shuffle_i32x4(of[0], of[1], 0xee);
            const __m512i then = _mm512_shuffle_i32x4(of[2], of[3], 0x44);
            const __m512i last = _mm512_shuffle_i32x4(of[2], of[3], 0xee);
            uint8_t* to = panel + 4 * q.value * kPanelBytes + 64 * v;
            _mm512_store_si512(to, _mm512_shuffle_i32x4(low, then, 0x88));
            _mm512_store_si512(to + kPanelBytes, _mm512_shuffle_i32x4(low, then, 0xdd));
            _mm512_store_si512(to + 2 * kPanelBytes, _mm512_shuffle_i32x4(high, last, 0x88));
            _mm512_store_si512(to + 3 * kPanelBytes, _mm512_shuffle_i32x4(high, last, 0xdd));
        });
    }
}

// -- Products --------------------------------------------------------------------------------------------------------

// sums[v][t] += register v of each step times the four bytes of token t. Four products of a step, at most 255 * 128
// each, are added without saturation.
template <int V, int N>
MOE_PACK_INLINE inline void add_steps(const uint8_t* panel, const int8_t* x, size_t x_stride, int32_t steps,
                                      Ints (&sums)[V][N]) {
    for (int32_t s = 0; s < steps; ++s, panel += kPanelBytes, x += 4) {
        __m512i codes[V];
        unrolled<V>([&](auto v) MOE_PACK_INLINE { codes[v.value] = _mm512_load_si512(panel + 64 * v.value); });
        unrolled<N>([&](auto t) MOE_PACK_INLINE {
            int32_t four;
            __builtin_memcpy(&four, x + t.value * x_stride, sizeof four);
            const __m512i inputs = _mm512_set1_epi32(four);
            unrolled<V>([&](auto v) MOE_PACK_INLINE {
                Ints& sum = sums[v.value][t.value];
                sum = Ints(_mm512_dpbusd_epi32(__m512i(sum), codes[v.value], inputs));
            });
        });
    }
}

// Products of all digits, `digit_stride` apart: exact, since a unit's columns or a tile's rows fit (rounded.h).
template <int DIGITS, int V, int N>
MOE_PACK_INLINE inline void multiply_steps(const uint8_t* panel, const int8_t* x, size_t x_stride, size_t digit_stride,
                                           int32_t steps, Ints (&sums)[V][N]) {
    unrolled<V * N>([&](auto i) MOE_PACK_INLINE { sums[i.value / N][i.value % N] = Ints{}; });
    add_steps<V, N>(panel, x, x_stride, steps, sums);
    if constexpr (DIGITS == 2) {
        unrolled<V * N>([&](auto i) MOE_PACK_INLINE { sums[i.value / N][i.value % N] <<= 8; });
        add_steps<V, N>(panel, x + digit_stride, x_stride, steps, sums);
    }
}

// A unit of 64 rows times N tokens: totals += scale * (products - zero * sum of codes) * token's scale.
template <int DIGITS, int N>
MOE_PACK_INLINE inline void dot_unit(const uint8_t* panel, const int8_t* x, int32_t steps, const float* scale,
                                     const float* zero, const float* x_scales, const float* x_sums, float* totals) {
    Ints sums[4][N];
    multiply_steps<DIGITS, 4, N>(panel, x, DIGITS * kBlock, kBlock, steps, sums);
    unrolled<4>([&](auto v) MOE_PACK_INLINE {
        const __m512 scales = _mm512_load_ps(scale + 16 * v.value), zeros = _mm512_load_ps(zero + 16 * v.value);
        unrolled<N>([&](auto t) MOE_PACK_INLINE {
            float* to = totals + t.value * kDotRows + 16 * v.value;
            const __m512 all = _mm512_cvtepi32_ps(__m512i(sums[v.value][t.value]));
            const __m512 own = _mm512_fnmadd_ps(zeros, _mm512_set1_ps(x_sums[t.value]), all);
            const __m512 scaled = _mm512_mul_ps(own, _mm512_set1_ps(x_scales[t.value]));
            _mm512_store_ps(to, _mm512_fmadd_ps(scaled, scales, _mm512_load_ps(to)));
        });
    });
}

template <int DIGITS>
void dot_unit_of_all(const uint8_t* panel, const int8_t* x, int32_t num_tokens, int32_t steps, const float* scale,
                     const float* zero, const float* x_scales, const float* x_sums, float* totals) {
    int32_t t = 0;
    for (; t + kTokensAtOnce <= num_tokens; t += kTokensAtOnce) {
        dot_unit<DIGITS, 4>(panel, x + t * DIGITS * kBlock, steps, scale, zero, x_scales + t, x_sums + t, totals + t * kDotRows);
    }
    const auto rest = [&](auto n) MOE_PACK_INLINE {
        constexpr int N = decltype(n)::value;
        dot_unit<DIGITS, N>(panel, x + t * DIGITS * kBlock, steps, scale, zero, x_scales + t, x_sums + t, totals + t * kDotRows);
    };
    switch (num_tokens - t) {
        case 1: return rest(Index<1>{});
        case 2: return rest(Index<2>{});
        case 3: return rest(Index<3>{});
        default: return;
    }
}

template <int DIGITS, int WIDTH, int UNIT>
void dot_rows(const Part& part, const uint8_t* const* given, int32_t num_rows, const RoundedTokens& tokens,
              float* totals) {
    constexpr int32_t units = kBlock / UNIT;
    const uint8_t* rows[kDotRows];
    for (int32_t r = 0; r < kDotRows; ++r) rows[r] = given[r < num_rows ? r : num_rows - 1];
    alignas(64) uint8_t panel[kBlock / 4 * kPanelBytes];
    Span<kDotRows> span;
    Fours<WIDTH> fours(part);
    const size_t num_tokens = size_t(tokens.num_tokens);
    __builtin_memset(totals, 0, sizeof(float) * num_tokens * kDotRows);
    for (int32_t block = 0; block * kBlock < part.num_cols; ++block) {
        const int32_t first = block * units;
        if (first % kSpan == 0) span.template load<WIDTH>(part, rows, kDotRows, first);
        pack_dots<WIDTH>(part, fours, rows, block, panel);
        const int8_t* x = tokens.codes + block * num_tokens * DIGITS * kBlock;
        for (int32_t u = 0; u < units; ++u) {
            dot_unit_of_all<DIGITS>(panel + u * (UNIT / 4) * kPanelBytes, x + u * UNIT, tokens.num_tokens, UNIT / 4,
                            span.scales[(first + u) % kSpan], span.zeros[(first + u) % kSpan],
                            tokens.scales + block * num_tokens, tokens.sums + (first + u) * num_tokens, totals);
        }
    }
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// What rows of a tile are multiplied with in a unit: h * scale, rounded, for each token.
struct alignas(64) Factors {
    int8_t codes[kRoundedTokens][2][kAddRows];  // digits
    float scales[kRoundedTokens], zeros[kRoundedTokens];  // zeros: sums of code * zero
};

struct alignas(64) AddWork {
    Span<kAddRows> span;
    Factors factors;
    uint8_t panel[kAddRows / 4 * kPanelBytes];
};

// `num_rows` is a multiple of 16, of which the first `some` exist.
template <int DIGITS>
inline void round_factors(const float* h, int32_t num_rows, int32_t some, const float* scale, const float* zero,
                          int8_t* codes, float* rounded_scale, float* rounded_zero) {
    __m512i largest = _mm512_setzero_si512();
    __m512 products[kAddRows / 16];
    for (int32_t r = 0; r < num_rows; r += 16) {
        const __mmask16 mask = first_lanes_mask(some - r);
        products[r / 16] = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, h + r), _mm512_load_ps(scale + r));
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(products[r / 16])));
    }
    const Rounding<DIGITS> rounding(_mm512_reduce_max_epu32(largest));
    __m512 zeros = _mm512_setzero_ps();
    for (int32_t r = 0; r < num_rows; r += 16) {
        const __m512i rounded = codes_of(products[r / 16], rounding.inverse);
        zeros = _mm512_fmadd_ps(_mm512_cvtepi32_ps(rounded), _mm512_load_ps(zero + r), zeros);
        store_digits<DIGITS>(rounded, codes + r, kAddRows);
    }
    *rounded_scale = rounding.scale;
    *rounded_zero = _mm512_reduce_add_ps(zeros);
}

// A unit's columns of N tokens, in V registers: out += (products - zeros) * scale.
template <int DIGITS, int V, int N>
MOE_PACK_INLINE inline void add_unit(const uint8_t* panel, int32_t steps, const Factors& factors, int32_t t, float* out,
                                     size_t stride) {
    Ints sums[V][N];
    multiply_steps<DIGITS, V, N>(panel, factors.codes[t][0], 2 * kAddRows, kAddRows, steps, sums);
    unrolled<N>([&](auto i) MOE_PACK_INLINE {
        const __m512 scale = _mm512_set1_ps(factors.scales[t + i.value]);
        const __m512 zero = _mm512_set1_ps(factors.zeros[t + i.value]);
        unrolled<V>([&](auto v) MOE_PACK_INLINE {
            float* to = out + (t + i.value) * stride + 16 * v.value;
            const __m512 own = _mm512_sub_ps(_mm512_cvtepi32_ps(__m512i(sums[v.value][i.value])), zero);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(own, scale, _mm512_loadu_ps(to)));
        });
    });
}

template <int DIGITS, int V>
void add_unit_of_all(const uint8_t* panel, int32_t steps, const Factors& factors, int32_t num_tokens, float* out,
                     size_t stride) {
    int32_t t = 0;
    for (; t + kTokensAtOnce <= num_tokens; t += kTokensAtOnce) add_unit<DIGITS, V, 4>(panel, steps, factors, t, out, stride);
    switch (num_tokens - t) {
        case 1: return add_unit<DIGITS, V, 1>(panel, steps, factors, t, out, stride);
        case 2: return add_unit<DIGITS, V, 2>(panel, steps, factors, t, out, stride);
        case 3: return add_unit<DIGITS, V, 3>(panel, steps, factors, t, out, stride);
        default: return;
    }
}

// A block of rows for sums: step s has rows 4 s on, register q columns 16 q on.
template <int WIDTH>
void pack_sums(Fours<WIDTH>* fours, const uint8_t* const* rows, const uint8_t* const* ahead, int32_t num_rows,
               int32_t block, uint8_t* panel) {
    constexpr int32_t block_bytes = is_trellis(WIDTH) ? kNibbleBytes : 8 * bits_of(WIDTH);
    for (int32_t r = 0; r < num_rows; r += 4, panel += kPanelBytes) {
        unrolled<4>([&](auto i) MOE_PACK_INLINE {
            __builtin_prefetch(ahead[r + i.value] + block * block_bytes, 0, 3);
        });
        __m512i codes[4];
        plain_codes<WIDTH>(fours[r / kMaxTile], rows + r, r % kMaxTile / 4, block, codes);
        unrolled<4>([&](auto q) MOE_PACK_INLINE { _mm512_store_si512(panel + 64 * q.value, codes[q.value]); });
    }
}

template <int DIGITS, int WIDTH, int UNIT>
void add_rows(const RowsToAdd& given, const Outputs& h, int32_t num_tokens, int32_t start, int32_t stop, void* memory,
              float* out, size_t stride) {
    const Part& part = given.part;
    const int32_t num_rows = given.count;
    constexpr int32_t units = kBlock / UNIT, registers = UNIT / 16;
    AddWork& work = *static_cast<AddWork*>(memory);
    const uint8_t *rows[kAddRows], *next[kAddRows];
    const int32_t padded = int32_t(round_up(size_t(num_rows), 16)), steps = (num_rows + 3) / 4;
    for (int32_t r = 0; r < padded; ++r) {
        const int32_t place = r < num_rows ? r : num_rows - 1;
        rows[r] = given.rows[place];
        next[r] = given.ahead == nullptr ? rows[r] : given.ahead[place];
    }
    Fours<WIDTH> fours[kAddRows / kMaxTile] = {Fours<WIDTH>(part), Fours<WIDTH>(part)};
    int32_t loaded = -1;
    if (is_trellis(WIDTH) && start > 0) pack_sums<WIDTH>(fours, rows, next, 4 * steps, start / kBlock - 1, work.panel);
    for (int32_t block = start / kBlock; block * kBlock < stop; ++block) {
        const int32_t first = block * units;
        if (first / kSpan != loaded) {
            loaded = first / kSpan;
            work.span.template load<WIDTH>(part, rows, padded, loaded * kSpan);
        }
        pack_sums<WIDTH>(fours, rows, next, 4 * steps, block, work.panel);
        for (int32_t u = 0; u < units; ++u) {
            const float *scale = work.span.scales[(first + u) % kSpan], *zero = work.span.zeros[(first + u) % kSpan];
            for (int32_t t = 0; t < num_tokens; ++t) {
                round_factors<DIGITS>(h.values + t * h.stride, padded, num_rows, scale, zero, work.factors.codes[t][0],
                                      work.factors.scales + t, work.factors.zeros + t);
            }
            add_unit_of_all<DIGITS, registers>(work.panel + u * registers * 64, steps, work.factors, num_tokens,
                                       out + (block * kBlock - start) + u * UNIT, stride);
        }
    }
}

int32_t digits_for(const Part&, int32_t digits) { return digits; }

// -- Which -----------------------------------------------------------------------------------------------------------

struct RowKernels {
    decltype(RoundedKernels::dot) dot;
    decltype(RoundedKernels::add) add;
};

template <int DIGITS, int WIDTH>
RowKernels kernels_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return {dot_rows<DIGITS, WIDTH, 16>, add_rows<DIGITS, WIDTH, 16>};
        case 32: return {dot_rows<DIGITS, WIDTH, 32>, add_rows<DIGITS, WIDTH, 32>};
        default: return {dot_rows<DIGITS, WIDTH, kBlock>, add_rows<DIGITS, WIDTH, kBlock>};
    }
}

template <int DIGITS>
RowKernels row_kernels(const Part& part) {
    if (part.codec == Codec::mxfp4) return {dot_rows<DIGITS, kE2m1, kMxGroup>, add_rows<DIGITS, kE2m1, kMxGroup>};
    switch (part.codec == Codec::trellis ? trellis_of(part.width) : part.width) {
        case 1: return kernels_of<DIGITS, 1>(part);
        case 2: return kernels_of<DIGITS, 2>(part);
        case 3: return kernels_of<DIGITS, 3>(part);
        case 4: return kernels_of<DIGITS, 4>(part);
        case 8: return kernels_of<DIGITS, 8>(part);
        case trellis_of(4): return kernels_of<DIGITS, trellis_of(4)>(part);
        case trellis_of(5): return kernels_of<DIGITS, trellis_of(5)>(part);
        case trellis_of(6): return kernels_of<DIGITS, trellis_of(6)>(part);
        case trellis_of(7): return kernels_of<DIGITS, trellis_of(7)>(part);
        default: return kernels_of<DIGITS, trellis_of(8)>(part);
    }
}

void dot(const Part& part, const uint8_t* const* rows, int32_t num_rows, const RoundedTokens& tokens, float* totals) {
    (tokens.digits == 1 ? row_kernels<1> : row_kernels<2>)(part).dot(part, rows, num_rows, tokens, totals);
}

void add(const RowsToAdd& rows, const Outputs& h, int32_t num_tokens, int32_t start, int32_t stop, void* work, float* out, size_t stride) {
    (h.digits == 1 ? row_kernels<1> : row_kernels<2>)(rows.part).add(rows, h, num_tokens, start, stop, work, out, stride);
}

}  // namespace

const RoundedKernels avx512_rounded_kernels = {digits_for, round, dot, add, sizeof(AddWork)};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
