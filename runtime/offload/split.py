"""The split of missing experts between GPU and CPU, and the substitution of experts.

The split: some missing experts are loaded while the CPU computes the others. Loading takes the same time for any number
of tokens, and computing on the CPU takes its time for each token.

The substitution changes the answer and is off by default: resident experts replace missing experts of a token that have
about the same score. Whether experts resemble each other is judged by their scores alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SHARES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)


@dataclass(frozen=True, slots=True)
class LoadOrCompute:
    """Positions in the list of missing experts: those to load, and those to compute on the CPU."""

    loaded: tuple[int, ...]
    computed: tuple[int, ...]

    def seconds(self, computing: Sequence[float], loading: Sequence[float]) -> float:
        """Returns the time of the split: the longer of both parts, which run at the same time."""
        return max(sum(computing[i] for i in self.computed), sum(loading[i] for i in self.loaded))


def fastest(computing: Sequence[float], loading: Sequence[float]) -> LoadOrCompute:
    """Returns the split that takes the least time; of several, the one that loads the fewest experts.

    Meaning: arg min over m of max(time to compute the m experts that cost least to compute for what they cost to load,
             time to load the others). If all take equally long to load, these m have the fewest tokens, and this is
             the least over all subsets. Otherwise it is at most longer by one expert's cheaper way.
    Args:    computing: seconds that each missing expert takes on the CPU.   loading: seconds to load it, not 0.
    Source:  Fiddler §3.2, prefill, whose arg min is over all subsets.
    """
    order = sorted(range(len(computing)), key=lambda place: -computing[place] / loading[place])
    splits = (LoadOrCompute(tuple(order[:m]), tuple(reversed(order[m:]))) for m in range(len(order) + 1))
    return min(splits, key=lambda split: split.seconds(computing, loading))


def fastest_share(seconds_with: Callable[[float], float], estimate: float) -> float:
    """Returns the share of the link, 0 to 1, with which something takes the least time: of an estimate and eight more.

    All are tried. The time need not fall and then rise: where link and CPU slow each other down, it may be least with
    either alone, and greatest with half of each (seen with an H200).
    """
    return min((estimate, *_SHARES), key=seconds_with)


def substitute(
    scores: NDArray[np.float32], chosen: NDArray[np.int64], is_resident: NDArray[np.bool_], alpha: float
) -> NDArray[np.int64]:
    """Returns the experts to run in place of the chosen ones: [T, k], k different ones for each token.

    Meaning: beta = a token's (k+1)-th score. Its top experts have more than (1 + alpha) beta; `top` has those of all
             tokens. Its other experts stay if they are resident or in `top`. The rest are replaced, lowest first (of
             equal ones the later), by an expert not chosen that is resident or in `top` and has at least
             (1 - alpha) beta, as long as there is one: by the one that the most tokens have chosen, since it runs for
             them anyway, of several by that with the best score, of equal ones by the earlier.
    Args:    scores: [T, E], of the routers, of all experts; not negative.   chosen: [T, k].   is_resident: [E].
             alpha: 0 to 1.
    Returns: [T, k]; a substitute is in the place of the expert that it replaces.
    Source:  Importance-Driven Expert Scheduling §5.1, Algorithm 1, and §5.4 for the most tokens. As printed, the
             algorithm counts the expert of rank k + 1 (score beta) among the active ones, so that k + 1 are returned;
             it replaces low-score experts in fast memory, which the text keeps; and a score of exactly (1 + alpha) beta
             belongs nowhere.
    """
    assert 0 <= alpha <= 1, "alpha is a share"
    num_experts, k = scores.shape[1], chosen.shape[1]
    if k == num_experts:
        return chosen
    beta = np.partition(scores, num_experts - k - 1, axis=1)[:, num_experts - k - 1]
    of_chosen = np.take_along_axis(scores, chosen, axis=1)  # [T, k]
    is_top = of_chosen > (1 + alpha) * beta[:, None]
    is_free = is_resident.copy()  # costs nothing to run
    is_free[chosen[is_top]] = True
    num_tokens = np.bincount(chosen.ravel(), minlength=num_experts)
    replaced = chosen.copy()
    for token in np.flatnonzero((~is_top & ~is_free[chosen]).any(axis=1)).tolist():
        row, token_scores = replaced[token], scores[token]
        fits = is_free & (token_scores >= (1 - alpha) * beta[token])
        fits[row] = False
        order = np.lexsort((-token_scores, -num_tokens))  # stable: of equals the earlier expert
        successors = order[fits[order]].tolist()
        leaving = [place for place in range(k) if not (is_top[token, place] or is_free[row[place]])]
        leaving.sort(key=lambda place: (of_chosen[token, place], -row[place]))
        for place, expert in zip(leaving, successors, strict=False):
            row[place] = expert
    return replaced
