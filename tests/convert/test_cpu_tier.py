"""The CPU's tier: a budget divided as the runtime does, and what bytes cost, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from support.models import DEMO_MODEL
from support.tiers import steady_disk

from moe_pack.convert.plan.cpu_speed import CpuTier
from moe_pack.convert.plan.machines import assumed_cpu
from moe_pack.convert.plan.speed import RoutingFacts
from moe_pack.formats import PackLayout, RunError, Selector, dense_roles, part_format
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import divide_budget

CONTEXT = 256
POPULARITY = np.random.default_rng(0).dirichlet(np.ones(8), 4) * 2
TRAFFIC = RoutingFacts(POPULARITY)
MIB = 1 << 20


def layout(selector: Selector = "up") -> PackLayout:
    spec, part = model_spec(str(DEMO_MODEL)), part_format(4, 64)
    return pack_layout(spec, plan_of(spec, selector, part, part), ["BF16"] * len(dense_roles(spec)))


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
        assert (shares["pages of experts"], shares["workspace"]) == (plan.arena, plan.workspace)


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
    expert, tier = layout("none").experts[0][0], tier_of(MIB)
    assert tier.fetch_seconds(expert, 0.99) == tier.fetch_seconds(expert, 0.0)
    assert tier.run_seconds(expert, 0.99) == tier.run_seconds(expert, 0.0)


def test_a_dense_matrix_takes_its_bytes_at_the_rate_of_its_width() -> None:
    assert tier_of(MIB).dense_seconds(36_000, 8) == pytest.approx(1e-6)
    assert tier_of(MIB).dense_seconds(38_000, 16) == pytest.approx(1e-6)
