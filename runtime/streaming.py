"""The staged engine: experts stream from the drive into pages, as routers ask for them or are foretold to.

`Residency` decides, `ExpertStore` moves bytes, the kernels compute; here the one's decisions are carried out by the
others. Reads of what this layer needs go first, those of what the next will need fill the rest of the drive's time,
both while what is there is computed. Each expert's output is kept apart, and they are added up in the order of experts:
the answer is the same, bit for bit, whatever was where and came when.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.runtime.expert import run_expert
from moe_pack.runtime.expert_store import ExpertStore
from moe_pack.runtime.kernels import Kernels, Selected
from moe_pack.runtime.pack_weights import PackWeights, tokens_by_expert
from moe_pack.runtime.paged_expert import PagedExpert
from moe_pack.runtime.residency import Compute, Drop, Fetch, Key, Residency

_LOOKED_BACK = 2  # layers whose routes foretellers may see


@dataclass(slots=True)
class PhaseCounts:
    """What happened in prefill, or in decoding: `needed` experts of which `hits` were there or on their way.

    `foretold` experts were read ahead of their layer; `right` of them were then chosen, `abandoned` dropped half read.
    `stall_ns`: how long was waited for reads.   `layers`: that were run.
    """

    needed: int = 0
    hits: int = 0
    foretold: int = 0
    right: int = 0
    abandoned: int = 0
    stall_ns: int = 0
    layers: int = 0


class Foreteller(Protocol):
    """Says which experts a layer is likely to need."""

    def __call__(self, layer_idx: int, x: Tensor, routes: NDArray[np.int64]) -> Sequence[int]:
        """The experts of MoE layer `layer_idx` to read ahead, likeliest first.

        Args:    x: float32 [T, d], the input of the MoE layer before.   routes: [T, p, k], of the p layers before it.
        """
        ...


@dataclass(slots=True)
class _Job:
    """An expert of the layer that runs: its tokens, their weights, and the rows that its outputs stand in."""

    key: Key
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]


class StreamingWeights(PackWeights):
    """A pack's weights inside a budget: the dense part held, experts in the pages of `store`.

    `prefill`, `decode` count what happened. Pack, kernels and store stay the caller's.
    Raises:  PackError, later, when an expert is damaged, its file is cut or its drive fails.
    """

    def __init__(
        self,
        pack: Pack,
        kernels: Kernels | None,
        store: ExpertStore,
        residency: Residency,
        foreteller: Foreteller | None = None,
    ) -> None:
        super().__init__(pack, torch.device("cpu"), kernels)
        self.prefill, self.decode = PhaseCounts(), PhaseCounts()
        self._store = store
        self._residency = residency
        self._foreteller = foreteller
        self._ahead: set[Key] = set()  # foretold, and their layer has not run since
        self._routes: list[NDArray[np.int64]] = []  # of the last layers
        for layer_idx, expert in np.argwhere(residency.is_placed).tolist():
            store.fetch(Key(layer_idx, expert), urgent=False)

    def run_experts(self, layer_idx: int, x: Tensor, experts: Tensor, router_weights: Tensor) -> Tensor:
        """The routed experts of a layer over tokens x float32 [T, d], weighted and added up.

        Args:    experts, router_weights: int64 and float32 [T, k].
        Raises:  PackError if an expert is damaged, or cannot be read.
        """
        counts = self.decode if len(x) == 1 else self.prefill
        jobs = _jobs(layer_idx, experts, router_weights)
        stalled = self._store.stall_ns
        self._settle(layer_idx, jobs, counts)
        layer = _LayerRun(self, self._store, x, experts.numel())
        has_looked = False
        for event in self._residency.walk(layer_idx, list(jobs)):
            if isinstance(event, Compute):
                if not has_looked and not self._residency.num_waiting:
                    has_looked = True
                    self._look_ahead(layer_idx, x, experts, layer, counts)
                counts.hits += event.is_hit
                layer.add(jobs[event.key.expert])
            elif isinstance(event, Fetch):
                self._store.fetch(event.key, urgent=True)
            else:
                layer.drop(event)
        counts.needed += len(jobs)
        counts.layers += 1
        outputs = layer.finish()
        counts.stall_ns += self._store.stall_ns - stalled
        return _added_up(outputs, jobs, len(x))

    def _settle(self, layer_idx: int, jobs: dict[int, _Job], counts: PhaseCounts) -> None:
        """Of what was foretold for this layer: what is chosen goes first, what is neither chosen nor there goes."""
        for key in sorted(key for key in self._ahead if key.layer_idx == layer_idx):
            self._ahead.discard(key)
            if not self._residency.is_resident[key]:
                continue
            if key.expert in jobs:
                counts.right += 1
                self._store.promote(key)
            elif not self._store.is_here(key):
                counts.abandoned += 1
                self._residency.abandon(key)
                self._store.drop(key)

    def _look_ahead(self, layer_idx: int, x: Tensor, experts: Tensor, layer: "_LayerRun", counts: PhaseCounts) -> None:
        if self._foreteller is None or layer_idx == self._last_layer_idx:
            return
        earlier = self._routes[-1:] if layer_idx and self._routes and len(self._routes[-1]) == len(x) else []
        self._routes = [*earlier, experts.numpy()]
        foretold = self._foreteller(layer_idx + 1, x, np.stack(self._routes, axis=1))
        for event in self._residency.ahead(layer_idx + 1, foretold, during=layer_idx):
            if isinstance(event, Drop):
                layer.drop(event)
            elif isinstance(event, Fetch):
                self._store.fetch(event.key, urgent=False)
                self._ahead.add(event.key)
                counts.foretold += 1


class _LayerRun:
    """A layer's experts at work on x [T, d]: gathered, so that those that are there take one call.

    Each expert adds to rows of its own.
    """

    def __init__(self, weights: StreamingWeights, store: ExpertStore, x: Tensor, num_outputs: int) -> None:
        self._weights, self._store, self._x = weights, store, x
        self._outputs = np.zeros((num_outputs, x.shape[1]), np.float32)
        self._whole: list[tuple[_Job, PagedExpert]] = []
        self._in_part: list[tuple[_Job, Selected]] = []

    def add(self, job: _Job) -> None:
        """An expert that is there, or on its way: while it comes, those before it are computed."""
        if not self._store.is_here(job.key):
            self.flush()
        held = self._store.arrive(job.key)
        if held.is_whole:
            self._whole.append((job, held))
            return
        kernels = self._weights.kernels
        assert kernels is not None, "rows are read for the kernels alone"
        selected = kernels.select(self._x[torch.from_numpy(job.tokens)], held.rows)
        neurons = selected.neurons.numpy()
        self._store.running(job.key, len(neurons) / held.layout.num_rows)
        self._store.fetch_records(job.key, neurons, urgent=True)
        self._in_part.append((job, selected))

    def drop(self, event: Drop) -> None:
        """An expert's pages are wanted: before, it is computed, if it was to be."""
        if any(job.key == event.key for job, _ in (*self._whole, *self._in_part)):
            self.flush()
        self._store.drop(event.key)

    def flush(self) -> None:
        """Computes what has been gathered."""
        whole, self._whole = self._whole, []
        in_part, self._in_part = self._in_part, []
        if whole:
            self._run_whole(whole)
        for job, selected in in_part:
            self._run_in_part(job, selected)

    def finish(self) -> NDArray[np.float32]:
        """The outputs, float32 [rows, d], once all are computed."""
        self.flush()
        return self._outputs

    def _run_whole(self, gathered: list[tuple[_Job, PagedExpert]]) -> None:
        kernels = self._weights.kernels
        if kernels is not None:
            works = [(held.rows, job.tokens, job.weights, job.places) for job, held in gathered]
            kernels.experts_apart(self._x, works, self._outputs)
            return
        spec, selector = self._weights.spec, self._weights.selector
        for job, held in gathered:
            x = self._x[torch.from_numpy(job.tokens)]
            y = run_expert(x, held, spec.expert.function, selector, held.rows.threshold)
            self._outputs[job.places] = job.weights[:, None] * y.numpy()

    def _run_in_part(self, job: _Job, selected: Selected) -> None:
        kernels = self._weights.kernels
        assert kernels is not None, "rows are read for the kernels alone"
        held = self._store.arrive(job.key)
        self._store.check_records(job.key, selected.neurons.numpy())
        h = kernels.neurons(self._x[torch.from_numpy(job.tokens)], held.rows, selected)
        y = kernels.accumulate(h, held.rows, selected.neurons)
        self._outputs[job.places] = job.weights[:, None] * y.numpy()


def _jobs(layer_idx: int, experts: Tensor, router_weights: Tensor) -> dict[int, _Job]:
    """What each expert has to do, rising; its outputs stand after those of the experts before it."""
    jobs, first = {}, 0
    for number, tokens, weights in tokens_by_expert(experts, router_weights):
        places = np.arange(first, first + len(tokens))
        jobs[number] = _Job(Key(layer_idx, number), tokens, weights, places)
        first += len(tokens)
    return jobs


def _added_up(outputs: NDArray[np.float32], jobs: dict[int, _Job], num_tokens: int) -> Tensor:
    """y float32 [T, d]: each token's outputs, in the order of experts."""
    y = np.zeros((num_tokens, outputs.shape[1]), np.float32)
    for job in jobs.values():
        y[job.tokens] += outputs[job.places]  # no token has an expert twice
    return torch.from_numpy(y)
