"""A pack before its bytes exist: every file's size, every extent's place, every item to write.

All of it follows from the model's spec and the plan, so that sizes are promised before conversion and writer and
reader agree without talking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_pack.formats.errors import PlanError
from moe_pack.formats.plan import FP8, PartFormat, Plan, format_fault, plan_fault
from moe_pack.formats.roles import DenseRole, dense_roles
from moe_pack.formats.rows import ExpertLayout, RowLayout, expert_layout, row_layout
from moe_pack.formats.spec import ModelSpec
from moe_pack.formats.tensor_file import TensorEntry, TensorFileLayout, lay_out, split_bytes

StoredTensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
# What disks are read in: offsets, sizes and addresses of direct reads are multiples of it, so experts begin on one.
DISK_BLOCK_BYTES = 4096
DENSE_ALIGN = 64  # one cache line
DENSE_FILE = "dense.safetensors"
UNUSED_FILE = "unused-000.safetensors"
# Larger dense tensors are written in pieces of whole rows: nobody need hold one. Rows are a multiple of what any
# quantizer solves together, so that pieces change no byte.
_PIECE_BYTES, _PIECE_ROWS = 128 << 20, 512


def experts_file(layer: int) -> str:
    """The name of the file that holds decoder layer `layer`'s experts."""
    return f"experts-{layer:03d}.safetensors"


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """A dense tensor as it will be stored: rows of the row layout where `rows` is set, else the source's bytes."""

    role: DenseRole
    dtype: str
    rows: RowLayout | None
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Item:
    """A range of a file that is written, and journaled, as one.

    A header, an expert's extent, rows of a dense tensor from `first_row` on, bytes of an unused one from `start` on;
    `role` is the tensor's name in its file.
    """

    kind: Literal["header", "expert", "dense", "unused"]
    file: str
    offset: int
    num_bytes: int
    layer: int = -1
    expert: int = -1
    role: str = ""
    first_row: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Files and extents of a pack. `experts[l][e]` and `expert_files[l]` count MoE layers, not decoder layers.

    `offsets[l][e]` is where the expert's extent begins in its layer's file, in bytes.
    """

    spec: ModelSpec
    experts: tuple[tuple[ExpertLayout, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    expert_files: tuple[TensorFileLayout, ...]
    dense: tuple[DenseLayout, ...]
    dense_file: TensorFileLayout
    unused_file: TensorFileLayout | None = None

    def files(self) -> Iterator[tuple[str, TensorFileLayout]]:
        """The large files, which are laid out before they are written."""
        yield DENSE_FILE, self.dense_file
        for layer, file in zip(self.spec.moe_layers, self.expert_files, strict=True):
            yield experts_file(layer), file
        if self.unused_file is not None:
            yield UNUSED_FILE, self.unused_file

    def items(self) -> Iterator[Item]:
        """Everything to write into the large files, in order."""
        yield Item("header", DENSE_FILE, 0, len(self.dense_file.header))
        for dense in self.dense:
            yield from _dense_items(dense.entry)
        for layer_idx, layer in enumerate(self.spec.moe_layers):
            name, file, experts = experts_file(layer), self.expert_files[layer_idx], self.experts[layer_idx]
            yield Item("header", name, 0, len(file.header))
            for expert, layout in enumerate(experts):
                yield Item("expert", name, self.offsets[layer_idx][expert], layout.num_bytes, layer_idx, expert)
        if self.unused_file is not None:
            yield Item("header", UNUSED_FILE, 0, len(self.unused_file.header))
            for entry in self.unused_file.entries:
                if not entry.name.startswith("pad."):
                    yield from _unused_items(entry)


def _dense_items(entry: TensorEntry) -> Iterator[Item]:
    num_rows, row_bytes = entry.shape[0], entry.num_bytes // entry.shape[0]
    step = max(_PIECE_BYTES // row_bytes // _PIECE_ROWS, 1) * _PIECE_ROWS
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        offset = entry.offset + first * row_bytes
        yield Item("dense", DENSE_FILE, offset, rows * row_bytes, role=entry.name, first_row=first)


def _unused_items(entry: TensorEntry) -> Iterator[Item]:
    for offset, size in split_bytes(entry.offset, entry.num_bytes, _PIECE_BYTES):
        yield Item("unused", UNUSED_FILE, offset, size, role=entry.name, start=offset - entry.offset)


def pack_layout(
    spec: ModelSpec, plan: Plan, dense_dtypes: Sequence[str], unused: Sequence[StoredTensor] = ()
) -> PackLayout:
    """The layout of the pack that `plan` makes of a model.

    Args:    dense_dtypes: safetensors dtype of each dense tensor in the source, in the order of `dense_roles`. What is
             F8_E4M3, and is not quantized, is in rows of `fp8`.   unused: what is kept but not run.
    Raises:  PlanError if the plan is for another model, or asks for what its rows cannot hold.
    """
    fault = plan_fault(plan, spec)
    if fault:
        raise PlanError(f"plan: {fault}")
    kinds = {expert for layer in plan.experts for expert in layer}  # few, of thousands of experts
    known = {kind: expert_layout(kind, plan.selector, spec.expert, spec.hidden_size) for kind in kinds}
    experts = tuple(tuple(known[expert] for expert in layer) for layer in plan.experts)
    dense = [
        _kept(role, dtype) if part is None else (dtype, part)
        for role, dtype, part in zip(dense_roles(spec), dense_dtypes, plan.dense, strict=True)
    ]
    return layout_of(spec, experts, dense, unused)


def _kept(role: DenseRole, dtype: str) -> tuple[str, PartFormat | None]:
    """How a dense tensor is stored that keeps the source's values: as it lies there, or FP8 in rows.

    FP8 whose rows are no multiple of 64 values is stored as what it means, in float32.
    """
    if dtype != "F8_E4M3":
        return dtype, None
    return ("F32", None) if format_fault(FP8, role.shape[-1]) else (dtype, FP8)


def layout_of(
    spec: ModelSpec,
    experts: tuple[tuple[ExpertLayout, ...], ...],
    dense_formats: Sequence[tuple[str, PartFormat | None]],
    unused: Sequence[StoredTensor] = (),
) -> PackLayout:
    """The layout for experts and dense tensors stored as given: dtype in the source, or the rows' format."""
    roles = dense_roles(spec)
    rows = [
        row_layout([("weight", part, False)], role.shape[1]) if part else None
        for role, (_, part) in zip(roles, dense_formats, strict=True)
    ]
    tensors = [
        (role.name, "U8" if layout else dtype, (role.shape[0], layout.row_bytes) if layout else role.shape)
        for role, layout, (dtype, _) in zip(roles, rows, dense_formats, strict=True)
    ]
    dense_file = lay_out([[tensor] for tensor in tensors], DENSE_ALIGN)
    entries = dense_file.by_name()
    dense = tuple(
        DenseLayout(role, dtype, layout, entries[role.name])
        for role, layout, (_, dtype, _) in zip(roles, rows, tensors, strict=True)
    )
    expert_files = tuple(_expert_file(layer) for layer in experts)
    offsets = tuple(_extent_offsets(file, len(layer)) for file, layer in zip(expert_files, experts, strict=True))
    unused_file = lay_out([[tensor] for tensor in unused], DENSE_ALIGN) if unused else None
    return PackLayout(spec, experts, offsets, expert_files, dense, dense_file, unused_file)


def whole_blocks(num_bytes: int) -> int:
    """Returns bytes rounded up to whole disk blocks."""
    return -(-num_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


def _expert_file(layer: Sequence[ExpertLayout]) -> TensorFileLayout:
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = []
    for number, expert in enumerate(layer):
        group: list[tuple[str, str, tuple[int, ...]]] = []
        if expert.selector is not None:
            group.append((f"{number}.selector", "U8", (expert.num_rows, expert.selector.row_bytes)))
        group.append((f"{number}.records", "U8", (expert.num_rows, expert.records.row_bytes)))
        if expert.extra is not None:
            group.append((f"{number}.extra", "U8", (1, expert.extra.row_bytes)))
        groups.append(group)
    return lay_out(groups, DISK_BLOCK_BYTES)


def _extent_offsets(file: TensorFileLayout, num_experts: int) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for entry in file.entries:
        first.setdefault(entry.name.partition(".")[0], entry.offset)
    return tuple(first[str(expert)] for expert in range(num_experts))
