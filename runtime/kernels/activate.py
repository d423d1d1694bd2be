"""The neuron function of dense experts, of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def activate(up: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """`out = silu(gate) * up`, or silu(up) where there is no gate: float32 [f] all; `out` may be one of them."""
    n = len(up)
    _activate[(triton.cdiv(n, _BLOCK),)](
        up, up if gate is None else gate, out, n, HAS_GATE=gate is not None, num_warps=4, enable_fp_fusion=True
    )


def activate_twin(up: Tensor, gate: Tensor | None) -> Tensor:
    """The same in plain torch."""
    return torch.nn.functional.silu(up) if gate is None else torch.nn.functional.silu(gate) * up


@triton.jit
def _activate(up_ptr, gate_ptr, out_ptr, n, HAS_GATE: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    u = tl.load(up_ptr + i, mask=i < n, other=0.0)
    if HAS_GATE:
        g = tl.load(gate_ptr + i, mask=i < n, other=0.0)
        u = u * (g / (1 + tl.exp(-g)))
    else:
        u = u / (1 + tl.exp(-u))
    tl.store(out_ptr + i, u, mask=i < n)
