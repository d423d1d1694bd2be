"""Choices that meet each selector in the slow suite, and one of them in the fast suite."""

from collections.abc import Sequence

import pytest

from moe_pack.formats import Selector
from moe_pack.formats.parts.specs import SELECTORS


def in_turn(name: str, choices: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrizes a test by `selector` and another name: in the fast suite each choice with the next selector."""
    fast: dict[tuple[object, Selector], None] = {}
    for number, choice in enumerate(choices):
        fast[choice, SELECTORS[number % len(SELECTORS)]] = None
    everything = dict.fromkeys((choice, selector) for choice in choices for selector in SELECTORS)
    cases = [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in everything if case not in fast)]
    return pytest.mark.parametrize((name, "selector"), cases)


def slow(choice: object) -> object:
    """Returns a choice that only the slow suite takes."""
    return pytest.param(choice, marks=pytest.mark.slow)
