"""One expert for many tokens, compared with its plain twin."""

import pytest
import torch
from in_turn import in_turn, slow
from named_formats import Name, named_expert
from random_experts import RandomExpert, Shape, random_expert, random_tokens, threshold_at
from torch import Tensor

from moe_pack.formats import NeuronFunction, Selector, part_format, trellis_format
from moe_pack.formats.plan import FP8
from moe_pack.formats.spec import SELECTORS
from moe_pack.runtime.gpu.kernels import experts as under_test
from moe_pack.runtime.gpu.kernels.experts import expert_many, workspace_floats
from moe_pack.runtime.gpu.kernels.tables import LayerTables, kind_of
from moe_pack.runtime.model import activations, run_expert

# The same products in float32, summed in another order than torch's, codes and zeros apart.
TOLERANCE = 1e-5  # of the reference's RMS
GPU_TOLERANCE = 3e-5  # tensor cores cut sums off; see test_gemm
EXPERT = 1  # of a layer of three; the others' rows are not there
WIDTHS: tuple[Name, ...] = (1, 2, 3, 4, 8, 16, "fp8", "mxfp4", "t4", "t5", "t8")


def tables_of(expert: RandomExpert, threshold: float, device: torch.device) -> LayerTables:
    """A layer with only this expert, whose rows lie in any order with gaps between."""
    layout, f = expert.shape.layout, expert.shape.num_rows
    extent, bias = torch.from_numpy(expert.extent), expert.packed().down_bias()
    sizes = [layout.selector.row_bytes if layout.selector else 0, layout.records.row_bytes]
    arena = torch.full((128 + f * (sum(sizes) + 32),), 0xFF, dtype=torch.uint8)
    tables, end, base = [], 128, 0
    for size in sizes:
        at = torch.full((3, f), -1, dtype=torch.int32)
        for i in torch.randperm(f, generator=torch.Generator().manual_seed(1)).tolist() if size else []:
            arena[end : end + size] = extent[base + i * size : base + (i + 1) * size]
            at[EXPERT, i] = end // 16
            end += size + 16
        base += f * size
        tables.append(at)
    return LayerTables(
        arena.to(device),
        tables[0].to(device) if layout.selector else None,
        tables[1].to(device),
        torch.zeros(3, dtype=torch.int32, device=device),
        torch.tensor([0.0, threshold, 0.0], device=device),
        (kind_of(layout, expert.shape.selector, expert.shape.function),),
        None if bias is None else torch.stack([torch.full_like(bias, torch.nan), bias, bias]).to(device),
    )


def assert_equals_twin(expert: RandomExpert, num_tokens: int, device: torch.device, sparsity: float = 0.8) -> None:
    """Runs an expert for every other token of some, last first; compares all of y."""
    x = random_tokens(2 * num_tokens, expert.shape.num_cols)
    tokens = torch.arange(2 * num_tokens - 1, 0, -2)
    threshold = threshold_at(
        activations(x[tokens], expert.block(), expert.shape.function).of(expert.shape.selector), sparsity
    )
    weights = torch.rand(num_tokens, generator=torch.Generator().manual_seed(3))
    tables = tables_of(expert, threshold, device)
    expected = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    y = expected.to(device, copy=True)
    expected[tokens] += weights[:, None] * run_expert(
        x[tokens], expert.packed(), expert.shape.function, expert.shape.selector, float(tables.thresholds[EXPERT])
    )
    workspace = torch.full((workspace_floats(num_tokens, expert.shape.num_rows),), torch.nan, device=device)
    x, tokens, weights = x.to(device), tokens.to(device, torch.int32), weights.to(device)
    expert_many(x, tokens, weights, tables, EXPERT, tables.kinds[0], y, workspace)
    assert_close(y, expected)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE if found.device.type == "cpu" else GPU_TOLERANCE
    error, size = (found.cpu() - expected).abs().max(), expected.square().mean().sqrt()
    assert error <= tolerance * size, f"off by {error / size} of the reference's RMS"


# In the fast suite each width meets one selector, and each selector some of each.
@in_turn("width", WIDTHS)
def test_experts_of_every_width_and_selector_equal_their_twin(
    width: Name, selector: Selector, kernel_device: torch.device
) -> None:
    stored = named_expert(width)
    shape = Shape(5, 64, selector, stored.gate, stored.up, stored.down)
    assert_equals_twin(random_expert(shape), 3, kernel_device)


@pytest.mark.parametrize("group", [16, 32, 128, 0])
def test_groups_of_every_length_equal_their_twin(group: int, kernel_device: torch.device) -> None:
    stored = part_format(2, group)
    assert_equals_twin(random_expert(Shape(5, 384, gate=stored, up=stored, down=stored)), 2, kernel_device)


@pytest.mark.parametrize("num_cols", [64, 320])
def test_byte_scales_that_put_parts_between_words_equal_their_twin(num_cols: int, kernel_device: torch.device) -> None:
    stored = part_format(3, 64, 8)
    assert_equals_twin(
        random_expert(Shape(5, num_cols, selector="both", gate=stored, up=stored, down=stored)), 2, kernel_device
    )


def test_a_last_group_of_64_columns_equals_its_twin(kernel_device: torch.device) -> None:
    shape = Shape(5, 192, "up", FP8, FP8, FP8)
    assert_equals_twin(random_expert(shape), 2, kernel_device)


def test_matrices_of_different_widths_equal_their_twin(kernel_device: torch.device) -> None:
    shape = Shape(num_cols=192, gate=part_format(1, 64), up=part_format(4, 16), down=part_format(1, 64))
    assert_equals_twin(random_expert(shape), 2, kernel_device)


@pytest.mark.parametrize("selector", ["both", *map(slow, ("none", "up", "gate"))])
def test_matrices_of_a_trellis_beside_others_equal_their_twin(selector: Selector, kernel_device: torch.device) -> None:
    for trio in (
        (trellis_format(4, 16), part_format(3, 64), trellis_format(7, 0, 8)),
        (FP8, trellis_format(8, 64), FP8),
    ):
        assert_equals_twin(random_expert(Shape(9, 192, selector, *trio, bias=("up",))), 2, kernel_device)


@pytest.mark.parametrize("selector", SELECTORS)
def test_an_expert_without_gate_equals_its_twin(selector: Selector, kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape(selector=selector, gate=None)), 2, kernel_device)


@pytest.mark.parametrize("selector", ["up", "both"])
def test_biases_are_added(selector: Selector, kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape(selector=selector, bias=("gate", "up"))), 2, kernel_device)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("function", ["relu", "clamped_swiglu"])
def test_every_neuron_function_equals_its_twin(
    selector: Selector, function: NeuronFunction, kernel_device: torch.device
) -> None:
    shape = Shape(66, 64, selector, bias=("gate", "up", "down"), function=function)
    assert_equals_twin(random_expert(shape), 2, kernel_device)


def test_relu_without_a_gate_equals_its_twin(kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape(gate=None, function="relu")), 2, kernel_device, sparsity=0.2)


@pytest.mark.parametrize("num_tokens", [1, 8, 17, 65])
def test_any_number_of_tokens_equals_its_twin(num_tokens: int, kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape(num_rows=5)), num_tokens, kernel_device)


def test_more_tokens_than_a_piece_holds_equal_their_twin(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    monkeypatch.setattr(under_test, "PIECE_TOKENS", 4)
    assert_equals_twin(random_expert(Shape(num_rows=5)), 9, kernel_device)


@pytest.mark.parametrize("num_rows", [1, 32, 70])
def test_any_number_of_neurons_equals_its_twin(num_rows: int, kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape(num_rows=num_rows)), 2, kernel_device, sparsity=0.5)


@pytest.mark.parametrize("sparsity", [0, 1])
def test_all_neurons_or_none_running_equals_its_twin(sparsity: float, kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape()), 2, kernel_device, sparsity)


def test_zero_and_constant_rows_equal_their_twin(kernel_device: torch.device) -> None:
    assert_equals_twin(random_expert(Shape(), zero_rows=(0, 3), constant_rows=(1, 32)), 2, kernel_device, 0)


def test_an_expert_without_tokens_changes_nothing(kernel_device: torch.device) -> None:
    expert = random_expert(Shape(num_rows=1))
    tables, y = tables_of(expert, 0.0, kernel_device), torch.ones(2, 128, device=kernel_device)
    empty = torch.zeros(0, device=kernel_device)
    expert_many(torch.ones(2, 128, device=kernel_device), empty.int(), empty, tables, EXPERT, tables.kinds[0], y, empty)
    assert torch.equal(y.cpu(), torch.ones(2, 128))


def test_a_nan_is_seen(kernel_device: torch.device) -> None:
    expert = random_expert(Shape(num_rows=3))
    tables, y = tables_of(expert, 1.0, kernel_device), torch.zeros(2, 128, device=kernel_device)
    x, one = torch.full((2, 128), torch.nan, device=kernel_device), torch.ones(1, device=kernel_device)
    workspace = torch.zeros(workspace_floats(1, 3), device=kernel_device)
    expert_many(x, one.int(), one, tables, EXPERT, tables.kinds[0], y, workspace)
    assert y[1].isnan().all()
    assert (y[0] == 0).all()
