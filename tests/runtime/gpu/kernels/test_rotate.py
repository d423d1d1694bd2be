"""Rotations by the kernel against plain torch."""

import pytest
import torch
from support.cases import case

from moe_pack.runtime.gpu.kernels.rotation import GpuOperations, device_matrix, rotate, rotate_back
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.compute.rotation import Rotation

SIZES = [64, 192, 256, 576, 960, 2048]  # odd factors 1, 3, 1, 9, 15, 1
TOLERANCE = 3e-6  # of the largest value: sums of d terms in another order


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotation_of(d: int, device: torch.device) -> Rotation:
    return Rotation((random(d, seed=1) + 3).to(device), (random(d, seed=2) - 3).to(device))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize("d", SIZES)
def test_rotations_are_torchs(d: int, kernel_device: torch.device) -> None:
    plain, there = rotation_of(d, torch.device("cpu")), rotation_of(d, kernel_device)
    matrix = device_matrix(d, kernel_device)
    for shape in ((d,), (1, d), (3, d)):
        with case(shape):
            x = random(*shape)
            out = torch.full_like(x, torch.nan, device=kernel_device)
            rotate(x.to(kernel_device), there, matrix, out)
            close(out, TORCH.rotate(x, plain))
            rotate_back(x.to(kernel_device), there, matrix, out)
            close(out, TORCH.rotate_back(x, plain))
    x, operations = random(5, d), GpuOperations()
    close(operations.rotate(x.to(kernel_device), there), TORCH.rotate(x, plain))
    close(operations.rotate_back(x.T.contiguous().T.to(kernel_device), there), TORCH.rotate_back(x, plain))


def test_the_shared_expert_and_the_residual_are_added(kernel_device: torch.device) -> None:
    d = 320
    plain, there = rotation_of(d, torch.device("cpu")), rotation_of(d, kernel_device)
    y, residual, shared = random(d), random(d, seed=4), random(d, seed=5)
    back = TORCH.rotate_back(y, plain)
    for has_residual in (False, True):
        for has_shared in (False, True):
            with case(has_residual, has_shared):
                out = residual.to(kernel_device, copy=True)  # in place, as the hidden state is
                rotate_back(
                    y.to(kernel_device),
                    there,
                    device_matrix(d, kernel_device),
                    out,
                    residual=out if has_residual else None,
                    shared=shared.to(kernel_device) if has_shared else None,
                    scale=0.25,
                )
                expected = 0.25 * (back + shared if has_shared else back)
                close(out, expected + residual if has_residual else expected)


def test_what_is_not_finite_stays_seen(kernel_device: torch.device) -> None:
    x = torch.ones(2, 192)
    x[1, 5] = torch.nan
    found = GpuOperations().rotate(x.to(kernel_device), rotation_of(192, kernel_device)).cpu()
    assert found[0].isfinite().all() and found[1].isnan().all()
