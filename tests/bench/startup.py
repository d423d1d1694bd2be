"""The time from a program's start to its first token, and its memory, with an empty page cache and again afterwards.

    python tests/bench/startup.py PACK --llama-python PYTHON

Each run is a process of its own: moe-run with its defaults on one token of a prompt of four, llama.cpp with repacked
weights, as its programs load them, and llama.cpp on its mapped file, with a GGUF of the pack's dimensions. They take
turns. Memory is the most anonymous memory that was seen; what is mapped of files is not in it. As root: it empties the
page cache.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from benchlib import finish, json_option, table
from benchlib.confined import MOE_RUN, drop_page_cache, measure, tree_anonymous_bytes
from benchlib.gguf_files import make_gguf
from benchlib.llama import llama_command, llama_option

from moe_pack.formats.base.limits import num_cores

_PROMPT_TOKENS = 4
_LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Start:
    """One run. `is_first`: the page cache was empty."""

    program: str
    is_first: bool
    seconds: float
    anonymous_bytes: int


def commands(pack: Path, llama_python: Path | None, threads: int) -> dict[str, tuple[list[str], str]]:
    """Returns the command of each program, and its standard input."""
    lengths = ["--prompt-tokens", str(_PROMPT_TOKENS), "--max-tokens", "1", "--threads", str(threads), "--seed", "0"]
    programs = {"moe-run": ([sys.executable, *MOE_RUN, str(pack), *lengths], "")}
    if llama_python is not None:
        gguf, prompt = make_gguf(pack), list(range(1, _PROMPT_TOKENS))
        asked = {"prompt": prompt, "tokens": [_PROMPT_TOKENS], "at_once": False, "threads": threads}
        for name, mapped in (("llama.cpp, repacked", False), ("llama.cpp, mapped", True)):
            programs[name] = llama_command(llama_python, gguf, 512, mapped), json.dumps(asked) + "\n"
    return programs


def started(programs: dict[str, tuple[list[str], str]], folder: Path) -> Iterator[Start]:
    """Yields a run of each program with an empty page cache, and another one."""
    for program, (command, given) in programs.items():
        for is_first in (True, False):
            if is_first:
                drop_page_cache(folder)
            run = measure(command, tree_anonymous_bytes, given, _LIMIT_SECONDS)
            if run.exit_code:
                raise click.ClickException(f"{program}: {run.errors}")
            click.echo(f"{program}: {run.seconds:.1f} s", err=True)
            yield Start(program, is_first, run.seconds, run.peak_bytes)


@click.command(help=__doc__)
@click.argument("pack", type=click.Path(path_type=Path, exists=True, file_okay=False))
@llama_option
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=num_cores(), show_default=True, type=click.IntRange(1))
@json_option
def main(pack: Path, llama_python: Path | None, rounds: int, threads: int, as_json: bool) -> None:
    programs = commands(pack, llama_python, threads)
    found = [start for _ in range(rounds) for start in started(programs, pack)]
    rows = []
    for program in programs:
        first, again = ([s for s in found if s.program == program and s.is_first is state] for state in (True, False))
        seconds = [f"{median(start.seconds for start in starts):.2f}" for starts in (first, again)]
        most = max(start.anonymous_bytes for start in (*first, *again))
        rows.append((program, *seconds, f"{most / 1e6:,.0f}"))
    text = table(("program", "first token, s", "again, s", "anonymous MB"), rows)
    finish({"starts": [asdict(start) for start in found]}, text, as_json)


if __name__ == "__main__":
    main()
