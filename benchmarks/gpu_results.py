"""What a part of `make gpu-check` found: a JSON file, whole after every row, so that a cut leaves whole rows.

When a call ends, the files of its parts become one.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_ERROR_LINES = 12
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU. `driver`: as nvidia-smi says it; `capability`: major and minor."""

    name: str
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    capability: tuple[int, int]
    driver: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and with what a part ran. `card`: None in a rehearsal."""

    card: Card | None
    cpu: str
    cores: int
    memory_bytes: int
    versions: dict[str, str]
    revision: str


@dataclass(slots=True)
class Results:
    """A part's rows and how it ended; written to `path` at every change.

    `state`: running, done, failed, stopped or died.   `errors`: what failed, by section, the last lines of each.
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
        """Adds a row, a dataclass; `kind` in the file is its class."""
        self.rows.append({"kind": type(row).__name__} | asdict(row))
        print(" ".join(f"{name}={_short(value)}" for name, value in self.rows[-1].items()), flush=True)
        self.write()

    def section(self, name: str, body: Callable[[], object]) -> None:
        """Runs a section of a part; what it raises is kept, and the next goes on."""
        try:
            body()
        except Exception:  # whatever it is, the other sections' figures are wanted
            self.fail(name, "\n".join(traceback.format_exc().splitlines()[-_ERROR_LINES:]))

    def fail(self, name: str, why: str) -> None:
        """Takes note that a section failed."""
        self.errors[name] = why
        print(f"{name}: {why}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Writes all to the file, beside and then in its place."""
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        beside.replace(self.path)

    def as_json(self) -> dict[str, Any]:
        """What the file holds."""
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


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def has_gpu() -> bool:
    """Whether torch finds a CUDA device."""
    return torch.cuda.is_available()


def combined(paths: list[Path]) -> dict[str, Any]:
    """The parts of a call as one: what they have in common, then each part's own."""
    parts = [json.loads(path.read_text()) for path in paths]
    common = {name: parts[0][name] for name in ("rehearsal", *(each.name for each in fields(Setting)))}
    return common | {"parts": [{name: part[name] for name in part if name not in common} for part in parts]}


def setting(is_rehearsal: bool, revision: str = "") -> Setting:
    """This machine. `revision`: of the code, where git cannot tell."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("torch", "triton", "numpy")
    versions = {"python": platform.python_version()} | {name: _version(name) for name in names}
    card = None if is_rehearsal else _card()
    return Setting(card, _cpu(), len(os.sched_getaffinity(0)), memory, versions, _revision() or revision or "unknown")


def card_slug(card: Card | None) -> str:
    """The card's name as part of a file's."""
    return "none" if card is None else "-".join(card.name.lower().replace("/", " ").split())


def _card() -> Card:
    facts = torch.cuda.get_device_properties(0)
    capability = (facts.major, facts.minor)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    l2_bytes = int(getattr(facts, "L2_cache_size", 0))
    return Card(
        facts.name, facts.multi_processor_count, facts.total_memory, l2_bytes, capability, _said(asked) or "unknown"
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
    found = _said(["git", "-C", str(_ROOT), "rev-parse", "HEAD"])
    changed = _said(["git", "-C", str(_ROOT), "status", "--porcelain", "-uno"])
    return found + (", changed" if changed else "")


def _said(command: list[str]) -> str:
    """The first line a program writes; empty if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
