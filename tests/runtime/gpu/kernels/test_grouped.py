"""Several experts for many tokens, compared with each expert's plain twin."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
from support.cases import case
from support.gpu_layers import layer_of
from support.in_turn import in_turn, slow
from support.kernel_twins import run_experts_plain
from support.named_formats import Name, named_expert
from support.random_experts import RandomExpert, Shape, random_expert, random_tokens, threshold_at
from torch import Tensor

from moe_pack.formats import LimitedFunction, NeuronFunction, Selector, part_format, trellis_format
from moe_pack.formats.pack.plans import FP8
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.gpu.fit import Slicing
from moe_pack.runtime.gpu.kernels.grouped import Group, PassMemory, combine, run_group, sort_pairs
from moe_pack.runtime.gpu.kernels.halves import Halves, round_rows
from moe_pack.runtime.model import activations

FAST, EXACT = 1, 2  # float16 numbers of a value
# The same products in float32, summed in another order than torch's.
TOLERANCE = 2e-5  # of the reference's RMS
GPU_TOLERANCE = 3e-5  # tensor cores cut sums off; see test_matmul
# Weights, inputs and neurons' outputs are rounded to 11 bits: by 2^-12 at most, which partly cancels in sums. The
# largest of all errors, of tokens whose sizes differ a hundredfold, is some 0.8% of the RMS over them all.
FAST_TOLERANCE = 0.015
WIDTHS: tuple[Name, ...] = (1, 2, 3, 4, 8, 16, "fp8", "mxfp4", "t4", "t5", "t8")


def routes(num_tokens: int, num_experts: int, k: int, seed: int = 5) -> np.ndarray:
    """Experts of each token, int64 [T, k], different in each row, in any order."""
    draw = np.random.default_rng(seed)
    return np.stack([draw.permutation(num_experts)[:k] for _ in range(num_tokens)])


def outputs_of(
    x: Tensor,
    chosen: np.ndarray,
    weights: Tensor,
    experts: Sequence[RandomExpert],
    thresholds: Sequence[float],
    device: torch.device,
    num_halves: int = EXACT,
    order: Sequence[int] | None = None,
    slicing: Slicing | None = None,
) -> Tensor:
    """Runs experts in an order, as many at once and as many of their neurons as the slicing says; returns y."""
    order, shape = list(range(len(experts)) if order is None else order), experts[0].shape
    slicing = slicing or Slicing.of(shape.num_rows, shape.num_cols, len(experts), num_halves, 1 << 30)
    tables = layer_of(experts, 0, thresholds).tables_on(device)
    there = torch.tensor(order, dtype=torch.int32, device=device)
    pairs = sort_pairs(torch.from_numpy(chosen).to(device), there, len(experts))
    memory = PassMemory.allocate(*slicing, shape.num_cols, chosen.size, num_halves, device)
    for values in memory[:4] + memory.rounded[:] + memory[5:]:
        values.fill_(torch.nan)
    memory.biases.zero_()
    inputs = Halves.allocate(num_halves, len(x), shape.num_cols, device)
    round_rows(x.to(device), inputs)
    for first in range(0, len(order), slicing.num_experts):
        number = min(slicing.num_experts, len(order) - first)
        run_group(inputs, Group(pairs, tables, first, number), memory)
    y = torch.full(x.shape, torch.nan, device=device)
    combine(memory.outputs, weights.to(device), y)
    return y.cpu()


def thresholds_at(x: Tensor, experts: Sequence[RandomExpert], sparsity: float) -> list[float]:
    return [
        threshold_at(activations(x.float(), e.block(), e.shape.function).of(e.shape.selector), sparsity)
        for e in experts
    ]


def random_weights(num_tokens: int, k: int) -> Tensor:
    return torch.rand(num_tokens, k, generator=torch.Generator().manual_seed(3))


def assert_equal_twin(
    experts: Sequence[RandomExpert],
    num_tokens: int,
    device: torch.device,
    sparsity: float = 0.8,
    k: int = 2,
    chosen: np.ndarray | None = None,
    num_halves: int = EXACT,
    slicing: Slicing | None = None,
) -> None:
    x = random_tokens(num_tokens, experts[0].shape.num_cols)
    chosen = routes(num_tokens, len(experts), k) if chosen is None else chosen
    weights = random_weights(*chosen.shape)
    thresholds = thresholds_at(x, experts, sparsity)
    found = outputs_of(x, chosen, weights, experts, thresholds, device, num_halves, slicing=slicing)
    expected = run_experts_plain(x, chosen, weights, experts, thresholds)
    tolerance = TOLERANCE if device.type == "cpu" else GPU_TOLERANCE
    if num_halves == FAST:
        tolerance = FAST_TOLERANCE
    error, size = (found - expected).abs().max(), expected.square().mean().sqrt()
    assert error <= tolerance * size, f"off by {error / size} of the reference's RMS"


def alike(shape: Shape, number: int = 3) -> list[RandomExpert]:
    return [random_expert(shape, seed) for seed in range(number)]


# In the fast suite each width meets one selector, and each selector some of each.
@in_turn("width", WIDTHS)
def test_experts_of_every_width_and_selector_equal_their_twins(
    width: Name, selector: Selector, kernel_device: torch.device
) -> None:
    stored = named_expert(width)
    experts = alike(Shape(5, 64, selector, stored.gate, stored.up, stored.down))
    assert_equal_twin(experts, 3, kernel_device)
    assert_equal_twin(experts, 3, kernel_device, num_halves=FAST)


@pytest.mark.parametrize("group", [16, 32, 128, 0])
def test_groups_of_every_length_equal_their_twins(group: int, kernel_device: torch.device) -> None:
    stored = part_format(2, group)
    assert_equal_twin(alike(Shape(5, 384, gate=stored, up=stored, down=stored), 2), 2, kernel_device)


@pytest.mark.parametrize("num_cols", [64, 320])
def test_byte_scales_that_put_parts_between_words_equal_their_twins(num_cols: int, kernel_device: torch.device) -> None:
    stored = part_format(3, 64, 8)
    experts = alike(Shape(5, num_cols, selector="both", gate=stored, up=stored, down=stored), 2)
    assert_equal_twin(experts, 2, kernel_device)


def test_a_last_group_of_64_columns_equals_its_twin(kernel_device: torch.device) -> None:
    assert_equal_twin(alike(Shape(5, 192, "up", FP8, FP8, FP8), 2), 2, kernel_device)


def test_matrices_of_different_widths_equal_their_twins(kernel_device: torch.device) -> None:
    shape = Shape(num_cols=192, gate=part_format(1, 64), up=part_format(4, 16), down=part_format(1, 64))
    assert_equal_twin(alike(shape, 2), 2, kernel_device)


@pytest.mark.parametrize("selector", ["both", *map(slow, ("none", "up", "gate"))])
def test_matrices_of_a_trellis_beside_others_equal_their_twins(selector: Selector, kernel_device: torch.device) -> None:
    for trio in (
        (trellis_format(4, 16), part_format(3, 64), trellis_format(7, 0, 8)),
        (FP8, trellis_format(8, 64), FP8),
    ):
        assert_equal_twin(alike(Shape(9, 192, selector, *trio, bias=("up",)), 2), 2, kernel_device)


@pytest.mark.parametrize("selector", SELECTORS)
def test_experts_without_gate_equal_their_twins(selector: Selector, kernel_device: torch.device) -> None:
    assert_equal_twin(alike(Shape(selector=selector, gate=None), 2), 2, kernel_device)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("function", ["relu", "clamped_swiglu"])
def test_every_neuron_function_and_all_biases_equal_their_twins(
    selector: Selector, function: NeuronFunction, kernel_device: torch.device
) -> None:
    shape = Shape(66, 64, selector, bias=("gate", "up", "down"), function=function)
    assert_equal_twin(alike(shape), 2, kernel_device)


@pytest.mark.parametrize(
    ("function", "selector"),
    [("relu2", "up"), ("gelu_tanh", "none"), (LimitedFunction("clipped_silu", 1.5), "gate"),
     (LimitedFunction("capped_silu", 0.5), "both")], ids=str,
)  # fmt: skip
def test_squares_gelu_and_functions_with_a_limit_equal_their_twins(
    function: NeuronFunction, selector: Selector, kernel_device: torch.device
) -> None:
    assert_equal_twin(alike(Shape(66, 64, selector, function=function), 2), 2, kernel_device)


def test_experts_of_several_kinds_run_together(kernel_device: torch.device) -> None:
    widths: tuple[Name, ...] = (2, 4, "t4", 4, 8)
    formats = [named_expert(width) for width in widths]
    experts = [random_expert(Shape(33, 128, "up", s.gate, s.up, s.down), seed) for seed, s in enumerate(formats)]
    for num_halves in (EXACT, FAST):
        assert_equal_twin(experts, 40, kernel_device, num_halves=num_halves, k=3)


@pytest.mark.parametrize("num_tokens", [1, 8, 17, 33, 65, 130])
def test_any_number_of_tokens_equals_its_twin(num_tokens: int, kernel_device: torch.device) -> None:
    for num_halves in (EXACT, FAST):
        with case(num_tokens, num_halves):
            assert_equal_twin(alike(Shape(num_rows=5), 2), num_tokens, kernel_device, num_halves=num_halves)


def test_experts_without_tokens_and_one_with_all_equal_their_twins(kernel_device: torch.device) -> None:
    for number in (0, 1, 2):
        with case(number):
            chosen = np.full((70, 1), number)
            assert_equal_twin(alike(Shape(num_rows=5)), 70, kernel_device, chosen=chosen)


def test_experts_beyond_the_scratch_memory_run_in_groups_and_slices(kernel_device: torch.device) -> None:
    experts = alike(Shape(num_rows=150, bias=("gate", "up", "down")))
    for slicing in (Slicing(1, 192), Slicing(2, 64), Slicing(3, 128)):
        with case(*slicing):
            assert_equal_twin(experts, 20, kernel_device, slicing=slicing)


@pytest.mark.parametrize("num_rows", [1, 32, 64, 70])
def test_any_number_of_neurons_equals_its_twin(num_rows: int, kernel_device: torch.device) -> None:
    assert_equal_twin(alike(Shape(num_rows=num_rows), 2), 2, kernel_device, sparsity=0.5)


@pytest.mark.parametrize("sparsity", [0, 1])
def test_all_neurons_or_none_running_equals_its_twin(sparsity: float, kernel_device: torch.device) -> None:
    assert_equal_twin(alike(Shape(bias=("down",)), 2), 2, kernel_device, sparsity)


def test_zero_and_constant_rows_equal_their_twin(kernel_device: torch.device) -> None:
    experts = [random_expert(Shape(), seed, zero_rows=(0, 3), constant_rows=(1, 32)) for seed in (0, 1)]
    assert_equal_twin(experts, 2, kernel_device, 0)


@pytest.fixture
def products_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, sums of tiles' products are exact before they are rounded.

    numpy's BLAS adds in an order that depends, on some CPUs, on where a row is in its tile; a GPU's does not.
    """
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def test_bits_depend_neither_on_the_order_of_experts_nor_on_groups(
    kernel_device: torch.device, products_rounded_once: None
) -> None:
    experts, num_tokens = alike(Shape(num_rows=5), 5), 40
    x, chosen, weights = random_tokens(num_tokens, 128), routes(num_tokens, 5, 3), random_weights(num_tokens, 3)
    thresholds = thresholds_at(x, experts, 0.5)
    expected = outputs_of(x, chosen, weights, experts, thresholds, kernel_device)
    for order, together in (([4, 2, 0, 1, 3], 5), (range(5), 2), ([3, 4, 0, 2, 1], 2)):
        slicing = Slicing(together, 64)
        found = outputs_of(x, chosen, weights, experts, thresholds, kernel_device, order=order, slicing=slicing)
        assert torch.equal(found, expected), (order, together)


@pytest.mark.parametrize(("num_halves", "most"), [(EXACT, 3e-7), (FAST, 6e-4)])
def test_outputs_with_outlier_channels_are_near_float64(
    num_halves: int, most: float, kernel_device: torch.device, products_rounded_once: None
) -> None:
    """Relative error of the norm: 32 tokens of 1,024 channels, of which some are 30 times as large."""
    stored = part_format(4, 64)
    (expert,) = experts = alike(Shape(256, 1024, "up", stored, stored, stored), 1)
    x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(2))
    x[:, ::127] *= 30
    chosen, weights = np.zeros((32, 1), np.int64), torch.ones(32, 1)
    found = outputs_of(x, chosen, weights, experts, [0.0], kernel_device, num_halves)
    block = expert.block()
    gate, up, down = (each.double() for each in (block.gate, block.up, block.down))
    g, u = x.double() @ gate.T, x.double() @ up.T
    expected = (g * torch.sigmoid(g) * u) @ down
    error = (found.double() - expected).norm() / expected.norm()
    assert error < most, f"{error:.2e}"


def test_a_nan_reaches_its_tokens_and_no_other(kernel_device: torch.device) -> None:
    experts = alike(Shape(num_rows=3), 2)
    for num_halves in (EXACT, FAST):
        x = torch.ones(4, 128)
        x[1] = torch.nan
        y = outputs_of(x, routes(4, 2, 2), torch.ones(4, 2), experts, [1.0, 1.0], kernel_device, num_halves)
        assert y[1].isnan().all() and not y[[0, 2, 3]].isnan().any()


# --- what is decided before anything runs


def test_pairs_are_sorted_by_the_order_of_experts_and_those_that_do_not_run_come_last() -> None:
    chosen, order = torch.tensor([[2, 0], [0, 1]]), torch.tensor([2, 3, 0], dtype=torch.int32)
    pairs = sort_pairs(chosen, order, 4)
    assert pairs.pairs.tolist() == [0, 1, 2, 3]
    assert pairs.starts.tolist() == [0, 1, 1, 3]
    assert pairs.k == 2
    assert sort_pairs(chosen[:0], order, 4).starts.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((768, 2048, 128, FAST), (21, 768)),
        ((768, 2048, 128, EXACT), (10, 768)),
        ((14336, 4096, 8, FAST), (8, 1024)),
        ((14336, 4096, 8, EXACT), (8, 512)),
        ((5, 64, 2, FAST), (2, 64)),
    ],
)
def test_scratch_memory_takes_whole_experts_or_slices_of_many(
    sizes: tuple[int, int, int, int], expected: tuple[int, int]
) -> None:
    slicing, (_, num_cols, _, num_halves) = Slicing.of(*sizes, 192 << 20), sizes
    assert slicing == expected
    assert 2 * 3 * num_halves * num_cols * slicing.num_experts * slicing.num_neurons <= 192 << 20
