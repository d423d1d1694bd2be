"""The neurons of a dense expert in one launch, against plain torch."""

import pytest
import torch
from gpu import cases
from gpu.comparing import assert_right
from support.cases import case
from torch import Tensor

from moe_pack.formats import NeuronFunction, NormSpec, part_format, trellis_format
from moe_pack.runtime.gpu.kernels import matmul
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.model import neuron_of

TWO, THREE, FOUR = (part_format(width, 64) for width in (2, 3, 4))
EDGES = [-30.0, -7.1, -7.0, -6.9, -1.0, -0.0, 0.0, 1.0, 6.9, 7.0, 7.1, 30.0, torch.nan]


def of_products(products: Tensor, device: torch.device) -> matmul.StoredRows:
    """A matrix whose products with (1, 0, 0, 0) these are."""
    rows = torch.nn.functional.pad(products[:, None], (0, 3))
    return matmul.StoredRows(rows.to(device), stored_part("F32", 4))


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("function", ["silu", "relu", "clamped_swiglu"])
def test_every_function_is_the_references_on_both_sides_of_its_limits(
    function: NeuronFunction, has_gate: bool, kernel_device: torch.device
) -> None:
    up, gate, edges = 5 * cases.random_values(1100), 5 * cases.random_values(1100, seed=1), torch.tensor(EDGES)
    up[: len(edges) ** 2], gate[: len(edges) ** 2] = edges.repeat(len(edges)), edges.repeat_interleave(len(edges))
    x, out = torch.tensor([1.0, 0, 0, 0], device=kernel_device), torch.full((1100,), torch.inf, device=kernel_device)
    gate_rows = of_products(gate, kernel_device) if has_gate else None
    matmul.gated(x, gate_rows, of_products(up, kernel_device), function, out)
    expected = neuron_of(function).h(gate if has_gate else None, up)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("num_rows", [1, 63, 200, 700])
def test_neurons_are_torchs_in_any_two_formats_with_and_without_norm_and_weight(
    num_rows: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "wave", lambda *_: 1)  # so that programs take several blocks of rows
    rms, layer, trellis = NormSpec("rms", 1e-5), NormSpec("layer", 1e-5), trellis_format(5, 64)
    for forms, norm_spec, weight in (
        ((FOUR, FOUR), None, None),
        ((FOUR, FOUR), rms, 0.25),
        ((TWO, FOUR), rms, None),
        ((THREE, TWO), layer, None),
        ((trellis, FOUR), None, 3.0),
        ((None, FOUR), layer, 0.5),
        ((None, THREE), None, None),
    ):
        with case(forms, norm_spec, weight):
            assert_right(cases.gated_case("silu", forms, (num_rows, 192), norm_spec, weight, kernel_device))


def test_a_nan_in_x_is_seen_in_every_neuron(kernel_device: torch.device) -> None:
    x, matrix = torch.randn(4), of_products(torch.randn(5), kernel_device)
    x[2] = torch.nan
    for norm in (None, Norm(torch.ones(4, device=kernel_device), None, 1e-5)):
        out = torch.zeros(5, device=kernel_device)
        matmul.gated(x.to(kernel_device), matrix, matrix, "silu", out, norm=norm)
        assert out.isnan().all()
