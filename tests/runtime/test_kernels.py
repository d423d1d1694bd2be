"""The native kernels for experts against plain torch: at once and step by step, over every pair of choices."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from combinations import Combination, sample
from native import INSTRUCTION_SETS, kernels_limited_to, work
from random_experts import (
    FOUR_BIT,
    Magnitudes,
    RandomExpert,
    Shape,
    assert_near,
    magnitudes,
    random_expert,
    random_tokens,
    running,
    threshold_at,
)
from torch import Tensor

from moe_pack.formats import (
    BF16,
    E5M2,
    FP8,
    MXFP4,
    SELECTORS,
    TRELLIS_WIDTHS,
    ExpertFormat,
    PartFormat,
    Selector,
    part_format,
    trellis_format,
)
from moe_pack.runtime import Activations, NeuronBlock, activations, run_expert
from moe_pack.runtime.native_kernels import Kernels, Selected

WIDTHS = (1, 2, 3, 4, 8, 16, "fp8", "e5m2", "mxfp4")  # the last three in the one format each has
TRELLISES = tuple(f"trellis {width}" for width in TRELLIS_WIDTHS)
SOURCES = {"fp8": FP8, "e5m2": E5M2, "mxfp4": MXFP4}
CHOICES: dict[str, tuple[object, ...]] = {
    "gate": (*WIDTHS, None),
    "up": WIDTHS,
    "down": WIDTHS,
    "group": (0, 16, 32, 64, 128),
    "scale_bits": (16, 8),
    "selector": SELECTORS,
    "bias": ((), ("up",), ("gate", "up"), ("down",), ("gate", "up", "down")),
    "function": ("silu", "relu", "clamped_swiglu"),
    "num_rows": (1, 7, 33, 65, 129, 257),
    "num_cols": (64, 70, 192, 320, 640, 1088),  # multiples of a block but not of a chunk; 70 with bf16 alone
    "num_tokens": (1, 2, 3, 4, 5, 17, 64, 65, 100),
    "sparsity": (0.0, 0.5, 0.8, 0.9, 1.0),
}


def can_be(c: Combination) -> bool:
    widths = [c[name] for name in ("gate", "up", "down") if c[name] is not None]
    if c["gate"] is None and (c["selector"] in ("gate", "both") or "gate" in c["bias"]):  # type: ignore[operator]
        return False
    if c["gate"] is None and c["function"] == "clamped_swiglu":
        return False
    if c["num_cols"] % 64:  # type: ignore[operator]
        return widths.count(16) == len(widths)
    grouped = any(width in TRELLISES or (isinstance(width, int) and width < 16) for width in widths)
    return not grouped or not c["group"] or not c["num_cols"] % c["group"]  # type: ignore[operator]


@dataclass(frozen=True)
class Case:
    """An expert at work on tokens, and what plain torch makes of them."""

    expert: RandomExpert
    x: Tensor
    threshold: float
    block: NeuronBlock
    values: Activations
    runs: Tensor
    errors: Magnitudes
    y: Tensor

    @property
    def selector(self) -> Selector:
        return self.expert.shape.selector


def case_of(expert: RandomExpert, x: Tensor, sparsity: float) -> Case:
    block, selector = expert.block(), expert.shape.selector
    values = activations(x, block, expert.shape.function)
    threshold = threshold_at(values.of(selector), sparsity)
    runs = running(values, selector, threshold)
    y = run_expert(x, expert.packed(), expert.shape.function, selector, threshold)
    return Case(expert, x, threshold, block, values, runs, magnitudes(x, expert, runs), y)


@cache
def case(number: int) -> Case:
    c = SAMPLE[number]

    def stored(name: str) -> PartFormat:
        width = c[name]
        if width in TRELLISES:
            return trellis_format(TRELLIS_WIDTHS[TRELLISES.index(width)], c["group"], c["scale_bits"])  # type: ignore[arg-type]
        if isinstance(width, str):
            return SOURCES[width]
        return part_format(width, c["group"], c["scale_bits"])  # type: ignore[arg-type]

    gate = None if c["gate"] is None else stored("gate")
    shape = Shape(
        c["num_rows"],  # type: ignore[arg-type]
        c["num_cols"],  # type: ignore[arg-type]
        c["selector"],  # type: ignore[arg-type]
        gate,
        stored("up"),
        stored("down"),
        c["bias"],  # type: ignore[arg-type]
        c["function"],  # type: ignore[arg-type]
    )
    special = (shape.num_rows // 2, shape.num_rows // 3) if shape.num_rows > 2 else ()
    expert = random_expert(shape, number, special[:1], special[1:])
    return case_of(expert, random_tokens(c["num_tokens"], shape.num_cols, number), c["sparsity"])  # type: ignore[arg-type]


# Of trellises beside each other, in rows of affine codes, and in rows of which they are a part.
OF_TRELLISES: dict[str, tuple[object, ...]] = {
    **CHOICES,
    "gate": (*TRELLISES, 3, None),
    "up": (*TRELLISES, 2),
    "down": (*TRELLISES, 4),
    "num_cols": (64, 192, 320, 640, 1088),
}
SAMPLE = sample(CHOICES, can_be, 180) + sample(OF_TRELLISES, can_be, 120)


def name_of(number: int) -> str:
    return "-".join(str(value).replace(" ", "") for value in SAMPLE[number].values())


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


each_combination = pytest.mark.parametrize("number", range(len(SAMPLE)), ids=name_of)


@each_combination
def test_an_expert_at_once_gives_the_reference_output(number: int, kernels: Kernels) -> None:
    held = case(number)
    num_tokens = len(held.x)
    everyone = work(held.expert.rows(held.threshold), torch.arange(num_tokens), torch.ones(num_tokens))
    assert_near(kernels.experts(held.x, [everyone]), held.y, held.errors.y)


@each_combination
def test_selection_gives_the_activations_and_neurons_of_the_reference(number: int, kernels: Kernels) -> None:
    held = case(number)
    found = kernels.select(held.x, held.expert.rows(held.threshold))
    if held.expert.rows().selector is None:
        assert not found.a.any() and found.runs.all() and found.neurons.tolist() == list(range(held.runs.shape[1]))
        return
    assert_near(found.a, held.values.of(held.selector), held.errors.a)
    assert torch.equal(found.runs, held.runs)
    assert found.neurons.tolist() == held.runs.any(dim=0).nonzero()[:, 0].tolist()


@each_combination
def test_selected_neurons_do_what_those_of_the_reference_do(number: int, kernels: Kernels) -> None:
    held = case(number)
    rows = held.expert.rows(held.threshold)
    selected = kernels.select(held.x, rows)
    found, chosen = kernels.neurons(held.x, rows, selected), selected.neurons.long()
    assert torch.equal(found != 0, (held.runs & (held.values.h != 0))[:, chosen])
    assert_near(found, torch.where(held.runs, held.values.h, 0.0)[:, chosen], held.errors.h[:, chosen])


@each_combination
def test_down_rows_add_up_to_the_reference_sum(number: int, kernels: Kernels) -> None:
    held = case(number)
    neurons = held.runs.any(dim=0).nonzero()[:, 0].to(torch.int32)
    h, down = torch.where(held.runs, held.values.h, 0.0)[:, neurons.long()], held.block.down[neurons.long()]
    found = kernels.accumulate(h, held.expert.rows(held.threshold), neurons)
    bias = held.expert.packed().down_bias()
    expected, magnitude = h @ down, h.double().abs() @ held.expert.weight_magnitudes("down")[neurons.long()]
    if bias is not None:
        expected, magnitude = expected + bias, magnitude + bias.double().abs()
    assert_near(found, expected, magnitude)


EIGHT_BIT = part_format(8, 32, 8)


def mixed(seed: int, num_rows: int, selector: Selector = "up") -> RandomExpert:
    stored = ExpertFormat(part_format(2, 32, 8), FOUR_BIT, EIGHT_BIT)
    return random_expert(Shape(num_rows, 192, selector, stored.gate, stored.up, stored.down), seed)


def weighted_sum(x: Tensor, works: list[tuple[RandomExpert, float, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The reference of several experts over tokens, and the magnitudes of its errors."""
    y, errors = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.float64)
    for expert, threshold, tokens, weights in works:
        selector = expert.shape.selector
        output = run_expert(x[tokens], expert.packed(), "silu", selector, threshold)
        runs = running(activations(x[tokens], expert.block(), "silu"), selector, threshold)
        y.index_add_(0, tokens, weights[:, None] * output)
        magnitude = magnitudes(x[tokens], expert, runs).y
        errors.index_add_(0, tokens, weights.double().abs()[:, None] * magnitude)
    return y, errors


def test_several_experts_add_up_by_their_router_weights(kernels: Kernels) -> None:
    """One without tokens, one with all of them, few and many in turn, each of another shape."""
    x = random_tokens(90, 192)
    draw = torch.Generator().manual_seed(0)
    works = []
    for seed, (num_tokens, f) in enumerate([(2, 7), (0, 33), (90, 65), (1, 1), (3, 129), (4, 40), (65, 3), (1, 200)]):
        tokens = torch.randperm(90, generator=draw)[:num_tokens]
        works.append((mixed(seed, f), 0.0, tokens, torch.randn(num_tokens, generator=draw)))
    y, errors = weighted_sum(x, works)
    given = [work(expert.rows(threshold), tokens, weights) for expert, threshold, tokens, weights in works]
    assert_near(kernels.experts(x, given), y, errors)


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 150])
def test_all_tokens_may_go_to_one_expert_among_several(num_tokens: int, kernels: Kernels) -> None:
    x, none = random_tokens(num_tokens, 192), torch.empty(0)
    everyone = torch.arange(num_tokens), torch.linspace(-1, 2, num_tokens)
    works = [(mixed(1, 70), 0.0, *everyone), *((mixed(i, 9), 0.0, none.long(), none) for i in (2, 3))]
    y, errors = weighted_sum(x, works)
    assert_near(kernels.experts(x, [work(e.rows(t), *rest) for e, t, *rest in works]), y, errors)


def test_without_experts_or_tokens_outputs_are_zero(kernels: Kernels) -> None:
    none, rows = torch.empty(0), mixed(1, 70).rows()
    assert torch.equal(kernels.experts(random_tokens(2, 192), []), torch.zeros(2, 192))
    assert torch.equal(kernels.experts(random_tokens(2, 192), [work(rows, none.long(), none)]), torch.zeros(2, 192))
    assert kernels.experts(torch.empty(0, 192), [work(rows, none.long(), none)]).shape == (0, 192)
    selected = kernels.select(torch.empty(0, 192), rows)
    assert selected.a.shape == (0, 70) and not len(selected.neurons)
    assert kernels.neurons(torch.empty(0, 192), rows, selected).shape == (0, 0)
    assert kernels.accumulate(torch.empty(0, 0), rows, selected.neurons).shape == (0, 192)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "times"),
    [
        pytest.param(Shape(3, 64, "up", FOUR_BIT, FOUR_BIT, BF16), 1, 300, id="many"),
        pytest.param(Shape(32, 16384, "up", BF16, BF16, BF16), 3, 45, id="wide"),  # unfinished sums pass 16 MiB
    ],
)
def test_more_experts_than_fit_side_by_side_add_up_one_after_the_other(
    shape: Shape, num_tokens: int, times: int, kernels: Kernels
) -> None:
    x, rows = random_tokens(num_tokens, shape.num_cols), random_expert(shape).rows()
    everyone = work(rows, torch.arange(num_tokens), torch.ones(num_tokens))
    alone, expected = kernels.experts(x, [everyone]), torch.zeros_like(x)
    for _ in range(times):
        expected += alone
    assert torch.equal(kernels.experts(x, [everyone] * times), expected)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_records_may_lie_anywhere(num_tokens: int, selector: Selector, kernels: Kernels) -> None:
    """Gathered side by side, backwards, they give the same bits as in their own places."""
    expert, x = mixed(5, 129, selector), random_tokens(num_tokens, 192)
    threshold = threshold_at(activations(x, expert.block(), "silu").of(selector), 0.8)
    rows = expert.rows(threshold)
    selected = kernels.select(x, rows)
    h = kernels.neurons(x, rows, selected)
    staged = kernels.gather(rows.records, selected.neurons.flip(0).numpy())
    places = torch.arange(len(selected.neurons), dtype=torch.int32).flip(0)
    elsewhere = replace(rows, records=staged)
    assert torch.equal(kernels.neurons(x, elsewhere, selected, places), h)
    in_place, moved = (
        kernels.accumulate(h, *given) for given in ((rows, selected.neurons), (elsewhere, selected.neurons, places))
    )
    assert torch.equal(in_place, moved)


@pytest.mark.parametrize("selector", ["up", "gate", "both"])
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_only_neurons_near_a_threshold_may_differ(selector: Selector, num_tokens: int, kernels: Kernels) -> None:
    """Thresholds that are an activation of the reference, to the last bit."""
    expert, x = mixed(6, 257, selector), random_tokens(num_tokens, 192)
    a = activations(x, expert.block(), "silu").of(selector)
    for threshold in a.abs().flatten().sort().values[:: a.numel() // 40].tolist():
        found = kernels.select(x, expert.rows(threshold))
        differ = found.runs != ((a != 0) & ~(a.abs() < threshold))
        assert ((a.abs() - threshold).abs()[differ] <= 1e-4 * threshold).all()


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_threshold_is_the_least_activation_that_runs(selector: Selector, num_tokens: int, kernels: Kernels) -> None:
    """Of the kernels' own activations: at one exactly a neuron runs, and at the next float it does not."""
    expert, x = mixed(7, 65, selector), random_tokens(num_tokens, 192)
    everything = Selected(
        torch.zeros(num_tokens, 65), torch.ones(num_tokens, 65, dtype=torch.bool), torch.arange(65, dtype=torch.int32)
    )
    rows = expert.rows()
    a = kernels.neurons(x, rows, everything) if selector == "none" else kernels.select(x, rows).a
    exact = a.abs()[0, 30]
    for threshold, runs in ((exact, True), (torch.nextafter(exact, exact + 1), False)):
        above = expert.rows(float(threshold))
        selected = kernels.select(x, above)
        assert bool(kernels.neurons(x, above, selected)[0, selected.neurons == 30].any()) is runs


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 66])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_not_finite_runs_and_is_seen(
    bad: float, num_tokens: int, selector: Selector, kernels: Kernels
) -> None:
    """In its own token, whatever the threshold; others are as without it."""
    expert, x = mixed(8, 65, selector), random_tokens(num_tokens, 192)
    everyone = work(expert.rows(1e30), torch.arange(num_tokens), torch.ones(num_tokens))
    assert not kernels.experts(x, [everyone]).any()
    x[-1, 77] = bad
    found = kernels.experts(x, [everyone])
    assert not found[-1].isfinite().any()
    assert not found[:-1].any()


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_neurons_of_inputs_that_are_zero_do_not_run(num_tokens: int, selector: Selector, kernels: Kernels) -> None:
    expert, x = mixed(9, 65, selector), torch.zeros(num_tokens, 192)
    selected = kernels.select(x, expert.rows())
    assert len(selected.neurons) == (65 if selector == "none" else 0)
    assert not kernels.experts(x, [work(expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))]).any()


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e-10, 1e10, 1e15])
def test_experts_bear_inputs_of_any_size(size: float, num_tokens: int, selector: Selector, kernels: Kernels) -> None:
    """Up to where the reference itself overflows; its products of tiny activations are zero."""
    held = case_of(mixed(10, 65, selector), random_tokens(num_tokens, 192) * size, 0.0)
    everyone = work(held.expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))
    assert held.y.isfinite().all()
    assert_near(kernels.experts(held.x, [everyone]), held.y, held.errors.y.clamp(min=1e-38))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_experts_overflow_where_the_reference_does(num_tokens: int, kernels: Kernels) -> None:
    expert, x = mixed(11, 65), random_tokens(num_tokens, 192) * 1e30
    everyone = work(expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))
    assert not run_expert(x, expert.packed(), "silu", "up", 0.0).isfinite().any()
    assert not kernels.experts(x, [everyone]).isfinite().any()
