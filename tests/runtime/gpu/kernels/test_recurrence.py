"""States of mixers by kernels against plain torch: rows of several sequences, several rows of one, and prompts."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenOperations, TokenStates
from moe_pack.runtime.model import TORCH, Operations
from moe_pack.runtime.model.caches import LayerState
from moe_pack.runtime.model.compute.recurrence import Gates

TOLERANCE = 1e-5
FLOAT, DOUBLE = torch.float32, torch.float64
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


def gated(
    operations: Operations,
    rows: slice,
    state: LayerState,
    mixed: Tensor,
    gates: Gates,
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Tensor:
    """The operation on rows of queries, keys and values together."""
    key_heads, heads, keys, width = sizes
    tensors = (mixed, gates.steps, gates.rates, gates.a_log, gates.dt_bias, gates.skip)
    mixed_, steps, rates, a_log, dt_bias, skip = to(operations, device, *tensors)
    assert mixed_ is not None and steps is not None and a_log is not None and dt_bias is not None
    q, k, v = torch.split(mixed_[rows], [key_heads * keys, key_heads * keys, heads * width], dim=1)
    shape = (-1, key_heads, keys)
    given = Gates(steps, rates, a_log, dt_bias, gates.least_step, skip).of_rows(rows)
    return operations.recur_gated(q.view(shape), k.view(shape), v.view(-1, heads, width), given, state)


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
            return gated(operations, rows, state, mixed, gates, (key_heads, heads, keys, width), kernel_device)

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


def test_norms_are_torchs(kernel_device: torch.device) -> None:
    x, weight = random(3, 4, 24), torch.arange(24.0)
    near(
        TokenOperations().rms_norm(x.to(kernel_device), weight.to(kernel_device), 1e-6), TORCH.rms_norm(x, weight, 1e-6)
    )


def check_prompt(step: Step, pieces: list[int], conv: Tensor, recurrent: Tensor, device: torch.device) -> None:
    """Compares a prompt's tokens, that come in pieces of these lengths, with the twin of all at once."""
    twin = LayerState(conv.clone(), recurrent.clone())
    expected = step(TORCH, slice(0, sum(pieces)), twin)
    state = LayerState(conv.to(device, copy=True), recurrent.to(device, copy=True))
    ends = list(accumulate(pieces, initial=0))
    found = [step(TokenOperations(), slice(*at), state) for at in pairwise(ends)]
    near(torch.cat(found), expected)
    near(state.conv, twin.conv)
    near(state.recurrent, twin.recurrent)


PIECES = ([1], [5], [16], [17, 2, 1, 20])


@pytest.mark.parametrize("activates", [False, True])
def test_convolutions_of_prompts_are_torchs(activates: bool, kernel_device: torch.device) -> None:
    torch.manual_seed(4)
    for channels, taps, dilation, has_bias in ((300, 4, 1, True), (64, 3, 4, False), (5, 1, 1, False)):
        bias, kernel = random(channels) if has_bias else None, random(channels * taps)
        x = random(40, 2 * channels)[:, channels:]

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

        for pieces in PIECES:
            with case(channels, taps, dilation, pieces):
                conv = random((taps - 1) * dilation, channels)
                check_prompt(step, pieces, conv, torch.zeros(0), kernel_device)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (1, 2, 72, 72)])
def test_recurrences_of_prompts_are_torchs(
    sizes: tuple[int, int, int, int], by_key: bool, kernel_device: torch.device
) -> None:
    torch.manual_seed(5)
    key_heads, heads, keys, width = sizes
    for has_rate in (False, True):
        q, k = random(40, key_heads, 2, keys).unbind(2)
        k, v = torch.nn.functional.normalize(k, dim=-1), random(40, heads, width)
        log_decay = -random(*((40, heads, keys) if by_key else (heads,))).abs()
        log_decay = log_decay if by_key else log_decay.expand(40, -1)
        rate = torch.rand(40, 2 * heads)[:, heads:] if has_rate else None

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

        for pieces in PIECES:
            with case(has_rate, pieces):
                check_prompt(step, pieces, torch.zeros(0), random(heads, keys, width), kernel_device)


@pytest.mark.parametrize("form", ["Gated DeltaNet", "Mamba-2"])
def test_gates_of_prompts_are_torchs(form: str, kernel_device: torch.device) -> None:
    torch.manual_seed(6)
    key_heads, heads, keys, width = 2, 4, 12, 40
    mixed = random(40, 2 * key_heads * keys + heads * width)
    # The least step of Mamba-2 cuts some off.
    gates = Gates(3 * random(40, heads), None, random(heads), random(heads), 0.01, random(heads))
    if form == "Gated DeltaNet":
        gates = replace(gates, rates=random(40, heads), least_step=0.0, skip=None)

    def step(operations: Operations, rows: slice, state: LayerState) -> Tensor:
        return gated(operations, rows, state, mixed, gates, (key_heads, heads, keys, width), kernel_device)

    for pieces in PIECES:
        with case(form, pieces):
            check_prompt(step, pieces, torch.zeros(0), random(heads, keys, width), kernel_device)


@pytest.mark.parametrize("log_decay", [0.0, -1e-4, -40.0])
def test_chunks_are_as_precise_where_keys_repeat_and_decays_are_extreme(
    log_decay: float, kernel_device: torch.device
) -> None:
    """Each of equal keys takes back what those before it wrote: powers of their matrix would be as large as 6435."""
    torch.manual_seed(7)
    keys, width, num_tokens = 24, 16, 33
    k = torch.nn.functional.normalize(random(1, 1, keys) + 1e-3 * random(num_tokens, 1, keys), dim=-1)
    v, rate = random(num_tokens, 1, width), torch.full((num_tokens, 1), 0.5 if log_decay else 1.0)
    decays = torch.full((num_tokens, 1), log_decay)
    decays[::5] = -3000.0 if log_decay else 0.0  # beside which others' differences are small
    state, twin = (LayerState(torch.zeros(0), torch.ones(1, keys, width, dtype=dtype)) for dtype in (FLOAT, DOUBLE))
    state = LayerState(state.conv, state.recurrent.to(kernel_device))
    found = TokenOperations().recur(*(each.to(kernel_device) for each in (k, k, v, decays, rate)), state)
    expected = []
    for token in range(num_tokens):
        own = (slice(token, token + 1), *(each[token : token + 1].double() for each in (k, v, decays, rate)))
        expected.append(TORCH.recur(own[1], *own[1:], twin))
    near(found, torch.cat(expected).float())
    near(state.recurrent, twin.recurrent.float())
