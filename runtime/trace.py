"""What happened when, for Perfetto (ui.perfetto.dev) or chrome://tracing: one event a line, as it happens.

Source:  the Trace Event Format of Chromium's catapult: `X` has a duration; `b` and `e` begin and end what may overlap.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_pack.formats import RunError

_EVENTS_AT_ONCE = 1000  # kept in memory between two writes


class Trace:
    """A trace's file, in the place of one that is there. `close` it: what was not written is.

    Raises:  RunError if the file cannot be written, now or later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_ns = time.perf_counter_ns()
        self._lines: list[str] = []
        self._begin = '{"displayTimeUnit": "ms", "traceEvents": [\n'  # of the next line
        self._num_reads = 0
        try:
            self._file = path.open("w", encoding="ascii")
        except OSError as fault:
            raise self._error(fault) from fault
        for track, name in enumerate(("computing", "waiting for reads")):
            self._add({"name": "thread_name", "ph": "M", "tid": track, "args": {"name": name}})

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def computing(self, name: str, **facts: object) -> Iterator[None]:
        """Something computed."""
        yield from self._during(0, name, facts)

    @contextmanager
    def waiting(self, name: str, **facts: object) -> Iterator[None]:
        """Something waited for."""
        yield from self._during(1, name, facts)

    def read_begins(self, name: str, num_bytes: int, is_urgent: bool) -> int:
        """A read was asked for; its number."""
        self._num_reads += 1
        facts = {"bytes": num_bytes, "urgent": is_urgent}
        self._add({"name": name, "cat": "read", "ph": "b", "id": self._num_reads, "tid": 2, "args": facts})
        return self._num_reads

    def read_ends(self, name: str, number: int) -> None:
        """A read has come, as far as it was waited for, or was dropped."""
        self._add({"name": name, "cat": "read", "ph": "e", "id": number, "tid": 2})

    def close(self) -> None:
        """Writes what is left, and ends the file."""
        if self._file.closed:
            return
        try:
            self._write()
            self._put("\n]}\n")
        finally:
            self._close()

    def _during(self, track: int, name: str, facts: dict[str, object]) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._add({"name": name, "ph": "X", "ts": start, "dur": self._now() - start, "tid": track, "args": facts})

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1000

    def _add(self, event: dict[str, Any]) -> None:
        self._lines.append(self._begin + json.dumps({"ts": self._now(), "pid": 1} | event))
        self._begin = ",\n"
        if len(self._lines) > _EVENTS_AT_ONCE:
            self._write()

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        self._put("".join(lines))

    def _put(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as fault:
            self._close()
            raise self._error(fault) from fault

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError as fault:  # of what could not be written; the descriptor is closed all the same
            raise self._error(fault) from fault

    def _error(self, fault: OSError) -> RunError:
        return RunError(f"--trace: {self._path}: cannot be written ({fault.strerror})")
