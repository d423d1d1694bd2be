"""Every command that a page shows runs as it stands there, or a table says why not; pages agree with the code."""

import ast
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import click
import pytest
import torch
import yaml
from click import Group
from click.testing import CliRunner
from support.cases import case
from support.chat_model import CHAT_TEMPLATE
from support.documented_keys import spec_names
from support.generated_docs import command_named, documented_options, generated
from support.hub_server import ask_here, running_hub
from support.models import BOOK, TinyMixtral
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
    with_options,
)
from support.small_commands import NOT_HERE, RUN_ELSEWHERE, SMALL, reasons

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, WIDTHS
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

CI_PAGE = ROOT / "docs" / "ci.md"
IN_README = "--target-vram"  # of convert: half a minute, which `make demo` takes already


def commands_of(page: Path) -> list[list[str]]:
    return [list(shown.words) for shown in shown_commands(page) if shown.words[0] in ("moe-pack", "moe-run")]


def options_of(command: list[str]) -> set[str]:
    """A command's program and options, without their values."""
    return {word for word in command if word.startswith(("moe-", "--"))}


def test_make_demo_runs_the_commands_of_the_readme() -> None:
    shown = commands_of(ROOT / "README.md")
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^\t\$\(BIN\)/(moe-(?:pack|run) .*)$", makefile, re.MULTILINE)
    for command in shown:
        assert any(options_of(command) <= options_of(shlex.split(line)) for line in lines), command
    assert len(shown) == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of four small experts, which change the hidden state little, as those of trained models do."""

    def small_outputs(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("w2.weight"):
                tensor *= 0.2

    config = {"max_position_embeddings": 4096}
    tiny = TinyMixtral(64, 64, 2, 4, num_heads=4, num_kv_heads=2, vocab_size=4096, config=config)
    folder = tiny.write_with_tokenizer(tmp_path_factory.mktemp("shown") / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tiny.write(folder, small_outputs)


# The options of commands that take long otherwise.
FEW_TOKENS = {"profile": ["--tokens", "1024"], "eval": ["--tokens", "512"], "thresholds": ["--tokens", "512"]}


@pytest.mark.parametrize("name", [name for name, how in RUN_ELSEWHERE.items() if how.endswith("test_documentation.py")])
def test_every_command_on_the_page_runs(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("mixtral", "smollm2_moe", "tests/models/tiny-mixtral"):  # which come before short names
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        Path(folder).symlink_to(model)
    Path("tests/data").symlink_to(BOOK.parent)
    Path("code.jsonl").write_text('{"text": "x = 1; y = 2"}\n' * 200)
    Path("prose.txt").symlink_to(BOOK)
    run(Shown("", ("moe-pack", "convert", "mixtral", "-o", "packed/")))
    found = [shown for shown in shown_commands(ROOT / name) if shown.words[0] in ("moe-pack", "moe-run")]
    assert len(found) >= 2
    for shown in found:
        is_left_out = shown.words[1] == "convert" and IN_README in shown.words
        if not is_left_out and not reasons(shown, NOT_HERE):
            with case(shown.text):
                run(shown)


def run(shown: Shown) -> None:
    shown = replace(shown, words=tuple(word.replace("/shared", "shared") for word in shown.words))
    out = next((word for before, word in pairwise(shown.words) if before == "-o"), "")
    if out in ("packed/", "profile/"):  # which a page makes more than once
        shutil.rmtree(out, ignore_errors=True)
    # With other sources of a text or of figures they take no number of tokens.
    takes_tokens = "--tokens" in shown.words or (shown.words[1] == "profile" and "--imatrix" not in shown.words)
    small = with_options(shown, FEW_TOKENS.get(shown.words[1], []) if takes_tokens else [], ())
    result = CliRunner().invoke(PRODUCT[small.words[0]], small.words[1:], prog_name=small.words[0])
    assert result.exit_code == 0, result.output


def test_what_follows_from_the_code_is_as_the_code_says() -> None:
    for page in PAGES:
        with case(page.name):
            assert page.read_text("utf-8") == generated(page), "run `make docs`"


def test_commands_with_many_options_have_a_table_of_them() -> None:
    tables = {name for page in PAGES for name, _ in documented_options(page)}
    assert isinstance(moe_pack, Group)
    programs = {"moe-run": moe_run, "moe-serve": moe_serve}
    programs |= {f"moe-pack {name}": command_named(f"moe-pack {name}") for name in moe_pack.commands}
    for name, command in programs.items():
        with case(name):
            page = (ROOT / "docs" / ("hub.md" if name == "moe-pack upload" else "moe-pack.md")).read_text("utf-8")
            options = [max(each.opts, key=len) for each in command.params if each.param_type_name == "option"]
            named = [option for option in options if option in page]
            assert name in tables or len(named) >= len(options) - 3  # --json, --output and --list say what they are


def test_the_keys_of_every_object_of_a_manifest_are_on_the_page() -> None:
    page = (ROOT / "docs" / "model.md").read_text("utf-8")
    listed = {name for names in re.findall(r"<!-- keys: (.*?) -->", page) for name in names.split(", ")}
    assert listed == spec_names()


def test_the_table_has_every_command() -> None:
    table = (ROOT / "docs" / "moe-pack.md").read_text("utf-8").partition("\n## convert\n")[0]
    named = re.findall(r"\[([a-z]+)\]\([^)]*\)", "".join(re.findall(r"^\| (\[.*?) \|", table, re.MULTILINE)))
    assert sorted(named) == sorted(moe_pack.commands)  # type: ignore[attr-defined]  # a click group


def test_the_page_says_the_widths_that_there_are() -> None:
    def listed(bits: list[float]) -> str:
        *first, last = (f"{each:g}" for each in bits)
        return f"{', '.join(first)} or {last}"

    affine, trellis = listed(list(WIDTHS)), listed([width / 2 for width in TRELLIS_WIDTHS])
    page = " ".join((ROOT / "docs" / "kernels.md").read_text("utf-8").split())
    assert f"Affine codes have {affine} bits, trellises {trellis}." in page


def workflow_of(page: Path) -> dict[str, Any]:
    """The workflow that a page shows."""
    workflow: dict[str, Any] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[0])
    return workflow


def test_the_workflow_runs_the_commands_that_the_page_shows() -> None:
    steps = workflow_of(CI_PAGE)["jobs"]["check"]["steps"]
    lines = [step["run"].strip() for step in steps if step.get("run", "").startswith("moe-pack ")]
    in_workflow, before_it = commands_of(CI_PAGE)[:2], commands_of(CI_PAGE)[2:]
    assert [shlex.split(line) for line in lines] == in_workflow == before_it


def test_the_workflow_of_checks_runs_on_packs_of_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**workflow_of(CI_PAGE)["env"], "COMMIT": "main", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    small = ("--quantizer", "nearest", "--record-bits", "8", "--selector-bits", "8")
    assert CliRunner().invoke(moe_pack, ["convert", str(model), "-o", "packed", *small]).exit_code == 0
    repository, _, variant = names["PACK"].partition(":")
    with running_hub() as server:
        server.add(repository, tmp_path / "packed", f"{variant}/")
        server.add(names["SOURCE"], model)
        ask_here(server, tmp_path / "cache", monkeypatch)
        for _, *arguments in commands_of(CI_PAGE)[:2]:
            result = CliRunner(env=names).invoke(moe_pack, [Template(word).substitute(names) for word in arguments])
            assert result.exit_code == 0, (arguments, result.output)
    assert "| kl | ✅ passed |" in (tmp_path / "summary.md").read_text("utf-8")


def anchors_of(page: Path) -> set[str]:
    """The names by which links find a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each).lower()).replace(" ", "-") for each in headings
    }


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text("utf-8")):
            linked = (page.parent / target).resolve() if target else page
            assert linked.exists(), f"{page.name}: {target}"
            if anchor and linked.suffix == ".md":
                assert anchor in anchors_of(linked), f"{page.name}: {target}#{anchor}"


def test_scripts_and_tests_that_pages_name_are_there() -> None:
    named = re.compile(
        r"(?<![\w/])(?:tests|runtime|formats|calib|convert|install)/[\w/.-]+\.(?:py|cpp|h|md|json|txt)\b"
    )
    for page in PAGES:
        for path in named.findall(page.read_text("utf-8")):
            # Not the family that the reader adds; benchmarks that have gone are another test's.
            if "newmoe" not in path and not path.startswith("tests/bench/"):
                assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_commits_that_pages_name_are_in_the_repository() -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("without all commits")
    for page in PAGES:
        for commit in re.findall(r"\bcommits?\s+`?([0-9a-f]{7,40})\b", page.read_text("utf-8")):
            assert git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0, f"{page.name}: {commit}"


def test_pages_use_the_words_of_the_glossary() -> None:
    """Prose only: what a command prints, and names of the code, may still have other words."""
    others = re.compile(r"\b(foret\w+|anew|whoever|beside|shall|wish\w*|cards?|drives?)\b", re.IGNORECASE)
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if page.name == "glossary.md":  # it names them
            continue
        prose = re.sub(r"```.*?```|`[^`\n]*`|^    .*?$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert not others.findall(prose), page.name


SHOWN = [shown for page in PAGES for shown in shown_commands(page)]
OF_MAKE = makefile_commands()


def is_known(shown: Shown) -> bool:
    """Whether a test runs a command, or a table says where else it runs or why it cannot."""
    if shown.is_bench and shown.bench in SMALL:
        return True
    if shown.words[0] == "make" and shown.words[1] in OF_MAKE and OF_MAKE[shown.words[1]]:
        return all(is_known(each) for each in OF_MAKE[shown.words[1]])
    is_run = shown.page in RUN_ELSEWHERE and shown.words[0] in PRODUCT
    return is_run or shown.is_old or bool(reasons(shown, NOT_HERE))


def test_pages_show_commands_of_all_kinds() -> None:
    assert len(SHOWN) > 150 and len({shown.page for shown in SHOWN}) > 15
    kinds = {shown.words[0] for shown in SHOWN}
    assert kinds >= {"moe-pack", "moe-run", "moe-serve", "python", "make", "pip", "curl"}
    assert len({shown.bench for shown in SHOWN if shown.is_bench}) >= 15


def test_every_command_on_a_page_is_run_or_has_a_reason_not_to() -> None:
    unknown = [f"{shown.page}: {shown.text}" for shown in SHOWN if not is_known(shown)]
    assert unknown == [], "give each a line in SMALL or NOT_HERE of tests/support/small_commands.py"


def test_every_line_of_the_makefiles_benchmarks_is_run() -> None:
    targets = [target for target in OF_MAKE if target.startswith("bench-")]
    assert len(targets) > 5
    for target in ("ablate", "papers", "families", *targets):
        with case(target):
            assert OF_MAKE[target]
            assert [each.text for each in OF_MAKE[target] if each.bench not in SMALL] == []


def test_a_benchmark_that_runs_small_is_none_of_the_past() -> None:
    for name in SMALL:
        file, *subcommand = name.split()
        with case(name):
            assert Shown("", ("python", f"tests/bench/{file}", *subcommand)).is_bench


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
            if shown.script is not None and shown.script.startswith("tests/") and not shown.is_old:
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
    yield from dict.fromkeys((shown.page, str(shown.script)) for shown in SHOWN if shown.is_old)


def test_a_page_names_a_commit_that_has_its_old_scripts(files_of: Callable[[str], set[str]]) -> None:
    commits: dict[str, set[str]] = {}
    assert len(list(old_scripts())) >= 10
    for page, script in old_scripts():
        named = re.findall(r"commit\s+`?([0-9a-f]{7,40})\b", (ROOT / page).read_text("utf-8"))
        with case(page, script):
            for commit in named:
                commits.setdefault(commit, files_of(commit))
            assert any(script in commits[commit] for commit in named), f"none of the commits {named} has it"


# --- what a benchmark finds as a program of its own


def test_a_benchmark_imports_what_tests_have_after_benchlib() -> None:
    """Tests find both; a program finds tests/support once benchlib has put tests on the path."""
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
            used = [number for number, name in enumerate(names) if name == "support"]
            found += len(used)
            assert not used or "benchlib" in names[: used[0]]
    assert found > 5
