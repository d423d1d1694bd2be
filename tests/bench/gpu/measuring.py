"""The results of a part of `make gpu-check`, and the clocks that time launches.

`Results` is a JSON file that is complete after every row. `Clock` times many launches in a CUDA graph by the device's
own events; in a rehearsal everything runs once on the CPU, and the times mean nothing.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

_ERROR_LINES = 12
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine and the versions that a part ran with. `gpu`: None in a rehearsal."""

    gpu: Gpu | None
    cpu: str
    cores: int
    memory_bytes: int
    versions: dict[str, str]
    revision: str


@dataclass(slots=True)
class Results:
    """A part's rows and how it ended; written to `path` at every change.

    `state`: running, done, failed, stopped or died.   `errors`: the last lines of each failed section.
    """

    path: Path
    part: str
    is_rehearsal: bool
    setting: Setting
    command: list[str]
    date: str
    state: str = "running"
    seconds: float = 0.0
    errors: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Any) -> None:
        self.rows.append({"kind": type(row).__name__} | asdict(row))
        print(" ".join(f"{name}={_short(value)}" for name, value in self.rows[-1].items()), flush=True)
        self.write()

    def section(self, name: str, body: Callable[[], object]) -> None:
        """Runs a section of a part; keeps its error, so that the next section runs."""
        try:
            body()
        except Exception:  # the other sections' figures count, whatever fails here
            self.fail(name, without_folders("\n".join(traceback.format_exc().splitlines()[-_ERROR_LINES:])))

    def fail(self, name: str, why: str) -> None:
        self.errors[name] = why
        print(f"{name}: {why}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        partial_file = self.path.with_suffix(".partial")
        partial_file.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        partial_file.replace(self.path)

    def as_json(self) -> dict[str, Any]:
        whole = {
            "part": self.part,
            "rehearsal": self.is_rehearsal,
            "state": self.state,
            "date": self.date,
            "command": self.command,
            "seconds": round(self.seconds, 1),
            **asdict(self.setting),
            "errors": self.errors,
            "rows": self.rows,
        }
        return whole


def without_folders(text: str) -> str:
    """Returns a traceback whose files are named from the repository or the folder of packages, to be published."""
    text = text.replace(f"{_ROOT}{os.sep}", "").replace("build/rooms/moe_pack/", "")
    return re.sub(r'"[^"\n]*/(?:site|dist)-packages/', '"', text)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def has_gpu() -> bool:
    return torch.cuda.is_available()


def combined(paths: list[Path]) -> dict[str, Any]:
    """Returns the parts of a call as one: their common values, then those of each part."""
    parts = [json.loads(path.read_text()) for path in paths]
    common = {name: parts[0][name] for name in ("rehearsal", *(each.name for each in fields(Setting)))}
    return common | {"parts": [{name: part[name] for name in part if name not in common} for part in parts]}


def setting(is_rehearsal: bool, revision: str = "") -> Setting:
    """Returns this machine's setting. `revision`: of the code, if git does not know it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("torch", "triton", "numpy")
    versions = {"python": platform.python_version()} | {name: _version(name) for name in names}
    gpu = None if is_rehearsal else _gpu()
    return Setting(gpu, _cpu(), len(os.sched_getaffinity(0)), memory, versions, _revision() or revision or "unknown")


def gpu_slug(name: str | None) -> str:
    return "none" if name is None else "-".join(name.lower().replace("/", " ").split())


def _gpu() -> Gpu:
    facts = torch.cuda.get_device_properties(0)
    capability = (facts.major, facts.minor)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    l2_bytes = int(getattr(facts, "L2_cache_size", 0))
    return Gpu(
        facts.name,
        facts.multi_processor_count,
        facts.total_memory,
        l2_bytes,
        capability,
        _first_line(asked) or "unknown",
    )


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _revision() -> str:
    found = _first_line(["git", "-C", str(_ROOT), "rev-parse", "HEAD"])
    changed = _first_line(["git", "-C", str(_ROOT), "status", "--porcelain", "-uno"])
    return found + (", changed" if changed else "")


def _first_line(command: list[str]) -> str:
    """Returns the first line that a program writes; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


Launch = Callable[[], object]
_MIB = 1 << 20
_LAUNCHES = 48  # in a graph, at least: starting one takes as long as a small kernel


@dataclass(frozen=True, slots=True)
class Clock:
    """Times launches on `device`. `is_rehearsal`: run once, on the CPU."""

    device: torch.device
    is_rehearsal: bool

    @property
    def num_sms(self) -> int:
        return 2 if self.is_rehearsal else torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def l2_bytes(self) -> int:
        return 0 if self.is_rehearsal else int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def synchronize(self) -> None:
        if not self.is_rehearsal:
            torch.cuda.synchronize(self.device)

    def direct(self, launch: Launch, rounds: int = 10) -> float:
        return median(self.each(launch, rounds))

    def each(self, launch: Launch, rounds: int) -> list[float]:
        """Returns the seconds of each of so many rounds, after one that warms up."""
        if self.is_rehearsal:
            return [self.once(launch)]
        launch()
        return [self.once(launch) for _ in range(rounds)]

    def once(self, launch: Launch) -> float:
        if self.is_rehearsal:
            start = time.perf_counter()
            launch()
            return time.perf_counter() - start
        begin, end = _event(), _event()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def captured(self, launch: Launch, before: Launch = lambda: None) -> Launch:
        """Returns the replay of a graph of `launch`, which runs twice before, each time after `before`."""
        if self.is_rehearsal:
            return launch
        before()
        launch()  # compiles
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        before()
        graph.replay()
        return graph.replay

    def graphed(self, launches: Sequence[Launch], rounds: int = 10) -> float:
        """Returns the median seconds of one of these launches, which follow one another in a replayed graph."""
        replay = self.captured(lambda: [launch() for launch in launches])
        return self.direct(replay, rounds) / len(launches)

    def copy_rate(self) -> float:
        """Returns the bytes a second, read and written, of a copy inside the device's memory, 1 GiB each way."""
        num_bytes = _MIB if self.is_rehearsal else 1024 * _MIB
        source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * num_bytes / self.direct(lambda: target.copy_(source), 20)


def copies_beyond(l2_bytes: int, num_bytes: int, least: int = 2) -> int:
    """Returns how many copies of so many bytes are four times as large as the L2 cache."""
    return max(least, -(-4 * l2_bytes // num_bytes))


def repeated(rows: Tensor, times: int, device: torch.device) -> Tensor:
    """Returns copies of bytes one after the other, on the device: u8 [times * n], each at a multiple of 128 bytes."""
    flat = rows.reshape(-1)
    padded = torch.zeros(-(-flat.numel() // 128) * 128, dtype=torch.uint8)
    padded[: flat.numel()] = flat
    return padded.to(device).repeat(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch has no types for it


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a launch and the bytes it must read. `share`: of the rate at which the GPU copies its memory."""

    us: float
    num_bytes: int
    gb_a_second: float
    share: float


@dataclass(frozen=True, slots=True)
class ByteClock:
    """Times operations that are bound by the bytes they read. `copy_rate`: of `clock`, in bytes a second."""

    clock: Clock
    copy_rate: float

    def timed(self, num_bytes: int, launch: Callable[[int], object], num_copies: int) -> Timed:
        launches: Sequence[Launch] = [partial(launch, number) for number in range(num_copies)]
        if not self.clock.is_rehearsal:
            launches = list(launches) * -(-_LAUNCHES // num_copies)
        seconds = self.clock.graphed(launches)
        rate = num_bytes / seconds
        return Timed(1e6 * seconds, num_bytes, rate / 1e9, rate / self.copy_rate)
