"""The router's kernel against plain torch: the same experts, ties to the lowest index, weights to rounding."""

import pytest
import torch
from cases import case
from torch import Tensor

from moe_pack.formats import RouterSpec
from moe_pack.runtime.gpu.kernels.experts import route
from moe_pack.runtime.model import TORCH

SPECS = [
    RouterSpec("softmax_topk", 8, 2, True),
    RouterSpec("softmax_topk", 60, 4, False, scaling_factor=2.5),
    RouterSpec("softmax_topk", 128, 8, True),
    RouterSpec("softmax_topk", 160, 6, False, n_group=8, topk_group=3, scaling_factor=16.0),
    RouterSpec("softmax_topk", 12, 3, True, bias=True, n_group=4, topk_group=2),
    RouterSpec("softmax_topk", 512, 10, True),
    RouterSpec("softmax_topk", 64, 6, True, least_sum=0.125),
    RouterSpec("sigmoid_topk", 24, 4, True, least_sum=0.25),
    RouterSpec("softmax_topk", 1, 1, True),
    RouterSpec("topk_softmax", 40, 8, False),
    RouterSpec("topk_softmax", 128, 4, False, logit_bias=True),
    RouterSpec("softmax_topk", 20, 3, True, least_sum=0.5),
    RouterSpec("topk_softmax", 3, 3, False, scaling_factor=0.5),
    RouterSpec("sigmoid_topk", 128, 8, True, bias=True),
    RouterSpec("sigmoid_topk", 256, 8, True, bias=True, n_group=8, topk_group=4, scaling_factor=2.5),
    RouterSpec("sigmoid_topk", 384, 8, True, bias=True, scaling_factor=2.827),
    RouterSpec("sigmoid_topk", 20, 10, False, n_group=4, topk_group=2),
    RouterSpec("sparsemixer", 16, 2, False, jitter=0.01),
    RouterSpec("sparsemixer", 7, 3, False, jitter=0.3),
]


def name_of(spec: RouterSpec) -> str:
    return f"{spec.kind}-{spec.num_experts}-{spec.num_experts_per_tok}-{spec.n_group}"


def found(logits: Tensor, spec: RouterSpec, bias: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The kernel's, of each row."""
    k = spec.num_experts_per_tok
    experts = torch.full((len(logits), k), -1, dtype=torch.int32, device=device)
    weights = torch.full((len(logits), k), torch.nan, device=device)
    held = None if bias is None else bias.to(device)
    for row in range(len(logits)):
        route(logits[row].to(device), spec, held, experts[row], weights[row])
    return experts.cpu(), weights.cpu()


def assert_same(logits: Tensor, spec: RouterSpec, device: torch.device) -> None:
    draw = torch.Generator().manual_seed(1)
    bias = torch.randn(spec.num_experts, generator=draw) / 4 if spec.bias else None
    experts, weights = found(logits, spec, bias, device)
    expected_experts, expected_weights = TORCH.route(logits, spec, bias)
    assert torch.equal(experts.long(), expected_experts)
    # Exponentials of another library, some 2 units in the last place each.
    assert (weights - expected_weights).abs().max() < 1e-6 * max(1.0, spec.scaling_factor)


def test_experts_and_weights_are_torchs(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            logits = 3 * torch.randn((4, spec.num_experts), generator=torch.Generator().manual_seed(0))
            assert_same(logits, spec, kernel_device)


@pytest.mark.slow
def test_of_equal_logits_the_lowest_index_comes_first(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            draw = torch.Generator().manual_seed(0)
            logits = torch.randint(-1, 2, (4, spec.num_experts), generator=draw).float()
            logits[0] = 0.0
            logits[1] *= -0.0  # zeros of both signs are equal
            assert_same(logits, spec, kernel_device)


# Numpy, in which the interpreter computes, tells of overflow and NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_that_vanish_are_equal(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            logits = torch.full((2, spec.num_experts), -200.0)
            logits[:, -1] = 1.0
            logits[1, spec.num_experts // 2] = -150.0
            assert_same(logits, spec, kernel_device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_that_are_no_numbers_still_give_experts(kernel_device: torch.device) -> None:
    for spec in SPECS:
        with case(name_of(spec)):
            bias = torch.zeros(spec.num_experts) if spec.bias else None
            experts, weights = found(torch.full((1, spec.num_experts), torch.nan), spec, bias, kernel_device)
            assert experts.unique().numel() == spec.num_experts_per_tok
            assert experts.min() >= 0 and experts.max() < spec.num_experts
            assert weights.isnan().all(), "what is wrong is seen"
