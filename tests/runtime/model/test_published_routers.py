"""Routers against the modules of transformers, with random weights."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from support.native import operations_limited_to
from support.specs import GROUPED
from torch import Tensor, nn
from transformers import AXK2Config, DeepseekV4Config, Kolibri1Config, LongcatFlashConfig
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

from moe_pack.formats import ModelSpec, RouterSpec
from moe_pack.runtime.model import TORCH, NeuronBlock, Operations, StoredMatrix, route_tokens
from moe_pack.runtime.model.layers import router_logits, run_one_by_one, weights_of_experts, with_returned

D, T = 64, 200


def random(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


@dataclass
class Layer:
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


@pytest.fixture(params=["torch", "native"])
def operations(request: pytest.FixtureRequest) -> Operations:
    return TORCH if request.param == "torch" else operations_limited_to("portable")


def randomized(module: nn.Module) -> nn.Module:
    for number, (_, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
        tensor.data = random(*tensor.shape, seed=number, size=0.2)
    return module


def assert_same_choice(found: tuple[Tensor, Tensor], experts: Tensor, weights: Tensor, num_experts: int) -> None:
    """Whatever the order of a token's experts."""
    expected, made = (torch.zeros(T, num_experts) for _ in range(2))
    expected.scatter_(1, experts, weights)
    made.scatter_(1, *found)
    torch.testing.assert_close(made, expected, rtol=2e-5, atol=1e-7)


@torch.no_grad()
def test_the_scaled_router_is_gemma_s(operations: Operations) -> None:
    config = Gemma4TextConfig(hidden_size=D, num_experts=8, top_k_experts=3, enable_moe_block=True)
    module = randomized(Gemma4TextRouter(config))
    x = random(T, D, seed=9)
    _, weights, experts = module(x)
    router = RouterSpec("softmax_topk", 8, 3, normalize=True, input_scale=True, expert_scale=True)
    tensors = {"router": module.proj.weight, "router_scale": module.scale}
    held = Layer(replace(GROUPED, router=router), tensors | {"router_expert_scale": module.per_expert_scale})
    held.operations = operations
    normed = module.norm(x)
    found = route_tokens(normed, held, 0)
    assert_same_choice(found, experts, weights, 8)
    again = weights_of_experts(router_logits(normed, held, 0), found[0], held, 0)
    torch.testing.assert_close(again, found[1])


@torch.no_grad()
def test_the_root_of_softplus_is_deepseek_s(operations: Operations) -> None:
    config = DeepseekV4Config(hidden_size=D, n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5)
    module = randomized(DeepseekV4TopKRouter(config))
    x = random(T, D, seed=9)
    _, weights, experts = module(x)
    router = RouterSpec("sqrtsoftplus_topk", 8, 3, normalize=True, bias=True, scaling_factor=1.5)
    tensors = {"router": module.weight, "router_bias": module.e_score_correction_bias}
    held = Layer(replace(GROUPED, router=router), tensors, operations=operations)
    assert_same_choice(route_tokens(x, held, 0), experts, weights, 8)


@torch.no_grad()
def test_groups_that_score_zero_are_ax_k2_s(operations: Operations) -> None:
    """Of two groups of two experts one stays; where both its scores are negative, the other two are chosen."""
    config = AXK2Config(
        hidden_size=D, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=1.5
    )
    module = randomized(AXK2TopkRouter(config))
    module.e_score_correction_bias.fill_(-0.5)
    x = random(T, D, seed=9)
    _, weights, experts = module(x)
    router = RouterSpec(
        "sigmoid_topk", 4, 2, normalize=True, bias=True, n_group=2, topk_group=1, scaling_factor=1.5, zero_outside=True
    )
    tensors = {"router": module.weight, "router_bias": module.e_score_correction_bias}
    held = Layer(replace(GROUPED, router=router), tensors, operations=operations)
    found = route_tokens(x, held, 0)
    scores = (x @ module.weight.T).sigmoid() - 0.5
    kept = scores.view(T, 2, 2).sum(dim=-1).argmax(dim=-1)
    negative = (scores.view(T, 2, 2)[torch.arange(T), kept] < 0).sum(dim=-1)
    clear = negative != 1  # then one of two experts that score 0 is chosen, and nobody says which
    assert (negative == 2).sum() > 5 and (negative == 0).sum() > 5
    assert torch.equal(found[0].sort().values[clear], experts.sort().values[clear])
    torch.testing.assert_close(found[1].sum(dim=1), weights.sum(dim=1))


@torch.no_grad()
@pytest.mark.parametrize("normalize", [False, True])
def test_the_largest_logits_with_a_bias_are_kolibri_s(operations: Operations, normalize: bool) -> None:
    config = Kolibri1Config(hidden_size=D, num_experts=8, num_experts_per_tok=3, norm_topk_prob=normalize)
    module = randomized(Kolibri1TopKRouter(config))
    x = random(T, D, seed=9)
    _, weights, experts = module(x)
    router = RouterSpec("topk_sigmoid", 8, 3, normalize=normalize, bias=True)
    tensors = {"router": module.weight, "router_bias": module.e_score_correction_bias}
    held = Layer(replace(GROUPED, router=router), tensors, operations=operations)
    assert_same_choice(route_tokens(x, held, 0), experts, weights, 8)


@torch.no_grad()
def test_experts_that_return_their_input_are_longcat_s(operations: Operations) -> None:
    """The whole block; an expert that no token runs is not brought."""
    config = LongcatFlashConfig(
        hidden_size=D, expert_ffn_hidden_size=48, n_routed_experts=3, zero_expert_num=5, moe_topk=3,
        routed_scaling_factor=6.0,
    )  # fmt: skip
    module = randomized(LongcatFlashMoE(config))
    module.router.e_score_correction_bias[2] = -9.0  # never chosen
    x = random(T, D, seed=9)
    router = RouterSpec("softmax_topk", 3, 3, False, bias=True, scaling_factor=6.0, num_identity=5)
    spec = replace(GROUPED, router=router, shared_expert=None)
    tensors = {"router": module.router.classifier.weight, "router_bias": module.router.e_score_correction_bias}
    held = Layer(spec, tensors, operations=operations)
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
