// How values become codes of one digit of 8 bits, or of two: what every instruction set does alike.
//
// Internal linkage, for the reason given in vector.h.
#pragma once

#include "codes.h"

namespace moe_pack {
namespace {

// The largest code of one digit, or of two: the higher digit is at most 127.
template <int DIGITS>
constexpr float kLargest = DIGITS == 1 ? 127.0f : 127.0f * 256.0f;

// The scale of values whose largest magnitude has these bits, and what they are multiplied with to become codes; an
// inverse of zero makes all codes zeros, whatever the values.
template <int DIGITS>
struct Rounding {
    float scale, inverse;

    explicit Rounding(uint32_t peak_bits) {
        const float peak = as_float(peak_bits);
        const bool finite = peak_bits < 0x7f800000u, counts = finite && peak >= 0x1p-100f;
        scale = !finite ? __builtin_nanf("") : counts ? peak / kLargest<DIGITS> : 0.0f;
        inverse = counts ? kLargest<DIGITS> / peak : 0.0f;
    }
};

}  // namespace
}  // namespace moe_pack
