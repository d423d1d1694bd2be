"""What a pack needs to run: the modules, lines and packages that commands load for a pack of Mixtral.

    python tests/bench/loaded.py

Without a pack it makes one of the demo model, in 4 bit. Every command runs in an interpreter of its own, to its first
tokens, or as a server until it has loaded the pack. With `--modules` it lists the modules, and who imported each first,
so that what made a command larger is found. With `--rounds` it measures the CPU seconds of commands, in turn.
"""

import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from benchlib import DEMO_MODEL, ROOT, figure, finish, json_option, moe_pack, table
from support.loaded_modules import PROGRAMS, Loaded, loaded_by

TEXT = ("--prompt", "It was a dark night, and the wind blew over the long road to the town")
NATIVE = ROOT / "runtime" / "cpu" / "native"
_NO_CODE = re.compile(r"\s*(//.*)?")


@dataclass(frozen=True)
class Case:
    """A command with a pack: as a table shows it, its arguments, those that end it early, and its exit code."""

    name: str
    program: str
    arguments: tuple[str, ...]
    exit_code: int = 0


CASES = (
    Case("moe-run PACK --prompt TEXT", "moe-run", (*TEXT, "--max-tokens", "8")),
    Case("moe-run PACK --prompt TEXT --budget 16M", "moe-run", (*TEXT, "--max-tokens", "8", "--budget", "16M")),
    Case("moe-serve PACK --budget 16M", "moe-serve", ("--budget", "16M", "--port", "0")),
)
TIMED = (
    Case("a name that no option has", "moe-run", ("--policy", "wrong"), 2),
    Case("an option without effect", "moe-run", ("--device", "cpu", "--ram", "1G", *TEXT), 1),
    Case("the first token", "moe-run", (*TEXT, "--max-tokens", "1")),
    Case("the first token, with --budget 16M", "moe-run", (*TEXT, "--max-tokens", "1", "--budget", "16M")),
)


def native_lines() -> tuple[int, int]:
    """Returns the lines of the C++ kernels, and those of them that are neither empty nor a comment."""
    lines = [line for path in sorted(NATIVE.iterdir()) for line in path.read_text("utf-8").splitlines()]
    return len(lines), sum(_NO_CODE.fullmatch(line) is None for line in lines)


def loaded_by_case(case: Case, pack: Path) -> Loaded:
    """Returns what a command loads for a pack."""
    return loaded_by(case.program, pack, *case.arguments, exit_code=case.exit_code)


def cpu_seconds(case: Case, pack: Path) -> float:
    """Returns the CPU seconds of a command, with all its threads, to its end."""
    script = f"from {PROGRAMS[case.program]} import main; main(prog_name={case.program!r})"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script, str(pack), *case.arguments], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == case.exit_code, done.stderr.decode(errors="replace")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def demo_pack() -> Iterator[Path]:
    """Makes a pack of the demo model in 4 bit, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "packed"
        bits = ("--quantizer", "nearest", "--selector-bits", 4, "--record-bits", 4)
        moe_pack("convert", DEMO_MODEL, *bits, "-o", pack)
        yield pack


def sizes(found: dict[str, Loaded]) -> str:
    """Returns the table of what commands load, and of the kernels."""
    rows = [
        (f"`{name}`", str(len(loaded.modules)), f"{loaded.lines:,}", f"{loaded.code_lines:,}")
        for name, loaded in found.items()
    ]
    lines, code_lines = native_lines()
    rows.append(("native kernels, C++", "", f"{lines:,}", f"{code_lines:,}"))
    packages = [f"{name}: {', '.join(loaded.packages)}" for name, loaded in found.items()]
    return "\n".join([table(("command", "modules", "lines", "of code"), rows), "", "Other packages:", *packages])


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("pack", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--modules", "shows_modules", is_flag=True, help="List the modules of each folder.")
@click.option("--rounds", default=0, type=click.IntRange(0), help="Also measure CPU seconds, so often.")
@json_option
def main(pack: Path | None, shows_modules: bool, rounds: int, as_json: bool) -> None:
    if pack is None:
        with demo_pack() as made:
            measure(made, shows_modules, rounds, as_json)
    else:
        measure(pack, shows_modules, rounds, as_json)


def measure(pack: Path, shows_modules: bool, rounds: int, as_json: bool) -> None:
    found = {case.name: loaded_by_case(case, pack) for case in CASES}
    texts = [f"{name}\n{loaded.table()}\n" for name, loaded in found.items() if shows_modules]
    texts.append(sizes(found))
    seconds: dict[str, list[float]] = {case.name: [] for case in TIMED}
    for _ in range(rounds):
        for case in TIMED:
            seconds[case.name].append(cpu_seconds(case, pack))
    if rounds:
        rows = [(name, figure(median(each))) for name, each in seconds.items()]
        texts.append("\n" + table(("CPU seconds until", "median"), rows))
    facts = {
        name: {
            "modules": len(each.modules),
            "lines": each.lines,
            "code_lines": each.code_lines,
            "folders": each.folders(),
        }
        for name, each in found.items()
    }
    finish({"commands": facts, "native": native_lines(), "cpu_seconds": seconds}, "\n".join(texts), as_json)


if __name__ == "__main__":
    main()
