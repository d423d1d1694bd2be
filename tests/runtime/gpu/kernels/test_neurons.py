"""A token's experts on the GPU: which neurons run, where each is computed, and what they give."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from support.cases import case
from support.gpu_layers import (
    PartlyThere,
    RandomLayer,
    layer_of,
    partly_there,
    random_layer,
    random_running,
    running_on,
)
from support.in_turn import in_turn, slow
from support.kernel_twins import compact_plain, listed_in_blocks, pull_records_plain, pull_selectors_plain
from support.named_formats import Name, named_expert, named_format
from support.printed_split import balanced
from support.random_experts import Shape, assert_near, magnitudes, random_expert, random_tokens, running, threshold_at
from torch import Tensor

from moe_pack.formats import NeuronFunction, Selector, part_format, trellis_format
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select
from moe_pack.runtime.gpu.kernels.tables import HERE, LEFT, PULLED, WHOLE, LeftToCpu, RunningNeurons
from moe_pack.runtime.model import Activations, activations, run_expert

CPU = torch.device("cpu")
WIDTHS: tuple[Name, ...] = (1, 2, 3, 4, 8, 16, "fp8", "mxfp4", "t4", "t5", "t8")


@dataclass(frozen=True)
class Run:
    """The kernels' answers for a token in some experts of a layer, on the host."""

    running: RunningNeurons
    left: LeftToCpu
    here: Tensor
    pulled: Tensor

    def entries(self, place: int) -> tuple[list[int], list[int]]:
        """The neurons in the two ranges of a place's list."""
        here, pulled, *_ = self.running.totals[place].tolist()
        listed = self.running.neurons[place].tolist()
        return listed[:here], listed[here : here + pulled]

    def to_cpu(self, place: int) -> list[int]:
        """The neurons that are left to the CPU."""
        found: list[int] = self.left.neurons[place, : max(0, int(self.left.counts[place]))].tolist()
        return found


def run_layer(
    layer: PartlyThere,
    x: Tensor,
    experts: list[int],
    num_partials: int = 3,
    is_split: bool = False,
    share: float = 0.0,
    pulls_selectors: bool = False,
    block: int | None = None,
) -> Run:
    """Runs a token, listing neurons in blocks of this size; rows come from host memory by the twins."""
    tables, device = layer.tables, layer.tables.arena.device
    there, numbers = x.to(device), torch.tensor(experts, dtype=torch.int32, device=device)
    found = RunningNeurons.allocate(len(experts), tables.record_at.shape[1], device)
    left, selector_units = layer.pinned(len(experts)), None
    if block is not None:
        num_blocks = -(-found.neurons.shape[1] // block)
        counts = torch.zeros((2, len(experts), num_blocks), dtype=torch.int32, device=device)
        found = found._replace(counts=counts, block=block)
    if pulls_selectors:
        selector_units = torch.full_like(found.neurons, -7)
        pull_selectors_plain(numbers, tables, layer.host, layer.selectors_at, selector_units)
    select(there, numbers, tables, found, selector_units)
    part, kept = torch.tensor([share], device=device), layer.kept(len(experts))
    compact(numbers, tables, found, layer.landing, part, left, is_split, kept=kept)
    pull_records_plain(numbers, tables, found, layer.host, is_split)
    here, pulled = torch.full((2, len(experts), num_partials, len(x)), torch.nan, device=device)
    neurons(there, numbers, tables, found, here, "here")
    if is_split:
        neurons(there, numbers, tables, found, pulled, "pulled")
    return Run(running_on(found, CPU), left, here.cpu(), pulled.cpu())


def values_of(layer: RandomLayer, x: Tensor, expert: int) -> Activations:
    return activations(x[None], layer.experts[expert].block(), layer.experts[expert].shape.function)


def check(layer: RandomLayer, x: Tensor, experts: list[int], device: torch.device, num_partials: int = 3) -> None:
    """Selection, lists and outputs of these experts are the reference's; half of the records are pulled."""
    run = run_layer(partly_there(layer, device, 0.5, len(experts)), x, experts, num_partials)
    for place, e in enumerate(experts):
        expert, threshold = layer.experts[e], float(layer.tables.thresholds[e])
        selector = expert.shape.selector
        values = values_of(layer, x, e)
        is_running = running(values, selector, threshold)
        errors = magnitudes(x[None], expert, is_running)
        if selector == "none":
            expected = list(range(expert.shape.num_rows))
            assert not run.running.a[place].any()
        else:
            assert_near(run.running.a[place][None], values.of(selector), errors.a)
            expected = is_running[0].nonzero()[:, 0].tolist()
        assert listed_in_blocks(run.running, place) == expected
        assert run.entries(place) == (expected, [])
        y = run_expert(x[None], expert.packed(), expert.shape.function, selector, threshold)
        assert_near(run.here[place].sum(0)[None], y, errors.y)


def with_thresholds(layer: RandomLayer, x: Tensor, sparsity: float) -> RandomLayer:
    """The layer with thresholds at which this share of its neurons does not run for x."""
    each = [
        threshold_at(values_of(layer, x, e).of(expert.shape.selector), sparsity)
        for e, expert in enumerate(layer.experts)
    ]
    return layer_of(layer.experts, thresholds=each)


def check_shapes(
    shapes: Sequence[Shape],
    sparsity: float,
    experts: list[int],
    device: torch.device,
    num_partials: int = 3,
    zero_rows: Sequence[int] = (),
) -> None:
    """Checks a layer of such experts, of which this share of the neurons does not run."""
    x = random_tokens(1, shapes[0].num_cols)[0]
    layer = random_layer(shapes, zero_rows=zero_rows)
    check(with_thresholds(layer, x, sparsity), x, experts, device, num_partials)


# In the fast suite each width and group meets one selector, and each selector some of each.
@in_turn("width", WIDTHS)
def test_experts_of_any_width_and_selector_give_the_reference(
    selector: Selector, width: Name, kernel_device: torch.device
) -> None:
    stored = named_expert(width)
    shape = Shape(66, 128, selector, stored.gate, stored.up, stored.down)
    check_shapes([shape] * 2, 0.6, [1], kernel_device, 2, zero_rows=(0, 5, 65))


@in_turn("scales", [(16, 16), (32, 16), (128, 16), (0, 16), (64, 8), (16, 8)])
def test_experts_and_trellises_of_any_group_and_kind_of_scale_give_the_reference(
    selector: Selector, scales: tuple[int, int], kernel_device: torch.device
) -> None:
    for form, trios in ((part_format, ((4, 2, 3), (1, 8, 2))), (trellis_format, ((4, 7, 6), (8, 5, 6)))):
        shapes = [Shape(9, 384, selector, *(form(width, *scales) for width in trio)) for trio in trios]
        check_shapes(shapes, 0.3, [0, 1], kernel_device, 2)


@pytest.mark.parametrize("selector", ["both", "none", *map(slow, ("up", "gate"))])
def test_experts_of_different_formats_in_one_layer_give_the_reference(
    selector: Selector, kernel_device: torch.device
) -> None:
    # Rows of 2048 columns and 8 bits take eight warps, those of 1 bit one: their rows are summed up in eight groups.
    trios = [(2, 4, 16), (1, 1, 1), (3, 8, 3), (8, 4, 8), (1, 1, 1)]
    shapes = [Shape(9, 2048, selector, *map(named_format, trio)) for trio in trios]
    assert len(random_layer(shapes).tables.kinds) == 4
    check_shapes(shapes, 0.5, [4, 0, 3, 1, 2], kernel_device, 2)


@pytest.mark.parametrize("selector", ["none", *map(slow, ("up", "gate", "both"))])
def test_matrices_of_a_trellis_and_others_in_one_expert_and_layer_give_the_reference(
    selector: Selector, kernel_device: torch.device
) -> None:
    names: list[tuple[Name, Name, Name]] = [("t4", 3, "t5"), (2, "t8", 16), ("t6", "fp8", "t7"), (4, 4, 4)]
    shapes = [Shape(9, 128, selector, *map(named_format, trio), bias=("up",)) for trio in names]
    assert len(random_layer(shapes).tables.kinds) == 4
    check_shapes(shapes, 0.5, [3, 0, 2, 1], kernel_device, 2)


@in_turn("bias", [("up",), ("gate", "up")])
def test_biases_are_added_before_the_activation(
    selector: Selector, bias: tuple[str, ...], kernel_device: torch.device
) -> None:
    check_shapes([Shape(33, 64, selector, bias=bias)] * 2, 0.5, [1, 0], kernel_device)  # type: ignore[arg-type]


@pytest.mark.parametrize(("selector", "function"), [("up", "relu"), ("none", "silu")])
def test_experts_without_a_gate_give_the_reference(
    selector: Selector, function: NeuronFunction, kernel_device: torch.device
) -> None:
    check_shapes([Shape(65, 128, selector, None, bias=("up",), function=function)] * 2, 0.2, [1, 0], kernel_device)


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
    there, x = partly_there(layer, kernel_device, 0.0, 1), random_tokens(1, 1088)[0]
    run = run_layer(there, x, [1], num_partials, is_split=True)
    assert layer.tables.down_bias is not None
    assert torch.equal(run.here[0].sum(0), layer.tables.down_bias[1])
    assert torch.equal(run.pulled, torch.zeros_like(run.pulled))


@pytest.mark.parametrize(
    ("selector", "num_rows", "sparsity"),
    [("up", 1, 0.0), ("none", 1, 1.0), ("gate", 64, 0.9), ("both", 63, 1.0), ("none", 65, 0.9), ("up", 130, 0.0)],
)
def test_any_number_of_neurons_and_any_share_of_them_gives_the_reference(
    selector: Selector, num_rows: int, sparsity: float, kernel_device: torch.device
) -> None:
    check_shapes([Shape(num_rows, 64, selector)], sparsity, [0], kernel_device, num_partials=5)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_lists_do_not_depend_on_the_blocks(block: int, kernel_device: torch.device) -> None:
    x = random_tokens(1, 64)[0]
    layer = with_thresholds(random_layer([Shape(130, 64, "up")]), x, 0.5)
    there = partly_there(layer, kernel_device, 0.5, 1)
    run, expected = run_layer(there, x, [0], block=block), run_layer(there, x, [0])
    assert run.running.counts.shape == (2, 1, -(-130 // block))
    assert run.entries(0) == expected.entries(0)
    assert torch.equal(run.here, expected.here)
    is_missing = there.tables.record_at[0].cpu()[listed_in_blocks(run.running, 0)] < 0
    assert run.running.counts.sum(2).flatten().tolist() == [len(is_missing), int(is_missing.sum())]


def test_the_fewer_neurons_there_are_the_smaller_are_the_blocks() -> None:
    for k, num_rows, least, block in (
        (8, 768, 2640, 4), (8, 768, 1536, 4), (8, 768, 1535, 4), (8, 768, 768, 8), (2, 14336, 1320, 16),
        (2, 14336, 448, 64), (2, 14336, 449, 32), (2, 100, 2, 64), (1, 3, 9, 4),
        (8, 2048, 9999, 8), (8, 2049, 9999, 16),
    ):  # fmt: skip
        found = RunningNeurons.allocate(k, num_rows, CPU, num_programs=least)
        assert (found.block, found.counts.shape[2]) == (block, -(-num_rows // block)), (k, num_rows, least)


@pytest.mark.parametrize("selector", ["up", "gate", "both"])
def test_neurons_that_do_nothing_do_not_run_at_a_threshold_of_zero(
    selector: Selector, kernel_device: torch.device
) -> None:
    layer = layer_of([random_expert(Shape(12, 64, selector), zero_rows=(0, 3, 11))])
    run = run_layer(partly_there(layer, kernel_device, 0.0, 1), random_tokens(1, 64)[0], [0], 2)
    assert run.entries(0) == ([1, 2, 4, 5, 6, 7, 8, 9, 10], [])


def with_scratch(there: PartlyThere, num_scratch: int | None) -> PartlyThere:
    """The same with scratch memory for so many records of each expert; None: for as many as there are."""
    if num_scratch is None:
        return there
    return replace(there, landing=there.landing._replace(num_scratch=num_scratch))


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_nan_runs_and_is_seen(selector: Selector, kernel_device: torch.device) -> None:
    layer = random_layer([Shape(20, 64, selector)], thresholds=[1e30])
    x = random_tokens(1, 64)[0]
    x[3] = torch.nan
    run = run_layer(partly_there(layer, kernel_device, 0.0, 1), x, [0], 2)
    assert run.entries(0)[0] == list(range(20))
    assert run.here.sum(1).isnan().all()


def test_partial_sums_of_nothing_are_zeros(kernel_device: torch.device) -> None:
    layer = random_layer([Shape(20, 64, down=part_format(3, 64))], thresholds=[1e30])  # a row of two planes
    run = run_layer(partly_there(layer, kernel_device, 0.0, 1), random_tokens(1, 64)[0], [0], is_split=True)
    assert run.entries(0) == ([], [])
    assert torch.equal(run.here, torch.zeros(1, 3, 64)) and torch.equal(run.pulled, run.here)


@pytest.mark.parametrize("selector", ["up", "none"])
def test_outputs_are_the_same_bits_whatever_the_arena_lacks_and_wherever_rows_lie(
    selector: Selector, kernel_device: torch.device
) -> None:
    experts = [random_expert(Shape(90, 64, selector), seed) for seed in range(2)]
    x = random_tokens(1, 64)[0]
    threshold = threshold_at(activations(x[None], experts[1].block(), "silu").of(selector), 0.5)
    found = [
        run_layer(
            partly_there(layer_of(experts, seed, [threshold] * 2), kernel_device, share, 2, num_kept, lacks, seed),
            x,
            [1, 0],
            2,
            pulls_selectors=selector != "none",
        )
        for seed, (share, num_kept, lacks) in enumerate([(0, 0, ()), (0.4, 3, (0,)), (1, 0, (0, 1))])
    ]
    for other in found[1:]:
        assert torch.equal(found[0].here, other.here)
        assert torch.equal(found[0].running.a, other.running.a)
        assert torch.equal(found[0].running.neurons, other.running.neurons)


@pytest.mark.parametrize("selector", ["up", "none"])
@pytest.mark.parametrize(
    ("share", "num_kept", "num_scratch"), [(0.0, 5, 5), (0.5, 90, 0), (0.5, 4, 2), (1.0, 90, 0), (1.0, 0, 0)]
)
def test_what_is_here_what_is_pulled_and_what_the_cpu_computes_is_everything(
    selector: Selector, share: float, num_kept: int, num_scratch: int, kernel_device: torch.device
) -> None:
    x = random_tokens(1, 128)[0]
    layer = with_thresholds(random_layer([Shape(90, 128, selector, bias=("down",))] * 3), x, 0.4)
    lacks = with_scratch(partly_there(layer, kernel_device, 0.5, 2, num_kept), num_scratch)
    run = run_layer(lacks, x, [2, 0], is_split=True, share=share)
    for place, e in enumerate((2, 0)):
        is_there = lacks.tables.record_at[e] >= 0
        (here, pulled), to_cpu = run.entries(place), run.to_cpu(place)
        assert sorted(here + pulled + to_cpu) == listed_in_blocks(run.running, place)
        assert here == [n for n in listed_in_blocks(run.running, place) if is_there[n]]
        assert len(pulled) == min(int((len(pulled) + len(to_cpu)) * share), num_kept + num_scratch)
        values = values_of(layer, x, e)
        is_running = running(values, selector, float(layer.tables.thresholds[e]))
        down = layer.experts[e].block().down
        by_cpu = (values.h * is_running)[:, to_cpu] @ down[to_cpu]
        y = run_expert(x[None], layer.experts[e].packed(), "silu", selector, float(layer.tables.thresholds[e]))
        computed = run.here[place].sum(0) + run.pulled[place].sum(0) + by_cpu[0]
        assert_near(computed[None], y, magnitudes(x[None], layer.experts[e], is_running).y)


def test_an_expert_whose_selector_is_missing_is_left_to_the_cpu(kernel_device: torch.device) -> None:
    x = random_tokens(1, 64)[0]
    layer = random_layer([Shape(40, 64, bias=("down",))] * 3)
    run = run_layer(partly_there(layer, kernel_device, 0.5, 2, 5, missing_selectors=[1]), x, [1, 2], 2, True, 1.0)
    assert run.running.counts[:, 0].sum() == 0 and run.running.totals[0].tolist() == [0, 0, 0, 0]
    assert run.left.counts[0] == WHOLE
    assert layer.tables.down_bias is not None
    assert torch.equal(run.here[0].sum(0), layer.tables.down_bias[1]) and not run.pulled[0].any()
    assert run.left.counts[1] >= 0 and run.running.totals[1, HERE] > 0


def test_a_list_is_cut_into_equal_shares(kernel_device: torch.device) -> None:
    """Whatever blocks list them: 10 neurons of the first block and 2 of the last, in 4 partial sums."""
    x = random_tokens(1, 64)[0]
    layer = partly_there(random_layer([Shape(66, 64, "up")]), kernel_device, 0.0, 1)
    chosen = [*range(10), 64, 65]
    found = random_running(layer.tables, [0], 0.0, 0)
    found.neurons[0, :12], found.totals[0] = torch.tensor(chosen), torch.tensor([12, 0, 0, 0])
    found.units[0, :12] = layer.tables.record_at[0, chosen].cpu()
    there = running_on(found, kernel_device)
    numbers, partials = torch.zeros(1, dtype=torch.int32, device=kernel_device), torch.empty(1, 4, 64)
    whole = partials.to(kernel_device)
    neurons(x.to(kernel_device), numbers, layer.tables, there, whole, "here")
    for program in range(4):
        there.totals[0] = torch.tensor([3, 0, 0, 0])
        part = there._replace(neurons=there.neurons.roll(-3 * program, 1), units=there.units.roll(-3 * program, 1))
        one = torch.empty(1, 1, 64, device=kernel_device)
        neurons(x.to(kernel_device), numbers, layer.tables, part, one, "here")
        assert torch.equal(one[0, 0], whole[0, program])


@pytest.mark.parametrize("num_rows", [1, 16, 65, 130])
@pytest.mark.parametrize("selector", ["up", "none"])
@pytest.mark.parametrize("is_split", [False, True])
def test_lists_are_those_of_the_twin(
    is_split: bool, selector: Selector, num_rows: int, kernel_device: torch.device
) -> None:
    experts, whole = torch.tensor([2, 0, 1], dtype=torch.int32), (1,) if is_split and selector == "up" else ()
    layer = random_layer([Shape(num_rows, 64, selector)] * 3)
    for lacking, num_kept, share, num_scratch, whole_records in (
        (0.0, 7, 0.37, 0, 0.0),
        (0.3, 0, 1.0, num_rows, 0.0),
        (0.3, 1, 0.37, 5, 20.0),
        (0.3, 7, 1.0, 0, 0.0),
        (0.3, num_rows, 0.37, 0, 7.0),
        (1.0, 7, 0.0, num_rows, 100.0),
        (1.0, 2, 0.1, num_rows, 100.0),
        (1.0, num_rows, 1.0, 0, 0.0),
    ):
        with case((lacking, num_kept, share, num_scratch, whole_records)):
            there, twin = (
                with_scratch(partly_there(layer, on, lacking, 3, num_kept, whole), num_scratch if is_split else None)
                for on in (kernel_device, CPU)
            )
            expected = random_running(twin.tables, experts.tolist(), 0.4, num_kept, whole)
            found, left, expected_left = running_on(expected, kernel_device), there.pinned(3), twin.pinned(3)
            part, kept, expected_kept = torch.tensor([share]), there.kept(3), twin.kept(3)
            numbers, part_there = experts.to(kernel_device), part.to(kernel_device)
            for by_expert in (False, True) if is_split else (False,):
                how = (is_split, whole_records, by_expert)
                compact(numbers, there.tables, found, there.landing, part_there, left, *how, kept=kept)
                compact_plain(experts, twin.tables, expected, twin.landing, part, expected_left, *how, expected_kept)
                on_host = running_on(found, CPU)
                for name in ("neurons", "units", "totals"):
                    assert torch.equal(getattr(on_host, name), getattr(expected, name)), (name, by_expert)
                for name in ("counts", "neurons", "a"):
                    assert torch.equal(getattr(left, name), getattr(expected_left, name)), (name, by_expert)
                for ours, theirs in zip(kept or (), expected_kept or (), strict=True):
                    assert torch.equal(ours.cpu(), theirs), by_expert


def test_whole_missing_experts_are_split_by_algorithm_2_as_it_is_printed(kernel_device: torch.device) -> None:
    """With one token each expert loads in 1 / link seconds, and is computed in 1 / CPU."""
    k, f = 6, 33
    layer = random_layer([Shape(f, 64)] * k)
    experts = torch.tensor([4, 0, 5, 2, 1, 3], dtype=torch.int32)
    there = with_scratch(partly_there(layer, kernel_device, 1.0, k, 0), f)
    numbers, found_splits = experts.to(kernel_device), set[tuple[int, ...]]()
    for link, cpu in ((1, 100), (1, 3), (2, 3.1), (1, 1), (5, 2), (3, 1), (100, 1)):
        with case((link, cpu)):
            found = running_on(random_running(there.tables, experts.tolist(), 1.0, 0), kernel_device)
            left, share = there.pinned(k), torch.tensor([link / (link + cpu)], device=kernel_device)
            compact(numbers, there.tables, found, there.landing, share, left, True, 0.0, True)
            split = balanced([1 / cpu] * k, [1 / link] * k)
            (number,) = set(found.counts[1].sum(dim=1).tolist())  # of neurons, in each
            expected = [number if place in split.loaded else 0 for place in range(k)]
            assert found.totals[:, PULLED].tolist() == expected
            assert left.counts.tolist() == found.totals[:, LEFT].tolist() == [number - pulled for pulled in expected]
            found_splits.add(split.loaded)
    assert len(found_splits) == 5, "the first is always loaded, then 1, 2, 3 or 4 more"


def test_lists_meet_every_place() -> None:
    """The cases above have records of each kind, so that the comparison is of something."""
    layer = random_layer([Shape(1000, 64, "up")] * 3)
    there = with_scratch(partly_there(layer, CPU, 0.3, 3, 7), 2)
    found, left = random_running(there.tables, [2, 0, 1], 0.4, 7), there.pinned(3)
    compact_plain(
        torch.tensor([2, 0, 1]),
        there.tables,
        found,
        there.landing,
        torch.tensor([0.37]),
        left,
        is_split=True,
        kept=there.kept(3),
    )
    assert (found.totals[:, [HERE, PULLED, LEFT]] > 0).all() and (found.totals[:, PULLED] == 9).all()


def test_memory_for_every_record_is_needed_where_all_are_pulled() -> None:
    there = partly_there(random_layer([Shape(20, 64)]), CPU, 0.5, 1, 19)
    found, landing = random_running(there.tables, [0], 0.5, 0), there.landing._replace(num_scratch=0)
    with pytest.raises(AssertionError, match=r"^there is memory for every record"):
        compact(
            torch.zeros(1, dtype=torch.int32), there.tables, found, landing, torch.zeros(1), there.pinned(1), False,
            kept=there.kept(1),
        )  # fmt: skip


def kernels_of(layer: PartlyThere, x: Tensor, experts: Tensor, k: int) -> Run:
    """Runs tokens x [T, d] in experts [T * k] by one launch of each kernel."""
    tables, device, num_tokens = layer.tables, layer.tables.arena.device, len(x)
    there, numbers, f = x.to(device), experts.to(device), tables.record_at.shape[1]
    found = RunningNeurons.allocate(k, f, device, num_programs=1 + k, num_tokens=num_tokens)
    left, share = layer.pinned(num_tokens * k), torch.zeros(1, device=device)
    select(there, numbers, tables, found)
    compact(numbers, tables, found, layer.landing, share, left, is_split=False, num_tokens=num_tokens)
    here = torch.full((num_tokens * k, 2, x.shape[1]), torch.nan, device=device)
    neurons(there, numbers, tables, found, here, "here")
    return Run(running_on(found, CPU), left, here.cpu(), here.cpu())


ROUTES = {"shared": [5, 0, 5, 0, 5, 0], "some": [5, 0, 1, 5, 0, 2], "none": [5, 0, 1, 7, 4, 2]}


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("selector", ["up", "none"])
def test_a_token_among_others_gives_the_bits_that_it_gives_alone(
    selector: Selector, routes: str, kernel_device: torch.device
) -> None:
    """Experts of two formats."""
    num_tokens, k, f, experts = 3, 2, 40, torch.tensor(ROUTES[routes], dtype=torch.int32)
    shapes = [Shape(f, 64, selector, *map(named_format, trio), bias=("down",)) for trio in ((4, 2, 4), (2, 8, 3))]
    x = random_tokens(num_tokens, 64)
    there = partly_there(with_thresholds(random_layer(shapes * 4), x[0], 0.4), kernel_device, 0.0, k)
    whole = kernels_of(there, x, experts, k)
    assert whole.running.block == 32
    for token in range(num_tokens):
        its = slice(token * k, (token + 1) * k)
        alone = kernels_of(there, x[token : token + 1], experts[its], k)
        for place in range(k):
            assert whole.entries(token * k + place) == alone.entries(place)
            number = int(alone.running.totals[place, HERE])
            units, expected = whole.running.units[token * k + place], alone.running.units[place]
            assert torch.equal(units[:number], expected[:number])
        assert torch.equal(whole.running.a[its], alone.running.a)
        assert torch.equal(whole.running.totals[its], alone.running.totals)
        assert torch.equal(whole.here[its], alone.here)
