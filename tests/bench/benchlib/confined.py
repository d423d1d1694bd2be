"""Commands in a memory cgroup, from an empty page cache, with samples of how much anonymous memory they take.

`ConfinedRun` is one run of moe-run or llama.cpp on a pack: its times, its memory, and how it ended.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import numpy as np

from benchlib.llama import llama_command
from moe_pack.formats import Pack
from moe_pack.runtime import MachineFacts, available_bytes, save_facts

SPARE_BYTES = 400_000_000  # of the cgroup beyond the budget: interpreter, libraries, what is mapped of the files
_LIMIT_SECONDS = 900.0  # for a whole run; a longer one is stopped
SAMPLE_SECONDS = 0.05
MOE_RUN = ("-m", "moe_pack.runtime.cli", "--bench", "--json", "--device", "cpu")  # what Python runs


class NoCgroupError(Exception):
    """A memory cgroup cannot be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What a version of the interface calls its files and counters."""

    limit: str
    peak: str
    refused: tuple[str, str]  # file and counter; a file without counters holds one number
    kills: tuple[str, str]
    anonymous: tuple[str, str]  # in memory.stat
    no_swap: str  # no way out through swap


_VERSION_1 = _Names(
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    ("memory.failcnt", ""),
    ("memory.oom_control", "oom_kill"),
    ("total_rss", "total_shmem"),
    # A limit on memory and swap together would be hit first, and failcnt stay at zero.
    "memory.swappiness",
)
_VERSION_2 = _Names(
    "memory.max",
    "memory.peak",
    ("memory.events", "max"),
    ("memory.events", "oom_kill"),
    ("anon", "shmem"),
    "memory.swap.max",
)


class MemoryCgroup:
    """A memory cgroup below this process's own, so that whatever limits this one limits it too; removed at the end.

    It counts the page cache that its processes are the first to ask for: what others had read before is theirs.
    Raises:  NoCgroupError where none can be made.
    """

    def __init__(self, limit_bytes: int) -> None:
        parent, self._names = _parent()
        self.folder = parent / f"moe-pack-{os.getpid()}"
        try:
            self.folder.mkdir()
        except OSError as fault:
            raise NoCgroupError(f"{self.folder}: {fault.strerror}") from fault
        try:
            (self.folder / self._names.limit).write_text(str(limit_bytes))
            if (no_swap := self.folder / self._names.no_swap).exists():  # version 2 without swap has none
                no_swap.write_text("0")
        except OSError as fault:
            self.folder.rmdir()
            raise NoCgroupError(f"{self.folder}: limit cannot be set ({fault.strerror})") from fault

    def __enter__(self) -> "MemoryCgroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(100):  # a process just ended may still be counted in for a moment
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        click.echo(f"{self.folder}: cannot be removed", err=True)

    @property
    def limit_bytes(self) -> int:
        """The limit, in whole pages."""
        return int((self.folder / self._names.limit).read_text())

    @property
    def peak_bytes(self) -> int | None:
        """Most that was counted at once, page cache included; None where the kernel keeps no such number."""
        path = self.folder / self._names.peak
        return int(path.read_text()) if path.exists() else None

    @property
    def num_refused(self) -> int:
        """How often the limit was reached, and something had to go."""
        return self._counter(*self._names.refused) or 0

    @property
    def num_kills(self) -> int | None:
        """Processes killed for want of memory; None where the kernel does not count them."""
        return self._counter(*self._names.kills)

    def anonymous_bytes(self) -> int:
        """Anonymous and shared memory of all processes inside."""
        return sum(self._counter("memory.stat", name) or 0 for name in self._names.anonymous)

    def inside(self, command: list[str]) -> list[str]:
        """The command, entering the cgroup before it starts."""
        return ["sh", "-c", 'echo $$ > "$1" && shift && exec "$@"', "sh", str(self.folder / "cgroup.procs"), *command]

    def _counter(self, file: str, name: str) -> int | None:
        text = (self.folder / file).read_text()
        if not name:
            return int(text)
        counters = dict(line.split() for line in text.splitlines())
        return int(counters[name]) if name in counters else None


def _parent() -> tuple[Path, _Names]:
    """The folder in the memory hierarchy that a cgroup may be made in, and the names of the files there."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    roots = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup" and "memory" in mount[3].split(",")]
    paths = [path for _, controllers, path in groups if "memory" in controllers.split(",")]
    if roots and paths:
        own = roots[0] / paths[0].lstrip("/")
        return own if own.is_dir() else roots[0], _VERSION_1  # in a container the mount may begin at our own group
    roots = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    paths = [path for number, _, path in groups if number == "0"]
    if roots and paths:
        own = roots[0] / paths[0].lstrip("/")
        # Only a group that passes the controller on can have limited ones below, and it has no processes of its own.
        for folder in (own, *own.parents):
            control = folder / "cgroup.subtree_control"
            if control.exists() and "memory" in control.read_text().split():
                return folder, _VERSION_2
    raise NoCgroupError("no cgroup hierarchy that limits memory is mounted")


def tree_anonymous_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process and its descendants; 0 for one that has ended."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(tree_anonymous_bytes(int(child)) for child in (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it or a thread of it ended while we looked
    return total


@dataclass(frozen=True, slots=True)
class Measured:
    """A command that was run to its end: what it took and wrote, of standard error the end alone.

    `is_stopped`: it was not done in the time it had, and was killed.
    """

    exit_code: int
    is_stopped: bool
    seconds: float
    peak_bytes: int
    num_samples: int
    major_faults: int
    output: str
    errors: str


def measure(
    command: list[str], anonymous_bytes: Callable[[int], int], standard_input: str = "", limit_s: float = float("inf")
) -> Measured:
    """Runs a command to its end or for so many seconds, sampling; `anonymous_bytes` is given its pid."""
    peak = num_samples = 0
    is_stopped = False
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(standard_input.encode())
        given.seek(0)
        began = time.monotonic()
        process = subprocess.Popen(command, stdin=given, stdout=output, stderr=errors)
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                peak, num_samples = max(peak, anonymous_bytes(process.pid)), num_samples + 1
                if time.monotonic() - began > limit_s:
                    is_stopped = True
                    process.kill()
                time.sleep(SAMPLE_SECONDS)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        seconds = time.monotonic() - began
        output.seek(0)
        errors.seek(0)
        said, text = output.read().decode(errors="replace"), errors.read()[-2000:].decode(errors="replace").strip()
    return Measured(process.returncode, is_stopped, seconds, peak, num_samples, usage.ru_majflt, said, text)


def drop_page_cache(folder: Path) -> bool:
    """Empties the page cache; where only root may, at least of a folder's files, as far as the kernel agrees."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return True
    except OSError:
        for path in folder.iterdir():
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        return False


def back_free_memory(num_bytes: int) -> None:
    """Touches so much free memory, half of what is free at most, and gives it back.

    A virtual machine may have left it to its host. To get it again takes up to 2.6 s a GB where pages are huge (2 cores
    of an AMD EPYC, 2026-11-22), which would else be the time of the program that asks for it first.
    """
    free = available_bytes()
    wanted = num_bytes if free is None else min(num_bytes, free // 2)
    with mmap.mmap(-1, wanted, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as touched:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            touched.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, wanted, mmap.PAGESIZE):
            touched[start] = 1


@dataclass(frozen=True, slots=True)
class Task:
    """What every program runs: so many random tokens as the prompt, then so many one by one."""

    prompt_tokens: int
    decode_tokens: int
    threads: int
    seed: int
    decode_limit_s: float  # of llama.cpp, which then has made fewer tokens


@dataclass(frozen=True, slots=True)
class ConfinedRun:
    """A run, measured. Times are None where it did not finish; then `fault` says why.

    `decode_s`: for `num_tokens`, one by one after the prompt.   `cgroup_peak_bytes`: page cache included.
    `facts`: what the program printed.
    """

    program: str
    limit_bytes: int
    measured: Measured
    prompt_s: float | None
    decode_s: float | None
    num_tokens: int
    kills: int | None
    cgroup_peak_bytes: int | None
    facts: dict[str, Any]

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding; None where there was none."""
        return self.num_tokens / self.decode_s if self.decode_s else None

    @property
    def token_bytes(self) -> float | None:
        """Bytes that were read for a decoded token; None where the program does not count them."""
        counts = (self.facts.get("stream") or {}).get("decode")
        return counts["asked_bytes"] / counts["tokens"] if counts and counts["tokens"] else None

    def fault(self) -> str | None:
        """Returns why it did not finish, or None."""
        if self.measured.is_stopped:
            return f"{self.program}: stopped after {self.measured.seconds:.0f} s"
        if self.measured.exit_code:
            return f"{self.program}: ended with {self.measured.exit_code}, {self.kills} kills: {self.measured.errors}"
        return None


def run_ours(
    program: str,
    pack: Path,
    task: Task,
    options: list[str],
    limit_bytes: int,
    machine: MachineFacts | None = None,
    command: Sequence[str] = MOE_RUN,
) -> ConfinedRun:
    """Runs `moe-run --bench` with these options, or another `command` that prints JSON with its names.

    Args:    machine: what moe-run finds in its cache folder, as after `moe-pack doctor`. None: nothing, and it measures
             the disk itself where that matters. It does not see the facts that other runs have left on this machine.
    """
    lengths = ["--prompt-tokens", str(task.prompt_tokens), "--max-tokens", str(task.decode_tokens + 1)]
    given = [*options, *lengths, "--threads", str(task.threads), "--seed", str(task.seed)]
    with tempfile.TemporaryDirectory(prefix="moe-pack-") as cache, MemoryCgroup(limit_bytes) as cgroup:
        if machine is not None:
            save_facts(machine, Path(cache) / "moe-pack", pack)
        drop_page_cache(pack)
        back_free_memory(limit_bytes)
        inside = cgroup.inside(["env", f"XDG_CACHE_HOME={cache}", sys.executable, *command, str(pack), *given])
        measured = measure(inside, tree_anonymous_bytes, limit_s=_LIMIT_SECONDS)
        facts = {} if measured.exit_code else json.loads(measured.output)
        num_tokens = facts["generated_tokens"] - 1 if facts else 0  # the prompt gives the first
        times = (facts.get("prefill_s"), facts.get("decode_s") or None, num_tokens)
        return ConfinedRun(program, limit_bytes, measured, *times, cgroup.num_kills, cgroup.peak_bytes, facts)


def run_llama(program: str, llama_python: Path, gguf: Path, pack: Path, task: Task, limit_bytes: int) -> ConfinedRun:
    """Runs llama.cpp on a mapped GGUF, with random tokens."""
    with Pack(pack) as opened:
        spec = opened.spec
    generator = np.random.default_rng(task.seed)
    prompt, tokens = (
        generator.integers(spec.vocab_size, size=n).tolist() for n in (task.prompt_tokens, task.decode_tokens)
    )
    asked = {"prompt": prompt, "tokens": tokens, "at_once": False, "threads": task.threads}
    command = llama_command(llama_python, gguf, task.prompt_tokens + task.decode_tokens, mapped=True)
    drop_page_cache(gguf.parent)
    back_free_memory(limit_bytes)
    with MemoryCgroup(limit_bytes) as cgroup:
        request = json.dumps(asked | {"limit_s": task.decode_limit_s}) + "\n"
        measured = measure(cgroup.inside(command), tree_anonymous_bytes, request, _LIMIT_SECONDS)
        lines = [] if measured.exit_code else [json.loads(line) for line in measured.output.splitlines()]
        timing = lines[1] if lines else {}
        times = (timing.get("prompt_s"), timing.get("seconds"), timing.get("num_tokens", 0))
        facts = lines[0] if lines else {}
        return ConfinedRun(program, limit_bytes, measured, *times, cgroup.num_kills, cgroup.peak_bytes, facts)
