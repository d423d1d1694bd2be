"""The neuron functions of dense experts by the kernel, against the reference's."""

import pytest
import torch

from moe_pack.formats import NeuronFunction
from moe_pack.runtime.gpu.kernels.elementwise import activate
from moe_pack.runtime.model import NEURONS

EDGES = [-30.0, -7.1, -7.0, -6.9, -1.0, -0.0, 0.0, 1.0, 6.9, 7.0, 7.1, 30.0, torch.nan]


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("function", ["silu", "relu", "clamped_swiglu"])
def test_every_function_is_the_references_on_both_sides_of_its_limits(
    function: NeuronFunction, has_gate: bool, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    up, gate = 5 * torch.randn(1100, generator=generator), 5 * torch.randn(1100, generator=generator)
    edges = torch.tensor(EDGES)  # each with each
    up[: len(edges) ** 2], gate[: len(edges) ** 2] = edges.repeat(len(edges)), edges.repeat_interleave(len(edges))
    out = torch.full_like(up, torch.inf, device=kernel_device)
    activate(up.to(kernel_device), gate.to(kernel_device) if has_gate else None, out, function)
    expected = NEURONS[function].h(gate if has_gate else None, up)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_result_may_take_the_place_of_up(kernel_device: torch.device) -> None:
    up, gate = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    held = up.to(kernel_device, copy=True)
    activate(held, gate.to(kernel_device), held, "clamped_swiglu")
    torch.testing.assert_close(held.cpu(), NEURONS["clamped_swiglu"].h(gate, up), rtol=1e-6, atol=1e-6)
