"""The graph engine: a token is one CUDA graph, in which the GPU pulls what it lacks from host memory.

The host says which token stands where, replays the graph, and waits once, for the logits; with them come the experts
that the token went to and the counts of what was pulled. Prompts run as everywhere, layer by layer (`Decoder`), over
the same cache. Importing this needs triton.
"""

import torch
from torch import Tensor

from moe_pack.runtime.card_engine import CardCounts
from moe_pack.runtime.card_weights import CardWeights
from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.kernels.admit import BYTES, HITS, NEEDED, ROWS
from moe_pack.runtime.token_step import TokenStep

NUM_SMS = 1  # where there is no card to ask: programs run one after the other there


class GraphDecoder(Decoder):
    """A model at work on a card; see `Decoder`. Logits come back in host memory.

    On a CPU, where the interpreter runs the kernels, the same launches run without a graph.
    Args:    chunk_tokens: of a forward pass of several tokens.   cache_dtype: float32 or bfloat16.
    """

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
        self._tables_are_long = False
        positions = torch.arange(context_tokens, device=device)
        self._tables = self._rope(positions, 1)
        is_cuda = device.type == "cuda"
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else NUM_SMS
        self._step = TokenStep(weights, self.cache, self._tables, num_sms)

        def pinned(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=like.dtype, pin_memory=is_cuda)

        self._control, self._logits = pinned(self._step.control), pinned(self._step.logits)
        self._routes, self._counters = pinned(self._step.routes), pinned(weights.cache.counters)
        # An event: torch can be told to forbid waits for streams, so that a test sees that there is no other.
        self._done = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch
        self._graph = self._captured() if is_cuda else None

    @property
    def routes(self) -> Tensor:
        """The experts of the last token that was run alone, int32 [L, k]."""
        return self._routes

    def counts(self) -> CardCounts:
        """What was needed and pulled until now; waits for the card."""
        total = self._card.cache.counters.sum(dim=0).tolist()
        return CardCounts(total[NEEDED], total[HITS], total[ROWS], total[BYTES])

    def logits(self, ids: list[int]) -> Tensor:
        """See `Decoder.logits`; in host memory."""
        return self._one(ids[0])[None].clone() if self._is_alone(ids) else super().logits(ids).cpu()

    def next_logits(self, ids: list[int]) -> Tensor:
        """See `Decoder.next_logits`; in host memory, until the next call."""
        return self._one(ids[0]) if self._is_alone(ids) else super().next_logits(ids).cpu()

    def _is_alone(self, ids: list[int]) -> bool:
        """Whether these are one token, for which nothing before has to be computed anew."""
        before = self.cache.num_tokens
        return len(ids) == 1 and (before == 0 or self._rope.is_long(before + 1) == self._rope.is_long(before))

    @torch.inference_mode()
    def _one(self, token: int) -> Tensor:
        self._check_room([token])
        before = self.cache.num_tokens
        self._take_angles(self._rope.is_long(before + 1))
        self._control[0], self._control[1] = token, before
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()
        if self._done is not None:
            self._done.record()
            self._done.synchronize()  # the one wait of a token: its logits are wanted
        self._ids[before:] = [token]
        self.cache.num_tokens += 1
        return self._logits

    def _launch(self) -> None:
        step = self._step
        step.control.copy_(self._control, non_blocking=True)
        step.run()
        self._logits.copy_(step.logits, non_blocking=True)
        self._routes.copy_(step.routes, non_blocking=True)
        self._counters.copy_(self._card.cache.counters, non_blocking=True)

    def _take_angles(self, is_long: bool) -> None:
        """Where a long sequence turns by other angles, puts those in their place."""
        if is_long == self._tables_are_long:
            return
        context = self.cache.context_tokens
        angles = self._rope(torch.arange(context, device=self.device), context if is_long else 1)
        for table, new in zip(self._tables, angles, strict=True):
            table.copy_(new)
        self._tables_are_long = is_long

    @torch.inference_mode()
    def _captured(self) -> torch.cuda.CUDAGraph:
        """The launches of a token as a graph. They run once before, so that all kernels are compiled and loaded."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())  # what is launched here uses what was filled there
        with torch.cuda.stream(stream):
            self._launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self._launch()
        return graph
