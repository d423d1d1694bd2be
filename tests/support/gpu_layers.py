"""Random layers as kernels see them: experts of one format or several, their rows at scattered places of an arena."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_pack.runtime.gpu.kernels.tables import (
    HostRows,
    KeptNeurons,
    Landing,
    LayerTables,
    LeftToCpu,
    RunningNeurons,
    kind_of,
)
from support.random_experts import RandomExpert, Shape, random_expert


@dataclass(frozen=True, slots=True)
class RandomLayer:
    experts: tuple[RandomExpert, ...]
    tables: LayerTables

    def tables_on(self, device: torch.device) -> LayerTables:
        held, at = self.tables, self.tables.selector_at
        return replace(
            held,
            arena=held.arena.to(device),
            selector_at=None if at is None else at.to(device),
            record_at=held.record_at.to(device),
            kind=held.kind.to(device),
            thresholds=held.thresholds.to(device),
            down_bias=None if held.down_bias is None else held.down_bias.to(device),
        )


@dataclass(frozen=True, slots=True)
class PartlyThere:
    """A layer of which the arena lacks some rows, on a device.

    `landing`: its kept memory lies behind the layer's rows, and its scratch memory behind that.
    `selectors_at`: scratch memory for selector rows, in units of 16 bytes.
    """

    tables: LayerTables
    host: HostRows
    landing: Landing
    selectors_at: int

    def pinned(self, k: int) -> LeftToCpu:
        """Memory for what is left to the CPU of k experts, filled with a number that is none of it."""
        f = self.tables.record_at.shape[1]

        def full(value: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            values = torch.full(shape, value, dtype=dtype)
            return values.pin_memory() if self.tables.arena.is_cuda else values

        return LeftToCpu(
            counts=full(-7, torch.int32, k),
            neurons=full(-7, torch.int32, k, f),
            a=full(-7, torch.float32, k, f),
        )

    def kept(self, k: int) -> KeptNeurons | None:
        """Memory for the names of what is kept of k experts, filled with a number that is none of them."""
        number, device = self.landing.num_kept, self.tables.arena.device
        if not number:
            return None
        return KeptNeurons(*(torch.full(shape, -7, dtype=torch.int32, device=device) for shape in ((k, number), (k,))))


def partly_there(
    layer: RandomLayer,
    device: torch.device,
    share: float,
    k: int,
    num_kept: int = 0,
    missing_selectors: Sequence[int] = (),
    seed: int = 0,
) -> PartlyThere:
    """The layer without this share of its records, and without some experts' selectors; their old bytes are 0xFF."""
    draw, tables = np.random.default_rng(seed), layer.tables
    f, arena = tables.record_at.shape[1], tables.arena.clone()
    record_at = tables.record_at.clone()
    selector_at = None if tables.selector_at is None else tables.selector_at.clone()
    for e, number in enumerate(tables.kind.tolist()):
        kind = tables.kinds[number]
        for neuron in np.flatnonzero(draw.random(f) < share).tolist():
            _forget(arena, record_at, e, neuron, kind.record_units)
        for neuron in range(f) if selector_at is not None and e in missing_selectors else ():
            _forget(arena, selector_at, e, neuron, kind.selector_units)
    units = max(kind.record_units for kind in tables.kinds)
    end = len(arena) // 16
    scratch_at = end + units * k * num_kept
    selectors_at = scratch_at + units * k * f
    num_units = selectors_at + k * f * max(kind.selector_units for kind in tables.kinds)
    whole = torch.from_numpy(draw.integers(256, size=16 * num_units, dtype=np.uint8))
    whole[: len(arena)] = arena
    on_device = RandomLayer(
        layer.experts, replace(tables, arena=whole, record_at=record_at, selector_at=selector_at)
    ).tables_on(device)
    host = host_rows(layer)
    host = HostRows(host.rows.pin_memory() if device.type == "cuda" else host.rows, host.extent_at.to(device))
    return PartlyThere(on_device, host, Landing(scratch_at, f, units, end, num_kept), selectors_at)


def _forget(arena: torch.Tensor, at: torch.Tensor | None, e: int, neuron: int, units: int) -> None:
    assert at is not None
    begin = 16 * int(at[e, neuron])
    arena[begin : begin + 16 * units] = 0xFF
    at[e, neuron] = -1


def host_rows(layer: RandomLayer) -> HostRows:
    """The layer's extents in host memory, with gaps between them."""
    pieces, begins, end = [], [], 0
    for number, expert in enumerate(layer.experts):
        gap = np.full(16 * (number % 3), 0xFF, np.uint8)
        begins.append((end + len(gap)) // 16)
        pieces += [gap, expert.extent]
        end += len(gap) + len(expert.extent)
    return HostRows(torch.from_numpy(np.concatenate(pieces)), torch.tensor(begins))


def random_running(
    tables: LayerTables, experts: Sequence[int], share: float, seed: int, without: Sequence[int] = ()
) -> RunningNeurons:
    """What `select` may write: each neuron runs with this probability, all of the first block, none of the last.

    None runs of the experts in `without`. The lists that `compact` writes contain a number that is no neuron.
    """
    draw, f = np.random.default_rng(seed), tables.record_at.shape[1]
    running = RunningNeurons.allocate(len(experts), f, torch.device("cpu"))
    running.a.copy_(torch.from_numpy(draw.standard_normal(running.a.shape)))
    for place, e in enumerate(experts):
        for block in range(running.counts.shape[2]):
            begin = block * running.block
            is_chosen = draw.random(min(running.block, f - begin)) < share
            is_chosen |= block == 0
            is_chosen &= (block == 0 or block < running.counts.shape[2] - 1) and e not in without
            listed = torch.from_numpy(begin + np.flatnonzero(is_chosen)).to(torch.int32)
            running.blocks[place, begin : begin + len(listed)] = listed
            running.counts[0, place, block] = len(listed)
            running.counts[1, place, block] = (tables.record_at[e, listed.to(tables.arena.device).long()] < 0).sum()
    for values in (running.neurons, running.units, running.totals):
        values.fill_(-7)
    return running


def running_on(running: RunningNeurons, device: torch.device) -> RunningNeurons:
    each = ("a", "blocks", "counts", "neurons", "units", "totals")
    return running._replace(**{name: getattr(running, name).clone().to(device) for name in each})


def random_layer(
    shapes: Sequence[Shape], seed: int = 0, thresholds: Sequence[float] | None = None, zero_rows: Sequence[int] = ()
) -> RandomLayer:
    """A layer of an expert of each shape; all have as many rows and columns, and one selector kind."""
    experts = tuple(random_expert(shape, seed + number, zero_rows=zero_rows) for number, shape in enumerate(shapes))
    return layer_of(experts, seed, thresholds)


def layer_of(experts: Sequence[RandomExpert], seed: int = 0, thresholds: Sequence[float] | None = None) -> RandomLayer:
    """A layer of these experts; rows lie in random order, with 16-byte gaps of random bytes here and there."""
    shapes = [expert.shape for expert in experts]
    distinct = list(dict.fromkeys(shapes))
    generator = np.random.default_rng(seed)
    rows = [(e, place, row) for e, x in enumerate(experts) for place, row in _rows(x)]
    at = np.full((2, len(experts), shapes[0].num_rows), -1, np.int32)
    arena, end = [], 0
    for number in generator.permutation(len(rows)):
        e, (is_record, i), row = rows[number]
        gap = generator.integers(0, 256, 16 * int(generator.integers(0, 3)), np.uint8)
        at[is_record, e, i] = (end + len(gap)) // 16
        arena += [gap, row]
        end += len(gap) + len(row)
    has_selector = shapes[0].layout.selector is not None
    biases = [bias for expert in experts if (bias := expert.packed().down_bias()) is not None]
    tables = LayerTables(
        torch.from_numpy(np.concatenate(arena)),
        torch.from_numpy(at[0]) if has_selector else None,
        torch.from_numpy(at[1]),
        torch.tensor([distinct.index(shape) for shape in shapes], dtype=torch.int32),
        torch.tensor(thresholds if thresholds is not None else [0.0] * len(shapes)),
        tuple(kind_of(shape.layout, shape.selector, shape.function) for shape in distinct),
        torch.stack(biases) if biases else None,
    )
    return RandomLayer(tuple(experts), tables)


def _rows(expert: RandomExpert) -> list[tuple[tuple[int, int], np.ndarray]]:
    """((0: selector or 1: record, neuron), bytes) of every row."""
    layout, f = expert.shape.layout, expert.shape.num_rows
    ends = [layout.selector_bytes, layout.selector_bytes + layout.records_bytes]
    selectors, records, _ = np.split(expert.extent, ends)
    found = [((1, i), row) for i, row in enumerate(records.reshape(f, -1))]
    return found + ([((0, i), row) for i, row in enumerate(selectors.reshape(f, -1))] if len(selectors) else [])
