"""Mixers, which replace attention in some layers, a function a kind, and the n-grams of a layer.

Short convolutions and recurrences are operations, because kernels compute them; their torch twins are in `recurrence`.
docs/model.md says what each kind computes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from moe_pack.formats.parts import mixers
from moe_pack.runtime.model.caches import layer_cache, states
from moe_pack.runtime.model.compute import recurrence
from moe_pack.runtime.model.compute.recurrence import normalized
from moe_pack.runtime.model.compute.softmax import joined
from moe_pack.runtime.model.compute.weights import RoleWeights, Weights, unit

_LEAST_GATE = 1e-6  # of the size of a gate of n-grams before its root is taken; no config names it


State = states.LayerState | layer_cache.Batch[states.LayerState]  # of one sequence, or of several with their tokens
Projected = Mapping[str, Tensor]  # float32 [T, n] each, by the matrix's name


class Projections(NamedTuple):
    """The matrices of a mixer that multiply its input, by name. The matrix `o` multiplies what the mixer computes."""

    names: tuple[str, ...]
    has_bias: bool = False  # of these, and of `o`


def mix(x: Tensor, weights: Weights, layer: int, mixer: mixers.MixerSpec, state: State) -> Tensor:
    """Returns a layer's mixer for new tokens, float32 [T, d]; they update the layer's state.

    Args:    x: float32 [T, d], normed.
    """
    own, (names, has_bias) = RoleWeights(weights, f"layers.{layer}.mixer"), projections_of(mixer)
    projected = {name: own.linear(x, name, True) for name in names} if has_bias else own.linear_each(x, names)
    return own.linear(mix_projected(projected, weights, layer, mixer, state), "o", has_bias)


def projections_of(mixer: mixers.MixerSpec) -> Projections:
    """Returns the matrices that multiply a mixer's input."""
    if isinstance(mixer, mixers.GatedDeltaSpec):
        return Projections(("qkvz", "ba") if mixer.interleaved else ("qkv", "z", "b", "a"))
    if isinstance(mixer, mixers.KimiDeltaSpec):
        return Projections(("q", "k", "v", *(("decay", "gate") if mixer.full_rank else ("decay_a", "gate_a")), "b"))
    if isinstance(mixer, mixers.Mamba2Spec | mixers.MambaSpec):
        return Projections(("in",), mixer.proj_bias)
    if isinstance(mixer, mixers.LightningSpec):
        return Projections(("qkv", "gate"))
    return Projections(("in",), mixer.bias)


def mix_projected(projected: Projected, weights: Weights, layer: int, mixer: mixers.MixerSpec, state: State) -> Tensor:
    """Returns the input of a mixer's matrix `o`, float32 [T, n], from the products of `projections_of`."""
    num_tokens = len(next(iter(projected.values())))
    own = _LayerMixer(weights, layer, layer_cache.each_sequence(state, num_tokens))
    if isinstance(mixer, mixers.GatedDeltaSpec):
        return _gated_delta(projected, own, mixer)
    if isinstance(mixer, mixers.KimiDeltaSpec):
        return _kimi_delta(projected, own, mixer)
    if isinstance(mixer, mixers.Mamba2Spec):
        return _mamba2(projected["in"], own, mixer)
    if isinstance(mixer, mixers.MambaSpec):
        return _mamba(projected["in"], own, mixer)
    if isinstance(mixer, mixers.LightningSpec):
        return _lightning(projected, own, mixer, layer)
    return _short_conv(projected["in"], own, mixer)


class _LayerMixer(RoleWeights):
    """A mixer's weights, and the states of the sequences of a pass."""

    def __init__(self, weights: Weights, layer: int, states: layer_cache.Batch[states.LayerState]) -> None:
        super().__init__(weights, f"layers.{layer}.mixer")
        self._states, self._operations = states, weights.operations

    def convolve(self, x: Tensor, kernel: Tensor, has_bias: bool = False, activates: bool = True) -> Tensor:
        """Returns the short convolution, with silu if it `activates`."""
        bias, operations = self.vector("conv_bias") if has_bias else None, self._operations
        return joined(
            [operations.convolve(x[own.rows], kernel, bias, own.cache, activates=activates) for own in self._states]
        )

    def recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None) -> Tensor:
        each = []
        for own in self._states:
            rows, own_rate = own.rows, None if rate is None else rate[own.rows]
            each.append(self._operations.recur(q[rows], k[rows], v[rows], log_decay[rows], own_rate, own.cache))
        return joined(each)

    def gated_delta(self, qkv: Tensor, z: Tensor, gates: recurrence.Gates, spec: mixers.GatedDeltaSpec) -> Tensor:
        delta = recurrence.DeltaNet(spec, self.vector("conv"), self.vector("out_norm"), self.weights.spec.norm.eps)
        each = []
        for own in self._states:
            rows, operation = own.rows, self._operations.gated_delta
            each.append(operation(qkv[rows], z[rows], gates.of_rows(rows), delta, own.cache))
        return joined(each)

    def recur_gated(self, q: Tensor, k: Tensor, v: Tensor, gates: recurrence.Gates) -> Tensor:
        each = []
        for own in self._states:
            rows, recur = own.rows, self._operations.recur_gated
            each.append(recur(q[rows], k[rows], v[rows], gates.of_rows(rows), own.cache))
        return joined(each)


def _gated_delta(projected: Projected, own: _LayerMixer, spec: mixers.GatedDeltaSpec) -> Tensor:
    if spec.interleaved:
        qkv, z, b, a = _interleaved(projected, spec)
    else:
        qkv, z, b, a = (projected[name] for name in ("qkv", "z", "b", "a"))
    gates = recurrence.Gates(a, b, own.vector("a_log"), own.vector("dt_bias"))
    return own.gated_delta(qkv, z, gates, spec)


def _interleaved(projected: Projected, spec: mixers.GatedDeltaSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values together, gates, logits of rates, and inputs of decays, from rows a key head."""
    shared, dk, dv = spec.num_value_heads // spec.num_key_heads, spec.key_head_dim, spec.value_head_dim
    qkvz, ba = (each.view(len(each), spec.num_key_heads, -1) for each in (projected["qkvz"], projected["ba"]))
    q, k, v, z = torch.split(qkvz, [dk, dk, shared * dv, shared * dv], dim=2)
    b, a = torch.split(ba, [shared, shared], dim=2)
    return torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1), z.flatten(1), b.flatten(1), a.flatten(1)


def _kimi_delta(projected: Projected, own: _LayerMixer, spec: mixers.KimiDeltaSpec) -> Tensor:
    qkv = torch.cat([projected[name] for name in "qkv"], dim=1)
    shape = len(qkv), spec.num_heads, spec.head_dim
    qkv = own.convolve(qkv, torch.cat([own.vector(f"{name}_conv") for name in "qkv"]))
    q, k, v = (each.view(shape) for each in qkv.chunk(3, dim=1))
    step, gate = (
        projected[name] if spec.full_rank else own.linear(projected[f"{name}_a"], f"{name}_b")
        for name in ("decay", "gate")
    )
    step = (step + own.vector("dt_bias")).view(shape)
    rates = own.vector("a_log").exp()[:, None]
    bound = spec.lower_bound
    log_decay = -rates * softplus(step) if bound is None else bound * torch.sigmoid(rates * step)
    rate = projected["b"].sigmoid()
    y = own.recur(normalized(q) * spec.head_dim**-0.5, normalized(k), v, log_decay, rate)
    return own.norm(y, "out_norm").flatten(1) * gate.sigmoid()


def _mamba2(projected: Tensor, own: _LayerMixer, spec: mixers.Mamba2Spec) -> Tensor:
    num_tokens = len(projected)
    z, mixed, step = torch.split(projected, [spec.head_width, spec.conv_channels, spec.num_heads], dim=1)
    mixed = own.convolve(mixed, own.vector("conv"), spec.conv_bias)
    keys = spec.num_groups * spec.state_size
    v, k, q = torch.split(mixed, [spec.head_width, keys, keys], dim=1)
    v = v.view(num_tokens, spec.num_heads, spec.head_dim)
    k, q = (each.view(num_tokens, spec.num_groups, spec.state_size) for each in (k, q))
    vectors = own.vector("a_log"), own.vector("dt_bias")
    gates = recurrence.Gates(step, None, *vectors, spec.time_step_min, own.vector("skip"))
    y = own.recur_gated(q, k, v, gates).flatten(1) * silu(z)
    return unit(y.view(num_tokens, spec.num_groups, -1), own.weights).flatten(1) * own.vector("out_norm")


def _mamba(projected: Tensor, own: _LayerMixer, spec: mixers.MambaSpec) -> Tensor:
    mixed, z = projected.chunk(2, dim=1)
    v = own.convolve(mixed, own.vector("conv"), spec.conv_bias)
    parts = torch.split(own.linear(v, "x"), [spec.step_rank, spec.state_size, spec.state_size], 1)
    step, k, q = (own.norm(part, f"{name}_norm") for part, name in zip(parts, ("dt", "b", "c"), strict=True))
    step = softplus(own.linear(step, "dt", has_bias=True))[:, :, None]  # [T, channels, 1]
    log_decay = -own.vector("a_log").view(spec.channels, -1).exp() * step
    y = own.recur(q[:, None], k[:, None], v[:, :, None] * step, log_decay, None)[:, :, 0]
    return (y + v * own.vector("skip")) * silu(z)


def _short_conv(projected: Tensor, own: _LayerMixer, spec: mixers.ShortConvSpec) -> Tensor:
    before, after, value = projected.chunk(3, dim=1)
    return after * own.convolve(before * value, own.vector("conv"), spec.bias, activates=False)


def _lightning(projected: Projected, own: _LayerMixer, spec: mixers.LightningSpec, layer: int) -> Tensor:
    qkv = silu(projected["qkv"])
    q, k, v = qkv.view(len(qkv), spec.num_heads, 3, spec.head_dim).unbind(2)
    heads = torch.arange(1, spec.num_heads + 1, dtype=torch.float64, device=qkv.device)
    rates = spec.factor(layer) * torch.exp2(-8 * heads / spec.num_heads)
    log_decay = -rates.float().expand(len(qkv), -1)
    y = own.norm(own.recur(q, k, v, log_decay, None).flatten(1), "out_norm", spec.norm_eps)
    return y * projected["gate"].sigmoid()


def ngram_output(x: Tensor, embedded: Tensor, weights: Weights, layer: int, state: states.LayerState) -> Tensor:
    """Returns the output of a layer's n-grams for new tokens, float32 [T, streams * d]; they update the layer's state.

    Args:    x: float32 [T, streams * d].   embedded: float32 [T, embed_dim], the tokens' rows of the layer's table.
    """
    ngrams, d = weights.spec.ngrams_of(layer), weights.spec.hidden_size
    own = RoleWeights(weights, f"layers.{layer}.ngrams")
    assert ngrams is not None, f"layer {layer} has n-grams"
    shape, embedded = (len(x), x.shape[1] // d, d), embedded.to(x.device)

    def normed(y: Tensor, name: str) -> Tensor:
        return unit(y.view(shape), weights) * own.vector(f"{name}_norm").view(shape[1:])

    key, query = normed(own.linear(embedded, "key"), "key"), normed(x, "query")
    gate = (key * query).sum(dim=2, keepdim=True) / math.sqrt(d)
    gate = gate.abs().clamp_min(_LEAST_GATE).sqrt() * gate.sign()
    value = gate.sigmoid() * own.linear(embedded, "value")[:, None]
    inputs = normed(value, "conv").flatten(1)
    convolve = weights.operations.convolve
    return value.flatten(1) + convolve(
        inputs, own.vector("conv"), None, state, dilation=ngrams.dilation, activates=True
    )
