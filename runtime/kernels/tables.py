"""What kernels know of a layer's experts: how they are stored, and where each row lies in an arena."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_pack.formats import ExpertLayout, Matrix, NeuronFunction, PartFormat, Selector
from moe_pack.runtime.kernels.codes import Part, part_of

SELECT_BLOCK = 64  # neurons that are selected, and listed, together
# Arguments that differ from one layer to the next, for which Triton must not compile a kernel each: a layer's routes
# may begin at any multiple of 4 bytes, and a format may be the first kind of one layer and the second of another.
PER_LAYER = ("experts_ptr", "kind_number", "max_pages", "pages_begin")


class Held(NamedTuple):
    """A matrix of an expert: in selector rows, or in records; where in such a row, and how it is stored."""

    in_selector: bool
    part: Part
    format: PartFormat


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """One way in which experts are stored and run; a layer of mixed widths has several.

    `function`: what neurons do.   `gate` is None where the family has none.   `selector_units`, `record_units`: bytes
    of a row by 16.
    """

    selector: Selector
    function: NeuronFunction
    gate: Held | None
    up: Held
    down: Held
    num_rows: int
    num_cols: int
    selector_units: int
    record_units: int


def kind_of(layout: ExpertLayout, selector: Selector, function: NeuronFunction) -> ExpertKind:
    """The kind of an expert of this layout."""

    def held(matrix: Matrix) -> Held | None:
        found = layout.find(matrix)
        return None if found is None else Held(found[0] is layout.selector, part_of(found[0], matrix), found[1].format)

    up, down = held("up"), held("down")
    assert up is not None and down is not None, "every expert has up and down"
    selector_units = layout.selector.row_bytes // 16 if layout.selector else 0
    return ExpertKind(
        selector,
        function,
        held("gate"),
        up,
        down,
        layout.num_rows,
        layout.records.num_cols,
        selector_units,
        layout.records.row_bytes // 16,
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerTables:
    """Where the rows of a layer's experts lie; all tensors are on one device.

    `arena`: u8, its first byte at a multiple of 128.   `selector_at`, `record_at`: int32 [E, f], a row's offset in it
    in units of 16 bytes, -1 where the row is not there; `selector_at` is None where no selector is stored.
    `kind`: int32 [E], which of `kinds` an expert is of.   `thresholds`: float32 [E].
    `down_bias`: float32 [E, d], contiguous, where experts have one.
    """

    arena: Tensor
    selector_at: Tensor | None
    record_at: Tensor
    kind: Tensor
    thresholds: Tensor
    kinds: tuple[ExpertKind, ...]
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Which neurons of a token's k experts run: room for it, made once, on the device.

    `a`: float32 [k, f], the selector's activations.   `neurons`: int32 [k, f]; those of each block of `SELECT_BLOCK`
    that run stand at its beginning, rising.   `counts`: int32 [k, blocks], how many.
    """

    a: Tensor
    neurons: Tensor
    counts: Tensor

    @classmethod
    def room(cls, k: int, num_rows: int, device: torch.device) -> "Selection":
        """Room for k experts of so many neurons."""
        blocks = -(-num_rows // SELECT_BLOCK)
        return cls(
            torch.zeros((k, num_rows), device=device),
            torch.zeros((k, num_rows), dtype=torch.int32, device=device),
            torch.zeros((k, blocks), dtype=torch.int32, device=device),
        )
