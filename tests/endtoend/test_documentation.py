"""Every command that docs show runs as it stands there; `make demo` runs the README's."""

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

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
from support.models import BOOK, TESTS, TinyMixtral
from support.shown_commands import PAGES, PRODUCT, Shown, shown_commands, with_options
from support.small_commands import NOT_HERE, RUN_ELSEWHERE, reasons

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS, WIDTHS
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

ROOT = TESTS.parent
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
SMALL = {"profile": ["--tokens", "1024"], "eval": ["--tokens", "512"], "thresholds": ["--tokens", "512"]}


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
    small = with_options(shown, SMALL.get(shown.words[1], []) if takes_tokens else [], ())
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
