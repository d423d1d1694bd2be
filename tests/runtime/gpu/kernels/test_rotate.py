"""Rotations by the kernel against plain torch."""

import pytest
import torch
from gpu import cases
from gpu.comparing import against_rms, assert_right
from support.cases import case

from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.model import TORCH
from moe_pack.runtime.model.compute.rotation import Rotation

TOLERANCE = 8e-6  # of the values' RMS: sums of d terms in another order


@pytest.mark.parametrize("d", [64, 192, 256, 320, 576, 960, 2048])  # odd factors 1, 3, 1, 5, 9, 15, 1
def test_rotations_are_torchs(d: int, kernel_device: torch.device) -> None:
    for shape in ((d,), (1, d), (3, d)):
        for added in ((), ("residual",), ("shared",), ("residual", "shared")) if d == 320 or shape == (3, d) else ((),):
            with case(shape, added):
                assert_right(cases.rotate_case(shape, added, kernel_device), TOLERANCE)
    vectors, x, operations = (
        [cases.random_values(d, seed=seed) + 3 for seed in (1, 2)],
        cases.random_values(5, d),
        GpuOperations(),
    )
    plain, there = Rotation(*vectors), Rotation(*(each.to(kernel_device) for each in vectors))
    transposed = x.T.contiguous().T.to(kernel_device)
    assert against_rms(operations.rotate(x.to(kernel_device), there), TORCH.rotate(x, plain)) <= TOLERANCE
    assert against_rms(operations.rotate_back(transposed, there), TORCH.rotate_back(x, plain)) <= TOLERANCE


def test_the_hidden_state_may_be_written_in_place_and_what_is_not_finite_stays_seen(
    kernel_device: torch.device,
) -> None:
    x, vectors = torch.ones(2, 192), [torch.ones(192)] * 2
    x[1, 5] = torch.nan
    found = GpuOperations().rotate(x.to(kernel_device), Rotation(*(each.to(kernel_device) for each in vectors))).cpu()
    assert found[0].isfinite().all() and found[1].isnan().all()
