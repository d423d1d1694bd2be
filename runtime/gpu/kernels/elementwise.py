"""Operations of one token on vectors: neuron functions, norms, and the sum of experts' outputs.

A neuron function is `h(g, u) = act(g) * factor(u)`, or `act(u)` without a gate. Twin: `runtime.model.compute.expert`.
Clamping leaves a NaN a NaN. Norms take the last dimension, one program a vector; their twins are torch's own.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.gpu.kernels.grids import launch_options, wait_for_earlier
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER

SILU, RELU, CLAMPED_SWIGLU = (tl.constexpr(number) for number in range(3))
FUNCTIONS: dict[NeuronFunction, int] = {"silu": SILU.value, "relu": RELU.value, "clamped_swiglu": CLAMPED_SWIGLU.value}
_LIMIT, _STEEPNESS = tl.constexpr(7.0), tl.constexpr(1.702)  # of the clamped SwiGLU


@triton.jit
def act(g, FUNCTION: tl.constexpr):
    """Returns the activation of the gate's product, or of up's where there is no gate."""
    if FUNCTION == RELU:
        active = tl.where(g < 0, 0.0, g)
    elif FUNCTION == CLAMPED_SWIGLU:
        clamped = tl.where(g > _LIMIT, _LIMIT, g)
        active = clamped / (1.0 + tl.exp(-_STEEPNESS * clamped))
    else:
        active = g / (1.0 + tl.exp(-g))
    return active


@triton.jit
def factor(u, FUNCTION: tl.constexpr):
    """Returns the factor that up's product gives the gate's activation."""
    if FUNCTION == CLAMPED_SWIGLU:
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u)) + 1.0
    return u


NORM_WARPS = 8  # 32 values a thread of the widest hidden states, 8,192


class Norm(NamedTuple):
    """A norm with its weights: `x / rms(x) * weight`; with a bias `(x - mean) / deviation * weight + bias`."""

    weight: Tensor  # float32 [d]
    bias: Tensor | None  # likewise; None for an rms norm
    eps: float  # added to the mean square


def norm(x: Tensor, by: Norm, out: Tensor) -> None:
    """Writes `x`, normalized, to `out`, which may be `x`: float32 [d] or [T, d], contiguous."""
    d = x.shape[-1]
    _norm_kernel[(x.numel() // d,)](x, by, out, d, num_warps=NORM_WARPS, enable_fp_fusion=True, **launch_options())


@triton.jit
def _norm_kernel(x_ptr, norm, out_ptr, D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    wait_for_earlier()
    normalize(x_ptr + row, norm, out_ptr + row, D)


@triton.jit
def normalize(x_ptr, norm, out_ptr, D: tl.constexpr):
    """Writes a vector, normalized by a `Norm`, to `out_ptr`."""
    c = tl.arange(0, triton.next_power_of_2(D))
    x = tl.load(x_ptr + c, mask=c < D, other=0.0)
    weight = tl.load(norm.weight + c, mask=c < D, other=0.0)
    # A layer norm takes the mean away first.
    if norm.bias is not None:
        x = tl.where(c < D, x - tl.sum(x) / D, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x) / D + norm.eps) * weight
    if norm.bias is not None:
        y += tl.load(norm.bias + c, mask=c < D, other=0.0)
    tl.store(out_ptr + c, y, mask=c < D)


_HANDED = tl.constexpr(512)  # values that a program writes


def hand_over(
    x: Tensor, weights: Tensor, experts: Tensor, x_there: Tensor, weights_there: Tensor, experts_there: Tensor
) -> None:
    """Copies x float32 [d], weights float32 [k] and experts int32 [k] to page-locked host memory.

    One launch in place of three copies, each of which takes a graph some 8 us (H200).
    """
    d, k = x.numel(), weights.numel()
    _hand_over[(triton.cdiv(d, _HANDED.value),)](
        x, weights, experts, x_there, weights_there, experts_there, d, k, num_warps=4, enable_fp_fusion=True
    )


@triton.jit(do_not_specialize=PER_LAYER)
def _hand_over(
    x_ptr, weights_ptr, experts_ptr, x_there_ptr, weights_there_ptr, experts_there_ptr, D: tl.constexpr, K: tl.constexpr
):
    column = tl.program_id(0) * _HANDED + tl.arange(0, _HANDED)
    tl.store(x_there_ptr + column, tl.load(x_ptr + column, mask=column < D), mask=column < D)
    # One program copies the few numbers too.
    if tl.program_id(0) == 0:
        place = tl.arange(0, triton.next_power_of_2(K))
        tl.store(weights_there_ptr + place, tl.load(weights_ptr + place, mask=place < K), mask=place < K)
        tl.store(experts_there_ptr + place, tl.load(experts_ptr + place, mask=place < K), mask=place < K)


_COLUMNS = tl.constexpr(32)  # that a program takes: 128 bytes, a cache line


class _Summands(NamedTuple):
    partials: Tensor
    pulled: Tensor | None
    weights: Tensor
    host: Tensor | None
    shared: Tensor | None
    residual: Tensor | None


def reduce(
    partials: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    pulled: Tensor | None = None,
    host: Tensor | None = None,
    residual: Tensor | None = None,
    shared: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Writes `residual + scale * (shared + host + sum over k of weights_k * sum over P of partials_kp)` to `out`.

    Args:    partials, pulled: float32 [k, P, d], contiguous, each with its own P; the partial sums of neurons whose
             records are here, and of those whose records are pulled. Both are summed.   weights: float32 [k].
             out: float32 [d]; may be `residual` or `shared`.
             host: float32 [d], the CPU's share, weighted already; page-locked host memory if the others are on a GPU.
             residual, shared: float32 [d]; `shared` is the shared experts' output.
    """
    k, num_partials, d = partials.shape
    summands = _Summands(partials, pulled, weights, host, shared, residual)
    num_pulled = 0 if pulled is None else pulled.shape[1]
    _reduce[(triton.cdiv(d, _COLUMNS.value),)](
        summands, out, scale, d, k, num_partials, num_pulled, num_warps=4, enable_fp_fusion=True, **launch_options()
    )


@triton.jit
def _reduce(
    given, out_ptr, scale, D: tl.constexpr, K: tl.constexpr, NUM_PARTIALS: tl.constexpr, NUM_PULLED: tl.constexpr
):
    column = tl.program_id(0) * _COLUMNS + tl.arange(0, _COLUMNS)
    is_column = column < D
    wait_for_earlier()
    # The CPU's share is loaded first, because it comes over the link.
    if given.host is not None:
        from_host = tl.load(given.host + column, mask=is_column, other=0.0)
    # Adds the experts in the router's order, and each one's partial sums in theirs: no sum depends on timing.
    total = tl.zeros([_COLUMNS], tl.float32)
    for place in range(K):
        sums = _sum_partials(given.partials + place * NUM_PARTIALS * D, column, D, NUM_PARTIALS)
        if given.pulled is not None:
            sums += _sum_partials(given.pulled + place * NUM_PULLED * D, column, D, NUM_PULLED)
        total += tl.load(given.weights + place) * sums
    if given.host is not None:
        total += from_host
    if given.shared is not None:
        total = tl.load(given.shared + column, mask=is_column, other=0.0) + total
    # Ends the layer: the sum joins the hidden state.
    total *= scale
    if given.residual is not None:
        total += tl.load(given.residual + column, mask=is_column, other=0.0)
    tl.store(out_ptr + column, total, mask=is_column)


@triton.jit
def _sum_partials(partials_ptr, column, D: tl.constexpr, NUM_PARTIALS: tl.constexpr):
    """Returns the sum of an expert's partial sums in some columns: float32, as `column`."""
    partial = tl.arange(0, triton.next_power_of_2(NUM_PARTIALS))[:, None]
    is_valid = (partial < NUM_PARTIALS) & (column < D)[None, :]
    return tl.sum(tl.load(partials_ptr + partial * D + column[None, :], mask=is_valid, other=0.0), 0)
