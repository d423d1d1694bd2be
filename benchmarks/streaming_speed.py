"""Times decoding from packs larger than the memory given, beside llama.cpp with mapped files.

Two synthetic packs of about 5 GB and a GGUF of each (`bench_packs.py`); budgets that are a share of the pack's bytes;
every run in a memory cgroup of the budget and 400 MB, and from an empty page cache. Interleaved: moe-run with the
budget, moe-run on mapped files, llama.cpp on mapped files, and again. Medians over rounds, and how many times
llama.cpp's speed that is. The prompt is short, as a long one reads every expert; then random tokens one by one, where
llama.cpp begins no further token after --decode-limit seconds. llama.cpp's threads and tokens are as many as ours, and
its load is not counted.

Ends with exit code 1 where moe-run does not come to its end within a budget, or holds more anonymous memory at any
sample than the budget and 400 MB.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from bench_packs import SYNTHETIC, make_gguf, make_pack, run_options, threads_option
from confined_run import SPARE_BYTES, ConfinedRun, Task, run_llama, run_ours
from memory_cgroup import NoCgroupError

OURS, MAPPED, LLAMA = "moe-run", "moe-run, mapped", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Case:
    """All runs of one pack with one budget."""

    pack: str
    pack_bytes: int
    share: float
    budget_bytes: int
    runs: tuple[ConfinedRun, ...]

    def of(self, program: str) -> list[ConfinedRun]:
        """The runs of one program, in order."""
        return [run for run in self.runs if run.program == program]

    def rate(self, program: str) -> float | None:
        """Its median of tokens a second; None where no run came to its end."""
        rates = [run.tokens_a_second for run in self.of(program) if run.tokens_a_second]
        return median(rates) if rates else None

    def faults(self) -> Iterator[str]:
        """What is wrong with our runs within the budget."""
        place = f"{self.pack}, {self.share:.0%}"
        for run in self.of(OURS):
            if fault := run.fault():
                yield f"{place}: {fault}"
            if run.peak_anonymous_bytes > self.budget_bytes + SPARE_BYTES:
                yield f"{place}: {run.peak_anonymous_bytes:,} bytes anonymous with a budget of {self.budget_bytes:,}"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    folder: Path
    llama_python: Path | None
    rounds: int
    task: Task


def run_case(name: str, share: float, options: Options) -> Case:
    """Runs every program as often as there are rounds."""
    pack = make_pack(name, options.folder)
    gguf = make_gguf(pack, options.llama_python) if options.llama_python else None
    pack_bytes = sum(path.stat().st_size for path in pack.iterdir())
    budget = int(share * pack_bytes)
    limit, task = budget + SPARE_BYTES, options.task
    runs = []
    for number in range(options.rounds):
        runs.append(run_ours(OURS, pack, task, ["--budget", str(budget)], limit))
        _tell(name, share, number, runs[-1])
        runs.append(run_ours(MAPPED, pack, task, ["--read", "map", "--policy", "lru"], limit))
        _tell(name, share, number, runs[-1])
        if options.llama_python and gguf:
            runs.append(run_llama(LLAMA, options.llama_python, gguf, pack, task, limit))
            _tell(name, share, number, runs[-1])
    return Case(name, pack_bytes, share, budget, tuple(runs))


def _tell(name: str, share: float, number: int, run: ConfinedRun) -> None:
    rate = "no token" if run.tokens_a_second is None else f"{run.tokens_a_second:.2f} tokens/s"
    found = run.fault() or f"{rate}, {run.seconds:.0f} s in all"
    click.echo(f"{name}, {share:.0%}, round {number + 1}: {run.program}: {found}", err=True)


def table(cases: Sequence[Case]) -> str:
    """The cases below each other, a line a program."""
    lines = [
        "pack              share  budget MB  program          tokens/s     least      most  times llama.cpp   prompt s"
        "  anonymous MB  at most  cgroup peak MB  killed"
    ]
    for case in cases:
        theirs = case.rate(LLAMA)
        for program in dict.fromkeys(run.program for run in case.runs):
            runs, rate = case.of(program), case.rate(program)
            rates = [run.tokens_a_second for run in runs if run.tokens_a_second]
            prompts = [run.prompt_s for run in runs if run.prompt_s is not None]
            peaks = [run.cgroup_peak_bytes for run in runs if run.cgroup_peak_bytes is not None]
            lines.append(
                f"{case.pack:17} {case.share:5.0%}{case.budget_bytes / 1e6:11,.0f}  {program:15}"
                f"{_cell(rate, 10)}{_cell(min(rates, default=None), 10)}{_cell(max(rates, default=None), 10)}"
                f"{_cell(rate / theirs if rate and theirs else None, 17)}"
                f"{_cell(median(prompts) if prompts else None, 11)}"
                f"{max(run.peak_anonymous_bytes for run in runs) / 1e6:14,.0f}"
                f"{(case.budget_bytes + SPARE_BYTES) / 1e6:9,.0f}"
                f"{_cell(max(peaks) / 1e6 if peaks else None, 16, '.0f')}"
                f"{sum(run.exit_code != 0 for run in runs):5} of {len(runs)}"
            )
    return "\n".join(lines)


def _cell(number: float | None, width: int, form: str = ".2f") -> str:
    return f"{'-' if number is None else format(number, ',' + form):>{width}}"


def write_json(path: Path, cases: Sequence[Case], options: Options) -> None:
    """All figures of all runs."""
    facts = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "task": asdict(options.task)}
    path.write_text(json.dumps(facts | {"cases": [asdict(case) for case in cases]}, indent=1))


@click.command(help=__doc__)
@run_options("packs and GGUFs, 20 GB in all")
@click.option(
    "--llama-python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A Python with llama_cpp, gguf and numpy.  [default: llama.cpp is left out]",
)
@click.option("--pack", "packs", multiple=True, type=click.Choice(list(SYNTHETIC)), help="Which.  [default: all]")
@click.option(
    "--share",
    "shares",
    multiple=True,
    type=click.FloatRange(0, 1, min_open=True),
    default=(0.25, 0.5, 0.75),
    show_default=True,
    help="Of the pack's bytes that the budget is; one or more.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", default=16, show_default=True, type=click.IntRange(1))
@click.option("--decode-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option(
    "--decode-limit", default=60.0, show_default=True, type=click.FloatRange(0), help="Seconds, of llama.cpp."
)
@threads_option
def main(
    folder: Path,
    llama_python: Path | None,
    packs: tuple[str, ...],
    shares: tuple[float, ...],
    rounds: int,
    prompt_tokens: int,
    decode_tokens: int,
    decode_limit: float,
    threads: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Runs, prints, judges."""
    options = Options(folder, llama_python, rounds, Task(prompt_tokens, decode_tokens, threads, seed, decode_limit))
    cases: list[Case] = []
    for name in packs or SYNTHETIC:
        for share in shares:
            try:
                cases.append(run_case(name, share, options))
            except NoCgroupError as reason:
                raise click.ClickException(f"no memory cgroup can be made: {reason}") from reason
            if json_file:  # after each: all take an hour
                write_json(json_file, cases, options)
    click.echo(table(cases))
    faults = [fault for case in cases for fault in case.faults()]
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
