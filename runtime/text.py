"""Text to tokens and back, with the tokenizer of a pack or a checkpoint.

The tokenizers library may fail on any text, in any way: whatever it raises, a panic too, is one of our errors here, and
a text that takes it very long is given up.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from tokenizers import Tokenizer

from moe_pack import formats
from moe_pack.formats.families import text_files

if TYPE_CHECKING:
    from moe_pack.runtime.templates import ChatTemplate

T = TypeVar("T")

# How long the library may take for a text: far more than any tokenizer that is published.
_LEAST_S, _S_PER_CHARACTER = 60.0, 1e-4
_SHRINKS = 4  # NFKC makes one byte of up to 4, and composes up to 9 to 3
_BYTE = re.compile(r"<0x..>")
_KEPT_TOKENS = 8  # before an answer's next piece; what a decoder does to a token depends on its neighbors
# Files of which transformers makes a tokenizer.json.
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", text_files.CONFIG_FILE)
_MADE = "create it with transformers: AutoTokenizer.from_pretrained(IN).save_pretrained(OUT)"
_TRIED_TEXTS = (
    *(chr(code) * 100 + "!" for code in range(0x20, 0x7F)),
    "It's 1984: the clocks weren't striking.\n\n\tGrüße, 東京 한국어 Привет مرحبا 🙂👩\u200d💻 \ufffd\u0301\u200b\r\n",
)


class Text:
    """A tokenizer, with the tokens that end a text. The caller may close `files` afterwards.

    Raises:  RunError if there is no tokenizer; PackError, or CheckpointError for a folder, if it is damaged.
    """

    def __init__(self, files: text_files.TextFiles) -> None:
        if not files.has(text_files.TOKENIZER_FILE):
            raise formats.RunError(_no_tokenizer(files))
        error, read = text_files.error_of(files), partial(text_files.read_values, files)
        config = read("config.json")
        self._vocab_size = text_files.text_config(config).get("vocab_size")
        special = text_files.SpecialTokens.of(read, error)
        raw, num_rows = files.read_file(text_files.TOKENIZER_FILE).tobytes(), self._vocab_size
        # `rowless` are tokens that the files name, and for which the model has no row: they are no tokens here.
        self._tokenizer, self.rowless = text_files.read_tokenizer(
            raw, special, num_rows if type(num_rows) is int else None, error
        )
        # A tokenizer.json may have length limits of its training, which would cut or pad a text silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        generation = ("generation_config.json", read("generation_config.json"))
        configs = (generation, ("config.json", config), ("config.json", text_files.text_config(config)))
        self.end_ids = frozenset(text_files.end_tokens(configs, self._tokenizer, error))
        self.named_tokens = special.named  # texts of tokens by their parts, as `bos_token`
        # Models trained further to chat often name their end of turn as the tokenizer's end of sequence alone.
        end = self._token(special.named.get("eos_token"))
        self.answer_end_ids = self.end_ids | (frozenset() if end is None else frozenset([end]))
        self._templates = text_files.read_templates(files)
        # DeepSeek's tokenizers say in the config alone that a text has a beginning. Source: transformers 4,
        # LlamaTokenizerFast; llama.cpp's converter reads the same key. transformers 5 does not.
        begins = read(text_files.CONFIG_FILE).get("add_bos_token") is True
        self._beginning = self._token(special.named.get("bos_token")) if begins else None
        # The name of a token has at least the bytes of its text, also where its characters stand for bytes.
        longest = max((len(name.encode()) for name in self._tokenizer.get_vocab()), default=1)
        # A text with so many bytes for each of some tokens has more tokens than these.
        self.most_bytes_per_token = longest * (1 if self._tokenizer.normalizer is None else _SHRINKS)
        self._special_ids = frozenset(
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The chat template; None if there is none."""
        if not self._templates:
            return None
        from moe_pack.runtime.templates import ChatTemplate

        return ChatTemplate.among(self._templates, self.named_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the model: `vocab_size` of config.json; raises RunError if it does not say it."""
        size = self._vocab_size
        if type(size) is not int or size < 1:
            raise formats.RunError(f"config.json: vocab_size is {size!r}, expected a whole number from 1")
        return size

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text, if asked with special ones around it; raises RunError if the library fails."""
        # `encode` would keep Python's lock, and nothing could end it.
        call = partial(self._tokenizer.encode_batch, [text], add_special_tokens=special_tokens)
        ids: list[int] = within(_LEAST_S + _S_PER_CHARACTER * len(text), call)[0].ids
        if special_tokens and self._beginning is not None and ids[:1] != [self._beginning]:
            return [self._beginning, *ids]
        return ids

    def tokenizer_json(self) -> str:
        """Returns the tokenizer in the format of tokenizer.json, as this object uses it."""
        written: str = self._tokenizer.to_str()
        return written

    def stream(self, prompt_ids: list[int], keeps_special: bool = False) -> "TextStream":
        """Returns a stream of the text after these tokens; without tokens, of a text from its beginning.

        Args:    keeps_special: write special tokens too, except those that end an answer. The marks of tool calls and
                 reasoning are special tokens in many tokenizers.
        """
        if keeps_special:
            return TextStream(self._tokenizer, prompt_ids, frozenset(), self.answer_end_ids)
        return TextStream(self._tokenizer, prompt_ids, self._special_ids, self._special_ids)

    def names_from(self, number: int, with_added: bool) -> list[str]:
        """Returns the tokens with this number or a larger one, by number; `with_added`: also those added to a model."""
        found = self._tokenizer.get_vocab(with_added_tokens=with_added).items()
        return [text for text, _ in sorted((each for each in found if each[1] >= number), key=lambda each: each[1])]

    def _token(self, text: str | None) -> int | None:
        number: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return number


class TextStream:
    """Turns tokens into text as they come. The pieces make the text of all tokens, without the prompt's.

    A piece waits for the tokens after it while these can change it: the first bytes of a character for the rest of it,
    and byte tokens for the end of their row, because one wrong byte makes all of them replacement characters.

    Args:    prompt_silent_ids, silent_ids: tokens of the prompt, and after it, that are not written.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], prompt_silent_ids: frozenset[int], silent_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._silent_ids = tokenizer, silent_ids
        self._before = self._end_of(prompt_ids, prompt_silent_ids)  # tokens that are written already
        self._waiting: list[int] = []
        self._written = self._decode(self._before)

    def push(self, token: int) -> str:
        """Returns the text that this token completes; it may be empty."""
        name = None if token in self._silent_ids else self._name(token)
        if name is None:
            return ""
        self._waiting.append(token)
        if _BYTE.fullmatch(name):
            return ""
        whole = self._decode(self._before + self._waiting)
        if whole == self._written or whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        piece = _after(self._written, whole)
        self._before = (self._before + self._waiting)[-_KEPT_TOKENS:]
        self._waiting = []
        self._written = self._decode(self._before)
        return piece

    def finish(self) -> str:
        """Returns the rest after the last token: replacement characters for bytes that make no whole character."""
        return _after(self._written, self._decode(self._before + self._waiting))

    def _name(self, token: int) -> str | None:
        """Returns a token's name; None for a number without a token, as models may have more rows."""
        name: str | None = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        return name

    def _end_of(self, prompt_ids: list[int], silent_ids: frozenset[int]) -> list[int]:
        """Returns the last written tokens of a prompt, from the beginning of a row of byte tokens on."""
        found = list[int]()
        for token in reversed(prompt_ids):
            name = None if token in silent_ids else self._name(token)
            if name is not None and len(found) >= _KEPT_TOKENS and not _BYTE.fullmatch(name):
                break
            if name is not None:
                found.append(token)
        return found[::-1]

    def _decode(self, ids: list[int]) -> str:
        return _asked(lambda: str(self._tokenizer.decode(ids, skip_special_tokens=False)))


def check_text(files: text_files.TextFiles, vocab_size: int) -> list[str]:
    """Checks before a conversion that its pack will read text; returns notes for users on what it will not do.

    Args:    vocab_size: number of tokens that the model has a row for.
    Raises:  CheckpointError, RunError if tokenizer or chat template are there, and moe-run could not use them.
    """
    if not files.has(text_files.TOKENIZER_FILE):
        other = next((name for name in _OTHER_TOKENIZERS if files.has(name)), None)
        if other is None:
            return [
                f"{files.folder}: has no tokenizer, so the pack cannot read text, and moe-run can only measure its "
                f"speed (--bench). To mend that, download tokenizer.json, or {_MADE}"
            ]
        message = f"{files.folder}: has {other}, but no tokenizer.json, which moe-run needs; {_MADE}"
        raise formats.CheckpointError(message)
    from moe_pack.runtime.helper import HELPER, HelperError
    from moe_pack.runtime.templates import chat_prompt

    raw = files.read_file(text_files.TOKENIZER_FILE).tobytes().decode("utf-8", "replace")
    try:
        HELPER.try_tokenizer(raw, _TRIED_TEXTS)
    except HelperError as fault:
        raise formats.CheckpointError(f"tokenizer.json: the tokenizers library cannot use it ({fault})") from fault
    text = Text(files)
    notes = _row_notes(text, files, vocab_size)
    if text.chat_template is not None:
        text.chat_template.check()
        try:
            chat_prompt(files, "Hello")
        except formats.RunError as fault:
            notes.append(f"{fault}, for a message of the user alone; a chat with this model will fail like this")
    return notes


def _row_notes(text: Text, files: text_files.TextFiles, vocab_size: int) -> list[str]:
    """Returns notes on tokens for which the model has no row.

    Raises:  CheckpointError if one of them begins or ends texts, or is one of those that texts consist of.
    """
    if words := text.names_from(vocab_size, with_added=False):
        raise formats.CheckpointError(
            f"tokenizer.json: token {words[0]!r} and {len(words) - 1} more have no row in the model, which has "
            f"{vocab_size} (vocab_size of config.json); use the tokenizer of this model"
        )
    rowless = [*text.names_from(vocab_size, with_added=True), *text.rowless]
    named = text_files.SpecialTokens.of(partial(text_files.read_values, files), text_files.error_of(files)).named
    wrong = [f"{name} {named[name]!r}" for name in ("bos_token", "eos_token") if named.get(name) in rowless]
    wrong += [f"eos_token_id {number}" for number in sorted(text.end_ids) if not 0 <= number < vocab_size]
    if wrong:
        raise formats.CheckpointError(
            f"{files.folder}: {wrong[0]} is no token of this model, which has {vocab_size} rows (vocab_size of "
            "config.json); name the right token, or use the tokenizer of this model"
        )
    if not rowless:
        return []
    return [
        f"the tokenizer has {len(rowless)} tokens for which the model has no row, such as {rowless[0]!r}; texts with "
        "them cannot be read"
    ]


def _no_tokenizer(files: text_files.TextFiles) -> str:
    if isinstance(files, formats.Pack) and files.is_synthetic:
        return (
            f"{files.folder}: is a synthetic pack with random weights and no tokenizer, so it has no text; "
            "moe-run --bench measures its speed"
        )
    if isinstance(files, formats.Pack):
        return f"{files.folder}: has no tokenizer.json, so it cannot read a prompt; convert a checkpoint that has one"
    return f"{files.folder}: has no tokenizer.json, so it cannot read text; download it, or {_MADE}"


def _after(before: str, whole: str) -> str:
    """Returns the text after `before`; if later bytes made the end of `before` another one, from there on."""
    if whole.startswith(before):
        return whole[len(before) :]
    return whole[next((i for i, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new), len(whole)) :]


def _asked(call: Callable[[], T]) -> T:
    """Returns the result of a call of the tokenizers library; raises RunError if it fails."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # a panic of the library is no Exception
        raise formats.RunError(
            f"tokenizer.json: the tokenizers library fails on this text ({text_files.first_line(fault)})"
        ) from fault


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns the result of a call of the library in a thread left alone after some seconds, or raises RunError."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as fault:  # the caller, who waits, raises it again
            answer.set_exception(fault)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    try:
        return _asked(lambda: answer.result(seconds))
    except formats.RunError as fault:
        if answer.done():
            raise
        raise formats.RunError(
            f"tokenizer.json: the tokenizers library takes longer than {seconds:.0f} seconds for this text; give "
            "another text, or mend the tokenizer"
        ) from fault
