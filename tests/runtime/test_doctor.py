"""The measuring of a machine: everything is measured, nothing is left behind; what is chosen, by hand."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.waiting import HANG_S

from moe_pack.formats import PackError, RunError
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.base.limits import num_cores
from moe_pack.runtime import MachineFacts, measure_machine
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.doctor import READ_SIZES, ReadMeasurement, ReadTrial, disk_facts
from moe_pack.runtime.engine.machine import ReadMode, SizedRate

INSTANT = 0.0005  # seconds a measurement
FOUR_MIB = 4 << 20


class Watched:
    """What was said and done, and what was in a folder then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.stages: list[Stage] = []
        self.done: list[int] = []
        self.seen: set[str] = set()

    def say(self, line: str) -> None:
        self.lines.append(line)
        self._look()

    def begin(self, stage: Stage) -> None:
        self.stages.append(stage)

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        assert what
        self.done.append(amount)
        self._look()

    def end(self) -> None:
        self._look()

    def _look(self) -> None:
        self.seen |= {path.name for path in self.folder.iterdir()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[MachineFacts, Watched]:
    """What is measured on an empty folder."""
    watched = Watched(tmp_path_factory.mktemp("empty"))
    return measure_machine(watched.folder, watched, INSTANT, FOUR_MIB), watched


@pytest.mark.slow
def test_every_size_that_the_file_has_room_for_is_measured_in_every_mode(
    measured: tuple[MachineFacts, Watched],
) -> None:
    drive = measured[0].drive
    sizes = [size for size in READ_SIZES if size <= FOUR_MIB]
    modes = {one.mode for one in drive.best}
    assert "pread" in modes and ("map" in modes) == is_available()
    assert sorted((one.mode, one.size) for one in drive.best) == sorted((m, size) for m in modes for size in sizes)
    assert [point.size for point in drive.curve] == sizes
    assert all(one.rate > 0 for one in drive.best) and drive.file_bytes == FOUR_MIB
    assert drive.mode in modes and 1 <= drive.threads <= 16


@pytest.mark.slow
def test_the_cpu_is_measured_where_there_are_kernels(measured: tuple[MachineFacts, Watched]) -> None:
    cpu = measured[0].cpu
    assert cpu.cores == num_cores()
    rates = [cpu.read_one, cpu.read_all]
    assert all(rate is not None and rate > 0 for rate in rates) if is_available() else rates == [None] * 2
    assert [one.width for one in cpu.experts] == ([1, 2, 3, 4, 8, 16] if is_available() else [])
    assert [one.width for one in cpu.dense] == ([4, 8, 16] if is_available() else [])
    assert [one.width for one in cpu.trellises] == ([4, 5, 6, 7, 8] if is_available() else [])
    assert all(one.rate > 0 for one in (*cpu.experts, *cpu.dense, *cpu.trellises))
    assert (cpu.row_s is not None and cpu.row_s >= 0) == is_available()


@pytest.mark.slow
def test_each_measurement_advances_one_stage(measured: tuple[MachineFacts, Watched]) -> None:
    watched = measured[1]
    assert watched.lines == ["writing 4 MiB to read"]
    (stage,) = watched.stages
    assert stage.note.startswith(f"{stage.total} measurements, about ")
    assert watched.done == [0] + [1] * (stage.total - 1)


@pytest.mark.slow
def test_the_file_that_is_written_has_no_name(measured: tuple[MachineFacts, Watched]) -> None:
    assert measured[1].seen == set() and not list(measured[1].folder.iterdir())


@pytest.mark.slow
def test_a_pack_is_measured_on_its_own_files_and_not_written(tiny_pack: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pack, tmp_path / "packed")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    watched = Watched(folder)
    drive = measure_machine(folder, watched, INSTANT).drive
    experts = [path.stat().st_size for path in folder.glob("experts-*.safetensors")]
    assert drive.file_bytes == sum(experts)
    assert max(one.size for one in drive.best) <= max(experts)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before and watched.seen == set(before)
    assert watched.lines == []


def test_a_damaged_pack_is_refused(tiny_pack: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_pack, tmp_path / "packed")
    with (folder / "experts-000.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(PackError, match=r"^experts-000\.safetensors: 4096 bytes, expected"):
        measure_machine(folder, Watched(folder), INSTANT)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name in ("missing", "file"):
        with pytest.raises(RunError, match=rf"{name}: no such folder; give a folder on the disk to measure$"):
            measure_machine(tmp_path / name, Watched(tmp_path), INSTANT)


def test_a_folder_that_takes_no_files_is_refused() -> None:
    """The kernel's own, which has no free space either."""
    with pytest.raises(RunError, match=r"^/proc: less than 4 MiB are free"):
        measure_machine(Path("/proc"), seconds=INSTANT)


def runs(mode: ReadMode, threads: int, rates: list[float]) -> list[ReadMeasurement]:
    return [
        ReadMeasurement(ReadTrial(mode, threads, size), rate) for size, rate in zip((4096, 16384), rates, strict=True)
    ]


def test_the_best_number_of_threads_is_kept_for_each_mode_and_size() -> None:
    found = disk_facts([*runs("direct", 1, [5, 8]), *runs("direct", 4, [9, 7]), *runs("map", 1, [1, 2])], "sda", 9)
    assert [(one.mode, one.size, one.threads, one.rate) for one in found.best] == [
        ("direct", 4096, 4, 9),
        ("direct", 16384, 1, 8),
        ("map", 4096, 1, 1),
        ("map", 16384, 1, 2),
    ]
    assert (found.name, found.file_bytes) == ("sda", 9)


def test_what_is_chosen_comes_nearest_to_the_best_over_all_sizes() -> None:
    """The best are 10 and 100, maps left out: pread has 1.0 + 0.2 with 1 thread, 0.6 + 0.9 with 8; direct 0.4 + 1.0."""
    pread = [*runs("pread", 1, [10, 20]), *runs("pread", 8, [6, 90])]
    found = disk_facts([*runs("direct", 2, [4, 100]), *pread, *runs("map", 1, [1, 5000])], None, 9)
    assert (found.mode, found.threads) == ("pread", 8)
    assert found.curve == (SizedRate(4096, 6), SizedRate(16384, 90))


def test_a_reads_processor_time_has_a_part_for_each_read_and_one_for_its_bytes() -> None:
    def took(mode: ReadMode, threads: int, rates: list[float], cpu_s: list[float]) -> list[ReadMeasurement]:
        return [replace(each, cpu_s=cpu) for each, cpu in zip(runs(mode, threads, rates), cpu_s, strict=True)]

    measured = [*took("direct", 8, [9, 99], [12e-6, 48e-6]), *took("direct", 1, [5, 50], [1.0, 1.0])]
    found = disk_facts(measured, None, 9)
    assert (found.mode, found.threads) == ("direct", 8)
    assert found.byte_cpu_s == pytest.approx(36e-6 / 12288)
    assert found.cpu_seconds(3, 7 * 12288) == pytest.approx(0.0 + 7 * 36e-6)  # 12 us are those of 4,096 bytes
    noisy = disk_facts(took("direct", 8, [9, 99], [12e-6, 11e-6]), None, 9)
    assert (noisy.read_cpu_s, noisy.byte_cpu_s) == (12e-6, 0.0)


# The extension is as good as not built where its import finds nothing.
WITHOUT_EXTENSION = """
import sys
sys.modules["moe_pack.runtime.cpu._native"] = None
from pathlib import Path
from moe_pack.runtime import measure_machine
from moe_pack.runtime.cpu import is_available
assert not is_available()
facts = measure_machine(Path(sys.argv[1]), seconds=0.0005, most_bytes=1 << 20)
print(facts.cpu.instruction_set, sorted({one.mode for one in facts.drive.best} - {"direct"}), facts.drive.threads)
"""


@pytest.mark.slow
def test_without_the_extension_reads_of_one_thread_are_measured_and_nothing_of_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_EXTENSION, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (run.stdout, run.stderr) == ("None ['pread'] 1\n", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_the_link_to_the_gpu_is_measured(measured: tuple[MachineFacts, Watched]) -> None:
    link = measured[0].link
    assert link is not None and link.name and link.memory_bytes > 1 << 30
    assert all(copy.rate > 0 for copy in link.copies)
