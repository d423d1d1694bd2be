"""Attention of one token: its queries, keys and values are made, the cache is read, and heads are mixed.

`attend` runs one token's queries over the cache. With grouped queries it normalizes and rotates heads first, and writes
keys and values to the cache: each program makes its queries, and the split with the last position its key. With fewer
places than positions the cache is a ring: the token overwrites a position that no query sees any more. The twin is
`Operations.attend`.

The positions that a token sees are divided into splits; each split is a program, and the results of splits are
combined, by a launch of their own: the last program of the heads that share keys would read up to 2 MiB for them. Up to
16 query heads that share keys are in one tile. Positions are divided evenly whatever their number, so nothing depends
on values that only the host knows; splits without positions return at once. A layer whose window is shorter than the
context may keep its positions in a ring, and a head may have a sink, a logit without a value. In latent attention the
values are the first columns of the keys. Products are 3xTF32 on a GPU, which lose no more than float32 sums do.

A cache may have codes (`q8`, `q4`) in the rows that `runtime.model.caches.storage` describes, for grouped queries. A
launch of its own then rotates queries once more, by the signs and the Hadamard matrix of rows, and writes the token's
key and value as codes, a program a head: they depend on the largest value of a block. What is added up of values is
rotated back where splits are combined.

`enter_latent`, `attend` and `leave_latent` are one token's latent attention: queries move into the latent's space, and
mixes of latents move out of it. Both read the rows of `kv_b`, plain values or in the pack's row layout, as they lie:
for each head `nope` rows of W_k, then the rows of W_v. The twin is the latent attention of `runtime.model.attention`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.products import add_part, dot_part, load_part, load_x_part, store_part, zero_part
from moe_pack.runtime.gpu.kernels.rotation import hadamard_stage
from moe_pack.runtime.gpu.kernels.rows import lookup_for
from moe_pack.runtime.model.caches import Angles, RowStorage, block_sizes


class QkNorms(NamedTuple):
    """Weights of the norms of queries and keys: float32 [head_dim], or of the whole projection."""

    q: Tensor
    k: Tensor
    eps: float


class Entering(NamedTuple):
    """A token's queries, keys and values before they are normalized and rotated, and what that takes.

    `q`, `k`, `v`: float32 [heads * head_dim].   `norms`: of queries and keys, if there are any.   `is_norm_whole`: they
    norm the whole projection at once, not each head.   `angles`: of all positions, float32 [positions, rotary_dim / 2]
    each, from `Rope`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    norms: QkNorms | None
    is_norm_whole: bool
    angles: Angles
    interleaved: bool


@triton.jit
def _rotated_heads(
    x_ptr,
    heads,
    is_head,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_NORM_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
):
    """Returns some heads, normalized if there is a norm, and rotated: float32 [heads, BLOCK]."""
    c = tl.arange(0, BLOCK)
    other = partner(c, HALF, INTERLEAVED)
    mask, at = is_head[:, None] & (c < DIM)[None, :], heads[:, None] * DIM
    x = tl.load(x_ptr + at + c[None, :], mask=mask, other=0.0)
    x_other = tl.load(x_ptr + at + other[None, :], mask=mask, other=0.0)
    if norm_ptr is not None:
        if IS_NORM_WHOLE:  # each program sums the whole projection, 16 KiB at most, and saves a launch
            all_c = tl.arange(0, BLOCK_ALL)
            whole = tl.load(x_ptr + all_c, mask=all_c < HEADS * DIM, other=0.0)
            factor = tl.rsqrt(tl.sum(whole * whole) / (HEADS * DIM) + eps)
        else:
            at, factor = at * 0, tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * factor * tl.load(norm_ptr + at + c[None, :], mask=mask, other=0.0)
        x_other = x_other * factor * tl.load(norm_ptr + at + other[None, :], mask=mask, other=0.0)
    return rotate(x, x_other, c, cos_ptr, sin_ptr, HALF, INTERLEAVED)


@triton.jit
def partner(c, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Returns the column that each column `c` is rotated with; `c` itself past the `2 HALF` columns that rotate."""
    other = c ^ 1 if INTERLEAVED else tl.where(c < HALF, c + HALF, c - HALF)
    return tl.where(c < 2 * HALF, other, c)


@triton.jit
def rotate(x, x_other, c, cos_ptr, sin_ptr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Returns values `x` of columns `c`, rotated with `x_other` of their partners by a position's angles."""
    if INTERLEAVED:
        angle, is_first = c // 2, c % 2 == 0
    else:
        angle, is_first = c % HALF, c < HALF
    turns = c < 2 * HALF
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return x * cos + tl.where(is_first, -x_other, x_other) * sin


_BLOCK_H = 16  # the fewest rows that a product of tiles may have
_USUAL_WIDTH = 128  # keys of other widths are multiplied in pieces, so that registers do not spill
_PIECE = 64
_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
_MAX_SPLITS = 64  # more splits cost more time to combine
_COMBINED = 16  # splits that are read at once


def _interpreted_range(*bounds: Any) -> Iterable[int]:
    """Returns a range of the interpreter's scalars, which are arrays of one number for numpy before 2.4."""
    return range(*(int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else bound for bound in bounds))


_range = _interpreted_range if triton.knobs.runtime.interpret else tl.range


def _block_s(width: int) -> int:
    """Returns how many positions a tile has."""
    return 32 if width <= _USUAL_WIDTH else 16


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWorkspace:
    """Results of splits before they are combined; allocated once, on the device.

    `sums`: float32 [2, splits, heads], the largest score and the sum of powers.   `mixed`: float32 [splits, heads,
    width], values times powers.
    """

    sums: Tensor
    mixed: Tensor

    @classmethod
    def allocate(
        cls, num_heads: int, num_kv_heads: int, width: int, context_tokens: int, device: torch.device
    ) -> "AttentionWorkspace":
        """Allocates for values of `width`, and for as many splits as pay for `context_tokens`: a power of two."""
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
    workspace: AttentionWorkspace,
    out: Tensor,
    sinks: Tensor | None = None,
    entering: Entering | None = None,
    rows: RowStorage | None = None,
) -> None:
    """Writes each head's mix of values at positions up to `position`; only of the last `window`, if there is one.

    Args:    q: float32 [heads, width], rotated; written first if a token enters. Over codes rotated as these are.
             cache: keys and values, float32 or bfloat16 [kv heads, places, width]; keys contiguous, and values
             either contiguous too or the first columns of the keys. A position's place is the position modulo `places`.
             position: int32 [1], this token's, not checked against the cache's size.
             out: float32 [heads, values' width].   sinks: float32 [heads].
             entering: this token, whose rotated keys and values are written to the cache at `position`; if None, they
             are in the cache already.
             rows: how keys and values are stored, if they are codes: uint8 [kv heads, places, bytes], contiguous.
    """
    keys, values = cache
    coding = _coding(rows)
    (num_heads, width), (num_kv_heads, num_places, value_width) = q.shape, values.shape
    if rows is not None and coding.BITS:
        value_width = width
        if entering is not None:
            _enter_rows(entering, cache, position, coding, q)
            entering = None
    group, splits = num_heads // num_kv_heads, workspace.sums.shape[1]
    tiles = -(-group // _BLOCK_H)
    block_c = width if width == _USUAL_WIDTH else min(_PIECE, triton.next_power_of_2(width))
    # The many loads of blocks of odd sizes would spill registers.
    block_s = 16 if coding.BITS and not coding.HAS_WIDE_LOADS else _block_s(value_width)
    block_v = max(16, triton.next_power_of_2(value_width))
    norms = entering.norms if entering is not None else None
    cos, sin = (None, None) if entering is None else entering.angles
    _attend_kernel[(num_kv_heads * tiles, splits)](
        q, keys, values, position, sinks, workspace.sums, workspace.mixed, out, num_places, scale,
        None if entering is None else entering.q, None if entering is None else entering.k,
        None if entering is None else entering.v, None if norms is None else norms.q,
        None if norms is None else norms.k, cos, sin, 0.0 if norms is None else norms.eps,
        num_heads, group, tiles, width, value_width, keys.stride(1), values.stride(1), window or 0, splits,
        _BLOCK_H, block_s, max(16, block_c), block_v,
        0 if cos is None else cos.shape[1], entering is not None and entering.interleaved,
        entering is not None and entering.is_norm_whole, triton.next_power_of_2(num_heads * width), coding,
        num_warps=4 if width <= _USUAL_WIDTH else 8, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1 or coding.BITS:
        _combine_kernel[(num_heads,)](
            position, sinks, workspace.sums, workspace.mixed, out, num_heads, value_width, window or 0, splits,
            block_s, _COMBINED, block_v, coding, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def _seen(position_ptr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the first position that is seen, the position after the last, and how many a split takes."""
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
    new_q_ptr,
    new_k_ptr,
    new_v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
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
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_NORM_WHOLE: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    CODING: tl.constexpr,
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
    if new_q_ptr is not None:  # the cache's values have the keys' width
        cos_ptr += (stop - 1).to(tl.int64) * HALF
        sin_ptr += (stop - 1).to(tl.int64) * HALF
        # Every split of these heads writes the same values, and reads those that it wrote.
        new_q = _rotated_heads(
            new_q_ptr, heads, is_head, q_norm_ptr, cos_ptr, sin_ptr, eps, HEADS, WIDTH, HALF, INTERLEAVED,
            IS_NORM_WHOLE, BLOCK_V, BLOCK_ALL,
        )  # fmt: skip
        is_value = (cv < WIDTH)[None, :]
        tl.store(q_ptr + heads[:, None] * WIDTH + cv[None, :], new_q, mask=is_head[:, None] & is_value)
        if end == stop:
            one = kv_head + tl.zeros([1], tl.int32)
            new_k = _rotated_heads(
                new_k_ptr, one, one >= 0, k_norm_ptr, cos_ptr, sin_ptr, eps, HEADS // GROUP, WIDTH, HALF, INTERLEAVED,
                IS_NORM_WHOLE, BLOCK_V, BLOCK_ALL,
            )  # fmt: skip
            last = first + (stop - 1) % num_places
            tl.store(keys_ptr + last * stride_ks + cv[None, :], new_k, mask=is_value)
            new_v = tl.load(new_v_ptr + kv_head * WIDTH + cv, mask=cv < WIDTH)
            tl.store(values_ptr + last * stride_vs + cv, new_v, mask=cv < WIDTH)
        tl.debug_barrier()  # other threads wrote what is read below
    before = begin - begin % num_places  # the positions cross the ring's end once at most
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
            if CODING.BITS and CODING.HAS_WIDE_LOADS:
                k = _load_blocks(k_rows, is_seen, c_begin, BLOCK_C, CODING)
            else:
                k = _load_values(k_rows, c, is_seen[:, None] & is_c[None, :], CODING)
            scores = tl.dot(q, tl.trans(k), scores, input_precision="tf32x3")
        if CODING.BITS and CODING.HAS_WIDE_LOADS:
            v = _load_blocks(v_rows, is_seen, 0, BLOCK_V, CODING)
        else:
            v = _load_values(v_rows, cv, is_seen[:, None] & (cv < VALUE_WIDTH)[None, :], CODING)
        scores = tl.where(is_seen[None, :], scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        powers = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(powers, 1)
        mixed = tl.dot(powers, v, mixed * shrink[:, None], input_precision="tf32x3")
        top = new_top
    stored = is_head[:, None] & (cv < VALUE_WIDTH)[None, :]
    if SPLITS == 1 and CODING.BITS == 0:
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
    CODING: tl.constexpr,
):
    head = tl.program_id(0)
    start, stop, share = _seen(position_ptr, WINDOW, SPLITS, BLOCK_S)
    used = tl.cdiv(stop - start, share)  # the other splits wrote nothing
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
    y /= total
    if CODING.BITS:
        y = _hadamard(y, CODING) * _signs(cv)
    tl.store(out_ptr + head * VALUE_WIDTH + cv, y, mask=cv < VALUE_WIDTH)


# ---- rows of codes --------------------------------------------------------------------------------------------------


class Coding(NamedTuple):
    """How rows of a cache are codes; the names are those of kernels' constants.

    `BITS`: of a code; 0: rows are plain values.   `BLOCKS`, `EACH`: of a row, and values of a block.   `CODE_BYTES`: of
    a row's codes.   `ROW_BYTES`: of a row.   `HAS_WIDE_LOADS`: whether blocks are loaded whole, with a load for each
    scale: those of a power of two of values, except in long rows of 4 bits.   `STAGES`: of the Hadamard transform of a
    piece; `FACTOR`: its factor.
    """

    BITS: int
    BLOCKS: int = 0
    EACH: int = 1
    CODE_BYTES: int = 0
    ROW_BYTES: int = 0
    HAS_WIDE_LOADS: bool = False
    STAGES: int = 0
    FACTOR: float = 1.0


def _coding(rows: RowStorage | None) -> Coding:
    if rows is None or not rows.is_coded:
        return Coding(0)
    (width,) = rows.parts
    bits, (blocks, each) = (8 if rows.dtype == "q8" else 4), block_sizes(width)
    piece = width & -width
    assert rows.row_bytes % 2 == 0, "scales lie at whole multiples of 2 bytes"
    # With rows of 256 values of 4 bits, an H100 got others from wide loads than the interpreter (Triton 3.6).
    has_wide_loads = each & (each - 1) == 0 and not (bits == 4 and width > _USUAL_WIDTH)
    code_bytes, stages = blocks * each * bits // 8, piece.bit_length() - 1
    return Coding(bits, blocks, each, code_bytes, rows.row_bytes, has_wide_loads, stages, float(piece**-0.5))


def _enter_rows(entering: Entering, cache: tuple[Tensor, Tensor], position: Tensor, coding: Coding, q: Tensor) -> None:
    """Writes a token's rotated queries to `q`, and its key and value as codes to a cache."""
    (num_heads, width), (keys, values), norms, (cos, sin) = q.shape, cache, entering.norms, entering.angles
    num_kv_heads, num_places, _ = keys.shape
    _enter_rows_kernel[(num_heads + 2 * num_kv_heads,)](
        entering.q, entering.k, entering.v, None if norms is None else norms.q, None if norms is None else norms.k,
        cos, sin, 0.0 if norms is None else norms.eps, position, q, keys, values, num_places, num_heads, num_kv_heads,
        width, cos.shape[1], entering.interleaved, entering.is_norm_whole, triton.next_power_of_2(width),
        triton.next_power_of_2(num_heads * width), coding,
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _enter_rows_kernel(
    new_q_ptr,
    new_k_ptr,
    new_v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    position_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    num_places,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_NORM_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    CODING: tl.constexpr,
):
    number = tl.program_id(0)
    position = tl.load(position_ptr).to(tl.int64)
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    c = tl.arange(0, BLOCK)
    if number < HEADS:
        one = number + tl.zeros([1], tl.int32)
        q = _rotated_heads(
            new_q_ptr, one, one >= 0, q_norm_ptr, cos_ptr, sin_ptr, eps, HEADS, WIDTH, HALF, INTERLEAVED,
            IS_NORM_WHOLE, BLOCK, BLOCK_ALL,
        )  # fmt: skip
        turned = _hadamard(tl.reshape(q, [BLOCK]) * _signs(c), CODING)
        tl.store(q_ptr + number * WIDTH + c, turned, mask=c < WIDTH)
    else:
        kv_head = (number - HEADS) % KV_HEADS
        row = (kv_head.to(tl.int64) * num_places + position % num_places) * CODING.ROW_BYTES
        if number < HEADS + KV_HEADS:
            one = kv_head + tl.zeros([1], tl.int32)
            k = _rotated_heads(
                new_k_ptr, one, one >= 0, k_norm_ptr, cos_ptr, sin_ptr, eps, KV_HEADS, WIDTH, HALF, INTERLEAVED,
                IS_NORM_WHOLE, BLOCK, BLOCK_ALL,
            )  # fmt: skip
            _store_codes(keys_ptr + row, tl.reshape(k, [BLOCK]), c, CODING)
        else:
            v = tl.load(new_v_ptr + kv_head * WIDTH + c, mask=c < WIDTH, other=0.0)
            _store_codes(values_ptr + row, v, c, CODING)


@triton.jit
def _signs(c):
    """Returns the signs of columns, as `storage.rotation` has them."""
    # Bit 15 of a product depends on the low 16 bits of its factors; these are 2654435761's.
    return 1.0 - 2.0 * ((c * 31153 >> 15) & 1).to(tl.float32)


@triton.jit
def _hadamard(x, CODING: tl.constexpr):
    """Returns values, float32 [BLOCK], each piece multiplied by the Hadamard matrix; zeros behind them stay zeros."""
    BLOCK: tl.constexpr = x.shape[0]
    STAGES: tl.constexpr = CODING.STAGES
    for stage in tl.static_range(STAGES):
        x = hadamard_stage(x, BLOCK, 1 << stage)
    return x * CODING.FACTOR


@triton.jit
def _store_codes(row_ptr, x, c, CODING: tl.constexpr):
    """Writes a row of values, float32 [BLOCK] with zeros behind them; one that is not finite makes all of them NaN."""
    y = _hadamard(x * _signs(c), CODING)
    nan_or_zero = tl.sum(y * 0.0)  # a maximum leaves NaNs out
    block, in_block = c // CODING.EACH, c % CODING.EACH
    halves_ptr = (row_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))
    scales, minima = y * 0.0, y * 0.0
    BLOCKS: tl.constexpr = CODING.BLOCKS
    for b in tl.static_range(BLOCKS):
        own = block == b
        if CODING.BITS == 8:
            scale = tl.div_rn(tl.max(tl.where(own, tl.abs(y), 0.0)) + nan_or_zero, 127.0).to(tl.float16)
        else:
            least = (tl.min(tl.where(own, y, float("inf"))) + nan_or_zero).to(tl.float16)
            most = tl.max(tl.where(own, y, -float("inf")))
            scale = tl.div_rn(most - least.to(tl.float32), 15.0).to(tl.float16)
            tl.store(halves_ptr + BLOCKS + b, least)
            minima = tl.where(own, least.to(tl.float32), minima)
        tl.store(halves_ptr + b, scale)
        scales = tl.where(own, scale.to(tl.float32), scales)
    steps = (y - minima) * tl.div_rn(1.0, tl.where(scales > 0, scales, 1.0))
    codes = _rounded(tl.where(scales > 0, steps, 0.0))
    is_stored = c < BLOCKS * CODING.EACH
    if CODING.BITS == 8:
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int32)
        tl.store(row_ptr + c, (codes & 255).to(tl.uint8), mask=is_stored)
    else:
        codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
        half = CODING.EACH // 2
        is_low = (in_block < half) & is_stored
        high = tl.gather(codes, tl.where(is_low, c + half, c), 0)
        tl.store(row_ptr + block * half + in_block, (codes | high << 4).to(tl.uint8), mask=is_low)


@triton.jit
def _rounded(x):
    """Returns whole numbers, the nearest to values below 2^22, even ones for halves."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _load_values(rows_ptr, c, mask, CODING: tl.constexpr):
    """Returns some columns of rows, float32 [rows, columns]; of codes, what they stand for, not rotated back."""
    if CODING.BITS == 0:
        values = tl.load(rows_ptr[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        block, in_block = c // CODING.EACH, c % CODING.EACH
        halves_ptr = (rows_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))[:, None] + block[None, :]
        scales = tl.load(halves_ptr, mask=mask, other=0.0).to(tl.float32)
        if CODING.BITS == 8:
            codes = tl.load(rows_ptr[:, None] + c[None, :], mask=mask, other=0)
            values = codes.to(tl.int8, bitcast=True).to(tl.float32) * scales
        else:
            half = CODING.EACH // 2
            place, shift = block * half + in_block % half, in_block // half * 4
            codes = tl.load(rows_ptr[:, None] + place[None, :], mask=mask, other=0).to(tl.int32)
            minima = tl.load(halves_ptr + CODING.BLOCKS, mask=mask, other=0.0).to(tl.float32)
            values = ((codes >> shift[None, :]) & 15).to(tl.float32) * scales + minima
    return values


@triton.jit
def _load_blocks(rows_ptr, is_row, begin, COLUMNS: tl.constexpr, CODING: tl.constexpr):
    """Returns the same of `COLUMNS` columns from `begin` on, the first of a block, by blocks."""
    ROWS: tl.constexpr = rows_ptr.shape[0]
    EACH: tl.constexpr = CODING.EACH
    block = begin // EACH + tl.arange(0, COLUMNS // EACH)
    mask = is_row[:, None] & (block < CODING.BLOCKS)[None, :]
    halves_ptr = (rows_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))[:, None] + block[None, :]
    scales = tl.load(halves_ptr, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    if CODING.BITS == 8:
        places = (block * EACH)[:, None] + tl.arange(0, EACH)[None, :]
        codes = tl.load(rows_ptr[:, None, None] + places[None, :, :], mask=mask[:, :, None], other=0)
        values = codes.to(tl.int8, bitcast=True).to(tl.float32) * scales
    else:
        places = (block * (EACH // 2))[:, None] + tl.arange(0, EACH // 2)[None, :]
        pairs = tl.load(rows_ptr[:, None, None] + places[None, :, :], mask=mask[:, :, None], other=0)
        minima = tl.load(halves_ptr + CODING.BLOCKS, mask=mask, other=0.0).to(tl.float32)[:, :, None]
        low, high = (pairs & 15).to(tl.float32) * scales + minima, (pairs >> 4).to(tl.float32) * scales + minima
        values = tl.permute(tl.join(low, high), [0, 1, 3, 2])
    return tl.reshape(values, [ROWS, COLUMNS])


# ---- latent attention ------------------------------------------------------------------------------------------------

_ROWS = 16  # rows that are read at once


def enter_latent(
    projected: tuple[Tensor, Tensor],
    norm: Tensor,
    angles: Angles,
    interleaved: bool,
    position: Tensor,
    spec: LatentSpec,
    kv_b: StoredRows,
    moved: Tensor,
    keys: Tensor,
) -> None:
    """Writes one token's queries in the latent's space to `moved`, its latent and its rotated key to the cache.

    Args:    projected: queries, float32 [num_heads * (nope + rope)], not rotated; `kv_a`'s product, float32
             [rank + rope].   norm: float32 [rank], of the latent.
             angles: of all positions, float32 [positions, rope / 2] each, from `Rope`.
             position: int32 [1], not checked against the cache's size.   kv_b: with `rank` columns.
             moved: float32 [num_heads, rank + rope].
             keys: float32 or bfloat16 [1, context, rank + rope], contiguous.
    """
    q, kv = projected
    cos, sin = angles
    stored, part = kv_b.raw, kv_b.part
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    _enter_latent_kernel[(spec.num_heads + 1,)](
        q, kv, norm, cos, sin, position, stored, moved, keys, lookup_for(q.device, part), spec.lora_norm_eps,
        spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim, rank, rope, cos.shape[1], interleaved,
        kv_b.row_units, part, part.num_words, _ROWS, triton.next_power_of_2(rank), triton.next_power_of_2(rope),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def leave_latent(mixed: Tensor, spec: LatentSpec, kv_b: StoredRows, out: Tensor) -> None:
    """Writes each head's values, W_v times its mix of latents.

    Args:    mixed: float32 [num_heads, rank], from `attend`.   out: float32 [num_heads * v].
    """
    stored, part = kv_b.raw, kv_b.part
    _leave_latent_kernel[(spec.num_heads, triton.cdiv(spec.v_head_dim, _ROWS))](
        mixed, stored, out, lookup_for(mixed.device, part), spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank,
        kv_b.row_units, part, part.num_words, _ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _enter_latent_kernel(
    q_ptr,
    kv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    kv_b_ptr,
    moved_ptr,
    keys_ptr,
    lookup_ptr,
    eps,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    V: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNITS: tl.constexpr,
    PART: tl.constexpr,
    NW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    head = tl.program_id(0)
    position = tl.load(position_ptr).to(tl.int64)
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    c = tl.arange(0, BLOCK_ROPE)
    other = partner(c, HALF, INTERLEAVED)
    if head < HEADS:
        q_ptr += head * (NOPE + ROPE)
        moved_ptr += head * (RANK + ROPE)
        y, less, y_high = zero_part(PART, NW)
        for begin in range(0, NOPE, ROWS):
            row = begin + tl.arange(0, ROWS)
            live = row < NOPE
            units = (head * (NOPE + V) + row).to(tl.int64) * UNITS
            weights = tl.load(q_ptr + row, mask=live, other=0.0)
            codes = load_part(kv_b_ptr, units, live, PART, NW)
            y, less, y_high = add_part(y, less, y_high, kv_b_ptr, units, live, codes, weights, lookup_ptr, PART, NW)
        store_part(moved_ptr, y, less, y_high, PART, NW)
        x_ptr, out_ptr = q_ptr + NOPE, moved_ptr + RANK
        x = tl.load(x_ptr + c, mask=c < ROPE, other=0.0)
        x = rotate(x, tl.load(x_ptr + other, mask=c < ROPE, other=0.0), c, cos_ptr, sin_ptr, HALF, INTERLEAVED)
        tl.store(out_ptr + c, x, mask=c < ROPE)
    else:
        keys_ptr += position * (RANK + ROPE)
        all_c = tl.arange(0, BLOCK)
        latent = tl.load(kv_ptr + all_c, mask=all_c < RANK, other=0.0)
        weight = tl.load(norm_ptr + all_c, mask=all_c < RANK, other=0.0)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / RANK + eps) * weight
        tl.store(keys_ptr + all_c, latent, mask=all_c < RANK)
        x = tl.load(kv_ptr + RANK + c, mask=c < ROPE, other=0.0)
        x = rotate(x, tl.load(kv_ptr + RANK + other, mask=c < ROPE, other=0.0), c, cos_ptr, sin_ptr, HALF, INTERLEAVED)
        tl.store(keys_ptr + RANK + c, x, mask=c < ROPE)


@triton.jit
def _leave_latent_kernel(
    mixed_ptr,
    kv_b_ptr,
    out_ptr,
    lookup_ptr,
    NOPE: tl.constexpr,
    V: tl.constexpr,
    RANK: tl.constexpr,
    UNITS: tl.constexpr,
    PART: tl.constexpr,
    NW: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < V
    units = (head * (NOPE + V) + NOPE + row).to(tl.int64) * UNITS
    x, x_sums, x_high = load_x_part(mixed_ptr + head * RANK, PART, NW)
    codes = load_part(kv_b_ptr, units, live, PART, NW)
    y = dot_part(kv_b_ptr, units, live, codes, x, x_sums, x_high, lookup_ptr, PART, NW)
    tl.store(out_ptr + head * V + row, y, mask=live)
