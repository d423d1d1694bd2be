"""Sweeps as loops: a test goes through its cases itself, and a failure names its case."""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SHOWN = 200  # characters of one value


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Adds the values of a case to the failure that its block raises; pytest prints them below the traceback."""
    try:
        yield
    except BaseException as fault:
        fault.add_note(f"case: {', '.join(_shown(value) for value in values)}")
        raise


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def random_seed() -> int:
    """Returns another seed each time and prints it; MOE_PACK_SEED repeats one."""
    seed = int(os.environ.get("MOE_PACK_SEED", random.randrange(1 << 31)))
    sys.stdout.write(f"MOE_PACK_SEED={seed}\n")
    return seed
