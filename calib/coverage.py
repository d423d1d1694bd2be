"""How well calibration text covers the experts, and whether their popularity is more than chance.

Not how experts of successive layers hang together: that is `paths`. Here T counts tokens, L MoE layers, E experts a
layer, k experts a token; a *choice* is one expert of one token, so that a layer has T k of them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.integer[Any]]

MIN_TOKENS = 64  # a count of n spreads by sqrt(n): of fewer than 64 an eighth of it and more is chance
WILSON_Z = 1.959963984540054  # 97.5% quantile of the normal distribution: a 95% interval
MAX_EXPERTS = 2**16 - 1  # expert indices and their number are kept in 16 bits


def as_sets(routes: Routes, num_experts: int) -> NDArray[np.uint16]:
    """The routes with every token's experts in ascending order, so that equal sets are equal arrays.

    Args:    routes: [T, L, k], what a router gave: T, L and k at least 1, a token's k experts distinct.
    Returns: [T, L, k].
    """
    assert routes.ndim == 3 and routes.size > 0, f"routes are [T, L, k] and not empty, not {routes.shape}"
    assert num_experts <= MAX_EXPERTS, f"{num_experts} experts, at most {MAX_EXPERTS} have an index of 16 bits"
    assert routes.min() >= 0 and routes.max() < num_experts, f"routes name an expert that is none of {num_experts}"
    ordered = np.sort(routes.astype(np.uint16), axis=2)
    assert (ordered[..., 1:] > ordered[..., :-1]).all(), "a token's experts are distinct"
    return ordered


def count_tokens(routes: Routes, num_experts: int) -> NDArray[np.uint32]:
    """How many tokens chose each expert: `[T, L, k]` gives `[L, E]`."""
    layers = [np.bincount(routes[:, l].ravel(), minlength=num_experts) for l in range(routes.shape[1])]
    return np.stack(layers).astype(np.uint32)


def count_pairs(earlier: Routes, later: Routes, num_experts: int) -> NDArray[np.uint32]:
    """`count[e', e]`: tokens that chose `e'` among `earlier` and `e` among `later`.

    Args:    earlier, later: [T, k], experts of the same tokens.
    Returns: [E, E].
    """
    cells = earlier[:, :, None].astype(np.int64) * num_experts + later[:, None, :]  # [T, k, k]
    counts = np.bincount(cells.ravel(), minlength=num_experts**2)
    return counts.reshape(num_experts, num_experts).astype(np.uint32)


def coactivation(routes: Routes, num_experts: int) -> NDArray[np.uint32]:
    """How many tokens chose both of two experts of a layer; the diagonal is how many chose the expert.

    Args:    routes: [T, L, k].
    Returns: [L, E, E], symmetric.
    """
    ordered = as_sets(routes, num_experts)
    return np.stack([count_pairs(ordered[:, l], ordered[:, l], num_experts) for l in range(ordered.shape[1])])


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """How many calibration tokens each expert had: arrays `[L, E]`, and the experts too few reached, as (l, e).

    `share` of the tokens chose the expert; `low` to `high` is its 95% interval. `unreached` had none; `scarce` had
    some, but fewer than MIN_TOKENS: too few to trust their quantiles.
    """

    num_tokens: int
    tokens: NDArray[np.uint32]
    share: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    unreached: tuple[tuple[int, int], ...]
    scarce: tuple[tuple[int, int], ...]


def measure_coverage(routes: Routes, num_experts: int) -> Coverage:
    """The coverage of every expert by the tokens of `routes` `[T, L, k]`.

    Source:  Wilson, JASA 22 (1927). The interval takes tokens as independent; those of one text are not quite, so
             that it is narrower than the truth.
    """
    ordered = as_sets(routes, num_experts)
    T = len(ordered)
    tokens = count_tokens(ordered, num_experts)
    low, high = wilson_interval(tokens, T)
    scarce = (tokens > 0) & (tokens < MIN_TOKENS)
    return Coverage(T, tokens, tokens / T, low, high, _places(tokens == 0), _places(scarce))


def _places(wanted: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    return tuple((int(l), int(e)) for l, e in np.argwhere(wanted))


def wilson_interval(tokens: NDArray[np.uint32], num_tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The shares, lowest and highest, that 95% confidence leaves to each count of tokens out of `num_tokens`.

    Meaning: (p + z²/2T ± z sqrt(p(1-p)/T + z²/4T²)) / (1 + z²/T), with p = tokens / T.
    """
    share, z2 = tokens / num_tokens, WILSON_Z**2 / num_tokens
    half = np.sqrt(share * (1 - share) * z2 + z2**2 / 4)
    # Summed in this order the ends of counts 0 and T are 0 and 1 exactly: sqrt undoes the square.
    return (share + (z2 / 2 - half)) / (1 + z2), (share + (z2 / 2 + half)) / (1 + z2)


@dataclass(frozen=True, slots=True)
class PopularityTest:
    """One layer's popularity on calibration text, judged on held-out text, against chance.

    `chi_square` (E - 1 degrees of freedom) and `p_value`: held-out counts against uniform. `calibrated_nats` and
    `uniform_nats`: log-likelihood of a held-out choice under calibration popularity and under uniform.
    `quarter_share` of held-out choices fell on the quarter of experts most popular in calibration, where uniform
    popularity gives `quarter_uniform`. `spearman`: rank correlation of the two popularities, None if one is constant.
    """

    chi_square: float
    p_value: float
    calibrated_nats: float
    uniform_nats: float
    quarter_share: float
    quarter_uniform: float
    spearman: float | None


def compare_popularity(calibration: Routes, held_out: Routes, num_experts: int) -> tuple[PopularityTest, ...]:
    """For each MoE layer, what calibration popularity says about held-out text.

    Meaning: chi-square: (E-1)/(E-k) * sum_e (n_e - Tk/E)²/(Tk/E): a token's k experts are distinct, which makes counts
             that much steadier than k free draws; without the factor k > 1 hides what is not uniform.
             nats: mean over held-out choices of log q_e, q_e = (m_e + 1) / (sum m + E), m the calibration counts.
             The quarter is ceil(E/4) experts, equals by lowest index.
    Args:    calibration: [T, L, k].   held_out: [T', L, k].
    Source:  Pearson's test; Laplace's rule. Tokens are taken as independent, as in `measure_coverage`: within one
             text p-values are somewhat too small.
    """
    assert calibration.shape[1:] == held_out.shape[1:], "both texts ran through the same model"
    k = calibration.shape[2]
    learned = count_tokens(as_sets(calibration, num_experts), num_experts)
    found = count_tokens(as_sets(held_out, num_experts), num_experts)
    return tuple(_compare_layer(before, after, k) for before, after in zip(learned, found, strict=True))


def _compare_layer(learned: NDArray[np.uint32], found: NDArray[np.uint32], k: int) -> PopularityTest:
    E, num_choices = len(found), int(found.sum())
    chi_square = _chi_square(found, k)
    q = (learned + 1.0) / (learned.sum() + E)
    quarter = np.argsort(-learned.astype(np.int64), kind="stable")[: -(-E // 4)]
    return PopularityTest(
        chi_square=chi_square,
        p_value=chi_square_tail(chi_square, E - 1),
        calibrated_nats=float((found * np.log(q)).sum() / num_choices),
        uniform_nats=-math.log(E),
        quarter_share=float(found[quarter].sum() / num_choices),
        quarter_uniform=len(quarter) / E,
        spearman=spearman(learned, found),
    )


def _chi_square(found: NDArray[np.uint32], k: int) -> float:
    E = len(found)
    if k == E:
        return 0.0  # every token chooses every expert: nothing can differ
    expected = found.sum() / E
    return float(((found - expected) ** 2 / expected).sum() * (E - 1) / (E - k))


def chi_square_tail(value: float, freedom: int) -> float:
    """The probability that a chi-square variable with `freedom` degrees of freedom is at least `value`; 1 for none.

    Meaning: freedom even: exp(-h) sum_{i < freedom/2} h^i / i!, h = value / 2; odd: erfc(sqrt(h)) and the same sum
             over the halves i = 1/2, 3/2, ... < freedom/2.
    Source:  Abramowitz and Stegun, 26.4.4 and 26.4.5; exact, every term at least 0, so that nothing cancels.
    """
    if value <= 0 or freedom == 0:
        return 1.0
    h, odd = value / 2, freedom % 2
    powers = (i + odd / 2 for i in range(freedom // 2))
    terms = [math.exp(i * math.log(h) - h - math.lgamma(i + 1)) for i in powers]
    return min(1.0, math.fsum([*terms, math.erfc(math.sqrt(h)) if odd else 0.0]))


def spearman(first: NDArray[Any], second: NDArray[Any]) -> float | None:
    """The correlation of the ranks of two lists, equals sharing their mean rank; None where one list is constant."""
    a, b = (_ranks(values) - (len(values) - 1) / 2 for values in (first, second))  # their mean is always that
    scale = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / scale if scale else None


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[places]
    return ranks
