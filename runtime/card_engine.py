"""A pack on a card, by the graph engine: what else takes memory is measured, and the rest is the experts'.

Nothing is assumed of what driver, kernels and forward passes take. The engine is first put together with as little
room for experts as they run in, does once all that it will ever do, and is measured; what the budget leaves is the room
of the engine that runs. Importing this needs triton.
"""

import gc
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.formats import Pack, RunError, size_text
from moe_pack.runtime.budget import AS_BUDGET
from moe_pack.runtime.card_budget import CardCosts, divide_card
from moe_pack.runtime.card_cache import CardCache
from moe_pack.runtime.card_memory import CardMemory
from moe_pack.runtime.card_placement import PAGE_SHARE, CardPlacement, least_placement, place_experts
from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.graph import GraphDecoder
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.routing import Routing

_ROUNDING_BYTES = 4 << 20  # the driver gives memory in pieces of 2 MiB


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


class _Built:
    """A decoder with its cache of experts. Owns the cache: `close` it."""

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        host: HostArena,
        placement: CardPlacement,
        context_tokens: int,
        chunk_tokens: int,
        cache_dtype: torch.dtype,
    ) -> None:
        with ExitStack() as opened:
            self.cache = opened.enter_context(closing(CardCache(pack, placement, host, device)))
            self.weights = CardWeights(pack, device, self.cache, chunk_tokens)
            self.decoder = GraphDecoder(self.weights, context_tokens, device, chunk_tokens, cache_dtype)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Lets go of the card's memory."""
        self._opened.close()
        del self.decoder, self.weights
        gc.collect()
        torch.cuda.empty_cache()


class GraphEngine:
    """A pack at work on a card: `decoder`, `weights`, `cache` of experts. Owns them, not `host`: `close` it.

    `use`: where the card's memory went.
    Args:    budget_bytes: of the card, for everything; None: all that is free.   cache_dtype: of keys and values.
             chunk_tokens: of a forward pass of a prompt, at most; None: as the budget allows.
    Raises:  RunError if the budget is too small; it says what is needed.
    """

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        memory: CardMemory,
        host: HostArena,
        budget_bytes: int | None,
        context_tokens: int,
        cache_dtype: torch.dtype,
        chunk_tokens: int | None,
    ) -> None:
        torch.zeros(1, device=device)  # makes the driver's context
        context_bytes = memory.used_bytes()
        budget = budget_bytes or context_bytes + memory.free_bytes() - _ROUNDING_BYTES
        popularity = _popularity(pack)
        costs = CardCosts(torch.empty((), dtype=cache_dtype).element_size(), context_bytes, AS_BUDGET)
        heat = np.ones((*popularity.shape, 1))
        plan = divide_card(pack.layout, budget, context_tokens, 0, popularity, heat, PAGE_SHARE, costs)
        chunk = min(chunk_tokens or plan.chunk_tokens, plan.chunk_tokens)
        asked = (context_tokens, chunk, cache_dtype)
        first = _Built(pack, device, host, least_placement(pack.layout), *asked)
        try:
            _do_everything(first.decoder, chunk)
            overhead = memory.used_bytes() - first.cache.num_bytes
        finally:
            first.close()
        room = budget - overhead - _ROUNDING_BYTES
        least = least_placement(pack.layout).num_bytes
        if room < least:
            raise RunError(
                f"--budget: {size_text(budget)}, needed are at least {size_text(overhead + _ROUNDING_BYTES + least)}: "
                f"{size_text(overhead)} for all but experts, measured, and {size_text(least)} for those of one token; "
                "give more, a shorter context with --max-tokens, or --engine staged"
            )
        built = _Built(pack, device, host, place_experts(pack.layout, room, popularity), *asked)
        self._built, self.decoder, self.weights, self.cache = built, built.decoder, built.weights, built.cache
        kept = built.decoder.cache.num_bytes
        placement = built.cache.placement
        pages = int(placement.num_pages.sum()) * placement.page_bytes
        fixed = pack.manifest.totals.dense + kept
        self.use = CardUse(budget, pack.manifest.totals.dense, kept, built.cache.num_bytes, pages, overhead - fixed)

    def close(self) -> None:
        """Lets go of the card's memory."""
        del self.decoder, self.weights, self.cache
        self._built.close()


def _do_everything(decoder: GraphDecoder, chunk_tokens: int) -> None:
    """The longest forward pass at the end of the context, and one token: all memory that will ever be asked for."""
    context = decoder.cache.context_tokens
    longest = min(chunk_tokens, context)
    for num_tokens in (longest, 1):
        decoder.reset()
        decoder.cache.num_tokens = context - num_tokens
        decoder.next_logits([0] * num_tokens)
    decoder.reset()


def _popularity(pack: Pack) -> NDArray[np.float64]:
    routing = Routing.open(pack)
    return np.ones(pack.index.size.shape) if routing is None else np.asarray(routing.popularity, np.float64)
