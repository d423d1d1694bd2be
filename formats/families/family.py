"""A family's facts about its checkpoints: how the config is read, and which source tensor has which role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_pack import formats
from moe_pack.formats.families.config import Config


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Source tensors that are not run: a pattern of names (`*` for anything), and the reason.

    The pattern applies only if the checkpoint has the tensor `sign` (None: always). `{n}` in either is the number of
    layers, plus `after`, `{e}` in the pattern the number of an expert behind the last one that is run. `copy_of` is the
    name of a tensor that they must be equal to.
    """

    pattern: str
    reason: str
    sign: str | None = None
    copy_of: str | None = None
    after: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is not stored like its role: `transposed`, `[in, out]`, or with the role as first of `parts`.

    `roles`: it has the rows of several roles, one after the other in this order, each named as in `dense_names`.
    """

    name: str
    transposed: bool = False
    parts: int = 1
    roles: tuple[str, ...] = ()


DenseName = str | Stored


def matrices(template: str, *names: str) -> dict[formats.Matrix, str]:
    """Returns the tensors' names of gate, up and down, or of up and down, whose own names are `*` in a template."""
    return {
        matrix: template.replace("*", name) for matrix, name in zip(formats.MATRICES[-len(names) :], names, strict=True)
    }


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One way in which checkpoints of a family name and store their experts.

    `matrices` has the tensors' names, with `{i}` for the layer and `{e}` for the expert (or `{pair}`, as in
    `dense_names`); a name without `{e}` is that of a tensor of all experts of the layer, `[E, rows, columns]`, or
    `[E rows, columns]` if it is `one_matrix`. A matrix is stored as `[out, in]` (gate and up `[f, d]`, down `[d, f]`),
    or as `[in, out]` if `transposed`, which may also be down alone. If gate and up have the same name, the neurons of
    gate come first, or the two alternate if `interleaved`. `biases` has the names of biases, which are stored in the
    same way: `[f]` for gate and up, `[d]` for down. `scales` names the scales of matrices in MXFP4 blocks. `of_gguf`:
    what our reader of GGUF files calls the matrices, where no checkpoint has one tensor for each.
    """

    matrices: Mapping[formats.Matrix, str]
    biases: Mapping[formats.Matrix, str] = field(default_factory=dict)
    interleaved: bool = False
    transposed: bool | Literal["down"] = False
    one_matrix: bool = False
    scales: Mapping[formats.Matrix, str] = field(default_factory=dict)
    of_gguf: bool = False


# The names that most families share; the second are those in transformers 5's memory, which it also writes with
# save_original_format=False.
EXPERT_NAMES = ExpertNames(matrices("model.layers.{i}.mlp.experts.{e}.*.weight", "gate_proj", "up_proj", "down_proj"))
FUSED_EXPERT_NAMES = ExpertNames(
    matrices("model.layers.{i}.mlp.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")
)


@dataclass(frozen=True, slots=True)
class TableNames:
    """One way in which checkpoints of a family name the n-gram table of a layer, with `{i}` for the layer.

    `table` is the name of a tensor with all rows, or, with `{part}`, of several whose rows follow each other, from part
    0 on. The others name constants (I64), which the spec has too: a checkpoint that has them must have the same.
    """

    table: str
    multipliers: str
    head_sizes: str
    head_offsets: str

    def names(self) -> tuple[str, ...]:
        """Returns all names, in the order of the fields."""
        return self.table, self.multipliers, self.head_sizes, self.head_offsets


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """How checkpoints of a family name the prediction layer: a decoder layer that predicts a further token.

    Names of the layer's parts begin with `layer` where those of `dense_names` and `expert_names` begin with `stack`;
    `{n}` is the number of decoder layers. The others name what the layer has of its own: the matrix `project`, which
    takes the normed embedding of a token and then the normed hidden state of the token before it, the norms of both,
    and the norm before the head. `embed` and `head`: tables that some checkpoints repeat, or have for this layer alone.
    """

    stack: str
    layer: str
    project: str
    embed_norm: str
    hidden_norm: str
    norm: str
    embed: str | None = None
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """A model whose `config.json` is in `configs`, and what its publisher prints of it."""

    name: str  # of the file, and a short name
    total: str  # parameters in billions
    active: str  # those of a token, in billions
    cached: str | None = None  # values cached a token, in thousands; None where nobody printed it
    leaves_out: tuple[str, ...] = ()  # dense roles, of all layers, that neither number counts
    total_leaves_out: tuple[str, ...] = ()  # those that the first does not count
    active_leaves_out: tuple[str, ...] = ()  # those that the second does not count
    adds_prediction_layer: bool = False  # whether the total has the layer that plain decoding does not run


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    `dense_names` maps roles to source names, with `{i}` for the layer, or `{pair}` and `{side}` (0 or 1) where the
    source counts two of our layers as one; if a role has several names, a checkpoint has one of them. If one tensor has
    several `roles`, each of them has the same `Stored`. A checkpoint follows one of the `expert_names`. For an encoder,
    the roles of its layers begin with `encoder.{i}` here, its experts follow `encoder_expert_names`, and the layers of
    both stacks count from 0.
    `table_names`: the spellings of n-gram tables; a checkpoint follows one of them, layer by layer.
    `prediction`: the spellings of the prediction layer, if the runtime can run it.
    `dropped`: tensors that are not packed. `unused`: tensors that the pack keeps although they are not run.
    `ignored_keys`: keys of the config that change nothing at inference. `text_keys`: in a multimodal checkpoint, the
    keys that lead to the text model's object in the config. `old_keys`: older names of keys of the config, and what
    they are called now. `may_lack_router_bias`: a checkpoint without any router's bias is that of a model without them.
    """

    model_type: str
    read_config: Callable[[Config], formats.ModelSpec]
    dense_names: Mapping[str, DenseName | tuple[DenseName, ...]]
    expert_names: tuple[ExpertNames, ...] = (EXPERT_NAMES, FUSED_EXPERT_NAMES)
    short_names: Mapping[str, str] = field(default_factory=dict)  # in lower case; each maps to a hub id
    published: tuple[Published, ...] = ()
    unpublished: str = ""  # why no public copy of a real config.json is in `configs`
    dropped: tuple[LeftOut, ...] = ()
    unused: tuple[LeftOut, ...] = ()
    ignored_keys: frozenset[str] = frozenset()
    encoder_expert_names: tuple[ExpertNames, ...] = ()
    text_keys: tuple[str, ...] = ()
    old_keys: Mapping[str, str] = field(default_factory=dict)
    table_names: tuple[TableNames, ...] = ()
    may_lack_router_bias: bool = False
    prediction: tuple[PredictionNames, ...] = ()
