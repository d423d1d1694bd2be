"""The loop that offloads: experts come from the disk into pages when routers choose them, or are predicted to.

`ExpertCache` decides, `ExpertStore` moves bytes, its operations compute; this file carries out the decisions. Reads of what this layer needs go first, those of what the next will need fill the rest of the drive's time,
both while what is there is computed. Each expert's output is kept apart, and they are added up in the order of experts:
the answer is the same, bit for bit, whatever was where and came when.
"""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack, option
from moe_pack.formats.spec import first_moe_layers
from moe_pack.runtime.cpu import SelectedNeurons
from moe_pack.runtime.model import ExpertRunner, Operations, PackWeights, PartialState, tokens_by_expert
from moe_pack.runtime.model.layer import router_logits
from moe_pack.runtime.model.router import expert_scores
from moe_pack.runtime.model.router import router_weights as weights_of
from moe_pack.runtime.offload.cache import ComputeEvent, EvictEvent, ExpertCache, ExpertKey, FetchEvent
from moe_pack.runtime.offload.expert_store import ExpertStore, PagedExpert, PagedWork, Trace
from moe_pack.runtime.offload.prefetch import PredictionInput, Prefetcher
from moe_pack.runtime.offload.record import Recorder
from moe_pack.runtime.offload.split import substitute


@dataclass(slots=True)
class PhaseCounts:
    """What happened in prefill, or in decoding: `needed` experts of which `hits` were there or on their way.

    `foretold` experts were read ahead of their layer; `right` of them were then chosen, `abandoned` dropped half read.
    `in_part`: chosen, and not all was there or asked for; for `rows_prefetched` of these rows were foretold. Where that
    did not bring all, of the `running` neurons `running_predicted` were foretold.   `substituted`: that gave way to
    others.   `stall_ns`: how long was waited for reads.   `asked_bytes`: of blocks that were to be read, whole ones.
    `tokens`, `layers`: that were run.
    """

    needed: int = 0
    hits: int = 0
    prefetched: int = 0
    prefetched_chosen: int = 0
    prefetched_abandoned: int = 0
    in_part: int = 0
    rows_prefetched: int = 0
    running: int = 0
    running_predicted: int = 0
    substituted: int = 0
    stall_ns: int = 0
    asked_bytes: int = 0
    tokens: int = 0
    layers: int = 0


@dataclass(slots=True)
class ExpertJob:
    """An expert of the layer that runs: its tokens, their weights, and the rows that its outputs stand in."""

    key: ExpertKey
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Approximations:
    """What changes answers, and is off unless asked for.

    `substitute`: alpha of importance Algorithm 1: experts that hardly count give way to ones in fast memory.
    `is_predicted_enough`: of an expert whose rows were foretold only those run that are there when they have come.
    """

    substitute: float | None = field(
        default=None,
        metadata=option(
            "--substitute",
            least=0,
            most=1,
            metavar="ALPHA",
            mark="offload",
            help="CHANGES THE ANSWER: experts that hardly count give way to similar ones in memory.  [default: off]",
        ),
    )
    is_predicted_enough: bool = field(
        default=False,
        metadata=option(
            "--trust-prediction",
            mark="offload",
            help="CHANGES THE ANSWER: where single rows are read, only those that were foretold run.",
        ),
    )


EXACT = Approximations()
_CPU = torch.device("cpu")


class ExpertStorage(Protocol):
    """Experts in pages of fast memory, or on their way: `ExpertStore`, or a device's."""

    stall_ns: int
    asked_bytes: int

    @property
    def peak_pages(self) -> int:
        """The most pages that experts had at once."""
        ...

    def fetch(self, key: ExpertKey, urgent: bool) -> None:
        """Gives an expert its pages and begins to bring it."""
        ...

    def evict(self, key: ExpertKey) -> None:
        """Takes an expert's pages back."""
        ...

    def stop(self, key: ExpertKey) -> None:
        """Ends what is on its way of an expert, which stays with what it has."""
        ...

    def promote(self, key: ExpertKey) -> None:
        """Brings an expert, whose turn it was not, before all that is not needed yet."""
        ...

    def is_here(self, key: ExpertKey) -> bool:
        """Whether nothing of what was asked for of an expert is still to come."""
        ...

    def fetch_records(self, key: ExpertKey, neurons: NDArray[np.int32], urgent: bool) -> None:
        """Begins to bring the records of some neurons, or all it lacks."""
        ...


class LayerRun(Protocol):
    """A layer's experts at work: gathered, so that those that are there are computed together."""

    def fetch(self, key: ExpertKey) -> None:
        """An expert of this layer is needed that has just got its pages."""
        ...

    def add(self, job: ExpertJob) -> None:
        """An expert to run: once all have been added, or its pages are wanted."""
        ...

    def evict(self, event: EvictEvent) -> None:
        """An expert's pages are wanted: before, it is computed, if it was to be."""
        ...

    def compute_gathered(self) -> None:
        """Computes what has been added and was there."""
        ...

    def flush(self) -> None:
        """Computes all that has been added."""
        ...

    def added_up(self) -> Tensor:
        """What has been computed: y float32 [T, d], each token's outputs in the order of experts."""
        ...


class OffloadedWeights(PackWeights, ExpertRunner):
    """A pack's weights inside a budget: the dense part held, experts in the pages of `store`.

    `prefill`, `decode` count what happened. Pack, operations, store and trace stay the caller's.
    Args:    reuses_selector: whether the next layer's selectors foretell, on this layer's input, which neurons run.
             scores_matter: whether the expert_cache, or its recorder, wants routers' scores.
    Raises:  PackError, later, when an expert is damaged, its file is cut or its drive fails.
    """

    def __init__(
        self,
        pack: Pack,
        operations: Operations,
        store: ExpertStorage,
        expert_cache: ExpertCache,
        *,
        device: torch.device = _CPU,
        scores_matter: bool = False,
        reuses_selector: bool = False,
        approximations: Approximations = EXACT,
        recorder: Recorder | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(pack, device, operations)
        self.prefill, self.decode = PhaseCounts(), PhaseCounts()
        self.prefetcher: Prefetcher | None = None  # a prediction may want these weights, so that it comes later
        self.store, self.trace, self.approximations = store, trace, approximations
        self._expert_cache, self._recorder = expert_cache, recorder
        self._scores_matter = scores_matter
        self._reuses_selector = reuses_selector
        self._ahead: set[ExpertKey] = set()  # foretold, and their layer has not run since
        self._rows_wanted: list[ExpertKey] = []  # foretold, and their rows can be once their selectors are there
        self._rows_ahead: dict[ExpertKey, NDArray[np.int32]] = {}  # likewise, where only rows were: which
        self.predicted: dict[ExpertKey, NDArray[np.int32]] = {}  # of the layer that runs: rows that were foretold
        self._routes: list[NDArray[np.int64]] = []  # of the last layers
        self._last_layer_idx = len(pack.layout.experts) - 1
        self._first_layers = frozenset(
            first_moe_layers(self.spec)
        )  # of a stack; the stack before tells nothing of them
        for layer_idx, expert in np.argwhere(expert_cache.is_placed).tolist():
            store.fetch(ExpertKey(layer_idx, expert), urgent=False)

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """The routed experts of a layer over tokens x float32 [T, d], weighted and added up.

        Args:    experts, router_weights: int64 and float32 [T, k].
        Raises:  PackError if an expert is damaged, or cannot be read.
        """
        counts = self.decode if len(x) == 1 else self.prefill
        stalled, asked = self.store.stall_ns, self.store.asked_bytes
        experts, router_weights = self._told(x, experts, router_weights)
        scores = None
        if self._scores_matter or self.approximations.substitute is not None:
            experts, router_weights, scores = self._scored(layer_idx, x, experts, router_weights, counts)
        jobs = _jobs(layer_idx, experts, router_weights)
        if self._recorder is not None:
            self._recorder.routed(layer_idx, experts.numpy())
        self._settle(layer_idx, jobs, counts)
        run = self._new_run(layer_idx, x, jobs, counts)
        self._walk(layer_idx, x, experts, scores, jobs, run, counts, partial_state)
        counts.needed += len(jobs)
        self.bytes_read += sum(self._pack.layout.experts[layer_idx][number].num_bytes for number in jobs)
        counts.layers += 1
        counts.tokens += len(x) * (layer_idx in self._first_layers)
        counts.stall_ns += self.store.stall_ns - stalled
        counts.asked_bytes += self.store.asked_bytes - asked
        return run.added_up()

    def _told(self, x: Tensor, experts: Tensor, router_weights: Tensor) -> tuple[Tensor, Tensor]:
        """What the router chose, on the host."""
        return experts, router_weights

    def _new_run(self, layer_idx: int, x: Tensor, jobs: dict[int, ExpertJob], counts: PhaseCounts) -> LayerRun:
        assert isinstance(self.store, ExpertStore), "the host's"
        return CpuLayerRun(self, self.store, x, jobs, counts)

    def _walk(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        scores: NDArray[np.float32] | None,
        jobs: dict[int, ExpertJob],
        run: LayerRun,
        counts: PhaseCounts,
        partial_state: PartialState | None,
    ) -> None:
        """Carries out what the expert_cache decides, and looks ahead once all that this layer needs is on its way."""
        waits_for_hits = self.prefetcher is not None and self.prefetcher.needs_partial
        is_last = layer_idx == self._last_layer_idx or layer_idx + 1 in self._first_layers
        has_looked = self.prefetcher is None or is_last

        def look(is_hit: bool) -> bool:
            if has_looked or self._expert_cache.num_waiting or (is_hit and waits_for_hits):
                return has_looked
            partial = None
            if waits_for_hits and partial_state is not None:
                run.compute_gathered()
                partial = partial_state(run.added_up())
            self._look_ahead(layer_idx, PredictionInput(x, self._last_routes(layer_idx, experts), partial), run, counts)
            return True

        with closing(self._expert_cache.schedule(layer_idx, list(jobs), scores)) as events:
            for event in events:
                if isinstance(event, ComputeEvent):
                    has_looked = look(event.is_hit)
                    counts.hits += event.is_hit
                    run.add(jobs[event.key.expert])
                    self._look_for_rows(x)
                elif isinstance(event, FetchEvent):
                    run.fetch(event.key)
                else:
                    run.evict(event)
        look(is_hit=False)
        run.flush()
        self._look_for_rows(x)

    def _scored(
        self, layer_idx: int, x: Tensor, experts: Tensor, router_weights: Tensor, counts: PhaseCounts
    ) -> tuple[Tensor, Tensor, NDArray[np.float32]]:
        """Experts and weights, with substitutes for a single token where that is asked for; mean scores float32 [E]."""
        spec = self.spec.router
        logits = router_logits(x, self, self.spec.moe_layers[layer_idx])
        scores = expert_scores(logits, spec).cpu().numpy()
        alpha = self.approximations.substitute
        if alpha is not None and len(x) == 1:
            chosen = substitute(scores, experts.numpy(), self._expert_cache.is_resident[layer_idx], alpha)
            num_replaced = int((chosen != experts.numpy()).sum())
            counts.substituted += num_replaced
            if num_replaced:  # else the weights stay the router's own, to the bit
                experts = torch.from_numpy(chosen)
                router_weights = weights_of(logits, experts.to(logits.device), spec).cpu()
        return experts, router_weights, scores.mean(axis=0)

    def _settle(self, layer_idx: int, jobs: dict[int, ExpertJob], counts: PhaseCounts) -> None:
        """Of what was foretold for this layer: what is chosen goes first, what is neither chosen nor there goes."""
        self._rows_wanted.clear()
        for key in sorted(key for key in self._ahead if key.layer_idx == layer_idx):
            self._ahead.discard(key)
            if not self._expert_cache.is_resident[key]:
                continue
            if key.expert in jobs:
                counts.prefetched_chosen += 1
                self.store.promote(key)
            elif key not in self._rows_ahead and not self.store.is_here(key):
                counts.prefetched_abandoned += 1
                self._expert_cache.abandon(key)
                self.store.evict(key)
        self.predicted.clear()
        for key in sorted(key for key in self._rows_ahead if key.layer_idx == layer_idx):
            neurons = self._rows_ahead.pop(key)
            if not self._expert_cache.is_resident[key]:
                continue
            if key.expert in jobs:
                self.predicted[key] = neurons
                counts.in_part += 1
                counts.rows_prefetched += 1
                self.store.promote(key)
            elif not self.store.is_here(key):
                self.store.stop(key)

    def _last_routes(self, layer_idx: int, experts: Tensor) -> NDArray[np.int64]:
        """The routes int64 [T, p, k] of this layer and, where it has one, the layer before."""
        before = [] if layer_idx in self._first_layers else self._routes[-1:]
        self._routes = [routes for routes in before if len(routes) == len(experts)] + [experts.numpy()]
        return np.stack(self._routes, axis=1)

    def _look_ahead(self, layer_idx: int, observed: PredictionInput, run: LayerRun, counts: PhaseCounts) -> None:
        assert self.prefetcher is not None, "asked only then"
        foretold = self.prefetcher.foretold(layer_idx + 1, observed)
        if not len(foretold):
            return
        for event in self._expert_cache.prefetch(layer_idx + 1, foretold, during=layer_idx):
            if isinstance(event, EvictEvent):
                run.evict(event)
            elif isinstance(event, FetchEvent):
                self.store.fetch(event.key, urgent=False)
                self._ahead.add(event.key)
                counts.prefetched += 1
        if self._reuses_selector and len(observed.x) == 1:
            keys = [ExpertKey(layer_idx + 1, expert) for expert in foretold]
            self._rows_wanted = [key for key in keys if self._expert_cache.is_resident[key]]

    def _look_for_rows(self, x: Tensor) -> None:
        """Reads ahead the rows that foretold experts, of which not all is there, would run on this layer's input.

        Their selectors may be on their way: those that have come since are looked at each time.
        """
        keys = [key for key in self._rows_wanted if self.store.is_here(key)]
        if not keys:
            return
        self._rows_wanted = [key for key in self._rows_wanted if key not in keys]
        for key, neurons in self._neurons_ahead(x, keys):
            self.store.fetch_records(key, neurons, urgent=False)
            self._rows_ahead[key] = neurons

    def _neurons_ahead(self, x: Tensor, keys: Sequence[ExpertKey]) -> list[tuple[ExpertKey, NDArray[np.int32]]]:
        """Of experts whose selectors have come, and not all else: which neurons would run on x."""
        assert isinstance(self.store, ExpertStore), "the host's"
        found = []
        for key in keys:
            held = self.store.arrive(key)
            if not held.is_whole:
                assert self.store.by_rows is not None, "experts are read whole"
                found.append((key, self.store.by_rows.select(x, held).neurons.numpy()))
        return found


class CpuLayerRun:
    """A layer's experts at work on x [T, d]: gathered, so that those that are there take one call.

    Each expert adds to rows of its own in `outputs`, float32 [rows, d].
    """

    def __init__(
        self, weights: OffloadedWeights, store: ExpertStore, x: Tensor, jobs: dict[int, ExpertJob], counts: PhaseCounts
    ) -> None:
        num_outputs = sum(len(job.tokens) for job in jobs.values())
        self.outputs = np.zeros((num_outputs, x.shape[1]), np.float32)
        self._weights, self._store, self._x, self._jobs, self._counts = weights, store, x, jobs, counts
        self._whole: list[tuple[ExpertJob, PagedExpert]] = []
        self._in_part: list[tuple[ExpertJob, SelectedNeurons]] = []
        self._late: list[ExpertJob] = []  # were not there yet

    def fetch(self, key: ExpertKey) -> None:
        """An expert that has got its pages: it is read before all that is not needed yet."""
        self._store.fetch(key, urgent=True)

    def add(self, job: ExpertJob) -> None:
        """An expert to run: once all have been added, or its pages are wanted; those that are there first."""
        if self._store.is_here(job.key):
            self._gather(job)
        else:
            self._late.append(job)

    def _gather(self, job: ExpertJob) -> None:
        """Takes an expert in that is there, or waits for it."""
        held = self._store.arrive(job.key)
        if held.is_whole:
            self._whole.append((job, held))
            return
        assert self._store.by_rows is not None, "experts are read whole"
        selected = self._store.by_rows.select(self._x[torch.from_numpy(job.tokens)], held)
        neurons = selected.neurons.numpy()
        self._store.running(job.key, len(neurons) / held.layout.num_rows)
        foretold = self._weights.predicted.get(job.key)
        count_rows(self._counts, neurons, foretold)
        if self._weights.approximations.is_predicted_enough and foretold is not None:
            selected = SelectedNeurons(selected.a, selected.runs, torch.from_numpy(held.present(neurons)))
        else:
            self._store.fetch_records(job.key, neurons, urgent=True)
        self._in_part.append((job, selected))

    def evict(self, event: EvictEvent) -> None:
        """An expert's pages are wanted: before, it is computed, if it was to be."""
        if any(job.key == event.key for job in (*self._late, *(job for job, _ in (*self._whole, *self._in_part)))):
            self.flush()
        self._store.evict(event.key)

    def flush(self) -> None:
        """Computes what has been added: what is there, then what comes, as much at once as has come."""
        self.compute_gathered()
        while self._late:
            first, *others = self._late
            self._late = []
            self._gather(first)  # waits
            for job in others:
                self.add(job)
            self.compute_gathered()

    def compute_gathered(self) -> None:
        """Computes what has been added and was there."""
        if not (self._whole or self._in_part):
            return
        trace = self._weights.trace
        num_experts = len(self._whole) + len(self._in_part)
        with nullcontext() if trace is None else trace.computing("experts", number=num_experts):
            self._compute()

    def _compute(self) -> None:
        whole, self._whole = self._whole, []
        in_part, self._in_part = self._in_part, []
        if whole:
            works = [PagedWork(held, job.tokens, job.weights, job.places) for job, held in whole]
            self._store.operations.run(self._x, works, self.outputs)
        for job, selected in in_part:
            self._run_in_part(job, selected)

    def _run_in_part(self, job: ExpertJob, selected: SelectedNeurons) -> None:
        assert self._store.by_rows is not None, "experts are read whole"
        held = self._store.arrive(job.key)
        self._store.check_records(job.key, selected.neurons.numpy())
        y = self._store.by_rows.run_rows(self._x[torch.from_numpy(job.tokens)], held, selected)
        self.outputs[job.places] = job.weights[:, None] * y.numpy()

    def added_up(self) -> Tensor:
        """y float32 [T, d]: each token's outputs so far, in the order of experts."""
        y = np.zeros((len(self._x), self.outputs.shape[1]), np.float32)
        for job in self._jobs.values():
            y[job.tokens] += self.outputs[job.places]  # no token has an expert twice
        return torch.from_numpy(y)


def _jobs(layer_idx: int, experts: Tensor, router_weights: Tensor) -> dict[int, ExpertJob]:
    """What each expert has to do, rising; its outputs stand after those of the experts before it."""
    jobs, first = {}, 0
    for number, tokens, weights in tokens_by_expert(experts, router_weights):
        places = np.arange(first, first + len(tokens))
        jobs[number] = ExpertJob(ExpertKey(layer_idx, number), tokens, weights, places)
        first += len(tokens)
    return jobs


def count_rows(counts: PhaseCounts, neurons: NDArray[np.int32], foretold: NDArray[np.int32] | None) -> None:
    """Counts an expert that was there in part, whose `neurons` run; None foretold: none of its rows were."""
    if foretold is None:
        counts.in_part += 1
        return
    counts.running += len(neurons)
    counts.running_predicted += len(np.intersect1d(neurons, foretold, assume_unique=True))
