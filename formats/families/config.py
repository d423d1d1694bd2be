"""Typed reads of a foreign `config.json`: every key is read, known to change nothing, or refused by name."""

from collections.abc import Mapping
from typing import Any

from moe_pack.formats import CheckpointError
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
            raise CheckpointError(f"{place}: expected a JSON object")
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
                raise CheckpointError(f"{self.place}: key {key!r} is missing, expected a value or null")

    def whole(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from 1 to 2^31 - 1; `default` if the key is missing or null."""
        value = int(self._typed(key, (int,), "a whole number", default))
        if not 0 < value < 2**31:
            raise CheckpointError(f"{self.place}: {key} is {value}, expected 1 to 2^31 - 1")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from 0 to 2^31 - 1; `default` if the key is missing or null."""
        value = int(self._typed(key, (int,), "a whole number", default))
        if not 0 <= value < 2**31:
            raise CheckpointError(f"{self.place}: {key} is {value}, expected 0 to 2^31 - 1")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Reads a whole number from -2^31 to 2^31 - 1; `default` if the key is missing or null."""
        value = int(self._typed(key, (int,), "a whole number", default))
        if not -(2**31) <= value < 2**31:
            raise CheckpointError(f"{self.place}: {key} is {value}, expected -2^31 to 2^31 - 1")
        return value

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """Reads the number of decoder layers (at most `MAX_LAYERS`)."""
        num_layers = self.whole(key)
        if num_layers > MAX_LAYERS:
            raise CheckpointError(f"{self.place}: {key} is {num_layers}, expected at most {MAX_LAYERS}")
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
            raise CheckpointError(f"{self.place}: {key} is {_shown(values)}, expected a list of numbers")
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

        Raises:  CheckpointError if it has two with different values.
        """
        spellings = [key for key in keys if self.has(key)]
        self._read.update(keys)
        for key in spellings[1:]:
            if self._values[key] != self._values[spellings[0]]:
                raise CheckpointError(
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
            raise CheckpointError(f"{self.place}: {key} is {_shown(value)}, supported: {', '.join(choices)}")
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
        Raises:  CheckpointError if it has a key under both, with different values.
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
                raise CheckpointError(f"{self.place}: {key} is {_shown(value)}; only {only!r} is supported")

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
        Raises:  CheckpointError that names the first such key.
        """
        known = self._read | _BOOKKEEPING | _GENERATION | ignored
        for key, value in self._values.items():
            if key not in known and value is not None and not _is_same(value, _DEFAULTS.get(key)):
                raise CheckpointError(
                    f"{self.place}: key {key!r} ({_shown(value)}) is unknown for this family and may change the "
                    "arithmetic"
                )

    def _float(self, key: str, number: int | float) -> float:
        if not abs(number) < _MAX_NUMBER:
            raise CheckpointError(
                f"{self.place}: {key} is {_shown(number)}, expected a magnitude below {_MAX_NUMBER:g}"
            )
        return float(number)

    def _items(self, key: str, kinds: tuple[type, ...], wanted: str) -> list[Any]:
        values = self._typed(key, (list,), f"a list of {wanted}", [])
        if any(type(value) not in kinds or (kinds == (int,) and value < 0) for value in values):
            raise CheckpointError(f"{self.place}: {key} is {_shown(values)}, expected a list of {wanted}")
        return list(values)

    def _typed(self, key: str, kinds: tuple[type, ...], wanted: str, default: object) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.place}: key {key!r} is missing, expected {wanted}")
            return default
        if type(value) not in kinds:
            raise CheckpointError(f"{self.place}: {key} is {_shown(value)}, expected {wanted}")
        return value


def _is_same(value: object, expected: object) -> bool:
    """Returns whether two values of JSON are equal, and either both or none true or false (in Python `1 == True`)."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _shown(value: object) -> str:
    """Returns a value of a foreign file for a message: whole, unless it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
