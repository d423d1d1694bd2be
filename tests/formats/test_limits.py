"""CPUs and memory within what affinity and control groups leave to a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_pack.formats.base.limits import cgroup_folders, cpu_quota, fast_cores, num_cores, num_cpus

GROUP = Path(f"/sys/fs/cgroup/cpu/moe-pack-test-{os.getpid()}")
PRINT_CPUS = "import os; from moe_pack.formats.base.limits import num_cpus; {before}; print(num_cpus())"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({"a/b/cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "250000 100000\n"}, 2.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3.0),
        ({"a/b/cpu.max": "400000 100000", "a/cpu.max": "50000 100000"}, 0.5),  # the slice around a service has less
        ({"cpu,cpuacct/own/cpu.cfs_quota_us": "-1", "cpu,cpuacct/own/cpu.cfs_period_us": "100000"}, None),
        ({"cpu,cpuacct/own/cpu.cfs_quota_us": "150000", "cpu,cpuacct/own/cpu.cfs_period_us": "50000"}, 3.0),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.0),
        ({"memory/own/cpu.max": "100000 100000"}, None),  # of another controller
        ({"a/b/cpu.max": "not a number"}, None),
    ],
)
def test_the_least_quota_around_a_process_counts(tmp_path: Path, files: dict[str, str], cpus: float | None) -> None:
    write(tmp_path / "listed", "0::/a/b\n5:cpu,cpuacct:/own\n4:memory:/own\n2:cpuset:/own\n")
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert cpu_quota(cgroup_folders("cpu", tmp_path / "listed", tmp_path / "groups")) == cpus


def test_a_group_outside_of_a_container_is_not_looked_for(tmp_path: Path) -> None:
    write(tmp_path / "listed", "0::/../../host\n")
    assert cgroup_folders("memory", tmp_path / "listed", tmp_path / "groups") == [tmp_path / "groups"]


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_folders("cpu", tmp_path / "none", tmp_path / "groups") == []
    assert cpu_quota([]) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_of_one_cpu_has_one_thread() -> None:
    assert num_cpus_of([], "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})") == 1


@pytest.mark.parametrize(("quota", "cpus"), [(40_000, 1), (140_000, 1), (150_000, 2), (100_000_000, 1 << 30)])
def test_a_quota_is_rounded_and_leaves_fewer_threads(quota: int, cpus: int) -> None:
    try:
        GROUP.mkdir()
    except OSError as fault:
        pytest.skip(f"no CPU cgroup can be made: {fault}")
    try:
        try:
            (GROUP / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as fault:
            pytest.skip(f"no quota can be set: {fault}")
        enters = ["sh", "-c", 'echo $$ > "$1" && shift && exec "$@"', "sh", str(GROUP / "cgroup.procs")]
        assert num_cpus_of(enters, "pass") == min(cpus, num_cpus())
    finally:
        GROUP.rmdir()


SIBLINGS = "system/cpu/cpu{cpu}/topology/thread_siblings_list"


@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        ({}, {0, 1, 5}, {0, 1, 5}),  # nothing is known
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, {0, 1, 2, 3}, {0, 2}),
        ({0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}, {1, 4, 5}, {1, 4}),  # of a core's CPUs only one is allowed
        # Intel: two fast cores of two threads, four slow ones
        (
            {"cpu_core/cpus": "0-3\n", "cpu_atom/cpus": "4-7\n", 0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"},
            {*range(8)},
            {0, 2},
        ),
        ({"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"}, {4, 5, 6}, {4, 5, 6}),  # only slow ones are allowed
        ({"capacity": [1024, 1024, 900, 446, 446, 446]}, {*range(6)}, {0, 1, 2}),  # Arm
        ({"capacity": [1024, 1024, 900, 446, 446, 446]}, {3, 4}, {3, 4}),
        ({"capacity": [1024, 1024]}, {0, 1}, {0, 1}),
    ],
)
def test_threads_have_fast_cores_of_their_own(
    tmp_path: Path, files: dict[str | int, str | list[int]], allowed: set[int], cores: set[int]
) -> None:
    for name, text in files.items():
        if isinstance(text, list):
            for cpu, capacity in enumerate(text):
                write(tmp_path / f"system/cpu/cpu{cpu}/cpu_capacity", f"{capacity}\n")
        else:
            write(tmp_path / (SIBLINGS.format(cpu=name) if isinstance(name, int) else name), f"{text}\n")
    assert fast_cores(allowed, tmp_path) == cores


def test_there_are_at_least_as_many_cpus_as_cores() -> None:
    assert 1 <= num_cores() <= num_cpus()


def num_cpus_of(enters: list[str], before: str) -> int:
    """Returns what another process finds, which a command starts and which does something before."""
    command = [*enters, sys.executable, "-c", PRINT_CPUS.format(before=before)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
