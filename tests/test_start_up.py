"""Programs load neither torch nor numpy for help, versions, mistakes and completion, and little to run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click import Choice, Command, Context, Group
from click.testing import CliRunner
from support.cases import case
from support.loaded_modules import Loaded

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats.families import short_names
from moe_pack.formats.families.published import published_names
from moe_pack.formats.families.registry import all_families, families_of, family_of, modules
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve


def loaded_by(*modules: str) -> set[str]:
    """Returns the top packages in memory after a fresh interpreter imported the modules."""
    script = f"import {', '.join(modules)}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_formats_loads_none_of_the_heavy_packages() -> None:
    heavy = {
        "torch", "hqq", "transformers", "datasets", "click", "tqdm", "huggingface_hub", "safetensors", "tokenizers",
    }  # fmt: skip
    assert loaded_by("moe_pack.formats.pack.reader", "moe_pack.formats.pack.writer") & heavy == set()


def test_importing_the_runtime_loads_nothing_of_the_extras() -> None:
    extras = {
        "hqq", "transformers", "datasets", "pyarrow", "huggingface_hub", "safetensors", "jinja2", "pytest", "triton",
    }  # fmt: skip
    loaded = loaded_by("moe_pack.runtime.engine.engine", "moe_pack.runtime.text", "moe_pack.calib.report.page")
    assert loaded & extras == set()
    assert "torch" in loaded, "as the test above would find it"


PROGRAMS = {"moe-pack": moe_pack, "moe-run": moe_run, "moe-serve": moe_serve}
COMMANDS = sorted(moe_pack.commands) if isinstance(moe_pack, Group) else []
HEAVY = {
    "datasets", "fastapi", "gguf", "hqq", "huggingface_hub", "jinja2", "numpy", "pyarrow", "pydantic", "ray",
    "safetensors", "tokenizers", "torch", "tqdm", "transformers", "triton", "uvicorn",
}  # fmt: skip
# What a user types, the exit code, and a part of the answer. There are a folder `packs/first` and a file `small.gguf`.
MISTAKES: list[tuple[str, int, str]] = [
    ("moe-pack convrt", 2, "No such command 'convrt'. Did you mean 'convert'?"),
    ("moe-pack convert mixtral --quantiser x", 2, "No such option '--quantiser'. (Did you mean one of: '--quantizer'"),
    ("moe-pack convert", 2, "Missing argument 'PATH'"),
    ("moe-pack convert nowhere", 1, "nowhere: no such file or folder, and no known model has this name; moe-pack "),
    ("moe-pack convert mixtrall", 1, "; did you mean mixtral or mixtral-8x7b? moe-pack convert --list prints "),
    ("moe-pack convert packs/a/frist", 1, "packs/a/frist: no such file or folder, and no name of the hub (owner/name)"),
    ("moe-pack convert small.ggu", 1, "; did you mean small.gguf? moe-pack convert --list prints all names"),
    ("moe-pack profile olmo -o x", 1, "did you mean olmoe? moe-pack convert --list"),
    ("moe-pack plan mixtrall", 1, "; did you mean mixtral-8x7b? moe-pack synth --list prints all names"),
    ("moe-pack synth QWEN3-30B-A3 -o x", 1, "did you mean qwen3-30b-a3b"),
    ("moe-pack inspect packz", 1, "moe-pack: packz: no such folder; did you mean packs?\n"),
    ("moe-pack verify ./packs/frist", 1, "moe-pack: packs/frist: no such folder; did you mean first?\n"),
    ("moe-pack check mixtral", 3, "mixtral: no such folder; this is a model's name"),
    ("moe-pack plan mixtral --target-vram 11G --search napsack", 2, "'uniform'; did you mean knapsack?"),
    ("moe-pack replay x --pack packs/first --budget 1G --policy lruu", 2, "edgemoe, importance; did you mean lru?"),
    ("moe-run packz", 1, "moe-run: packz: no such folder; did you mean packs?\n"),
    ("moe-run small.gguf --prompt x", 1, "small.gguf: is a file, but a pack is a folder"),
    ("moe-run packs/first --policy edgmoe", 2, "'importance'; did you mean edgemoe?"),
    ("moe-run packs/first", 2, "standard input is empty; give the text to continue"),
    ("moe-run packs/first --device cpu --ram 1G -p x", 1, "--ram needs --device cuda; remove it or add --device cuda"),
    ("moe-serve packs/first --device cpu --ram 1G", 1, "--ram needs --device cuda; remove it or add --device cuda"),
    ("moe-run packs/first --temperature", 2, "Option '--temperature' requires an argument"),
    ("moe-serve packz", 1, "moe-serve: packz: no such folder; did you mean packs?\n"),
    ("moe-serve packs/first --port many", 2, "'many' is not a valid integer"),
]  # fmt: skip
# What stands on a line when TAB is pressed, and some of what is offered.
TABS: list[tuple[str, set[str]]] = [
    ("moe-pack conv", {"convert"}),
    ("moe-pack convert mixtral-", {"mixtral-8x7b", "mixtral-8x22b"}),
    ("moe-pack convert pac", {"packs/"}),
    ("moe-pack plan qwen3-30", {"qwen3-30b-a3b"}),
    ("moe-pack convert mixtral --quant", {"--quantizer"}),
    ("moe-pack inspect pac", {"dir pac"}),
    ("moe-run pac", {"dir pac"}),
    ("moe-run packs/first --policy l", {"lru"}),
    ("moe-run packs/first --rec", {"--record"}),
    ("moe-serve packs/first --kv-dtype ", {"f32", "bf16", "q8", "q4"}),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "packs" / "first").mkdir(parents=True)
    (tmp_path / "small.gguf").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(line: str) -> tuple[int, str]:
    program, *words = line.split()
    done = CliRunner().invoke(PROGRAMS[program], words, prog_name=program)
    return done.exit_code, done.output


def offered(line: str) -> set[str]:
    """Returns what bash gets at a TAB: texts, and `dir` or `file` where it looks for paths itself."""
    program, *words = line.split(" ")
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    env = {variable: "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    shown = CliRunner().invoke(PROGRAMS[program], [], prog_name=program, env=env).output.splitlines()
    return {text if kind == "plain" else f"{kind} {text}" for kind, _, text in (row.partition(",") for row in shown)}


def command_of(name: str) -> Command:
    assert isinstance(moe_pack, Group)
    command = moe_pack.resolve_command(Context(moe_pack), [name])[1]
    assert command is not None
    return command


# What a pack of Mixtral needs on a CPU, in lines of our Python, with some air. If a run loads more, `python
# support.loaded_packs --modules` shows every module and who imported it first. Load what is new where it is
# used, or raise the bound and say in docs/install.md what it is for.
MOST_LINES = {"moe-run PACK --prompt TEXT": 18_000, "moe-run PACK --prompt TEXT --budget 16M": 20_500}
# Modules for what this run does not do, by the beginnings of their names.
NOT_NEEDED = (
    "calib", "convert", "formats.codecs", "formats.gguf", "formats.hub.packs", "formats.hub.repository",
    "formats.hub.streamed", "formats.parts.mixers", "formats.parts.ngrams", "formats.sidecar", "formats.writer",
    "runtime.cli.chat", "runtime.cli.serve", "runtime.cpu.host_share", "runtime.doctor",
    "runtime.drafts.prediction", "runtime.gpu", "runtime.helper", "runtime.model.checkpoint_weights",
    "runtime.model.encoder_decoder", "runtime.model.attention.compressed", "runtime.model.attention.latent",
    "runtime.model.attention.relative", "runtime.model.mixers", "runtime.model.compute.ngrams",
    "runtime.model.compute.recurrence", "runtime.offload.paths", "runtime.offload.record", "runtime.offload.replay",
    "runtime.offload.routing_file", "runtime.offload.split", "runtime.engine.gpu", "runtime.engine.report",
    "runtime.serve", "runtime.templates",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    """Returns the modules that `moe-run` loads for a pack of the demo model, without and with a budget."""
    # Not above: this file is imported where torch may not be.
    from support.loaded_packs import loaded_by_case
    from support.models import DEMO_MODEL, pack

    from moe_pack.runtime.cpu import is_available

    if not is_available():
        pytest.skip("native kernels were not built: torch computes, and needs more of our modules")
    folder = tmp_path_factory.mktemp("runs") / "packed"
    pack(DEMO_MODEL, folder)
    return {each: loaded_by_case(each, folder) for each in MOST_LINES}


def test_a_run_loads_what_its_pack_needs(runs: dict[str, Loaded]) -> None:
    for run, loaded in runs.items():
        with case(run):
            names = {module.name.removeprefix("moe_pack.") for module in loaded.modules}
            assert {name for name in names if f"{name}.".startswith(NOT_NEEDED)} == set()
            assert [name for name in names if name.startswith("formats.families.")] == ["formats.families.text_files"]
            assert HEAVY & set(loaded.packages) - {"triton"} == {"numpy", "tokenizers", "torch", "tqdm"}
            assert any(name.startswith("runtime.offload.expert_store") for name in names) == ("--budget" in run)


def test_a_run_loads_few_lines(runs: dict[str, Loaded]) -> None:
    from support.loaded_packs import sizes

    assert all(f"`{run}`" in sizes(runs) for run in MOST_LINES)
    for run, loaded in runs.items():
        assert loaded.lines <= MOST_LINES[run], f"{loaded.table()}\n{run}: see MOST_LINES"


def test_families_are_those_of_their_modules() -> None:
    """Each module has families, each of its own type; text_files.py knows the keys that lead to the text model."""
    from moe_pack.formats.families.text_files import TEXT_KEYS  # which imports numpy and tokenizers

    families = all_families()
    assert all(family_of(family.model_type) is family for family in families)
    assert all(families_of(module) for module in modules())
    assert {family.text_keys[0] for family in families if family.text_keys} == TEXT_KEYS


def test_mistakes_get_an_answer_with_similar_names(here: Path) -> None:
    for line, exit_code, answer in MISTAKES:
        with case(line):
            code, said = typed(line)
            assert (code, answer in said) == (exit_code, True), said
            assert code == 2 or said.count("\n") == 1, "one line, but for what click says of a command's use"


def test_a_tab_completes_commands_options_choices_names_and_paths(here: Path) -> None:
    for line, some in TABS:
        with case(line):
            assert some <= offered(line)


def test_a_tab_completes_every_option_with_choices() -> None:
    commands = {"moe-run x": moe_run, "moe-serve x": moe_serve}
    commands |= {f"moe-pack {name}": command_of(name) for name in COMMANDS}
    num_options = 0
    for start, command in commands.items():
        for option in command.params:
            if isinstance(option.type, Choice):
                num_options += 1
                with case((start, option.name)):
                    assert offered(f"{start} {option.opts[0]} ") == set(option.type.choices)
    assert num_options > 20


def test_the_lines_for_shells_give_a_script_for_each_program() -> None:
    page = (Path(__file__).parents[1] / "docs" / "install.md").read_text(encoding="utf-8")
    lines = re.findall(r"(_MOE_\w+_COMPLETE)=((?:bash|zsh|fish)_source) (moe-\w+)", page)
    assert len(lines) == len(set(lines)) == 3 * len(PROGRAMS)
    for variable, instruction, program in lines:
        with case((instruction, program)):
            shown = CliRunner().invoke(PROGRAMS[program], [], prog_name=program, env={variable: instruction})
            assert instruction.replace("_source", "_complete") in shown.output


def test_a_list_has_the_names_that_commands_take() -> None:
    for command, names in (("convert", short_names()), ("synth", published_names())):
        assert typed(f"moe-pack {command} --list") == (0, "".join(f"{name}\n" for name in sorted(names)))


def test_every_command_is_listed_with_a_line_and_has_its_name() -> None:
    _, listed = typed("moe-pack --help")
    for name in COMMANDS:
        with case(name):
            assert command_of(name).name == name
            assert re.search(rf"^  {name} +[A-Z].*\.$", listed, re.MULTILINE)
            assert typed(f"moe-pack {name} --help")[1].startswith(f"Usage: moe-pack {name} ")


def test_help_mistakes_and_completion_load_neither_torch_nor_numpy(here: Path) -> None:
    lines = [f"{program} {option}" for program in PROGRAMS for option in ("--version", "--help")]
    lines += [f"moe-pack {name} --help" for name in COMMANDS]
    lines += [line for line, _, _ in MISTAKES]
    lines += ["moe-pack convert --list", "moe-pack synth --list"]
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]}
import test_start_up as here
loaded = set()
for work, line in [*((here.typed, line) for line in {lines}), *((here.offered, line) for line, _ in here.TABS)]:
    work(line)
    for name in sorted(here.HEAVY & set(sys.modules) - loaded):
        print(line, "loads", name)
        loaded.add(name)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=here)
    assert done.stdout == "end\n"
