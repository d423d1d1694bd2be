"""One token on a GPU: its launches, which a CUDA graph repeats, and what the host does between two tokens.

`TokenStep` launches a forward pass. Of each layer's experts the GPU computes what lies in its memory. At the same time,
on forks of the graph, the CPU computes what is left to it (`cpu_share`), and records are pulled over the link, those of
the next layer's predicted experts too (`prefetch`). Nothing in it waits for Python. `GpuDecoder` runs it: between two
tokens the host enters records in the tables, and while a token runs it decides on those that the token before lacked
(`residency`). Importing this needs Triton.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.gpu import cpu_share, devices, fit
from moe_pack.runtime.gpu.kernels import elementwise
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select
from moe_pack.runtime.gpu.kernels.pull import bring, enter_rows, pull_records, pull_selectors
from moe_pack.runtime.gpu.kernels.rotation import device_matrix as rotation_matrix
from moe_pack.runtime.gpu.kernels.rotation import rotate, rotate_back
from moe_pack.runtime.gpu.kernels.router import ChangedChoice
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.kernels.tables import HERE, LEFT, MISSING, PULLED, HostRows, RunningNeurons
from moe_pack.runtime.gpu.placements import NUM_TURNS
from moe_pack.runtime.gpu.prefetch import ExpertPrediction, PredictionPlan, RecordPrefetch
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.residency import MOST_KEPT, Promotion, Residency, TokenRoutes
from moe_pack.runtime.gpu.token_layers import TokenLayers
from moe_pack.runtime.model import Decoder, caches
from moe_pack.runtime.model.router import expert_scores
from moe_pack.runtime.offload.split import fastest_share

_LINK_SHARE = 0.5  # of the link's time that promotions may take
_FIRST_TOKEN_SECONDS = 0.02
_TIMED_RUNS = 5
_WARMING_TOKENS, _TUNED_TOKENS = 2, 7  # for each share that is tried


@dataclass(frozen=True, slots=True, eq=False)
class Substitution:
    """Experts in place of missing ones with low scores, which changes the answer.

    `alpha`: 0 to 1, as in `runtime.offload.split.substitute`.   `is_resident`: bool [L, E], experts that may stand in
    for others, and that no other replaces.
    """

    alpha: float
    is_resident: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a token's launches use besides weights and buffers of their own.

    `host`: experts in page-locked memory; None if the CPU's own engine has them.   `share`: computes what is left to
    the CPU; None if everything is pulled or resident.   `exchange`: of the share.   `pulled_share`: of the missing
    records, that the link brings.   `needs_scores`: whether the policy uses the routers' scores of all experts.
    `whole_records`: [L], the work of the CPU for an expert whose selector is missing, in records.
    `prediction`: of experts; None: none are predicted.   `substitution`: what replaces experts; None: nothing does.
    `by_expert`: whether Algorithm 2 of *importance* splits a layer's missing experts one by one; `pulled_share` is then
    the link's rate divided by both rates, and no other is tried.
    """

    queues: devices.Queues
    host: devices.HostArena | None
    share: cpu_share.CpuShare | None
    exchange: cpu_share.Exchange
    pulled_share: float
    needs_scores: bool
    whole_records: NDArray[np.float64]
    prediction: PredictionPlan | None = None
    substitution: Substitution | None = None
    by_expert: bool = False


class TokenStep:
    """The launches of one token, experts included, and buffers for its experts.

    `routes`: int32 [turns, L, k], `totals`: int32 [turns, L, k, 4], in page-locked memory: the token's experts, and
    their neurons (HERE, PULLED, LEFT, MISSING).   `changes`: [turns, most_changes, 2], likewise: places and
    values for the table of records.   `router_logits`: float32 [turns, L, E], likewise, if the policy needs scores.
    `ahead`: int32 [turns, L, n, 3], the prefetch's totals, `num_changed`: int32 [turns, L], experts that ran in place
    of the routers'; both likewise, if there are any.
    Args:    num_sms: multiprocessors of the GPU, by which work is divided.   most_changes: of a token.
    """

    def __init__(
        self, weights: GpuWeights, layers: TokenLayers, inputs: StepInputs, num_sms: int, most_changes: int
    ) -> None:
        spec, device = weights.spec, layers.x.device
        self._weights, self._layers, self._inputs, self._spec = weights, layers, inputs, spec
        self._placement = weights.memory.placement
        f, k, d = spec.expert.intermediate_size, spec.router.num_experts_per_tok, spec.hidden_size
        num_layers = len(spec.moe_layers)
        is_locked = device.type == "cuda"
        offsets = weights.memory.record_at.dtype
        running = RunningNeurons.allocate(k, f, device, offsets)
        self._totals = torch.zeros((num_layers, k, 4), dtype=torch.int32, device=device)
        self._running = [running._replace(totals=totals) for totals in self._totals]
        self._partials, self._pulled_partials = (
            torch.zeros((k, num_partials(k, f, num_sms), d), device=device) for _ in range(2)
        )
        self._selector_units = torch.zeros((k, f), dtype=offsets, device=device)
        self._pulled_share = torch.tensor([inputs.pulled_share], device=device)
        self._host_rows = [_host_rows(inputs.host, l, device) for l in range(num_layers)]
        is_rotated = any(weights.rotation(layer_idx) is not None for layer_idx in range(num_layers))
        # Of rotated layers: the input of experts, and the sum of their outputs.
        self._turned, self._sum = (torch.zeros(d * is_rotated, device=device) for _ in range(2))
        self._matrix = rotation_matrix(d, device)
        self._from_tier = torch.zeros(d, device=device)
        self._own_pulled = devices.Mark(None)  # reached when what a layer itself pulls is there
        self.routes, self.totals = (
            torch.zeros((NUM_TURNS, *shape), dtype=torch.int32, pin_memory=is_locked)
            for shape in ((num_layers, k), (num_layers, k, 4))
        )
        logits_shape = (NUM_TURNS, *layers.router_logits.shape) if inputs.needs_scores else (0,)
        self.router_logits = torch.zeros(logits_shape, pin_memory=is_locked)
        self.changes = torch.zeros((NUM_TURNS, most_changes, 2), dtype=offsets, pin_memory=is_locked)
        self.prefetch: RecordPrefetch | None = None
        plan, substitution = inputs.prediction, inputs.substitution
        if plan is not None and not self._placement.is_whole:
            prediction = ExpertPrediction(plan, weights, layers)
            self.prefetch = RecordPrefetch(prediction, weights, layers, inputs.queues, self._host_rows)
        self._runs_predicted = (
            self.prefetch is not None and plan is not None and plan.runs_predicted and plan.num_predicted >= k
        )
        self._partial = torch.zeros(d, device=device)
        ahead_shape = (0,) if self.prefetch is None else self.prefetch.totals.shape
        self.ahead = torch.zeros((NUM_TURNS, *ahead_shape), dtype=torch.int32, pin_memory=is_locked)
        self._num_changed = torch.zeros(num_layers, dtype=torch.int32, device=device)
        self.num_changed = torch.zeros((NUM_TURNS, num_layers), dtype=torch.int32, pin_memory=is_locked)
        self._is_resident: Tensor | None = None
        if substitution is not None and not self._placement.is_whole:
            self._is_resident = torch.from_numpy(substitution.is_resident.astype(np.int32)).to(device)

    def run(self, turn: int, num_changes: Tensor) -> None:
        """Launches the whole forward pass, from the token in `control` to `logits`, `routes` and `totals`.

        Args:    num_changes: int32 [1] on the device: entries of `changes` that count.
        """
        layers, spec = self._layers, self._spec
        if self.changes.numel():
            enter_rows(self.changes[turn], num_changes, self._weights.memory.record_at.view(-1))
        layers.start()
        layer_idx = 0
        for layer in range(spec.num_hidden_layers):
            layers.run(layer, layers.x)
            if layer in spec.moe_layers:
                self._inputs.queues.join("next")
                shared = layers.route(layer_idx, self._changed_choice(layer_idx))
                self._add_experts(turn, layer_idx, shared)
                layer_idx += 1
        self._inputs.queues.join("next")
        layers.finish()
        self.routes[turn].copy_(layers.routes, non_blocking=True)
        self.totals[turn].copy_(self._totals, non_blocking=True)
        if self._inputs.needs_scores:
            self.router_logits[turn].copy_(layers.router_logits, non_blocking=True)
        if self.prefetch is not None:
            self.ahead[turn].copy_(self.prefetch.totals, non_blocking=True)
        if self._is_resident is not None or self._runs_predicted:
            self.num_changed[turn].copy_(self._num_changed, non_blocking=True)

    def pull(self, share: float) -> None:
        """Lets the link bring another share of the missing records; graphs that were captured read it too."""
        self._pulled_share.fill_(share)

    def run_layers(self) -> None:
        """Launches the layers without their routed experts, for timing: their results mean nothing."""
        for layer in range(self._spec.num_hidden_layers):
            self._layers.run(layer, self._layers.x)
        for layer_idx in range(len(self._host_rows)):
            self._layers.route(layer_idx)

    def _changed_choice(self, layer_idx: int) -> ChangedChoice | None:
        """Returns what changes the choice of a layer's router, if anything does."""
        prefetch, number = self.prefetch, self._num_changed[layer_idx : layer_idx + 1]
        if prefetch is not None and self._runs_predicted and prefetch.prediction.predicts(layer_idx):
            return ChangedChoice(prefetch.prediction.experts, None, 0.0, number)
        substitution = self._inputs.substitution
        if substitution is None or self._is_resident is None:
            return None
        return ChangedChoice(None, self._is_resident[layer_idx], substitution.alpha, number)

    def _add_experts(self, turn: int, layer_idx: int, shared: Tensor | None) -> None:
        """Launches a layer's experts; adds them and the shared experts' output to the hidden state."""
        layers, rotation, share = self._layers, self._weights.rotation(layer_idx), self._inputs.share
        x, scale, exchange = layers.x, self._spec.residual_multiplier, self._inputs.exchange
        inputs = layers.normed
        if rotation is not None:
            inputs = self._turned
            rotate(layers.normed, rotation, self._matrix, inputs)
        is_whole = self._is_static(layer_idx)
        if is_whole:
            share = None
        pulled = self._experts(turn, layer_idx, inputs, is_whole)
        self._look_ahead_by_partial(layer_idx, shared)
        self._inputs.queues.join("cpu", "link")
        self._add_up(layer_idx, x, shared, pulled, None if share is None or share.adds_output else exchange.y)
        if share is not None and share.adds_output:
            self._from_tier.copy_(exchange.y, non_blocking=True)
            x.add_(self._from_tier, alpha=scale)

    def _add_up(
        self, layer_idx: int, out: Tensor, shared: Tensor | None, pulled: Tensor | None, host: Tensor | None
    ) -> None:
        """Launches the sum of a layer's outputs and the hidden state, which it writes to `out`."""
        layers, rotation, scale = self._layers, self._weights.rotation(layer_idx), self._spec.residual_multiplier
        if rotation is None:
            sums = {"pulled": pulled, "host": host, "residual": layers.x, "shared": shared}
            elementwise.reduce(self._partials, layers.router_weights, out, scale=scale, **sums)
        else:
            elementwise.reduce(self._partials, layers.router_weights, self._sum, pulled=pulled, host=host)
            rotate_back(self._sum, rotation, self._matrix, out, residual=layers.x, shared=shared, scale=scale)

    def _look_ahead(self, layer_idx: int) -> None:
        """Launches, on a fork, what predicts the next layer's experts, and pulls records of these."""
        prefetch = self.prefetch
        if prefetch is None:
            return
        next_idx = layer_idx + 1
        with self._inputs.queues.forked("next"):
            if prefetch.pulls(layer_idx):
                prefetch.forget(layer_idx, self._running[layer_idx])
            if prefetch.prediction.predicts(next_idx) and not prefetch.prediction.needs_partial(next_idx):
                prefetch.launch(next_idx, self._layers.x, self._own_pulled)

    def _look_ahead_by_partial(self, layer_idx: int, shared: Tensor | None) -> None:
        """Launches the same where the partial hidden state predicts: the next attention comes first, on no fork."""
        prefetch, queues, next_idx = self.prefetch, self._inputs.queues, layer_idx + 1
        if prefetch is None or not prefetch.prediction.needs_partial(next_idx):
            return
        queues.join("next")
        self._add_up(layer_idx, self._partial, shared, None, None)
        for layer in range(self._spec.moe_layers[layer_idx] + 1, self._spec.moe_layers[next_idx] + 1):
            self._layers.run(layer, self._partial)
        with queues.forked("next"):
            prefetch.launch(next_idx, self._partial, self._own_pulled)

    def _experts(self, turn: int, layer_idx: int, inputs: Tensor, is_whole: bool) -> Tensor | None:
        """Launches the token's experts; returns partial sums of pulled neurons beside the others, if there are any.

        Args:    inputs: float32 [d], as the experts' stored rows get it.   is_whole: whether the layer lacks nothing.
        """
        memory, queues, running = self._weights.memory, self._inputs.queues, self._running[layer_idx]
        experts, tables = self._layers.routes[layer_idx], memory.layers[layer_idx]
        landing, left = memory.landing[layer_idx], self._inputs.exchange.left[turn][layer_idx]
        is_pull = is_whole or self._placement.misses == "pull"
        host, selector_units = self._host_rows[layer_idx], None
        if not is_whole and is_pull and not self._placement.has_selector[layer_idx].all():
            assert host is not None, "records are pulled from host memory"
            selector_units = self._selector_units
            num_records = len(experts) * landing.num_scratch
            scratch_at = landing.scratch_at + num_records * landing.slot_units
            pull_selectors(experts, tables, host, scratch_at, selector_units)
        select(inputs, experts, tables, running, selector_units)
        whole_records = float(self._inputs.whole_records[layer_idx])
        by_expert = self._inputs.by_expert
        compact(experts, tables, running, landing, self._pulled_share, left, not is_pull, whole_records, by_expert)
        if is_pull:
            if not is_whole:
                assert host is not None, "records are pulled from host memory"
                pull_records(experts, tables, running, host, is_split=False)
            self._own_pulled = queues.mark()
            self._look_ahead(layer_idx)
            neurons(inputs, experts, tables, running, self._partials, "here")
            return None
        share, exchange = self._inputs.share, self._inputs.exchange
        assert share is not None, "what is neither resident nor pulled has a share of the CPU"
        # Before records are pulled: while they are, these few bytes take the link ten times as long (H200).
        x = self._layers.normed if share.adds_output else inputs
        elementwise.hand_over(x, self._layers.router_weights, experts, exchange.x, exchange.weights, exchange.experts)
        self._own_pulled = queues.mark()
        with queues.forked("cpu"):
            share.launch(turn, layer_idx)
        pulls = self._inputs.pulled_share > 0 and landing.slots.shape[1] + landing.num_scratch > 0
        if pulls:
            assert host is not None, "records are pulled from host memory"
            with queues.forked("link"):
                pull_records(experts, tables, running, host, is_split=True)
                self._own_pulled = queues.mark()
                neurons(inputs, experts, tables, running, self._pulled_partials, "pulled")
        self._look_ahead(layer_idx)
        neurons(inputs, experts, tables, running, self._partials, "here")
        return self._pulled_partials if pulls else None

    def _is_static(self, layer_idx: int) -> bool:
        """Whether all rows of a layer are resident for the whole run."""
        placement = self._placement
        is_full = placement.first_dynamic[layer_idx] == self._spec.expert.intermediate_size
        return bool(is_full.all() and placement.has_selector[layer_idx].all())


def _host_rows(host: devices.HostArena | None, layer_idx: int, device: torch.device) -> HostRows | None:
    if host is None:
        return None
    return HostRows(host.rows(layer_idx), torch.from_numpy(host.extent_at[layer_idx] // 16).to(device))


class GpuDecoder(Decoder):
    """A decoder on a GPU; see `Decoder`. Logits are returned in host memory.

    Before `prepare`, and on a CPU, where the interpreter runs the kernels, the same launches run without graphs.
    Args:    residency: decides on the slots; None if there are none.   chunk_tokens: of a forward pass of several
             tokens.   cache_dtype: of keys and values.   link_rate: bytes a second that promotions may count on.
    """

    def __init__(
        self,
        weights: GpuWeights,
        inputs: StepInputs,
        residency: Residency | None,
        context_tokens: int,
        device: torch.device,
        chunk_tokens: int,
        cache_dtype: caches.KvDtype = "f32",
        link_rate: float = float("inf"),
    ) -> None:
        super().__init__(weights, context_tokens, device, chunk_tokens, cache_dtype)
        self._is_cuda = device.type == "cuda"
        self._gpu_weights, self._inputs, self._residency, self._link_rate = weights, inputs, residency, link_rate
        self._layers = TokenLayers(weights, self.cache, self._ropes.as_last(context_tokens)[0])
        most_changes = 0 if residency is None else residency.most_changes
        self._step = TokenStep(weights, self._layers, inputs, _num_sms(device), most_changes)
        self._control, self._logits = (
            torch.zeros(shape, dtype=dtype, pin_memory=self._is_cuda)
            for shape, dtype in ((3, torch.int32), (self._layers.logits.shape, torch.float32))
        )
        self._num_changes = torch.zeros(1, dtype=torch.int32, device=device)
        landing_slots = weights.memory.landing_slots
        offsets = landing_slots.dtype
        self._landing = torch.zeros((NUM_TURNS, *landing_slots.shape), dtype=offsets, pin_memory=self._is_cuda)
        self._num_entries = [0] * NUM_TURNS  # of the changes before the next token of each turn
        most = 0 if residency is None else MOST_KEPT
        self._sources, self._targets = (
            torch.zeros(most, dtype=dtype, pin_memory=self._is_cuda) for dtype in (torch.int64, offsets)
        )
        self._sources_there, self._targets_there = (each.to(device) for each in (self._sources, self._targets))
        # An event and not a stream: a test makes torch forbid waits for streams. The wait takes a CPU, which the CPU's
        # share leaves free; a thread that sleeps wakes up a millisecond late.
        self._done = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch
        self._runs: list[Callable[[], None]] = [lambda turn=turn: self.launch(turn) for turn in range(NUM_TURNS)]  # type: ignore[misc]  # bound now
        self._turn = 0
        self._undecided = False  # whether the last token's routes are still to be looked at
        self._coming: list[tuple[devices.Mark, list[Promotion]]] = []
        self._token_seconds = _FIRST_TOKEN_SECONDS
        self._counts = np.zeros(7, np.int64)
        self._record_bytes = np.array([[16 * kind.record_units for kind in layer] for layer in weights.memory.kinds])
        self._num_tokens = self._promoted_bytes = self._pulled_bytes = 0
        self._busy_before = 0.0
        self._slots_are_empty = False
        self._empty_slots()

    def logits(self, ids: list[int]) -> Tensor:
        """Returns logits in host memory; see `Decoder.logits`."""
        if self._is_alone(ids):
            return self._one(ids[0])[None].clone()
        return torch.cat(
            [
                self._head(some).cpu()
                for hidden in self._forward(self.sequences[0], ids)
                for some in torch.split(hidden, fit.LOGITS_AT_ONCE)
            ]
        )

    def extend(self, sequence: caches.CachedSequence, ids: list[int]) -> Tensor:
        """Returns the last logits in host memory, valid until the next call; see `Decoder.next_logits`."""
        return self._one(ids[0]) if self._is_alone(ids) else super().extend(sequence, ids).cpu()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures a token's launches as a graph for each turn, after running them so that all kernels are loaded."""
        if not self._is_cuda:
            return
        launches = list(self._runs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream())  # these launches use buffers that the current stream fills
        with torch.cuda.stream(stream):
            for turn, launch in enumerate(launches):
                launch()
                stream.synchronize()
                if turn == 0:
                    self._limit_prefetch(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    launch()
                self._runs[turn] = graph.replay
        self._clear_counts()

    @torch.inference_mode()
    def tune(self) -> None:
        """Chooses the share of missing records that the link brings, by the time that tokens take with it."""
        if self._inputs.share is None or not self._inputs.pulled_share or self._inputs.by_expert:
            return
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.spec.vocab_size, (_WARMING_TOKENS + _TUNED_TOKENS,), generator=draw).tolist()

        def seconds_with(share: float) -> float:
            self._step.pull(share)
            times = []
            for token in tokens:
                if self.cache.num_tokens == self.cache.context_tokens:
                    self.reset()
                started = time.perf_counter()
                self._one(token)
                times.append(time.perf_counter() - started)
            return median(times[_WARMING_TOKENS:])

        self._step.pull(fastest_share(seconds_with, self._inputs.pulled_share))
        self.reset()
        self._empty_slots()
        self._clear_counts()

    def _limit_prefetch(self, stream: "torch.cuda.Stream") -> None:
        """Lets records be pulled ahead as long as a layer's other work takes, as measured now."""
        prefetch, placement = self._step.prefetch, self._gpu_weights.memory.placement
        if prefetch is None:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._step.run_layers()
        times = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_RUNS + 1)]  # type: ignore[no-untyped-call]  # untyped in torch
        for event in times:
            graph.replay()
            event.record(stream)
        stream.synchronize()
        seconds = times[0].elapsed_time(times[-1]) / 1e3 / _TIMED_RUNS / len(placement.num_slots)
        num_bytes = int(placement.slot_bytes.max()) * placement.num_predicted
        if self._link_rate < float("inf"):
            prefetch.limit(int(self._link_rate * seconds / num_bytes))

    def close(self) -> None:
        """Frees the graphs, which contain calls of the CPU."""
        self._runs.clear()

    @property
    def routes(self) -> Tensor:
        """The experts of the last token that ran alone: int32 [L, k]."""
        return self._step.routes[1 - self._turn]

    def counts(self) -> fit.GpuCounts:
        """Returns what tokens that ran alone needed until now."""
        resident, pulled, left, whole, ahead, ahead_ran, changed = self._counts.tolist()
        promoted = 0 if self._residency is None else self._residency.promoted_rows
        link_bytes = self._promoted_bytes + self._pulled_bytes
        cpu_seconds = self._busy_seconds() - self._busy_before
        counts = (resident, pulled, left, whole, promoted, ahead, ahead_ran, changed)
        return fit.GpuCounts(self._num_tokens, *counts, link_bytes, cpu_seconds)

    def _clear_counts(self) -> None:
        """Forgets what launches have counted that were no tokens of the caller."""
        self._counts[:] = 0
        self._num_tokens = self._promoted_bytes = self._pulled_bytes = 0
        self._busy_before = self._busy_seconds()
        self._undecided = False

    def _busy_seconds(self) -> float:
        return 0.0 if self._inputs.share is None else self._inputs.share.busy_seconds()

    def _is_alone(self, ids: list[int]) -> bool:
        """Whether these are one token, and no earlier position has to be computed again."""
        before = self.cache.num_tokens
        return len(ids) == 1 and not self._ropes.outgrows(before, before + 1)

    def _forward(self, sequence: caches.CachedSequence, ids: list[int], last_only: bool = False) -> list[Tensor]:
        self._empty_slots()
        self._gpu_weights.stream.begin_pass()
        hidden = super()._forward(sequence, ids, last_only)
        self._gpu_weights.stream.end_pass()
        return hidden

    @torch.inference_mode()
    def _one(self, token: int) -> Tensor:
        self._check_ids(self.sequences[0], [token])
        before, started, turn = self.cache.num_tokens, time.perf_counter(), self._turn
        self._control[0], self._control[1], self._control[2] = token, before, self._num_entries[turn]
        begin = self._inputs.queues.mark()
        self._runs[turn]()
        self._between_tokens(1 - turn, begin)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()  # the only wait for a token: its logits are returned
        if self._inputs.share is not None:
            self._inputs.share.check()
        self._count(turn)
        self._turn, self._undecided, self._slots_are_empty = 1 - turn, True, False
        self._token_seconds = time.perf_counter() - started
        self.sequences[0].ids[before:] = [token]
        self.cache.num_tokens += 1
        return self._logits

    def launch(self, turn: int) -> None:
        """Launches the token in the control memory; a graph repeats it."""
        layers, memory = self._layers, self._gpu_weights.memory
        layers.control.copy_(self._control[:2], non_blocking=True)
        self._num_changes.copy_(self._control[2:], non_blocking=True)
        memory.landing_slots.copy_(self._landing[turn], non_blocking=True)
        self._step.run(turn, self._num_changes)
        self._logits.copy_(layers.logits, non_blocking=True)

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _between_tokens(self, last: int, begin: devices.Mark) -> None:
        """Decides on the slots, while a token runs, by what the token before it lacked, for the token after it.

        Args:    last: the turn of the token before.   begin: of the token that runs; what its tables do not name may be
                 overwritten after that.
        """
        residency, exchange, step = self._residency, self._inputs.exchange, self._step
        if residency is None:
            return
        experts = step.routes[last].numpy()
        if self._undecided:
            pulled = [left.pulled for left in exchange.left[last]]
            residency.pulled(last, experts, exchange.pulled_counts[last].numpy(), lambda l: pulled[l].numpy())
        while self._coming and self._coming[0][0].is_reached():
            residency.arrived(self._coming.pop(0)[1])
        if self._undecided:
            counts, neurons = exchange.counts[last].numpy(), exchange.neurons[last].numpy()
            scores = None
            if self._inputs.needs_scores:
                scores = expert_scores(step.router_logits[last], self.spec.router).numpy()
            routes = TokenRoutes(experts, counts, lambda l, place: neurons[l, place, : counts[l, place]], scores)
            promotions = residency.decide(routes, 0 if self._coming else self._most_promoted())
            if promotions:
                copied = self._inputs.queues.beside(lambda: self._copy(promotions), [begin])
                self._coming.append((copied, promotions))
        self._write_changes(last, residency)

    def _write_changes(self, turn: int, residency: Residency) -> None:
        """Writes what changes before the next token of a turn to where its launches read it."""
        changes, entries = residency.changes(), self._step.changes[turn]
        number = self._num_entries[turn] = len(changes.places)
        entries[:number, 0] = torch.from_numpy(changes.places)
        entries[:number, 1] = torch.from_numpy(changes.values)
        self._landing[turn] = torch.from_numpy(residency.landing[turn])

    def _most_promoted(self) -> int:
        """Returns how many records may be copied while a token runs: none where a token itself needs the link."""
        if self._inputs.pulled_share > 0:
            return 0
        slot_bytes = int(self._gpu_weights.memory.placement.slot_bytes.max())
        return int(min(_LINK_SHARE * self._link_rate * self._token_seconds / slot_bytes, len(self._sources)))

    def _copy(self, promotions: list[Promotion]) -> None:
        """Launches the copies of records into their slots; the copies before have ended."""
        host, memory = self._inputs.host, self._gpu_weights.memory
        assert host is not None, "records are promoted from host memory"

        def units_of(promotion: Promotion) -> int:
            return memory.kinds[promotion.key.layer_idx][promotion.key.expert].record_units

        end = 0
        for record_units, some in groupby(sorted(promotions, key=units_of), units_of):
            begin = end
            for promotion in some:
                kind = memory.kinds[promotion.key.layer_idx][promotion.key.expert]
                first = host.extent_begin(*promotion.key) // 16 + kind.num_rows * kind.selector_units
                start, end = end, end + len(promotion.neurons)
                sources = first + promotion.neurons.astype(np.int64) * record_units
                self._sources[start:end] = torch.from_numpy(sources)
                self._targets[start:end] = torch.from_numpy(promotion.units)
            sources_there, targets_there = self._sources_there[begin:end], self._targets_there[begin:end]
            sources_there.copy_(self._sources[begin:end], non_blocking=True)
            targets_there.copy_(self._targets[begin:end], non_blocking=True)
            bring(sources_there, targets_there, record_units, host.bytes, memory.arena)
            self._promoted_bytes += 16 * record_units * (end - begin)

    def _empty_slots(self) -> None:
        """Forgets what the slots have, because a pass of many tokens uses their memory."""
        if self._residency is None or self._slots_are_empty:
            return
        for mark, _ in self._coming:
            self._inputs.queues.wait_for(mark)
        self._coming.clear()
        self._residency.reset()
        self._gpu_weights.memory.record_at.copy_(torch.from_numpy(self._residency.at))
        self._landing.copy_(torch.from_numpy(self._residency.landing))
        self._num_entries = [0] * NUM_TURNS
        self._undecided, self._slots_are_empty = False, True

    def _count(self, turn: int) -> None:
        totals = self._step.totals[turn].numpy()
        running, left = totals[..., HERE] + totals[..., PULLED] + totals[..., LEFT], totals[..., LEFT]
        pulled = totals[..., MISSING] - left
        self._counts[:3] += [int((running - totals[..., MISSING]).sum()), int(pulled.sum()), int(left.sum())]
        record_bytes = np.take_along_axis(self._record_bytes, self._step.routes[turn].numpy(), axis=1)
        self._pulled_bytes += int((pulled * record_bytes).sum())
        self._counts[3] += int((self._inputs.exchange.counts[turn] < 0).sum())
        if self._step.prefetch is not None:
            ahead = self._step.ahead[turn].numpy()  # [L, n, 3]
            self._counts[4:6] += ahead[..., 1:].sum(axis=(0, 1))
            self._pulled_bytes += int((ahead[..., 1] * np.take_along_axis(self._record_bytes, ahead[..., 0], 1)).sum())
        self._counts[6] += int(self._step.num_changed[turn].sum())
        self._num_tokens += 1


_INTERPRETED_SMS = 1  # programs run one after the other


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
