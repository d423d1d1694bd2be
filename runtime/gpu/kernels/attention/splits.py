"""Attention of T rows, a token each: each reads the cache of its sequence up to its own position.

With grouped queries `attend` can norm and rotate heads first, and write keys and values to the cache (`entering`). With
fewer places than positions the cache is a ring: a token overwrites a position that no query sees any more. The twin is
`Operations.attend`. Each program takes a split of a row's positions, and a launch of its own combines the splits: the
last program of the heads that share keys would read up to 2 MiB for them. Up to 16 query heads that share keys are in
one tile. Positions are divided evenly whatever their number, so nothing depends on values that only the host knows, and
no row's result on other rows. A head may have a sink, a logit without a value. In latent attention the values are the
first columns of the keys, or the first part of their rows. Products are 3xTF32 on a GPU, which lose no more than
float32 sums do. Rows of codes are read as `cached_rows` says.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.attention.cached_rows import (
    Coding,
    RowPositions,
    StoredAs,
    block_width,
    codings,
    load_columns,
    stacked,
    turned_back,
)
from moe_pack.runtime.gpu.kernels.attention.entering import Entering, Form, enter_heads, enter_row, new_of
from moe_pack.runtime.gpu.kernels.grids import Registers, dot_precision, launch_options, wait_for_earlier, wave
from moe_pack.runtime.gpu.kernels.rows import loop_range


class View(NamedTuple):
    """The positions that rows see, and how scores become weights."""

    scale: float  # multiplies query times key
    window: int | None = None  # the most positions that a row sees, itself included; None: all before it
    # The window does not slide: a row sees positions back to the last multiple of `window`.
    chunked: bool = False
    sinks: Tensor | None = None  # float32 [heads], logits without a value
    # bool or uint8 [T, m, places], contiguous: 0 hides a position from a row. m divides the kv heads, and each of m
    # has an equal share of them. A row sees its own position, and the cache is no ring.
    seen: Tensor | None = None


_BLOCK_H = 16  # the fewest rows that a product of tiles may have
_USUAL_WIDTH = 128  # keys of other widths are multiplied in pieces, so that registers do not spill
_PIECE = 64
_MAX_SPLITS = 128  # more splits cost more time to combine
_COMBINED = tl.constexpr(4096)  # values of splits that are read at once


def _block_s(width: int) -> int:
    return 32 if width <= _USUAL_WIDTH else 16


def _num_warps(width: int) -> int:
    return 4 if width <= _USUAL_WIDTH else 8


def _tile_bytes(width: int) -> int:
    """Returns the shared memory of a program: two tiles of keys and of values in 16 bits, and a tile of queries."""
    return 2 * 2 * 2 * _block_s(width) * width + 2 * _BLOCK_H * _USUAL_WIDTH


class AttentionWorkspace(NamedTuple):
    """Results of splits before they are combined; allocated once, on the device."""

    sums: Tensor  # float32 [T, 2, splits, heads], the largest score and the sum of powers
    mixed: Tensor  # float32 [T, splits, heads, width], values times powers

    @classmethod
    def allocate(
        cls,
        num_heads: int,
        num_kv_heads: int,
        width: int,
        context_tokens: int,
        device: torch.device,
        num_rows: int = 1,
    ) -> "AttentionWorkspace":
        """Allocates for values of `width`, and for as many splits as pay for `context_tokens`: a wave of programs.

        Their number is that of a row alone: sums do not depend on `num_rows`, the most rows of a launch.
        """
        tiles = num_kv_heads * -(-num_heads // num_kv_heads // _BLOCK_H)
        num_programs = wave(Registers.ATTEND, _num_warps(width), _tile_bytes(width))
        splits = min(_MAX_SPLITS, max(1, num_programs // tiles), -(-context_tokens // _block_s(width)))
        sums = torch.zeros((num_rows, 2, splits, num_heads), device=device)
        return cls(sums, torch.zeros((num_rows, splits, num_heads, width), device=device))


class _Seen(NamedTuple):
    """A mask as kernels take it."""

    bytes: Tensor | None  # uint8 [T, m, places]
    num_places: int


class _Shape(NamedTuple):
    num_heads: int
    group: int  # query heads that share keys
    tiles: int  # of these heads
    width: int
    window: int  # 0: all positions are seen
    chunked: bool
    shares: int  # of the kv heads, each with a mask of its own; 0: there is none
    splits: int
    block_h: int
    block_s: int
    block_c: int
    form: Form | None  # of the heads of a row that enters
    k: Coding
    k_more: Coding | None  # of the second part of keys
    v: Coding
    is_alone: bool  # there is one row


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    at: RowPositions,
    view: View,
    workspace: AttentionWorkspace,
    out: Tensor,
    entering: Entering | None = None,
    rows: StoredAs | None = None,
) -> None:
    """Writes each row's and head's mix of the values that the row sees, at positions up to its own.

    Args:    q: float32 [T, heads, width], contiguous, rotated; written first if rows enter. Over codes rotated as these
             are (`entering.enter`, `latent.enter_latent`).
             cache: stacked keys and values, float32 or bfloat16 [num_slots, kv heads, places, n]. A slot's rows follow
             one another; values may be the first columns of the keys. A position's place is the position modulo
             `places`. A ring has places for the window and for T - 1 positions more.
             workspace: for T rows or more.   out: float32 [T, heads, values' width].
             entering: the rows, whose rotated keys and values are written to the cache first; if None, they are in the
             cache already.
             rows: how keys and values are stored, if they are codes: uint8 [num_slots, kv heads, places, bytes]. Both
             may be one tensor; the values are then the first part of its rows.
    """
    new = form = None
    if entering is not None:
        if _enters_first(len(q), rows):
            enter_heads(entering, q, cache, at, rows)
        else:
            new, form = new_of(entering, q.shape[2])
    keys, values = cache
    shape, seen = _shape(q, cache, view, workspace.sums.shape[2], form, rows), _Seen(None, 0)
    if view.seen is not None:
        assert view.seen.is_contiguous(), "rows of a mask follow one another"
        seen = _Seen(view.seen.view(torch.uint8), view.seen.shape[2])
    _attend_kernel[(keys.shape[1] * shape.tiles, shape.splits, len(q))](
        q, stacked(keys, values), at, view.sinks, seen, workspace, out, new, view.scale, shape,
        num_warps=_num_warps(shape.v.WIDTH), num_stages=2, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip
    if shape.splits > 1 or shape.v.BITS:
        shape = shape._replace(form=None)  # this kernel is the same for all of them
        _combine_kernel[(shape.num_heads, len(q))](
            at.positions, view.sinks, workspace, out, shape, num_warps=4, enable_fp_fusion=True, **launch_options()
        )


def _enters_first(num_rows: int, rows: StoredAs | None) -> bool:
    """Returns whether rows enter in a launch of their own.

    A row of codes does, and several rows do, because they may be drafts that read each other's keys.
    """
    return num_rows > 1 or (rows is not None and rows[0].is_coded)


def _shape(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    view: View,
    splits: int,
    form: Form | None,
    rows: StoredAs | None,
) -> _Shape:
    (_, num_heads, width), (keys, values) = q.shape, cache
    num_kv_heads, (k_rows, v_rows) = keys.shape[1], rows or (None, None)
    value_width = values.shape[3] if v_rows is None or not v_rows.is_coded else v_rows.parts[0]
    (k, k_more), (v, _) = codings(keys, width, k_rows), codings(values, value_width, v_rows)
    group, shares = num_heads // num_kv_heads, 0 if view.seen is None else view.seen.shape[1]
    block_c = k.WIDTH if k.WIDTH == _USUAL_WIDTH else min(_PIECE, triton.next_power_of_2(k.WIDTH))
    # The many loads of blocks of odd sizes would spill registers.
    is_narrow = any(each is not None and each.BITS and not each.HAS_WIDE_LOADS for each in (k, k_more, v))
    block_s = 16 if is_narrow else _block_s(value_width)
    return _Shape(
        num_heads, group, -(-group // _BLOCK_H), width, view.window or 0, view.chunked, shares, splits, _BLOCK_H,
        block_s, max(16, block_c), form, k, k_more, v, len(q) == 1,
    )  # fmt: skip


@triton.jit
def _seen(position_ptr, SHAPE: tl.constexpr):
    """Returns the first position that is seen, the position after the last, and how many a split takes."""
    stop = tl.load(position_ptr) + 1
    start = stop * 0
    if SHAPE.chunked:
        start = (stop - 1) // SHAPE.window * SHAPE.window
    elif SHAPE.window:
        start = tl.maximum(stop - SHAPE.window, 0)
    share = tl.cdiv(tl.cdiv(stop - start, SHAPE.block_s), SHAPE.splits) * SHAPE.block_s
    return start, stop, share


@triton.jit
def _attend_kernel(q_ptr, cache, at, sinks_ptr, seen, workspace, out_ptr, new, scale, SHAPE: tl.constexpr):
    # A program takes a split of the positions that a tile of a row's heads sees.
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    BLOCK_H: tl.constexpr = SHAPE.block_h
    BLOCK_S: tl.constexpr = SHAPE.block_s
    BLOCK_V: tl.constexpr = block_width(V.WIDTH)
    kv_head, tile, split = tl.program_id(0) // SHAPE.tiles, tl.program_id(0) % SHAPE.tiles, tl.program_id(1)
    row = 0 if SHAPE.is_alone else tl.program_id(2)
    in_group = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = in_group < SHAPE.group
    heads = kv_head * SHAPE.group + in_group
    wait_for_earlier()
    start, stop, share = _seen(at.positions + row, SHAPE)
    first = tl.load(at.slots + row).to(tl.int64) * cache.slot_rows
    begin = start + split * share
    if begin >= stop:
        return
    end = tl.minimum(begin + share, stop)
    cv = tl.arange(0, BLOCK_V)
    first += kv_head.to(tl.int64) * cache.num_places
    q_ptr += row * (SHAPE.num_heads * SHAPE.width)
    # The split with the last position also enters the key and value of a row alone.
    if SHAPE.form is not None:
        enter_row(q_ptr, cache, first, new, heads, is_head, kv_head, stop - 1, end == stop, SHAPE)
        tl.debug_barrier()  # other threads wrote what is read below
    q_ptr += heads[:, None] * SHAPE.width
    if SHAPE.shares:
        share_of_heads = kv_head // (SHAPE.num_heads // SHAPE.group // SHAPE.shares)
        seen_ptr = seen.bytes + (row * SHAPE.shares + share_of_heads).to(tl.int64) * seen.num_places
    before = begin - begin % cache.num_places  # the positions cross the ring's end once at most
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for tile_begin in loop_range(begin, end, BLOCK_S):
        # Multiplies a tile's keys, and adds its values, times powers of the scores.
        s = tile_begin + tl.arange(0, BLOCK_S)
        is_seen = s < end
        if SHAPE.shares:
            is_seen = is_seen & (tl.load(seen_ptr + s, mask=is_seen, other=0) != 0)
        place = s - before
        place = first + tl.where(place < cache.num_places, place, place - cache.num_places)
        rows_ptr = cache.k + place * K.STRIDE
        scores = tl.zeros([BLOCK_H, BLOCK_S], tl.float32)
        scores = _add_scores(scores, q_ptr, is_head, rows_ptr, is_seen, SHAPE, K)
        if SHAPE.k_more is not None:
            MORE: tl.constexpr = SHAPE.k_more
            scores = _add_scores(scores, q_ptr + K.WIDTH, is_head, rows_ptr, is_seen, SHAPE, MORE)
        v = load_columns(cache.v + place * V.STRIDE, is_seen, 0, BLOCK_V, V)
        scores = tl.where(is_seen[None, :], scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # The sums shrink where a score is the largest so far. No score may be one: then all powers are 0.
        largest = new_top
        if SHAPE.shares:
            largest = tl.where(new_top == -float("inf"), 0.0, new_top)
        powers = tl.exp(scores - largest[:, None])
        shrink = tl.exp(top - largest)
        total = total * shrink + tl.sum(powers, 1)
        mixed = tl.dot(powers, v, mixed * shrink[:, None], input_precision=dot_precision())
        top = new_top
    # A single split ends here; several are combined by a launch of their own.
    stored = is_head[:, None] & (cv < V.WIDTH)[None, :]
    if SHAPE.splits == 1 and V.BITS == 0:
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0)
            new_top = tl.maximum(top, sinks)
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.exp(sinks - new_top)
            mixed *= shrink[:, None]
        places = (row * SHAPE.num_heads + heads)[:, None] * V.WIDTH + cv[None, :]
        tl.store(out_ptr + places, mixed / total[:, None], mask=stored)
    else:
        place, each = split * SHAPE.num_heads + heads, SHAPE.splits * SHAPE.num_heads
        sums_ptr = workspace.sums + row * (2 * each)
        tl.store(sums_ptr + place, top, mask=is_head)
        tl.store(sums_ptr + each + place, total, mask=is_head)
        mixed_ptr = workspace.mixed + row * (each * V.WIDTH)
        tl.store(mixed_ptr + place[:, None] * V.WIDTH + cv[None, :], mixed, mask=stored)


@triton.jit
def _add_scores(scores, q_ptr, is_head, rows_ptr, is_seen, SHAPE: tl.constexpr, CODING: tl.constexpr):
    """Adds the products of queries and a part of rows, a piece of their columns at a time: float32 [heads, rows]."""
    BLOCK_C: tl.constexpr = SHAPE.block_c
    for c_begin in range(0, CODING.WIDTH, BLOCK_C):
        c = c_begin + tl.arange(0, BLOCK_C)
        is_q = is_head[:, None] & (c < CODING.WIDTH)[None, :]
        q = tl.load(q_ptr + c[None, :], mask=is_q, other=0.0)
        k = load_columns(rows_ptr, is_seen, c_begin, BLOCK_C, CODING)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=dot_precision())
    return scores


@triton.jit
def _combine_kernel(position_ptr, sinks_ptr, workspace, out_ptr, SHAPE: tl.constexpr):
    V: tl.constexpr = SHAPE.v
    HEADS: tl.constexpr = SHAPE.num_heads
    WIDTH: tl.constexpr = V.WIDTH
    head, row = tl.program_id(0), 0 if SHAPE.is_alone else tl.program_id(1)
    sums_ptr = workspace.sums + row * (2 * SHAPE.splits * HEADS)
    mixed_ptr = workspace.mixed + row * (SHAPE.splits * HEADS * WIDTH)
    wait_for_earlier()
    start, stop, share = _seen(position_ptr + row, SHAPE)
    used = tl.cdiv(stop - start, share)  # the other splits wrote nothing
    # The largest score of all splits and of the sink, and the sum of all powers.
    splits = tl.arange(0, triton.next_power_of_2(SHAPE.splits))
    tops = tl.load(sums_ptr + splits * HEADS + head, mask=splits < used, other=-float("inf"))
    totals = tl.load(sums_ptr + (SHAPE.splits + splits) * HEADS + head, mask=splits < used, other=0.0)
    top = tl.max(tops)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp(tops - top) * totals)
    if sinks_ptr is not None:
        total += tl.exp(sink - top)
    # Adds the splits' mixes, some at a time.
    BLOCK_V: tl.constexpr = block_width(WIDTH)
    AT_ONCE: tl.constexpr = _COMBINED // BLOCK_V
    cv = tl.arange(0, BLOCK_V)
    y = tl.zeros([BLOCK_V], tl.float32)
    for first in loop_range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        of_split = tl.load(sums_ptr + split * HEADS + head, mask=split < used, other=-float("inf"))
        powers = tl.exp(of_split - top)
        places = (split * HEADS + head)[:, None] * WIDTH + cv[None, :]
        mixed = tl.load(mixed_ptr + places, mask=(split < used)[:, None] & (cv < WIDTH)[None, :], other=0.0)
        y += tl.sum(mixed * powers[:, None], 0)
    y /= total
    tl.store(out_ptr + (row * HEADS + head) * WIDTH + cv, turned_back(y, cv, V), mask=cv < WIDTH)
