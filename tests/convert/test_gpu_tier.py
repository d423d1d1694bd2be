"""A GPU as a tier: its minimum memory, the cost of fetching by hand, and quick estimates against exact ones."""

from typing import Any

import numpy as np
import pytest
from cases import case

from moe_pack.convert.plan.machines import GPUS, machine_of_gpu
from moe_pack.convert.plan.speed import drawn_passes
from moe_pack.convert.plan.tiers import GpuTier, RoutingFacts, RowHeat
from moe_pack.formats import PackLayout, RunError, Selector, dense_roles, part_format
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.layout import pack_layout

SPEC = model_spec("olmoe-1b-7b", 3)
MIB = 1 << 20
SHAPE = (3, 64)
LINK = 16e9


def layout(selector: Selector = "up") -> PackLayout:
    part = part_format(4, 64)
    return pack_layout(SPEC, plan_of(SPEC, selector, part, part), ["BF16"] * len(dense_roles(SPEC)))


def tier(budget_bytes: int, ram_bytes: int | None = None) -> GpuTier:
    popularity = np.random.default_rng(0).dirichlet(np.full(64, 0.5), 3) * 8
    machine = machine_of_gpu(GPUS["L4"], LINK, ram_bytes)
    traffic = RoutingFacts(popularity, drawn_passes(popularity, 8, 100), None, MIB)
    return GpuTier(machine, traffic, RowHeat(None), budget_bytes, 256)


def test_the_least_runs_and_a_byte_less_does_not() -> None:
    made = layout()
    least = tier(1).least_bytes(made)
    assert sum(share.num_bytes for share in tier(least).estimate(made, np.full(SHAPE, 0.5)).shares) == least
    with pytest.raises(RunError, match=r"^--target-vram: .* the model needs at least "):
        tier(least - 1).estimate(made, np.full(SHAPE, 0.5))


def test_pulling_an_expert_takes_its_selector_and_running_rows_over_the_link() -> None:
    for selector in ["up", "gate", "both", "none"]:
        with case(selector):
            expert = layout(selector).experts[0][0]
            running = 1.0 if selector == "none" else 0.25
            by_hand = (expert.selector_bytes + running * expert.records_bytes) / LINK
            assert tier(MIB).fetch_seconds(expert, 0.75) == pytest.approx(by_hand)


def test_what_host_memory_cannot_hold_is_pulled_from_the_drive() -> None:
    """Half of the pack at 16 GB/s, half at the disk's 1 GB/s."""
    expert = layout("none").experts[0][0]
    half = expert.num_bytes * 3 * 64 // 2
    assert tier(MIB, half).fetch_seconds(expert, 0) == pytest.approx(expert.num_bytes * (0.5 / 16e9 + 0.5 / 1e9))


@pytest.mark.parametrize("selector", ["up", "both", "none"])
def test_quick_estimates_are_near_exact_ones(selector: Selector) -> None:
    """One share of pages is tried, not five, on fewer tokens: it may seem slower, and not much faster."""
    made, sparsity = layout(selector), np.full(SHAPE, 0.5)
    some = tier(tier(1).least_bytes(made) + 200 * MIB)
    exact, rough = (some.estimate(made, sparsity, is_rough=quick).seconds for quick in (False, True))
    assert 0.85 < rough / exact < 1.5


@pytest.mark.slow
def test_what_is_always_there_is_never_missed() -> None:
    made, sparsity = layout(), np.full(SHAPE, 0.5)
    found: list[Any] = [tier(budget * MIB).estimate(made, sparsity) for budget in (1100, 1200, 1300, 4000)]
    misses = [float(one.misses.sum()) for one in found]
    assert misses == sorted(misses, reverse=True) and misses[0] > misses[-1] == 0
    assert found[-1].fetched_bytes == 0
