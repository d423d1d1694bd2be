// AVX-512 (F, BW, DQ, VL, VNNI): whole matrices at the speed of memory.
//
// Products of one token are exact sums of integers: inputs become 24-bit fixed point relative to the token's largest
// magnitude, in three signed digits of 8 bits, which VNNI multiplies with codes of up to 8 bits, 64 at a time. That is
// as precise as float32 inputs, whose products would be rounded at every addition. Sums of rows are float32.
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2")
#endif

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"

#define MOE_PACK_VECTOR_FLOATS 16
#define MOE_PACK_FMA(a, b, c) (Vector) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define MOE_PACK_TILE_ROWS 4
#define MOE_PACK_TILE_TOKENS 6
#include "vector.h"

namespace moe_pack {
namespace {

constexpr float kFixedPoint = 8300000.0f;  // the largest input, below 127 * 65536 + 127 * 256 + 127
constexpr int kDigits = 3;

// How a chunk of 64 bytes of codes (96 with 3 bits) lies: `kPlanes` blocks, and as many planes of 64 codes.
template <int W>
struct Chunk {
    static constexpr int planes = W == 3 ? 4 : 8 / W;
    static constexpr int plane_bytes = 64 / planes;  // of one block in one plane
    static constexpr int blocks = planes;
    static constexpr int cols = 64 * blocks;
    static constexpr int code_bytes = W == 3 ? 96 : 64;
    static constexpr int vectors = cols / 16;
};

// U units of 64 / U columns share a scale in a block: 1 (groups of 64 and more), 2 or 4. Consecutive planes of one
// unit are summed before they are scaled.
template <int W, int U>
struct Units {
    static constexpr int planes_each = Chunk<W>::planes > U ? Chunk<W>::planes / U : 1;
    static constexpr int parts = Chunk<W>::planes / planes_each;
    static constexpr int a_chunk = Chunk<W>::blocks * U;

    // Which of a chunk's units each lane of 4 codes belongs to, for the planes of one part.
    static inline __m512i index(int part) {
        alignas(64) int32_t lanes[16];
        constexpr int lanes_each = Chunk<W>::plane_bytes / 4;
        for (int lane = 0; lane < 16; lane++) {
            int col = lane / lanes_each * 64 + Chunk<W>::plane_bytes * part * planes_each + lane % lanes_each * 4;
            lanes[lane] = col / (64 / U);
        }
        return _mm512_load_si512(lanes);
    }
};

// use(Index<0>), ..., use(Index<N - 1>): unlike a loop, indices are constants before registers are given out, and
// arrays of vectors stay in them.
template <int I>
struct Index {
    static constexpr int value = I;
};

template <class Use, int... I>
__attribute__((always_inline)) inline void each_of(const Use& use, std::integer_sequence<int, I...>) {
    (use(Index<I>{}), ...);
}

template <int N, class Use>
__attribute__((always_inline)) inline void unrolled(const Use& use) {
    each_of(use, std::make_integer_sequence<int, N>{});
}

inline int32_t round_up(int32_t value, int32_t to) { return (value + to - 1) / to * to; }

inline int32_t unit_cols(const Part& part) { return part.group < 64 ? part.group : 64; }

inline int32_t padded_units(const Part& part) { return round_up(part.num_cols / unit_cols(part), 16) + 32; }

inline int32_t planes_of(int32_t width) { return width == 3 ? 4 : 8 / width; }

inline int32_t num_chunks(const Part& part) {
    int32_t cols = 64 * planes_of(part.width);
    return (part.num_cols + cols - 1) / cols;
}

inline __mmask16 first(int32_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

// ---- scales -------------------------------------------------------------------------------------------------------

inline __m512 halves(const uint8_t* from, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
}

inline float half(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return _cvtsh_ss(bits);
}

// Up to 16 scales and zeros from group `group` on, for any way they are stored.
struct Scales {
    const uint8_t* scales;
    const uint8_t* zeros;
    float scale_step, zero_step;
    bool bytes;

    inline Scales(const Part& part, const uint8_t* row) : bytes(part.scale_bits == 8) {
        scales = row + part.code_bytes;
        zeros = scales + part.scale_bytes;
        if (bytes) {
            scale_step = half(scales);
            zero_step = half(zeros);
            scales += 2;
            zeros += 2;
        }
    }
    inline void load(int32_t group, __mmask16 mask, __m512* scale, __m512* zero) const {
        if (!bytes) {
            *scale = halves(scales + 2 * group, mask);
            *zero = halves(zeros + 2 * group, mask);
            return;
        }
        __m128i s = _mm_maskz_loadu_epi8(mask, scales + group), z = _mm_maskz_loadu_epi8(mask, zeros + group);
        *scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(s)), _mm512_set1_ps(scale_step));
        *zero = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(z)), _mm512_set1_ps(zero_step));
    }
};

// Calls `use(first unit, scales, zeros)` for 16 units at a time: groups longer than 64 are repeated.
template <class Use>
inline void each_16_units(const Part& part, const uint8_t* row, const Use& use) {
    Scales stored(part, row);
    int32_t num_units = part.num_cols / unit_cols(part);
    __m512 scale, zero;
    // A chunk may have more units than its row: what stands for them must be a number.
    use(round_up(num_units, 16), _mm512_setzero_ps(), _mm512_setzero_ps());
    if (part.num_groups == 1) {
        stored.load(0, 1, &scale, &zero);
        scale = _mm512_broadcastss_ps(_mm512_castps512_ps128(scale));
        zero = _mm512_broadcastss_ps(_mm512_castps512_ps128(zero));
        for (int32_t unit = 0; unit < num_units; unit += 16) {
            __mmask16 mask = first(num_units - unit);
            use(unit, _mm512_maskz_mov_ps(mask, scale), _mm512_maskz_mov_ps(mask, zero));
        }
        return;
    }
    bool twice = part.group == 128;
    const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (int32_t unit = 0; unit < num_units; unit += 16) {
        __mmask16 mask = first(num_units - unit);
        if (twice) {
            stored.load(unit / 2, first((num_units - unit) / 2) & 0xff, &scale, &zero);
            scale = _mm512_permutexvar_ps(pairs, scale);
            zero = _mm512_permutexvar_ps(pairs, zero);
        } else {
            stored.load(unit, mask, &scale, &zero);
        }
        use(unit, scale, zero);
    }
}

// ---- a token's inputs ---------------------------------------------------------------------------------------------

// 64 bytes with the scale of the fixed point; for each chunk, plane and digit 64 bytes, in the order of the codes; the
// sum of the inputs of each unit as a float.
struct Prepared {
    float scale;
    const uint8_t* digits;
    const float* sums;

    inline Prepared(const Part& part, const void* prepared) {
        auto* bytes = static_cast<const uint8_t*>(prepared);
        std::memcpy(&scale, bytes, 4);
        digits = bytes + 64;
        sums = reinterpret_cast<const float*>(digits + (size_t)num_chunks(part) * planes_of(part.width) * kDigits * 64);
    }
};

size_t prepared_bytes(const Part& part) {
    if (part.codec != Codec::affine) return (size_t)round_up(4 * part.num_cols, 64);
    return 64 + (size_t)num_chunks(part) * planes_of(part.width) * kDigits * 64 + 4 * (size_t)padded_units(part);
}

inline float largest(const float* x, int32_t n) {
    __m512 found = _mm512_setzero_ps();
    __mmask16 bad = 0;
    for (int32_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(first(n - i), x + i);
        bad |= _mm512_fpclass_ps_mask(v, 0x99);  // NaNs and infinities
        found = _mm512_max_ps(found, _mm512_abs_ps(v));
    }
    return bad ? NAN : _mm512_reduce_max_ps(found);
}

// Digits of 64 columns: each value is d2 * 65536 + d1 * 256 + d0 with digits from -128 to 127.
inline void split_digits(const float* x, float inverse, uint8_t out[kDigits][64]) {
    for (int i = 0; i < 64; i += 16) {
        __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(inverse)));
        for (int digit = kDigits - 1; digit >= 0; digit--) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out[digit] + i), _mm512_cvtepi32_epi8(v));
            __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24);
            v = _mm512_srai_epi32(_mm512_sub_epi32(v, low), 8);
        }
    }
}

void prepare_affine(const Part& part, const float* x, void* prepared) {
    auto* bytes = static_cast<uint8_t*>(prepared);
    Prepared place(part, prepared);
    auto* digits = const_cast<uint8_t*>(place.digits);
    auto* sums = const_cast<float*>(place.sums);
    int32_t planes = planes_of(part.width), plane_bytes = 64 / planes, unit = unit_cols(part);
    float top = largest(x, part.num_cols);
    // Below this the inverse would overflow; such inputs are nothing beside any bias or sum.
    float inverse = top > 1e-30f ? kFixedPoint / top : 0.0f, scale = std::isnan(top) ? NAN : top / kFixedPoint;
    std::memcpy(bytes, &scale, 4);
    int32_t blocks = round_up(part.num_cols / 64, planes);
    for (int32_t block = 0; block < blocks; block++) {
        uint8_t found[kDigits][64] = {};
        bool inside = block * 64 < part.num_cols;
        if (inside && !std::isnan(top)) split_digits(x + block * 64, inverse, found);
        uint8_t* chunk = digits + (size_t)(block / planes) * planes * kDigits * 64;
        for (int32_t plane = 0; plane < planes; plane++)
            for (int32_t digit = 0; digit < kDigits; digit++)
                std::memcpy(chunk + (plane * kDigits + digit) * 64 + block % planes * plane_bytes,
                            found[digit] + plane * plane_bytes, plane_bytes);
        for (int32_t start = 0; inside && start < 64; start += unit) {
            int32_t sum = 0;
            for (int32_t i = start; i < start + unit; i++)
                sum += (int8_t)found[0][i] * 65536 + (int8_t)found[1][i] * 256 + (int8_t)found[2][i];
            sums[(block * 64 + start) / unit] = (float)sum;
        }
    }
    int32_t num_units = part.num_cols / unit;
    std::memset(sums + num_units, 0, sizeof(float) * (padded_units(part) - num_units));
}

void prepare(const Part& part, const float* x, void* prepared) {
    if (part.codec == Codec::affine)
        prepare_affine(part, x, prepared);
    else
        std::memcpy(prepared, x, sizeof(float) * part.num_cols);
}

// ---- codes --------------------------------------------------------------------------------------------------------

// A chunk's bytes; those behind the row's codes are zero.
template <int W>
struct Codes {
    __m512i low, high;  // high: third bits, with 3-bit codes

    // Of a chunk's bytes from `from` on, `num_bytes` belong to the row.
    inline void load(const uint8_t* from, int32_t num_bytes) {
        if constexpr (W == 3) {
            __mmask64 here = num_bytes >= 64 ? ~0ull : (1ull << num_bytes) - 1;
            __mmask32 behind = num_bytes >= 96 ? ~0u : num_bytes > 64 ? (1u << (num_bytes - 64)) - 1 : 0;
            __m512i a = _mm512_maskz_loadu_epi8(here, from);
            __m512i b = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(behind, from + 64));
            low = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 3, 4, 6, 7, 9, 10), b);
            high = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 2, 5, 5, 8, 8, 11, 11), b);
            // Codes 8 to 15 of a plane have their third bits one place above those of 0 to 7.
            high = _mm512_srlv_epi64(high, _mm512_setr_epi64(0, 1, 0, 1, 0, 1, 0, 1));
        } else if (num_bytes >= 64) {
            low = _mm512_loadu_si512(from);
        } else {
            low = _mm512_maskz_loadu_epi8((1ull << num_bytes) - 1, from);
        }
    }

    // The 64 codes of a plane, a byte each.
    inline __m512i plane(int s) const {
        if constexpr (W == 8) return low;
        if constexpr (W == 3) {
            __m512i two = s ? _mm512_srli_epi16(low, 2 * s) : low;
            __m512i third = s > 1 ? _mm512_srli_epi16(high, 2 * s - 2) : s ? high : _mm512_slli_epi16(high, 2);
            __m512i three = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), two, third, 0xca);
            return _mm512_and_si512(three, _mm512_set1_epi8(7));
        }
        __m512i shifted = s ? _mm512_srli_epi16(low, W * s) : low;
        return _mm512_and_si512(shifted, _mm512_set1_epi8((1 << W) - 1));
    }

    // 16 codes as floats: those in byte b of each lane of 4 bytes, plane s. `table` from `code_table`.
    inline __m512 floats(int b, int s, __m512 table) const {
        if constexpr (W == 8) {
            return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(low, 8 * b), _mm512_set1_epi32(255)));
        } else {
            // The table repeats every 2^W entries: of an index its low W bits count, and nothing need be masked.
            int shift = 8 * b + (W == 3 ? 2 : W) * s;
            __m512i index = _mm512_srli_epi32(low, shift);
            if constexpr (W == 3) {
                __m512i third = shift > 1 ? _mm512_srli_epi32(high, shift - 2) : _mm512_slli_epi32(high, 2);
                index = _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), index, third, 0xca);
            }
            return _mm512_permutexvar_ps(index, table);
        }
    }
};

template <int W>
inline __m512 code_table() {
    const __m512i all = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cvtepi32_ps(_mm512_and_si512(all, _mm512_set1_epi32((1 << W) - 1)));
}

template <int W, int U>
inline __m512 unit_values(const float* values, int chunk, __m512i index) {
    const float* from = values + (size_t)chunk * Units<W, U>::a_chunk;
    if constexpr (Units<W, U>::a_chunk > 16)
        return _mm512_permutex2var_ps(_mm512_loadu_ps(from), index, _mm512_loadu_ps(from + 16));
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(from));
}

inline void prefetch_line(const Ahead& ahead, int row, int32_t line) {
    if (line * kLineBytes < ahead.num_bytes)
        _mm_prefetch(reinterpret_cast<const char*>(ahead.rows[row]) + line * kLineBytes, _MM_HINT_T1);
}

inline void prefetch_rest(const Ahead& ahead, int row, int32_t line) {
    for (; line * kLineBytes < ahead.num_bytes; line++) prefetch_line(ahead, row, line);
}

// ---- rows times a token -------------------------------------------------------------------------------------------

// The digits' sums of a part of a chunk, as one float a lane.
template <int W>
inline __m512 joined(__m512i d2, __m512i d1, __m512i d0) {
    if constexpr (W == 8) {  // 4 * 255 * 128 * 65536 does not fit 32 bits
        __m512i low = _mm512_add_epi32(_mm512_slli_epi32(d1, 8), d0);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(d2), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(low));
    }
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(d2, 8), d1);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), d0));
}

template <int W, int U, int R>
inline void dot_some(const Part& part, const uint8_t* const* rows, const Prepared& x, const Ahead& ahead, int first_row,
                     float* work, float* out) {
    using C = Chunk<W>;
    using N = Units<W, U>;
    float* scales[R];
    __m512 shift[R], sum[R];
    __m512i index[N::parts];
    for (int i = 0; i < N::parts; i++) index[i] = N::index(i);
    for (int r = 0; r < R; r++) {
        scales[r] = work + (size_t)r * padded_units(part);
        shift[r] = sum[r] = _mm512_setzero_ps();
        each_16_units(part, rows[r], [&](int32_t unit, __m512 scale, __m512 zero) {
            _mm512_store_ps(scales[r] + unit, scale);
            shift[r] = _mm512_fmadd_ps(_mm512_mul_ps(scale, zero), _mm512_load_ps(x.sums + unit), shift[r]);
        });
    }
    int32_t chunks = num_chunks(part);
    for (int32_t c = 0; c < chunks; c++) {
        const uint8_t* digits = x.digits + (size_t)c * C::planes * kDigits * 64;
        int32_t left = part.code_bytes - c * C::code_bytes;
        Codes<W> codes[R];
        unrolled<R>([&](auto r) __attribute__((always_inline)) {
            prefetch_line(ahead, first_row + r.value, c);
            codes[r.value].load(rows[r.value] + (size_t)c * C::code_bytes, left);
        });
        unrolled<N::parts>([&](auto i) __attribute__((always_inline)) {
            __m512i d[R * kDigits] = {};
            unrolled<N::planes_each>([&](auto plane) __attribute__((always_inline)) {
                constexpr int s = decltype(i)::value * N::planes_each + decltype(plane)::value;
                __m512i plane_codes[R];
                unrolled<R>([&](auto r) __attribute__((always_inline)) {
                    plane_codes[r.value] = codes[r.value].plane(s);
                });
                unrolled<kDigits>([&](auto digit) __attribute__((always_inline)) {
                    __m512i inputs = _mm512_load_si512(digits + (s * kDigits + digit.value) * 64);
                    unrolled<R>([&](auto r) __attribute__((always_inline)) {
                        __m512i& sum_of = d[r.value * kDigits + digit.value];
                        sum_of = _mm512_dpbusd_epi32(sum_of, plane_codes[r.value], inputs);
                    });
                });
            });
            unrolled<R>([&](auto r) __attribute__((always_inline)) {
                const __m512i* of = d + r.value * kDigits;
                __m512 scale = unit_values<W, U>(scales[r.value], c, index[i.value]);
                sum[r.value] = _mm512_fmadd_ps(joined<W>(of[0], of[1], of[2]), scale, sum[r.value]);
            });
        });
    }
    for (int r = 0; r < R; r++) {
        prefetch_rest(ahead, first_row + r, chunks);
        out[r] = x.scale * (_mm512_reduce_add_ps(sum[r]) - _mm512_reduce_add_ps(shift[r]));
    }
}

template <int W, int U>
void dot_affine(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                const Ahead& ahead, float* work, float* out) {
    Prepared x(part, prepared);
    int32_t r = 0;
    // Two rows at once: each load of inputs serves both.
    for (; r + 1 < num_rows; r += 2) dot_some<W, U, 2>(part, rows + r, x, ahead, r, work, out + r);
    if (r < num_rows) dot_some<W, U, 1>(part, rows + r, x, ahead, r, work, out + r);
}

// 16 weights of a part that is no codes, from column `col` on; `mask` says which exist.
inline __m512 plain_weights(Codec codec, const uint8_t* row, int32_t col, __mmask16 mask) {
    if (codec == Codec::f32) return _mm512_maskz_loadu_ps(mask, row + 4 * (size_t)col);
    __m256i stored = _mm256_maskz_loadu_epi16(mask, row + 2 * (size_t)col);
    if (codec == Codec::f16) return _mm512_cvtph_ps(stored);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
}

template <Codec codec>
void dot_plain(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
               const Ahead& ahead, float*, float* out) {
    auto* x = static_cast<const float*>(prepared);
    int32_t n = part.num_cols, lines_each = codec == Codec::f32 ? 4 : 2;  // of 64 weights
    for (int32_t r = 0; r < num_rows; r++) {
        __m512 sum[4] = {};
        int32_t col = 0, line = 0;
        for (; col + 64 <= n; col += 64, line += lines_each) {
            for (int i = 0; i < lines_each; i++) prefetch_line(ahead, r, line + i);
            for (int i = 0; i < 4; i++)
                sum[i] = _mm512_fmadd_ps(plain_weights(codec, rows[r], col + 16 * i, 0xffff),
                                         _mm512_loadu_ps(x + col + 16 * i), sum[i]);
        }
        for (; col < n; col += 16) {
            __mmask16 mask = first(n - col);
            sum[0] = _mm512_fmadd_ps(plain_weights(codec, rows[r], col, mask), _mm512_maskz_loadu_ps(mask, x + col),
                                     sum[0]);
        }
        prefetch_rest(ahead, r, line);
        out[r] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
    }
}

// ---- sums of rows -------------------------------------------------------------------------------------------------

size_t work_floats(const Part& part) {
    return part.codec == Codec::affine ? (size_t)kMaxTile * padded_units(part) : 16;
}

// Affine: a chunk's vectors, byte by byte and plane by plane, as `Codes::floats` gives them; then what is to be
// subtracted from each unit. Others: columns in their order.
size_t sum_floats(const Part& part) {
    if (part.codec != Codec::affine) return (size_t)round_up(part.num_cols, 16);
    return (size_t)num_chunks(part) * 64 * planes_of(part.width) + padded_units(part);
}

// B of the 4 bytes of each lane of a chunk, from `first_byte` on: as many accumulators as fit the registers.
template <int W, int U, int B, int first_byte>
inline void add_chunk(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* factors, int32_t c,
                      const Ahead& ahead, float* sum) {
    using C = Chunk<W>;
    using N = Units<W, U>;
    const __m512 table = code_table<W>();
    __m512i index[N::parts];
    for (int i = 0; i < N::parts; i++) index[i] = N::index(i);
    float* place = sum + ((size_t)c * C::vectors + first_byte * C::planes) * 16;
    constexpr int vectors = B * C::planes;
    __m512 acc[vectors];
    unrolled<vectors>([&](auto k) __attribute__((always_inline)) { acc[k.value] = _mm512_load_ps(place + 16 * k.value); });
    int32_t left = part.code_bytes - c * C::code_bytes, stride = padded_units(part);
    for (int32_t r = 0; r < num_rows; r++, factors += stride) {
        Codes<W> codes;
        codes.load(rows[r] + (size_t)c * C::code_bytes, left);
        if (first_byte == 0) prefetch_line(ahead, r, c);
        unrolled<N::parts>([&](auto i) __attribute__((always_inline)) {
            __m512 factor = unit_values<W, U>(factors, c, index[i.value]);
            unrolled<B * N::planes_each>([&](auto k) __attribute__((always_inline)) {
                constexpr int b = decltype(k)::value / N::planes_each;
                constexpr int s = decltype(i)::value * N::planes_each + decltype(k)::value % N::planes_each;
                __m512& to = acc[b * C::planes + s];
                to = _mm512_fmadd_ps(codes.floats(first_byte + b, s, table), factor, to);
            });
        });
    }
    unrolled<vectors>([&](auto k) __attribute__((always_inline)) { _mm512_store_ps(place + 16 * k.value, acc[k.value]); });
}

template <int W, int U>
void add_affine(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
                float* work, float* sum) {
    float* shifts = sum + (size_t)num_chunks(part) * Chunk<W>::cols;
    for (int32_t r = 0; r < num_rows; r++) {
        float* factors = work + (size_t)r * padded_units(part);
        each_16_units(part, rows[r], [&](int32_t unit, __m512 scale, __m512 zero) {
            __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(h[r]));
            _mm512_store_ps(factors + unit, factor);
            _mm512_store_ps(shifts + unit, _mm512_fmadd_ps(factor, zero, _mm512_load_ps(shifts + unit)));
        });
    }
    int32_t chunks = num_chunks(part);
    for (int32_t c = 0; c < chunks; c++) {
        if constexpr (W == 1) {
            add_chunk<W, U, 2, 0>(part, rows, num_rows, work, c, ahead, sum);
            add_chunk<W, U, 2, 2>(part, rows, num_rows, work, c, ahead, sum);
        } else {
            add_chunk<W, U, 4, 0>(part, rows, num_rows, work, c, ahead, sum);
        }
    }
    for (int32_t r = 0; r < num_rows; r++) prefetch_rest(ahead, r, chunks);
}

template <Codec codec>
void add_plain(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
               float*, float* sum) {
    int32_t n = part.num_cols, line = 0;
    for (int32_t col = 0; col < n; col += 64) {
        __m512 acc[4];
        __mmask16 mask[4];
        for (int i = 0; i < 4; i++) {
            mask[i] = col + 16 * i < n ? first(n - col - 16 * i) : 0;
            acc[i] = _mm512_maskz_loadu_ps(mask[i], sum + col + 16 * i);
        }
        for (int32_t r = 0; r < num_rows; r++) {
            prefetch_line(ahead, r, line);
            prefetch_line(ahead, r, line + 1);
            for (int i = 0; i < 4; i++)
                acc[i] = _mm512_fmadd_ps(plain_weights(codec, rows[r], col + 16 * i, mask[i]), _mm512_set1_ps(h[r]),
                                         acc[i]);
        }
        line += 2;
        for (int i = 0; i < 4; i++) _mm512_mask_storeu_ps(sum + col + 16 * i, mask[i], acc[i]);
    }
    for (int32_t r = 0; r < num_rows; r++) prefetch_rest(ahead, r, line);
}

template <int W>
void finish_affine(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    using C = Chunk<W>;
    const float* shifts = sum + (size_t)num_chunks(part) * C::cols;
    int32_t unit = unit_cols(part);
    constexpr int lanes_each = C::plane_bytes / 4;
    for (int32_t block = start / 64; block < stop / 64; block++) {
        const float* chunk = sum + (size_t)(block / C::blocks) * C::cols;
        int first_lane = block % C::blocks * lanes_each;
        float* y = out + (size_t)block * 64;
        for (int s = 0; s < C::planes; s++)
            for (int lane = 0; lane < lanes_each; lane++)
                for (int b = 0; b < 4; b++) {
                    int col = C::plane_bytes * s + 4 * lane + b;
                    float found = chunk[(b * C::planes + s) * 16 + first_lane + lane];
                    y[col] += weight * (found - shifts[(block * 64 + col) / unit]);
                }
    }
}

// ---- rows as floats -----------------------------------------------------------------------------------------------

// Codes 16 q to 16 q + 15 of a block, a byte each.
template <int W>
inline __m128i sixteen_codes(const uint8_t* block, int q) {
    auto load = [&](int from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + from)); };
    // Third bits, and 1-bit codes: 8 bytes hold bit after bit of 8 codes each.
    auto bits = [&](const uint8_t* from) {
        int64_t eight;
        std::memcpy(&eight, from, 8);
        return _mm_and_si128(_mm_set_epi64x(eight >> (2 * q + 1), eight >> (2 * q)), _mm_set1_epi8(1));
    };
    if constexpr (W == 8) return load(16 * q);
    if constexpr (W == 4)
        return _mm_and_si128(_mm_srli_epi16(load(16 * (q & 1)), q & 2 ? 4 : 0), _mm_set1_epi8(15));
    if constexpr (W == 1) return bits(block);
    __m128i two = _mm_and_si128(_mm_srl_epi16(load(0), _mm_cvtsi32_si128(2 * q)), _mm_set1_epi8(3));
    if constexpr (W == 2) return two;
    return _mm_or_si128(two, _mm_slli_epi16(bits(block + 16), 2));
}

template <int W>
void decode_affine(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    Scales stored(part, row);
    for (int32_t col = start; col < stop; col += 16) {
        int32_t group = part.num_groups == 1 ? 0 : col / part.group;
        __m512 scale, zero;
        stored.load(group, 1, &scale, &zero);
        scale = _mm512_broadcastss_ps(_mm512_castps512_ps128(scale));
        zero = _mm512_broadcastss_ps(_mm512_castps512_ps128(zero));
        __m128i codes = sixteen_codes<W>(row + (size_t)(col / 64) * 8 * W, col % 64 / 16);
        __m512 value = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
        _mm512_storeu_ps(out + (col - start), _mm512_mul_ps(_mm512_sub_ps(value, zero), scale));
    }
}

template <Codec codec>
void decode_plain(const Part&, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    for (int32_t col = start; col < stop; col += 16) {
        __mmask16 mask = first(stop - col);
        _mm512_mask_storeu_ps(out + (col - start), mask, plain_weights(codec, row, col, mask));
    }
}

// ---- one function for every kind of part --------------------------------------------------------------------------

using DotRows = decltype(Kernels::dot_rows);
using AddRows = decltype(Kernels::add_rows);

template <int W>
DotRows dot_of(int32_t unit) {
    return unit == 64 ? dot_affine<W, 1> : unit == 32 ? dot_affine<W, 2> : dot_affine<W, 4>;
}

template <int W>
AddRows add_of(int32_t unit) {
    return unit == 64 ? add_affine<W, 1> : unit == 32 ? add_affine<W, 2> : add_affine<W, 4>;
}

void dot_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
              const Ahead& ahead, float* work, float* out) {
    int32_t unit = unit_cols(part);
    DotRows run = part.codec == Codec::bf16  ? dot_plain<Codec::bf16>
                  : part.codec == Codec::f16 ? dot_plain<Codec::f16>
                  : part.codec == Codec::f32 ? dot_plain<Codec::f32>
                  : part.width == 1          ? dot_of<1>(unit)
                  : part.width == 2          ? dot_of<2>(unit)
                  : part.width == 3          ? dot_of<3>(unit)
                  : part.width == 4          ? dot_of<4>(unit)
                                             : dot_of<8>(unit);
    run(part, rows, num_rows, prepared, ahead, work, out);
    for (int32_t r = 0; part.has_bias && r < num_rows; r++) {
        float bias;
        std::memcpy(&bias, rows[r] + part.num_bytes(), 4);
        out[r] += bias;
    }
}

void add_rows(const Part& part, const uint8_t* const* rows, int32_t num_rows, const float* h, const Ahead& ahead,
              float* work, float* sum) {
    int32_t unit = unit_cols(part);
    AddRows run = part.codec == Codec::bf16  ? add_plain<Codec::bf16>
                  : part.codec == Codec::f16 ? add_plain<Codec::f16>
                  : part.codec == Codec::f32 ? add_plain<Codec::f32>
                  : part.width == 1          ? add_of<1>(unit)
                  : part.width == 2          ? add_of<2>(unit)
                  : part.width == 3          ? add_of<3>(unit)
                  : part.width == 4          ? add_of<4>(unit)
                                             : add_of<8>(unit);
    run(part, rows, num_rows, h, ahead, work, sum);
}

void finish_sum(const Part& part, const float* sum, float weight, int32_t start, int32_t stop, float* out) {
    if (part.codec != Codec::affine) {
        for (int32_t col = start; col < stop; col++) out[col] += weight * sum[col];
        return;
    }
    auto run = part.width == 1   ? finish_affine<1>
               : part.width == 2 ? finish_affine<2>
               : part.width == 3 ? finish_affine<3>
               : part.width == 4 ? finish_affine<4>
                                 : finish_affine<8>;
    run(part, sum, weight, start, stop, out);
}

void decode(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    auto run = part.codec == Codec::bf16  ? decode_plain<Codec::bf16>
               : part.codec == Codec::f16 ? decode_plain<Codec::f16>
               : part.codec == Codec::f32 ? decode_plain<Codec::f32>
               : part.width == 1          ? decode_affine<1>
               : part.width == 2          ? decode_affine<2>
               : part.width == 3          ? decode_affine<3>
               : part.width == 4          ? decode_affine<4>
                                          : decode_affine<8>;
    run(part, row, start, stop, out);
}

}  // namespace

const Kernels avx512_kernels = {"avx512", prepared_bytes, prepare, dot_rows,  work_floats, sum_floats,
                                add_rows, finish_sum,     decode,  dots,      add};

}  // namespace moe_pack

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
