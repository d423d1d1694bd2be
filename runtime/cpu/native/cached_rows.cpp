#include "cached_rows.h"

#include <cmath>
#include <cstring>

namespace moe_pack {
namespace {

constexpr float kToWhole = 12582912.0f;  // 1.5 * 2^23: added and subtracted, it rounds to even what is below 2^22

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float as_value(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The nearest half, ties to even; NaN for what is not finite.
uint16_t to_half(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // below 2^-14 halves are multiples of 2^-24: those are the steps of floats from 0.5 on
        const float stepped = as_value(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(stepped) - bits_of(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000) >> 13));
}

float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return as_value(sign | 0x7f800000 | rest << 13);
    if (rest >= 0x0400) return as_value(sign | ((rest << 13) + 0x38000000));
    const float magnitude = (float)rest * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

void put_half(uint8_t* to, uint16_t half) { std::memcpy(to, &half, sizeof half); }

uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The smallest and the largest value of a block, 0 among them where it is not full. Returns whether all are finite.
bool find_span(const float* values, int32_t count, int32_t block, float* least, float* most) {
    float low = count < block ? 0.0f : values[0], high = low, none = 0.0f;
    for (int32_t i = 0; i < count; i++) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
        none += values[i] * 0.0f;
    }
    *least = low;
    *most = high;
    return none == 0.0f;
}

// The least code where there is no number: of values that are not finite as halves, whose block is NaNs anyway.
int32_t code_of(float value, float inverse, float least, float most) {
    const float whole = (value * inverse + kToWhole) - kToWhole, at_least = whole > least ? whole : least;
    return (int32_t)(at_least < most ? at_least : most);
}

void encode_q8(const CachedRows& rows, const float* values, int32_t count, uint8_t* codes, uint8_t* scale) {
    float low, high;
    const bool finite = find_span(values, count, rows.block, &low, &high);
    const float largest = -low > high ? -low : high;
    const uint16_t half = finite ? to_half(largest / 127.0f) : 0x7e00;
    const float step = from_half(half), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    put_half(scale, half);
    for (int32_t i = 0; i < rows.block; i++)
        codes[i] = finite && i < count ? (uint8_t)(int8_t)code_of(values[i], inverse, -127.0f, 127.0f) : 0;
}

void encode_q4(const CachedRows& rows, const float* values, int32_t count, uint8_t* codes, uint8_t* scale,
               uint8_t* minimum) {
    float low, high;
    const bool finite = find_span(values, count, rows.block, &low, &high);
    const uint16_t least_half = to_half(low);
    const float least = from_half(least_half);
    const uint16_t half = finite ? to_half((high - least) / 15.0f) : 0x7e00;
    const float step = from_half(half), inverse = step > 0.0f ? 1.0f / step : 0.0f;
    put_half(scale, half);
    put_half(minimum, least_half);
    const int32_t second = rows.block / 2;
    for (int32_t i = 0; i < second; i++) {
        const int32_t j = second + i;
        const float one = i < count ? values[i] : 0.0f, other = j < count ? values[j] : 0.0f;
        const int32_t first_code = finite ? code_of(one - least, inverse, 0.0f, 15.0f) : 0;
        const int32_t second_code = finite ? code_of(other - least, inverse, 0.0f, 15.0f) : 0;
        codes[i] = (uint8_t)(first_code | second_code << 4);
    }
}

// Hadamard's matrix times each piece, over the root of its size.
void transform(float* x, int32_t width) {
    const int32_t size = width & -width;
    const float share = 1.0f / std::sqrt((float)size);
    for (float* piece = x; piece < x + width; piece += size) {
        for (int32_t apart = 1; apart < size; apart *= 2)
            for (int32_t first = 0; first < size; first += 2 * apart)
                for (int32_t i = first; i < first + apart; i++) {
                    const float one = piece[i], other = piece[i + apart];
                    piece[i] = one + other;
                    piece[i + apart] = one - other;
                }
        for (int32_t i = 0; i < size; i++) piece[i] *= share;
    }
}

}  // namespace

CachedRows cached_rows(CacheKind kind, int32_t width) {
    CachedRows rows = {kind, width, 0, 0, 0, 0};
    if (kind == CacheKind::f32 || kind == CacheKind::bf16) {
        rows.row_bytes = (size_t)width * (kind == CacheKind::f32 ? 4 : 2);
        return rows;
    }
    rows.num_blocks = (width + kCacheBlock - 1) / kCacheBlock;
    rows.block = (width + rows.num_blocks - 1) / rows.num_blocks;
    rows.block += rows.block % 2;
    rows.code_bytes = kind == CacheKind::q8 ? rows.block : rows.block / 2;
    rows.row_bytes = (size_t)rows.num_blocks * (rows.code_bytes + (kind == CacheKind::q8 ? 2 : 4));
    return rows;
}

void fill_signs(float* signs, int32_t width) {
    for (int64_t i = 0; i < width; i++) signs[i] = (i * 2654435761 >> 15) & 1 ? -1.0f : 1.0f;
}

void rotate_cached(float* x, const float* signs, int32_t width) {
    for (int32_t i = 0; i < width; i++) x[i] *= signs[i];
    transform(x, width);
}

void rotate_cached_back(float* x, const float* signs, int32_t width) {
    transform(x, width);
    for (int32_t i = 0; i < width; i++) x[i] *= signs[i];
}

void encode_cached(const CachedRows& rows, const float* values, uint8_t* out) {
    if (rows.kind == CacheKind::f32) {
        std::memcpy(out, values, rows.row_bytes);
        return;
    }
    if (rows.kind == CacheKind::bf16) {
        for (int32_t i = 0; i < rows.width; i++) put_half(out + 2 * i, to_bf16(values[i]));
        return;
    }
    uint8_t *scales = out + (size_t)rows.num_blocks * rows.code_bytes, *minima = scales + 2 * rows.num_blocks;
    for (int32_t b = 0; b < rows.num_blocks; b++) {
        const int32_t first = b * rows.block, left = rows.width - first;
        const int32_t count = left < 0 ? 0 : left < rows.block ? left : rows.block;
        uint8_t* codes = out + (size_t)b * rows.code_bytes;
        if (rows.kind == CacheKind::q8)
            encode_q8(rows, values + first, count, codes, scales + 2 * b);
        else
            encode_q4(rows, values + first, count, codes, scales + 2 * b, minima + 2 * b);
    }
}

}  // namespace moe_pack
