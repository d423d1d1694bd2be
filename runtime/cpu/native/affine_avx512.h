// Rows of integer codes (affine, and mxfp4) with AVX-512: inputs as digits, products, sums of rows.
//
// For kernels_avx512.cpp alone, as codes_avx512.h is. Inputs become 24-bit fixed point, three signed bytes (digits)
// each, whose products with codes are exact; so do the factors of rows that are added.
#pragma once

#include <immintrin.h>

#include "codes_avx512.h"
#include "trellis_avx512.h"

namespace moe_pack {
namespace {

constexpr float kPeak = 8300000.0f;  // of fixed-point inputs: the highest digit is at most 127
constexpr int32_t kDigits = 3;
constexpr int32_t kPlaneBytes = kDigits * kBlock;  // of a plane of inputs: 64 high digits, 64 middle, 64 low
constexpr int32_t kHeaderBytes = 64;               // of prepared inputs: their peak, a float; their sum, an integer

size_t padded_units(const Part& part) { return round_up(size_t(num_units(part)), 32); }

// Sums in a loop are of this type: of __m512i, which is of 64-bit integers to GCC 12, each would be copied to another
// register and back.
typedef int32_t Ints __attribute__((vector_size(64)));

// Of a trellis: sets of a chunk's planes, as Units has them, and what the sums of one begin with.
constexpr int32_t kStarts = 32;

int32_t sets_of(const Part& part) { return kBlock / unit_of(part); }

// -- Inputs ----------------------------------------------------------------------------------------------------------

// Prepared affine inputs: header, digits by chunk and plane, then their sum in each unit as floats, zeros after the
// last. Instead of these sums, so that weights of zero give zero: for E2M1, by plane, of every four columns, times the
// zero of codes; for a trellis, what its sums begin with (`store_starts`), or with one scale a row, in the header, the
// sum of all.
struct Inputs {
    const uint8_t* digits;
    const float* sums;
    float peak;
    int64_t sum;  // of a trellis's inputs, fixed-point

    Inputs(const Part& part, const void* prepared)
        : digits(static_cast<const uint8_t*>(prepared) + kHeaderBytes),
          sums(reinterpret_cast<const float*>(digits + digit_bytes(part))),
          peak(*static_cast<const float*>(prepared)),
          sum(static_cast<const int64_t*>(prepared)[1]) {}

    static size_t digit_bytes(const Part& part) {
        return size_t(num_chunks(part)) * planes_of(part) * kPlaneBytes;
    }

    static size_t num_sums(const Part& part) {
        if (part.codec == Codec::trellis) {
            return part.num_groups == 1 ? 0 : size_t(num_chunks(part)) * sets_of(part) * kStarts;
        }
        return part.codec == Codec::mxfp4 ? digit_bytes(part) / kPlaneBytes * 16 : padded_units(part);
    }
};

size_t prepared_digit_bytes(const Part& part) {
    return kHeaderBytes + Inputs::digit_bytes(part) + 4 * Inputs::num_sums(part);
}

// Digits of 16 columns go where their plane's are, or two planes', where runs are of 8.
inline void store_digits(__m512i fixed, int32_t col, int32_t run, uint8_t* block_digits) {
    // Adding 128 to each digit makes all of them positive: they are then the bytes of the sum.
    const __m512i biased = _mm512_add_epi32(fixed, _mm512_set1_epi32(0x808080));
    uint8_t* to = block_digits + col / run * kPlaneBytes + col % run;
    for (int k = 0; k < kDigits; ++k, to += kBlock) {
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_srli_epi32(biased, 16 - 8 * k));
        const __m128i digits = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        if (run >= 16) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), digits);
        } else {
            _mm_storel_epi64(reinterpret_cast<__m128i*>(to), digits);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(to + kPlaneBytes), _mm_srli_si128(digits, 8));
        }
    }
}

// Of 16 columns the sum of every four, times the zero of E2M1's codes.
inline void store_fours_of(__m512i fixed, int32_t* to) {
    int32_t columns[16];
    _mm512_storeu_si512(columns, fixed);
    for (int i = 0; i < 16; i += 4) {
        to[i / 4] = kE2m1Zero * (columns[i] + columns[i + 1] + columns[i + 2] + columns[i + 3]);
    }
}

// What the sums of a trellis's products begin with: what codes that are all its zero give, negative, of the highest
// digits, then of the others.
inline void store_starts(const Part& part, const uint8_t* digits, int32_t* starts) {
    const __m512i zero = _mm512_set1_epi8(int8_t(trellis_zero(part.width))), none = _mm512_setzero_si512();
    const int32_t num_sets = num_chunks(part) * sets_of(part), planes_each = planes_of(part) / sets_of(part);
    for (int32_t set = 0; set < num_sets; ++set, starts += kStarts) {
        __m512i sums[kDigits] = {none, none, none};
        for (int32_t plane = 0; plane < planes_each; ++plane, digits += kPlaneBytes) {
            for (int k = 0; k < kDigits; ++k) {
                sums[k] = _mm512_dpbusd_epi32(sums[k], zero, _mm512_loadu_si512(digits + k * kBlock));
            }
        }
        const __m512i fine = _mm512_add_epi32(_mm512_slli_epi32(sums[1], 8), sums[2]);
        _mm512_storeu_si512(starts, _mm512_sub_epi32(none, sums[0]));
        _mm512_storeu_si512(starts + 16, _mm512_sub_epi32(none, fine));
    }
}

void prepare_digits(const Part& part, const float* x, void* prepared) {
    const float peak = largest_magnitude(x, part.num_cols);
    const bool finite = is_finite(peak);
    const Inputs inputs(part, prepared);
    *static_cast<float*>(prepared) = finite ? peak : __builtin_nanf("");
    int64_t& whole_sum = static_cast<int64_t*>(prepared)[1];
    whole_sum = 0;
    uint8_t* digits = const_cast<uint8_t*>(inputs.digits);
    float* sums = const_cast<float*>(inputs.sums);
    const bool is_trellis = part.codec == Codec::trellis;
    const int32_t planes = planes_of(part), run = kBlock / planes, unit = unit_of(part);
    if (!finite || peak == 0.0f || part.num_cols % (kBlock * planes) != 0) {
        __builtin_memset(digits, 0, Inputs::digit_bytes(part));
    }
    __builtin_memset(sums, 0, 4 * Inputs::num_sums(part));
    if (!finite || peak == 0.0f) {
        return;
    }
    // The inverse of the smallest floats would be infinite.
    const float lift = peak < 0x1p-90f ? 0x1p60f : 1.0f;
    const float steps = kPeak / (peak * lift);
    for (int32_t block = 0; block * kBlock < part.num_cols; ++block) {
        uint8_t* to = digits + block / planes * planes * kPlaneBytes + block % planes * run;
        __m512i sum = _mm512_setzero_si512();
        for (int32_t col = 0; col < kBlock; col += 16) {
            const __m512 lifted = _mm512_mul_ps(_mm512_loadu_ps(x + block * kBlock + col), _mm512_set1_ps(lift));
            const __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(lifted, _mm512_set1_ps(steps)));
            store_digits(fixed, col, run, to);
            if (part.codec == Codec::mxfp4) {
                int32_t* fours = reinterpret_cast<int32_t*>(sums) + (block / planes * planes + col / run) * 16;
                store_fours_of(fixed, fours + block % planes * (run / 4) + col % run / 4);
                continue;
            }
            sum = _mm512_add_epi32(sum, fixed);
            if (!is_trellis && (col + 16) % unit == 0) {
                *sums++ = float(_mm512_reduce_add_epi32(sum));
                sum = _mm512_setzero_si512();
            }
        }
        whole_sum += is_trellis ? _mm512_reduce_add_epi32(sum) : 0;
    }
    if (is_trellis && part.num_groups > 1) {
        store_starts(part, digits, reinterpret_cast<int32_t*>(sums));
    }
}

// -- Rows times inputs -----------------------------------------------------------------------------------------------

// Codes of a chunk's planes from FIRST on times inputs; each of 16 floats sums four columns of each plane.
//
// Digits' sums are computed in parallel, but where few planes make short chains of them, the lowest digit's products
// are added to the others' sum, shifted: an instruction less. With 8 bits, 4 * 255 * kPeak would not fit 32 bits, nor
// would 16 * 32 * kPeak of a trellis.
// `fours`: of E2M1's inputs, by plane; of a trellis's, its set's starts.
template <int WIDTH, int FIRST, int COUNT>
MOE_PACK_INLINE inline __m512 products(const Codes<WIDTH>& codes, const uint8_t* digits, const int32_t* fours) {
    __m512i planes[COUNT];
    unrolled<COUNT>([&](auto i) MOE_PACK_INLINE {
        planes[i.value] = codes.template plane<FIRST + decltype(i)::value>();
    });
    const auto add_digit = [&](__m512i sum, int k) MOE_PACK_INLINE {
        unrolled<COUNT>([&](auto i) MOE_PACK_INLINE {
            const uint8_t* inputs = digits + (FIRST + i.value) * kPlaneBytes + k * kBlock;
            sum = _mm512_dpbusd_epi32(sum, planes[i.value], _mm512_load_si512(inputs));
        });
        return sum;
    };
    const __m512i none = _mm512_setzero_si512();
    const __m512i coarse = add_digit(is_trellis(WIDTH) ? _mm512_loadu_si512(fours) : none, 0);
    const __m512i middle = add_digit(none, 1);
    if constexpr (is_trellis(WIDTH)) {
        const __m512i others = _mm512_add_epi32(_mm512_slli_epi32(middle, 8), _mm512_loadu_si512(fours + 16));
        const __m512 fine = _mm512_cvtepi32_ps(add_digit(others, 2));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(coarse), _mm512_set1_ps(65536.0f), fine);
    } else if constexpr (WIDTH == 8) {
        const __m512i fine = add_digit(_mm512_slli_epi32(middle, 8), 2);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(coarse), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(fine));
    } else {
        __m512i high = _mm512_slli_epi32(_mm512_add_epi32(_mm512_slli_epi32(coarse, 8), middle), 8);
        if constexpr (WIDTH == kE2m1) {
            static_assert(COUNT == 1, "a plane is of one group in each block");
            high = _mm512_sub_epi32(high, _mm512_loadu_si512(fours + 16 * FIRST));
        }
        return _mm512_cvtepi32_ps(COUNT > 2 ? _mm512_add_epi32(high, add_digit(none, 2)) : add_digit(high, 2));
    }
}

template <int WIDTH, int UNIT>
float dot_row(const Part& part, const uint8_t* row, const Inputs& inputs, Prefetch prefetch) {
    using C = Chunk<WIDTH>;
    using U = Units<WIDTH, UNIT>;
    const uint8_t top = WIDTH == kE2m1 ? largest_byte(row + part.scales_at, part.num_groups) : 127;
    const StoredScales stored(part, row, top);
    const uint8_t* digits = inputs.digits;
    const int32_t* fours = reinterpret_cast<const int32_t*>(inputs.sums);
    Chunks<WIDTH> chunks(part, row);
    int32_t unit = 0;
    __m512 sum = _mm512_setzero_ps(), zeros = sum;
    while (chunks.more()) {
        __m512 scales[U::registers];
        unrolled<U::registers>([&](auto i) MOE_PACK_INLINE {
            if constexpr (is_trellis(WIDTH)) {
                scales[i.value] = stored.load(unit);
            } else {
                __m512 zero;
                stored.load(unit, &scales[i.value], &zero);
                if constexpr (WIDTH != kE2m1) {
                    const __m512 input_sums = _mm512_load_ps(inputs.sums + unit);
                    zeros = _mm512_fmadd_ps(_mm512_mul_ps(scales[i.value], zero), input_sums, zeros);
                }
            }
            unit += 16;
        });
        // Not unrolled: processors fetch ahead what they see one instruction load in order (Zen 5).
        for (int32_t c = 0; c < U::span_chunks && chunks.more(); ++c) {
            prefetch.line();
            const Codes<WIDTH> codes = chunks.next();
            unrolled<U::sets>([&](auto set) MOE_PACK_INLINE {
                const __m512 scale = U::spread(scales, U::template index<decltype(set)::value>(c));
                constexpr int SET = decltype(set)::value, FIRST = SET * U::planes_each;
                const int32_t* of_set = is_trellis(WIDTH) ? fours + SET * kStarts : fours;
                sum = _mm512_fmadd_ps(products<WIDTH, FIRST, U::planes_each>(codes, digits, of_set), scale, sum);
            });
            digits += C::planes * kPlaneBytes;
            fours += is_trellis(WIDTH) ? U::sets * kStarts : C::planes * 16;
        }
    }
    prefetch.rest();
    if constexpr (WIDTH == kE2m1) {
        return times_power(double(_mm512_reduce_add_ps(sum)) * kE2m1Unit / kPeak * inputs.peak, top);
    }
    return _mm512_reduce_add_ps(_mm512_sub_ps(sum, zeros)) * (1.0f / kPeak) * inputs.peak;
}

template <int WIDTH, int UNIT>
void dot_affine(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                const Ahead& ahead, float* out) {
    const Inputs inputs(part, prepared);
    for (int32_t r = 0; r < num_rows; ++r) {
        out[r] = dot_row<WIDTH, UNIT>(part, rows[r], inputs, Prefetch(ahead, r)) + row_bias(part, rows[r]);
    }
}

// -- Sums of rows ----------------------------------------------------------------------------------------------------

// Rows are added four at a time, their bytes interleaved: with h * scale in digits, as inputs are, one instruction
// multiplies 16 columns of four rows, and sums over a call's rows are exact. What is not is h * scale itself, rounded
// to 2^-24 of the largest of its unit in the call.

constexpr int32_t kFours = kMaxTile / 4;
constexpr int32_t kMostLines = 6;  // prefetched for a block of four rows

// What 16 units of a call's rows are multiplied with.
struct alignas(64) Factors {
    int32_t digits[kFours][kDigits][16];  // by unit: digits of four rows in a double word
    int32_t starts[kDigits][16];          // by unit: of a trellis, what codes of zero give, negative
    float peaks[16];                      // by unit: the largest value, which digits of kPeak stand for
    float values[kMaxTile][16];           // h * scale
};

// Double words of four rows' digits, one digit each of all four.
inline void store_fours(const __m512i fixed[4], int32_t digits[kDigits][16]) {
    const __m512i low = _mm512_set1_epi32(255);
    for (int k = 0; k < kDigits; ++k) {
        __m512i all = _mm512_setzero_si512();
        for (int r = 3; r >= 0; --r) {
            const __m512i digit = _mm512_and_si512(_mm512_srli_epi32(fixed[r], 16 - 8 * k), low);
            all = _mm512_or_si512(_mm512_slli_epi32(all, 8), digit);
        }
        _mm512_store_si512(digits[k], _mm512_xor_si512(all, _mm512_set1_epi8(-128)));
    }
}

// `zeros` are those of 16 units from `first_unit` on.
template <bool HAS_ZEROS>
inline void find_factors(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h,
                         int32_t first_unit, float* zeros, Factors& factors) {
    __m512i largest = _mm512_setzero_si512();
    __m512 zeros_sum = HAS_ZEROS ? _mm512_load_ps(zeros) : _mm512_setzero_ps();
    for (int32_t r = 0; r < num_rows; ++r) {
        const StoredScales stored(part, rows[r]);
        __m512 scale, zero = _mm512_setzero_ps();
        if constexpr (HAS_ZEROS) {
            stored.load(first_unit, &scale, &zero);
        } else {
            scale = stored.load(first_unit);
        }
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(h[r]));
        _mm512_store_ps(factors.values[r], factor);
        if constexpr (HAS_ZEROS) {
            zeros_sum = _mm512_fmadd_ps(factor, zero, zeros_sum);
        }
        largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(factor)));
    }
    for (int32_t r = num_rows; r % 4 != 0; ++r) {
        _mm512_store_ps(factors.values[r], _mm512_setzero_ps());
    }
    if constexpr (HAS_ZEROS) {
        _mm512_store_ps(zeros, zeros_sum);
    }
    // As integers, infinity and NaNs are the largest.
    const __mmask16 finite = _mm512_cmplt_epi32_mask(largest, _mm512_set1_epi32(0x7f800000));
    const __m512 peak = _mm512_max_ps(_mm512_castsi512_ps(largest), _mm512_set1_ps(0x1p-126f));
    const __m512 exponent = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_getexp_ps(peak));
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(kPeak), _mm512_scalef_ps(peak, exponent));
    _mm512_store_ps(factors.peaks, _mm512_mask_mov_ps(_mm512_set1_ps(__builtin_nanf("")), finite, peak));
    for (int32_t r = 0; r < num_rows; r += 4) {
        __m512i fixed[4];
        for (int i = 0; i < 4; ++i) {
            const __m512 lifted = _mm512_scalef_ps(_mm512_load_ps(factors.values[r + i]), exponent);
            fixed[i] = _mm512_cvtps_epi32(_mm512_mul_ps(lifted, inverse));
            fixed[i] = _mm512_add_epi32(fixed[i], _mm512_set1_epi32(0x808080));
        }
        store_fours(fixed, factors.digits[r / 4]);
    }
    for (int k = 0; k < kDigits && !HAS_ZEROS; ++k) {
        __m512i sum = _mm512_setzero_si512();
        for (int32_t r = 0; r < num_rows; r += 4) {
            const __m512i digits = _mm512_load_si512(factors.digits[r / 4][k]);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(int8_t(trellis_zero(part.width))), digits);
        }
        _mm512_store_si512(factors.starts[k], _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    }
}

// A block's columns of all rows (a multiple of four). Its first unit is the `unit`-th of `factors`.
template <int WIDTH, int UNIT>
MOE_PACK_INLINE inline void add_block(const uint8_t* const* rows, int32_t num_rows, Fours<WIDTH>& of_fours,
                                      int32_t block, const Factors& factors, int32_t unit, PrefetchRows& prefetch,
                                      int32_t lines, float* sum) {
    Ints sums[4][kDigits];
    unrolled<4 * kDigits>([&](auto i) MOE_PACK_INLINE {
        constexpr int q = decltype(i)::value / kDigits, k = decltype(i)::value % kDigits;
        sums[q][k] = is_trellis(WIDTH) ? Ints(_mm512_set1_epi32(factors.starts[k][unit + 16 * q / UNIT])) : Ints{};
    });
    for (int32_t r = 0; r < num_rows; r += 4) {
        prefetch.lines<kMostLines>(lines);
        __m512i codes[4];
        of_fours.codes(rows + r, r / 4, block, codes);
        unrolled<kDigits>([&](auto k) MOE_PACK_INLINE {
            const int32_t* digits = factors.digits[r / 4][k.value] + unit;
            unrolled<4>([&](auto q) MOE_PACK_INLINE {
                const __m512i four = _mm512_set1_epi32(digits[16 * q.value / UNIT]);
                Ints& sum = sums[q.value][k.value];
                sum = Ints(_mm512_dpbusd_epi32(__m512i(sum), codes[q.value], four));
            });
        });
    }
    const auto total_of = [&](auto q) MOE_PACK_INLINE {
        const __m512i of[kDigits] = {__m512i(sums[q.value][0]), __m512i(sums[q.value][1]), __m512i(sums[q.value][2])};
        constexpr float share = 1.0f / (kPeak * places_of_four<WIDTH>(decltype(q)::value));
        const __m512 coarse = _mm512_mul_ps(_mm512_cvtepi32_ps(of[0]), _mm512_set1_ps(65536.0f * share));
        const __m512 fine = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(of[1], 8), of[2]));
        return _mm512_fmadd_ps(fine, _mm512_set1_ps(share), coarse);
    };
    const auto put = [&](auto q, __m512 total) MOE_PACK_INLINE {
        const __m512 peak = _mm512_set1_ps(factors.peaks[unit + 16 * q.value / UNIT]);
        _mm512_store_ps(sum + 16 * q.value, _mm512_fmadd_ps(total, peak, _mm512_load_ps(sum + 16 * q.value)));
    };
    unrolled<4>([&](auto q) MOE_PACK_INLINE { put(q, total_of(q)); });
}

// The six bits of a number in reverse.
inline int32_t shuffled(uint32_t i) {
    return int32_t((i & 1) << 5 | (i & 2) << 3 | (i & 4) << 1 | (i & 8) >> 1 | (i & 16) >> 3 | (i & 32) >> 5);
}

template <int WIDTH, int UNIT>
void add_affine(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
                float* work, float* sum) {
    constexpr int32_t block_units = kBlock / UNIT;
    Factors& factors = *reinterpret_cast<Factors*>(work);
    // Taken in their order, rows at equal distances look like a stream, and processors fetch on past its end: what this
    // wastes halved the speed of the rows that come next (Zen 4). The order changes no sum of codes.
    const uint8_t* fours[kMaxTile];
    float fours_h[kMaxTile];
    int32_t count = 0;
    for (uint32_t i = 0; i < uint32_t(kMaxTile); ++i) {
        const int32_t r = shuffled(i);
        if (r < num_rows) {
            fours[count] = rows[r];
            fours_h[count++] = h[r];
        }
    }
    const int32_t num_fours = (num_rows + 3) / 4, num_blocks = part.num_cols / kBlock;
    for (; count % 4 != 0; ++count) {
        fours[count] = rows[0];
    }
    Fours<WIDTH> of_fours(part);
    PrefetchRows prefetch(ahead, num_rows);
    const int32_t wanted = num_rows * (ahead.num_bytes / kLineBytes + 2) / (num_fours * num_blocks) + 1;
    const int32_t lines = wanted < kMostLines ? wanted : kMostLines;
    float* zeros = sum + round_up(size_t(part.num_cols), 16);
    for (int32_t block = 0; block < num_blocks; ++block) {
        const int32_t unit = block * block_units;
        if (unit % 16 == 0) {
            find_factors<!is_trellis(WIDTH)>(part, fours, num_rows, fours_h, unit, zeros + unit, factors);
        }
        add_block<WIDTH, UNIT>(fours, 4 * num_fours, of_fours, block, factors, unit % 16, prefetch, lines,
                               sum + block * kBlock);
    }
    prefetch.rest();
}

// -- Trellises -------------------------------------------------------------------------------------------------------

// Lanes of int32, which are sums of digits' products, together.
inline __m512i in_one(const __m512i sums[kDigits], int half) {
    __m512i total = _mm512_setzero_si512();
    for (int k = 0; k < kDigits; ++k) {
        const __m256i eight = half == 0 ? _mm512_castsi512_si256(sums[k]) : _mm512_extracti64x4_epi64(sums[k], 1);
        total = _mm512_add_epi64(_mm512_slli_epi64(total, 8), _mm512_cvtepi32_epi64(eight));
    }
    return total;
}

// A row with one scale: sums of products stay integers to its end. They are at most 124 * 128 in each lane for each of
// its four columns in a plane, which with kMaxCols is below 2^31.
template <int W>
float dot_row_of_one_scale(const Part& part, const uint8_t* row, const Inputs& inputs, Prefetch prefetch) {
    using C = Chunk<trellis_of(W)>;
    const uint8_t* digits = inputs.digits;
    const StoredScales stored(part, row);
    Ints sums[C::planes][kDigits];
    unrolled<C::planes * kDigits>([&](auto i) MOE_PACK_INLINE {
        sums[i.value / kDigits][i.value % kDigits] = Ints{};
    });
    for (Chunks<trellis_of(W)> chunks(part, row); chunks.more();) {
        prefetch.line();
        const Codes<trellis_of(W)> codes = chunks.next();
        unrolled<C::planes>([&](auto plane) MOE_PACK_INLINE {
            const __m512i values = codes.template plane<decltype(plane)::value>();
            unrolled<kDigits>([&](auto k) MOE_PACK_INLINE {
                Ints& sum = sums[plane.value][k.value];
                sum = Ints(_mm512_dpbusd_epi32(__m512i(sum), values, _mm512_load_si512(digits + k.value * kBlock)));
            });
            digits += kPlaneBytes;
        });
    }
    prefetch.rest();
    __m512i all[kDigits];
    unrolled<kDigits>([&](auto k) MOE_PACK_INLINE {
        Ints sum = sums[0][k.value];
        unrolled<C::planes - 1>([&](auto plane) MOE_PACK_INLINE { sum += sums[plane.value + 1][k.value]; });
        all[k.value] = __m512i(sum);
    });
    const int64_t total = _mm512_reduce_add_epi64(_mm512_add_epi64(in_one(all, 0), in_one(all, 1)));
    const double scale = _mm512_cvtss_f32(stored.load(0));
    return float(double(total - trellis_zero(W) * inputs.sum) * scale * (1.0 / kPeak) * inputs.peak);
}

// A trellis's rows: those of codes of 8 bits, looked up.
template <int W, int UNIT>
void dot_trellis(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                 const Ahead& ahead, float* out) {
    if (part.num_groups > 1) {
        return dot_affine<trellis_of(W), UNIT>(part, rows, num_rows, prepared, ahead, out);
    }
    const Inputs inputs(part, prepared);
    for (int32_t r = 0; r < num_rows; ++r) {
        out[r] = dot_row_of_one_scale<W>(part, rows[r], inputs, Prefetch(ahead, r)) + row_bias(part, rows[r]);
    }
}

template <int W, int UNIT>
constexpr auto add_trellis = add_affine<trellis_of(W), UNIT>;

}  // namespace
}  // namespace moe_pack
