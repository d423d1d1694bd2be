"""CPUs and memory that this process may use, by its affinity and by the control groups of containers."""

import os
from pathlib import Path

_LISTED, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def num_cpus() -> int:
    """Returns how many threads of this process can compute at once: its CPUs, or those of a quota, rounded.

    With more threads than a quota has CPUs, all threads are stopped when its time is used up.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cpus if quota is None else max(1, min(cpus, int(quota + 0.5)))


def cpu_quota(folders: list[Path] | None = None) -> float | None:
    """Returns the CPUs whose time this process may use, by the least quota around it; None without a quota.

    Args:    folders: of control groups; by default those of `cgroup_folders`.
    """
    quotas = []
    for folder in cgroup_folders("cpu") if folders is None else folders:
        texts = [_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for words in (texts[0].split(), texts[1:]):  # of version 2, and of version 1
            if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cgroup_folders(controller: str, listed: Path = _LISTED, root: Path = _ROOT) -> list[Path]:
    """Lists the folders of this process's control groups, of version 2 and of a controller of version 1, nearest first.

    Args:    controller: "cpu" or "memory".   listed: the file that names this process's groups.   root: of all groups.
    """
    folders = []
    for line in _text(listed).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, names = root / controllers, [name for name in path.split("/") if name]
        if ".." in names:  # the group is outside of what a container sees
            names = []
        folders += [top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
    return folders


def number_in(path: Path) -> int | None:
    """Returns the number that a file of a control group holds; None without the file, or for "max"."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace").strip() if path.is_file() else ""
