"""Sequences on their way through a model, one layer at a time: bounded memory, and resumable after any layer.

    for layer in layers:
        tokens = states.enter(layer)         attention, shared and dense experts, routes; for all sequences
        states.add(...)                      the caller runs the routed experts and adds their outputs
        states.leave(layer, tokens)          hidden states go to a file, from which a killed pass goes on

Between layers hidden states are in a file (of which the system keeps in memory what it has room for); within a layer
two float32 values a token and hidden dimension, in memory up to a bound, in a mapped file beyond. What an encoder has
read stays in a file of its own as long as decoder layers attend to it, and is read a sequence at a time.
"""

import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.sequence_attention import SequenceAttention
from moe_pack.calib.sequences import Beginning, stack_of
from moe_pack.calib.workers import in_order, num_workers
from moe_pack.formats import CheckpointError
from moe_pack.runtime import Weights, mlp_input, norm, route_tokens, run_unrouted

MAX_HELD_BYTES = 1 << 29  # of what a pass holds for its tokens in memory


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """All tokens inside a layer, T = sequences times their length, in order.

    `x` float32 [T, d]: hidden states, attention and what every token gets added.   `inputs` float32 [T, d]: what
    router and experts see.   `experts` int64 [T, k], `weights` float32 [T, k]: routes; empty [T, 0] in a layer without.
    An expert that is beyond its capacity has the weight 0, and does not run for that token.
    """

    x: Tensor
    inputs: Tensor
    experts: Tensor
    weights: Tensor

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """The tokens that an expert runs for, rising int64 [n], and the weight of each, float32 [n]."""
        token_idx, place = torch.where((self.experts == expert) & (self.weights != 0))
        return token_idx, self.weights[token_idx, place]


class LayerStates:
    """The hidden states of sequences of S tokens between layers. Owns `folder`.

    Args:    first: the hidden states float32 [S, d] of a sequence before layer 0, by its number.
             sequence_length: of what each stack is given; the caller has checked it.
             folder: made if missing; if a killed pass left its hidden states there, `next_layer` is where to go on.
             held_bytes: of a layer's two arrays in memory; larger ones lie in a mapped file.
             answer: with an encoder, the hidden states before the decoder's first layer, likewise.
             origin: with an encoder, the sequence that a later one branched off from, by its number: both are of one
             text. Where some do.
    """

    def __init__(
        self,
        weights: Weights,
        first: Beginning,
        num_sequences: int,
        sequence_length: int,
        folder: Path,
        device: torch.device,
        held_bytes: int = MAX_HELD_BYTES,
        answer: Beginning | None = None,
        origin: Callable[[int], int] | None = None,
    ) -> None:
        self.spec = weights.spec
        self.num_sequences = self._num_first = num_sequences
        self.sequence_length = sequence_length
        self._weights = weights
        self._first = first
        self._folder = folder
        self._held_bytes = held_bytes
        self._answer = answer
        self._origin = origin
        assert (answer is None) == (self.spec.encoder is None), "a decoder after an encoder begins anew"
        self._turn = 0 if self.spec.encoder is None else self.spec.encoder.num_layers  # the layer before which it does
        self.device = device
        folder.mkdir(exist_ok=True)
        self._attention = SequenceAttention(weights, sequence_length, device)
        self.next_layer = self._resume()

    @torch.inference_mode()
    def enter(self, layer: int, branches: Sequence[tuple[Weights, int]] = ()) -> LayerTokens:
        """All tokens as layer `layer` (the next one) has them before its routed experts.

        Args:    branches: other weights for this layer, and how many of the first sequences go through it with them
                 too; from here on these are sequences of their own, after all others.
        """
        assert layer == self.next_layer, (layer, self.next_layer)
        k = self.spec.router.num_experts_per_tok if layer in self.spec.moe_layers else 0
        ways = [(number, self._weights) for number in range(self.num_sequences)]
        ways += [(number, weights) for weights, number_of in branches for number in range(number_of)]
        num_tokens = len(ways) * self.sequence_length
        mapped = 2 * 4 * num_tokens * self.spec.hidden_size > self._held_bytes
        tokens = LayerTokens(
            x=self.room("x", num_tokens, mapped),
            inputs=self.room("inputs", num_tokens, mapped),
            experts=torch.empty((num_tokens, k), dtype=torch.int64),
            weights=torch.empty((num_tokens, k)),
        )

        def place_sequence(place: int) -> None:
            number, weights = ways[place]
            rows = slice(place * self.sequence_length, (place + 1) * self.sequence_length)
            x, inputs = self.half(layer, number, weights)
            tokens.x[rows], tokens.inputs[rows] = x.cpu(), inputs.cpu()
            if k:
                experts, router_weights = route_tokens(inputs, self._weights, layer)
                tokens.experts[rows], tokens.weights[rows] = experts.cpu(), router_weights.cpu()

        for _ in in_order(place_sequence, range(len(ways)), num_workers(self.spec)):
            pass
        self.num_sequences = len(ways)
        return tokens

    @torch.inference_mode()
    def half(self, layer: int, number: int, weights: Weights) -> tuple[Tensor, Tensor]:
        """A sequence's `x` and `inputs` (`LayerTokens`) in layer `layer`, float32 [S, d] each, with these weights."""
        text = self._text(number) if stack_of(self.spec, layer) else None
        return self.half_of(layer, self.before(number), text, weights)

    @torch.inference_mode()
    def half_of(self, layer: int, x: Tensor, text: Tensor | None, weights: Weights) -> tuple[Tensor, Tensor]:
        """The same of hidden states float32 [S, d].

        Args:    text: for a layer of a decoder after an encoder, the encoder's output float32 [S, d].
        """
        text = None if text is None else text.to(self.device)
        x = self._attention.added(x.to(self.device), weights, layer, text)
        inputs = mlp_input(x, weights, layer)
        unrouted = run_unrouted(inputs, weights, layer)
        return x if unrouted is None else x + unrouted * self.spec.residual_multiplier, inputs

    def add(self, tokens: LayerTokens, token_idx: Tensor, weights: Tensor, output: Tensor) -> None:
        """Adds an expert's output float32 [n, d], weighted, to the hidden states of its tokens."""
        output = output.to("cpu") * (weights * self.spec.residual_multiplier)[:, None]
        tokens.x.index_add_(0, token_idx, output)

    def leave(self, layer: int, tokens: LayerTokens, more: Iterable[Tensor] = ()) -> None:
        """Ends layer `layer`: its hidden states replace those before it on the drive.

        Args:    more: hidden states float32 [n S, d] of sequences that begin here, after all others.
        Raises:  CheckpointError if they are not all numbers.
        """
        # A sum in float64 is a number if and only if all terms are; of pieces, because torch converts them whole.
        if not all(piece.sum(dtype=torch.float64).isfinite() for piece in torch.split(tokens.x, self.sequence_length)):
            raise CheckpointError(f"layer {layer}: hidden states are not finite; is the checkpoint whole?")
        crc32 = num_tokens = 0
        beside = self._folder / "hidden.tmp"
        with beside.open("wb") as file:
            for held in chain((tokens.x,), more):
                raw = held.numpy().reshape(-1).view(np.uint8)
                raw.tofile(file)
                crc32 = zlib.crc32(raw.data, crc32)
                num_tokens += len(held)
        path = self._folder / f"hidden-{layer + 1:03d}-{crc32:08x}.bin"
        beside.rename(path)
        if layer + 1 == self._turn:
            self._text_path = path
        kept = (path, self._text_path if layer + 1 > self._turn > 0 else path)
        for other in self._folder.glob("hidden-*"):
            if other not in kept:
                other.unlink()
        self._path = path
        self.num_sequences = num_tokens // self.sequence_length
        self.next_layer = layer + 1

    def before(self, number: int) -> Tensor:
        """A sequence's hidden states before the next layer, or after the last: float32 [S, d]."""
        if self.next_layer == 0:
            return self._first(number)
        if self.next_layer == self._turn:
            assert self._answer is not None, "a layer at which a decoder begins"
            return self._answer(self._root(number, self._num_first))
        return self._stored(self._path, number)

    def _text(self, number: int) -> Tensor:
        """The encoder's output for a sequence, float32 [S, d]."""
        num_read = self._text_path.stat().st_size // self._sequence_bytes
        read = self._stored(self._text_path, self._root(number, num_read)).to(self.device)
        return norm(read, self._weights, "encoder_norm")

    def _root(self, number: int, num_sequences: int) -> int:
        """Of the first `num_sequences` that one from which a sequence branched off, or itself."""
        while number >= num_sequences:
            assert self._origin is not None, "sequences branch off where the caller says from which"
            number = self._origin(number)
        return number

    def _stored(self, path: Path, number: int) -> Tensor:
        with path.open("rb") as file:
            file.seek(number * self._sequence_bytes)
            raw = np.fromfile(file, np.float32, self._sequence_bytes // 4)
        return torch.from_numpy(raw).view(self.sequence_length, -1)

    def room(self, name: str, num_tokens: int, mapped: bool) -> Tensor:
        """Room for float32 [num_tokens, d] until the next call with this name, not set to anything."""
        shape = (num_tokens, self.spec.hidden_size)
        if not mapped:
            return torch.empty(shape)
        path = self._folder / f"held-{name}.bin"
        path.unlink(missing_ok=True)  # what an earlier layer still has mapped stays its own
        return torch.from_numpy(np.memmap(path, np.float32, "w+", shape=shape))

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder)

    @property
    def _sequence_bytes(self) -> int:
        return 4 * self.sequence_length * self.spec.hidden_size

    def _resume(self) -> int:
        """The layer to begin with: after the one whose hidden states are whole on the drive, else the first."""
        for path in sorted(self._folder.glob("hidden-*.bin"), reverse=True):
            layer = int(path.stem.split("-")[1])
            if not _is_whole(path):
                continue
            if layer >= self._turn > 0:
                text = next(filter(_is_whole, self._folder.glob(f"hidden-{self._turn:03d}-*.bin")), None)
                if text is None:
                    continue
                self._text_path = text
            self._path = path
            self.num_sequences = path.stat().st_size // self._sequence_bytes
            return layer
        return 0


def _is_whole(path: Path) -> bool:
    """Whether a file of hidden states has the checksum in its name."""
    return _crc32(path) == int(path.stem.split("-")[2], 16)


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
