"""The knapsack against brute force and an exact solution; formats chosen for bytes and for time against other plans."""

import dataclasses
import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.allocation import least_loss
from support.cases import case
from support.losses import calibrated_losses, random_losses
from support.models import BOOK, DEMO_MODEL
from support.profiles import profiled
from support.specs import GROUPED

from moe_pack.calib.forward import read_tokens
from moe_pack.calib.profile import Losses, ProfileOptions, losses_of
from moe_pack.convert.plan import Decision, PlanningModel, search
from moe_pack.formats import ModelSpec, Plan, PlanError, RouterSpec, dense_roles, part_format, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.pack.layouts import expert_layout, pack_layout
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime import Text

SPEC = dataclasses.replace(
    GROUPED,
    num_hidden_layers=2,
    moe_layers=(0, 1),
    dense_intermediate_size=None,
    router=RouterSpec("softmax_topk", 4, 2, normalize=True),
    shared_expert=None,
)
LOSSES = random_losses(SPEC)
DTYPES = ("BF16",) * len(dense_roles(SPEC))
MODEL = PlanningModel(SPEC, DTYPES, LOSSES)


def expert_bytes(plan: Plan) -> int:
    return sum(expert.num_bytes for layer in pack_layout(SPEC, plan, DTYPES).experts for expert in layer)


def running(plan: Plan) -> Decision:
    return Decision(plan, np.zeros(LOSSES.popularity.shape))


def test_at_a_uniform_plans_bytes_the_chosen_one_loses_less() -> None:
    """Or as little: without a selector a row of the 2 and 4 bit plans has not a byte of padding to make use of."""
    for selector in SELECTORS:
        for width in [2, 3, 4]:
            with case(selector, width):
                uniform = uniform_plan(SPEC, selector, part_format(width, 64), part_format(width, 64))
                found = least_loss(SPEC, selector, LOSSES, expert_bytes(uniform))
                assert found is not None
                assert expert_bytes(found.decision.plan) == found.solution.weight <= expert_bytes(uniform)
                assert found.loss == pytest.approx(MODEL.loss(found.decision))
                assert found.loss <= MODEL.loss(running(uniform))
                assert (found.decision.plan.experts == uniform.experts) == (selector == "none" and width in (2, 4))


def test_for_vllm_each_layer_has_one_format_and_no_better_one_is_within_the_loss() -> None:
    """All choices of two layers are tried; each is one format of 4 or 8 bits for all matrices, with all neurons."""
    wide = dataclasses.replace(SPEC, expert=dataclasses.replace(SPEC.expert, intermediate_size=128))
    choices = search.fused_choices(wide, "up", LOSSES)
    assert {part.width for formats in choices.formats for part in (formats.gate, formats.up, formats.down) if part} == {
        4,
        8,
    }
    assert all(
        formats.gate == formats.up == formats.down and formats.up.group in (32, 64, 128) for formats in choices.formats
    )
    costs = prices(len(choices.formats), hold=1e-9, run=1e-4)
    lost = choices.losses(LOSSES).reshape(2, 4, -1).sum(axis=1)  # [layers, choices]
    cost = ((costs.runs[:, None] * costs.run[:, 0] + costs.misses[:, None] * costs.fetch[:, 0])
            + costs.expert_byte * choices.extent_bytes).reshape(2, 4, -1).sum(axis=1)  # fmt: skip
    for max_loss in (lost.min(axis=1).sum() * 1.01, lost.min(axis=1).sum() * 2, lost.max(axis=1).sum()):
        with case(max_loss):
            found = search.least_time(wide, LOSSES, max_loss, costs, choices)
            assert found is not None and not found.decision.sparsity.any()
            layers = found.decision.plan.experts
            assert all(len(set(layer)) == 1 for layer in layers)
            taken = [choices.formats.index(layer[0]) for layer in layers]
            pairs = [(a, b) for a in range(len(choices.formats)) for b in range(len(choices.formats))]
            within = [cost[0, a] + cost[1, b] for a, b in pairs if lost[0, a] + lost[1, b] <= max_loss]
            assert cost[0, taken[0]] + cost[1, taken[1]] <= min(within) * 1.02  # the rest is that of dense matrices
            assert found.loss <= max_loss
    assert search.least_time(wide, LOSSES, lost.min(axis=1).sum() * 0.5, costs, choices) is None


def test_rows_that_no_group_divides_have_no_format_for_vllm() -> None:
    odd = dataclasses.replace(SPEC, expert=dataclasses.replace(SPEC.expert, intermediate_size=80))
    with pytest.raises(PlanError, match="--for vllm: groups of 128, 64, 32 weights do not divide rows of"):
        search.fused_choices(odd, "up", LOSSES)


def prices(choices_count: int, *, hold: float, run: float = 0.0) -> search.StorageCosts:
    """Returns the costs of choices that cost what running them does, the more sparse the less."""
    sparse = 1 - np.array(LOSSES.sparsities)
    runs = LOSSES.popularity.ravel()
    table = run * np.linspace(1, 2, choices_count)[:, None] * sparse
    dense = np.where(np.isfinite(LOSSES.dense), np.array([4.0, 2.0, 1.0]), 0.0)
    return search.StorageCosts(runs, 0 * runs, table, 0 * table, hold, dense * 1e-6)


def test_least_time_keeps_the_loss_and_counts_it_as_the_model_does() -> None:
    choices = search.expert_choices(SPEC, "both", LOSSES)
    for max_loss in (0.3, 0.1, 0.03, 0.005):
        found = search.least_time(SPEC, LOSSES, max_loss, prices(len(choices.formats), hold=1e-9, run=1e-4), choices)
        assert found is not None
        assert found.loss == pytest.approx(MODEL.loss(found.decision)) and found.loss <= max_loss


def test_sparsity_is_given_where_running_costs_and_not_where_only_room_does() -> None:
    choices = search.expert_choices(SPEC, "up", LOSSES)
    number = len(choices.formats)
    held = search.least_time(SPEC, LOSSES, 0.02, prices(number, hold=1e-9), choices)
    ran = search.least_time(SPEC, LOSSES, 0.02, prices(number, hold=1e-12, run=1e-3), choices)
    assert held is not None and ran is not None
    assert not held.decision.sparsity.any()
    assert ran.decision.sparsity.any()


def test_only_what_may_be_quantized_is() -> None:
    choices = search.expert_choices(SPEC, "up", LOSSES)
    found = search.least_time(SPEC, LOSSES, 1.0, prices(len(choices.formats), hold=1e-9), choices)
    assert found is not None
    for role, part in zip(dense_roles(SPEC), found.decision.plan.dense, strict=True):
        assert (part is not None) == role.quantizable


def test_the_knapsack_over_calibrated_formats_is_as_good_as_the_best_of_all_plans() -> None:
    """Four experts, each in every combination of some formats: no plan of at most the bytes loses less."""
    router = dataclasses.replace(SPEC.router, num_experts=3)
    spec = dataclasses.replace(SPEC, num_hidden_layers=1, moe_layers=(0,), router=router)
    losses = calibrated_losses(spec, seed=3, most=4)
    choices = search.expert_choices(spec, "none", losses)
    lost, sizes = choices.losses(losses), choices.extent_bytes
    for share in (0.1, 0.3, 0.6):
        limit = int(3 * (sizes[0] + share * (sizes[-1] - sizes[0])))
        found = least_loss(spec, "none", losses, limit)
        assert found is not None and found.decision.plan.quantizer == "calibrated"
        every = sizes[:, None, None] + sizes[None, :, None] + sizes[None, None, :]
        nats = lost[0][:, None, None] + lost[1][None, :, None] + lost[2][None, None, :]
        best = float(nats[every <= limit].min())
        assert found.solution.bound <= best * (1 + 1e-9)
        assert best <= found.loss * (1 + 1e-9) <= 1.1 * best
        assert PlanningModel(spec, DTYPES, losses).loss(found.decision) == pytest.approx(found.loss)


def random_table(seed: int, num_items: int, num_choices: int) -> search.KnapsackProblem:
    """Costs that fall as weights rise, roughly: as losses do with bytes."""
    generator = np.random.default_rng(seed)
    weight = np.sort(generator.uniform(1, 10, (num_items, num_choices)), axis=1)
    cost = np.sort(generator.exponential(1.0, (num_items, num_choices)), axis=1)[:, ::-1] + 0.01
    cost[generator.random(cost.shape) < 0.1] = np.inf
    cost[:, -1] = 0.01
    return search.KnapsackProblem(cost, weight)


def best_cost(table: search.KnapsackProblem, limit: float) -> float:
    found = [
        table.of(np.array(choice)) for choice in itertools.product(range(table.cost.shape[1]), repeat=len(table.cost))
    ]
    return min((cost for cost, weight in found if weight <= limit), default=float("inf"))


def test_it_keeps_the_limit_and_its_bound_is_below_the_best_of_all() -> None:
    for seed in range(30):
        with case(seed):
            table = random_table(seed, 6, 4)
            limit = float(np.random.default_rng(seed).uniform(6, 60))
            found, best = search.solve(table, limit), best_cost(table, limit)
            if found is None:
                assert best == float("inf")
            else:
                assert found.weight <= limit
                assert (found.cost, found.weight) == pytest.approx(table.of(found.choice))
                assert found.bound <= best * (1 + 1e-12) and best <= found.cost * (1 + 1e-12)


def test_with_many_items_the_gap_is_small() -> None:
    table = random_table(1, 2000, 12)
    found = search.solve(table, 8000.0)
    assert found is not None
    assert found.weight <= 8000.0
    assert found.gap < 2e-3


def test_convex_costs_are_solved_to_within_one_step() -> None:
    # Each unit of weight saves less than the one before: taking savings in their order is optimal.
    weight = np.tile(np.arange(5.0), (3, 1))
    cost = np.array([[16.0, 8, 4, 2, 1], [8, 4, 2, 1, 0.5], [4, 2, 1, 0.5, 0.25]])
    found = search.solve(search.KnapsackProblem(cost, weight), 6.0)
    assert found is not None
    assert found.choice.tolist() == [3, 2, 1]
    assert found.cost == pytest.approx(6.0)
    assert found.gap == pytest.approx(0.0)


def test_what_costs_least_is_taken_where_the_limit_does_not_bind() -> None:
    found = search.solve(search.KnapsackProblem(np.array([[3.0, 1.0, 1.0]]), np.array([[1.0, 5.0, 4.0]])), 10.0)
    assert found is not None
    assert (found.choice.tolist(), found.gap, found.price) == ([2], 0.0, 0.0)


def test_there_is_no_solution_where_the_lightest_choices_weigh_too_much() -> None:
    assert search.solve(search.KnapsackProblem(np.array([[3.0, 1.0]]), np.array([[2.0, 5.0]])), 1.9) is None


def test_a_choice_an_item_does_not_have_is_never_taken() -> None:
    table = search.KnapsackProblem(np.array([[5.0, np.inf], [5.0, 1.0]]), np.array([[3.0, 0.0], [3.0, 4.0]]))
    found = search.solve(table, 7.0)
    assert found is not None
    assert found.choice.tolist() == [0, 1]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    tokens = read_tokens(str(BOOK), None, Text(FolderFiles(DEMO_MODEL)), 512, 128)
    return losses_of(profiled(DEMO_MODEL, tmp_path_factory.mktemp("demo") / "profile", tokens, ProfileOptions("fast")))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return model_spec(str(DEMO_MODEL))


def least_of_all(choices: search.FormatChoices, losses: Losses, max_bytes: int) -> float:
    """The least that any choice for each expert loses within so many bytes: dynamic programming, no expert after
    another forgotten, bytes in units of their greatest common divisor."""
    unit = int(np.gcd.reduce(choices.extent_bytes))
    sizes = (choices.extent_bytes // unit).tolist()
    room = max_bytes // unit
    best = np.zeros(room + 1)  # of the experts so far, within so many units
    for expert in choices.losses(losses):
        within = np.full(room + 1, np.inf)
        for size, lost in zip(sizes, expert.tolist(), strict=True):
            np.minimum(within[size:], best[: room + 1 - size] + lost, out=within[size:])
        best = within
    return float(best[-1])


@pytest.mark.slow  # the demo model is profiled
@pytest.mark.parametrize("width", [2, 3, 4])
def test_at_a_uniform_plans_bytes_the_knapsack_is_within_its_gap_of_the_exact_best(
    losses: Losses, spec: ModelSpec, width: int
) -> None:
    part = part_format(width, 64)
    expert = expert_layout(uniform_plan(spec, "up", part, part).experts[0][0], "up", spec.expert, spec.hidden_size)
    max_bytes = 32 * expert.num_bytes
    found = least_loss(spec, "up", losses, max_bytes)
    assert found is not None
    best = least_of_all(search.expert_choices(spec, "up", losses), losses, max_bytes)
    assert found.solution.bound <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= found.loss <= best / (1 - found.solution.gap) * (1 + 1e-12)
    assert found.solution.gap < 1e-3


@pytest.mark.slow
def test_at_few_bits_the_demo_models_experts_are_trellises_and_lose_less_than_by_hqq(
    losses: Losses, spec: ModelSpec
) -> None:
    """2.4 bits a weight, all bytes of extents; rows of 128 end in a CRC and padding besides."""
    num_weights = 4 * 8 * 3 * spec.expert.intermediate_size * spec.hidden_size
    found = least_loss(spec, "none", losses, int(2.4 * num_weights / 8))
    assert found is not None and found.decision.plan.quantizer == "calibrated"
    parts = [part for layer in found.decision.plan.experts for e in layer for part in (e.gate, e.up, e.down)]
    assert {part.codec for part in parts if part} == {"trellis"}
    plain = least_loss(spec, "none", replace(losses, quantizer="hqq"), int(2.6 * num_weights / 8))
    assert plain is not None and found.loss < plain.loss
