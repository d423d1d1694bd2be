"""The small files of a checkpoint's folder (tokenizer, configs), read whole; never its weights.

Text to tokens and back, with the tokenizer of a pack or of a checkpoint's folder.

The pack's own chat template, rendered in jinja2's sandbox. Source: the conventions of transformers' templates.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from moe_pack.formats import CheckpointError, Pack, PackError, RangeReader, RunError, parse
from moe_pack.formats.errors import MoePackError

_MAX_FILE_BYTES = 64 << 20  # the largest published tokenizer.json has 33 MB


class FolderFiles:
    """A folder's files by name, as `Text` asks for them. Holds nothing open; a file is read anew each time.

    Raises:  CheckpointError if there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        self.folder = folder

    def has(self, name: str) -> bool:
        """Whether the folder has this file."""
        return (self.folder / name).exists()

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """All bytes of a file: u8, own memory.

        Raises:  CheckpointError if it is larger than such files are, or cannot be read.
        """
        with RangeReader(self.folder / name, CheckpointError) as reader:
            if reader.num_bytes > _MAX_FILE_BYTES:
                raise CheckpointError(f"{name}: {reader.num_bytes} bytes, at most {_MAX_FILE_BYTES}")
            return reader.read(0, reader.num_bytes)


_SENTINEL = re.compile(r"<extra_id_\d+>")


class TextFiles(Protocol):
    """What holds a tokenizer's files: a `Pack`, or the `FolderFiles` of a checkpoint."""

    folder: Path

    def has(self, name: str) -> bool:
        """Whether it has this file."""
        ...

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """All bytes of a file."""
        ...


class Text:
    """A tokenizer, and its tokens that end a text. Keeps nothing of `files`, which may be closed.

    Raises:  RunError if there is no tokenizer; PackError, or CheckpointError for a folder, if it is damaged.
    """

    def __init__(self, files: TextFiles) -> None:
        if not files.has("tokenizer.json"):
            raise RunError(_no_tokenizer(files))
        raw = files.read_file("tokenizer.json").tobytes()
        try:
            self._tokenizer = Tokenizer.from_str(_with_sentinels(raw.decode("utf-8")))
        except Exception as fault:  # tokenizers raises nothing narrower
            raise _error(files)(f"tokenizer.json: not one that tokenizers can read ({fault})") from fault
        # A tokenizer.json may hold its maker's length limits; they would cut or pad a text without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_ids = _end_ids(files)
        self._beginning = _beginning(files, self._tokenizer)
        self._vocab_size = _json(files, "config.json").get("vocab_size")

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has a row for: the `vocab_size` of config.json, not the tokenizer's own count.

        Raises:  RunError if config.json does not say.
        """
        found = self._vocab_size
        if type(found) is not int or found < 1:
            raise RunError(f"config.json: vocab_size is {found!r}, expected a whole number from 1")
        return found

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The tokens of a text, with those the tokenizer puts around it (such as a beginning) if asked."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        if special_tokens and self._beginning is not None and ids[:1] != [self._beginning]:
            return [self._beginning, *ids]
        return ids

    def stream(self, prompt_ids: list[int]) -> "TextStream":
        """A stream of the text that follows the prompt; of a text of its own, after no tokens."""
        return TextStream(self._tokenizer, prompt_ids)


class TextStream:
    """Turns tokens into text as they come; a character that is not whole yet waits for the rest of its bytes."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []
        self._written = ""
        # The prompt's last tokens are known to the decoder, so that a leading space is kept where it belongs.
        self._stream = DecodeStream(ids=prompt_ids, skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._written += piece
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come: bytes that make no whole character, as replacement characters."""
        before = self._tokenizer.decode(self._prompt_ids, skip_special_tokens=True)
        whole = self._tokenizer.decode(self._prompt_ids + self._ids, skip_special_tokens=True)
        if not whole.startswith(before + self._written):
            return ""
        return str(whole[len(before) + len(self._written) :])


def _with_sentinels(raw: str) -> str:
    """A tokenizer.json in which sentinels are plain tokens, so that text is not stripped of them.

    Models trained to fill spans name these by them: an answer without them says nothing.
    Source: T5 (1910.10683), section 3.1.4.
    """
    if _SENTINEL.search(raw) is None:
        return raw
    values = json.loads(raw)
    for token in values.get("added_tokens", ()):
        if _SENTINEL.fullmatch(token["content"]):
            token["special"] = False
    return json.dumps(values)


def _error(files: TextFiles) -> type[MoePackError]:
    return PackError if isinstance(files, Pack) else CheckpointError


def _no_tokenizer(files: TextFiles) -> str:
    if isinstance(files, Pack) and files.is_synthetic:
        return (
            f"{files.folder}: is a synthetic pack: its weights are random, so it has no tokenizer and no text; "
            "moe-run --bench measures how fast it runs"
        )
    if isinstance(files, Pack):
        return f"{files.folder}: has no tokenizer.json, so it cannot read a prompt; convert it with one"
    return (
        f"{files.folder}: has no tokenizer.json, so it cannot read text; download it, or make it with transformers: "
        "AutoTokenizer.from_pretrained(IN).save_pretrained(OUT)"
    )


def _json(files: TextFiles, name: str) -> dict[str, Any]:
    """A JSON object's values; none if the file is missing or holds something else."""
    values: Any = parse(files.read_file(name).tobytes(), name, _error(files)) if files.has(name) else {}
    return values if isinstance(values, dict) else {}


def _beginning(files: TextFiles, tokenizer: Tokenizer) -> int | None:
    """The token that begins every text, where tokenizer_config.json alone says so (DeepSeek's do, in `add_bos_token`).

    Source: transformers 4, LlamaTokenizerFast; llama.cpp's converter reads the same key. transformers 5 does not.
    """
    values = _json(files, "tokenizer_config.json")
    if values.get("add_bos_token") is not True:
        return None
    token = values.get("bos_token")
    content = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return found


def _end_ids(files: TextFiles) -> frozenset[int]:
    """`eos_token_id` of generation_config.json, else of config.json: a number, a list, or nothing."""
    for name in ("generation_config.json", "config.json"):
        found = _json(files, name).get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token) is int for token in ids):
            raise _error(files)(f"{name}: eos_token_id is {found!r}, expected a token or a list of tokens")
        if ids:
            return frozenset(ids)
    return frozenset()


def chat_prompt(pack: Pack, message: str) -> str:
    """The text that asks the model to answer `message`, special tokens written out.

    Raises:  RunError if the pack has no template, jinja2 is not installed, or the template fails.
    """
    config = _tokenizer_config(pack)
    template = _template(pack, config)
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as fault:
        raise RunError("--chat: the jinja2 package is not installed; pip install 'moe-pack[chat]'") from fault

    def raise_exception(text: str) -> None:
        raise TemplateError(text)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # templates that say the date
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": message}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            bos_token=_token(config, "bos_token"),
            eos_token=_token(config, "eos_token"),
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError) as fault:
        raise RunError(f"--chat: the pack's template failed ({fault})") from fault


def _tokenizer_config(pack: Pack) -> dict[str, Any]:
    if not pack.has("tokenizer_config.json"):
        return {}
    values = parse(pack.read_file("tokenizer_config.json").tobytes(), "tokenizer_config.json", PackError)
    return values if isinstance(values, dict) else {}


def _template(pack: Pack, config: dict[str, Any]) -> str:
    if pack.has("chat_template.jinja"):
        return pack.read_file("chat_template.jinja").tobytes().decode("utf-8", "replace")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise RunError("--chat: this pack has no chat template (its model may not be one to chat with); leave it out")
    return found


def _token(config: dict[str, Any], key: str) -> str:
    found = config.get(key)
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else ""
