"""A family's facts about its checkpoints: how the config is read, and which source tensor has which role."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from moe_pack import formats
from moe_pack.formats.parts.specs import MAX_LAYERS


def keys(text: str) -> frozenset[str]:
    """Returns the keys that a text lists, with spaces between them."""
    return frozenset(text.split())


_MAX_NUMBER = 1e38
# Keys without effect on inference: training, tools that wrote the file, token ids (these are read from
# generation_config.json), names of labels, and what a forward pass returns in addition to logits.
_BOOKKEEPING = keys(
    """
    _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id
    finetuning_task id2label initializer_range label2id model_type output_attentions output_hidden_states
    output_router_logits pad_token_id prefix problem_type return_dict router_aux_loss_coef router_jitter_noise
    sep_token_id task_specific_params tokenizer_class torch_dtype transformers_version unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache
    """
)
# How text is generated. transformers 4 wrote these into config.json; transformers 5 skips them there.
_GENERATION = keys(
    """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p
    """
)
# Keys that the base class of transformers writes for every model, with the value that changes nothing. Source:
# PretrainedConfig of transformers 4.57 and PreTrainedConfig of 5.23; a test compares the list with the installed class.
_DEFAULTS: Mapping[str, object] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "torchscript": False,
}


class Config:
    """A parsed `config.json` that remembers which keys were read.

    Args:    values: the JSON object.   place: its file name, for messages.
    """

    def __init__(self, values: Any, place: str) -> None:
        if not isinstance(values, dict):
            raise formats.CheckpointError(f"{place}: expected a JSON object")
        self.place = place
        self._values: dict[str, Any] = values
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Returns whether the key exists and is not null."""
        return self._values.get(key) is not None

    def require(self, *keys: str) -> None:
        """Checks that the keys exist; each may be null."""
        for key in keys:
            if key not in self._values:
                raise formats.CheckpointError(f"{self.place}: key {key!r} is missing, expected a value or null")

    def whole(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from 1 to 2^31 - 1; `default` if the key is missing or null."""
        return self._ranged(key, 1, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from 0 to 2^31 - 1; `default` if the key is missing or null."""
        return self._ranged(key, 0, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from -2^31 to 2^31 - 1; `default` if the key is missing or null."""
        return self._ranged(key, -(2**31), default)

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """Reads the number of decoder layers (at most `MAX_LAYERS`)."""
        num_layers = self.whole(key)
        if num_layers > MAX_LAYERS:
            raise formats.CheckpointError(f"{self.place}: {key} is {num_layers}, expected at most {MAX_LAYERS}")
        return num_layers

    def counts(self, key: str) -> tuple[int, ...]:
        """Reads a list of whole numbers, 0 or more each; empty if the key is missing or null."""
        return tuple(self._items(key, (int,), "whole numbers"))

    def first_count(self, key: str) -> int:
        """Reads a whole number of 0 or more, or the first of a list of such numbers."""
        listed = self.counts(key) if isinstance(self._values.get(key), list) else ()
        return listed[0] if listed else self.count(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Reads a list of numbers; empty if the key is missing or null."""
        return tuple(self._float(key, number) for number in self._items(key, (int, float), "numbers"))

    def limits(self, key: str) -> tuple[float | None, ...]:
        """Reads a list of numbers, of which null and 0 mean that there is no limit; empty if the key is missing."""
        limits = self._items(key, (int, float, type(None)), "numbers or null")
        return tuple(self._float(key, limit) if limit else None for limit in limits)

    def unbounded(self, key: str) -> tuple[float, ...]:
        """Reads a list of numbers that may be infinite, which transformers 5 writes as an object; empty if missing."""
        values = self._typed(key, (list,), "a list of numbers", [])
        numbers = [float("inf") if value == {"__float__": "Infinity"} else value for value in values]
        if any(type(number) not in (int, float) for number in numbers):
            raise formats.CheckpointError(f"{self.place}: {key} is {_shown(values)}, expected a list of numbers")
        return tuple(float(number) for number in numbers)

    def is_list(self, key: str) -> bool:
        """Returns whether the key's value is a list, which may stand for one value in its place."""
        return isinstance(self._values.get(key), list)

    def is_text(self, key: str, text: str) -> bool:
        """Returns whether the key's value is this string, which stands for a number that follows from others."""
        if self._values.get(key) != text:
            return False
        self._read.add(key)
        return True

    def respell(self, key: str, value: str | float, usual: str | float) -> None:
        """Takes this value under a key as the usual one, which means the same to the family."""
        if self._values.get(key) == value:
            self._values = self._values | {key: usual}

    def texts(self, key: str) -> tuple[str, ...]:
        """Reads a list of strings; empty if the key is missing or null."""
        return tuple(self._items(key, (str,), "strings"))

    def either(self, *keys: str) -> str:
        """Returns that of several spellings of a key which the config has (the first if it has none).

        Raises:  formats.CheckpointError if it has two with different values.
        """
        spellings = [key for key in keys if self.has(key)]
        self._read.update(keys)
        for key in spellings[1:]:
            if self._values[key] != self._values[spellings[0]]:
                raise formats.CheckpointError(
                    f"{self.place}: {spellings[0]} is {_shown(self._values[spellings[0]])}, "
                    f"{key} is {_shown(self._values[key])}; these keys must be equal"
                )
        return spellings[0] if spellings else keys[0]

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a number within float32's range; `default` if the key is missing or null."""
        return self._float(key, self._typed(key, (int, float), "a number", default))

    def text(self, key: str, default: str | None = None) -> str:
        """Reads a string; `default` if the key is missing or null."""
        return str(self._typed(key, (str,), "a string", default))

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Reads one of `choices`; the first of them if the key is missing or null."""
        value = self.text(key, choices[0])
        if value not in choices:
            raise formats.CheckpointError(f"{self.place}: {key} is {_shown(value)}, supported: {', '.join(choices)}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Reads true or false; `default` if the key is missing or null."""
        return bool(self._typed(key, (bool,), "true or false", default))

    def truth(self, key: str, default: bool) -> bool:
        """Reads true or false, or a number, which is true unless it is 0; `default` if the key is missing or null."""
        return bool(self._typed(key, (bool, int, float), "true, false or a number", default))

    def group(self, key: str) -> "Config | None":
        """Reads the object under `key`, which remembers its own reads; None if it is missing or null."""
        self._read.add(key)
        value = self._values.get(key)
        return None if value is None else Config(value, f"{self.place}: {key}")

    @property
    def is_empty(self) -> bool:
        """Whether there are no keys."""
        return not self._values

    def raw(self, key: str) -> dict[str, Any]:
        """Reads the object under `key` as it is; empty if it is missing or null."""
        return dict(self._typed(key, (dict,), "an object", {}))

    def renamed(self, names: Mapping[str, str]) -> "Config":
        """Returns the config with keys under their newer names.

        Args:    names: from older names to newer ones.
        Raises:  formats.CheckpointError if it has a key under both, with different values.
        """
        for old, new in names.items():
            self.either(new, old)
        values = {names.get(key, key): value for key, value in self._values.items()}
        return Config(values | {key: value for key, value in self._values.items() if key not in names}, self.place)

    def groups(self) -> "list[Config]":
        """Reads the object under each of the keys."""
        found = [self.group(key) for key in self._values]
        return [group for group in found if group is not None]

    def only(self, **expected: object) -> None:
        """Checks that each key is missing, null or as given: the only value whose arithmetic we implement.

        So are keys read that published configs have and no code of transformers reads: other values would be another
        model.
        """
        for key, only in expected.items():
            self._read.add(key)
            value = self._values.get(key)
            if value is not None and not _is_same(value, only):
                raise formats.CheckpointError(f"{self.place}: {key} is {_shown(value)}; only {only!r} is supported")

    def derive(self, key: str, value: int) -> None:
        """Gives a key the value that follows from other keys, which is the only one that the config may have."""
        self.only(**{key: value})
        self._values = self._values | {key: value}

    def each_whole(self, key: str, num_layers: int) -> int:
        """Reads a whole number from 1 to 2^31 - 1, which may also be a list with the same number for each layer."""
        value = self._values.get(key)
        if isinstance(value, list):
            self.only(**{key: [value[0] if value else None] * num_layers})
            return Config({key: value[0]}, self.place).whole(key)
        return self.whole(key)

    def only_each(self, key: str, expected: int, num_layers: int) -> None:
        """Checks that `key` is missing, null, `expected`, or a list with that for each layer."""
        is_list = isinstance(self._values.get(key), list)
        self.only(**{key: [expected] * num_layers if is_list else expected})

    def ignore(self, *keys: str) -> None:
        """Accepts keys that, given the other keys, change nothing."""
        self._read.update(keys)

    def refuse_unread(self, ignored: frozenset[str] = frozenset()) -> None:
        """Refuses keys that were not read and may change the arithmetic.

        Args:    ignored: keys that change nothing in this family.
        Raises:  formats.CheckpointError that names the first such key.
        """
        known = self._read | _BOOKKEEPING | _GENERATION | ignored
        for key, value in self._values.items():
            if key not in known and value is not None and not _is_same(value, _DEFAULTS.get(key)):
                raise formats.CheckpointError(
                    f"{self.place}: key {key!r} ({_shown(value)}) is unknown for this family and may change the "
                    "arithmetic"
                )

    def _ranged(self, key: str, least: int, default: int | None) -> int:
        value = int(self._typed(key, (int,), "a whole number", default))
        if not least <= value < 2**31:
            shown = "-2^31" if least < 0 else least
            raise formats.CheckpointError(f"{self.place}: {key} is {value}, expected {shown} to 2^31 - 1")
        return value

    def _float(self, key: str, number: int | float) -> float:
        if not abs(number) < _MAX_NUMBER:
            raise formats.CheckpointError(
                f"{self.place}: {key} is {_shown(number)}, expected a magnitude below {_MAX_NUMBER:g}"
            )
        return float(number)

    def _items(self, key: str, kinds: tuple[type, ...], wanted: str) -> list[Any]:
        values = self._typed(key, (list,), f"a list of {wanted}", [])
        if any(type(value) not in kinds or (kinds == (int,) and value < 0) for value in values):
            raise formats.CheckpointError(f"{self.place}: {key} is {_shown(values)}, expected a list of {wanted}")
        return list(values)

    def _typed(self, key: str, kinds: tuple[type, ...], wanted: str, default: object) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise formats.CheckpointError(f"{self.place}: key {key!r} is missing, expected {wanted}")
            return default
        if type(value) not in kinds:
            raise formats.CheckpointError(f"{self.place}: {key} is {_shown(value)}, expected {wanted}")
        return value


def _is_same(value: object, expected: object) -> bool:
    """Returns whether two values of JSON are equal, either both or none of them true or false (`1 == True`)."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _shown(value: object) -> str:
    """Returns a value of a foreign file for a message: whole, unless it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


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
        """Returns these names of experts with each tensor renamed."""
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
    """Returns these names with each tensor renamed; None stays None."""
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
