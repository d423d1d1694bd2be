// Rounded inputs with AVX2: codes of up to 4 bits times one digit in bytes, all others in 16-bit words.
//
// Eight registers of codes stay where they are while the tokens go by. A word holds both digits of an input, so two
// digits cost no more than one.
#if defined(__x86_64__)

#include <new>

#include "rounded.h"

#include "target_avx2.h"

#include "rounding_avx2.h"
#include "trellis_avx2.h"

namespace moe_pack {
namespace {

constexpr int32_t kLanes = 8;  // rows, or columns of sums
constexpr int32_t kMostBits = 4;  // of codes that are multiplied as bytes
constexpr int32_t kAheadCodes = 192;  // how far before their use codes are fetched

// How codes and inputs are multiplied: `Input` holds an input, and a double word some of them.
struct AsBytes {
    using Input = int8_t;
    static constexpr int32_t in_word = 4, chunk = 8;  // double words that are multiplied at once, at most
    static constexpr int32_t digits = 1;
};
struct AsWords {
    using Input = int16_t;
    static constexpr int32_t in_word = 2, chunk = 8;
    static constexpr int32_t digits = 2;
};

// Sums of bytes' products are of 16 bits for the steps of a chunk, two products each; those of words' are of 32 bits at
// once, and both fit to the end (rounded.h).
static_assert(AsBytes::chunk * 2 * ((1 << kMostBits) - 1) * 127 <= INT16_MAX, "sums of bytes' products fit");

int32_t digits_for(const Part& part, int32_t digits) {
    return digits == 1 && part.codec == Codec::affine && part.width <= kMostBits ? 1 : 2;
}

// -- Inputs ----------------------------------------------------------------------------------------------------------

// Sixteen codes in their order.
template <class As>
inline void store_codes(__m256i first, __m256i second, typename As::Input* to) {
    if constexpr (sizeof(typename As::Input) == 2) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), as_words(first, second));
    } else {
        store_bytes(as_words(first, second), to);
    }
}

template <class As>
void round_as(const float* const* x, int32_t first, int32_t stop, const RoundedTokens& tokens) {
    const int32_t units = kBlock / tokens.unit;
    auto* codes = reinterpret_cast<typename As::Input*>(tokens.codes);
    for (int32_t block = first / kBlock; block * kBlock < stop; ++block) {
        for (int32_t t = 0; t < tokens.num_tokens; ++t) {
            const size_t place = size_t(block) * tokens.num_tokens + t;
            const float* from = x[t] + block * kBlock;
            const Rounding<As::digits> rounding(largest_bits(from));
            tokens.scales[place] = rounding.scale;
            __m256i sum = _mm256_setzero_si256();
            for (int32_t c = 0; c < kBlock; c += 16) {
                const __m256i low = codes_of(_mm256_loadu_ps(from + c), rounding.inverse);
                const __m256i high = codes_of(_mm256_loadu_ps(from + c + kLanes), rounding.inverse);
                store_codes<As>(low, high, codes + place * kBlock + c);
                sum = _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
                if ((c + 16) % tokens.unit == 0) {
                    const size_t unit = size_t(block) * units + c / tokens.unit;
                    tokens.sums[unit * tokens.num_tokens + t] = float(lanes_sum(sum));
                    sum = _mm256_setzero_si256();
                }
            }
        }
    }
}

void round(const float* const* x, int32_t first, int32_t stop, const RoundedTokens& tokens) {
    (tokens.digits == 1 ? round_as<AsBytes> : round_as<AsWords>)(x, first, stop, tokens);
}

// -- Codes and scales ------------------------------------------------------------------------------------------------

// A row's blocks, one after the other, as codes in their order.
template <int WIDTH, bool IS_TRELLIS = is_trellis(WIDTH)>
struct Blocks {
    const uint8_t* at = nullptr;

    Blocks() = default;
    Blocks(const Part&, const uint8_t* row, int32_t block) : at(row + block * 8 * bits_of(WIDTH)) {}

    Codes next() {
        __builtin_prefetch(at + kAheadCodes, 0, 3);
        Codes codes = load_codes<WIDTH>(at);
        at += 8 * bits_of(WIDTH);
        // Back to a unit of 1: the bits that a byte loses to its neighbor are zero.
        if constexpr (WIDTH == 3) codes = {{_mm256_srli_epi16(codes.half[0], 2), _mm256_srli_epi16(codes.half[1], 2)}};
        return codes;
    }
};

template <int WIDTH>
struct Blocks<WIDTH, true> {
    TrellisBlocks<WIDTH - trellis_of(0)> blocks;

    Blocks(const Part& part, const uint8_t* row, int32_t block) : blocks(part, row, block) {}

    Codes next() { return blocks.next(); }
};

// Blocks of several rows.
template <int WIDTH, int32_t MOST>
struct RowBlocks {
    alignas(32) unsigned char memory[MOST * sizeof(Blocks<WIDTH>)];

    RowBlocks(const Part& part, const uint8_t* const* rows, int32_t num_rows, int32_t block) {
        for (int32_t r = 0; r < num_rows; ++r) new (memory + r * sizeof(Blocks<WIDTH>)) Blocks<WIDTH>(part, rows[r], block);
    }

    Codes next(int32_t row) { return reinterpret_cast<Blocks<WIDTH>*>(memory)[row].next(); }
};

// A weight of a unit is scale * (code - zero).
template <int WIDTH>
inline void load_unit(const Part& part, const uint8_t* row, int32_t unit, float* scale, float* zero) {
    const uint8_t* scales = row + part.scales_at;
    if constexpr (WIDTH == kE2m1) {
        *scale = power_of_two(scales[unit]) * kE2m1Unit;
        *zero = float(kE2m1Zero);
        return;
    }
    const int32_t per_group = part.group / (part.group < kBlock ? part.group : kBlock);
    const int32_t group = part.num_groups == 1 ? 0 : unit / per_group;
    *scale = _mm256_cvtss_f32(load_group(part, scales, group, false));
    if constexpr (is_trellis(WIDTH)) {
        *zero = float(trellis_zero(part.width));
    } else {
        *zero = _mm256_cvtss_f32(load_group(part, scales + part.scale_bytes, group, true));
    }
}

// -- Products --------------------------------------------------------------------------------------------------------

// Registers' double words become their rows.
inline void transpose(const __m256i rows[8], __m256i out[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int k = 0; k < 2; ++k) {
            b[i + 2 * k] = _mm256_unpacklo_epi64(a[i + k], a[i + 2 + k]);
            b[i + 2 * k + 1] = _mm256_unpackhi_epi64(a[i + k], a[i + 2 + k]);
        }
    }
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        out[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
}

inline __m256i half_words(const Codes& codes, int32_t sixteen) {
    const __m256i half = codes.half[sixteen / 2];
    return _mm256_cvtepu8_epi16(sixteen % 2 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half));
}

// What the codes of STEPS registers, rows or columns in their lanes, give with a token's double words.
template <class As, int32_t STEPS>
inline __m256i chunk_products(const __m256i* codes, const typename As::Input* x) {
    const auto input = [&](int32_t step) {
        int32_t word;
        __builtin_memcpy(&word, x + step * As::in_word, sizeof word);
        return _mm256_set1_epi32(word);
    };
    if constexpr (As::in_word == 2) {
        __m256i sum = _mm256_madd_epi16(codes[0], input(0));
        for (int32_t s = 1; s < STEPS; ++s) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes[s], input(s)));
        return sum;
    } else {
        __m256i pairs = _mm256_maddubs_epi16(codes[0], input(0));
        for (int32_t s = 1; s < STEPS; ++s) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[s], input(s)));
        return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
}

// Sums of all tokens over `num_chunks` chunks of a panel, in order: [tokens, kLanes]. A token's inputs are `stride` apart.
template <class As, int32_t STEPS>
inline void multiply(const __m256i* panel, int32_t num_chunks, const typename As::Input* x, size_t stride,
                     int32_t num_tokens, __m256i* sums) {
    for (int32_t chunk = 0; chunk < num_chunks; ++chunk, panel += STEPS, x += STEPS * As::in_word) {
        __m256i codes[STEPS];
        for (int32_t s = 0; s < STEPS; ++s) codes[s] = panel[s];
        for (int32_t t = 0; t < num_tokens; ++t) {
            const __m256i found = chunk_products<As, STEPS>(codes, x + t * stride);
            sums[t] = chunk == 0 ? found : _mm256_add_epi32(sums[t], found);
        }
    }
}

// A block of eight rows: step s has columns `in_word` s on.
template <class As, int WIDTH, int32_t MOST>
inline void pack_dots(RowBlocks<WIDTH, MOST>& blocks, int32_t first, __m256i* panel) {
    Codes codes[kLanes];
    for (int32_t r = 0; r < kLanes; ++r) codes[r] = blocks.next(first + r);
    for (int32_t part = 0; part < kBlock / (8 * As::in_word); ++part) {
        __m256i rows[kLanes];
        for (int32_t r = 0; r < kLanes; ++r) {
            if constexpr (As::in_word == 2) {
                rows[r] = half_words(codes[r], part);
            } else {
                rows[r] = codes[r].half[part];
            }
        }
        transpose(rows, panel + 8 * part);
    }
}

template <class As, int WIDTH, int UNIT>
void dot_rows(const Part& part, const uint8_t* const* given, int32_t num_rows, const RoundedTokens& tokens,
              float* totals) {
    using Input = typename As::Input;
    constexpr int32_t units = kBlock / UNIT, words = UNIT / As::in_word, steps = words < As::chunk ? words : As::chunk;
    const int32_t num_tokens = tokens.num_tokens, padded = int32_t(round_up(size_t(num_rows), kLanes));
    const uint8_t* rows[kDotRows];
    for (int32_t r = 0; r < padded; ++r) rows[r] = given[r < num_rows ? r : num_rows - 1];
    RowBlocks<WIDTH, kDotRows> blocks(part, rows, padded, 0);
    __m256i panel[kBlock / As::in_word], sums[kRoundedTokens];
    __builtin_memset(totals, 0, sizeof(float) * size_t(num_tokens) * kDotRows);
    for (int32_t block = 0; block * kBlock < part.num_cols; ++block) {
        const Input* x = reinterpret_cast<const Input*>(tokens.codes) + size_t(block) * num_tokens * kBlock;
        for (int32_t first = 0; first < padded; first += kLanes) {
            pack_dots<As, WIDTH>(blocks, first, panel);
            for (int32_t u = 0; u < units; ++u) {
                const int32_t unit = block * units + u;
                alignas(32) float scale[kLanes], zero[kLanes];
                for (int32_t r = 0; r < kLanes; ++r) load_unit<WIDTH>(part, rows[first + r], unit, scale + r, zero + r);
                multiply<As, steps>(panel + u * words, words / steps, x + u * UNIT, kBlock, num_tokens, sums);
                const float *x_scales = tokens.scales + size_t(block) * num_tokens, *x_sums = tokens.sums + size_t(unit) * num_tokens;
                const __m256 scales = _mm256_load_ps(scale), zeros = _mm256_load_ps(zero);
                for (int32_t t = 0; t < num_tokens; ++t) {
                    float* to = totals + t * kDotRows + first;
                    const __m256 own = _mm256_fnmadd_ps(zeros, _mm256_set1_ps(x_sums[t]), _mm256_cvtepi32_ps(sums[t]));
                    const __m256 scaled = _mm256_mul_ps(own, _mm256_set1_ps(x_scales[t]));
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(scaled, scales, _mm256_loadu_ps(to)));
                }
            }
        }
    }
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

struct alignas(64) AddWork {
    float scales[kBlock / 16][kAddRows], zeros[kBlock / 16][kAddRows];  // by unit of a block
    int16_t factors[kRoundedTokens][kAddRows];                          // or bytes
    float factor_scales[kRoundedTokens], factor_zeros[kRoundedTokens];
    __m256i sums[kRoundedTokens];
    __m256i panel[kBlock / kLanes][kAddRows / 2];  // by eight columns: a step's rows
};

// `num_rows` is a multiple of 16, of which the first `some` exist.
template <class As>
inline void round_factors(const float* h, int32_t num_rows, int32_t some, const float* scale, const float* zero,
                          typename As::Input* codes, float* rounded_scale, float* rounded_zero) {
    alignas(32) float products[kAddRows];
    for (int32_t r = 0; r < some; ++r) products[r] = h[r] * scale[r];
    for (int32_t r = some; r < num_rows; ++r) products[r] = 0.0f;
    __m256i largest = _mm256_setzero_si256();
    for (int32_t r = 0; r < num_rows; r += kLanes) {
        largest = _mm256_max_epu32(largest, magnitudes(_mm256_load_ps(products + r)));
    }
    const Rounding<As::digits> rounding(largest_lane(largest));
    __m256 zeros = _mm256_setzero_ps();
    for (int32_t r = 0; r < num_rows; r += 16) {
        const __m256i low = codes_of(_mm256_load_ps(products + r), rounding.inverse);
        const __m256i high = codes_of(_mm256_load_ps(products + r + kLanes), rounding.inverse);
        zeros = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), _mm256_load_ps(zero + r), zeros);
        zeros = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_load_ps(zero + r + kLanes), zeros);
        store_codes<As>(low, high, codes + r);
    }
    *rounded_scale = rounding.scale;
    *rounded_zero = lanes_total(zeros);
}

// A block of rows, `in_word` of them a step; `num_rows` is a multiple of that.
template <class As, int WIDTH>
inline void pack_sums(RowBlocks<WIDTH, kAddRows>& blocks, int32_t num_rows, __m256i (*panel)[kAddRows / 2]) {
    for (int32_t r = 0, step = 0; r < num_rows; r += As::in_word, ++step) {
        if constexpr (As::in_word == 2) {
            const Codes a = blocks.next(r), b = blocks.next(r + 1);
            for (int32_t sixteen = 0; sixteen < 4; ++sixteen) {
                const __m256i first = half_words(a, sixteen), second = half_words(b, sixteen);
                const __m256i low = _mm256_unpacklo_epi16(first, second), high = _mm256_unpackhi_epi16(first, second);
                panel[2 * sixteen][step] = _mm256_permute2x128_si256(low, high, 0x20);
                panel[2 * sixteen + 1][step] = _mm256_permute2x128_si256(low, high, 0x31);
            }
        } else {
            const Codes a = blocks.next(r), b = blocks.next(r + 1), c = blocks.next(r + 2), d = blocks.next(r + 3);
            for (int32_t half = 0; half < 2; ++half) {
                const __m256i ab_low = _mm256_unpacklo_epi8(a.half[half], b.half[half]);
                const __m256i ab_high = _mm256_unpackhi_epi8(a.half[half], b.half[half]);
                const __m256i cd_low = _mm256_unpacklo_epi8(c.half[half], d.half[half]);
                const __m256i cd_high = _mm256_unpackhi_epi8(c.half[half], d.half[half]);
                const __m256i fours[4] = {_mm256_unpacklo_epi16(ab_low, cd_low), _mm256_unpackhi_epi16(ab_low, cd_low),
                                          _mm256_unpacklo_epi16(ab_high, cd_high),
                                          _mm256_unpackhi_epi16(ab_high, cd_high)};
                for (int32_t i = 0; i < 2; ++i) {
                    panel[4 * half + i][step] = _mm256_permute2x128_si256(fours[2 * i], fours[2 * i + 1], 0x20);
                    panel[4 * half + 2 + i][step] = _mm256_permute2x128_si256(fours[2 * i], fours[2 * i + 1], 0x31);
                }
            }
        }
    }
}

template <class As, int WIDTH, int UNIT>
void add_rows(const RowsToAdd& given, const Outputs& h, int32_t num_tokens, int32_t start, int32_t stop, void* memory,
              float* out, size_t stride) {
    using Input = typename As::Input;
    constexpr int32_t units = kBlock / UNIT, at_once = As::chunk * As::in_word;
    AddWork& work = *static_cast<AddWork*>(memory);
    const Part& part = given.part;
    const int32_t padded = int32_t(round_up(size_t(given.count), at_once)), chunks = padded / at_once;
    const uint8_t* rows[kAddRows];
    for (int32_t r = 0; r < padded; ++r) rows[r] = given.rows[r < given.count ? r : given.count - 1];
    RowBlocks<WIDTH, kAddRows> blocks(part, rows, padded, start / kBlock);
    Input* factors = reinterpret_cast<Input*>(work.factors);
    for (int32_t block = start / kBlock; block * kBlock < stop; ++block) {
        pack_sums<As, WIDTH>(blocks, padded, work.panel);
        for (int32_t u = 0; u < units; ++u) {
            for (int32_t r = 0; r < padded; ++r) {
                load_unit<WIDTH>(part, rows[r], block * units + u, work.scales[u] + r, work.zeros[u] + r);
            }
            for (int32_t t = 0; t < num_tokens; ++t) {
                round_factors<As>(h.values + t * h.stride, padded, given.count, work.scales[u], work.zeros[u],
                                  factors + t * kAddRows, work.factor_scales + t, work.factor_zeros + t);
            }
            for (int32_t eight = u * UNIT / kLanes; eight < (u + 1) * UNIT / kLanes; ++eight) {
                multiply<As, As::chunk>(work.panel[eight], chunks, factors, kAddRows, num_tokens, work.sums);
                float* to = out + (block * kBlock - start) + eight * kLanes;
                for (int32_t t = 0; t < num_tokens; ++t, to += stride) {
                    const __m256 sum = _mm256_cvtepi32_ps(work.sums[t]);
                    const __m256 own = _mm256_sub_ps(sum, _mm256_set1_ps(work.factor_zeros[t]));
                    _mm256_storeu_ps(to, _mm256_fmadd_ps(own, _mm256_set1_ps(work.factor_scales[t]), _mm256_loadu_ps(to)));
                }
            }
        }
    }
}

// -- Which -----------------------------------------------------------------------------------------------------------

struct RowKernels {
    decltype(RoundedKernels::dot) dot;
    decltype(RoundedKernels::add) add;
};

template <class As, int WIDTH>
RowKernels kernels_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return {dot_rows<As, WIDTH, 16>, add_rows<As, WIDTH, 16>};
        case 32: return {dot_rows<As, WIDTH, 32>, add_rows<As, WIDTH, 32>};
        default: return {dot_rows<As, WIDTH, kBlock>, add_rows<As, WIDTH, kBlock>};
    }
}

RowKernels row_kernels(const Part& part, int32_t digits) {
    if (part.codec == Codec::mxfp4) return {dot_rows<AsWords, kE2m1, kMxGroup>, add_rows<AsWords, kE2m1, kMxGroup>};
    const bool bytes = digits == 1;
    switch (part.codec == Codec::trellis ? trellis_of(part.width) : part.width) {
        case 1: return bytes ? kernels_of<AsBytes, 1>(part) : kernels_of<AsWords, 1>(part);
        case 2: return bytes ? kernels_of<AsBytes, 2>(part) : kernels_of<AsWords, 2>(part);
        case 3: return bytes ? kernels_of<AsBytes, 3>(part) : kernels_of<AsWords, 3>(part);
        case 4: return bytes ? kernels_of<AsBytes, 4>(part) : kernels_of<AsWords, 4>(part);
        case 8: return kernels_of<AsWords, 8>(part);
        case trellis_of(4): return kernels_of<AsWords, trellis_of(4)>(part);
        case trellis_of(5): return kernels_of<AsWords, trellis_of(5)>(part);
        case trellis_of(6): return kernels_of<AsWords, trellis_of(6)>(part);
        case trellis_of(7): return kernels_of<AsWords, trellis_of(7)>(part);
        default: return kernels_of<AsWords, trellis_of(8)>(part);
    }
}

void dot(const Part& part, const uint8_t* const* rows, int32_t num_rows, const RoundedTokens& tokens, float* totals) {
    row_kernels(part, tokens.digits).dot(part, rows, num_rows, tokens, totals);
}

void add(const RowsToAdd& rows, const Outputs& h, int32_t num_tokens, int32_t start, int32_t stop, void* work, float* out,
         size_t stride) {
    row_kernels(rows.part, h.digits).add(rows, h, num_tokens, start, stop, work, out, stride);
}

}  // namespace

const RoundedKernels avx2_rounded_kernels = {digits_for, round, dot, add, sizeof(AddWork)};

}  // namespace moe_pack

#include "target_end.h"

#endif  // __x86_64__
