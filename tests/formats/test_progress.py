"""Long work reports on standard error: lines where there is no terminal, and honest times."""

import itertools
import os
import pty
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

from moe_pack.formats import NO_PROGRESS, Progress
from moe_pack.formats.base import cli
from moe_pack.formats.base.cli import StageTime, TerminalProgress
from moe_pack.formats.base.commands import Kind, Stage, stage_of
from moe_pack.formats.hub.repository import _counted

TraceFunction = Callable[[FrameType, str, object], "TraceFunction | None"]


def work(progress: Progress) -> None:
    progress.begin(Stage("first", 10, "B", done=4))
    progress.advance(6, "all that was left")
    progress.say("half of it")
    progress.end()
    progress.begin(Stage("second", 1200, "layers", note="12 matrices"))
    progress.advance(1)
    progress.end()
    progress.begin(Stage("third", 1200, "layers"))
    progress.end()
    with stage_of(progress, "fourth"):
        pass


def test_where_there_is_no_terminal_each_stage_has_a_first_and_a_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress() as progress:
        work(progress)
    out, err = capsys.readouterr()
    assert out == "" and [line.rsplit(" done in ")[0] for line in err.splitlines()] == [
        "first: 10 B, 4 B of it by an earlier run",
        "half of it",
        "first:",
        "second: 12 matrices",
        "second:",
        "third: 1,200 layers",
        "third:",
        "fourth: begins",
        "fourth:",
    ]


def lines_of(capsys: pytest.CaptureFixture[str], number: int) -> list[str]:
    text = ""
    while text.count("\n") < number:
        time.sleep(0.002)
        text += capsys.readouterr().err
    return text.splitlines()


def test_lines_come_while_one_unit_of_work_lasts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.LINE_S == 15
    monkeypatch.setattr(cli, "LINE_S", 0.01)
    with TerminalProgress() as progress:
        progress.begin(Stage("packing", 4, "layers"))
        lines = lines_of(capsys, 4)  # no unit is done yet
        assert lines[0] == "packing: 4 layers" and all(line.startswith("packing: 0% in 0.") for line in lines[1:])
        progress.advance(2, "layer 1")
        assert lines_of(capsys, 2)[1].endswith(" left, layer 1")
        with stage_of(progress, "sealing"):
            assert lines_of(capsys, 4)[-1].startswith("sealing: 0.")  # of work whose size is not known


def test_work_that_fails_is_not_called_done_and_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TerminalProgress()
    with pytest.raises(ValueError, match="broken"), progress:
        progress.begin(Stage("first", 10))
        raise ValueError("broken")
    progress.end()  # which has nothing left to end
    with pytest.raises(ValueError, match="broken"), progress, stage_of(progress, "second"):
        raise ValueError("broken")
    assert capsys.readouterr().err == "first: 10\nsecond: begins\n"


def interrupted_after(num_lines: int) -> bool:
    left = num_lines

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal left
        if frame.f_code.co_filename != cli.__file__ or frame.f_code.co_name not in dir(TerminalProgress):
            return None
        left -= event == "line"
        if event == "line" and left < 0:
            raise KeyboardInterrupt  # which ends tracing
        return trace

    sys.settrace(trace)
    try:
        with TerminalProgress() as progress:
            work(progress)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_ctrl_c_at_any_line_is_all_that_comes_out() -> None:
    assert next(n for n in itertools.count() if not interrupted_after(n)) > 100


def test_ctrl_c_while_a_thread_starts_is_all_that_comes_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = getattr(threading, "_start_new_thread")  # noqa: B009, threading's own name for it

    def start_and_interrupt(run: Callable[[], None], arguments: tuple[()]) -> None:
        start(run, arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading, "_start_new_thread", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt), TerminalProgress() as progress:
        progress.begin(Stage("first", 1))
    with pytest.raises(KeyboardInterrupt), _counted(tmp_path, NO_PROGRESS):
        pass  # of a download


def test_no_progress_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(NO_PROGRESS)
    assert tuple(capsys.readouterr()) == ("", "")


def test_on_a_terminal_a_bar_shows_the_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 100))
    monkeypatch.setattr(cli, "BAR_S", 0.01)

    def read_until(end: bytes, found: bytes = b"") -> bytes:  # a read may end anywhere, within a character too
        while end not in found:
            found += os.read(reader, 4096)
        return found

    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with TerminalProgress() as progress:
            progress.begin(Stage("packing", 100, "B"))
            progress.advance(100, "layer {1}")  # braces are no format of a bar
            found = read_until(b"layer {1}")
            progress.end()
        terminal.write("<end>")
        terminal.flush()
        text = read_until(b"<end>", found).decode().removesuffix("<end>")
    os.close(reader)
    assert "packing: 100%|" in text and text.endswith("\r") and "\n" not in text and "done in" not in text


# ---- shares and the time that is left -------------------------------------------------------------------------------


def told(
    stage: Stage, reports: list[tuple[str, int, float]], begin: float = 100.0
) -> Iterator[tuple[float, StageTime]]:
    now, seen = begin, StageTime(stage, begin)
    for kind, units, seconds in reports:
        now += seconds
        seen.advance(units, kind, now)
        yield now, seen


def test_a_share_is_one_of_time_where_kinds_of_work_take_unlike_times() -> None:
    """Dense bytes come first and fast: after 9 of 10 parts of the bytes, a tenth of the time may be over."""
    dense, experts = [("dense", 100, 1.0)] * 90, [("experts", 20, 16.2)] * 50
    stage = Stage.of_kinds("packing", [Kind("dense", 9000), Kind("experts", 1000, cost=60.0)], "10,000 bytes")
    total = 90 * 1.0 + 50 * 16.2
    shares = []
    for now, seen in told(stage, dense + experts):
        over = now - 100
        left = seen.left(now)
        if over < 8:
            continue  # too little to say how long a unit takes
        shares.append((seen.share(now), over / total))
        if over <= 90:  # the given ratio, 60, is wrong: 81 is right
            assert left is None, "most of the rest was not measured"
        if left is None:
            assert over < 90 + 8 * 16.2
            continue

        assert abs(left - (total - over)) <= 0.01 * (total - over) + 1e-6, (over, left)
    assert max(abs(share - truth) for share, truth in shares) < 0.05
    assert shares[-1][0] == 1.0


def test_the_time_left_follows_the_load() -> None:
    """In the middle the machine becomes half as fast; within a minute of work the prediction knows it."""
    stage, half = Stage("work", 400), 200
    reports = [("", 1, 1.0)] * half + [("", 1, 2.0)] * half
    for now, seen in told(stage, reports):
        over = now - 100
        left, truth = seen.left(now), 600 - over
        if 10 < over <= 200:
            assert left == pytest.approx(400 - over)  # nobody knows the future
        if over > 200 + 60:
            assert left == pytest.approx(truth, rel=0.01) and seen.share(now) == pytest.approx(over / 600, rel=0.01)


def test_what_an_earlier_run_has_done_took_time_too() -> None:
    """A share counts it as if it had been done at this run's rates; the time left does not count it."""
    stage = Stage.of_kinds("packing", [Kind("dense", 50, 50), Kind("experts", 100, 40, cost=10.0)], "150 parts")
    seen = StageTime(stage, 0.0)
    assert seen.left(0.0) is None and seen.share(0.0) == pytest.approx(450 / 1050)  # by costs, without a measurement
    for now, seen in told(stage, [("experts", 1, 5.0)] * 60):
        done = (now - 100) / 5
        if done >= 8:
            assert seen.left(now) == pytest.approx(5 * (60 - done))
            assert seen.share(now) == pytest.approx((0.5 * 50 + 5 * (40 + done)) / (0.5 * 50 + 500))


def test_a_report_that_stays_out_makes_the_rest_longer() -> None:
    """The time left falls while a usual report is awaited, stays, and grows: it never ends before the work does."""
    *_, (now, seen) = told(Stage("work", 20), [("", 1, 10.0)] * 10)
    assert [seen.left(now + waited) for waited in (0, 5, 10)] == pytest.approx([100, 95, 90])
    later = [seen.left(now + waited) for waited in range(10, 200, 10)]
    assert all(a is not None and b is not None and 90 <= a < b for a, b in pairwise(later))


def test_workers_that_report_at_once_do_not_confuse_the_prediction() -> None:
    """16 reports come together, each minute and a half."""
    burst = [("", 1, 90.0), *[("", 1, 0.0)] * 15]
    *_, (now, seen) = told(Stage("work", 160), burst * 5)
    for waited in range(0, 90, 10):
        assert seen.left(now + waited) == pytest.approx(450 - waited)


def test_an_estimate_counts_until_work_is_measured() -> None:
    seen = StageTime(Stage("work", 100, seconds=500.0), 0.0)
    assert seen.left(0.0) == 500 and seen.left(100.0) == 400 and seen.share(100.0) == 0.2
    seen.advance(10, "", 200.0)
    assert seen.left(200.0) == pytest.approx(1800)


def test_the_first_small_unit_says_nothing_of_the_rest() -> None:
    seen = StageTime(Stage("packing", 10_000), 0.0)
    seen.advance(1, "", 5.0)
    assert seen.left(5.0) is None
