"""Every command that a page shows is one that a test runs, or that one table says cannot run here."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator

import click
import pytest
from support.cases import case
from support.shown_commands import (
    PAGES,
    PRODUCT,
    ROOT,
    Shown,
    command_of,
    makefile_commands,
    named_commands,
    parsed,
    shown_commands,
)
from support.small_commands import NOT_HERE, RUN_ELSEWHERE, SMALL, reasons

SHOWN = [shown for page in PAGES for shown in shown_commands(page)]
OF_MAKE = makefile_commands()


def is_old(shown: Shown) -> bool:
    return shown.script is not None and shown.script.startswith("benchmarks/")


def is_known(shown: Shown) -> bool:
    """Whether a test runs a command, or a table says where else it runs or why it cannot."""
    if shown.is_bench and shown.bench in SMALL:
        return True
    if shown.words[0] == "make" and shown.words[1] in OF_MAKE and OF_MAKE[shown.words[1]]:
        return all(is_known(each) for each in OF_MAKE[shown.words[1]])
    is_run = shown.page in RUN_ELSEWHERE and shown.words[0] in PRODUCT
    return is_run or is_old(shown) or bool(reasons(shown, NOT_HERE))


def test_pages_show_commands_of_all_kinds() -> None:
    assert len(SHOWN) > 150 and len({shown.page for shown in SHOWN}) > 15
    kinds = {shown.words[0] for shown in SHOWN}
    assert kinds >= {"moe-pack", "moe-run", "moe-serve", "python", "make", "pip", "curl"}
    assert len({shown.bench for shown in SHOWN if shown.is_bench}) > 20


def test_every_command_on_a_page_is_run_or_has_a_reason_not_to() -> None:
    unknown = [f"{shown.page}: {shown.text}" for shown in SHOWN if not is_known(shown)]
    assert unknown == [], "give each a line in SMALL or NOT_HERE of tests/support/small_commands.py"


@pytest.mark.parametrize("target", ["ablate", "papers", "bench", "bench-cpu", "bench-streaming", "families"])
def test_every_line_of_the_makefiles_benchmarks_is_run(target: str) -> None:
    assert OF_MAKE[target]
    assert [each.text for each in OF_MAKE[target] if each.bench not in SMALL] == []


def test_reasons_are_of_commands_that_pages_show_and_that_no_test_runs() -> None:
    every = [*SHOWN, *(each for commands in OF_MAKE.values() for each in commands)]
    for entry, reason in NOT_HERE.items():
        with case(entry):
            assert len(reason) > 10
            assert any(reasons(shown, {entry: reason}) for shown in every), "no page shows it"
    assert not {entry for entry in NOT_HERE for name in SMALL if entry == f"python tests/bench/{name}"}


def test_every_shown_option_is_one_of_its_command() -> None:
    for shown in [*SHOWN, *(each for commands in OF_MAKE.values() for each in commands)]:
        with case(shown.page, shown.text):
            parsed(shown)


def test_every_option_that_is_named_with_a_command_is_one_of_it() -> None:
    named = [each for page in PAGES for each in named_commands(page)]
    assert len(named) > 20
    for each in named:
        with case(each.page, each.text):
            command, arguments = command_of(each)
            assert command is not None
            known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
            assert {word for word in arguments if word.startswith("-")} <= known | {"--help"}


def test_a_command_with_an_unknown_option_or_choice_is_seen() -> None:
    for text in (
        "moe-pack convert mixtral --no-such",
        "moe-run packed/ --policy best",
        "python tests/bench/policies.py hits --no-such 3",
        "python tests/bench/plans.py table --size 9",
    ):
        with case(text), pytest.raises(click.UsageError):
            parsed(Shown("", tuple(text.split())))
    for text in ("moe-pack convert mixtral -o packed/", "python tests/bench/plans.py table --size 8"):
        parsed(Shown("", tuple(text.split())))


def test_make_has_every_target_that_a_page_shows() -> None:
    text = (ROOT / "Makefile").read_text("utf-8").replace("$(INSTALLED)", ".venv/installed")
    targets = set(re.findall(r"^([a-z./-]+):", text, re.MULTILINE))
    for shown in SHOWN:
        if shown.words[0] == "make":
            with case(shown.page, shown.text):
                assert shown.words[1] in targets
                assert {word.partition("=")[0] for word in shown.words[2:]} <= set(re.findall(r"\$\((\w+)\)", text))


def test_extras_and_files_that_installing_names_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    found = 0
    for shown in SHOWN:
        with case(shown.page, shown.text):
            for names in re.findall(r"^(?:\.|moe-pack)\[(.*)\]$", "\n".join(shown.words), re.MULTILINE):
                found += 1
                assert set(names.split(",")) <= set(extras)
            for path in shown.words[1:] if shown.words[0] == "pytest" else ():
                assert (ROOT / path).is_file()
            if shown.script is not None and shown.script.startswith("tests/"):
                assert (ROOT / shown.script).is_file()
            if shown.words[0] == "podman" and "-f" in shown.words:
                assert (ROOT / shown.words[shown.words.index("-f") + 1]).is_file()
    assert found >= 4


# --- scripts of the past


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def files_of() -> Callable[[str], set[str]]:
    """Returns the files of a commit."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("the history is not here")
    return lambda commit: set(git("ls-tree", "-r", "--name-only", commit).splitlines())


def old_scripts() -> Iterator[tuple[str, str]]:
    """Yields the page and the script of each command of the past."""
    yield from dict.fromkeys((shown.page, str(shown.script)) for shown in SHOWN if is_old(shown))


def test_a_page_names_a_commit_that_has_its_old_scripts(files_of: Callable[[str], set[str]]) -> None:
    commits: dict[str, set[str]] = {}
    assert len(list(old_scripts())) > 20
    for page, script in old_scripts():
        named = re.findall(r"commit\s+`?([0-9a-f]{7,40})\b", (ROOT / page).read_text("utf-8"))
        with case(page, script):
            for commit in named:
                commits.setdefault(commit, files_of(commit))
            assert any(script in commits[commit] for commit in named), f"none of the commits {named} has it"


# --- what a benchmark finds as a program of its own


def test_a_benchmark_imports_what_tests_have_after_benchlib() -> None:
    """Tests find both; a program finds the modules of tests/support once benchlib has put their folder on the path."""
    support = {path.stem for path in (ROOT / "tests" / "support").glob("*.py")}
    found = 0
    for path in (ROOT / "tests" / "bench").glob("*.py"):
        text = path.read_text("utf-8")
        if "sys.path" in text:  # it finds them by itself
            continue
        names = [
            str(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
            for node in ast.parse(text).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        with case(path.name):
            used = [number for number, name in enumerate(names) if name in support]
            found += len(used)
            assert not used or "benchlib" in names[: used[0]]
    assert found > 5
