// Inputs as digits: 24-bit fixed point, three signed bytes each, low ones first; internal linkage as in vector.h.
#pragma once

#include "codes.h"

namespace moe_pack {
namespace {

constexpr float kPeak = 8300000.0f;  // of fixed-point inputs: the highest digit is at most 127
constexpr int32_t kDigits = 3;
constexpr int32_t kDigitBytes = kDigits * kBlock;  // of a block of inputs: 64 low digits, 64 middle, 64 high
constexpr int32_t kHeaderBytes = 64;               // of prepared affine inputs: their peak, a float

inline size_t padded_groups(const Part& part) { return round_up(size_t(part.num_groups), 16); }

}  // namespace
}  // namespace moe_pack
