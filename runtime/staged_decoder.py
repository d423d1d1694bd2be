"""The staged engine's decoder on a card: of a token, what lies between two layers' experts is one CUDA graph.

Each ends with a router; then the host is told what it chose, and experts are brought and run. Importing this needs
triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_pack.runtime.staged_weights import StagedWeights
from moe_pack.runtime.token_decoder import TokenDecoder


class StagedDecoder(TokenDecoder):
    """A model at work by the staged engine; arguments as of `TokenDecoder`."""

    def __init__(
        self,
        weights: StagedWeights,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._staged = weights
        layers = self._layers
        self._y = torch.zeros_like(layers.x)
        self._chosen = torch.zeros(layers.routes.shape, dtype=torch.int64, device=device)
        self._segments = self._launches()

    def prepare(self) -> None:
        """Captures a graph for each stretch between two layers' experts."""
        self._segments = [self._captured(launch) for launch in self._launches()]

    def _is_alone(self, ids: list[int]) -> bool:
        foreteller = self._staged.foreteller
        # What foretells from a part of the experts looks into the next layer, which is launched whole here.
        return super()._is_alone(ids) and (foreteller is None or not foreteller.needs_partial)

    def _run_token(self) -> None:
        layers, weights = self._layers, self._staged
        for layer_idx, segment in enumerate(self._segments[:-1]):
            segment()
            chosen = self._chosen[layer_idx : layer_idx + 1]
            y = weights.run_experts(layer_idx, layers.normed[None], chosen, layers.router_weights[None])
            self._y.copy_(y[0])
        self._segments[-1]()

    def _launches(self) -> list[Callable[[], None]]:
        """What is launched before each layer's experts, and after the last's."""
        moe_layers, last = self.spec.moe_layers, self.spec.num_hidden_layers
        begins = [0, *(layer + 1 for layer in moe_layers)]
        ends = [*(layer + 1 for layer in moe_layers), last]
        return [self._between(number, begin, end) for number, (begin, end) in enumerate(zip(begins, ends, strict=True))]

    def _between(self, number: int, begin: int, end: int) -> Callable[[], None]:
        """The launches of decoder layers `begin` to `end`, the experts of the last but not its own, and what they add.

        `number`: of the layer of experts that comes after them; past the last, logits come.
        """
        layers, scale = self._layers, self.spec.residual_multiplier

        def launch() -> None:
            if number == 0:
                layers.control.copy_(self._control, non_blocking=True)
                layers.start()
            else:
                layers.x.add_(self._y, alpha=scale)
            also: Tensor | None = None
            for layer in range(begin, end):
                also = layers.run(layer)
            if number == len(self._chosen):
                layers.finish()
                self._logits.copy_(layers.logits, non_blocking=True)
                return
            self._chosen[number].copy_(layers.routes[number])
            if also is not None:
                layers.x.add_(also, alpha=scale)

        return launch
