"""A token's experts on the GPU, step by step and at once, against the reference semantics."""

from dataclasses import dataclass

import pytest
import torch
from gpu_layers import RandomLayer, layer_of, random_layer
from in_turn import in_turn, slow
from kernel_twins import reduce_twin
from named_formats import Name, named_expert, named_format
from random_experts import FOUR_BIT, Shape, assert_near, magnitudes, random_expert, random_tokens, running, threshold_at
from torch import Tensor

from moe_pack.formats import BF16, NeuronFunction, PartFormat, Selector, part_format, trellis_format
from moe_pack.formats.spec import SELECTORS
from moe_pack.runtime.gpu.kernels.cache import Selection
from moe_pack.runtime.gpu.kernels.elementwise import reduce
from moe_pack.runtime.gpu.kernels.experts import neurons, select
from moe_pack.runtime.gpu.kernels.tables import SELECT_BLOCK
from moe_pack.runtime.model import Activations, activations, run_expert

WIDTHS: tuple[Name, ...] = (1, 2, 3, 4, 8, 16, "fp8", "mxfp4", "t4", "t5", "t8")


def of_width(width: int, group: int = 64, scale_bits: int = 16) -> PartFormat:
    return BF16 if width == 16 else part_format(width, group, scale_bits)


@dataclass(frozen=True)
class Run:
    """What kernels made of a token in some experts of a layer, on the host."""

    selection: Selection
    partials: Tensor

    def listed(self, place: int) -> list[int]:
        """The neurons that were listed for the expert in this place."""
        found = []
        for block, count in enumerate(self.selection.counts[place].tolist()):
            start = block * SELECT_BLOCK
            found += self.selection.neurons[place, start : start + count].tolist()
        return found


def run_layer(layer: RandomLayer, x: Tensor, experts: list[int], num_partials: int, device: torch.device) -> Run:
    tables, there = layer.tables_on(device), x.to(device)
    selection = Selection.allocate(len(experts), tables.record_at.shape[1], device)
    numbers = torch.tensor(experts, dtype=torch.int32, device=device)
    partials = torch.full((len(experts), num_partials, len(x)), torch.nan, device=device)
    select(there, numbers, tables, selection)
    neurons(there, numbers, tables, selection, partials)
    held = Selection(selection.a.cpu(), selection.neurons.cpu(), selection.counts.cpu())
    return Run(held, partials.cpu())


def values_of(layer: RandomLayer, x: Tensor, expert: int) -> Activations:
    return activations(x[None], layer.experts[expert].block(), layer.experts[expert].shape.function)


def check(layer: RandomLayer, x: Tensor, experts: list[int], device: torch.device, num_partials: int = 3) -> None:
    """Selection, lists and outputs of these experts are the reference's."""
    run = run_layer(layer, x, experts, num_partials, device)
    for place, e in enumerate(experts):
        expert, threshold = layer.experts[e], float(layer.tables.thresholds[e])
        selector = expert.shape.selector
        values = values_of(layer, x, e)
        is_running = running(values, selector, threshold)
        errors = magnitudes(x[None], expert, is_running)
        if selector == "none":
            assert run.listed(place) == list(range(expert.shape.num_rows))
        else:
            assert_near(run.selection.a[place][None], values.of(selector), errors.a)
            assert run.listed(place) == is_running[0].nonzero()[:, 0].tolist()
        y = run_expert(x[None], expert.packed(), expert.shape.function, selector, threshold)
        assert_near(run.partials[place].sum(0)[None], y, errors.y)


def with_thresholds(layer: RandomLayer, x: Tensor, sparsity: float) -> RandomLayer:
    """The layer with thresholds at which this share of its neurons does not run for x."""
    each = [
        threshold_at(values_of(layer, x, e).of(expert.shape.selector), sparsity)
        for e, expert in enumerate(layer.experts)
    ]
    return layer_of(layer.experts, thresholds=each)


# In the fast suite each width and group meets one selector, and each selector some of each.
@in_turn("width", WIDTHS)
def test_experts_of_any_width_and_selector_give_the_reference(
    selector: Selector, width: Name, kernel_device: torch.device
) -> None:
    stored = named_expert(width)
    x = random_tokens(1, 128)[0]
    layer = random_layer([Shape(66, 128, selector, stored.gate, stored.up, stored.down)] * 2, zero_rows=(0, 5, 65))
    check(with_thresholds(layer, x, 0.6), x, [1], kernel_device, num_partials=2)


@in_turn("scales", [(16, 16), (32, 16), (128, 16), (0, 16), (64, 8), (16, 8)])
def test_experts_of_any_group_and_kind_of_scale_give_the_reference(
    selector: Selector, scales: tuple[int, int], kernel_device: torch.device
) -> None:
    shapes = [Shape(9, 384, selector, *(of_width(w, *scales) for w in trio)) for trio in ((4, 2, 3), (1, 8, 2))]
    x = random_tokens(1, 384)[0]
    check(with_thresholds(random_layer(shapes), x, 0.3), x, [0, 1], kernel_device, num_partials=2)


@pytest.mark.parametrize("selector", ["both", *map(slow, ("none", "up", "gate"))])
def test_experts_of_different_formats_in_one_layer_give_the_reference(
    selector: Selector, kernel_device: torch.device
) -> None:
    trios = [(2, 4, 16), (4, 4, 4), (16, 16, 16), (3, 8, 3), (4, 4, 4)]
    layer = random_layer([Shape(9, 64, selector, *(of_width(w) for w in trio)) for trio in trios])
    assert len(layer.tables.kinds) == 4
    x = random_tokens(1, 64)[0]
    check(with_thresholds(layer, x, 0.5), x, [4, 0, 3, 1, 2], kernel_device, num_partials=2)


@in_turn("scales", [(16, 16), (128, 16), (0, 16), (64, 8), (16, 8)])
def test_trellises_of_any_group_and_kind_of_scale_give_the_reference(
    selector: Selector, scales: tuple[int, int], kernel_device: torch.device
) -> None:
    trios = [(4, 7, 6), (8, 5, 6)]
    shapes = [Shape(9, 384, selector, *(trellis_format(w, *scales) for w in trio)) for trio in trios]
    x = random_tokens(1, 384)[0]
    check(with_thresholds(random_layer(shapes), x, 0.3), x, [0, 1], kernel_device, num_partials=2)


@pytest.mark.parametrize("selector", ["none", *map(slow, ("up", "gate", "both"))])
def test_matrices_of_a_trellis_beside_others_in_one_expert_and_layer_give_the_reference(
    selector: Selector, kernel_device: torch.device
) -> None:
    names: list[tuple[Name, Name, Name]] = [("t4", 3, "t5"), (2, "t8", 16), ("t6", "fp8", "t7"), (4, 4, 4)]
    layer = random_layer([Shape(9, 128, selector, *map(named_format, trio), bias=("up",)) for trio in names])
    assert len(layer.tables.kinds) == 4
    x = random_tokens(1, 128)[0]
    check(with_thresholds(layer, x, 0.5), x, [3, 0, 2, 1], kernel_device, num_partials=2)


@in_turn("bias", [("up",), ("gate", "up")])
def test_biases_are_added_before_the_activation(
    selector: Selector, bias: tuple[str, ...], kernel_device: torch.device
) -> None:
    x = random_tokens(1, 64)[0]
    layer = random_layer([Shape(33, 64, selector, bias=bias)] * 2)  # type: ignore[arg-type]
    check(with_thresholds(layer, x, 0.5), x, [1, 0], kernel_device)


@pytest.mark.parametrize(("selector", "function"), [("up", "relu"), ("none", "silu")])
def test_experts_without_a_gate_give_the_reference(
    selector: Selector, function: NeuronFunction, kernel_device: torch.device
) -> None:
    x = random_tokens(1, 128)[0]
    layer = random_layer([Shape(65, 128, selector, None, bias=("up",), function=function)] * 2)
    check(with_thresholds(layer, x, 0.2), x, [1, 0], kernel_device)


@in_turn("function", ["relu", "clamped_swiglu"])
def test_every_neuron_function_gives_the_reference(
    selector: Selector, function: NeuronFunction, kernel_device: torch.device
) -> None:
    x = random_tokens(2, 64)[1]  # products beyond 7 on both sides
    layer = random_layer([Shape(66, 64, selector, bias=("gate", "up", "down"), function=function)] * 2)
    products = layer.experts[0].block().gate
    assert products is not None and (products @ x).max() > 7 and (products @ x).min() < -7
    check(with_thresholds(layer, x, 0.5), x, [1, 0], kernel_device)


@pytest.mark.parametrize("num_partials", [1, 3])
def test_the_bias_of_down_is_added_once_whichever_neurons_run(num_partials: int, kernel_device: torch.device) -> None:
    layer = random_layer([Shape(20, 1088, bias=("down",))] * 2, thresholds=[1e30, 1e30])
    run = run_layer(layer, random_tokens(1, 1088)[0], [1], num_partials, kernel_device)
    assert layer.tables.down_bias is not None
    assert torch.equal(run.partials[0].sum(0), layer.tables.down_bias[1])


@pytest.mark.parametrize(
    ("selector", "num_rows", "sparsity"),
    [("up", 1, 0.0), ("none", 1, 1.0), ("gate", 64, 0.9), ("both", 63, 1.0), ("none", 65, 0.9), ("up", 130, 0.0)],
)
def test_any_number_of_neurons_and_any_share_of_them_gives_the_reference(
    selector: Selector, num_rows: int, sparsity: float, kernel_device: torch.device
) -> None:
    x = random_tokens(1, 64)[0]
    layer = random_layer([Shape(num_rows, 64, selector)])
    check(with_thresholds(layer, x, sparsity), x, [0], kernel_device, num_partials=5)


@pytest.mark.parametrize("selector", ["up", "gate", "both"])
def test_neurons_that_do_nothing_do_not_run_at_a_threshold_of_zero(
    selector: Selector, kernel_device: torch.device
) -> None:
    shape = Shape(12, 64, selector)
    layer = layer_of([random_expert(shape, zero_rows=(0, 3, 11))])
    run = run_layer(layer, random_tokens(1, 64)[0], [0], 2, kernel_device)
    assert run.listed(0) == [1, 2, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_nan_runs_and_is_seen(selector: Selector, kernel_device: torch.device) -> None:
    layer = random_layer([Shape(20, 64, selector)], thresholds=[1e30])
    x = random_tokens(1, 64)[0]
    x[3] = torch.nan
    run = run_layer(layer, x, [0], 2, kernel_device)
    assert run.listed(0) == list(range(20))
    assert run.partials.sum(1).isnan().all()


def test_outputs_do_not_depend_on_where_rows_lie(kernel_device: torch.device) -> None:
    experts = [random_expert(Shape(90, 128), seed) for seed in range(2)]
    x = random_tokens(1, 128)[0]
    one, other = (run_layer(layer_of(experts, seed), x, [1, 0], 4, kernel_device) for seed in (1, 2))
    assert torch.equal(one.partials, other.partials)


def test_partial_sums_of_nothing_are_zeros(kernel_device: torch.device) -> None:
    layer = random_layer([Shape(20, 64, "up", FOUR_BIT, FOUR_BIT, of_width(3))], thresholds=[1e30])
    run = run_layer(layer, random_tokens(1, 64)[0], [0], 3, kernel_device)
    assert not run.listed(0) and torch.equal(run.partials, torch.zeros(1, 3, 64))


@pytest.mark.parametrize(("k", "num_partials", "d"), [(1, 1, 64), (2, 5, 70), (8, 16, 128)])
def test_partial_sums_are_added_with_the_routers_weights(
    k: int, num_partials: int, d: int, kernel_device: torch.device
) -> None:
    partials, weights = torch.randn(k, num_partials, d), torch.rand(k)
    residual, shared = torch.randn(d), torch.randn(d)
    plain = reduce_twin(partials, weights)
    expected = residual + 2.5 * (shared + plain)
    partials, weights, residual, shared = (each.to(kernel_device) for each in (partials, weights, residual, shared))
    out = torch.full_like(residual, torch.nan)
    reduce(partials, weights, out)
    torch.testing.assert_close(out.cpu(), plain, rtol=1e-5, atol=1e-5)
    reduce(partials, weights, residual, residual=residual, shared=shared, scale=2.5)
    torch.testing.assert_close(residual.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_pulled", [0, 1, 5])
@pytest.mark.parametrize("has_host", [False, True])
def test_partial_sums_of_pulled_records_and_the_cpus_share_are_added(
    num_pulled: int, has_host: bool, kernel_device: torch.device
) -> None:
    here, pulled, weights = torch.randn(3, 4, 70), torch.randn(3, num_pulled, 70), torch.rand(3)
    residual, host = torch.randn(70), torch.randn(70)
    expected = residual + 0.5 * (reduce_twin(here, weights) + reduce_twin(pulled, weights) + has_host * host)
    here, pulled, weights, residual = (each.to(kernel_device) for each in (here, pulled, weights, residual))
    reduce(
        here,
        weights,
        residual,
        pulled=pulled if num_pulled else None,
        host=(host.pin_memory() if kernel_device.type == "cuda" else host) if has_host else None,
        residual=residual,
        scale=0.5,
    )
    torch.testing.assert_close(residual.cpu(), expected, rtol=1e-5, atol=1e-5)
