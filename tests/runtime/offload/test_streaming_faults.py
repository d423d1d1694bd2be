"""`moe-run` inside a budget when something goes wrong: one clear line, the exit code, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.commands import moe_run as run
from support.models import PackMaker
from support.streaming import budget_for
from support.waiting import HANG_S, wait_until

from moe_pack.formats import DISK_BLOCK_BYTES, Pack, PackError, RunError
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.offload import read_recording
from moe_pack.runtime.offload.expert_store import Trace

PROMPT = [1, 540, 33, 7, 2048, 19]
MANY_TOKENS = 2000
TEXT = "It was"


@pytest.fixture
def demo(demo_pack: PackMaker, tmp_path: Path) -> Path:
    """A copy of the demo pack, to be damaged."""
    return shutil.copytree(demo_pack("up", 4), tmp_path / "packed")


@pytest.fixture
def shared_demo(demo_pack: PackMaker) -> Path:
    return demo_pack("up", 4)


def smallest(folder: Path, context_tokens: int, num_experts: int = 2) -> int:
    with Pack(folder) as opened:
        return budget_for(opened, num_experts, context_tokens)


def options(folder: Path, max_tokens: int) -> list[str]:
    """Memory for so few experts that nearly each is read again."""
    budget = smallest(folder, max_tokens + 16)
    # How many drafts run depends on times, and on it how large a recording is.
    text = ["--prompt", TEXT, "--temperature", "0", "-n", str(max_tokens), "--draft", "off", "--device", "cpu"]
    return [str(folder), *text, "--budget", str(budget)]


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moe_pack.runtime.cli", *(str(argument) for argument in arguments)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def assert_one_line(errors: str, expected: str) -> None:
    assert errors.count("\n") == 1, errors
    assert expected in errors


def events(trace: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(trace.read_text("ascii"))["traceEvents"]
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def running(folder: Path, **changes: object) -> Iterator[Engine]:
    """An engine that has made its first token, and has room for two experts."""
    budget = smallest(folder, 64)
    arguments = EngineOptions(budget_bytes=budget, kernels="portable", threads=1, **changes)  # type: ignore[arg-type]
    with Pack(folder) as opened, Engine(opened, arguments, 64) as engine:
        engine.decoder.next_logits(PROMPT)
        yield engine


def answers(engine: Engine) -> torch.Tensor:
    return torch.stack([engine.decoder.next_logits([token]) for token in range(100, 120)])


def descriptors() -> Counter[str]:
    """Returns the files that this process has open, and how often each."""
    found = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[os.readlink(entry)] += 1
        except FileNotFoundError:  # of the listing itself
            continue
    return Counter({name: times for name, times in found.items() if not name.startswith("/proc/")})


def threads() -> set[str]:
    """Returns the threads of this process, those of the extension too."""
    return set(os.listdir("/proc/self/task"))


@contextmanager
def nothing_stays_open() -> Iterator[None]:
    """Holds that what runs inside leaves no file and no thread.

    What was there before may end meanwhile: the system lists a thread for a moment after it was joined.
    """
    files, tasks = descriptors(), threads()
    yield
    assert not descriptors() - files
    wait_until(lambda: not threads() - tasks, lambda: f"threads stay: {sorted(threads() - tasks)}")


@pytest.mark.slow
@pytest.mark.parametrize("read", ["direct", "pread"])
def test_an_expert_file_cut_while_running_is_named_and_nothing_stays_open(
    demo: Path, read: str, tmp_path: Path
) -> None:
    trace, record = tmp_path / "out.json", tmp_path / "out.record"
    with running(demo):
        pass  # what torch starts once and keeps
    with (
        nothing_stays_open(),
        pytest.raises(PackError, match=r"^experts-\d+.safetensors: was truncated while it was in use; "),
        running(demo, read=read, trace=trace, record=record) as engine,
    ):
        for path in demo.glob("experts*"):
            os.truncate(path, DISK_BLOCK_BYTES)
        answers(engine)
    assert len(events(trace)) > 2
    assert len(read_recording(record).passes.chunks) == 1  # the prompt; the token that failed is no whole pass
    assert names(tmp_path) == ["out.json", "out.record", "packed"]


def test_bytes_damaged_while_running_are_found_when_an_expert_first_arrives(demo: Path) -> None:
    with pytest.raises(PackError, match=r"CRC-32 does not match|damaged"), running(demo) as engine:
        for path in demo.glob("experts*"):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
        answers(engine)


def test_an_expert_file_replaced_while_running_changes_nothing(demo: Path) -> None:
    with running(demo) as engine:
        expected = answers(engine)
    with running(demo) as engine:
        for path in demo.glob("experts*"):
            other = path.with_name("other")
            other.write_bytes(bytes(path.stat().st_size))
            other.replace(path)
        assert torch.equal(answers(engine), expected), "the file that was opened is read to the end"


@pytest.mark.parametrize("kind", ["folder", "pipe", "gone"])
def test_an_expert_file_that_cannot_be_read_is_refused_before_the_first_token(demo: Path, kind: str) -> None:
    arguments = options(demo, 4)
    path = min(demo.glob("experts*"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert_one_line(result.stderr, path.name)


def test_an_expert_file_lost_between_opening_and_reading_leaves_nothing_open(demo: Path) -> None:
    budget = smallest(demo, 64)
    with running(demo):
        pass
    with Pack(demo) as opened:
        max(demo.glob("experts*")).unlink()
        with nothing_stays_open(), pytest.raises(PackError, match="file is missing"):
            Engine(opened, EngineOptions(budget_bytes=budget, kernels="portable", threads=1), 64)


PLACES = {"a folder that is not there": "none/out", "a file for a folder": "file/out", "a name too long": "x" * 300}


@pytest.mark.parametrize("option", ["--trace", "--record"])
def test_what_is_to_be_written_is_written_without_a_budget_too(option: str, shared_demo: Path, tmp_path: Path) -> None:
    arguments = [shared_demo, "--prompt", TEXT, "-n", 2, option, tmp_path / "out"]
    assert run(*arguments).exit_code == 0
    assert events(tmp_path / "out") if option == "--trace" else read_recording(tmp_path / "out")
    (tmp_path / "out").unlink()
    refused = run(*arguments, "--read", "map")
    assert (refused.exit_code, refused.stdout, names(tmp_path)) == (1, "", [])
    assert_one_line(refused.stderr, f"{option} needs offloaded experts; remove --read map")


def test_a_place_that_cannot_be_written_is_refused_before_the_model_runs(shared_demo: Path, tmp_path: Path) -> None:
    for number, (option, place) in enumerate(product(["--trace", "--record"], PLACES)):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with case(option, place):
            (case_folder / "file").write_text("kept")
            result = run(*options(shared_demo, 4), option, case_folder / PLACES[place])
            assert (result.exit_code, result.stdout) == (1, "")
            assert_one_line(result.stderr, "cannot be written")
            assert names(case_folder) == ["file"]


def test_a_record_is_not_written_in_the_place_of_a_device(shared_demo: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*options(shared_demo, 4), "--record", pipe)
    assert (result.exit_code, result.stdout) == (1, "")
    assert_one_line(result.stderr, "pipe: is no regular file; give another path")
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_a_trace_on_a_device_that_is_full_is_refused_before_the_model_runs(shared_demo: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    result = run(*options(shared_demo, 4), "--trace", "/dev/full")
    assert (result.exit_code, result.stdout) == (1, "")
    assert_one_line(result.stderr, "--trace: /dev/full: cannot be written (No space left on device)")
    assert Path("/dev/full").is_char_device()


@pytest.mark.slow
def test_a_continuation_that_finds_no_room_ends_in_a_line(shared_demo: Path) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    command = [sys.executable, "-m", "moe_pack.runtime.cli", *options(shared_demo, 4)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 1
    assert_one_line(ended.stderr, ": standard output: cannot be written (No space left on device)")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "none", folder], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--trace", "--record"])
def test_a_disk_that_fills_up_ends_it_in_a_line_and_leaves_no_file(
    option: str, shared_demo: Path, small_disk: Path
) -> None:
    result = run(*options(shared_demo, 400), option, small_disk / "out")
    assert result.exit_code == 1
    assert_one_line(result.stderr, "out: cannot be written (No space left on device); give another path")
    assert names(small_disk) == []


def test_a_full_disk_for_the_trace_does_not_cost_the_record(
    shared_demo: Path, small_disk: Path, tmp_path: Path
) -> None:
    record = tmp_path / "out.record"
    with pytest.raises(RunError, match="--trace"), running(shared_demo, trace=small_disk / "out", record=record) as e:
        (small_disk / "filler").write_bytes(bytes(28 << 10))
        answers(e)
        answers(e)
    assert len(read_recording(record).passes.chunks) > 1
    assert names(small_disk) == ["filler"]


def test_what_ended_the_run_is_told_even_if_the_record_cannot_be_written(demo: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    with pytest.raises(PackError) as raised, running(demo, record=place / "record") as engine:
        for path in demo.glob("experts*"):
            os.truncate(path, DISK_BLOCK_BYTES)
        place.rmdir()
        answers(engine)
    assert "record: cannot be written" in raised.value.__notes__[0]


def test_after_a_trace_was_refused_what_ends_goes_nowhere(small_disk: Path) -> None:
    trace = Trace(small_disk / "out")
    with pytest.raises(RunError, match="No space left"), trace.during("computing", "experts"):
        for number in range(2000):
            trace.read_begins(f"layer 0 expert {number}", 4096, True)
    for _ in range(2000):
        trace.read_ends("layer 0 expert 0", 1)
    trace.close()
    assert names(small_disk) == []


@pytest.mark.slow
def test_an_interruption_in_mid_token_ends_it_with_whole_files(shared_demo: Path, tmp_path: Path) -> None:
    """A request to terminate is in test_run_command.py."""
    trace, record = tmp_path / "out.json", tmp_path / "out.record"
    process = started(*options(shared_demo, MANY_TOKENS), "--trace", trace, "--record", record)
    assert process.stdout is not None
    first = process.stdout.read(1)  # it is writing
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert (first + rest).endswith("\n")
    assert errors.endswith(": interrupted\n")
    assert_one_line(errors, "interrupted")
    assert {event["name"] for event in events(trace)} > {"experts", "thread_name"}
    assert len(read_recording(record).passes.chunks) >= 1
    assert names(tmp_path) == ["out.json", "out.record"]


@pytest.mark.slow
def test_two_processes_on_one_pack_answer_the_same(shared_demo: Path) -> None:
    arguments = options(shared_demo, 40)
    other = started(*arguments)
    assert other.stdout is not None and other.stderr is not None
    with other.stdout, other.stderr:
        first = other.stdout.read(1)  # it is running
        mine = run(*arguments).stdout
        assert first + other.stdout.read() == mine
        assert other.stderr.read() == ""
    assert other.wait(timeout=HANG_S) == 0
