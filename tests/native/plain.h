// What the kernels compute, computed plainly from docs/pack.md, with how far float32 may be from it.
#pragma once
#include <cfloat>
#include <cmath>
#include <vector>

#include "experts.h"
#include "random.h"

namespace moe_pack {

// A value, and how far a kernel's may be from it.
struct Near {
    double value = 0, slack = 0;

    bool holds(float found) const {
        // Only what no float holds may be infinite, with its sign.
        if (std::isinf(found)) return std::fabs(value) + slack > FLT_MAX && (found > 0) == (value > 0);
        return std::fabs(found - value) <= slack;
    }
};

// A row in float32, as the codec says, and each weight's magnitude before zeros are taken off. `steps`: how far apart
// weights of neighbouring codes are, where codes are integers; else there are none.
struct PlainRow {
    std::vector<float> weights;
    std::vector<double> magnitudes, steps;
    float bias;
};
PlainRow plain_row(const PlacedPart& placed, const uint8_t* row);

// Code `c` of a row of affine codes of 1, 2, 4 or 8 bits: the row begins with its codes.
int plain_code(const Part& part, const uint8_t* row, int c);

// Whether every code, scale and zero of 16 rows, each from where its codes begin, lies in a panel where panels.h says.
void check_panel(const Part& part, const uint8_t* const* rows, const uint8_t* panel);

// Random bytes made sane: scales, zeros, biases and plain weights of a size that a model's have.
void make_sane(Random& random, const PlacedPart& placed, uint8_t* row);

// How far a value may be from its code of so many digits (rounded.h), as a share of the largest of its block; 0 digits:
// values are not rounded. Where the largest is below kLeastRounded all may count as zero.
double rounding_share(int digits);
constexpr double kLeastRounded = 0x1p-100;

// row . x (+ its bias); inputs of rows of integers may be rounded to so many digits.
Near plain_dot(const PlainRow& row, const float* x, int digits = 0);

Near activation_of(const ExpertLayout& layout, const Near& v);
Near factor_of(const ExpertLayout& layout, const Near& v);
Near product_of(const Near& a, const Near& b);
Near exactly(double value);

uint32_t plain_crc(const uint8_t* bytes, size_t num_bytes);

// The same number; any NaN is as good as another.
inline bool same_value(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

}  // namespace moe_pack
