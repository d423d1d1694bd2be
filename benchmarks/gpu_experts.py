"""Random experts and matrices in a card's memory, as kernels read them: more copies than its caches hold."""

from dataclasses import dataclass

import numpy as np
import torch
from gpu_clock import Clock, copies_beyond, repeated
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.convert.random_weights import Spread, even_values, random_rows, random_stream
from moe_pack.formats import (
    E5M2,
    FP8,
    MXFP4,
    TRELLIS_WIDTHS,
    ExpertFormat,
    ExpertLayout,
    ExpertSpec,
    PartFormat,
    RowLayout,
    Selector,
    expert_layout,
    part_format,
    trellis_format,
)
from moe_pack.formats import row_layout as layout_of_rows
from moe_pack.runtime.kernels.codes import Part, part_of, stored_part
from moe_pack.runtime.kernels.tables import LayerTables, kind_of

_GROUP = 64
Stored = int | str  # bits of codes in groups of 64; `t4`: a trellis of that width; or a codec that keeps a source
_NAMED: dict[str, PartFormat] = {part.codec: part for part in (FP8, E5M2, MXFP4)}
_NAMED |= {f"t{width}": trellis_format(width, _GROUP) for width in TRELLIS_WIDTHS}


@dataclass(frozen=True, slots=True)
class Model:
    """An expert's dimensions; `k`: how many a token takes at once."""

    name: str
    d: int
    f: int
    k: int


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Copies of one random expert, each with its places in `tables`; a launch takes `k` of them.

    `selector_bytes`: of all its rows' parts.   `record_bytes`: of a record's.
    """

    tables: LayerTables
    layout: ExpertLayout
    batches: tuple[Tensor, ...]
    selector_bytes: int
    record_bytes: int


def expert_of(model: Model, selector: Selector, selector_bits: Stored, record_bits: Stored) -> ExpertLayout:
    """The layout of an expert of these widths, trellises or codecs."""
    chosen, stored = _format(selector_bits), _format(record_bits)
    gate, up = (chosen if selector in (name, "both") else stored for name in ("gate", "up"))
    spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
    return expert_layout(ExpertFormat(gate, up, stored), selector, spec, model.d)


def _format(stored: Stored) -> PartFormat:
    return _NAMED[stored] if isinstance(stored, str) else part_format(stored, _GROUP)


def random_extent(layout: ExpertLayout) -> NDArray[np.uint8]:
    """An expert's selector and records: u8 [bytes]; activations of rms 1 for hidden states of rms 1."""
    d = layout.records.num_cols
    spreads = {name: Spread(0.0, d**-0.5) for name in ("gate", "up")} | {"down": Spread(0.0, layout.num_rows**-0.5)}
    stream = random_stream(1)
    halves = [random_rows(rows, layout.num_rows, spreads, stream) for rows in (layout.selector, layout.records) if rows]
    return np.concatenate([half.reshape(-1) for half in halves])


def make_experts(clock: Clock, model: Model, selector: Selector, selector_bits: Stored, record_bits: Stored) -> Experts:
    """So many copies that what each operation reads of them exceeds the L2 cache four times."""
    layout, f = expert_of(model, selector, selector_bits, record_bits), model.f
    records_bytes = sum(part.num_bytes for part in layout.records.parts)
    selected = 0 if layout.selector is None else f * sum(part.num_bytes for part in layout.selector.parts)
    least = min(selected or f * records_bytes, f * records_bytes // 10)
    num_batches = -(-copies_beyond(clock.l2_bytes, least) // model.k)
    num_experts = num_batches * model.k
    extent = torch.from_numpy(random_extent(layout))
    arena = repeated(extent, num_experts, clock.device)
    device, stride = clock.device, arena.numel() // num_experts // 16
    first = torch.arange(num_experts, dtype=torch.int32, device=device)[:, None] * stride
    row = torch.arange(f, dtype=torch.int32, device=device)[None, :]
    kind = kind_of(layout, selector, "silu")
    tables = LayerTables(
        arena=arena,
        selector_at=None if layout.selector is None else first + row * kind.selector_units,
        record_at=first + layout.selector_bytes // 16 + row * kind.record_units,
        kind=torch.zeros(num_experts, dtype=torch.int32, device=device),
        thresholds=torch.zeros(num_experts, device=device),
        kinds=(kind,),
    )
    batches = torch.arange(num_experts, dtype=torch.int32, device=device).view(num_batches, model.k)
    return Experts(tables, layout, tuple(batch.clone() for batch in batches), selected, records_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Copies of a random dense matrix. `rows`: u8 [n, row bytes], or bf16 [n, d].   `num_bytes`: of one's parts."""

    rows: tuple[Tensor, ...]
    part: Part
    layout: RowLayout | None
    row_units: int
    num_bytes: int


def make_matrices(clock: Clock, num_rows: int, num_cols: int, bits: Stored) -> Matrices:
    """So many copies that they exceed the L2 cache four times; of 16 bits they are plain bf16 values."""
    spread = Spread(0.0, num_cols**-0.5)
    if bits == 16:
        drawn = np.random.default_rng(0).integers(0, 256, (num_rows, num_cols), np.uint8)
        values = torch.from_numpy(even_values(spread)[drawn]).view(torch.bfloat16).to(clock.device)
        num_bytes = 2 * num_rows * num_cols
        copies = tuple(values.clone() for _ in range(copies_beyond(clock.l2_bytes, num_bytes)))
        return Matrices(copies, stored_part("BF16", num_cols), None, num_cols // 8, num_bytes)
    layout = layout_of_rows([("weight", _format(bits), False)], num_cols)
    rows = torch.from_numpy(random_rows(layout, num_rows, {"weight": spread}, random_stream(2))).to(clock.device)
    num_bytes = num_rows * layout.parts[0].num_bytes
    copies = tuple(rows.clone() for _ in range(copies_beyond(clock.l2_bytes, num_bytes)))
    return Matrices(copies, part_of(layout, "weight"), layout, layout.row_bytes // 16, num_bytes)
