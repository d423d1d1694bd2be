"""One token's queries over the cache: the positions it sees in splits, each a program's, whose results are combined.

Up to 16 query heads that share keys stand in one tile. Positions are divided evenly whatever their number, so that
nothing depends on host values; splits that get none leave at once. In latent attention the values are the first
columns of the keys. A layer whose window is shorter than the context may keep its positions in a ring, and a head may
have a sink, a logit that no value belongs to. Products are 3xTF32 on a GPU, which lose no more than float32 sums do.
The twin is torch's own attention, as in `runtime.attention`; `runtime.latent_attention` for latents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_H = 16  # the fewest rows a product of tiles has
_USUAL_WIDTH = 128  # other keys beyond a piece are multiplied piece by piece, lest the registers overflow
_PIECE = 64
_PROGRAMS = 256  # about two for each multiprocessor of a large card
_MAX_SPLITS = 64  # what combining them costs grows with them
_COMBINED = 16  # splits read at once


def _interpreted_range(*bounds: Any) -> Iterable[int]:
    """What the interpreter's own range is for numpy before 2.4: its scalars are arrays of one."""
    return range(*(int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else bound for bound in bounds))


_range = _interpreted_range if triton.knobs.runtime.interpret else tl.range


def _block_s(width: int) -> int:
    """Positions of a tile."""
    return 32 if width <= _USUAL_WIDTH else 16


@dataclass(frozen=True, slots=True, eq=False)
class AttendRoom:
    """Room for what each split finds, made once, on the device.

    `sums`: float32 [2, splits, heads], the largest score and the sum of powers.   `mixed`: float32 [splits, heads,
    width], values times powers.
    """

    sums: Tensor
    mixed: Tensor

    @classmethod
    def room(
        cls, num_heads: int, num_kv_heads: int, width: int, context_tokens: int, device: torch.device
    ) -> "AttendRoom":
        """Room for values of `width` and as many splits as a cache of `context_tokens` is worth: a power of two."""
        tiles = num_kv_heads * -(-num_heads // num_kv_heads // _BLOCK_H)
        most = min(_MAX_SPLITS, max(1, _PROGRAMS // tiles), -(-context_tokens // _block_s(width)))
        splits = 1 << (most.bit_length() - 1)
        sums = torch.zeros((2, splits, num_heads), device=device)
        return cls(sums, torch.zeros((splits, num_heads, width), device=device))


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    position: Tensor,
    scale: float,
    window: int | None,
    room: AttendRoom,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Writes each head's mix of the values at positions up to `position`, of the last `window` where there is one.

    Args:    q: float32 [heads, width], rotated.
             cache: keys and values, float32 or bfloat16 [kv heads, places, width]; keys contiguous, and values
             either contiguous too or the first columns of the keys. A position's place is it modulo `places`.
             position: int32 [1], this token's, already in the cache, as is all that it sees.
             out: float32 [heads, values' width].   sinks: float32 [heads].
    """
    keys, values = cache
    (num_heads, width), (num_kv_heads, num_places, value_width) = q.shape, values.shape
    group, splits = num_heads // num_kv_heads, room.sums.shape[1]
    tiles = -(-group // _BLOCK_H)
    block_c = width if width == _USUAL_WIDTH else min(_PIECE, triton.next_power_of_2(width))
    block_s, block_v = _block_s(value_width), max(16, triton.next_power_of_2(value_width))
    _attend_kernel[(num_kv_heads * tiles, splits)](
        q, keys, values, position, sinks, room.sums, room.mixed, out, num_places, scale,
        num_heads, group, tiles, width, value_width, keys.stride(1), values.stride(1), window or 0, splits,
        _BLOCK_H, block_s, max(16, block_c), block_v,
        num_warps=4 if width <= _USUAL_WIDTH else 8, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_heads,)](
            position, sinks, room.sums, room.mixed, out, num_heads, value_width, window or 0, splits,
            block_s, _COMBINED, block_v, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def _seen(position_ptr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """The first position seen, the one after the last, and how many a split takes."""
    stop = tl.load(position_ptr) + 1
    start = stop * 0
    if WINDOW:
        start = tl.maximum(stop - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(stop - start, BLOCK_S), SPLITS) * BLOCK_S
    return start, stop, share


@triton.jit
def _attend_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    position_ptr,
    sinks_ptr,
    sums_ptr,
    mixed_ptr,
    out_ptr,
    num_places,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    stride_ks: tl.constexpr,
    stride_vs: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    kv_head, tile, split = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    in_group = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group
    start, stop, share = _seen(position_ptr, WINDOW, SPLITS, BLOCK_S)
    begin = start + split * share
    if begin >= stop:
        return
    end = tl.minimum(begin + share, stop)
    cv = tl.arange(0, BLOCK_V)
    first = kv_head.to(tl.int64) * num_places
    before = begin - begin % num_places  # what is seen goes past the ring's end once at most
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for tile_begin in _range(begin, end, BLOCK_S):
        s = tile_begin + tl.arange(0, BLOCK_S)
        is_seen = s < end
        place = s - before
        place = first + tl.where(place < num_places, place, place - num_places)
        k_rows = keys_ptr + place * stride_ks
        v_rows = values_ptr + place * stride_vs
        scores = tl.zeros([BLOCK_H, BLOCK_S], tl.float32)
        for c_begin in range(0, WIDTH, BLOCK_C):
            c = c_begin + tl.arange(0, BLOCK_C)
            is_c = c < WIDTH
            q = tl.load(q_ptr + heads[:, None] * WIDTH + c[None, :], mask=is_head[:, None] & is_c[None, :], other=0.0)
            k = tl.load(k_rows[:, None] + c[None, :], mask=is_seen[:, None] & is_c[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k.to(tl.float32)), scores, input_precision="tf32x3")
        v = tl.load(v_rows[:, None] + cv[None, :], mask=is_seen[:, None] & (cv < VALUE_WIDTH)[None, :], other=0.0)
        scores = tl.where(is_seen[None, :], scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        powers = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(powers, 1)
        mixed = tl.dot(powers, v.to(tl.float32), mixed * shrink[:, None], input_precision="tf32x3")
        top = new_top
    stored = is_head[:, None] & (cv < VALUE_WIDTH)[None, :]
    if SPLITS == 1:
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0)
            new_top = tl.maximum(top, sinks)
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.exp(sinks - new_top)
            mixed *= shrink[:, None]
        tl.store(out_ptr + heads[:, None] * VALUE_WIDTH + cv[None, :], mixed / total[:, None], mask=stored)
    else:
        places = split * HEADS + heads
        tl.store(sums_ptr + places, top, mask=is_head)
        tl.store(sums_ptr + SPLITS * HEADS + places, total, mask=is_head)
        tl.store(mixed_ptr + places[:, None] * VALUE_WIDTH + cv[None, :], mixed, mask=stored)


@triton.jit
def _combine_kernel(
    position_ptr,
    sinks_ptr,
    sums_ptr,
    mixed_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COMBINED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(0)
    start, stop, share = _seen(position_ptr, WINDOW, SPLITS, BLOCK_S)
    used = tl.cdiv(stop - start, share)  # the others wrote nothing
    splits = tl.arange(0, SPLITS)
    tops = tl.load(sums_ptr + splits * HEADS + head, mask=splits < used, other=-float("inf"))
    totals = tl.load(sums_ptr + (SPLITS + splits) * HEADS + head, mask=splits < used, other=0.0)
    top = tl.max(tops)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp(tops - top) * totals)
    if sinks_ptr is not None:
        total += tl.exp(sink - top)
    cv = tl.arange(0, BLOCK_V)
    y = tl.zeros([BLOCK_V], tl.float32)
    for first in _range(0, used, COMBINED):
        split = first + tl.arange(0, COMBINED)
        powers = tl.exp(tl.load(sums_ptr + split * HEADS + head, mask=split < used, other=-float("inf")) - top)
        places = (split * HEADS + head)[:, None] * VALUE_WIDTH + cv[None, :]
        mixed = tl.load(mixed_ptr + places, mask=(split < used)[:, None] & (cv < VALUE_WIDTH)[None, :], other=0.0)
        y += tl.sum(mixed * powers[:, None], 0)
    tl.store(out_ptr + head * VALUE_WIDTH + cv, y / total, mask=cv < VALUE_WIDTH)
