"""What happened when, for Perfetto (ui.perfetto.dev) or chrome://tracing: one event a line, as it happens.

Source:  the Trace Event Format of Chromium's catapult: `X` has a duration; `b` and `e` begin and end what may overlap.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_pack.formats import RunError

_EVENTS_AT_ONCE = 1000  # kept in memory between two writes


class Trace:
    """A trace's file, in the place of one that is there. `close` it: what was not written is.

    It is whole JSON once closed, whatever ended the run. Where the drive refuses, the file goes: it would be none.
    Raises:  RunError if the file cannot be written, now or later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_ns = time.perf_counter_ns()
        self._lines: list[str] = []
        self._num_reads = 0
        try:
            self._file = path.open("w", encoding="ascii")
        except OSError as fault:
            raise self._error(fault) from fault
        tracks = (
            {"name": "thread_name", "ph": "M", "ts": 0, "pid": 1, "tid": track, "args": {"name": name}}
            for track, name in enumerate(("computing", "waiting for reads"))
        )
        # Written now: a drive that refuses says so before the model runs, and each later line can stand alone.
        self._put('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, tracks)))

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
        self._write()
        self._put("\n]}\n")
        try:
            self._file.close()
        except OSError as fault:
            raise self._failed(fault) from fault

    def _during(self, track: int, name: str, facts: dict[str, object]) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._add({"name": name, "ph": "X", "ts": start, "dur": self._now() - start, "tid": track, "args": facts})

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1000

    def _add(self, event: dict[str, Any]) -> None:
        if self._file.closed:  # the drive has refused: what ends now has no place
            return
        self._lines.append(",\n" + json.dumps({"ts": self._now(), "pid": 1} | event))
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
            raise self._failed(fault) from fault

    def _failed(self, fault: OSError) -> RunError:
        """Gives the file up."""
        with suppress(OSError):  # of what could not be written, again; the descriptor is closed all the same
            self._file.close()
        if self._path.is_file():  # not a device or a pipe
            self._path.unlink()
        return self._error(fault)

    def _error(self, fault: OSError) -> RunError:
        return RunError(f"--trace: {self._path}: cannot be written ({fault.strerror}); give another place")
