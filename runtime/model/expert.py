"""The reference semantics of an expert (docs/format.md, "What a pack means"): the answer every faster path must give.

    y = bias of down + sum over running neurons i of  h(gate_i . x, up_i . x) * down_i

with h(g, u) = act(g) * factor(u), or act(u) without a gate, as the neuron function says; few experts have a bias.

Neuron i runs when `a_i != 0 and not (abs(a_i) < t)`: a threshold of zero drops exactly what contributes nothing, and a
NaN runs and is seen. `a` is what the selector kind makes known before the record is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_pack.formats import NeuronFunction, Selector

_LIMIT, _STEEPNESS = 7.0, 1.702  # of the clamped SwiGLU


@dataclass(frozen=True, slots=True)
class NeuronBlock:
    """Some neurons of an expert, dequantized: float32 [n, d] each, gate None in families without one.

    Biases are float32 [n], where the family has them.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None


class Expert(Protocol):
    """An expert whose neurons come in blocks of bounded size."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """All neurons once, in stored order."""
        ...

    def down_bias(self) -> Tensor | None:
        """What is added to the output of a token that comes here, float32 [d]; None where the family has none."""
        ...


@dataclass(frozen=True, slots=True)
class Neuron:
    """A neuron function: `h(g, u) = act(g) * factor(u)`; without a gate `act(u)`."""

    act: Callable[[Tensor], Tensor]
    factor: Callable[[Tensor], Tensor]

    def h(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """What neurons add to an expert's output, in their down rows, from what their gate and up rows give."""
        return self.act(up) if gate is None else self.act(gate) * self.factor(up)


def _same(up: Tensor) -> Tensor:
    return up


def _clamped_swish(gate: Tensor) -> Tensor:
    clamped = gate.clamp(max=_LIMIT)
    return clamped * torch.sigmoid(_STEEPNESS * clamped)


def _clamped_plus_one(up: Tensor) -> Tensor:
    return up.clamp(-_LIMIT, _LIMIT) + 1


NEURONS: dict[NeuronFunction, Neuron] = {
    "silu": Neuron(torch.nn.functional.silu, _same),
    "relu": Neuron(torch.relu, _same),
    "clamped_swiglu": Neuron(_clamped_swish, _clamped_plus_one),
}


def run_expert(x: Tensor, expert: Expert, function: NeuronFunction, selector: Selector, threshold: float) -> Tensor:
    """The output of an expert for some tokens.

    Args:    x: float32 [T, d].   function: the neuron function's name.   threshold: on `abs(a)`.
    Returns: float32 [T, d].
    Source:  FloE Eq. 6 and CORM §4.2 for `up` and `gate`; `both` tests h itself.
    """
    y = resting_output(x, expert)
    for block in expert.blocks():
        values = activations(x, block, function)
        h, a = values.h, values.of(selector)
        y += torch.where(running(a, threshold), h, 0.0) @ block.down
    return y


def running(a: Tensor, threshold: float | Tensor) -> Tensor:
    """Returns which neurons run, bool in the shape of `a`: `a != 0 and not (abs(a) < threshold)`."""
    return (a != 0) & ~(a.abs() < threshold)


def resting_output(x: Tensor, expert: Expert) -> Tensor:
    """The output of an expert for tokens float32 [T, d] of which none has a neuron that runs: [T, d], to add to."""
    bias = expert.down_bias()
    return torch.zeros_like(x) if bias is None else bias.repeat(len(x), 1)


@dataclass(frozen=True, slots=True)
class Activations:
    """What some neurons do for some tokens, float32 [T, n] each: up's factor, the gate's activation, and `h` itself."""

    up: Tensor
    gate: Tensor
    h: Tensor

    def of(self, selector: Selector) -> Tensor:
        """`a` of this selector kind: what a threshold is compared with."""
        return {"up": self.up, "gate": self.gate, "both": self.h, "none": self.h}[selector]


def activations(x: Tensor, block: NeuronBlock, function: NeuronFunction) -> Activations:
    """The activations of a block's neurons for tokens float32 [T, d].

    An expert of two matrices has one activation, that of up: it stands for all three.
    """
    neuron = NEURONS[function]
    u = x @ block.up.T
    if block.up_bias is not None:
        u = u + block.up_bias
    if block.gate is None:
        h = neuron.act(u)
        return Activations(h, h, h)
    g = x @ block.gate.T
    if block.gate_bias is not None:
        g = g + block.gate_bias
    active, factor = neuron.act(g), neuron.factor(u)
    return Activations(factor, active, active * factor)
