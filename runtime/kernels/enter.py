"""A token enters attention: heads normed and rotated, keys and values written where the cache keeps its position.

With fewer places than positions the cache is a ring, and the token takes the place of one that nobody sees any more.

One program a head of queries, keys or values. The twin is `Operations.attend` up to its product.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import GroupedQuerySpec
from moe_pack.runtime.rope import Angles

_NORMS = {"none": 0, "head": 1, "projection": 2}


class QkNorms(NamedTuple):
    """Weights of the norms of queries and keys: float32 [head_dim], or of the whole projection."""

    q: Tensor
    k: Tensor
    eps: float


def enter(
    projected: tuple[Tensor, Tensor, Tensor],
    norms: QkNorms | None,
    angles: Angles,
    interleaved: bool,
    position: Tensor,
    spec: GroupedQuerySpec,
    turned: Tensor,
    cache: tuple[Tensor, Tensor],
) -> None:
    """Writes one token's rotated queries to `turned`, its rotated keys and its values to the cache at `position`.

    Args:    projected: queries, keys and values, float32 [heads * head_dim].
             norms: where the spec's `qk_norm` is not none.
             angles: of all positions, float32 [positions, rotary_dim / 2] each, from `Rope`.
             position: int32 [1]; its place in the cache is that modulo `places`.
             turned: float32 [num_heads, head_dim].
             cache: keys and values, float32 or bfloat16 [num_kv_heads, places, head_dim], contiguous.
    """
    q, k, v = projected
    keys, values = cache
    cos, sin = angles
    assert (norms is None) == (spec.qk_norm == "none"), "norms are there where the spec has them"
    q_norm, k_norm, eps = (q, k, 0.0) if norms is None else norms  # unread where there are none
    num_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    _enter_kernel[(num_heads + 2 * num_kv_heads,)](
        q, k, v, q_norm, k_norm, cos, sin, position, turned, keys, values, keys.shape[1], eps,
        num_heads, num_kv_heads, head_dim, cos.shape[1], interleaved, _NORMS[spec.qk_norm],
        triton.next_power_of_2(head_dim), triton.next_power_of_2(num_heads * head_dim),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _enter_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    turned_ptr,
    keys_ptr,
    values_ptr,
    num_places,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
):
    head = tl.program_id(0)
    position = tl.load(position_ptr).to(tl.int64)
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    place = position % num_places
    c = tl.arange(0, BLOCK)
    if head < HEADS:
        q = _turned_head(
            q_ptr, head, q_norm_ptr, cos_ptr, sin_ptr, eps, HEADS, DIM, HALF, INTERLEAVED, NORM, BLOCK, BLOCK_ALL
        )
        tl.store(turned_ptr + head * DIM + c, q, mask=c < DIM)
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        k = _turned_head(
            k_ptr, head, k_norm_ptr, cos_ptr, sin_ptr, eps, KV_HEADS, DIM, HALF, INTERLEAVED, NORM, BLOCK, BLOCK_ALL
        )
        tl.store(keys_ptr + (head * num_places + place) * DIM + c, k, mask=c < DIM)
    else:
        head -= HEADS + KV_HEADS
        v = tl.load(v_ptr + head * DIM + c, mask=c < DIM)
        tl.store(values_ptr + (head * num_places + place) * DIM + c, v, mask=c < DIM)


@triton.jit
def _turned_head(
    x_ptr,
    head,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
):
    """One head normed and rotated, float32 [BLOCK]."""
    c = tl.arange(0, BLOCK)
    other = partner(c, HALF, INTERLEAVED)
    x = tl.load(x_ptr + head * DIM + c, mask=c < DIM, other=0.0)
    x_other = tl.load(x_ptr + head * DIM + other, mask=c < DIM, other=0.0)
    if NORM:
        if NORM == 1:
            factor = tl.rsqrt(tl.sum(x * x) / DIM + eps)
        else:  # each head's program sums all of the projection: 16 KiB at most, and no launch more
            norm_ptr += head * DIM
            all_c = tl.arange(0, BLOCK_ALL)
            whole = tl.load(x_ptr + all_c, mask=all_c < HEADS * DIM, other=0.0)
            factor = tl.rsqrt(tl.sum(whole * whole) / (HEADS * DIM) + eps)
        x = x * factor * tl.load(norm_ptr + c, mask=c < DIM, other=0.0)
        x_other = x_other * factor * tl.load(norm_ptr + other, mask=c < DIM, other=0.0)
    return turn(x, x_other, c, cos_ptr, sin_ptr, HALF, INTERLEAVED)


@triton.jit
def partner(c, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The column that each column `c` is turned against; itself past the `2 HALF` that turn."""
    other = c ^ 1 if INTERLEAVED else tl.where(c < HALF, c + HALF, c - HALF)
    return tl.where(c < 2 * HALF, other, c)


@triton.jit
def turn(x, x_other, c, cos_ptr, sin_ptr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Values `x` of columns `c` turned against `x_other` of their partners, by a position's angles."""
    if INTERLEAVED:
        angle, is_first = c // 2, c % 2 == 0
    else:
        angle, is_first = c % HALF, c < HALF
    turns = c < 2 * HALF
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return x * cos + tl.where(is_first, -x_other, x_other) * sin
