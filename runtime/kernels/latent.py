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
from moe_pack.runtime.kernels.codes import Part, lookup_for
from moe_pack.runtime.kernels.enter import partner, turn
from moe_pack.runtime.kernels.products import add_part, dot_part, load_part, load_x_part, store_part, zero_part
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
        q, kv, norm, cos, sin, position, held, moved, keys, lookup_for(q.device, part), spec.lora_norm_eps,
        spec.num_heads, spec.qk_nope_head_dim, spec.v_head_dim, rank, rope, cos.shape[1], interleaved,
        held.shape[1] // 16, part, part.num_words, _ROWS, triton.next_power_of_2(rank), triton.next_power_of_2(rope),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def leave_latent(mixed: Tensor, spec: LatentSpec, kv_b: HeldRows, out: Tensor) -> None:
    """Writes each head's values, W_v times its mix of latents.

    Args:    mixed: float32 [num_heads, rank], from `attend`.   out: float32 [num_heads * v].
    """
    held, part = kv_b.rows.view(torch.uint8), kv_b.part
    _leave_latent_kernel[(spec.num_heads, triton.cdiv(spec.v_head_dim, _ROWS))](
        mixed, held, out, lookup_for(mixed.device, part), spec.qk_nope_head_dim, spec.v_head_dim, spec.kv_lora_rank,
        held.shape[1] // 16, part, part.num_words, _ROWS, num_warps=4, enable_fp_fusion=True,
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
            words, high = load_part(kv_b_ptr, units, live, PART, NW)
            y, less, y_high = add_part(
                y, less, y_high, kv_b_ptr, units, live, words, high, weights, lookup_ptr, PART, NW
            )
        store_part(moved_ptr, y, less, y_high, PART, NW)
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
    words, high = load_part(kv_b_ptr, units, live, PART, NW)
    y = dot_part(kv_b_ptr, units, live, words, high, x, x_sums, x_high, lookup_ptr, PART, NW)
    tl.store(out_ptr + head * V + row, y, mask=live)
