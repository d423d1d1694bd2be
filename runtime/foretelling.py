"""From predictions to what is read ahead: which experts of the next layer, for one token or for a whole chunk."""

from collections.abc import Sequence

import numpy as np

from moe_pack.runtime.path_statistics import ranked
from moe_pack.runtime.prediction import Observed, Prediction
from moe_pack.runtime.residency import Array

_NEARLY_ALL = 0.9  # of a layer's experts: a chunk that is expected to need so many is not worth a prediction


class Foreteller:
    """Says which experts of a layer to read ahead, likeliest first.

    Args:    prediction: None where only chunks that need nearly all experts are foretold.   num_ahead: experts for one
             token; of more tokens every one that any of them is foretold to choose, the most chosen first.
    """

    def __init__(self, prediction: Prediction | None, num_experts: int, num_active: int, num_ahead: int) -> None:
        self._prediction = prediction
        self._num_experts, self._num_active, self._num_ahead = num_experts, num_active, num_ahead

    @property
    def needs_partial(self) -> bool:
        """Whether `Observed.partial` is looked at."""
        return self._prediction is not None and self._prediction.needs_partial

    def foretold(self, layer_idx: int, observed: Observed) -> Sequence[int]:
        """The experts of MoE layer `layer_idx` to read ahead."""
        num_tokens = len(observed.x)
        if self.expects_nearly_all(num_tokens):
            return range(self._num_experts)  # as they lie in their file
        scores = self._prediction.scores(layer_idx, observed) if self._prediction else None
        if scores is None:
            return ()
        if num_tokens == 1:
            likeliest: list[int] = ranked(scores, self._num_ahead)[0].tolist()
            return likeliest
        return _most_chosen(ranked(scores, self._num_active), self._num_experts)

    def expects_nearly_all(self, num_tokens: int) -> bool:
        """Whether so many tokens, were their choices independent and even, would choose nearly all experts."""
        return num_tokens > 1 and 1 - (1 - self._num_active / self._num_experts) ** num_tokens > _NEARLY_ALL


def _most_chosen(chosen: Array, num_experts: int) -> list[int]:
    """The experts of choices [T, k], those of most tokens first."""
    counts = np.bincount(chosen.ravel(), minlength=num_experts)
    order: list[int] = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    return order
