"""Text: to tokens and back with the tokenizer of a pack or a checkpoint, and conversations in its chat template.

The tokenizer's files are read whole; weights are not touched. A chat template runs in jinja2's sandbox. Source: the
conventions of transformers' templates (`apply_chat_template`): names of variables, choice among several templates, and
how an unfinished last message is continued.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from moe_pack.formats import CheckpointError, Pack, PackError, RunError, parse
from moe_pack.formats.errors import MoePackError
from moe_pack.formats.families import text_config

_SENTINEL = re.compile(r"<extra_id_\d+>")
_TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError)
# A loop over a message's content, as `for part in message['content']`.
_READS_PARTS = re.compile(r"""\{%-?\s*for\s+\w+\s+in\s+(?:\w+\.|\w+\[['"])?content\b""")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_END_MARK = "END_OF_THE_LAST_MESSAGE "  # the space shows whether the template keeps spaces


class TextFiles(Protocol):
    """A folder with a tokenizer's files: a `Pack`, or the files of a checkpoint."""

    folder: Path

    def has(self, name: str) -> bool:
        """Whether the folder has this file."""
        ...

    def read_file(self, name: str) -> NDArray[np.uint8]:
        """Reads a whole file: u8 [bytes]."""
        ...


class Text:
    """A tokenizer, with the tokens that end a text (`end_ids`), and the chat template, None if there is none.

    `answer_end_ids`: the tokens that end an answer in a chat: also the tokenizer's own end of sequence, because
    models trained further to chat often name their end of turn there alone. The caller may close `files` afterwards.

    Raises:  RunError if there is no tokenizer; PackError, or CheckpointError for a folder, if it is damaged.
    """

    def __init__(self, files: TextFiles) -> None:
        if not files.has("tokenizer.json"):
            raise RunError(_no_tokenizer(files))
        raw = files.read_file("tokenizer.json").tobytes()
        try:
            self._tokenizer = Tokenizer.from_str(_with_sentinels(raw.decode("utf-8")))
        except Exception as fault:  # tokenizers raises nothing narrower
            raise _error(files)(f"tokenizer.json: the tokenizers library cannot read it ({fault})") from fault
        # A tokenizer.json may have length limits of its training, which would cut or pad a text silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_ids = _end_ids(files)
        self.answer_end_ids = self.end_ids | _tokenizer_end_ids(files, self._tokenizer)
        self.chat_template = ChatTemplate.of(files)
        self._beginning = _beginning(files, self._tokenizer)
        self._vocab_size = text_config(_json(files, "config.json")).get("vocab_size")

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model has a row for: `vocab_size` of config.json, not the tokenizer's count.

        Raises:  RunError if config.json does not say it.
        """
        size = self._vocab_size
        if type(size) is not int or size < 1:
            raise RunError(f"config.json: vocab_size is {size!r}, expected a whole number from 1")
        return size

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text; with `special_tokens` also those that the tokenizer puts around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        if special_tokens and self._beginning is not None and ids[:1] != [self._beginning]:
            return [self._beginning, *ids]
        return ids

    def tokenizer_json(self) -> str:
        """Returns the tokenizer in the format of tokenizer.json, as this object uses it."""
        written: str = self._tokenizer.to_str()
        return written

    def stream(self, prompt_ids: list[int], keeps_special: bool = False) -> "TextStream":
        """Returns a stream of the text after these tokens; without tokens, of a text from its beginning.

        Args:    keeps_special: write special tokens too, but for those that end an answer. The marks of tool calls and
                 reasoning are special tokens in many tokenizers.
        """
        return TextStream(self._tokenizer, prompt_ids, self.answer_end_ids if keeps_special else None)


class TextStream:
    """Turns tokens into text as they come; the first bytes of a character wait for the rest of it.

    Args:    silent_ids: write all special tokens except these; None writes none.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], silent_ids: frozenset[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []
        self._written = ""
        self._silent_ids = silent_ids or frozenset()
        self._skips_special = silent_ids is None
        # The stream knows the prompt, because a leading space depends on the token before it.
        self._stream = DecodeStream(ids=prompt_ids, skip_special_tokens=self._skips_special)

    def push(self, token: int) -> str:
        """Returns the text that this token completes; it may be empty."""
        if token in self._silent_ids:
            return ""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._written += piece
        return piece

    def finish(self) -> str:
        """Returns the rest after the last token: replacement characters for bytes that make no whole character."""
        prompt = self._tokenizer.decode(self._prompt_ids, skip_special_tokens=self._skips_special)
        whole = self._tokenizer.decode(self._prompt_ids + self._ids, skip_special_tokens=self._skips_special)
        if not whole.startswith(prompt + self._written):
            return ""
        return str(whole[len(prompt) + len(self._written) :])


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
            f"{files.folder}: is a synthetic pack with random weights and no tokenizer, so it has no text; "
            "moe-run --bench measures its speed"
        )
    if isinstance(files, Pack):
        return f"{files.folder}: has no tokenizer.json, so it cannot read a prompt; convert a checkpoint that has one"
    return (
        f"{files.folder}: has no tokenizer.json, so it cannot read text; download it, or create it with transformers: "
        "AutoTokenizer.from_pretrained(IN).save_pretrained(OUT)"
    )


def _json(files: TextFiles, name: str) -> dict[str, Any]:
    """Returns the values of a JSON object; none if the file is missing or has no object."""
    values: Any = parse(files.read_file(name).tobytes(), name, _error(files)) if files.has(name) else {}
    return values if isinstance(values, dict) else {}


def _beginning(files: TextFiles, tokenizer: Tokenizer) -> int | None:
    """Returns the token that begins every text if only tokenizer_config.json says so, as DeepSeek's `add_bos_token`.

    Source: transformers 4, LlamaTokenizerFast; llama.cpp's converter reads the same key. transformers 5 does not.
    """
    values = _json(files, "tokenizer_config.json")
    if values.get("add_bos_token") is not True:
        return None
    content = _token_text(values, "bos_token")
    token: int | None = tokenizer.token_to_id(content) if content else None
    return token


def _end_ids(files: TextFiles) -> frozenset[int]:
    """Returns `eos_token_id` of generation_config.json, else of config.json: a token, a list of tokens, or none.

    In a multimodal config it may also be in the text model's object.
    """
    config = _json(files, "config.json")
    found = [("generation_config.json", _json(files, "generation_config.json"))]
    for name, values in (*found, ("config.json", config), ("config.json", text_config(config))):
        value = values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise _error(files)(f"{name}: eos_token_id is {value!r}, expected a token or a list of tokens")
        if ids:
            return frozenset(ids)
    return frozenset()


def _tokenizer_end_ids(files: TextFiles, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the token of `eos_token` in tokenizer_config.json; none if there is no such token."""
    content = _token_text(_json(files, "tokenizer_config.json"), "eos_token")
    token: int | None = tokenizer.token_to_id(content) if content else None
    return frozenset() if token is None else frozenset([token])


class ChatTemplate:
    """A model's chat template: it writes a conversation as text, with the special tokens as text.

    A message is an object of `role`, `content` and whatever else the template reads. The template runs in jinja2's
    sandbox, with the names that transformers gives. It is compiled when it is first used.

    Args:    tool_template: the template for conversations with tools; None uses `template` for them too.
    """

    def __init__(
        self, template: str, bos_token: str = "", eos_token: str = "", tool_template: str | None = None
    ) -> None:
        self._source = template
        self._tool_source = template if tool_template is None else tool_template
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._compiled: dict[str, Any] = {}
        self._takes_objects: dict[str, bool] = {}
        self._now: datetime | None = None

    @classmethod
    def of(cls, files: TextFiles) -> "ChatTemplate | None":
        """Returns the template of chat_template.jinja, else of tokenizer_config.json; None if there is none.

        Of several named templates it takes `default`, and `tool_use` for conversations with tools.
        """
        config = _json(files, "tokenizer_config.json")
        template = config.get("chat_template")
        tool_template = None
        if isinstance(template, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template, tool_template = named.get("default"), named.get("tool_use")
        if files.has("chat_template.jinja"):
            template, tool_template = _file_text(files, "chat_template.jinja"), None
        if files.has(_TOOL_TEMPLATE_FILE):
            tool_template = _file_text(files, _TOOL_TEMPLATE_FILE)
        if not isinstance(template, str):
            return None
        return cls(
            template,
            _token_text(config, "bos_token"),
            _token_text(config, "eos_token"),
            tool_template if isinstance(tool_template, str) else None,
        )

    def source(self, has_tools: bool = False) -> str:
        """Returns the template that renders conversations with tools, or those without, as it is written."""
        return self._tool_source if has_tools else self._source

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        now: datetime | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Returns a conversation as text.

        Parts of a message's content are joined by line breaks, unless the template reads parts itself. The arguments
        of tool calls become objects where the template can write objects, else text; clients send them as JSON text.
        Args:    add_generation_prompt: end with the beginning of the model's answer.   now: the time for templates
                 that write the date; None for this machine's.   tools: objects that describe functions, as OpenAI's
                 API has them.   documents: objects of `title` and `text`, for templates that quote them.   extra: more
                 variables of the template, such as `enable_thinking`.   continue_final_message: end right after the
                 content of the last message, so that the model continues it.
        Raises:  RunError if the template has an error or refuses the conversation, if a part of the content is not
                 text, or if there is no last message to continue.
        """
        self._now = now
        source = self.source(tools is not None)
        prepared = [self._prepared(message, source) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise RunError("the last message is continued and an answer begun; ask for one of them")
            _mark_end(prepared)
        names = {"messages": prepared, "tools": tools, "documents": documents}
        try:
            text = self._run(source, {**self._tokens, **(extra or {}), **names}, add_generation_prompt)
        except _TEMPLATE_FAULTS as fault:
            raise RunError(f"the model's chat template failed ({fault})") from fault
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, source: str, names: Mapping[str, object], add_generation_prompt: bool) -> str:
        """Returns what a template writes. All faults that jinja2 raises are among `_TEMPLATE_FAULTS`."""
        from jinja2 import TemplateError

        try:
            if source not in self._compiled:
                self._compiled[source] = self._environment().from_string(source)
            text: str = self._compiled[source].render(**{**names, "add_generation_prompt": add_generation_prompt})
        except TemplateError as fault:
            raise ValueError(fault) from fault
        return text

    def _prepared(self, message: Mapping[str, object], source: str) -> dict[str, object]:
        """Returns a message in the form that the template takes; a message that needs no change stays as it is."""
        prepared = dict(message)
        thought = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
        if thought is not None:  # templates read it under different names
            prepared |= {"reasoning_content": thought, "thinking": message.get("thinking", thought)}
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list) and not _READS_PARTS.search(source):
            prepared["content"] = "\n".join(map(_part_text, content))
        if isinstance(calls, list) and calls:
            if source not in self._takes_objects:
                self._takes_objects[source] = self._writes_objects(source)
            prepared["tool_calls"] = [_with_arguments(call, self._takes_objects[source]) for call in calls]
        return prepared

    def _writes_objects(self, source: str) -> bool:
        """Whether the template can write arguments that are an object: it fails, or writes Python's quotes, if not.

        A template that can write neither, perhaps because it refuses the example for another reason, gets objects.
        """
        written: list[str | None] = []
        for arguments in ({"needle": "value"}, '{"needle": "value"}'):
            call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look", "arguments": arguments}}
            messages = [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            names = {**self._tokens, "messages": messages, "tools": None, "documents": None}
            try:
                written.append(self._run(source, names, add_generation_prompt=False))
            except _TEMPLATE_FAULTS:
                written.append(None)
        as_object, as_text = written
        if as_object is not None and "needle" in as_object and "'needle'" not in as_object:
            return True
        return as_text is None or "needle" not in as_text

    def _environment(self) -> Any:
        """Returns jinja2's sandbox as transformers prepares it for templates."""
        from jinja2 import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`, which marks the answers for training and changes no text."""

            tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(text: str) -> None:
            raise TemplateError(text)

        def tojson(
            value: object,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: Any = None,
            sort_keys: bool = False,
        ) -> str:  # jinja2's own escapes for HTML
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: (self._now or datetime.now()).strftime(form)
        return environment


def _part_text(part: object) -> str:
    """Returns the text of a part of a message's content, in the forms of OpenAI's and Anthropic's API."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RunError(f"a message has a part of type {kind!r}, and the model's chat template takes text; remove it")
    return text


def _with_arguments(call: object, as_object: bool) -> object:
    """Returns a tool call with its arguments as an object or as JSON text; text that is no object stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if as_object and isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return call
        arguments = found if isinstance(found, dict) else arguments
    elif not as_object and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(messages: list[dict[str, object]]) -> None:
    """Puts a mark behind the content of the last message, so that the rendered text can be cut there.

    Raises:  RunError if that message has no text.
    """
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_MARK
        return
    parts = [dict(part) if isinstance(part, dict) else part for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END_MARK
            messages[-1]["content"] = parts
            return
    raise RunError("the last message has no text to continue; give it content, or begin a new answer")


def _cut_at_mark(text: str) -> str:
    """Returns the text before the mark; if the template strips contents, also without the spaces before it."""
    at = text.rfind(_END_MARK.strip())
    if at < 0:
        raise RunError("the model's chat template does not write the last message, so it cannot be continued")
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _file_text(files: TextFiles, name: str) -> str:
    return files.read_file(name).tobytes().decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as text and as tokens, ready for the model's answer.

    `stable_tokens`: with so many of its tokens the conversation's next turn probably begins; None: with all.
    """

    text: str
    ids: tuple[int, ...]
    stable_tokens: int | None = None


class Encoder(Protocol):
    """Turns text into tokens, as `Text` does."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text."""
        ...


def prompt_of(encoder: Encoder, render: Callable[[bool], str], continues: bool = False) -> ChatPrompt:
    """Returns the prompt of a conversation.

    Args:    render: returns its text, with what begins an answer or without.   continues: whether the answer continues
             the last message.
    Raises:  RunError as `render` does.
    """

    def encoded(words: str) -> tuple[int, ...]:
        return tuple(encoder.encode(words, special_tokens=False))

    text = render(not continues)
    ids = encoded(text)
    if continues:
        return ChatPrompt(text, ids)
    with suppress(RunError):  # the next turn will not have what begins this answer
        before = render(False)
        kept = encoded(before) if text.startswith(before) else ()
        if kept and ids[: len(kept)] == kept:
            return ChatPrompt(text, ids, len(kept))
    return ChatPrompt(text, ids)


def chat_prompt(files: TextFiles, message: str) -> str:
    """Returns the prompt that asks the model to answer `message`, with special tokens as text.

    Raises:  RunError if there is no chat template, or it fails.
    """
    template = ChatTemplate.of(files)
    if template is None:
        raise RunError("--chat needs a chat template, and this pack has none; remove --chat")
    return template.render([{"role": "user", "content": message}], add_generation_prompt=True)


def _token_text(config: dict[str, Any], key: str) -> str:
    """Returns the text of a special token in tokenizer_config.json, where it is a text or an object with `content`."""
    token = config.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
