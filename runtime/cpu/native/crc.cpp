#include "cpu_features.h"
#include "crc.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_pack {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320u;

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
        tables[0][i] = value;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++) tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
    return tables;
}

constexpr Tables kTables = make_tables();

// Eight bytes a step. `state` is the checksum before its final xor.
uint32_t by_tables(uint32_t state, const uint8_t* bytes, size_t num_bytes) {
    for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) {
        uint32_t low, high;
        std::memcpy(&low, bytes, 4);
        std::memcpy(&high, bytes + 4, 4);
        low ^= state;
        state = kTables[7][low & 255] ^ kTables[6][low >> 8 & 255] ^ kTables[5][low >> 16 & 255] ^
                kTables[4][low >> 24] ^ kTables[3][high & 255] ^ kTables[2][high >> 8 & 255] ^
                kTables[1][high >> 16 & 255] ^ kTables[0][high >> 24];
    }
    for (; num_bytes; bytes++, num_bytes--) state = state >> 8 ^ kTables[0][(state ^ *bytes) & 255];
    return state;
}

// a * b modulo the polynomial, bits reflected.
uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
    }
    return product;
}

// x^n modulo the polynomial, bits reflected.
uint32_t power(uint64_t n) {
    uint32_t result = 1u << 31, square = 1u << 30;
    for (; n; n >>= 1, square = times(square, square))
        if (n & 1) result = times(result, square);
    return result;
}

#if defined(__x86_64__)

// Four lanes of 128 bits are folded over 64 bytes a step, then into one, whose 16 bytes go by tables.
// Source: Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction (Intel, 2009); the
// constants are x^(512 + 64), x^512, x^(128 + 64) and x^128 modulo the polynomial in its reflected form.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t state, const uint8_t* bytes, size_t num_bytes) {
    const __m128i far = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    auto load = [](const uint8_t* from) __attribute__((target("pclmul,sse4.1"))) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    };
    auto fold = [](__m128i lane, __m128i by, __m128i next) __attribute__((target("pclmul,sse4.1"))) {
        __m128i low = _mm_clmulepi64_si128(lane, by, 0x00), high = _mm_clmulepi64_si128(lane, by, 0x11);
        return _mm_xor_si128(_mm_xor_si128(low, high), next);
    };
    __m128i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = load(bytes + 16 * i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)state));
    for (bytes += 64, num_bytes -= 64; num_bytes >= 64; bytes += 64, num_bytes -= 64)
        for (int i = 0; i < 4; i++) lanes[i] = fold(lanes[i], far, load(bytes + 16 * i));
    __m128i all = lanes[0];
    for (int i = 1; i < 4; i++) all = fold(all, near, lanes[i]);
    for (; num_bytes >= 16; bytes += 16, num_bytes -= 16) all = fold(all, near, load(bytes));
    uint8_t left[16];
    std::memcpy(left, &all, 16);
    return by_tables(by_tables(0, left, 16), bytes, num_bytes);
}

#endif

}  // namespace

uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t num_bytes) {
#if defined(__x86_64__)
    static const bool can_fold = cpu_features().pclmul && cpu_features().sse41;
    if (can_fold && num_bytes >= 64) return ~by_folding(~crc, bytes, num_bytes);
#endif
    return ~by_tables(~crc, bytes, num_bytes);
}

uint32_t crc32_joined(uint32_t first, uint32_t second, size_t num_bytes) {
    return times(power(8 * (uint64_t)num_bytes), first) ^ second;
}

}  // namespace moe_pack
