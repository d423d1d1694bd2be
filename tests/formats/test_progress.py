"""What long work tells of itself: on standard error, lines always, bars on a terminal alone."""

import pytest

from moe_pack.formats import NO_PROGRESS, Progress
from moe_pack.formats.cli import TerminalProgress
from moe_pack.formats.commands import Stage


def work(progress: Progress) -> None:
    progress.begin(Stage("first", 10, "B", done=4, note="10 bytes"))
    progress.advance(6, "all that was left")
    progress.say("half of it")
    progress.end()
    progress.begin(Stage("second", 2))
    progress.advance(1)


def test_where_there_is_no_terminal_lines_alone_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress() as progress:
        work(progress)
    assert tuple(capsys.readouterr()) == ("", "first: 10 bytes\nhalf of it\n")


def test_no_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(NO_PROGRESS)
    assert tuple(capsys.readouterr()) == ("", "")


def test_a_bar_is_removed_when_work_fails() -> None:
    progress = TerminalProgress()
    with pytest.raises(ValueError, match="broken"), progress:
        progress.begin(Stage("first", 10))
        raise ValueError("broken")
    progress.end()  # which has nothing left to remove
