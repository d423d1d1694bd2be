"""Norms by kernels against plain torch."""

import pytest
import torch
from torch import Tensor

from moe_pack.runtime.gpu.kernels.elementwise import Norm, norm
from moe_pack.runtime.model import TORCH

WIDTHS = [1, 8, 63, 64, 320, 2048]
TOLERANCE = 2e-6  # float32 sums of up to 2,048 squares in another order


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, device: torch.device) -> Tensor:
    """The kernel's answer."""
    out = torch.full_like(x, torch.nan, device=device)
    norm(x.to(device), Norm(weight.to(device), None if bias is None else bias.to(device), eps), out)
    return out.cpu()


@pytest.mark.parametrize("d", WIDTHS)
def test_rms_norm_is_torchs(d: int, kernel_device: torch.device) -> None:
    x, weight = 3 * random(3, d), random(d, seed=1)
    found = normed(x, weight, None, 1e-5, kernel_device)
    torch.testing.assert_close(found, TORCH.rms_norm(x, weight, 1e-5), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("d", WIDTHS)
def test_layer_norm_is_torchs(d: int, kernel_device: torch.device) -> None:
    x, weight, bias = 5 + random(d), random(d, seed=1), random(d, seed=2)
    found = normed(x, weight, bias, 1e-5, kernel_device)
    expected = torch.nn.functional.layer_norm(x, (d,), weight, bias, 1e-5)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_zeros_stay_zeros(kernel_device: torch.device) -> None:
    assert not normed(torch.zeros(64), random(64), None, 1e-6, kernel_device).any()


def test_a_vector_may_be_normed_in_place(kernel_device: torch.device) -> None:
    x, weight = random(320), random(320, seed=1)
    expected = TORCH.rms_norm(x, weight, 1e-6)
    held = x.to(kernel_device)
    norm(held, Norm(weight.to(kernel_device), None, 1e-6), held)
    torch.testing.assert_close(held.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)
