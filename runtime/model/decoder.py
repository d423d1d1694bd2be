"""The decoder: the whole forward pass over any source of weights, computed by the operations that they carry.

The parts of a layer are in `layer`, an expert's arithmetic in `expert`, routing in `router`. Hidden state, router
logits and all sums are float32. Everything faster is tested against this.
"""

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model.kv_cache import Angles, KVCache, Rope
from moe_pack.runtime.model.layer import (
    PREFILL_TOKENS,
    PartialState,
    add_attention,
    embed,
    head,
    mlp_input,
    route_tokens,
    run_experts,
    run_unrouted,
    scaled,
)
from moe_pack.runtime.model.weights import Weights

ANGLES_AT_ONCE = 256  # positions: made for one token at a time, they take as long


class Decoder:
    """A model at work: weights, and a key-value cache for one sequence.

    Args:    context_tokens: the longest sequence, prompt and continuation together.   chunk_tokens: of a forward pass
             at most: bounds hidden states.
    Raises:  RunError if that is more than the model's positions.
    """

    def __init__(
        self,
        weights: Weights,
        context_tokens: int,
        device: torch.device | None = None,
        chunk_tokens: int = PREFILL_TOKENS,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        spec = weights.spec
        if not 0 < context_tokens <= spec.max_position_embeddings:
            raise RunError(
                f"context of {context_tokens} tokens; this model has {spec.max_position_embeddings} positions"
            )
        self.spec = spec
        self.device = device or torch.device("cpu")
        self.cache = KVCache(spec, context_tokens, self.device, dtype=cache_dtype, chunk_tokens=chunk_tokens)
        self._weights = weights
        self._chunk_tokens = chunk_tokens
        self._rope = Rope(spec.rotation, self.device)
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}
        self._ids: list[int] = []
        self._made: Angles = (torch.empty(0), torch.empty(0))
        self._first_angle, self._are_long = 0, False

    def reset(self) -> None:
        """Forgets the sequence; the cache stays allocated."""
        self.cache.num_tokens = 0
        self._ids = []

    def begin(self, prompt_ids: list[int]) -> Tensor:
        """Appends a prompt; returns the prediction after it, float32 [vocabulary]."""
        return self.next_logits(prompt_ids)

    def logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns each one's prediction of the next, float32 [T, vocabulary].

        Raises:  RunError if the context is full or a token is not in the vocabulary.
        """
        return torch.cat([self._head(hidden) for hidden in self._forward(ids)])

    def next_logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns the prediction after the last, float32 [vocabulary]."""
        assert ids, "at least one token"
        return self._head(self._forward(ids, last_only=True)[0][-1:])[0]

    @torch.inference_mode()
    def _forward(self, ids: list[int], last_only: bool = False) -> list[Tensor]:
        """The hidden states of new tokens, float32 [T, d] in pieces; of the last piece alone if asked."""
        self._check_room(ids)
        before, new = self.cache.num_tokens, ids
        self._ids[before:] = ids
        if before and self._rope.is_long(before + len(ids)) and not self._rope.is_long(before):
            # Positions have other angles from here on, and all that was computed hangs on them.
            new, self.cache.num_tokens = self._ids, 0
        num_tokens, kept = before + len(ids), self.cache.num_tokens
        hidden: list[Tensor] = []
        try:
            for start in range(0, len(new), self._chunk_tokens):
                piece = self._chunk(torch.tensor(new[start : start + self._chunk_tokens]), num_tokens)
                hidden = [piece] if last_only else [*hidden, piece]
        except BaseException:
            # What was there before is whole, unless it was to be computed anew, or more than a chunk's tokens have
            # taken its places.
            is_whole = self.cache.num_tokens == kept or not self.cache.is_ring
            self.cache.num_tokens = kept if is_whole else 0
            raise
        return hidden if last_only or kept == before else [torch.cat(hidden)[before:]]

    def _check_room(self, ids: list[int]) -> None:
        if self.cache.num_tokens + len(ids) > self.cache.context_tokens:
            raise RunError(f"context is full: {self.cache.context_tokens} tokens")
        if ids and not 0 <= min(ids) <= max(ids) < self.spec.vocab_size:
            raise RunError(f"token {max(ids)} is not in the model's vocabulary of {self.spec.vocab_size}")

    def _chunk(self, ids: Tensor, num_tokens: int) -> Tensor:
        """The hidden state after the last layer, float32 [T, d]; the sequence will have `num_tokens`."""
        spec, weights, start = self.spec, self._weights, self.cache.num_tokens
        x = embed(ids, weights)
        angles = self._angles(start, start + len(ids), num_tokens)
        for layer in range(spec.num_hidden_layers):
            x = add_attention(x, weights, layer, self.cache.layer(layer), angles)
            y = self._mlp(mlp_input(x, weights, layer), layer, self._partial_state(x, layer, angles))
            x = x + scaled(y, spec.residual_multiplier)
        self.cache.num_tokens += len(ids)
        return x

    def _partial_state(self, x: Tensor, layer: int, angles: Angles) -> PartialState | None:
        """How the next layer's attention would leave the states x that this layer's did; None: it has no experts."""
        if layer + 1 not in self._layer_idx:
            return None
        weights = self._weights

        def partial_state(y: Tensor) -> Tensor:
            unrouted = run_unrouted(mlp_input(x, weights, layer), weights, layer)
            some = x + scaled(y if unrouted is None else y + unrouted, self.spec.residual_multiplier)
            return add_attention(some, weights, layer + 1, self.cache.layer(layer + 1), angles)

        return partial_state

    def _angles(self, start: int, stop: int, num_tokens: int) -> Angles:
        """The angles at positions `start` to `stop`, of those made for many at once."""
        is_long, first = self._rope.is_long(num_tokens), self._first_angle
        if self._are_long != is_long or not first <= start < stop <= first + len(self._made[0]):
            positions = torch.arange(start, max(stop, start + ANGLES_AT_ONCE), device=self.device)
            self._made, self._first_angle, self._are_long = self._rope(positions, num_tokens), start, is_long
            first = start
        cosines, sines = self._made
        return cosines[start - first : stop - first], sines[start - first : stop - first]

    def _mlp(self, x: Tensor, layer: int, partial_state: PartialState | None) -> Tensor:
        """The second half of a layer for normed hidden states [T, d]: its experts, or its one dense expert."""
        unrouted = run_unrouted(x, self._weights, layer)
        if layer not in self._layer_idx:
            assert unrouted is not None, "a layer without experts is dense"
            return unrouted
        experts, router_weights = route_tokens(x, self._weights, layer)
        y = run_experts(x, experts, router_weights, self._weights, self._layer_idx[layer], partial_state)
        return y if unrouted is None else y + unrouted

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        return head(hidden, self._weights)
