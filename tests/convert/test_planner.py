"""The planner on a tier worked by hand, and on the CPU's: it keeps its word, and nothing near it is faster."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from typing import get_args

import numpy as np
import pytest
from support.cases import case
from support.losses import random_losses
from support.specs import GROUPED
from support.tiers import DENSE_RATE, FETCH_RATE, RUN_RATE, FixedTier

from moe_pack.convert.plan import Decision, EstimatedPlan, Planner, PlanningModel
from moe_pack.convert.plan.cpu_speed import CpuTier
from moe_pack.convert.plan.machines import assumed_cpu
from moe_pack.convert.plan.options import SearchName
from moe_pack.convert.plan.plan_file import plan_bytes
from moe_pack.convert.plan.search import costed_formats, expert_choices, price
from moe_pack.convert.plan.speed import MemoryTier, RoutingFacts
from moe_pack.formats import (
    BF16,
    ExpertSpec,
    Plan,
    PlanError,
    RunError,
    Selector,
    dense_roles,
    part_format,
    size_text,
    uniform_plan,
)
from moe_pack.formats.pack.plans import E5M2, FP8, MXFP4, QUANTIZERS, plan_fault
from moe_pack.formats.parts.specs import SELECTORS

SPEC = replace(
    GROUPED, num_hidden_layers=2, dense_intermediate_size=None, router=replace(GROUPED.router, num_experts=8)
)
DENSE_FORMATS = (None, part_format(8, 64), part_format(4, 64))
DTYPES = ("BF16",) * len(dense_roles(SPEC))
MODEL = PlanningModel(SPEC, DTYPES, random_losses(SPEC))
SEARCHES: tuple[SearchName, ...] = get_args(SearchName)
BUDGETS = (75_000, 90_000, 120_000, 220_000, 600_000)
LIMITS = (0.01, 0.05, 0.2)


def tier_of(budget: int, model: PlanningModel = MODEL) -> FixedTier:
    return FixedTier(model.losses, budget)


@cache
def planned(budget: int, max_loss: float, search: SearchName = "knapsack") -> EstimatedPlan | None:
    """None where nothing within the loss fits."""
    try:
        return Planner(MODEL, tier_of(budget), search).plan(max_loss)
    except RunError:
        return None


def refusal(budget: int, max_loss: float) -> str:
    with pytest.raises(RunError) as error:
        Planner(MODEL, tier_of(budget)).plan(max_loss)
    return str(error.value)


@pytest.mark.slow
def test_a_plan_keeps_loss_and_budget_and_fits_the_model() -> None:
    for search, max_loss in [*((SEARCHES[0], limit) for limit in LIMITS), *((name, 0.05) for name in SEARCHES[1:])]:
        with case(search, max_loss):
            found = [(budget, planned(budget, max_loss, search)) for budget in BUDGETS]
            assert found[-1][1] is not None
            for budget, plan in found:
                if plan is not None:
                    assert plan_fault(plan.decision.plan, SPEC) is None
                    assert plan.loss == pytest.approx(MODEL.loss(plan.decision)) and plan.loss <= max_loss
                    assert sum(share.num_bytes for share in plan.speed.shares) <= budget


def changed(decision: Decision, rng: np.random.Generator, others: list[Decision]) -> Decision:
    """With some experts, sparsities and dense widths of another decision of the same selector kind."""
    other, plan = others[int(rng.integers(len(others)))], decision.plan
    share = rng.choice([0.03, 0.1, 0.3, 1.0])
    taken = rng.random(decision.sparsity.shape) < share
    experts = tuple(
        tuple(o if t else e for e, o, t in zip(*row, strict=True))
        for row in zip(plan.experts, other.plan.experts, taken.tolist(), strict=True)
    )
    taken_dense = rng.random(len(plan.dense)) < share
    dense = tuple(o if t else d for d, o, t in zip(plan.dense, other.plan.dense, taken_dense.tolist(), strict=True))
    sparse = rng.random(decision.sparsity.shape) < share
    return Decision(replace(plan, experts=experts, dense=dense), np.where(sparse, other.sparsity, decision.sparsity))


def drawn(selector: Selector, rng: np.random.Generator, number: int) -> list[Decision]:
    """Plans of any choices; half of them alike for all experts."""
    choices, found = expert_choices(SPEC, selector, MODEL.losses), []
    shape = MODEL.losses.popularity.shape
    for _ in range(number):
        one = rng.random() < 0.5
        numbers = rng.integers(0, len(choices.formats), (1, 1) if one else shape)
        sparsity = rng.choice(MODEL.losses.sparsities, (1, 1) if one else shape)
        experts = tuple(tuple(choices.formats[n] for n in row) for row in np.broadcast_to(numbers, shape).tolist())
        part = DENSE_FORMATS[int(rng.integers(3))]
        dense = uniform_plan(SPEC, "none", BF16, BF16, part).dense
        found.append(Decision(Plan(selector, "hqq", experts, dense), np.broadcast_to(sparsity, shape).copy()))
    return found


@pytest.mark.slow
def test_of_many_decisions_within_loss_and_budget_none_is_much_faster() -> None:
    """Drawn at random, and the plan itself with pieces of those. Much: the knapsack decides at prices of one turn, and
    of hundreds of choices an expert; both cost a little."""
    for budget, max_loss in [(75_000, 0.05), (120_000, 0.01), (120_000, 0.2), (600_000, 0.05)]:
        with case(budget, max_loss):
            best = planned(budget, max_loss)
            assert best is not None
            tier, rng, tried = tier_of(budget), np.random.default_rng(0), 0
            for selector in SELECTORS:
                others = drawn(selector, rng, 25)
                same = best.decision if best.decision.plan.selector == selector else None
                for decision in [*others, *(changed(same or other, rng, others) for other in others * 2)]:
                    try:
                        seconds = tier.estimate(MODEL.layout(decision.plan), decision.sparsity).seconds.total
                    except RunError:
                        continue
                    if MODEL.loss(decision) <= max_loss:
                        tried += 1
                        assert seconds >= 0.99 * best.speed.seconds.total
            assert tried > 10


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_more_memory_or_more_loss_is_never_slower_by_more_than_a_turn_of_prices_misses(search: SearchName) -> None:
    memory = [((a, limit), (b, limit)) for limit in LIMITS for a, b in pairwise(BUDGETS)]
    losses = [((budget, a), (budget, b)) for budget in BUDGETS for a, b in pairwise(LIMITS)]
    for lesser, greater in [*memory, *losses]:
        with case(lesser, greater):
            less, more = planned(*lesser, search), planned(*greater, search)
            assert less is None or (more is not None and more.speed.seconds.total <= 1.01 * less.speed.seconds.total)


def least_bytes(max_loss: float) -> int:
    """The smallest budget of any plan, found without the planner: dense tensors and one expert.

    For each largest expert, what all lose at least. All dense tensors lose alike, so that the n largest have 4 bits,
    and of the others as many as may, the largest first, have 8; each n is tried.
    """
    losses, found = MODEL.losses, []
    layouts = [MODEL.layout(uniform_plan(SPEC, "none", BF16, BF16, part)) for part in DENSE_FORMATS]
    sizes = np.array([[dense.entry.num_bytes for dense in made.dense] for made in layouts]).T  # [roles, widths]
    sizes = sizes[np.argsort(-sizes[:, 0], kind="stable")]
    header = layouts[0].dense_file.num_bytes - int(sizes[:, 0].sum())
    n = int((sizes[:, 1] < sizes[:, 0]).sum())
    fixed, sizes = int(sizes[:, 0].sum() - sizes[sizes[:, 1] < sizes[:, 0], 0].sum()), sizes[sizes[:, 1] < sizes[:, 0]]
    for selector in SELECTORS:
        choices = expert_choices(SPEC, selector, losses)
        for largest in np.unique(choices.extent_bytes).tolist():
            left = max_loss - choices.losses(losses)[:, choices.extent_bytes <= largest].min(axis=1).sum()
            for at_4 in range(n + 1):
                if left >= 2e-3 * at_4:
                    at_8 = min(int((left - 2e-3 * at_4) / 1e-4), n - at_4) + at_4
                    dense = sizes[:at_4, 2].sum() + sizes[at_4:at_8, 1].sum() + sizes[at_8:, 0].sum()
                    found.append(fixed + int(dense) + largest)
    return header + min(found)


@pytest.mark.slow
def test_plans_made_before_do_not_matter() -> None:
    """A conversion that was killed between two of its plans makes the same ones."""
    budget = BUDGETS[2]
    planner = Planner(MODEL, tier_of(budget))
    for first, max_loss in permutations(LIMITS, 2):
        with case(first, max_loss):
            planner.plan(first)
            found, expected = planner.plan(max_loss), planned(budget, max_loss)
            assert expected is not None and plan_bytes(found.decision, SPEC) == plan_bytes(expected.decision, SPEC)


@pytest.mark.parametrize("max_loss", LIMITS)
def test_a_budget_is_refused_only_where_hardly_any_plan_fits(max_loss: float) -> None:
    """Hardly: a header's length varies, and dense tensors are decided to within the knapsack's gap."""
    least = least_bytes(max_loss)
    assert Planner(MODEL, tier_of(round(1.01 * least))).plan(max_loss).loss <= max_loss
    assert refusal(round(0.99 * least), max_loss)


def test_too_small_a_budget_is_told_the_least_that_would_do() -> None:
    smallest = part_format(2, 64, 8)
    any_loss = tier_of(1).least_bytes(MODEL.layout(uniform_plan(SPEC, "up", smallest, smallest, part_format(4, 64))))
    message = refusal(80_000, 0.01)
    found = re.search("a pack within this loss needs ([0-9.]+) KiB", message)
    assert found is not None
    assert float(found[1]) * 1024 == pytest.approx(least_bytes(0.01), rel=0.01)
    assert message == (
        f"--target-vram: 78.1 KiB is too small; a pack within this loss needs {found[1]} KiB, one of any loss "
        f"{size_text(any_loss)}; give more memory, a larger --max-loss, or a shorter --context"
    )


def test_a_loss_that_nothing_keeps_is_refused() -> None:
    """A model of which even 16 bits were said to lose: as where no bfloat16 is among the formats."""
    losses = replace(MODEL.losses, quantized=MODEL.losses.quantized + 1e-3)
    with pytest.raises(PlanError) as error:
        Planner(replace(MODEL, losses=losses), tier_of(600_000)).plan(0.01)
    assert str(error.value) == "--max-loss: every plan loses more than 0.01 nats; allow more"


def test_selector_kinds_may_be_restricted() -> None:
    for selector in SELECTORS:
        with case(selector):
            for search in SEARCHES:
                found = Planner(MODEL, tier_of(220_000), search, (selector,)).plan(0.2)
                assert found.decision.plan.selector == selector


def test_experts_without_a_gate_are_selected_by_up_or_not_at_all() -> None:
    spec = replace(SPEC, expert=ExpertSpec("relu2", 48, ("up", "down"), bias=(), extra_floats=0))
    model = PlanningModel(spec, ("BF16",) * len(dense_roles(spec)), random_losses(spec))
    for search in SEARCHES:
        found = Planner(model, tier_of(220_000, model), search).plan(0.05)
        assert found.decision.plan.selector in ("up", "none")
        assert plan_fault(found.decision.plan, spec) is None
    with pytest.raises(PlanError) as error:
        Planner(model, tier_of(220_000, model), selectors=("gate", "both"))
    assert str(error.value) == "--selector gate: this model's experts have no gate matrix; use up or none"


def test_formats_that_keep_a_source_lose_nothing_and_take_their_bytes() -> None:
    for quantizer in QUANTIZERS:
        with case(quantizer):
            plan = uniform_plan(SPEC, "up", MXFP4, E5M2, FP8, quantizer)
            sparsity = np.zeros((len(SPEC.moe_layers), SPEC.router.num_experts))
            assert MODEL.loss(Decision(plan, sparsity)) == 0
            expert = MODEL.layout(plan).experts[0][0]
            # Up: 32 bytes of codes, 2 of scales; gate and down: 65 each. With a CRC and padding, 48 and 144.
            assert expert.num_bytes == SPEC.expert.intermediate_size * (48 + 144)


def test_a_uniform_plan_stores_all_experts_alike() -> None:
    found = planned(220_000, 0.05, "uniform")
    assert found is not None and found.gap is None
    assert len({expert for layer in found.decision.plan.experts for expert in layer}) == 1
    assert len(np.unique(found.decision.sparsity)) == 1


@pytest.mark.slow
def test_the_knapsack_is_faster_than_what_papers_search() -> None:
    for max_loss in LIMITS:
        ours, uniform, edgemoe = (planned(220_000, max_loss, search) for search in ("knapsack", "uniform", "edgemoe"))
        assert ours is not None and uniform is not None and edgemoe is not None
        assert ours.speed.seconds.total < min(uniform.speed.seconds.total, edgemoe.speed.seconds.total)


@pytest.mark.slow
def test_the_cpus_tier_is_planned_for_within_its_budget_and_the_faster_the_larger_it_is() -> None:
    traffic, seconds = RoutingFacts(MODEL.losses.popularity), []
    bf16 = uniform_plan(SPEC, "none", BF16, BF16)
    least = CpuTier(assumed_cpu(), traffic, 1, 32).least_bytes(MODEL.layout(bf16))
    for more in (0, 50_000, 10_000_000):
        tier: MemoryTier = CpuTier(assumed_cpu(), traffic, least + more, 32)
        found = Planner(MODEL, tier).plan(0.05)
        assert found.loss <= 0.05
        assert sum(share.num_bytes for share in found.speed.shares) <= least + more
        seconds.append(found.speed.seconds.total)
    # A turn of prices may miss a little, and draws of routes are few.
    assert all(after <= 1.02 * before for before, after in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_memory_is_worth_what_a_little_less_of_it_costs() -> None:
    """At 220,000 bytes all experts of the plan at hand have room, at 120,000 they take turns."""
    plan = Decision(uniform_plan(SPEC, "up", part_format(4, 64), part_format(4, 64)), np.zeros((2, 8)))
    menu = costed_formats(tier_of(1), MODEL, "up")
    for budget, has_room in ((600_000, True), (200_000, False)):
        tier = tier_of(budget)
        last = Planner(MODEL, tier).estimate(plan)
        prices = price(tier, MODEL, menu, last)
        smaller = tier.estimate(last.layout, plan.sparsity, budget // 20)
        worth = (smaller.seconds.total - last.speed.seconds.total) / (budget // 20)
        assert (worth == 0) == has_room
        assert prices.expert_byte == pytest.approx(worth * min(1, budget / last.expert_bytes))
        assert prices.misses.tolist() == last.speed.misses.ravel().tolist()


def test_a_choice_costs_what_running_and_fetching_its_bytes_takes() -> None:
    menu = costed_formats(tier_of(1), MODEL, "up")
    choices = menu.choices
    assert menu.run.shape == (len(choices.formats), 5)
    for sparsity_idx, sparsity in enumerate(MODEL.losses.sparsities):
        num_bytes = choices.selector_bytes + (1 - sparsity) * choices.record_bytes
        np.testing.assert_allclose(menu.run[:, sparsity_idx], num_bytes / RUN_RATE)
        np.testing.assert_allclose(menu.fetch[:, sparsity_idx], num_bytes / FETCH_RATE)


def test_of_the_embedding_one_row_is_read_and_all_of_the_head() -> None:
    prices = price(tier_of(600_000), MODEL, costed_formats(tier_of(1), MODEL, "up"), None)
    names = [role.name for role in dense_roles(SPEC)]
    assert prices.dense[names.index("embed"), 0] == pytest.approx(64 * 2 / DENSE_RATE)
    assert prices.dense[names.index("head"), 0] == pytest.approx(96 * 64 * 2 / DENSE_RATE)
