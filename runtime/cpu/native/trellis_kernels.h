// Which functions a trellis takes, by its width and unit: TrellisKernels of an instruction set.
//
// Included as row_kernels.h is, but by other files: beside so much code compilers leave apart what functions of affine
// rows else take in (GCC 12, AVX2: an eighth of their speed).
#pragma once

namespace moe_pack {
namespace {

struct RowKernels {
    DotRow dot;
    AddRow add;
    DecodeRow decode;
};

template <int W>
RowKernels row_kernels_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return {dot_trellis<W, 16>, add_trellis<W, 16>, decode_blocks<W>};
        case 32: return {dot_trellis<W, 32>, add_trellis<W, 32>, decode_blocks<W>};
        default: return {dot_trellis<W, kBlock>, add_trellis<W, kBlock>, decode_blocks<W>};
    }
}

RowKernels row_kernels(const Part& part) {
    switch (part.width) {
        case 4: return row_kernels_of<4>(part);
        case 5: return row_kernels_of<5>(part);
        case 6: return row_kernels_of<6>(part);
        case 7: return row_kernels_of<7>(part);
        default: return row_kernels_of<8>(part);
    }
}

void decode_row(const Part& part, const uint8_t* row, int32_t start, int32_t stop, float* out) {
    row_kernels(part).decode(part, row, start, stop, out);
}

}  // namespace
}  // namespace moe_pack
