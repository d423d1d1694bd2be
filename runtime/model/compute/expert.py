"""The reference semantics of an expert (docs/model.md, "Expert"): every faster path gives this answer.

For a hidden state x, an expert adds up the down rows of its running neurons:

    y = bias of down + sum over running neurons i of  h(gate_i . x, up_i . x) * down_i

    h(g, u) = act(g) * factor(u)    the neuron function; without a gate h(u) = act(u)

    neuron i runs  if  a_i != 0 and not (abs(a_i) < t)    t: the expert's threshold

The pack's selector kind decides on a, which is known before the neuron's record is read: `up` takes factor(u), `gate`
takes act(g), `both` and `none` take h. With t = 0 all neurons run that add anything. A neuron whose activation is NaN
runs, so that the error shows in the output.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from moe_pack import formats

# ---- the neuron functions -------------------------------------------------------------------------------------------

_CLAMP_LIMIT, _SWISH_STEEPNESS = 7.0, 1.702  # of clamped_swiglu


@dataclass(frozen=True, slots=True)
class Neuron:
    """A neuron function: `h(g, u) = act(g) * factor(u)`; without a gate `h(u) = act(u)`."""

    act: Callable[[Tensor], Tensor]
    factor: Callable[[Tensor], Tensor]

    def h(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Returns h of `gate_i . x` and `up_i . x`, all in one shape; `gate` is None in families without one."""
        return self.act(up) if gate is None else self.act(gate) * self.factor(up)


def _identity(up: Tensor) -> Tensor:
    return up


def _clamped_swish(gate: Tensor) -> Tensor:
    clamped = gate.clamp(max=_CLAMP_LIMIT)
    return clamped * torch.sigmoid(_SWISH_STEEPNESS * clamped)


_NEURONS: dict[formats.NeuronFunction, Neuron] = {
    "silu": Neuron(silu, _identity),
    "relu": Neuron(torch.relu, _identity),
    "relu2": Neuron(lambda gate: torch.relu(gate).square(), _identity),
    "clamped_swiglu": Neuron(_clamped_swish, lambda up: up.clamp(-_CLAMP_LIMIT, _CLAMP_LIMIT) + 1),
    "gelu_tanh": Neuron(partial(gelu, approximate="tanh"), _identity),
}


def neuron_of(function: formats.NeuronFunction) -> Neuron:
    """Returns the functions of a neuron function's name."""
    if not isinstance(function, formats.LimitedFunction):
        return _NEURONS[function]
    limit = function.limit
    limited: dict[str, Callable[[Tensor], Tensor]] = {
        "clipped_silu": lambda gate: silu(gate.clamp(max=limit)),
        "capped_silu": lambda gate: silu(gate).clamp(max=limit),
    }
    return Neuron(limited[function.name], lambda up: up.clamp(-limit, limit))


# ---- the weights of an expert ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeuronBlock:
    """Dequantized rows of some neurons, float32 [n, d] each, and biases, float32 [n]; None in families without them."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "NeuronBlock":
        """Returns the block with each of its tensors changed."""
        gate, gate_bias, up_bias = (
            None if each is None else change(each) for each in (self.gate, self.gate_bias, self.up_bias)
        )
        return NeuronBlock(gate, change(self.up), change(self.down), gate_bias, up_bias)


class Expert(Protocol):
    """The weights of an expert, which come in blocks of neurons of bounded size."""

    def blocks(self) -> Iterator[NeuronBlock]:
        """Yields every neuron once, in stored order."""

    def down_bias(self) -> Tensor | None:
        """Returns the bias of the output, float32 [d], or None."""


# ---- an expert runs -------------------------------------------------------------------------------------------------


def run_expert(
    x: Tensor, expert: Expert, function: formats.NeuronFunction, selector: formats.Selector, threshold: float
) -> Tensor:
    """Returns the output of an expert for tokens x float32 [T, d], by the formula at the top: float32 [T, d].

    Source:  FloE Eq. 6 and CORM §4.2 for `up` and `gate`; `both` compares h itself.
    """
    y = resting_output(x, expert)
    for block in expert.blocks():
        values = activations(x, block, function)
        is_running = running(values.of(selector), threshold)
        y += torch.where(is_running, values.h, 0.0) @ block.down
    return y


def resting_output(x: Tensor, expert: Expert) -> Tensor:
    """Returns the output for tokens x float32 [T, d] if no neuron runs: the bias or zeros, float32 [T, d]."""
    bias = expert.down_bias()
    return torch.zeros_like(x) if bias is None else bias.repeat(len(x), 1)


@dataclass(frozen=True, slots=True)
class Activations:
    """The results of n neurons for T tokens, float32 [T, n] each: factor(u), act(g), and h(g, u)."""

    up: Tensor
    gate: Tensor
    h: Tensor

    def of(self, selector: formats.Selector) -> Tensor:
        """Returns the activation a of a selector kind."""
        return {"up": self.up, "gate": self.gate, "both": self.h, "none": self.h}[selector]


def activations(x: Tensor, block: NeuronBlock, function: formats.NeuronFunction) -> Activations:
    """Computes a block's neurons for tokens x float32 [T, d]; without a gate all three results are h."""
    neuron = neuron_of(function)
    u = x @ block.up.T
    if block.up_bias is not None:
        u = u + block.up_bias
    if block.gate is None:
        h = neuron.act(u)
        return Activations(h, h, h)
    g = x @ block.gate.T
    if block.gate_bias is not None:
        g = g + block.gate_bias
    act, factor = neuron.act(g), neuron.factor(u)
    return Activations(up=factor, gate=act, h=act * factor)


def running(a: Tensor, threshold: float | Tensor) -> Tensor:
    """Returns which neurons run, bool in the shape of `a`: `a != 0 and not (abs(a) < threshold)`."""
    return (a != 0) & ~(a.abs() < threshold)
