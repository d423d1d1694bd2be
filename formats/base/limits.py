"""CPUs and memory that this process may use, by its affinity and by the control groups of containers."""

import os
from pathlib import Path

_LISTED, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_DEVICES = Path("/sys/devices")
_FAST_SHARE = 0.7  # of the largest capacity: big cores of Arm have more, small ones half and less


def num_cpus() -> int:
    """Returns how many threads of this process can run at once: its CPUs, or those of a quota, rounded.

    With more threads than a quota has CPUs, all threads are stopped when its time is used up.
    """
    return _within_quota(len(_allowed_cpus()))


def num_cores() -> int:
    """Returns how many threads of kernels pay: one for each fast core of this process, within a quota.

    Threads of one core would wait for the same arithmetic, and all threads for the last part of each operation, which a
    slow core may have taken.
    """
    return _within_quota(len(fast_cores(_allowed_cpus())))


def fast_cores(cpus: set[int], devices: Path = _DEVICES) -> set[int]:
    """Returns one CPU of each core, and of a hybrid processor those of its fast cores, if there are any.

    Args:    cpus: numbers of CPUs, from which it chooses.   devices: the folder in which Linux describes them.
    """
    folders = {cpu: devices / "system" / "cpu" / f"cpu{cpu}" for cpu in sorted(cpus)}
    fast = cpus & _listed(_text(devices / "cpu_core" / "cpus"))  # of Intel's hybrid processors
    if not fast:
        capacities = {cpu: number_in(folder / "cpu_capacity") or 0 for cpu, folder in folders.items()}  # of Arm's
        fast = {cpu for cpu, capacity in capacities.items() if capacity >= _FAST_SHARE * max(capacities.values())}
    cores: dict[str, int] = {}
    for cpu in sorted(fast):
        cores.setdefault(_text(folders[cpu] / "topology" / "thread_siblings_list") or str(cpu), cpu)
    return set(cores.values())


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _within_quota(cpus: int) -> int:
    quota = cpu_quota()
    return cpus if quota is None else max(1, min(cpus, int(quota + 0.5)))


def _listed(text: str) -> set[int]:
    """Returns the numbers of a list as Linux writes it, "0-3,8"."""
    ranges = [part.split("-") for part in text.split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


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
