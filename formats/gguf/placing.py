"""The places of a model's weights in a GGUF file: the inverse of what `GgufFiles` reads.

Nothing here reads or writes weights. The order that an architecture's `makers` undo is found by running them on tensors
whose values are their own places.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.families.claiming import role_key
from moe_pack.formats.gguf import architecture, header
from moe_pack.formats.gguf.factors import rope_factors
from moe_pack.formats.gguf.rows import Bytes, Rows
from moe_pack.formats.parts import AttentionSpec, DenseRole

Places = NDArray[np.int64]
_Orders = list[tuple[str, Places | None, Places | None]]  # a tensor of a role, and its rows and columns of the role
# Names that `fuses_qkv` and `fuses_shared` join, and the name of the whole.
_JOINS = ((("attn_q", "attn_k", "attn_v"), "attn_qkv"), (("ffn_gate_shexp", "ffn_up_shexp"), "ffn_up_shexp"))
_KEYS_AND_VALUES = "layers.{i}.attention.kv_b"


class NoPlaceError(Exception):
    """The architecture has no tensor for a role, whose name is the message."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A GGUF tensor of dense roles."""

    name: str
    shape: tuple[int, ...]  # with the contiguous dimension last
    roles: tuple[DenseRole, ...]  # whose rows it has, one after the other
    is_matrix: bool  # whether a pack may quantize them
    rows: Places | None = None  # of the roles, in the tensor's order; None: all as they are
    cols: Places | None = None  # likewise
    # Of latent attention: how many a head has. The role has a head's keys, then its values; the tensor transposes keys.
    keys: int | None = None
    values: int | None = None
    change: architecture.Change | None = None  # of the values


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
    spec: formats.ModelSpec, own: architecture.Architecture, metadata: header.Metadata
) -> Iterator[AnyPlacement]:
    """Yields all tensors of a model: factors of rotary positions, dense ones, then those of experts, layer by layer.

    Args:    spec: of the source, without repeated neurons.   own: the model's.   metadata: of the file, for makers.
    Raises:  NoPlaceError if the architecture lacks one.
    """
    orders: dict[str, _Orders] = {}
    is_needed = (own.fuses_qkv, own.fuses_shared)
    joins = [join for join, needed in zip(_JOINS, is_needed, strict=True) if needed]
    fused: list[Placement] = []
    if (factors := rope_factors(spec)) is not None:
        yield ConstantPlacement(header.FACTORS, factors)
    for role in formats.dense_roles(spec):
        for place in _of_role(spec, role, own, metadata, orders):
            join = next((join for join in joins if any(f".{name}.weight" in place.name for name in join[0])), None)
            if join is None:
                yield place
                continue
            fused.append(place)
            if len(fused) == len(join[0]):
                yield _joined(fused, *join)
                fused = []
    for layer in spec.moe_layers:
        yield from _of_experts(spec, layer, own.fuses_gate_up)


def _of_role(
    spec: formats.ModelSpec,
    role: DenseRole,
    own: architecture.Architecture,
    metadata: header.Metadata,
    orders: dict[str, _Orders],
) -> Iterator[Placement]:
    key, layer = role_key(spec, role.name)
    change = own.changes.get(key)
    if (maker := own.makers.get(key)) is not None:
        if key not in orders:
            orders[key] = _orders(maker, metadata, spec, key, role)
        for name, rows, cols in orders[key]:
            full, shape = f"blk.{layer}.{name}", _made_shape(spec, key, name, role)
            yield Placement(full, shape, (role,), role.quantizable, rows, cols, change=change)
        return
    if key == _KEYS_AND_VALUES:
        yield from _latent(spec.attention_of(layer), layer, role)
        return
    template = own.names.get(key) or architecture.TENSOR_NAMES.get(key)
    if template is None:
        raise NoPlaceError(role.name)
    place = Placement(template.format(i=layer), _shape(spec, key, role), (role,), role.quantizable, change=change)
    if change == "pairs":
        place = replace(place, rows=_pair_order(spec.attention.sizes.get("head_dim", 0), role), change=None)
    yield place


def _pair_order(size: int, role: DenseRole) -> Places:
    """Returns the rows of heads in pairs of neighbours: rows that are rotated together lie together."""
    assert size, "attention of heads"
    place = np.arange(role.shape[0])
    head, within = place // size, place % size
    order: Places = head * size + within % 2 * (size // 2) + within // 2
    return order


def _latent(attention: AttentionSpec, layer: int, role: DenseRole) -> Iterator[Placement]:
    """Yields the two tensors of latent attention: keys transposed, `[heads, rank, key]`, and values."""
    names = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    heads, rank, key, value = (attention.sizes[name] for name in names)
    for name, shape, keys, values in (
        ("attn_k_b", (heads, rank, key), key, None),
        ("attn_v_b", (heads, value, rank), None, value),
    ):
        yield Placement(f"blk.{layer}.{name}.weight", shape, (role,), True, keys=keys, values=values)


def _joined(parts: list[Placement], names: tuple[str, ...], name: str) -> Placement:
    roles = tuple(role for part in parts for role in part.roles)
    rows = sum(part.shape[0] for part in parts)
    full = parts[0].name.replace(f"{names[0]}.", f"{name}.")
    return replace(parts[0], name=full, shape=(rows, *parts[0].shape[1:]), roles=roles)


def _of_experts(spec: formats.ModelSpec, layer: int, fuses_gate_up: bool) -> Iterator[ExpertPlacement]:
    count, f, d = spec.router.num_experts, spec.expert.source_size, spec.hidden_size
    matrices = spec.expert.matrices
    if fuses_gate_up:
        name = architecture.GATE_UP_EXPERTS.format(i=layer)
        yield ExpertPlacement(f"{name}.weight", (count, 2 * f, d), layer, ("gate", "up"))
        matrices = ("down",)
    for matrix in matrices:
        shape = (d, f) if matrix == "down" else (f, d)
        name = architecture.EXPERT_TENSORS[matrix].format(i=layer)
        yield ExpertPlacement(f"{name}.weight", (count, *shape), layer, (matrix,))
        if matrix in spec.expert.bias:
            yield ExpertPlacement(f"{name}.bias", (count, shape[0]), layer, (matrix,), is_bias=True)


def _shape(spec: formats.ModelSpec, key: str, role: DenseRole) -> tuple[int, ...]:
    if spec.mixer is None or ".mixer." not in key:
        return role.shape
    return spec.mixer.gguf_shape(key.rpartition("mixer.")[2], role.shape)


def _made_shape(spec: formats.ModelSpec, key: str, name: str, role: DenseRole) -> tuple[int, ...]:
    """Returns the shape of one of the tensors that make a role."""
    if key == "layers.{i}.mixer.qkvz" and spec.mixer is not None:
        channels = spec.mixer.state.conv[1]
        return (role.shape[0] - channels if name == "attn_gate.weight" else channels, role.shape[1])
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


def _moved(order: Places) -> Places | None:
    """Returns the order; None if it moves nothing."""
    return None if np.array_equal(order, np.arange(len(order))) else order


def _orders(
    maker: architecture.Maker, metadata: header.Metadata, spec: formats.ModelSpec, key: str, role: DenseRole
) -> _Orders:
    """Returns the tensors from which a maker makes a role, and the role's rows and columns of each."""
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
    orders, first, cols = _Orders(), 0, found[False]
    for name, shape in shapes.items():
        count = int(np.prod(shape[:-1], dtype=np.int64))
        rows, first = found[True][first : first + count], first + count
        orders.append((name, _moved(rows), _moved(cols)))
    return orders
