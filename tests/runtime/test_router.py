"""Routers against the rule: softmax, the largest k, ties to the lowest index."""

import math

import torch

from moe_pack.formats import RouterSpec
from moe_pack.runtime.router import route


def spec(num_experts: int, k: int, normalize: bool = True) -> RouterSpec:
    return RouterSpec("softmax_topk", num_experts, k, normalize)


def test_weights_are_the_largest_probabilities_made_to_sum_to_one() -> None:
    experts, weights = route(torch.tensor([[math.log(1), math.log(4), math.log(3), math.log(2)]]), spec(4, 2))
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]]))


def test_without_normalization_weights_are_the_probabilities() -> None:
    _, weights = route(torch.tensor([[math.log(1), math.log(4), math.log(3), math.log(2)]]), spec(4, 2, False))
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]]))


def test_equal_scores_go_to_the_lowest_index() -> None:
    logits = torch.zeros(3, 64)
    logits[1, [60, 7, 33]] = 1.0
    experts, _ = route(logits, spec(64, 4))
    assert experts.tolist() == [[0, 1, 2, 3], [7, 33, 60, 0], [0, 1, 2, 3]]


def test_all_experts_and_one_expert_can_be_asked_for() -> None:
    experts, weights = route(torch.tensor([[1.0, 2.0]]), spec(2, 2))
    assert experts.tolist() == [[1, 0]]
    assert math.isclose(float(weights.sum()), 1, rel_tol=1e-6)
    assert route(torch.tensor([[5.0]]), spec(1, 1))[1].tolist() == [[1.0]]
