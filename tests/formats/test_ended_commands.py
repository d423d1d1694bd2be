"""SIGTERM ends a command, and only while it runs."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from moe_pack.formats.base.cli import command_errors


@pytest.fixture(autouse=True)
def usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def run(body: Callable[[], None]) -> Result:
    command = click.command()(command_errors(interrupted="interrupted")(body))
    return CliRunner().invoke(command, prog_name="moe-test")


def end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_ends_a_command_in_a_line_and_the_handler_goes_with_it() -> None:
    result = run(end)
    assert (result.exit_code, result.stderr) == (143, "moe-test: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_one_does_not_break_off_what_cleans_up(tmp_path: Path) -> None:
    def body() -> None:
        try:
            end()
        finally:
            end()
            (tmp_path / "cleaned").touch()

    assert run(body).exit_code == 143
    assert (tmp_path / "cleaned").exists()


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert run(end).exit_code == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_forked_child_dies_of_it_as_any_process() -> None:
    def body() -> None:
        child = os.fork()
        if not child:
            end()
            os._exit(0)  # not reached
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

    assert run(body).exit_code == 0
