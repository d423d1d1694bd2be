"""The output of a token's experts: their partial sums, added in a fixed order, times the router's weights."""

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 32  # of a program: a line of 128 bytes


def reduce(
    partials: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    also: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """`out = residual + scale * (also + sum over k of weights_k * sum over P of partials_kp)`.

    Args:    partials: float32 [k, P, d].   weights: float32 [k].   out: float32 [d]; may be `residual` or `also`.
             residual, also: float32 [d]; `also` is the shared experts' output.
    """
    k, num_partials, d = partials.shape
    _reduce[(triton.cdiv(d, _COLUMNS),)](
        partials,
        weights,
        out if also is None else also,
        out if residual is None else residual,
        out,
        scale,
        D=d,
        K=k,
        P=num_partials,
        P_POW2=triton.next_power_of_2(num_partials),
        COLUMNS=_COLUMNS,
        HAS_ALSO=also is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _reduce(
    partials_ptr,
    weights_ptr,
    also_ptr,
    residual_ptr,
    out_ptr,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    P_POW2: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_ALSO: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    partial = tl.arange(0, P_POW2)[:, None]
    is_there = (partial < P) & (column < D)[None, :]
    total = tl.zeros([COLUMNS], tl.float32)
    for place in range(K):
        terms = tl.load(partials_ptr + (place * P + partial) * D + column[None, :], mask=is_there, other=0.0)
        total += tl.load(weights_ptr + place) * tl.sum(terms, 0)
    if HAS_ALSO:
        total = tl.load(also_ptr + column, mask=column < D, other=0.0) + total
    total *= scale
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + column, mask=column < D, other=0.0)
    tl.store(out_ptr + column, total, mask=column < D)
