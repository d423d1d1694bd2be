"""The reference semantics of an expert (docs/model.md, "Expert"): every faster path gives this answer.

For a hidden state x, an expert adds up the down rows of the neurons that run:

    y = bias of down + sum over running neurons i of  h(gate_i . x, up_i . x) * down_i

    h(g, u) = act(g) * factor(u)    the neuron function; without a gate h(u) = act(u)

A neuron runs if its activation a is not zero and not below the expert's threshold t:

    neuron i runs  if  a_i != 0 and not (abs(a_i) < t)

The selector kind of the pack says what a is, so that it is known before the neuron's record is read: `up` takes
factor(u), `gate` takes act(g), `both` and `none` take h itself. With t = 0 only neurons that add nothing do not run. A
neuron whose activation is NaN runs, so that the error shows in the output.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

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


def _squared_relu(gate: Tensor) -> Tensor:
    return torch.relu(gate).square()


def _clamped_swish(gate: Tensor) -> Tensor:
    clamped = gate.clamp(max=_CLAMP_LIMIT)
    return clamped * torch.sigmoid(_SWISH_STEEPNESS * clamped)


def _clamped_plus_one(up: Tensor) -> Tensor:
    return up.clamp(-_CLAMP_LIMIT, _CLAMP_LIMIT) + 1


def _gelu_tanh(gate: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh")


def _clipped_silu(limit: float, gate: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit))


def _capped_silu(limit: float, gate: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate).clamp(max=limit)


def _within(limit: float, up: Tensor) -> Tensor:
    return up.clamp(-limit, limit)


_NEURONS: dict[formats.NeuronFunction, Neuron] = {
    "silu": Neuron(torch.nn.functional.silu, _identity),
    "relu": Neuron(torch.relu, _identity),
    "relu2": Neuron(_squared_relu, _identity),
    "clamped_swiglu": Neuron(_clamped_swish, _clamped_plus_one),
    "gelu_tanh": Neuron(_gelu_tanh, _identity),
}
_LIMITED: dict[str, Callable[[float, Tensor], Tensor]] = {"clipped_silu": _clipped_silu, "capped_silu": _capped_silu}


def neuron_of(function: formats.NeuronFunction) -> Neuron:
    """Returns what a neuron function computes."""
    if not isinstance(function, formats.LimitedFunction):
        return _NEURONS[function]
    return Neuron(partial(_LIMITED[function.name], function.limit), partial(_within, function.limit))


# ---- the weights of an expert ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeuronBlock:
    """Dequantized rows of some neurons of an expert: float32 [n, d] each; `gate` is None in families without one.

    Biases are float32 [n]; None in families without them.
    """

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
        ...

    def down_bias(self) -> Tensor | None:
        """Returns the bias of the output, float32 [d]; None in families without one."""
        ...


# ---- an expert runs -------------------------------------------------------------------------------------------------


def run_expert(
    x: Tensor, expert: Expert, function: formats.NeuronFunction, selector: formats.Selector, threshold: float
) -> Tensor:
    """Returns the output of an expert for tokens, by the formula at the top.

    Args:    x: float32 [T, d].   threshold: t, on `abs(a)`.
    Returns: float32 [T, d].
    Source:  FloE Eq. 6 and CORM §4.2 for `up` and `gate`; `both` compares h itself.
    """
    y = resting_output(x, expert)
    for block in expert.blocks():
        values = activations(x, block, function)
        is_running = running(values.of(selector), threshold)
        y += torch.where(is_running, values.h, 0.0) @ block.down
    return y


def resting_output(x: Tensor, expert: Expert) -> Tensor:
    """Returns the output for tokens x float32 [T, d] of which no neuron runs: the bias or zeros, float32 [T, d]."""
    bias = expert.down_bias()
    return torch.zeros_like(x) if bias is None else bias.repeat(len(x), 1)


@dataclass(frozen=True, slots=True)
class Activations:
    """What n neurons compute for T tokens, float32 [T, n] each: `up` is factor(u), `gate` is act(g), `h` is h(g, u)."""

    up: Tensor
    gate: Tensor
    h: Tensor

    def of(self, selector: formats.Selector) -> Tensor:
        """Returns the activation a of a selector kind, which a threshold is compared with."""
        return {"up": self.up, "gate": self.gate, "both": self.h, "none": self.h}[selector]


def activations(x: Tensor, block: NeuronBlock, function: formats.NeuronFunction) -> Activations:
    """Returns what a block's neurons compute for tokens x float32 [T, d]; without a gate all three are h."""
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
