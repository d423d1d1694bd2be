"""Mixers, which replace attention in some layers, a function a kind, and the n-grams of a layer.

Short convolutions and recurrences are operations, because kernels compute them; their torch twins are in `recurrence`.
docs/model.md says what each kind computes.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from moe_pack.formats.parts import mixers
from moe_pack.runtime.model.caches import layer_cache, states
from moe_pack.runtime.model.compute import recurrence
from moe_pack.runtime.model.compute.softmax import joined
from moe_pack.runtime.model.compute.weights import RoleWeights, Weights, unit

_L2_EPS = 1e-6  # of queries' and keys' lengths; no config names it
_LEAST_GATE = 1e-6  # of the size of a gate of n-grams before its root is taken; no config names it


def mix(
    x: Tensor,
    weights: Weights,
    layer: int,
    mixer: mixers.MixerSpec,
    state: states.LayerState | layer_cache.Batch[states.LayerState],
) -> Tensor:
    """Returns a layer's mixer for new tokens, float32 [T, d]; they update the layer's state.

    Args:    x: float32 [T, d], normed.   state: of one sequence, or of several with their tokens.
    """
    own = _LayerMixer(weights, layer, layer_cache.each_sequence(state, len(x)))
    if isinstance(mixer, mixers.GatedDeltaSpec):
        return _gated_delta(x, own, mixer)
    if isinstance(mixer, mixers.KimiDeltaSpec):
        return _kimi_delta(x, own, mixer)
    if isinstance(mixer, mixers.Mamba2Spec):
        return _mamba2(x, own, mixer)
    if isinstance(mixer, mixers.MambaSpec):
        return _mamba(x, own, mixer)
    if isinstance(mixer, mixers.LightningSpec):
        return _lightning(x, own, mixer, layer)
    return _short_conv(x, own, mixer)


class _LayerMixer(RoleWeights):
    """A mixer's weights, and the states of the sequences of a pass."""

    def __init__(self, weights: Weights, layer: int, states: layer_cache.Batch[states.LayerState]) -> None:
        super().__init__(weights, f"layers.{layer}.mixer")
        self._states, self._operations = states, weights.operations

    def convolve(self, x: Tensor, kernel: Tensor, has_bias: bool = False) -> Tensor:
        bias = self.vector("conv_bias") if has_bias else None
        return joined([self._operations.convolve(x[own.rows], kernel, bias, own.cache) for own in self._states])

    def recur(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor | None) -> Tensor:
        each = []
        for own in self._states:
            rows, own_rate = own.rows, None if rate is None else rate[own.rows]
            each.append(self._operations.recur(q[rows], k[rows], v[rows], log_decay[rows], own_rate, own.cache))
        return joined(each)


def _gated_delta(x: Tensor, own: _LayerMixer, spec: mixers.GatedDeltaSpec) -> Tensor:
    if spec.interleaved:
        qkv, z, b, a = _interleaved(x, own, spec)
    else:
        qkv, z, b, a = (own.linear(x, name) for name in ("qkv", "z", "b", "a"))
    qkv = silu(own.convolve(qkv, own.vector("conv")))
    q, k, v = torch.split(qkv, [spec.key_width, spec.key_width, spec.value_width], dim=1)
    q, k = (_normalized(each.view(len(x), spec.num_key_heads, spec.key_head_dim)) for each in (q, k))
    log_decay = -own.vector("a_log").exp() * softplus(a + own.vector("dt_bias"))
    v = v.view(len(x), spec.num_value_heads, spec.value_head_dim)
    y = own.norm(own.recur(q * spec.key_head_dim**-0.5, k, v, log_decay, b.sigmoid()), "out_norm")
    return own.linear(y.flatten(1) * (silu if spec.gate == "silu" else torch.sigmoid)(z), "o")


def _interleaved(x: Tensor, own: _LayerMixer, spec: mixers.GatedDeltaSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values together, gates, logits of rates, and inputs of decays, from rows a key head."""
    shared, dk, dv = spec.num_value_heads // spec.num_key_heads, spec.key_head_dim, spec.value_head_dim
    qkvz = own.linear(x, "qkvz").view(len(x), spec.num_key_heads, -1)
    q, k, v, z = torch.split(qkvz, [dk, dk, shared * dv, shared * dv], dim=2)
    ba = own.linear(x, "ba").view(len(x), spec.num_key_heads, -1)
    b, a = torch.split(ba, [shared, shared], dim=2)
    return torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1), z.flatten(1), b.flatten(1), a.flatten(1)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _L2_EPS)


def _kimi_delta(x: Tensor, own: _LayerMixer, spec: mixers.KimiDeltaSpec) -> Tensor:
    shape = len(x), spec.num_heads, spec.head_dim
    qkv = torch.cat([own.linear(x, name) for name in "qkv"], dim=1)
    qkv = silu(own.convolve(qkv, torch.cat([own.vector(f"{name}_conv") for name in "qkv"])))
    q, k, v = (each.view(shape) for each in qkv.chunk(3, dim=1))
    step, gate = (
        own.linear(x, name) if spec.full_rank else own.linear(own.linear(x, f"{name}_a"), f"{name}_b")
        for name in ("decay", "gate")
    )
    step = (step + own.vector("dt_bias")).view(shape)
    rates = own.vector("a_log").exp()[:, None]
    bound = spec.lower_bound
    log_decay = -rates * softplus(step) if bound is None else bound * torch.sigmoid(rates * step)
    rate = own.linear(x, "b").sigmoid()
    y = own.recur(_normalized(q) * spec.head_dim**-0.5, _normalized(k), v, log_decay, rate)
    return own.linear(own.norm(y, "out_norm").flatten(1) * gate.sigmoid(), "o")


def _mamba2(x: Tensor, own: _LayerMixer, spec: mixers.Mamba2Spec) -> Tensor:
    projected = own.linear(x, "in", spec.proj_bias)
    z, mixed, step = torch.split(projected, [spec.head_width, spec.conv_channels, spec.num_heads], dim=1)
    mixed = silu(own.convolve(mixed, own.vector("conv"), spec.conv_bias))
    keys = spec.num_groups * spec.state_size
    v, k, q = torch.split(mixed, [spec.head_width, keys, keys], dim=1)
    v = v.view(len(x), spec.num_heads, spec.head_dim)
    k, q = (each.view(len(x), spec.num_groups, spec.state_size) for each in (k, q))
    step = softplus(step + own.vector("dt_bias")).clamp(min=spec.time_step_min)
    y = own.recur(q, k, v * step[:, :, None], -own.vector("a_log").exp() * step, None)
    y = (y + v * own.vector("skip")[:, None]).flatten(1) * silu(z)
    y = unit(y.view(len(x), spec.num_groups, -1), own.weights).flatten(1) * own.vector("out_norm")
    return own.linear(y, "o", spec.proj_bias)


def _mamba(x: Tensor, own: _LayerMixer, spec: mixers.MambaSpec) -> Tensor:
    mixed, z = own.linear(x, "in", spec.proj_bias).chunk(2, dim=1)
    v = silu(own.convolve(mixed, own.vector("conv"), spec.conv_bias))
    parts = torch.split(own.linear(v, "x"), [spec.step_rank, spec.state_size, spec.state_size], 1)
    step, k, q = (own.norm(part, f"{name}_norm") for part, name in zip(parts, ("dt", "b", "c"), strict=True))
    step = softplus(own.linear(step, "dt", has_bias=True))[:, :, None]  # [T, channels, 1]
    log_decay = -own.vector("a_log").view(spec.channels, -1).exp() * step
    y = own.recur(q[:, None], k[:, None], v[:, :, None] * step, log_decay, None)[:, :, 0]
    return own.linear((y + v * own.vector("skip")) * silu(z), "o", spec.proj_bias)


def _short_conv(x: Tensor, own: _LayerMixer, spec: mixers.ShortConvSpec) -> Tensor:
    before, after, value = own.linear(x, "in", spec.bias).chunk(3, dim=1)
    return own.linear(after * own.convolve(before * value, own.vector("conv"), spec.bias), "o", spec.bias)


def _lightning(x: Tensor, own: _LayerMixer, spec: mixers.LightningSpec, layer: int) -> Tensor:
    qkv = silu(own.linear(x, "qkv"))
    q, k, v = qkv.view(len(x), spec.num_heads, 3, spec.head_dim).unbind(2)
    log_decay = -torch.tensor(spec.rates(layer), device=x.device).expand(len(x), -1)
    y = own.norm(own.recur(q, k, v, log_decay, None).flatten(1), "out_norm", spec.norm_eps)
    return own.linear(y * own.linear(x, "gate").sigmoid(), "o")


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
    convolved = recurrence.convolve(inputs, own.vector("conv"), None, state, ngrams.dilation)
    return value.flatten(1) + silu(convolved)
