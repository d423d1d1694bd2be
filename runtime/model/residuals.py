"""Residuals: how the halves of a layer read and change the hidden states, a class a kind.

    plain:  x = x + attention(norm(x));  x = x + mlp(norm(x))

Between layers, hidden states are float32 [T, w], where w is d, or with several streams a multiple of it. A half gets
`half_input` and returns float32 [T, d]; `enter` or `enter_second` adds it.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_pack.formats import parts
from moe_pack.formats.parts import residual
from moe_pack.runtime.model.compute.matrices import linear
from moe_pack.runtime.model.compute.weights import Weights, norm, unit


def scaled(x: Tensor, factor: float) -> Tensor:
    """Returns `x * factor`; x itself if the factor is 1, as in most families."""
    return x if factor == 1.0 else x * factor


class Residual:
    """The plain residual, and the base of the other kinds."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec

    def begin(self, x: Tensor) -> Tensor:
        """Returns the hidden states [T, w] before the first layer, from embeddings float32 [T, d]."""
        return x

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        """Returns the input of a half of a layer, float32 [T, d], from hidden states [T, w]."""
        return norm(x, weights, f"layers.{layer}.{half}_norm")

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        """Returns hidden states [T, w] after a half of a layer with output y float32 [T, d]."""
        return x + scaled(y, weights.spec.residual_multiplier)

    def enter_second(
        self, x: Tensor, unrouted: Tensor | None, routed: Tensor | None, weights: Weights, layer: int
    ) -> Tensor:
        """Returns hidden states [T, w] after a layer, from x after its first half and one or both outputs [T, d]."""
        return self.enter(x, _sum(unrouted, routed), weights, layer, "mlp")

    def end(self, x: Tensor, weights: Weights) -> Tensor:
        """Returns the input of the head, float32 [T, d], from hidden states [T, w] after the last layer."""
        return norm(x, weights, "norm")

    def experts_norm(self, weights: Weights, layer: int) -> Tensor | None:
        """Returns the weights of a norm of a layer's routed experts alone, float32 [d], or None."""
        return None

    def shared_norm(self, weights: Weights, layer: int) -> Tensor | None:
        """Returns the same of its shared expert."""
        return None


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor:
    given = [each for each in (second, first) if each is not None]
    assert given, "a layer with a second half has an output"
    return given[0] if len(given) == 1 else given[0] + given[1]


class _Normed(Residual):
    """Norms outputs before they are added."""

    _spec: parts.NormedResidualSpec

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        if self._spec.has_input_norm(half, layer in weights.spec.moe_layers):
            return super().half_input(x, weights, layer, half)
        return unit(x, weights) if self._spec.apart and half == "mlp" else x

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        if self._spec.has_output_norm(half, layer in weights.spec.moe_layers):
            y = norm(y, weights, f"layers.{layer}.{half}_post_norm")
        if not self._spec.by_depth:
            return super().enter(x, y, weights, layer, half)
        number = 2 * layer + (2 if half == "attention" else 3)  # of summands so far, which all weigh the same
        return x * math.sqrt((number - 1) / number) + y * math.sqrt(1 / number)

    def enter_second(
        self, x: Tensor, unrouted: Tensor | None, routed: Tensor | None, weights: Weights, layer: int
    ) -> Tensor:
        role = f"layers.{layer}"
        if self._spec.apart and unrouted is not None and routed is not None:
            unrouted = norm(unrouted, weights, f"{role}.shared_post_norm")
            routed = norm(routed, weights, f"{role}.experts_post_norm")
        x = super().enter_second(x, unrouted, routed, weights, layer)
        return x * weights.vector(f"{role}.scale") if self._spec.scaled else x

    def experts_norm(self, weights: Weights, layer: int) -> Tensor | None:
        return weights.vector(f"layers.{layer}.experts_norm") if self._spec.apart else None

    def shared_norm(self, weights: Weights, layer: int) -> Tensor | None:
        return weights.vector(f"layers.{layer}.shared_norm") if self._spec.apart else None


class _NormedState(Residual):
    """A half's output is added to the normed hidden states that it read."""

    _spec: parts.NormedStateSpec

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        factors = self._spec.mlp if half == "mlp" else self._spec.attention
        if half == "attention" and weights.spec.mixer_of(layer) is not None:
            assert self._spec.mixer is not None, "a checked spec"
            factors = self._spec.mixer
        return scaled(norm(x, weights, f"layers.{layer}.{half}_norm"), factors.state) + scaled(y, factors.output)


class _GatedNorms(Residual):
    """The normed input of a half goes through gates, which second halves without routed experts lack."""

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        x = super().half_input(x, weights, layer, half)
        if half == "mlp" and layer not in weights.spec.moe_layers:
            return x
        role = f"layers.{layer}.{half}_gates"
        gates = torch.nn.functional.silu(linear(x, weights.matrix(f"{role}.down")))
        return x * linear(gates, weights.matrix(f"{role}.up")).sigmoid()


# ---- several residual streams ---------------------------------------------------------------------------------------


class _Waiting(Residual):
    """Two streams: the hidden states, and an output that is added later."""

    def begin(self, x: Tensor) -> Tensor:
        return torch.cat((x, torch.zeros_like(x)), dim=1)

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        return super().half_input(x[:, : weights.spec.hidden_size], weights, layer, half)

    def end(self, x: Tensor, weights: Weights) -> Tensor:
        return super().end(x[:, : weights.spec.hidden_size], weights)


class _Shortcut(_Waiting):
    """The routed experts of some layers join the hidden states one layer later."""

    _spec: parts.ShortcutResidualSpec

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        d = weights.spec.hidden_size
        return torch.cat((x[:, :d] + y, x[:, d:]), dim=1)

    def enter_second(
        self, x: Tensor, unrouted: Tensor | None, routed: Tensor | None, weights: Weights, layer: int
    ) -> Tensor:
        d, waiting = weights.spec.hidden_size, routed if layer in self._spec.layers else None
        y = _sum(_sum(unrouted, None if waiting is not None else routed), x[:, d:])
        return torch.cat((x[:, :d] + y, torch.zeros_like(y) if waiting is None else waiting), dim=1)


class _Parallel(_Waiting):
    """Both halves read the same hidden states, through one norm, and are added together."""

    _spec: parts.ParallelResidualSpec

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        return super().half_input(x, weights, layer, "attention")

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        return torch.cat((x[:, : weights.spec.hidden_size], y), dim=1)

    def enter_second(
        self, x: Tensor, unrouted: Tensor | None, routed: Tensor | None, weights: Weights, layer: int
    ) -> Tensor:
        d, y = weights.spec.hidden_size, _sum(unrouted, routed)
        if self._spec.averaged and unrouted is not None and routed is not None:
            y = y / 2
        return self.begin(x[:, :d] + x[:, d:] + y)


class _GatedStreams(Residual):
    """A half reads the average of the normed streams, each value behind a gate, and enters each stream by a weight."""

    _spec: parts.GatedStreamsSpec

    def begin(self, x: Tensor) -> Tensor:
        return x.repeat(1, self._spec.streams)

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        return self._average(x, weights, f"layers.{layer}.{half}_streams")

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        role = f"layers.{layer}.{half}_streams"
        inject = linear(self._normed(x, weights, role), weights.matrix(f"{role}.inject"))
        return x + ((2 * (inject / self._spec.streams).sigmoid())[:, :, None] * y[:, None]).flatten(1)

    def end(self, x: Tensor, weights: Weights) -> Tensor:
        return self._average(x, weights, "streams")

    def _normed(self, x: Tensor, weights: Weights, role: str) -> Tensor:
        return unit(x.view(len(x), self._spec.streams, -1), weights).flatten(1) * weights.vector(f"{role}.norm")

    def _average(self, x: Tensor, weights: Weights, role: str) -> Tensor:
        normed = self._normed(x, weights, role)
        gates = torch.nn.functional.silu(linear(normed, weights.matrix(f"{role}.down")) / self._spec.streams)
        gates = linear(gates, weights.matrix(f"{role}.up")).sigmoid()
        return (gates * normed).view(len(x), self._spec.streams, -1).mean(dim=1)


class _MixedStreams(Residual):
    """A half reads a weighted sum of the streams, normed, and enters each; the streams are mixed."""

    _spec: parts.MixedStreamsSpec

    def begin(self, x: Tensor) -> Tensor:
        return x.repeat(1, self._spec.streams)

    def half_input(self, x: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        read, _, _ = self._shares(x, weights, f"layers.{layer}.{half}_streams")
        return norm(_weighted(x, read), weights, f"layers.{layer}.{half}_norm")

    def enter(self, x: Tensor, y: Tensor, weights: Weights, layer: int, half: residual.Half) -> Tensor:
        _, enter, mix = self._shares(x, weights, f"layers.{layer}.{half}_streams")
        if mix is not None:
            x = (mix.transpose(1, 2) @ x.view(len(x), self._spec.streams, -1)).flatten(1)
        return x + (enter[:, :, None] * y[:, None]).flatten(1)

    def end(self, x: Tensor, weights: Weights) -> Tensor:
        found = linear(unit(x, weights), weights.matrix("streams.weights")) * weights.vector("streams.scale")
        shares = (found + weights.vector("streams.base")).sigmoid() + self._spec.eps
        return norm(_weighted(x, shares), weights, "norm")

    def _shares(self, x: Tensor, weights: Weights, role: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns shares by which streams are read [T, n], entered [T, n], and mixed [T, n, n] (j in k) or None."""
        spec, n, scale = self._spec, self._spec.streams, weights.vector(f"{role}.scale")
        found = linear(unit(x, weights), weights.matrix(f"{role}.weights"))
        base = weights.vector(f"{role}.base")
        read = (found[:, :n] * scale[0] + base[:n]).sigmoid() + spec.eps
        enter = spec.magnitude * (found[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
        if not spec.mixing:
            return read, enter + spec.eps, None
        mix = (found[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(dim=-1) + spec.eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + spec.eps)
        for _ in range(spec.mixing - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + spec.eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + spec.eps)
        return read, enter, mix


def _weighted(x: Tensor, shares: Tensor) -> Tensor:
    return (x.view(*shares.shape, -1) * shares[:, :, None]).sum(dim=1)


_KINDS: dict[type, type[Residual]] = {
    parts.NormedResidualSpec: _Normed,
    parts.NormedStateSpec: _NormedState,
    parts.GatedNormsSpec: _GatedNorms,
    parts.ShortcutResidualSpec: _Shortcut,
    parts.ParallelResidualSpec: _Parallel,
    parts.GatedStreamsSpec: _GatedStreams,
    parts.MixedStreamsSpec: _MixedStreams,
}


@lru_cache(maxsize=64)
def residual_of(spec: residual.ResidualSpec | None) -> Residual:
    """Returns the residual of a model; None: the plain one."""
    return (Residual if spec is None else _KINDS[type(spec)])(spec)
