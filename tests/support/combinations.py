"""Samples of the combinations of some choices in which all choices appear, alone or with each other."""

import random
from collections.abc import Callable, Collection
from itertools import combinations, product

Choice = object
Combination = dict[str, Choice]
Meeting = tuple[tuple[str, Choice], ...]  # choices that one combination has together

_TRIES = 6  # candidates for each place: the one with most new meetings is taken


def sample(
    choices: dict[str, tuple[Choice, ...]],
    can_be: Callable[[Combination], bool],
    count: int = 0,
    together: Collection[tuple[str, ...]] | None = None,
    seed: int = 0,
) -> list[Combination]:
    """Returns combinations that can be, the same ones for a seed; choices are hashable.

    Args:    count: the least number of combinations; a greedy search finds how many are needed.
             together: names whose choices all meet in some combination, where they can. Every choice appears in any
             case. None: every two names.
    """
    draw = random.Random(seed)
    groups: list[tuple[str, ...]] = [*together, *((name,) for name in choices)] if together is not None else []
    groups = groups or list(combinations(choices, 2))
    left = dict.fromkeys(
        tuple(zip(names, values, strict=True))
        for names in groups
        for values in product(*(choices[name] for name in names))
    )
    found: list[Combination] = []
    while left or len(found) < count:
        wanted = next(iter(left), ())  # one by one, so that a rare one is met as well as a frequent one
        candidates = [c for _ in range(_TRIES) if (c := _drawn(choices, wanted, can_be, draw)) is not None]
        if not candidates:  # these never meet
            assert wanted, "there are combinations that can be"
            del left[wanted]
            continue
        best = max(candidates, key=lambda c: sum(meeting in left for meeting in _meetings(c, groups)))
        for meeting in _meetings(best, groups):
            left.pop(meeting, None)
        found.append(best)
    return found


def name_of(combination: Combination) -> str:
    """Returns the choices of a combination as one word."""
    return "-".join(str(value).replace(" ", "") for value in combination.values())


def _meetings(combination: Combination, groups: list[tuple[str, ...]]) -> list[Meeting]:
    return [tuple((name, combination[name]) for name in names) for names in groups]


def _drawn(
    choices: dict[str, tuple[Choice, ...]], wanted: Meeting, can_be: Callable[[Combination], bool], draw: random.Random
) -> Combination | None:
    for _ in range(200):
        drawn = {name: draw.choice(values) for name, values in choices.items()} | dict(wanted)
        if can_be(drawn):
            return drawn
    return None
