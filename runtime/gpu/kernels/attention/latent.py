"""Latent attention of T rows: queries move into the latent's space, and what heads read leaves it.

`enter_latent`, `splits.attend` and `leave_latent` are the latent attention of a layer. They read the rows of `kv_b`,
plain values or in the pack's row layout, as they lie: for each head `nope` rows of W_k, then the rows of W_v. A row of
the cache has two parts, the latent, which is the value, and the rotated key; parts behind them are others' own. The
twin is the latent attention of `runtime.model.attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats.parts import LatentSpec
from moe_pack.runtime.gpu.kernels.attention.cached_rows import (
    Coding,
    RowPositions,
    codings,
    stacked,
    store_row,
    turned,
)
from moe_pack.runtime.gpu.kernels.attention.entering import partner, rotate
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.grids import launch_options, wait_for_earlier
from moe_pack.runtime.gpu.kernels.matmul import StoredRows
from moe_pack.runtime.gpu.kernels.products import add_part, dot_part, load_part, load_x_part, store_part, zero_part
from moe_pack.runtime.gpu.kernels.rows import RowPart, lookup_for, loop_range
from moe_pack.runtime.model.caches import Angles, RowStorage

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
    latent: Coding | None = None  # of the cache's rows
    key: Coding | None = None
    is_alone: bool = False  # there is one row


def _latent_shape(spec: LatentSpec, kv_b: StoredRows, interleaved: bool = False) -> _LatentShape:
    sizes = (spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank, spec.qk_rope_head_dim)
    return _LatentShape(*sizes, interleaved, kv_b.part, kv_b.row_units)


def enter_latent(
    projected: tuple[Tensor, Tensor],
    norm: Tensor,
    angles: Angles,
    interleaved: bool,
    at: RowPositions,
    spec: LatentSpec,
    kv_b: StoredRows,
    moved: Tensor,
    keys: Tensor,
    rows: RowStorage | None = None,
) -> None:
    """Writes rows' queries in the latent's space to `moved`, their latents and rotated keys to the cache.

    Args:    projected: queries, float32 [T, num_heads * (nope + rope)], not rotated; `kv_a`'s product, float32
             [T, rank + rope].   norm: float32 [rank], of the latent.
             angles: of all positions, float32 [positions, rope / 2] each, from `Rope`.   kv_b: with `rank` columns.
             moved: float32 [T, num_heads, rank + rope]. Over codes rotated as these are.
             keys: float32 or bfloat16 [num_slots, 1, context, n], n at least rank + rope.
             rows: how keys are stored, if they are codes: uint8 [num_slots, 1, context, bytes].
    """
    (q, kv), rank, rope = projected, spec.kv_lora_rank, spec.qk_rope_head_dim
    latent, key = codings(keys, rank + rope, rows)
    if key is None:
        latent, key = latent._replace(WIDTH=rank), latent._replace(WIDTH=rope, BEGIN=rank)
    shape = _latent_shape(spec, kv_b, interleaved)._replace(latent=latent, key=key, is_alone=len(q) == 1)
    # The programs of a head start together, so that they read its rows of W_k from the L2 cache.
    _enter_latent_kernel[(len(at.positions), spec.num_heads + 1)](
        (q, kv, Norm(norm, None, spec.lora_norm_eps), tuple(angles)), at, kv_b.raw, moved, stacked(keys, keys),
        lookup_for(q.device, kv_b.part), shape, num_warps=4, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


def leave_latent(mixed: Tensor, spec: LatentSpec, kv_b: StoredRows, out: Tensor) -> None:
    """Writes W_v times each head's mix of latents: float32 [T, num_heads * v] of float32 [T, num_heads, rank]."""
    _leave_latent_kernel[(spec.num_heads, triton.cdiv(spec.v_head_dim, _ROWS.value))](
        mixed, kv_b.raw, out, len(mixed), lookup_for(mixed.device, kv_b.part), _latent_shape(spec, kv_b),
        num_warps=4, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


@triton.jit
def _enter_latent_kernel(given, at, kv_b_ptr, moved_ptr, cache, lookup_ptr, SHAPE: tl.constexpr):
    PART: tl.constexpr = SHAPE.part
    RANK: tl.constexpr = SHAPE.rank
    ROPE: tl.constexpr = SHAPE.rope
    LATENT: tl.constexpr = SHAPE.latent
    KEY: tl.constexpr = SHAPE.key
    HALF: tl.constexpr = ROPE // 2
    q_ptr, kv_ptr, norm, angles = given
    row, head = 0 if SHAPE.is_alone else tl.program_id(0), tl.program_id(1)
    wait_for_earlier()
    position = tl.load(at.positions + row).to(tl.int64)
    cos_ptr, sin_ptr = angles[0] + position * HALF, angles[1] + position * HALF
    c = tl.arange(0, triton.next_power_of_2(ROPE))
    all_c = tl.arange(0, triton.next_power_of_2(RANK))
    if head < SHAPE.num_heads:
        # A head's query moves into the latent's space: its values times the rows of W_k.
        q_ptr += (row * SHAPE.num_heads + head) * (SHAPE.nope + ROPE)
        moved_ptr += (row * SHAPE.num_heads + head) * (RANK + ROPE)
        sums = zero_part(PART)
        for begin in range(0, SHAPE.nope, _ROWS):
            w_row = begin + tl.arange(0, _ROWS)
            live = w_row < SHAPE.nope
            units = (head * (SHAPE.nope + SHAPE.v) + w_row).to(tl.int64) * SHAPE.units
            weights = tl.load(q_ptr + w_row, mask=live, other=0.0)
            codes = load_part(kv_b_ptr, units, live, PART)
            sums = add_part(sums, kv_b_ptr, units, live, codes, weights, lookup_ptr, PART)
        store_part(moved_ptr, sums, PART)
        if LATENT.BITS:
            tl.debug_barrier()  # other threads wrote those columns
            x = tl.load(moved_ptr + all_c, mask=all_c < RANK, other=0.0)
            tl.debug_barrier()  # before any of them is overwritten
            tl.store(moved_ptr + all_c, turned(x, all_c, LATENT), mask=all_c < RANK)
        x = _rotated_part(q_ptr + SHAPE.nope, c, cos_ptr, sin_ptr, SHAPE)
        tl.store(moved_ptr + RANK + c, turned(x, c, KEY), mask=c < ROPE)
    else:
        # The last program writes the row's latent, normed, and its key to the cache.
        kv_ptr += row * (RANK + ROPE)
        row_ptr = cache.k + (tl.load(at.slots + row).to(tl.int64) * cache.slot_rows + position) * LATENT.STRIDE
        latent = tl.load(kv_ptr + all_c, mask=all_c < RANK, other=0.0)
        weight = tl.load(norm.weight + all_c, mask=all_c < RANK, other=0.0)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / RANK + norm.eps) * weight
        store_row(row_ptr, latent, all_c, LATENT)
        store_row(row_ptr, _rotated_part(kv_ptr + RANK, c, cos_ptr, sin_ptr, SHAPE), c, KEY)


@triton.jit
def _rotated_part(x_ptr, c, cos_ptr, sin_ptr, SHAPE: tl.constexpr):
    """Returns the columns of a query or a key that rotate, rotated: float32 as `c`."""
    HALF: tl.constexpr = SHAPE.rope // 2
    mask = c < SHAPE.rope
    x = tl.load(x_ptr + c, mask=mask, other=0.0)
    x_other = tl.load(x_ptr + partner(c, HALF, SHAPE.interleaved), mask=mask, other=0.0)
    return rotate(x, x_other, c, cos_ptr, sin_ptr, HALF, SHAPE.interleaved)


@triton.jit
def _leave_latent_kernel(mixed_ptr, kv_b_ptr, out_ptr, num_rows, lookup_ptr, SHAPE: tl.constexpr):
    # A program multiplies some rows of a head's W_v, which it loads once, with the head's mixes of latents.
    PART: tl.constexpr = SHAPE.part
    HEADS: tl.constexpr = SHAPE.num_heads
    head = tl.program_id(0)
    w_row = tl.program_id(1) * _ROWS + tl.arange(0, _ROWS)
    live = w_row < SHAPE.v
    units = (head * (SHAPE.nope + SHAPE.v) + SHAPE.nope + w_row).to(tl.int64) * SHAPE.units
    codes = load_part(kv_b_ptr, units, live, PART)
    wait_for_earlier()
    for row in loop_range(0, num_rows):
        x = load_x_part(mixed_ptr + (row * HEADS + head) * SHAPE.rank, PART)
        y = dot_part(kv_b_ptr, units, live, codes, x, lookup_ptr, PART)
        tl.store(out_ptr + (row * HEADS + head) * SHAPE.v + w_row, y, mask=live)
