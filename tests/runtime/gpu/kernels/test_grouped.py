"""Several experts for many tokens, compared with each expert's plain twin."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
from support.cases import case
from support.gpu_layers import group_of, layer_of
from support.in_turn import in_turn, slow
from support.kernel_twins import run_experts_plain
from support.named_formats import Name, named_expert
from support.random_experts import RandomExpert, Shape, random_expert, random_tokens, threshold_at
from torch import Tensor

from moe_pack.formats import NeuronFunction, Selector, part_format, trellis_format
from moe_pack.formats.pack.plans import FP8
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime.gpu.kernels.grouped import (
    TilePlan,
    combine,
    max_pairs,
    pairs_by_expert,
    plan_tiles,
    run_group,
)
from moe_pack.runtime.gpu.kernels.tables import kind_of
from moe_pack.runtime.model import activations

# The same products in float32, summed in another order than torch's, codes and zeros apart.
TOLERANCE = 1e-5  # of the reference's RMS
GPU_TOLERANCE = 3e-5  # tensor cores cut sums off; see test_matmul
# Neurons' outputs, times a scale, are rounded to 8 bits: by 2^-9 at most, which partly cancels in sums. The largest of
# all errors, of tokens whose sizes differ a hundredfold, is some 2% of the RMS over them all.
BF16_TOLERANCE = 0.03
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
    order: Sequence[int] | None = None,
    group_size: int = 99,
    rows: int | None = None,
) -> Tensor:
    """Runs experts in an order, so many at once, with so many rows of `hidden`; returns y."""
    order = range(len(experts)) if order is None else order
    k, f, d = chosen.shape[1], experts[0].shape.num_rows, x.shape[1]
    pairs = pairs_by_expert(chosen, weights.numpy(), np.array(order))
    tokens, places, factors = (torch.from_numpy(each).to(device) for each in pairs[:3])
    hidden = torch.full((rows or max_pairs(len(x), k, f), f), torch.nan, device=device)
    outputs = torch.full((len(x) * k, d), torch.nan, device=device)
    begin = 0
    for start in range(0, len(order), group_size):
        few = list(order[start : start + group_size])
        group, kind_idx = group_of(layer_of([experts[i] for i in few], 0, [thresholds[i] for i in few]), device)
        counts = pairs.counts[start : start + group_size]
        plan = plan_tiles(counts, kind_idx, group.kinds, len(hidden), x.dtype == torch.bfloat16)
        here = slice(begin, begin + int(counts.sum()))
        tiles = torch.from_numpy(plan.tiles).to(device)
        run_group(x.to(device), tokens[here], places[here], factors[here], group, plan, tiles, hidden, outputs)
        begin = here.stop
    y = torch.full((len(x), d), torch.nan, device=device)
    combine(outputs, y)
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
    dtype: torch.dtype = torch.float32,
    rows: int | None = None,
) -> None:
    x = random_tokens(num_tokens, experts[0].shape.num_cols).to(dtype)
    chosen = routes(num_tokens, len(experts), k) if chosen is None else chosen
    weights = random_weights(*chosen.shape)
    thresholds = thresholds_at(x, experts, sparsity)
    found = outputs_of(x, chosen, weights, experts, thresholds, device, rows=rows)
    expected = run_experts_plain(x, chosen, weights, experts, thresholds)
    tolerance = TOLERANCE if device.type == "cpu" else GPU_TOLERANCE
    if dtype == torch.bfloat16:
        tolerance = BF16_TOLERANCE
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
    assert_equal_twin(experts, 3, kernel_device, dtype=torch.bfloat16)


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


def test_experts_of_several_kinds_run_together(kernel_device: torch.device) -> None:
    widths: tuple[Name, ...] = (2, 4, "t4", 4, 8)
    formats = [named_expert(width) for width in widths]
    experts = [random_expert(Shape(33, 128, "up", s.gate, s.up, s.down), seed) for seed, s in enumerate(formats)]
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal_twin(experts, 40, kernel_device, dtype=dtype, k=3)


@pytest.mark.parametrize("num_tokens", [1, 8, 17, 33, 65, 130])
def test_any_number_of_tokens_equals_its_twin(num_tokens: int, kernel_device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with case(num_tokens, dtype):
            assert_equal_twin(alike(Shape(num_rows=5), 2), num_tokens, kernel_device, dtype=dtype)


def test_experts_without_tokens_and_one_with_all_equal_their_twins(kernel_device: torch.device) -> None:
    for number in (0, 1, 2):
        with case(number):
            chosen = np.full((70, 1), number)
            assert_equal_twin(alike(Shape(num_rows=5)), 70, kernel_device, chosen=chosen)


def test_pairs_beyond_the_workspace_run_in_pieces(kernel_device: torch.device) -> None:
    for num_tokens, rows in ((4, 1), (20, 7), (70, 64), (70, 100)):
        with case(num_tokens, rows):
            assert_equal_twin(alike(Shape(num_rows=5)), num_tokens, kernel_device, rows=rows)


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

    dot_otherwise = InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        if a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return dot_otherwise(self, a, b, d, *others)
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(np.float32)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def test_bits_depend_neither_on_the_order_of_experts_nor_on_groups_nor_on_pieces(
    kernel_device: torch.device, products_rounded_once: None
) -> None:
    experts, num_tokens = alike(Shape(num_rows=5), 5), 40
    x, chosen, weights = random_tokens(num_tokens, 128), routes(num_tokens, 5, 3), random_weights(num_tokens, 3)
    thresholds = thresholds_at(x, experts, 0.5)
    expected = outputs_of(x, chosen, weights, experts, thresholds, kernel_device)
    for order, group_size, rows in (([4, 2, 0, 1, 3], 99, 64), (range(5), 2, 64), ([3, 4, 0, 2, 1], 2, 128)):
        found = outputs_of(
            x, chosen, weights, experts, thresholds, kernel_device, order=order, group_size=group_size, rows=rows
        )
        assert torch.equal(found, expected), (order, group_size, rows)


def test_a_nan_reaches_its_tokens_and_no_other(kernel_device: torch.device) -> None:
    experts = alike(Shape(num_rows=3), 2)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(4, 128, dtype=dtype)
        x[1] = torch.nan
        y = outputs_of(x, routes(4, 2, 2), torch.ones(4, 2), experts, [1.0, 1.0], kernel_device)
        assert y[1].isnan().all() and not y[[0, 2, 3]].isnan().any()


# --- what the host computes


def test_pairs_are_listed_by_expert_and_have_places_in_ascending_order_of_experts() -> None:
    chosen, weights = np.array([[2, 0], [0, 1]]), np.array([[0.25, 0.5], [0.75, 1.0]], np.float32)
    pairs = pairs_by_expert(chosen, weights, np.array([2, 0, 3, 1]))
    assert pairs.counts.tolist() == [1, 2, 0, 1]
    assert pairs.tokens.tolist() == [0, 0, 1, 1]
    assert pairs.places.tolist() == [1, 0, 2, 3]
    assert pairs.weights.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_no_tokens_have_no_pairs_and_no_tiles() -> None:
    pairs = pairs_by_expert(np.zeros((0, 2), np.int64), np.zeros((0, 2), np.float32), np.arange(3))
    assert pairs.counts.tolist() == [0, 0, 0] and len(pairs.tokens) == 0
    plan = plan_tiles(pairs.counts, np.zeros(3, np.int64), (kind_of(Shape().layout, "up", "silu"),), 64, False)
    assert plan.tiles.shape == (0, 3) and plan.pieces == ()


def pairs_of_tiles(plan: TilePlan, launches: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """(expert, pair) of all pairs in these launches' tiles."""
    tiles = [tile for _, block, first, stop in launches for tile in plan.tiles[first:stop].tolist() if tile[2] <= block]
    return sorted((expert, begin + i) for expert, begin, count in tiles for i in range(count))


def test_tiles_take_every_pair_once_in_the_smallest_block_that_fits() -> None:
    kinds = tuple(kind_of(Shape(gate=part).layout, "up", "silu") for part in (part_format(4, 64), part_format(1, 64)))
    counts, kind_idx = np.array([0, 1, 16, 17, 33, 200, 0, 64, 3]), np.array([0, 1, 0, 1, 0, 1, 0, 0, 1])
    expert_of = np.repeat(np.arange(len(counts)), counts).tolist()
    for rows in (int(counts.sum()), 64, 50, 1):
        plan = plan_tiles(counts, kind_idx, kinds, rows, False)
        for step in ("hidden", "down"):
            with case(rows, step):
                found = []
                for number, piece in enumerate(plan.pieces):
                    launches = getattr(piece, step)
                    found += pairs_of_tiles(plan, launches)
                    assert piece.first_pair == number * rows
                    for launch in launches:
                        tiles = plan.tiles[launch.first : launch.stop]
                        assert (kind_idx[tiles[:, 0]] == launch.kind).all()
                        assert (tiles[:, 1] >= piece.first_pair).all()
                        assert (tiles[:, 1] + tiles[:, 2] <= piece.first_pair + rows).all()
                        assert (tiles[:, 2] > (launch.block_tokens // 2 if launch.block_tokens > 16 else 0)).all()
                assert sorted(found) == [(expert, pair) for pair, expert in enumerate(expert_of)]
    whole = plan_tiles(counts, kind_idx, kinds, int(counts.sum()), False)
    assert [(launch.kind, launch.block_tokens) for launch in whole.pieces[0].hidden] == [(0, 32), (0, 16), (1, 16)]


def test_the_neurons_outputs_that_are_in_memory_at_once_are_bounded() -> None:
    assert max_pairs(512, 8, 768) == 4096
    assert max_pairs(4096, 2, 14336) == 1152
    assert max_pairs(4096, 2, 10**6) == 64
