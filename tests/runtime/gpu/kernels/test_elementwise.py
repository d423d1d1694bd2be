"""Norms, sums of experts' outputs and what the CPU gets of a layer, by kernels, against plain torch."""

import pytest
import torch
from gpu import cases
from gpu.comparing import assert_right
from support.cases import case
from torch import Tensor

from moe_pack.formats import LimitedFunction, NeuronFunction, NormSpec
from moe_pack.runtime.gpu.kernels.elementwise import Norm, norm, reduce
from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.model import TORCH

FUNCTIONS: tuple[NeuronFunction, ...] = (
    "silu", "relu", "relu2", "gelu_tanh", "clamped_swiglu", LimitedFunction("clipped_silu", 1.5),
    LimitedFunction("capped_silu", 1.5),
)  # fmt: skip
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


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_the_sums_of_several_tokens_have_the_bits_of_each_alone(num_tokens: int, kernel_device: torch.device) -> None:
    k, d = 3, 70

    def random(*shape: int, seed: int) -> Tensor:
        return cases.random_values(*shape, seed=seed).to(kernel_device)

    partials, pulled = random(num_tokens * k, 4, d, seed=1), random(num_tokens * k, 2, d, seed=2)
    weights = random(num_tokens, k, seed=3)
    others = {name: random(num_tokens, d, seed=4 + i) for i, name in enumerate(("host", "residual", "shared"))}
    found, alone = torch.full_like(others["host"], torch.nan), torch.full_like(others["host"], torch.nan)
    reduce(partials, weights, found, pulled=pulled, scale=2.5, **others)
    for t in range(num_tokens):
        own, its = slice(t * k, t * k + k), {name: each[t] for name, each in others.items()}
        reduce(partials[own], weights[t], alone[t], pulled=pulled[own], scale=2.5, **its)
    assert torch.equal(found, alone)
    several = torch.cat([partials, pulled], dim=1).view(num_tokens, k, -1, d)
    expected = (several.sum(2) * weights[..., None]).sum(1) + others["host"] + others["shared"]
    torch.testing.assert_close(found, others["residual"] + 2.5 * expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_activates_neurons_as_torch_does(kernel_device: torch.device) -> None:
    operations = GpuOperations()
    for function in FUNCTIONS:
        for shape in ((3, 5), (2, 700)):
            with case(str(function), shape):
                gate, up = 4 * cases.random_values(*shape), 4 * cases.random_values(*shape, seed=1)
                gate[0, 0] = torch.nan
                there = gate.to(kernel_device), up.to(kernel_device)
                for given, expected in ((there[0], gate), (None, None)):
                    found = operations.activate(given, there[1], function).cpu()
                    wanted = TORCH.activate(expected, up, function)
                    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5, equal_nan=True)


def test_vectors_of_any_shape_are_normed_as_by_torch(kernel_device: torch.device) -> None:
    operations = GpuOperations()
    for shape in ((4, 64), (3, 2, 128), (2, 2048), (1, 5000)):
        with case(shape):
            x, weight = 3 * cases.random_values(*shape), cases.random_values(shape[-1], seed=1)
            expected = TORCH.rms_norm(x, weight, 0.5)
            for given in (x.to(kernel_device), x.transpose(0, 1).contiguous().to(kernel_device).transpose(0, 1)):
                found = operations.rms_norm(given, weight.to(kernel_device), 0.5).cpu()
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_what_the_cpu_needs_of_several_tokens_is_written_to_host_memory(kernel_device: torch.device) -> None:
    for num_tokens in (1, 2, 5, 8):
        with case(num_tokens):
            assert_right(cases.hand_over_case(6, 515, kernel_device, num_tokens))


@pytest.mark.parametrize(("d", "k"), [(64, 1), (515, 6)])
def test_what_the_cpu_needs_is_written_to_host_memory(d: int, k: int, kernel_device: torch.device) -> None:
    assert_right(cases.hand_over_case(k, d, kernel_device))
