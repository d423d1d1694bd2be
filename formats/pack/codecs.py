"""The codecs: rows of weights as bytes, and back (docs/pack.md). No other module of formats imports torch.

`calib/quantize/plain.py` chooses scales, zeros and codes. Tensors may be on any device. To add a codec:

1. plans.py: its name and a line of `CODECS`, from which sizes, faults, features and numbers follow.
2. Here: a class with encode and decode, and a line in `_CODECS`. docs/pack.md: its number and its bytes.
3. The CPU, in runtime/cpu/native: kernels.h (number and format), codes.h, row_kernels.h, and the loops of each
   instruction set (floats_*.h, affine_*.h). The GPU: runtime/gpu/kernels/rows.py, and products.py if values need more
   than a factor.
4. Codes: calib/quantize/, or convert/kept.py if a source has them; then scales in convert/synthetic.py.
5. Tests: tests/support/second_reader.py, named_formats.py and expert_cases.py; tests/native/layouts.cpp and plain.cpp.

`TRELLIS_HASH` and `TRELLIS_LEVELS` are part of the format (docs/trellis-tables.json) and never change.
tests/bench/trellis_tables.py of commit c1a3bd93 made them.
"""

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats.pack import plans

# Of a step's nibble, of the nibble before it, and of the one before that: 16 bytes each.
TRELLIS_HASH: tuple[str, str, str] = (
    "977ecd08825ae1d066af43153cf9bb24",
    "fcd043e22176454ddf9f47f71efb9f98",
    "bef222e809cf2b343eca52d589fde084",
)

# By width, of the first and of the second weight: signed bytes, level `u` of set `p` at 16 u + p.
TRELLIS_LEVELS: dict[int, tuple[str, str]] = {
    4: (
        "e3edf1f4f8fafdfe020406080b0f131d",
        "e3ecf1f4f8fafcff010406080c0f131d",
    ),
    5: (
        "e6eef3f6f8fbfdff010305080a0d121a",
        "e3eaeef0f2f3f5f6f8f9fafbfdfdffff01020204050607080a0b0c0e1012161d",
    ),
    6: (
        "e6ecf0f2f4f5f6f8f9fafbfcfdfeffff010102030405060708090b0c0e10141a",
        "e6ecf0f2f4f5f6f8f9fafbfcfdfeffff0101020304050607080a0b0c0e10141a",
    ),
    7: (
        "cad6dee3e7eaedf0f1f4f6f8f9fcfdff01030407080a0c0f111316191d222a36",
        (
            "c5cfd6dbdee0e3e4e7e8eaebeceeeff0f1f2f3f4f6f6f7f8f9fafbfcfdfefe00010102030505060708090a0a0c0d0e0f11111314"
            "151618191b1e1f222529303b"
        ),
    ),
    8: (
        (
            "c5d0d6dbdee1e3e5e7e8eaebeceeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeffff010102030405060708090a0b0c0d0e0f10111213"
            "1516181a1b1d1f22252a303a"
        ),
        (
            "c5cfd6dbdee1e3e5e7e8eaebedeeeff0f1f2f3f4f6f6f7f8f9fafbfcfdfefe00000102030405060708090a0b0c0d0e0f10111214"
            "151618191b1d1f22252a313b"
        ),
    ),
}

# The scale of weights with unit variance, by width; for other weights it is multiplied by their standard deviation.
TRELLIS_UNITS: dict[int, float] = {
    4: 0.074461,
    5: 0.089378,
    6: 0.105687,
    7: 0.053113,
    8: 0.054169,
}


class _Codec:
    def __init__(self, part: plans.PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols
        self.code_bytes = part.code_bytes(num_cols)
        self.scale_bytes = part.scale_bytes(num_cols)
        self.num_groups = part.num_groups(num_cols)


class Bf16(_Codec):
    """Weights as little-endian bfloat16, two bytes each."""

    def encode(self, weights: Tensor) -> Tensor:
        """Returns u8 [rows, 2 num_cols] for weights [rows, num_cols] of any float dtype, rounded to nearest even."""
        return weights.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, 2 num_cols]."""
        return _viewed(part, torch.bfloat16).to(torch.float32)


class Affine(_Codec):
    """Weights as `(code - zero) * scale`, computed in float32 in that order: codes, then scales, then zeros.

    Source: the arithmetic of hqq's `Quantizer.dequantize`, with which it agrees bit for bit.
    """

    def store_scales(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the nearest stored bytes, u8 [rows, scale_bytes], of scales and of zeros.

        Args:    scale, zero: float32 [rows, num_groups], scale not negative.
        """
        if self.part.scale_bits == 16:
            return _float16_bytes(scale), _float16_bytes(zero)
        return _byte_scales(scale, signed=False), _byte_scales(zero, signed=True)

    def load_scales(self, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 scales and zeros, [rows, num_groups] each, for their stored bytes."""
        if self.part.scale_bits == 16:
            return _from_float16_bytes(scales), _from_float16_bytes(zeros)
        return _from_byte_scales(scales, signed=False), _from_byte_scales(zeros, signed=True)

    def encode(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Returns rows of packed codes, scales and zeros: u8 [rows, part_bytes].

        Args:    codes: u8 [rows, num_cols], each below 2^width.   scales, zeros: from `store_scales`.
        """
        return torch.cat((pack_codes(codes, self.part.width), scales, zeros), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        sizes = [self.code_bytes, self.scale_bytes, self.scale_bytes]
        packed, scales, zeros = torch.split(part, sizes, dim=1)
        scale, zero = self.load_scales(scales, zeros)
        codes = unpack_codes(packed, self.part.width).to(torch.float32)
        grouped = codes.view(-1, self.num_groups, self.num_cols // self.num_groups)  # [rows, groups, group]
        return grouped.sub_(zero.unsqueeze(2)).mul_(scale.unsqueeze(2)).view(-1, self.num_cols)


class Fp8(_Codec):
    """Weights as `code * scale` in float32: E4M3 codes (no infinity), then a float32 scale for each 128 columns."""

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes for u8 codes [rows, num_cols] and float32 scales [rows, num_groups]."""
        return torch.cat((codes, scales.contiguous().view(torch.uint8)), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        codes, scales = part[:, : self.num_cols], part[:, self.num_cols :]
        weights = _viewed(codes, torch.float8_e4m3fn).to(torch.float32)
        scale = _viewed(scales, torch.float32).repeat_interleave(self.part.group, dim=1)
        return weights.mul_(scale[:, : self.num_cols])


class E5m2(_Codec):
    """Weights as `code * scale`: E5M2 codes, then one power of two a row. Stores a neuron of MXFP4's `down` exactly."""

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes for u8 codes [rows, num_cols] and E8M0 scales, u8 [rows, 1]."""
        return torch.cat((codes, scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        codes, scales = part[:, : self.num_cols], part[:, self.num_cols :]
        return _viewed(codes, torch.float8_e5m2).to(torch.float32).mul_(powers_of_two(scales))


class Mxfp4(_Codec):
    """Weights as `code * scale`: E2M1 codes in planar blocks, then a power of two for each 32 columns.

    Source: OCP Microscaling Formats (MX) Specification, version 1.0, section 5.
    """

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes for u8 codes [rows, num_cols], 0 to 15, and E8M0 scales, u8 [rows, num_groups]."""
        return torch.cat((pack_codes(codes, self.part.width), scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        packed, scales = part[:, : self.num_cols // 2], part[:, self.num_cols // 2 :]
        weights = e2m1_values(unpack_codes(packed, self.part.width)).view(len(part), -1, self.part.group)
        return weights.mul_(powers_of_two(scales).unsqueeze(2)).view(-1, self.num_cols)


class Trellis(_Codec):
    """Weights as `level * scale`: two weights a step; the last three nibbles of the stream select their sets of levels.

    Step t has a nibble n[t]. The byte `hash = newest[n[t]] ^ middle[n[t-1]] ^ oldest[n[t-2]]` selects a set of levels
    for each of the step's two weights: the low four bits for the first, the high four for the second. Widths above 4
    have further bits that select a level in its set. A row has a plane of nibbles and a plane of these refinements.
    Source: trellis-coded quantization over a shift register, as in QTIP (arXiv 2406.11235), with sets of levels as in
    Marcellin and Fischer (1990). The hash of nibbles is our own: a processor looks it up with byte shuffles.
    """

    def store_scales(self, scale: Tensor) -> Tensor:
        """Returns the nearest stored bytes, u8 [rows, scale_bytes], for float32 scales [rows, num_groups], >= 0."""
        return _float16_bytes(scale) if self.part.scale_bits == 16 else _byte_scales(scale, signed=False, trellis=True)

    def load_scales(self, scales: Tensor) -> Tensor:
        """Returns float32 scales [rows, num_groups] for their stored bytes."""
        return _from_float16_bytes(scales) if self.part.scale_bits == 16 else _from_byte_scales(scales, signed=False)

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes: the plane of nibbles, the plane of refinements, scales.

        Args:    codes: u8 [rows, num_cols / 2], one a step: the nibble, then two bits from bit 4 on for each weight's
                 refinement, of which `trellis_refinements` are used.   scales: from `store_scales`.
        """
        nibbles = (codes & 15).view(len(codes), -1, 2)
        planes = [nibbles[:, :, 0] | nibbles[:, :, 1] << 4]
        bits, chosen = trellis_refinements(self.part.width), (codes >> 4 & 3, codes >> 6)
        halves = [_pack_refinements(_columns_of_steps(c), b) for c, b in zip(chosen, bits, strict=True) if b]
        if halves:
            planes.append(torch.cat(halves, dim=2).flatten(1))
        return torch.cat((*planes, scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        nibble_bytes = self.num_cols // 4
        plane, refinements, scales = torch.split(
            part, [nibble_bytes, self.code_bytes - nibble_bytes, part.shape[1] - self.code_bytes], dim=1
        )
        nibbles = torch.stack((plane & 15, plane >> 4), dim=2).flatten(1)  # [rows, steps]
        windows = trellis_windows(nibbles)
        hashes = trellis_hashes().to(part.device)[windows]
        bits = trellis_refinements(self.part.width)
        sets = [_columns_of_steps(hashes & 15), _columns_of_steps(hashes >> 4)]  # [rows, blocks, 32] each
        halves = torch.split(refinements.reshape(len(part), sets[0].shape[1], -1), [4 * b for b in bits], dim=2)
        chosen = [
            _unpack_refinements(half, b) if b else torch.zeros_like(sets[0])
            for half, b in zip(halves, bits, strict=True)
        ]
        levels = [table.to(part.device) for table in trellis_levels(self.part.width)]
        values = [levels[half][(chosen[half].to(torch.int64) << 4) + sets[half].to(torch.int64)] for half in range(2)]
        grouped = torch.cat(values, dim=2).view(len(part), self.num_groups, self.num_cols // self.num_groups)
        return grouped.mul(self.load_scales(scales).unsqueeze(2)).view(-1, self.num_cols)


def trellis_refinements(width: int) -> tuple[int, int]:
    """Returns the bits that select a level in its set, of a step's two weights. `width` counts both weights' bits."""
    return (width - 4) // 2, (width - 3) // 2


def trellis_windows(nibbles: Tensor) -> Tensor:
    """Returns the last three nibbles of every step as one number, the newest highest: int64 [rows, steps].

    Args:    nibbles: u8 [rows, steps]; zeros come before the first.
    """
    padded = torch.nn.functional.pad(nibbles.to(torch.int64), (2, 0))
    return padded[:, 2:] << 8 | padded[:, 1:-1] << 4 | padded[:, :-2]


def trellis_hashes() -> Tensor:
    """Returns the hash of every window, u8 [4096]: the set of the first weight, and that of the second times 16."""
    newest, middle, oldest = (torch.tensor(list(bytes.fromhex(table)), dtype=torch.uint8) for table in TRELLIS_HASH)
    return (newest[:, None, None] ^ middle[:, None] ^ oldest).flatten()


def trellis_levels(width: int) -> tuple[Tensor, Tensor]:
    """Returns the levels of a step's first and second weight, float32 [16 times refinements]; a set is every 16th."""
    first, second = (np.frombuffer(bytes.fromhex(table), np.int8).astype(np.float32) for table in TRELLIS_LEVELS[width])
    return torch.from_numpy(first), torch.from_numpy(second)


def trellis_columns(num_cols: int) -> Tensor:
    """Returns the two columns of every step, int64 [num_cols / 2, 2].

    In each block of 64 columns, steps 2 j and 2 j + 1 have columns j and j + 32, and j + 16 and j + 48.
    """
    step = torch.arange(num_cols // 2)
    first = step // 32 * 64 + step % 32 // 2 + step % 2 * 16
    return torch.stack((first, first + 32), dim=1)


def _columns_of_steps(values: Tensor) -> Tensor:  # [rows, steps] to [rows, blocks, 32], in the order of first columns
    return values.view(len(values), -1, 16, 2).transpose(2, 3).flatten(2)


# A refinement plane has 4 bytes a bit for 32 columns. Byte r of 4 bits a byte column: with one bit, bit q of byte r is
# that of column 4 q + r (q 0 to 7, r 0 to 3); with two, bits 2 q and 2 q + 1 of byte r are those of column 8 q + r
# (q 0 to 3, r 0 to 7). So a shift that differs between the words of a register leaves each column's bits in its byte.
def _pack_refinements(values: Tensor, bits: int) -> Tensor:
    """Packs u8 [rows, blocks, 32], each below 2^bits, to u8 [rows, blocks, 4 bits]."""
    fields = values.view(*values.shape[:2], 8 // bits, 4 * bits)  # [rows, blocks, q, r]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (fields << shifts).sum(dim=2).to(torch.uint8)


def _unpack_refinements(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(2)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def e2m1_values(codes: Tensor) -> Tensor:
    """Returns the float32 numbers of E2M1 codes, u8 0 to 15, on the codes' device."""
    return _E2M1.to(codes.device)[codes.to(torch.int64)]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Returns the float32 numbers of E8M0 bytes: `2^(byte - 127)`; NaN for 255."""
    return _viewed(exponents, torch.float8_e8m0fnu).to(torch.float32)


def affine(part: plans.PartFormat, num_cols: int) -> Affine:
    """Returns the affine codec for rows of `num_cols` weights."""
    assert part.codec == "affine", part
    return Affine(part, num_cols)


_CODECS: dict[str, type[Bf16] | type[Affine] | type[Fp8] | type[E5m2] | type[Mxfp4] | type[Trellis]] = {
    "bf16": Bf16,
    "affine": Affine,
    "fp8": Fp8,
    "e5m2": E5m2,
    "mxfp4": Mxfp4,
    "trellis": Trellis,
}


def decode_part(part: plans.PartFormat, num_cols: int, rows: Tensor) -> Tensor:
    """Returns float32 weights [rows, num_cols] for a part's bytes, u8 [rows, part_bytes]."""
    return _CODECS[part.codec](part, num_cols).decode(rows)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Packs codes in planar blocks of 64: u8 [rows, n] to u8 [rows, n * width / 8]; n is a multiple of 64."""
    if width == 8:
        return codes
    blocks = codes.view(codes.shape[0], -1, plans.BLOCK)  # [rows, blocks, 64]
    planes = [(blocks & 3, 2), (blocks >> 2, 1)] if width == 3 else [(blocks, width)]
    return torch.cat([_pack_plane(values, bits) for values, bits in planes], dim=2).flatten(1)


def unpack_codes(packed: Tensor, width: int) -> Tensor:
    """Unpacks the result of `pack_codes`: u8 [rows, n * width / 8] to u8 [rows, n]."""
    if width == 8:
        return packed.contiguous()
    blocks = packed.reshape(packed.shape[0], -1, 8 * width)  # [rows, blocks, bytes of a block]
    if width != 3:
        return _unpack_plane(blocks, width).flatten(1)
    low, high = _unpack_plane(blocks[:, :, :16], 2), _unpack_plane(blocks[:, :, 16:], 1)
    return (low | (high << 2)).flatten(1)


def _pack_plane(values: Tensor, bits: int) -> Tensor:
    """Packs [rows, blocks, 64] to [rows, blocks, 8 bits]: byte j has codes j, j + 8 bits, ... from bit 0 up."""
    runs = values.view(*values.shape[:2], 8 // bits, 8 * bits)
    packed = runs[:, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= runs[:, :, place] << (place * bits)
    return packed


def _unpack_plane(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=2)


def _viewed(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of bytes as another dtype: a part may begin at an address unfit for the dtype."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _float16_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous().view(torch.uint8)


def _from_float16_bytes(stored: Tensor) -> Tensor:
    return _viewed(stored, torch.float16).to(torch.float32)


def _byte_scales(values: Tensor, signed: bool, trellis: bool = False) -> Tensor:
    """Returns a float16 multiplier a row, then a byte a group: 0 to 255, or two's complement -127 to 127."""
    top = 127 if signed else 255
    largest = values.abs().amax(dim=1, keepdim=True)
    # With a multiplier that float16 rounds to zero, every scale of the row would be zero.
    multiplier = (largest / top).clamp(min=2.0**-24).to(torch.float16)
    if trellis:
        # Scales of a trellis are small, and float16 is coarse near their multiplier: the next number above reaches all.
        short = multiplier.to(torch.float32) * top < largest
        multiplier = torch.where(short, torch.nextafter(multiplier, torch.full_like(multiplier, torch.inf)), multiplier)
    # An affine scale has a byte of at least 1: with a scale of zero all weights of the group would be zero.
    least = 0 if trellis else 1
    steps = (values / multiplier.to(torch.float32)).round_().clamp_(-top if signed else least, top)
    stored = steps.to(torch.int8).view(torch.uint8) if signed else steps.to(torch.uint8)
    return torch.cat((multiplier.view(torch.uint8), stored), dim=1)


def _from_byte_scales(stored: Tensor, signed: bool) -> Tensor:
    multiplier = _viewed(stored[:, :2], torch.float16).to(torch.float32)
    steps = stored[:, 2:].contiguous()
    return (steps.view(torch.int8) if signed else steps).to(torch.float32) * multiplier
