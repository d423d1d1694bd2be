"""The neurons of a dense expert in one launch, against plain torch."""

import pytest
import torch
from gpu import cases
from gpu.comparing import assert_right
from support.cases import case
from support.random_experts import random_rows
from torch import Tensor

from moe_pack.formats import LimitedFunction, NeuronFunction, NormSpec, PartFormat, part_format, trellis_format
from moe_pack.runtime.gpu.kernels import matmul
from moe_pack.runtime.gpu.kernels.elementwise import Norm
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.model import neuron_of

TWO, THREE, FOUR = (part_format(width, 64) for width in (2, 3, 4))
FUNCTIONS: tuple[NeuronFunction, ...] = (
    "silu", "relu", "relu2", "clamped_swiglu", "gelu_tanh", LimitedFunction("clipped_silu", 7.0),
    LimitedFunction("capped_silu", 0.7),
)  # fmt: skip
EDGES = [-30.0, -7.1, -7.0, -6.9, -1.0, -0.0, 0.0, 1.0, 6.9, 7.0, 7.1, 30.0, torch.nan]


def of_products(products: Tensor, device: torch.device) -> matmul.StoredRows:
    """A matrix whose products with (1, 0, 0, 0) these are."""
    rows = torch.nn.functional.pad(products[:, None], (0, 3))
    return matmul.StoredRows(rows.to(device), stored_part("F32", 4))


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_every_function_is_the_references_on_both_sides_of_its_limits(
    function: NeuronFunction, has_gate: bool, kernel_device: torch.device
) -> None:
    up, gate, edges = 5 * cases.random_values(1100), 5 * cases.random_values(1100, seed=1), torch.tensor(EDGES)
    up[: len(edges) ** 2], gate[: len(edges) ** 2] = edges.repeat(len(edges)), edges.repeat_interleave(len(edges))
    x, out = torch.tensor([1.0, 0, 0, 0], device=kernel_device), torch.full((1100,), torch.inf, device=kernel_device)
    gate_rows = of_products(gate, kernel_device) if has_gate else None
    matmul.gated(x, gate_rows, of_products(up, kernel_device), function, out)
    expected = neuron_of(function).h(gate if has_gate else None, up)
    tolerance = 1e-5 if function == "gelu_tanh" else 1e-6  # torch adds 1 to a tanh near -1
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=tolerance, equal_nan=True)


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


def test_each_of_several_vectors_has_the_neurons_that_it_has_alone(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "wave", lambda *_: 1)
    trellis, d = trellis_format(5, 64), 192
    weight, bias = (cases.random_values(d, seed=seed).to(kernel_device) for seed in (5, 6))
    for forms, f, norm in (
        ((FOUR, FOUR), 200, Norm(weight, None, 1e-5)),
        ((THREE, TWO), 70, Norm(weight, bias, 1e-5)),
        ((trellis, FOUR), 70, None),
        ((None, THREE), 200, None),
    ):
        stored = [None if form is None else stored_rows(form, (f, d), kernel_device) for form in forms]
        gate, up = stored[0], stored[1]
        assert up is not None
        for num_tokens in (1, 2, 5, 8):
            with case(forms, num_tokens):
                x = cases.random_values(num_tokens, d).to(kernel_device)
                weights = cases.random_values(num_tokens, seed=1).to(kernel_device)
                found, alone = (torch.full((num_tokens, f), torch.nan, device=kernel_device) for _ in range(2))
                matmul.gated(x, gate, up, "silu", found, norm=norm, weight=weights)
                for row in range(num_tokens):
                    matmul.gated(x[row], gate, up, "silu", alone[row], norm=norm, weight=weights[row : row + 1])
                assert torch.equal(found, alone)


def stored_rows(form: PartFormat, shape: tuple[int, int], device: torch.device) -> matmul.StoredRows:
    """A random matrix of a format."""
    layout, rows = random_rows(form, *shape)
    return matmul.StoredRows(torch.from_numpy(rows).to(device), part_of(layout, "weight"))


def test_a_nan_in_x_is_seen_in_every_neuron(kernel_device: torch.device) -> None:
    x, matrix = torch.randn(4), of_products(torch.randn(5), kernel_device)
    x[2] = torch.nan
    for norm in (None, Norm(torch.ones(4, device=kernel_device), None, 1e-5)):
        out = torch.zeros(5, device=kernel_device)
        matmul.gated(x.to(kernel_device), matrix, matrix, "silu", out, norm=norm)
        assert out.isnan().all()
