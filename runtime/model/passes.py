"""Forward passes over sequences: several at once, drafted tokens that are verified together, and failed passes.

`Pass` has the sequences of a pass, each with its cache and rotary angles. `SequencePasses` makes passes: it appends
tokens to a sequence in chunks, one token to each of several sequences, or several tokens that are computed as if each
had its own pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moe_pack.formats import RunError
from moe_pack.runtime.model import layers
from moe_pack.runtime.model.caches import Angles, LayerState, layer_cache
from moe_pack.runtime.model.compute.weights import Weights
from moe_pack.runtime.model.kv_cache import CachedSequence, KVCache, joined_angles

if TYPE_CHECKING:
    from moe_pack.runtime.model import compute

MAX_CALL_TOKENS = 16  # of a sequence in a pass that native calls of layers take: for more, they gain nothing
_Rows = list["compute.NgramRows | None"]  # of each sequence's tokens in n-gram tables


class Pass:
    """The sequences of a forward pass: their rows of x, and the parts of a layer in which each is on its own.

    Args:    num_new: new tokens of each sequence.   num_tokens: of each sequence when all its new tokens have run.
    """

    def __init__(
        self, weights: Weights, sequences: list[CachedSequence], rows: _Rows, num_new: int, num_tokens: list[int]
    ) -> None:
        self._weights, self._num_new, self._sequences, self._ngram_rows = weights, num_new, sequences, rows
        self._rows = [slice(i * num_new, (i + 1) * num_new) for i in range(len(sequences))]
        self.num_sequences, self._num_tokens = len(sequences), num_tokens
        self._angles = joined_angles(
            [
                sequence.angles_at(sequence.num_tokens, sequence.num_tokens + num_new, number)
                for sequence, number in zip(sequences, num_tokens, strict=True)
            ]
        )

    def over(self, weights: Weights, sequence_of: Callable[[CachedSequence], CachedSequence]) -> "Pass":
        """Returns the same pass over the layers of some weights, whose caches other sequences have."""
        sequences = [sequence_of(each) for each in self._sequences]
        return Pass(weights, sequences, self._ngram_rows, self._num_new, self._num_tokens)

    def end(self, x: Tensor) -> None:
        """Counts the new tokens, when all layers have run, and shows their hidden states to a sequence's follower."""
        for sequence, hidden in zip(self._sequences, x.chunk(len(self._sequences)), strict=True):
            if sequence.follower is not None:
                sequence.follower.follow(sequence.ids, sequence.num_tokens, hidden)
            sequence.cache.num_tokens += self._num_new

    def add_ngrams(self, x: Tensor, layer: int, is_trial: bool = False) -> Tensor:
        """Adds a layer's n-grams to hidden states, if it has any."""
        if self._weights.spec.ngrams_of(layer) is None:
            return x
        each = zip(self._rows, self._ngram_rows, self._ngram_states(layer, is_trial), strict=True)
        return torch.cat([layers.add_ngrams(x[own], rows, self._weights, layer, state) for own, rows, state in each])

    def caches(self, layer: int) -> layer_cache.Batch[layer_cache.LayerCache]:
        """Returns the caches of a layer with attention, and the rows of their sequences."""
        return cast(layer_cache.Batch[layer_cache.LayerCache], self._kept(layer, is_trial=False))

    def angles(self, layer: int) -> Angles:
        return self._angles[self._weights.spec.attention_kind(layer)]

    def add_attention(self, x: Tensor, layer: int, is_trial: bool = False) -> Tensor:
        """Adds a layer's attention, or its mixer, to hidden states; a trial leaves no trace in the caches."""
        kept = cast(layer_cache.Batch[layer_cache.LayerCache], self._kept(layer, is_trial))
        return layers.add_attention(x, self._weights, layer, kept, self.angles(layer))

    def partial_state(self, x: Tensor, layer: int) -> layers.PartialState | None:
        """Returns the `PartialState` of the next layer, from x after this layer's first half; None without experts."""

        def then(partial: Tensor) -> Tensor:
            partial = self.add_ngrams(partial, layer + 1, is_trial=True)
            return self.add_attention(partial, layer + 1, is_trial=True)

        return layers.partial_state(x, self._weights, layer, then)

    def _kept(self, layer: int, is_trial: bool) -> layer_cache.Batch[layer_cache.LayerCache | LayerState]:
        return tuple(map(layer_cache.SequenceRows, self._rows, self._caches(layer, is_trial)))

    def _caches(self, layer: int, is_trial: bool) -> list[layer_cache.LayerCache | LayerState]:
        caches = [sequence.cache for sequence in self._sequences]
        return [cache.trial(layer) if is_trial else cache.of(layer) for cache in caches]

    def _ngram_states(self, layer: int, is_trial: bool) -> list[LayerState | None]:
        states = [sequence.cache.states.of_ngrams(layer) for sequence in self._sequences]
        return [state.copied() if is_trial and state is not None else state for state in states]


class TokenPass(Pass):
    """New tokens of one sequence in a pass, each computed as if alone; the caches give it the tokens before it."""

    def __init__(self, weights: Weights, sequence: CachedSequence, rows: _Rows) -> None:
        start, num_new = sequence.num_tokens, len(rows)
        super().__init__(weights, [sequence], [None], num_new, [start + num_new])
        self.num_sequences = num_new
        self._ngram_rows = rows
        self._rows = [slice(i, i + 1) for i in range(num_new)]
        self._chosen = [layer_cache.Chosen() for _ in rows]  # a layer's choice is for one token

    def _caches(self, layer: int, is_trial: bool) -> list[layer_cache.LayerCache | LayerState]:
        (cache,) = super()._caches(layer, is_trial)
        if isinstance(cache, LayerState):
            return [cache] * len(self._rows)
        return [
            replace(cache, num_tokens=cache.num_tokens + i, chosen=replace(chosen) if is_trial else chosen)
            for i, chosen in enumerate(self._chosen)
        ]

    def _ngram_states(self, layer: int, is_trial: bool) -> list[LayerState | None]:
        return super()._ngram_states(layer, is_trial) * len(self._rows)


class SequencePasses(ABC):
    """The passes of a model over its sequences."""

    def __init__(
        self, weights: Weights, device: torch.device, chunk_tokens: int, sequences: tuple[CachedSequence, ...]
    ) -> None:
        self.spec, self.weights, self.device, self.chunk_tokens = weights.spec, weights, device, chunk_tokens
        self.sequences = sequences
        self._verified = torch.empty((0, 0))  # hidden states of the tokens that `verify` appended last

    @abstractmethod
    def run_layers(self, x: Tensor, batch: Pass, ids: Tensor, ends_early: bool) -> Tensor:
        """Returns the hidden states of tokens int64 [T] after the last layer, from those before the first, [T, d].

        Args:    ends_early: the last layer's experts run for the last token alone, whose state alone is returned.
        """

    # ---- one sequence -----------------------------------------------------------------------------------------------

    def extend(self, sequence: CachedSequence, ids: list[int]) -> Tensor:
        """Appends tokens to one of the sequences; returns the logits after the last, float32 [vocabulary].

        Raises:  RunError if the context is full or a token is not in the vocabulary.
        """
        assert ids, "at least one token"
        return self._head(self.append(sequence, ids, last_only=True)[0][-1:])[0]

    @torch.inference_mode()
    def append(self, sequence: CachedSequence, ids: list[int], last_only: bool = False) -> list[Tensor]:
        """Appends tokens to a sequence, in chunks; raises as `extend`.

        Returns: the hidden states of new tokens, float32 [T, d] in pieces; only the last piece if `last_only`.
        """
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
                    batch = Pass(self.weights, [sequence], [rows], len(tokens), [len(sequence.ids)])
                    piece = self._run(batch, tokens, ends_early and len(tokens) > MAX_CALL_TOKENS)
                    hidden = [piece] if last_only else [*hidden, piece]
                    sequence.hidden = piece[-1].clone() if len(piece) > 1 else piece[0]
        except BaseException:
            keep_what_is_whole(cache, kept)
            raise
        return hidden if last_only or kept == before else [torch.cat(hidden)[before:]]

    def _may_end_early(self, sequence: CachedSequence) -> bool:
        """Returns whether the last layer's experts may run for the last token of each pass of a prompt alone.

        Drafters that follow the sequence, and routers with a capacity, need the others' outputs; a GPU computes whole
        passes. Passes that calls of layers may take are whole, too, so that calls change no bit.
        """
        return self.device.type == "cpu" and sequence.follower is None and not self.spec.router.capacity

    # ---- several sequences ------------------------------------------------------------------------------------------

    def extend_each(self, sequences: Sequence[CachedSequence], ids: Sequence[int]) -> Tensor:
        """Appends a token to each of some sequences, in one pass; returns the logits after them, float32 [n, vocab].

        With native kernels these are, to the bit, those of each alone. Raises as `extend`, before anything runs.
        """
        if len(ids) == 1:
            return self.extend(sequences[0], [ids[0]])[None]
        for sequence, token in zip(sequences, ids, strict=True):
            self._check_ids(sequence, [token])
        together = [i for i, sequence in enumerate(sequences) if not sequence.outgrows(1)]
        logits: dict[int, Tensor] = {}
        if together:
            found = self._extend_together([sequences[i] for i in together], [ids[i] for i in together])
            logits = dict(zip(together, found, strict=True))
        for i, (sequence, token) in enumerate(zip(sequences, ids, strict=True)):
            if i not in logits:
                logits[i] = self.extend(sequence, [token])
        return torch.stack([logits[i] for i in range(len(ids))])

    @torch.inference_mode()
    def _extend_together(self, sequences: list[CachedSequence], ids: list[int]) -> Tensor:
        rows: _Rows = []
        with self._alone(sequences, rows):
            for sequence, token in zip(sequences, ids, strict=True):
                sequence.ids[sequence.num_tokens :] = [token]
                rows.append(self._ngram_rows(sequence.ids, sequence.num_tokens, sequence.num_tokens + 1))
            batch = Pass(self.weights, sequences, rows, 1, [len(sequence.ids) for sequence in sequences])
            hidden = self._run(batch, torch.tensor(ids))
            for sequence, own in zip(sequences, hidden, strict=True):
                sequence.hidden = own
            return self._head(hidden)

    # ---- drafts -----------------------------------------------------------------------------------------------------

    def most_verified(self, sequence: CachedSequence) -> int:
        """Returns how many tokens `verify` may append now: 1 if they cannot be taken back or change all angles."""
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

        With native kernels these are the logits that the tokens have one after the other, to the bit. `keep` drops
        wrong tokens. A cache with states then leads back to the position before these tokens, and no longer to the one
        saved last.
        Args:    ids: at most `most_verified`.
        Raises:  RunError as `extend`, before anything runs.
        """
        if len(ids) == 1:
            return self.extend(sequence, ids)[None]
        assert len(ids) <= self.most_verified(sequence), "what cannot be taken back is not verified"
        self._check_ids(sequence, ids)
        sequence.cache.save()
        self._verified = self._append_alone(sequence, ids)
        return self._logits_after(self._verified)

    def _logits_after(self, verified: Tensor) -> Tensor:
        """Returns the logits after tokens that were verified, from their hidden states [n, d]."""
        return self._head(verified)

    @torch.inference_mode()
    def keep(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Keeps the first tokens, at least one of the last `verify`; with states, the kept tokens run again."""
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
        before, rows = sequence.num_tokens, _Rows()
        sequence.ids[before:] = ids
        with self._alone([sequence], rows):
            for i in range(before, before + len(ids)):
                rows.append(self._ngram_rows(sequence.ids, i, i + 1))
            hidden = self._run(TokenPass(self.weights, sequence, rows), torch.tensor(ids))
        sequence.hidden = hidden[-1]
        return hidden

    # ---- a pass -----------------------------------------------------------------------------------------------------

    def _run(self, batch: Pass, ids: Tensor, ends_early: bool = False) -> Tensor:
        if isinstance(self.weights, layers.ExpertRunner):
            self.weights.begin_pass(ids, 1 if ends_early else len(ids))
        x = self.run_layers(self._embed(ids), batch, ids, ends_early)
        batch.end(x)
        return x

    def _embed(self, ids: Tensor) -> Tensor:
        return layers.embed(ids, self.weights)

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        return layers.head(hidden, self.weights)

    @contextmanager
    def _alone(self, sequences: list[CachedSequence], rows: _Rows) -> Iterator[None]:
        """Computes each token of a pass as if it were alone; a failed pass is cut back."""
        before = [sequence.num_tokens for sequence in sequences]
        try:
            with self.weights.operations.tokens_alone(), self._told(is_batch=True):
                yield
        except BaseException:
            for sequence, kept in zip(sequences, before, strict=True):
                keep_what_is_whole(sequence.cache, kept)
            raise
        finally:
            for each in rows:
                if each is not None:
                    each.close()

    @contextmanager
    def _told(self, is_batch: bool = False, is_prompt: bool = False) -> Iterator[None]:
        """Tells weights that run experts themselves the kind of a pass."""
        runner = self.weights if isinstance(self.weights, layers.ExpertRunner) else None
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

    def _chunks(self, ids: list[int], num_new: int) -> "Generator[tuple[Tensor, compute.NgramRows | None], None, None]":
        """Yields the tokens of each pass, int64 [T], and their rows, read ahead, for the last `num_new` of ids."""
        first, step = len(ids) - num_new, self.chunk_tokens
        rows = self._ngram_rows(ids, first, min(first + step, len(ids)))
        ahead: compute.NgramRows | None = None
        try:
            for start in range(first, len(ids), step):
                stop = min(start + step, len(ids))
                if stop < len(ids):
                    ahead = self._ngram_rows(ids, stop, min(stop + step, len(ids)))
                yield torch.tensor(ids[start:stop]), rows
                rows, ahead = ahead, None
        finally:
            for left in (rows, ahead):
                if left is not None:
                    left.close()

    def _ngram_rows(self, ids: list[int], start: int, stop: int) -> "compute.NgramRows | None":
        """Begins to read the rows of positions `start` to `stop` in all n-gram tables; None without tables."""
        ngrams = self.spec.ngrams
        if ngrams is None:
            return None
        from moe_pack.runtime.model.compute import NgramRows

        tokens = torch.tensor(ids[max(start - ngrams.ngram_size + 1, 0) : stop])
        return NgramRows(ngrams, self.weights.ngram_table, tokens, stop - start)


def keep_what_is_whole(cache: KVCache, kept: int) -> None:
    """Cuts a cache back after a failed pass: to `kept` tokens, or none if places or states of these are lost."""
    is_whole = not cache.states and (cache.num_tokens == kept or not cache.is_ring)
    cache.num_tokens = kept if is_whole else 0
