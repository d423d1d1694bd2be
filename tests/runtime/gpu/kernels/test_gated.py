"""The neurons of a dense expert in one launch, against plain torch."""

import pytest
import torch
from support.cases import case
from support.random_experts import random_rows, random_tokens
from torch import Tensor

from moe_pack.formats import NeuronFunction, PartFormat, part_format, trellis_format
from moe_pack.runtime.gpu.kernels import matmul as module
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.matmul import StoredRows, gated
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.model import TORCH, RowMatrix, neuron_of

TWO, THREE, FOUR = (part_format(width, 64) for width in (2, 3, 4))
EDGES = [-30.0, -7.1, -7.0, -6.9, -1.0, -0.0, 0.0, 1.0, 6.9, 7.0, 7.1, 30.0, torch.nan]


def on(device: torch.device, matrix: StoredRows) -> StoredRows:
    return StoredRows(matrix.rows.to(device), matrix.part)


def quantized(form: PartFormat, num_rows: int, num_cols: int, seed: int = 0) -> tuple[StoredRows, Tensor]:
    """A random matrix as it is stored, and its values in float32."""
    layout, held = random_rows(form, num_rows, num_cols, seed)
    rows = torch.from_numpy(held)
    return StoredRows(rows, part_of(layout, "weight")), RowMatrix(layout, rows).rows(0, num_rows)


def neurons(
    x: Tensor,
    gate: StoredRows | None,
    up: StoredRows,
    function: NeuronFunction,
    device: torch.device,
    norm: Norm | None = None,
    weight: float | None = None,
) -> Tensor:
    """The kernel's, on the host."""
    out = torch.full((len(up.rows),), torch.inf, device=device)
    there = None if norm is None else Norm(*(each.to(device) if isinstance(each, Tensor) else each for each in norm))
    factor = None if weight is None else torch.tensor([weight], device=device)
    gated(
        x.to(device),
        None if gate is None else on(device, gate),
        on(device, up),
        function,
        out,
        norm=there,
        weight=factor,
    )
    return out.cpu()


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("function", ["silu", "relu", "clamped_swiglu"])
def test_every_function_is_the_references_on_both_sides_of_its_limits(
    function: NeuronFunction, has_gate: bool, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    up, gate = 5 * torch.randn(1100, generator=generator), 5 * torch.randn(1100, generator=generator)
    edges = torch.tensor(EDGES)  # each with each
    up[: len(edges) ** 2], gate[: len(edges) ** 2] = edges.repeat(len(edges)), edges.repeat_interleave(len(edges))
    x, matrices = torch.tensor([1.0, 0.0, 0.0, 0.0]), []
    for products in (gate, up):  # of rows with one value each
        rows = torch.zeros(1100, 4)
        rows[:, 0] = products
        matrices.append(StoredRows(rows, stored_part("F32", 4)))
    found = neurons(x, matrices[0] if has_gate else None, matrices[1], function, kernel_device)
    expected = neuron_of(function).h(gate if has_gate else None, up)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 63, 200, 700])
def test_neurons_are_torchs_in_any_two_formats_with_and_without_norm_and_weight(
    num_rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_PROGRAMS", 1)  # so that programs take several blocks of rows
    d = 192
    x = 1 + random_tokens(1, d)[0]
    rms, layer = Norm(1 + torch.randn(d) / 4, None, 1e-5), Norm(torch.randn(d), torch.randn(d), 1e-5)
    trellis = trellis_format(5, 64)
    for gate_format, up_format, norm, weight in (
        (FOUR, FOUR, None, None),
        (FOUR, FOUR, rms, 0.25),
        (TWO, FOUR, rms, None),
        (THREE, TWO, layer, None),
        (trellis, FOUR, None, 3.0),
        (None, FOUR, layer, 0.5),
        (None, THREE, None, None),
    ):
        with case((gate_format, up_format, norm is not None, weight)):
            up, up_values = quantized(up_format, num_rows, d, 1)
            gate, gate_values = (None, None) if gate_format is None else quantized(gate_format, num_rows, d)
            found = neurons(x, gate, up, "silu", kernel_device, norm, weight)
            normed = x
            if norm is not None and norm.bias is None:
                normed = TORCH.rms_norm(x, norm.weight, norm.eps)
            elif norm is not None:
                normed = torch.nn.functional.layer_norm(x, (d,), norm.weight, norm.bias, norm.eps)
            u, u_bound = up_values @ normed, up_values.abs() @ normed.abs()
            g, bound = None, 1.1 * u_bound  # by which silu grows at most
            if gate_values is not None:
                g = gate_values @ normed
                bound = 1.1 * (gate_values.abs() @ normed.abs()) * u.abs() + g.abs() * u_bound
            factor = 1.0 if weight is None else weight
            error = (found - factor * neuron_of("silu").h(g, u)).abs()
            assert (error <= 4e-6 * factor * bound).all()  # sums in float32, and two of a norm


def test_a_nan_in_x_is_seen_in_every_neuron(kernel_device: torch.device) -> None:
    x = torch.randn(64)
    x[7] = torch.nan
    matrix, _ = quantized(FOUR, 5, 64)
    assert neurons(x, matrix, matrix, "silu", kernel_device).isnan().all()
    norm = Norm(torch.ones(64), None, 1e-5)
    assert neurons(x, matrix, matrix, "silu", kernel_device, norm).isnan().all()
