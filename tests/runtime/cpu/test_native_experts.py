"""The native kernels for experts against plain torch: whole, and of selected neurons; over samples of all choices."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from support.cases import case, random_seed
from support.combinations import Combination, name_of, sample
from support.expert_cases import CHOICES, FEW_CHOICES, TOGETHER, Case, can_be, case_of, drawn
from support.native import INSTRUCTION_SETS, kernels_limited_to, select, work
from support.random_experts import (
    FOUR_BIT,
    RandomExpert,
    Shape,
    assert_near,
    magnitudes,
    random_expert,
    random_tokens,
    running,
)
from torch import Tensor

from moe_pack.formats import BF16, ExpertFormat, Selector, part_format
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.cpu import ExpertRows, ExpertWork, Kernels, SelectedNeurons
from moe_pack.runtime.model import activations, run_expert


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_limited_to(request.param)


def check_at_once(held: Case, kernels: Kernels) -> None:
    num_tokens = len(held.x)
    everyone = work(held.expert.rows(held.threshold), torch.arange(num_tokens), torch.ones(num_tokens))
    assert_near(kernels.experts(held.x, [everyone]), held.y, held.errors.y)


def check_selection(held: Case, kernels: Kernels) -> SelectedNeurons:
    found = select(held.x, held.expert.rows(held.threshold), kernels)
    if held.expert.rows().selector is None:
        assert not found.a.any() and found.runs.all() and found.neurons.tolist() == list(range(held.runs.shape[1]))
        return found
    assert_near(found.a, held.values.of(held.selector), held.errors.a)
    # By the kernels' own activations: the reference's may be zero, or on the other side of zero, where sums round.
    runs = (found.a != 0) & ~(found.a.abs() < held.threshold)
    assert torch.equal(found.runs, runs), "the neurons that run"
    assert found.neurons.tolist() == runs.any(dim=0).nonzero()[:, 0].tolist(), "the neurons of any token"
    return found


def check_part(held: Case, kernels: Kernels, selected: SelectedNeurons) -> None:
    """That every third neuron of those selected gives its part of the sum, whatever the other tokens run."""
    if held.selector == "none":
        return  # what runs is known when all has been computed
    part = replace(selected, neurons=selected.neurons[::3].contiguous())
    chosen = torch.zeros_like(selected.runs)
    chosen[:, part.neurons.long()] = selected.runs[:, part.neurons.long()]
    expected = torch.where(chosen, held.values.h, 0.0) @ held.block.down
    magnitude = (chosen * held.errors.h) @ held.expert.weight_magnitudes("down")
    bias = held.expert.packed().down_bias()
    if bias is not None:
        expected, magnitude = expected + bias, magnitude + bias.double().abs()
    assert_near(run_selected(held.x, held.expert.rows(held.threshold), part, kernels), expected, magnitude)


def run_selected(x: Tensor, rows: ExpertRows, selected: SelectedNeurons, kernels: Kernels) -> Tensor:
    """The outputs of all tokens, of the neurons that were selected before."""
    tokens, weights, out = np.arange(len(x)), np.ones(len(x), np.float32), np.zeros(x.shape, np.float32)
    kernels.experts_apart(x, [ExpertWork(rows, tokens, weights, tokens, selected)], out)
    return torch.from_numpy(out)


def check_combinations(combinations: list[Combination], kernels: Kernels, seed: int) -> None:
    """That experts, selection, and experts of selected neurons are the reference's in every combination."""
    for number, combination in enumerate(combinations):
        with case(name_of(combination)):
            held = drawn(combination, seed + number)
            check_at_once(held, kernels)
            check_part(held, kernels, check_selection(held, kernels))


def test_experts_give_the_reference_whole_and_in_part(kernels: Kernels) -> None:
    """Each instruction set meets other combinations."""
    seed = INSTRUCTION_SETS.index(kernels.instruction_set)  # type: ignore[arg-type]  # the one it was limited to
    check_combinations(sample(FEW_CHOICES, can_be, together=TOGETHER, seed=seed), kernels, seed)


@pytest.mark.slow
def test_experts_of_every_two_choices_give_the_reference(kernels: Kernels) -> None:
    """Seeds 0 and 1 keep the bound; of any random experts, a few sums of few neurons exceed it."""
    seed = random_seed()
    check_combinations(sample(CHOICES, can_be, seed=seed), kernels, seed)


EIGHT_BIT = part_format(8, 32, 8)
HAVE_SELECTORS: tuple[Selector, ...] = ("up", "gate", "both")


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


def test_all_tokens_may_go_to_one_expert_among_several(kernels: Kernels) -> None:
    for num_tokens in (1, 3, 64, 150):
        with case(num_tokens):
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
    selected = select(torch.empty(0, 192), rows, kernels)
    assert selected.a.shape == (0, 70) and not len(selected.neurons)
    assert run_selected(torch.empty(0, 192), rows, selected, kernels).shape == (0, 192)
    for num_tokens in (1, 4):
        x = random_tokens(num_tokens, 192)
        no_neurons = replace(select(x, rows, kernels), neurons=torch.empty(0, dtype=torch.int32))
        assert not run_selected(x, rows, no_neurons, kernels).any()


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


def test_only_neurons_near_a_threshold_may_differ(kernels: Kernels) -> None:
    """Thresholds that are an activation of the reference, to the last bit."""
    for selector, num_tokens in product(HAVE_SELECTORS, (1, 3, 20)):
        expert, x = mixed(6, 257, selector), random_tokens(num_tokens, 192)
        a = activations(x, expert.block(), "silu").of(selector)
        for threshold in a.abs().flatten().sort().values[:: a.numel() // 40].tolist():
            with case((selector, num_tokens, threshold)):
                found = select(x, expert.rows(threshold), kernels)
                differ = found.runs != ((a != 0) & ~(a.abs() < threshold))
                assert ((a.abs() - threshold).abs()[differ] <= 1e-4 * threshold).all()


def test_a_threshold_is_the_least_activation_that_runs(kernels: Kernels) -> None:
    """Of the kernels' own activations: at one exactly a neuron runs, and at the next float it does not.

    Each neuron's down row has a one in the neuron's column, and zeros: outputs are `h`.
    """
    for selector, num_tokens in product(SELECTORS, (1, 8)):
        expert, x = random_expert(replace(mixed(7, 65, selector).shape, down=BF16), 7), random_tokens(num_tokens, 192)
        down = expert.part_bytes("down")
        down[:] = 0
        for neuron in range(65):
            down[neuron, 2 * neuron : 2 * neuron + 2] = 0x80, 0x3F
        everyone = torch.arange(num_tokens), torch.ones(num_tokens)
        h = kernels.experts(x, [work(expert.rows(), *everyone)])
        exact = (h if selector == "none" else select(x, expert.rows(), kernels).a).abs()[0, 30]
        for threshold, runs in ((exact, True), (torch.nextafter(exact, exact + 1), False)):
            with case((selector, num_tokens, runs)):
                found = kernels.experts(x, [work(expert.rows(float(threshold)), *everyone)])
                assert torch.equal(found[0, 30], h[0, 30] if runs else torch.tensor(0.0))


def test_an_input_that_is_not_finite_runs_and_is_seen(kernels: Kernels) -> None:
    """In its own token, whatever the threshold; others are as without it."""
    for selector, num_tokens in product(SELECTORS, (1, 3, 4, 66)):
        expert, x = mixed(8, 65, selector), random_tokens(num_tokens, 192)
        everyone = work(expert.rows(1e30), torch.arange(num_tokens), torch.ones(num_tokens))
        with case((selector, num_tokens, "finite")):
            assert not kernels.experts(x, [everyone]).any()
        for bad in (float("nan"), float("inf"), float("-inf")):
            with case((selector, num_tokens, bad)):
                x[-1, 77] = bad
                found = kernels.experts(x, [everyone])
                assert not found[-1].isfinite().any()
                assert not found[:-1].any()


def test_neurons_of_inputs_that_are_zero_do_not_run(kernels: Kernels) -> None:
    for selector, num_tokens in product(SELECTORS, (1, 4)):
        with case((selector, num_tokens)):
            rows, x = mixed(9, 65, selector).rows(), torch.zeros(num_tokens, 192)
            assert len(select(x, rows, kernels).neurons) == (65 if selector == "none" else 0)
            assert not kernels.experts(x, [work(rows, torch.arange(num_tokens), torch.ones(num_tokens))]).any()


def test_experts_bear_inputs_of_any_size(kernels: Kernels) -> None:
    """Up to where the reference itself overflows; its products of tiny activations are zero."""
    for selector, num_tokens, size in product(SELECTORS, (1, 4), (1e-38, 1e-25, 1e-10, 1e10, 1e15)):
        with case((selector, num_tokens, size)):
            held = case_of(mixed(10, 65, selector), random_tokens(num_tokens, 192) * size, 0.0)
            everyone = work(held.expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))
            assert held.y.isfinite().all()
            assert_near(kernels.experts(held.x, [everyone]), held.y, held.errors.y.clamp(min=1e-38))


def test_experts_overflow_where_the_reference_does(kernels: Kernels) -> None:
    for num_tokens in (1, 4):
        with case(num_tokens):
            expert, x = mixed(11, 65), random_tokens(num_tokens, 192) * 1e30
            everyone = work(expert.rows(), torch.arange(num_tokens), torch.ones(num_tokens))
            assert not run_expert(x, expert.packed(), "silu", "up", 0.0).isfinite().any()
            assert not kernels.experts(x, [everyone]).isfinite().any()
