"""Conversations as text, in the chat template of a pack or a checkpoint.

Source:  the conventions of transformers' templates (`apply_chat_template`): names of variables, choice among several
         templates, and how an unfinished last message is continued.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Protocol

from moe_pack.formats import RunError
from moe_pack.formats.families import text_files
from moe_pack.runtime import helper

# A loop over a message's content, as `for part in message['content']`.
_READS_PARTS = re.compile(r"""\{%-?\s*for\s+\w+\s+in\s+(?:\w+\.|\w+\[['"])?content\b""")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_END_MARK = "END_OF_THE_LAST_MESSAGE "  # the space shows whether the template keeps spaces


class ChatTemplate:
    """A model's chat template: it writes a conversation as text, with the special tokens as text.

    A message is an object of `role`, `content` and whatever else the template reads. The template runs in jinja2's
    sandbox in a helper process with limits (`helper.py`). It is compiled when it is first used.

    Args:    tool_template: the template for conversations with tools; None uses `template` for them too.
    """

    def __init__(
        self, template: str, bos_token: str = "", eos_token: str = "", tool_template: str | None = None
    ) -> None:
        self._source = template
        self._tool_source = template if tool_template is None else tool_template
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._takes_objects: dict[str, bool] = {}

    @classmethod
    def of(cls, files: text_files.TextFiles) -> "ChatTemplate | None":
        """Returns the template in a model's files; None if there is none."""
        return cls.among(
            text_files.read_templates(files),
            text_files.SpecialTokens.of(partial(text_files.read_values, files), text_files.error_of(files)).named,
        )

    @classmethod
    def among(cls, templates: Mapping[str, str], named_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """Returns the template among these of `read_templates`, with special tokens by name; None without any."""
        if "default" not in templates:
            return None
        bos_token, eos_token = (named_tokens.get(name, "") for name in ("bos_token", "eos_token"))
        return cls(templates["default"], bos_token, eos_token, templates.get("tool_use"))

    def check(self) -> None:
        """Raises RunError if one of the templates cannot be compiled."""
        for source in {self._source, self._tool_source}:
            try:
                helper.HELPER.compile(source)
            except helper.HelperError as fault:
                raise RunError(f"the model's chat template has an error ({fault})") from fault

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
        source = self.source(tools is not None)
        prepared = [self._prepared(message, source) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise RunError("the last message is continued and an answer begun; ask for one of them")
            _mark_end(prepared)
        names = {"messages": prepared, "tools": tools, "documents": documents}
        try:
            text = self._run(source, {**self._tokens, **(extra or {}), **names}, add_generation_prompt, now)
        except helper.HelperError as fault:
            raise RunError(f"the model's chat template failed ({fault})") from fault
        return _cut_at_mark(text) if continue_final_message else text

    def _run(
        self, source: str, names: Mapping[str, object], add_generation_prompt: bool, now: datetime | None = None
    ) -> str:
        return helper.HELPER.render(source, {**names, "add_generation_prompt": add_generation_prompt}, now)

    def _prepared(self, message: Mapping[str, object], source: str) -> dict[str, object]:
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
        """Returns whether the template writes arguments that are an object, or writes them in neither form."""
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
            except helper.HelperError:
                written.append(None)
        as_object, as_text = written
        if as_object is not None and "needle" in as_object and "'needle'" not in as_object:
            return True
        return as_text is None or "needle" not in as_text


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
    """Puts a mark behind the content of the last message, so that the rendered text can be cut there."""
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


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as text and as tokens, ready for the model's answer."""

    text: str
    ids: tuple[int, ...]
    stable_tokens: int | None = None  # with so many the conversation's next turn probably begins; None: with all


class Encoder(Protocol):
    """Turns text into tokens, as `Text` does."""

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text."""


def prompt_of(encoder: Encoder, render: Callable[[bool], str], continues: bool = False) -> ChatPrompt:
    """Returns the prompt of a conversation, whose text `render` returns with the beginning of an answer or without."""

    def encoded(words: str) -> tuple[int, ...]:
        return tuple(encoder.encode(words, special_tokens=False))

    text = render(not continues)
    ids = encoded(text)
    if continues:
        return ChatPrompt(text, ids)
    with suppress(RunError):  # the next turn will not have what begins this answer
        before = render(False)
        if not text.startswith(before):
            return ChatPrompt(text, ids)
        # The beginning of an answer is short, and mostly begins with a special token, before which a text can be cut.
        begun = encoded(text[len(before) :])
        if begun and ids[-len(begun) :] == begun:
            return ChatPrompt(text, ids, len(ids) - len(begun))
        kept = encoded(before)
        if kept and ids[: len(kept)] == kept:
            return ChatPrompt(text, ids, len(kept))
    return ChatPrompt(text, ids)


def chat_prompt(files: text_files.TextFiles, message: str) -> str:
    """Returns the prompt that asks the model to answer `message`; raises RunError without a working template."""
    template = ChatTemplate.of(files)
    if template is None:
        raise RunError("--chat needs a chat template, and this pack has none; remove --chat")
    return template.render([{"role": "user", "content": message}], add_generation_prompt=True)
