"""What the staged engine computes experts with, whose rows lie in an arena of the device. Importing it needs triton.

A layer's experts at work on a device: launched together where they are there, each as soon as it comes otherwise.

The twin of `streaming`'s LayerRun. The host launches and goes on; it waits for the device only to see which rows are to
be brought ("neurons"), and for experts that the CPU computes meanwhile. Each expert's output is kept apart, and they
are added up in the order of experts.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import ModelSpec
from moe_pack.formats.layout import DenseLayout
from moe_pack.runtime.cpu import ExpertRows, Kernels
from moe_pack.runtime.gpu.device import Device, StreamMark
from moe_pack.runtime.gpu.kernels.cache import SELECT_BLOCK, ExpertKind, LayerTables, Selection
from moe_pack.runtime.gpu.kernels.elementwise import reduce
from moe_pack.runtime.gpu.kernels.experts import expert_many, neurons, select, workspace_floats
from moe_pack.runtime.gpu.staged_store import GpuExpert, GpuExpertStore
from moe_pack.runtime.gpu.weights import DeviceMatrix
from moe_pack.runtime.model import Matrix
from moe_pack.runtime.offload import Approximations, ExpertJob, ExpertKey, PhaseCounts
from moe_pack.runtime.offload.cache import EvictEvent
from moe_pack.runtime.offload.experts import count_rows


class TritonOps:
    """Experts of one token, several at a time, or one expert for many tokens, by the Triton kernels.

    Nothing here waits for the device, which is a GPU, or plain memory under Triton's interpreter.
    """

    def matrix(self, dense: DenseLayout, raw: Tensor) -> Matrix:
        """A dense matrix of the bytes u8 of its rows, on the device."""
        return DeviceMatrix(dense, raw)

    def select(self, x: Tensor, experts: Tensor, tables: LayerTables, out: Selection) -> None:
        """Finds the neurons that run for x float32 [d], of experts int32 [k]."""
        select(x, experts, tables, out)

    def neurons(self, x: Tensor, experts: Tensor, tables: LayerTables, selection: Selection, partials: Tensor) -> None:
        """Partial sums float32 [k, P, d] of the listed neurons' outputs."""
        neurons(x, experts, tables, selection, partials)

    def reduce(self, partials: Tensor, weights: Tensor, out: Tensor) -> None:
        """`out` float32 [d] = the sum over k of weights float32 [k] times partials, in order."""
        reduce(partials, weights, out)

    def workspace_floats(self, num_tokens: int, num_rows: int) -> int:
        """Float32 values that `many` needs to work in, for so many tokens of an expert of so many neurons."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Memory that layers work in, one after the other; taken once. What begins with `host_` is page-locked.

    `numbers`, `host_numbers`: int32 [3, N], for N = chunk_tokens * k: experts or tokens; where outputs stand, in two
    copies as they may be wanted twice.   `weights`, `host_weights`: float32 [2, N].   `partials`, `ordered`: float32
    [k, P, d].   `out`: float32 [2, 1, d].   `selection`, with `host_neurons` and `host_counts` its copies.   `host_x`:
    float32 [chunk_tokens, d], `host_y`: [N, d], for the CPU's experts; of no rows where it has none.
    """

    numbers: Tensor
    host_numbers: Tensor
    weights: Tensor
    host_weights: Tensor
    partials: Tensor
    ordered: Tensor
    out: Tensor
    workspace: Tensor
    selection: Selection
    host_neurons: Tensor
    host_counts: Tensor
    host_x: Tensor
    host_y: Tensor


def allocate_workspace(
    spec: ModelSpec, device: Device, ops: TritonOps, chunk_tokens: int, num_partials: int, has_cpu: bool
) -> Workspace:
    """Room for forward passes of so many tokens, and partial sums of one token's experts."""
    d, f, k = spec.hidden_size, spec.expert.intermediate_size, spec.router.num_experts_per_tok
    N, blocks = chunk_tokens * k, -(-f // SELECT_BLOCK)

    def floats(*shape: int) -> Tensor:
        return device.on_device(4 * prod(shape)).view(torch.float32).view(shape)

    def whole(*shape: int) -> Tensor:
        return device.on_device(4 * prod(shape)).view(torch.int32).view(shape)

    def host(dtype: torch.dtype, *shape: int) -> Tensor:
        return device.on_host(4 * prod(shape)).view(dtype).view(shape)

    return Workspace(
        numbers=whole(3, N),
        host_numbers=host(torch.int32, 3, N),
        weights=floats(2, N),
        host_weights=host(torch.float32, 2, N),
        partials=floats(k, num_partials, d),
        ordered=floats(k, num_partials, d),
        out=floats(2, 1, d),
        workspace=floats(ops.workspace_floats(chunk_tokens, f)),
        selection=Selection(floats(k, f), whole(k, f), whole(k, blocks)),
        host_neurons=host(torch.int32, k, f),
        host_counts=host(torch.int32, k, blocks),
        host_x=host(torch.float32, chunk_tokens if has_cpu else 0, d),
        host_y=host(torch.float32, N if has_cpu else 0, d),
    )


def workspace_size(spec: ModelSpec, ops: TritonOps, chunk_tokens: int, num_partials: int) -> int:
    """Returns the bytes that `allocate_workspace` takes on the device, and those of outputs that stand apart."""
    d, f, k = spec.hidden_size, spec.expert.intermediate_size, spec.router.num_experts_per_tok
    N, blocks = chunk_tokens * k, -(-f // SELECT_BLOCK)
    few = 2 * k * num_partials * d + 2 * d + k * (2 * f + blocks)
    apart = 2 * N * d + 2 * chunk_tokens * d  # outputs, one place's at a time, an expert's inputs, the sum
    return 4 * (5 * N + few + ops.workspace_floats(chunk_tokens, f) + apart)


@dataclass(frozen=True, slots=True)
class CpuWorker:
    """What computes some of a layer's experts on the host meanwhile: kernels, and a thread that calls them."""

    kernels: Kernels
    thread: ThreadPoolExecutor


class GpuLayerRun:
    """A layer's experts on x float32 [T, d] on the device.

    Args:    jobs: all of the layer's, rising.   on_cpu: those that the CPU computes, by their rows in host memory; they
             begin at once.   predicted: rows that were predicted, by expert.
    """

    def __init__(
        self,
        store: GpuExpertStore,
        ops: TritonOps,
        room: Workspace,
        layer_idx: int,
        x: Tensor,
        jobs: dict[int, ExpertJob],
        counts: PhaseCounts,
        predicted: dict[ExpertKey, Neurons],
        approximations: Approximations,
    ) -> None:
        self._store, self._device, self._ops, self._room = store, store.device, ops, room
        self._tables: LayerTables = store.tables[layer_idx]
        self._x, self._jobs, self._counts = x, jobs, counts
        self._predicted, self._approximations = predicted, approximations
        self._whole: list[tuple[ExpertJob, GpuExpert]] = []
        self._in_part: list[tuple[ExpertJob, GpuExpert]] = []
        self._late: list[ExpertJob] = []
        self._on_cpu: dict[ExpertKey, ExpertJob] = {}  # what the CPU computes, where it has been told to
        self._cpu: Future[None] | None = None
        self._places: list[int] = []  # of those computed for one token, as they stand in `partials`
        self._num_sums = 0
        self._outputs = torch.empty(0)
        if len(x) > 1:
            self._prepare_many()

    def compute_on_cpu(self, cpu: CpuWorker, rows: dict[ExpertKey, ExpertRows]) -> None:
        """Begins to compute these experts on the CPU; their pages are never filled."""
        self._on_cpu = {job.key: job for job in self._jobs.values() if job.key in rows}
        out = self._room.host_y
        works = []
        for key, job in self._on_cpu.items():
            out[job.places[0] : job.places[0] + len(job.places)] = 0
            # For one token `added_up` weights them as all others.
            weights = job.weights if len(self._x) > 1 else np.ones(1, np.float32)
            works.append((rows[key], job.tokens, weights, job.places))
        x = self._room.host_x[: len(self._x)]
        self._cpu = cpu.thread.submit(cpu.kernels.experts_apart, x, works, out.numpy())

    def fetch(self, key: ExpertKey) -> None:
        """Copies an expert that has got its pages, where it is not the CPU's."""
        if key not in self._on_cpu:
            self._store.fetch(key, urgent=True)

    def add(self, job: ExpertJob) -> None:
        """An expert to run: with the others that are there, or once it comes."""
        if job.key in self._on_cpu:
            return
        if self._store.is_here(job.key):
            self._gather(job)
        else:
            self._late.append(job)

    def evict(self, event: EvictEvent) -> None:
        """An expert's pages are wanted: before, it is launched, if it was to be."""
        if event.key in self._on_cpu:
            return
        if any(job.key == event.key for job in (*self._late, *(job for job, _ in (*self._whole, *self._in_part)))):
            self._launch_all()
        self._store.evict(event.key)

    def flush(self) -> None:
        """Launches all that has been added, and takes in what the CPU has computed."""
        self._launch_all()
        if self._cpu is not None:
            self._cpu.result()
            self._cpu = None
            for job in self._on_cpu.values():
                self._take_from_cpu(job)

    def compute_gathered(self) -> None:
        """Launches what has been added and was there."""
        whole, self._whole = self._whole, []
        in_part, self._in_part = self._in_part, []
        if len(self._x) > 1:
            for job, _ in whole:
                self._run_many(job)
        elif whole or in_part:
            self._run_one(whole, in_part)

    def added_up(self) -> Tensor:
        """y float32 [T, d]: outputs so far, in the order of experts. Of one token, valid until the next layer's."""
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
        """Takes an expert in that is there, or that the device is to wait for."""
        held = self._store.arrive(job.key)
        if not held.is_whole and len(self._x) > 1:
            self._counts.in_part += job.key not in self._predicted
            self._store.fetch_records(job.key, np.arange(held.layout.num_rows, dtype=np.int32), urgent=True)
            held = self._store.arrive(job.key)
        (self._whole if held.is_whole else self._in_part).append((job, held))

    def _run_one(self, whole: list[tuple[ExpertJob, GpuExpert]], in_part: list[tuple[ExpertJob, GpuExpert]]) -> None:
        """Launches experts of one token: selectors of those in part first, so that their rows are on their way soon."""
        ops, room, x, first = self._ops, self._room, self._x[0], len(self._places)
        middle, end = first + len(in_part), first + len(in_part) + len(whole)
        both = [job for job, _ in (*in_part, *whole)]
        self._places += [int(job.places[0]) for job in both]
        room.host_numbers[0, first:end] = torch.tensor([job.key.expert for job in both], dtype=torch.int32)
        self._device.copy(room.numbers[0, first:end], room.host_numbers[0, first:end], "compute")
        of_part, of_whole = _slice(room.selection, first, middle), _slice(room.selection, middle, end)
        if in_part:
            ops.select(x, room.numbers[0, first:middle], self._tables, of_part)
            seen = seen_neurons(self._device, room, first, middle)
        if whole:
            ops.select(x, room.numbers[0, middle:end], self._tables, of_whole)
            ops.neurons(x, room.numbers[0, middle:end], self._tables, of_whole, room.partials[middle:end])
        if in_part:
            self._device.synchronize(seen, "neurons")
            for place, (job, held) in enumerate(in_part, first):
                self._bring_rows(job, held, place)
            ops.neurons(x, room.numbers[0, first:middle], self._tables, of_part, room.partials[first:middle])

    def _bring_rows(self, job: ExpertJob, held: GpuExpert, place: int) -> None:
        """Has the rows of the neurons that run copied; what is launched from now on has them."""
        room = self._room
        neurons = listed_neurons(room, place)
        self._store.running(job.key, len(neurons) / held.layout.num_rows)
        predicted = self._predicted.get(job.key)
        count_rows(self._counts, neurons, predicted)
        if self._approximations.is_predicted_enough and predicted is not None:
            list_neurons(room, place, held.present(neurons))
            self._device.copy(room.selection.neurons[place], room.host_neurons[place], "compute")
            self._device.copy(room.selection.counts[place], room.host_counts[place], "compute")
        else:
            self._store.fetch_records(job.key, neurons, urgent=True)
        self._store.arrive(job.key)

    def _one_added_up(self) -> Tensor:
        """Weights and adds what has been computed of one token, in the order of experts."""
        room, n, turn = self._room, len(self._places), self._num_sums
        assert turn < 2, "at most once before all is computed"
        self._num_sums += 1
        out = room.out[turn]
        if n == 0:
            return out.zero_()
        order = sorted(range(n), key=self._places.__getitem__)
        by_place = {int(job.places[0]): float(job.weights[0]) for job in self._jobs.values()}
        weights = [by_place[self._places[number]] for number in order]
        room.host_weights[turn, :n] = torch.tensor(weights)
        self._device.copy(room.weights[turn, :n], room.host_weights[turn, :n], "compute")
        partials = room.partials[:n]
        if order != list(range(n)):
            slots = room.host_numbers[1 + turn, :n]
            slots[:] = torch.tensor(order, dtype=torch.int32)
            self._device.copy(room.numbers[1 + turn, :n], slots, "compute")
            partials = room.ordered[:n]
            torch.index_select(room.partials, 0, room.numbers[1 + turn, :n], out=partials)
        self._ops.reduce(partials, room.weights[turn, :n], out[0])
        return out

    def _take_from_cpu(self, job: ExpertJob) -> None:
        room, first = self._room, int(job.places[0])
        if len(self._x) > 1:
            mine = slice(first, first + len(job.places))
            self._device.copy(self._outputs[mine], room.host_y[mine], "compute")
            return
        slot = len(self._places)
        self._places.append(first)
        room.partials[slot].zero_()
        self._device.copy(room.partials[slot, 0], room.host_y[first], "compute")

    def _prepare_many(self) -> None:
        """Sends each job's tokens and weights, and where each token's outputs will stand."""
        room, jobs = self._room, self._jobs.values()
        tokens = np.concatenate([job.tokens for job in jobs])
        n = len(tokens)
        host = room.host_numbers.numpy()
        host[0, :n] = tokens
        # A token's outputs in the order of experts, as jobs are: [T, k], place by place.
        host[1, :n] = np.argsort(tokens, kind="stable").reshape(len(self._x), -1).T.ravel()
        host[2, :n] = np.arange(n)
        room.host_weights.numpy()[0, :n] = np.concatenate([job.weights for job in jobs])
        for row in range(3):
            self._device.copy(room.numbers[row, :n], room.host_numbers[row, :n], "compute")
        self._device.copy(room.weights[0, :n], room.host_weights[0, :n], "compute")
        self._outputs = torch.zeros((n, self._x.shape[1]), device=self._x.device)

    def _run_many(self, job: ExpertJob) -> None:
        room, first, n = self._room, int(job.places[0]), len(job.places)
        mine = slice(first, first + n)
        x = self._x.index_select(0, room.numbers[0, mine])  # [n, d]
        kind = self._store.kind(job.key)
        outputs, tables, expert = self._outputs[mine], self._tables, job.key.expert
        self._ops.many(x, room.numbers[2, :n], room.weights[0, mine], tables, expert, kind, outputs, room.workspace)

    def _many_added_up(self) -> Tensor:
        T = len(self._x)
        places = self._room.numbers[1, : len(self._outputs)].view(-1, T)  # [k, T]
        y = self._outputs.index_select(0, places[0])
        for others in places[1:]:
            y += self._outputs.index_select(0, others)
        return y


def _slice(selection: Selection, first: int, end: int) -> Selection:
    return Selection(selection.a[first:end], selection.neurons[first:end], selection.counts[first:end])


def seen_neurons(device: Device, room: Workspace, first: int, end: int) -> StreamMark:
    """Asks for the host's copies of what was selected; the mark after which they are there."""
    device.copy(room.host_neurons[first:end], room.selection.neurons[first:end], "compute")
    device.copy(room.host_counts[first:end], room.selection.counts[first:end], "compute")
    return device.record("compute")


def listed_neurons(room: Workspace, place: int) -> Neurons:
    """The neurons that a selection lists for its `place`-th expert, rising: from the host's copies."""
    neurons, counts = room.host_neurons[place].numpy(), room.host_counts[place].numpy()
    within = np.arange(len(neurons)) % SELECT_BLOCK
    listed: Neurons = neurons[within < np.repeat(counts, SELECT_BLOCK)[: len(neurons)]]
    return listed


def list_neurons(room: Workspace, place: int, neurons: Neurons) -> None:
    """Writes a list of neurons (rising) into the host's copies of a selection."""
    listed, counts = room.host_neurons[place].numpy(), room.host_counts[place].numpy()
    blocks = neurons // SELECT_BLOCK
    counts[:] = np.bincount(blocks, minlength=len(counts))
    starts = np.cumsum(counts) - counts
    listed[blocks * SELECT_BLOCK + np.arange(len(neurons)) - starts[blocks]] = neurons
