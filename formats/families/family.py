"""A family's facts about its checkpoints: how the config is read, and which source tensor has which role."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar

from moe_pack import formats
from moe_pack.formats.families.config import Config


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Source tensors that are not run. `{n}` in names is the number of layers, plus `after`."""

    pattern: str  # of their names: `*` for anything, `{e}` for the number of an expert behind the last one that is run
    reason: str
    sign: str | None = None  # the pattern applies only if the checkpoint has this tensor; None: always
    copy_of: str | None = None  # the name of a tensor that they must be equal to
    after: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is not stored like its role."""

    name: str
    transposed: bool = False  # `[in, out]`
    parts: int = 1  # with the role as first of so many
    # It has the rows of several roles, one after the other in this order, each named as in `dense_names`.
    roles: tuple[str, ...] = ()


DenseName = str | Stored
DenseNames = DenseName | tuple[DenseName, ...]


def matrices(template: str, *names: str) -> dict[formats.Matrix, str]:
    """Returns the tensors' names of gate, up and down, or of up and down, whose own names are `*` in a template."""
    return {
        matrix: template.replace("*", name) for matrix, name in zip(formats.MATRICES[-len(names) :], names, strict=True)
    }


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One way in which checkpoints of a family name and store their experts.

    A matrix is stored as `[out, in]` (gate and up `[f, d]`, down `[d, f]`). If gate and up have the same name, the
    neurons of gate come first.
    """

    # The tensors' names, with `{i}` for the layer and `{e}` for the expert (or `{pair}`, as in `dense_names`). A name
    # without `{e}` is that of a tensor of all experts of the layer, `[E, rows, columns]`.
    matrices: Mapping[formats.Matrix, str]
    biases: Mapping[formats.Matrix, str] = field(default_factory=dict)  # stored likewise: gate and up `[f]`, down `[d]`
    interleaved: bool = False  # neurons of gate and up alternate
    transposed: bool | Literal["down"] = False  # `[in, out]`; or down alone
    one_matrix: bool = False  # all experts of the layer are `[E rows, columns]`
    scales: Mapping[formats.Matrix, str] = field(default_factory=dict)  # of matrices in MXFP4 blocks
    of_gguf: bool = False  # our reader of GGUF files calls them so; no checkpoint has one tensor for each

    def renamed(self, rename: Callable[[str], str]) -> "ExpertNames":
        """Returns the same with other names of tensors."""
        matrices, biases, scales = (
            {matrix: rename(name) for matrix, name in names.items()}
            for names in (self.matrices, self.biases, self.scales)
        )
        return replace(self, matrices=matrices, biases=biases, scales=scales)


# The names that most families share; the second are those in transformers 5's memory, which it also writes with
# save_original_format=False.
EXPERT_NAMES = ExpertNames(matrices("model.layers.{i}.mlp.experts.{e}.*.weight", "gate_proj", "up_proj", "down_proj"))
FUSED_EXPERT_NAMES = ExpertNames(
    matrices("model.layers.{i}.mlp.experts.*", "gate_up_proj", "gate_up_proj", "down_proj")
)


@dataclass(frozen=True, slots=True)
class TableNames:
    """One way in which checkpoints of a family name the n-gram table of a layer, with `{i}` for the layer.

    The last three are constants (I64) that the spec has too: a checkpoint that has them must have the same.
    """

    table: str  # a tensor with all rows; with `{part}`, several whose rows follow each other, from part 0 on
    multipliers: str
    head_sizes: str
    head_offsets: str


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """How checkpoints of a family name the prediction layer: a decoder layer that predicts a further token.

    `{n}` is the number of decoder layers.
    """

    stack: str  # so begin names in `dense_names` and `expert_names` ...
    layer: str  # ... which begin so for this layer
    project: str  # takes the normed embedding of a token, then the normed hidden state of the token before it
    embed_norm: str
    hidden_norm: str
    norm: str  # before the head
    embed: str | None = None  # tables that some checkpoints repeat, or have for this layer alone
    head: str | None = None


_Names = TypeVar("_Names", TableNames, PredictionNames)


def renamed(names: _Names, rename: Callable[[str], str]) -> _Names:
    """Returns the same with other names of tensors, those that are there."""
    given = {each.name: getattr(names, each.name) for each in fields(names)}
    return replace(names, **{key: rename(name) for key, name in given.items() if name is not None})


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
    """One `model_type`."""

    model_type: str
    read_config: Callable[[Config], formats.ModelSpec]
    # From roles to source names, with `{i}` for the layer, or `{pair}` and `{side}` (0 or 1) where the source counts
    # two of our layers as one. If a role has several names, a checkpoint has one of them. If one tensor has several
    # roles, each of them has the same `Stored`. Roles of an encoder's layers begin with `encoder.{i}`; the layers of
    # both stacks count from 0. `.mlp.{up,down}` is short for two roles that begin with `layers.{i}`; the names of such
    # roles have `{}` for `up` and `down`, and begin with each of `layer`.
    dense_names: Mapping[str, DenseNames]
    expert_names: tuple[ExpertNames, ...] = (EXPERT_NAMES, FUSED_EXPERT_NAMES)  # a checkpoint follows one of them
    short_names: Mapping[str, str] = field(default_factory=dict)  # in lower case; each maps to a hub id
    published: tuple[Published, ...] = ()
    unpublished: str = ""  # why no public copy of a real config.json is in `configs`
    model_class: str = ""  # of transformers, where it is not called as the type
    dropped: tuple[LeftOut, ...] = ()  # not packed
    unused: tuple[LeftOut, ...] = ()  # kept in the pack although they are not run
    ignored_keys: frozenset[str] = frozenset()  # keys of the config that change nothing at inference
    encoder_expert_names: tuple[ExpertNames, ...] = ()
    text_keys: tuple[str, ...] = ()  # in a multimodal config, the keys that lead to the text model's object
    old_keys: Mapping[str, str] = field(default_factory=dict)  # older names of keys, and what they are called now
    table_names: tuple[TableNames, ...] = ()  # of n-gram tables; a checkpoint follows one of them, layer by layer
    may_lack_router_bias: bool = False  # a checkpoint without any router's bias is that of a model without them
    prediction: tuple[PredictionNames, ...] = ()  # the spellings of the prediction layer, if the runtime can run it
    layer: tuple[str, ...] = ("model.layers.{i}.",)
    ways: Mapping[str, tuple[Stored, ...]] = field(init=False)  # `dense_names` in full

    def __post_init__(self) -> None:
        object.__setattr__(self, "ways", dict(_ways(self.dense_names, self.layer)))

    @property
    def class_name(self) -> str:
        """The model's class, for `architectures` in config.json. vLLM and llama.cpp's converter choose by it."""
        words = self.model_type.removesuffix("_text").split("_")
        return self.model_class or f"{''.join(word.capitalize() for word in words)}ForCausalLM"


def _ways(dense_names: Mapping[str, DenseNames], prefixes: tuple[str, ...]) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    for role, names in dense_names.items():
        ways = [
            Stored(name) if isinstance(name, str) else name
            for name in (names if isinstance(names, tuple) else (names,))
        ]
        if not role.startswith("."):
            yield role, tuple(ways)
            continue
        found = re.search(r"{(\w+(?:,\w+)+)}", role)
        for part in found[1].split(",") if found else ("",):
            own = role.replace(found[0], part) if found else role
            yield (
                f"layers.{{i}}{own}",
                tuple(
                    Stored(
                        prefix + way.name.replace("{}", part),
                        way.transposed,
                        way.parts,
                        tuple(f"layers.{{i}}{other}" for other in way.roles),
                    )
                    for prefix in prefixes
                    for way in ways
                ),
            )
