"""The loop that offloads: experts come from the disk into pages when a router chooses them, or when they are predicted.

`ExpertCache` decides, `ExpertStore` moves bytes, its operations compute; this file carries out the decisions. Reads
that the running layer needs go first, prefetches for the next layer fill the rest of the disk's time, and resident
experts are computed meanwhile. Each expert's output has rows of its own, which are added in the order of experts:
the answer is the same to the bit, whatever was resident and whenever the rest came.
"""

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import model
from moe_pack.runtime.cpu import SelectedNeurons
from moe_pack.runtime.model.compute.router import expert_scores
from moe_pack.runtime.model.compute.weights import from_experts, to_experts
from moe_pack.runtime.model.layers import expert_inputs, experts_of_tokens, router_logits, weights_of_experts
from moe_pack.runtime.offload import cache, expert_store, presets
from moe_pack.runtime.offload.expert_store import ExpertJob, PagedExpert
from moe_pack.runtime.offload.prefetch import PredictionInput, Prefetcher, most_chosen

if TYPE_CHECKING:
    from moe_pack.runtime.offload.record import Recorder


@dataclass(slots=True)
class PhaseCounts:
    """The counts of prefill, or of decode."""

    needed: int = 0  # experts that routers chose
    hits: int = 0  # needed experts that were resident or on their way
    prefetched: int = 0  # experts that were fetched before their layer
    prefetched_chosen: int = 0  # prefetched experts that the router chose
    prefetched_abandoned: int = 0  # prefetched experts that were evicted half read
    in_part: int = 0  # chosen experts of which not everything was resident or requested
    rows_prefetched: int = 0  # experts `in_part` of which predicted rows were
    running: int = 0  # neurons of experts `in_part`, if more rows ran than the predicted ones
    running_predicted: int = 0  # running neurons that were predicted
    substituted: int = 0  # experts that were replaced by others
    mispredicted: int = 0  # experts that ran because they were predicted, where the router chose others
    stall_ns: int = 0  # time that the computation waited for reads
    asked_bytes: int = 0  # of requested blocks
    tokens: int = 0
    layers: int = 0


class OffloadedWeights(model.PackWeights, model.ExpertRunner):
    """A pack's weights inside a budget: the dense part in memory, experts in the pages of `store`.

    The caller owns pack, operations, store and trace.
    Args:    scores_matter: whether the cache's policy or its recorder needs the routers' scores.   reuses_selector:
             whether the next layer's selectors predict, from this layer's input, which neurons run.
    Raises:  PackError, later, if an expert is damaged, its file is truncated or its disk fails.
    """

    def __init__(
        self,
        pack: Pack,
        operations: model.Operations,
        store: expert_store.ExpertStore,
        expert_cache: cache.ExpertCache,
        *,
        scores_matter: bool = False,
        reuses_selector: bool = False,
        approximations: presets.Approximations = presets.EXACT,
        recorder: "Recorder | None" = None,
        trace: expert_store.Trace | None = None,
    ) -> None:
        super().__init__(pack, torch.device("cpu"), operations)
        self.prefill, self.decode = PhaseCounts(), PhaseCounts()
        self.prefetcher: Prefetcher | None = None  # set later: a prediction may need these weights
        self.store, self.trace, self.approximations = store, trace, approximations
        self._expert_cache, self.recorder = expert_cache, recorder
        self._scores_matter = scores_matter
        self._reuses_selector = reuses_selector
        self._prefetched: set[cache.ExpertKey] = set()  # since the last run of their layer
        self._rows_pending: list[cache.ExpertKey] = []  # predicted: their rows will be, after their selectors arrive
        self._prefetched_rows: dict[cache.ExpertKey, NDArray[np.int32]] = {}  # since the last run of their layer
        self.predicted: dict[cache.ExpertKey, NDArray[np.int32]] = {}  # the predicted rows of the layer that runs
        self._expected: tuple[int, list[int]] | None = None  # the next layer, and experts predicted for its one token
        self._routes: list[NDArray[np.int64]] = []  # of the last layers
        self._named: dict[int, NDArray[np.int64]] = {}  # by the layers of the pass whose experts a table names
        self._num_last: int | None = None  # tokens of the pass in the model's last layer; None: all
        self._last_layer_idx = len(pack.layout.experts) - 1
        # The first layer of a stack is not predicted: the stack before says nothing about it.
        self._first_layers = frozenset(first_moe_layers(self.spec))
        for layer_idx, expert in np.argwhere(expert_cache.is_placed).tolist():
            store.fetch(cache.ExpertKey(layer_idx, expert), urgent=False)
        for key in expert_cache.initial:
            store.fetch(key, urgent=False)
        self._initial = set(expert_cache.initial)  # until their layer runs or they are evicted

    def begin_pass(self, ids: Tensor, num_last: int) -> None:
        """Prefetches the first layer's experts if a table names them."""
        self._num_last, self._named = num_last, {}
        if self.recorder is not None:
            self.recorder.begin_pass()
        if self.prefetcher is None:
            return
        for layer_idx, layer in enumerate(self.spec.moe_layers):
            if layer in self.spec.router.table_layers:
                named = experts_of_tokens(ids, self, layer).numpy()
                self._named[layer_idx] = named[-self._num_tokens(layer_idx, ids) :]
        if 0 in self._named:
            self.store.shares.is_decoding = is_decoding = self._is_decoding(len(ids))
            counts = self.decode if is_decoding else self.prefill
            experts, asked = most_chosen(self._named[0], self.spec.router.num_experts), self.store.asked_bytes
            self._fetch_ahead(0, experts, 0, self.store.evict, counts)
            counts.asked_bytes += self.store.asked_bytes - asked

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: model.PartialState | None = None,
    ) -> Tensor:
        """Returns the sum of the routed experts of a layer, weighted: float32 [T, d] for x float32 [T, d].

        Args:    experts, router_weights: int64 and float32 [T, k].
        Raises:  PackError if an expert is damaged, or cannot be read.
        """
        is_decoding = self._is_decoding(len(x))
        counts = self.decode if is_decoding else self.prefill
        self.store.shares.is_decoding = is_decoding
        stalled, asked = self.store.stall_ns, self.store.asked_bytes
        scores, predicted = None, self._predicted_for(layer_idx, len(x))
        if self._scores_matter or self.approximations.substitute is not None or predicted is not None:
            experts, router_weights, scores = self._scored(layer_idx, x, experts, router_weights, predicted, counts)
        # Experts get these; routers and predictors get x.
        inputs, router_weights = expert_inputs(x, router_weights, self, layer_idx)
        inputs = to_experts(inputs, self, layer_idx)
        jobs = _jobs(layer_idx, experts, router_weights)
        if self.recorder is not None:
            self.recorder.routed(layer_idx, experts.numpy(), is_decoding)
        if self.observer is not None:
            self.observer.routed(layer_idx, experts.numpy())
        self._settle(layer_idx, jobs, counts)
        run = LayerRun(self, self.store, inputs, jobs, counts)
        self._run_schedule(layer_idx, x, experts, scores, jobs, run, counts, partial_state)
        counts.needed += len(jobs)
        self.bytes_read += sum(self._pack.layout.experts[layer_idx][number].num_bytes for number in jobs)
        counts.layers += 1
        counts.tokens += len(x) * (layer_idx in self._first_layers)
        counts.stall_ns += self.store.stall_ns - stalled
        counts.asked_bytes += self.store.asked_bytes - asked
        return from_experts(run.added_up(), self, layer_idx)

    def _run_schedule(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        scores: NDArray[np.float32] | None,
        jobs: dict[int, ExpertJob],
        run: "LayerRun",
        counts: PhaseCounts,
        partial_state: model.PartialState | None,
    ) -> None:
        """Carries out the cache's decisions, and prefetches once everything that this layer needs is on its way."""
        is_last = layer_idx == self._last_layer_idx or layer_idx + 1 in self._first_layers
        is_prefetch_done = self.prefetcher is None or is_last
        ahead = x[-self._num_tokens(layer_idx + 1, x) :]  # the tokens that the next layer runs
        # Of a prompt's last token alone no partial state is computed: it would take an attention of all tokens.
        waits_for_hits = (
            self.prefetcher is not None
            and not is_last
            and len(ahead) == len(x)
            and self.prefetcher.needs_partial(layer_idx + 1, len(x))
        )

        def prefetch(is_hit: bool) -> bool:
            if is_prefetch_done or self._expert_cache.num_waiting or (is_hit and waits_for_hits):
                return is_prefetch_done
            partial = None
            if waits_for_hits and partial_state is not None:
                run.compute_gathered()
                partial = partial_state(from_experts(run.added_up(), self, layer_idx))
            routes = self._last_routes(layer_idx, experts)[-len(ahead) :]
            num_layers, k = 1 + (layer_idx not in self._first_layers), self.spec.router.num_experts_per_tok
            lacks_routes = routes.shape[1:] != (num_layers, k)
            observed = PredictionInput(ahead, routes, partial, self._named.get(layer_idx + 1), lacks_routes)
            self._prefetch_experts(layer_idx, observed, run, counts)
            return True

        with closing(self._expert_cache.schedule(layer_idx, list(jobs), scores)) as events:
            for event in events:
                if isinstance(event, cache.ComputeEvent):
                    is_prefetch_done = prefetch(event.is_hit)
                    counts.hits += event.is_hit
                    run.add(jobs[event.key.expert])
                elif isinstance(event, cache.FetchEvent):
                    self._note_fetch(event.key)
                    self.store.fetch(event.key, urgent=True)
                else:
                    run.evict(event.key)
        prefetch(is_hit=False)
        run.request_rows()  # before those of the next layer
        self._prefetch_rows(layer_idx + 1, ahead)
        run.flush()
        self._prefetch_rows(layer_idx + 1, ahead)

    def resident_experts(self) -> NDArray[np.bool_]:
        """Returns a copy of which experts are in fast memory now: bool [L, E]. May be called from any thread."""
        return self._expert_cache.is_resident.copy()

    def _note_fetch(self, key: cache.ExpertKey) -> None:
        if self.observer is not None:
            self.observer.fetched(key.layer_idx, key.expert)

    def _scored(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        predicted: list[int] | None,
        counts: PhaseCounts,
    ) -> tuple[Tensor, Tensor, NDArray[np.float32]]:
        """Returns experts, weights and mean scores float32 [E]; in decode with the replacements asked for.

        Args:    predicted: the experts that run in any case; None if the router chooses.
        """
        spec = self.spec.router
        layer = self.spec.moe_layers[layer_idx]
        logits = router_logits(x, self, layer)
        scores = expert_scores(logits, spec).numpy()
        alpha, chosen = self.approximations.substitute, experts.numpy()
        if predicted is not None:
            num_wrong = len(set(predicted) - set(chosen[0].tolist()))
            counts.mispredicted += num_wrong
            if num_wrong:
                chosen = np.array([sorted(predicted, key=lambda expert: -scores[0, expert])])  # best first
        elif alpha is not None and self._is_decoding(len(x)) and layer not in spec.table_layers:
            # Where a table names the experts, scores say nothing of which may replace another.
            from moe_pack.runtime.offload.split import substitute

            chosen = substitute(scores, chosen, self._expert_cache.is_resident[layer_idx], alpha)
            counts.substituted += int((chosen != experts.numpy()).sum())
        if (chosen != experts.numpy()).any():  # otherwise the weights stay the router's, to the bit
            experts = torch.from_numpy(chosen)
            router_weights = weights_of_experts(logits, experts, self, layer)
        return experts, router_weights, scores.mean(axis=0)

    def _num_tokens(self, layer_idx: int, tokens: Tensor) -> int:
        """Returns how many of a pass's tokens [T, ...], the last, a MoE layer runs."""
        is_last = self.spec.moe_layers[layer_idx : layer_idx + 1] == (self.spec.num_hidden_layers - 1,)
        return len(tokens) if self._num_last is None or not is_last else min(self._num_last, len(tokens))

    def _is_decoding(self, num_tokens: int) -> bool:
        return self.is_batch or (num_tokens == 1 and not self.is_prompt)

    def _predicted_for(self, layer_idx: int, num_tokens: int) -> list[int] | None:
        """Returns as many predicted experts as a token uses if they are to run; None if the layer's router chooses."""
        expected, self._expected = self._expected, None
        if not self.approximations.runs_predicted or expected is None or num_tokens > 1 or expected[0] != layer_idx:
            return None
        k = self.spec.router.num_experts_per_tok
        return expected[1][:k] if len(expected[1]) >= k else None

    def _settle(self, layer_idx: int, jobs: dict[int, ExpertJob], counts: PhaseCounts) -> None:
        """Ends the prefetches of this layer: those of chosen experts become urgent, the other unfinished ones end."""
        self._rows_pending.clear()
        for key in [key for key in self._initial if key.layer_idx == layer_idx]:
            # Never abandoned: what is resident must not depend on how fast the disk is.
            self._initial.discard(key)
            if key.expert in jobs and self._expert_cache.is_resident[key] and key not in self._prefetched:
                self.store.promote(key)
        for key in sorted(key for key in self._prefetched if key.layer_idx == layer_idx):
            self._prefetched.discard(key)
            if not self._expert_cache.is_resident[key]:
                continue
            if key.expert in jobs:
                counts.prefetched_chosen += 1
                self.store.promote(key)
            elif key not in self._prefetched_rows and not self.store.is_here(key):
                counts.prefetched_abandoned += 1
                self._expert_cache.abandon(key)
                self.store.evict(key)
        self.predicted.clear()
        for key in sorted(key for key in self._prefetched_rows if key.layer_idx == layer_idx):
            neurons = self._prefetched_rows.pop(key)
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
        """Returns the routes int64 [T, p, k] of this layer and, if it has one, of the layer before.

        A GPU that computes some of a token's experts by itself leaves another number of them to each layer.
        """
        before = [] if layer_idx in self._first_layers else self._routes[-1:]
        self._routes = [routes for routes in before if routes.shape == experts.shape] + [experts.numpy()]
        return np.stack(self._routes, axis=1)

    def _prefetch_experts(
        self, layer_idx: int, observed: PredictionInput, run: "LayerRun", counts: PhaseCounts
    ) -> None:
        assert self.prefetcher is not None, "called only if there is one"
        predicted = self.prefetcher.predict(layer_idx + 1, observed)
        if not len(predicted):
            return
        is_alone = len(observed.x) == 1 and not self.is_prompt  # what is trusted is trusted in decode
        if is_alone:
            self._expected = (layer_idx + 1, list(predicted))
        self._fetch_ahead(layer_idx + 1, predicted, layer_idx, run.evict, counts)
        if self._reuses_selector and is_alone:
            keys = [cache.ExpertKey(layer_idx + 1, expert) for expert in predicted]
            self._rows_pending = [key for key in keys if self._expert_cache.is_resident[key]]

    def _fetch_ahead(
        self,
        layer_idx: int,
        experts: Sequence[int],
        during: int,
        evict: Callable[[cache.ExpertKey], None],
        counts: PhaseCounts,
    ) -> None:
        for event in self._expert_cache.prefetch(layer_idx, experts, during):
            if isinstance(event, cache.EvictEvent):
                evict(event.key)
            elif isinstance(event, cache.FetchEvent):
                self._note_fetch(event.key)
                self.store.fetch(event.key, urgent=False)
                self._prefetched.add(event.key)
                counts.prefetched += 1

    def _prefetch_rows(self, layer_idx: int, x: Tensor) -> None:
        """Prefetches the rows that predicted experts, if only in part resident, would run on the input x before it.

        Their selectors may be on their way; each call takes those that have arrived since the last.
        """
        keys = [key for key in self._rows_pending if self.store.is_here(key)]
        if not keys:
            return
        self._rows_pending = [key for key in self._rows_pending if key not in keys]
        for key, neurons in self._predict_neurons(to_experts(x, self, layer_idx), keys):
            self.store.fetch_records(key, neurons, urgent=False)
            self._prefetched_rows[key] = neurons

    def _predict_neurons(
        self, x: Tensor, keys: Sequence[cache.ExpertKey]
    ) -> list[tuple[cache.ExpertKey, NDArray[np.int32]]]:
        """Returns the neurons that would run on x float32 [1, d], of experts that lack some records."""
        experts = [(key, self.store.arrive(key)) for key in keys]
        in_part = [(key, expert) for key, expert in experts if not expert.is_whole]
        if not in_part:
            return []
        assert self.store.by_rows is not None, "experts are read whole"
        token = np.zeros(1, np.int64)
        selected = self.store.by_rows.select(x, [(expert, token) for _, expert in in_part])
        return [(key, found.neurons.numpy()) for (key, _), found in zip(in_part, selected, strict=True)]


class LayerRun:
    """The experts of a layer at work on x float32 [T, d]: gathered, so that resident ones take one call.

    Each expert writes rows of its own in `outputs`, float32 [rows, d].
    """

    def __init__(
        self,
        weights: OffloadedWeights,
        store: expert_store.ExpertStore,
        x: Tensor,
        jobs: dict[int, ExpertJob],
        counts: PhaseCounts,
    ) -> None:
        num_outputs = sum(len(job.tokens) for job in jobs.values())
        self.outputs = np.zeros((num_outputs, x.shape[1]), np.float32)
        self._weights, self._store, self._x, self._jobs, self._counts = weights, store, x, jobs, counts
        self._whole: list[tuple[ExpertJob, PagedExpert]] = []
        self._to_select: list[tuple[ExpertJob, PagedExpert]] = []  # in part; running neurons are not known
        self._in_part: list[tuple[ExpertJob, SelectedNeurons]] = []
        self._late: list[ExpertJob] = []  # not all bytes had arrived

    def add(self, job: ExpertJob) -> None:
        """Adds an expert to run: with the next that are computed if it is resident, else after them."""
        if self._store.is_here(job.key):
            self._gather(job)
        else:
            self._late.append(job)

    def _gather(self, job: ExpertJob) -> None:
        """Adds an expert to the next call; waits for its bytes."""
        expert = self._store.arrive(job.key)
        (self._whole if expert.is_whole else self._to_select).append((job, expert))

    def request_rows(self) -> None:
        """Asks the selectors of the gathered experts that are resident in part, and requests the rows that run."""
        if not self._to_select:
            return
        assert self._store.by_rows is not None, "experts are read whole"
        jobs, self._to_select = self._to_select, []
        found = self._store.by_rows.select(self._x, [(expert, job.tokens) for job, expert in jobs])
        for (job, expert), selected in zip(jobs, found, strict=True):
            neurons = selected.neurons.numpy()
            self._store.shares.ran(job.key.layer_idx, len(neurons) / expert.layout.num_rows)
            predicted = self._weights.predicted.get(job.key)
            if predicted is None:
                self._counts.in_part += 1
            else:
                self._counts.running += len(neurons)
                right = np.isin(neurons, predicted, assume_unique=True, kind="table")
                self._counts.running_predicted += int(right.sum())
            if self._weights.approximations.is_predicted_enough and predicted is not None:
                there = torch.from_numpy(expert.present(neurons))
                self._in_part.append((job, SelectedNeurons(selected.a, selected.runs, there)))
            else:
                self._store.fetch_records(job.key, neurons, urgent=True)
                self._in_part.append((job, selected))

    def evict(self, key: cache.ExpertKey) -> None:
        """Evicts an expert; if it is to be computed, that happens before."""
        gathered = (*self._whole, *self._to_select, *self._in_part)
        if any(job.key == key for job in (*self._late, *(job for job, _ in gathered))):
            self.flush()
        self._store.evict(key)

    def flush(self) -> None:
        """Computes all added experts: the resident ones, then the others as they arrive."""
        self.compute_gathered()
        while self._late:
            first, *others = self._late
            self._late = []
            self._gather(first)  # waits
            for job in others:
                self.add(job)
            self.compute_gathered()

    def compute_gathered(self) -> None:
        """Computes the added experts that were resident."""
        self.request_rows()
        num_experts = len(self._whole) + len(self._in_part)
        if not num_experts:
            return
        trace = self._weights.trace
        with nullcontext() if trace is None else trace.during("computing", "experts", number=num_experts):
            whole, self._whole = self._whole, []
            if whole:
                self._store.operations.run(self._x, [(job, expert, None) for job, expert in whole], self.outputs)
            self._compute_in_part()

    def _compute_in_part(self) -> None:
        while self._in_part:  # some at a time: those whose rows have arrived, at least the first
            _, *others = self._in_part
            here = [True, *(self._store.is_here(job.key) for job, _ in others)]
            arrived = [each for each, is_here in zip(self._in_part, here, strict=True) if is_here]
            self._in_part = [each for each, is_here in zip(self._in_part, here, strict=True) if not is_here]
            works = list[expert_store.PagedWork]()
            for job, selected in arrived:
                works.append((job, self._store.arrive(job.key), selected))  # waits for the first
                self._store.check_records(job.key, selected.neurons.numpy())
            self._store.operations.run(self._x, works, self.outputs)

    def added_up(self) -> Tensor:
        """Returns y float32 [T, d]: the computed outputs of each token, added in the order of experts."""
        y = np.zeros((len(self._x), self.outputs.shape[1]), np.float32)
        for job in self._jobs.values():
            y[job.tokens] += self.outputs[job.places]  # no token has an expert twice
        return torch.from_numpy(y)


def _jobs(layer_idx: int, experts: Tensor, router_weights: Tensor) -> dict[int, ExpertJob]:
    """Returns the job of each expert, ascending; its output rows follow those of the experts before it."""
    jobs, first = {}, 0
    for number, tokens, weights in model.tokens_by_expert(experts, router_weights):
        places = np.arange(first, first + len(tokens))
        jobs[number] = ExpertJob(cache.ExpertKey(layer_idx, number), tokens, weights, places)
        first += len(tokens)
    return jobs
