"""A pack's weights on a GPU, and passes of many tokens: experts stream through memory while others run.

`GpuWeights` runs the routed experts of a layer for many tokens. Experts that are not resident as a whole are copied
from host memory, in one piece each, into a ring (`ExpertStream`) that takes all of the dynamic memory. While a layer
runs, the next one's experts follow, as far as the ring has space. One token runs in `decoder.TokenStep`, without the
host. Importing this needs Triton.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.layout import DenseLayout
from moe_pack.runtime.gpu.cpu_share import PromptShare
from moe_pack.runtime.gpu.device import LINE_BYTES, HostArena, Mark, Queues
from moe_pack.runtime.gpu.kernels.experts import expert_many, workspace_floats
from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.gpu.kernels.tables import LayerTables
from moe_pack.runtime.gpu.weights import DeviceMatrix, ExpertMemory
from moe_pack.runtime.model import ExpertRunner, Matrix, PackWeights, PartialState, tokens_by_expert
from moe_pack.runtime.model.weights import from_experts, to_experts
from moe_pack.runtime.offload import ExpertKey


@dataclass(slots=True, eq=False)
class _Coming:
    """An expert in the ring, from byte `begin` to `end` of the dynamic memory.

    `copied`: reached when all its bytes are there.   `done`: reached when it has run; None until it is launched.
    """

    key: ExpertKey
    begin: int
    end: int
    copied: Mark
    done: Mark | None = None


class ExpertStream:
    """The missing rows of experts on their way from host memory to a ring of the GPU's dynamic memory."""

    def __init__(self, pack: Pack, memory: ExpertMemory, host: HostArena | None, queues: Queues) -> None:
        self._pack, self._memory, self._host, self._queues = pack, memory, host, queues
        begin = 16 * memory.dynamic_at
        self._ring = memory.arena[begin : begin + memory.placement.dynamic_bytes]
        self._entries = deque[_Coming]()
        self._end = 0

    def begin_pass(self) -> None:
        """Takes all of the dynamic memory: what lies in it is overwritten after what was launched until now."""
        if len(self._ring):
            self._end = 0
            self._entries = deque([_Coming(ExpertKey(-1, -1), 0, len(self._ring), Mark(None), self._queues.mark())])

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
        start, stop = self._missing(key)
        size = -(-(stop - start) // LINE_BYTES) * LINE_BYTES
        begin = self._end if self._end + size <= len(self._ring) else 0
        marks = self._overwritten(begin, begin + size)
        if marks is None:
            return False
        source = self._host.extent(key.layer_idx, key.expert, layout.num_bytes)[start:stop]
        to = self._ring[begin : begin + stop - start]
        copied = self._queues.beside(lambda: _copy(to, source), marks)
        self._entries.append(_Coming(key, begin, begin + size, copied))
        self._end = begin + size
        return True

    def rows_at(self, entry: _Coming) -> tuple[int, int]:
        """Returns where selector row 0 and record 0 would lie, in units of 16 bytes, as far as they are in the ring."""
        layout = self._pack.layout.experts[entry.key.layer_idx][entry.key.expert]
        begin = self._memory.dynamic_at + (entry.begin - self._missing(entry.key)[0]) // 16
        return begin, begin + layout.selector_bytes // 16

    def release(self, keys: Sequence[ExpertKey], done: Mark) -> None:
        """Gives back the space of experts after a mark."""
        for entry in self._entries:
            if entry.key in keys and entry.done is None:
                entry.done = done

    def keys(self, layer_idx: int) -> list[ExpertKey]:
        """Returns the experts of a layer that are on their way or there."""
        return [entry.key for entry in self._entries if entry.key.layer_idx == layer_idx and entry.done is None]

    def _missing(self, key: ExpertKey) -> tuple[int, int]:
        """Returns the part of an expert's extent that is not resident: one piece, in bytes."""
        placement, layout = self._memory.placement, self._pack.layout.experts[key.layer_idx][key.expert]
        stop = layout.selector_bytes + layout.records_bytes
        if not placement.has_selector[key]:
            return 0, stop
        return layout.selector_bytes + int(placement.first_dynamic[key]) * layout.records.row_bytes, stop

    def _overwritten(self, begin: int, end: int) -> list[Mark] | None:
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


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


class _Job(NamedTuple):
    """An expert with its tokens int64 [n] and their router weights float32 [n]."""

    key: ExpertKey
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]


class GpuWeights(PackWeights, ExpertRunner):
    """The weights of an open pack on a device; memory of experts, host memory and queues stay the caller's.

    `is_streaming`: whether a pass of many tokens has used the dynamic memory since `begin_token`.
    Args:    chunk_tokens: of a forward pass, at most.   tier: the CPU's own engine, which runs experts that are not in
             GPU memory; None if `host` has them all.   share: the CPU's of missing experts; None if all are copied.
    """

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        memory: ExpertMemory,
        host: HostArena | None,
        queues: Queues,
        chunk_tokens: int,
        tier: ExpertRunner | None = None,
        share: PromptShare | None = None,
    ) -> None:
        super().__init__(pack, device, GpuOperations())
        self.memory, self.stream = memory, ExpertStream(pack, memory, host, queues)
        self._queues, self._tier, self._share = queues, tier, share
        floats = workspace_floats(chunk_tokens, pack.spec.expert.intermediate_size)
        self._workspace = torch.empty(floats, device=device)

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation, whose size is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return DeviceMatrix(dense, raw)

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: PartialState | None = None,
    ) -> Tensor:
        """Returns the weighted sum of a layer's routed experts for tokens x float32 [T, d].

        Args:    experts, router_weights: int64 and float32 [T, k].
        """
        y, inputs = torch.zeros_like(x), to_experts(x, self, layer_idx)
        # The host waits once a layer, because it has to know which experts have tokens.
        chosen, weights = experts.cpu(), router_weights.cpu()
        jobs = [
            _Job(ExpertKey(layer_idx, e), tokens, of_tokens)
            for e, tokens, of_tokens in tokens_by_expert(chosen, weights)
        ]
        for job in jobs:
            self.bytes_read += self._pack.layout.experts[layer_idx][job.key.expert].num_bytes
        static = [job for job in jobs if self.stream.is_static(job.key)]
        missing = [job for job in jobs if not self.stream.is_static(job.key)]
        others = None
        if missing and self._tier is not None:
            others = self._run_by_tier(self._tier, layer_idx, x, chosen, weights, missing)
            missing = []
        on_cpu = None
        if missing and self._share is not None:
            numbers = self._share.choose([len(job.tokens) for job in missing])
            of_cpu = [(job.key.expert, job.tokens, job.weights) for i, job in enumerate(missing) if i in numbers]
            missing = [job for i, job in enumerate(missing) if i not in numbers]
            on_cpu = self._share.start(layer_idx, inputs.cpu(), of_cpu) if of_cpu else None
        self._run(static, inputs, y)
        self._stream_and_run(layer_idx, missing, inputs, y)
        self._stream_ahead(layer_idx + 1, chosen.numel())
        if on_cpu is not None:
            y += on_cpu.result().to(self._device)
        y = from_experts(y, self, layer_idx)
        return y if others is None else y + others.to(self._device)

    def _stream_and_run(self, layer_idx: int, jobs: list[_Job], x: Tensor, y: Tensor) -> None:
        """Runs experts that are not resident, as many at once as the ring has space for."""
        wanted = {job.key for job in jobs}
        unused = [key for key in self.stream.keys(layer_idx) if key not in wanted]
        self.stream.release(unused, self._queues.mark())
        waiting = sorted(jobs, key=lambda job: self.stream.find(job.key) is None)  # first what is on its way
        while waiting:
            group = list[_Job]()
            while waiting and (self.stream.find(waiting[0].key) or self.stream.request(waiting[0].key)):
                group.append(waiting.pop(0))
            assert group, "the ring has space for the largest expert"
            self._run(group, x, y)
            self.stream.release([job.key for job in group], self._queues.mark())

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

    def _run(self, jobs: list[_Job], x: Tensor, y: Tensor) -> None:
        """Runs experts whose rows are all resident or in the ring."""
        if not jobs:
            return
        layer_idx = jobs[0].key.layer_idx
        tables = self._group_tables(jobs)
        tokens = torch.from_numpy(np.concatenate([job.tokens for job in jobs]).astype(np.int32)).to(self._device)
        weights = torch.from_numpy(np.concatenate([job.weights for job in jobs])).to(self._device)
        first = 0
        for place, job in enumerate(jobs):
            some = slice(first, first + len(job.tokens))
            kind = self.memory.kinds[layer_idx][job.key.expert]
            expert_many(x, tokens[some], weights[some], tables, place, kind, y, self._workspace)
            first = some.stop

    def _group_tables(self, jobs: list[_Job]) -> LayerTables:
        """Returns tables of some experts of a layer alone, int32 [G, f]; waits for their copies."""
        layer_idx = jobs[0].key.layer_idx
        tables, kinds = self.memory.layers[layer_idx], self.memory.kinds[layer_idx]
        begins = np.zeros((2, len(jobs)), np.int32)  # where row 0 of selector and records would lie
        for place, job in enumerate(jobs):
            entry = self.stream.find(job.key)
            if entry is not None:
                self._queues.wait_for(entry.copied)
                begins[:, place] = self.stream.rows_at(entry)
        chosen = torch.tensor([job.key.expert for job in jobs], device=self._device)
        units = np.array([[kinds[job.key.expert].selector_units, kinds[job.key.expert].record_units] for job in jobs])
        at, steps = (
            torch.from_numpy(begins).to(self._device),
            torch.from_numpy(units.T.astype(np.int32)).to(self._device),
        )
        rows = torch.arange(tables.record_at.shape[1], dtype=torch.int32, device=self._device)

        def places(table: Tensor, number: int) -> Tensor:
            known = table.index_select(0, chosen)
            return torch.where(known >= 0, known, at[number][:, None] + rows * steps[number][:, None])

        return LayerTables(
            arena=tables.arena,
            selector_at=None if tables.selector_at is None else places(tables.selector_at, 0),
            record_at=places(tables.record_at, 1),
            kind=tables.kind.index_select(0, chosen),
            thresholds=tables.thresholds.index_select(0, chosen),
            kinds=tables.kinds,
            down_bias=None if tables.down_bias is None else tables.down_bias.index_select(0, chosen),
        )

    def _run_by_tier(
        self, tier: ExpertRunner, layer_idx: int, x: Tensor, experts: Tensor, weights: Tensor, missing: list[_Job]
    ) -> Tensor:
        """Returns the outputs of missing experts, computed by the CPU's own engine: float32 [T, d], on the CPU."""
        is_missing = torch.isin(experts, torch.tensor([job.key.expert for job in missing]))
        if len(x) == 1:
            return tier.run_experts(layer_idx, x.cpu(), experts[:, is_missing[0]], weights[:, is_missing[0]])
        # Choices of weight zero are left out where their expert has others.
        chosen = torch.where(is_missing, experts, missing[0].key.expert)
        return tier.run_experts(layer_idx, x.cpu(), chosen, torch.where(is_missing, weights, 0.0))
