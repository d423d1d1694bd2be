"""Random experts and rows in the bytes of a pack, with scales of sane size; and how exactly they can be computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import (
    BF16,
    MATRICES,
    ExpertFormat,
    ExpertLayout,
    ExpertSpec,
    Matrix,
    NeuronFunction,
    PartFormat,
    RowLayout,
    Selector,
    part_format,
)
from moe_pack.formats.pack.codecs import (
    TRELLIS_UNITS,
    Trellis,
    affine,
    decode_part,
    pack_codes,
    powers_of_two,
    unpack_codes,
)
from moe_pack.formats.pack.layouts import Part, expert_layout, row_layout, seal_rows, write_rows
from moe_pack.formats.pack.plans import E5M2, FP8, MXFP4
from moe_pack.runtime.cpu import ExpertRows, extent_rows
from moe_pack.runtime.model import Activations, NeuronBlock, PackedExpert, activations

Bytes = NDArray[np.uint8]

FOUR_BIT = part_format(4, 64, 16)
# Inputs are 24-bit fixed point or float32, sums integers or float32, in another order than torch's: each adds a few
# times 2^-24 (6e-8) of the sum of magnitudes. Measured at most 4.5e-7, and 1.3e-7 in root mean square, over all
# widths, groups and kinds (Zen 5, 2026-11-21).
MAX_ERROR = 1e-6
RMS_ERROR = 3e-7


@dataclass(frozen=True, slots=True)
class Shape:
    """An expert's shape: `num_rows` neurons of `num_cols` weights a matrix; `gate` is None in families without one."""

    num_rows: int = 33
    num_cols: int = 128
    selector: Selector = "up"
    gate: PartFormat | None = FOUR_BIT
    up: PartFormat = FOUR_BIT
    down: PartFormat = FOUR_BIT
    bias: tuple[Matrix, ...] = ()
    function: NeuronFunction = "silu"

    @property
    def layout(self) -> ExpertLayout:
        matrices = MATRICES if self.gate else tuple(m for m in MATRICES if m != "gate")
        extra_floats = self.num_cols if "down" in self.bias else 0
        spec = ExpertSpec("silu", self.num_rows, matrices, self.bias, extra_floats)  # no function lays rows out
        return expert_layout(ExpertFormat(self.gate, self.up, self.down), self.selector, spec, self.num_cols)


@dataclass(frozen=True, slots=True)
class RandomExpert:
    shape: Shape
    extent: Bytes = field(repr=False)

    def rows(self, threshold: float = 0.0) -> ExpertRows:
        return extent_rows(self.shape.layout, self.shape.selector, self.shape.function, threshold, self.extent)

    def packed(self) -> PackedExpert:
        return PackedExpert(self.shape.layout, torch.from_numpy(self.extent))

    def block(self) -> NeuronBlock:
        (block,) = self.packed().blocks()
        return block

    def weight_magnitudes(self, matrix: Matrix) -> Tensor:
        held, part = self._rows_of(matrix)
        codes = held[:, part.offset : part.offset + part.code_bytes]
        section = np.hstack([codes, held[:, part.scales_offset : part.bias_offset]])
        return weight_magnitudes(part.format, self.shape.num_cols, section)

    def part_bytes(self, matrix: Matrix) -> Bytes:
        """The bytes of a matrix's rows, u8 [f, part bytes], to be changed; its scales follow its codes."""
        held, part = self._rows_of(matrix)
        return held[:, part.offset : part.offset + part.num_bytes]

    def _rows_of(self, matrix: Matrix) -> tuple[Bytes, Part]:
        found = self.shape.layout.find(matrix)
        assert found is not None, matrix
        rows, part, base = found
        return self.extent[base : base + self.shape.num_rows * rows.row_bytes].reshape(-1, rows.row_bytes), part


def weight_magnitudes(stored: PartFormat, num_cols: int, section: Bytes) -> Tensor:
    held = torch.from_numpy(section)
    if stored == MXFP4:  # sums of the native kernels' rows take E2M1 codes as affine ones, with a zero of 6
        scales = powers_of_two(held[:, stored.code_bytes(num_cols) :]).double().repeat_interleave(32, dim=1)
        return decode_part(stored, num_cols, held).double().abs() + 6 * scales
    if stored.codec == "trellis":
        # Of rows that are added, h * scale has steps of the largest / 8.3e6: half of one, times a level of 64, is
        # `MAX_ERROR` of 4 times that largest, whose own level may be zero. Other kernels add codes, up to 64 too large:
        # each sum rounds 64 * 2^-24 more, `MAX_ERROR` of 4, and some sums follow each other.
        trellis = Trellis(stored, num_cols)
        scales = trellis.load_scales(held[:, trellis.code_bytes :]).double()
        return decode_part(stored, num_cols, held).double().abs() + 16 * _each_column(scales, num_cols)
    if stored.codec != "affine":
        return decode_part(stored, num_cols, held).double().abs()
    codec = affine(stored, num_cols)
    packed, scales, zeros = torch.split(held, [codec.code_bytes, codec.scale_bytes, codec.scale_bytes], dim=1)
    scale, zero = (values.double().abs().unsqueeze(2) for values in codec.load_scales(scales, zeros))
    codes = unpack_codes(packed, stored.width).double().view(len(held), codec.num_groups, -1)
    return ((codes + zero) * scale).flatten(1)


def _each_column(scales: Tensor, num_cols: int) -> Tensor:
    return scales.repeat_interleave(num_cols // scales.shape[1], dim=1)


def random_expert(
    shape: Shape, seed: int = 0, zero_rows: Sequence[int] = (), constant_rows: Sequence[int] = ()
) -> RandomExpert:
    """An expert with weights of about 0.1; some neurons may have all weights zero, or the same in each matrix."""
    generator = torch.Generator().manual_seed(seed)
    layout = shape.layout
    sections = {}
    for matrix, stored in (("gate", shape.gate), ("up", shape.up), ("down", shape.down)):
        if stored is not None:
            section = random_section(stored, shape.num_rows, shape.num_cols, generator)
            _flatten(section, stored, shape.num_cols, zero_rows, constant_rows)
            biases = torch.randn(shape.num_rows, 1, generator=generator).view(torch.uint8).numpy()
            biased = matrix in shape.bias and matrix != "down"
            sections[matrix] = np.hstack([section, biases]) if biased else section
    extent = np.zeros(layout.num_bytes, np.uint8)
    if layout.selector:
        write_rows(layout.selector, sections, extent[: layout.selector_bytes].reshape(shape.num_rows, -1))
    records_end = layout.selector_bytes + layout.records_bytes
    write_rows(layout.records, sections, extent[layout.selector_bytes : records_end].reshape(shape.num_rows, -1))
    if layout.extra is not None:
        extra = extent[records_end:].reshape(1, -1)
        values = torch.randn(shape.num_cols, generator=generator)
        extra[:, : layout.extra.crc_offset] = values.view(torch.uint8).numpy()
        seal_rows(layout.extra, extra)
    return RandomExpert(shape, extent)


def random_rows(
    stored: PartFormat, num_rows: int, num_cols: int, seed: int = 0, bias: bool = False
) -> tuple[RowLayout, Bytes]:
    """Rows of one part, called `weight`: their layout, and u8 [rows, row bytes]."""
    generator = torch.Generator().manual_seed(seed)
    layout = row_layout([("weight", stored, bias)], num_cols)
    section = random_section(stored, num_rows, num_cols, generator)
    if bias:
        section = np.hstack([section, torch.randn(num_rows, 1, generator=generator).view(torch.uint8).numpy()])
    out = np.zeros((num_rows, layout.row_bytes), np.uint8)
    write_rows(layout, {"weight": section}, out)
    return layout, out


def random_section(stored: PartFormat, num_rows: int, num_cols: int, generator: torch.Generator) -> Bytes:
    if stored == BF16:
        weights = torch.randn(num_rows, num_cols, generator=generator).mul_(0.1).to(torch.bfloat16)
        return weights.view(torch.uint8).numpy()
    if stored.codec == "trellis":
        return random_trellis_section(stored, num_rows, num_cols, generator)
    if stored.codec != "affine":
        return random_source_section(stored, num_rows, num_cols, generator)
    top, groups = 2**stored.width - 1, stored.num_groups(num_cols)
    codes = torch.randint(0, top + 1, (num_rows, num_cols), generator=generator, dtype=torch.uint8)
    if stored.scale_bits == 16:
        scales = ((torch.rand(num_rows, groups, generator=generator) + 0.5) * 0.2 / top).to(torch.float16)
        zeros = ((torch.rand(num_rows, groups, generator=generator) * 1.25 - 0.25) * top).to(torch.float16)
        parts = [scales.view(torch.uint8), zeros.view(torch.uint8)]
    else:
        steps = torch.randint(1, 256, (num_rows, groups), generator=generator, dtype=torch.uint8)
        signed = torch.randint(-32, 128, (num_rows, groups), generator=generator, dtype=torch.int8)
        multipliers = torch.rand(num_rows, 2, generator=generator) + 0.5
        multipliers = (multipliers * torch.tensor([0.2 / top / 128, top / 128])).to(torch.float16)
        scale_step, zero_step = multipliers[:, :1].contiguous(), multipliers[:, 1:].contiguous()
        parts = [scale_step.view(torch.uint8), steps, zero_step.view(torch.uint8), signed.view(torch.uint8)]
    return torch.cat([pack_codes(codes, stored.width), *parts], dim=1).numpy()


def random_trellis_section(stored: PartFormat, num_rows: int, num_cols: int, generator: torch.Generator) -> Bytes:
    """The same of a trellis: any bits are a stream."""
    codec = Trellis(stored, num_cols)
    shape = (num_rows, codec.code_bytes)
    stream = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(num_rows, codec.num_groups, generator=generator) + 0.5) * 0.1 * TRELLIS_UNITS[stored.width]
    return torch.cat([stream, codec.store_scales(scales)], dim=1).numpy()


def random_source_section(stored: PartFormat, num_rows: int, num_cols: int, generator: torch.Generator) -> Bytes:
    """The same of a codec that keeps what a source holds: any finite code, zeros of either sign among them."""
    groups = stored.num_groups(num_cols)
    if stored == MXFP4:
        codes = torch.randint(0, 16, (num_rows, num_cols), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 125, (num_rows, groups), generator=generator, dtype=torch.uint8)
        return torch.cat([pack_codes(codes, 4), scales], dim=1).numpy()
    top = 0x7E if stored == FP8 else 0x7B  # of finite numbers
    codes = torch.randint(0, top + 1, (num_rows, num_cols), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
    if stored == E5M2:
        return torch.cat([codes, torch.full((num_rows, 1), 110, dtype=torch.uint8)], dim=1).numpy()
    scale = (torch.rand(num_rows, groups, generator=generator) + 0.5) / 448
    return torch.cat([codes, scale.view(torch.uint8)], dim=1).numpy()


def _flatten(
    section: Bytes, stored: PartFormat, num_cols: int, zero_rows: Sequence[int], constant_rows: Sequence[int]
) -> None:
    """Makes rows of a part zero (codes and zeros are), or of the same weight in all columns."""
    section[list(zero_rows)] = 0
    if stored == BF16:
        section[list(constant_rows)] = np.resize(section[0, :2], section.shape[1])
        return
    groups, codes, scales = stored.num_groups(num_cols), stored.code_bytes(num_cols), stored.scale_bytes(num_cols)
    rows = list(constant_rows)
    if stored.codec != "affine":
        section[rows, :codes] = 0x77  # a number in all of them
        first = codes + (2 if stored.has_byte_scales else 0)
        each = (codes + scales - first) // groups
        section[rows, first:] = np.tile(section[rows, first : first + each], groups)
        return
    section[rows, :codes] = 0xFF
    for start in (codes, codes + scales):  # all groups as the first
        each = 2 if stored.scale_bits == 16 else 1
        first = start if stored.scale_bits == 16 else start + 2
        section[rows, first : first + each * groups] = np.tile(section[rows, first : first + each], groups)


def random_tokens(num_tokens: int, num_cols: int, seed: int = 0) -> Tensor:
    """Inputs of order 1, float32 [T, d], each token of another size; one column of the first stands out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_cols, generator=generator)
    x *= torch.logspace(-1, 1, num_tokens)[:, None] if num_tokens > 1 else 1.0
    x[:1, num_cols // 3] *= 50
    return x


def threshold_at(a: Tensor, sparsity: float, errors: Tensor | None = None) -> float:
    """A threshold below which about this share of `abs(a)` lies, so far from each that no rounding moves one across.

    A limit of an activation makes many equal: then the threshold is beyond all of them.
    Args:    errors: what the errors of a are relative to, as of `Magnitudes`; None: all alike.
    """
    values = a.abs().flatten().double()
    if sparsity == 0:
        return 0.0
    if sparsity == 1:
        return float(values.max() * 2 + 1)
    held = torch.cat([torch.zeros(1, dtype=torch.float64), values.sort().values])
    scale = torch.ones_like(values) if errors is None else errors.flatten()
    # A zero does not run, whatever the threshold.
    scale, values = scale[values != 0], values[values != 0]
    if not len(values):
        return 0.0
    place, reach = int(sparsity * len(held)), 2 + len(held) // 100
    while True:
        near = held[max(0, place - reach) : place + reach]
        widest = near.diff().topk(min(16, len(near) - 1)).indices  # of these, the one that errors leave widest
        between = (near[1:] + near[:-1])[widest] / 2
        gaps = ((values - between[:, None]).abs() / scale).amin(dim=1)
        best = int(gaps.argmax())
        if gaps[best] > MAX_ERROR / 2 * (between[best] if errors is None else 1):  # more than was ever measured
            return float(between[best])
        if reach >= len(held):  # all are near one another, measured by their errors
            return float(values.max() * 2 + 1)
        reach *= 2


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The magnitudes by which errors of an expert are judged, float64: [T, f] of `a` and `h`, [T, d] of `y`."""

    a: Tensor
    h: Tensor
    y: Tensor


def magnitudes(x: Tensor, expert: RandomExpert, runs: Tensor) -> Magnitudes:
    """The sums of magnitudes behind an expert's values, with each product that of its factors' errors."""
    block, selector = expert.block(), expert.shape.selector
    held = activations(x, block, expert.shape.function)
    up = _sums(x, expert.weight_magnitudes("up"), block.up_bias)
    if expert.shape.function == "clamped_swiglu":
        up = up + 1  # which is added
    if block.gate is None:
        a = h = _acted(up, held.h, expert.shape.function)
    else:
        gate = _sums(x, expert.weight_magnitudes("gate"), block.gate_bias)
        gate = _acted(gate, held.gate, expert.shape.function)
        h = held.gate.double().abs() * up + gate * held.up.double().abs()
        a = {"up": up, "gate": gate, "both": h, "none": h}[selector]
    y = (runs * h) @ expert.weight_magnitudes("down")
    bias = expert.packed().down_bias()
    return Magnitudes(a, h, y if bias is None else y + bias.double().abs())


def _acted(sums: Tensor, values: Tensor, function: NeuronFunction) -> Tensor:
    values = values.double().abs()
    if function == "relu2":  # whose slope is twice the root of its value
        return 2 * values.sqrt() * sums + MAX_ERROR * sums.square() + values
    return 1.13 * sums + values  # every other activation has a slope of 1.13 at most


def product_magnitudes(x: Tensor, weights: Tensor) -> Tensor:
    """Returns the magnitudes by which errors of products are judged, float64 [T, rows], for weights' [rows, d].

    Fixed point has steps of a token's largest input / 8.3e6: half of one is `MAX_ERROR` of a sixteenth of that input.
    """
    size = x.double().abs()
    return (size + size.amax(dim=1, keepdim=True) / 16) @ weights.T


def _sums(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    sums = product_magnitudes(x, weights)
    return sums if bias is None else sums + bias.double().abs()


def assert_near(found: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Each value within `MAX_ERROR` of its magnitude, and all within `RMS_ERROR` of theirs; else the worst place."""
    assert found.shape == expected.shape == magnitude.shape, (found.shape, expected.shape, magnitude.shape)
    assert found.dtype == torch.float32
    if not found.numel():
        return
    error = (found.double() - expected.double()).abs()
    excess = torch.where(error == 0, 0.0, error / magnitude)
    if not (excess <= MAX_ERROR).all():
        place = np.unravel_index(int(excess.nan_to_num(nan=np.inf).argmax()), excess.shape)
        raise AssertionError(f"at {place}: {found[place]}, expected {expected[place]}: {excess[place]} of magnitude")
    rms, bound = error.square().mean().sqrt(), RMS_ERROR * magnitude.square().mean().sqrt()
    assert rms <= bound, f"RMS error {rms}, expected at most {bound}"


def running(values: Activations, selector: Selector, threshold: float) -> Tensor:
    """Returns whether each neuron runs, bool [T, f], as `run_expert` has it."""
    a = values.of(selector)
    return (a != 0) & ~(a.abs() < threshold)
