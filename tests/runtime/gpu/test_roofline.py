"""The page of predictions for the GPU's engine: its arithmetic, its counts of launches, and that it is up to date."""

import json
import os
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from gpu.flights import MEASURED, START_S, ReadRates, read_rate, read_rates
from gpu.launches import CPU_CALL, Launch, LayerLaunches, TokenLaunches, count
from gpu.packs import MIXTRAL, QWEN3, QWEN36, PackRequest
from gpu.roofline import (
    CONTEXT_TOKENS,
    Launches,
    LayerBytes,
    Rates,
    Setup,
    Subject,
    forks,
    kernel_times,
    moved_bytes,
    predict,
    pulled_pass,
)
from gpu.runs import read_runs
from gpu_report import FOLDER, measured_page
from gpu_roofline import COUNTS, Counts, measured_ms, predictions
from support.cases import case
from support.synthetic import plan_for, small

from moe_pack.convert.plan.gpu_speed import estimate_on_gpu
from moe_pack.convert.plan.machines import GPUS, machine_of_gpu
from moe_pack.formats import dense_roles
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.placements import GpuPlacement, Misses
from moe_pack.runtime.offload import Passes

READ = ReadRates(dense=50.0, head=100.0, select=100.0, records=200.0)
RATES = Rates(
    memory=100.0,
    link=10.0,
    cpu=20.0,
    read=READ,
    launch_s=1.0,
    layer_launch_s=0.5,
    call_s=3.0,
    latency_s=2.0,
)
LAUNCHES = Launches(layer=7, cpu=2, link=1, others=0)


def layer_bytes(pulled: float, left: float, selectors: float = 0.0) -> LayerBytes:
    """One token and one layer; a second layer lacks nothing."""
    values = {"select": (300, 300), "here": (400, 400), "pulled": (pulled, 0), "left": (left, 0)}
    arrays = {name: np.array([each], float) for name, each in values.items()}
    return LayerBytes(200, 100, 50, **arrays, selectors=np.array([[selectors, 0.0]]))


def test_a_layer_takes_its_serial_part_and_the_longest_fork() -> None:
    is_split = np.array([True, False])
    found = forks(layer_bytes(pulled=60, left=100), LAUNCHES, RATES, False, is_split)
    # 7 launches, 200 dense bytes, 100 of attention, 300 of selectors, 50 of partial sums; twice that of pulled records.
    serial = 3.5 + 2 + 4 + 1 + 3 + 0.5
    np.testing.assert_allclose(found.serial, [[serial + 0.5, serial]])
    np.testing.assert_allclose(found.here, [[2 + 0.5, 2 + 0.5]])
    np.testing.assert_allclose(found.cpu, [[3 + 2 + 100 / 20, 0]])
    np.testing.assert_allclose(found.link, [[1 + 60 / 10 + 0.3 + 0.5, 0]])
    np.testing.assert_allclose(found.seconds, [[serial + 0.5 + 10, serial + 2.5]])


def test_a_layer_that_leaves_nothing_to_the_link_has_no_such_fork() -> None:
    found = forks(layer_bytes(pulled=0, left=0), LAUNCHES, RATES, False, np.array([True, True]))
    assert found.link.tolist() == [[0, 0]] and found.cpu.tolist() == [[5, 5]]


def test_without_forks_the_link_comes_first() -> None:
    found = forks(layer_bytes(pulled=60, left=0, selectors=40), LAUNCHES, RATES, True, np.array([True, True]))
    serial = 3.5 + 2 + 4 + 1 + 3 + 0.5
    np.testing.assert_allclose(found.serial, [[serial + (60 + 40) / 10 + 1, serial]])
    np.testing.assert_allclose(found.here, [[2 + 0.5 + 0.3, 2 + 0.5]])
    assert not found.cpu.any() and not found.link.any()


def subject(*routes: tuple[int, int]) -> Subject:
    """A layer of three experts with 64 neurons, of which half run; a token chooses the first two if none is given."""
    spec = small(num_layers=1, num_experts=3)
    layout = pack_layout(spec, plan_for(spec), ["BF16"] * len(dense_roles(spec)))
    request = PackRequest("small", "", plan_for, 0.5)
    return Subject(
        request, layout, np.ones((1, 3)), np.ones((1, 3, 4)), np.array([[each] for each in routes or [(0, 1)]])
    )


def placement(misses: Misses, has_selector: bool) -> GpuPlacement:
    """32 rows of the first expert and 16 of the second are resident; 4 of each can be pulled."""
    first_dynamic, zeros = np.array([[32, 16 * has_selector, 64]]), np.zeros(1, np.int64)
    return GpuPlacement(
        misses, np.array([[True, has_selector, True]]), first_dynamic, zeros, slot_bytes=zeros,
        num_scratch=zeros + 4, num_ahead=zeros, scratch_bytes=0, ahead_bytes=0, dynamic_bytes=1,
        other_bytes=0, offset_bytes=4, num_rows=64, num_active=2, num_predicted=0,
    )  # fmt: skip


def test_bytes_of_neurons_by_where_their_records_are() -> None:
    one, runs = subject(), subject().runs()
    expert = one.layout.experts[0][0]
    assert expert.selector is not None
    record, selector = expert.records.row_bytes, 64 * expert.selector.row_bytes
    found = moved_bytes(one, placement("split", True), runs, 0.125, num_sms=4)
    # Half of 32 and 48 missing records run. Of these an eighth is pulled, or four.
    np.testing.assert_allclose(found.here, [[(16 + 8) * (record + 8)]])
    np.testing.assert_allclose(found.pulled, [[0.125 * (16 + 24) * record]])
    np.testing.assert_allclose(found.left, [[0.875 * 40 * record]])
    np.testing.assert_allclose(found.select, [[2 * (selector + 2 * 4 * 64)]])
    assert found.partials == 4 * 2 * num_partials(2, 64, 4) * 256
    most = moved_bytes(one, placement("split", True), runs, 1.0, num_sms=4)
    np.testing.assert_allclose(most.pulled, [[(4 + 4) * record]])

    pulled = moved_bytes(one, placement("pull", True), runs, 0.25, num_sms=4)
    np.testing.assert_allclose(pulled.pulled, [[40 * record]])
    assert not pulled.left.any() and not pulled.selectors.any()


def test_bytes_of_an_expert_whose_selector_is_missing() -> None:
    one, runs = subject(), subject().runs()
    expert = one.layout.experts[0][0]
    record, selector = expert.records.row_bytes, expert.selector_bytes
    found = moved_bytes(one, placement("split", False), runs, 0.0, num_sms=4)
    # Half of the first expert's 32 missing records run; the CPU has all of the second.
    np.testing.assert_allclose(found.here, [[16 * (record + 8)]])
    np.testing.assert_allclose(found.left, [[selector + (16 + 32) * record]])
    np.testing.assert_allclose(found.select, [[selector + 2 * 4 * 64]])

    pulled = moved_bytes(one, placement("pull", False), runs, 0.0, num_sms=4)
    np.testing.assert_allclose(pulled.selectors, [[selector]])
    np.testing.assert_allclose(pulled.pulled, [[(16 + 32) * record]])


def test_rows_of_a_pass_read_what_they_share_once() -> None:
    """Two tokens choose the experts 0 and 1, and 1 and 2, of which a token alone reads two."""
    pair, alone = subject((0, 1), (1, 2)), subject((0, 1))
    one, found = (
        moved_bytes(each, each.place(1 << 30, "auto"), each.runs(), 0.0, num_sms=4, num_rows=number)
        for number, each in enumerate((alone, pair), 1)
    )
    np.testing.assert_allclose(found.select, 1.5 * one.select)
    np.testing.assert_allclose(found.here, 1.5 * one.here)
    assert (found.attention, found.partials, found.dense) == (2 * one.attention, 2 * one.partials, one.dense)

    # Where rows are missing, each row reads the memory for itself, and what both lack comes once.
    missing = placement("pull", False)
    found = moved_bytes(pair, missing, pair.runs(), 0.0, num_sms=4, num_rows=2)
    each = moved_bytes(pair, missing, pair.runs(), 0.0, num_sms=4)
    np.testing.assert_allclose(found.here, each.here.sum(axis=0, keepdims=True))
    np.testing.assert_allclose(found.pulled, each.pulled[:1])
    np.testing.assert_allclose(found.selectors, each.selectors[:1])


def test_rows_are_faster_together_and_slower_each() -> None:
    for request in (MIXTRAL, QWEN3, QWEN36):
        one, counts = Subject.of(request), Counts.read(COUNTS)
        resident = [
            sum(part.seconds for part in kernel_times(one, "H200", counts.of(request.model, n)["resident"], num_rows=n))
            for n in (1, 2, 4, 8)
        ]
        capped = [pulled_pass(one, "H200", 11 << 30, counts.of(request.model, n)["pull"])[0] for n in (1, 2, 4, 8)]
        for less, more in (pair for seconds in (resident, capped) for pair in pairwise(seconds)):
            with case(request.name, less):
                assert less < more < 2 * less


def test_launches_take_as_long_as_they_were_measured_within_a_fifth() -> None:
    for each in MEASURED:
        with case(each.name):
            rate = read_rate("H200", each.flight_bytes, each.weights_a_byte)
            assert 0.8 < (START_S + each.num_bytes / rate) / each.seconds < 1.2


def test_grids_of_256_programs_are_predicted_at_the_measured_speed_and_waves_above_it() -> None:
    """309 to 317 tokens/s were measured on an H200 with everything resident, of both models (docs/benchmarks)."""
    for request in (MIXTRAL, QWEN3):
        with case(request.name):
            one, counted = Subject.of(request), Counts.read(COUNTS).of(request.model)["resident"]
            old, new = (
                1 / sum(part.seconds for part in kernel_times(one, "H200", counted, grids))
                for grids in ("256 programs", "waves")
            )
            assert 309 / 1.15 < old < 317 * 1.15
            assert new > 1.08 * old


def test_rates_of_rows_are_below_a_copys_and_no_lower_with_waves() -> None:
    layout = Subject.of(MIXTRAL).layout
    for gpu in ("RTX 3090", "RTX 4090", "H100", "H200"):
        few, waves = read_rates(layout, gpu, "256 programs"), read_rates(layout, gpu, "waves")
        for name in ("dense", "head", "select", "records"):
            with case(gpu, name):
                assert 0.99 * getattr(few, name) <= getattr(waves, name) < GPUS[gpu].memory_rate


def test_a_plan_estimates_what_the_page_predicts() -> None:
    """The same bytes. A plan assumes 80% of the memory's rate and no latency of launches: it is faster by a third."""
    for request in (MIXTRAL, QWEN3):
        one, launches = Subject.of(request), Counts.read(COUNTS).of(request.model)
        passes = Passes(one.routes.astype("<u2"), np.ones(len(one.routes), np.uint32), None, one.popularity)
        for gpu, gib in product(("RTX 3090", "RTX 4090"), (8, 11, 16, 22)):
            with case(request.name, gpu, gib):
                predicted = predict(one, Setup(gpu, "DDR5", gib << 30, "auto"), launches)
                placed, machine = one.place(one.expert_bytes(gib << 30), "auto"), machine_of_gpu(GPUS[gpu], None, None)
                found = estimate_on_gpu(one.layout, placed, machine, one.popularity, one.runs(), passes, CONTEXT_TOKENS)
                assert 0.6 * predicted.token_s < found.seconds.total < predicted.token_s


def _speed(budget_gib: int, ms: float, **changed: object) -> dict[str, object]:
    wanted = {"misses": "auto", "policy": "auto", "ram_bytes": None, "budget_bytes": budget_gib << 30}
    figures = {"prompt_tokens": 16, "decode_per_s": 1000 / ms, "median_token_ms": ms}
    return {"kind": "Speed", "pack": "a", "wanted": wanted | changed} | figures


def test_measured_tokens_are_found_of_the_last_commit_with_the_defaults() -> None:
    gpu = {"name": "NVIDIA GeForce RTX 3090"}
    last = [
        {"kind": "Filled", "pack": "a"},
        _speed(8, 12.5),
        _speed(8, 9.0, misses="pull"),
        _speed(8, 8.0, policy="corm"),
    ]
    calls = (
        (gpu, "old", "2026-11-25", [_speed(8, 40.0), _speed(11, 30.0)]),
        (gpu, "new", "2026-11-26", [*last, _speed(8, 7.0, ram_bytes=1 << 30)]),
        (None, "new", "2026-11-26", [_speed(8, 1.0)]),
    )
    wholes = [
        {
            "rehearsal": each is None, "gpu": each, "cores": 2, "cpu": "", "revision": revision,
            "versions": {"torch": "", "triton": ""},
            "parts": [{"part": "mixtral", "state": "done", "date": date, "errors": {}, "rows": rows}],
        }
        for each, revision, date, rows in calls
    ]  # fmt: skip
    assert measured_ms(read_runs(wholes)) == {("RTX 3090", "a", 8 << 30): 12.5}


def test_launches_are_those_on_the_page(tmp_path: Path) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("launches are counted in plain memory")
    for model, num_rows in (("mixtral-8x7b", 1), ("qwen3.6-35b-a3b", 4)):
        with case(model):
            found = count(model, tmp_path, num_rows)
            assert found == list(Counts.read(COUNTS).of(model, num_rows).values())
            by_mode = {each.mode: each for each in found}
            assert all(each.launches[Launch("cpu", CPU_CALL)] == 1 for each in by_mode["split"].layers)
            assert by_mode["pull"].total(lambda launch: launch.name == CPU_CALL) == 0
    assert [(each.kind, each.number) for each in found[0].layers] == [("attention", 10), ("mixer", 30)]


def test_counts_come_back_from_json() -> None:
    layers = (
        LayerLaunches("attention", 8, {Launch("main", "x"): 2}),
        LayerLaunches("mixer", 24, {Launch("cpu", "x"): 3}),
    )
    counted = TokenLaunches("a", "pull", 4, layers, {Launch("link", "y"): 1})
    assert TokenLaunches.from_json(json.loads(json.dumps(counted.as_json()))) == counted
    assert counted.total(lambda launch: True) == 8 * 2 + 24 * 3 + 1
    assert Launches.of(counted) == Launches(layer=0.5, cpu=2.25, link=0.0, others=1)


def test_the_page_is_what_the_report_writes_of_the_files_beside_it() -> None:
    runs = read_runs(json.loads(path.read_text()) for path in sorted(FOLDER.glob("gpu-*.json")))
    written = (FOLDER / "gpu.md").read_text()
    measured = measured_page(runs, "gpu.svg")
    assert written.startswith(measured)
    assert written.removeprefix(f"{measured}\n") == predictions(runs)


def test_no_file_of_raw_results_is_long() -> None:
    for path in FOLDER.glob("*.json*"):
        with case(path.name):
            assert len(path.read_text().splitlines()) < 100
