"""One token on a GPU, as launches that a CUDA graph repeats; importing this needs Triton.

The GPU computes those experts of a layer that are in its memory. On forks of the graph the CPU computes its share
(`cpu_share`), and the link brings missing records and those of the next layer's predicted experts (`prefetch`). No
launch waits for Python; `decoder.GpuDecoder` runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.gpu import cpu_share, devices, placements
from moe_pack.runtime.gpu.kernels import elementwise, grids, rotation
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select, select_programs, sums_at_once
from moe_pack.runtime.gpu.kernels.pull import enter_rows, pull_records, pull_selectors
from moe_pack.runtime.gpu.kernels.router import ChangedChoice
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.kernels.tables import HostRows, LeftToCpu, RunningNeurons
from moe_pack.runtime.gpu.prefetch import ExpertPrediction, PredictionPlan, RecordPrefetch
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.token_layers import TokenLayers


@dataclass(frozen=True, slots=True, eq=False)
class Substitution:
    """Resident experts run in place of missing ones with low scores, which changes the answer."""

    alpha: float  # 0 to 1, as in `runtime.offload.split.substitute`
    is_resident: NDArray[np.bool_]  # [L, E], experts that may stand in for others, and that no other replaces


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """All that a token's launches use, except weights and their own buffers."""

    queues: devices.Queues
    host: devices.HostArena | None  # experts in page-locked memory; None if the CPU's own engine has them
    share: cpu_share.CpuShare | None  # computes what is left to the CPU; None if everything is pulled or resident
    exchange: cpu_share.Exchange  # of the share
    pulled_share: float  # of the missing records, that the link brings
    needs_scores: bool  # whether the policy uses the routers' scores of all experts
    whole_records: NDArray[np.float64]  # [L], the work of the CPU for an expert without its selector, in records
    prediction: PredictionPlan | None = None  # of experts; None: none are predicted
    substitution: Substitution | None = None  # of experts; None: nothing replaces them
    # Whether Algorithm 2 of *importance* splits a layer's missing experts one by one; `pulled_share` is then the link's
    # rate divided by both rates, and no other is tried.
    by_expert: bool = False


class _LayerExperts:
    """The launches of a layer's experts that are resident for the whole run."""

    is_whole = True
    _is_split = False

    def __init__(self, step: "TokenStep", layer_idx: int) -> None:
        memory, inputs = step.weights.memory, step.inputs
        self._experts, self._running = step.layers.routes[layer_idx], step.own.running[layer_idx]
        self._tables, self._landing = memory.layers[layer_idx], memory.landing[layer_idx]
        self._left = [of_turn[layer_idx] for of_turn in inputs.exchange.left]
        self._queues, self._own, self._by_expert = inputs.queues, step.own, inputs.by_expert
        self._whole_records = float(inputs.whole_records[layer_idx])

    def launch(self, turn: int, x: Tensor, then: Callable[[devices.Mark], None]) -> Tensor | None:
        """Launches the experts; returns the partial sums of pulled neurons if they are not among the others.

        Args:    x: float32 [d], the stored rows' input.   then: launches what runs at the same time as the longest
                 kernel; it gets the mark after the layer's own records.
        """
        self._list(x, None, self._left[turn])
        self._pull()
        then(self._queues.mark())
        neurons(x, self._experts, self._tables, self._running, self._own.partials, "here")
        return None

    def _list(self, x: Tensor, selector_units: Tensor | None, left: LeftToCpu) -> None:
        """Launches the search for running neurons, and the decision who computes them."""
        experts, tables, running, own = self._experts, self._tables, self._running, self._own
        select(x, experts, tables, running, selector_units)
        compact(
            experts, tables, running, self._landing, own.pulled_share, left, self._is_split, self._whole_records,
            self._by_expert,
        )  # fmt: skip

    def _pull(self) -> None:
        """Launches the copies of missing records; there are none."""


class _PulledExperts(_LayerExperts):
    """The launches of a layer's experts that the GPU computes alone: the link brings missing rows."""

    is_whole = False

    def __init__(self, step: "TokenStep", layer_idx: int) -> None:
        super().__init__(step, layer_idx)
        self._host_rows = step.host_rows[layer_idx]
        self._lacks_selectors = not step.weights.memory.placement.has_selector[layer_idx].all()

    def _list(self, x: Tensor, selector_units: Tensor | None, left: LeftToCpu) -> None:
        if self._lacks_selectors:
            landing, selector_units = self._landing, self._own.selector_units
            scratch_at = landing.scratch_at + len(self._experts) * landing.num_scratch * landing.slot_units
            pull_selectors(self._experts, self._tables, self._host_rows, scratch_at, selector_units)
        super()._list(x, selector_units, left)

    def _pull(self) -> None:
        pull_records(self._experts, self._tables, self._running, self._host_rows, is_split=self._is_split)


class _SplitExperts(_LayerExperts):
    """The launches of a layer's experts with missing rows that the CPU computes."""

    is_whole = False
    _is_split = True

    def __init__(self, step: "TokenStep", layer_idx: int) -> None:
        super().__init__(step, layer_idx)
        assert step.inputs.share is not None, "what is neither resident nor pulled has a share of the CPU"
        self._layer_idx, self._share = layer_idx, step.inputs.share
        self._exchange, self._layers = step.inputs.exchange, step.layers

    def launch(self, turn: int, x: Tensor, then: Callable[[devices.Mark], None]) -> Tensor | None:
        self._list(x, None, self._left[turn])
        # Before records are pulled: while they are, these few bytes take the link ten times as long (H200).
        given, there = self._layers.normed if self._share.adds_output else x, self._exchange
        elementwise.hand_over(given, self._layers.router_weights, self._experts, there.x, there.weights, there.experts)
        own_pulled = self._queues.mark()
        with self._queues.forked("cpu"):
            self._share.launch(turn, self._layer_idx)
        pulled, own_pulled = self._pull_share(x, own_pulled)
        then(own_pulled)
        neurons(x, self._experts, self._tables, self._running, self._own.partials, "here")
        return pulled

    def _pull_share(self, x: Tensor, own_pulled: devices.Mark) -> tuple[Tensor | None, devices.Mark]:
        return None, own_pulled


class _SharedExperts(_SplitExperts):
    """The launches of a layer's experts with missing rows that the CPU and the link share."""

    def __init__(self, step: "TokenStep", layer_idx: int) -> None:
        super().__init__(step, layer_idx)
        self._host_rows = step.host_rows[layer_idx]

    def _pull_share(self, x: Tensor, own_pulled: devices.Mark) -> tuple[Tensor | None, devices.Mark]:
        with self._queues.forked("link"):
            pull_records(self._experts, self._tables, self._running, self._host_rows, is_split=True)
            own_pulled = self._queues.mark()
            partials = self._own.pulled_partials
            neurons(x, self._experts, self._tables, self._running, partials, "pulled")
        return partials, own_pulled


class _Buffers:
    def __init__(self, weights: GpuWeights, device: torch.device, num_sms: int, pulled_share: float) -> None:
        spec, offsets = weights.spec, weights.memory.record_at.dtype
        f, k, d = spec.expert.intermediate_size, spec.router.num_experts_per_tok, spec.hidden_size
        num_layers = len(spec.moe_layers)
        is_rotated = any(weights.rotation(layer_idx) is not None for layer_idx in range(num_layers))
        kinds = weights.memory.layers[0].kinds  # those of all layers
        running = RunningNeurons.allocate(k, f, device, offsets, select_programs(kinds))
        self.totals = torch.zeros((num_layers, k, 4), dtype=torch.int32, device=device)
        self.running = [running._replace(totals=totals) for totals in self.totals]
        num_sums = num_partials(k, f, num_sms, sums_at_once(kinds))
        self.partials, self.pulled_partials = (torch.zeros((k, num_sums, d), device=device) for _ in range(2))
        self.selector_units = torch.zeros((k, f), dtype=offsets, device=device)
        self.pulled_share = torch.tensor([pulled_share], device=device)
        self.num_changed = torch.zeros(num_layers, dtype=torch.int32, device=device)
        # Of rotated layers: the input of experts, and the sum of their outputs.
        self.turned, self.sum = (torch.zeros(d * is_rotated, device=device) for _ in range(2))
        self.matrix = rotation.device_matrix(d, device)
        self.from_tier, self.partial = (torch.zeros(d, device=device) for _ in range(2))


class TokenStep:
    """The launches of one token, experts included, and the page-locked memory that the host exchanges with them.

    Args:    num_sms: multiprocessors of the GPU, by which work is divided.   most_changes: of a token.
    """

    def __init__(
        self, weights: GpuWeights, layers: TokenLayers, inputs: StepInputs, num_sms: int, most_changes: int
    ) -> None:
        device, num_layers = layers.x.device, len(weights.spec.moe_layers)
        self.weights, self.layers, self.inputs, self.spec = weights, layers, inputs, weights.spec
        self.own = _Buffers(weights, device, num_sms, inputs.pulled_share)
        self.host_rows: list[HostRows] = []  # by layer; none without host memory, from which records are pulled
        if inputs.host is not None:
            extents = [torch.from_numpy(at // 16).to(device) for at in inputs.host.extent_at]
            self.host_rows = [HostRows(inputs.host.rows(l), extent_at) for l, extent_at in enumerate(extents)]
        self.prefetch: RecordPrefetch | None = None
        is_whole = weights.memory.placement.is_whole
        if inputs.prediction is not None and not is_whole:
            prediction = ExpertPrediction(inputs.prediction, weights, layers)
            self.prefetch = RecordPrefetch(prediction, weights, layers, inputs.queues, self.host_rows)
        self._experts = [_layer_experts(self, l) for l in range(num_layers)]
        self._choices = [None if is_whole else self._changed_choice(l) for l in range(num_layers)]
        self._own_pulled = devices.Mark(None)  # reached when what a layer itself pulls is there
        self._copies: list[tuple[Tensor, Tensor]] = []  # page-locked memory of all turns, and what is copied to it
        self.routes = self._page_locked(layers.routes)  # int32 [turns, L, k]
        self.totals = self._page_locked(self.own.totals)  # int32 [turns, L, k, 4]: HERE, PULLED, LEFT, MISSING
        # float32 [turns, L, E], if the policy needs scores.
        self.router_logits = self._page_locked(layers.router_logits if inputs.needs_scores else None)
        # int32 [turns, L, n, 3], the prefetch's totals.
        self.ahead = self._page_locked(None if self.prefetch is None else self.prefetch.totals)
        # int32 [turns, L], experts that ran in place of the routers'.
        self.num_changed = self._page_locked(self.own.num_changed if any(self._choices) else None)
        # [turns, most_changes, 2], places and values for the table of records, which the host writes.
        shape, offsets = (placements.NUM_TURNS, most_changes, 2), weights.memory.record_at.dtype
        self.changes = torch.zeros(shape, dtype=offsets, pin_memory=device.type == "cuda")

    def run(self, turn: int, num_changes: Tensor) -> None:
        """Launches the forward pass, from the token in `control` to `logits`, `routes` and `totals`.

        Args:    num_changes: int32 [1] on the device, the valid entries of `changes`.
        """
        layers, spec = self.layers, self.spec
        if self.changes.numel():
            enter_rows(self.changes[turn], num_changes, self.weights.memory.record_at.view(-1))
        layers.start()
        # Where all experts are resident, nothing forks, and no copy comes between.
        with grids.chained(self.weights.memory.placement.is_whole):
            layer_idx = 0
            for layer in range(spec.num_hidden_layers):
                layers.run(layer, layers.x)
                if layer in spec.moe_layers:
                    self.inputs.queues.join("next")
                    shared = layers.route(layer_idx, self._choices[layer_idx])
                    self._add_experts(turn, layer_idx, shared)
                    layer_idx += 1
            self.inputs.queues.join("next")
            layers.finish()
        for there, here in self._copies:
            there[turn].copy_(here, non_blocking=True)

    def pull(self, share: float) -> None:
        """Lets the link bring another share of the missing records, in captured graphs too."""
        self.own.pulled_share.fill_(share)

    def run_layers(self) -> None:
        """Launches the layers without their routed experts, for timing; their results mean nothing."""
        for layer in range(self.spec.num_hidden_layers):
            self.layers.run(layer, self.layers.x)
        for layer_idx in range(len(self._experts)):
            self.layers.route(layer_idx)

    def _page_locked(self, here: Tensor | None) -> Tensor:
        """Returns memory for each turn's copy of a tensor, which has no values if there is no tensor."""
        if here is None:
            return torch.zeros((placements.NUM_TURNS, 0), dtype=torch.int32)
        there = torch.zeros((placements.NUM_TURNS, *here.shape), dtype=here.dtype, pin_memory=here.is_cuda)
        self._copies.append((there, here))
        return there

    def _changed_choice(self, layer_idx: int) -> ChangedChoice | None:
        number, k = self.own.num_changed[layer_idx : layer_idx + 1], self.spec.router.num_experts_per_tok
        plan, substitution, prefetch = self.inputs.prediction, self.inputs.substitution, self.prefetch
        runs_predicted = plan is not None and plan.runs_predicted and plan.num_predicted >= k
        if runs_predicted and prefetch is not None and layer_idx in prefetch.prediction.launches:
            return ChangedChoice(prefetch.prediction.experts, None, 0.0, number)
        if substitution is None:
            return None
        is_resident = torch.from_numpy(substitution.is_resident[layer_idx].astype(np.int32)).to(number.device)
        return ChangedChoice(None, is_resident, substitution.alpha, number)

    def _add_experts(self, turn: int, layer_idx: int, shared: Tensor | None) -> None:
        """Launches a layer's experts; adds their sum and the shared experts' output to the hidden state."""
        layers, rotated, share = self.layers, self.weights.rotation(layer_idx), self.inputs.share
        x, own, experts = layers.normed, self.own, self._experts[layer_idx]
        if rotated is not None:
            x = own.turned
            rotation.rotate(layers.normed, rotated, own.matrix, x)
        pulled = experts.launch(turn, x, lambda own_pulled: self._look_ahead(layer_idx, own_pulled))
        self._look_ahead_by_partial(layer_idx, shared)
        self.inputs.queues.join("cpu", "link")
        y = self.inputs.exchange.y
        if share is None or experts.is_whole:
            self._add_up(layer_idx, layers.x, shared, pulled, None)
        elif share.adds_output:
            self._add_up(layer_idx, layers.x, shared, pulled, None)
            own.from_tier.copy_(y, non_blocking=True)
            layers.x.add_(own.from_tier, alpha=self.spec.residual_multiplier)
        else:
            self._add_up(layer_idx, layers.x, shared, pulled, y)

    def _add_up(
        self, layer_idx: int, out: Tensor, shared: Tensor | None, pulled: Tensor | None, host: Tensor | None
    ) -> None:
        """Launches the sum of a layer's outputs and the hidden state, which goes to `out`."""
        layers, rotated, scale = self.layers, self.weights.rotation(layer_idx), self.spec.residual_multiplier
        own, weights = self.own, self.layers.router_weights
        if rotated is None:
            sums = {"pulled": pulled, "host": host, "residual": layers.x, "shared": shared}
            elementwise.reduce(own.partials, weights, out, scale=scale, **sums)
        else:
            elementwise.reduce(own.partials, weights, own.sum, pulled=pulled, host=host)
            rotation.rotate_back(own.sum, rotated, own.matrix, out, residual=layers.x, shared=shared, scale=scale)

    def _look_ahead(self, layer_idx: int, own_pulled: devices.Mark) -> None:
        """Launches the next layer's prediction on a fork, and pulls the records of the predicted experts."""
        prefetch, next_idx = self.prefetch, layer_idx + 1
        self._own_pulled = own_pulled
        if prefetch is None:
            return
        with self.inputs.queues.forked("next"):
            if prefetch.pulls(layer_idx):
                prefetch.forget(layer_idx, self.own.running[layer_idx])
            if next_idx in prefetch.prediction.launches and not prefetch.prediction.needs_partial(next_idx):
                prefetch.launch(next_idx, self.layers.x, own_pulled)

    def _look_ahead_by_partial(self, layer_idx: int, shared: Tensor | None) -> None:
        """Launches a prediction by the partial hidden state: the next attention comes first, on no fork."""
        prefetch, queues, next_idx, partial = self.prefetch, self.inputs.queues, layer_idx + 1, self.own.partial
        if prefetch is None or not prefetch.prediction.needs_partial(next_idx):
            return
        queues.join("next")
        self._add_up(layer_idx, partial, shared, None, None)
        for layer in range(self.spec.moe_layers[layer_idx] + 1, self.spec.moe_layers[next_idx] + 1):
            self.layers.run(layer, partial)
        with queues.forked("next"):
            prefetch.launch(next_idx, partial, self._own_pulled)


def _layer_experts(step: TokenStep, layer_idx: int) -> _LayerExperts:
    memory, inputs = step.weights.memory, step.inputs
    placement, landing = memory.placement, memory.landing[layer_idx]
    is_full = placement.first_dynamic[layer_idx] == step.spec.expert.intermediate_size
    if is_full.all() and placement.has_selector[layer_idx].all():
        return _LayerExperts(step, layer_idx)
    if placement.misses == "pull":
        return _PulledExperts(step, layer_idx)
    if inputs.pulled_share > 0 and landing.slots.shape[1] + landing.num_scratch > 0:
        return _SharedExperts(step, layer_idx)
    return _SplitExperts(step, layer_idx)
