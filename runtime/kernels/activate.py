"""The neuron function of dense experts, of one token."""

import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.kernels.functions import FUNCTIONS, act, factor

_BLOCK = 1024


def activate(up: Tensor, gate: Tensor | None, out: Tensor, function: NeuronFunction) -> None:
    """`out = act(gate) * factor(up)`, or act(up) where there is no gate: float32 [f] all; `out` may be one of them."""
    n = len(up)
    _activate[(triton.cdiv(n, _BLOCK),)](
        up,
        gate,
        out,
        n,
        FUNCTION=FUNCTIONS[function],
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def _activate(up_ptr, gate_ptr, out_ptr, n, FUNCTION: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    u = tl.load(up_ptr + i, mask=i < n, other=0.0)
    if gate_ptr is None:
        h = act(u, FUNCTION)
    else:
        h = act(tl.load(gate_ptr + i, mask=i < n, other=0.0), FUNCTION) * factor(u, FUNCTION)
    tl.store(out_ptr + i, h, mask=i < n)
