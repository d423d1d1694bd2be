"""The speed of a pack on a CPU: waiting against a simulation, rows against draws, bytes against the engine's."""

import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support.cases import case
from support.models import DEMO_MODEL, pack
from support.streaming import budget_for
from support.synthetic import character, small
from support.synthetic import made as synthetic_pack
from support.tiers import steady_disk

from moe_pack.convert import measure_fixed_costs, skewed_popularity
from moe_pack.convert.plan.cpu_speed import (
    MAX_AGE,
    CpuTier,
    FetchCosts,
    Visits,
    estimate_on_cpu,
    expected_misses,
    fetched_from_disk,
    planned_heat,
    visits,
    waited,
)
from moe_pack.convert.plan.machines import Machine, assumed_cpu, machine_of_cpu, rate_of
from moe_pack.convert.plan.speed import RoutingFacts, dense_seconds, drawn_passes, expert_seconds
from moe_pack.formats import (
    BF16,
    DISK_BLOCK_BYTES,
    Pack,
    PackLayout,
    RunError,
    Selector,
    dense_roles,
    part_format,
    trellis_format,
)
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.formats.pack.plans import E5M2, FP8, MXFP4, TRELLIS_WIDTHS
from moe_pack.formats.parts.specs import cached_values
from moe_pack.runtime import USUAL_DISK, Engine, EngineOptions, FixedCosts, MachineFacts, WidthRate
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.engine.machine import CpuFacts
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import PRESETS, CacheFacts, OffloadedWeights, Passes, divide_budget, read_recording
from moe_pack.runtime.offload.replay import replay

FREE = FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0)
ELSEWHERE = np.zeros((4, 8), bool)  # no selector stays in memory


def machine(fixed: FixedCosts = FREE, row_s: float = 0.0, drive_rate: float = 1e9) -> Machine:
    rates = (WidthRate(2, 2e9), WidthRate(4, 4e9), WidthRate(16, 16e9))
    return Machine("cpu", "made up", rates, rates, row_s, 1e10, fixed, steady_disk(drive_rate))


def layout(selector_width: int = 4, record_width: int = 4, selector: Selector = "up") -> PackLayout:
    spec = model_spec(str(DEMO_MODEL))
    parts = [BF16 if width == 16 else part_format(width, 64) for width in (selector_width, record_width)]
    return pack_layout(spec, plan_of(spec, selector, *parts), ["BF16"] * len(dense_roles(spec)))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at 4 bit, every neuron running; not to be changed."""
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack(DEMO_MODEL, folder, group=64)
    return folder


def simulated(reads: list[float], computing: list[float], is_late: list[bool]) -> float:
    """When a layer ends whose reads follow each other evenly, and which computes what is there, then what comes."""
    now = sum(c for c, late in zip(computing, is_late, strict=True) if not late)
    late_ones = [c for c, late in zip(computing, is_late, strict=True) if late]
    for number, seconds in enumerate(late_ones):
        now = max(now, sum(reads) * (number + 1) / len(late_ones)) + seconds
    return now


def test_a_layer_waits_as_long_as_a_simulation_of_its_reads() -> None:
    for seed in range(20):
        with case(seed):
            rng = np.random.default_rng(seed)
            m, h = int(rng.integers(0, 4)), int(rng.integers(0, 4))
            compute, read = float(rng.uniform(0.1, 2)), rng.uniform(0.1, 2, m)
            keys = np.arange(m + h)
            ages = np.array([0] * m + [3] * h, np.int64)
            seconds = np.zeros((MAX_AGE + 1, 1, max(m + h, 1)))
            seconds[0, 0, :m] = read
            fetching = FetchCosts(seconds, seconds, np.zeros_like(seconds), np.zeros_like(seconds))
            found = Visits(1, np.zeros(m + h, np.int64), keys, ages)
            table = np.full((1, max(m + h, 1)), compute)
            end = simulated(read.tolist(), [compute] * (m + h), [True] * m + [False] * h)
            assert waited(found, table, fetching, np.zeros(1), 0.0) == pytest.approx(end - compute * (m + h), abs=1e-12)


def test_what_is_all_predicted_waits_for_what_a_layer_does_not_hide() -> None:
    seconds = np.zeros((MAX_AGE + 1, 1, 2))
    seconds[0] = 5.0
    fetching = FetchCosts(seconds, seconds, seconds, np.zeros_like(seconds))
    found = Visits(1, np.zeros(2, np.int64), np.arange(2), np.zeros(2, np.int64))
    assert waited(found, np.full((1, 2), 1.5), fetching, np.ones(1), 2.0) == pytest.approx(10 - (3 + 2))
    assert waited(found, np.full((1, 2), 1.5), fetching, np.ones(1), 20.0) == 0


def test_each_layer_waits_by_its_own_share_of_predicted_experts() -> None:
    """Two tokens through two layers, the first of which is never predicted: it waits for each read."""
    seconds = np.zeros((MAX_AGE + 1, 2, 1))
    seconds[0] = 5.0
    fetching = FetchCosts(seconds, seconds, seconds, np.zeros_like(seconds))
    found = Visits(2, np.arange(4), np.array([0, 1, 0, 1]), np.zeros(4, np.int64))
    assert waited(found, np.full((2, 1), 1.5), fetching, np.array([0.0, 1.0]), 2.0) == pytest.approx(2 * (5 + 1.5))


def test_one_read_takes_no_less_than_it_takes_alone() -> None:
    shape = (MAX_AGE + 1, 1, 1)
    found = Visits(1, np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
    fetching = FetchCosts(np.full(shape, 8.0), np.full(shape, 1.0), np.full(shape, 4.0), np.zeros(shape))
    assert waited(found, np.zeros((1, 1)), fetching, np.zeros(1), 0.0) == 4.0


def test_of_several_reads_only_the_first_has_to_be_waited_for_longer() -> None:
    shape = (MAX_AGE + 1, 1, 3)
    found = Visits(1, np.zeros(3, np.int64), np.arange(3), np.zeros(3, np.int64))
    fetching = FetchCosts(np.full(shape, 8.0), np.full(shape, 1.0), np.full(shape, 4.0), np.zeros(shape))
    assert waited(found, np.zeros((1, 3)), fetching, np.zeros(1), 0.0) == 3 * 1.0 + (4.0 - 1.0)


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_running_rows_read_as_many_blocks_as_draws_of_them_at_the_first_visit_and_the_third(share: float) -> None:
    """Independent neurons; blocks that are there already are not read again, and none is read over."""
    made = layout(2, 16)
    expert, num_blocks = made.experts[0][0], made.experts[0][0].records_bytes // 4096
    running = np.full((4, 8), share)
    # A disk on which every read costs its bytes alone: rows pay, gaps do not.
    fetching = fetched_from_disk(made, running, machine(), 1 << 20, ELSEWHERE)
    rng, row_bytes = np.random.default_rng(0), expert.records.row_bytes
    read = np.zeros(3)
    for _ in range(400):
        here = np.zeros(num_blocks + 1, bool)
        for visit in range(3):
            rows = np.flatnonzero(rng.random(expert.num_rows) < share)
            wanted = np.zeros_like(here)
            for row in rows.tolist():
                wanted[row * row_bytes // 4096 : ((row + 1) * row_bytes - 1) // 4096 + 1] = True
            read[visit] += (wanted & ~here).sum()
            here |= wanted
    first, _, third = fetching.num_bytes[:3, 0, 0]
    assert first - expert.selector_bytes == pytest.approx(4096 * read[0] / 400, rel=0.06)
    assert third == pytest.approx(4096 * read[2] / 400, rel=0.12, abs=1500)
    resident = fetched_from_disk(made, running, machine(), 1 << 20, ~ELSEWHERE)
    assert resident.num_bytes[0, 0, 0] == pytest.approx(first - expert.selector_bytes)
    assert resident.num_bytes[2, 0, 0] == third


def test_what_all_runs_is_read_whole_and_once() -> None:
    made = layout()
    fetching = fetched_from_disk(made, np.ones((4, 8)), machine(), 1 << 20, ELSEWHERE)
    whole = -(-made.experts[0][0].num_bytes // 4096) * 4096
    assert set(fetching.num_bytes[0].ravel().tolist()) == {whole}
    assert not fetching.num_bytes[1:].any()


def test_an_expert_takes_its_parts_bytes_by_the_rate_of_their_width_and_its_rows() -> None:
    """By hand, f = 448: up rows of 2 bit, records of bfloat16 gate and down, a quarter of which run."""
    expert = layout(2, 16).experts[0][0]
    assert expert.selector is not None and (expert.selector.row_bytes, expert.records.row_bytes) == (48, 528)
    seconds, num_bytes = expert_seconds(expert, 0.25, machine(row_s=1e-6))
    assert num_bytes == 448 * 48 + 112 * 528
    assert seconds == pytest.approx(448 * (48 / 2e9 + 1e-6) + 112 * (528 / 16e9 + 2e-6))


def test_rows_in_a_source_s_codec_take_the_rate_of_their_width() -> None:
    """By hand, d = 128: up has 64 bytes of codes and 4 of scales, gate 128 and 4, down 128 and 1."""
    spec = model_spec(str(DEMO_MODEL))
    plan = plan_of(spec, "up", MXFP4, E5M2)
    experts = tuple(tuple(replace(expert, gate=FP8) for expert in layer) for layer in plan.experts)
    expert = pack_layout(spec, replace(plan, experts=experts), ["BF16"] * len(dense_roles(spec))).experts[0][0]
    assert expert.selector is not None and (expert.selector.row_bytes, expert.records.row_bytes) == (80, 272)
    seconds, _ = expert_seconds(expert, 0.25, machine())
    assert seconds == pytest.approx(448 * 80 / 4e9 + 112 * 272 / 4e9)  # of 2, 4 and 16 bit, 4 is nearest to 8


def test_an_expert_without_a_selector_is_computed_whole_however_few_neurons_pass() -> None:
    expert = layout(selector="none").experts[0][0]
    assert expert_seconds(expert, 0.1, machine()) == expert_seconds(expert, 1.0, machine())
    assert expert_seconds(expert, 1.0, machine())[1] == 448 * expert.records.row_bytes


def test_reads_of_rows_are_as_many_as_in_draws() -> None:
    """A read takes half of a second of a processor, on two cores a quarter. 400 draws: at most 2% of standard error."""
    spec = replace(small(num_experts=8, intermediate_size=512), hidden_size=1024)
    plan = plan_of(spec, "up", part_format(2, 64), BF16)
    made = pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec)))
    expert, shape = made.experts[0][0], (len(made.experts), 8)
    row_bytes, num_rows = expert.records.row_bytes, expert.num_rows
    disk = replace(steady_disk(1e9), read_cpu_s=0.5)
    generator = np.random.default_rng(0)
    for share, gap_blocks in product((0.02, 0.1, 0.3), (0, 3)):
        with case(share, gap_blocks):
            counts = []
            for _ in range(400):
                rows = np.flatnonzero(generator.random(num_rows) < share)
                first, last = rows * row_bytes // DISK_BLOCK_BYTES, ((rows + 1) * row_bytes - 1) // DISK_BLOCK_BYTES
                counts.append(int((first[1:] - last[:-1] > gap_blocks + 1).sum()) + (len(rows) > 0))
            with mock.patch.object(type(disk), "gap_bytes", lambda self, most=gap_blocks: most * DISK_BLOCK_BYTES):
                two = replace(machine(), disk=disk, cores=2)
                fetching = fetched_from_disk(made, np.full(shape, share), two, 1 << 20, np.ones(shape, bool))
            assert fetching.handling[0, 0, 0] == pytest.approx(np.mean(counts) / 4, rel=0.05)


def test_all_dense_matrices_are_read_but_one_row_of_the_embedding() -> None:
    made = layout()
    entries = {dense.role.name: dense.entry.num_bytes for dense in made.dense}
    seconds, num_bytes = dense_seconds(made, machine(), 10)
    tied = made.spec.tied_head
    dense = sum(entries.values()) - (0 if tied else entries["embed"])
    cache = 4 * cached_values(made.spec) * 10
    assert num_bytes == dense + cache
    assert seconds == pytest.approx(dense / 16e9 + cache / 1e10)


@pytest.mark.slow
def test_bytes_of_a_token_are_those_that_the_engine_counted_on_the_same_routes(packed: Path, tmp_path: Path) -> None:
    ids = torch.randint(0, 4000, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    record = tmp_path / "routes.safetensors"
    with Pack(packed) as opened:
        budget = budget_for(opened, 12, 160)
        options = EngineOptions(budget_bytes=budget, record=record, kernels="portable")
        with Engine(opened, options, 160) as engine:
            counts = engine.weights
            assert isinstance(counts, OffloadedWeights)
            for token in ids[:40]:
                engine.decoder.next_logits([token])
            before = counts.decode.asked_bytes
            for token in ids[40:]:
                engine.decoder.next_logits([token])
            asked = (counts.decode.asked_bytes - before) / 120
        run = read_recording(record).passes
        plan = divide_budget(opened.layout, budget, 160, 0)
        popularity = np.ones((4, 8))
        alike = Passes(run.routes, run.chunks, None, np.ones((4, 8), "<f4"))
        found = estimate_on_cpu(opened.layout, plan, machine(), RoutingFacts(popularity, alike), np.zeros((4, 8)))
    assert 0 < found.hit_rate < 1
    assert found.fetched_bytes == pytest.approx(asked, rel=0.1)  # auto chooses by these routes, the run had none


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic pack with records of 4 KiB, of which a tenth runs; selectors of 2 bits; not to be changed."""
    spec = replace(small(num_experts=16, intermediate_size=512), hidden_size=1024, num_hidden_layers=3)
    spec = replace(spec, moe_layers=(0, 1, 2))
    plan = plan_of(spec, "up", part_format(2, 64), BF16)
    return synthetic_pack(spec, tmp_path_factory.mktemp("sparse") / "packed", character(spec, 0.9, skew=0.5), plan)


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="single rows need native kernels")
def test_where_some_neurons_run_the_engine_reads_by_default_what_the_plan_says(sparse: Path) -> None:
    """By `auto`, which reads rows and keeps selectors, on the disk that the plan assumes."""
    generator = np.random.default_rng(2)
    for share in (0.25, 0.5):
        with case(share), Pack(sparse) as opened:
            ids = generator.integers(0, opened.spec.vocab_size, 160).tolist()
            budget = budget_for(opened, int(48 * share), 160)
            options = EngineOptions(budget_bytes=budget, prefetches=False)
            with Engine(opened, options, 160) as engine:
                assert isinstance(engine.weights, OffloadedWeights) and engine.plan is not None
                for token in ids[:60]:
                    engine.decoder.next_logits([token])
                before = engine.weights.decode.asked_bytes
                for token in ids[60:]:
                    engine.decoder.next_logits([token])
                asked, divided = (engine.weights.decode.asked_bytes - before) / 100, engine.plan
            popularity, sparsity = skewed_popularity(opened.spec, 0.5, 0), np.full((3, 16), 0.9)
            usual = replace(machine(), disk=USUAL_DISK)
            heat = planned_heat(opened.layout, popularity, sparsity, USUAL_DISK)
            plan = divide_budget(opened.layout, budget, 160, 0, heat=heat)
            assert plan == divided and plan.num_selectors > 0
            # All predictions are right: nothing is read for a wrong one, as without prefetch.
            found = estimate_on_cpu(opened.layout, plan, usual, RoutingFacts(popularity, recall=1.0), sparsity)
            whole = 3 * 2 * opened.layout.experts[0][0].num_bytes
            # The estimate draws neurons independently; tokens of one text resemble each other.
            assert found.fetched_bytes == pytest.approx(asked, rel=0.15)
            assert asked < whole / 3


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="single rows need native kernels")
def test_a_prompt_that_runs_many_neurons_does_not_end_the_reads_of_rows(sparse: Path) -> None:
    """A pass of 16 tokens runs about a fifth of an expert's neurons, one token a tenth."""
    with Pack(sparse) as opened:
        ids = np.random.default_rng(3).integers(0, opened.spec.vocab_size, 160).tolist()
        options = EngineOptions(budget_bytes=budget_for(opened, 12, 160), prefetches=False, cutover=0.15)
        with Engine(opened, options, 160) as engine:
            assert isinstance(engine.weights, OffloadedWeights)
            engine.decoder.next_logits(ids[:120])
            for token in ids[120:]:
                engine.decoder.next_logits([token])
            asked = engine.weights.decode.asked_bytes / 40
        assert asked < 3 * 2 * opened.layout.experts[0][0].num_bytes / 2


@pytest.mark.slow
def test_more_memory_is_never_slower_and_all_of_it_waits_for_nothing() -> None:
    made, popularity = layout(), np.random.default_rng(0).dirichlet(np.ones(8), 4)
    fixed = FixedCosts(1e-4, 1e-5, 1e-6, 1e-5, 0.0)
    rates = []
    for mebibytes in (9, 10, 11, 12, 1000):
        plan = divide_budget(made, mebibytes << 20, 64, 0)
        found = estimate_on_cpu(made, plan, machine(fixed, drive_rate=1e8), RoutingFacts(popularity), np.zeros((4, 8)))
        rates.append(found.tokens_per_second)
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert (found.fetched_bytes, found.hit_rate, found.seconds.waiting) == (0, 1, 0)
    assert found.seconds.fixed == pytest.approx(1e-4 + 4 * (1e-5 + 2 * 1e-6))


L, E, K = 3, 6, 2
DRAWN_POPULARITY = np.random.default_rng(3).dirichlet(np.ones(E), L)


def facts(num_pages: int) -> CacheFacts:
    pages = np.random.default_rng(4).integers(1, 3, (L, E))
    return CacheFacts(pages, num_pages, K, DRAWN_POPULARITY.astype(np.float32))


def passes() -> Passes:
    return drawn_passes(DRAWN_POPULARITY, K, 60, seed=1)


def test_hits_and_bytes_are_those_that_replay_counts() -> None:
    for name in sorted(PRESETS):
        for num_pages in [5, 12]:
            with case(name, num_pages):
                preset, routed = PRESETS[name].without_prediction(), passes()
                extents = np.random.default_rng(5).integers(1000, 2000, (L, E))
                found = visits(routed, facts(num_pages), preset, 0)
                played = replay(routed, facts(num_pages), extents, preset).decode
                # What a policy places is there from the start, and was brought in by nobody.
                placed = name == "fiddler"
                assert len(found.keys) == played.num_needed == 60 * L * K
                assert placed or found.hit_rate == played.hit_rate
                assert placed or int(extents.ravel()[found.keys[found.ages == 0]].sum()) == played.bytes_fetched


def test_where_all_have_room_each_finds_what_has_long_been_there() -> None:
    found = visits(passes(), facts(1000), PRESETS["lru"], 10)
    assert found.hit_rate == 1 and found.num_tokens == 50
    assert set(found.ages.tolist()) == {MAX_AGE}
    routed = passes().routes[10:]
    cells = [(t * L + l, l * E + int(e)) for t in range(50) for l in range(L) for e in routed[t, l]]
    assert sorted(zip(found.steps.tolist(), found.keys.tolist(), strict=True)) == sorted(cells)


def test_ages_count_visits_since_an_expert_was_brought_in() -> None:
    """By hand: one layer, room for one expert, one expert a token: 0 0 1 0 0 0."""
    routed = Passes(np.array([[[e]] for e in (0, 0, 1, 0, 0, 0)], "<u2"), np.ones(6, np.uint32), None, np.ones((1, 2)))
    one_page = CacheFacts(np.ones((1, 2), np.int64), 1, 1, np.ones((1, 2), np.float32))
    assert visits(routed, one_page, PRESETS["lru"], 0).ages.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_filled_cache_begins_with_the_most_popular_experts_that_have_room() -> None:
    """By hand: room for two of three, of which 2 and 0 are chosen most: they have long been there, 1 has not."""
    routed = Passes(np.array([[[e]] for e in (2, 0, 1)], "<u2"), np.ones(3, np.uint32), None, np.ones((1, 3)))
    two_pages = CacheFacts(np.ones((1, 3), np.int64), 2, 1, np.array([[0.3, 0.1, 0.6]], np.float32))
    assert visits(routed, two_pages, PRESETS["lru"], 0, is_filled=True).ages.tolist() == [MAX_AGE, MAX_AGE, 0]
    assert visits(routed, two_pages, PRESETS["lru"], 0).ages.tolist() == [0, 0, 0]


def test_one_expert_is_drawn_as_often_as_it_is_popular() -> None:
    drawn = drawn_passes(DRAWN_POPULARITY, 1, 20_000).routes
    shares = [np.bincount(drawn[:, l, 0], minlength=E) / len(drawn) for l in range(L)]
    np.testing.assert_allclose(shares, DRAWN_POPULARITY, atol=0.015)  # 4 deviations of 20,000 draws


def test_a_token_never_draws_an_expert_twice_nor_one_that_is_never_chosen() -> None:
    never = np.array([[0.0, 1.0, 1.0, 1.0]])
    drawn = drawn_passes(never, 3, 50).routes
    assert np.sort(drawn, axis=2).tolist() == [[[1, 2, 3]]] * 50


def test_misses_expected_are_between_each_experts_own_and_those_of_all() -> None:
    """By hand: of 3 visits to expert 0 one missed, of 1 to expert 1 one, none came to expert 2: 2 of 4 in all.

    Sixteen visits of the mean are added to each: (1 + 8) / 19, (1 + 8) / 17 and 8 / 16 of what a token runs of each.
    """
    found = Visits(2, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 0]), np.array([0, 0, 1, 2]))
    runs = np.array([[1.5, 0.4, 0.1]])
    expected = [[1.5 * 9 / 19, 0.4 * 9 / 17, 0.1 * 8 / 16]]
    np.testing.assert_allclose(expected_misses(found, runs), expected, rtol=1e-12)
    assert not expected_misses(Visits(1, np.array([0]), np.array([2]), np.array([5])), runs).any()


CONTEXT = 256
POPULARITY = np.random.default_rng(0).dirichlet(np.ones(8), 4) * 2
TRAFFIC = RoutingFacts(POPULARITY)
MIB = 1 << 20


MADE = layout()
EXPERT = MADE.experts[0][0]


def tier_of(budget: int, traffic: RoutingFacts = TRAFFIC, kv_dtype: KvDtype = "f32") -> CpuTier:
    return CpuTier(assumed_cpu(), traffic, budget, CONTEXT, kv_dtype)


@pytest.mark.parametrize("predictor_bytes", [0, 100_000])
def test_shares_are_the_runtimes_own_and_come_to_the_budget(predictor_bytes: int) -> None:
    traffic = replace(TRAFFIC, predictor_bytes=predictor_bytes)
    for budget in (9 * MIB, 10 * MIB, 64 * MIB):
        found = tier_of(budget, traffic).estimate(MADE, np.zeros((4, 8)), is_rough=True)
        shares = {share.name: share.num_bytes for share in found.shares}
        plan = divide_budget(MADE, budget, CONTEXT, predictor_bytes)
        assert sum(shares.values()) == budget
        assert shares["predictors"] == predictor_bytes
        assert (shares["pages of experts"], shares["workspace"]) == (plan.arena, plan.fixed.workspace)


@pytest.mark.parametrize("predictor_bytes", [0, 100_000])
def test_the_least_budget_is_divided_and_a_byte_less_is_not(predictor_bytes: int) -> None:
    traffic = replace(TRAFFIC, predictor_bytes=predictor_bytes)
    least = tier_of(1, traffic).least_bytes(MADE)
    assert tier_of(least, traffic).estimate(MADE, np.zeros((4, 8)), is_rough=True).hit_rate < 0.5
    with pytest.raises(RunError, match=r"^budget: .* the model needs at least "):
        tier_of(least - 1, traffic).estimate(MADE, np.zeros((4, 8)), is_rough=True)


def test_keys_and_values_in_few_bits_leave_their_bytes_to_experts() -> None:
    # Of a position in a layer: keys and values of 2 heads with 32 values.
    values = MADE.spec.num_hidden_layers * CONTEXT * 2 * 2
    found = {}
    for dtype, row_bytes in (("f32", 128), ("bf16", 64), ("q8", 34), ("q4", 20)):
        estimate = tier_of(9 * MIB, kv_dtype=dtype).estimate(MADE, np.zeros((4, 8)), is_rough=True)
        shares = {share.name: share.num_bytes for share in estimate.shares}
        assert shares["key-value cache"] == values * row_bytes and sum(shares.values()) == 9 * MIB
        less = tier_of(1).least_bytes(MADE) - tier_of(1, kv_dtype=dtype).least_bytes(MADE)
        assert less == values * (128 - row_bytes)
        found[dtype] = estimate
    assert found["q4"].hit_rate > found["f32"].hit_rate


def test_a_smaller_budget_is_as_one_that_was_given_smaller() -> None:
    smaller = tier_of(10 * MIB).estimate(MADE, np.zeros((4, 8)), MIB, is_rough=True)
    assert smaller.seconds == tier_of(9 * MIB).estimate(MADE, np.zeros((4, 8)), is_rough=True).seconds


def test_an_expert_is_missed_no_more_often_than_it_runs_and_never_where_all_fit() -> None:
    found = tier_of(9 * MIB).estimate(MADE, np.zeros((4, 8)), is_rough=True)
    assert 0 < found.hit_rate < 1
    assert (found.misses > 0).all() and (found.misses < TRAFFIC.popularity).all()
    assert not tier_of(64 * MIB).estimate(MADE, np.zeros((4, 8)), is_rough=True).misses.any()


def test_running_an_expert_takes_its_selector_and_the_rows_that_run() -> None:
    """By hand, at 33 GB/s for 4 bits: 448 rows of up, a quarter of the records."""
    assert EXPERT.selector is not None
    num_bytes = 448 * EXPERT.selector.row_bytes + 112 * EXPERT.records.row_bytes
    assert tier_of(MIB).run_seconds(EXPERT, 0.75) == pytest.approx(num_bytes / 33e9)


def test_an_expert_is_fetched_whole_unless_its_running_rows_are_the_sooner_there() -> None:
    """A disk of 1 GB/s whatever the size, in whole blocks of 4 KiB."""
    disk = steady_disk(1e9)
    tier = CpuTier(replace(assumed_cpu(), disk=disk), TRAFFIC, MIB, CONTEXT)
    whole = tier.fetch_seconds(EXPERT, 0.0)
    assert whole == pytest.approx(EXPERT.num_bytes / 1e9, rel=0.05)
    assert tier.fetch_seconds(EXPERT, 0.5) == whole  # rows of 160 bytes: half of them lie in every block
    assert tier.fetch_seconds(EXPERT, 0.999) == pytest.approx(
        disk.seconds(1, EXPERT.selector_bytes) + disk.seconds_for_rows(0.001, EXPERT.records.row_bytes, 448)
    )
    assert tier.fetch_seconds(EXPERT, 0.999) < whole


def test_without_a_selector_an_expert_is_fetched_and_run_whole() -> None:
    expert, tier = layout(selector="none").experts[0][0], tier_of(MIB)
    assert tier.fetch_seconds(expert, 0.99) == tier.fetch_seconds(expert, 0.0)
    assert tier.run_seconds(expert, 0.99) == tier.run_seconds(expert, 0.0)


def test_a_dense_matrix_takes_its_bytes_at_the_rate_of_its_width() -> None:
    assert tier_of(MIB).dense_seconds(36_000, 8) == pytest.approx(1e-6)
    assert tier_of(MIB).dense_seconds(38_000, 16) == pytest.approx(1e-6)


@pytest.mark.slow
def test_tokens_layers_and_experts_cost_time_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    facts = MachineFacts("2026-11-22", steady_disk(1e9), CpuFacts(2, None, None, None, (), (), None), None)
    found = measure_fixed_costs(facts, 0.01)
    assert min(found.token_s, found.layer_s, found.expert_s, found.miss_s, found.rows_s) >= 0
    assert 0 < found.token_s + found.layer_s + found.expert_s < 1
    assert not list(tmp_path.iterdir())


def test_without_measured_experts_no_cpu_is_planned_for() -> None:
    facts = MachineFacts("2026-11-22", steady_disk(1e9), CpuFacts(2, None, None, None, (), (), None), None)
    with pytest.raises(RunError, match=r"^doctor: the speed of experts was not measured; build the native kernels"):
        machine_of_cpu(facts)


def test_a_width_that_was_not_measured_goes_by_the_nearest_and_of_two_by_the_wider() -> None:
    rates = (WidthRate(2, 20.0), WidthRate(4, 40.0), WidthRate(16, 160.0))
    assert [rate_of(rates, width) for width in (1, 2, 3, 4, 8, 16)] == [20, 20, 40, 40, 40, 160]


def test_a_trellis_goes_by_trellises_measured_else_by_affine_codes_of_no_fewer_bits() -> None:
    """Bits of 2, 2.5, 3, 3.5 and 4."""
    affine = tuple(WidthRate(width, 10.0 * width) for width in (1, 2, 3, 4, 8, 16))
    machine = replace(assumed_cpu(), expert_rates=affine)
    parts = [trellis_format(width, 0) for width in TRELLIS_WIDTHS]
    assert [machine.expert_rate(part) for part in parts] == [20, 30, 30, 40, 40]
    measured = replace(machine, trellis_rates=(WidthRate(4, 7.0), WidthRate(5, 8.0), WidthRate(8, 9.0)))
    assert [measured.expert_rate(part) for part in parts] == [7, 8, 8, 9, 9]
    assert measured.expert_rate(part_format(8, 64)) == 80


def test_the_machine_of_a_cpu_has_its_trellises_rates() -> None:
    one = (WidthRate(4, 1e10),)
    cpu = CpuFacts(2, "avx2", 1e10, 1e10, one, one, 0.0, (WidthRate(4, 2e9),))
    facts = MachineFacts("2026-11-22", steady_disk(1e9), cpu, None, FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    assert machine_of_cpu(facts).expert_rate(trellis_format(4, 0)) == 2e9
