"""Partial sums of experts added by a kernel: with the router's weights, and with everything else that a layer adds."""

import pytest
import torch
from support.kernel_twins import reduce_twin

from moe_pack.runtime.gpu.kernels.elementwise import hand_over, reduce


@pytest.mark.parametrize(("k", "num_partials", "d"), [(1, 1, 64), (2, 5, 70), (8, 16, 128)])
def test_partial_sums_are_added_with_the_routers_weights(
    k: int, num_partials: int, d: int, kernel_device: torch.device
) -> None:
    partials, weights = torch.randn(k, num_partials, d), torch.rand(k)
    residual, shared = torch.randn(d), torch.randn(d)
    plain = reduce_twin(partials, weights)
    expected = residual + 2.5 * (shared + plain)
    partials, weights, residual, shared = (each.to(kernel_device) for each in (partials, weights, residual, shared))
    out = torch.full_like(residual, torch.nan)
    reduce(partials, weights, out)
    torch.testing.assert_close(out.cpu(), plain, rtol=1e-5, atol=1e-5)
    reduce(partials, weights, residual, residual=residual, shared=shared, scale=2.5)
    torch.testing.assert_close(residual.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_pulled", [0, 1, 5])
@pytest.mark.parametrize("has_host", [False, True])
def test_partial_sums_of_pulled_records_and_the_cpus_share_are_added(
    num_pulled: int, has_host: bool, kernel_device: torch.device
) -> None:
    here, pulled, weights = torch.randn(3, 4, 70), torch.randn(3, num_pulled, 70), torch.rand(3)
    residual, host = torch.randn(70), torch.randn(70)
    expected = residual + 0.5 * (reduce_twin(here, weights) + reduce_twin(pulled, weights) + has_host * host)
    here, pulled, weights, residual = (each.to(kernel_device) for each in (here, pulled, weights, residual))
    reduce(
        here,
        weights,
        residual,
        pulled=pulled if num_pulled else None,
        host=(host.pin_memory() if kernel_device.type == "cuda" else host) if has_host else None,
        residual=residual,
        scale=0.5,
    )
    torch.testing.assert_close(residual.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("d", "k"), [(64, 1), (515, 6)])
def test_what_the_cpu_needs_is_written_to_host_memory(d: int, k: int, kernel_device: torch.device) -> None:
    given = (torch.randn(d), torch.rand(k), torch.randperm(k, dtype=torch.int32))
    there = [torch.zeros(each.shape, dtype=each.dtype, pin_memory=kernel_device.type == "cuda") for each in given]
    x, weights, experts = (each.to(kernel_device) for each in given)
    hand_over(x, weights, experts, *there)
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(found, wanted) for found, wanted in zip(there, given, strict=True))
