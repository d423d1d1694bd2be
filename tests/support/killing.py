"""Conversions that die at a chosen step, and what their folders become: a script, so that pytest itself never forks.

    python killing.py SCENARIO,... WORKPLACE EVERY    prints a report: a JSON list of trials for each scenario

EVERY is 1 for a trial at each step; at a larger N, only every Nth torn write and power cut is tried, and one sequence
of random deaths in place of four.

Each conversion runs in a child forked from a process of one thread that has loaded torch: killing and resuming one
takes hundredths of a second. A child tells of each step through a pipe before it makes it.
"""

import dataclasses
import gc
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from moe_pack.convert.pipeline import convert, layout_for
from moe_pack.formats import ConversionError, Plan, part_format, uniform_plan
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.layouts import Item
from moe_pack.formats.pack.writer import Step
from support.models import TinyMixtral
from support.profiles import Recorder
from support.waiting import HANG_S

JOURNAL = "conversion.journal"
CLAIM = "conversion.json"
MEMORY = Path("/dev/shm")
MAX_DEATHS = 200  # some seven do
OnStep = Callable[[Step], None]
Files = dict[str, bytes]
Said = dict[str, Any]  # one line of a conversion's account of itself


@dataclass(frozen=True)
class Run:
    """The report of one conversion: its steps up to its end or death, the last progress, and how it ended."""

    steps: list[tuple[str, str]]
    killed: bool
    done_bytes: int = 0
    error: str = ""
    resumed_bytes: int = -1
    written: bool = False

    @property
    def large_writes(self) -> int:
        return sum(action == "write" and _is_large(path) for action, path in self.steps)


@dataclass(frozen=True)
class Trial:
    what: str
    runs: list[Run]
    different: list[str] = field(default_factory=list)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder in memory where there is one: a test that dies at every step syncs thousands of times."""
    disk = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=disk, prefix="moe-pack-test-") as folder:
        yield Path(folder)


def files_in(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def different_files(found: Files, expected: Files) -> list[str]:
    return sorted(name for name in found | expected if found.get(name) != expected.get(name))


def run_scenarios(scenarios: Sequence[str], workplace: Path, *prefix: str, every: int = 1) -> dict[str, list[Trial]]:
    """Runs this file in a process of its own, behind a `prefix`, and reads its report."""
    command = [*prefix, sys.executable, __file__, ",".join(scenarios), str(workplace), str(every)]
    # numpy's own threads are not wanted in a process that forks.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # of `support`
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=HANG_S)
    assert ended.returncode == 0, f"{', '.join(scenarios)} failed:\n{ended.stderr}"
    return {name: [_read_trial(trial) for trial in trials] for name, trials in json.loads(ended.stdout).items()}


def _read_trial(trial: dict[str, Any]) -> Trial:
    runs = [Run(**run | {"steps": [(action, path) for action, path in run["steps"]]}) for run in trial["runs"]]
    return Trial(trial["what"], runs, trial["different"])


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def nothing(step: Step) -> None:
    """Lets every step pass."""


def dies_at(number: int) -> OnStep:
    def on_step(step: Step) -> None:
        if step.number == number:
            die()

    return on_step


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")  # small files are written as `.tmp`


class Child:
    """A forked process that converts, and the pipe through which it tells of it."""

    def __init__(self, source: Path, folder: Path, on_step: OnStep, workers: int) -> None:
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reading)
            _convert_and_exit(source, folder, on_step, workers, writing)
        os.close(writing)
        self._pipe = os.fdopen(reading, "rb")

    def wait_for_step(self, number: int) -> None:
        for line in iter(self._pipe.readline, b""):
            if json.loads(line).get("step") == number:
                return
        raise AssertionError(f"the conversion ended before step {number}")

    def result(self) -> Run:
        with self._pipe:
            said = [json.loads(line) for line in self._pipe]
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"a conversion ended with {code}"
        return _run_of(said, killed=code != 0)


def _convert_and_exit(source: Path, folder: Path, on_step: OnStep, workers: int, pipe: int) -> NoReturn:
    code = 1
    try:
        gc.disable()  # a collection would touch, and so copy, every page shared with the parent
        _convert(source, folder, on_step, workers, lambda said: os.write(pipe, json.dumps(said).encode() + b"\n"))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # whatever happened, the child must not go on as its parent


def _convert(source: Path, folder: Path, on_step: OnStep, workers: int, say: Callable[[Said], object]) -> None:
    def announce(step: Step) -> None:
        say({"step": step.number, "action": step.action, "path": step.path})
        on_step(step)

    checkpoint = Checkpoint(source)
    plan = quick_plan(checkpoint)
    try:
        ended = convert(checkpoint, plan, folder, workers, _Told(say), announce)
        say({"resumed_bytes": ended.resumed_bytes, "written": ended.written})
    except ConversionError as fault:
        say({"error": str(fault)})
    finally:
        checkpoint.close()


class _Told(Recorder):
    def __init__(self, say: Callable[[Said], object]) -> None:
        super().__init__()
        self._say = say

    def begin(self, stage: Stage) -> None:
        self.done = stage.done
        self._say({"done_bytes": self.done})

    def advance(self, amount: int, what: str = "", kind: str = "") -> None:
        self.done += amount
        self._say({"done_bytes": self.done})


def _run_of(said: list[Said], killed: bool) -> Run:
    steps = [(str(line["action"]), str(line["path"])) for line in said if "step" in line]
    facts = {key: value for line in said if "step" not in line for key, value in line.items()}
    return Run(steps, killed, **facts)


def quick_plan(checkpoint: Checkpoint) -> Plan:
    part = part_format(4, 16)
    return uniform_plan(checkpoint.spec, "up", part, part, quantizer="nearest")


class Bench:
    """A checkpoint, its pack as an uninterrupted conversion makes it, and a folder for others."""

    def __init__(self, work: Path) -> None:
        self.source = TinyMixtral().write(work / "source")
        self.out = work / "out"
        whole = work / "whole"
        self.unfinished: Files = {}  # what is there when all is done but the last cleaning
        run = self.start(whole, self._keep_unfinished(whole, work / "unfinished")).result()
        self.unfinished = files_in(work / "unfinished")
        self.whole = files_in(whole)
        self.steps = run.steps
        checkpoint = Checkpoint(self.source)
        items = list(layout_for(checkpoint, quick_plan(checkpoint)).items())
        checkpoint.close()
        headers = [item for item in items if item.kind == "header"]
        self.items = headers + [item for item in items if item.kind != "header"]  # in the order of their writes

    def start(self, folder: Path, on_step: OnStep = nothing, workers: int = 1) -> Child:
        return Child(self.source, folder, on_step, workers)

    def run(self, on_step: OnStep = nothing, workers: int = 1) -> Run:
        return self.start(self.out, on_step, workers).result()

    def resume(self, on_step: OnStep = nothing) -> Run:
        """Converts into `out` in this process, where none was ever killed: forking is most of a trial's time."""
        said: list[Said] = []
        _convert(self.source, self.out, on_step, 1, said.append)
        return _run_of(said, killed=False)

    def trial(self, what: str, *runs: Run) -> Trial:
        different = different_files(files_in(self.out), self.whole)
        shutil.rmtree(self.out)
        return Trial(what, list(runs), different)

    def _keep_unfinished(self, whole: Path, kept: Path) -> OnStep:
        def on_step(step: Step) -> None:
            if (step.action, step.path) == ("unlink", JOURNAL):
                shutil.copytree(whole, kept)

        return on_step


def each_step(work: Path, every: int) -> Iterator[Trial]:
    bench = Bench(work)
    for number, (action, path) in enumerate(bench.steps, 1):
        yield bench.trial(f"{number}: {action} {path}", bench.run(dies_at(number)), bench.resume())


def torn_writes(work: Path, every: int) -> Iterator[Trial]:
    """Dies within each write and truncation, having made part of it or something else, then resumes."""
    bench = Bench(work)
    for number, (action, path) in enumerate(bench.steps, 1):
        ways = (
            ("half", "noise", "zeros", "wrong digits", "all but the last byte")
            if path == JOURNAL
            else ("half", "noise")
        )
        for way in ways[number % every :: every] if action == "write" else ():
            tear = TornWrite(bench, number, way)
            yield bench.trial(f"{number}: {way} of write {path}", bench.run(tear), bench.resume())
        if action == "truncate":
            cut = _half_truncation(bench, number)
            yield bench.trial(f"{number}: half of truncate {path}", bench.run(cut), bench.resume())


class TornWrite:
    """Makes the write with this number in part or wrongly, and dies."""

    def __init__(self, bench: Bench, number: int, way: str) -> None:
        self._bench = bench
        self._number = number
        self._way = way
        self._items = iter(bench.items)

    def __call__(self, step: Step) -> None:
        item = next(self._items) if step.action == "write" and _is_large(step.path) else None
        if step.number != self._number:
            return
        offset, raw = self._whole_write(step, item)
        made = {
            "half": raw[: len(raw) // 2],
            "all but the last byte": raw[:-1],
            "noise": random.Random(step.number).randbytes(len(raw)),
            "wrong digits": raw.replace(raw[-20:-19], b"0" if raw[-20:-19] != b"0" else b"1"),
            "zeros": bytes(len(raw)),  # what a file system leaves that knew the size before the bytes
        }[self._way]
        with (self._bench.out / step.path).open("r+b") as file:
            os.pwrite(file.fileno(), made, offset)
        die()

    def _whole_write(self, step: Step, item: Item | None) -> tuple[int, bytes]:
        """Returns the place of this write, and its bytes."""
        known = self._bench.unfinished
        if item is not None:
            assert item.file == step.path, (item, step)
            return item.offset, known[item.file][item.offset : item.offset + item.num_bytes]
        if step.path == JOURNAL:
            size = (self._bench.out / JOURNAL).stat().st_size
            return size, known[JOURNAL][size : known[JOURNAL].index(b"\n", size) + 1]
        return 0, known[step.path.removesuffix(".tmp")]


def _half_truncation(bench: Bench, number: int) -> OnStep:
    def on_step(step: Step) -> None:
        if step.number == number:
            os.truncate(bench.out / step.path, len(bench.whole[step.path]) // 2)
            die()

    return on_step


def resumed_runs(work: Path, every: int) -> Iterator[Trial]:
    """Dies within the first expert's line in the journal, then at each step of the resumed run."""
    bench = Bench(work)
    torn = [number for number, step in enumerate(bench.steps, 1) if step == ("write", JOURNAL)][-2]
    for second in itertools.count(1):
        runs = [bench.run(TornWrite(bench, torn, "all but the last byte")), bench.run(dies_at(second))]
        if not runs[-1].killed:
            yield bench.trial("nowhere", *runs)
            return
        action, path = runs[-1].steps[-1]
        yield bench.trial(f"{second}: {action} {path}", *runs, bench.resume())


def many_deaths(work: Path, every: int) -> Iterator[Trial]:
    """Dies at random steps, time after time, with one, two or three workers, until nothing is left to do."""
    bench = Bench(work)
    for seed in range(4 if every == 1 else 1):
        chance = random.Random(seed)
        runs = [bench.run(dies_at(1), 1)]
        while runs[-1].killed:
            assert len(runs) < MAX_DEATHS, "each run does some work, yet none comes to an end"
            runs.append(bench.run(dies_at(chance.randint(1, len(bench.steps) // 2)), chance.randint(1, 3)))
        yield bench.trial(f"seed {seed}", *runs)


class Drive:
    """A disk that keeps only synced bytes and names, and dies at a step.

    It may keep more: with `names` "ahead", all changes to names so far, but no bytes; "removed", removals alone;
    "replaced", other files under names that were safe.
    """

    def __init__(self, folder: Path, number: int, names: str, end: Callable[[], NoReturn] = die) -> None:
        self._folder = folder
        self._number = number
        self._kept = names
        self._end = end
        self._names = self._names_now() if folder.exists() else {}
        self._bytes = {inode: (folder / name).read_bytes() for name, inode in self._names.items()}
        self._last = Step(0, "", "")

    def __call__(self, step: Step) -> None:
        if self._last.action == "fsync":
            if self._last.path == ".":
                self._names = self._names_now()
            elif self._last.path != str(self._folder.parent):  # the folder itself is taken to survive
                path = self._folder / self._last.path
                self._bytes[path.stat().st_ino] = path.read_bytes()
        self._last = step
        if step.number == self._number:
            self._lose()
            self._end()

    def _names_now(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self._folder.iterdir()}

    def _lose(self) -> None:
        now, safe = self._names_now(), self._names
        left = {
            "synced": safe,
            "ahead": now,
            "replaced": {name: now.get(name, inode) for name, inode in safe.items()},
            "removed": {name: inode for name, inode in safe.items() if name in now},
        }[self._kept]
        for name in now:
            (self._folder / name).unlink()
        for name, inode in left.items():
            (self._folder / name).write_bytes(self._bytes.get(inode, b""))


def power_cuts(work: Path, every: int) -> Iterator[Trial]:
    """Loses the power before each step but the first, and with it all that was not synced, then resumes."""
    bench = Bench(work)
    # What survives changes with these actions alone: after others the same would be lost again.
    losses = {"synced": ("fsync",), "ahead": ("fsync", "create", "rename", "unlink"), "removed": ("unlink",)}
    for names, changes in losses.items():
        for number, ((before, _), (action, path)) in enumerate(itertools.pairwise(bench.steps), 2):
            if before in changes and number % every == 0:
                runs = [bench.run(Drive(bench.out, number, names)), bench.resume()]
                yield bench.trial(f"{number}: {action} {path}, names {names}", *runs)


def two_at_once(work: Path, every: int) -> Iterator[Trial]:
    """Holds one conversion still before a step; another comes; the first goes on. The second run is the other's."""
    bench = Bench(work)
    writes = [number for number, step in enumerate(bench.steps, 1) if step[0] == "write"]
    locked = next(number for number, (action, _) in enumerate(bench.steps, 1) if action == "create")
    for number in (locked, writes[len(writes) // 2], len(bench.steps)):
        waiting, going = os.pipe()

        def holds(step: Step, number: int = number, waiting: int = waiting) -> None:
            if step.number == number:
                os.read(waiting, 1)

        first = bench.start(bench.out, holds)
        first.wait_for_step(number)
        before = files_in(bench.out)
        second = bench.run()
        changed = different_files(files_in(bench.out), before)
        os.write(going, b"!")
        trial = bench.trial(f"held at {number}", first.result(), second)
        yield dataclasses.replace(trial, different=trial.different + changed)
        os.close(waiting)
        os.close(going)


def full_from_the_start(work: Path, every: int) -> Iterator[Trial]:
    """`work` is a small tmpfs: filled until too little is free, then freed. The report's second run is the resumed."""
    bench = Bench(work)
    needed = sum(len(raw) for name, raw in bench.whole.items() if _is_large(name))
    filler = work / "filler"
    with filler.open("wb", buffering=0) as file:
        _fill(file, leave=needed // 2)
    full = bench.run()
    filler.unlink()
    yield bench.trial("too little room", full, bench.resume())


def filling_up(work: Path, every: int) -> Iterator[Trial]:
    """`work` is a small tmpfs that something else fills before each write in turn: fails, fails again, then resumes."""
    bench = Bench(work)
    filler = work / "filler"
    for number, (action, path) in enumerate(bench.steps, 1):
        if action != "write":
            continue

        def fills(step: Step, number: int = number) -> None:
            if step.number == number:
                with filler.open("wb", buffering=0) as file:
                    _fill(file)

        runs = [bench.resume(fills)]
        if runs[-1].error:
            runs.append(bench.resume())
        filler.unlink()
        yield bench.trial(f"full before {number}: {action} {path}", *runs, bench.resume())


def _fill(file: BinaryIO, leave: int = 0) -> None:
    disk = os.fstatvfs(file.fileno())
    left = disk.f_bavail * disk.f_frsize - leave
    try:
        while leave == 0 or left > 0:
            left -= file.write(bytes(1 << 12))
    except OSError:
        assert leave == 0, "the disk is full already"


SCENARIOS: dict[str, Callable[[Path, int], Iterator[Trial]]] = {
    scenario.__name__: scenario
    for scenario in (
        each_step,
        torn_writes,
        resumed_runs,
        many_deaths,
        power_cuts,
        two_at_once,
        full_from_the_start,
        filling_up,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    report = {}
    for name in sys.argv[1].split(","):
        work = Path(sys.argv[2]) / name
        work.mkdir()
        report[name] = [dataclasses.asdict(trial) for trial in SCENARIOS[name](work, int(sys.argv[3]))]
        shutil.rmtree(work)
    sys.stdout.write(json.dumps(report))
