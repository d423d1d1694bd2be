"""Norms over the last dimension, one program a vector; `runtime.norm` and torch's layer norm are their twins."""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import NormSpec

_WARPS = 8  # 32 values a thread of the widest hidden states, 8,192


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Writes `x / rms(x) * weight` to `out`, which may be `x`.

    Args:    x, out: float32 [d] or [T, d], contiguous.   weight: float32 [d].
    """
    d = x.shape[-1]
    grid, block = (x.numel() // d,), triton.next_power_of_2(d)
    _rms_norm_kernel[grid](x, weight, out, eps, d, block, num_warps=_WARPS, enable_fp_fusion=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    """Writes `(x - mean) / deviation * weight + bias` to `out`, which may be `x`.

    Args:    x, out: float32 [d] or [T, d], contiguous.   weight, bias: float32 [d].
    """
    d = x.shape[-1]
    grid, block = (x.numel() // d,), triton.next_power_of_2(d)
    _layer_norm_kernel[grid](x, weight, bias, out, eps, d, block, num_warps=_WARPS, enable_fp_fusion=True)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, out: Tensor) -> None:
    """Writes `x` normed as the model does to `out`, which may be `x`; shapes as above, bias with layer norms only."""
    if spec.kind == "rms":
        rms_norm(x, weight, spec.eps, out)
    else:
        assert bias is not None, "a layer norm has a bias"
        layer_norm(x, weight, bias, spec.eps, out)


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + c, mask=c < D, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < D, other=0.0)
    y = x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight
    tl.store(out_ptr + row + c, y, mask=c < D)


@triton.jit
def _layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + c, mask=c < D, other=0.0)
    weight = tl.load(weight_ptr + c, mask=c < D, other=0.0)
    bias = tl.load(bias_ptr + c, mask=c < D, other=0.0)
    x = tl.where(c < D, x - tl.sum(x) / D, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight + bias
    tl.store(out_ptr + row + c, y, mask=c < D)
