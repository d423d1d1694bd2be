"""Sequences on their way through a model, one layer at a time: bounded memory, and resumable after any layer.

    for layer in layers:
        tokens = states.enter(layer)         attention, shared and dense experts, routes; for all sequences
        states.add(...)                      the caller runs the routed experts and adds their outputs
        states.leave(layer, tokens)          hidden states go to a file, from which a killed pass goes on

Between layers hidden states are in a file (of which the system keeps in memory what it has room for); within a layer
two float32 values a token and hidden dimension, in memory up to a bound, in a mapped file beyond.
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

from moe_pack.calib.workers import in_order, num_workers
from moe_pack.formats import CheckpointError, ModelSpec, RunError
from moe_pack.runtime import (
    KVCache,
    Rope,
    Weights,
    add_attention,
    mlp_input,
    route_tokens,
    run_unrouted,
)

MAX_HELD_BYTES = 1 << 29  # of what a pass holds for its tokens in memory


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """All tokens inside a layer, T = sequences times their length, in order.

    `x` float32 [T, d]: hidden states, attention and what every token gets added.   `inputs` float32 [T, d]: what
    router and experts see.   `experts` int64 [T, k], `weights` float32 [T, k]: routes; empty [T, 0] in a layer without.
    """

    x: Tensor
    inputs: Tensor
    experts: Tensor
    weights: Tensor

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """The tokens that go to an expert, rising int64 [n], and the weight of each, float32 [n]."""
        token_idx, place = torch.where(self.experts == expert)
        return token_idx, self.weights[token_idx, place]


def check_length(spec: ModelSpec, sequence_length: int) -> None:
    """Refuses sequences longer than the model's positions, and models that no pass here goes through.

    Raises:  RunError.
    """
    if spec.encoder is not None:
        raise RunError(
            "models with an encoder are not measured on text yet; convert with widths (--record-bits), or with a plan "
            "that moe-pack plan --preset edgemoe makes of assumed losses"
        )
    if sequence_length > spec.max_position_embeddings:
        raise RunError(
            f"--sequence-length: found {sequence_length}, expected at most the "
            f"{spec.max_position_embeddings} positions this model has"
        )


class LayerStates:
    """The hidden states of sequences of S tokens between layers. Owns `folder`.

    Args:    first: the hidden states float32 [S, d] of a sequence before layer 0, by its number.
             sequence_length: at most the model's positions.
             folder: made if missing; if a killed pass left its hidden states there, `next_layer` is where to go on.
             held_bytes: of a layer's two arrays in memory; larger ones lie in a mapped file.
    Raises:  RunError for sequences longer than that.
    """

    def __init__(
        self,
        weights: Weights,
        first: Callable[[int], Tensor],
        num_sequences: int,
        sequence_length: int,
        folder: Path,
        device: torch.device,
        held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self.spec = weights.spec
        check_length(self.spec, sequence_length)
        self.num_sequences = num_sequences
        self.sequence_length = sequence_length
        self._weights = weights
        self._first = first
        self._folder = folder
        self._held_bytes = held_bytes
        self.device = device
        folder.mkdir(exist_ok=True)
        positions = torch.arange(self.sequence_length, device=device)
        self._angles = Rope(self.spec.rotation, device)(positions, self.sequence_length)
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
        x = self.before(number).to(self.device)
        cache = KVCache(self.spec, self.sequence_length, self.device, num_layers=1).layer(0)
        x = add_attention(x, weights, layer, cache, self._angles)
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
        for other in self._folder.glob("hidden-*"):
            if other != path:
                other.unlink()
        self._path = path
        self.num_sequences = num_tokens // self.sequence_length
        self.next_layer = layer + 1

    def before(self, number: int) -> Tensor:
        """A sequence's hidden states before the next layer, or after the last: float32 [S, d]."""
        if self.next_layer == 0:
            return self._first(number)
        with self._path.open("rb") as file:
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
            layer, crc32 = path.stem.split("-")[1:]
            if _crc32(path) == int(crc32, 16):
                self._path = path
                self.num_sequences = path.stat().st_size // self._sequence_bytes
                return int(layer)
        return 0


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
