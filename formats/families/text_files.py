"""The small files of a model's text: special tokens that several files name, tokens that end a text, chat templates.

A token may be in tokenizer.json, in tokenizer_config.json, in added_tokens.json or in special_tokens_map.json. The
order of files and of new tokens is that of transformers 5: `_from_pretrained` of `PreTrainedTokenizerBase` and
`__init__` of `TokenizersBackend`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from moe_pack import formats
from moe_pack.formats.base.errors import MoePackError

Values = dict[str, Any]
Reader = Callable[[str], Values]  # returns the values of a JSON object by its file's name; none for a missing file

TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_ADDED_FILE, _MAP_FILE = "added_tokens.json", "special_tokens_map.json"
_LISTED = "added_tokens_decoder"
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SENTINEL = re.compile(r"<extra_id_\d+>")
# The keys for the text model in multimodal checkpoints. In a config without any of them, the whole is the text model.
TEXT_KEYS = frozenset({"text_config", "thinker_config"})
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TextFiles(Protocol):
    """A folder with a tokenizer's files: a `Pack`, or the files of a checkpoint."""

    folder: Path

    def has(self, name: str) -> bool:
        """Whether the folder has this file."""
        ...

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """Reads a whole file: u8 [bytes]."""
        ...


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object of a `config.json` that describes the text model: a part of it in a multimodal checkpoint."""
    if TEXT_KEYS.isdisjoint(values):
        return values
    from moe_pack.formats.families.registry import family_of

    family = family_of(str(values.get("model_type")))
    for key in () if family is None else family.text_keys:
        inner = values.get(key)
        if not isinstance(inner, dict):
            break
        values = inner
    return values


def error_of(files: TextFiles) -> type[MoePackError]:
    """Returns the class of errors in these files."""
    return formats.PackError if isinstance(files, formats.Pack) else formats.CheckpointError


def read_values(files: TextFiles, name: str) -> Values:
    """Returns the values of a JSON object; none if the file is missing or has no object.

    Raises:  PackError, or CheckpointError for a checkpoint, if the file is not JSON.
    """
    raw = files.read_file(name).tobytes() if files.has(name) else b"{}"
    values: Any = formats.parse(raw, name, error_of(files), is_foreign=True)
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that the files next to tokenizer.json name."""

    listed: dict[int, str]  # tokens with their number, which the tokenizer has to give them
    named: dict[str, str]  # the text of each token that has a name, as `eos_token`
    extra: tuple[str, ...]  # the texts of more special tokens
    flags: dict[str, dict[str, bool]]  # how a token is found in a text

    @classmethod
    def of(cls, read: Reader, error: type[MoePackError]) -> "SpecialTokens":
        """Reads the files. special_tokens_map.json and added_tokens.json count unless the config lists tokens.

        Raises:  `error` if a token has no text, or its number is none.
        """
        config = read(CONFIG_FILE)
        extra = config.get(_EXTRA) or config.get(_OLD_EXTRA) or []
        tokens = _Tokens(error)
        if _LISTED in config:
            entries = config[_LISTED]
            if not isinstance(entries, dict):
                raise error(f"{CONFIG_FILE}: {_LISTED} is {_short(entries)}, expected an object of tokens by number")
            for number, entry in entries.items():
                tokens.add(CONFIG_FILE, number, entry)
        else:
            mapped = read(_MAP_FILE)
            extra = _joined(extra, mapped.get(_EXTRA) or ([] if extra else mapped.get(_OLD_EXTRA)))
            config = config | mapped
        named = {key: config[key] for key in (*_NAMES, *config) if key in config and _is_name(key, config[key])}
        if isinstance(extra, dict):  # more tokens with names
            named, extra = named | extra, []
        if not isinstance(extra, list):
            raise error(f"{CONFIG_FILE}: {_EXTRA} is {_short(extra)}, expected a list of tokens")
        names = {key: tokens.text(CONFIG_FILE, key, value, special=True) for key, value in named.items()}
        more = tuple(tokens.text(CONFIG_FILE, _EXTRA, value, special=True) for value in extra)
        if _LISTED not in config:
            for text, number in read(_ADDED_FILE).items():
                is_special = text in names.values() or text in more
                tokens.add(_ADDED_FILE, number, {"content": text, "special": is_special, "normalized": not is_special})
        return cls(tokens.listed, {key: text for key, text in names.items() if text}, more, tokens.flags)


class _Tokens:
    """Collects tokens with their numbers and flags; where two files name a token, the flags of the list count."""

    def __init__(self, error: type[MoePackError]) -> None:
        self.listed: dict[int, str] = {}
        self.flags: dict[str, dict[str, bool]] = {}
        self._error = error

    def add(self, file: str, number: object, entry: object) -> None:
        """Adds a token that has a number."""
        text = number if isinstance(number, str) else str(number)
        if isinstance(number, bool) or re.fullmatch(r"\d{1,9}", text, re.ASCII) is None:
            raise self._error(f"{file}: a token has the number {_short(number)}, expected a whole number from 0")
        if not isinstance(entry, dict):
            raise self._error(f"{file}: token {text} is {_short(entry)}, expected an object with its text, `content`")
        self.listed[int(text)] = self.text(file, f"token {text}", entry, special=False)

    def text(self, file: str, place: str, value: object, special: bool) -> str:
        """Returns the text of a token that is a text, or an object with flags; notes new flags."""
        entry = {"content": value} if isinstance(value, str) else value
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(text, str):
            raise self._error(f"{file}: {place} is {_short(value)}, expected a text or an object with a text `content`")
        flags = {name: entry[name] for name in _FLAGS if name in entry}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise self._error(f"{file}: {place}: {', '.join(flags)} have to be true or false")
        if isinstance(value, dict) or text not in self.flags:
            self.flags.setdefault(text, flags | ({"special": True} if special else {}))
        return text


def read_tokenizer(
    raw: bytes, tokens: SpecialTokens, vocab_size: int | None, error: type[MoePackError]
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Returns the tokenizer of tokenizer.json with the tokens of the files next to it, and those that got no number.

    Sentinels are plain tokens, so that text is not stripped of them: models trained to fill spans name these by them.
    Source: T5 (1910.10683), section 3.1.4.
    Args:    vocab_size: number of tokens that the model has a row for; a token without a row gets no number. None: not
             known.
    Raises:  `error` if the library cannot read it, or gives a token another number than the files say.
    """
    try:
        tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        added, expected, rowless = _to_add(tokenizer, tokens, vocab_size)
        tokenizer.add_tokens(added)
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # a panic of the library is no Exception
        raise error(f"{TOKENIZER_FILE}: the tokenizers library cannot read it ({first_line(fault)})") from fault
    for text, number in expected.items():
        found = tokenizer.token_to_id(text)
        if found != number:
            raise error(
                f"{CONFIG_FILE}: token {text!r} has number {number}, but the next free number of {TOKENIZER_FILE} is "
                f"{found}; create {TOKENIZER_FILE} again with transformers: "
                "AutoTokenizer.from_pretrained(IN).save_pretrained(OUT)"
            )
    return tokenizer, tuple(rowless)


def _to_add(
    tokenizer: Tokenizer, tokens: SpecialTokens, vocab_size: int | None
) -> tuple[list[AddedToken], dict[str, int], list[str]]:
    """Returns tokens to add, or to give other flags; the numbers that files say of new ones; new ones without a row."""
    numbers: dict[str, int | None] = {text: number for number, text in sorted(tokens.listed.items())}
    named = dict.fromkeys((*tokens.named.values(), *tokens.extra))
    numbers = {text: number for text, number in (numbers | named | numbers).items() if text}
    added = list[AddedToken]()
    for known in tokenizer.get_added_tokens_decoder().values():
        if known.special and _SENTINEL.fullmatch(known.content):
            known.special = False
            added.append(known)
    # The number that the library gives the next token that is added.
    number = max(tokenizer.get_added_tokens_decoder(), default=-1) + 1
    number = max(number, tokenizer.get_vocab_size(with_added_tokens=False))
    expected, rowless = dict[str, int](), list[str]()
    for text, listed in numbers.items():
        if tokenizer.token_to_id(text) is None:
            if vocab_size is not None and number >= vocab_size:
                rowless.append(text)
                continue
            number += 1
            if listed is not None:
                expected[text] = listed
        flags = tokens.flags[text] | ({"special": True} if text in named else {})
        added.append(AddedToken(text, **flags | ({"special": False} if _SENTINEL.fullmatch(text) else {})))
    return added, expected, rowless


def end_tokens(
    configs: Iterable[tuple[str, Mapping[str, Any]]], tokenizer: Tokenizer, error: type[MoePackError]
) -> list[int]:
    """Returns `eos_token_id` of the first config that has one: a token or a list of tokens, by number or by text.

    Args:    configs: the values of each, with the name of its file.
    Raises:  `error` if it is something else, or a text that is no token.
    """
    for name, values in configs:
        value = values.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        numbers = [tokenizer.token_to_id(each) if isinstance(each, str) else each for each in found]
        known = [number for number in numbers if type(number) is int]
        if len(known) < len(found):
            raise error(
                f"{name}: eos_token_id is {_short(value)}, expected a token of the tokenizer, by number or by text, or "
                "a list of them"
            )
        if known:
            return known
    return []


def read_templates(files: TextFiles) -> dict[str, str]:
    """Returns the chat templates by name: of chat_template.jinja (`default`), else of tokenizer_config.json.

    `default` is for conversations, and `tool_use` for those with tools.
    Raises:  PackError, or CheckpointError for a checkpoint, if they are something else than texts.
    """
    templates = chat_templates(read_values(files, CONFIG_FILE), error_of(files))
    if files.has(TEMPLATE_FILE):
        templates = {"default": _file_text(files, TEMPLATE_FILE)}
    if files.has(_TOOL_TEMPLATE_FILE):
        templates["tool_use"] = _file_text(files, _TOOL_TEMPLATE_FILE)
    return templates


def _file_text(files: TextFiles, name: str) -> str:
    return files.read_file(name).tobytes().decode("utf-8", "replace")


def chat_templates(config: Mapping[str, Any], error: type[MoePackError]) -> dict[str, str]:
    """Returns the chat templates of tokenizer_config.json by name; a single text is `default`.

    Raises:  `error` if they are something else.
    """
    found = config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for each in found.items() for text in each):
        raise error(
            f"{CONFIG_FILE}: chat_template is {_short(config['chat_template'])}, expected a text, or an object or "
            "a list of texts with their names"
        )
    return dict(found)


def first_line(fault: BaseException) -> str:
    """Returns the first line of a fault's text, shortened."""
    lines = str(fault).splitlines()
    return lines[0][:200] if lines else type(fault).__name__


def _is_name(key: str, value: object) -> bool:
    return (key in _NAMES and value is not None) or (key.endswith("_token") and isinstance(value, str | dict))


def _joined(extra: Any, more: Any) -> Any:
    if isinstance(extra, list) and isinstance(more, list):
        return [*extra, *(token for token in more if token not in extra)]
    return more or extra


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
