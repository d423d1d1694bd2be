"""The codecs: rows of weights as bytes, and bytes as weights. No other module of this folder imports torch.

`calib/quantize/plain.py` chooses scales, zeros and codes; docs/format.md specifies the bytes. Tensors may be on any
device.

To add a codec:

1. plan.py: `Codec`, `PartFormat`, `format_fault`, `quantizer_fault`, `format_text`. manifest.py: number and feature.
2. Here: a class with encode and decode, and a line in `_CODECS`. docs/format.md: its number and its bytes.
3. The CPU: native/kernels.h, layout.cpp, codes.h, row_kernels.h, and `_CODECS` in runtime/cpu/kernels.py. The GPU:
   runtime/gpu/kernels/rows.py and products.py. Each numbers codecs in its own way.
4. Codes: calib/quantize/, or convert/matrix_bytes.py if a source has them; then convert/cli/options.py,
   convert/synthetic.py and convert/plan/machines.py (rates).
5. Tests: tests/support/second_reader.py and named_formats.py; tests/native/layouts.cpp and plain.cpp.

`TRELLIS_TABLES` has the tables of the codec `trellis`: 128 signed bytes a table, in hexadecimal, by width (bits of two
weights). Odd widths have two tables: one for even columns, one for odd columns. Lloyd's algorithm made them from the
best paths of random rows (benchmarks/trellis_tables.py at commit f1fe26a). They are part of the format
(docs/trellis-tables.json) and never change.
"""

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats.plan import BLOCK, PartFormat

TRELLIS_TABLES: dict[int, str] = {
    3: (
        "e523f80b04ec21ebf40ae02d12e212f7f409e91f20d70bf9d519f30608f445dfda35f90d0ef91be0f50689231bdb05f1"
        "fa08d73232ec0af6f125f50e0bf71bd211f623e4cb1cf50b15d70df7ee09e2731fc707f6f306e41c0af82edfdb14f919"
        "09f51ad8e53ff50c2ee909f4ed04bf2133c808fafa15df1b0af21dbbe127f30681fef429ff20e0050ee421f31bf205bc"
        "20f606c60adb36fafd38d609e313f31a0bdc38031ff405dae10cf418fa74e30ef822e605ca04f21d25f50adb0feb20f5"
        "ee1dc402e108fa2532f50be406bb1bf106e21ff422f50bdee90dfb36f419e00f2fff0ce203d81af3f71fde0fe10df947"
        "dd09fa21f529d1040cd820f524fa09de"
    ),
    4: (
        "81f00417e5fb0c26102fe5fc041bdaf40f37ebfc051cd9f3b0f20517e4fa0d25061bdbf30d6fe6fce6fc0d2accf10418"
        "e4fc0b24c1f20517051adaf40f47e5fcebd11704fae6220d2e0ffceb1a06f4dd2c0efae81906f3daefcd1804fae4280d"
        "2005f2d83111fcebfbe4250df2cb1805fbea240cefce1b041d07f4dc3a12fce9"
    ),
    5: (
        "90f2031ae6fc0d260f31e6fd041cd7f30e46eafe041cdbf5b5f00316dffa0b29041ad9f30b6be9fce4fd0c25cef40415"
        "e5fb0c33c4f30418041cd7f20f3de8fbe9d01505fbe8240c300ffceb1605f4dc260efdee1905f4dff2ce1502fae7210b"
        "1d05f5dd2f0efdebfcea230df2de1403f9e5210ef0c816041905f4dd260efcec811500ee30ecfd0f0ffdec30ef0314ae"
        "08f5db20fb091fe4e41d09fb1fd9f505f20317cd10feed466ce9fb10ce1504f01adcf707e4200afafa0822e505f5df19"
        "e5280afc1fdff50805f5da1cfa0b27e50fffeb36f20214cac31303f12eebfc0df90c25e206f5e11d20daf506e2200bf9"
        "3eeefd11d11201eff10213d211ffec2e"
    ),
    6: (
        "8105f11ae50ffb3f0bec24fe04df15f605d31df110e533fbeb0afc21db02f414f01bcd04fb2ce40e27fc0ceb16f503de"
        "1bf105c073fc0fe6fc23ea0af514d804e010fb30d405f01b04dd16f60cec21fe0fe635fb06ab1bf2df03f514ea0afb28"
        "fa52e60ef11acf0415f604d824fd0bed2afc10e51cf105c8f515dc03fd22ea0a"
    ),
    7: (
        "811a06f229e7fa0f1feefe0adc1301f602f6dd14fe0b20ecfa0f2ae606f1ce1af0061cd20efae6300afeed23f60214df"
        "16def602ec1f09fee66d0ffa17d4f106da4d0ffa1acaf10613e3f702eb230afe0affec26f50213e1f20619d70efbe63e"
        "f90e2fe805f2c11802f6e012fe0a20ee28ebfe09d71402f6ac1b06f136e4f90e8323e51303fb0af103fb0bf2d526e715"
        "f109f90112e51faa14e724d5f20afa02e413be1f0af202fa0bf202fae815d327fa02f10920c912e424cf14e8fa03f10a"
        "da32ea1705fe0cf506ff0ff6e037ed1df60efe0618ed2eda1bed40e1f610fe06eb19dc2c0df506fe10f707feed1ce053"
        "fe06f50e2ddc18ec75e01aedfe06f60f"
    ),
    8: (
        "81dc1f2a0a0ff3f70206fbfee5ec1217f1f6090d2537cee1141be9effafe0205e5ec11170206fbff0a0ff3f7bddc1f2e"
        "fafe0105141ae9ee2351d6e1f1f6090dd9c8311f0f0af7f30602fefbece51712f6f10d097126e1d51a14eee9fefa0502"
        "ece617110602fffb0f0af7f3dda82a1efefa05011a14eee93f22e1d1f5f10d09"
    ),
}

# The scale of weights with unit variance, by width; for other weights it is multiplied by their standard deviation.
TRELLIS_UNITS: dict[int, float] = {
    3: 0.033923,
    4: 0.038386,
    5: 0.041391,
    6: 0.043219,
    7: 0.044342,
    8: 0.044850,
}


_WINDOW_BITS = 7  # bits of a trellis's stream that decide a value


class Bf16:
    """Weights as little-endian bfloat16, two bytes each."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.num_cols = num_cols

    def encode(self, weights: Tensor) -> Tensor:
        """Returns rows of bytes for rows of weights, rounded to nearest even.

        Args:    weights: [rows, num_cols] of any float dtype.
        Returns: u8 [rows, 2 num_cols].
        """
        return weights.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, 2 num_cols]."""
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
        """Returns the stored bytes that are nearest to scales and zeros.

        Args:    scale, zero: float32 [rows, num_groups], scale not negative.
        Returns: u8 [rows, scale_bytes] of the scales, and the same of the zeros.
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
        """Returns rows of bytes: packed codes, scales, zeros.

        Args:    codes: u8 [rows, num_cols], each below 2^width.   scales, zeros: from `store_scales`.
        Returns: u8 [rows, part_bytes].
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


class Fp8:
    """Weights as `code * scale` in float32: E4M3 codes (no infinity), then a float32 scale for each 128 columns."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes for u8 codes [rows, num_cols] and float32 scales [rows, num_groups]."""
        return torch.cat((codes, scales.contiguous().view(torch.uint8)), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        codes, scales = part[:, : self.num_cols], part[:, self.num_cols :]
        weights = _viewed(codes, torch.float8_e4m3fn).to(torch.float32)
        scale = _viewed(scales, torch.float32).repeat_interleave(self.part.group, dim=1)
        return weights.mul_(scale[:, : self.num_cols])


class E5m2:
    """Weights as `code * scale`: E5M2 codes, then one power of two a row. Stores a neuron of MXFP4's `down` exactly."""

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.num_cols = num_cols

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes for u8 codes [rows, num_cols] and E8M0 scales, u8 [rows, 1]."""
        return torch.cat((codes, scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        codes, scales = part[:, : self.num_cols], part[:, self.num_cols :]
        return _viewed(codes, torch.float8_e5m2).to(torch.float32).mul_(powers_of_two(scales))


class Mxfp4:
    """Weights as `code * scale`: E2M1 codes in planar blocks, then a power of two for each 32 columns.

    Source: OCP Microscaling Formats (MX) Specification, version 1.0, section 5.
    """

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes for u8 codes [rows, num_cols], 0 to 15, and E8M0 scales, u8 [rows, num_groups]."""
        return torch.cat((pack_codes(codes, self.part.width), scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        packed, scales = part[:, : self.num_cols // 2], part[:, self.num_cols // 2 :]
        weights = e2m1_values(unpack_codes(packed, self.part.width)).view(len(part), -1, self.part.group)
        return weights.mul_(powers_of_two(scales).unsqueeze(2)).view(-1, self.num_cols)


class Trellis:
    """Weights as `value * scale`: each weight adds some bits to a stream, whose last 7 bits select the value.

    A value depends on the weight's own bits and on those of up to six weights before it in the row.
    Source: trellis-coded quantization (Marcellin and Fischer, 1990) over a shift register, as in QTIP (arXiv
    2406.11235); the tables are our own (`TRELLIS_TABLES`).
    """

    def __init__(self, part: PartFormat, num_cols: int) -> None:
        self.part = part
        self.num_cols = num_cols
        self.code_bytes = part.code_bytes(num_cols)
        self.num_groups = part.num_groups(num_cols)

    def store_scales(self, scale: Tensor) -> Tensor:
        """Returns the nearest stored bytes, u8 [rows, scale_bytes], for float32 scales [rows, num_groups], >= 0."""
        return _float16_bytes(scale) if self.part.scale_bits == 16 else _byte_scales(scale, signed=False, trellis=True)

    def load_scales(self, scales: Tensor) -> Tensor:
        """Returns float32 scales [rows, num_groups] for their stored bytes."""
        return _from_float16_bytes(scales) if self.part.scale_bits == 16 else _from_byte_scales(scales, signed=False)

    def encode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns rows of bytes: the stream, then scales.

        Args:    codes: u8 [rows, num_cols], the bits that each weight adds to the stream, the lowest bit first.
                 scales: from `store_scales`.
        """
        bits = [(codes[:, column::2, None] >> torch.arange(count)) & 1 for column, count in enumerate(self._steps())]
        stream = torch.cat(bits, dim=2).flatten(1).view(len(codes), -1, 8)  # [rows, bytes, 8]
        return torch.cat(((stream << torch.arange(8)).sum(dim=2).to(torch.uint8), scales), dim=1)

    def decode(self, part: Tensor) -> Tensor:
        """Returns float32 weights [rows, num_cols] for u8 [rows, part_bytes]."""
        stream, scales = part[:, : self.code_bytes].to(torch.int32), part[:, self.code_bytes :]
        padded = torch.nn.functional.pad(stream, (1, 1))  # the stream begins after zeros
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
    """Returns the bits that a weight adds to a trellis's stream: in even columns, in odd columns."""
    return width // 2, width - width // 2


def trellis_values(width: int) -> Tensor:
    """Returns the values that 7 bits of a trellis's stream select: float32 [2, 128], for even and for odd columns."""
    tables = np.frombuffer(bytes.fromhex(TRELLIS_TABLES[width]), np.int8).reshape(-1, 1 << _WINDOW_BITS)
    return torch.from_numpy(tables.astype(np.float32)[[0, -1]])


def trellis_unit(width: int) -> float:
    """Returns the scale for weights of unit variance, for which the values of a trellis were made."""
    return TRELLIS_UNITS[width]


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def e2m1_values(codes: Tensor) -> Tensor:
    """Returns the float32 numbers of E2M1 codes, u8 0 to 15, on the codes' device."""
    return _E2M1.to(codes.device)[codes.to(torch.int64)]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Returns the float32 numbers of E8M0 bytes: `2^(byte - 127)`; NaN for 255."""
    return _viewed(exponents, torch.float8_e8m0fnu).to(torch.float32)


def affine(part: PartFormat, num_cols: int) -> Affine:
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


def decode_part(part: PartFormat, num_cols: int, rows: Tensor) -> Tensor:
    """Returns float32 weights [rows, num_cols] for a part's bytes, u8 [rows, part_bytes]."""
    return _CODECS[part.codec](part, num_cols).decode(rows)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Packs codes in planar blocks of 64: u8 [rows, n] to u8 [rows, n * width / 8]; n is a multiple of 64."""
    if width == 8:
        return codes
    blocks = codes.view(codes.shape[0], -1, BLOCK)  # [rows, blocks, 64]
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
    """Returns a copy of bytes as another dtype, because a part may begin at an address unfit for the dtype."""
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
