"""What a family says of its checkpoints: how to read the config, and which source tensor plays which role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moe_pack.formats.families.config import Config
from moe_pack.formats.spec import Matrix, ModelSpec


@dataclass(frozen=True, slots=True)
class Dropped:
    """Source tensors that are not packed: a pattern of names (`*` for anything), and the reason.

    `sign` is the name of a tensor without which they are something else, and claimed by nobody. `{n}` in either is
    the number of layers. `copy_of` is the name of a tensor that they must be equal to.
    """

    pattern: str
    reason: str
    sign: str | None = None
    copy_of: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One way in which checkpoints of a family hold their experts.

    `matrices` has the tensors' names, with `{i}` for the layer and `{e}` for the expert; a name without `{e}` is that
    of a tensor of all experts of the layer, `[E, rows, columns]`. A matrix lies as `[out, in]` (gate and up
    `[f, d]`, down `[d, f]`), or as `[in, out]` if `transposed`. Where gate and up have the same name, the neurons of
    gate come first, or the two take turns if `interleaved`. `biases` has the names of the bias of a matrix, which lie
    alike: `[f]` for gate and up, `[d]` for down. `scales` names the scales of matrices that are in MXFP4 blocks.
    """

    matrices: Mapping[Matrix, str]
    biases: Mapping[Matrix, str] = field(default_factory=dict)
    interleaved: bool = False
    transposed: bool = False
    scales: Mapping[Matrix, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    `dense_names` maps roles to source names, with `{i}` for the layer; where a role has several names, a checkpoint has
    one of them. Of several `expert_names` a checkpoint follows one. Where there is an encoder, the roles of its layers
    begin with `encoder.{i}` here, `encoder_expert_names` is its experts', and both stacks' layers count from 0.
    `dropped` says what is not packed. `ignored_keys` of the config change nothing at inference.
    """

    model_type: str
    short_names: Mapping[str, str]
    read_config: Callable[[Config], ModelSpec]
    dense_names: Mapping[str, str | tuple[str, ...]]
    expert_names: tuple[ExpertNames, ...]
    dropped: tuple[Dropped, ...] = ()
    ignored_keys: frozenset[str] = frozenset()
    encoder_expert_names: tuple[ExpertNames, ...] = ()
