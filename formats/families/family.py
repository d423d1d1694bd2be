"""What a family says of its checkpoints: how to read the config, and which source tensor plays which role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_pack.formats.errors import CheckpointError
from moe_pack.formats.families.config import Config
from moe_pack.formats.roles import DenseRole, dense_roles
from moe_pack.formats.spec import Matrix, ModelSpec

FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    `dense_names` maps roles to source names, with `{i}` for the decoder layer; `expert_names` maps an expert's
    matrices, with `{i}` and `{e}`; `down` lies there as `[d, f]`, gate and up as `[f, d]`. `dropped` maps endings of
    source names that are not packed to the reason why. `ignored_keys` of the config change nothing at inference.
    """

    model_type: str
    short_names: Mapping[str, str]
    read_config: Callable[[Config], ModelSpec]
    dense_names: Mapping[str, str]
    expert_names: Mapping[Matrix, str]
    dropped: Mapping[str, str]
    ignored_keys: frozenset[str] = frozenset()

    def dense_source(self, role: str) -> str:
        """The source's name of the dense tensor with this role."""
        head, _, rest = role.partition(".")
        if head != "layers":
            return self.dense_names[role]
        layer, _, name = rest.partition(".")
        return self.dense_names[f"layers.{{i}}.{name}"].format(i=layer)

    def expert_source(self, layer: int, expert: int, matrix: Matrix) -> str:
        """The source's name of one matrix of one expert; `layer` is the decoder layer."""
        return self.expert_names[matrix].format(i=layer, e=expert)


@dataclass(frozen=True, slots=True)
class Claims:
    """The account of a checkpoint: what each of its tensors becomes."""

    resident: Mapping[str, DenseRole]
    packed: Mapping[str, tuple[int, int, Matrix]]
    dropped: Mapping[str, str]


def claim_tensors(family: Family, spec: ModelSpec, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Claims:
    """Accounts for every source tensor.

    Args:    tensors: dtype and shape of every source tensor, by name.
    Raises:  CheckpointError for a tensor that is missing, misshapen, of a type we cannot read, or claimed by nobody.
    """
    d, f = spec.hidden_size, spec.expert.intermediate_size
    resident = {family.dense_source(role.name): role for role in dense_roles(spec)}
    packed = {
        family.expert_source(layer, expert, matrix): (layer, expert, matrix)
        for layer in spec.moe_layers
        for expert in range(spec.router.num_experts)
        for matrix in spec.expert.matrices
    }
    for name, role in resident.items():
        _check_tensor(name, role.shape, tensors)
    for name, (_, _, matrix) in packed.items():
        _check_tensor(name, (d, f) if matrix == "down" else (f, d), tensors)
    dropped = {}
    for name in tensors:
        if name in resident or name in packed:
            continue
        reason = next((why for ending, why in family.dropped.items() if name.endswith(ending)), None)
        if reason is None:
            raise CheckpointError(
                f"checkpoint: tensor {name!r} belongs to nothing the config describes; it would be lost in the pack"
            )
        dropped[name] = reason
    return Claims(resident, packed, dropped)


def _check_tensor(name: str, expected: tuple[int, ...], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    if name not in tensors:
        raise CheckpointError(f"checkpoint: tensor {name!r} is missing")
    dtype, shape = tensors[name]
    if shape != expected:
        raise CheckpointError(f"checkpoint: tensor {name!r} has shape {list(shape)}, expected {list(expected)}")
    if dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"checkpoint: tensor {name!r} is {dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
