// Which of an instruction set's functions a trellis takes. Included as row_kernels.h is, or by it.
#pragma once

namespace moe_pack {
namespace {

struct RowKernels {
    DotRow dot;
    AddRow add;
    DecodeRow decode;
};

template <int W>
RowKernels trellis_kernels_of(const Part& part) {
    switch (unit_of(part)) {
        case 16: return {dot_trellis<W, 16>, add_trellis<W, 16>, decode_windows<W>};
        case 32: return {dot_trellis<W, 32>, add_trellis<W, 32>, decode_windows<W>};
        default: return {dot_trellis<W, kBlock>, add_trellis<W, kBlock>, decode_windows<W>};
    }
}

RowKernels trellis_kernels(const Part& part) {
    switch (part.width) {
        case 3: return trellis_kernels_of<3>(part);
        case 4: return trellis_kernels_of<4>(part);
        case 5: return trellis_kernels_of<5>(part);
        case 6: return trellis_kernels_of<6>(part);
        case 7: return trellis_kernels_of<7>(part);
        default: return trellis_kernels_of<8>(part);
    }
}

}  // namespace
}  // namespace moe_pack
