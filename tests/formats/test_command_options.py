"""Options spelled once: what the command line makes of a dataclass's fields, and which errors end in exit code 2."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner, Result

from moe_pack.formats import UsageError, option
from moe_pack.formats.base.cli import command_errors, options_from
from moe_pack.formats.base.commands import Part, given, read_size


@dataclass(frozen=True, slots=True)
class Inner:
    """Options of a group that its first one begins, or its last."""

    size: int | None = field(metadata=option("--size", parse=read_size, metavar="SIZE", help="How large."))
    share: float = field(default=0.5, metadata=option("--share", least=0, most=1, help="How much.", mark="chosen"))
    shape: Literal["round", "flat"] | None = field(
        default=None,
        metadata=option("--shape", begins=True, instead={"cube": "a cube has no shape here"}, help="Which."),
    )


@dataclass(frozen=True, slots=True)
class Options:
    out: Path = field(metadata=option("--out", "-o", help="Where."))
    width: Literal[8, 16] = field(default=16, metadata=option("--width", help="How wide.", mark="chosen"))
    name: Literal["auto"] | Literal["a", "b"] = field(default="auto", metadata=option("--name", help="Which."))
    sleeps: bool = field(default=True, metadata=option("--no-sleep", help="Do not sleep."))
    sings: bool = field(default=True, metadata=option("--sing/--no-sing", help="Sing."))
    number: int | None = field(default=None, metadata=option("--number", least=1, help="How many.  [default: all]"))
    limit: int = field(default=1 << 30, metadata=option("--limit", parse=read_size, default_text="1G", help="At most."))
    inner: Inner | None = None
    unsaid: int = 7

    def check(self) -> None:
        if self.number == 13:
            raise UsageError("--number: 13 brings bad luck; take another")


FOUND: list[Options] = []


@click.command()
@options_from(Options)
@command_errors(interrupted="interrupted")
def command(options: Options) -> None:
    FOUND.append(options)
    if options.number == 14:
        raise UsageError("--number: 14 is too much")


def run(*arguments: str) -> Result:
    FOUND.clear()
    return CliRunner().invoke(command, list(arguments))


def read(*arguments: str) -> Options:
    result = run("--out", "o", *arguments)
    assert result.exit_code == 0, result.output
    return FOUND[0]


def test_what_is_not_given_has_the_fields_default() -> None:
    assert read() == Options(Path("o"))


def test_every_kind_of_field_takes_its_value() -> None:
    arguments = ["--width", "8", "--name", "b", "--no-sleep", "--no-sing", "--number", "3", "--limit", "2K"]
    assert read(*arguments) == Options(Path("o"), 8, "b", sleeps=False, sings=False, number=3, limit=2048)
    assert read("--size", "1M", "--share", "1").inner == Inner(1 << 20, 1.0)


def test_an_option_that_begins_a_group_stands_in_for_the_required_one() -> None:
    assert read("--shape", "flat").inner == Inner(None, shape="flat")
    assert read("--shape", "flat", "--share", "1").inner == Inner(None, 1.0, "flat")
    assert read("--shape", "flat", "--size", "1M").inner == Inner(1 << 20, shape="flat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "8"], "Missing option '--out'"),
        (["--out", "o", "--width", "9"], "'9' is not one of '8', '16'"),
        (["--out", "o", "--number", "0"], "0 is not in the range x>=1"),
        (["--out", "o", "--limit", "much"], "'--limit': found 'much', expected a size such as 11G"),
        (["--out", "o", "--share", "0.5"], "--share needs --size; add --size or remove --share"),
        (["--out", "o", "--shape", "cube"], "Invalid value for '--shape': a cube has no shape here"),
        (["--out", "o", "--shape", "flap"], "did you mean flat?"),
        (["--out", "o", "--number", "13"], "--number: 13 brings bad luck; take another"),
        (["--out", "o", "--number", "14"], "--number: 14 is too much"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output.splitlines()[-1]


def test_help_shows_each_default_once() -> None:
    shown = " ".join(run("--help").output.split())
    for line in (
        "-o, --out PATH Where. [required]",
        "--width [8|16] How wide. [default: 16]",
        "--name [auto|a|b] Which. [default: auto]",
        "--no-sleep Do not sleep. --sing",
        "--sing / --no-sing Sing. [default: sing]",
        "How many. [default: all] [x>=1]",
        "--limit TEXT At most. [default: 1G]",
        "--size SIZE How large. --share",
    ):
        assert line in shown


def test_given_lists_what_differs_from_its_default_in_groups_too() -> None:
    options = Options(Path("o"), sleeps=False, inner=Inner(1, 0.7), unsaid=8)
    assert given(options) == ["--out", "--no-sleep", "--size", "--share"]
    assert given(options, "chosen") == ["--share"]
    assert given(Options(Path("o"), width=8), "chosen") == ["--width"]


def test_what_is_no_part_is_refused() -> None:
    for text in ("", "1", "0/2", "3/2", "1/0", "a/2", "1/2/3", "-1/2", "1.0/2", "+1/2"):
        with pytest.raises(ValueError, match="expected I/N with I from 1 to N, such as 1/3"):
            Part.of(text)
    assert [Part.of(text) for text in ("1/1", "2/3", "3/3")] == [Part(1, 1), Part(2, 3), Part(3, 3)]


def test_parts_own_every_piece_of_work_once() -> None:
    owned = [[number for number in range(7) if Part(index, 3).owns(number)] for index in (1, 2, 3)]
    assert owned == [[0, 3, 6], [1, 4], [2, 5]]
    assert [Part(index, 2).apart([0, 1, 2, 3]) for index in (1, 2)] == [[3, 2, 1, 0], [1, 0, 3, 2]]
