"""The pass of sequences through a model, one layer at a time: in bounded memory, resumable after any layer.

    for layer in layers:
        tokens = states.enter(layer)         attention, shared and dense experts, routes; for all sequences
        states.add(...)                      the caller runs the routed experts and adds their outputs
        states.leave(layer, tokens)          hidden states go to a file, from which a killed pass goes on

With an encoder, each stack sees n = S // 2 tokens of a sequence: the encoder the first n, the decoder its start token
and the next n - 1, which it predicts. docs/profile.md specifies this.
"""

import math
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.calib.forward import shared
from moe_pack.runtime import model
from moe_pack.runtime.model import caches, compute, encoder_decoder, kv_cache
from moe_pack.runtime.model.attention import relative
from moe_pack.runtime.model.compute.weights import norm
from moe_pack.runtime.model.layers import add_ngrams, enter_second, run_unrouted, with_returned
from moe_pack.runtime.model.residuals import residual_of

_PARALLEL_BYTES = 64 << 20  # of experts in float32 at once


def num_workers(spec: formats.ModelSpec) -> int:
    """Returns how many experts run in parallel: one for each of torch's threads while their weights fit in memory."""
    expert_bytes = 4 * len(spec.expert.matrices) * spec.hidden_size * spec.expert.intermediate_size
    return max(1, min(torch.get_num_threads(), _PARALLEL_BYTES // expert_bytes))


OfSequence = Callable[[int], Tensor]  # a tensor of a sequence, by the sequence's number


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The beginning of each sequence of a pass."""

    first: OfSequence  # hidden states float32 [S, w] before layer 0
    answer: OfSequence | None = None  # with an encoder: hidden states before the decoder's first layer
    ids: OfSequence | None = None  # tokens int64 [S]; for n-grams and tables from tokens to experts
    # The number of the sequence from which a later one branched off. Both read the same text of an encoder, and share
    # what a layer before chose.
    origin: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The tokens that a model is given of N sequences."""

    stacks: tuple[Tensor, ...]  # int64 [N, n] for each stack, the encoder first if there is one

    @classmethod
    def of(cls, spec: formats.ModelSpec, tokens: Tensor) -> "Sequences":
        """Returns what a model is given of sequences int64 [N, S]."""
        if spec.encoder is None:
            return cls((tokens,))
        n = stack_tokens(spec, tokens.shape[1])
        start = torch.full((len(tokens), 1), spec.encoder.start_token)
        return cls((tokens[:, :n], torch.cat((start, tokens[:, n : 2 * n - 1]), dim=1)))

    @property
    def ids(self) -> Tensor:
        """The tokens of the decoder, int64 [N, n]: each but the first is predicted from those before."""
        return self.stacks[-1]

    @property
    def length(self) -> int:
        """The number of tokens of a sequence in each stack, n."""
        return self.ids.shape[1]

    def begun(self, embedded: Callable[[Tensor, int], Tensor]) -> Beginning:
        """Returns the beginning of a pass over the sequences, or copies; `embedded` takes a stack's tokens int64 [N,
        n].
        """
        first, *others = (partial(embedded, ids) for ids in self.stacks)
        return Beginning(first, others[0] if others else None, lambda number: self.ids[number % len(self.ids)])

    def embedded(self, weights: model.Weights) -> Beginning:
        """Returns the beginning of a pass over the sequences, or over several copies of them, by their embeddings."""
        return self.begun(lambda ids, number: model.embed(ids[number % len(ids)], weights))

    def first(self, number: int) -> "Sequences":
        """Returns the first sequences."""
        return Sequences(tuple(ids[:number] for ids in self.stacks))


def stack_tokens(spec: formats.ModelSpec, sequence_length: int) -> int:
    """Returns how many tokens of a sequence each layer of a model sees."""
    return sequence_length if spec.encoder is None else sequence_length // 2


def stack_of(spec: formats.ModelSpec, layer: int) -> int:
    """Returns the stack of a layer: 1 for a decoder after an encoder, else 0."""
    return int(spec.encoder is not None and layer >= spec.encoder.num_layers)


def check_length(spec: formats.ModelSpec, sequence_length: int) -> None:
    """Refuses sequences longer than the model's positions, or too short for a prediction in each half: RunError."""
    if sequence_length > spec.max_position_embeddings:
        raise formats.RunError(
            f"--sequence-length: found {sequence_length}, expected at most the "
            f"{spec.max_position_embeddings} positions this model has"
        )
    if spec.encoder is not None and stack_tokens(spec, sequence_length) < 2:
        raise formats.RunError(
            f"--sequence-length: found {sequence_length}, expected at least 4: this model's encoder reads the first "
            "half, and its decoder predicts tokens of the second"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The inputs of a layer's attention in a sequence of n tokens next to hidden states."""

    text: Tensor | None = None  # float32 [n, d]: the encoder's output, for a decoder layer after an encoder
    # Positions to attend to: a layer with an indexer writes them, layers that share its choice read them.
    chosen: caches.Chosen = field(default_factory=caches.Chosen)
    ids: Tensor | None = None  # int64 [n]: the tokens, for n-grams


class SequenceAttention:
    """The attention of layers for whole sequences of one length, each from an empty context."""

    def __init__(self, weights: model.Weights, sequence_length: int, device: torch.device) -> None:
        self._spec = weights.spec
        self._sequence_length = sequence_length
        self._device = device
        if weights.spec.encoder is None:
            positions = torch.arange(sequence_length, device=device)
            self._angles = caches.LayerRopes(weights.spec, device)(positions, sequence_length)
        else:
            self._biases = tuple(
                relative.position_bias(weights, sequence_length, is_encoder) for is_encoder in (True, False)
            )

    def added(self, x: Tensor, weights: model.Weights, layer: int, context: Context) -> Tensor:
        """Returns hidden states float32 [n, d] with a layer's n-grams and attention added."""
        spec, mixer, ids, text = self._spec, self._spec.mixer_of(layer), context.ids, context.text
        if (ngrams := spec.ngrams_of(layer)) is not None:
            assert ids is not None, f"layer {layer} needs the tokens"
            rows = compute.NgramRows(ngrams, weights.ngram_table, ids, len(ids), (layer,))
            x = add_ngrams(
                x, rows, weights, layer, caches.LayerState.zeros(ngrams.state(spec.stream_width), self._device)
            )
        if mixer is not None:
            return model.add_attention(
                x, weights, layer, caches.LayerState.zeros(mixer.state, self._device), self._angles[0]
            )
        cache = kv_cache.KVCache.of_layer(spec, layer, self._sequence_length, self._device)
        if spec.encoder is None:
            cache = replace(cache, chosen=context.chosen)
            return model.add_attention(x, weights, layer, cache, self._angles[spec.attention_kind(layer)])
        x = encoder_decoder.add_own_attention(x, weights, layer, cache, self._biases[stack_of(spec, layer)])
        if text is None:
            return x
        text_cache = kv_cache.KVCache.of_layer(spec, layer, self._sequence_length, self._device)
        encoder_decoder.enter_text(text, weights, layer, text_cache, len(text))
        return encoder_decoder.add_cross_attention(x, weights, layer, replace(text_cache, num_tokens=len(text)))


def shared_choosers(spec: formats.ModelSpec, sequence_length: int) -> frozenset[int]:
    """Returns the layers that choose some of a sequence's positions, not all, for later layers too."""
    indexers = {layer: spec.indexer_of(layer) for layer in spec.shared_choosers}
    return frozenset(layer for layer, each in indexers.items() if each is not None and each.top_k < sequence_length)


class Choices:
    """Keeps the positions that indexers chose in sequences of S tokens, for the layers that share them.

    Each layer whose choice is shared has a file of one bit for each token and position; none if an indexer chooses all
    S positions. `enter` begins such a layer, `write` takes its choices, `leave` ends it.
    """

    def __init__(
        self, spec: formats.ModelSpec, sequence_length: int, folder: Path, results: shared.Results = shared.ONE_PROCESS
    ) -> None:
        self._folder, self._sequence_length, self._results = folder, sequence_length, results
        self._shape = sequence_length, -(-sequence_length // 8)
        self._choosers = shared_choosers(spec, sequence_length)
        wanted = ((layer, spec.chooser_of(layer)) for layer in range(spec.num_hidden_layers))
        self._chooser_of = {layer: chooser for layer, chooser in wanted if chooser in self._choosers}
        self._paths = whole_states(folder, "chosen")
        self._bits: Tensor | None = None  # uint8 [N, S, S / 8] of the layer that was entered

    def enter(self, layer: int, num_sequences: int) -> None:
        """Begins a layer."""
        self._bits = None
        if layer in self._choosers:
            mapped = np.memmap(self._held, np.uint8, "w+", shape=(num_sequences, *self._shape))
            self._bits = torch.from_numpy(mapped)

    def bits(self, chosen: caches.Chosen) -> Tensor:
        """Returns what the layer that was entered chose in a sequence, uint8 [S, S / 8]; [0] in other layers."""
        if self._bits is None:
            return torch.zeros(0, dtype=torch.uint8)
        assert chosen.positions is not None, "not all positions are chosen"
        return torch.from_numpy(np.packbits(chosen.positions.cpu().numpy(), axis=1))

    def write(self, number: int, bits: Tensor) -> None:
        """Keeps the `bits` of a sequence; those of other layers are not kept."""
        if self._bits is not None:
            self._bits[number] = bits

    def leave(self, layer: int) -> None:
        """Ends a layer: what it chose is on disk."""
        if self._bits is not None:
            self._paths[layer], _ = store_states(self._folder, f"chosen-{layer:03d}", (self._bits,), self._results)
            self._bits = None
            self._held.unlink()

    def remove_before(self, layer: int) -> None:
        """Removes the choices that this layer and those after it do not read."""
        read = {chooser for later, chooser in self._chooser_of.items() if later >= layer}
        for chooser in set(self._paths) - read:
            self._paths.pop(chooser).unlink(missing_ok=True)  # another part may have removed it

    @property
    def _held(self) -> Path:
        return self._folder / self._results.own_name("held-chosen.bin")

    def are_there(self, layers: Iterable[int]) -> bool:
        """Returns whether all choices are there that these layers share."""
        return all(layer not in self._chooser_of or self._chooser_of[layer] in self._paths for layer in layers)

    def num_read(self, layer: int) -> int:
        """Returns in how many sequences positions were chosen for a layer that shares a choice; 0 for other layers."""
        if layer not in self._chooser_of:
            return 0
        return self._paths[self._chooser_of[layer]].stat().st_size // math.prod(self._shape)

    def read(self, layer: int, number: int) -> caches.Chosen:
        """Returns the choice that a layer shares, in one of these sequences; all positions for other layers."""
        if layer not in self._chooser_of:
            return caches.Chosen()
        path, size = self._paths[self._chooser_of[layer]], math.prod(self._shape)
        raw = np.fromfile(path, np.uint8, size, offset=number * size).reshape(self._shape)
        return caches.Chosen(torch.from_numpy(np.unpackbits(raw, axis=1, count=self._sequence_length).view(bool)))


MAX_MEMORY_BYTES = 1 << 29  # that a pass may use for the arrays of its tokens


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """All tokens inside a layer, T = sequences times their length, in order."""

    # float32 [T, w]: hidden states after attention, with the outputs of shared and dense experts, and of experts that
    # return their input.
    x: Tensor
    inputs: Tensor  # float32 [T, d]: of the router and the experts
    experts: Tensor  # int64 [T, k]: routes; [T, 0] in a layer without a router
    weights: Tensor  # float32 [T, k]. With the weight 0, as beyond its capacity, an expert does not run for that token
    # float32 [T]: the router's weights, where they multiply the input of experts; `weights` are ones then
    scales: Tensor | None = None
    own_norm: Tensor | None = None  # float32 [d]: multiplies the input of routed experts alone
    # float32 [T, d]: the weighted sum of routed experts, where it does not simply add to `x`. `x` is then without the
    # outputs of shared and dense experts too, until `LayerStates.summed`.
    outputs: Tensor | None = None

    def expert_inputs(self, token_idx: Tensor | slice) -> Tensor:
        """Returns what experts get for these tokens, float32 [n, d]."""
        inputs = self.inputs[token_idx]
        if self.own_norm is not None:
            inputs = inputs * self.own_norm
        return inputs if self.scales is None else inputs * self.scales[token_idx, None]

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens that an expert runs for, rising int64 [n], and its weight for each, float32 [n]."""
        token_idx, rank = torch.where((self.experts == expert) & (self.weights != 0))
        return token_idx, self.weights[token_idx, rank]


class LayerStates:
    """The hidden states of sequences of S tokens between layers. Owns `folder`.

    Args:    sequence_length: in each stack; the caller has checked it.   folder: created if missing; if a killed pass
             left its hidden states there, the pass goes on at `next_layer`.   keeps_all: whether the hidden states
             before every layer stay on disk, for `inside` and `at`.   workers: threads that run sequences; None: as
             many as `num_workers`.   results: of sequences within a layer; shared, if several parts run the same pass
             over `folder`.
    """

    def __init__(
        self,
        weights: model.Weights,
        beginning: Beginning,
        num_sequences: int,
        sequence_length: int,
        folder: Path,
        device: torch.device,
        keeps_all: bool = False,
        workers: int | None = None,
        results: shared.Results = shared.ONE_PROCESS,
    ) -> None:
        self.spec = weights.spec
        self.num_sequences = self._num_first = num_sequences
        self.sequence_length = sequence_length
        self._sequence_bytes = 4 * sequence_length * weights.spec.stream_width
        self._weights = weights
        self._beginning = beginning
        self._folder = folder
        self._keeps_all = keeps_all
        self._num_workers = num_workers(self.spec) if workers is None else workers
        self._results = results
        assert (beginning.answer is None) == (self.spec.encoder is None), (
            "a decoder after an encoder has a beginning of its own"
        )
        self._decoder_start = 0 if self.spec.encoder is None else self.spec.encoder.num_layers  # its first layer
        self.device = device
        folder.mkdir(exist_ok=True)
        self._attention = SequenceAttention(weights, sequence_length, device)
        self._choices = Choices(self.spec, sequence_length, folder, results)
        self._paths = dict[int, Path]()  # of the hidden states before each layer
        self.next_layer = self._resume()

    def enter(self, layer: int) -> LayerTokens:
        """Takes all sequences into layer `layer`, the next one, up to its routed experts, and returns their tokens."""
        assert layer == self.next_layer, (layer, self.next_layer)
        self._choices.enter(layer, self.num_sequences)
        return self.inside(layer, self.num_sequences)

    @torch.inference_mode()
    def inside(self, layer: int, num_sequences: int) -> LayerTokens:
        """Returns the tokens of the first sequences in a layer whose hidden states are there, up to its experts."""
        k = self.spec.router.num_experts_per_tok if layer in self.spec.moe_layers else 0
        num_tokens = num_sequences * self.sequence_length
        d, width = self.spec.hidden_size, self.spec.stream_width
        adds_apart = self.spec.residual is not None and self.spec.has_second(layer)
        mapped = 4 * num_tokens * (width + d + d * adds_apart) > MAX_MEMORY_BYTES
        own_norm = residual_of(self.spec.residual).experts_norm(self._weights, layer) if k else None
        tokens = LayerTokens(
            x=self.allocate("x", num_tokens, mapped, width),
            inputs=self.allocate("inputs", num_tokens, mapped),
            experts=torch.empty((num_tokens, k), dtype=torch.int64),
            weights=torch.empty((num_tokens, k)),
            own_norm=None if own_norm is None else own_norm.cpu(),
            outputs=self.allocate("outputs", num_tokens, mapped).zero_() if adds_apart else None,
        )

        def run_sequence(number: int) -> tuple[Tensor, ...]:
            context = self.context(layer, number)
            x, inputs = self.half_of(layer, self.at(layer, number), self._weights, context)
            routes = model.route_tokens(inputs, self._weights, layer, context.ids) if k else ()
            return x.cpu(), inputs.cpu(), self._choices.bits(context.chosen), *(each.cpu() for each in routes)

        halves = self._results.in_order("halves", run_sequence, range(num_sequences), self._num_workers)
        for number, (x, inputs, bits, *routes) in enumerate(halves):
            rows = slice(number * self.sequence_length, (number + 1) * self.sequence_length)
            tokens.x[rows], tokens.inputs[rows] = x, inputs
            self._choices.write(number, bits)
            if k:
                tokens.experts[rows], tokens.weights[rows] = routes
        if k and self.spec.router.on_input:
            tokens = replace(tokens, scales=tokens.weights[:, 0], weights=torch.ones_like(tokens.weights))
        return tokens

    def half(self, layer: int, number: int, weights: model.Weights) -> tuple[Tensor, Tensor]:
        """Returns a sequence's `x` and `inputs` (`LayerTokens`) in layer `layer`, float32 [S, w] and [S, d]."""
        return self.half_of(layer, self.at(layer, number), weights, self.context(layer, number))

    def context(self, layer: int, number: int) -> Context:
        """Returns the other inputs of a layer's attention in a sequence."""
        return Context(self.text(layer, number), self.chosen(layer, number), self.ids(number))

    def half_of(self, layer: int, x: Tensor, weights: model.Weights, context: Context) -> tuple[Tensor, Tensor]:
        """Returns `half` of other hidden states, float32 [S, w]."""
        x = self.attended(layer, x, weights, context)
        if not self.spec.has_second(layer):
            return x, torch.zeros_like(x)
        inputs = model.mlp_input(x, weights, layer)
        if self.spec.residual is not None:
            return x, inputs
        unrouted, returned = run_unrouted(inputs, weights, layer), with_returned(None, inputs, weights, layer)
        if unrouted is None and returned is None:
            return x, inputs
        return enter_second(x, unrouted, returned, weights, layer), inputs

    def after(self, layer: int, half: tuple[Tensor, Tensor], outputs: Tensor | None, weights: model.Weights) -> Tensor:
        """Returns hidden states after a layer, float32 [n, w], from its `half` and its experts' `outputs`."""
        x, inputs = (each.to(self.device) for each in half)
        if outputs is None:
            return x
        routed = outputs.to(self.device) if layer in self.spec.moe_layers else None
        routed = with_returned(routed, inputs, weights, layer)
        return enter_second(x, run_unrouted(inputs, weights, layer), routed, weights, layer)

    @torch.inference_mode()
    def summed(self, layer: int, tokens: LayerTokens) -> LayerTokens:
        """Returns the tokens with hidden states after the layer as `x`, when all experts have run."""
        if (outputs := tokens.outputs) is None:
            return tokens

        S = self.sequence_length
        pieces = [slice(start, start + S) for start in range(0, len(tokens.x), S)]

        def run_sequence(number: int) -> tuple[Tensor]:
            rows = pieces[number]
            half = tokens.x[rows], tokens.inputs[rows]
            return (self.after(layer, half, outputs[rows], self._weights).cpu(),)

        sums = self._results.in_order("sums", run_sequence, range(len(pieces)), self._num_workers)
        for rows, (x,) in zip(pieces, sums, strict=True):
            tokens.x[rows] = x
        return replace(tokens, outputs=None)

    def attended(self, layer: int, x: Tensor, weights: model.Weights, context: Context) -> Tensor:
        """Returns a sequence's hidden states float32 [S, w] with a layer's attention added."""
        if context.text is not None:
            context = replace(context, text=norm(context.text.to(self.device), weights, "encoder_norm"))
        return self._attention.added(x.to(self.device), weights, layer, context)

    def add(self, tokens: LayerTokens, token_idx: Tensor, weights: Tensor, output: Tensor) -> None:
        """Adds an expert's output float32 [n, d], weighted, to the hidden states of its tokens, or to `outputs`."""
        target = tokens.x if tokens.outputs is None else tokens.outputs
        target.index_add_(0, token_idx, output.to("cpu") * self.shares(weights)[:, None])

    def shares(self, weights: Tensor) -> Tensor:
        """Returns what an expert's output is multiplied by for each of its tokens, from the router's weights [n]."""
        return weights * self.spec.residual_multiplier if self.spec.residual is None else weights

    def leave(self, layer: int, tokens: LayerTokens, more: Iterable[Tensor] = ()) -> None:
        """Ends a layer: its hidden states, and `more` that begin here, replace those before it; refuses non-finite
        ones.
        """
        tokens = self.summed(layer, tokens)
        # A sum in float64 is finite if and only if all terms are. Summed in pieces: torch converts a piece as a whole.
        if not all(piece.sum(dtype=torch.float64).isfinite() for piece in torch.split(tokens.x, self.sequence_length)):
            raise formats.CheckpointError(
                f"layer {layer}: hidden states are not finite; check that the checkpoint is complete"
            )
        self._choices.leave(layer)
        path, num_tokens = store_states(
            self._folder, f"hidden-{layer + 1:03d}", chain((tokens.x,), more), self._results
        )
        if layer + 1 == self._decoder_start:
            self._text_path = path
        kept = {path, self._text_path if layer + 1 > self._decoder_start > 0 else path}
        first_kept = layer + 1
        if self._results.is_shared:  # other parts may still be in this layer
            kept |= set(self._folder.glob(f"hidden-{layer:03d}-*"))
            first_kept = layer
        if not self._keeps_all:
            for other in self._folder.glob("hidden-*"):
                if other not in kept:
                    other.unlink(missing_ok=True)
            self._choices.remove_before(first_kept)
        self._paths[layer + 1] = path
        self.num_sequences = num_tokens // self.sequence_length
        self.next_layer = layer + 1

    def before(self, number: int) -> Tensor:
        """Returns a sequence's hidden states before the next layer, or after the last: float32 [S, w]."""
        return self.at(self.next_layer, number)

    def at(self, layer: int, number: int) -> Tensor:
        """Returns a sequence's hidden states before this layer, which is the next one unless all are kept."""
        if layer == 0:
            return self._beginning.first(number)
        if layer == self._decoder_start:
            assert self._beginning.answer is not None, "a layer at which a decoder begins"
            return self._beginning.answer(self._root_of(number, self._num_first))
        return self._read_hidden(self._paths[layer], number)

    def ids(self, number: int) -> Tensor | None:
        """Returns the tokens of a sequence, int64 [S]; None if the model does not need them."""
        return self._beginning.ids(number) if self._beginning.ids is not None and self.spec.needs_ids else None

    def text(self, layer: int, number: int) -> Tensor | None:
        """Returns the encoder's output for a sequence, float32 [S, d], not normed; None outside of its decoder."""
        if not stack_of(self.spec, layer):
            return None
        num_read = self._text_path.stat().st_size // self._sequence_bytes
        return self._read_hidden(self._text_path, self._root_of(number, num_read))

    def chosen(self, layer: int, number: int) -> caches.Chosen:
        """Returns the positions to attend to: those that an earlier layer chose, if the layer shares them, or all."""
        num_read = self._choices.num_read(layer)
        found = self._choices.read(layer, self._root_of(number, num_read) if num_read else number)
        return replace(found, positions=None if found.positions is None else found.positions.to(self.device))

    def _root_of(self, number: int, num_sequences: int) -> int:
        """Returns the sequence from which a sequence branched off among the first `num_sequences`, or itself."""
        while number >= num_sequences:
            assert self._beginning.origin is not None, "sequences branch off where the caller says from which"
            number = self._beginning.origin(number)
        return number

    def _read_hidden(self, path: Path, number: int) -> Tensor:
        with path.open("rb") as file:
            file.seek(number * self._sequence_bytes)
            raw = np.fromfile(file, np.float32, self._sequence_bytes // 4)
        return torch.from_numpy(raw).view(self.sequence_length, -1)

    def allocate(self, name: str, num_tokens: int, mapped: bool, width: int | None = None) -> Tensor:
        """Returns an uninitialized float32 [num_tokens, width], in memory or in a mapped file of this name."""
        shape = (num_tokens, self.spec.hidden_size if width is None else width)
        if not mapped:
            return torch.empty(shape)
        path = self._folder / self._results.own_name(f"held-{name}.bin")
        path.unlink(missing_ok=True)  # an earlier mapping of the file stays valid
        return torch.from_numpy(np.memmap(path, np.float32, "w+", shape=shape))

    def close(self) -> None:
        """Removes the folder, unless other parts may still read in it."""
        if not self._results.is_shared:
            shutil.rmtree(self._folder)

    def _resume(self) -> int:
        """Returns the layer after the last whose hidden states are whole on disk, or 0."""
        found = whole_states(self._folder, "hidden")
        if self._keeps_all:
            found = {layer: path for layer, path in found.items() if all(before in found for before in range(1, layer))}
        for layer in sorted(found, reverse=True):
            if layer >= self._decoder_start > 0:
                if self._decoder_start not in found:
                    continue
                self._text_path = found[self._decoder_start]
            if not self._choices.are_there(range(layer + 1) if self._keeps_all else (layer,)):
                continue
            self._paths = found if self._keeps_all else {layer: found[layer]}
            self.num_sequences = found[layer].stat().st_size // self._sequence_bytes
            return layer
        return 0


def store_states(
    folder: Path, name: str, pieces: Iterable[Tensor], results: shared.Results = shared.ONE_PROCESS
) -> tuple[Path, int]:
    """Writes float32 [n, d] in pieces to a file with a checksum in its name; returns its path and the sum of n."""
    crc32 = num_tokens = 0
    unfinished = folder / results.own_name(f"{name.split('-')[0]}.tmp")
    with unfinished.open("wb") as file:
        for piece in pieces:
            raw = piece.numpy().reshape(-1).view(np.uint8)
            raw.tofile(file)
            crc32 = zlib.crc32(raw.data, crc32)
            num_tokens += len(piece)
    path = folder / f"{name}-{crc32:08x}.bin"
    results.publish(unfinished, path)
    return path, num_tokens


def whole_states(folder: Path, name: str) -> dict[int, Path]:
    """Returns the files of `store_states` that are whole, by the number in their name."""
    return {int(path.stem.split("-")[1]): path for path in folder.glob(f"{name}-*.bin") if _is_whole(path)}


def _is_whole(path: Path) -> bool:
    crc32 = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                crc32 = zlib.crc32(piece, crc32)
    except FileNotFoundError:  # another part is further on, and has removed it
        return False
    return crc32 == int(path.stem.split("-")[2], 16)
