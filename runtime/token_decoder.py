"""A decoder on a card: several tokens layer by layer as everywhere, one token by launches made ready before.

Importing this needs triton.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.runtime.decoder import Decoder
from moe_pack.runtime.pack_weights import PackWeights
from moe_pack.runtime.token_layers import TokenLayers

_INTERPRETED_SMS = 1  # programs run one after the other


class TokenDecoder(Decoder):
    """A model at work on a card; see `Decoder`. Logits come back in host memory.

    Until it is prepared, and on a CPU, where the interpreter runs the kernels, the same launches run without graphs.
    Args:    chunk_tokens: of a forward pass of several tokens.   cache_dtype: float32 or bfloat16.
    """

    def __init__(
        self,
        weights: PackWeights,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._is_cuda = device.type == "cuda"
        self._tables_are_long = False
        self._tables = self._rope(torch.arange(context_tokens, device=device), 1)
        self._layers = TokenLayers(weights, self.cache, self._tables)
        self._control, self._logits = self._on_host(self._layers.control), self._on_host(self._layers.logits)
        # An event: torch can be told to forbid waits for streams, and a test has no others here.
        self._done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch

    def logits(self, ids: list[int]) -> Tensor:
        """See `Decoder.logits`; in host memory."""
        return self._one(ids[0])[None].clone() if self._is_alone(ids) else super().logits(ids).cpu()

    def next_logits(self, ids: list[int]) -> Tensor:
        """See `Decoder.next_logits`; in host memory, until the next call."""
        return self._one(ids[0]) if self._is_alone(ids) else super().next_logits(ids).cpu()

    @abstractmethod
    def prepare(self) -> None:
        """Captures what is launched for a token in CUDA graphs; runs it once before, so that all kernels are loaded."""

    @abstractmethod
    def _run_token(self) -> None:
        """Runs the token in `_control`, and asks for its logits to come to `_logits`."""

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
        self._run_token()
        if self._done is not None:
            self._done.record()
            self._done.synchronize()  # the one wait of a token: its logits are wanted
        self._ids[before:] = [token]
        self.cache.num_tokens += 1
        return self._logits

    def _take_angles(self, is_long: bool) -> None:
        """Where a long sequence turns by other angles, puts those in their place."""
        if is_long == self._tables_are_long:
            return
        context = self.cache.context_tokens
        angles = self._rope(torch.arange(context, device=self.device), context if is_long else 1)
        for table, new in zip(self._tables, angles, strict=True):
            table.copy_(new)
        self._tables_are_long = is_long

    def _on_host(self, like: Tensor) -> Tensor:
        """Page-locked memory of a tensor's shape."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self._is_cuda)

    def _num_sms(self) -> int:
        if not self._is_cuda:
            return _INTERPRETED_SMS
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @torch.inference_mode()
    def _captured(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Launches as one graph. They run once before, so that all kernels are compiled and loaded."""
        if not self._is_cuda:
            return launch
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())  # what is launched here uses what was filled there
        with torch.cuda.stream(stream):
            launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
        return graph.replay
