"""Every benchmark that a page or the Makefile shows runs, small, and prints its tables."""

import functools
import importlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import benchlib
import benchlib.confined
import benchlib.packs
import benchlib.predicting
import pytest
import torch
from benchlib.confined import Measured, MemoryCgroup, back_free_memory, drop_page_cache, measure
from click import Context
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from support.cases import case
from support.chat_model import chat_source
from support.models import BOOK, TinyMixtral, pack
from support.shown_commands import PAGES, Shown, makefile_commands, shown_commands, with_options
from support.small_commands import NOT_HERE, SMALL, reasons

from moe_pack.convert import measure_fixed_costs
from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.doctor import measure_cpu

_MODULES = {"moe_pack.convert.cli": moe_pack, "moe_pack.runtime.cli": moe_run}
_PADDING_BYTES = 48 << 20  # of a file without blocks in each pack: budgets that are shares of its bytes are then enough
_MOST_PROFILED_TOKENS = 1024


class NoGroup:
    """Stands for a memory cgroup, and limits nothing."""

    peak_bytes, num_refused, num_kills = None, 0, 0

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def __enter__(self) -> "NoGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """It leaves nothing."""

    def inside(self, command: list[str]) -> list[str]:
        """Returns the command as it is."""
        return command


def run_here(command: Sequence[object]) -> Result:
    """Runs the line of a process, `python -m MODULE` or `python SCRIPT` with its arguments, in this one."""
    words = list(map(str, command))
    while words[0] == "env" or "=" in words[0]:
        words.pop(0)
    assert words.pop(0) == sys.executable, command
    if words[0] == "-m":
        main, arguments = _MODULES[words[1]], words[2:]
        if main is moe_pack:
            arguments = _quick(arguments)
    else:
        script = Path(words[0])
        folder = "benchlib." if script.parent.name == "benchlib" else ""
        main, arguments = importlib.import_module(folder + script.stem).main, words[1:]
    return CliRunner().invoke(main, arguments)


def _quick(arguments: list[str]) -> list[str]:
    """Returns a command of moe-pack with little to do: no search for codes unless one is asked for, few tokens."""
    if arguments[0] == "convert":
        arguments = [*arguments, "--workers", "1"]
        # A profile is for a calibrated pack, unless it is for a sparsity.
        is_free = {"--quantizer", "--preset"}.isdisjoint(arguments)
        quick = is_free and ("--profile" not in arguments or "--sparsity" in arguments)
        return [*arguments, "--quantizer", "nearest"] if quick else arguments
    if arguments[0] == "profile":
        place = arguments.index("--tokens") + 1
        tokens = min(int(arguments[place]), _MOST_PROFILED_TOKENS)
        return [*arguments[:place], str(tokens), *arguments[place + 1 :]]
    return arguments


def measure_here(
    command: list[str], anonymous_bytes: Callable[[int], int], standard_input: str = "", limit_s: float = float("inf")
) -> Measured:
    """Stands for `measure`: runs a command in this process; its memory is not sampled."""
    began = time.monotonic()
    result = run_here(command)
    return Measured(
        result.exit_code, False, time.monotonic() - began, 1, 1, 0, result.stdout, f"{result.stderr}{result.exception}"
    )


def _once(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a measurement that is made once."""
    known: list[Any] = []

    @functools.wraps(measure)
    def once(*arguments: Any) -> Any:
        if not known:
            known.append(measure(*arguments))
        return known[0]

    return once


_REPLACED: list[tuple[object, object]] = [
    (MemoryCgroup, NoGroup),
    (measure, measure_here),
    (drop_page_cache, lambda folder: True),
    (back_free_memory, lambda num_bytes: None),
    (measure_cpu, _once(measure_cpu)),
    (measure_fixed_costs, _once(measure_fixed_costs)),
]
_MOE_PACK = benchlib.moe_pack


def write_tiny(folder: Path, num_layers: int, num_experts: int) -> Path:
    """Writes a random checkpoint with a tokenizer into a folder."""
    config = {"max_position_embeddings": 1024}
    model = TinyMixtral(64, 64, num_layers, num_experts, num_heads=4, num_kv_heads=2, vocab_size=4096, config=config)
    return model.write_with_tokenizer(folder)


class SmallRuns:
    """The files that small runs find: a tiny model and packs of it under the names of those that benchmarks would make.

    `folder`: for `--folder`.   `model`, `smallest`: tiny checkpoints.   `packed`: a pack of the demo model that chats.
    `experts`: a file of one expert with inputs.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "packs"
        self.folder.mkdir()
        self.model, self.smallest = write_tiny(place / "model", 3, 4), write_tiny(place / "smallest", 1, 2)
        self.packed = place / "packed"
        pack(chat_source(place / "chats"), self.packed, group=64)
        self._packs = {kind: place / kind for kind in ("up", "gate")}
        pack(self.model, self._packs["up"], group=64, dense_width=4)
        pack(self.model, self._packs["gate"], group=64, dense_width=4, selector="gate")
        for each in self._packs.values():
            with (each / "padding").open("wb") as file:
                file.truncate(_PADDING_BYTES)

    @functools.cached_property
    def experts(self) -> Path:
        """Returns the file, made once."""
        path, generator = self.place / "experts.safetensors", torch.Generator().manual_seed(0)
        names = ("gate", "up", "down", "calibration", "test")
        save_file({f"layer-0.{name}": torch.randn(64, 64, generator=generator) for name in names}, path)
        return path

    def moe_pack(self, *arguments: object) -> None:
        """Stands for `benchlib.moe_pack`; a synthetic pack of any size is the tiny model's, once its options are read.

        Raises:  AssertionError with what a command says that fails.
        """
        words = list(map(str, arguments))
        if words[0] == "synth":
            _, command, rest = moe_pack.resolve_command(Context(moe_pack), words)
            assert command is not None, words
            command.make_context("synth", rest)
            source, out = self._packs["gate" if "gate" in words else "up"], words[words.index("-o") + 1]
            shutil.copytree(source, out, copy_function=os.link)
            return
        result = run_here([sys.executable, "-m", "moe_pack.convert.cli", *words])
        assert result.exit_code == 0, (words, result.output, result.exception)

    def stand_in(self, module: Any, patch: pytest.MonkeyPatch) -> None:
        """Puts the stand-ins in place of what a benchmark's module has of the same name."""
        replaced = {id(known): other for known, other in [*_REPLACED, (_MOE_PACK, self.moe_pack)]}
        for each in (module, benchlib, benchlib.confined, benchlib.packs, benchlib.predicting):
            for name, value in vars(each).copy().items():
                if id(value) in replaced:
                    patch.setattr(each, name, replaced[id(value)])


# Options of programs that are not there: what is measured without them is ours.
ELSEWHERE = ("--llama-python", "--llama-server", "--libggml-cpu", "--libggml", "--lm-eval", "--json")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    return SmallRuns(tmp_path_factory.mktemp("small"))


def shown_benches() -> Iterator[Shown]:
    for page in PAGES:
        yield from (shown for shown in shown_commands(page) if shown.is_bench)
    for commands in makefile_commands().values():
        yield from commands


SHOWN = [shown for shown in shown_benches() if not reasons(shown, NOT_HERE)]


def small_runs(name: str) -> list[Shown]:
    """Returns the different commands that those shown for a benchmark become with its small options."""
    shown = [each for each in SHOWN if each.bench == name]
    shown = shown or [Shown("", ("python", f"tests/bench/{name.split()[0]}", *name.split()[1:]))]
    made = [with_options(each, SMALL[name].options.split(), ELSEWHERE) for each in shown]
    return list({each.words: each for each in made}.values())


def tables_of(output: str) -> list[tuple[list[str], list[list[str]]]]:
    """Returns the header and the rows of each table."""
    tables: list[tuple[list[str], list[list[str]]]] = []
    lines = [*output.splitlines(), ""]
    for line, following in pairwise(lines):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            continue
        if following.startswith(("| -", "|--", "| :-")):
            tables.append((cells, []))
        elif not set(line) <= set("|-: "):
            tables[-1][1].append(cells)
    return tables


def placed(words: tuple[str, ...], small: SmallRuns, scratch: Path) -> list[str]:
    """Returns words with files of this machine in place of the names that pages have for those of their readers."""
    model, packed = str(small.model), str(small.packed)
    names = {
        **dict.fromkeys(("MODEL", "MODEL]", "small-mixtral", "smollm2_moe", "smollm2_routed", "GIVEN"), model),
        **dict.fromkeys(("PACK", "packed/"), packed),
        "SMALLEST": str(small.smallest), "FOLDER": str(small.folder), "topics.txt": str(BOOK), "[--model": "--model",
        "FILE.safetensors": str(small.experts),
    }  # fmt: skip
    return [names.get(word, word.replace("SCRATCH", str(scratch))) for word in words]


@pytest.mark.parametrize(
    "name",
    [
        name if any(each.bench == name for each in SHOWN) else pytest.param(name, marks=pytest.mark.slow)
        for name in SMALL
    ],
)
def test_the_benchmark_runs_and_prints_its_tables(
    name: str, small: SmallRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in small_runs(name):
        with case(shown.text):
            module = importlib.import_module(Path(shown.words[1]).stem)
            small.stand_in(module, monkeypatch)
            arguments = placed(shown.arguments, small, tmp_path)
            result = CliRunner().invoke(module.main, arguments)
            assert result.exception is None or isinstance(result.exception, SystemExit), result.output
            assert result.exit_code in ((0, 1) if SMALL[name].judges else (0,)), result.output
            assert SMALL[name].tables or SMALL[name].says, "what it prints is judged"
            assert re.search(SMALL[name].says, result.stdout), (SMALL[name].says, result.output)
            found = tables_of(result.stdout)
            for expected in SMALL[name].tables:
                rows = [rows for header, rows in found if set(expected.split(" | ")) <= set(header)]
                assert rows and all(rows), (expected, result.output)
    torch.set_num_threads(1)  # as before: some set another number


def test_a_paper_without_a_pack_is_refused_with_the_names_of_its_packs() -> None:
    main = importlib.import_module("offloading").main
    result = CliRunner().invoke(main, ["parts", "--paper", "corm", "--pack", "mixtral-5-layers-floe"])
    assert result.exit_code == 2, result.output
    assert "of --paper corm: mixtral-5-layers-int4, deepseek-11-layers-int4" in result.output
