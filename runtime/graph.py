"""The graph engine: a token is one CUDA graph, in which the GPU pulls what it lacks from host memory.

The host says which token stands where, replays the graph, and waits once, for the logits; with them come the experts
that the token went to and the counts of what was pulled. Importing this needs triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.runtime.card_engine import CardCounts
from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.kernels.admit import BYTES, HITS, NEEDED, ROWS
from moe_pack.runtime.token_decoder import TokenDecoder
from moe_pack.runtime.token_step import TokenStep


class GraphDecoder(TokenDecoder):
    """A model at work by the graph engine; arguments as of `TokenDecoder`."""

    def __init__(
        self,
        weights: CardWeights,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._card = weights
        self._step = TokenStep(weights, self._layers, self._num_sms())
        self._routes, self._counters = self._on_host(self._layers.routes), self._on_host(weights.cache.counters)
        self._run: Callable[[], None] = self._launch

    def prepare(self) -> None:
        """Captures a token's graph."""
        self._run = self._captured(self._launch)
        self._card.cache.counters.zero_()  # what ran until now was no token that anybody asked for

    @property
    def routes(self) -> Tensor:
        """The experts of the last token that was run alone, int32 [L, k]."""
        return self._routes

    def counts(self) -> CardCounts:
        """What was needed and pulled until now; waits for the card."""
        total = self._card.cache.counters.sum(dim=0).tolist()
        return CardCounts(total[NEEDED], total[HITS], total[ROWS], total[BYTES])

    def _run_token(self) -> None:
        self._run()

    def _launch(self) -> None:
        layers = self._layers
        layers.control.copy_(self._control, non_blocking=True)
        self._step.run()
        self._logits.copy_(layers.logits, non_blocking=True)
        self._routes.copy_(layers.routes, non_blocking=True)
        self._counters.copy_(self._card.cache.counters, non_blocking=True)
