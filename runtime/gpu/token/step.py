"""A pass of few tokens on a GPU, as launches that a CUDA graph repeats; importing this needs Triton.

Launches of a layer's routed experts are in `experts`. For a token alone the link brings records of the next layer's
predicted experts on a fork of the graph (`prefetch`). No launch waits for Python; `decoder.GpuDecoder` runs them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.gpu import cpu_share, devices, placements
from moe_pack.runtime.gpu.kernels import elementwise, grids, matmul, rotation
from moe_pack.runtime.gpu.kernels.router import ChangedChoice
from moe_pack.runtime.gpu.kernels.rows import stored_part
from moe_pack.runtime.gpu.kernels.tables import HostRows
from moe_pack.runtime.gpu.prefill import GpuWeights
from moe_pack.runtime.gpu.token import experts
from moe_pack.runtime.gpu.token.layers import TokenLayers
from moe_pack.runtime.gpu.token.prefetch import ExpertPrediction, PredictionPlan, RecordPrefetch


@dataclass(frozen=True, slots=True, eq=False)
class Substitution:
    """Resident experts run in place of missing ones with low scores, which changes the answer."""

    alpha: float  # 0 to 1, as in `runtime.offload.split.substitute`
    is_resident: NDArray[np.bool_]  # [L, E], experts that may stand in for others, and that no other replaces


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """All that launches use, except weights and their own buffers."""

    queues: devices.Queues
    host: devices.HostArena | None  # experts in page-locked memory; None if the CPU's own engine has them
    share: cpu_share.CpuShare | None  # computes what is left to the CPU; None if everything is pulled or resident
    exchange: cpu_share.Exchange  # of the share
    pulled_share: float  # of the missing records, that the link brings
    whole_records: NDArray[np.float64]  # [L], the work of the CPU for an expert without its selector, in records
    prediction: PredictionPlan | None = None  # of experts; None: none are predicted
    substitution: Substitution | None = None  # of experts; None: nothing replaces them
    # Whether Algorithm 2 of *importance* splits a layer's missing experts one by one; `pulled_share` is then the link's
    # rate divided by both rates, and no other is tried.
    by_expert: bool = False


class ReceivedRows(NamedTuple):
    """Hidden states of rows, which come from another device before a graph runs."""

    rows: Tensor  # float32 [R, w]
    numbers: Tensor  # int32 [R], 0, 1, 2 and so on

    @classmethod
    def allocate(cls, x: Tensor) -> "ReceivedRows":
        """Allocates for as many rows as x [R, w] has."""
        return cls(torch.zeros_like(x), torch.arange(len(x), dtype=torch.int32, device=x.device))

    def enter(self, x: Tensor) -> None:
        """Launches the copy of the first rows to x [T, w], by a kernel, after which another one may start early."""
        matrix = matmul.StoredRows(self.rows, stored_part("F32", self.rows.shape[1]))
        matmul.gather_row(matrix, self.numbers[: len(x)], x)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The layers and the experts of passes of so many rows."""

    weights: GpuWeights
    layers: TokenLayers
    own: experts.Buffers
    host_rows: list[HostRows]
    inputs: StepInputs


class TokenStep:
    """The launches of few tokens, experts included, and the page-locked memory that the host exchanges with them.

    Args:    layers: by number of rows, 1 among them, with the same buffers.   num_sms: multiprocessors of the GPU, by
             which work is divided.
    """

    def __init__(
        self,
        weights: GpuWeights,
        layers: Mapping[int, TokenLayers],
        inputs: StepInputs,
        num_sms: int,
    ) -> None:
        alone, num_layers = layers[1], len(weights.spec.moe_layers)
        device = alone.x.device
        self.weights, self.inputs, self.spec = weights, inputs, weights.spec
        self.own = experts.Buffers(weights, device, num_sms, inputs.pulled_share, max(layers))
        self.host_rows: list[HostRows] = []  # by layer; none without host memory, from which records are pulled
        if inputs.host is not None:
            extents = [torch.from_numpy(at // 16).to(device) for at in inputs.host.extent_at]
            self.host_rows = [HostRows(inputs.host.rows(l), extent_at) for l, extent_at in enumerate(extents)]
        self.prefetch: RecordPrefetch | None = None
        is_whole = weights.memory.placement.is_whole
        if inputs.prediction is not None and not is_whole:
            prediction = ExpertPrediction(inputs.prediction, weights, alone)
            self.prefetch = RecordPrefetch(prediction, weights, alone, inputs.queues, self.host_rows)
        self._rows = {number: _Rows(weights, each, self.own, self.host_rows, inputs) for number, each in layers.items()}
        self._experts = {
            number: [experts.layer_experts(rows, l, number) for l in range(num_layers)]
            for number, rows in self._rows.items()
        }
        residents = self._residents(device)
        self._choices = {
            number: [None if is_whole else self._changed_choice(l, number, residents) for l in range(num_layers)]
            for number in self._rows
        }
        self._own_pulled = devices.Mark(None)  # reached when what a layer itself pulls is there
        self._copies: list[tuple[Tensor, Tensor]] = []  # page-locked memory of all turns, and what is copied to it
        buffers = alone.buffers
        self.routes = self._page_locked(buffers.routes)  # int32 [turns, L, R, k]
        self.totals = self._page_locked(self.own.totals)  # int32 [turns, L, R * k, 4]: HERE, PULLED, LEFT, MISSING
        # int32 [turns, L, n, 3], the prefetch's totals.
        self.ahead = self._page_locked(None if self.prefetch is None else self.prefetch.totals)
        # int32 [turns, L, R], experts that ran in place of the routers'.
        self._num_changed = self._page_locked(self.own.num_changed if any(self._choices[1]) else None)
        # The hidden states of rows, from the layers on another device; None: rows begin with embeddings.
        self.received = None if weights.begins else ReceivedRows.allocate(buffers.x)

    def run(self, turn: int, num_rows: int = 1) -> None:
        """Launches the forward pass, from the rows in their buffer to `logits`, `routes` and `totals`."""
        layers, spec = self._rows[num_rows].layers, self.spec
        if self.received is None:
            layers.start()
        else:
            self.received.enter(layers.x)
        # Where all experts are resident, nothing forks, and no copy comes between.
        with grids.chained(self.weights.memory.placement.is_whole and layers.is_chained):
            layer_idx = 0
            for layer in range(spec.num_hidden_layers):
                layers.run(layer, layers.x)
                if layer in spec.moe_layers:
                    self.inputs.queues.join("next")
                    shared = layers.route(layer_idx, self._choices[num_rows][layer_idx])
                    self._add_experts(turn, layer_idx, shared, num_rows)
                    layer_idx += 1
            self.inputs.queues.join("next")
            if self.weights.ends:
                layers.finish()
        for there, here in self._copies:
            there[turn].copy_(here, non_blocking=True)

    def pull(self, share: float) -> None:
        """Lets the link bring another share of the missing records, in captured graphs too."""
        self.own.pulled_share.fill_(share)

    def pull_ahead(self, share: float) -> None:
        """Lets the link bring another share of the predicted experts' records, in captured graphs too."""
        assert self.prefetch is not None, "experts are predicted"
        self.prefetch.share.fill_(share)

    @contextmanager
    def unpredicted(self) -> Iterator[None]:
        """Launches nothing of predictions in this context."""
        prefetch, self.prefetch = self.prefetch, None
        yield
        self.prefetch = prefetch

    def num_changed(self, turn: int, num_rows: int) -> int:
        """Returns how many experts ran in place of the routers' in a pass that has ended."""
        changed = [layer_idx for layer_idx, choice in enumerate(self._choices[num_rows]) if choice is not None]
        return int(self._num_changed[turn, changed, :num_rows].sum()) if changed else 0

    def _page_locked(self, here: Tensor | None) -> Tensor:
        """Returns memory for each turn's copy of a tensor, which has no values if there is no tensor."""
        if here is None:
            return torch.zeros((placements.NUM_TURNS, 0), dtype=torch.int32)
        there = torch.zeros((placements.NUM_TURNS, *here.shape), dtype=here.dtype, pin_memory=here.is_cuda)
        self._copies.append((there, here))
        return there

    def _residents(self, device: torch.device) -> list[Tensor]:
        """Returns which experts of each layer nothing replaces, int32 [E]; none without substitution."""
        substitution = self.inputs.substitution
        if substitution is None:
            return []
        return list(torch.from_numpy(substitution.is_resident.astype(np.int32)).to(device))

    def _changed_choice(self, layer_idx: int, num_rows: int, residents: list[Tensor]) -> ChangedChoice | None:
        number, k = self.own.num_changed[layer_idx, :num_rows], self.spec.router.num_experts_per_tok
        plan, substitution, prefetch = self.inputs.prediction, self.inputs.substitution, self.prefetch
        runs_predicted = plan is not None and plan.runs_predicted and plan.num_predicted >= k
        # Nothing is predicted for several tokens: their routers choose, as on the CPU.
        if runs_predicted and num_rows == 1 and prefetch is not None and layer_idx in prefetch.prediction.launches:
            return ChangedChoice(prefetch.prediction.experts, None, 0.0, number)
        if substitution is None:
            return None
        return ChangedChoice(None, residents[layer_idx], substitution.alpha, number)

    def _add_experts(self, turn: int, layer_idx: int, shared: Tensor | None, num_rows: int) -> None:
        """Launches a layer's experts; adds their sum and the shared experts' output to the hidden states."""
        layers, rotated, share = self._rows[num_rows].layers, self.weights.rotation(layer_idx), self.inputs.share
        x, own, launches = layers.expert_inputs, self.own, self._experts[num_rows][layer_idx]
        if rotated is not None:
            x = own.turned[:num_rows]
            rotation.rotate(layers.expert_inputs, rotated, own.matrix, x)
        is_alone = num_rows == 1

        def then(own_pulled: devices.Mark) -> None:
            if is_alone:
                self._look_ahead(layer_idx, own_pulled)

        pulled = launches.launch(turn, x, then)
        if is_alone:
            self._look_ahead_by_partial(layer_idx, shared)
        self.inputs.queues.join("cpu", "link")
        y, from_tier = self.inputs.exchange.y[:num_rows], None
        is_shared = share is not None and not launches.is_whole
        if share is not None and is_shared and share.adds_output:
            from_tier = own.from_tier[:num_rows].copy_(y, non_blocking=True)
        from_cpu = y if is_shared and from_tier is None else None
        self._add_up(layer_idx, layers.x, shared, (pulled, from_cpu), num_rows, from_tier)

    def _add_up(
        self,
        layer_idx: int,
        out: Tensor,
        shared: Tensor | None,
        others: tuple[Tensor | None, Tensor | None],
        num_rows: int = 1,
        from_tier: Tensor | None = None,
    ) -> None:
        """Launches the sum of a layer's outputs and the hidden states, which goes to `out`.

        Args:    others: partial sums of pulled neurons, and the CPU's share.   from_tier: the output of the CPU's own
                 engine, rotated back already.
        """
        layers, rotated, (pulled, host) = self._rows[num_rows].layers, self.weights.rotation(layer_idx), others
        own, weights, scale = self.own, layers.output_weights, self.spec.residual_multiplier
        partials = own.partials[: weights.numel()]
        ends = {"residual": layers.x, "shared": shared} if layers.is_plain else {}
        to, by = (out, scale) if layers.is_plain else (layers.routed, 1.0)
        if rotated is None:
            elementwise.reduce(partials, weights, to, pulled=pulled, host=host, scale=by, **ends)
        else:
            total = own.sum[:num_rows]
            elementwise.reduce(partials, weights, total, pulled=pulled, host=host)
            rotation.rotate_back(total, rotated, own.matrix, to, scale=by, **ends)
        if from_tier is not None:
            to.add_(from_tier, alpha=by)
        if not layers.is_plain:
            layers.end_layer(layer_idx, layers.routed, shared, out)

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
                prefetch.launch(next_idx, self._rows[1].layers.x, own_pulled)

    def _look_ahead_by_partial(self, layer_idx: int, shared: Tensor | None) -> None:
        """Launches a prediction by the partial hidden state: the next attention comes first, on no fork."""
        prefetch, queues, next_idx, partial = self.prefetch, self.inputs.queues, layer_idx + 1, self.own.partial
        if prefetch is None or not prefetch.prediction.needs_partial(next_idx):
            return
        queues.join("next")
        self._add_up(layer_idx, partial, shared, (None, None))
        for layer in range(self.spec.moe_layers[layer_idx] + 1, self.spec.moe_layers[next_idx] + 1):
            self._rows[1].layers.run(layer, partial)
        with queues.forked("next"):
            prefetch.launch(next_idx, partial, self._own_pulled)
