"""A profile made in parts: any number of processes over one folder give the bytes of one, also if some are killed."""

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import Tiny, write
from support.profiles import QUICK, SMALLEST, Recorder, StoppedError, folder_bytes, random_tokens
from support.specs import GROUPED
from support.waiting import HANG_S

from moe_pack.calib.forward import ProfileStore, Tokens, in_order, num_workers
from moe_pack.calib.profile import Profile, ProfileOptions, make_profile
from moe_pack.formats import ConversionError
from moe_pack.formats.base.commands import Part
from moe_pack.formats.families import Checkpoint

TOKENS = random_tokens(5, 16, SMALLEST.vocab_size)
TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path

support, source, folder, level, part, *shape = sys.argv[1:]
sys.path[:0] = [support]
import torch
from support.profiles import random_tokens
from moe_pack.calib.profile import ProfileOptions, make_profile
from moe_pack.formats.base.commands import Part
from moe_pack.formats.families import Checkpoint

torch.set_num_threads(1)
tokens = random_tokens(*map(int, shape))
make_profile(Checkpoint(Path(source)), tokens, Path(folder), ProfileOptions(level), part=Part.of(part))
"""
# Experts that all tokens share, a stack of two halves, layers without attention, norms of outputs.
FAMILIES = (
    Tiny("qwen2_moe", "a shared expert", {"num_hidden_layers": 2, "num_experts": 4}),
    Tiny(
        "switch_transformers",
        "an encoder and a decoder",
        {"expert_capacity": 5, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 4},
    ),
    Tiny("qwen3_next", "two kinds of mixers", {}),
)


FOUR_LAYERS = Tiny("qwen3_moe", "four layers", {"num_hidden_layers": 4, "num_experts": 3, "moe_intermediate_size": 16})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs in runs have the threads that the outer one leaves them; all must have the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALLEST.write(tmp_path_factory.mktemp("source"))


def profiled(
    source: Path, folder: Path, options: ProfileOptions, part: Part | None = None, progress: Recorder | None = None
) -> Profile:
    with closing(Checkpoint(source)) as checkpoint:
        return make_profile(checkpoint, TOKENS, folder, options, progress or Recorder(), part=part)


def run_in_turns(source: Path, folder: Path, options: ProfileOptions, num_parts: int, most: int = 9) -> int:
    """Lets one part after the other run, and kills each at a random one of `most` events; returns how often."""
    chance, killed = random.Random(num_parts), 0
    for turn in range(1000):
        part = Part(1 + turn % num_parts, num_parts)
        try:
            profiled(source, folder, options, part, Recorder(chance.randrange(most)))
            return killed
        except StoppedError:
            killed += 1
    raise AssertionError("parts that are killed again and again finish")


@pytest.mark.slow
def test_parts_killed_again_and_again_end_in_the_bytes_of_one_process(source: Path, tmp_path: Path) -> None:
    profiled(source, tmp_path / "one", QUICK)
    expected = folder_bytes(tmp_path / "one")
    for num_parts in (1, 2, 3):
        folder = tmp_path / str(num_parts)
        assert run_in_turns(source, folder, QUICK, num_parts) > 3
        assert folder_bytes(folder) == expected, num_parts


@dataclass
class Late(Recorder):
    """Progress that lets another part run for a while, or to its end, at one of its events."""

    at: int = 0
    run: Any = None
    waits: bool = field(default=True)

    def _event(self, what: str) -> None:
        super()._event(what)
        if self.waits and len(self.events) > self.at:
            self.waits = False
            self.run()


@pytest.mark.slow
def test_a_part_that_falls_behind_goes_on_where_the_others_are(tmp_path: Path) -> None:
    source = write(FOUR_LAYERS, tmp_path / "source")
    profiled(source, tmp_path / "one", QUICK)
    expected, late = folder_bytes(tmp_path / "one"), 0
    for at, others in ((2, 13), (2, 7), (7, None)):
        folder = tmp_path / f"{at}-{others}"

        def run(folder: Path = folder, stop_at: int | None = others) -> None:
            with contextlib.suppress(StoppedError):
                profiled(source, folder, QUICK, Part(2, 2), Recorder(stop_at))

        progress = Late(at=at, run=run)
        profiled(source, folder, QUICK, Part(1, 2), progress)
        assert not progress.waits and folder_bytes(folder) == expected, (at, others)
        late += progress.events.count("statistics") > 1  # the stage was entered again
    assert late == 1  # the second was not late enough, and the third found the profile finished


def test_a_damaged_result_is_computed_again(source: Path, tmp_path: Path) -> None:
    profiled(source, tmp_path / "one", QUICK)
    damaged = 0
    for stop_at in range(2, 12, 3):
        folder = tmp_path / str(stop_at)
        with pytest.raises(StoppedError):
            profiled(source, folder, QUICK, Part(1, 2), Recorder(stop_at))
        for path in (folder / "work" / "shared").rglob("experts.*"):
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw[: len(raw) - (damaged % 2) * 5])
            damaged += 1
        profiled(source, folder, QUICK, Part(2, 2))
        assert folder_bytes(folder) == folder_bytes(tmp_path / "one"), stop_at
    assert damaged > 3


@pytest.mark.slow
def test_one_process_goes_on_where_parts_were_killed_and_parts_where_it_was(source: Path, tmp_path: Path) -> None:
    profiled(source, tmp_path / "one", QUICK)
    for first, then in ((Part(2, 3), None), (None, Part(1, 2)), (Part(1, 2), Part(4, 5))):
        folder = tmp_path / f"{first}-{then}"
        with pytest.raises(StoppedError):
            profiled(source, folder, QUICK, first, Recorder(9))
        profiled(source, folder, QUICK, then)
        assert folder_bytes(folder) == folder_bytes(tmp_path / "one")
        profiled(source, folder, QUICK, Part(1, 2))  # a part that comes when all is done
        assert folder_bytes(folder) == folder_bytes(tmp_path / "one")


def test_each_part_is_made_by_one_process_and_none_without_a_part(tmp_path: Path) -> None:
    first = ProfileStore(tmp_path, "one", part=Part(1, 2))
    second = ProfileStore(tmp_path, "one", part=Part(2, 2))
    with pytest.raises(ConversionError, match="another process is making part 2/2; give each process another"):
        ProfileStore(tmp_path, "one", part=Part(2, 2))
    with pytest.raises(ConversionError, match="another process is writing a profile here; wait for it, or stop it"):
        ProfileStore(tmp_path, "one")
    with pytest.raises(ConversionError, match="unfinished profile of another model, text or options"):
        ProfileStore(tmp_path, "other", part=Part(3, 3))
    first.close()
    second.close()
    alone = ProfileStore(tmp_path, "one")
    with pytest.raises(ConversionError, match="it was started without --part; wait for it, or stop it"):
        ProfileStore(tmp_path, "one", part=Part(2, 2))
    alone.close()
    ProfileStore(tmp_path, "one", part=Part(2, 2)).close()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match=r"contains 'notes.txt'; give a new or empty folder"):
        ProfileStore(tmp_path, "one", part=Part(1, 2))


# --- processes


def started(source: Path, folder: Path, level: str, part: Part, tokens: Tokens) -> subprocess.Popen[str]:
    shape = (*tokens.sequences.shape, SMALLEST.vocab_size)
    arguments = [str(each) for each in (TESTS, source, folder, level, f"{part.index}/{part.count}", *shape)]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_processes_side_by_side_give_the_bytes_of_one(source: Path, tmp_path: Path) -> None:
    profiled(source, tmp_path / "one", QUICK)
    parts = [started(source, tmp_path / "two", "none", Part(index, 2), TOKENS) for index in (1, 2)]
    for process in parts:
        ended(process)
    assert folder_bytes(tmp_path / "two") == folder_bytes(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["fast", "full", "exact"])
def test_parts_give_the_same_sensitivity(source: Path, tmp_path: Path, level: Any) -> None:
    options = ProfileOptions(level)
    profiled(source, tmp_path / "one", options)
    for num_parts in (1, 2, 3):
        folder = tmp_path / str(num_parts)
        run_in_turns(source, folder, options, num_parts, most=60)
        assert folder_bytes(folder) == folder_bytes(tmp_path / "one"), num_parts


@pytest.mark.slow
@pytest.mark.parametrize("shape", FAMILIES, ids=str)
def test_parts_of_other_families_give_the_same_bytes(shape: Tiny, tmp_path: Path) -> None:
    source, options = write(shape, tmp_path / "source"), ProfileOptions("full")
    profiled(source, tmp_path / "one", options)
    for num_parts in (2, 3):
        folder = tmp_path / str(num_parts)
        run_in_turns(source, folder, options, num_parts, most=60)
        assert folder_bytes(folder) == folder_bytes(tmp_path / "one"), num_parts


@pytest.mark.slow
def test_processes_killed_for_good_and_started_again_give_the_bytes_of_one(source: Path, tmp_path: Path) -> None:
    chance, level = random.Random(0), "exact"
    profiled(source, tmp_path / "one", ProfileOptions(level))
    expected = folder_bytes(tmp_path / "one")
    for number in range(2):
        folder, count = tmp_path / str(number), 3
        processes = {index: started(source, folder, level, Part(index, count), TOKENS) for index in range(1, count + 1)}
        time.sleep(4)
        for index, comes_back in zip(chance.sample(range(1, count + 1), 2), (number % 2 > 0, False), strict=True):
            time.sleep(chance.random() * 4)
            with processes.pop(index) as killed:
                killed.kill()
            if comes_back:
                processes[index] = started(source, folder, level, Part(index, count), TOKENS)
        for process in processes.values():
            ended(process)
        assert folder_bytes(folder) == expected, number


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_their_items(workers: int) -> None:
    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))  # later ones are ready before earlier ones
        return item * item

    assert list(in_order(work, range(12), workers)) == [item * item for item in range(12)]


def test_no_more_is_begun_than_workers_and_one_that_waits() -> None:
    begun: list[int] = []
    results = in_order(lambda item: begun.append(item) or item, range(20), 2)  # type: ignore[func-returns-value]
    assert next(results) == 0
    time.sleep(0.05)
    assert len(begun) <= 4
    assert list(results) == list(range(1, 20))


def test_workers_are_in_inference_mode_with_their_share_of_torchs_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = list(in_order(lambda _: (torch.is_inference_mode_enabled(), torch.get_num_threads()), range(4), 2))
        assert found == [(True, 2)] * 4 and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_an_error_in_one_ends_all_and_leaves_no_thread() -> None:
    def work(item: int) -> int:
        if item == 3:
            raise ValueError("item 3")
        return item

    with pytest.raises(ValueError, match="item 3"):
        list(in_order(work, range(10), 2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("calib")]


@pytest.mark.parametrize(("d", "f", "expected"), [(64, 48, 4), (2048, 768, 3), (4096, 14336, 1)])
def test_large_experts_are_left_to_torchs_threads(d: int, f: int, expected: int) -> None:
    spec = replace(GROUPED, hidden_size=d, expert=replace(GROUPED.expert, intermediate_size=f))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert num_workers(spec) == expected  # of 64 MiB: 37 KB, 18.9 MB and 704 MB an expert
    finally:
        torch.set_num_threads(before)
