"""When drafts are verified: look-up in the text so far, and the gate, which knows time only by what it is told."""

from collections.abc import Callable
from itertools import product
from random import Random

import pytest
from support.cases import case

from moe_pack.runtime.drafts import MOST_DRAFTED, Gate, NgramDrafter

Cost = Callable[[int], float]  # seconds of a pass over so many tokens


def proposals(text: list[int], most: int = 4) -> list[list[int]]:
    """Returns the proposals after each token of a text."""
    drafter = NgramDrafter()
    return [drafter.propose(text[:end], None, most) for end in range(1, len(text) + 1)]


def test_what_followed_the_same_end_is_proposed() -> None:
    text = [1, 2, 3, 4, 5, 9, 8, 2, 3]
    *before, last = proposals(text)
    assert not any(before) and last == [4, 5, 9, 8]
    assert proposals([1, 2, 9, 1])[-1] == [], "one token is no end that is looked up"


def test_the_longest_agreement_wins_and_of_equal_ones_the_last() -> None:
    drafter = NgramDrafter()
    text = [7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3, 70]
    for before, expected, length in (([7], 50, 4), ([8], 60, 4), ([6], 70, 3)):
        with case(before):
            drafter.reset()
            assert drafter.propose([*text, *before, 1, 2, 3], None, 1) == [expected]
            assert drafter.match_length == length


def test_a_text_in_a_loop_is_drafted_to_any_length() -> None:
    assert proposals([4, 5, 6] * 3, most=8)[-1] == [4, 5, 6, 4, 5, 6, 4, 5]
    assert proposals([3] * 4, most=8)[-1] == [3] * 8


def test_another_text_after_a_reset_knows_nothing_of_the_first() -> None:
    drafter = NgramDrafter()
    assert drafter.propose([1, 2, 3, 1, 2], None, 2) == [3, 1]
    drafter.reset()
    assert drafter.propose([5, 1, 2], None, 2) == [] and drafter.match_length == 0


def generated_seconds(
    gate: Gate, cost: Cost, share_right: float, num_tokens: int, draw: Random, spread: float = 0.1
) -> float:
    """Seconds of a text whose every token has a proposal, each token of which is right with this probability."""
    spent, made = 0.0, 0
    while made < num_tokens:
        rights = [draw.random() < share_right for _ in range(MOST_DRAFTED)]
        number = gate.length(4, MOST_DRAFTED)
        num_right = next((i for i, is_right in enumerate(rights) if not is_right), len(rights))
        for place in range(min(num_right + 1, MOST_DRAFTED)):
            gate.judged(4, place, rights[place])
        accepted = min(number, num_right)
        seconds = cost(1 + number) * draw.uniform(1 - spread, 1 + spread)
        gate.passed(number, accepted, seconds)
        spent, made = spent + seconds, made + 1 + accepted
    return spent / made * num_tokens


def test_the_gate_takes_what_pays_and_loses_nearly_nothing_where_nothing_does() -> None:
    cheap, linear = (lambda n: 1 + 0.1 * (n - 1)), (lambda n: float(n))
    steep: Cost = lambda n: 1.0 if n == 1 else 3.0 + n  # noqa: E731  (a function of a row)
    rows = (
        ("cheap and right", cheap, 0.9, 0.0, 0.40),
        ("cheap, half right", cheap, 0.5, 0.0, 0.75),
        ("cheap, hardly right", cheap, 0.05, 0.0, 1.02),
        ("as long as alone", linear, 0.8, 0.0, 1.02),
        ("longer than alone", steep, 0.9, 0.0, 1.02),
    )
    for name, cost, share_right, least, most in rows:
        seconds = generated_seconds(Gate(), cost, share_right, 2000, Random(3))
        with case(name):
            assert least <= seconds / 2000 <= most, seconds / 2000


@pytest.mark.parametrize("num_seeds", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_a_short_text_without_luck_takes_hardly_longer(num_seeds: int) -> None:
    steep: Cost = lambda n: 1 + 0.35 * (n - 1)  # noqa: E731  (a function of a row)
    for num_tokens, share_right in product((60, 120, 400), (0.02, 0.2, 0.35)):
        with case(num_tokens, share_right):
            passes = [_own_seconds(steep, share_right, num_tokens, seed) for seed in range(num_seeds)]
            assert sum(passes) / len(passes) <= num_tokens * 1.01
            assert max(passes) <= num_tokens * 1.01 + 1, "a percent, or the time of a token"


def _own_seconds(cost: Cost, share_right: float, num_tokens: int, seed: int) -> float:
    """Seconds of a text, each pass of which takes as long as the others of its length."""
    return generated_seconds(Gate(), cost, share_right, num_tokens, Random(seed), spread=0.0)


def test_the_gate_follows_a_machine_that_changes() -> None:
    gate, draw = Gate(), Random(1)
    cheap: Cost = lambda n: 1 + 0.1 * (n - 1)  # noqa: E731  (a function of a row)
    steep: Cost = lambda n: 1 + 2.0 * (n - 1)  # noqa: E731
    assert generated_seconds(gate, cheap, 0.9, 1000, draw) < 400
    assert generated_seconds(gate, steep, 0.9, 3000, draw) < 3000 * 1.05, "it stops"
    generated_seconds(gate, cheap, 0.9, 4000, draw)
    assert generated_seconds(gate, cheap, 0.9, 1000, draw) < 500, "it begins again"


def test_nothing_is_drafted_before_a_plain_pass_is_known() -> None:
    gate = Gate()
    for _ in range(3):
        assert gate.length(20, 8) == 0
        gate.passed(0, 0, 1.0)
    assert gate.length(20, 8) > 0
    assert gate.length(20, 0) == 0
