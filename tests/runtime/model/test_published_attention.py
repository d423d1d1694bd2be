"""Attention against the modules of transformers, with random weights: a prompt, and token by token."""

from dataclasses import replace

import pytest
import torch
from support.native import operations_limited_to
from support.random_weights import RandomWeights
from support.specs import GROUPED, LATENT
from torch import Tensor, nn
from transformers import AfmoeConfig, AXK2Config, BailingHybridConfig, HYV4Config, LagunaConfig, PreTrainedConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeAttention
from transformers.models.axk2.modeling_axk2 import AXK2Attention
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridAttention
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention
from transformers.models.laguna.modeling_laguna import LagunaAttention

from moe_pack.formats import ModelSpec
from moe_pack.formats.parts import GroupedQuerySpec, IndexerSpec, LatentSpec, OutputGateSpec, RopeSpec
from moe_pack.formats.parts.positions import ProportionalSpec
from moe_pack.runtime.model import TORCH, Operations, StoredMatrix, head
from moe_pack.runtime.model.attention.kinds import attend
from moe_pack.runtime.model.caches import LayerRopes
from moe_pack.runtime.model.kv_cache import KVCache

D, T, CPU = 64, 12, torch.device("cpu")
# Names of modules, of all kinds of attention here.
NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "q_norm": "q_norm", "k_norm": "k_norm",
    "gate_proj": "gate", "g_proj": "gate", "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "kv_b", "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b", "q_gate_proj": "q_b",
    "sinks": "sinks",
    "indexer.wq_b": "index_q", "indexer.wk": "index_k", "indexer.k_norm": "index_k_norm",
    "indexer.k_norm.bias": "index_k_norm_bias", "indexer.weights_proj": "index_weights",
}  # fmt: skip


class Layer:
    """The weights of a module as those of layer 0."""

    def __init__(self, spec: ModelSpec, module: nn.Module, operations: Operations) -> None:
        self.spec, self.operations = spec, operations
        self.tensors = {
            f"layers.0.attention.{NAMES[name.removesuffix('.weight')]}": tensor.detach()
            for name, tensor in module.named_parameters()
        }

    def matrix(self, role: str) -> StoredMatrix:
        return StoredMatrix(self.tensors[role])

    def vector(self, role: str) -> Tensor:
        return self.tensors[role]


@pytest.fixture(params=["torch", "native"])
def operations(request: pytest.FixtureRequest) -> Operations:
    return TORCH if request.param == "torch" else operations_limited_to("portable")


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for _, tensor in module.named_parameters():
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if tensor.dim() == 1 else 0.0)
    return module


def angles_of(rope: RopeSpec, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of T positions as modules take them: [1, T, width], those of pairs of halves twice."""
    (angles,) = LayerRopes(replace(GROUPED, rope=rope), CPU)(torch.arange(T), T)
    return tuple(torch.cat((each, each), dim=-1)[None, :, :width] for each in angles)  # type: ignore[return-value]


def mask_of(window: int | None) -> Tensor:
    """What each position sees, as scores to add: [1, 1, T, T]."""
    distance = torch.arange(T)[:, None] - torch.arange(T)[None]
    seen = (distance >= 0) & (distance < (window or T))
    return torch.zeros(T, T).masked_fill(~seen, -torch.inf)[None, None]


@torch.no_grad()
def check(module: nn.Module, spec: ModelSpec, expected: Tensor, x: Tensor, operations: Operations) -> None:
    held = Layer(spec, module, operations)
    cache, ropes = KVCache(spec, T, CPU, num_layers=1), LayerRopes(spec, CPU)

    def attended(start: int, stop: int) -> Tensor:
        (angles,) = ropes(torch.arange(start, stop), T)
        cache.num_tokens = start
        return attend(x[start:stop], held, 0, cache.layer(0), angles)  # type: ignore[arg-type]  # all that it asks for

    assert expected.abs().max() > 0.1
    for pieces in ([(0, T)], [(0, 5), *((i, i + 1) for i in range(5, T))]):
        found = torch.cat([attended(start, stop) for start, stop in pieces])
        assert (found - expected).abs().max() < 2e-5 * max(1.0, float(expected.abs().max()))


def inputs() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(2))


def with_attention(attention: GroupedQuerySpec | LatentSpec, rope: RopeSpec, eps: float) -> ModelSpec:
    like = GROUPED if isinstance(attention, GroupedQuerySpec) else LATENT
    return replace(like, attention=attention, rope=rope, norm=replace(like.norm, eps=eps))


def eager(config: PreTrainedConfig) -> PreTrainedConfig:
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def test_gates_of_values_are_trinity_s(operations: Operations) -> None:
    config = eager(AfmoeConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"], sliding_window=5,
    ))  # fmt: skip
    module, x = randomized(AfmoeAttention(config, 0)), inputs()
    rope = RopeSpec(1e4, 16, interleaved=False, scaling=None)
    expected, _ = module(x[None], angles_of(rope, 16), mask_of(5))
    attention = GroupedQuerySpec(
        "grouped_query", 4, 2, 16, 5, 0.25, (), "head", gate=OutputGateSpec("value", "sigmoid")
    )
    check(module, with_attention(attention, rope, config.rms_norm_eps), expected[0], x, operations)


@torch.no_grad()
@pytest.mark.parametrize("each", ["head", "value"])
def test_gates_of_softplus_are_laguna_s(operations: Operations, each: str) -> None:
    config = eager(LagunaConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
        layer_types=["full_attention"] * 2, gating="per-head" if each == "head" else "per-element",
    ))  # fmt: skip
    module, x = randomized(LagunaAttention(config, 0, 4)), inputs()
    rope = RopeSpec(1e4, 16, interleaved=False, scaling=None)
    expected, _ = module(x[None], angles_of(rope, 16), mask_of(None))
    gate = OutputGateSpec(each, "softplus")  # type: ignore[arg-type]  # one of both
    attention = GroupedQuerySpec("grouped_query", 4, 2, 16, None, 0.25, (), "head", gate=gate)
    check(module, with_attention(attention, rope, config.rms_norm_eps), expected[0], x, operations)


@torch.no_grad()
def test_gates_of_latent_heads_are_ling_s(operations: Operations) -> None:
    config = eager(BailingHybridConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, kv_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    ))  # fmt: skip
    module, x = randomized(BailingHybridAttention(config, 0)), inputs()
    rope = RopeSpec(1e4, 8, interleaved=True, scaling=None)
    expected, _ = module(x[None], angles_of(rope, 8), mask_of(None))
    attention = LatentSpec(
        "latent", 4, None, 24, 16, 8, 12, module.scaling, module.kv_a_layernorm.variance_epsilon,
        gate=OutputGateSpec("head", "sigmoid"),
    )  # fmt: skip
    check(module, with_attention(attention, rope, 1e-6), expected[0], x, operations)


@torch.no_grad()
@pytest.mark.parametrize("top_k", [4, T])
def test_gates_that_come_with_queries_are_ax_k2_s(operations: Operations, top_k: int) -> None:
    config = eager(AXK2Config(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, q_lora_rank=40,
        kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, index_n_heads=12, index_head_dim=20,
        index_topk=top_k,
    ))  # fmt: skip
    module, x = randomized(AXK2Attention(config, 0)), inputs()
    rope = RopeSpec(1e4, 8, interleaved=True, scaling=None)
    expected, _ = module(x[None], angles_of(rope, 8), mask_of(None))
    attention = LatentSpec(
        "latent", 4, 40, 24, 16, 8, 12, module.scaling, module.kv_a_layernorm.variance_epsilon,
        indexer=IndexerSpec(12, 20, top_k), gated=True,
    )  # fmt: skip
    check(module, with_attention(attention, rope, 1e-6), expected[0], x, operations)


@torch.no_grad()
@pytest.mark.parametrize("top_k", [4, T])
def test_sinks_of_latent_heads_and_choices_by_last_values_are_hy4_s(operations: Operations, top_k: int) -> None:
    config = eager(HYV4Config(
        hidden_size=D, num_attention_heads=4, num_hidden_layers=2, q_lora_rank=40, kv_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, index_n_heads=12, index_head_dim=20, index_topk=top_k,
        rms_norm_eps=1e-3,
    ))  # fmt: skip
    module, x = randomized(HYV4Attention(config, 0)), inputs()
    rope = RopeSpec(1e4, 8, interleaved=False, scaling=None)
    expected, _, _ = module(x[None], angles_of(rope, 8), mask_of(None))
    attention = LatentSpec(
        "latent", 4, 40, 24, 16, 8, 12, module.scaling, module.kv_a_layernorm.variance_epsilon,
        indexer=IndexerSpec(12, 20, top_k, rotates_last=True, norm_eps=1e-3),
        gate=OutputGateSpec("value", "sigmoid"), sinks=True,
    )  # fmt: skip
    check(module, with_attention(attention, rope, 1e-3), expected[0], x, operations)


@torch.no_grad()
@pytest.mark.parametrize("is_sliding", [True, False])
def test_values_that_are_keys_and_their_norms_are_gemma_s(operations: Operations, is_sliding: bool) -> None:
    """Layers with a window have values of their own; the others have wider and fewer heads, partly rotated."""
    config = eager(Gemma4TextConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    ))  # fmt: skip
    module, x = randomized(Gemma4TextAttention(config, 0 if is_sliding else 1)), inputs()
    size, window = (16, 5) if is_sliding else (32, None)
    scaling = None if is_sliding else ProportionalSpec("proportional", 4, 1.0)
    rope = RopeSpec(1e4, size, interleaved=False, scaling=scaling)
    expected, _ = module(x[None], angles_of(rope, size), mask_of(window), {})
    attention = GroupedQuerySpec(
        "grouped_query", 4, 2 if is_sliding else 1, size, window, 1.0, (), "head",
        keys_as_values=not is_sliding, v_norm=True,
    )  # fmt: skip
    assert (module.v_proj is None) == attention.keys_as_values
    check(module, with_attention(attention, rope, config.rms_norm_eps), expected[0], x, operations)


@torch.no_grad()
def test_a_softcap_bounds_the_logits_after_their_scaling() -> None:
    plain = replace(GROUPED, logits_scaling=0.5)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(3)) * 4
    logits = head(x, RandomWeights(plain))
    found = head(x, RandomWeights(replace(plain, logits_softcap=1.5)))
    torch.testing.assert_close(found, 1.5 * torch.tanh(logits / 1.5))
    assert logits.abs().max() > 3 > 1.5 >= found.abs().max()
