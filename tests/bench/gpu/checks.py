"""Parts `preflight`, `twins` and `sanitizer`: whether the machine can run the checks, and whether kernels are right.

A missing requirement ends the whole call, a missing tool only its part. `twins` compares every kernel with its twin
(`cases.py`), in a process that another one follows if a kernel misuses memory. `sanitizer` runs kernels on few rows, as
wide as real models', under memcheck and racecheck.
"""

import importlib
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch

from gpu.engines import MEMORY
from gpu.measuring import Clock, Results
from moe_pack.runtime.cpu import is_available, why_unavailable
from moe_pack.runtime.engine.machine import LEAST_CAPABILITY

_GIB = 1 << 30
_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "click", "tqdm")
_LEAST_VERSIONS = {"torch": (2, 6), "triton": (3, 6)}
# Of the largest pack, which is kept in memory once as files and once page-locked.
_PACK_BYTES = 20 * _GIB
_TOOL_FOLDERS = ("/usr/local/cuda*/bin",)


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the machine. `advice`: what to do if it is not `ok`."""

    name: str
    found: str
    ok: bool
    required: bool
    advice: str = ""


class UnfitError(Exception):
    """This machine cannot run the checks."""


def preflight(results: Results, clock: Clock) -> None:
    """Raises:  UnfitError, which says what to do about each missing requirement."""
    checks: list[Callable[[], Check]] = [partial(_package, name) for name in _PACKAGES]
    checks += [_native_kernels, partial(_tool, "compute-sanitizer"), _disk_space, _host_memory]
    if not clock.is_rehearsal:
        checks = [*checks, _capability, partial(_gpu_memory, clock)]
    checks.append(partial(_page_lock, clock))
    wrong = []
    for check in checks:
        found = check()
        results.add(replace(found, advice="") if found.ok else found)
        if found.required and not found.ok:
            wrong.append(f"{found.name}: {found.found}; {found.advice}")
    if wrong:
        raise UnfitError("this machine cannot run the checks: " + " | ".join(wrong))


def find_tool(name: str) -> str | None:
    """The path of one of NVIDIA's tools, on the PATH or where they are usually installed."""
    found = shutil.which(name)
    if found is not None:
        return found
    paths = [path for pattern in _TOOL_FOLDERS for path in sorted(Path("/").glob(f"{pattern[1:]}/{name}"))]
    return str(paths[-1]) if paths else None


def _package(name: str) -> Check:
    try:
        importlib.import_module(name)
        found = version(name)
    except (ImportError, PackageNotFoundError) as fault:
        return Check(f"package {name}", str(fault), False, True, f"install {name}")
    least = _LEAST_VERSIONS.get(name, (0,))
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    advice = f"install {name} {'.'.join(map(str, least))} or later"
    return Check(f"package {name}", found, numbers >= least, True, advice)


def _native_kernels() -> Check:
    why = "" if is_available() else why_unavailable()
    advice = "install g++ 9 or later; without them the CPU computes by torch, and reads wait for one another"
    return Check("native kernels", why or "built", not why, False, advice)


def _tool(name: str) -> Check:
    found = find_tool(name)
    return Check(name, found or "not found", found is not None, False, "install the CUDA toolkit, or add it to PATH")


def _disk_space() -> Check:
    """Checks the space for packs, in /dev/shm or on the disk."""
    free = {str(folder): shutil.disk_usage(folder).free for folder in (MEMORY, Path()) if folder.exists()}
    text = ", ".join(f"{folder} {num_bytes / _GIB:.0f} GiB" for folder, num_bytes in free.items())
    ok = max(free.values()) >= _PACK_BYTES
    return Check("space for packs", text, ok, False, f"free {_PACK_BYTES // _GIB} GiB, or leave out mixtral and qwen3")


def _host_memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A virtual machine may get more memory when it uses it, so too little now is no error.
    return Check("host memory", f"{total / _GIB:.0f} GiB now", total >= 2 * _PACK_BYTES, False, "fewer layers may fit")


def _capability() -> Check:
    facts = torch.cuda.get_device_properties(0)
    found, needed = (facts.major, facts.minor), ".".join(map(str, LEAST_CAPABILITY))
    text = f"{facts.name}, {facts.major}.{facts.minor}"
    return Check("compute capability", text, found >= LEAST_CAPABILITY, True, f"use a GPU of {needed} or later")


def _gpu_memory(clock: Clock) -> Check:
    free, total = torch.cuda.mem_get_info(clock.device)
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    return Check("GPU memory", text, free >= 14 * _GIB, False, "larger budgets will fail")


def _page_lock(clock: Clock) -> Check:
    """Page-locks 1 GiB of a mapping, copies it to the GPU, and compares the bytes."""
    num_bytes = (1 << 20) if clock.is_rehearsal else _GIB
    host = torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))
    host[:] = torch.arange(num_bytes // 256).to(torch.uint8).repeat_interleave(256)
    start = time.perf_counter()
    if not clock.is_rehearsal:
        status = int(cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0))
        if status:
            advice = "raise the limit of locked memory (ulimit -l)"
            return Check("page-locking 1 GiB", f"cudaHostRegister returned {status}", False, True, advice)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    there = host.to(clock.device, non_blocking=True).clone()
    clock.synchronize()
    rate = num_bytes / (time.perf_counter() - start)
    is_same = torch.equal(there.cpu(), host)
    if not clock.is_rehearsal:
        cudart().cudaHostUnregister(host.data_ptr())
    text = f"locked in {seconds:.2f} s, copied at {rate / 1e9:.1f} GB/s, {'the same' if is_same else 'other'} bytes"
    return Check("page-locking 1 GiB", text, is_same, True, "the link returns other bytes: use another machine")


def cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it


_CASES = Path(__file__).parent / "cases.py"
_MOST_STARTS = 12
_TOOL_SECONDS = 40.0  # that each of compute-sanitizer's tools may take
_NO_LIMIT = 3600.0  # seconds: the part's own limit comes first
_SHOWN_LINES = 8

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Twin:
    """A case that ended: its largest difference from the twin, the bound, and its seconds, inputs included."""

    kernels: str
    case: str
    is_right: bool
    error: float
    bound: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """Kernels that were compiled before the cases ran, which launch `collected` ones.

    `prepared_s`: seconds of making inputs, and the twins' answers.
    """

    collected: int
    compiled: int
    processes: int
    prepared_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Sanitized:
    """The findings of a tool of compute-sanitizer. `cases`: that ran under it.   `summary`: the tool's last line."""

    tool: str
    cases: int
    is_clean: bool
    summary: str
    first_lines: str
    seconds: float


def twins(results: Results, clock: Clock) -> None:
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
    """Returns what is wrong with a case that ended; empty if it is right."""
    if "fault" in event:
        return str(event["fault"])
    return "" if event["is_right"] else f"differs from its twin by {event['error']:.2g}, allowed {event['bound']:.2g}"


def sanitize(results: Results, clock: Clock) -> None:
    """Runs the wide cases under memcheck and racecheck, once without either before, which compiles them."""
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
    size, limit_s = ("tiny", None) if clock.is_rehearsal else ("wide", _TOOL_SECONDS)
    for event in _events(prefix, clock, size, 0, limit_s):
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
    """Yields the lines of a process that runs cases; at the end `exit`, its code, negative for a signal."""
    # Without torch's own cache of memory every tensor is an allocation of the driver's, whose ends memcheck sees.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if prefix else {})
    command = [*prefix, sys.executable, str(_CASES), clock.device.type, size, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as process:
        assert process.stdout is not None, "it is a pipe"
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
