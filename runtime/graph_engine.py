"""The graph engine put together: experts' cache, weights and decoder. Importing this needs triton."""

from contextlib import ExitStack, closing

import numpy as np
import torch

from moe_pack.formats import Pack
from moe_pack.runtime.card_cache import CardCache
from moe_pack.runtime.card_placement import place_experts, usual_heat
from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.graph import GraphDecoder
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.routing import Routing


class GraphAtWork:
    """A pack at work by the graph engine; see `AtWork`. Owns all but pack and host memory: `close` it.

    Args:    room_bytes: of the device, for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if one token's experts have no room.
    """

    def __init__(
        self,
        pack: Pack,
        host: HostArena,
        device: torch.device,
        room_bytes: int,
        context_tokens: int,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        routing = Routing.open(pack)
        popularity = None if routing is None else np.asarray(routing.popularity, np.float64)
        placement = place_experts(pack.layout, room_bytes, popularity, usual_heat(pack.layout, pack.thresholds))
        with ExitStack() as opened:
            self.cache = opened.enter_context(closing(CardCache(pack, placement, host, device)))
            self.weights = CardWeights(pack, device, self.cache, chunk_tokens)
            self.decoder = GraphDecoder(self.weights, context_tokens, device, chunk_tokens, cache_dtype)
            self.expert_bytes, self.pages_bytes = self.cache.num_bytes, placement.pages_bytes
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        """Captures a token's graph."""
        self.decoder.prepare()

    def close(self) -> None:
        """Lets go of the device's memory."""
        self._opened.close()
        del self.decoder, self.weights, self.cache
