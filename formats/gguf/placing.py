"""Where a model's weights lie in a GGUF file: the inverse of what `GgufFiles` reads.

A `Placement` names a GGUF tensor and says which values of the model it has: those of a dense role, perhaps in another
order, or those of matrices of all experts of a layer, or factors of rotary positions. Nothing here reads or writes
weights. The order that an architecture's `makers` undo is found by running them on tensors whose values are their own
places.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.families.claiming import role_key
from moe_pack.formats.gguf import header
from moe_pack.formats.gguf.architecture import (
    EXPERT_TENSORS,
    GATE_UP_EXPERTS,
    TENSOR_NAMES,
    Architecture,
    Change,
    Maker,
)
from moe_pack.formats.gguf.factors import rope_factors
from moe_pack.formats.gguf.rows import Bytes, Rows
from moe_pack.formats.parts import DenseRole, GroupedQuerySpec, LatentSpec, mixers

Places = NDArray[np.int64]
# What `fuses_qkv` and `fuses_shared` join, and the name of the whole.
_JOINS = ((("attn_q", "attn_k", "attn_v"), "attn_qkv"), (("ffn_gate_shexp", "ffn_up_shexp"), "ffn_up_shexp"))
_KEYS_AND_VALUES = "layers.{i}.attention.kv_b"


class NoPlaceError(Exception):
    """The architecture has no tensor for a role, whose name is the message."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A GGUF tensor of dense roles. `shape`: with the contiguous dimension last.

    `roles`: whose rows it has, one after the other.   `is_matrix`: whether a pack may quantize them.   `rows`: which of
    them, in the tensor's order; None: all as they are.   `cols`: likewise columns.   `keys`, `values`: of the tensors
    of latent attention, how many a head has; the role has a head's keys, then its values, and the tensor has keys
    transposed.   `change`: of the values.
    """

    name: str
    shape: tuple[int, ...]
    roles: tuple[DenseRole, ...]
    is_matrix: bool
    rows: Places | None = None
    cols: Places | None = None
    keys: int | None = None
    values: int | None = None
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """A GGUF tensor with a matrix, or gate and up, or the bias of a matrix, of all experts of a layer."""

    name: str
    shape: tuple[int, ...]
    layer: int
    matrices: tuple[formats.Matrix, ...]
    is_bias: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ConstantPlacement:
    """A GGUF tensor whose values follow from the model's spec: float32."""

    name: str
    values: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.values.shape


AnyPlacement = Placement | ExpertPlacement | ConstantPlacement


def placements(
    spec: formats.ModelSpec, architecture: Architecture, metadata: header.Metadata
) -> Iterator[AnyPlacement]:
    """Yields all tensors of a model: factors of rotary positions, dense ones, then those of experts, layer by layer.

    Args:    spec: of the source, without repeated neurons.   metadata: that is written, which makers read.
    Raises:  NoPlaceError if the architecture lacks one.
    """
    orders: dict[str, list[tuple[str, Places | None, Places | None]]] = {}
    is_needed = (architecture.fuses_qkv, architecture.fuses_shared)
    joins = [join for join, needed in zip(_JOINS, is_needed, strict=True) if needed]
    fused: list[Placement] = []
    if (factors := rope_factors(spec)) is not None:
        yield ConstantPlacement(header.FACTORS, factors)
    for role in formats.dense_roles(spec):
        for place in _of_role(spec, role, architecture, metadata, orders):
            join = next((join for join in joins if any(f".{name}.weight" in place.name for name in join[0])), None)
            if join is None:
                yield place
                continue
            fused.append(place)
            if len(fused) == len(join[0]):
                yield _joined(fused, *join)
                fused = []
    for layer in spec.moe_layers:
        yield from _of_experts(spec, layer, architecture.fuses_gate_up)


def _of_role(
    spec: formats.ModelSpec,
    role: DenseRole,
    architecture: Architecture,
    metadata: header.Metadata,
    orders: dict[str, list[tuple[str, Places | None, Places | None]]],
) -> Iterator[Placement]:
    key, layer = role_key(spec, role.name)
    if (maker := architecture.makers.get(key)) is not None:
        if key not in orders:
            orders[key] = _orders(maker, metadata, spec, key, role)
        for name, rows, cols in orders[key]:
            full = f"blk.{layer}.{name}"
            shape = _made_shape(spec, key, name, role)
            yield Placement(full, shape, (role,), role.quantizable, rows, cols, change=architecture.changes.get(key))
        return
    if key == _KEYS_AND_VALUES:
        yield from _latent(spec.attention_of(layer), layer, role)
        return
    template = architecture.names.get(key) or TENSOR_NAMES.get(key)
    if template is None:
        raise NoPlaceError(role.name)
    name, shape, change = template.format(i=layer), _shape(spec, key, role), architecture.changes.get(key)
    if change == "pairs":
        yield Placement(name, shape, (role,), role.quantizable, _pair_order(spec, role))
    else:
        yield Placement(name, shape, (role,), role.quantizable, change=change)


def _pair_order(spec: formats.ModelSpec, role: DenseRole) -> Places:
    """Returns the rows of heads in pairs of neighbours: what is rotated together lies together."""
    assert isinstance(spec.attention, GroupedQuerySpec), "attention of heads"
    size = spec.attention.head_dim
    place = np.arange(role.shape[0])
    head, within = place // size, place % size
    order: Places = head * size + within % 2 * (size // 2) + within // 2
    return order


def _latent(attention: object, layer: int, role: DenseRole) -> Iterator[Placement]:
    """Yields the two tensors of latent attention: keys transposed, `[heads, rank, key]`, and values."""
    assert isinstance(attention, LatentSpec), "latent attention"
    heads, rank = attention.num_heads, attention.kv_lora_rank
    key, value = attention.qk_nope_head_dim, attention.v_head_dim
    for name, shape, keys, values in (
        ("attn_k_b", (heads, rank, key), key, None),
        ("attn_v_b", (heads, value, rank), None, value),
    ):
        yield Placement(f"blk.{layer}.{name}.weight", shape, (role,), True, keys=keys, values=values)


def _joined(parts: list[Placement], names: tuple[str, ...], name: str) -> Placement:
    """Returns the tensor with several of a layer, one after the other."""
    roles = tuple(role for part in parts for role in part.roles)
    rows = sum(part.shape[0] for part in parts)
    full = parts[0].name.replace(f"{names[0]}.", f"{name}.")
    return replace(parts[0], name=full, shape=(rows, *parts[0].shape[1:]), roles=roles)


def _of_experts(spec: formats.ModelSpec, layer: int, fuses_gate_up: bool) -> Iterator[ExpertPlacement]:
    count, f, d = spec.router.num_experts, spec.expert.source_size, spec.hidden_size
    matrices = spec.expert.matrices
    if fuses_gate_up:
        yield ExpertPlacement(f"{GATE_UP_EXPERTS.format(i=layer)}.weight", (count, 2 * f, d), layer, ("gate", "up"))
        matrices = ("down",)
    for matrix in matrices:
        shape = (d, f) if matrix == "down" else (f, d)
        name = EXPERT_TENSORS[matrix].format(i=layer)
        yield ExpertPlacement(f"{name}.weight", (count, *shape), layer, (matrix,))
        if matrix in spec.expert.bias:
            yield ExpertPlacement(f"{name}.bias", (count, shape[0]), layer, (matrix,), is_bias=True)


def _shape(spec: formats.ModelSpec, key: str, role: DenseRole) -> tuple[int, ...]:
    """Returns the shape of a role's tensor, which llama.cpp wants in more dimensions for some vectors of mixers."""
    mixer, part = spec.mixer, key.rpartition("mixer.")[2] if ".mixer." in key else ""
    if isinstance(mixer, mixers.KimiDeltaSpec) and part.endswith("_conv"):
        return (1, mixer.head_width, 1, mixer.conv_kernel)
    if isinstance(mixer, mixers.KimiDeltaSpec) and part == "a_log":
        return (mixer.num_heads, 1) if mixer.full_rank else (1, 1, mixer.num_heads, 1)
    if (
        isinstance(mixer, mixers.GatedDeltaSpec | mixers.Mamba2Spec | mixers.MambaSpec | mixers.ShortConvSpec)
        and part == "conv"
    ):
        return (role.shape[0] // mixer.conv_kernel, mixer.conv_kernel)
    if isinstance(mixer, mixers.Mamba2Spec) and part in ("a_log", "skip"):
        return (mixer.num_heads, 1)
    if isinstance(mixer, mixers.Mamba2Spec) and part == "out_norm":
        return (mixer.num_groups, mixer.head_width // mixer.num_groups)
    if isinstance(mixer, mixers.MambaSpec) and part == "a_log":
        return (mixer.channels, mixer.state_size)
    return role.shape


def _made_shape(spec: formats.ModelSpec, key: str, name: str, role: DenseRole) -> tuple[int, ...]:
    """Returns the shape of one of the tensors that make a role."""
    if key == "layers.{i}.mixer.qkvz":
        assert isinstance(spec.mixer, mixers.GatedDeltaSpec), "the mixer of the role"
        rows = spec.mixer.value_width if name == "attn_gate.weight" else spec.mixer.conv_channels
        return (rows, role.shape[1])
    return _shape(spec, key, role)


class _Numbered(Rows):
    """A matrix whose values are the numbers of their rows, from `first` on, or those of their columns."""

    dtype = "F32"

    def __init__(self, shape: tuple[int, ...], first: int, by_row: bool) -> None:
        self.num_cols = shape[-1]
        self.num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        self._first, self._by_row = first, by_row

    def _read(self, start: int, stop: int) -> Bytes:
        numbers = np.arange(start, stop)[:, None] + self._first if self._by_row else np.arange(self.num_cols)[None]
        values = np.broadcast_to(numbers.astype("<f4"), (stop - start, self.num_cols))
        return np.ascontiguousarray(values).view(np.uint8)


def _orders(
    maker: Maker, metadata: header.Metadata, spec: formats.ModelSpec, key: str, role: DenseRole
) -> list[tuple[str, Places | None, Places | None]]:
    """Returns the tensors from which a maker makes a role, and which of the role's rows and columns each has."""
    found: dict[bool, Places] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for by_row in (True, False):
        shapes.clear()

        def take(name: str) -> Rows:
            first = sum(int(np.prod(shape[:-1], dtype=np.int64)) for shape in shapes.values())
            shapes[name] = _made_shape(spec, key, name, role)
            return _Numbered(shapes[name], first, by_row)  # noqa: B023  # called before the next turn

        made = maker(take, metadata)
        values = made.floats(0, made.num_rows) if by_row else made.floats(0, 1)
        numbers: Places = (values[:, 0] if by_row else values[0]).astype(np.int64)
        found[by_row] = np.argsort(numbers, kind="stable")
    orders, first = list[tuple[str, Places | None, Places | None]](), 0
    for name, shape in shapes.items():
        count = int(np.prod(shape[:-1], dtype=np.int64))
        rows, first = found[True][first : first + count], first + count
        orders.append((name, _unless_plain(rows), _unless_plain(found[False])))
    return orders


def _unless_plain(places: Places) -> Places | None:
    return None if np.array_equal(places, np.arange(len(places))) else places
