"""A conversion in parts, whichever of them come, die or come late, ends in the bytes of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.killing import different_files, files_in, nothing, quick_plan
from support.models import TinyMixtral
from support.profiles import StoppedError, profiled, random_tokens
from support.waiting import HANG_S

from moe_pack.calib.profile import Profile
from moe_pack.convert import ConversionResult
from moe_pack.convert.account import Preparation
from moe_pack.convert.pipeline import convert
from moe_pack.formats import ConversionError, Pack, trellis_format, uniform_plan
from moe_pack.formats.base.commands import Part
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.manifests import Digests
from moe_pack.formats.pack.reader import audit
from moe_pack.formats.pack.writer import SEALING_FILE, Step, await_parts, encode_line

MODEL = TinyMixtral(64, 128, num_layers=3, num_experts=5, vocab_size=96)
OnStep = Callable[[Step], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("parts") / "source")


@pytest.fixture(scope="module")
def profile(source: Path) -> Profile:
    return profiled(source, source.parent / "profile", random_tokens(6, 32, 96))


def made(
    source: Path, out: Path, part: Part | None, on_step: OnStep = nothing, profile: Profile | None = None
) -> ConversionResult:
    checkpoint = Checkpoint(source)
    try:
        plan = quick_plan(checkpoint)
        if profile is not None:
            two_bits = trellis_format(4, 0)
            plan = uniform_plan(checkpoint.spec, "up", two_bits, two_bits, quantizer="calibrated")
        return convert(checkpoint, plan, out, 2, on_step=on_step, prepared=Preparation(calibration=profile), part=part)
    finally:
        checkpoint.close()


def at_once(source: Path, out: Path, num_parts: int, profile: Profile | None = None) -> list[ConversionResult]:
    with ThreadPoolExecutor(num_parts) as pool:
        parts = [Part(index, num_parts) for index in range(1, num_parts + 1)]
        return list(pool.map(lambda part: made(source, out, part, profile=profile), parts))


def stopped_at(number: int) -> OnStep:
    def on_step(step: Step) -> None:
        if step.number == number:
            raise StoppedError(step.action)

    return on_step


def whole_of(source: Path, folder: Path, profile: Profile | None = None) -> dict[str, bytes]:
    made(source, folder, None, profile=profile)
    return files_in(folder)


def test_any_number_of_parts_at_once_writes_the_pack_of_one_process(source: Path, tmp_path: Path) -> None:
    expected = whole_of(source, tmp_path / "whole")
    for num_parts in (1, 2, 3, 5):
        out = tmp_path / f"of-{num_parts}"
        results = at_once(source, out, num_parts)
        assert different_files(files_in(out), expected) == [], num_parts
        assert sum(result.written for result in results) == 1, num_parts


@pytest.mark.slow
def test_sequential_calibration_in_parts_gives_the_same_pack(source: Path, profile: Profile, tmp_path: Path) -> None:
    expected = whole_of(source, tmp_path / "whole", profile)
    for num_parts in (2, 3):
        out = tmp_path / f"of-{num_parts}"
        at_once(source, out, num_parts, profile)
        assert different_files(files_in(out), expected) == [], num_parts
    with Pack(tmp_path / "of-3") as pack:
        audit(pack)


def test_a_part_makes_what_parts_that_never_come_have_left(source: Path, tmp_path: Path) -> None:
    expected = whole_of(source, tmp_path / "whole")
    result = made(source, tmp_path / "alone", Part(2, 3))
    assert result.written and different_files(files_in(tmp_path / "alone"), expected) == []


@pytest.mark.slow
def test_a_part_that_stops_anywhere_is_replaced_or_resumed(source: Path, tmp_path: Path) -> None:
    expected = whole_of(source, tmp_path / "whole")
    others: tuple[Part | None, ...] = (Part(2, 2), Part(1, 2), Part(3, 5), None)
    steps: list[Step] = []
    made(source, tmp_path / "counted", Part(1, 2), steps.append)
    sealing = next(step.number for step in steps if step.path == SEALING_FILE)
    for number in range(3, sealing, 7):
        out, other = tmp_path / f"stopped-{number}", others[number % len(others)]
        with pytest.raises(StoppedError):
            made(source, out, Part(1, 2), stopped_at(number))
        made(source, out, other)
        assert different_files(files_in(out), expected) == [], (number, steps[number - 1], other)


def test_a_part_that_comes_late_finds_the_pack(source: Path, tmp_path: Path) -> None:
    made(source, tmp_path / "out", Part(1, 2))
    before = files_in(tmp_path / "out")
    result = made(source, tmp_path / "out", Part(2, 2))
    assert not result.written and files_in(tmp_path / "out") == before


def test_a_part_is_written_by_one_process_and_not_next_to_a_whole_conversion(source: Path, tmp_path: Path) -> None:
    out, reached, goes_on = tmp_path / "out", threading.Event(), threading.Event()

    def held(step: Step) -> None:
        if step.path.endswith(".journal") and step.action == "write":
            reached.set()
            assert goes_on.wait(HANG_S)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(made, source, out, Part(1, 2), held)
        assert reached.wait(HANG_S)
        try:
            with pytest.raises(ConversionError, match="another process is writing part 1/2 in this folder"):
                made(source, out, Part(1, 2))
            with pytest.raises(ConversionError, match="another conversion is writing in this folder"):
                made(source, out, None)
        finally:
            goes_on.set()
        assert first.result().written


def test_what_follows_a_sealed_pack_waits_for_the_other_parts(source: Path, tmp_path: Path) -> None:
    out, reached, goes_on = tmp_path / "out", threading.Event(), threading.Event()

    def held(step: Step) -> None:
        if step.path.endswith(".journal") and step.action == "write" and not reached.is_set():
            reached.set()
            assert goes_on.wait(HANG_S)

    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(made, source, out, Part(1, 2), held)
        assert reached.wait(HANG_S)
        try:
            assert made(source, out, Part(2, 2)).written
            assert not await_parts(out, 0.0)
            waiting = pool.submit(await_parts, out, 60.0)
        finally:
            goes_on.set()
        assert waiting.result() and not slow.result().written


def test_parts_of_another_conversion_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        made(source, out, Part(1, 2), stopped_at(12))
    checkpoint = Checkpoint(source)
    plan = replace(quick_plan(checkpoint), quantizer="absmax")
    before = files_in(out)
    with pytest.raises(ConversionError, match="contains an unfinished conversion of another source or with other opt"):
        convert(checkpoint, plan, out, 1, part=Part(2, 2))
    checkpoint.close()
    assert files_in(out) == before


def test_other_bytes_of_the_same_item_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def on_step(step: Step) -> None:
        if step.path == "experts-001.safetensors" and step.action == "write":
            raise StoppedError

    with pytest.raises(StoppedError):
        made(source, out, Part(1, 2), on_step)
    header = (out / "conversion-1-of-2.journal").read_bytes().splitlines(keepends=True)[0]
    number, crc32, sha256, _ = header.decode().split(" ")

    other = encode_line(int(number), Digests(int(crc32, 16) ^ 1, bytes.fromhex(sha256)))
    (out / "conversion-2-of-2.journal").write_bytes(other)
    with pytest.raises(ConversionError, match="two parts have made different bytes of the same header"):
        made(source, out, Part(1, 2))
    (out / "conversion-2-of-2.journal").write_bytes(header)  # the same bytes are no fault
    assert made(source, out, Part(1, 2)).written


@pytest.mark.slow
def test_a_part_seals_the_pack_where_the_one_that_began_has_died(source: Path, tmp_path: Path) -> None:
    expected = whole_of(source, tmp_path / "whole")
    steps: list[Step] = []
    made(source, tmp_path / "counted", Part(1, 2), steps.append)
    sealing = next(step.number for step in steps if step.path == SEALING_FILE)
    for number in range(sealing + 1, len(steps) + 1, 9):
        out = tmp_path / f"stopped-{number}"
        with pytest.raises(StoppedError):
            made(source, out, Part(1, 2), stopped_at(number))
        made(source, out, Part(2, 2))  # waits ten seconds for the part that died
        assert different_files(files_in(out), expected) == [], (number, steps[number - 1])
