"""Programs get bytes that are no text, standard streams that are closed, full or of few letters, and SIGTERM."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from support.cases import case

from moe_pack.convert.cli.main import main as moe_pack
from moe_pack.formats import PackError
from moe_pack.formats.base.cli import Program, command_errors
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

ODD = os.fsdecode(b"caf\xe9")  # as Python decodes an argument
# A program that prints a letter, reads standard input, or has a message for standard error.
PROGRAM = """
import os, click
from moe_pack.formats.base.cli import Program, command_errors
@click.command(cls=Program)
@click.argument("file", type=click.File("r"))
@command_errors("interrupted")
def main(file):
    click.echo(f"{len(file.read())} caf\\u00e9 \\U0001f642 \\udce9")
    click.echo("said", err=True)
    for descriptor in range(3):
        os.fstat(descriptor)  # raises if no file has the number
main()
"""


def test_text_that_is_no_text_is_a_usage_error_wherever_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOE_SERVE_API_KEY", raising=False)
    commands: list[tuple[click.Command, list[str], str]] = [
        (moe_run, ["pack", "-p", ODD], "'--prompt' / '-p'"),
        (moe_serve, ["pack", "--api-key", ODD], "'--api-key'"),
        (moe_serve, ["pack", "--cors-origins", ODD], "'--cors-origins'"),
        (moe_serve, ["pack", "--host", ODD], "'--host'"),
        (moe_pack, ["upload", "pack", ODD], "'NAME'"),
        (moe_pack, ["synth", ODD, "-o", "x"], "'NAME'"),
    ]
    for command, arguments, name in commands:
        with case(arguments):
            result = CliRunner().invoke(command, arguments)
            assert result.exit_code == 2, result.output
            assert f"Invalid value for {name}: is not UTF-8 text (character 3)" in result.stderr
    monkeypatch.setenv("MOE_SERVE_API_KEY", ODD)
    result = CliRunner().invoke(moe_serve, ["."])
    assert (
        result.exit_code == 2
        and "MOE_SERVE_API_KEY is not UTF-8 text (character 3); set another value" in result.stderr
    )


def test_paths_of_any_bytes_are_named_in_one_line(tmp_path: Path) -> None:
    for command, arguments in ((moe_run, ["-p", "a"]), (moe_serve, []), (moe_pack, ["inspect"])):
        with case(command):
            result = CliRunner().invoke(command, [*arguments, str(tmp_path / ODD)])
            assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
            assert "caf" in result.stderr and "no such folder" in result.stderr


def test_an_error_is_one_line_without_control_characters_and_of_bounded_length() -> None:
    def shown(message: str) -> str:
        @click.command(cls=Program)
        @command_errors("interrupted")
        def main() -> None:
            raise PackError(message)

        result = CliRunner().invoke(main, prog_name="moe-test")
        assert result.exit_code == 1
        return result.stderr

    assert shown("a\n b\x1b[2J\r\x07é\u202e 東") == "moe-test: a b\\x1b[2J \\x07é\\u202e 東\n"
    assert len(shown("x" * 1_000_000)) < 5000


def test_standard_streams_may_be_closed_full_or_of_few_letters(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    western = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    cases: dict[str, tuple[str, dict[str, str], int, str, str]] = {
        "all closed": ("- <&- >&- 2>&-", {}, 0, "", ""),
        "input closed": ("- <&-", western, 0, "0 café \\U0001f642 \\udce9\n", "said\n"),
        "full": ("--help >/dev/full", {}, 1, "", "program.py: standard output: cannot be written (No space left"),
    }
    for name, (arguments, environment, code, out, err) in cases.items():
        with case(name):
            done = subprocess.run(
                f"exec {shlex.quote(sys.executable)} {tmp_path}/program.py {arguments}",
                shell=True,
                env=os.environ | environment,
                capture_output=True,
                encoding="latin-1",
                check=False,
            )
            assert done.returncode == code and done.stdout == out, done.stderr
            assert done.stderr.startswith(err) and done.stderr.count("\n") == bool(err)


@pytest.fixture
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def run(body: Callable[[], None]) -> Result:
    command = click.command()(command_errors(interrupted="interrupted")(body))
    return CliRunner().invoke(command, prog_name="moe-test")


def end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_command_in_a_line_and_the_handler_goes_with_it(usual_handler: None) -> None:
    result = run(end)
    assert (result.exit_code, result.stderr) == (143, "moe-test: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_sigterm_does_not_break_off_what_cleans_up(usual_handler: None, tmp_path: Path) -> None:
    def body() -> None:
        try:
            end()
        finally:
            end()
            (tmp_path / "cleaned").touch()

    assert run(body).exit_code == 143
    assert (tmp_path / "cleaned").exists()


def test_where_sigterm_is_ignored_it_stays_so(usual_handler: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert run(end).exit_code == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_forked_child_dies_of_sigterm_as_any_process(usual_handler: None) -> None:
    def body() -> None:
        child = os.fork()
        if not child:
            end()
            os._exit(0)  # not reached
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

    assert run(body).exit_code == 0
