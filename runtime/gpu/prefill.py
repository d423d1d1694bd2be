"""A pack's weights on a GPU, and passes of many tokens: experts stream through memory while others run.

Experts that are not resident as a whole are copied from host memory, in one piece each, into a ring (`ExpertStream`)
that takes all of the dynamic memory. While a layer runs, the next one's experts follow, as far as the ring has space.
Importing this needs Triton.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.pack.layouts import DenseLayout
from moe_pack.runtime import model
from moe_pack.runtime.gpu import devices
from moe_pack.runtime.gpu.cpu_share import PromptShare
from moe_pack.runtime.gpu.kernels import grouped
from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.gpu.weights import DeviceMatrix, ExpertMemory
from moe_pack.runtime.model.compute.weights import from_experts, to_experts
from moe_pack.runtime.offload import ExpertKey


@dataclass(slots=True, eq=False)
class _Coming:
    key: ExpertKey
    begin: int  # in bytes of the dynamic memory
    end: int
    copied: devices.Mark  # reached when all its bytes are there
    done: devices.Mark | None = None  # reached when it has run; None until it is launched


class ExpertStream:
    """The missing rows of experts on their way from host memory to a ring of the GPU's dynamic memory."""

    def __init__(
        self, pack: Pack, memory: ExpertMemory, host: devices.HostArena | None, queues: devices.Queues
    ) -> None:
        self._pack, self._memory, self._host, self._queues = pack, memory, host, queues
        begin = 16 * memory.dynamic_at
        self._ring = memory.arena[begin : begin + memory.placement.dynamic_bytes]
        self._entries = deque[_Coming]()
        self._end = 0

    def begin_pass(self) -> None:
        """Takes all of the dynamic memory: what lies in it is overwritten after what was launched until now."""
        if len(self._ring):
            self._end = 0
            self._entries = deque(
                [_Coming(ExpertKey(-1, -1), 0, len(self._ring), devices.Mark(None), self._queues.mark())]
            )

    def end_pass(self) -> None:
        """Makes the computation wait for copies that no expert waited for: something else may lie there from now on."""
        for entry in self._entries:
            self._queues.wait_for(entry.copied)

    def is_static(self, key: ExpertKey) -> bool:
        """Whether all rows of an expert are resident for the whole run."""
        placement = self._memory.placement
        f = self._memory.kinds[key.layer_idx][key.expert].num_rows
        return bool(placement.has_selector[key] and placement.first_dynamic[key] == f)

    def find(self, key: ExpertKey) -> _Coming | None:
        """Returns an expert that is on its way or there."""
        return next((entry for entry in self._entries if entry.key == key and entry.done is None), None)

    def request(self, key: ExpertKey) -> bool:
        """Begins to copy an expert's missing rows; returns whether the ring has space."""
        assert self._host is not None, "experts are in host memory"
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        start, stop = self.missing(key)
        size = -(-(stop - start) // devices.LINE_BYTES) * devices.LINE_BYTES
        begin = self._end if self._end + size <= len(self._ring) else 0
        marks = self._overwritten(begin, begin + size)
        if marks is None:
            return False
        source = self._host.extent(key.layer_idx, key.expert, layout.num_bytes)[start:stop]
        to = self._ring[begin : begin + stop - start]
        copied = self._queues.beside(lambda: to.copy_(source, non_blocking=True), marks)
        self._entries.append(_Coming(key, begin, begin + size, copied))
        self._end = begin + size
        return True

    def rows_at(self, entry: _Coming) -> tuple[int, int]:
        """Returns where selector row 0 and record 0 would lie, in units of 16 bytes, as far as they are in the ring."""
        layout = self._pack.layout.experts[entry.key.layer_idx][entry.key.expert]
        begin = self._memory.dynamic_at + (entry.begin - self.missing(entry.key)[0]) // 16
        return begin, begin + layout.selector_bytes // 16

    def release(self, keys: Sequence[ExpertKey], done: devices.Mark) -> None:
        """Gives back the space of experts after a mark."""
        for entry in self._entries:
            if entry.key in keys and entry.done is None:
                entry.done = done

    def release_others(self, keys: Sequence[ExpertKey], done: devices.Mark) -> None:
        """Gives back the space of all other experts after a mark."""
        self.release([entry.key for entry in self._entries if entry.key not in keys], done)

    def missing(self, key: ExpertKey) -> tuple[int, int]:
        """Returns the part of an expert's extent that is not resident: one piece, in bytes."""
        placement, layout = self._memory.placement, self._pack.layout.experts[key.layer_idx][key.expert]
        stop = layout.selector_bytes + layout.records_bytes
        if not placement.has_selector[key]:
            return 0, stop
        return layout.selector_bytes + int(placement.first_dynamic[key]) * layout.records.row_bytes, stop

    def _overwritten(self, begin: int, end: int) -> list[devices.Mark] | None:
        """Forgets the oldest experts that lie in a piece of the ring; returns their marks, None if one has not run."""
        in_way = [entry for entry in self._entries if entry.begin < end and begin < entry.end]
        if any(entry.done is None for entry in in_way):
            return None
        rest = [entry for entry in self._entries if entry not in in_way]
        whole = [entry for entry in in_way if entry.key.layer_idx < 0 and entry.end > end]
        for entry in whole:  # what was there before the pass: the rest of it is still to be waited for
            rest.append(_Coming(entry.key, end, entry.end, entry.copied, entry.done))
        self._entries = deque(rest)
        return [entry.done for entry in in_way if entry.done is not None]


class GpuWeights(model.PackWeights, model.ExpertRunner):
    """The weights of an open pack on a device; memory of experts, host memory and queues stay the caller's.

    `is_streaming`: whether a pass of many tokens has used the dynamic memory since `begin_token`.
    Args:    chunk_tokens: of a forward pass, at most.   tier: the CPU's own engine, which runs experts that are not in
             GPU memory; None if `host` has them all.   share: the CPU's of missing experts; None if all are copied.
             is_fast: whether many tokens are multiplied in bfloat16; routers' products stay as exact as float32's.
    """

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        memory: ExpertMemory,
        host: devices.HostArena | None,
        queues: devices.Queues,
        chunk_tokens: int,
        tier: model.ExpertRunner | None = None,
        share: PromptShare | None = None,
        is_fast: bool = False,
    ) -> None:
        self._is_fast = is_fast
        super().__init__(pack, device, GpuOperations())
        self.memory, self.stream = memory, ExpertStream(pack, memory, host, queues)
        self._queues, self._tier, self._share = queues, tier, share
        f, d, k = pack.spec.expert.intermediate_size, pack.spec.hidden_size, pack.spec.router.num_experts_per_tok
        self._hidden = torch.empty((grouped.max_pairs(chunk_tokens, k, f), f), device=device)
        self._outputs = torch.empty((chunk_tokens * k, d), device=device)

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation, whose size is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> model.Matrix:
        return DeviceMatrix(dense, raw, self._is_fast and not dense.role.name.endswith("router"))

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: model.PartialState | None = None,
    ) -> Tensor:
        """Returns the weighted sum of a layer's routed experts [T, k] for tokens x float32 [T, d]."""
        inputs = to_experts(x, self, layer_idx)
        # The host waits once a layer, because it has to know which experts have tokens.
        chosen, weights = experts.cpu(), router_weights.cpu()
        num_experts = len(self.memory.kinds[layer_idx])
        pass_ = _Pass.of(layer_idx, chosen, weights, self.stream, num_experts)
        self.bytes_read += sum(self._pack.layout.experts[layer_idx][expert].num_bytes for expert in pass_.order)
        outputs, x_of_gpu = self._outputs[: chosen.numel()], inputs.bfloat16() if self._is_fast else inputs
        others = on_cpu = None
        num_streamed = len(pass_.missing)
        if pass_.missing and self._tier is not None:
            others, num_streamed = self._run_by_tier(self._tier, layer_idx, x, chosen, weights, pass_.missing), 0
        elif pass_.missing and self._share is not None:
            on_cpu, num_streamed = self._start_on_cpu(self._share, layer_idx, inputs, chosen, weights, pass_)
        if num_streamed < len(pass_.missing):
            outputs.zero_()  # of those the GPU does not compute
        pairs = [torch.from_numpy(each).to(self._device) for each in pass_.pairs[:3]]
        self._run(pass_, pairs, 0, len(pass_.static), x_of_gpu, outputs)
        self._stream_and_run(pass_, pairs, num_streamed, x_of_gpu, outputs)
        self._stream_ahead(layer_idx + 1, chosen.numel())
        y = torch.empty_like(x)
        grouped.combine(outputs, y)
        if on_cpu is not None:
            y += on_cpu.result().to(self._device)
        y = from_experts(y, self, layer_idx)
        return y if others is None else y + others.to(self._device)

    def _start_on_cpu(
        self, share: PromptShare, layer_idx: int, x: Tensor, experts: Tensor, weights: Tensor, pass_: "_Pass"
    ) -> tuple[Future[Tensor] | None, int]:
        """Begins to compute some missing experts on the CPU, and puts them last; returns the number of the others."""
        jobs = {expert: (tokens, of_tokens) for expert, tokens, of_tokens in model.tokens_by_expert(experts, weights)}
        num_tokens = [len(jobs[expert][0]) for expert in pass_.missing]
        pieces = [self.stream.missing(ExpertKey(layer_idx, expert)) for expert in pass_.missing]
        num_bytes = [stop - start for start, stop in pieces]
        on_cpu = share.choose(layer_idx, pass_.missing, num_tokens, num_bytes)
        pass_.put_last(on_cpu)
        if not on_cpu:
            return None, len(pass_.missing)
        started = share.start(layer_idx, x.cpu(), [(expert, *jobs[expert]) for expert in on_cpu])
        return started, len(pass_.missing) - len(on_cpu)

    def _stream_and_run(self, pass_: "_Pass", pairs: list[Tensor], number: int, x: Tensor, outputs: Tensor) -> None:
        """Runs the first missing experts, as many at once as the ring has space for."""
        layer_idx = pass_.layer_idx
        waiting = [ExpertKey(layer_idx, expert) for expert in pass_.missing[:number]]
        self.stream.release_others(waiting, self._queues.mark())
        start = len(pass_.static)
        while waiting:
            group = list[ExpertKey]()
            while waiting and (self.stream.find(waiting[0]) or self.stream.request(waiting[0])):
                group.append(waiting.pop(0))
            assert group, "the ring has space for the largest expert"
            self._run(pass_, pairs, start, start + len(group), x, outputs)
            self.stream.release(group, self._queues.mark())
            start += len(group)

    def _stream_ahead(self, layer_idx: int, num_choices: int) -> None:
        """Begins to copy the next layer's experts, if about all of them will have tokens."""
        if self._tier is not None or layer_idx >= len(self.memory.kinds) or self.memory.placement.is_whole:
            return
        keys = [ExpertKey(layer_idx, e) for e in range(len(self.memory.kinds[layer_idx]))]
        if num_choices < 2 * len(keys):
            return
        for key in keys:
            if not (self.stream.is_static(key) or self.stream.find(key) or self.stream.request(key)):
                return

    def _run(self, pass_: "_Pass", pairs: list[Tensor], start: int, stop: int, x: Tensor, outputs: Tensor) -> None:
        """Runs experts `start` to `stop` of a pass, whose rows are all resident or in the ring."""
        experts, counts = pass_.order[start:stop], pass_.pairs.counts[start:stop]
        if not counts.sum():
            return
        kinds = self.memory.layers[pass_.layer_idx].kinds
        kind_idx = np.array([kinds.index(self.memory.kinds[pass_.layer_idx][expert]) for expert in experts])
        plan = grouped.plan_tiles(counts, kind_idx, kinds, len(self._hidden), is_bf16=x.dtype == torch.bfloat16)
        first = int(pass_.pairs.counts[:start].sum())
        some = slice(first, first + int(counts.sum()))
        tokens, places, weights = (each[some] for each in pairs)
        group, tiles = self._group(pass_.layer_idx, experts), torch.from_numpy(plan.tiles).to(self._device)
        grouped.run_group(x.contiguous(), tokens, places, weights, group, plan, tiles, self._hidden, outputs)

    def _group(self, layer_idx: int, experts: Sequence[int]) -> grouped.ExpertGroup:
        """Returns some experts of a layer with the places of all their rows; waits for their copies."""
        tables, kinds = self.memory.layers[layer_idx], self.memory.kinds[layer_idx]
        offsets = self.memory.static_at.dtype
        begins = np.zeros((2, len(experts)), offsets)  # where row 0 of selector and records would lie
        for place, expert in enumerate(experts):
            entry = self.stream.find(ExpertKey(layer_idx, expert))
            if entry is not None:
                self._queues.wait_for(entry.copied)
                begins[:, place] = self.stream.rows_at(entry)
        chosen = torch.tensor(experts, device=self._device)
        units = np.array([[kinds[expert].selector_units, kinds[expert].record_units] for expert in experts], offsets)
        at, steps = (torch.from_numpy(each).to(self._device) for each in (begins, np.ascontiguousarray(units.T)))
        rows = torch.arange(tables.record_at.shape[1], dtype=tables.record_at.dtype, device=self._device)

        def places(table: Tensor, number: int) -> Tensor:
            known = table.index_select(0, chosen)
            return torch.where(known >= 0, known, at[number][:, None] + rows * steps[number][:, None])

        return grouped.ExpertGroup(
            arena=tables.arena,
            selector_units=None if tables.selector_at is None else places(tables.selector_at, 0),
            record_units=places(tables.record_at, 1),
            thresholds=tables.thresholds.index_select(0, chosen),
            kinds=tables.kinds,
            down_bias=None if tables.down_bias is None else tables.down_bias.index_select(0, chosen),
        )

    def _run_by_tier(
        self, tier: model.ExpertRunner, layer_idx: int, x: Tensor, experts: Tensor, weights: Tensor, missing: list[int]
    ) -> Tensor:
        """Returns the outputs of missing experts, computed by the CPU's own engine: float32 [T, d], on the CPU."""
        is_missing = torch.isin(experts, torch.tensor(missing))
        if len(x) == 1:
            return tier.run_experts(layer_idx, x.cpu(), experts[:, is_missing[0]], weights[:, is_missing[0]])
        # Choices of weight zero are left out where their expert has others.
        chosen = torch.where(is_missing, experts, missing[0])
        return tier.run_experts(layer_idx, x.cpu(), chosen, torch.where(is_missing, weights, 0.0))


@dataclass(slots=True, eq=False)
class _Pass:
    """A layer's experts in the order in which they run: those that are static as a whole, then the missing ones.

    `pairs`: in this order; experts without tokens come last.
    """

    layer_idx: int
    static: list[int]
    missing: list[int]
    experts: NDArray[np.int64]
    weights: NDArray[np.float32]
    pairs: grouped.Pairs

    @classmethod
    def of(cls, layer_idx: int, experts: Tensor, weights: Tensor, stream: ExpertStream, num_experts: int) -> "_Pass":
        numbers = [(expert, ExpertKey(layer_idx, expert)) for expert in torch.unique(experts).tolist()]
        static = [expert for expert, key in numbers if stream.is_static(key)]
        missing = [expert for expert, key in numbers if not stream.is_static(key)]
        missing.sort(key=lambda expert: stream.find(ExpertKey(layer_idx, expert)) is None)  # first what is on its way
        others = sorted(set(range(num_experts)) - {expert for expert, _ in numbers})
        order = np.array([*static, *missing, *others])
        pairs = grouped.pairs_by_expert(experts.numpy(), weights.numpy(), order)
        return cls(layer_idx, static, missing, experts.numpy(), weights.numpy(), pairs)

    @property
    def order(self) -> list[int]:
        return [*self.static, *self.missing]

    def put_last(self, experts: list[int]) -> None:
        self.missing = [expert for expert in self.missing if expert not in experts] + experts
        others = sorted(set(range(len(self.pairs.counts))) - set(self.order))
        self.pairs = grouped.pairs_by_expert(self.experts, self.weights, np.array([*self.order, *others]))
