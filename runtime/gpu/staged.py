"""One layer's experts in the staged engine: experts on the device run together, others as soon as they arrive.

The twin of `runtime.offload.experts`' run of a layer. The host launches and goes on; it waits for the device only to
learn which rows have to be copied ("neurons"), and for experts that the CPU computes meanwhile. Each expert's output is
kept apart, and outputs are added in the order of experts. `TritonOps` are the operations, and `Workspace` the memory
that layers use one after the other. Importing this needs Triton.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ModelSpec
from moe_pack.formats.layout import DenseLayout
from moe_pack.runtime.cpu import ExpertRows, ExpertWork, Kernels
from moe_pack.runtime.gpu.device import Device, StreamMark
from moe_pack.runtime.gpu.kernels.cache import Selection
from moe_pack.runtime.gpu.kernels.elementwise import reduce
from moe_pack.runtime.gpu.kernels.experts import expert_many, neurons, select, workspace_floats
from moe_pack.runtime.gpu.kernels.rotation import GpuOperations
from moe_pack.runtime.gpu.kernels.tables import SELECT_BLOCK, ExpertKind, LayerTables
from moe_pack.runtime.gpu.staged_store import GpuExpert, GpuExpertStore
from moe_pack.runtime.gpu.weights import DeviceMatrix
from moe_pack.runtime.model import Matrix, Operations
from moe_pack.runtime.offload import Approximations, ExpertJob, ExpertKey, PhaseCounts
from moe_pack.runtime.offload.cache import EvictEvent
from moe_pack.runtime.offload.experts import count_rows


class TritonOps:
    """The Triton kernels as the staged engine calls them: several experts of one token, or one expert for many tokens.

    No call waits for the device, which is a GPU, or plain memory under Triton's interpreter. `operations`: everything
    else that a layer's experts need.
    """

    def __init__(self) -> None:
        self.operations: Operations = GpuOperations()

    def matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        """Returns a dense matrix whose bytes, u8, are on the device."""
        return DeviceMatrix(dense, raw)

    def select(self, x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
        """Finds which neurons of experts int32 [k] run for x float32 [d]."""
        select(x, experts, tables, out)

    def neurons(self, x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
        """Writes partial sums float32 [k, P, d] of the listed neurons' outputs."""
        neurons(x, experts, tables, selection, partials)

    def reduce(self, partials: Tensor, weights: Tensor, out: Tensor) -> None:
        """Writes the sum over k of weights float32 [k] times partials, in order, to `out` float32 [d]."""
        reduce(partials, weights, out)

    def workspace_floats(self, num_tokens: int, num_rows: int) -> int:
        """Returns how many float32 values `many` needs as workspace, for so many tokens and neurons of an expert."""
        return int(workspace_floats(num_tokens, num_rows))

    def many(
        self,
        x: Tensor,
        tokens: Tensor,
        weights: Tensor,
        tables: LayerTables,
        expert: int,
        kind: ExpertKind,
        y: Tensor,
        workspace: Tensor,
    ) -> None:
        """Adds a whole expert's outputs for `tokens` int32 [n] of x float32 [T, d], weighted, to their rows of y."""
        expert_many(x, tokens, weights, tables, expert, kind, y, workspace)


Neurons = NDArray[np.int32]


# Rows of `Workspace.numbers` and `host_numbers`. A layer with one token uses the first three, one with many the others.
EXPERTS_ROW = 0  # the experts that are launched together
ORDER_ROWS = (1, 2)  # where each expert's partial sums are, in the order of experts; two, for two sums of a layer
PREDICTED_ROW = 2  # experts of the next layer, whose neurons are predicted before the second sum
TOKENS_ROW = 0  # the tokens of each expert
PLACES_ROW = 1  # where each token's outputs are, [k, T]
SLOTS_ROW = 2  # 0, 1, 2, ...: each output has a row of its own


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Memory that layers use one after the other; allocated once. Tensors named `host_...` are page-locked.

    `numbers`, `host_numbers`: int32 [3, N] for N = chunk_tokens * k, by the rows above.   `weights`, `host_weights`:
    float32 [2, N], for two sums.   `partials`, `ordered`: float32 [k, P, d].   `out`: float32 [2, 1, d], for two sums.
    `hidden`: float32, the workspace of `TritonOps.many`.   `selection`: which neurons run, with its copies
    `host_neurons` and `host_counts`.   `host_x`: float32 [chunk_tokens, d], `host_y`: float32 [N, d], for experts that
    the CPU computes; without rows if it computes none.
    """

    numbers: Tensor
    host_numbers: Tensor
    weights: Tensor
    host_weights: Tensor
    partials: Tensor
    ordered: Tensor
    out: Tensor
    hidden: Tensor
    selection: Selection
    host_neurons: Tensor
    host_counts: Tensor
    host_x: Tensor
    host_y: Tensor

    def send_numbers(
        self, device: Device, row: int, numbers: Sequence[int] | NDArray[np.int64], first: int = 0
    ) -> Tensor:
        """Begins to copy numbers to a row of `numbers` from `first` on; returns them on the device, int32 [n]."""
        stop = first + len(numbers)
        host, target = self.host_numbers[row, first:stop], self.numbers[row, first:stop]
        host.numpy()[:] = numbers
        device.copy(target, host, "compute")
        return target

    def send_weights(self, device: Device, row: int, weights: Sequence[float] | NDArray[np.float32]) -> Tensor:
        """Begins to copy weights to a row of `weights`; returns them on the device, float32 [n]."""
        host, target = self.host_weights[row, : len(weights)], self.weights[row, : len(weights)]
        host.numpy()[:] = weights
        device.copy(target, host, "compute")
        return target

    def copy_selection_to_host(self, device: Device, first: int, stop: int) -> StreamMark:
        """Begins to copy a part of the selection to the host; returns the mark after which it has arrived."""
        device.copy(self.host_neurons[first:stop], self.selection.neurons[first:stop], "compute")
        device.copy(self.host_counts[first:stop], self.selection.counts[first:stop], "compute")
        return device.record("compute")

    def selected_neurons(self, place: int) -> Neurons:
        """Returns the ascending neurons that the host's copy of the selection lists for its `place`-th expert."""
        neurons, counts = self.host_neurons[place].numpy(), self.host_counts[place].numpy()
        within = np.arange(len(neurons)) % SELECT_BLOCK
        listed: Neurons = neurons[within < np.repeat(counts, SELECT_BLOCK)[: len(neurons)]]
        return listed

    def replace_selected(self, device: Device, place: int, neurons: Neurons) -> None:
        """Makes the selection of its `place`-th expert list these ascending neurons, here and on the device."""
        listed, counts = self.host_neurons[place].numpy(), self.host_counts[place].numpy()
        blocks = neurons // SELECT_BLOCK
        counts[:] = np.bincount(blocks, minlength=len(counts))
        starts = np.cumsum(counts) - counts
        listed[blocks * SELECT_BLOCK + np.arange(len(neurons)) - starts[blocks]] = neurons
        device.copy(self.selection.neurons[place], self.host_neurons[place], "compute")
        device.copy(self.selection.counts[place], self.host_counts[place], "compute")


def allocate_workspace(
    spec: ModelSpec, device: Device, ops: TritonOps, chunk_tokens: int, num_partials: int, has_cpu: bool
) -> Workspace:
    """Allocates for forward passes of so many tokens, with `num_partials` sums of one token's expert."""
    d, f, k = spec.hidden_size, spec.expert.intermediate_size, spec.router.num_experts_per_tok
    N, blocks = chunk_tokens * k, -(-f // SELECT_BLOCK)

    def floats(*shape: int) -> Tensor:
        return device.allocate(4 * prod(shape)).view(torch.float32).view(shape)

    def ints(*shape: int) -> Tensor:
        return device.allocate(4 * prod(shape)).view(torch.int32).view(shape)

    def host(dtype: torch.dtype, *shape: int) -> Tensor:
        return device.allocate_host(4 * prod(shape)).view(dtype).view(shape)

    return Workspace(
        numbers=ints(3, N),
        host_numbers=host(torch.int32, 3, N),
        weights=floats(2, N),
        host_weights=host(torch.float32, 2, N),
        partials=floats(k, num_partials, d),
        ordered=floats(k, num_partials, d),
        out=floats(2, 1, d),
        hidden=floats(ops.workspace_floats(chunk_tokens, f)),
        selection=Selection(floats(k, f), ints(k, f), ints(k, blocks)),
        host_neurons=host(torch.int32, k, f),
        host_counts=host(torch.int32, k, blocks),
        host_x=host(torch.float32, chunk_tokens if has_cpu else 0, d),
        host_y=host(torch.float32, N if has_cpu else 0, d),
    )


def workspace_size(spec: ModelSpec, ops: TritonOps, chunk_tokens: int, num_partials: int) -> int:
    """Returns the bytes on the device of `allocate_workspace` and of the outputs that a layer allocates."""
    d, f, k = spec.hidden_size, spec.expert.intermediate_size, spec.router.num_experts_per_tok
    N, blocks = chunk_tokens * k, -(-f // SELECT_BLOCK)
    one_token = 2 * k * num_partials * d + 2 * d + k * (2 * f + blocks)
    outputs = 2 * N * d + 2 * chunk_tokens * d  # all outputs, those of one place, an expert's inputs, the sum
    return 4 * (5 * N + one_token + ops.workspace_floats(chunk_tokens, f) + outputs)


@dataclass(frozen=True, slots=True)
class CpuWorker:
    """The CPU's part of a layer's experts: kernels, and the thread that calls them."""

    kernels: Kernels
    thread: ThreadPoolExecutor


class GpuLayerRun:
    """A layer's experts for x float32 [T, d] on the device.

    Args:    jobs: of all the layer's experts, ascending.   predicted: neurons that were predicted to run, by expert.
    """

    def __init__(
        self,
        store: GpuExpertStore,
        ops: TritonOps,
        workspace: Workspace,
        layer_idx: int,
        x: Tensor,
        jobs: dict[int, ExpertJob],
        counts: PhaseCounts,
        predicted: dict[ExpertKey, Neurons],
        approximations: Approximations,
    ) -> None:
        self._store, self._device, self._ops, self._workspace = store, store.device, ops, workspace
        self._tables: LayerTables = store.tables[layer_idx]
        self._x, self._jobs, self._counts = x, jobs, counts
        self._predicted, self._approximations = predicted, approximations
        self._whole: list[tuple[ExpertJob, GpuExpert]] = []
        self._in_part: list[tuple[ExpertJob, GpuExpert]] = []
        self._late: list[ExpertJob] = []
        self._on_cpu: dict[ExpertKey, ExpertJob] = {}  # experts that the CPU computes
        self._cpu: Future[None] | None = None
        self._places: list[int] = []  # places of one token's experts, in the order of `partials`
        self._num_sums = 0
        self._outputs = torch.empty(0)
        if len(x) > 1:
            self._prepare_many()

    def compute_on_cpu(self, cpu: CpuWorker, rows: dict[ExpertKey, ExpertRows]) -> None:
        """Begins to compute these experts on the CPU; their pages stay empty."""
        self._on_cpu = {job.key: job for job in self._jobs.values() if job.key in rows}
        out = self._workspace.host_y
        works = []
        for key, job in self._on_cpu.items():
            out[job.places[0] : job.places[0] + len(job.places)] = 0
            # For one token `added_up` applies the weight, as it does for all experts.
            weights = job.weights if len(self._x) > 1 else np.ones(1, np.float32)
            works.append(ExpertWork(rows[key], job.tokens, weights, job.places))
        x = self._workspace.host_x[: len(self._x)]
        self._cpu = cpu.thread.submit(cpu.kernels.experts_apart, x, works, out.numpy())

    def fetch(self, key: ExpertKey) -> None:
        """Begins to copy an expert that has its pages, unless the CPU computes it."""
        if key not in self._on_cpu:
            self._store.fetch(key, urgent=True)

    def add(self, job: ExpertJob) -> None:
        """Adds an expert to run: together with those on the device, or when it has arrived."""
        if job.key in self._on_cpu:
            return
        if self._store.is_here(job.key):
            self._gather(job)
        else:
            self._late.append(job)

    def evict(self, event: EvictEvent) -> None:
        """Takes an expert's pages; launches it before, if it still has to run."""
        if event.key in self._on_cpu:
            return
        if any(job.key == event.key for job in (*self._late, *(job for job, _ in (*self._whole, *self._in_part)))):
            self._launch_all()
        self._store.evict(event.key)

    def flush(self) -> None:
        """Launches all added experts, and takes the outputs of the CPU's experts."""
        self._launch_all()
        if self._cpu is not None:
            self._cpu.result()
            self._cpu = None
            for job in self._on_cpu.values():
                self._take_from_cpu(job)

    def request_rows(self) -> None:
        """Does nothing: a launch asks the selectors and requests the rows that run."""

    def compute_gathered(self) -> None:
        """Launches the added experts that were on the device."""
        whole, self._whole = self._whole, []
        in_part, self._in_part = self._in_part, []
        if len(self._x) > 1:
            for job, _ in whole:
                self._run_many(job)
        elif whole or in_part:
            self._run_one(whole, in_part)

    def added_up(self) -> Tensor:
        """Returns the sum of outputs so far, float32 [T, d]; for one token it is valid until the next layer's."""
        return self._one_added_up() if len(self._x) == 1 else self._many_added_up()

    @property
    def keys_on_cpu(self) -> list[ExpertKey]:
        """The experts that the CPU computes."""
        return list(self._on_cpu)

    def _launch_all(self) -> None:
        self.compute_gathered()
        while self._late:
            first, *others = self._late
            self._late = []
            self._gather(first)
            for job in others:
                self.add(job)
            self.compute_gathered()

    def _gather(self, job: ExpertJob) -> None:
        """Adds an expert to the next launches; the device waits for it, if it has not arrived."""
        expert = self._store.arrive(job.key)
        if not expert.is_whole and len(self._x) > 1:
            self._counts.in_part += job.key not in self._predicted
            self._store.fetch_records(job.key, np.arange(expert.layout.num_rows, dtype=np.int32), urgent=True)
            expert = self._store.arrive(job.key)
        (self._whole if expert.is_whole else self._in_part).append((job, expert))

    def _run_one(self, whole: list[tuple[ExpertJob, GpuExpert]], in_part: list[tuple[ExpertJob, GpuExpert]]) -> None:
        """Launches experts of one token; first the selectors of partial experts, so that their rows come soon."""
        ops, workspace, x, first = self._ops, self._workspace, self._x[0], len(self._places)
        middle, end = first + len(in_part), first + len(in_part) + len(whole)
        both = [job for job, _ in (*in_part, *whole)]
        self._places += [int(job.places[0]) for job in both]
        experts = workspace.send_numbers(self._device, EXPERTS_ROW, [job.key.expert for job in both], first)
        partial, complete = experts[: len(in_part)], experts[len(in_part) :]
        of_part, of_whole = _slice(workspace.selection, first, middle), _slice(workspace.selection, middle, end)
        if in_part:
            ops.select(x, partial, self._tables, of_part)
            mark = workspace.copy_selection_to_host(self._device, first, middle)
        if whole:
            ops.select(x, complete, self._tables, of_whole)
            ops.neurons(x, complete, self._tables, of_whole, workspace.partials[middle:end])
        if in_part:
            self._device.synchronize(mark, "neurons")
            for place, (job, expert) in enumerate(in_part, first):
                self._copy_running_rows(job, expert, place)
            ops.neurons(x, partial, self._tables, of_part, workspace.partials[first:middle])

    def _copy_running_rows(self, job: ExpertJob, expert: GpuExpert, place: int) -> None:
        """Begins to copy the rows of the neurons that run; later launches have them."""
        neurons = self._workspace.selected_neurons(place)
        self._store.shares.ran(job.key.layer_idx, len(neurons) / expert.layout.num_rows)
        predicted = self._predicted.get(job.key)
        count_rows(self._counts, neurons, predicted)
        if self._approximations.is_predicted_enough and predicted is not None:
            self._workspace.replace_selected(self._device, place, expert.present(neurons))
        else:
            self._store.fetch_records(job.key, neurons, urgent=True)
        self._store.arrive(job.key)

    def _one_added_up(self) -> Tensor:
        """Returns the weighted sum of one token's experts so far, in the order of experts."""
        workspace, n, turn = self._workspace, len(self._places), self._num_sums
        assert turn < 2, "a layer has at most one sum before its last"
        self._num_sums += 1
        out = workspace.out[turn]
        if n == 0:
            return out.zero_()
        order = sorted(range(n), key=self._places.__getitem__)
        by_place = {int(job.places[0]): float(job.weights[0]) for job in self._jobs.values()}
        weights = workspace.send_weights(self._device, turn, [by_place[self._places[number]] for number in order])
        partials = workspace.partials[:n]
        if order != list(range(n)):
            slots = workspace.send_numbers(self._device, ORDER_ROWS[turn], order)
            partials = workspace.ordered[:n]
            torch.index_select(workspace.partials, 0, slots, out=partials)
        self._ops.reduce(partials, weights, out[0])
        return out

    def _take_from_cpu(self, job: ExpertJob) -> None:
        """Copies the outputs of an expert that the CPU has computed to the device."""
        workspace, first = self._workspace, int(job.places[0])
        if len(self._x) > 1:
            rows = slice(first, first + len(job.places))
            self._device.copy(self._outputs[rows], workspace.host_y[rows], "compute")
            return
        slot = len(self._places)
        self._places.append(first)
        workspace.partials[slot].zero_()
        self._device.copy(workspace.partials[slot, 0], workspace.host_y[first], "compute")

    def _prepare_many(self) -> None:
        """Sends each job's tokens and weights, and where each token's outputs will be."""
        workspace, jobs = self._workspace, self._jobs.values()
        tokens = np.concatenate([job.tokens for job in jobs])
        n = len(tokens)
        workspace.send_numbers(self._device, TOKENS_ROW, tokens)
        # Jobs are in the order of experts, and so are a token's outputs: [T, k], sent as [k, T].
        places = np.argsort(tokens, kind="stable").reshape(len(self._x), -1).T.ravel()
        workspace.send_numbers(self._device, PLACES_ROW, places)
        workspace.send_numbers(self._device, SLOTS_ROW, np.arange(n))
        workspace.send_weights(self._device, 0, np.concatenate([job.weights for job in jobs]))
        self._outputs = torch.zeros((n, self._x.shape[1]), device=self._x.device)

    def _run_many(self, job: ExpertJob) -> None:
        workspace, first, n = self._workspace, int(job.places[0]), len(job.places)
        rows = slice(first, first + n)
        x = self._x.index_select(0, workspace.numbers[TOKENS_ROW, rows])  # [n, d]
        self._ops.many(
            x,
            workspace.numbers[SLOTS_ROW, :n],
            workspace.weights[0, rows],
            self._tables,
            job.key.expert,
            self._store.kind(job.key),
            self._outputs[rows],
            workspace.hidden,
        )

    def _many_added_up(self) -> Tensor:
        T = len(self._x)
        places = self._workspace.numbers[PLACES_ROW, : len(self._outputs)].view(-1, T)  # [k, T]
        y = self._outputs.index_select(0, places[0])
        for others in places[1:]:
            y += self._outputs.index_select(0, others)
        return y


def _slice(selection: Selection, first: int, end: int) -> Selection:
    return Selection(selection.a[first:end], selection.neurons[first:end], selection.counts[first:end])
