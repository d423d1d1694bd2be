"""From logits to a token: greedy, or temperature and nucleus (top-p) with a seed."""

import torch
from torch import Tensor

from moe_pack.formats import RunError


class Sampler:
    """Chooses tokens; the same seed and logits give the same tokens on every device.

    Args:    temperature: 0 is greedy.   top_p: the smallest set of tokens with at least this probability is kept.
    Raises:  RunError if these are out of range.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        if not 0 <= temperature < float("inf"):
            raise RunError(f"--temperature: found {temperature}, expected a number from 0 up")
        if not 0 < top_p <= 1:
            raise RunError(f"--top-p: found {top_p}, expected more than 0 and at most 1")
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """A token, the lowest among equals where greedy.

        Args:    logits: float32 [vocabulary].
        Raises:  RunError if they are not all numbers.
        """
        logits = logits.cpu()
        if not torch.isfinite(logits).all():
            raise RunError("the model's logits are not numbers; its weights overflow or were broken before packing")
        if self._temperature == 0:
            return int((logits == logits.max()).nonzero()[0])
        scores = torch.softmax((logits - logits.max()).to(torch.float64) / self._temperature, dim=0)
        ranked, tokens = torch.sort(scores, descending=True, stable=True)
        before = ranked.cumsum(0) - ranked  # probability of everything likelier
        kept = ranked[before < self._top_p]  # a prefix, never empty
        bounds = kept.cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * bounds[-1]
        place = min(int(torch.searchsorted(bounds, point, right=True)), len(kept) - 1)
        return int(tokens[place])
