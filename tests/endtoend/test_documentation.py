"""Every command that docs show runs as it stands there; `make demo` runs the README's."""

import re
import shlex
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
import yaml
from click import Context, Group, Parameter
from click.testing import CliRunner
from support.cases import case
from support.chat_model import CHAT_TEMPLATE
from support.hub_server import ask_here, running_hub
from support.models import BOOK, TESTS, TinyMixtral
from support.shown_commands import PRODUCT, Shown, shown_commands, with_options
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


def params_of(name: str) -> list[Parameter]:
    assert isinstance(moe_pack, Group)
    _, command, _ = moe_pack.resolve_command(Context(moe_pack), [name])
    assert command is not None
    return command.params


def test_the_page_names_every_option_of_moe_pack() -> None:
    cases = [
        "convert",
        "plan",
        "profile",
        "merge",
        "report",
        "thresholds",
        "attach",
        "imatrix",
        "replay",
        "inspect",
        "verify",
        "eval",
        "check",
        "synth",
        "upload",
        "doctor",
    ]
    for command in cases:
        with case(command):
            page = (ROOT / "docs" / ("hub.md" if command == "upload" else "moe-pack.md")).read_text("utf-8")
            for parameter in params_of(command):
                if parameter.param_type_name == "option" and parameter.name != "output":
                    assert max(parameter.opts, key=len) in page


def test_the_table_has_every_command() -> None:
    table = (ROOT / "docs" / "moe-pack.md").read_text("utf-8").partition("\n## convert\n")[0]
    named = re.findall(r"\[([a-z]+)\]\([^)]*\)", "".join(re.findall(r"^\| (\[.*?) \|", table, re.MULTILINE)))
    assert sorted(named) == sorted(moe_pack.commands)  # type: ignore[attr-defined]  # a click group


def test_the_readme_says_the_widths_that_there_are() -> None:
    def listed(bits: list[float]) -> str:
        *first, last = (f"{each:g}" for each in bits)
        return f"{', '.join(first)} or {last}"

    affine, trellis = listed(list(WIDTHS)), listed([width / 2 for width in TRELLIS_WIDTHS])
    assert f"Affine codes have {affine} bits, trellises {trellis}." in (ROOT / "README.md").read_text("utf-8")


def test_the_page_names_every_option_of_an_export() -> None:
    page = (ROOT / "docs" / "export.md").read_text("utf-8")
    for parameter in params_of("export"):
        if parameter.param_type_name == "option":
            assert max(parameter.opts, key=len) in page


def test_the_page_names_every_option_of_moe_run() -> None:
    page = (ROOT / "docs" / "moe-run.md").read_text("utf-8")
    for parameter in moe_run.params:
        if parameter.param_type_name == "option" and parameter.name not in ("version", "debug"):
            assert max(parameter.opts, key=len) in page


def test_the_page_names_every_option_of_moe_serve() -> None:
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    for parameter in moe_serve.params:
        if parameter.param_type_name == "option" and parameter.name not in ("version", "debug"):
            assert max(parameter.opts, key=len) in page


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


def heading_anchors(page: Path) -> set[str]:
    """Returns the names by which a link finds the headings of a page, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^):\s]+)\)", page.read_text("utf-8")):
            with case(page.name, target):
                path, _, anchor = target.partition("#")
                other = page.parent / path if path else page
                assert other.exists()
                assert not anchor or anchor in heading_anchors(other)


def test_pages_use_the_words_of_the_glossary() -> None:
    """Prose only: what a command prints, and names of the code, may still have other words."""
    others = re.compile(r"\b(foret\w+|anew|whoever|beside|shall|wish\w*|cards?|drives?)\b", re.IGNORECASE)
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if page.name == "glossary.md":  # it names them
            continue
        prose = re.sub(r"```.*?```|`[^`\n]*`|^    .*?$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert not others.findall(prose), page.name
