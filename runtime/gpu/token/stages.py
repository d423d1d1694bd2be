"""A model whose layers are divided between GPUs: each *stage* has a run of layers, its device, graphs and caches.

A pass goes through the stages in their order. Hidden states go from one device to the next by a copy, which waits for a
mark of the first device. The host waits once, for the logits of the last. Positions and tokens of sequences are those
of the joined caches (`GpuDecoder.join`); a stage's own caches have the same memory.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_pack import formats
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.model import layers
from moe_pack.runtime.model.compute.weights import Weights
from moe_pack.runtime.model.kv_cache import CachedSequence, KVCache
from moe_pack.runtime.model.passes import Pass


class RowEntry(NamedTuple):
    """A row of a pass of few tokens."""

    token: int
    position: int
    slot: int  # the number of its sequence


class Stage(Protocol):
    """The layers of one device, as `GpuDecoder` runs them; its device has to be torch's current one."""

    device: torch.device
    queues: devices.Queues
    weights: Weights
    begins: bool  # whether its first layer is the model's
    own_sequences: tuple[CachedSequence, ...]  # with caches of these layers alone

    def own_sequence(self, sequence: CachedSequence) -> CachedSequence:
        """Returns a whole model's sequence with the caches of these layers alone."""

    def begin_pass(self) -> None:
        """Begins passes of many tokens."""

    def end_pass(self) -> None:
        """Ends passes of many tokens."""

    def run_own_layers(self, x: Tensor, batch: Pass, ids: Tensor) -> Tensor:
        """Returns the hidden states [T, w] of tokens int64 [T] after these layers."""

    def received(self, num_rows: int) -> Tensor:
        """Returns the memory [T, w] for hidden states of rows from the device before."""

    def launch_rows(self, entries: "Sequence[RowEntry]") -> None:
        """Launches rows through these layers."""

    def hidden(self, num_rows: int) -> Tensor:
        """Returns the hidden states [T, w] of rows after these layers."""

    def wait(self) -> None:
        """Waits for all that was launched."""

    def end_rows(self, num_rows: int) -> None:
        """Counts rows that have run."""


class Stages:
    """The decoders of a model's layers, in the order of their layers; the last one has the head."""

    def __init__(self, decoders: Sequence["Stage"]) -> None:
        self.decoders = tuple(decoders)

    def caches(self, spec: formats.ModelSpec) -> Iterator[KVCache]:
        """Yields the joined cache of all layers for each sequence."""
        for own in zip(*(decoder.own_sequences for decoder in self.decoders), strict=True):
            yield KVCache.joined(spec, [sequence.cache for sequence in own])

    # ---- passes of few tokens ---------------------------------------------------------------------------------------

    def run_rows(self, entries: Sequence[RowEntry]) -> None:
        """Runs rows through all layers, and waits for their logits."""
        number = len(entries)
        self._launch_rows(self.decoders[0], entries)
        for before, after in pairwise(self.decoders):
            _hand_over(before.hidden(number), after.received(number), before, after)
            self._launch_rows(after, entries)
        with self.decoders[-1].queues.current():
            self.decoders[-1].wait()
        for decoder in self.decoders:
            decoder.end_rows(number)

    @staticmethod
    def _launch_rows(decoder: "Stage", entries: Sequence[RowEntry]) -> None:
        with decoder.queues.current():
            decoder.launch_rows(entries)

    # ---- passes of many tokens --------------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the hidden states [T, w] before the first layer, for tokens int64 [T].

        They are zeros if that layer is not the model's: an engine of some layers is measured by itself.
        """
        first = self.decoders[0]
        with first.queues.current():
            if first.begins:
                return layers.embed(ids, first.weights)
            return torch.zeros((len(ids), first.weights.spec.stream_width), device=first.device)

    def begin_pass(self) -> None:
        """Begins passes of many tokens."""
        for decoder in self.decoders:
            with decoder.queues.current():
                decoder.begin_pass()

    def end_pass(self) -> None:
        """Ends passes of many tokens."""
        for decoder in self.decoders:
            with decoder.queues.current():
                decoder.end_pass()

    def run_layers(self, x: Tensor, batch: Pass, ids: Tensor) -> Tensor:
        """Returns the hidden states [T, w] after the last layer, from those before the first."""
        if len(self.decoders) == 1:
            return self.decoders[0].run_own_layers(x, batch, ids)
        before: Stage | None = None
        for decoder in self.decoders:
            if before is not None:
                with decoder.queues.current():
                    received = torch.empty(x.shape, device=decoder.device)
                _hand_over(x, received, before, decoder)
                x = received
            with decoder.queues.current():
                x = decoder.run_own_layers(x, batch.over(decoder.weights, decoder.own_sequence), ids)
            before = decoder
        return x


def _hand_over(x: Tensor, received: Tensor, before: "Stage", after: "Stage") -> None:
    """Launches the copy of hidden states to the next device; what `before` does later waits for its end."""
    with before.queues.current():
        computed = before.queues.mark()
    with after.queues.current():
        after.queues.wait_for(computed)
        received.copy_(x, non_blocking=True)
        copied = after.queues.mark()
    with before.queues.current():
        before.queues.wait_for(copied)
