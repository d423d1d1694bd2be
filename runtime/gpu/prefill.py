"""A pack's weights on a GPU, and passes of many tokens: experts stream through memory while others run.

Experts are decoded and multiplied a group at a time (`kernels.grouped`). Those that are not resident as a whole are
copied from host memory into a ring (`ExpertStream`) that takes all of the dynamic memory, half of it at a time, so that
the next ones come while these run. Copies are the copy engine's: a kernel that read host memory would take registers
from the products. The host waits for nothing if all experts are resident. Importing this needs Triton.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.pack.layouts import DenseLayout
from moe_pack.runtime import model
from moe_pack.runtime.gpu import devices, fit
from moe_pack.runtime.gpu.cpu_share import PromptShare
from moe_pack.runtime.gpu.kernels import grouped, halves
from moe_pack.runtime.gpu.kernels.mixers.recurrence import TokenOperations
from moe_pack.runtime.gpu.weights import DeviceMatrix, ExpertMemory
from moe_pack.runtime.model import layers
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
        self.copied_bytes = 0  # since the start

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

    def request(self, keys: Sequence[ExpertKey]) -> int:
        """Begins to copy missing rows of the first of these experts, as many as the ring has space for.

        They take half of the ring at most, or one expert's space.
        Returns: how many experts these are.
        """
        assert self._host is not None, "experts are in host memory"
        entries, after, copies = list[_Coming](), list[devices.Mark](), list[tuple[Tensor, Tensor]]()
        for key in keys:
            start, stop = self.missing(key)
            size = -(-(stop - start) // devices.LINE_BYTES) * devices.LINE_BYTES
            if entries and sum(len(to) for to, _ in copies) + size > len(self._ring) // 2:
                break
            begin = self._end if self._end + size <= len(self._ring) else 0
            is_own = any(entry.begin < begin + size and begin < entry.end for entry in entries)
            marks = None if is_own else self._overwritten(begin, begin + size)
            if marks is None:
                break
            extent = self._host.extent(*key, self._pack.layout.experts[key.layer_idx][key.expert].num_bytes)
            copies.append((self._ring[begin : begin + stop - start], extent[start:stop]))
            entries.append(_Coming(key, begin, begin + size, devices.Mark(None)))
            after += marks
            self._end = begin + size

        def copy() -> None:
            for to, source in copies:
                to.copy_(source, non_blocking=True)

        if entries:
            copied = self._queues.beside(copy, after)
            for entry in entries:
                entry.copied = copied
            self._entries += entries
            self.copied_bytes += sum(len(to) for to, _ in copies)
        return len(entries)

    def num_together(self, keys: Sequence[ExpertKey]) -> int:
        """Returns how many of these experts, from the first on, come with the first one."""
        marks = [entry.copied for key in keys if (entry := self.find(key))]
        return sum(1 for _ in takewhile(lambda mark: mark is marks[0], marks))

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

    `pass_bytes`: of the device's memory, that passes of many tokens take.
    Args:    chunk_tokens: of a forward pass, at most.   tier: the CPU's own engine, which runs experts that are not in
             GPU memory; None if `host` has them all.   share: the CPU's of missing experts; None if all are copied.
             is_fast: whether a value of many tokens is one float16 number, and not two; routers' products stay exact.
             spare_bytes: of the device's memory, as of `Slicing.for_passes`.
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
        spare_bytes: int = 0,
    ) -> None:
        # Whether its first layer is the model's, after the embedding, and its last one, before the head.
        self.begins, self.ends = pack.begins, pack.ends
        self._num_halves = fit.FAST_HALVES if is_fast else fit.EXACT_HALVES
        d, num_pairs = pack.spec.hidden_size, chunk_tokens * pack.spec.router.num_experts_per_tok
        self._slicing = fit.Slicing.for_passes(pack.layout, chunk_tokens, self._num_halves, spare_bytes)
        self.pass_bytes = self._slicing.num_bytes(pack.layout, chunk_tokens, self._num_halves)
        self._own = grouped.PassMemory.allocate(*self._slicing, d, num_pairs, self._num_halves, device)
        self.memory, self.stream = memory, ExpertStream(pack, memory, host, queues)
        self._queues, self._tier, self._share = queues, tier, share
        placement, num_experts = memory.placement, len(memory.kinds[0])
        is_static = (placement.first_dynamic == pack.spec.expert.intermediate_size) & placement.has_selector
        self._is_resident: list[bool] = is_static.all(axis=1).tolist()  # by layer
        self._all_experts = torch.arange(num_experts, dtype=torch.int32, device=device)
        # int64 [L, E]: on the device, in how many passes an expert had tokens; its size, in host memory.
        self._num_passes = torch.zeros((len(memory.kinds), num_experts), dtype=torch.int64, device=device)
        self._sizes = torch.tensor([[expert.num_bytes for expert in layer] for layer in pack.layout.experts])
        super().__init__(pack, device, TokenOperations(attends_in_half=is_fast))

    @property
    def bytes_read(self) -> int:
        """The bytes of experts that had tokens, each counted once a pass; the device counts, so that no pass waits."""
        return int((self._num_passes.cpu() * self._sizes).sum())

    @bytes_read.setter
    def bytes_read(self, num_bytes: int) -> None:
        self._num_passes.zero_()

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation, whose size is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> model.Matrix:
        is_router = dense.role.name.endswith("router")
        num_halves = fit.EXACT_HALVES if is_router else self._num_halves
        return DeviceMatrix(dense, raw, self._own.decoded.view(-1), num_halves)

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: model.PartialState | None = None,
    ) -> Tensor:
        """Returns the weighted sum of a layer's routed experts [T, k] for tokens x float32 [T, d]."""
        given, given_weights = x, router_weights  # as the CPU's own engine takes them
        x, router_weights = layers.expert_inputs(x, router_weights, self, layer_idx)
        inputs = to_experts(x, self, layer_idx)
        rounded = halves.Halves.allocate(self._num_halves, len(x), x.shape[1], self._device)
        halves.round_rows(inputs.contiguous(), rounded)
        memory = self._own._replace(outputs=self._own.outputs[: experts.numel()])
        others = on_cpu = None
        if self._is_resident[layer_idx]:
            pairs = self._pairs(layer_idx, experts, self._all_experts)
            self._run(layer_idx, pairs, 0, len(pairs.order), rounded, memory)
        else:
            pass_ = self._choose(layer_idx, experts)
            if pass_.on_cpu:
                memory.outputs.zero_()  # of those the GPU does not compute
                self._num_passes[layer_idx, pass_.on_cpu] += 1
                if self._tier is None:
                    on_cpu = self._start_on_cpu(layer_idx, inputs, experts.cpu(), router_weights.cpu(), pass_.on_cpu)
                else:
                    routed = (experts.cpu(), given_weights.cpu(), pass_.on_cpu)
                    others = self._run_by_tier(self._tier, layer_idx, given, *routed)
            pairs = self._pairs(layer_idx, experts, self._there(np.array(pass_.order, np.int32)))
            self._run(layer_idx, pairs, 0, len(pass_.static), rounded, memory)
            self._stream_and_run(layer_idx, pairs, pass_, rounded, memory)
        self._stream_ahead(layer_idx + 1, experts.numel())
        y = torch.empty_like(x)
        grouped.combine(memory.outputs, router_weights.contiguous(), y)
        if on_cpu is not None:
            y += on_cpu.result().to(self._device)
        y = from_experts(y, self, layer_idx)
        return y if others is None else y + others.to(self._device)

    def _pairs(self, layer_idx: int, experts: Tensor, order: Tensor) -> grouped.Pairs:
        pairs = grouped.sort_pairs(experts, order, len(self._all_experts))
        self._num_passes[layer_idx].index_add_(0, order, (pairs.starts.diff() > 0).long())
        return pairs

    def _choose(self, layer_idx: int, experts: Tensor) -> "_Pass":
        """Returns a layer's experts in the order in which they run.

        The host waits for the routes only if it has to know them: where the CPU computes some experts, or where there
        are so few tokens that not all experts come.
        """
        num_experts = len(self._all_experts)
        if self._tier is None and self._share is None and experts.numel() >= 2 * num_experts:
            return _Pass.of(layer_idx, range(num_experts), self.stream)
        chosen, num_tokens = np.unique(experts.cpu().numpy(), return_counts=True)
        pass_ = _Pass.of(layer_idx, chosen.tolist(), self.stream)
        if self._tier is not None:
            pass_.on_cpu, pass_.missing = pass_.missing, []
        elif self._share is not None:
            tokens_of = dict(zip(chosen.tolist(), num_tokens.tolist(), strict=True))
            pieces = [self.stream.missing(ExpertKey(layer_idx, expert)) for expert in pass_.missing]
            num_bytes = [stop - start for start, stop in pieces]
            tokens = [tokens_of[expert] for expert in pass_.missing]
            pass_.on_cpu = self._share.choose(layer_idx, pass_.missing, tokens, num_bytes)
            pass_.missing = [expert for expert in pass_.missing if expert not in pass_.on_cpu]
        return pass_

    def _start_on_cpu(
        self, layer_idx: int, x: Tensor, experts: Tensor, weights: Tensor, on_cpu: Sequence[int]
    ) -> Future[Tensor]:
        """Begins to compute some missing experts on the CPU."""
        assert self._share is not None, "it has chosen them"
        jobs = [job for job in model.tokens_by_expert(experts, weights) if job[0] in on_cpu]
        return self._share.start(layer_idx, x.cpu(), jobs)

    def _stream_and_run(
        self, layer_idx: int, pairs: grouped.Pairs, pass_: "_Pass", x: halves.Halves, memory: grouped.PassMemory
    ) -> None:
        """Runs the missing experts; while some run, the next ones come."""
        keys = [ExpertKey(layer_idx, expert) for expert in pass_.missing]
        self.stream.release_others(keys, self._queues.mark())
        first, num_coming = len(pass_.static), sum(self.stream.find(key) is not None for key in keys)
        done = 0
        while done < len(keys):
            while number := self.stream.request(keys[num_coming:]):
                num_coming += number
            assert num_coming > done, "the ring has space for the largest expert"
            number = self.stream.num_together(keys[done:num_coming])
            group = keys[done : done + number]
            self._run(layer_idx, pairs, first + done, number, x, memory, self._coming(group))
            self.stream.release(group, self._queues.mark())
            done += number

    def _stream_ahead(self, layer_idx: int, num_choices: int) -> None:
        """Begins to copy the next layer's experts, if about all of them will have tokens."""
        if self._tier is not None or layer_idx >= len(self.memory.kinds) or self.memory.placement.is_whole:
            return
        keys = [ExpertKey(layer_idx, e) for e in range(len(self.memory.kinds[layer_idx]))]
        if num_choices < 2 * len(keys):
            return
        keys = [key for key in keys if not (self.stream.is_static(key) or self.stream.find(key))]
        while number := self.stream.request(keys):
            keys = keys[number:]

    def _run(
        self,
        layer_idx: int,
        pairs: grouped.Pairs,
        first: int,
        number: int,
        x: halves.Halves,
        memory: grouped.PassMemory,
        coming: grouped.Coming | None = None,
    ) -> None:
        """Runs experts from place `first` of the order on, whose rows are all resident or in the ring."""
        tables = self.memory.layers[layer_idx]
        for begin in range(first, first + number, self._slicing.num_experts):
            together = min(self._slicing.num_experts, first + number - begin)
            grouped.run_group(x, grouped.Group(pairs, tables, begin, together, coming), memory)

    def _coming(self, keys: Sequence[ExpertKey]) -> grouped.Coming:
        """Returns where rows of experts that come together lie in the ring; waits for their copy."""
        begins = np.zeros((2, len(self._all_experts)), np.int64)
        for number, key in enumerate(keys):
            entry = self.stream.find(key)
            assert entry is not None, "it was requested"
            if number == 0:
                self._queues.wait_for(entry.copied)
            begins[:, key.expert] = self.stream.rows_at(entry)
        return grouped.Coming(*self._there(begins))

    def _there(self, values: NDArray[np.integer]) -> Tensor:
        """Returns a copy on the device, for which the host does not wait."""
        here = torch.from_numpy(values)
        return here.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else here

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
    """A layer's experts in the order in which they run: those that are static as a whole, then those that come."""

    static: list[int]
    missing: list[int]
    on_cpu: list[int]  # that the GPU does not compute

    @classmethod
    def of(cls, layer_idx: int, experts: Sequence[int], stream: ExpertStream) -> "_Pass":
        static = [expert for expert in experts if stream.is_static(ExpertKey(layer_idx, expert))]
        missing = [expert for expert in experts if not stream.is_static(ExpertKey(layer_idx, expert))]
        missing.sort(key=lambda expert: stream.find(ExpertKey(layer_idx, expert)) is None)  # first what is on its way
        return cls(static, missing, [])

    @property
    def order(self) -> list[int]:
        return [*self.static, *self.missing]
