"""A sample of the combinations of some choices in which every pair of choices that can meet does."""

import random
from collections.abc import Callable, Iterable
from itertools import combinations

Choice = object
Combination = dict[str, Choice]
Pair = tuple[tuple[str, Choice], tuple[str, Choice]]

_TRIES = 6  # candidates for each place: the one with most new pairs is taken


def sample(
    choices: dict[str, tuple[Choice, ...]], can_be: Callable[[Combination], bool], count: int
) -> list[Combination]:
    """`count` combinations that can be, the same ones each time; choices are hashable.

    The pairs still to be met are tried for one by one, so that a rare one is met as well as a frequent one.
    """
    draw = random.Random(0)
    pairs_left = dict.fromkeys(_all_pairs(choices))
    found: list[Combination] = []
    while len(found) < count:
        wanted = next(iter(pairs_left), None)
        candidates = [c for c in (_drawn(choices, wanted, can_be, draw) for _ in range(_TRIES)) if c is not None]
        if not candidates:  # these two never meet
            assert wanted is not None, "there are combinations that can be"
            del pairs_left[wanted]
            continue
        best = max(candidates, key=lambda c: sum(pair in pairs_left for pair in pairs_of(c)))
        for pair in pairs_of(best):
            pairs_left.pop(pair, None)
        found.append(best)
    assert not pairs_left, f"{count} combinations leave {len(pairs_left)} pairs that never meet"
    return found


def pairs_of(combination: Combination) -> Iterable[Pair]:
    """The pairs of choices that meet in a combination."""
    return combinations(combination.items(), 2)


def _all_pairs(choices: dict[str, tuple[Choice, ...]]) -> Iterable[Pair]:
    for one, other in combinations(choices, 2):
        yield from (((one, a), (other, b)) for a in choices[one] for b in choices[other])


def _drawn(
    choices: dict[str, tuple[Choice, ...]],
    wanted: Pair | None,
    can_be: Callable[[Combination], bool],
    draw: random.Random,
) -> Combination | None:
    for _ in range(200):
        drawn = {name: draw.choice(values) for name, values in choices.items()} | dict(wanted or ())
        if can_be(drawn):
            return drawn
    return None
