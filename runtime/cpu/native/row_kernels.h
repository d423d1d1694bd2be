// Which of an instruction set's functions a part takes: one table for all of them.
//
// Included by a file that has defined, in its own anonymous namespace, the templates that are named here; see vector.h
// for why nothing is shared between such files.
#pragma once

namespace moe_pack {
namespace {

struct RowKernels {
    DotRow dot;
    AddRow add;
    DecodeRow decode;
};

template <int WIDTH>
RowKernels affine_kernels(const Part& part) {
    switch (unit_of(part)) {
        case 16: return {dot_affine<WIDTH, 16>, add_affine<WIDTH, 16>, decode_codes<WIDTH>};
        case 32: return {dot_affine<WIDTH, 32>, add_affine<WIDTH, 32>, decode_codes<WIDTH>};
        default: return {dot_affine<WIDTH, kBlock>, add_affine<WIDTH, kBlock>, decode_codes<WIDTH>};
    }
}

template <Codec CODEC>
constexpr RowKernels float_kernels() {
    return {dot_floats<CODEC>, add_floats<CODEC>, decode_floats<CODEC>};
}

template <Codec CODEC>
constexpr RowKernels half_kernels() {
    return {dot_halves<CODEC>, add_halves<CODEC>, decode_halves<CODEC>};
}

RowKernels row_kernels(const Part& part) {
    switch (part.codec) {
        case Codec::bf16: return float_kernels<Codec::bf16>();
        case Codec::f16: return float_kernels<Codec::f16>();
        case Codec::f32: return float_kernels<Codec::f32>();
        case Codec::fp8: return half_kernels<Codec::fp8>();
        case Codec::e5m2: return half_kernels<Codec::e5m2>();
        case Codec::mxfp4: return {dot_affine<kE2m1, kMxGroup>, add_affine<kE2m1, kMxGroup>, decode_e2m1};
        case Codec::trellis: __builtin_unreachable();  // trellis_kernels.h
        case Codec::affine: break;
    }
    switch (part.width) {
        case 1: return affine_kernels<1>(part);
        case 2: return affine_kernels<2>(part);
        case 3: return affine_kernels<3>(part);
        case 4: return affine_kernels<4>(part);
        default: return affine_kernels<8>(part);
    }
}

void decode_row(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    row_kernels(part).decode(part, row, start, stop, out);
}

}  // namespace
}  // namespace moe_pack
