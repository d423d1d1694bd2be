"""Recall and precision worked by hand, and against sets in plain Python."""

import random

import pytest
import torch
from support.cases import case

from moe_pack.calib.statistics.predictors import MaskCounts, mask_counts, recall_precision

# Worked by hand. Token 0: experts 1, 2 and 3 are equal, so 1 then 2 come first. Token 1: 3, then 0 and 1 are equal.
SCORES = torch.tensor([[0.1, 0.5, 0.5, 0.5], [0.2, 0.2, 0.1, 0.9]])
ACTUAL = torch.tensor([[2, 3], [3, 1]])


def test_the_best_is_right_for_one_token_of_two() -> None:
    assert recall_precision(SCORES, ACTUAL, 1) == (1 / 4, 1 / 2)  # predicted 1 | 3


def test_ties_go_to_the_lowest_index() -> None:
    assert recall_precision(SCORES, ACTUAL, 2) == (2 / 4, 2 / 4)  # predicted 1 2 | 3 0
    assert recall_precision(SCORES, ACTUAL, 3) == (1.0, 4 / 6)  # predicted 1 2 3 | 3 0 1


def test_many_equal_scores_are_predicted_in_their_order() -> None:
    """More than 16 entries, where sorts that are not stable begin to shuffle."""
    scores = torch.zeros(3, 300)
    assert recall_precision(scores, torch.tensor([[0, 1], [1, 2], [298, 299]]), 2) == (3 / 6, 3 / 6)


def test_predicting_more_experts_than_there_are_predicts_all() -> None:
    assert recall_precision(SCORES, ACTUAL, 8) == (1.0, 0.5)


def test_one_token_of_one_expert_is_predicted() -> None:
    assert recall_precision(torch.tensor([[-3.0]]), torch.tensor([[0]]), 1) == (1.0, 1.0)


def test_all_tokens_on_one_expert_that_is_predicted_last_are_missed() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0]]).expand(5, 3)
    assert recall_precision(scores, torch.full((5, 1), 2), 2) == (0.0, 0.0)


def test_without_tokens_nothing_is_missed_and_nothing_wrong() -> None:
    assert recall_precision(torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int64), 2) == (1.0, 1.0)


def test_recall_and_precision_are_those_of_sets() -> None:
    for num_experts, k, num_predicted in [(8, 2, 2), (8, 2, 4), (5, 1, 1), (64, 8, 16)]:
        with case(num_experts, k, num_predicted):
            rng = random.Random(num_experts)
            scores = [
                [rng.randrange(6) / 4 for _ in range(num_experts)] for _ in range(40)
            ]  # few values: ties everywhere
            actual = [rng.sample(range(num_experts), k) for _ in range(40)]
            hits = 0
            for row, chosen in zip(scores, actual, strict=True):
                best = [e for _, e in sorted((-score, e) for e, score in enumerate(row))][:num_predicted]
                hits += len(set(best) & set(chosen))
            found = recall_precision(torch.tensor(scores), torch.tensor(actual), num_predicted)
            assert found == (hits / (40 * k), hits / (40 * num_predicted))
            assert (found[0] == found[1]) == (k == num_predicted)


def test_masks_are_counted_entry_by_entry() -> None:
    predicted = torch.tensor([[True, True, False], [False, True, False]])
    actual = torch.tensor([[True, False, True], [False, True, True]])
    counts = mask_counts(predicted, actual)
    assert counts == MaskCounts(num_both=2, num_predicted=3, num_actual=4)
    assert (counts.recall, counts.precision) == (2 / 4, 2 / 3)


def test_counts_of_blocks_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, actual = (torch.rand(50, 7, generator=generator) < share for share in (0.3, 0.6))
    blocks = [slice(0, 1), slice(1, 1), slice(1, 33), slice(33, 50)]
    added = sum((mask_counts(predicted[block], actual[block]) for block in blocks), MaskCounts())
    assert added == mask_counts(predicted, actual)
    assert added.num_predicted not in (0, added.num_actual)


def test_masks_with_nothing_in_them_have_recall_and_precision() -> None:
    nothing, everything = torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)
    assert (mask_counts(nothing, everything).recall, mask_counts(nothing, everything).precision) == (0.0, 1.0)
    assert (mask_counts(everything, nothing).recall, mask_counts(everything, nothing).precision) == (1.0, 0.0)
    assert (MaskCounts().recall, MaskCounts().precision) == (1.0, 1.0)


def test_masks_must_be_bool() -> None:
    """The bitwise and of 2 and 1 is 0, though both are true."""
    with pytest.raises(AssertionError, match="masks are bool"):
        mask_counts(torch.tensor([2]), torch.tensor([1]))
