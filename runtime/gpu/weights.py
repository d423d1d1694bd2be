"""A pack's weights in a GPU's memory: dense matrices as they are stored, and rows of experts.

`ExpertMemory` is one allocation: rows that are resident for the whole run, memory for the others, and tables of the
rows' places. `placements` divides it, and `prefill` uses its dynamic part for experts on their way. Importing this
needs Triton.
"""

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats.pack.layouts import DenseLayout, check_rows
from moe_pack.runtime import model
from moe_pack.runtime.gpu import devices, placements
from moe_pack.runtime.gpu.kernels import matmul, tables
from moe_pack.runtime.gpu.kernels.rows import part_of, stored_part
from moe_pack.runtime.model.compute import matrices


class DeviceMatrix(matrices.InMemoryMatrix):
    """A matrix [num_rows, num_cols] in the pack's row layout, or in plain values.

    Args:    raw: u8, all bytes of the matrix, on the device.   scratch, num_halves: as of `matmul.gemm`.
    """

    def __init__(self, dense: DenseLayout, raw: Tensor, scratch: Tensor, num_halves: int) -> None:
        self.num_rows, self.num_cols = dense.role.shape
        self._scratch, self._num_halves = scratch, num_halves
        self._plain: model.RowMatrix | model.StoredMatrix
        if dense.rows is not None:
            rows = raw.view(-1, dense.rows.row_bytes)
            self._rows = matmul.StoredRows(rows, part_of(dense.rows, dense.rows.parts[0].name))
            self._plain = model.RowMatrix(dense.rows, rows)
        else:
            rows = raw.view(matrices.TORCH_DTYPES[dense.dtype]).view(-1, self.num_cols)
            self._rows = matmul.StoredRows(rows, stored_part(dense.dtype, self.num_cols))
            self._plain = model.StoredMatrix(rows)

    @property
    def stored(self) -> matmul.StoredRows:
        """The rows as they are stored, [num_rows, num_cols]."""
        return self._rows

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop`: float32 [stop - start, num_cols]."""
        return self._plain.rows(start, stop)

    def take(self, ids: Tensor) -> Tensor:
        """Returns the rows with these numbers: float32 [n, num_cols]."""
        return self._plain.take(ids)

    def product(self, x: Tensor) -> Tensor:
        """Returns `x @ matrix.T`, float32 [T, num_rows], for x float32 [T, num_cols]."""
        if self._rows.rows.shape[1] * self._rows.rows.element_size() % 16:  # kernels load 16 bytes at a time
            return self._plain.product(x)
        out = torch.empty((len(x), self.num_rows), device=x.device)
        if len(x) <= matmul.MOST_TOKENS:
            matmul.gemv(x.contiguous(), self._rows, out)
        else:
            matmul.gemm(x.contiguous(), self._rows, out, self._scratch, self._num_halves)
        return out


def stored(weights: model.Weights, role: str) -> matmul.StoredRows:
    """Returns a dense matrix as it is stored on the device."""
    matrix = weights.matrix(role)
    assert isinstance(matrix, DeviceMatrix), "weights of a GPU"
    return matrix.stored


def down_biases(pack: formats.Pack, layer_idx: int) -> Tensor | None:
    """Returns the biases of down of a layer's experts, float32 [E, d] in host memory; None if there are none.

    Raises:  PackError if they are damaged or cannot be read.
    """
    extra = pack.layout.experts[layer_idx][0].extra
    if extra is None:
        return None
    entries = {entry.name: entry for entry in pack.layout.expert_files[layer_idx].entries}
    file_name, num_experts = pack.manifest.expert_files[layer_idx].name, len(pack.layout.experts[layer_idx])
    rows = np.stack([pack.read_range(layer_idx, entries[f"{expert}.extra"]) for expert in range(num_experts)])
    check_rows(extra, rows, f"{file_name}: biases of down")
    return torch.from_numpy(rows[:, : extra.crc_offset].copy()).view(torch.float32)


class ExpertMemory:
    """A GPU's memory for experts, with its tables. Owns it: `close` it."""

    def __init__(
        self,
        pack: formats.Pack,
        placement: placements.GpuPlacement,
        host: devices.HostArena | None,
        device: torch.device,
    ) -> None:
        """Allocates memory, copies static rows, and fills the tables.

        Args:    host: all experts' extents; None: static experts are read from the pack.
        Raises:  RunError if the device has too little memory; PackError if an expert is damaged or cannot be read.
        """
        assert placement.num_bytes <= placements.REACH_BYTES or placement.offset_bytes == 8, "offsets reach all rows"
        memory = _Memory(placement.num_bytes, device)
        num_layers = len(placement.slot_bytes)
        self.placement, self.device = placement, device
        self.num_bytes = placement.num_bytes  # of the allocation
        static = [memory.take(int(num_bytes)) for num_bytes in placement.static_bytes]
        dynamic = memory.take(placement.dynamic_bytes)
        self.arena = memory.bytes
        self.dynamic_at = memory.begin_of(dynamic) // 16  # where the dynamic memory begins, in units of 16 bytes
        shape = (num_layers, pack.spec.router.num_experts, pack.spec.expert.intermediate_size)
        dtype = np.int32 if placement.offset_bytes == 4 else np.int64
        record_at, selector_at = np.full(shape, -1, dtype), np.full(shape, -1, dtype)
        for l, part in enumerate(static):
            _copy_static(pack, l, placement, host, part, memory.begin_of(part), selector_at[l], record_at[l])
        # [L, E, f] on the device, int32 or int64, which the layers' tables are parts of.
        self.record_at = memory.put(torch.from_numpy(record_at))
        has_selector = pack.layout.experts[0][0].selector is not None
        on_device = memory.put(torch.from_numpy(selector_at)) if has_selector else None
        sizes = zip(placement.num_scratch.tolist(), placement.slot_bytes.tolist(), strict=True)
        self.landing = tuple(tables.Landing(self.dynamic_at, number, size // 16) for number, size in sizes)
        self.layers: tuple[tables.LayerTables, ...] = tuple(
            _tables(pack, l, placement, memory, None if on_device is None else on_device[l], self.record_at[l])
            for l in range(num_layers)
        )
        self.kinds: tuple[tuple[tables.ExpertKind, ...], ...] = tuple(
            tuple(tables.kind_of(e, pack.manifest.selector, pack.spec.expert_function(l)) for e in layer)
            for l, layer in enumerate(pack.layout.experts)
        )

    def close(self) -> None:
        """Releases the device's memory, which is freed with the last tensor that refers to it."""
        self.layers, self.landing = (), ()
        self.arena = self.record_at = torch.empty(0)


class _Memory:
    """One allocation that is given out from its beginning, in pieces that begin at multiples of `LINE_BYTES`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            self.bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as fault:
            raise formats.RunError(
                f"--budget: cannot allocate {formats.size_text(num_bytes)} on the GPU; give less"
            ) from fault
        self.bytes = self.bytes[-self.bytes.data_ptr() % devices.LINE_BYTES :]  # host memory may begin anywhere
        self._end = 0

    def take(self, num_bytes: int) -> Tensor:
        """Returns the next piece, u8, zeros."""
        begin, self._end = self._end, -(-(self._end + num_bytes) // devices.LINE_BYTES) * devices.LINE_BYTES
        assert begin + num_bytes <= len(self.bytes), "the placement counts all pieces"
        return self.bytes[begin : begin + num_bytes]

    def begin_of(self, piece: Tensor) -> int:
        return int(piece.storage_offset() - self.bytes.storage_offset())

    def put(self, values: Tensor) -> Tensor:
        """Returns a copy of a tensor in the next piece."""
        return self.take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)


def _tables(
    pack: formats.Pack,
    l: int,
    placement: placements.GpuPlacement,
    memory: _Memory,
    selector_at: Tensor | None,
    record_at: Tensor,
) -> tables.LayerTables:
    layouts, biases = pack.layout.experts[l], down_biases(pack, l)
    if biases is not None and placement.misses == "disk":
        biases[torch.from_numpy(placement.first_dynamic[l] == 0)] = 0  # the CPU's engine adds those of its experts
    # All layers' kinds, in one order: kernels are compiled for each such list.
    kinds: list[formats.ExpertLayout] = list(dict.fromkeys(chain.from_iterable(pack.layout.experts)))
    return tables.LayerTables(
        arena=memory.bytes,
        selector_at=selector_at,
        record_at=record_at,
        kind=memory.put(torch.tensor([kinds.index(layout) for layout in layouts], dtype=torch.int32)),
        thresholds=memory.put(torch.from_numpy(pack.thresholds[l].copy())),
        kinds=tuple(tables.kind_of(layout, pack.manifest.selector, pack.spec.expert_function(l)) for layout in kinds),
        down_bias=None if biases is None else memory.put(biases),
    )


def _copy_static(
    pack: formats.Pack,
    l: int,
    placement: placements.GpuPlacement,
    host: devices.HostArena | None,
    to: Tensor,
    base: int,
    selector_at: NDArray[np.integer],
    record_at: NDArray[np.integer],
) -> None:
    """Copies a layer's static rows to `to`, which begins at byte `base` of the arena, and enters their offsets.

    Args:    selector_at, record_at: [E, f] of this layer, which get the offsets in units of 16 bytes.
    """
    layouts, begin = pack.layout.experts[l], 0
    f = layouts[0].num_rows
    for e, layout in enumerate(layouts):
        # They are one piece of an extent: the selector, if it is resident, and the first records.
        has_selector, first = bool(placement.has_selector[l, e]), int(placement.first_dynamic[l, e])
        start = 0 if has_selector else layout.selector_bytes
        stop = layout.selector_bytes + first * layout.records.row_bytes
        if stop <= start:
            continue
        source = torch.from_numpy(pack.read_extent(l, e)) if host is None else host.extent(l, e, layout.num_bytes)
        to[begin : begin + stop - start].copy_(source[start:stop])
        place = base + begin
        if layout.selector is not None and has_selector:
            selector_at[e] = (place + np.arange(f) * layout.selector.row_bytes) // 16
        records = place + layout.selector_bytes - start
        record_at[e, :first] = (records + np.arange(first) * layout.records.row_bytes) // 16
        begin += -(-(stop - start) // devices.LINE_BYTES) * devices.LINE_BYTES
