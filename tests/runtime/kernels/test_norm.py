"""Norms by kernels against plain torch."""

import pytest
import torch
from torch import Tensor

from moe_pack.formats import NormSpec
from moe_pack.runtime import norm as norms
from moe_pack.runtime.kernels.norm import norm

WIDTHS = [1, 8, 63, 64, 320, 2048]
TOLERANCE = 2e-6  # float32 sums of up to 2,048 squares in another order


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("d", WIDTHS)
def test_rms_norm_is_torchs(d: int) -> None:
    x, weight = 3 * random(3, d), random(d, seed=1)
    out = torch.full_like(x, torch.nan)
    norm(x, weight, None, NormSpec("rms", 1e-5), out)
    torch.testing.assert_close(out, norms.rms_norm(x, weight, 1e-5), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("d", WIDTHS)
def test_layer_norm_is_torchs(d: int) -> None:
    x, weight, bias = 5 + random(d), random(d, seed=1), random(d, seed=2)
    out = torch.full_like(x, torch.nan)
    norm(x, weight, bias, NormSpec("layer", 1e-5), out)
    expected = torch.nn.functional.layer_norm(x, (d,), weight, bias, 1e-5)
    torch.testing.assert_close(out, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_zeros_stay_zeros() -> None:
    out = torch.ones(64)
    norm(torch.zeros(64), random(64), None, NormSpec("rms", 1e-6), out)
    assert not out.any()


def test_a_vector_may_be_normed_in_place() -> None:
    x, weight = random(320), random(320, seed=1)
    expected = norms.rms_norm(x, weight, 1e-6)
    norm(x, weight, None, NormSpec("rms", 1e-6), x)
    torch.testing.assert_close(x, expected, rtol=TOLERANCE, atol=TOLERANCE)
