"""States of mixers by kernels against plain torch: rows of several sequences, and several rows of one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenOperations, TokenStates
from moe_pack.runtime.model import TORCH, Operations
from moe_pack.runtime.model.caches import LayerState
from moe_pack.runtime.model.compute.recurrence import Gates

TOLERANCE = 1e-5
# The slots of 1, 2, 5 and 8 rows.
SLOTS = ([1], [2, 0], [0, 0], [2, 2, 2, 0, 1], [1, 1, 1, 1, 1], [3, 0, 0, 0, 2, 2, 1, 1], [2] * 8)
NUM_SLOTS = 4

Step = Callable[[Operations, slice, LayerState], Tensor]  # the operation on some rows


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def stacked(conv: Tensor, recurrent: Tensor, slots: list[int], device: torch.device) -> TokenStates:
    return TokenStates(
        conv.clone().to(device), recurrent.clone().to(device), torch.tensor(slots, dtype=torch.int32, device=device)
    )


def check(step: Step, conv: Tensor, recurrent: Tensor, slots: list[int], device: torch.device) -> None:
    """Compares rows with the twin, slot after slot, and bit for bit with the same rows one at a time."""
    operations, states = TokenOperations(), stacked(conv, recurrent, slots, device)
    found = step(operations, slice(None), states)
    alone = stacked(conv, recurrent, slots, device)
    for row in range(len(slots)):
        one = replace(alone, slots=alone.slots[row : row + 1])
        assert torch.equal(step(operations, slice(row, row + 1), one)[0], found[row]), f"row {row}"
    assert torch.equal(alone.conv, states.conv) and torch.equal(alone.recurrent, states.recurrent)
    for slot in range(NUM_SLOTS):
        twin = LayerState(conv[slot].clone(), recurrent[slot].clone())
        if slot in slots:
            rows = slice(slots.index(slot), slots.index(slot) + slots.count(slot))
            near(found[rows], step(TORCH, rows, twin))
        near(states.conv[slot], twin.conv)
        near(states.recurrent[slot], twin.recurrent)


def near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    error = ((found.cpu() - expected).abs() / (1 + expected.abs())).nan_to_num(nan=torch.inf)
    assert not error.numel() or error.max() <= TOLERANCE


def to(operations: Operations, device: torch.device, *given: Tensor | None) -> list[Tensor | None]:
    """Inputs on the device of a kernel, or as they are for the twin."""
    return [each if operations is TORCH or each is None else each.to(device) for each in given]


@pytest.mark.parametrize("activates", [False, True])
def test_convolutions_are_torchs(activates: bool, kernel_device: torch.device) -> None:
    torch.manual_seed(1)
    for channels, taps, dilation, has_bias in ((300, 4, 1, True), (64, 3, 2, False), (8, 2, 3, True), (5, 1, 1, False)):
        for slots in SLOTS:
            # Rows are parts of longer ones, as one of several projections is.
            x, kernel = random(len(slots), 2 * channels)[:, channels:], random(channels * taps)
            bias, conv = random(channels) if has_bias else None, random(NUM_SLOTS, (taps - 1) * dilation, channels)

            def step(
                operations: Operations,
                rows: slice,
                state: LayerState,
                given: tuple[Tensor, Tensor, Tensor | None] = (x, kernel, bias),
                dilation: int = dilation,
            ) -> Tensor:
                x, kernel, bias = to(operations, kernel_device, *given)
                assert x is not None and kernel is not None
                return operations.convolve(x[rows], kernel, bias, state, dilation=dilation, activates=activates)

            with case(channels, taps, dilation, slots):
                check(step, conv, torch.zeros(NUM_SLOTS, 0), slots, kernel_device)


# Key heads, heads, keys and values: of Gated DeltaNet and Mamba-2, of lightning and Kimi delta, and of Mamba.
SIZES = [(2, 4, 16, 24), (3, 3, 8, 40), (1, 70, 5, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_recurrences_are_torchs(sizes: tuple[int, int, int, int], kernel_device: torch.device) -> None:
    torch.manual_seed(2)
    key_heads, heads, keys, width = sizes
    for slots in SLOTS:
        for by_key in (False, True):
            for has_rate in (False, True):
                num_rows = len(slots)
                q, k = random(num_rows, key_heads, 2, keys).unbind(2)
                k, v = torch.nn.functional.normalize(k, dim=-1), random(num_rows, heads, width)
                log_decay = -random(*((num_rows, heads, keys) if by_key else (heads,))).abs()
                log_decay = log_decay if by_key else log_decay.expand(num_rows, -1)
                rate = torch.rand(num_rows, 2 * heads)[:, heads:] if has_rate else None

                def step(
                    operations: Operations,
                    rows: slice,
                    state: LayerState,
                    given: tuple[Tensor | None, ...] = (q, k, v, log_decay, rate),
                ) -> Tensor:
                    q, k, v, log_decay, rate = (
                        None if each is None else each[rows] for each in to(operations, kernel_device, *given)
                    )
                    assert q is not None and k is not None and v is not None and log_decay is not None
                    return operations.recur(q, k, v, log_decay, rate, state)

                with case(sizes, slots, by_key, has_rate):
                    check(step, torch.zeros(NUM_SLOTS, 0), random(NUM_SLOTS, heads, keys, width), slots, kernel_device)


@pytest.mark.parametrize("form", ["Gated DeltaNet", "Mamba-2"])
def test_gates_are_torchs(form: str, kernel_device: torch.device) -> None:
    torch.manual_seed(3)
    key_heads, heads, keys, width = 2, 4, 12, 40
    for slots in SLOTS:
        num_rows = len(slots)
        mixed = random(num_rows, 2 * key_heads * keys + heads * width)
        # The least step of Mamba-2 cuts some off.
        gates = Gates(3 * random(num_rows, heads), None, random(heads), random(heads), 0.01, random(heads))
        if form == "Gated DeltaNet":
            gates = replace(gates, rates=random(num_rows, heads), least_step=0.0, skip=None)

        def step(
            operations: Operations, rows: slice, state: LayerState, mixed: Tensor = mixed, gates: Gates = gates
        ) -> Tensor:
            tensors = (mixed, gates.steps, gates.rates, gates.a_log, gates.dt_bias, gates.skip)
            mixed_, steps, rates, a_log, dt_bias, skip = to(operations, kernel_device, *tensors)
            assert mixed_ is not None and steps is not None and a_log is not None and dt_bias is not None
            q, k, v = torch.split(mixed_[rows], [key_heads * keys, key_heads * keys, heads * width], dim=1)
            shape = (-1, key_heads, keys)
            given = Gates(steps, rates, a_log, dt_bias, gates.least_step, skip).of_rows(rows)
            return operations.recur_gated(q.view(shape), k.view(shape), v.view(-1, heads, width), given, state)

        with case(form, slots):
            check(step, torch.zeros(NUM_SLOTS, 0), random(NUM_SLOTS, heads, keys, width), slots, kernel_device)


def test_small_steps_are_as_precise_as_large_ones(kernel_device: torch.device) -> None:
    """A Mamba-2's value times its step is what the first row reads: the softplus alone."""
    steps = torch.linspace(-30, 30, 61, device=kernel_device)[None]
    heads = steps.shape[1]
    ones, zeros = torch.ones(1, 1, 4, device=kernel_device), torch.zeros(heads, device=kernel_device)
    state = stacked(torch.zeros(1, 0), torch.zeros(1, heads, 4, 8), [0], kernel_device)
    values = torch.ones(1, heads, 8, device=kernel_device)
    found = TokenOperations().recur_gated(ones / 4, ones, values, Gates(steps, None, zeros, zeros), state)
    expected = torch.nn.functional.softplus(steps.cpu().double())
    assert (found[0, :, 0].cpu() / expected[0] - 1).abs().max() < 1e-6


def test_other_states_and_norms_are_torchs(kernel_device: torch.device) -> None:
    operations, x = TokenOperations(), random(3, 4, 24)
    found = operations.rms_norm(x.to(kernel_device), torch.arange(24.0, device=kernel_device), 1e-6)
    near(found, TORCH.rms_norm(x, torch.arange(24.0), 1e-6))
    ours, theirs = (LayerState(torch.ones(1, 4), torch.ones(2, 3, 5)) for _ in range(2))
    rows, kernel, log_decay = random(3, 4), random(8), -torch.ones(3, 2)
    assert torch.equal(operations.convolve(rows, kernel, None, ours), TORCH.convolve(rows, kernel, None, theirs))
    q, v, gates = random(3, 1, 3), random(3, 2, 5), Gates(log_decay, None, log_decay[0], log_decay[0])
    assert torch.equal(operations.recur(q, q, v, log_decay, None, ours), TORCH.recur(q, q, v, log_decay, None, theirs))
    assert torch.equal(operations.recur_gated(q, q, v, gates, ours), TORCH.recur_gated(q, q, v, gates, theirs))
    assert torch.equal(ours.conv, theirs.conv) and torch.equal(ours.recurrent, theirs.recurrent)
