"""Operations of a few tokens on vectors: neuron functions, norms, and the sum of experts' outputs.

A neuron function is `h(g, u) = act(g) * factor(u)`, or `act(u)` without a gate. Twin: `runtime.model.compute.expert`.
Clamping leaves a NaN a NaN. Norms take the last dimension, one program a vector; their twins are torch's own.
"""

import math
import struct
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import LimitedFunction, NeuronFunction
from moe_pack.runtime.gpu.kernels.grids import launch_options, wait_for_earlier
from moe_pack.runtime.gpu.kernels.tables import PER_LAYER

SILU, RELU, RELU2, CLAMPED_SWIGLU, GELU_TANH, CLIPPED_SILU, CAPPED_SILU = (tl.constexpr(number) for number in range(7))
_LIMIT, _STEEPNESS = tl.constexpr(7.0), tl.constexpr(1.702)  # of the clamped SwiGLU
_GELU_SLOPE, _GELU_CUBE = tl.constexpr((2 / math.pi) ** 0.5), tl.constexpr(0.044715)
_NUMBER_BITS = tl.constexpr(8)  # of a function's number; the bits of its limit in float32 are above them


class _Functions(dict[NeuronFunction, int]):
    """The numbers by which kernels know neuron functions; one with a limit has the limit in its number."""

    def __missing__(self, function: NeuronFunction) -> int:
        if not isinstance(function, LimitedFunction):
            raise KeyError(function)
        (bits,) = struct.unpack("<I", struct.pack("<f", function.limit))
        return int(_LIMITED[function.name] | bits << _NUMBER_BITS.value)


_LIMITED = {"clipped_silu": CLIPPED_SILU.value, "capped_silu": CAPPED_SILU.value}
FUNCTIONS = _Functions({"silu": SILU.value, "relu": RELU.value, "relu2": RELU2.value,
                        "clamped_swiglu": CLAMPED_SWIGLU.value, "gelu_tanh": GELU_TANH.value})  # fmt: skip


@triton.constexpr_function
def _kind(function: int) -> int:
    """Returns a function's number without its limit."""
    return int(function & ((1 << _NUMBER_BITS.value) - 1))


@triton.constexpr_function
def _limit(function: int) -> float:
    """Returns the limit in a function's number, 0 for one without a limit."""
    bits = function >> _NUMBER_BITS.value
    return float((1 + bits % 2**23 / 2**23) * 2.0 ** ((bits >> 23) - 127)) if bits else 0.0


@triton.jit
def act(g, FUNCTION: tl.constexpr):
    """Returns the activation of the gate's product, or of up's where there is no gate."""
    KIND: tl.constexpr = _kind(FUNCTION)
    LIMIT: tl.constexpr = _limit(FUNCTION)
    if KIND == CLIPPED_SILU:
        g = tl.where(g > LIMIT, LIMIT, g)
    if KIND == RELU:
        active = tl.where(g < 0, 0.0, g)
    elif KIND == RELU2:
        active = tl.where(g < 0, 0.0, g * g)
    elif KIND == CLAMPED_SWIGLU:
        clamped = tl.where(g > _LIMIT, _LIMIT, g)
        active = clamped / (1.0 + tl.exp(-_STEEPNESS * clamped))
    elif KIND == GELU_TANH:
        y = _GELU_SLOPE * (g + _GELU_CUBE * g * g * g)
        power = tl.exp(-2.0 * tl.abs(y))  # which does not overflow
        tanh = (1.0 - power) / (1.0 + power)
        active = 0.5 * g * (1.0 + tl.where(y < 0, -tanh, tanh))
    else:
        active = g / (1.0 + tl.exp(-g))
    if KIND == CAPPED_SILU:
        active = tl.where(active > LIMIT, LIMIT, active)
    return active


@triton.jit
def factor(u, FUNCTION: tl.constexpr):
    """Returns the factor that up's product gives the gate's activation."""
    KIND: tl.constexpr = _kind(FUNCTION)
    LIMIT: tl.constexpr = _limit(FUNCTION)
    if KIND == CLAMPED_SWIGLU:
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u)) + 1.0
    elif LIMIT > 0.0:  # one of those with a limit
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    return u


_ACTIVATED = tl.constexpr(1024)  # neurons of a program


def activate(gate: Tensor | None, up: Tensor, function: NeuronFunction, out: Tensor) -> None:
    """Writes neurons `act(gate) * factor(up)`, or `act(up)` without a gate, to `out`: float32 of one shape, contiguous.

    `out` may be `gate` or `up`.
    """
    number = up.numel()
    _activate_kernel[(triton.cdiv(number, _ACTIVATED.value),)](
        gate, up, out, number, FUNCTIONS[function], num_warps=4, enable_fp_fusion=True
    )


@triton.jit(do_not_specialize=["number"])
def _activate_kernel(gate_ptr, up_ptr, out_ptr, number, FUNCTION: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * _ACTIVATED + tl.arange(0, _ACTIVATED)
    u = tl.load(up_ptr + at, mask=at < number, other=0.0)
    if gate_ptr is None:
        h = act(u, FUNCTION)
    else:
        h = act(tl.load(gate_ptr + at, mask=at < number, other=0.0), FUNCTION) * factor(u, FUNCTION)
    tl.store(out_ptr + at, h, mask=at < number)


NORM_WARPS = 8  # 32 values a thread of the widest hidden states, 8,192


class Norm(NamedTuple):
    """A norm with its weights: `x / rms(x) * weight`; with a bias `(x - mean) / deviation * weight + bias`."""

    weight: Tensor  # float32 [d]
    bias: Tensor | None  # likewise; None for an rms norm
    eps: float  # added to the mean square


def norm(x: Tensor, by: Norm, out: Tensor, num_warps: int = NORM_WARPS) -> None:
    """Writes `x`, normalized, to `out`, which may be `x`: float32 [..., d], contiguous."""
    d = x.shape[-1]
    _norm_kernel[(x.numel() // d,)](x, by, out, d, num_warps=num_warps, enable_fp_fusion=True, **launch_options())


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
    """Copies x, weights and experts to page-locked host memory.

    One launch in place of three copies, each of which takes a graph some 8 us (H200).
    Args:    x: float32 [d] or [T, d].   weights: float32 [k] or [T, k].   experts: int32, as weights.   All contiguous.
    """
    d, k, num_tokens = x.shape[-1], weights.shape[-1], count_tokens(x)
    _hand_over[triton.cdiv(d, _HANDED.value), num_tokens](
        x, weights, experts, x_there, weights_there, experts_there, d, k, num_tokens > 1,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=PER_LAYER)
def _hand_over(
    x_ptr,
    weights_ptr,
    experts_ptr,
    x_there_ptr,
    weights_there_ptr,
    experts_there_ptr,
    D: tl.constexpr,
    K: tl.constexpr,
    HAS_SEVERAL: tl.constexpr,
):
    token = token_of(HAS_SEVERAL)
    column = tl.program_id(0) * _HANDED + tl.arange(0, _HANDED)
    tl.store(x_there_ptr + token * D + column, tl.load(x_ptr + token * D + column, mask=column < D), mask=column < D)
    # One program copies a token's few numbers too.
    if tl.program_id(0) == 0:
        c = tl.arange(0, triton.next_power_of_2(K))
        place = token * K + c
        tl.store(weights_there_ptr + place, tl.load(weights_ptr + place, mask=c < K), mask=c < K)
        tl.store(experts_there_ptr + place, tl.load(experts_ptr + place, mask=c < K), mask=c < K)


def ask(flag: Tensor, number: int) -> None:
    """Calls the CPU and waits, as `devices.Ask`: a program that takes a warp of one multiprocessor.

    For drivers without such an operation.
    """
    _ask[(1,)](flag, number, num_warps=1, enable_fp_fusion=True)


@triton.jit(do_not_specialize=["number"])
def _ask(flag_ptr, number):
    tl.atomic_xchg(flag_ptr, number, sem="release", scope="sys")
    tl.debug_barrier()
    # Only reads: over PCIe an atomic operation of the GPU on host memory could undo what the CPU writes meanwhile. What
    # the CPU has written before is read by later kernels, which start after this one's end.
    waited_for = tl.load(flag_ptr, volatile=True)
    while waited_for != 0:
        waited_for = tl.load(flag_ptr, volatile=True)


def count_tokens(x: Tensor) -> int:
    """Returns the number of tokens that x has: T of [T, d], or 1 of [d]."""
    return x.numel() // x.shape[-1]


@triton.jit
def token_of(HAS_SEVERAL: tl.constexpr):
    """Returns a program's token, by which the grid's second dimension counts; a single one costs no instruction."""
    return tl.program_id(1) if HAS_SEVERAL else 0


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

    Args:    partials, pulled: float32 [T * k, P, d], contiguous, each with its own P; the partial sums of neurons whose
             records are here, and of those whose records are pulled. Both are summed.   weights: float32 [T, k] or [k].
             out: float32 [T, d] or [d], as the others; may be `residual` or `shared`.
             host: the CPU's share, weighted already; page-locked host memory if the others are on a GPU.
             shared: the shared experts' output.
    """
    num_tokens, k = count_tokens(weights), weights.shape[-1]
    num_partials, d = partials.shape[-2:]
    summands = _Summands(partials, pulled, weights, host, shared, residual)
    num_pulled = 0 if pulled is None else pulled.shape[-2]
    _reduce[triton.cdiv(d, _COLUMNS.value), num_tokens](
        summands, out, scale, d, k, num_partials, num_pulled, num_tokens > 1,
        num_warps=4, enable_fp_fusion=True, **launch_options(),
    )  # fmt: skip


@triton.jit
def _reduce(
    given,
    out_ptr,
    scale,
    D: tl.constexpr,
    K: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    NUM_PULLED: tl.constexpr,
    HAS_SEVERAL: tl.constexpr,
):
    token = token_of(HAS_SEVERAL)
    column = tl.program_id(0) * _COLUMNS + tl.arange(0, _COLUMNS)
    is_column = column < D
    at = token * D + column
    wait_for_earlier()
    # The CPU's share is loaded first, because it comes over the link.
    if given.host is not None:
        from_host = tl.load(given.host + at, mask=is_column, other=0.0)
    # Adds the experts in the router's order, and each one's partial sums in theirs: no sum depends on timing.
    total = tl.zeros([_COLUMNS], tl.float32)
    for number in range(K):
        place = token * K + number
        sums = _sum_partials(given.partials + place * NUM_PARTIALS * D, column, D, NUM_PARTIALS)
        if given.pulled is not None:
            sums += _sum_partials(given.pulled + place * NUM_PULLED * D, column, D, NUM_PULLED)
        total += tl.load(given.weights + place) * sums
    if given.host is not None:
        total += from_host
    if given.shared is not None:
        total = tl.load(given.shared + at, mask=is_column, other=0.0) + total
    # Ends the layer: the sum joins the hidden state.
    total *= scale
    if given.residual is not None:
        total += tl.load(given.residual + at, mask=is_column, other=0.0)
    tl.store(out_ptr + at, total, mask=is_column)


@triton.jit
def _sum_partials(partials_ptr, column, D: tl.constexpr, NUM_PARTIALS: tl.constexpr):
    """Returns the sum of an expert's partial sums in some columns: float32, as `column`."""
    partial = tl.arange(0, triton.next_power_of_2(NUM_PARTIALS))[:, None]
    is_valid = (partial < NUM_PARTIALS) & (column < D)[None, :]
    return tl.sum(tl.load(partials_ptr + partial * D + column[None, :], mask=is_valid, other=0.0), 0)
