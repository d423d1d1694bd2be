"""The codecs: rows of weights as bytes and back. The only module of this room that imports torch.

Not the quantizers: which scale, zero and codes stand for a weight is decided in `calib/quantize.py`. The bytes are
specified in docs/format.md. Tensors may live on any device.
"""

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats.plan import BLOCK, PartFormat
from moe_pack.formats.trellis_tables import TRELLIS_TABLES, TRELLIS_UNITS

_WINDOW_BITS = 7  # of a trellis's stream


class Bf16:
    """Weights as little-endian bfloat16, two bytes each."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.num_cols = num_cols

    def encode(self, weights: Tensor) -> Tensor:
        """Rows of bytes for rows of weights, rounded to nearest even.

        Args:    weights: [rows, num_cols] of any float dtype.
        Returns: u8 [rows, 2 num_cols].
        """
        return weights.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, part: Tensor) -> Tensor:
        """Weights in float32 [rows, num_cols] for u8 [rows, 2 num_cols]."""
        return _viewed(part, torch.bfloat16).to(torch.float32)


class Affine:
    """Weights as `(code - zero) * scale`, computed in float32 in that order: codes, then scales, then zeros.

    Source: the arithmetic of hqq's `Quantizer.dequantize`, with which it agrees bit for bit.
    """

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols
        self.code_bytes = part.code_bytes(num_cols)
        self.scale_bytes = part.scale_bytes(num_cols)
        self.num_groups = part.num_groups(num_cols)

    def store_scales(self, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """The stored bytes nearest to given scales and zeros.

        Args:    scale, zero: float32 [rows, num_groups], scale not negative.
        Returns: u8 [rows, scale_bytes] for scales, and for zeros.
        """
        if self.part.scale_bits == 16:
            return _float16_bytes(scale), _float16_bytes(zero)
        return _byte_scales(scale, signed=False), _byte_scales(zero, signed=True)

    def load_scales(self, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and zeros in float32 [rows, num_groups] for their stored bytes."""
        if self.part.scale_bits == 16:
            return _from_float16_bytes(scales), _from_float16_bytes(zeros)
        return _from_byte_scales(scales, signed=False), _from_byte_scales(zeros, signed=True)

    def encode(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Rows of bytes: packed codes, scales, zeros.

        Args:    codes: u8 [rows, num_cols], each below 2^width.   scales, zeros: from `store_scales`.
        Returns: u8 [rows, part_bytes].
        """
        return torch.cat((pack_codes(codes, self.part.width), scales, zeros), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Weights in float32 [rows, num_cols] for u8 [rows, part_bytes]."""
        sizes = [self.code_bytes, self.scale_bytes, self.scale_bytes]
        packed, scales, zeros = torch.split(part, sizes, dim=1)
        scale, zero = self.load_scales(scales, zeros)
        codes = unpack_codes(packed, self.part.width).to(torch.float32)
        grouped = codes.view(-1, self.num_groups, self.num_cols // self.num_groups)  # [rows, groups, group]
        return grouped.sub_(zero.unsqueeze(2)).mul_(scale.unsqueeze(2)).view(-1, self.num_cols)


class Fp8:
    """Weights as `code * scale` in float32: E4M3 codes (no infinity), then a float32 scale for 128 columns."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows of bytes for u8 codes [rows, num_cols] and float32 scales [rows, num_groups]."""
        return torch.cat((codes, scales.contiguous().view(torch.uint8)), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Weights in float32 [rows, num_cols] for u8 [rows, part_bytes]."""
        codes, scales = part[:, : self.num_cols], part[:, self.num_cols :]
        weights = _viewed(codes, torch.float8_e4m3fn).to(torch.float32)
        scale = _viewed(scales, torch.float32).repeat_interleave(self.part.group, dim=1)
        return weights.mul_(scale[:, : self.num_cols])


class E5m2:
    """Weights as `code * scale`: E5M2 codes, then one power of two a row. Exact for a neuron of MXFP4's `down`."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.num_cols = num_cols

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows of bytes for u8 codes [rows, num_cols] and E8M0 scales, u8 [rows, 1]."""
        return torch.cat((codes, scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Weights in float32 [rows, num_cols] for u8 [rows, part_bytes]."""
        codes, scales = part[:, : self.num_cols], part[:, self.num_cols :]
        return _viewed(codes, torch.float8_e5m2).to(torch.float32).mul_(powers_of_two(scales))


class Mxfp4:
    """Weights as `code * scale`: E2M1 codes in planar blocks, then a power of two for 32 columns.

    Source: OCP Microscaling Formats (MX) Specification, version 1.0, section 5.
    """

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows of bytes for u8 codes [rows, num_cols], 0 to 15, and E8M0 scales, u8 [rows, num_groups]."""
        return torch.cat((pack_codes(codes, self.part.width), scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Weights in float32 [rows, num_cols] for u8 [rows, part_bytes]."""
        packed, scales = part[:, : self.num_cols // 2], part[:, self.num_cols // 2 :]
        weights = e2m1_values(unpack_codes(packed, self.part.width)).view(len(part), -1, self.part.group)
        return weights.mul_(powers_of_two(scales).unsqueeze(2)).view(-1, self.num_cols)


class Trellis:
    """Weights as `value * scale`: a value for the last 7 bits of a stream, which grows by some bits a weight.

    Each value so depends on the weight's own bits and on those of up to six weights before it in the row.
    Source: trellis-coded quantization (Marcellin and Fischer, 1990) over a shift register, as QTIP (arXiv 2406.11235)
    has it; the tables are our own (`trellis_tables`).
    """

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols
        self.code_bytes = part.code_bytes(num_cols)
        self.num_groups = part.num_groups(num_cols)

    def store_scales(self, scale: Tensor) -> Tensor:
        """The stored bytes nearest to given scales: u8 [rows, scale_bytes] for float32 [rows, num_groups], >= 0."""
        return _float16_bytes(scale) if self.part.scale_bits == 16 else _byte_scales(scale, signed=False, trellis=True)

    def load_scales(self, scales: Tensor) -> Tensor:
        """Scales in float32 [rows, num_groups] for their stored bytes."""
        return _from_float16_bytes(scales) if self.part.scale_bits == 16 else _from_byte_scales(scales, signed=False)

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Rows of bytes: the stream, then scales.

        Args:    codes: u8 [rows, num_cols], the bits that each weight adds, the first the lowest.
                 scales: from `store_scales`.
        """
        bits = [(codes[:, column::2, None] >> torch.arange(count)) & 1 for column, count in enumerate(self._steps())]
        stream = torch.cat(bits, dim=2).flatten(1).view(len(codes), -1, 8)  # [rows, bytes, 8]
        return torch.cat(((stream << torch.arange(8)).sum(dim=2).to(torch.uint8), scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Weights in float32 [rows, num_cols] for u8 [rows, part_bytes]."""
        stream, scales = part[:, : self.code_bytes].to(torch.int32), part[:, self.code_bytes :]
        padded = torch.nn.functional.pad(stream, (1, 1))  # zeros before the stream's first bits
        even, width = self._steps()[0], self.part.width
        columns = torch.arange(self.num_cols, device=part.device)
        starts = columns // 2 * width + torch.where(columns % 2 == 0, even, width) + 8 - _WINDOW_BITS
        bytes_ = padded[:, starts // 8] | padded[:, starts // 8 + 1] << 8
        windows = (bytes_ >> starts % 8) & ((1 << _WINDOW_BITS) - 1)  # [rows, columns]
        values = trellis_values(width).to(part.device)[columns % 2, windows.to(torch.int64)]
        grouped = values.view(len(part), self.num_groups, self.num_cols // self.num_groups)
        return grouped.mul(self.load_scales(scales).unsqueeze(2)).view(-1, self.num_cols)

    def _steps(self) -> tuple[int, int]:
        return trellis_steps(self.part.width)


def trellis_steps(width: int) -> tuple[int, int]:
    """Bits that a trellis's weights add to its stream: those of even columns, and of odd ones."""
    return width // 2, width - width // 2


def trellis_values(width: int) -> Tensor:
    """What the last 7 bits of a trellis's stream stand for: float32 [2, 128], for even columns and for odd ones."""
    held = np.frombuffer(bytes.fromhex(TRELLIS_TABLES[width]), np.int8).reshape(-1, 1 << _WINDOW_BITS)
    return torch.from_numpy(held.astype(np.float32)[[0, -1]])


def trellis_unit(width: int) -> float:
    """The scale of weights of unit variance, for which a trellis's values are made."""
    return TRELLIS_UNITS[width]


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def e2m1_values(codes: Tensor) -> Tensor:
    """The numbers that E2M1 codes, u8 0 to 15, stand for: float32, on the codes' device."""
    return _E2M1.to(codes.device)[codes.to(torch.int64)]


def powers_of_two(exponents: Tensor) -> Tensor:
    """What E8M0 bytes stand for, float32: `2^(byte - 127)`, 255 no number."""
    return _viewed(exponents, torch.float8_e8m0fnu).to(torch.float32)


def affine(part: PartFormat, num_cols: int) -> Affine:
    """The affine codec for rows of `num_cols` weights."""
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


def decode_part(part: PartFormat, num_cols: int, rows: Tensor) -> Tensor:
    """Weights in float32 [rows, num_cols] for a part's bytes, u8 [rows, part_bytes]."""
    return _CODECS[part.codec](part, num_cols).decode(rows)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Codes in planar blocks of 64: u8 [rows, n] to u8 [rows, n * width / 8]; n is a multiple of 64."""
    if width == 8:
        return codes
    blocks = codes.view(codes.shape[0], -1, BLOCK)  # [rows, blocks, 64]
    planes = [(blocks & 3, 2), (blocks >> 2, 1)] if width == 3 else [(blocks, width)]
    return torch.cat([_pack_plane(values, bits) for values, bits in planes], dim=2).flatten(1)


def unpack_codes(packed: Tensor, width: int) -> Tensor:
    """What `pack_codes` packed: u8 [rows, n * width / 8] to u8 [rows, n]."""
    if width == 8:
        return packed.contiguous()
    blocks = packed.reshape(packed.shape[0], -1, 8 * width)  # [rows, blocks, bytes of a block]
    if width != 3:
        return _unpack_plane(blocks, width).flatten(1)
    low, high = _unpack_plane(blocks[:, :, :16], 2), _unpack_plane(blocks[:, :, 16:], 1)
    return (low | (high << 2)).flatten(1)


def _pack_plane(values: Tensor, bits: int) -> Tensor:
    """[rows, blocks, 64] codes to [rows, blocks, 8 bits]: byte j holds codes j, j + 8 bits, ... from bit 0 up."""
    runs = values.view(*values.shape[:2], 8 // bits, 8 * bits)
    packed = runs[:, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= runs[:, :, place] << (place * bits)
    return packed


def _unpack_plane(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=2)


def _viewed(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as another dtype. Copied first: the part of a row may begin where the dtype cannot be read in place."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _float16_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous().view(torch.uint8)


def _from_float16_bytes(stored: Tensor) -> Tensor:
    return _viewed(stored, torch.float16).to(torch.float32)


def _byte_scales(values: Tensor, signed: bool, trellis: bool = False) -> Tensor:
    """One float16 multiplier a row, then a byte a group: unsigned to 255, or two's complement -127 to 127."""
    top = 127 if signed else 255
    largest = values.abs().amax(dim=1, keepdim=True)
    # Float16 rounds the multiplier; below its smallest positive value every group would read as zero.
    multiplier = (largest / top).clamp(min=2.0**-24).to(torch.float16)
    if trellis:
        # Scales of a table's steps are small: float16 has few numbers about their multiplier. The next above holds all.
        short = multiplier.to(torch.float32) * top < largest
        multiplier = torch.where(short, torch.nextafter(multiplier, torch.full_like(multiplier, torch.inf)), multiplier)
    # The byte of a scale with a zero is at least 1: a scale of zero could hold nothing.
    least = 0 if trellis else 1
    steps = (values / multiplier.to(torch.float32)).round_().clamp_(-top if signed else least, top)
    stored = steps.to(torch.int8).view(torch.uint8) if signed else steps.to(torch.uint8)
    return torch.cat((multiplier.view(torch.uint8), stored), dim=1)


def _from_byte_scales(stored: Tensor, signed: bool) -> Tensor:
    multiplier = _viewed(stored[:, :2], torch.float16).to(torch.float32)
    steps = stored[:, 2:].contiguous()
    return (steps.view(torch.int8) if signed else steps).to(torch.float32) * multiplier
