"""Part `tests`: the tests that are marked `gpu`, and those of the kernels, which elsewhere run by the interpreter.

The marked ones come first, alone: they count what is in use of the card. Those of kernels follow, several files at
once: most of their time goes to compiling.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
from gpu_clock import Clock
from gpu_results import Results

_TESTS = Path(__file__).parents[1] / "tests"
_ERROR_LINES = 12
_MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class TestFile:
    """How the tests of a file ended."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FailedTest:
    """A test that failed, and the last lines of why."""

    name: str
    why: str


class _Recorder:
    """pytest tells it how each test ended; `rows`: one a file, and one a failure."""

    def __init__(self) -> None:
        self.rows: list[TestFile | FailedTest] = []
        self._file = ""
        self._counts, self._seconds = {"passed": 0, "failed": 0, "skipped": 0}, 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended: a test counts when it ran, or when what comes before or after went wrong."""
        file = report.nodeid.partition("::")[0]
        if file != self._file:
            self.finish()
            self._file = file
        self._seconds += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
        if report.failed:
            self._fail(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that could not be read counts as a test that failed."""
        if report.failed:
            self._fail(report.nodeid, report.longreprtext)

    def finish(self) -> None:
        """Adds the row of the file that has ended."""
        if self._file:
            self.rows.append(TestFile(self._file, **self._counts, seconds=self._seconds))
        self._file, self._counts, self._seconds = "", dict.fromkeys(self._counts, 0), 0.0

    def _fail(self, name: str, why: str) -> None:
        self.rows.append(FailedTest(name, "\n".join(why.splitlines()[-_ERROR_LINES:])))


def run(results: Results, clock: Clock) -> None:
    """Runs them in processes of their own; in a rehearsal they are only found, for `make test` runs them."""
    marked = [path for path in sorted(_TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    kernels = sorted((_TESTS / "runtime" / "kernels").glob("test_*.py"))
    num_failed = 0
    for groups, mark, num_processes in (
        ([marked], "gpu", 1),
        ([[path] for path in kernels], "not slow and not gpu", min(_MOST_PROCESSES, os.cpu_count() or 1)),
    ):
        with ProcessPoolExecutor(num_processes, get_context("spawn")) as processes:
            for done in as_completed([processes.submit(_run, files, mark, clock.is_rehearsal) for files in groups]):
                for row in done.result():
                    results.add(row)
                    num_failed += isinstance(row, FailedTest)
    assert not num_failed, f"{num_failed} tests failed"


def _run(files: Sequence[Path], mark: str, only_finds: bool) -> list[TestFile | FailedTest]:
    recorder = _Recorder()
    # A warning of another torch than the tests were written with is no failure here.
    options = ["-q", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors"]
    options += ["--rootdir", str(_TESTS.parent)] + (["--collect-only"] if only_finds else [])
    pytest.main([*options, "-m", mark, *map(str, files)], plugins=[recorder])
    recorder.finish()
    return recorder.rows
