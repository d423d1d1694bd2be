"""Norms, sums of experts' outputs and what the CPU gets of a layer, by kernels, against plain torch."""

import pytest
import torch
from gpu import cases
from gpu.comparing import assert_right
from support.cases import case

from moe_pack.formats import NormSpec
from moe_pack.runtime.gpu.kernels.elementwise import Norm, norm
from moe_pack.runtime.model import TORCH

TOLERANCE = 2e-6  # float32 sums of up to 2,048 squares in another order


@pytest.mark.parametrize("d", [1, 8, 63, 64, 320, 2048])
def test_norms_are_torchs(d: int, kernel_device: torch.device) -> None:
    for kind in ("rms", "layer"):
        with case(kind):
            assert_right(cases.norm_case(NormSpec(kind, 1e-5), d, kernel_device), TOLERANCE)


def test_zeros_stay_zeros_and_a_vector_may_be_normed_in_place(kernel_device: torch.device) -> None:
    x, weight = cases.random_values(320), cases.random_values(320, seed=1)
    by = Norm(weight.to(kernel_device), None, 1e-6)
    for given, expected in ((x, TORCH.rms_norm(x, weight, 1e-6)), (0 * x, 0 * x)):
        there = given.to(kernel_device, copy=True)
        norm(there, by, there)
        torch.testing.assert_close(there.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 5, 70), (3, 4, 70), (8, 16, 128)])
def test_partial_sums_are_added_with_the_routers_weights_and_all_else_of_a_layer(
    shape: tuple[int, int, int], kernel_device: torch.device
) -> None:
    for added in ((), ("residual", "shared"), ("residual", "pulled"), ("residual", "host"), ("shared", "host"),
                  ("residual", "pulled", "host", "shared")):  # fmt: skip
        with case(added):
            assert_right(cases.reduce_case(shape, added, kernel_device))


@pytest.mark.parametrize(("d", "k"), [(64, 1), (515, 6)])
def test_what_the_cpu_needs_is_written_to_host_memory(d: int, k: int, kernel_device: torch.device) -> None:
    assert_right(cases.hand_over_case(k, d, kernel_device))
