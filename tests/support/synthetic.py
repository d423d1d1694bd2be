"""Small synthetic packs, and what their layers see and choose when they run."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.convert import SyntheticTraits, skewed_popularity, synthesize
from moe_pack.formats import ModelSpec, Pack, Plan, Selector, part_format, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.parts import GatedDeltaSpec, GroupedQuerySpec, Mamba2Spec, MambaSpec, MixerSpec, ShortConvSpec
from moe_pack.runtime.model import (
    add_attention,
    embed,
    head,
    mlp_input,
    open_weights,
    operations_for,
    route_tokens,
    run_experts,
)
from moe_pack.runtime.model.caches import LayerRopes
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.model.layers import enter_second, run_unrouted, with_returned

CPU = torch.device("cpu")


def shrunk(name: str, num_layers: int = 3, hidden_size: int = 128, **changes: object) -> ModelSpec:
    """A published model with few layers, heads and experts, small matrices and a vocabulary of 512."""
    spec = model_spec(name, num_layers, 512)
    mixer = None if spec.mixer is None else shrunk_mixer(spec.mixer, hidden_size)
    attention = replace(spec.attention, num_heads=8)
    if isinstance(attention, GroupedQuerySpec):
        attention = replace(attention, num_kv_heads=min(8, attention.num_kv_heads))
    shared = None if spec.shared_expert is None else replace(spec.shared_expert, intermediate_size=64)
    spec = replace(
        spec,
        hidden_size=hidden_size,
        attention=attention,
        router=replace(spec.router, num_experts=min(24, spec.router.num_experts)),
        dense_intermediate_size=None if spec.dense_intermediate_size is None else 192,
        expert=replace(
            spec.expert, intermediate_size=64, extra_floats=hidden_size if "down" in spec.expert.bias else 0
        ),
        shared_expert=shared,
        mixer=mixer,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]  # fields of ModelSpec


def shrunk_mixer(mixer: MixerSpec, hidden_size: int) -> MixerSpec:
    if isinstance(mixer, GatedDeltaSpec):
        return replace(mixer, num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)
    if isinstance(mixer, MambaSpec):
        return replace(mixer, channels=2 * hidden_size, step_rank=8)
    if isinstance(mixer, ShortConvSpec):
        return replace(mixer, channels=hidden_size)
    if isinstance(mixer, Mamba2Spec):
        return replace(mixer, num_heads=4, head_dim=16, num_groups=min(2, mixer.num_groups))
    return replace(mixer, num_heads=4, head_dim=16)


def small(num_layers: int = 3, num_experts: int = 16, hidden_size: int = 256, intermediate_size: int = 64) -> ModelSpec:
    """A Mixtral of four narrow heads and 4,096 tokens."""
    spec = shrunk("mixtral-8x7b", 1, hidden_size, vocab_size=4096)
    assert isinstance(spec.attention, GroupedQuerySpec), "as Mixtral has it"
    return replace(
        spec,
        num_hidden_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        attention=replace(spec.attention, num_heads=4, num_kv_heads=2, head_dim=32),
        rope=replace(spec.rotation, rotary_dim=32),
        router=replace(spec.router, num_experts=num_experts),
        expert=replace(spec.expert, intermediate_size=intermediate_size),
    )


def plan_for(
    spec: ModelSpec,
    selector: Selector = "up",
    width: int = 4,
    group: int = 64,
    scale_bits: int = 16,
    dense: bool = True,
) -> Plan:
    """Everything stored alike; bfloat16 where not `dense`."""
    part = part_format(width, group, scale_bits)
    return uniform_plan(spec, selector, part, part, part if dense and width < 16 else None, "nearest")


def character(
    spec: ModelSpec, sparsity: float = 0.0, skew: float = 0.0, path: float = 0.0, seed: int = 0
) -> SyntheticTraits:
    return SyntheticTraits(sparsity, skewed_popularity(spec, skew, seed), path, seed)


def made(spec: ModelSpec, folder: Path, like: SyntheticTraits | None = None, plan: Plan | None = None) -> Path:
    synthesize(spec, plan or plan_for(spec), like or character(spec), folder, workers=1)
    return folder


@dataclass(frozen=True)
class Run:
    """A run over some tokens: experts of each MoE layer, [T, k]; the hidden state's rms after each layer."""

    routes: list[NDArray[np.int64]]
    rms: list[float]
    logits: torch.Tensor


@torch.inference_mode()
def run(folder: Path, num_tokens: int, seed: int = 5) -> Run:
    with Pack(folder) as pack, operations_for(CPU) as operations:
        weights, spec = open_weights(pack, CPU, operations), pack.spec
        ids = torch.randint(spec.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
        cache, angles = KVCache(spec, num_tokens, CPU), LayerRopes(spec, CPU)(torch.arange(num_tokens), num_tokens)
        x, routes, rms = embed(ids, weights), [], []
        for layer in range(spec.num_hidden_layers):
            x = add_attention(x, weights, layer, cache.of(layer), angles[spec.attention_kind(layer)])
            if not spec.has_second(layer):
                continue
            inputs = mlp_input(x, weights, layer)
            unrouted = run_unrouted(inputs, weights, layer)
            routed = None
            if layer in spec.moe_layers:
                experts, router_weights = route_tokens(inputs, weights, layer, ids)
                routes.append(experts.numpy())
                routed = run_experts(inputs, experts, router_weights, weights, spec.moe_layers.index(layer))
            x = enter_second(x, unrouted, with_returned(routed, inputs, weights, layer), weights, layer)
            rms.append(float(x.pow(2).mean().sqrt()))
        return Run(routes, rms, head(x, weights))


def shares(routes: NDArray[np.int64], num_experts: int) -> NDArray[np.float64]:
    return np.bincount(routes.ravel(), minlength=num_experts) / len(routes)


def recall(before: NDArray[np.int64], after: NDArray[np.int64], num_experts: int) -> float:
    """How many of a token's experts the previous layer predicts, by counts of pairs over half of the tokens."""

    def chosen(routes: NDArray[np.int64]) -> NDArray[np.float64]:
        found = np.zeros((len(routes), num_experts))
        np.put_along_axis(found, routes, 1.0, axis=1)
        return found

    half, first, second = len(before) // 2, chosen(before), chosen(after)
    pairs = first[:half].T @ second[:half] / np.maximum(first[:half].sum(axis=0), 1)[:, None]
    predicted = np.argsort(-(first[half:] @ pairs), axis=1, kind="stable")[:, : after.shape[1]]
    return float(np.take_along_axis(second[half:], predicted, axis=1).mean())
