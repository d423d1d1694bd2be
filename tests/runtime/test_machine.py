"""Times from measured rates, by hand and against simulated reads; facts kept between commands."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import case
from support.models import PackMaker

from moe_pack.formats import Pack, RunError
from moe_pack.runtime import (
    DiskFacts,
    Engine,
    EngineOptions,
    FixedCosts,
    MachineFacts,
    WidthRate,
    load_facts,
    save_facts,
)
from moe_pack.runtime.engine import machine
from moe_pack.runtime.engine.machine import CpuFacts, LinkFacts, ReadRate, SizedRate, facts_file
from moe_pack.runtime.offload.budgets import whole_bytes

SIZES = [4096 << i for i in range(13)]


CPU = CpuFacts(8, "avx2", 1e10, 3e10, (WidthRate(2, 1e10), WidthRate(4, 2e10)), (WidthRate(16, 3e10),), 1e-8)
FIXED = FixedCosts(1e-4, 2e-4, 3e-5, 4e-5, 5e-5)


def drive(curve: list[tuple[int, float]]) -> DiskFacts:
    points = tuple(SizedRate(size, rate) for size, rate in curve)
    alone = tuple(SizedRate(size, rate / 4) for size, rate in curve)
    best = tuple(ReadRate("pread", size, 4, rate) for size, rate in curve)
    return DiskFacts("vda", 1 << 30, "pread", 4, points, alone, best)


def drive_with_cost(read_seconds: float, byte_seconds: float) -> DiskFacts:
    """A disk on which a read of s bytes takes `read_seconds + s * byte_seconds`."""
    return drive([(size, size / (read_seconds + size * byte_seconds)) for size in SIZES])


def facts() -> MachineFacts:
    link = LinkFacts("some GPU", 12 << 30, (SizedRate(65536, 4e9), SizedRate(1 << 20, 12e9)))
    return MachineFacts("2026-11-22", drive([(4096, 1e8), (65536, 1e9)]), CPU, link, FIXED)


def test_rates_between_sizes_are_straight_in_both_logarithms() -> None:
    found = drive([(4096, 100.0), (16384, 400.0), (65536, 900.0)])
    assert [found.rate(size) for size in (4096, 16384, 65536)] == pytest.approx([100, 400, 900])
    assert found.rate(8192) == pytest.approx(200)  # half-way: the geometric mean of 100 and 400
    assert found.rate(32768) == pytest.approx(600)  # of 400 and 900


def test_smaller_reads_take_as_long_as_the_smallest_and_larger_ones_go_on_at_the_rate_of_the_largest() -> None:
    found = drive([(4096, 4096.0), (16384, 8192.0)])
    assert found.seconds(1, 16) == found.seconds(1, 4096) == pytest.approx(1)
    assert found.seconds(3, 8 * 16384) == pytest.approx(48)
    assert found.seconds(0, 4096) == found.seconds(5, 0) == 0


def test_few_reads_take_as_long_as_one_alone_and_many_as_long_as_the_drive_needs() -> None:
    found = drive([(4096, 4096.0)])  # one alone at a quarter of that rate
    assert [found.seconds_for_few(n, 4096) for n in (0, 1, 4, 5)] == pytest.approx([0, 4, 4, 5])


def test_the_smallest_efficient_read_has_half_of_the_best_rate() -> None:
    assert drive([(4096, 49.9), (16384, 50.0), (65536, 100.0), (262144, 90.0)]).smallest_efficient_bytes == 16384
    assert drive([(4096, 10.0)]).smallest_efficient_bytes == 4096


def simulated(found: DiskFacts, share: float, row_bytes: int, num_rows: int, most_gap: int, seed: int) -> float:
    """Seconds for the rows that run by chance, those with at most so many between them read together."""
    random = np.random.default_rng(seed)
    running = np.flatnonzero(random.random(num_rows) < share)
    if not len(running):
        return 0.0
    base, total = int(random.integers(0, 256)) * 16, 0.0
    for group in np.split(running, np.flatnonzero(np.diff(running) > most_gap + 1) + 1):
        begin = (base + int(group[0]) * row_bytes) // 4096 * 4096
        end = -(-(base + (int(group[-1]) + 1) * row_bytes) // 4096) * 4096
        total += found.seconds(1, end - begin)
    return total


def test_rows_take_as_long_as_simulated_reads_merged_in_the_best_way() -> None:
    """The mean of draws; the model takes reads of their mean size, which with this cost makes no difference."""
    for row_bytes, share in product([528, 4096, 4624, 20000], [0.01, 0.1, 0.3, 0.6, 0.9]):
        with case(row_bytes, share):
            found, num_rows = drive_with_cost(20e-6, 1e-9), 1500
            means = []
            for most_gap in (0, 1, 3, 7, 15, 31, 63, 127, num_rows):
                means.append(
                    np.mean([simulated(found, share, row_bytes, num_rows, most_gap, seed) for seed in range(6)])
                )
            # Interpolating between sizes costs a few percent, draws another one; rows that share a block do the rest.
            assert found.seconds_for_rows(share, row_bytes, num_rows) == pytest.approx(min(means), rel=0.1)


def test_rows_that_do_not_run_take_no_time() -> None:
    assert drive_with_cost(1e-4, 1e-9).seconds_for_rows(0.0, 4096, 1000) == 0.0


def test_all_rows_are_one_read() -> None:
    found = drive_with_cost(1e-4, 1e-9)
    assert found.seconds_for_rows(1.0, 4096, 1000) == pytest.approx(found.seconds(1, 4096 * 1000 + 4080))


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_where_every_read_takes_as_long_rows_are_read_as_one(share: float) -> None:
    found = drive_with_cost(1e-2, 0.0)
    assert found.seconds_for_rows(share, 4096, 1000) == pytest.approx(1e-2, rel=1e-3)  # gaps longer than 1023 rows
    assert found.seconds(1, 4096 * 1000) == pytest.approx(1e-2)


def test_where_reads_cost_their_bytes_alone_reading_rows_alone_pays_until_nearly_all_run() -> None:
    """By hand, for 1000 rows of 4096 bytes, none merged but neighbours, each read 4080 bytes longer than its rows:

    at 97%   970 * 4096 + (1 + 969 * 0.03) * 4080 = 4,095,806
    at 98%   980 * 4096 + (1 + 979 * 0.02) * 4080 = 4,098,046, and all of them have 4,096,000
    """
    found = drive_with_cost(0.0, 1e-9)
    assert found.seconds_for_rows(0.97, 4096, 1000) == pytest.approx(4095806e-9, rel=1e-6)
    assert found.cutover(4096, 1000, 4096 * 1000) == 0.97


def test_reading_rows_alone_pays_up_to_a_share_that_falls_with_the_cost_of_a_read() -> None:
    shares = [drive_with_cost(cost, 1e-9).cutover(4608, 14336, 14336 * 4608) for cost in (1e-6, 1e-5, 1e-4, 1e-3)]
    assert shares == sorted(shares, reverse=True) and 1 > shares[0] > shares[-1] > 0


def test_facts_are_read_back_as_they_were_kept(tmp_path: Path) -> None:
    kept = save_facts(facts(), tmp_path / "new" / "folder", tmp_path)
    assert kept == facts_file(tmp_path / "new" / "folder", tmp_path)
    assert load_facts(tmp_path / "new" / "folder", tmp_path) == facts()
    assert list(kept.parent.iterdir()) == [kept], "nothing else is left"
    without = MachineFacts("2026-11-23", facts().drive, CpuFacts(1, None, None, None, (), (), None), None)
    save_facts(without, kept.parent, tmp_path)
    assert load_facts(kept.parent, tmp_path) == without


def test_where_nothing_is_kept_there_are_no_facts(tmp_path: Path) -> None:
    assert load_facts(tmp_path, tmp_path) is None


def test_paths_of_one_file_system_share_their_facts_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert facts_file(tmp_path, tmp_path / "below") == facts_file(tmp_path, tmp_path)
    assert facts_file(tmp_path, Path("/proc")) != facts_file(tmp_path, tmp_path)


def test_a_path_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing: cannot be found \(No such file or directory\)$"):
        load_facts(tmp_path, tmp_path / "missing")


def test_facts_of_another_version_are_as_good_as_missing(tmp_path: Path) -> None:
    file = save_facts(facts(), tmp_path, tmp_path)
    file.write_text('{"version": 1, "whatever": 1}')
    assert load_facts(tmp_path, tmp_path) is None


def test_damaged_facts_are_refused_with_what_to_do(new_folder: Callable[[], Path]) -> None:
    rate = "facts: cpu: experts[0]: rate: found 0.0, expected at least 0.001 and at most 1e+18"
    none = "sizes are [], expected positive sizes in rising order"
    falling = "drive: curve: sizes are [65536, 4096], expected positive sizes in rising order"
    changes: tuple[tuple[str, Callable[[dict[str, Any]], object], str], ...] = (
        ("drive", lambda drive: drive["curve"].clear(), f"drive: curve: {none}"),
        ("drive", lambda drive: drive["curve"].reverse(), falling),
        ("drive", lambda drive: drive["alone"].clear(), f"drive: alone: {none}"),
        ("fixed", lambda fixed: fixed.update(miss_s=-1e-6), "facts: fixed: miss_s: found -1e-06, expected at least 0"),
        ("cpu", lambda cpu: cpu["experts"][0].update(rate=0.0), rate),
        ("drive", lambda drive: drive.update(colour="red"), "facts: drive: unknown key 'colour'"),
    )
    for part, damage, message in changes:
        case_folder = new_folder()
        with case(part, message):
            file = save_facts(facts(), case_folder, case_folder)
            values = json.loads(file.read_bytes())
            damage(values["facts"][part])
            file.write_text(json.dumps(values))
            expected = f"{file.name}: {message}; remove {file}, or run moe-pack doctor again"
            with pytest.raises(RunError, match=f"^{re.escape(expected)}$"):
                load_facts(case_folder, case_folder)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match=r"doctor-.*\.json: cannot be written \(Not a directory\)$"):
        save_facts(facts(), tmp_path / "file" / "cache", tmp_path)


def test_a_pack_is_mapped_in_nine_tenths_of_the_free_memory(
    demo_pack: PackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A little more than that offloads it, in three quarters; an option of offload takes no more than these."""
    with Pack(demo_pack("up", 4)) as opened:
        options, context = EngineOptions(device="cpu"), 64
        needed = whole_bytes(opened.layout, context, 0)
        for free, own, expected in (
            (needed * 10 // 9 + 2, options, None),
            (needed * 10 // 9 - 2, options, (needed * 10 // 9 - 2) * 3 // 4),
            (needed * 10 // 9 + 2, replace(options, policy="lru"), (needed * 10 // 9 + 2) * 3 // 4),
            (2 * needed, replace(options, policy="lru"), needed),
        ):
            with case(free / needed, own.policy):
                monkeypatch.setattr(machine, "available_bytes", lambda free=free: free)
                with Engine(opened, own, context) as engine:
                    found = None if engine.plan is None else engine.plan.budget
                assert found == expected
