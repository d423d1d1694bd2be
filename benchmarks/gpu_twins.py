"""Parts `twins` and `sanitizer`: every kernel beside its twin, and under NVIDIA's checkers of memory and races.

The cases run in a process of their own, which a kernel that misuses memory takes with it: the cases after it run in
another. `sanitizer` runs them at tiny sizes, once under memcheck and once under racecheck.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from gpu_clock import Clock
from gpu_preflight import find_tool
from gpu_results import Results

_CASES = Path(__file__).parent / "gpu_cases.py"
_MOST_STARTS = 12
_TOOL_SECONDS = 75.0  # that each of compute-sanitizer's tools may take
_NO_LIMIT = 3600.0  # seconds: the part's own limit comes first
_SHOWN_LINES = 8

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Twin:
    """A case that ended: the largest difference from its twin, what it may be, and seconds with its inputs."""

    kernels: str
    case: str
    is_right: bool
    error: float
    bound: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """Kernels that were compiled before the cases ran. `collected`: how many the cases launch.

    `prepared_s`: seconds of making inputs, and the twins' answers.
    """

    collected: int
    compiled: int
    processes: int
    prepared_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Sanitized:
    """What a tool of compute-sanitizer found. `cases`: that ran under it.   `summary`: its own last line."""

    tool: str
    cases: int
    is_clean: bool
    summary: str
    first_lines: str
    seconds: float


def run(results: Results, clock: Clock) -> None:
    """Runs every case; of one that fails the others' answers are wanted still."""
    size, first, starts = "tiny" if clock.is_rehearsal else "real", 0, 0
    while True:
        starts += 1
        asked, ended, code = 0, 0, 0
        running: Event = {}
        for event in _events([], clock, size, first):
            if "exit" in event:
                code = event["exit"]
            elif "collected" in event:
                results.add(CompiledAhead(**event))
            elif "case" in event:
                running, asked = event, asked + 1
            else:
                ended += 1
                _add(results, running, event)
        if asked > ended:
            results.fail(_name(running), f"the process died: {_how(code)}")
        if code == 0 or not asked or starts == _MOST_STARTS:
            break
        first += asked
    if code != 0:
        results.fail("cases", f"{starts} processes died; the last: {_how(code)}")


def _add(results: Results, running: Event, event: Event) -> None:
    if "fault" not in event:
        results.add(Twin(running["kernels"], running["case"], **event))
    if fault := _fault(event):
        results.fail(_name(running), fault)


def _fault(event: Event) -> str:
    """What is wrong with a case that ended; empty where it is right."""
    if "fault" in event:
        return str(event["fault"])
    return "" if event["is_right"] else f"differs from its twin by {event['error']:.2g}, allowed {event['bound']:.2g}"


def sanitize(results: Results, clock: Clock) -> None:
    """Runs the tiny cases under memcheck and racecheck, once without either before, which compiles them."""
    for tool in ("none",) if clock.is_rehearsal else ("none", "memcheck", "racecheck"):
        results.section(tool, lambda tool=tool: _sanitize(results, clock, tool))  # type: ignore[misc] # a default


def _sanitize(results: Results, clock: Clock, tool: str) -> None:
    prefix, log = list[str](), results.path.with_suffix(f".{tool}.log")
    if tool != "none":
        path = find_tool("compute-sanitizer")
        assert path is not None, "compute-sanitizer is not installed"
        # By default it gives a process a minute to first use the GPU, and watches compilers that it starts.
        prefix = [path, "--tool", tool, "--target-processes", "application-only", "--launch-timeout", "0"]
        prefix += ["--log-file", str(log), "--error-exitcode", "9"]
    start = time.perf_counter()
    running, num_cases, code = Event(), 0, 0
    for event in _events(prefix, clock, "tiny", 0, _TOOL_SECONDS):
        if "exit" in event:
            code = event["exit"]
        elif "case" in event:
            running = event
        else:
            num_cases += 1
            if fault := _fault(event):  # the tool may have found nothing: a kernel that was not launched is clean
                results.fail(f"{tool}, {_name(running)}", fault)
    seconds = time.perf_counter() - start
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), f"ended with {_how(code)}")
    wrong = [line for line in lines if re.search(r"Invalid|Error|hazard|Warning|leaked", line)]
    is_clean = code == 0
    results.add(Sanitized(tool, num_cases, is_clean, summary, "\n".join(wrong[:_SHOWN_LINES]), seconds))
    log.unlink(missing_ok=True)
    assert is_clean, f"{tool}: {summary}"


def _events(prefix: list[str], clock: Clock, size: str, first: int, limit_s: float | None = None) -> Iterator[Event]:
    """What a process that runs cases says, line by line; at the end `exit`, its code, negative for a signal."""
    # Without torch's own cache of memory every tensor is an allocation of the driver's, whose ends memcheck sees.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if prefix else {})
    command = [*prefix, sys.executable, str(_CASES), clock.device.type, size, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as process:
        assert process.stdout is not None, "it was asked for"
        timer = Timer(limit_s or _NO_LIMIT, lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            yield {"exit": process.wait()}
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _name(running: Event) -> str:
    return f"{running.get('kernels', 'before the first case')}: {running.get('case', '')}"


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
