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

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model import layer_calls, layers, mixers
from moe_pack.runtime.model.caches import CachedSequence, KvDtype, joined_angles, kv_cache
from moe_pack.runtime.model.layers import add_attention, add_ngrams
from moe_pack.runtime.model.weights import Weights


class Decoder:
    """A model that runs: weights, and the key-value caches of one sequence or of several.

    `sequences`: all of them. What names no sequence is about the first.
    Args:    context_tokens: the longest sequence, prompt and continuation together.   chunk_tokens: the most tokens of
             a forward pass, which bound its hidden states.   cache_dtype: of keys and values.   num_checkpoints: of
             each sequence, as `CachedSequence` says.
    Raises:  RunError if the context is longer than the model's.
    """

    def __init__(
        self,
        weights: Weights,
        context_tokens: int,
        device: torch.device | None = None,
        chunk_tokens: int = layers.PREFILL_TOKENS,
        cache_dtype: KvDtype = "f32",
        num_sequences: int = 1,
        num_checkpoints: int = 0,
    ) -> None:
        self.spec = spec = weights.spec
        layers.check_context(context_tokens, spec)
        self.device = device or torch.device("cpu")
        self._weights, self.chunk_tokens = weights, chunk_tokens
        self._layer_idx = {layer: idx for idx, layer in enumerate(spec.moe_layers)}  # of layers that have experts
        self._ropes = kv_cache.LayerRopes(spec, self.device)
        self._verified = torch.empty((0, 0))  # hidden states of the tokens that `verify` appended last
        self._calls = layer_calls.LayerCalls(weights)

        def sequence() -> CachedSequence:
            cache = kv_cache.KVCache(spec, context_tokens, self.device, dtype=cache_dtype, chunk_tokens=chunk_tokens)
            return CachedSequence(spec, cache, self._ropes, num_checkpoints)

        self.sequences = tuple(sequence() for _ in range(num_sequences))

    @property
    def cache(self) -> kv_cache.KVCache:
        """The cache of the first sequence."""
        return self.sequences[0].cache

    def reset(self) -> None:
        """Forgets the sequence; the cache stays allocated."""
        self.sequences[0].reset()

    def keep_beginning(self, prompt_ids: list[int]) -> list[int]:
        """Begins a text with this prompt; returns the tokens that are left to append, at least one.

        The others are the beginning of the sequence so far, whose keys, values and states stay. A cache does not lead
        back to every position (`KVCache.reachable`), and a beginning of a few tokens is not worth the other rounding.
        """
        return self.sequences[0].keep_beginning(prompt_ids)

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
        return self.extend(self.sequences[0], ids)

    def extend(self, sequence: CachedSequence, ids: list[int]) -> Tensor:
        """Appends tokens to one of the sequences; returns as `next_logits` does, and raises the same."""
        assert ids, "at least one token"
        return self._head(self._forward(sequence, ids, last_only=True)[0][-1:])[0]

    def extend_each(self, sequences: Sequence[CachedSequence], ids: Sequence[int]) -> Tensor:
        """Appends a token to each of some sequences, in one pass; returns the logits after them, float32 [n, vocab].

        With native kernels the logits of a sequence are those that it has alone, to the bit.
        Raises:  RunError as `next_logits`, before anything runs.
        """
        if len(ids) == 1:
            return self.extend(sequences[0], [ids[0]])[None]
        for sequence, token in zip(sequences, ids, strict=True):
            self._check_ids(sequence, [token])
        together = [i for i, sequence in enumerate(sequences) if not sequence.outgrows(1)]
        logits: list[Tensor | None] = [None] * len(ids)
        if together:
            found = self._extend_together([sequences[i] for i in together], [ids[i] for i in together])
            for i, row in zip(together, found, strict=True):
                logits[i] = row
        for i, (sequence, token) in enumerate(zip(sequences, ids, strict=True)):
            if logits[i] is None:
                logits[i] = self.extend(sequence, [token])
        return torch.stack([row for row in logits if row is not None])

    def most_verified(self, sequence: CachedSequence) -> int:
        """Returns how many tokens `verify` may append to a sequence now.

        It is 1 where tokens cannot be taken back, or where all positions get other angles.
        """
        before = sequence.num_tokens
        most = min(
            sequence.cache.context_tokens - before,
            self.chunk_tokens,
            sequence.cache.most_taken_back,
            self.spec.router.capacity or self.chunk_tokens,
        )
        while most > 1 and not sequence.are_angles_same(before, before + most):
            most -= 1
        return max(most, 1)

    @torch.inference_mode()
    def verify(self, sequence: CachedSequence, ids: list[int]) -> Tensor:
        """Appends tokens to a sequence in one pass; returns the logits after each, float32 [n, vocabulary].

        With native kernels these are the logits that the tokens have one after the other, to the bit. `keep` drops the
        tokens that turn out to be wrong. Where the cache has states, it leads back to the position before these tokens,
        and no longer to the one that was saved last.
        Args:    ids: at most `most_verified`.
        Raises:  RunError as `next_logits`, before anything runs.
        """
        if len(ids) == 1:
            return self.extend(sequence, ids)[None]
        assert len(ids) <= self.most_verified(sequence), "what cannot be taken back is not verified"
        self._check_ids(sequence, ids)
        sequence.cache.save()
        self._verified = self._append_alone(sequence, ids)
        return self._head(self._verified)

    @torch.inference_mode()
    def keep(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Keeps the first tokens of a sequence, of those that the last `verify` appended at least one.

        Where the cache has states, the kept tokens run again, from the states before them.
        """
        num_dropped = sequence.num_tokens - num_tokens
        if not num_dropped:
            return
        if not sequence.cache.states:
            sequence.cut_to(num_tokens)
            sequence.hidden = self._verified[-1 - num_dropped]
            return
        start = sequence.num_tokens - len(self._verified)
        kept = sequence.ids[start:num_tokens]
        sequence.cut_to(start)
        self._append_alone(sequence, kept)

    def _append_alone(self, sequence: CachedSequence, ids: list[int]) -> Tensor:
        """Appends tokens to a sequence in one pass, as if each had its own; returns the hidden states, [n, d]."""
        before, rows = sequence.num_tokens, list["mixers.NgramRows | None"]()
        sequence.ids[before:] = ids
        with self._alone([sequence], rows):
            for i in range(before, before + len(ids)):
                rows.append(self._rows(sequence.ids, i, i + 1))
            hidden = self._pass(_TokenPass(sequence, rows), torch.tensor(ids))
        sequence.hidden = hidden[-1]
        return hidden

    def logits(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns the logits after each of them, float32 [T, vocabulary].

        Raises:  RunError if the context is full or a token is not in the vocabulary.
        """
        return self.logits_of(self.hidden_states(ids))

    def hidden_states(self, ids: list[int]) -> Tensor:
        """Appends tokens to the sequence; returns the hidden states after the last layer, float32 [T, d].

        Raises:  RunError as `logits`.
        """
        return torch.cat(self._forward(self.sequences[0], ids))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Returns the logits, float32 [T, vocabulary], of hidden states after the last layer, float32 [T, d]."""
        return self._head(hidden)

    @torch.inference_mode()
    def _forward(self, sequence: CachedSequence, ids: list[int], last_only: bool = False) -> list[Tensor]:
        """Returns the hidden states of new tokens, float32 [T, d] in pieces; only the last piece if `last_only`."""
        self._check_ids(sequence, ids)
        cache, new = sequence.cache, ids
        before = cache.num_tokens
        is_again = sequence.outgrows(len(ids))
        sequence.ids[before:] = ids
        if is_again:
            # From here on every position has other angles, and everything that was computed depends on them.
            new, cache.num_tokens = sequence.ids, 0
        kept = cache.num_tokens
        ends_early = last_only and self._may_end_early(sequence)
        hidden: list[Tensor] = []
        try:
            with closing(self._chunks(sequence.ids, len(new))) as chunks, self._told(is_prompt=len(new) > 1):
                for tokens, rows in chunks:
                    batch = _Pass([sequence], [rows], len(tokens), [len(sequence.ids)])
                    piece = self._pass(batch, tokens, ends_early and len(tokens) > layer_calls.MAX_CALL_TOKENS)
                    hidden = [piece] if last_only else [*hidden, piece]
                    sequence.hidden = piece[-1].clone() if len(piece) > 1 else piece[0]
        except BaseException:
            _keep_what_is_whole(cache, kept)
            raise
        return hidden if last_only or kept == before else [torch.cat(hidden)[before:]]

    def _may_end_early(self, sequence: CachedSequence) -> bool:
        """Whether the last layer's experts may run for the last token of each pass of a prompt alone.

        Nothing else needs the others' outputs but a drafter that follows the sequence, and routers whose experts take a
        number of tokens at most; a GPU computes whole passes. Passes that calls of layers may take are whole, too, so
        that calls change no bit.
        """
        return self.device.type == "cpu" and sequence.follower is None and not self.spec.router.capacity

    @torch.inference_mode()
    def _extend_together(self, sequences: list[CachedSequence], ids: list[int]) -> Tensor:
        """Returns the logits after a token of each sequence, float32 [n, vocabulary]."""
        rows: list[mixers.NgramRows | None] = []
        with self._alone(sequences, rows):
            for sequence, token in zip(sequences, ids, strict=True):
                sequence.ids[sequence.num_tokens :] = [token]
                rows.append(self._rows(sequence.ids, sequence.num_tokens, sequence.num_tokens + 1))
            hidden = self._pass(
                _Pass(sequences, rows, 1, [len(sequence.ids) for sequence in sequences]), torch.tensor(ids)
            )
            for sequence, own in zip(sequences, hidden, strict=True):
                sequence.hidden = own
            return self._head(hidden)

    @contextmanager
    def _alone(self, sequences: list[CachedSequence], rows: "list[mixers.NgramRows | None]") -> Iterator[None]:
        """Computes each token of a pass as if it were alone; closes its rows, and drops what a failed pass leaves."""
        before = [sequence.num_tokens for sequence in sequences]
        try:
            with self._weights.operations.tokens_alone(), self._told(is_batch=True):
                yield
        except BaseException:
            for sequence, kept in zip(sequences, before, strict=True):
                _keep_what_is_whole(sequence.cache, kept)
            raise
        finally:
            for each in rows:
                if each is not None:
                    each.close()

    @contextmanager
    def _told(self, is_batch: bool = False, is_prompt: bool = False) -> Iterator[None]:
        """Tells weights that run experts themselves what the tokens of a pass are."""
        runner = self._weights if isinstance(self._weights, layers.ExpertRunner) else None
        if runner is not None:
            runner.is_batch, runner.is_prompt = is_batch, is_prompt
        try:
            yield
        finally:
            if runner is not None:
                runner.is_batch = runner.is_prompt = False

    def _check_ids(self, sequence: CachedSequence, ids: list[int]) -> None:
        if sequence.num_tokens + len(ids) > sequence.cache.context_tokens:
            raise RunError(f"the context of {sequence.cache.context_tokens} tokens is full")
        layers.check_vocabulary(ids, self.spec)

    def _chunks(self, ids: list[int], num_new: int) -> "Generator[tuple[Tensor, mixers.NgramRows | None], None, None]":
        """Yields the tokens of each pass, int64 [T], and their rows, which are read while the pass before it runs.

        Args:    ids: the sequence, its new tokens last.
        """
        first, step = len(ids) - num_new, self.chunk_tokens
        rows = self._rows(ids, first, min(first + step, len(ids)))
        ahead: mixers.NgramRows | None = None
        try:
            for start in range(first, len(ids), step):
                stop = min(start + step, len(ids))
                if stop < len(ids):
                    ahead = self._rows(ids, stop, min(stop + step, len(ids)))
                yield torch.tensor(ids[start:stop]), rows
                rows, ahead = ahead, None
        finally:
            for left in (rows, ahead):
                if left is not None:
                    left.close()

    def _rows(self, ids: list[int], start: int, stop: int) -> "mixers.NgramRows | None":
        """Begins to read the rows of positions `start` to `stop` in all n-gram tables; None without tables."""
        ngrams = self.spec.ngrams
        if ngrams is None:
            return None
        tokens = torch.tensor(ids[max(start - ngrams.ngram_size + 1, 0) : stop])
        return mixers.NgramRows(ngrams, self._weights.ngram_table, tokens, stop - start)

    def _pass(self, batch: "_Pass", ids: Tensor, ends_early: bool = False) -> Tensor:
        """Runs one forward pass over tokens int64 [T]; returns the hidden states after the last layer, [T, d].

        Args:    ends_early: the last layer's experts run for the last token alone, whose state alone is returned.
        """
        weights, last = self._weights, self.spec.num_hidden_layers - 1
        if isinstance(weights, layers.ExpertRunner):
            weights.begin_pass(ids, 1 if ends_early else len(ids))
        x = layers.embed(ids, weights)
        layer = 0
        while layer < self.spec.num_hidden_layers:
            x = batch.add_ngrams(x, weights, layer)
            begun = self._calls.begin(x, layer, batch) if self._calls.has(layer) else None
            if begun is None:
                x = batch.add_attention(x, weights, layer)
            else:
                x, layer = begun.x, begun.layer
            if ends_early and layer == last:
                x, ids = x[-1:], ids[-1:]
            if self.spec.has_second(layer) and (begun is None or not begun.is_complete):
                x = self._second_half(x, layer, ids, self._partial_state(x, layer, batch), begun)
            layer += 1
        batch.end(x)
        return x

    def _second_half(
        self,
        x: Tensor,
        layer: int,
        ids: Tensor,
        partial_state: layers.PartialState | None,
        begun: layer_calls.BegunLayer | None,
    ) -> Tensor:
        """Returns hidden states after a layer's experts, or its dense expert, from those after its first half.

        Args:    ids: the tokens, int64 [T].   begun: what is computed already.
        """
        weights, routed = self._weights, None
        inputs = layers.mlp_input(x, weights, layer) if begun is None else begun.inputs
        unrouted = begun.unrouted if begun and begun.has_unrouted else layers.run_unrouted(inputs, weights, layer)
        if layer in self._layer_idx:
            route = None if begun is None else begun.route
            experts, router_weights = route or layers.route_tokens(inputs, weights, layer, ids)
            routed = layers.run_experts(inputs, experts, router_weights, weights, self._layer_idx[layer], partial_state)
            routed = layers.with_returned(routed, inputs, weights, layer)
        return layers.enter_second(x, unrouted, routed, weights, layer)

    def _partial_state(self, x: Tensor, layer: int, batch: "_Pass") -> layers.PartialState | None:
        """Returns the `PartialState` of the next layer, from x after this layer's attention; None without experts."""
        weights, after = self._weights, layer + 1
        if after not in self._layer_idx:
            return None

        def partial_state(y: Tensor) -> Tensor:
            inputs = layers.mlp_input(x, weights, layer)
            routed = layers.with_returned(y, inputs, weights, layer)
            partial = layers.enter_second(x, layers.run_unrouted(inputs, weights, layer), routed, weights, layer)
            partial = batch.add_ngrams(partial, weights, after, is_trial=True)
            return batch.add_attention(partial, weights, after, is_trial=True)

        return partial_state

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        return layers.head(hidden, self._weights)


def _keep_what_is_whole(cache: kv_cache.KVCache, kept: int) -> None:
    """Drops what a pass that failed has left in a cache.

    The first `kept` tokens stay, unless the pass was to compute them again, or a ring lost places to new tokens, or
    states moved on with some layers.
    """
    is_whole = not cache.states and (cache.num_tokens == kept or not cache.is_ring)
    cache.num_tokens = kept if is_whole else 0


class _Pass:
    """The sequences of a forward pass: their rows of x, and the parts of a layer in which each is on its own.

    Args:    rows: of each sequence's tokens in n-gram tables.   num_new: new tokens of each sequence.   num_tokens: of
             each sequence when all its new tokens have run.
    """

    def __init__(
        self,
        sequences: list[CachedSequence],
        rows: "list[mixers.NgramRows | None]",
        num_new: int,
        num_tokens: list[int],
    ) -> None:
        self._num_new, self._sequences, self._ngram_rows = num_new, sequences, rows
        self._rows = [slice(i * num_new, (i + 1) * num_new) for i in range(len(sequences))]
        starts = [sequence.num_tokens for sequence in sequences]
        self.num_sequences = len(sequences)
        self._angles = joined_angles(
            [
                sequence.angles_at(start, start + num_new, number)
                for sequence, start, number in zip(sequences, starts, num_tokens, strict=True)
            ]
        )

    def end(self, x: Tensor) -> None:
        """Counts the new tokens, when all layers have run, and shows their hidden states to who follows a sequence."""
        for sequence, hidden in zip(self._sequences, x.chunk(len(self._sequences)), strict=True):
            if sequence.follower is not None:
                sequence.follower.follow(sequence.ids, sequence.num_tokens, hidden)
            sequence.cache.num_tokens += self._num_new

    def add_ngrams(self, x: Tensor, weights: Weights, layer: int, is_trial: bool = False) -> Tensor:
        """Returns hidden states with a layer's n-grams added, as `layer.add_ngrams` does for one sequence."""
        if weights.spec.ngrams_of(layer) is None:
            return x
        pieces = []
        each = zip(self._rows, self._ngram_rows, self._ngram_states(layer, is_trial), strict=True)
        for own, rows, state in each:
            pieces.append(add_ngrams(x[own], rows, weights, layer, state))
        return torch.cat(pieces)

    def caches(self, layer: int) -> kv_cache.Batch[kv_cache.LayerCache]:
        """Returns the caches of a layer with attention, and the rows of their sequences."""
        kept = tuple(kv_cache.SequenceRows(*each) for each in zip(self._rows, self._caches(layer, False), strict=True))
        return cast(kv_cache.Batch[kv_cache.LayerCache], kept)

    def angles(self, layer: int) -> kv_cache.Angles:
        """Returns the rotary angles of all tokens in a layer."""
        return self._angles[self._sequences[0].spec.attention_kind(layer)]

    def add_attention(self, x: Tensor, weights: Weights, layer: int, is_trial: bool = False) -> Tensor:
        """Returns hidden states with a layer's attention, or its mixer, added.

        Args:    is_trial: the outcome does not count, and leaves no trace in the caches.
        """
        caches = self._caches(layer, is_trial)
        kept = tuple(kv_cache.SequenceRows(*each) for each in zip(self._rows, caches, strict=True))
        return add_attention(x, weights, layer, cast(kv_cache.Batch[kv_cache.LayerCache], kept), self.angles(layer))

    def _caches(self, layer: int, is_trial: bool) -> list[kv_cache.LayerCache | mixers.LayerState]:
        caches = [sequence.cache for sequence in self._sequences]
        return [cache.trial(layer) if is_trial else cache.of(layer) for cache in caches]

    def _ngram_states(self, layer: int, is_trial: bool) -> list[mixers.LayerState | None]:
        caches = [sequence.cache for sequence in self._sequences]
        return [cache.trial_of_ngrams(layer) if is_trial else cache.of_ngrams(layer) for cache in caches]


class _TokenPass(_Pass):
    """Some new tokens of one sequence, which have a pass together and are computed as if each had its own.

    Every token is treated as a sequence that is one token longer than the one before it. All of them have the same
    caches, in which each finds what the tokens before it have just entered.
    """

    def __init__(self, sequence: CachedSequence, rows: "list[mixers.NgramRows | None]") -> None:
        start, num_new = sequence.num_tokens, len(rows)
        super().__init__([sequence], [None], num_new, [start + num_new])
        self.num_sequences = num_new
        self._ngram_rows = rows
        self._rows = [slice(i, i + 1) for i in range(num_new)]
        self._chosen = [kv_cache.Chosen() for _ in rows]  # a layer's choice is for one token

    def _caches(self, layer: int, is_trial: bool) -> list[kv_cache.LayerCache | mixers.LayerState]:
        (cache,) = super()._caches(layer, is_trial)
        if isinstance(cache, mixers.LayerState):
            return [cache] * len(self._rows)
        return [
            replace(cache, num_tokens=cache.num_tokens + i, chosen=replace(chosen) if is_trial else chosen)
            for i, chosen in enumerate(self._chosen)
        ]

    def _ngram_states(self, layer: int, is_trial: bool) -> list[mixers.LayerState | None]:
        return super()._ngram_states(layer, is_trial) * len(self._rows)
