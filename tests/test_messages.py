"""Messages use the words of the glossary, and name options that their command has."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from support.cases import case
from support.messages import collected_messages
from support.models import TinyMixtral, pack

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import RunError
from moe_pack.formats.base.cli import LateCommand
from moe_pack.runtime import EngineOptions, load
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
EVERYWHERE = {"--help", "--version", "--debug"}
# Programs that are not ours, by the words with which messages name them.
FOREIGN = {"ray start": {"--head"}, "llama-imatrix": {"--in-file"}, "hf download": {"--revision"}}
SEVERAL = {"convert/cli/profile.py": ("profile", "merge", "report", "attach", "imatrix", "thresholds")}


def test_messages_use_the_words_of_the_glossary() -> None:
    words = r"foretell\w*|anew|whoever|beside|shall|wish(?:es|ed)?|upon|thereof"
    assert re.findall(rf"(?i)^.*\b(?:{words})\b.*$", collected_messages(), re.MULTILINE) == []


def options_of(command: click.Command) -> set[str]:
    return EVERYWHERE | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


def programs() -> dict[str, set[str]]:
    """The options of each command, by the words that name it: `moe-run`, `moe-pack eval`, and `eval`."""
    found = {"moe-run": options_of(moe_run), "moe-serve": options_of(moe_serve), **FOREIGN}
    for name, command in commands().items():
        found[f"moe-pack {name}"] = found[name] = options_of(command)
    return found


def commands() -> dict[str, click.Command]:
    """The commands of `moe-pack`, each with its module loaded."""
    assert isinstance(moe_pack, click.Group)
    found = moe_pack.commands.items()
    return {name: command.loaded() if isinstance(command, LateCommand) else command for name, command in found}


def own_options(page: str, known: dict[str, set[str]]) -> set[str] | None:
    """The options of the command that a source file defines; None for a file that several programs use."""
    if page in ("runtime/cli/main.py", "runtime/cli/chat.py", "runtime/cli/serve.py"):
        return known["moe-serve" if page.endswith("serve.py") else "moe-run"]
    names = SEVERAL.get(page, (Path(page).stem,))
    if Path(page).parent != Path("convert/cli") or not set(names) <= set(known):
        return None
    return set().union(*(known[name] for name in names))


def wrongly_named(pages: str) -> list[str]:
    """Messages, with their files, that name an option which neither their command nor a program that they name has."""
    known, page, found = programs(), "", []
    everything = set().union(*known.values())
    for line in pages.splitlines():
        if re.fullmatch(r"# [\w/]+\.py", line):
            page = line[2:]
            continue
        own = own_options(page, known)
        named = [options for name, options in known.items() if re.search(rf"\b{name}\b", line)]
        allowed = (everything if own is None else own).union(*named)
        found += [f"{page}: {line}" for option in OPTION.findall(line) if option not in allowed]
    return found


def test_every_option_in_a_message_is_one_of_the_program() -> None:
    assert wrongly_named(collected_messages()) == []
    for wrong in (
        "# convert/cli/replay.py\nshorten it with --max-tokens",
        "# formats/pack/reader.py\ngive --no-such-option",
    ):
        assert len(wrongly_named(wrong)) == 1, "the scan finds it"
    assert wrongly_named("# convert/cli/replay.py\nrecord it with moe-run --max-tokens 8 --record routes") == []


def test_a_budget_that_is_too_small_names_options_of_the_command(tmp_path: Path) -> None:
    """The division of memory is shared by all commands, and its message names the options of each."""
    source = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096).write_with_tokenizer(tmp_path / "source")
    packed, routes = tmp_path / "packed", tmp_path / "routes"
    pack(source, packed)
    done = CliRunner().invoke(moe_run, [str(packed), "--prompt", "It was", "-n", "2", "--record", str(routes)])
    assert done.exit_code == 0, done.output
    of_pack = commands()
    cases: list[tuple[click.Command, list[object]]] = [
        (moe_run, [packed, "--prompt", "It was", "--budget", "1K"]),
        (moe_serve, [packed, "--port", "0", "--budget", "1K"]),
        (of_pack["check"], [packed, "--budget", "1K"]),
        (of_pack["replay"], [routes, "--pack", packed, "--budget", "1K"]),
        (of_pack["plan"], [source, "--target-vram", "1K", "--device", "cpu"]),
        (of_pack["plan"], [source, "--target-vram", "1K", "--device", "cuda", "--preset", "floe"]),
    ]
    for command, arguments in cases:
        with case(command.name, arguments):
            result = CliRunner().invoke(command, list(map(str, arguments)))
            assert result.exit_code == 1 and "1.0 KiB" in result.output, result.output
            assert set(OPTION.findall(result.output)) <= options_of(command), result.output
    with pytest.raises(RunError, match=r"^budget: 1\.0 KiB is too little; .* shorten the context with context_tokens$"):
        load(packed, 1024, options=EngineOptions(device="cpu"))
