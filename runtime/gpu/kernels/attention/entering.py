"""Tokens that enter a cache: heads are normed and rotated, and keys and values are written.

`enter_heads` takes what projections made, and norms and rotates it. `enter` takes heads that are prepared. Both are a
launch with a program for each head of each row. Rows of a launch may be drafts of one sequence, which read the keys of
those before them, so all of them enter before any attends. A row alone enters within the launch in which it attends
(`splits`), by the same functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.runtime.gpu.kernels.attention.cached_rows import (
    Cache,
    Coding,
    RowPositions,
    StoredAs,
    block_width,
    codings,
    stacked,
    store_row,
    turned,
)
from moe_pack.runtime.gpu.kernels.grids import launch_options, wait_for_earlier
from moe_pack.runtime.model.caches import Angles


class QkNorms(NamedTuple):
    """Weights of the norms of queries and keys: float32 [head_dim], or of the whole projection."""

    q: Tensor
    k: Tensor
    eps: float


class Entering(NamedTuple):
    """The queries, keys and values of T rows before they are normed and rotated, and how that is done."""

    q: Tensor  # float32 [T, heads * width], contiguous, as `k` [T, kv heads * width] and `v`
    k: Tensor
    v: Tensor  # [T, kv heads * values' width]
    norms: QkNorms | None  # of queries and keys, if there are any
    is_norm_whole: bool  # they norm the whole projection at once, not each head
    angles: Angles  # of all positions, float32 [positions, rotary_dim / 2] each, from `Rope`
    interleaved: bool


class New(NamedTuple):
    """The queries, keys and values of rows, and the tensors that norm and rotate them, as kernels take them."""

    q: Tensor
    k: Tensor
    v: Tensor
    norms: QkNorms | None
    angles: tuple[Tensor, Tensor]


class Form(NamedTuple):
    """The constants by which a head is normed and rotated."""

    width: int
    half: int  # of the columns that rotate; 0: none does
    interleaved: bool
    is_norm_whole: bool


class _Heads(NamedTuple):
    """The constants of a launch in which rows enter."""

    queries: int  # their heads; 0: there are none, or plain rows leave them as they are
    others: int  # heads of keys
    form: Form
    k: Coding
    k_more: Coding | None  # of the second part of keys
    v: Coding | None  # None: the keys are the values
    is_alone: bool  # there is one row


def new_of(entering: Entering, width: int) -> tuple[New, Form]:
    """Returns tokens that enter as kernels take them, with heads of `width`."""
    cos, sin = entering.angles
    form = Form(width, cos.shape[1], entering.interleaved, entering.is_norm_whole)
    return New(entering.q, entering.k, entering.v, entering.norms, (cos, sin)), form


def enter_heads(
    entering: Entering, q: Tensor, cache: tuple[Tensor, Tensor], at: RowPositions, rows: StoredAs | None
) -> None:
    """Writes rotated queries to `q`, float32 [T, heads, width], and rotated keys, and values, to the cache.

    Args:    cache, rows: as of `splits.attend`. Over codes, queries are also rotated as these are.
    """
    (num_rows, num_heads, width), (keys, values) = q.shape, cache
    new, form = new_of(entering, width)
    k_rows, v_rows = rows or (None, None)
    k, k_more = codings(keys, width, k_rows)
    assert k_more is None, "heads are normed and rotated whole"
    v, _ = codings(values, entering.v.numel() // (num_rows * keys.shape[1]), v_rows)
    _launch(new, q, stacked(keys, values), at, _Heads(num_heads, keys.shape[1], form, k, k_more, v, num_rows == 1))


def enter(
    k: Tensor,
    v: Tensor | None,
    cache: tuple[Tensor, Tensor],
    at: RowPositions,
    rows: StoredAs | None = None,
    q: Tensor | None = None,
) -> None:
    """Writes prepared keys and values, normed and rotated by their positions already, to the cache.

    Args:    k: float32 [T, kv heads, width], contiguous.   v: float32 [T, kv heads, values' width], contiguous; None:
             the values are the first columns, or the first part, of the keys.
             cache, rows: as of `splits.attend`.
             q: float32 [T, heads, width], prepared too. Over codes they are rotated in place as these are, so that
             `attend` may read them. Over plain rows they stay as they are.
    """
    (num_rows, num_kv_heads, width), (keys, values) = k.shape, cache
    k_rows, v_rows = rows or (None, None)
    k_coding, k_more = codings(keys, width, k_rows)
    v_coding = None if v is None else codings(values, v.shape[2], v_rows)[0]
    assert k.is_contiguous() and (v is None or v.is_contiguous()), "rows follow one another"
    num_heads = 0
    if q is not None and k_coding.BITS:
        assert q.is_contiguous(), "rows follow one another"
        num_heads = q.shape[1]
    new = New(k if q is None else q, k, k if v is None else v, None, (k, k))  # without angles nothing rotates
    form = Form(width, half=0, interleaved=False, is_norm_whole=False)
    heads = _Heads(num_heads, num_kv_heads, form, k_coding, k_more, v_coding, num_rows == 1)
    _launch(new, new.q, stacked(keys, values), at, heads)


def _launch(new: New, q: Tensor, cache: Cache, at: RowPositions, heads: _Heads) -> None:
    num_programs = heads.queries + heads.others * (1 if heads.v is None else 2)
    _enter_heads_kernel[(num_programs, len(at.positions))](
        new, at, q, cache, heads, num_warps=1, enable_fp_fusion=True, **launch_options()
    )


@triton.jit
def _enter_heads_kernel(new, at, q_ptr, cache, HEADS: tl.constexpr):
    # A program takes a head of a row: of the queries, then of the keys, then of the values.
    QUERIES: tl.constexpr = HEADS.queries
    OTHERS: tl.constexpr = HEADS.others
    FORM: tl.constexpr = HEADS.form
    K: tl.constexpr = HEADS.k
    V: tl.constexpr = HEADS.v
    WIDTH: tl.constexpr = FORM.width
    number, row = tl.program_id(0), 0 if HEADS.is_alone else tl.program_id(1)
    wait_for_earlier()
    position, slot = tl.load(at.positions + row).to(tl.int64), tl.load(at.slots + row).to(tl.int64)
    angles = (new.angles[0] + position * FORM.half, new.angles[1] + position * FORM.half)
    q_norm_ptr, k_norm_ptr, eps = None, None, 0.0
    if new.norms is not None:
        q_norm_ptr, k_norm_ptr, eps = new.norms
    if number < QUERIES:
        # Queries are rotated as the cache's rows are, so that products are those of plain keys.
        x_ptr = new.q + row * (QUERIES * WIDTH)
        norm = (q_norm_ptr, eps, angles)
        _enter_head(q_ptr + (row * QUERIES + number) * WIDTH, x_ptr, number, norm, QUERIES, True, HEADS)
    else:
        kv_head = (number - QUERIES) % OTHERS
        place = slot * cache.slot_rows + kv_head.to(tl.int64) * cache.num_places + position % cache.num_places
        if number < QUERIES + OTHERS:
            k_ptr = cache.k + place * K.STRIDE
            norm = (k_norm_ptr, eps, angles)
            _enter_head(k_ptr, new.k + row * (OTHERS * WIDTH), kv_head, norm, OTHERS, False, HEADS)
        elif V is not None:
            c = tl.arange(0, block_width(V.WIDTH))
            v = tl.load(new.v + (row * OTHERS + kv_head) * V.WIDTH + c, mask=c < V.WIDTH, other=0.0)
            store_row(cache.v + place * V.STRIDE, v, c, V)


@triton.jit
def _enter_head(to_ptr, x_ptr, number, norm, NUM_HEADS: tl.constexpr, IS_QUERY: tl.constexpr, HEADS: tl.constexpr):
    """Writes head `number` of some, normed and rotated if the form says so, as a query or as a row of keys.

    Args:    norm: its weights and eps, and the cosines and sines of the position.
    """
    FORM: tl.constexpr = HEADS.form
    K: tl.constexpr = HEADS.k
    c = tl.arange(0, block_width(K.WIDTH))
    if FORM.half == 0 and norm[0] is None:
        x = tl.load(x_ptr + number * FORM.width + c, mask=c < K.WIDTH, other=0.0)
    else:
        one = number + tl.zeros([1], tl.int32)
        heads = rotated_heads(x_ptr, one, one >= 0, norm[0], norm[1], norm[2], NUM_HEADS, FORM)
        x = tl.reshape(heads, c.shape)
    _store_part(to_ptr, x, c, 0, IS_QUERY, K)
    if HEADS.k_more is not None:  # of prepared heads
        MORE: tl.constexpr = HEADS.k_more
        more_c = tl.arange(0, block_width(MORE.WIDTH))
        more = tl.load(x_ptr + number * FORM.width + K.WIDTH + more_c, mask=more_c < MORE.WIDTH, other=0.0)
        _store_part(to_ptr, more, more_c, K.WIDTH, IS_QUERY, MORE)


@triton.jit
def _store_part(to_ptr, x, c, begin, IS_QUERY: tl.constexpr, CODING: tl.constexpr):
    """Writes a part of a head: of a query, turned as rows are, from column `begin` on; of keys as their rows are."""
    if IS_QUERY:
        tl.store(to_ptr + begin + c, turned(x, c, CODING), mask=c < CODING.WIDTH)
    else:
        store_row(to_ptr, x, c, CODING)


@triton.jit
def enter_row(q_ptr, cache, first, new, heads, is_head, kv_head, position, is_last, SHAPE: tl.constexpr):
    """Writes a tile's rotated queries, and if `is_last` the key and value of a row that is alone.

    Args:    first: int64, the first row of the head's keys in the slot.   SHAPE: of `splits`.
    """
    FORM: tl.constexpr = SHAPE.form
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    WIDTH: tl.constexpr = SHAPE.width
    c = tl.arange(0, block_width(WIDTH))
    is_value = (c < WIDTH)[None, :]
    q_norm_ptr, k_norm_ptr, eps = None, None, 0.0
    if new.norms is not None:
        q_norm_ptr, k_norm_ptr, eps = new.norms
    # Every split of these heads writes the same queries, and reads those that it wrote.
    turn = position.to(tl.int64) * FORM.half
    angles = (new.angles[0] + turn, new.angles[1] + turn)
    q = rotated_heads(new.q, heads, is_head, q_norm_ptr, eps, angles, SHAPE.num_heads, FORM)
    tl.store(q_ptr + heads[:, None] * WIDTH + c[None, :], q, mask=is_head[:, None] & is_value)
    if is_last:
        one = kv_head + tl.zeros([1], tl.int32)
        NUM_KV_HEADS: tl.constexpr = SHAPE.num_heads // SHAPE.group
        k = rotated_heads(new.k, one, one >= 0, k_norm_ptr, eps, angles, NUM_KV_HEADS, FORM)
        place = first + position % cache.num_places
        tl.store(cache.k + place * K.STRIDE + c[None, :], k, mask=is_value)
        cv = tl.arange(0, block_width(V.WIDTH))
        v = tl.load(new.v + kv_head * V.WIDTH + cv, mask=cv < V.WIDTH)
        tl.store(cache.v + place * V.STRIDE + cv, v, mask=cv < V.WIDTH)


@triton.jit
def rotated_heads(x_ptr, heads, is_head, norm_ptr, eps, angles, NUM_HEADS: tl.constexpr, FORM: tl.constexpr):
    """Returns some heads, normalized if there is a norm, and rotated: float32 [heads, width to a power of two].

    Args:    angles: cosines and sines of the position.
    """
    DIM: tl.constexpr = FORM.width
    c = tl.arange(0, block_width(DIM))
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
    if FORM.half:
        x = rotate(x, x_other, c, angles[0], angles[1], FORM.half, FORM.interleaved)
    return x


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
        angle, is_first = tl.where(c < HALF, c, c - HALF), c < HALF
    turns = c < 2 * HALF
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return x * cos + tl.where(is_first, -x_other, x_other) * sin
