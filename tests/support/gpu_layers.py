"""Random layers as kernels see them: experts of one format or several, their rows at scattered places of an arena."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from random_experts import RandomExpert, Shape, random_expert

from moe_pack.runtime.gpu.kernels.tables import LayerTables, kind_of


@dataclass(frozen=True, slots=True)
class RandomLayer:
    """Experts, and the tables of where their rows lie."""

    experts: tuple[RandomExpert, ...]
    tables: LayerTables

    def tables_on(self, device: torch.device) -> LayerTables:
        """The tables on a device."""
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
