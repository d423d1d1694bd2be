"""Attention and routers against the modules of transformers, with random weights."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from support.cases import case
from support.native import operations_limited_to
from support.random_weights import RandomWeights
from support.specs import GROUPED, LATENT
from torch import Tensor, nn
from transformers import (
    AfmoeConfig,
    AXK2Config,
    BailingHybridConfig,
    DeepseekV4Config,
    HYV4Config,
    Kolibri1Config,
    LagunaConfig,
    LongcatFlashConfig,
    PreTrainedConfig,
)
from transformers.models.afmoe.modeling_afmoe import AfmoeAttention
from transformers.models.axk2.modeling_axk2 import AXK2Attention, AXK2TopkRouter
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridAttention
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention, Gemma4TextRouter
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaAttention
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

from moe_pack.formats import ModelSpec, RouterSpec
from moe_pack.formats.parts import GroupedQuerySpec, IndexerSpec, LatentSpec, OutputGateSpec, RopeSpec
from moe_pack.formats.parts.positions import ProportionalSpec
from moe_pack.runtime.model import TORCH, NeuronBlock, Operations, StoredMatrix, head, route_tokens
from moe_pack.runtime.model.attention.kinds import attend
from moe_pack.runtime.model.caches import LayerRopes
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.model.layers import router_logits, run_one_by_one, weights_of_experts, with_returned

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


def angles_of(rope: RopeSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines of T positions as modules take them: [1, T, rotary_dim], those of pairs of halves twice."""
    (angles,) = LayerRopes(replace(GROUPED, rope=rope), CPU)(torch.arange(T), T)
    return tuple(torch.cat((each, each), dim=-1)[None] for each in angles)  # type: ignore[return-value]


def mask_of(window: int | None) -> Tensor:
    """Scores to add, minus infinity for unseen positions: [1, 1, T, T]."""
    distance = torch.arange(T)[:, None] - torch.arange(T)[None]
    seen = (distance >= 0) & (distance < (window or T))
    return torch.zeros(T, T).masked_fill(~seen, -torch.inf)[None, None]


@torch.no_grad()
def check(
    module: nn.Module,
    attention: GroupedQuerySpec | LatentSpec,
    rope: RopeSpec,
    operations: Operations,
    eps: float = 1e-6,
    *others: object,
) -> None:
    """The layer has the answers of a module, which is given others too: for a prompt, and token by token."""
    window = attention.sliding_window if isinstance(attention, GroupedQuerySpec) else None
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(2))
    expected = randomized(module)(x[None], angles_of(rope), mask_of(window), *others)[0][0]
    like = GROUPED if isinstance(attention, GroupedQuerySpec) else LATENT
    spec = replace(like, attention=attention, rope=rope, norm=replace(like.norm, eps=eps))
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


def eager(config: PreTrainedConfig) -> PreTrainedConfig:
    config._attn_implementation = "eager"
    return config


def test_gates_of_values_are_trinity_s(operations: Operations) -> None:
    config = eager(AfmoeConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"], sliding_window=5,
    ))  # fmt: skip
    rope = RopeSpec(1e4, 16, interleaved=False, scaling=None)
    attention = GroupedQuerySpec(
        "grouped_query", 4, 2, 16, 5, 0.25, (), "head", gate=OutputGateSpec("value", "sigmoid")
    )
    check(AfmoeAttention(config, 0), attention, rope, operations, config.rms_norm_eps)


@pytest.mark.parametrize("each", ["head", "value"])
def test_gates_of_softplus_are_laguna_s(operations: Operations, each: str) -> None:
    config = eager(LagunaConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
        layer_types=["full_attention"] * 2, gating="per-head" if each == "head" else "per-element",
    ))  # fmt: skip
    rope = RopeSpec(1e4, 16, interleaved=False, scaling=None)
    gate = OutputGateSpec(each, "softplus")  # type: ignore[arg-type]  # one of both
    attention = GroupedQuerySpec("grouped_query", 4, 2, 16, None, 0.25, (), "head", gate=gate)
    check(LagunaAttention(config, 0, 4), attention, rope, operations, config.rms_norm_eps)


def test_gates_of_latent_heads_are_ling_s(operations: Operations) -> None:
    config = eager(BailingHybridConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, kv_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    ))  # fmt: skip
    module = BailingHybridAttention(config, 0)
    rope = RopeSpec(1e4, 8, interleaved=True, scaling=None)
    attention = LatentSpec(
        "latent", 4, None, 24, 16, 8, 12, module.scaling, module.kv_a_layernorm.variance_epsilon,
        gate=OutputGateSpec("head", "sigmoid"),
    )  # fmt: skip
    check(module, attention, rope, operations)


@pytest.mark.parametrize("top_k", [4, T])
def test_gates_that_come_with_queries_are_ax_k2_s(operations: Operations, top_k: int) -> None:
    config = eager(AXK2Config(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, q_lora_rank=40,
        kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, index_n_heads=12, index_head_dim=20,
        index_topk=top_k,
    ))  # fmt: skip
    module = AXK2Attention(config, 0)
    rope = RopeSpec(1e4, 8, interleaved=True, scaling=None)
    attention = LatentSpec(
        "latent", 4, 40, 24, 16, 8, 12, module.scaling, module.kv_a_layernorm.variance_epsilon,
        indexer=IndexerSpec(12, 20, top_k), gated=True,
    )  # fmt: skip
    check(module, attention, rope, operations)


@pytest.mark.parametrize("top_k", [4, T])
def test_sinks_of_latent_heads_and_choices_by_last_values_are_hy4_s(operations: Operations, top_k: int) -> None:
    config = eager(HYV4Config(
        hidden_size=D, num_attention_heads=4, num_hidden_layers=2, q_lora_rank=40, kv_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, index_n_heads=12, index_head_dim=20, index_topk=top_k,
        rms_norm_eps=1e-3,
    ))  # fmt: skip
    module = HYV4Attention(config, 0)
    rope = RopeSpec(1e4, 8, interleaved=False, scaling=None)
    attention = LatentSpec(
        "latent", 4, 40, 24, 16, 8, 12, module.scaling, module.kv_a_layernorm.variance_epsilon,
        indexer=IndexerSpec(12, 20, top_k, rotates_last=True, norm_eps=1e-3),
        gate=OutputGateSpec("value", "sigmoid"), sinks=True,
    )  # fmt: skip
    check(module, attention, rope, operations, 1e-3)


@pytest.mark.parametrize("is_sliding", [True, False])
def test_values_that_are_keys_and_their_norms_are_gemma_s(operations: Operations, is_sliding: bool) -> None:
    """Layers with a window have values of their own; the others have wider and fewer heads, partly rotated."""
    config = eager(Gemma4TextConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    ))  # fmt: skip
    module = Gemma4TextAttention(config, 0 if is_sliding else 1)
    size, window = (16, 5) if is_sliding else (32, None)
    scaling = None if is_sliding else ProportionalSpec("proportional", 4, 1.0)
    rope = RopeSpec(1e4, size, interleaved=False, scaling=scaling)
    attention = GroupedQuerySpec(
        "grouped_query", 4, 2 if is_sliding else 1, size, window, 1.0, (), "head",
        keys_as_values=not is_sliding, v_norm=True,
    )  # fmt: skip
    assert (module.v_proj is None) == attention.keys_as_values
    check(module, attention, rope, operations, config.rms_norm_eps, {})


@torch.no_grad()
def test_a_softcap_bounds_the_logits_after_their_scaling() -> None:
    plain = replace(GROUPED, logits_scaling=0.5)
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(3)) * 4
    logits = head(x, RandomWeights(plain))
    found = head(x, RandomWeights(replace(plain, logits_softcap=1.5)))
    torch.testing.assert_close(found, 1.5 * torch.tanh(logits / 1.5))
    assert logits.abs().max() > 3 > 1.5 >= found.abs().max()


NUM_ROUTED = 200


def random(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


@dataclass
class RouterLayer:
    """The weights of layer 0, by role; its experts are whole."""

    spec: ModelSpec
    tensors: dict[str, Tensor]
    experts: list[NeuronBlock] = field(default_factory=list)
    operations: Operations = TORCH
    selector: str = "none"
    brought: list[int] = field(default_factory=list)

    def matrix(self, role: str) -> StoredMatrix:
        return StoredMatrix(self.tensors[role.removeprefix("layers.0.")])

    def vector(self, role: str) -> Tensor:
        return self.tensors[role.removeprefix("layers.0.")]

    def expert(self, layer_idx: int, expert: int) -> "Whole":
        self.brought.append(expert)
        return Whole(self.experts[expert])

    def threshold(self, layer_idx: int, expert: int) -> float:
        return 0.0

    def rotation(self, layer_idx: int) -> None:
        return None


@dataclass
class Whole:
    """An expert in one block."""

    block: NeuronBlock

    def blocks(self) -> list[NeuronBlock]:
        return [self.block]

    def down_bias(self) -> None:
        return None


def randomized_router(module: nn.Module) -> nn.Module:
    for number, (_, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        tensor.data = random(*tensor.shape, seed=number, size=0.2)
    return module


def assert_same_choice(found: tuple[Tensor, Tensor], experts: Tensor, weights: Tensor, num_experts: int) -> None:
    """Whatever the order of a token's experts."""
    expected, made = (torch.zeros(NUM_ROUTED, num_experts) for _ in range(2))
    expected.scatter_(1, experts, weights)
    made.scatter_(1, *found)
    torch.testing.assert_close(made, expected, rtol=2e-5, atol=1e-7)


@torch.no_grad()
def test_the_scaled_router_is_gemma_s(operations: Operations) -> None:
    config = Gemma4TextConfig(hidden_size=D, num_experts=8, top_k_experts=3, enable_moe_block=True)
    module = randomized_router(Gemma4TextRouter(config))
    x = random(NUM_ROUTED, D, seed=9)
    _, weights, experts = module(x)
    router = RouterSpec("softmax_topk", 8, 3, normalize=True, input_scale=True, expert_scale=True)
    tensors = {"router": module.proj.weight, "router_scale": module.scale}
    held = RouterLayer(replace(GROUPED, router=router), tensors | {"router_expert_scale": module.per_expert_scale})
    held.operations = operations
    normed = module.norm(x)
    found = route_tokens(normed, held, 0)
    assert_same_choice(found, experts, weights, 8)
    again = weights_of_experts(router_logits(normed, held, 0), found[0], held, 0)
    torch.testing.assert_close(again, found[1])


BIASED = [
    (
        DeepseekV4TopKRouter(
            DeepseekV4Config(hidden_size=D, n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5)
        ),
        RouterSpec("sqrtsoftplus_topk", 8, 3, normalize=True, bias=True, scaling_factor=1.5),
    ),
    *(
        (
            Kolibri1TopKRouter(
                Kolibri1Config(hidden_size=D, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize)
            ),
            RouterSpec("topk_sigmoid", 8, 3, normalize=normalize, bias=True),
        )
        for normalize in (False, True)
    ),
]


@torch.no_grad()
def test_roots_of_softplus_are_deepseek_s_and_the_largest_logits_kolibri_s(operations: Operations) -> None:
    for module, router in BIASED:
        with case(router):
            x = random(NUM_ROUTED, D, seed=9)
            _, weights, experts = randomized_router(module)(x)
            tensors = {"router": module.weight, "router_bias": module.e_score_correction_bias}
            held = RouterLayer(replace(GROUPED, router=router), tensors, operations=operations)
            assert_same_choice(route_tokens(x, held, 0), experts, weights, 8)


@torch.no_grad()
def test_groups_that_score_zero_are_ax_k2_s(operations: Operations) -> None:
    """One of two groups of two experts stays; if both its scores are negative, the other two are chosen."""
    config = AXK2Config(
        hidden_size=D, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=1.5
    )
    module = randomized_router(AXK2TopkRouter(config))
    module.e_score_correction_bias.fill_(-0.5)
    x = random(NUM_ROUTED, D, seed=9)
    _, weights, experts = module(x)
    router = RouterSpec(
        "sigmoid_topk", 4, 2, normalize=True, bias=True, n_group=2, topk_group=1, scaling_factor=1.5, zero_outside=True
    )
    tensors = {"router": module.weight, "router_bias": module.e_score_correction_bias}
    held = RouterLayer(replace(GROUPED, router=router), tensors, operations=operations)
    found = route_tokens(x, held, 0)
    scores = (x @ module.weight.T).sigmoid() - 0.5
    kept = scores.view(NUM_ROUTED, 2, 2).sum(dim=-1).argmax(dim=-1)
    negative = (scores.view(NUM_ROUTED, 2, 2)[torch.arange(NUM_ROUTED), kept] < 0).sum(dim=-1)
    clear = negative != 1  # then one of two experts that score 0 is chosen, and nobody says which
    assert (negative == 2).sum() > 5 and (negative == 0).sum() > 5
    assert torch.equal(found[0].sort().values[clear], experts.sort().values[clear])
    torch.testing.assert_close(found[1].sum(dim=1), weights.sum(dim=1))


@torch.no_grad()
def test_experts_that_return_their_input_are_longcat_s(operations: Operations) -> None:
    """The whole block; an expert that no token runs is not brought."""
    config = LongcatFlashConfig(
        hidden_size=D, expert_ffn_hidden_size=48, n_routed_experts=3, zero_expert_num=5, moe_topk=3,
        routed_scaling_factor=6.0,
    )  # fmt: skip
    module = randomized_router(LongcatFlashMoE(config))
    module.router.e_score_correction_bias[2] = -9.0  # never chosen
    x = random(NUM_ROUTED, D, seed=9)
    router = RouterSpec("softmax_topk", 3, 3, False, bias=True, scaling_factor=6.0, num_identity=5)
    spec = replace(GROUPED, router=router, shared_expert=None)
    tensors = {"router": module.router.classifier.weight, "router_bias": module.router.e_score_correction_bias}
    held = RouterLayer(spec, tensors, operations=operations)
    for expert in range(3):
        gate, up = module.experts.gate_up_proj[expert].chunk(2)
        held.experts.append(NeuronBlock(gate, up, module.experts.down_proj[expert].T.contiguous()))
    experts, weights = route_tokens(x, held, 0)
    assert bool((weights == 0).any()) and bool((weights[:, 0] != 0).any()) and bool((experts == 2).any())
    y = run_one_by_one(x, experts, weights, held, 0)
    assert held.brought == [0, 1]
    found, expected = with_returned(y, x, held, 0), module(x)
    assert found is not None
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
