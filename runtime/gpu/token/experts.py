"""The routed experts of a layer, as launches of a token's graph; importing this needs Triton.

The GPU computes those experts, or their neurons, that are in its memory. On forks of the graph the CPU computes its
share (`cpu_share`), and the link brings missing records. `step.TokenStep` launches all layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.gpu import cpu_share, devices, placements
from moe_pack.runtime.gpu.kernels import elementwise, rotation
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select, select_programs, sums_at_once
from moe_pack.runtime.gpu.kernels.predict import PulledAhead, enter_pulled
from moe_pack.runtime.gpu.kernels.pull import pull_records, pull_selectors
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.kernels.tables import HostRows, KeptNeurons, Landing, LeftToCpu, RunningNeurons
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.token.layers import TokenLayers

_ALIGNED = 4  # entries: Triton compiles a kernel for tensors that begin at multiples of 16 bytes, and one for others


class _Inputs(Protocol):
    """The part of `step.StepInputs` that experts use, read-only."""

    @property
    def queues(self) -> devices.Queues: ...
    @property
    def share(self) -> cpu_share.CpuShare | None: ...
    @property
    def exchange(self) -> cpu_share.Exchange: ...
    @property
    def pulled_share(self) -> float: ...
    @property
    def whole_records(self) -> NDArray[np.float64]: ...
    @property
    def by_expert(self) -> bool: ...


class _Step(Protocol):
    """The part of a pass that experts use."""

    @property
    def weights(self) -> GpuWeights: ...
    @property
    def layers(self) -> TokenLayers: ...
    @property
    def own(self) -> "Buffers": ...
    @property
    def host_rows(self) -> list[HostRows]: ...
    @property
    def inputs(self) -> _Inputs: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A token of a layer with missing rows, whose launches are those of a token alone."""

    experts: Tensor  # int32 [k], the token's part of the layer's routes; so are the next two of the step's buffers
    running: RunningNeurons
    partials: Tensor
    pulled_partials: Tensor
    landing: Landing
    left: tuple[LeftToCpu, ...]  # of each turn
    kept: KeptNeurons | None = None  # whose records stay for the tokens that follow in this layer


class LayerExperts:
    """The launches of a layer's experts that are resident for the whole run, for T tokens at once.

    Args:    num_rows: T, at most that of the step's buffers.
    """

    is_whole = True
    _is_split = False

    def __init__(self, step: _Step, layer_idx: int, num_rows: int) -> None:
        memory, inputs, own = step.weights.memory, step.inputs, step.own
        self._num_rows, self._k = num_rows, step.weights.spec.router.num_experts_per_tok
        self._experts = step.layers.routes[layer_idx].view(-1)[: num_rows * self._k]
        self._running = own.running[layer_idx].of_tokens(0, num_rows, self._k)
        self._partials = own.partials[: num_rows * self._k]
        self._tables, self._landing = memory.layers[layer_idx], memory.landing[layer_idx]
        self._queues, self._own, self._by_expert = inputs.queues, own, inputs.by_expert
        self._whole_records = float(inputs.whole_records[layer_idx])
        self._left = [inputs.exchange.left[turn][layer_idx] for turn in range(placements.NUM_TURNS)]

    def launch(self, turn: int, x: Tensor, then: Callable[[devices.Mark], None]) -> Tensor | None:
        """Launches the experts; returns the partial sums of pulled neurons if they are not among the others.

        Args:    x: float32 [T, d], the stored rows' input.   then: launches what runs at the same time as the longest
                 kernel; it gets the mark after the layer's own records.
        """
        select(x, self._experts, self._tables, self._running)
        compact(
            self._experts, self._tables, self._running, self._landing, self._own.pulled_share, self._left[turn],
            is_split=False, num_tokens=self._num_rows,
        )  # fmt: skip
        then(self._queues.mark())
        neurons(x, self._experts, self._tables, self._running, self._partials, "here")
        return None


class _IncompleteExperts(LayerExperts):
    """The launches of a layer's experts of which rows are missing: those of its tokens follow one another."""

    is_whole = False

    def __init__(self, step: _Step, layer_idx: int, num_rows: int) -> None:
        super().__init__(step, layer_idx, num_rows)
        self._rows = [self._row(row, step.inputs.exchange.of_row(row), layer_idx) for row in range(num_rows)]

    def _row(self, row: int, exchange: cpu_share.Exchange, layer_idx: int) -> _Row:
        its = slice(row * self._k, (row + 1) * self._k)
        return _Row(
            experts=self._experts[its],
            running=self._running.of_tokens(row, 1, self._k),
            partials=self._own.partials[its],
            pulled_partials=self._own.pulled_partials[its],
            landing=self._landing,
            left=tuple(of_turn[layer_idx] for of_turn in exchange.left),
        )

    def _list(self, turn: int, row: _Row, x: Tensor, selector_units: Tensor | None) -> None:
        """Launches the search for a token's running neurons, and the decision who computes them.

        Args:    x: float32 [d].
        """
        select(x, row.experts, self._tables, row.running, selector_units)
        compact(
            row.experts, self._tables, row.running, row.landing, self._own.pulled_share, row.left[turn],
            self._is_split, self._whole_records, self._by_expert, kept=row.kept,
        )  # fmt: skip


class PulledExperts(_IncompleteExperts):
    """The launches of a layer's experts that the GPU computes alone: the link brings missing rows.

    Each other token keeps the first records that it pulls, as far as there is memory, and enters them in the table for
    the tokens that follow it in this layer.
    """

    def __init__(self, step: _Step, layer_idx: int, num_rows: int) -> None:
        super().__init__(step, layer_idx, num_rows)
        self._host_rows = step.host_rows[layer_idx]
        self._lacks_selectors = not step.weights.memory.placement.has_selector[layer_idx].all()
        self._kept = self._keep(step.weights.memory.placement, layer_idx)

    def _keep(self, placement: placements.GpuPlacement, layer_idx: int) -> PulledAhead | None:
        """Gives the other tokens memory for records that they keep; returns it, or None without any."""
        own, k, num_places = self._own, self._k, (self._num_rows - 1) * self._k
        slot_bytes = int(placement.slot_bytes[layer_idx])
        most = min(placement.kept_bytes // slot_bytes // max(num_places, 1), placement.num_rows)
        most = most // _ALIGNED * _ALIGNED
        if not num_places or not most:
            return None
        neurons = own.kept_neurons[: num_places * most].view(num_places, most)
        kept = PulledAhead(self._experts[k:], neurons, own.kept_counts[:num_places])
        for number, row in enumerate(self._rows[1:]):
            its = _places(kept, number * k, (number + 1) * k)
            at = own.kept_at + number * k * most * slot_bytes // 16
            landing = row.landing._replace(kept_at=at, num_kept=most)
            self._rows[number + 1] = replace(row, landing=landing, kept=KeptNeurons(its.neurons, its.counts))
        return kept

    def launch(self, turn: int, x: Tensor, then: Callable[[devices.Mark], None]) -> Tensor | None:
        """Launches the experts, as `LayerExperts.launch`."""
        tables, kept, rows_of_x = self._tables, self._kept, x.view(self._num_rows, -1)
        for number, row in reversed(list(enumerate(self._rows))):
            selector_units = None
            if self._lacks_selectors:
                selector_units = self._own.selector_units
                scratch_at = row.landing.scratch_at + self._k * row.landing.num_scratch * row.landing.slot_units
                pull_selectors(row.experts, tables, self._host_rows, scratch_at, selector_units)
            self._list(turn, row, rows_of_x[number], selector_units)
            pull_records(row.experts, tables, row.running, self._host_rows, is_split=False)
            if number == 0:
                if kept is not None:  # the next layer's tokens overwrite the records
                    enter_pulled(kept, tables.record_at, -1, 0)
                then(self._queues.mark())
            elif kept is not None:
                its = _places(kept, (number - 1) * self._k, number * self._k)
                enter_pulled(its, tables.record_at, row.landing.kept_at, row.landing.slot_units)
            neurons(rows_of_x[number], row.experts, tables, row.running, row.partials, "here")
        return None


def _places(kept: PulledAhead, begin: int, end: int) -> PulledAhead:
    return PulledAhead(*(each[begin:end] for each in kept))


class SplitExperts(_IncompleteExperts):
    """The launches of a layer's experts with missing rows that the CPU computes."""

    _is_split = True

    def __init__(self, step: _Step, layer_idx: int, num_rows: int) -> None:
        super().__init__(step, layer_idx, num_rows)
        assert step.inputs.share is not None, "what is neither resident nor pulled has a share of the CPU"
        self._layer_idx, self._share = layer_idx, step.inputs.share
        self._exchange, self._layers = step.inputs.exchange, step.layers

    def launch(self, turn: int, x: Tensor, then: Callable[[devices.Mark], None]) -> Tensor | None:
        """Launches the experts, as `LayerExperts.launch`."""
        for row, its_x in zip(self._rows, x.view(self._num_rows, -1), strict=True):
            self._list(turn, row, its_x, None)
        # Before records are pulled: while they are, these few bytes take the link ten times as long (H200).
        own, there = self._layers, self._exchange
        given = own.normed if self._share.adds_output else x
        given = given.view(-1)[: x.numel()]
        weights = own.router_weights if self._share.adds_output else own.output_weights
        weights = weights.view(-1)[: self._num_rows * self._k]
        elementwise.hand_over(given, weights, self._experts, there.x, there.weights, there.experts)
        own_pulled = self._queues.mark()
        with self._queues.forked("cpu"):
            self._share.launch(turn, self._layer_idx, self._num_rows)
        pulled, own_pulled = self._pull_share(x, own_pulled)
        then(own_pulled)
        neurons(x, self._experts, self._tables, self._running, self._partials, "here")
        return pulled

    def _pull_share(self, x: Tensor, own_pulled: devices.Mark) -> tuple[Tensor | None, devices.Mark]:
        return None, own_pulled


class SharedExperts(SplitExperts):
    """The launches of a layer's experts with missing rows that the CPU and the link share."""

    def __init__(self, step: _Step, layer_idx: int, num_rows: int) -> None:
        super().__init__(step, layer_idx, num_rows)
        self._host_rows = step.host_rows[layer_idx]

    def _pull_share(self, x: Tensor, own_pulled: devices.Mark) -> tuple[Tensor | None, devices.Mark]:
        with self._queues.forked("link"):
            for row, its_x in zip(self._rows, x.view(self._num_rows, -1), strict=True):
                pull_records(row.experts, self._tables, row.running, self._host_rows, is_split=True)
                own_pulled = self._queues.mark()
                neurons(its_x, row.experts, self._tables, row.running, row.pulled_partials, "pulled")
        return self._own.pulled_partials[: self._num_rows * self._k], own_pulled


class Buffers:
    """The buffers of experts of T tokens at most, which all layers and all graphs use.

    Args:    num_rows: T.
    """

    def __init__(
        self, weights: GpuWeights, device: torch.device, num_sms: int, pulled_share: float, num_rows: int = 1
    ) -> None:
        spec, offsets = weights.spec, weights.memory.record_at.dtype
        f, k, d = spec.expert.intermediate_size, spec.router.num_experts_per_tok, spec.hidden_size
        num_layers, num_places = len(spec.moe_layers), num_rows * k
        is_rotated = any(weights.rotation(layer_idx) is not None for layer_idx in range(num_layers))
        kinds = weights.memory.layers[0].kinds  # those of all layers
        # A token has as many blocks and partial sums as it has alone.
        running = RunningNeurons.allocate(k, f, device, offsets, select_programs(kinds), num_rows)
        self.totals = torch.zeros((num_layers, num_places, 4), dtype=torch.int32, device=device)
        self.running = [running._replace(totals=totals) for totals in self.totals]
        num_sums = num_partials(k, f, num_sms, sums_at_once(kinds))
        self.partials, self.pulled_partials = (torch.zeros((num_places, num_sums, d), device=device) for _ in range(2))
        self.selector_units = torch.zeros((k, f), dtype=offsets, device=device)
        self.pulled_share = torch.tensor([pulled_share], device=device)
        self.num_changed = torch.zeros((num_layers, num_rows), dtype=torch.int32, device=device)
        # Of rotated layers: the input of experts, and the sum of their outputs.
        self.turned, self.sum = (torch.zeros((num_rows * is_rotated, d), device=device) for _ in range(2))
        self.matrix = rotation.device_matrix(d, device)
        self.from_tier = torch.zeros((num_rows, d), device=device)
        self.partial = torch.zeros((1, spec.stream_width), device=device)
        # Records that several tokens of a layer use (`PulledExperts`): where they begin, of which neurons they are, and
        # how many each place has.
        memory, placement = weights.memory, weights.memory.placement
        self.kept_at = memory.dynamic_at + (placement.scratch_bytes - placement.kept_bytes) // 16
        num_kept = placement.kept_bytes // int(placement.slot_bytes.min())
        self.kept_neurons = torch.zeros(num_kept, dtype=torch.int32, device=device)
        self.kept_counts = torch.zeros(num_places - k, dtype=torch.int32, device=device)


def layer_experts(step: _Step, layer_idx: int, num_rows: int = 1) -> LayerExperts:
    """Returns the launches of a layer's experts for so many tokens, by where their rows are."""
    memory, inputs = step.weights.memory, step.inputs
    placement, landing = memory.placement, memory.landing[layer_idx]
    is_full = placement.first_dynamic[layer_idx] == step.weights.spec.expert.intermediate_size
    if is_full.all() and placement.has_selector[layer_idx].all():
        return LayerExperts(step, layer_idx, num_rows)
    if placement.misses == "pull":
        return PulledExperts(step, layer_idx, num_rows)
    if inputs.pulled_share > 0 and landing.num_scratch > 0:
        return SharedExperts(step, layer_idx, num_rows)
    return SplitExperts(step, layer_idx, num_rows)
