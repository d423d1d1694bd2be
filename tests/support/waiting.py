"""Waits of tests: for progress, or for the end of a process. A clock only ends a hang."""

import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 900.0  # far longer than any wait takes on a busy machine: a test that waits so long has hung


def wait_until(is_so: Callable[[], bool], said: Callable[[], str] = lambda: "it does not become so") -> None:
    """Waits until something is so.

    Args:    said: what the failure says.
    Raises:  AssertionError if it does not become so; `is_so` raises what makes it impossible.
    """
    until = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < until, said()
        time.sleep(0.01)


def wait_until_asleep(pid: int) -> None:
    """Waits until a process's main thread sleeps, and goes on sleeping: it waits for something outside, as for a key.

    A thread that has work and no CPU does not sleep, however long it waits for one.
    """
    stat, times = Path(f"/proc/{pid}/stat"), list[tuple[str, ...]]()

    def is_asleep() -> bool:
        fields = stat.read_text().rpartition(")")[2].split()
        state, *ticks = fields[0], fields[11], fields[12]
        if state != "S" or (times and times[-1] != tuple(ticks)):
            times.clear()
        times.append(tuple(ticks))
        return state == "S" and len(times) >= 20

    wait_until(is_asleep)
