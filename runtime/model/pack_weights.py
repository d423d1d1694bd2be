"""The weights of a pack.

`PackWeights` keeps the dense part on the device and reads an expert whenever it is needed; `PackedExpert` decodes it
block by block. `MappedPackWeights` leaves experts in their mapped files, where native kernels use them as they are.
`StreamedPackWeights` keeps nothing, so that packs can be measured that fit no memory.

n-gram tables stay on the disk in all of them: `PackTables` reads rows by threads while a pass runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import Matrix as MatrixName
from moe_pack.formats.pack.layouts import DENSE_FILE, DenseLayout, NgramLayout, check_rows, ngrams_file
from moe_pack.runtime import cpu
from moe_pack.runtime.cpu import reads
from moe_pack.runtime.cpu.reads import cut_error
from moe_pack.runtime.model import compute, layers
from moe_pack.runtime.model.compute import matrices
from moe_pack.runtime.model.compute.expert import Expert, NeuronBlock
from moe_pack.runtime.model.compute.operations import TORCH, NativeOperations, Operations, row_blocks
from moe_pack.runtime.model.compute.rotation import Rotation
from moe_pack.runtime.model.compute.weights import from_experts, to_experts
from moe_pack.runtime.model.panels import ExpertPanels


@contextmanager
def named_if_cut(place: str) -> Iterator[None]:
    """Turns MapCutError into a PackError that names the file."""
    try:
        yield
    except cpu.MapCutError as fault:
        raise cut_error(place) from fault


class PackedExpert:
    """An expert in the bytes of its extent, u8 on any device; its neurons are dequantized block by block."""

    def __init__(self, layout: formats.ExpertLayout, extent: Tensor, operations: Operations = TORCH) -> None:
        self._layout = layout
        self._extent = extent
        self._operations = operations

    def blocks(self) -> Iterator[NeuronBlock]:
        layout = self._layout
        num_parts = len(layout.records.parts) + (len(layout.selector.parts) if layout.selector else 0)
        for start, stop in row_blocks(layout.num_rows, layout.records.num_cols, num_parts):
            gate, gate_bias = self._part("gate", start, stop)
            up, up_bias = self._part("up", start, stop)
            down, _ = self._part("down", start, stop)
            assert up is not None and down is not None, "every expert has up and down"
            yield NeuronBlock(gate, up, down, gate_bias, up_bias)

    def down_bias(self) -> Tensor | None:
        extra = self._layout.extra
        if extra is None:
            return None
        start = len(self._extent) - extra.row_bytes
        return self._extent[start : start + extra.crc_offset].clone().view(torch.float32)

    def _part(self, matrix: MatrixName, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns rows of a matrix, float32 [stop - start, d], and its biases, float32 [stop - start], or None."""
        place = self._layout.find(matrix)
        if place is None:
            return None, None
        layout, part, base = place
        first, last = base + start * layout.row_bytes, base + stop * layout.row_bytes
        rows = self._extent[first:last].view(-1, layout.row_bytes)
        weights = self._operations.decode(layout, part, rows)
        bias = (
            rows[:, part.bias_offset : part.bias_offset + 4].clone().view(torch.float32)[:, 0]
            if part.has_bias
            else None
        )
        return weights, bias


class MappedExpert:
    """An expert in its mapped file, u8. Only native operations read it, because they survive it if the file is cut."""

    def __init__(
        self,
        layout: formats.ExpertLayout,
        selector: formats.Selector,
        function: formats.NeuronFunction,
        threshold: float,
        mapped: NDArray[np.uint8],
        operations: NativeOperations,
        place: str,
    ) -> None:
        self._layout = layout
        self._place = place
        self._mapped = mapped
        self._operations = operations
        self.num_bytes = layout.num_bytes
        self.rows = cpu.extent_rows(layout, selector, function, threshold, mapped)

    def blocks(self) -> Iterator[NeuronBlock]:
        with named_if_cut(self._place):
            copied = self._operations.kernels.gather(self._mapped.reshape(1, -1), np.zeros(1, np.int32)).reshape(-1)
        yield from PackedExpert(self._layout, torch.from_numpy(copied), self._operations).blocks()

    def down_bias(self) -> Tensor | None:
        if self._layout.extra is None:
            return None
        extra = self._mapped[-self._layout.extra_bytes :].reshape(1, -1)
        with named_if_cut(self._place):
            copied = self._operations.kernels.gather(extra, np.zeros(1, np.int32))[0]
        return torch.from_numpy(copied[: self._layout.extra.crc_offset]).view(torch.float32)


def rotations(pack: formats.Pack, device: torch.device) -> tuple[Rotation | None, ...]:
    """Returns the rotation of each MoE layer on a device; None for layers that are not rotated."""
    vectors = pack.rotation
    if vectors is None:
        return (None,) * len(pack.spec.moe_layers)
    inputs, outputs = (torch.from_numpy(each).to(device) for each in (vectors.input, vectors.output))
    return tuple(
        Rotation(a, b) if vectors.is_rotated(layer_idx) else None
        for layer_idx, (a, b) in enumerate(zip(inputs, outputs, strict=True))
    )


def table_values(table: NgramLayout, rows: NDArray[np.uint8], numbers: reads.Numbers) -> Tensor:
    """Returns the values of table rows u8 [n, row_bytes], float32 [n, values]; raises PackError for a damaged one."""
    check_rows(table.rows, rows, ngrams_file(table.layer), numbers)
    values = torch.from_numpy(rows).view(matrices.TORCH_DTYPES[table.dtype])[:, : table.rows.num_cols]
    return values.to(torch.float32, copy=True)


class PackTables:
    """The n-gram tables of an open pack, of which threads read rows into buffers. `close` it.

    Reads go through the system's cache: measured on a table eight times as large as the memory for it, threads that
    read rows take 0.6 ms for a token's 32 rows, faults of a mapped file 1.5 ms with one thread and 2.6 with eight, and
    a map of so many scattered pages takes megabytes of page tables for each gigabyte.
    """

    def __init__(self, pack: formats.Pack) -> None:
        ngrams, tables = pack.spec.ngrams, pack.layout.ngrams
        assert ngrams is not None, "a model with n-gram tables"
        self.pack, self.slot_rows = pack, compute.SLOT_TOKENS * ngrams.num_heads
        self.slot_bytes = self.slot_rows * max(table.rows.row_bytes for table in tables)
        num_slots = compute.SLOTS_PER_TABLE * len(tables)
        self.memory = np.empty(num_slots * self.slot_bytes, np.uint8)
        self.free = list(range(num_slots))
        self.reads = reads.open_reads(self.memory, direct=False)
        self._tables = {t.layer: (t, self.reads.open(pack.folder / ngrams_file(t.layer))) for t in tables}

    def begin(self, layer: int, numbers: reads.Numbers) -> "_PackRows | compute.LaterRows":
        """Begins to read rows of a decoder layer's table; without a free buffer, they are read in `result`."""
        table, file = self._tables[layer]
        if not self.free:
            return compute.LaterRows(lambda: table_values(table, self.pack.read_ngram_rows(table, numbers), numbers))
        return _PackRows(self, table, file, numbers)

    def close(self) -> None:
        self.reads.close()


class _PackRows:
    """Rows on their way into a buffer; if there are more than fit it, the others follow when somebody waits."""

    def __init__(self, tables: PackTables, table: NgramLayout, file: int, numbers: reads.Numbers) -> None:
        self._tables, self._table, self._file, self._numbers = tables, table, file, numbers
        self._slot: int | None = tables.free.pop()
        self._ticket: int | None = None
        self._submit(numbers[: tables.slot_rows])

    def result(self) -> Tensor:
        pieces, step, row_bytes = [], self._tables.slot_rows, self._table.rows.row_bytes
        assert self._slot is not None, "rows are taken once"
        memory = self._tables.memory[self._slot * self._tables.slot_bytes :]
        try:
            for start in range(0, len(self._numbers), step):
                numbers = self._numbers[start : start + step]
                if start:
                    self._submit(numbers)
                self._wait()
                rows = memory[: len(numbers) * row_bytes].reshape(-1, row_bytes)
                pieces.append(table_values(self._table, rows, numbers))
        finally:
            self.cancel()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def cancel(self) -> None:
        if self._ticket is not None:
            self._tables.reads.cancel(self._ticket)
            self._ticket = None
        if self._slot is not None:
            self._tables.free.append(self._slot)
            self._slot = None

    def _submit(self, numbers: reads.Numbers) -> None:
        assert self._slot is not None, "rows have a buffer"
        row_bytes = self._table.rows.row_bytes
        places = self._slot * self._tables.slot_bytes + np.arange(len(numbers), dtype=np.int64) * row_bytes
        offsets, sizes = self._table.offset + numbers * row_bytes, np.full(len(numbers), row_bytes, np.int64)
        self._ticket = self._tables.reads.submit(self._file, offsets, places, sizes, urgent=True)

    def _wait(self) -> None:
        assert self._ticket is not None, "rows were requested"
        try:
            self._tables.reads.wait(self._ticket)
        except formats.PackError:
            self._ticket = None  # it is forgotten; after a signal it is not
            raise
        self._ticket = None


_FIRST_TOKEN = np.zeros(1, np.int64)
_PANEL_TOKENS = 16  # of a pass at most, whose experts are then copied to panels: prompts have more, and use rows


class _OfPack:
    def __init__(self, pack: formats.Pack, device: torch.device, operations: Operations) -> None:
        self.spec: formats.ModelSpec = pack.spec
        self.selector = pack.manifest.selector
        self.operations = operations
        self._pack, self._device = pack, device
        self._rotations = rotations(pack, device)

    def threshold(self, layer_idx: int, expert: int) -> float:
        return float(self._pack.thresholds[layer_idx, expert])

    def rotation(self, layer_idx: int) -> Rotation | None:
        return self._rotations[layer_idx]


class PackWeights(_OfPack, layers.ObservedWeights):
    """The weights of an open pack, with the dense part on the device. `close` them; the caller closes the pack.

    Raises:  PackError if the dense part is damaged; later, if an expert is, which is read when it is needed.
    """

    def __init__(self, pack: formats.Pack, device: torch.device, operations: Operations = TORCH) -> None:
        super().__init__(pack, device, operations)
        self.bytes_read = 0  # of experts
        self.dense_bytes = pack.layout.dense_file.num_bytes + pack.layout.rotation_bytes
        self._dense: dict[str, matrices.Matrix] = {}
        self._vectors: dict[str, Tensor] = {}
        self._tables: PackTables | None = None  # opened when they are needed
        self._keep(torch.from_numpy(pack.read_file(DENSE_FILE)))

    def _keep(self, file: Tensor) -> None:
        multiplied = {dense.role.name for dense in self._pack.layout.read_dense()}
        for dense in self._pack.layout.dense:
            entry = dense.entry
            raw = file[entry.offset : entry.offset + entry.num_bytes].to(self._device)
            if len(entry.shape) == 1:
                self._vectors[dense.role.name] = stored_vector(dense, raw)
            else:
                matrix = self._matrix(dense, raw)
                if isinstance(matrix, matrices.RowMatrix) and dense.role.name in multiplied:
                    matrix = matrix.to_panels()
                self._dense[dense.role.name] = matrix

    def _matrix(self, dense: DenseLayout, raw: Tensor) -> matrices.Matrix:
        return stored_matrix(dense, raw, self.operations)

    def vector(self, role: str) -> Tensor:
        return self._vectors[role]

    def matrix(self, role: str) -> matrices.Matrix:
        return self._dense[role]

    def expert(self, layer_idx: int, expert: int) -> Expert:
        layout = self._pack.layout.experts[layer_idx][expert]
        self.bytes_read += layout.num_bytes
        if self.observer is not None:
            self.observer.fetched(layer_idx, expert)
        raw = torch.from_numpy(self._pack.read_extent(layer_idx, expert)).to(self._device)
        return PackedExpert(layout, raw, self.operations)

    def ngram_table(self, layer: int) -> "compute.RowTable":
        if self._tables is None:
            self._tables = PackTables(self._pack)
        return partial(self._tables.begin, layer)

    def close(self) -> None:
        """Ends the threads that read n-gram tables."""
        if self._tables is not None:
            self._tables.close()
            self._tables = None


class MappedPackWeights(PackWeights, layers.ExpertRunner):
    """The weights of an open pack on the CPU; native operations use experts, checked once, in their mapped files.

    Args:    panel_bytes: memory for copies of experts in panels.
    """

    operations: NativeOperations

    def __init__(self, pack: formats.Pack, operations: NativeOperations, panel_bytes: int = 0) -> None:
        super().__init__(pack, torch.device("cpu"), operations)
        self._last_layer_idx = len(pack.layout.experts) - 1
        self._mapped: dict[tuple[int, int], MappedExpert] = {}
        self.panels = ExpertPanels(operations.kernels, panel_bytes)
        self._num_panels = 0  # of those made that `_mapped` has
        sizes = [[expert.num_bytes for expert in layer] for layer in pack.layout.experts]
        self._sizes = np.array(sizes, np.int64).reshape(-1, pack.spec.router.num_experts)
        self._has_asked = np.zeros(self._sizes.shape, np.bool_)  # for panels

    def close(self) -> None:
        self.panels.close()
        super().close()

    def expert(self, layer_idx: int, expert: int) -> Expert:
        self.bytes_read += self._pack.layout.experts[layer_idx][expert].num_bytes
        return self._mapped_expert(layer_idx, expert)

    def _mapped_expert(self, layer_idx: int, expert: int) -> MappedExpert:
        mapped_expert = self._mapped.get((layer_idx, expert))
        if mapped_expert is None:
            place = self._pack.manifest.expert_files[layer_idx].name
            with named_if_cut(place):
                mapped = self._pack.map_extent(layer_idx, expert, self.operations.kernels.checksum)
            layout, threshold = self._pack.layout.experts[layer_idx][expert], self.threshold(layer_idx, expert)
            function = self.spec.expert_function(layer_idx)
            mapped_expert = self._mapped[layer_idx, expert] = MappedExpert(
                layout, self.selector, function, threshold, mapped, self.operations, place
            )
        return mapped_expert

    def run_experts(
        self,
        layer_idx: int,
        x: Tensor,
        experts: Tensor,
        router_weights: Tensor,
        partial_state: layers.PartialState | None = None,
    ) -> Tensor:
        if self.observer is not None:
            self.observer.routed(layer_idx, experts.numpy())
        works = []
        self._take_panels()
        self.read_ahead(layer_idx, np.unique(experts.numpy()).tolist())
        x, router_weights = layers.expert_inputs(x, router_weights, self, layer_idx)
        for number, tokens, weights in tokens_by_expert(experts, router_weights):
            expert = self._mapped_expert(layer_idx, number)
            works.append((expert.rows, tokens, weights))
            self.bytes_read += expert.num_bytes
            if len(x) <= _PANEL_TOKENS:
                self.panels.want((layer_idx, number), expert.rows)
        try:
            y = self.operations.kernels.experts(to_experts(x, self, layer_idx), works)
        except cpu.MapCutError as fault:
            raise cut_error(self._pack.manifest.expert_files[layer_idx].name) from fault
        if layer_idx == self._last_layer_idx:
            self._check_files()
        return from_experts(y, self, layer_idx)

    @property
    def runs_in_place(self) -> bool:
        """Whether native layers may run the experts instead of `run_experts`: not where a class overrides that."""
        return type(self).run_experts is MappedPackWeights.run_experts

    def expert_rows(self, layer_idx: int, expert: int) -> cpu.ExpertRows:
        """Returns the rows of an expert in its mapped file; raises PackError if it is damaged."""
        self._take_panels()
        return self._mapped_expert(layer_idx, expert).rows

    def read_ahead(self, layer_idx: int, experts: list[int]) -> None:
        """Has the system read all experts at once that are about to be mapped: page by page a disk is far slower."""
        self._pack.read_ahead(layer_idx, experts)

    def _take_panels(self) -> None:
        for key, panels in self.panels.made_since(self._num_panels):
            self._mapped[key].rows = replace(self._mapped[key].rows, panels=panels)
            self._num_panels += 1

    def note_run(self, layer_idxs: list[int], experts: NDArray[np.int64], router_weights: NDArray[np.float32]) -> None:
        """Notes experts, int64 and float32 [layers, T, k], that native layers ran; raises PackError if one was cut."""
        if self.observer is not None:
            for layer_idx, own in zip(layer_idxs, experts, strict=True):
                self.observer.routed(layer_idx, own)
        layers_of, runs = np.array(layer_idxs, np.int64), router_weights != 0
        ran = np.zeros((len(layers_of), self._sizes.shape[1]), np.bool_)
        ran[runs.nonzero()[0], experts[runs]] = True
        self.bytes_read += int(self._sizes[layers_of][ran].sum())
        if experts.shape[1] <= _PANEL_TOKENS:
            for row, number in np.argwhere(ran & ~self._has_asked[layers_of]).tolist():
                key = layer_idxs[row], number
                self._has_asked[key] = True
                self.panels.want(key, self._mapped[key].rows)
        if self._last_layer_idx in layer_idxs:
            self._check_files()

    def cut_error(self, layer_idx: int) -> formats.PackError:
        """Returns the error for a layer whose file was cut while its map was read."""
        return cut_error(self._pack.manifest.expert_files[layer_idx].name)

    def _check_files(self) -> None:
        """Refuses files that were cut within a page, the rest of which reads as zeros; all at once, which is faster."""
        for layer_idx, listed in enumerate(self._pack.manifest.expert_files):
            if self._pack.is_cut(layer_idx):
                raise cut_error(listed.name)


def open_weights(
    pack: formats.Pack, device: torch.device, operations: Operations = TORCH, panel_bytes: int = 0
) -> PackWeights:
    """Returns a pack's weights: native operations use experts in mapped files, others read them.

    Args:    panel_bytes: memory for copies of experts in panels, by native operations.
    """
    if isinstance(operations, NativeOperations):
        return MappedPackWeights(pack, operations, panel_bytes)
    return PackWeights(pack, device, operations)


def tokens_by_expert(experts: Tensor, weights: Tensor) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Yields each running expert with its tokens and weights, in rising order, so that sums have one order.

    Args:    experts, weights: int64 and float32 [T, k]; with the weight zero an expert does not run for the token.
    """
    chosen, flat, (num_tokens, k) = experts.ravel().tolist(), weights.numpy().ravel(), experts.shape
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    if num_tokens == 1:
        for place in order:
            if flat[place] != 0:
                yield chosen[place], _FIRST_TOKEN, flat[place : place + 1]
        return
    tokens, flat, start = np.array(order, np.int64) // k, flat[order], 0
    none_is_zero = bool(flat.all())
    for number, places in groupby(order, key=chosen.__getitem__):
        stop = start + len(list(places))
        counting = slice(start, stop) if none_is_zero else start + np.flatnonzero(flat[start:stop])
        if len(tokens[counting]):
            yield number, tokens[counting], flat[counting]
        start = stop


class StreamedPackWeights(_OfPack):
    """The weights of an open pack, each read, and checked, when it is needed; the caller closes the pack."""

    def __init__(self, pack: formats.Pack, device: torch.device, operations: Operations = TORCH) -> None:
        super().__init__(pack, device, operations)
        pack.check_file(DENSE_FILE)
        self._dense = {dense.role.name: dense for dense in pack.layout.dense}

    def vector(self, role: str) -> Tensor:
        return stored_vector(self._dense[role], self._rows(role, 0, self._dense[role].entry.shape[0]))

    def matrix(self, role: str) -> matrices.Matrix:
        num_rows, num_cols = self._dense[role].role.shape
        return matrices.ReadMatrix(num_rows, num_cols, lambda start, stop: self.rows(role, start, stop))

    def load(self, role: str) -> matrices.Matrix:
        """Reads a dense matrix into memory, in its stored bytes."""
        dense = self._dense[role]
        return stored_matrix(dense, self._rows(role, 0, dense.role.shape[0]), self.operations)

    def rows(self, role: str, start: int, stop: int) -> Tensor:
        """Reads rows of a dense matrix, float32 [stop - start, columns]."""
        return stored_matrix(self._dense[role], self._rows(role, start, stop), self.operations).rows(0, stop - start)

    def expert(self, layer_idx: int, expert: int) -> Expert:
        raw = torch.from_numpy(self._pack.read_extent(layer_idx, expert)).to(self._device)
        return PackedExpert(self._pack.layout.experts[layer_idx][expert], raw, self.operations)

    def ngram_table(self, layer: int) -> "compute.RowTable":
        pack, table = self._pack, next(table for table in self._pack.layout.ngrams if table.layer == layer)

        def read(numbers: reads.Numbers) -> Tensor:
            return table_values(table, pack.read_ngram_rows(table, numbers), numbers)

        return lambda numbers: compute.LaterRows(partial(read, numbers))

    def _rows(self, role: str, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self._pack.read_dense(self._dense[role].entry, start, stop)).to(self._device)


def stored_vector(dense: DenseLayout, raw: Tensor) -> Tensor:
    """Returns a vector from its stored bytes, u8: float32 [n]."""
    vector = raw.view(matrices.TORCH_DTYPES[dense.dtype]).to(torch.float32)
    return vector + dense.role.offset if dense.role.offset else vector


def stored_matrix(dense: DenseLayout, raw: Tensor, operations: Operations = TORCH) -> matrices.Matrix:
    """Returns a matrix of some rows from their stored bytes, u8."""
    if dense.rows is not None:
        return matrices.RowMatrix(dense.rows, raw.view(-1, dense.rows.row_bytes), operations)
    values = raw.view(matrices.TORCH_DTYPES[dense.dtype]).view(-1, dense.role.shape[1])
    return matrices.StoredMatrix(
        values, TORCH if dense.role.integers else operations
    )  # integers are read, not multiplied
