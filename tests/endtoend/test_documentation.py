"""Every command that docs show runs as it stands there; `make demo` runs the README's."""

import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from cases import case
from click import Context, Group, Parameter
from click.testing import CliRunner
from hub_server import ask_here, running_hub
from models import DEMO_MODEL, TESTS

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats.plan import TRELLIS_WIDTHS, WIDTHS
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

ROOT = TESTS.parent
PAGES = [ROOT / "docs" / name for name in ("moe-pack.md", "moe-run.md", "streaming.md", "export.md")]
CI_PAGE = ROOT / "docs" / "ci.md"
LONG = ("moe-pack.md", "export.md")  # two minutes; half of one
IN_README = {"moe-pack", "--target-vram"}  # a minute, which `make demo` takes already
PROGRAMS = {"moe-pack": moe_pack, "moe-run": moe_run}


def shown_commands(page: Path) -> list[list[str]]:
    lines = re.findall(r"^    (moe-(?:pack|run) .*)$", page.read_text("utf-8"), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def options_of(command: list[str]) -> set[str]:
    """A command's program and options, without their values."""
    return {word for word in command if word.startswith(("moe-", "--"))}


def test_make_demo_runs_the_commands_of_the_readme() -> None:
    shown = shown_commands(ROOT / "README.md")
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^\t\$\(BIN\)/(moe-(?:pack|run) .*)$", makefile, re.MULTILINE)
    for command in shown:
        assert any(options_of(command) <= options_of(shlex.split(line)) for line in lines), command
    assert len(shown) == 2


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else []) for page in PAGES],
    ids=lambda page: page.name,
)
def test_every_command_on_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("mixtral").symlink_to(DEMO_MODEL)  # a folder of that name comes before the short name
    commands = [command for command in shown_commands(page) if options_of(command) != IN_README]
    if not any("convert" in command for command in commands):
        commands.insert(0, ["moe-pack", "convert", "mixtral", "-o", "packed/"])
    assert len(commands) >= 2
    for program, *arguments in commands:
        result = CliRunner().invoke(PROGRAMS[program], arguments, prog_name=program)
        assert result.exit_code == 0, (program, arguments, result.output)


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
    assert [shlex.split(line) for line in lines] == shown_commands(CI_PAGE)


@pytest.mark.slow
def test_the_workflow_of_checks_runs_on_packs_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**workflow_of(CI_PAGE)["env"], "COMMIT": "main", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    small = ("--quantizer", "nearest", "--record-bits", "8", "--selector-bits", "8")
    assert CliRunner().invoke(moe_pack, ["convert", str(DEMO_MODEL), "-o", "packed", *small]).exit_code == 0
    repository, _, variant = names["PACK"].partition(":")
    with running_hub() as server:
        server.add(repository, tmp_path / "packed", f"{variant}/")
        server.add(names["SOURCE"], DEMO_MODEL)
        ask_here(server, tmp_path / "cache", monkeypatch)
        for _, *arguments in shown_commands(CI_PAGE):
            result = CliRunner(env=names).invoke(moe_pack, [Template(word).substitute(names) for word in arguments])
            assert result.exit_code == 0, (arguments, result.output)
    assert "| kl | ✅ passed |" in (tmp_path / "summary.md").read_text("utf-8")


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_use_the_words_of_the_glossary() -> None:
    """Prose only: what a command prints, and names of the code, may still have other words."""
    others = re.compile(r"\b(foret\w+|anew|whoever|beside|shall|wish\w*|cards?|drives?)\b", re.IGNORECASE)
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        if page.name in ("glossary.md", "benchmarks.md"):  # the glossary names them; benchmarks are not rewritten yet
            continue
        prose = re.sub(r"```.*?```|`[^`\n]*`|^    .*?$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert not others.findall(prose), page.name
