"""Every benchmark that a page or the Makefile shows runs, small, and prints its tables."""

import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.cases import case
from support.models import BOOK
from support.shown_commands import PAGES, Shown, makefile_commands, shown_commands, with_options
from support.small_commands import NOT_HERE, SMALL, reasons
from support.small_runs import SmallRuns

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
        **dict.fromkeys(("PACK", "packed/", "smollm2-packed/", "q2"), packed),
        **{name: str(small.gguf) for name in words if name.endswith(".gguf")},
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
