"""The rotated coordinates in which a layer's experts may be stored (docs/model.md).

Gate, up and transposed down all lie along the hidden state, so one change of coordinates serves all experts of a layer.
With the layer's vectors a and b, and a fixed orthogonal and symmetric matrix R:

    x' = R (a * x)       the input of the layer's experts; its router and its shared expert get x
    y  = b * R y'        y' is the weighted sum of the experts, computed from the stored rows

    stored rows:  gate' = R (gate / a),  up' = R (up / a),  down' = R (down / b);  a bias of down as R (bias / b)

Then `gate' . x' = gate . x`, and likewise for up: activations, thresholds and selectors keep their meaning. The
rotation spreads a single huge weight over its whole row, which few bits represent much better.

For d = m 2^k, m odd, R is the Walsh-Hadamard transform of the last axis of a vector seen as [m, 2^k], and the Hartley
transform of its first axis. Both are symmetric and their own inverses, so R is too. m is 1, 3, 5 or 7 in most models.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Floats of a piece that is transformed at once: it stays in a processor's cache.
_PIECE_FLOATS, _MOST_PIECES = 1 << 16, 16


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The vectors of one layer, float32 [d]."""

    input: Tensor  # a
    output: Tensor  # b


def odd_factor(d: int) -> int:
    """Returns m of `d = m 2^k`, m odd."""
    return d // (d & -d)


@lru_cache(maxsize=64)
def hartley(m: int) -> tuple[tuple[float, ...], ...]:
    """Returns the Hartley matrix, m x m: `(cos(2 pi i j / m) + sin(2 pi i j / m)) / sqrt(m)`, computed in 64 bits."""
    angles = [2 * math.pi * number / m for number in range(m)]
    values = [(math.cos(angle) + math.sin(angle)) / math.sqrt(m) for angle in angles]
    return tuple(tuple(values[i * j % m] for j in range(m)) for i in range(m))


def transform(x: Tensor) -> Tensor:
    """Returns `R x` for each vector, float32 [..., d], elementwise in one order: its bits do not depend on others."""
    d = x.shape[-1]
    flat = x.reshape(-1, d)
    if x.device.type != "cpu" or flat.numel() <= _PIECE_FLOATS:
        return _transformed(flat).view(x.shape)
    # With m parts to add up, a piece is longer: the additions of short pieces take less time than their launches.
    out, at_once = torch.empty_like(flat), max(_PIECE_FLOATS * min(odd_factor(d), _MOST_PIECES) // d, 1)
    for start in range(0, len(flat), at_once):
        out[start : start + at_once] = _transformed(flat[start : start + at_once])
    return out.view(x.shape)


def _transformed(x: Tensor) -> Tensor:
    num_rows, d = x.shape
    m = odd_factor(d)
    size = d // m
    for _ in range(size.bit_length() - 1):
        # Each stage adds neighbours and moves the lowest bit of a place to the top; after all, places are as before.
        pairs = x.view(num_rows, m, size // 2, 2)
        halves = torch.empty((num_rows, m, 2, size // 2), dtype=x.dtype, device=x.device)
        torch.add(pairs[..., 0], pairs[..., 1], out=halves[:, :, 0])
        torch.sub(pairs[..., 0], pairs[..., 1], out=halves[:, :, 1])
        x = halves
    x = x.reshape(num_rows, m, size) * (1 / math.sqrt(size))
    if m == 1:
        return x.view(num_rows, d)
    out = torch.zeros_like(x)
    for i, row in enumerate(hartley(m)):
        for j, factor in enumerate(row):
            out[:, i] += x[:, j] * factor
    return out.view(num_rows, d)


def rotated_weights(weights: Tensor, scale: Tensor) -> Tensor:
    """Returns the rows in which a layer's experts are stored: `R (weights / scale)`, float32 [n, d].

    Args:    weights: [n, d] in any float dtype.   scale: float32 [d], the layer's a for gate and up, its b for down.
    """
    return transform(weights.to(torch.float32, copy=True).div_(scale))
