"""Mixers, which replace attention in some layers, a function a kind, and the n-grams of a layer.

Short convolutions and recurrences are operations, because kernels compute them; their torch twins are in `recurrence`.
docs/model.md says what each kind computes.
"""

import math

import torch
from torch import Tensor

from moe_pack.formats.parts import mixers
from moe_pack.runtime.model.caches import layer_cache, states
from moe_pack.runtime.model.compute import recurrence
from moe_pack.runtime.model.compute.matrices import linear
from moe_pack.runtime.model.compute.operations import Operations
from moe_pack.runtime.model.compute.softmax import joined
from moe_pack.runtime.model.compute.weights import Weights

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
    role, states = f"layers.{layer}.mixer", layer_cache.each_sequence(state, len(x))
    if isinstance(mixer, mixers.GatedDeltaSpec):
        return _gated_delta(x, weights, role, mixer, states)
    if isinstance(mixer, mixers.KimiDeltaSpec):
        return _kimi_delta(x, weights, role, mixer, states)
    if isinstance(mixer, mixers.Mamba2Spec):
        return _mamba2(x, weights, role, mixer, states)
    if isinstance(mixer, mixers.MambaSpec):
        return _mamba(x, weights, role, mixer, states)
    if isinstance(mixer, mixers.LightningSpec):
        return _lightning(x, weights, layer, mixer, states)
    return _short_conv(x, weights, role, mixer, states)


def _convolve(
    operations: Operations, x: Tensor, kernel: Tensor, bias: Tensor | None, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    each = [operations.convolve(x[own.rows], kernel, bias, own.cache) for own in states]
    return joined(each)


def _recur(
    operations: Operations,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor | None,
    states: layer_cache.Batch[states.LayerState],
) -> Tensor:
    each = []
    for own in states:
        rows, own_rate = own.rows, None if rate is None else rate[own.rows]
        each.append(operations.recur(q[rows], k[rows], v[rows], log_decay[rows], own_rate, own.cache))
    return joined(each)


def _gated_delta(
    x: Tensor, weights: Weights, role: str, spec: mixers.GatedDeltaSpec, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    operations, num_tokens = weights.operations, len(x)
    qkv, z, b, a = (_interleaved if spec.interleaved else _separate)(x, weights, role, spec)
    qkv = torch.nn.functional.silu(_convolve(operations, qkv, weights.vector(f"{role}.conv"), None, states))
    q, k, v = torch.split(qkv, [spec.key_width, spec.key_width, spec.value_width], dim=1)
    q, k = (_unit(each.view(num_tokens, spec.num_key_heads, spec.key_head_dim)) for each in (q, k))
    log_decay = -weights.vector(f"{role}.a_log").exp() * torch.nn.functional.softplus(
        a + weights.vector(f"{role}.dt_bias")
    )
    v = v.view(num_tokens, spec.num_value_heads, spec.value_head_dim)
    y = _recur(operations, q * spec.key_head_dim**-0.5, k, v, log_decay, b.sigmoid(), states)
    y = operations.rms_norm(y, weights.vector(f"{role}.out_norm"), weights.spec.norm.eps)
    gate = torch.nn.functional.silu if spec.gate == "silu" else torch.sigmoid
    return linear(y.flatten(1) * gate(z), weights.matrix(f"{role}.o"))


def _interleaved(
    x: Tensor, weights: Weights, role: str, spec: mixers.GatedDeltaSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values together, gates of outputs, logits of rates, and inputs of decays.

    Each key head has its query and key, the values it serves and their gates; and two numbers a value head.
    """
    shared, dk, dv = spec.num_value_heads // spec.num_key_heads, spec.key_head_dim, spec.value_head_dim
    qkvz = linear(x, weights.matrix(f"{role}.qkvz")).view(len(x), spec.num_key_heads, -1)
    q, k, v, z = torch.split(qkvz, [dk, dk, shared * dv, shared * dv], dim=2)
    ba = linear(x, weights.matrix(f"{role}.ba")).view(len(x), spec.num_key_heads, -1)
    b, a = torch.split(ba, [shared, shared], dim=2)
    return torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1), z.flatten(1), b.flatten(1), a.flatten(1)


def _separate(
    x: Tensor, weights: Weights, role: str, spec: mixers.GatedDeltaSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv, z, b, a = (linear(x, weights.matrix(f"{role}.{name}")) for name in ("qkv", "z", "b", "a"))
    return qkv, z, b, a


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _L2_EPS)


def _kimi_delta(
    x: Tensor, weights: Weights, role: str, spec: mixers.KimiDeltaSpec, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    operations, shape = weights.operations, (len(x), spec.num_heads, spec.head_dim)
    qkv = torch.cat([linear(x, weights.matrix(f"{role}.{name}")) for name in "qkv"], dim=1)
    kernel = torch.cat([weights.vector(f"{role}.{name}_conv") for name in "qkv"])
    qkv = torch.nn.functional.silu(_convolve(operations, qkv, kernel, None, states))
    q, k, v = (each.view(shape) for each in qkv.chunk(3, dim=1))
    step, gate = (
        linear(x, weights.matrix(f"{role}.{name}")) if spec.full_rank else _through(x, weights, f"{role}.{name}")
        for name in ("decay", "gate")
    )
    step = (step + weights.vector(f"{role}.dt_bias")).view(shape)
    rates = weights.vector(f"{role}.a_log").exp()[:, None]
    if spec.lower_bound is None:
        log_decay = -rates * torch.nn.functional.softplus(step)
    else:
        log_decay = spec.lower_bound * torch.sigmoid(rates * step)
    rate = linear(x, weights.matrix(f"{role}.b")).sigmoid()
    y = _recur(operations, _unit(q) * spec.head_dim**-0.5, _unit(k), v, log_decay, rate, states)
    y = operations.rms_norm(y, weights.vector(f"{role}.out_norm"), weights.spec.norm.eps)
    return linear(y.flatten(1) * gate.sigmoid(), weights.matrix(f"{role}.o"))


def _through(x: Tensor, weights: Weights, role: str) -> Tensor:
    return linear(linear(x, weights.matrix(f"{role}_a")), weights.matrix(f"{role}_b"))


def _mamba2(
    x: Tensor, weights: Weights, role: str, spec: mixers.Mamba2Spec, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    operations, silu, num_tokens = weights.operations, torch.nn.functional.silu, len(x)
    bias = weights.vector(f"{role}.in_bias") if spec.proj_bias else None
    projected = linear(x, weights.matrix(f"{role}.in"), bias)
    z, mixed, step = torch.split(projected, [spec.head_width, spec.conv_channels, spec.num_heads], dim=1)
    conv_bias = weights.vector(f"{role}.conv_bias") if spec.conv_bias else None
    mixed = silu(_convolve(operations, mixed, weights.vector(f"{role}.conv"), conv_bias, states))
    keys = spec.num_groups * spec.state_size
    v, k, q = torch.split(mixed, [spec.head_width, keys, keys], dim=1)
    v = v.view(num_tokens, spec.num_heads, spec.head_dim)
    k, q = (each.view(num_tokens, spec.num_groups, spec.state_size) for each in (k, q))
    step = torch.nn.functional.softplus(step + weights.vector(f"{role}.dt_bias")).clamp(min=spec.time_step_min)
    log_decay = -weights.vector(f"{role}.a_log").exp() * step
    y = _recur(operations, q, k, v * step[:, :, None], log_decay, None, states)
    y = (y + v * weights.vector(f"{role}.skip")[:, None]).flatten(1) * silu(z)
    grouped = y.view(num_tokens, spec.num_groups, -1)
    ones = torch.ones(grouped.shape[2], device=y.device)
    y = operations.rms_norm(grouped, ones, weights.spec.norm.eps).flatten(1) * weights.vector(f"{role}.out_norm")
    bias = weights.vector(f"{role}.o_bias") if spec.proj_bias else None
    return linear(y, weights.matrix(f"{role}.o"), bias)


def _mamba(
    x: Tensor, weights: Weights, role: str, spec: mixers.MambaSpec, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    operations, silu, eps = weights.operations, torch.nn.functional.silu, weights.spec.norm.eps
    bias = weights.vector(f"{role}.in_bias") if spec.proj_bias else None
    mixed, z = linear(x, weights.matrix(f"{role}.in"), bias).chunk(2, dim=1)
    conv_bias = weights.vector(f"{role}.conv_bias") if spec.conv_bias else None
    v = silu(_convolve(operations, mixed, weights.vector(f"{role}.conv"), conv_bias, states))
    parts = torch.split(linear(v, weights.matrix(f"{role}.x")), [spec.step_rank, spec.state_size, spec.state_size], 1)
    named = zip(parts, ("dt", "b", "c"), strict=True)
    step, k, q = (operations.rms_norm(part, weights.vector(f"{role}.{name}_norm"), eps) for part, name in named)
    step = linear(step, weights.matrix(f"{role}.dt"), weights.vector(f"{role}.dt_bias"))
    step = torch.nn.functional.softplus(step)[:, :, None]  # [T, channels, 1]
    log_decay = -weights.vector(f"{role}.a_log").view(spec.channels, -1).exp() * step
    y = _recur(operations, q[:, None], k[:, None], v[:, :, None] * step, log_decay, None, states)[:, :, 0]
    y = (y + v * weights.vector(f"{role}.skip")) * silu(z)
    return linear(y, weights.matrix(f"{role}.o"), weights.vector(f"{role}.o_bias") if spec.proj_bias else None)


def _short_conv(
    x: Tensor, weights: Weights, role: str, spec: mixers.ShortConvSpec, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    bias = {name: weights.vector(f"{role}.{name}_bias") if spec.bias else None for name in ("in", "conv", "o")}
    before, after, value = linear(x, weights.matrix(f"{role}.in"), bias["in"]).chunk(3, dim=1)
    y = _convolve(weights.operations, before * value, weights.vector(f"{role}.conv"), bias["conv"], states)
    return linear(after * y, weights.matrix(f"{role}.o"), bias["o"])


def _lightning(
    x: Tensor, weights: Weights, layer: int, spec: mixers.LightningSpec, states: layer_cache.Batch[states.LayerState]
) -> Tensor:
    operations, role = weights.operations, f"layers.{layer}.mixer"
    qkv = torch.nn.functional.silu(linear(x, weights.matrix(f"{role}.qkv")))
    q, k, v = qkv.view(len(x), spec.num_heads, 3, spec.head_dim).unbind(2)
    log_decay = -torch.tensor(spec.rates(layer), device=x.device).expand(len(x), -1)
    y = _recur(operations, q, k, v, log_decay, None, states).flatten(1)
    y = operations.rms_norm(y, weights.vector(f"{role}.out_norm"), spec.norm_eps)
    return linear(y * linear(x, weights.matrix(f"{role}.gate")).sigmoid(), weights.matrix(f"{role}.o"))


def ngram_output(x: Tensor, embedded: Tensor, weights: Weights, layer: int, state: states.LayerState) -> Tensor:
    """Returns the output of a layer's n-grams for new tokens, float32 [T, streams * d]; they update the layer's state.

    Args:    x: float32 [T, streams * d].   embedded: float32 [T, embed_dim], the tokens' rows of the layer's table.
    """
    ngrams, role, d = weights.spec.ngrams_of(layer), f"layers.{layer}.ngrams", weights.spec.hidden_size
    assert ngrams is not None, f"layer {layer} has n-grams"
    shape, embedded = (len(x), x.shape[1] // d, d), embedded.to(x.device)

    def normed(y: Tensor, name: str) -> Tensor:
        ones = torch.ones(d, device=y.device)
        scaled = weights.operations.rms_norm(y.view(shape), ones, weights.spec.norm.eps)
        return scaled * weights.vector(f"{role}.{name}_norm").view(shape[1:])

    key, query = normed(linear(embedded, weights.matrix(f"{role}.key")), "key"), normed(x, "query")
    gate = (key * query).sum(dim=2, keepdim=True) / math.sqrt(d)
    gate = gate.abs().clamp_min(_LEAST_GATE).sqrt() * gate.sign()
    value = gate.sigmoid() * linear(embedded, weights.matrix(f"{role}.value"))[:, None]
    inputs = normed(value, "conv").flatten(1)
    convolved = recurrence.convolve(inputs, weights.vector(f"{role}.conv"), None, state, ngrams.dilation)
    return value.flatten(1) + torch.nn.functional.silu(convolved)
