"""How experts lie in a GPU's memory, and which of a token's neurons run: what the kernels for experts share.

The host alone writes `LayerTables`, between tokens; `neurons.select` and `neurons.compact` write `RunningNeurons`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_pack.formats import ExpertLayout, Matrix, NeuronFunction, PartFormat, Selector
from moe_pack.runtime.gpu.kernels.grids import Registers, wave
from moe_pack.runtime.gpu.kernels.rows import RowPart, part_of

# Neurons that are selected and listed together (`RunningNeurons.allocate`). The smallest block is a tile of 4 bits.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 64, 4
_MOST_BLOCKS = 2048  # of a token's experts: a program of `compact` has the counts of all in the registers of a warp
_USUAL_WARPS = 4  # of `select`: for rows of 4,096 codes of 2 or 4 bits
# Arguments that differ between layers; Triton must not compile a kernel for each of their values. A layer's routes may
# begin at any multiple of 4 bytes. Slots and scratch memory are a layer's own.
PER_LAYER = ("experts_ptr", "kept_at", "num_kept", "scratch_at", "num_scratch", "whole_records")


class StoredPart(NamedTuple):
    """A matrix of an expert."""

    in_selector: bool  # else it is in records
    part: RowPart
    format: PartFormat


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """One way in which experts are stored and run; a layer of mixed widths has several."""

    selector: Selector
    function: NeuronFunction
    gate: StoredPart | None  # None if the family has none
    up: StoredPart
    down: StoredPart
    num_rows: int
    num_cols: int
    selector_units: int  # the bytes of a row, divided by 16
    record_units: int


def kind_of(layout: ExpertLayout, selector: Selector, function: NeuronFunction) -> ExpertKind:
    """Returns the kind of an expert with this layout."""

    def stored(matrix: Matrix) -> StoredPart | None:
        place = layout.find(matrix)
        if place is None:
            return None
        rows, part, _ = place
        return StoredPart(rows is layout.selector, part_of(rows, matrix), part.format)

    up, down = stored("up"), stored("down")
    assert up is not None and down is not None, "every expert has up and down"
    return ExpertKind(
        selector=selector,
        function=function,
        gate=stored("gate"),
        up=up,
        down=down,
        num_rows=layout.num_rows,
        num_cols=layout.records.num_cols,
        selector_units=layout.selector.row_bytes // 16 if layout.selector else 0,
        record_units=layout.records.row_bytes // 16,
    )


class TablePointers(NamedTuple):
    """A layer's tables as kernels take them; fields as in `LayerTables`."""

    arena: Tensor
    selector_at: Tensor | None
    record_at: Tensor
    kind: Tensor
    thresholds: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerTables:
    """The places of a layer's experts' rows in an arena; all tensors are on one device."""

    arena: Tensor  # u8, its first byte at a multiple of 128
    # [E, f], a row's offset in the arena in units of 16 bytes, -1 if the row is missing; int64 if int32 does not reach
    # all of the arena. An expert's selector rows are all there or all missing.
    selector_at: Tensor | None  # None if no selector is stored
    record_at: Tensor
    kind: Tensor  # int32 [E], an expert's place in `kinds`
    thresholds: Tensor  # float32 [E]
    kinds: tuple[ExpertKind, ...]
    down_bias: Tensor | None = None  # float32 [E, d], contiguous, if experts have one

    @property
    def pointers(self) -> TablePointers:
        """The tables as kernels take them."""
        return TablePointers(self.arena, self.selector_at, self.record_at, self.kind, self.thresholds, self.down_bias)


HERE, PULLED, LEFT, MISSING = range(4)  # places in `RunningNeurons.totals`
WHOLE = -1  # in `LeftToCpu.counts`: the CPU selects and computes the whole expert


class RunningNeurons(NamedTuple):
    """The running neurons of T tokens' K = T * k experts, and the places of their records; allocated once.

    All tensors are on the device.
    """

    a: Tensor  # float32 [K, f], the selector's activations
    blocks: Tensor  # int32 [K, f]; a block's running neurons stand at its beginning, in ascending order
    counts: Tensor  # int32 [2, K, blocks], how many run, and how many of these have no record in the arena
    # int32 [K, f], the neurons that the GPU computes: `totals[:, HERE]` of them, then `totals[:, PULLED]` whose records
    # are pulled.
    neurons: Tensor
    units: Tensor  # [K, f], the offset of each one's record, as the tables have them
    # int32 [K, 4]; after HERE and PULLED come LEFT, which are left to the CPU, and MISSING, all that have no record in
    # the arena.
    totals: Tensor
    block: int  # neurons of a block

    @classmethod
    def allocate(
        cls,
        k: int,
        num_rows: int,
        device: torch.device,
        offsets: torch.dtype = torch.int32,
        num_programs: int | None = None,
        num_tokens: int = 1,
    ) -> "RunningNeurons":
        """Allocates for k experts a token with so many neurons: the fewer there are, the smaller are the blocks.

        Blocks are those of one token, however many there are.
        Args:    num_programs: that `select` has, or more, for a token, if blocks are not the smallest; from
                 `select_programs`.
        """
        block = _LARGEST_BLOCK
        least = 2 * wave(Registers.SELECT, _USUAL_WARPS) if num_programs is None else num_programs
        while block > _SMALLEST_BLOCK and k * -(-num_rows // block) < least:
            if k * -(-num_rows // (block // 2)) > _MOST_BLOCKS:
                break
            block //= 2
        num_blocks, num_places = -(-num_rows // block), num_tokens * k

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            a=torch.zeros((num_places, num_rows), device=device),
            blocks=numbers(num_places, num_rows),
            counts=numbers(2, num_places, num_blocks),
            neurons=numbers(num_places, num_rows),
            units=torch.zeros((num_places, num_rows), dtype=offsets, device=device),
            totals=numbers(num_places, 4),
            block=block,
        )

    def of_tokens(self, first: int, num_tokens: int, k: int) -> "RunningNeurons":
        """Returns the part of some tokens, from the `first` on; kernels that take it use no other part."""
        its = slice(first * k, (first + num_tokens) * k)
        size = 2 * self.counts.shape[2]
        counts = self.counts.view(-1)[its.start * size : its.stop * size].view(2, num_tokens * k, size // 2)
        names = ("a", "blocks", "neurons", "units", "totals")
        return self._replace(counts=counts, **{name: getattr(self, name)[its] for name in names})


class Landing(NamedTuple):
    """The places for a layer's pulled records, in units of 16 bytes from the beginning of the arena.

    Record `j` of the token's p-th expert goes to `kept_at + (p * num_kept + j) * slot_units` if it is one of the first
    `num_kept`. The next `num_scratch` go to scratch memory, which the next layer overwrites, in the same way.
    """

    scratch_at: int
    num_scratch: int
    slot_units: int
    kept_at: int = 0
    num_kept: int = 0


class LeftToCpu(NamedTuple):
    """The part of a layer of a token's k experts that a GPU leaves to the CPU, in page-locked memory that both see."""

    counts: Tensor  # int32 [k], neurons that the CPU computes, or WHOLE
    neurons: Tensor  # int32 [k, f], these neurons, rising
    a: Tensor  # float32 [k, f], the selector's activations of these neurons; not written if no selector is stored


class KeptNeurons(NamedTuple):
    """The neurons whose records were pulled to memory that keeps them (`Landing.kept_at`), on the device."""

    neurons: Tensor  # int32 [k, S]
    counts: Tensor  # int32 [k], how many of them


class HostRows(NamedTuple):
    """A layer's experts in host memory."""

    # u8, all their extents, on the host, page-locked if the tables are on a GPU; the first byte is at a multiple of 128
    rows: Tensor
    extent_at: Tensor  # int64 [E], on the tables' device, where each extent begins, in units of 16 bytes


@triton.jit
def of_kind(kind, UNITS: tl.constexpr):
    """Returns the kind's entry of a tuple of constants."""
    units = kind * 0
    for number in tl.static_range(len(UNITS)):
        units = tl.where(kind == number, UNITS[number], units)
    return units
