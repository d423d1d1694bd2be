"""The decoder: the forward pass of a whole model, and the reference for every faster one.

    x = embed(ids)
    for each layer:
        x += ngrams(x)              in some layers of some models: rows of a table on the disk
        x += attention(norm(x))
        x += mlp(norm(x))           routed experts, weighted, and the shared expert; or one dense expert
    logits = head(norm(x))

It runs over any source of weights (`weights`), with the operations that they bring (`operations`). The parts of a layer
are in `layer`, attention in `attention`, routing in `router`, the arithmetic of an expert in `expert`. Hidden states,
router logits and all sums are float32.
"""

from collections.abc import Generator
from contextlib import closing
from itertools import takewhile

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model.kv_cache import Angles, KVCache, LayerRopes
from moe_pack.runtime.model.layer import (
    PREFILL_TOKENS,
    PartialState,
    add_attention,
    add_ngrams,
    check_context,
    check_vocabulary,
    embed,
    enter_second,
    head,
    mlp_input,
    route_tokens,
    run_experts,
    run_unrouted,
    with_returned,
)
from moe_pack.runtime.model.mixers import NgramRows
from moe_pack.runtime.model.weights import Weights

_LEAST_KEPT = 16  # tokens of a beginning
_ANGLES_AT_ONCE = 256  # positions; the angles of a single position take as long to compute


class Decoder:
    """A model that runs: weights, and the key-value cache of one sequence.

    Args:    context_tokens: the longest sequence, prompt and continuation together.   chunk_tokens: the most tokens of
             a forward pass, which bound its hidden states.   cache_dtype: of keys and values.
    Raises:  RunError if the context is longer than the model's.
    """

    def __init__(
        self,
        weights: Weights,
        context_tokens: int,
        device: torch.device | None = None,
        chunk_tokens: int = PREFILL_TOKENS,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec = weights.spec
        check_context(context_tokens, spec)
        self.device = device or torch.device("cpu")
        self.cache = KVCache(spec, context_tokens, self.device, dtype=cache_dtype, chunk_tokens=chunk_tokens)
        self._weights, self._chunk_tokens = weights, chunk_tokens
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}  # of layers that have experts
        self._ids: list[int] = []  # the sequence, of which the cache has keys and values
        self._ropes = LayerRopes(spec, self.device)
        self._angle_run: tuple[Angles, ...] = ((torch.empty(0), torch.empty(0)),)  # of consecutive positions
        self._first_angle, self._num_long = 0, 0

    def reset(self) -> None:
        """Forgets the sequence; the cache stays allocated."""
        self.cache.num_tokens = 0
        self._ids = []

    def keep_beginning(self, prompt_ids: list[int]) -> list[int]:
        """Begins a text with this prompt; returns the tokens that are left to append, at least one.

        The others are the beginning of the sequence so far, whose keys, values and states stay. A cache does not lead
        back to every position (`KVCache.reachable`), and a beginning of a few tokens is not worth the other rounding.
        """
        before = self.cache.num_tokens
        pairs = zip(self._ids[:before], prompt_ids[:-1], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        kept = self.cache.reachable(same)
        if kept < _LEAST_KEPT or self._ropes.num_long(before) != self._ropes.num_long(kept):
            self.reset()
            return prompt_ids
        self.cache.return_to(kept)
        del self._ids[kept:]
        return prompt_ids[kept:]

    def begin(self, prompt_ids: list[int]) -> Tensor:
        """Appends a prompt; returns the logits of the token after it, float32 [vocabulary].

        The cache leads back to its end.
        """
        logits = self.next_logits(prompt_ids)
        self.cache.save()
        return logits

    def next_logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns the logits of the token after the last, float32 [vocabulary].

        Raises:  RunError if the context is full or a token is not in the vocabulary.
        """
        assert ids, "at least one token"
        return self._head(self._forward(ids, last_only=True)[0][-1:])[0]

    def logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns the logits after each of them, float32 [T, vocabulary].

        Raises:  RunError if the context is full or a token is not in the vocabulary.
        """
        return torch.cat([self._head(hidden) for hidden in self._forward(ids)])

    @torch.inference_mode()
    def _forward(self, ids: list[int], last_only: bool = False) -> list[Tensor]:
        """Returns the hidden states of new tokens, float32 [T, d] in pieces; only the last piece if `last_only`."""
        self._check_ids(ids)
        before, new = self.cache.num_tokens, ids
        num_tokens = before + len(ids)
        self._ids[before:] = ids
        if before and self._ropes.num_long(num_tokens) > self._ropes.num_long(before):
            # From here on every position has other angles, and everything that was computed depends on them.
            new, self.cache.num_tokens = self._ids, 0
        kept = self.cache.num_tokens
        hidden: list[Tensor] = []
        try:
            with closing(self._chunks(new)) as chunks:
                for tokens, rows in chunks:
                    piece = self._chunk(tokens, num_tokens, rows)
                    hidden = [piece] if last_only else [*hidden, piece]
        except BaseException:
            # The earlier tokens stay, unless the pass was to compute them again, or a ring lost places to new tokens,
            # or states moved on with some layers.
            is_whole = not self.cache.states and (self.cache.num_tokens == kept or not self.cache.is_ring)
            self.cache.num_tokens = kept if is_whole else 0
            raise
        return hidden if last_only or kept == before else [torch.cat(hidden)[before:]]

    def _check_ids(self, ids: list[int]) -> None:
        if self.cache.num_tokens + len(ids) > self.cache.context_tokens:
            raise RunError(f"the context of {self.cache.context_tokens} tokens is full")
        check_vocabulary(ids, self.spec)

    def _chunks(self, new: list[int]) -> Generator[tuple[Tensor, NgramRows | None], None, None]:
        """Yields the tokens of each pass, int64 [T], and their rows, which are read while the pass before it runs.

        Args:    new: the last tokens of the sequence.
        """
        first, step = len(self._ids) - len(new), self._chunk_tokens
        rows = self._rows(first, min(first + step, len(self._ids)))
        ahead: NgramRows | None = None
        try:
            for start in range(first, len(self._ids), step):
                stop = min(start + step, len(self._ids))
                if stop < len(self._ids):
                    ahead = self._rows(stop, min(stop + step, len(self._ids)))
                yield torch.tensor(self._ids[start:stop]), rows
                rows, ahead = ahead, None
        finally:
            for left in (rows, ahead):
                if left is not None:
                    left.close()

    def _rows(self, start: int, stop: int) -> NgramRows | None:
        """Begins to read the rows of positions `start` to `stop` in all n-gram tables; None without tables."""
        ngrams = self.spec.ngrams
        if ngrams is None:
            return None
        tokens = torch.tensor(self._ids[max(start - ngrams.ngram_size + 1, 0) : stop])
        return NgramRows(ngrams, self._weights.ngram_table, tokens, stop - start)

    def _chunk(self, ids: Tensor, num_tokens: int, rows: NgramRows | None) -> Tensor:
        """Runs one forward pass; returns the hidden states after the last layer, float32 [T, d].

        Args:    ids: int64 [T].   num_tokens: of the sequence when all its new tokens have run.   rows: of `ids`.
        """
        weights, start = self._weights, self.cache.num_tokens
        angles = self._angles_at(start, start + len(ids), num_tokens)
        x = embed(ids, weights)
        for layer in range(self.spec.num_hidden_layers):
            x = add_ngrams(x, rows, weights, layer, self.cache.of_ngrams(layer))
            x = add_attention(x, weights, layer, self.cache.of(layer), angles[self.spec.attention_kind(layer)])
            if not self.spec.has_second(layer):
                continue
            x = self._second_half(x, layer, ids, self._partial_state(x, layer, angles, rows))
        self.cache.num_tokens += len(ids)
        return x

    def _second_half(self, x: Tensor, layer: int, ids: Tensor, partial_state: PartialState | None) -> Tensor:
        """Returns hidden states after a layer's experts, or its dense expert, from those after its first half.

        Args:    ids: the tokens, int64 [T].
        """
        weights, routed = self._weights, None
        inputs = mlp_input(x, weights, layer)
        unrouted = run_unrouted(inputs, weights, layer)
        if layer in self._layer_idx:
            experts, router_weights = route_tokens(inputs, weights, layer, ids)
            routed = run_experts(inputs, experts, router_weights, weights, self._layer_idx[layer], partial_state)
            routed = with_returned(routed, inputs, weights, layer)
        return enter_second(x, unrouted, routed, weights, layer)

    def _partial_state(
        self, x: Tensor, layer: int, angles: tuple[Angles, ...], rows: NgramRows | None
    ) -> PartialState | None:
        """Returns the `PartialState` of the next layer, from x after this layer's attention; None without experts."""
        weights, after = self._weights, layer + 1
        if after not in self._layer_idx:
            return None

        def partial_state(y: Tensor) -> Tensor:
            inputs = mlp_input(x, weights, layer)
            routed = with_returned(y, inputs, weights, layer)
            partial = enter_second(x, run_unrouted(inputs, weights, layer), routed, weights, layer)
            kind = self.spec.attention_kind(after)
            partial = add_ngrams(partial, rows, weights, after, self.cache.trial_of_ngrams(after))
            return add_attention(partial, weights, after, self.cache.trial(after), angles[kind])

        return partial_state

    def _angles_at(self, start: int, stop: int, num_tokens: int) -> tuple[Angles, ...]:
        """Returns the angles at positions `start` to `stop` for each kind of attention; many are computed at once."""
        num_long, first = self._ropes.num_long(num_tokens), self._first_angle
        if self._num_long != num_long or not first <= start < stop <= first + len(self._angle_run[0][0]):
            positions = torch.arange(start, max(stop, start + _ANGLES_AT_ONCE), device=self.device)
            self._angle_run = self._ropes(positions, num_tokens)
            self._first_angle, self._num_long = start, num_long
            first = start
        rows = slice(start - first, stop - first)
        return tuple((cosines[rows], sines[rows]) for cosines, sines in self._angle_run)

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        return head(hidden, self._weights)
