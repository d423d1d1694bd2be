"""The graph engine: a token is one CUDA graph, in which the GPU itself copies missing expert rows from host memory.

The host writes the token and its position, replays the graph, and waits once, for the logits. With them it gets the
token's experts and the counts of copied rows. Importing this needs Triton.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing

import numpy as np
import torch
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime.gpu.decoder import TokenDecoder, TokenStep
from moe_pack.runtime.gpu.device import HostArena
from moe_pack.runtime.gpu.fit import GpuCacheCounts
from moe_pack.runtime.gpu.kernels.cache import BYTES, HITS, NEEDED, ROWS
from moe_pack.runtime.gpu.placement import place_experts, usual_heat
from moe_pack.runtime.gpu.weights import GpuExpertCache, GpuWeights
from moe_pack.runtime.offload import Routing


class GraphDecoder(TokenDecoder):
    """The graph engine's decoder; arguments as for `TokenDecoder`."""

    def __init__(
        self,
        weights: GpuWeights,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._gpu_weights = weights
        self._step = TokenStep(weights, self._layers, self._num_sms())
        self._routes, self._counters = (
            self._page_locked_like(self._layers.routes),
            self._page_locked_like(weights.cache.counters),
        )
        self._run: Callable[[], None] = self._launch

    def prepare(self) -> None:
        """Captures a token's launches as one graph."""
        self._run = self._captured(self._launch)
        self._gpu_weights.cache.counters.zero_()  # the launches until now were no tokens of the caller

    @property
    def routes(self) -> Tensor:
        """The experts of the last token that ran alone: int32 [L, k]."""
        return self._routes

    def counts(self) -> GpuCacheCounts:
        """Returns what was needed and copied until now; waits for the GPU."""
        total = self._gpu_weights.cache.counters.sum(dim=0).tolist()
        return GpuCacheCounts(total[NEEDED], total[HITS], total[ROWS], total[BYTES])

    def _run_token(self) -> None:
        self._run()

    def _launch(self) -> None:
        layers = self._layers
        layers.control.copy_(self._control, non_blocking=True)
        self._step.run()
        self._logits.copy_(layers.logits, non_blocking=True)
        self._routes.copy_(layers.routes, non_blocking=True)
        self._counters.copy_(self._gpu_weights.cache.counters, non_blocking=True)


class GraphEngine:
    """The graph engine for a pack: expert cache, weights and decoder. Owns all but pack and host memory: `close` it.

    Args:    expert_bytes: the device's memory for experts.   chunk_tokens: of a forward pass, at most.
    Raises:  RunError if one token's experts do not fit.
    """

    def __init__(
        self,
        pack: Pack,
        host: HostArena,
        device: torch.device,
        expert_bytes: int,
        context_tokens: int,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        routing = Routing.open(pack)
        popularity = None if routing is None else np.asarray(routing.popularity, np.float64)
        placement = place_experts(pack.layout, expert_bytes, popularity, usual_heat(pack.layout, pack.thresholds))
        with ExitStack() as opened:
            self.cache = opened.enter_context(closing(GpuExpertCache(pack, placement, host, device)))
            self.weights = GpuWeights(pack, device, self.cache, chunk_tokens)
            self.decoder = GraphDecoder(self.weights, context_tokens, device, chunk_tokens, cache_dtype)
            self.expert_bytes, self.pages_bytes = self.cache.num_bytes, placement.pages_bytes
            self._opened = opened.pop_all()

    def prepare(self) -> None:
        """Captures a token's launches as one graph."""
        self.decoder.prepare()

    def close(self) -> None:
        """Releases the device's memory."""
        self._opened.close()
        del self.decoder, self.weights, self.cache
