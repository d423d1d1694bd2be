"""One token's latent attention beside `attend`: queries move into the latent's space, mixes of latents out of it.

Both read `kv_b`'s rows, stored or in the row layout, as they lie: for each head `nope` rows of W_k, then those of W_v.
A token is `enter_latent`, `attend`, `leave_latent`. The twin is `runtime.latent_attention`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import LatentSpec
from moe_pack.runtime.kernels.codes import Part, add_plane, dot_plane, load_words, load_x, plane_bits, store_y
from moe_pack.runtime.kernels.enter import partner, turn
from moe_pack.runtime.rope import Angles

_ROWS = 16  # rows read at once


class HeldRows(NamedTuple):
    """A matrix's rows as they lie, [rows, values or bytes], contiguous, each a multiple of 16 bytes; and their part."""

    rows: Tensor
    part: Part


def enter_latent(
    projected: tuple[Tensor, Tensor],
    norm: Tensor,
    angles: Angles,
    interleaved: bool,
    position: Tensor,
    spec: LatentSpec,
    kv_b: HeldRows,
    moved: Tensor,
    keys: Tensor,
) -> None:
    """Writes one token's queries in the latent's space to `moved`, its latent and rotated key to the cache.

    Args:    projected: queries, float32 [num_heads * (nope + rope)], not rotated; `kv_a`'s product, float32
             [rank + rope].   norm: float32 [rank], of the latent.
             angles: of all positions, float32 [positions, rope / 2] each, from `Rope`.
             position: int32 [1]; not checked against the cache's room.   kv_b: of rank columns.
             moved: float32 [num_heads, rank + rope].
             keys: float32 or bfloat16 [1, context, rank + rope], contiguous.
    """
    q, kv = projected
    cos, sin = angles
    held, part = kv_b.rows.view(torch.uint8), kv_b.part
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    _enter_latent_kernel[(spec.num_heads + 1,)](
        q, kv, norm, cos, sin, position, held, moved, keys, spec.lora_norm_eps,
        spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim, rank, rope, cos.shape[1], interleaved,
        held.shape[1] // 16, part, *_words(part), _ROWS, triton.next_power_of_2(rank), triton.next_power_of_2(rope),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def leave_latent(mixed: Tensor, spec: LatentSpec, kv_b: HeldRows, out: Tensor) -> None:
    """Writes each head's values, W_v times its mix of latents.

    Args:    mixed: float32 [num_heads, rank], from `attend`.   out: float32 [num_heads * v].
    """
    held, part = kv_b.rows.view(torch.uint8), kv_b.part
    _leave_latent_kernel[(spec.num_heads, triton.cdiv(spec.v_head_dim, _ROWS))](
        mixed, held, out, spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank,
        held.shape[1] // 16, part, *_words(part), _ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _words(part: Part) -> tuple[int, int]:
    """Words of a tile of each plane; none of the second where there is one."""
    return part.num_words, part.num_words // 2 if part.num_planes == 2 else 0


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
    NW1: tl.constexpr,
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
        first = head * (NOPE + V)
        y = _weighed_rows(q_ptr, kv_b_ptr, first, NOPE, UNITS, PART, 0, NW, ROWS)
        store_y(moved_ptr, y, PART, 0, NW)
        if NW1:
            tl.debug_barrier()  # the planes' columns differ: the first must be written before it is added to
            y = load_x(moved_ptr, PART, 1, NW1) + _weighed_rows(q_ptr, kv_b_ptr, first, NOPE, UNITS, PART, 1, NW1, ROWS)
            store_y(moved_ptr, y, PART, 1, NW1)
        x_ptr, out_ptr = q_ptr + NOPE, moved_ptr + RANK
        x = tl.load(x_ptr + c, mask=c < ROPE, other=0.0)
        x = turn(x, tl.load(x_ptr + other, mask=c < ROPE, other=0.0), c, cos_ptr, sin_ptr, HALF, INTERLEAVED)
        tl.store(out_ptr + c, x, mask=c < ROPE)
    else:
        keys_ptr += position * (RANK + ROPE)
        all_c = tl.arange(0, BLOCK)
        latent = tl.load(kv_ptr + all_c, mask=all_c < RANK, other=0.0)
        weight = tl.load(norm_ptr + all_c, mask=all_c < RANK, other=0.0)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / RANK + eps) * weight
        tl.store(keys_ptr + all_c, latent, mask=all_c < RANK)
        x = tl.load(kv_ptr + RANK + c, mask=c < ROPE, other=0.0)
        x = turn(x, tl.load(kv_ptr + RANK + other, mask=c < ROPE, other=0.0), c, cos_ptr, sin_ptr, HALF, INTERLEAVED)
        tl.store(keys_ptr + RANK + c, x, mask=c < ROPE)


@triton.jit
def _weighed_rows(
    weights_ptr,
    rows_ptr,
    first,
    COUNT: tl.constexpr,
    UNITS: tl.constexpr,
    PART: tl.constexpr,
    PLANE: tl.constexpr,
    NW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """COUNT rows from `first` on, each times its weight, summed: a plane's share, float32 [SQ, NW]."""
    y = tl.zeros([32 // plane_bits(PART, PLANE), NW], tl.float32)
    for begin in range(0, COUNT, ROWS):
        row = begin + tl.arange(0, ROWS)
        live = row < COUNT
        units = (first + row).to(tl.int64) * UNITS
        weights = tl.load(weights_ptr + row, mask=live, other=0.0)
        words = load_words(rows_ptr, units, live, PART, PLANE, NW)
        y = add_plane(y, rows_ptr, units, live, words, weights, PART, PLANE, NW)
    return y


@triton.jit
def _leave_latent_kernel(
    mixed_ptr,
    kv_b_ptr,
    out_ptr,
    NOPE: tl.constexpr,
    V: tl.constexpr,
    RANK: tl.constexpr,
    UNITS: tl.constexpr,
    PART: tl.constexpr,
    NW: tl.constexpr,
    NW1: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < V
    units = (head * (NOPE + V) + NOPE + row).to(tl.int64) * UNITS
    mixed_ptr += head * RANK
    words = load_words(kv_b_ptr, units, live, PART, 0, NW)
    y = dot_plane(kv_b_ptr, units, live, words, load_x(mixed_ptr, PART, 0, NW), PART, 0, NW)
    if NW1:
        words = load_words(kv_b_ptr, units, live, PART, 1, NW1)
        y += dot_plane(kv_b_ptr, units, live, words, load_x(mixed_ptr, PART, 1, NW1), PART, 1, NW1)
    tl.store(out_ptr + head * V + row, y, mask=live)
