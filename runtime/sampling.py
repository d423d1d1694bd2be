"""From logits to a token: greedy, or temperature and nucleus (top-p) with a seed."""

import torch
from torch import Tensor

from moe_pack.formats import RunError

# Scores whose float64 bits differ in the last 46 alone are in one bucket: 64 buckets for each power of two.
_BUCKET_BITS = 46


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
        self.temperature, self.seed = temperature, seed
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        """Returns a token, the lowest among equals where greedy.

        Where a draw falls is found in the vocabulary's order, which needs sums of probabilities but no sorting.
        Args:    logits: float32 [vocabulary].
        Raises:  RunError if they are not all numbers.
        """
        logits = logits.cpu()
        least, most = torch.aminmax(logits)
        if not (torch.isfinite(least) and torch.isfinite(most)):
            raise RunError("the model's logits are not numbers; its weights overflow or were broken before packing")
        if self.temperature == 0:
            return int(logits.argmax())  # the first of equals
        scores = logits.to(torch.float64).sub_(most).div_(self.temperature).exp_()
        tokens = None if self._top_p == 1 else nucleus(scores, self._top_p)
        bounds = (scores if tokens is None else scores[tokens]).cumsum(0)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * bounds[-1]
        place = min(int(torch.searchsorted(bounds, point, right=True)), len(bounds) - 1)
        return place if tokens is None else int(tokens[place])


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Returns the smallest set of tokens whose share of all scores is `top_p` or more: int64 [n], rising.

    The likeliest are kept, among equals those with the lowest numbers. Scores are added up in buckets of like size, so
    that only the bucket in which the set ends has to be sorted.
    Args:    scores: float64 [vocabulary], not negative, some positive.   top_p: above 0, at most 1.
    """
    total = scores.sum()
    wanted = top_p * total
    # All tokens below this together are less than what the set leaves out.
    tokens = (scores >= (1 - top_p) * total / len(scores)).nonzero()[:, 0]
    scores = scores[tokens]
    buckets = scores.view(torch.int64) >> _BUCKET_BITS  # the bits of positive numbers rise with their size
    buckets -= buckets.min()
    largest_first = torch.bincount(buckets, weights=scores).flip(0).cumsum(0)
    place = min(int((largest_first < wanted).sum()), len(largest_first) - 1)
    last_bucket = len(largest_first) - 1 - place
    in_last = (buckets == last_bucket).nonzero()[:, 0]
    ranked, order = scores[in_last].sort(descending=True, stable=True)
    before = ranked.cumsum(0) - ranked + (largest_first[place - 1] if place else 0.0)
    is_kept = buckets > last_bucket
    is_kept[in_last[order[before < wanted]]] = True
    return tokens[is_kept]
