#include "plain.h"

#include <algorithm>

#include "cases.h"
#include "panels.h"
#include "trellis_tables.h"

namespace moe_pack {
namespace {

// Inputs are fixed point relative to the largest, and sums are float32: of the magnitudes that meet in a sum (largest
// input times weights before their zeros are taken off), a hundred roundings.
constexpr double kRoundings = 100 * 0x1p-24;

uint16_t u16_at(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }

float half_at(const uint8_t* at) {
    int stored = u16_at(at), exponent = stored >> 10 & 31, fraction = stored & 1023;
    float sign = stored & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp((float)(1024 + fraction), exponent - 25) : std::ldexp((float)fraction, -24));
}

float bits_at(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float float_at(const uint8_t* at) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Code j + 8 b p of a block of width b is (byte[j] >> (b p)) & (2^b - 1).
int planar_code(const uint8_t* block, int width, int i) {
    int run = 8 * width;
    return block[i % run] >> (width * (i / run)) & ((1 << width) - 1);
}

int code_at(const Part& part, const uint8_t* row, int i) {
    const uint8_t* block = row + i / kBlock * (8 * part.width);
    if (part.width != 3) return planar_code(block, part.width, i % kBlock);
    return planar_code(block, 2, i % kBlock) | planar_code(block + 16, 1, i % kBlock) << 2;
}

// Nibble `t` of a trellis's stream; zeros come before the first.
int nibble_at(const uint8_t* codes, int t) { return t < 0 ? 0 : codes[t / 2] >> 4 * (t % 2) & 15; }

// The level of weight `i` of a trellis: the last three nibbles select its set, bits of the second plane the level.
int trellis_value(const Part& part, const uint8_t* codes, int i) {
    int column = i % kBlock, half = column / 32, place = column % 32;  // step 2 j: column j or j + 32; then 16 more
    int step = i / kBlock * 32 + place % 16 * 2 + place / 16;
    int hash = kTrellisHash[0][nibble_at(codes, step)] ^ kTrellisHash[1][nibble_at(codes, step - 1)] ^
               kTrellisHash[2][nibble_at(codes, step - 2)];
    int bits[2] = {(part.width - 4) / 2, (part.width - 3) / 2}, level = 0;
    const uint8_t* plane = codes + part.num_cols / 4 + i / kBlock * 4 * (part.width - 4) + (half ? 4 * bits[0] : 0);
    if (bits[half] == 1) level = plane[place % 4] >> place / 4 & 1;
    if (bits[half] == 2) level = plane[place % 8] >> 2 * (place / 8) & 3;
    return kTrellisLevels[part.width - 4][half][16 * level + (hash >> 4 * half & 15)];
}

// A float of few bits: `mantissa` of them below the exponent, which has this bias; no number and infinity apart.
float small_float(int code, int mantissa, int bias) {
    int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    float found = exponent ? std::ldexp((float)((1 << mantissa) + fraction), exponent - bias - mantissa)
                           : std::ldexp((float)fraction, 1 - bias - mantissa);
    return code & 0x80 ? -found : found;
}

float e4m3(int code) { return (code & 0x7f) == 0x7f ? NAN : small_float(code, 3, 7); }

float e5m2(int code) {
    int magnitude = code & 0x7f;
    if (magnitude > 0x7c) return NAN;
    return magnitude == 0x7c ? (code & 0x80 ? -INFINITY : INFINITY) : small_float(code, 2, 15);
}

float e2m1(int code) { return small_float((code & 8) << 4 | (code & 7), 1, 1); }

float e8m0(int byte) { return byte == 255 ? NAN : std::ldexp(1.0f, byte - 127); }

// Weight `i` of a codec that keeps what a source holds; what its products' errors are relative to goes to `magnitude`.
float source_weight(const Part& part, const uint8_t* codes, const uint8_t* scales, int i, double* magnitude) {
    if (part.codec == Codec::fp8) {
        float scale = float_at(scales + 4 * (i / 128)), weight = e4m3(codes[i]) * scale;
        *magnitude = std::fabs((double)weight);
        return weight;
    }
    float scale = e8m0(scales[part.codec == Codec::mxfp4 ? i / 32 : 0]);
    float weight = part.codec == Codec::e5m2 ? e5m2(codes[i]) * scale : e2m1(code_at(part, codes, i)) * scale;
    *magnitude = part.codec == Codec::e5m2 ? std::fabs((double)weight) : 12.0 * scale;
    return weight;
}

void put_half(uint8_t* at, float value) {
    int exponent;
    float fraction = std::frexp(std::fabs(value), &exponent);  // 0.5 to 1
    int stored = exponent > -14 ? (exponent + 14) << 10 | ((int)(fraction * 2048.0f) - 1024)
                                : (int)std::ldexp(std::fabs(value), 24);
    if (value < 0) stored |= 0x8000;
    at[0] = (uint8_t)stored;
    at[1] = (uint8_t)(stored >> 8);
}

}  // namespace

int plain_code(const Part& part, const uint8_t* row, int c) { return code_at(part, row, c); }

void check_panel(const Part& part, const uint8_t* const* rows, const uint8_t* panel) {
    require((uintptr_t)panel % kLineBytes == 0, "where a panel begins");
    for (int b = 0; b < part.num_groups; b++, panel += 16 * 8 * part.width + 64)
        for (int r = 0; r < 16; r++) {
            const uint8_t* scales = panel + 16 * 8 * part.width + 2 * r;
            for (int k = 0; k < kBlock; k++) {
                const uint8_t byte = panel[part.width == 8 ? k / 4 * 64 + 4 * r + k % 4 : k / 8 * 64 + 4 * r + k % 4];
                const int code = part.width == 8 ? byte : byte >> 4 * (k % 8 / 4) & 15;
                require(code == code_at(part, rows[r], kBlock * b + k), "a code in a panel");
            }
            const uint8_t* own = rows[r] + part.scales_at + 2 * b;
            require(u16_at(scales) == u16_at(own), "a scale in a panel");
            require(u16_at(scales + 32) == u16_at(own + part.scale_bytes), "a zero in a panel");
        }
}

PlainRow plain_row(const PlacedPart& placed, const uint8_t* row) {
    const Part& part = placed.part;
    const uint8_t *codes = row + placed.offset, *scales = codes + part.scales_at, *zeros = scales + part.scale_bytes;
    PlainRow made = {std::vector<float>(part.num_cols), std::vector<double>(part.num_cols), {}, 0.0f};
    const bool has_integers =
        part.codec == Codec::affine || part.codec == Codec::trellis || part.codec == Codec::mxfp4;
    if (has_integers) made.steps.resize(part.num_cols);
    for (int i = 0; i < part.num_cols; i++) {
        float& weight = made.weights[i];
        if (part.codec == Codec::affine) {
            int g = i / part.group;
            bool bytes = part.scale_bits == 8;
            float scale = bytes ? half_at(scales) * (float)scales[2 + g] : half_at(scales + 2 * g);
            float zero = bytes ? half_at(zeros) * (float)(int8_t)zeros[2 + g] : half_at(zeros + 2 * g);
            weight = ((float)code_at(part, codes, i) - zero) * scale;
            made.steps[i] = std::fabs((double)scale);
            made.magnitudes[i] = made.steps[i] * ((1 << part.width) - 1 + std::fabs((double)zero));
            continue;
        }
        if (part.codec == Codec::trellis) {
            int g = i / part.group;
            float scale = part.scale_bits == 8 ? half_at(scales) * (float)scales[2 + g] : half_at(scales + 2 * g);
            weight = (float)trellis_value(part, codes, i) * scale;
            made.steps[i] = std::fabs((double)scale);
            made.magnitudes[i] = 124.0 * made.steps[i];  // with the zero that kernels take off
            continue;
        }
        if (part.codec == Codec::fp8 || part.codec == Codec::e5m2 || part.codec == Codec::mxfp4) {
            weight = source_weight(part, codes, scales, i, &made.magnitudes[i]);
            if (has_integers) made.steps[i] = made.magnitudes[i] / 24;  // codes are twice the numbers, to 12
            continue;
        }
        if (part.codec == Codec::bf16) weight = bits_at((uint32_t)u16_at(codes + 2 * i) << 16);
        if (part.codec == Codec::f16) weight = half_at(codes + 2 * i);
        if (part.codec == Codec::f32) std::memcpy(&weight, codes + 4 * i, 4);
        made.magnitudes[i] = std::fabs((double)weight);
    }
    if (part.has_bias) std::memcpy(&made.bias, codes + part.bias_at(), 4);
    return made;
}

namespace {

// Finite codes, and scales that make weights of about 0.1.
void make_source_sane(Random& random, const Part& part, uint8_t* codes) {
    uint8_t* scales = codes + part.scales_at;
    int top = part.codec == Codec::fp8 ? 0x7e : 0x7b;
    for (int i = 0; i < part.code_bytes && part.codec != Codec::mxfp4; i++)
        if ((codes[i] & 0x7f) > top) codes[i] -= 4;
    for (int g = 0; g < part.num_groups; g++) {
        float scale = random.sign() * random.real(0.1f, 1.0f) / 4480;
        if (part.codec == Codec::fp8)
            std::memcpy(scales + 4 * g, &scale, 4);
        else
            scales[g] = (uint8_t)(part.codec == Codec::e5m2 ? 108 : random.between(118, 122));
    }
}

}  // namespace

void make_sane(Random& random, const PlacedPart& placed, uint8_t* row) {
    const Part& part = placed.part;
    if (placed.place == Place::none) return;
    uint8_t *codes = row + placed.offset, *scales = codes + part.scales_at, *zeros = scales + part.scale_bytes;
    const float top = (float)(1 << (part.codec == Codec::affine ? part.width : 1)), unit = 0.1f / top;
    const bool is_trellis = part.codec == Codec::trellis;
    if (is_trellis && part.scale_bits == 8) put_half(scales, random.sign() * 0.1f / 127 / 128);
    for (int g = 0; is_trellis && part.scale_bits == 16 && g < part.num_groups; g++)
        put_half(scales + 2 * g, random.sign() * random.real(0.01f, 0.1f) / 127);
    if (part.codec == Codec::affine && part.scale_bits == 8) {
        put_half(scales, random.sign() * unit / 128);
        put_half(zeros, top / 256);
    }
    for (int g = 0; part.codec == Codec::affine && part.scale_bits == 16 && g < part.num_groups; g++) {
        put_half(scales + 2 * g, random.sign() * random.real(0.1f, 1.0f) * unit);
        put_half(zeros + 2 * g, random.real(0.01f, 1.0f) * top);
    }
    bool source = part.codec == Codec::fp8 || part.codec == Codec::e5m2 || part.codec == Codec::mxfp4;
    if (source) make_source_sane(random, part, codes);
    for (int i = 0; part.codec != Codec::affine && !is_trellis && !source && i < part.num_cols; i++) {
        float weight = random.sign() * random.real(0.001f, 0.1f);
        uint32_t bits;
        std::memcpy(&bits, &weight, 4);
        if (part.codec == Codec::f16) put_half(codes + 2 * i, weight);
        if (part.codec == Codec::bf16) std::memcpy(codes + 2 * i, reinterpret_cast<uint8_t*>(&bits) + 2, 2);
        if (part.codec == Codec::f32) std::memcpy(codes + 4 * i, &weight, 4);
    }
    float bias = random.real(-0.5f, 0.5f);
    if (part.has_bias) std::memcpy(codes + part.bias_at(), &bias, 4);
}

double rounding_share(int digits) { return digits == 0 ? 0.0 : 0.501 / (digits == 1 ? 127 : 127 * 256); }

Near plain_dot(const PlainRow& row, const float* x, int digits) {
    Near sum = exactly(row.bias);
    double peak = 0, magnitude = std::fabs(row.bias);
    for (size_t i = 0; i < row.weights.size(); i++) peak = std::max(peak, std::fabs((double)x[i]));
    for (size_t i = 0; i < row.weights.size(); i++) {
        sum.value += (double)row.weights[i] * x[i];
        magnitude += row.magnitudes[i] * peak;
    }
    sum.slack = kRoundings * magnitude;
    for (size_t block = 0; digits > 0 && block < row.steps.size(); block += kBlock) {
        double largest = 0, weights = 0;
        for (size_t i = block; i < block + kBlock; i++) {
            largest = std::max(largest, std::fabs((double)x[i]));
            weights += std::fabs((double)row.weights[i]);
        }
        sum.slack += (rounding_share(digits) * largest + kLeastRounded) * weights;
    }
    return sum;
}

Near exactly(double value) { return {value, 0}; }

namespace {

double silu(double v) { return v / (1 + std::exp(-v)); }

double plain_activation(const ExpertLayout& layout, double v) {
    const double c = std::min(v, 7.0), limit = layout.limit;
    switch (layout.function) {
        case Function::silu: return silu(v);
        case Function::relu: return std::max(v, 0.0);
        case Function::relu2: return v > 0 ? v * v : 0.0;
        case Function::gelu_tanh: return v / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
        case Function::clipped_silu: return silu(std::min(v, limit));
        case Function::capped_silu: return std::min(silu(v), limit);
        case Function::clamped_swiglu: break;
    }
    return c / (1 + std::exp(-1.702 * c));
}

}  // namespace

// No activation is steeper than 1.13, but for the square. Where GELU vanishes, 1 + tanh is rounded.
Near activation_of(const ExpertLayout& layout, const Near& v) {
    const double found = plain_activation(layout, v.value);
    double slope = layout.function == Function::relu2 ? 2 * std::fabs(v.value) + v.slack : 1.13;
    double tail = layout.function == Function::gelu_tanh ? 1e-14 : 0.0;
    return {found, slope * v.slack + tail + kRoundings * (std::fabs(found) + 1e-30)};
}

Near factor_of(const ExpertLayout& layout, const Near& v) {
    if (layout.has_limit()) return {std::clamp<double>(v.value, -layout.limit, layout.limit), v.slack};
    if (layout.function != Function::clamped_swiglu) return v;
    return {std::clamp(v.value, -7.0, 7.0) + 1, v.slack + kRoundings * (std::fabs(v.value) + 1)};
}

Near product_of(const Near& a, const Near& b) {
    double found = a.value * b.value;
    return {found, a.slack * std::fabs(b.value) + b.slack * std::fabs(a.value) + a.slack * b.slack +
                       kRoundings * (std::fabs(found) + 1e-30)};
}

uint32_t plain_crc(const uint8_t* bytes, size_t num_bytes) {
    uint32_t state = ~0u;
    for (size_t i = 0; i < num_bytes; i++) {
        state ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) state = state >> 1 ^ (state & 1 ? 0xedb88320u : 0);
    }
    return ~state;
}

}  // namespace moe_pack
