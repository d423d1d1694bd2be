"""Which missing experts are loaded, and which are computed where they lie, when both happen at the same time.

Loading takes as long however many tokens an expert has; computing in the slow place takes its time for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """Places in the list of missing experts: those to load, and those to compute where they lie."""

    loaded: tuple[int, ...]
    computed: tuple[int, ...]

    def seconds(self, num_tokens: Sequence[int], token_seconds: float, load_seconds: float) -> float:
        """How long it takes: the longer of the two."""
        return max(sum(num_tokens[i] for i in self.computed) * token_seconds, len(self.loaded) * load_seconds)


def balanced(num_tokens: Sequence[int], token_seconds: float, load_seconds: float) -> Split:
    """From both ends: while loading has cost no more than computing, the one with most tokens is loaded, else the one
    with fewest is computed. Equals: the earlier counts as having more.

    Args:    num_tokens: of each missing expert.   token_seconds: to compute one token.   load_seconds: for an expert.
    Source:  Importance-Driven Expert Scheduling, Algorithm 2.
    """
    order = _most_first(num_tokens)
    loaded, computed = list[int](), list[int]()
    load_cost = compute_cost = 0.0
    while order:
        if load_cost <= compute_cost:
            load_cost += load_seconds
            loaded.append(order.pop(0))
        else:
            compute_cost += num_tokens[order[-1]] * token_seconds
            computed.append(order.pop())
    return Split(tuple(loaded), tuple(computed))


def fastest(num_tokens: Sequence[int], token_seconds: float, load_seconds: float) -> Split:
    """The split that takes least time; of several, the one that loads least.

    Meaning: arg min over m of max(tokens of the m experts with fewest * token_seconds, (n - m) * load_seconds): of all
             ways to compute m experts that one is fastest.
    Args:    as for `balanced`.
    Source:  Fiddler §3.2, prefill, whose arg min is over all subsets.
    """
    order = _most_first(num_tokens)
    splits = (Split(tuple(order[:m]), tuple(reversed(order[m:]))) for m in range(len(order) + 1))
    return min(splits, key=lambda split: split.seconds(num_tokens, token_seconds, load_seconds))


def _most_first(num_tokens: Sequence[int]) -> list[int]:
    return sorted(range(len(num_tokens)), key=lambda place: -num_tokens[place])
