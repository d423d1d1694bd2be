// An instruction set's kernels with the inputs of single tokens rounded to one digit of 8 bits.
//
// Included by a file that has defined its exact functions and, in rounded_rows_*.h, RoundedInputs, prepare_rounded,
// dot_rounded and dot_rounded_rows; see vector.h for why nothing is shared between such files.
#pragma once

namespace moe_pack {
namespace {

// Whether a part's products are taken with rounded inputs.
inline bool has_rounded(const Part& part) { return part.codec == Codec::affine; }

template <int WIDTH>
DotRow rounded_dot_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return dot_rounded<WIDTH, 16>;
        case 32: return dot_rounded<WIDTH, 32>;
        default: return dot_rounded<WIDTH, kBlock>;
    }
}

DotRow rounded_dot(const Part& part) {
    switch (part.width) {
        case 1: return rounded_dot_of<1>(part);
        case 2: return rounded_dot_of<2>(part);
        case 3: return rounded_dot_of<3>(part);
        case 4: return rounded_dot_of<4>(part);
        default: return rounded_dot_of<8>(part);
    }
}

size_t one_digit_bytes(const Part& part) {
    return has_rounded(part) ? round_up(RoundedInputs::num_bytes(part), 64) : prepared_bytes(part);
}

void prepare_one_digit(const Part& part, const float* x, void* prepared) {
    (has_rounded(part) ? prepare_rounded : prepare)(part, x, prepared);
}

void dot_one_digit(const Part& part, const uint8_t* const* rows, int32_t num_rows, const void* prepared,
                   const Ahead& ahead, float* work, float* out) {
    if (!has_rounded(part)) return dot_rows(part, rows, num_rows, prepared, ahead, work, out);
    dot_rounded_rows(rounded_dot(part), part, rows, num_rows, prepared, ahead, work, out);
}

constexpr Kernels with_one_digit(Kernels kernels) {
    kernels.prepared_bytes = one_digit_bytes;
    kernels.prepare = prepare_one_digit;
    kernels.dot_rows = dot_one_digit;
    return kernels;
}

}  // namespace
}  // namespace moe_pack
