"""Attention of one token: its queries, keys and values are made, the cache is read, and heads are mixed.

`attend` runs one token's queries over the cache. With grouped queries it norms and rotates heads first, and writes the
token's key and value to the cache. With fewer places than positions the cache is a ring: the token overwrites a
position that no query sees any more. The twin is `Operations.attend`.

Each program takes a split of the positions, and a launch of its own combines the splits: the last program of the heads
that share keys would read up to 2 MiB for them. Up to 16 query heads that share keys are in one tile. Positions are
divided evenly whatever their number, so nothing depends on values that only the host knows. A head may have a sink, a
logit without a value. In latent attention the values are the first columns of the keys. Products are 3xTF32 on a GPU,
which lose no more than float32 sums do.

A cache of grouped queries may have codes (`q8`, `q4`) in the rows of `runtime.model.caches.storage`. A launch of its
own then rotates queries once more, by the signs and the Hadamard matrix of rows, and writes the token's key and value
as codes, a program a head. The sum of values is rotated back when splits are combined.

`enter_latent`, `attend` and `leave_latent` are one token's latent attention. They read the rows of `kv_b`, plain values
or in the pack's row layout, as they lie: for each head `nope` rows of W_k, then the rows of W_v. The twin is the latent
attention of `runtime.model.attention`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.grids import Registers, launch_options, wait_for_earlier, wave
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.products import add_part, dot_part, load_part, load_x_part, store_part, zero_part
from moe_pack.runtime.gpu.kernels.rotation import hadamard_stage
from moe_pack.runtime.gpu.kernels.rows import RowPart, lookup_for, loop_range
from moe_pack.runtime.model.caches import Angles, RowStorage, block_sizes


class QkNorms(NamedTuple):
    """Weights of the norms of queries and keys: float32 [head_dim], or of the whole projection."""

    q: Tensor
    k: Tensor
    eps: float


class Entering(NamedTuple):
    """A token's queries, keys and values before they are normalized and rotated, and how that is done."""

    q: Tensor  # float32 [heads * head_dim], as `k` and `v`
    k: Tensor
    v: Tensor
    norms: QkNorms | None  # of queries and keys, if there are any
    is_norm_whole: bool  # they norm the whole projection at once, not each head
    angles: Angles  # of all positions, float32 [positions, rotary_dim / 2] each, from `Rope`
    interleaved: bool


class _New(NamedTuple):
    """A token's queries, keys and values, and the tensors that norm and rotate them, as kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    norms: QkNorms | None
    angles: tuple[Tensor, Tensor]


class _Form(NamedTuple):
    """The constants by which a head is normed and rotated."""

    width: int
    half: int  # of the columns that rotate
    interleaved: bool
    is_norm_whole: bool


def _new(entering: Entering, width: int) -> tuple[_New, _Form]:
    cos, sin = entering.angles
    form = _Form(width, cos.shape[1], entering.interleaved, entering.is_norm_whole)
    return _New(entering.q, entering.k, entering.v, entering.norms, (cos, sin)), form


@triton.jit
def _rotated_heads(x_ptr, heads, is_head, norm_ptr, eps, angles, NUM_HEADS: tl.constexpr, FORM: tl.constexpr):
    """Returns some heads, normalized if there is a norm, and rotated: float32 [heads, width to a power of two].

    Args:    angles: cosines and sines of the position.
    """
    DIM: tl.constexpr = FORM.width
    c = tl.arange(0, _block_v(DIM))
    other = partner(c, FORM.half, FORM.interleaved)
    mask, at = is_head[:, None] & (c < DIM)[None, :], heads[:, None] * DIM
    x = tl.load(x_ptr + at + c[None, :], mask=mask, other=0.0)
    x_other = tl.load(x_ptr + at + other[None, :], mask=mask, other=0.0)
    if norm_ptr is not None:
        if FORM.is_norm_whole:  # each program sums the whole projection, 16 KiB at most, and saves a launch
            all_c = tl.arange(0, triton.next_power_of_2(NUM_HEADS * DIM))
            whole = tl.load(x_ptr + all_c, mask=all_c < NUM_HEADS * DIM, other=0.0)
            factor = tl.rsqrt(tl.sum(whole * whole) / (NUM_HEADS * DIM) + eps)
        else:
            at, factor = at * 0, tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * factor * tl.load(norm_ptr + at + c[None, :], mask=mask, other=0.0)
        x_other = x_other * factor * tl.load(norm_ptr + at + other[None, :], mask=mask, other=0.0)
    return rotate(x, x_other, c, angles[0], angles[1], FORM.half, FORM.interleaved)


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
_MAX_SPLITS = 128  # more splits cost more time to combine
_COMBINED = tl.constexpr(4096)  # values of splits that are read at once


def _block_s(width: int) -> int:
    return 32 if width <= _USUAL_WIDTH else 16


def _num_warps(width: int) -> int:
    return 4 if width <= _USUAL_WIDTH else 8


def _tile_bytes(width: int) -> int:
    """Returns the shared memory of a program: two tiles of keys and of values in 16 bits, and a tile of queries."""
    return 2 * 2 * 2 * _block_s(width) * width + 2 * _BLOCK_H * _USUAL_WIDTH


@triton.constexpr_function
def _block_v(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


class AttentionWorkspace(NamedTuple):
    """Results of splits before they are combined; allocated once, on the device."""

    sums: Tensor  # float32 [2, splits, heads], the largest score and the sum of powers
    mixed: Tensor  # float32 [splits, heads, width], values times powers

    @classmethod
    def allocate(
        cls, num_heads: int, num_kv_heads: int, width: int, context_tokens: int, device: torch.device
    ) -> "AttentionWorkspace":
        """Allocates for values of `width`, and for as many splits as pay for `context_tokens`: a wave of programs."""
        tiles = num_kv_heads * -(-num_heads // num_kv_heads // _BLOCK_H)
        num_programs = wave(Registers.ATTEND, _num_warps(width), _tile_bytes(width))
        splits = min(_MAX_SPLITS, max(1, num_programs // tiles), -(-context_tokens // _block_s(width)))
        sums = torch.zeros((2, splits, num_heads), device=device)
        return cls(sums, torch.zeros((splits, num_heads, width), device=device))


class _Cache(NamedTuple):
    """A layer's keys and values, as kernels take them; `values` is a field of Triton's own tuples."""

    k: Tensor
    v: Tensor
    num_places: int


class _Shape(NamedTuple):
    num_heads: int
    group: int  # query heads that share keys
    tiles: int  # of these heads
    width: int
    value_width: int
    key_stride: int
    value_stride: int
    window: int  # 0: all positions are seen
    splits: int
    block_h: int
    block_s: int
    block_c: int
    form: _Form | None  # of the heads of a token that enters
    coding: "Coding"


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
    new = form = None
    if coding.BITS:
        value_width = width
    if entering is not None:
        new, form = _new(entering, width)
        if coding.BITS:
            _enter_rows_kernel[(num_heads + 2 * num_kv_heads,)](
                new, position, q, _Cache(keys, values, num_places), num_heads, num_kv_heads, form, coding,
                num_warps=1, enable_fp_fusion=True, **launch_options(),
            )  # fmt: skip
            new = form = None
    group, splits = num_heads // num_kv_heads, workspace.sums.shape[1]
    block_c = width if width == _USUAL_WIDTH else min(_PIECE, triton.next_power_of_2(width))
    # The many loads of blocks of odd sizes would spill registers.
    block_s = 16 if coding.BITS and not coding.HAS_WIDE_LOADS else _block_s(value_width)
    shape = _Shape(
        num_heads, group, -(-group // _BLOCK_H), width, value_width, keys.stride(1), values.stride(1), window or 0,
        splits, _BLOCK_H, block_s, max(16, block_c), form, coding,
    )  # fmt: skip
    _attend_kernel[(num_kv_heads * shape.tiles, splits)](
        q, _Cache(keys, values, num_places), position, sinks, workspace, out, new, scale, shape,
        num_warps=_num_warps(width), num_stages=2, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip
    if splits > 1 or coding.BITS:
        shape = shape._replace(form=None)  # this kernel is the same for all of them
        _combine_kernel[(num_heads,)](
            position, sinks, workspace, out, shape, num_warps=4, enable_fp_fusion=True, **launch_options()
        )


@triton.jit
def _seen(position_ptr, SHAPE: tl.constexpr):
    """Returns the first position that is seen, the position after the last, and how many a split takes."""
    stop = tl.load(position_ptr) + 1
    start = stop * 0
    if SHAPE.window:
        start = tl.maximum(stop - SHAPE.window, 0)
    share = tl.cdiv(tl.cdiv(stop - start, SHAPE.block_s), SHAPE.splits) * SHAPE.block_s
    return start, stop, share


@triton.jit
def _attend_kernel(q_ptr, cache, position_ptr, sinks_ptr, workspace, out_ptr, new, scale, SHAPE: tl.constexpr):
    # A program takes a split of the positions that a tile of heads sees.
    CODING: tl.constexpr = SHAPE.coding
    BLOCK_H: tl.constexpr = SHAPE.block_h
    BLOCK_S: tl.constexpr = SHAPE.block_s
    BLOCK_V: tl.constexpr = _block_v(SHAPE.value_width)
    kv_head, tile, split = tl.program_id(0) // SHAPE.tiles, tl.program_id(0) % SHAPE.tiles, tl.program_id(1)
    in_group = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = in_group < SHAPE.group
    heads = kv_head * SHAPE.group + in_group
    wait_for_earlier()
    start, stop, share = _seen(position_ptr, SHAPE)
    begin = start + split * share
    if begin >= stop:
        return
    end = tl.minimum(begin + share, stop)
    cv = tl.arange(0, BLOCK_V)
    first = kv_head.to(tl.int64) * cache.num_places
    # The split with the last position also enters the token's key and value.
    if SHAPE.form is not None:
        _enter(q_ptr, cache, new, heads, is_head, kv_head, stop - 1, end == stop, SHAPE)
        tl.debug_barrier()  # other threads wrote what is read below
    before = begin - begin % cache.num_places  # the positions cross the ring's end once at most
    top = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for tile_begin in loop_range(begin, end, BLOCK_S):
        # Multiplies a tile's keys, a piece of their columns at a time.
        s = tile_begin + tl.arange(0, BLOCK_S)
        is_seen = s < end
        place = s - before
        place = first + tl.where(place < cache.num_places, place, place - cache.num_places)
        scores = tl.zeros([BLOCK_H, BLOCK_S], tl.float32)
        for c_begin in range(0, SHAPE.width, SHAPE.block_c):
            c = c_begin + tl.arange(0, SHAPE.block_c)
            is_q = is_head[:, None] & (c < SHAPE.width)[None, :]
            q = tl.load(q_ptr + heads[:, None] * SHAPE.width + c[None, :], mask=is_q, other=0.0)
            k = _load_columns(cache.k + place * SHAPE.key_stride, is_seen, c_begin, SHAPE.width, SHAPE.block_c, CODING)
            scores = tl.dot(q, tl.trans(k), scores, input_precision="tf32x3")
        # Adds its values, times powers of the scores; the sums shrink where a score is the largest so far.
        v = _load_columns(cache.v + place * SHAPE.value_stride, is_seen, 0, SHAPE.value_width, BLOCK_V, CODING)
        scores = tl.where(is_seen[None, :], scores * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        powers = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(powers, 1)
        mixed = tl.dot(powers, v, mixed * shrink[:, None], input_precision="tf32x3")
        top = new_top
    # A single split ends here; several are combined by a launch of their own.
    stored = is_head[:, None] & (cv < SHAPE.value_width)[None, :]
    if SHAPE.splits == 1 and CODING.BITS == 0:
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0)
            new_top = tl.maximum(top, sinks)
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.exp(sinks - new_top)
            mixed *= shrink[:, None]
        places = heads[:, None] * SHAPE.value_width + cv[None, :]
        tl.store(out_ptr + places, mixed / total[:, None], mask=stored)
    else:
        place = split * SHAPE.num_heads + heads
        tl.store(workspace.sums + place, top, mask=is_head)
        tl.store(workspace.sums + SHAPE.splits * SHAPE.num_heads + place, total, mask=is_head)
        tl.store(workspace.mixed + place[:, None] * SHAPE.value_width + cv[None, :], mixed, mask=stored)


@triton.jit
def _enter(q_ptr, cache, new, heads, is_head, kv_head, position, is_last, SHAPE: tl.constexpr):
    """Writes a tile's rotated queries, and if `is_last` the token's key and value."""
    FORM: tl.constexpr = SHAPE.form
    WIDTH: tl.constexpr = SHAPE.width
    c = tl.arange(0, _block_v(WIDTH))
    is_value = (c < WIDTH)[None, :]
    q_norm_ptr, k_norm_ptr, eps = None, None, 0.0
    if new.norms is not None:
        q_norm_ptr, k_norm_ptr, eps = new.norms
    # Every split of these heads writes the same queries, and reads those that it wrote.
    turn = position.to(tl.int64) * FORM.half
    angles = (new.angles[0] + turn, new.angles[1] + turn)
    q = _rotated_heads(new.q, heads, is_head, q_norm_ptr, eps, angles, SHAPE.num_heads, FORM)
    tl.store(q_ptr + heads[:, None] * WIDTH + c[None, :], q, mask=is_head[:, None] & is_value)
    if is_last:
        one = kv_head + tl.zeros([1], tl.int32)
        NUM_KV_HEADS: tl.constexpr = SHAPE.num_heads // SHAPE.group
        k = _rotated_heads(new.k, one, one >= 0, k_norm_ptr, eps, angles, NUM_KV_HEADS, FORM)
        place = kv_head.to(tl.int64) * cache.num_places + position % cache.num_places
        tl.store(cache.k + place * SHAPE.key_stride + c[None, :], k, mask=is_value)
        v = tl.load(new.v + kv_head * WIDTH + c, mask=c < WIDTH)
        tl.store(cache.v + place * SHAPE.value_stride + c, v, mask=c < WIDTH)


@triton.jit
def _combine_kernel(position_ptr, sinks_ptr, workspace, out_ptr, SHAPE: tl.constexpr):
    CODING: tl.constexpr = SHAPE.coding
    HEADS: tl.constexpr = SHAPE.num_heads
    WIDTH: tl.constexpr = SHAPE.value_width
    head = tl.program_id(0)
    wait_for_earlier()
    start, stop, share = _seen(position_ptr, SHAPE)
    used = tl.cdiv(stop - start, share)  # the other splits wrote nothing
    # The largest score of all splits and of the sink, and the sum of all powers.
    splits = tl.arange(0, triton.next_power_of_2(SHAPE.splits))
    tops = tl.load(workspace.sums + splits * HEADS + head, mask=splits < used, other=-float("inf"))
    totals = tl.load(workspace.sums + (SHAPE.splits + splits) * HEADS + head, mask=splits < used, other=0.0)
    top = tl.max(tops)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp(tops - top) * totals)
    if sinks_ptr is not None:
        total += tl.exp(sink - top)
    # Adds the splits' mixes, some at a time.
    BLOCK_V: tl.constexpr = _block_v(WIDTH)
    AT_ONCE: tl.constexpr = _COMBINED // BLOCK_V
    cv = tl.arange(0, BLOCK_V)
    y = tl.zeros([BLOCK_V], tl.float32)
    for first in loop_range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        of_split = tl.load(workspace.sums + split * HEADS + head, mask=split < used, other=-float("inf"))
        powers = tl.exp(of_split - top)
        places = (split * HEADS + head)[:, None] * WIDTH + cv[None, :]
        mixed = tl.load(workspace.mixed + places, mask=(split < used)[:, None] & (cv < WIDTH)[None, :], other=0.0)
        y += tl.sum(mixed * powers[:, None], 0)
    y /= total
    # Values of codes are rotated: their sum is rotated back.
    if CODING.BITS:
        y = _hadamard(y, CODING) * _signs(cv)
    tl.store(out_ptr + head * WIDTH + cv, y, mask=cv < WIDTH)


# ---- rows of codes --------------------------------------------------------------------------------------------------


class Coding(NamedTuple):
    """How rows of a cache are codes; the names are those of kernels' constants."""

    BITS: int  # of a code; 0: rows are plain values
    BLOCKS: int = 0  # of a row
    EACH: int = 1  # values of a block
    CODE_BYTES: int = 0  # of a row's codes
    ROW_BYTES: int = 0
    # Whether blocks are loaded whole, with a load for each scale: those of a power of two of values, except in long
    # rows of 4 bits.
    HAS_WIDE_LOADS: bool = False
    STAGES: int = 0  # of the Hadamard transform of a piece
    FACTOR: float = 1.0  # of that transform


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


@triton.jit
def _enter_rows_kernel(
    new,
    position_ptr,
    q_ptr,
    cache,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    FORM: tl.constexpr,
    CODING: tl.constexpr,
):
    # A program takes a head: of the queries, then of the keys, then of the values.
    WIDTH: tl.constexpr = FORM.width
    number = tl.program_id(0)
    wait_for_earlier()
    position = tl.load(position_ptr).to(tl.int64)
    angles = (new.angles[0] + position * FORM.half, new.angles[1] + position * FORM.half)
    c = tl.arange(0, _block_v(WIDTH))
    q_norm_ptr, k_norm_ptr, eps = None, None, 0.0
    if new.norms is not None:
        q_norm_ptr, k_norm_ptr, eps = new.norms
    if number < HEADS:
        # Queries are rotated as the cache's rows are, so that products are those of plain keys.
        one = number + tl.zeros([1], tl.int32)
        q = _rotated_heads(new.q, one, one >= 0, q_norm_ptr, eps, angles, HEADS, FORM)
        turned = _hadamard(tl.reshape(q, c.shape) * _signs(c), CODING)
        tl.store(q_ptr + number * WIDTH + c, turned, mask=c < WIDTH)
    else:
        kv_head = (number - HEADS) % KV_HEADS
        row = (kv_head.to(tl.int64) * cache.num_places + position % cache.num_places) * CODING.ROW_BYTES
        if number < HEADS + KV_HEADS:
            one = kv_head + tl.zeros([1], tl.int32)
            k = _rotated_heads(new.k, one, one >= 0, k_norm_ptr, eps, angles, KV_HEADS, FORM)
            _store_codes(cache.k + row, tl.reshape(k, c.shape), c, CODING)
        else:
            v = tl.load(new.v + kv_head * WIDTH + c, mask=c < WIDTH, other=0.0)
            _store_codes(cache.v + row, v, c, CODING)


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
    # Signs and the transform make values of a row alike in size.
    y = _hadamard(x * _signs(c), CODING)
    nan_or_zero = tl.sum(y * 0.0)  # a maximum leaves NaNs out
    block, in_block = c // CODING.EACH, c % CODING.EACH
    halves_ptr = (row_ptr + CODING.CODE_BYTES).to(tl.pointer_type(tl.float16))
    # Stores each block's scale, and with 4 bits its least value, as float16; codes are made by what was stored.
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
    # Stores the codes; with 4 bits, those of a block's second half stand in the upper halves of its bytes.
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
def _load_columns(rows_ptr, is_row, begin, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CODING: tl.constexpr):
    """Returns `COLUMNS` columns of rows from `begin` on, zeros past the row: float32 [rows, COLUMNS]."""
    if CODING.BITS and CODING.HAS_WIDE_LOADS:
        values = _load_blocks(rows_ptr, is_row, begin, COLUMNS, CODING)
    else:
        c = begin + tl.arange(0, COLUMNS)
        values = _load_values(rows_ptr, c, is_row[:, None] & (c < WIDTH)[None, :], CODING)
    return values


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
    """Returns `COLUMNS` columns of cached rows, by blocks; column `begin` is the first of a block."""
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

_ROWS = tl.constexpr(16)  # rows that are read at once


class _LatentShape(NamedTuple):
    num_heads: int
    nope: int
    v: int
    rank: int
    rope: int
    interleaved: bool
    part: RowPart  # of `kv_b`
    units: int  # of its rows


def _latent_shape(spec: LatentSpec, kv_b: StoredRows, interleaved: bool = False) -> _LatentShape:
    sizes = (spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank, spec.qk_rope_head_dim)
    return _LatentShape(*sizes, interleaved, kv_b.part, kv_b.row_units)


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
    _enter_latent_kernel[(spec.num_heads + 1,)](
        q, kv, Norm(norm, None, spec.lora_norm_eps), tuple(angles), position, kv_b.raw, moved, keys,
        lookup_for(q.device, kv_b.part), _latent_shape(spec, kv_b, interleaved), num_warps=4, enable_fp_fusion=True,
        **launch_options(),
    )  # fmt: skip


def leave_latent(mixed: Tensor, spec: LatentSpec, kv_b: StoredRows, out: Tensor) -> None:
    """Writes each head's values float32 [num_heads * v]: W_v times its mix of latents, float32 [num_heads, rank]."""
    _leave_latent_kernel[(spec.num_heads, triton.cdiv(spec.v_head_dim, _ROWS.value))](
        mixed, kv_b.raw, out, lookup_for(mixed.device, kv_b.part), _latent_shape(spec, kv_b),
        num_warps=4, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


@triton.jit
def _enter_latent_kernel(
    q_ptr, kv_ptr, norm, angles, position_ptr, kv_b_ptr, moved_ptr, keys_ptr, lookup_ptr, SHAPE: tl.constexpr
):
    PART: tl.constexpr = SHAPE.part
    RANK: tl.constexpr = SHAPE.rank
    ROPE: tl.constexpr = SHAPE.rope
    HALF: tl.constexpr = ROPE // 2
    head = tl.program_id(0)
    wait_for_earlier()
    position = tl.load(position_ptr).to(tl.int64)
    cos_ptr, sin_ptr = angles[0] + position * HALF, angles[1] + position * HALF
    c = tl.arange(0, triton.next_power_of_2(ROPE))
    if head < SHAPE.num_heads:
        # A head's query moves into the latent's space: its values times the rows of W_k.
        q_ptr += head * (SHAPE.nope + ROPE)
        moved_ptr += head * (RANK + ROPE)
        sums = zero_part(PART)
        for begin in range(0, SHAPE.nope, _ROWS):
            row = begin + tl.arange(0, _ROWS)
            live = row < SHAPE.nope
            units = (head * (SHAPE.nope + SHAPE.v) + row).to(tl.int64) * SHAPE.units
            weights = tl.load(q_ptr + row, mask=live, other=0.0)
            codes = load_part(kv_b_ptr, units, live, PART)
            sums = add_part(sums, kv_b_ptr, units, live, codes, weights, lookup_ptr, PART)
        store_part(moved_ptr, sums, PART)
        x = _rotated_part(q_ptr + SHAPE.nope, c, cos_ptr, sin_ptr, SHAPE)
        tl.store(moved_ptr + RANK + c, x, mask=c < ROPE)
    else:
        # The last program writes the token's latent, normed, and its key to the cache.
        keys_ptr += position * (RANK + ROPE)
        all_c = tl.arange(0, triton.next_power_of_2(RANK))
        latent = tl.load(kv_ptr + all_c, mask=all_c < RANK, other=0.0)
        weight = tl.load(norm.weight + all_c, mask=all_c < RANK, other=0.0)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / RANK + norm.eps) * weight
        tl.store(keys_ptr + all_c, latent, mask=all_c < RANK)
        x = _rotated_part(kv_ptr + RANK, c, cos_ptr, sin_ptr, SHAPE)
        tl.store(keys_ptr + RANK + c, x, mask=c < ROPE)


@triton.jit
def _rotated_part(x_ptr, c, cos_ptr, sin_ptr, SHAPE: tl.constexpr):
    """Returns the columns of a query or a key that rotate, rotated: float32 as `c`."""
    HALF: tl.constexpr = SHAPE.rope // 2
    mask = c < SHAPE.rope
    x = tl.load(x_ptr + c, mask=mask, other=0.0)
    x_other = tl.load(x_ptr + partner(c, HALF, SHAPE.interleaved), mask=mask, other=0.0)
    return rotate(x, x_other, c, cos_ptr, sin_ptr, HALF, SHAPE.interleaved)


@triton.jit
def _leave_latent_kernel(mixed_ptr, kv_b_ptr, out_ptr, lookup_ptr, SHAPE: tl.constexpr):
    # A program multiplies some rows of a head's W_v with the head's mix of latents.
    PART: tl.constexpr = SHAPE.part
    head = tl.program_id(0)
    row = tl.program_id(1) * _ROWS + tl.arange(0, _ROWS)
    live = row < SHAPE.v
    units = (head * (SHAPE.nope + SHAPE.v) + SHAPE.nope + row).to(tl.int64) * SHAPE.units
    codes = load_part(kv_b_ptr, units, live, PART)
    wait_for_earlier()
    x = load_x_part(mixed_ptr + head * SHAPE.rank, PART)
    y = dot_part(kv_b_ptr, units, live, codes, x, lookup_ptr, PART)
    tl.store(out_ptr + head * SHAPE.v + row, y, mask=live)
