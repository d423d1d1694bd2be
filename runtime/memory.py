"""How much memory there is for this process, and how much it holds. Linux; elsewhere nothing is known."""

import ctypes
import os
from pathlib import Path

_MEMINFO, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
# Of the control groups of versions 2 and 1: the limit, what counts against it, and what of that is files', in
# memory.stat: pages of theirs give way.
_CGROUPS = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def available_bytes() -> int | None:
    """What can be had without swapping, the process's control group regarded; None where it cannot be told."""
    free = _field(_MEMINFO, "MemAvailable")
    left = _left_in_cgroup()
    known = [number for number in (free, left) if number is not None]
    return min(known) if known else None


def total_bytes() -> int | None:
    """All memory that this process may ever have, its control group regarded; None where it cannot be told."""
    known = [number for number in (_field(_MEMINFO, "MemTotal"), *_limits()) if number is not None]
    return min(known) if known else None


def anonymous_bytes() -> int | None:
    """The process's own memory that is no file's; None where it cannot be told."""
    return _field(_STATUS, "RssAnon")


def give_back_freed() -> None:
    """Gives memory back to the system that was freed and that C's allocator keeps, wherever it lies; glibc alone does.

    What was freed between things still in use stays with the process otherwise, and large tensors that no longer fit
    there take new memory: after stages that make and free much.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _field(path: Path, name: str) -> int | None:
    """A line `Name:  123 kB` of a file of the kernel's, in bytes."""
    if not path.is_file():
        return None
    for line in path.read_text("ascii", "replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return None


def _left_in_cgroup() -> int | None:
    for folder in _cgroup_folders():
        for limit_name, used_name, files_name in _CGROUPS:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                return max(limit - used + _stat(folder / "memory.stat", files_name), 0)
    return None


def _limits() -> list[int | None]:
    return [_number(folder / limit_name) for folder in _cgroup_folders() for limit_name, _, _ in _CGROUPS]


def _stat(path: Path, name: str) -> int:
    lines = path.read_text("ascii", "replace").splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _cgroup_folders() -> list[Path]:
    """The folders that may hold this process's limits: version 2's, then version 1's controller of memory."""
    listed = Path("/proc/self/cgroup")
    folders = []
    for line in listed.read_text("utf-8").splitlines() if listed.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup") / controllers
            folders += [root / path.lstrip("/"), root]
    return folders


def _number(path: Path) -> int | None:
    if not path.is_file():
        return None
    text = path.read_text("ascii", "replace").strip()
    return int(text) if text.isdigit() else None
