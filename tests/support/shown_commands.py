"""The commands that pages and the Makefile show, and what Click says of their words without running them."""

import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "formats" / "families" / "README.md"]
PRODUCT: dict[str, click.Command] = {"moe-pack": moe_pack, "moe-run": moe_run, "moe-serve": moe_serve}
_PROGRAMS = (*PRODUCT, "python", "make", "pip", "curl", "podman", "docker", "uvx", "ray", "lm_eval", "llama-quantize",
             "pytest")  # fmt: skip
PLACEHOLDERS = {"newmoe": "mixtral"}  # names on pages of what their reader makes, by the names of what is there
# What may stand before a program: a machine's name, a step of a workflow, variables, the folder of an environment.
_BEFORE = re.compile(r"^(?:machine \d: +)?(?:- run: )?(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_BENCH = "tests/bench/"
_CHECKED = (click.Choice, type(click.INT), type(click.FLOAT))  # types whose values are right or wrong anywhere


@dataclass(frozen=True, slots=True)
class Shown:
    """A command on a page. `words`: the program, then its arguments, without a comment and without what is piped."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def script(self) -> str | None:
        is_script = len(self.words) > 1 and self.words[0] == "python" and self.words[1].endswith(".py")
        return self.words[1] if is_script else None

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.words[2:] if self.script else self.words[1:]

    @property
    def is_bench(self) -> bool:
        return self.script is not None and self.script.startswith(_BENCH) and not self.is_old

    @property
    def is_old(self) -> bool:
        """Whether it is a benchmark of the past: the script is gone, or its subcommand."""
        if self.script is None or not self.script.startswith((_BENCH, "benchmarks/")):
            return False
        if not (ROOT / self.script).is_file():
            return True
        return _has_subcommands(self.script) and not _has_subcommand(self.script, self.words[2])

    @property
    def bench(self) -> str:
        """The benchmark's name: its file, and its subcommand if it has some."""
        assert self.is_bench, self.text
        name = self.words[1].removeprefix(_BENCH)
        return f"{name} {self.words[2]}" if _has_subcommands(self.words[1]) else name


@cache
def _has_subcommands(script: str) -> bool:
    """Returns what a benchmark's text says of itself: to import all of them takes seconds."""
    return "\n@click.group" in (ROOT / script).read_text("utf-8")


@cache
def _has_subcommand(script: str, name: str) -> bool:
    return re.search(rf'(command|_add)\(\s*"{name}"', (ROOT / script).read_text("utf-8")) is not None


def shown_commands(page: Path) -> Iterator[Shown]:
    """Yields the commands of a page: of its blocks of code, and those of make and Python between its words."""
    text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
    for line in _code_lines(text):
        if len(words := _command(line)) > 1:
            yield Shown(name, words)
    for span in _spans(text):
        words = _command(span)
        if len(words) > 1 and words[0] in ("make", "python"):
            yield Shown(name, words)


def named_commands(page: Path) -> Iterator[Shown]:
    """Yields commands that a page names between its words, with or without some of their options."""
    name = page.relative_to(ROOT).as_posix()
    for span in _spans(page.read_text("utf-8")):
        words = span.split()
        if len(words) > 1 and words[0] in PRODUCT and words[1].startswith("-"):
            yield Shown(name, tuple(words))
        if len(words) > 1 and words[0] == "moe-pack" and words[1] in moe_pack.commands:
            yield Shown(name, tuple(words))


def makefile_commands() -> dict[str, list[Shown]]:
    """Returns the benchmarks that each target of the Makefile runs, with variables replaced as if all were given.

    Those of a target's prerequisites are its own, too.
    """
    text = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    text = re.sub(r"\$\(if \$\(\w+\),((?:[^()]|\([^()]*\))*)\)", r"\1", text)  # what is there if the variable is
    given = {
        "BIN": "python-of", "BENCH": "tests/bench", "LLAMA": "", "BENCH_PACKS": "FOLDER", "PACK": "PACK",
        "EXPERTS": "FILE.safetensors", "GPU_PYTHON": "python-of/python",
    }  # fmt: skip
    found: dict[str, list[Shown]] = {}
    needed: dict[str, list[str]] = {}
    target = ""
    for line in text.splitlines():
        if match := re.match(r"^([a-z-]+):(.*)", line):
            target = match[1]
            found[target] = []
            needed[target] = match[2].split()
        for name, value in given.items():
            line = line.replace(f"$({name})", value)
        for command in re.findall(r"python-of/python (tests/bench/\S+\.py[^&|]*)", line):
            words = re.sub(r"\$\(\w+\)|\$\$\w+", "GIVEN", command.replace("$$model", "deepseek-v3")).split()
            found[target].append(Shown("Makefile", ("python", *words)))
    return {
        each: own + [shown for name in needed[each] for shown in found.get(name, [])] for each, own in found.items()
    }


def _code_lines(text: str) -> Iterator[str]:
    """Yields the lines of fenced and of indented blocks, those that go on joined."""
    fenced = "\n".join(block for block in _FENCED.findall(text))
    lines, is_code, is_after_space = [*fenced.splitlines()], False, True
    for line in _FENCED.sub("", text).splitlines():
        is_indented = line.startswith("    ")
        is_code = is_indented and (is_code or is_after_space)
        is_after_space = not line.strip()
        if is_code:
            lines.append(line)
    yield from re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()


def _spans(text: str) -> Iterator[str]:
    prose = re.sub(r"^    .*$", "", _FENCED.sub("", text), flags=re.MULTILINE)
    yield from (" ".join(span.split()) for span in _SPAN.findall(prose))


def _command(line: str) -> tuple[str, ...]:
    rest = _BEFORE.sub("", line.strip())
    if rest.split(" ")[0] not in _PROGRAMS:
        return ()
    words = shlex.split(rest, comments=True)
    ends = [place for place, word in enumerate(words) if word in ("|", ">", "&&")]
    return tuple(words[: ends[0]] if ends else words)


def bench_command(script: str) -> click.Command | None:
    main = getattr(importlib.import_module(Path(script).stem), "main", None)
    return main if isinstance(main, click.Command) else None


def command_of(shown: Shown) -> tuple[click.Command | None, list[str]]:
    """Returns Click's command for what is shown and the arguments for it; None if it is not one of Click's."""
    command = bench_command(shown.words[1]) if shown.is_bench else PRODUCT.get(shown.words[0])
    arguments = list(shown.arguments)
    if isinstance(command, click.Group) and not arguments[0].startswith("-"):
        _, found, arguments = command.resolve_command(click.Context(command), arguments)
        return found, arguments
    return command, arguments


def parsed(shown: Shown) -> dict[str, object]:
    """Returns the options of what is shown with their values; files need not be there.

    Raises:  click.UsageError for an option that is not one, or a value that is none of its choices.
    """
    command, arguments = command_of(shown)
    if command is None:
        return {}
    with click.Context(command) as context:
        words = [PLACEHOLDERS.get(word, word).strip("[]") for word in arguments]
        values, _, _ = command.make_parser(context).parse_args(words)
        for param in command.params:
            value = values.get(param.name or "")
            if not isinstance(param.type, _CHECKED) or not isinstance(value, str | list):
                continue
            for each in value if isinstance(value, list) else [value]:
                param.type(each, param, context)
    return {name: value for name, value in values.items() if value is not None}


def with_options(shown: Shown, options: Sequence[str], left_out: Sequence[str]) -> Shown:
    """Returns a command with these options in place of the same ones with other values, and without others."""
    command, _ = command_of(shown)
    assert command is not None, shown.text
    flags = {name for param in command.params if getattr(param, "is_flag", False) for name in param.opts}
    replaced, kept, words = {*left_out, *(word for word in options if word.startswith("-"))}, [], list(shown.words)
    while words:
        word = words.pop(0)
        if word in replaced:
            if word not in flags:
                words.pop(0)
            continue
        kept.append(word)
    return replace(shown, words=(*kept, *options))
