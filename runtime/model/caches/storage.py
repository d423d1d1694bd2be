"""How a cache stores keys and values: as float32, as bfloat16, or as codes of 8 or 4 bits.

A *row* has the values of one position and one head. Codes are of *rotated* values: a fixed orthogonal matrix R, the
Hadamard matrix times a sign for each value, spreads a large value over its row, which few bits represent better. A
row's values are rotated in pieces of the largest power of two that divides their number. Since `q . k = (R q) . (R k)`,
a kernel rotates queries instead of keys, and the sum of values back. `RowStorage` itself rotates back as it reads.

A row of codes is bytes, for each of its parts (a latent and its rotated key are two parts):

    codes     blocks of at most 32 values; with q4, byte j of a block has value j in its low bits, and in its high bits
              value j of the block's second half
    scales    float16, one a block
    minima    float16, one a block, with q4 alone

    q8   value = code * scale              code: int8, -127 to 127
    q4   value = code * scale + minimum    code: 0 to 15

Sources: QuaRot (2404.00456), section 4, for the rotation; KIVI (2402.02750), section 3.1, for scales and minima.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moe_pack.runtime.model.caches.dtypes import KvDtype

BLOCK_VALUES = 32  # the most of a block
_CODED = ("q8", "q4")
_MOST_CODES = {"q8": 127, "q4": 15}
_ALL = slice(None)


def plain_dtype(dtype: KvDtype) -> torch.dtype:
    """Returns the dtype of an indexer's keys and of the projections of entries."""
    return torch.float32 if dtype == "f32" else torch.bfloat16


@dataclass(frozen=True, slots=True)
class RowStorage:
    """The storage of rows of `sum(parts)` values; each part is rotated on its own."""

    dtype: KvDtype
    parts: tuple[int, ...]

    @property
    def is_coded(self) -> bool:
        return self.dtype in _CODED

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_coded else plain_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.torch_dtype.itemsize * self._num_stored

    @property
    def _num_stored(self) -> int:
        return sum(self._sizes(self.parts))

    def _sizes(self, parts: tuple[int, ...]) -> list[int]:
        return [_part_bytes(self.dtype, part) if self.is_coded else part for part in parts]

    def empty(self, heads: int, places: int, device: torch.device) -> Tensor:
        """Allocates rows, [heads, places, n]."""
        return torch.zeros((heads, places, self._num_stored), dtype=self.torch_dtype, device=device)

    def places(self, parts: slice) -> slice:
        """Returns where consecutive parts lie in a row, in elements of the tensor."""
        sizes = self._sizes(self.parts)
        first, last, _ = parts.indices(len(sizes))
        return slice(sum(sizes[:first]), sum(sizes[:last]))

    def encode(self, values: Tensor, parts: slice = _ALL) -> Tensor:
        """Encodes values float32 [..., width of the parts]."""
        if not self.is_coded:
            return values.to(self.torch_dtype)
        split = torch.split(values, list(self.parts[parts]), dim=-1)
        return torch.cat([_encode(_rotated(part), self.dtype) for part in split], dim=-1)

    def decode(self, stored: Tensor, parts: slice = _ALL) -> Tensor:
        """Returns the values of stored parts, float32 [..., width of the parts], rotated back."""
        if not self.is_coded:
            return stored.float()
        widths = self.parts[parts]
        split = torch.split(stored, self._sizes(widths), dim=-1)
        return torch.cat(
            [_rotated_back(_decode(part, self.dtype, width)) for part, width in zip(split, widths, strict=True)], dim=-1
        )


def plain_rows(tensor: Tensor) -> RowStorage:
    """Returns the storage of a tensor of float32 or bfloat16."""
    return RowStorage("f32" if tensor.dtype == torch.float32 else "bf16", (tensor.shape[-1],))


# ---- rotation -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def rotation(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns R for rows of so many values: their signs, float32 [width], and the Hadamard matrix of a piece."""
    size = width & -width
    matrix = torch.ones((1, 1))
    for _ in range(size.bit_length() - 1):
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    # Bits of multiples of the golden ratio: they look random, and the kernels compute them alike.
    numbers = torch.arange(width, dtype=torch.int64) * 2654435761
    signs = 1.0 - 2.0 * ((numbers >> 15) & 1).float()
    return signs.to(device), (matrix / size**0.5).to(device)


def _rotated(values: Tensor) -> Tensor:
    signs, matrix = rotation(values.shape[-1], values.device)
    return (_pieces(values * signs, len(matrix)) @ matrix).flatten(-2)


def _rotated_back(values: Tensor) -> Tensor:
    signs, matrix = rotation(values.shape[-1], values.device)
    return (_pieces(values, len(matrix)) @ matrix).flatten(-2) * signs


def _pieces(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


# ---- codes ----------------------------------------------------------------------------------------------------------


def block_sizes(width: int) -> tuple[int, int]:
    """Returns the number of blocks of a part of so many values, and the values of each, an even number."""
    number = -(-width // BLOCK_VALUES)
    each = -(-width // number)
    return number, each + each % 2


def _part_bytes(dtype: KvDtype, width: int) -> int:
    number, each = block_sizes(width)
    return number * (each + 2) if dtype == "q8" else number * (each // 2 + 4)


def _encode(values: Tensor, dtype: KvDtype) -> Tensor:
    number, each = block_sizes(values.shape[-1])
    blocks = _pieces(torch.nn.functional.pad(values, (0, number * each - values.shape[-1])), each)
    if dtype == "q8":
        scales = (blocks.abs().amax(dim=-1) / _MOST_CODES[dtype]).half()
        codes = _codes(blocks, scales).clamp(-_MOST_CODES[dtype], _MOST_CODES[dtype]).to(torch.int8).view(torch.uint8)
        return torch.cat((codes.flatten(-2), _as_bytes(scales)), dim=-1)
    minima = blocks.amin(dim=-1).half()
    scales = ((blocks.amax(dim=-1) - minima.float()) / _MOST_CODES[dtype]).half()
    codes = _codes(blocks - minima.float()[..., None], scales).clamp(0, _MOST_CODES[dtype]).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return torch.cat(((low | (high << 4)).flatten(-2), _as_bytes(scales), _as_bytes(minima)), dim=-1)


def _codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns blocks over their scales, rounded; zeros where a scale is zero."""
    wide = scales.float()[..., None]
    return (blocks * torch.where(wide > 0, 1 / wide, torch.zeros_like(wide))).round()


def _as_bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8)


def _decode(stored: Tensor, dtype: KvDtype, width: int) -> Tensor:
    number, each = block_sizes(width)
    each_bytes = each if dtype == "q8" else each // 2
    packed = _pieces(stored[..., : number * each_bytes], each_bytes)
    factors = stored[..., number * each_bytes :].contiguous().view(torch.float16).float()[..., None]
    scales, minima = factors[..., :number, :], factors[..., number:, :]
    if dtype == "q8":
        values = packed.view(torch.int8).float() * scales
    else:
        values = torch.cat((packed & 15, packed >> 4), dim=-1).float() * scales + minima
    return values.flatten(-2)[..., :width]
