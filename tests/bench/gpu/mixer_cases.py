"""The cases of mixers' states for `cases`: rows of several sequences, several of one, and prompts."""

import torch
from torch import Tensor

from gpu.comparing import Difference, Prepared, against_rms, random_values
from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenOperations, TokenStates
from moe_pack.runtime.model import TORCH, Operations
from moe_pack.runtime.model.caches import LayerState
from moe_pack.runtime.model.compute.recurrence import Gates

FORMS = ("Gated DeltaNet", "Kimi delta", "Mamba-2", "Mamba")
_SLOTS = [1, 1, 0, 2]  # of the rows
_NUM_SLOTS, _TAPS, _BOUND = 3, 4, 1e-5


def state_case(form: str, sizes: tuple[int, int, int, int], device: torch.device, num_tokens: int = 0) -> Prepared:
    """A convolution of all queries, keys and values, with silu, and the recurrence of one kind of mixer after it.

    Args:    sizes: key heads, heads, keys and values; each of Mamba's heads has one value.   num_tokens: of a prompt;
             0: there are rows of several sequences.
    """
    key_heads, heads, keys, width = sizes
    of_rows = num_tokens * [0] or _SLOTS
    num_rows, parts = len(of_rows), [key_heads * keys, key_heads * keys, heads * width]
    x, kernel = random_values(num_rows, sum(parts)), random_values(sum(parts) * _TAPS, seed=1) / _TAPS
    rates = random_values(num_rows, heads, seed=2) if "delta" in form.lower() else None
    a_log, dt_bias = random_values(heads, seed=3), random_values(heads, seed=4)
    decay = -random_values(num_rows, heads, keys, seed=5).abs()
    steps = random_values(num_rows, heads, seed=6)
    states = random_values(_NUM_SLOTS, _TAPS - 1, sum(parts), seed=7), random_values(_NUM_SLOTS, *sizes[1:], seed=8)

    def step(operations: Operations, rows: slice, state: LayerState) -> Tensor:
        def there(given: Tensor) -> Tensor:
            return given.to(state.conv.device)

        mixed = operations.convolve(there(x)[rows], there(kernel), None, state, activates=True)
        q, k, v = (
            part.reshape(len(part), -1, n)
            for part, n in zip(torch.split(mixed, parts, 1), (keys, keys, width), strict=True)
        )
        rate = None if rates is None else there(rates)[rows]
        if form in ("Gated DeltaNet", "Mamba-2"):
            least, skip = (0.01, there(a_log)) if rates is None else (0.0, None)
            gates = Gates(there(steps)[rows], rate, there(a_log), there(dt_bias), least, skip)
            return operations.recur_gated(q, k, v, gates, state)
        k = torch.nn.functional.normalize(k, dim=-1)
        return operations.recur(q, k, v, there(decay)[rows], None if rate is None else rate.sigmoid(), state)

    expected, after = torch.zeros(num_rows, heads, width), [each.clone() for each in states]
    for slot in dict.fromkeys(of_rows):
        rows = slice(of_rows.index(slot), of_rows.index(slot) + of_rows.count(slot))
        twin = LayerState(states[0][slot].clone(), states[1][slot].clone())
        expected[rows] = step(TORCH, rows, twin)
        after[0][slot], after[1][slot] = twin.conv, twin.recurrent
    conv, recurrent = (torch.empty_like(each, device=device) for each in states)
    state = LayerState(conv[0], recurrent[0])
    if not num_tokens:
        state = TokenStates(conv, recurrent, torch.tensor(of_rows, dtype=torch.int32, device=device))
    found = torch.full(expected.shape, torch.nan, device=device)

    def launch() -> None:
        conv.copy_(states[0])
        recurrent.copy_(states[1])
        found.copy_(step(TokenOperations(), slice(None), state))

    def compare() -> Difference:
        pairs = ((found, expected), (conv, after[0]), (recurrent, after[1]))
        return Difference(max(against_rms(*pair) for pair in pairs), _BOUND)

    return Prepared(launch, compare)
