"""The reference semantics of an expert (docs/format.md, "What a pack means"): the answer every faster path must give.

    y = sum over running neurons i of  h(gate_i . x, up_i . x) * down_i

Neuron i runs when `a_i != 0 and not (abs(a_i) < t)`: a threshold of zero drops exactly what contributes nothing, and a
NaN runs and is seen. `a` is what the selector kind makes known before the record is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_pack.formats import Selector
from moe_pack.runtime.matrix import linear
from moe_pack.runtime.weights import Expert, NeuronBlock, Weights

# The activation of each neuron function; h(g, u) = activation(g) * u.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch.nn.functional.silu, "relu": torch.relu}


def run_expert(x: Tensor, expert: Expert, function: str, selector: Selector, threshold: float) -> Tensor:
    """The output of an expert for some tokens.

    Args:    x: float32 [T, d].   function: the neuron function's name.   threshold: on `abs(a)`.
    Returns: float32 [T, d].
    Source:  FloE Eq. 6 and CORM §4.2 for `up` and `gate`; `both` tests h itself.
    """
    y = torch.zeros_like(x)
    for block in expert.blocks():
        values = activations(x, block, function)
        h, a = values.h, values.of(selector)
        runs = (a != 0) & ~(a.abs() < threshold)  # [T, n]
        y += torch.where(runs, h, 0.0) @ block.down
    return y


def run_dense_expert(x: Tensor, weights: Weights, role: str, function: str) -> Tensor:
    """The output of an expert that every token goes to and that is kept as dense matrices: all its neurons run.

    Args:    x: float32 [T, d].   role: what its matrices' roles begin with (`layers.{i}.shared`).
    Returns: float32 [T, d].
    """
    h = linear(x, weights.matrix(f"{role}.up"))
    if "gate" in weights.spec.expert.matrices:
        h = ACTIVATIONS[function](linear(x, weights.matrix(f"{role}.gate"))) * h
    else:
        h = ACTIVATIONS[function](h)
    return linear(h, weights.matrix(f"{role}.down"))


@dataclass(frozen=True, slots=True)
class Activations:
    """What some neurons do for some tokens, float32 [T, n] each: `up`, the gate's activation, and `h` itself."""

    up: Tensor
    gate: Tensor
    h: Tensor

    def of(self, selector: Selector) -> Tensor:
        """`a` of this selector kind: what a threshold is compared with."""
        return {"up": self.up, "gate": self.gate, "both": self.h, "none": self.h}[selector]


def activations(x: Tensor, block: NeuronBlock, function: str) -> Activations:
    """The activations of a block's neurons for tokens float32 [T, d].

    An expert of two matrices has one activation, that of up: it stands for all three.
    """
    activation = ACTIVATIONS[function]
    u = x @ block.up.T
    if block.up_bias is not None:
        u = u + block.up_bias
    if block.gate is None:
        h = activation(u)
        return Activations(h, h, h)
    g = x @ block.gate.T
    if block.gate_bias is not None:
        g = g + block.gate_bias
    active = activation(g)
    return Activations(u, active, active * u)
