"""A sweep: one test that loops over many cases, runs them all, and names those that fail."""

import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Case = Callable[[object], AbstractContextManager[None]]

_MOST_TOLD = 5


@contextmanager
def sweep() -> Iterator[Case]:
    """Collects failures of cases and raises them together at the end.

    Use it as `with sweep() as case:`, and inside, for each case, `with case(name): ...`. A case that skips its test
    skips the whole sweep.
    """
    failures: list[tuple[str, BaseException]] = []

    @contextmanager
    def case(name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            failures.append((str(name), failure))

    yield case
    if failures:
        told = [f"{name}: {_where(failure)}: {failure}" for name, failure in failures[:_MOST_TOLD]]
        names = ", ".join(name for name, _ in failures)
        raise AssertionError("\n".join([f"{len(failures)} cases failed: {names}", *told]))


def _where(failure: BaseException) -> str:
    """The line of the test that failed: the first one below this module's."""
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if frame.filename != __file__]
    return f"line {frames[0].lineno}, {type(failure).__name__}" if frames else type(failure).__name__


def random_seed() -> int:
    """Returns another seed each time and writes it; MOE_PACK_SEED repeats one."""
    seed = int(os.environ.get("MOE_PACK_SEED", random.randrange(1 << 31)))
    sys.stdout.write(f"MOE_PACK_SEED={seed}\n")
    return seed
