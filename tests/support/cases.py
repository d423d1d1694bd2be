"""Sweeps as loops: a test goes through its cases itself, and a failure names its case."""

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MAX_SHOWN = 200  # characters of one value


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Adds the values of a case to the failure that its block raises; pytest prints them below the traceback."""
    try:
        yield
    except BaseException as fault:
        fault.add_note(f"case: {', '.join(_shown(value) for value in values)}")
        raise


def assert_each(cases: Iterable[tuple[Any, ...]], found: Callable[..., object], before: str = "") -> None:
    """Asserts that `found` returns the last value of each case for its other values; `before` begins each text."""
    for *values, expected in cases:
        with case(*values, expected):
            assert found(*values) == (before + expected if before else expected)


def line_of(error: type[Exception], call: Callable[[], object]) -> str:
    """Returns the message, one line, of the error that a call must raise."""
    with pytest.raises(error) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message, message
    return message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def random_seed() -> int:
    """Returns MOE_PACK_SEED, else 0, and prints it; another seed each time if that is `random`."""
    given = os.environ.get("MOE_PACK_SEED", "0")
    seed = random.randrange(1 << 31) if given == "random" else int(given)
    sys.stdout.write(f"MOE_PACK_SEED={seed}\n")
    return seed
