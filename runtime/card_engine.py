"""A pack on a card inside a budget: what else takes memory is measured, and the rest is the experts'.

Nothing is assumed of what driver, kernels and forward passes take. An engine is first put together with as little room
for experts as it runs in, does once all that it will ever do, and is measured; what the budget leaves is the room of
the engine that stays.
"""

import gc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from moe_pack.formats import Pack, RunError, size_text
from moe_pack.runtime.budget import AS_BUDGET
from moe_pack.runtime.card_budget import CardCosts, divide_card
from moe_pack.runtime.card_placement import PAGE_SHARE
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.pack_weights import PackWeights

_ROUNDING_BYTES = 4 << 20  # the driver gives memory in pieces of 2 MiB
# What torch allocates has a piece of the driver's memory of its own from so many bytes on; what is smaller shares
# pieces of 20 MiB with others, of which there may be one more than was measured.
_OWN_PIECE_BYTES, _SHARED_PIECE_BYTES = 10 << 20, 20 << 20


@dataclass(frozen=True, slots=True)
class CardAsked:
    """What was asked for: `budget_bytes` of the card for everything, None for all that is free.

    `chunk_tokens`: of a forward pass of a prompt, at most; None: as the budget allows.   `cache_dtype`: of keys and
    values.
    """

    budget_bytes: int | None
    context_tokens: int
    chunk_tokens: int | None
    cache_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CardUse:
    """What a card's memory is spent on, in bytes. `overhead`: measured, all that is none of the others.

    `pages`: of `experts`, what comes and goes; the rest of it is always there.
    """

    budget: int
    dense: int
    cache: int
    experts: int
    pages: int
    overhead: int

    @property
    def spent(self) -> int:
        """All together."""
        return self.dense + self.cache + self.experts + self.overhead


@dataclass(frozen=True, slots=True)
class CardCounts:
    """What the cache of experts was asked since the start: `needed` experts of which `hits` had their pages.

    `rows`, `num_bytes`: that were pulled from host memory.
    """

    needed: int
    hits: int
    rows: int
    num_bytes: int


@runtime_checkable
class Counting(Protocol):
    """A decoder that counts what it needed and pulled."""

    def counts(self) -> CardCounts:
        """What was needed and pulled until now; waits for the card."""
        ...


class DriverMemory(Protocol):
    """A card's memory as its driver counts it; see `CardMemory`."""

    def used_bytes(self) -> int:
        """Bytes that this process uses."""
        ...

    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        ...


class AtWork(Protocol):
    """An engine put together: `expert_bytes` of the card are experts', `pages_bytes` of these come and go."""

    expert_bytes: int
    pages_bytes: int

    @property
    def decoder(self) -> Decoder:
        """What runs it."""
        ...

    @property
    def weights(self) -> PackWeights:
        """What it runs on."""
        ...

    def close(self) -> None:
        """Lets go of everything."""
        ...


def fit_to_card(
    pack: Pack,
    device: torch.device,
    memory: DriverMemory,
    asked: CardAsked,
    least_bytes: int,
    build: Callable[[int, int], AtWork],
) -> tuple[AtWork, CardUse]:
    """An engine whose experts have what the budget leaves them.

    Args:    least_bytes: that experts can run in.   build: an engine with so many bytes for experts, whose forward
             passes have so many tokens at most.
    Raises:  RunError if the budget is too small; it says what is needed, and for what.
    """
    torch.zeros(1, device=device)  # makes the driver's context
    context_bytes = memory.used_bytes()
    budget = asked.budget_bytes or context_bytes + memory.free_bytes() - _ROUNDING_BYTES
    chunk = _chunk_tokens(pack, asked, budget, context_bytes)
    with closing(build(least_bytes, chunk)) as first:
        _do_everything(first.decoder, chunk)
        overhead, cache_bytes = memory.used_bytes() - first.expert_bytes, first.decoder.cache.num_bytes
    _let_go()
    overhead_kept = overhead + _ROUNDING_BYTES + (_SHARED_PIECE_BYTES if least_bytes < _OWN_PIECE_BYTES else 0)
    room = budget - overhead_kept
    if room < least_bytes:
        raise RunError(
            f"--budget: {size_text(budget)}, needed are at least "
            f"{size_text(overhead_kept + least_bytes)}: {size_text(overhead)} for all but experts, as "
            f"measured, and {size_text(least_bytes)} for experts; give more, or a shorter context with --max-tokens"
        )
    built = build(room, chunk)
    dense = pack.manifest.totals.dense
    rest = overhead - dense - cache_bytes
    return built, CardUse(budget, dense, cache_bytes, built.expert_bytes, built.pages_bytes, rest)


def _chunk_tokens(pack: Pack, asked: CardAsked, budget: int, context_bytes: int) -> int:
    """How many tokens a forward pass may have, before anything is measured."""
    alike = np.ones(pack.index.size.shape)
    costs = CardCosts(torch.empty((), dtype=asked.cache_dtype).element_size(), context_bytes, AS_BUDGET)
    plan = divide_card(pack.layout, budget, asked.context_tokens, 0, alike, alike[:, :, None], PAGE_SHARE, costs)
    return min(asked.chunk_tokens or plan.chunk_tokens, plan.chunk_tokens, asked.context_tokens)


def _do_everything(decoder: Decoder, chunk_tokens: int) -> None:
    """The longest forward pass at the end of the context, and one token: all memory that will ever be asked for."""
    for num_tokens in (chunk_tokens, 1):
        decoder.reset()
        decoder.cache.num_tokens = decoder.cache.context_tokens - num_tokens
        decoder.next_logits([0] * num_tokens)
    decoder.reset()


def _let_go() -> None:
    """Gives memory back to the driver that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()
