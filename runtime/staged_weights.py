"""The staged engine on a device: experts' pages in its memory, decisions on the host, which sees every layer's routes.

The host waits for the device once a layer ("routes"), once more where rows of some experts come alone ("neurons"), once
for each foretold group of these ("foretold neurons"), and where memory that it would fill anew is still being copied
("host memory is reused"). Routers' scores, where a policy wants them, are one more wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import DenseLayout, Pack, RunError, size_text
from moe_pack.runtime.budget import FixedParts, MemoryNeeds, divide
from moe_pack.runtime.experts import PartialState
from moe_pack.runtime.matrix import Matrix
from moe_pack.runtime.native_kernels import ExpertRows, Kernels, extent_rows
from moe_pack.runtime.operations import TORCH
from moe_pack.runtime.policies.split import Split
from moe_pack.runtime.recording import Recorder
from moe_pack.runtime.residency import Key, Residency
from moe_pack.runtime.staged_ops import TritonOps
from moe_pack.runtime.staged_pages import most_pages, staged_page_bytes
from moe_pack.runtime.staged_run import CpuExperts, DeviceRun, listed_neurons, make_room, seen_neurons
from moe_pack.runtime.staged_run import room_bytes as room_bytes_of
from moe_pack.runtime.staged_store import DeviceStore, pages_of, store_bytes
from moe_pack.runtime.streaming import NO_TRUST, Job, PhaseCounts, Run, StreamingWeights, Trust

NUM_PARTIALS = 32  # sums that a token's expert is computed in, side by side


@dataclass(frozen=True, slots=True)
class CpuShare:
    """Misses that the CPU computes while the link brings the others.

    `kernels`: the caller's to close.   `split`: from the tokens of each missing expert, which; `balanced` or `fastest`
    (policies/split.py) with measured rates.
    """

    kernels: Kernels
    split: Callable[[Sequence[int]], Split]


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """What the device's memory for experts is spent on, in bytes, but for `num_pages`; `fixed`: tables, workspace."""

    page_bytes: int
    num_pages: int
    fixed: int


def plan_staged(
    pack: Pack, room_bytes: int, chunk_tokens: int, ops: TritonOps, num_partials: int = NUM_PARTIALS
) -> StagedPlan:
    """Divides the device's memory that is left for experts, besides dense weights, cache and the driver's own.

    All of it is pages: which experts have them is the host's decision, as on the CPU.
    Raises:  RunError if the largest expert would have no room.
    """
    page_bytes = staged_page_bytes(pack.layout)
    needs = staged_needs(pack, page_bytes, chunk_tokens, ops, num_partials)
    division = divide(room_bytes, needs)
    if division.experts < needs.least_experts:
        raise RunError(
            f"--budget: {size_text(max(room_bytes, 0))} left for experts, needed are at least "
            f"{size_text(needs.least_budget)}; give more, or a shorter context with --max-tokens"
        )
    num_pages = min(min(division.experts, needs.all_experts) // page_bytes, most_pages(page_bytes))
    return StagedPlan(page_bytes, num_pages, division.fixed.num_bytes)


def staged_needs(
    pack: Pack, page_bytes: int, chunk_tokens: int, ops: TritonOps, num_partials: int = NUM_PARTIALS
) -> MemoryNeeds:
    """Returns what the staged engine needs of the device's memory that is left for experts."""
    pages = pages_of(pack, page_bytes) * page_bytes
    workspace = room_bytes_of(pack.spec, ops, chunk_tokens, num_partials)
    fixed = FixedParts(tables=store_bytes(pack, 0, page_bytes), workspace=workspace)
    return MemoryNeeds(lambda _: fixed, chunk_tokens, chunk_tokens, int(pages.max()), int(pages.sum()), usual_share=1)


class StagedWeights(StreamingWeights):
    """A pack's weights, dense ones on the device, experts in the pages of `store`. Owns threads: `close` it.

    Pack, store, trace and recorder stay the caller's.
    Args:    chunk_tokens: of a forward pass at most.   cpu: None where the device computes all. Experts that the CPU
             computes get pages as all others, which stay empty and are given back once the layer has all it needs:
             a record of the run plays as the run did.   `store.host` then holds all experts.
    """

    def __init__(
        self,
        pack: Pack,
        store: DeviceStore,
        residency: Residency,
        ops: TritonOps,
        chunk_tokens: int,
        *,
        cpu: CpuShare | None = None,
        num_partials: int = NUM_PARTIALS,
        scores_matter: bool = False,
        reuses_selector: bool = False,
        trust: Trust = NO_TRUST,
        recorder: Recorder | None = None,
    ) -> None:
        assert cpu is None or store.host.holds_all, "the CPU computes from memory"
        self._device_store, self._ops, self._cpu = store, ops, cpu
        super().__init__(
            pack,
            TORCH,
            store,
            residency,
            device=store.device.device,
            scores_matter=scores_matter,
            reuses_selector=reuses_selector,
            trust=trust,
            recorder=recorder,
        )
        self._room = make_room(self.spec, store.device, ops, chunk_tokens, num_partials, cpu is not None)
        k = self.spec.router.num_experts_per_tok
        self._host_experts = store.device.on_host(8 * chunk_tokens * k).view(torch.int64).view(chunk_tokens, k)
        self._host_weights = store.device.on_host(4 * chunk_tokens * k).view(torch.float32).view(chunk_tokens, k)
        self._thread = None if cpu is None else ThreadPoolExecutor(1, "experts")

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _keep(self, held: Tensor) -> None:
        super()._keep(held.to(self._device))  # one allocation: what is there is what is counted

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        return self._ops.matrix(dense, raw)

    def _told(self, x: Tensor, experts: Tensor, router_weights: Tensor) -> tuple[Tensor, Tensor]:
        device, T = self._device_store.device, len(x)
        device.copy(self._host_experts[:T], experts.contiguous(), "compute")
        device.copy(self._host_weights[:T], router_weights.contiguous(), "compute")
        if self._cpu is not None:
            device.copy(self._room.host_x[:T], x, "compute")
        # The policy, and what is copied, hang on the routes; after this all of the layer before is done, too.
        device.synchronize(device.record("compute"), "routes")
        return self._host_experts[:T], self._host_weights[:T]

    def _new_run(self, layer_idx: int, x: Tensor, jobs: dict[int, Job], counts: PhaseCounts) -> Run:
        run = DeviceRun(
            self._device_store, self._ops, self._room, layer_idx, x, jobs, counts, self.predicted, self.trust
        )
        if self._cpu is not None and self._thread is not None:
            rows = self._rows_for_cpu(self._cpu, jobs)
            if rows:
                run.compute_on_cpu(CpuExperts(self._cpu.kernels, self._thread), rows)
        return run

    def _walk(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        scores: NDArray[np.float32] | None,
        jobs: dict[int, Job],
        run: Run,
        counts: PhaseCounts,
        partial_state: PartialState | None,
    ) -> None:
        super()._walk(layer_idx, x, experts, scores, jobs, run, counts, partial_state)
        assert isinstance(run, DeviceRun), "its own"
        for key in run.keys_on_cpu:
            if self._residency.is_resident[key]:  # in name only
                self._residency.abandon(key)

    def _rows_for_cpu(self, cpu: CpuShare, jobs: dict[int, Job]) -> dict[Key, ExpertRows]:
        """The misses that the CPU computes, where they lie in host memory."""
        missing = [job for job in jobs.values() if not self._residency.is_resident[job.key]]
        chosen = cpu.split([len(job.tokens) for job in missing]).computed
        return {missing[number].key: self._host_rows(missing[number].key) for number in sorted(chosen)}

    def _host_rows(self, key: Key) -> ExpertRows:
        layout = self._pack.layout.experts[key.layer_idx][key.expert]
        held = self._device_store.host.extent(key).numpy()
        return extent_rows(layout, self.selector, self.spec.expert.function, self.threshold(*key), held)

    def _neurons_ahead(self, x: Tensor, keys: Sequence[Key]) -> list[tuple[Key, NDArray[np.int32]]]:
        store, room = self._device_store, self._room
        wanted = [key for key in keys if not store.arrive(key).is_whole][: len(room.host_neurons)]
        if not wanted:
            return []
        n = len(wanted)
        # What the layer's own experts need has been launched or is not listed yet: the room is free between launches.
        numbers = room.host_numbers[2, :n]
        numbers[:] = torch.tensor([key.expert for key in wanted], dtype=torch.int32)
        store.device.copy(room.numbers[2, :n], numbers, "compute")
        selection = room.selection
        first = type(selection)(selection.a[:n], selection.neurons[:n], selection.counts[:n])
        self._ops.select(x[0], room.numbers[2, :n], store.tables[wanted[0].layer_idx], first)
        store.device.synchronize(seen_neurons(store.device, room, 0, n), "foretold neurons")
        return [(key, listed_neurons(room, place).copy()) for place, key in enumerate(wanted)]
