"""How good a prediction was: recall and precision of predicted experts, and of predicted neurons.

Only counting: what is predicted, and from what, is for the predictors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskCounts:
    """How many entries were predicted, how many came true, and how many were both; counts of blocks add up.

    Meaning: recall is the share of what came true that was predicted, 1 where nothing did; precision is the share of
             what was predicted that came true, 1 where nothing was.
    """

    num_both: int = 0
    num_predicted: int = 0
    num_actual: int = 0

    def __add__(self, other: "MaskCounts") -> "MaskCounts":
        """The counts of both blocks together."""
        return MaskCounts(
            self.num_both + other.num_both,
            self.num_predicted + other.num_predicted,
            self.num_actual + other.num_actual,
        )

    @property
    def recall(self) -> float:
        """The share of what came true that was predicted."""
        return self.num_both / self.num_actual if self.num_actual else 1.0

    @property
    def precision(self) -> float:
        """The share of what was predicted that came true."""
        return self.num_both / self.num_predicted if self.num_predicted else 1.0


def mask_counts(predicted: Tensor, actual: Tensor) -> MaskCounts:
    """The counts of one block: of neurons that were said to run and neurons that ran.

    Args:    predicted, actual: bool [T, n].
    Source:  FloE §3.3.2, CORM §4.2, which reuse the next layer's selector on this layer's hidden state.
    """
    assert predicted.shape == actual.shape, "masks of different neurons"
    assert predicted.dtype == actual.dtype == torch.bool, "masks are bool: & of other types is bitwise"
    return MaskCounts(int((predicted & actual).sum()), int(predicted.sum()), int(actual.sum()))


def recall_precision(scores: Tensor, actual: Tensor, num_predicted: int) -> tuple[float, float]:
    """Recall and precision of predicting, for each token, the `num_predicted` experts with the largest scores.

    Where `num_predicted` is k they are the same number; all experts are predicted where it is E or more. Among equal
    scores the lower index is predicted. That scores are numbers is not checked: a NaN counts as largest.

    Args:    scores: [T, E].   actual: int64 [T, k], the experts chosen, different ones in each row.
    Returns: recall, precision; both 1 where there are no tokens.
    """
    # A stable sort keeps the lower index first among equals; topk promises no order.
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :num_predicted]
    nothing = torch.zeros(scores.shape, dtype=torch.bool)
    counts = mask_counts(nothing.scatter(1, best, True), nothing.scatter(1, actual, True))
    return counts.recall, counts.precision
