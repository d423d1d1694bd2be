"""Layers in the memory of a small GPU: experts of two formats, some rows resident, pages for the others."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_pack.formats import ExpertLayout, part_format
from moe_pack.formats.layout import row_layout
from moe_pack.runtime.gpu.kernels.cache import CacheState, Selection
from moe_pack.runtime.gpu.kernels.tables import SELECT_BLOCK, HostRows, LayerTables, kind_of

CPU = torch.device("cpu")


def layout_of(num_rows: int, num_cols: int, selector_width: int | None, record_width: int) -> ExpertLayout:
    """An expert with `up` as its selector, or with none."""
    parts = [(name, part_format(record_width, 64), False) for name in ("gate", "up", "down")]
    if selector_width is None:
        return ExpertLayout(None, row_layout(parts, num_cols), num_rows, None)
    selector = row_layout([("up", part_format(selector_width, 64), False)], num_cols)
    return ExpertLayout(selector, row_layout([parts[0], parts[2]], num_cols), num_rows, None)


@dataclass(frozen=True)
class SmallLayer:
    """A layer of random bytes; `extents[e]` are an expert's."""

    layouts: tuple[ExpertLayout, ...]
    extents: tuple[torch.Tensor, ...]
    tables: LayerTables
    state: CacheState
    host: HostRows

    def to(self, device: torch.device) -> "SmallLayer":
        """The same on a device, `host` in memory that it can read."""
        tables, rows = self.tables, self.host.rows
        on_device = {name: getattr(tables, name).to(device) for name in ("arena", "record_at", "kind", "thresholds")}
        at = None if tables.selector_at is None else tables.selector_at.to(device)
        state = self.state.put(lambda held: held.to(device), self.state.counters.to(device))
        rows = rows if device.type == "cpu" else rows.pin_memory()
        host = HostRows(rows, self.host.extent_at.to(device))
        return replace(self, tables=replace(tables, selector_at=at, **on_device), state=state, host=host)

    def copy(self) -> "SmallLayer":
        """The same, with tables and state of its own."""
        tables, state = self.tables, self.state
        at = tables.selector_at
        mine = {name: getattr(state, name).clone() for name in ("last_used", "is_in", "page_list", "free", "num_free",
                "clock", "counters")}  # fmt: skip
        return replace(
            self,
            tables=replace(
                tables,
                arena=tables.arena.clone(),
                selector_at=None if at is None else at.clone(),
                record_at=tables.record_at.clone(),
            ),
            state=replace(state, **mine),
        )


def small_layer(
    num_experts: int = 6,
    num_rows: int = 150,
    num_cols: int = 64,
    num_active: int = 2,
    more_pages: int = 3,
    has_selector: bool = True,
    page_bytes: int = 4096,
    keeps: bool = True,
    seed: int = 0,
) -> SmallLayer:
    """Nothing is there yet but what always is; the pages hold the largest `num_active` experts and a few pages more."""
    draw = np.random.default_rng(seed)
    widths = [(2 if has_selector else None, 4), (4 if has_selector else None, 2)]
    two = [layout_of(num_rows, num_cols, *width) for width in widths]
    kind = draw.integers(2, size=num_experts)
    layouts = tuple(two[k] for k in kind)
    is_dynamic = draw.integers(2, size=num_experts) * has_selector
    first = draw.choice([0, 1, num_rows // 2, num_rows], size=num_experts)
    first[-1], is_dynamic[-1] = num_rows, 0  # one that is always there
    extents = tuple(torch.from_numpy(draw.integers(256, size=e.num_bytes, dtype=np.uint8)) for e in layouts)
    pages, begins, held = [], [], []
    resident = 0
    selector_at = np.full((num_experts, num_rows), -1, np.int32)
    record_at = np.full((num_experts, num_rows), -1, np.int32)
    for e, layout in enumerate(layouts):
        begin = 0 if layout.selector and not is_dynamic[e] else layout.selector_bytes
        bytes_there = extents[e][begin : layout.selector_bytes + int(first[e]) * layout.records.row_bytes]
        if layout.selector and not is_dynamic[e]:
            selector_at[e] = resident + np.arange(num_rows) * (layout.selector.row_bytes // 16)
        records = resident + (layout.selector_bytes - begin) // 16
        record_at[e, : first[e]] = records + np.arange(first[e]) * (layout.records.row_bytes // 16)
        held.append(bytes_there)
        resident += len(bytes_there) // 16
        of_selector = page_bytes // layout.selector.row_bytes if layout.selector else 1
        pages.append(
            is_dynamic[e] * -(-num_rows // of_selector)
            + -(-(num_rows - first[e]) // (page_bytes // layout.records.row_bytes))
        )
        begins.append(sum(len(extent) for extent in extents[:e]) // 16)
    num_pages = int(sum(sorted(pages)[-num_active:])) + more_pages
    arena = torch.zeros(16 * resident + num_pages * page_bytes, dtype=torch.uint8)
    arena[: 16 * resident] = torch.cat(held)
    tables = LayerTables(
        arena,
        torch.from_numpy(selector_at) if has_selector else None,
        torch.from_numpy(record_at),
        torch.from_numpy(kind.astype(np.int32)),
        torch.zeros(num_experts),
        tuple(kind_of(layout, "up" if has_selector else "none", "silu") for layout in two),
    )
    of_each = (torch.tensor(np.asarray(values), dtype=torch.int32) for values in (pages, is_dynamic, first))
    pages_of, dynamic, first_dynamic = of_each
    begin, page_units = resident, page_bytes // 16
    state = CacheState.empty(pages_of, dynamic, first_dynamic, num_pages, begin, page_units, num_active, keeps)
    return SmallLayer(layouts, extents, tables, state, HostRows(torch.cat(extents), torch.tensor(begins)))


def random_selection(num_experts: int, num_rows: int, share: float, seed: int) -> Selection:
    """Neurons that run, each with this probability; the first block of the first expert is full, its last empty."""
    draw = np.random.default_rng(seed)
    selection = Selection.allocate(num_experts, num_rows, CPU)
    for place in range(num_experts):
        for block in range(selection.counts.shape[1]):
            begin = block * SELECT_BLOCK
            length = min(SELECT_BLOCK, num_rows - begin)
            runs = draw.random(length) < share
            if place == 0 and block in (0, selection.counts.shape[1] - 1):
                runs[:] = block == 0
            listed = begin + np.flatnonzero(runs)
            selection.neurons[place, begin : begin + len(listed)] = torch.from_numpy(listed)
            selection.counts[place, block] = len(listed)
    return selection
