"""Parsers of answers: pieces of text become deltas of content, reasoning and tool calls.

A mark may be cut anywhere between two pieces: a possible beginning of a mark waits for the rest of it. Every decision
depends on the whole text alone and not on the pieces. Marks, and the spaces around them, are no part of any delta.
Text between the marks of a call that is no call becomes content, with its marks.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

from moe_pack.runtime.serve import styles

_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call."""

    index: int
    call_id: str | None  # in its first delta alone, as the name
    name: str | None
    arguments: str  # of all deltas together, JSON text


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


class AnswerParser(Protocol):
    """Turns the text of one answer into deltas."""

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that this piece of the text completes; there may be none."""
        ...

    def finish(self) -> list[Delta]:
        """Returns the deltas of the text that still waits, at the end of the answer."""
        ...


def parser_for(
    style: styles.AnswerStyle,
    prompt_end: str,
    tools: Sequence[Mapping[str, object]] = (),
    new_id: Callable[[], str] | None = None,
) -> AnswerParser:
    """Returns the parser of one answer.

    Args:    prompt_end: of the rendered prompt; the reasoning may begin there.   tools: of the request, in OpenAI's
             form: their schemas give the types of parameters where the format does not. Without tools, calls are
             content.   new_id: makes the ids of calls; None makes random ones.
    """
    if new_id is None:
        has_short_ids = isinstance(style.calls, styles.JsonCalls) and style.calls.has_short_ids
        new_id = _short_id if has_short_ids else _random_id
    if style.has_channels:
        return _ChannelParser(prompt_end, bool(tools), new_id)
    return _MarkParser(style, prompt_end, style.calls if tools else None, _schemas(tools), new_id)


def _random_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return secrets.token_hex(5)[:9]


Schemas = Mapping[str, Mapping[str, object]]


def _schemas(tool_list: Sequence[Mapping[str, object]]) -> Schemas:
    """Returns the schemas of parameters, by the function's name and the parameter's."""
    found: dict[str, Mapping[str, object]] = {}
    for tool in tool_list:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[str(function.get("name"))] = properties if isinstance(properties, Mapping) else {}
    return found


def json_value(text: str, schema: object) -> str:
    """Returns a parameter's text as JSON text, by the parameter's schema.

    A string stays a string. Another value is JSON if the text is JSON and, where strings are allowed too, has one of
    the other types. Python's words for true, false and null count as JSON's.
    """
    types = _types(schema)
    enum = schema.get("enum") if isinstance(schema, Mapping) else None
    if types == {"string"} or (isinstance(enum, list) and text in enum):
        return _json_text(text)
    words = {"True": "true", "False": "false", "None": "null"}
    stripped = text.strip()
    try:
        value = json.loads(words.get(stripped, stripped))
        found = _json_text(value)
    except (ValueError, RecursionError):
        return _json_text(text)
    return _json_text(text) if "string" in types and _type_of(value) not in types else found


def _json_text(value: object) -> str:
    """Returns a value as JSON text that has a UTF-8 form; raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # A model may escape half of a character, which has no other form.
    return text if text.isascii() or not _HALF.search(text) else json.dumps(value, allow_nan=False)


def _types(schema: object) -> set[str]:
    """Returns the names of the types that a schema allows, `number` for integers too; none if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types = {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        types |= {name for option in options for name in _types(option)} if isinstance(options, list) else set()
    return types | ({"number"} if "integer" in types else set())


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _typed(value: object, schema: object) -> object:
    """Returns a value whose texts have the types that the schema gives."""
    parts = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, str):
        return json.loads(json_value(value, schema))
    if isinstance(value, list):
        return [_typed(item, parts.get("items")) for item in value]
    if isinstance(value, dict):
        properties = parts.get("properties")
        inner = properties if isinstance(properties, Mapping) else {}
        return {key: _typed(item, inner.get(key)) for key, item in value.items()}
    return value


class _JsonScan:
    """Finds the end of a JSON value that comes in pieces, by its brackets and strings.

    Args:    close: a mark that ends the value, too, outside of strings.   depth: brackets that are open already.
    """

    def __init__(self, close: str, depth: int = 0) -> None:
        self._close, self._depth = close, depth
        self._in_string = self._is_escaped = False
        self.is_done = False

    def feed(self, text: str) -> int:
        """Returns how many characters belong to the value; fewer than all if it ends, or may end, there."""
        for at, char in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif self._close and char == self._close[0] and self._close.startswith(text[at : at + len(self._close)]):
                self.is_done = text.startswith(self._close, at)
                return at
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return at + 1
        return len(text)


@dataclass(frozen=True, slots=True)
class _Began:
    """A call begins."""

    name: str
    own_id: str | None = None  # from the model


@dataclass(frozen=True, slots=True)
class _Read:
    """One step of a reader."""

    num_chars: int  # that are used up
    # `wait` for more text; `again` with the rest; `done`: the call ended; `wrong`: it is no call.
    state: Literal["wait", "again", "done", "wrong"]
    events: tuple[_Began | str, ...] = ()  # calls that begin, and text of arguments


class _Reader(Protocol):
    """Reads the calls between two marks; uses up nothing before the first call begins."""

    def read(self, text: str, is_last: bool) -> _Read: ...


# The beginning of an object with a call, up to the object of its arguments.
_OBJECT_HEAD = re.compile(
    r'[\s\[,;]*\{\s*(?:"\w*id"\s*:\s*"[^"]*"\s*,\s*)?(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*(?P<quoted>"(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_BETWEEN = re.compile(r"[\s\],;]*")


class _JsonReader:
    """Reads calls whose arguments are JSON; the arguments go on as they come."""

    def __init__(self, calls: styles.JsonCalls) -> None:
        self._calls = calls
        self._close = calls.marks.close
        self._phase: Literal["head", "arguments", "object", "end"] = "head"
        self._scan = _JsonScan(self._close)
        self._scanned = 0
        self._is_object = self._is_list = self._has_begun = False

    def read(self, text: str, is_last: bool) -> _Read:
        if self._phase == "head":
            found = self._head(text)
            if found.state == "wrong" or (is_last and found.state == "wait"):  # no further call begins
                return replace(found, state="done" if self._has_begun else "wrong")
            return found
        if self._phase == "end":
            return self._end(text, is_last)
        num = self._scan.feed(text)
        is_arguments = self._phase == "arguments"
        events = (text[:num],) if is_arguments and num else ()
        if not self._scan.is_done:
            return _Read(num, "done" if is_last else "wait", events)
        is_at_close = bool(self._close) and text.startswith(self._close, num)
        self._phase = "object" if is_arguments and self._is_object and not is_at_close else "end"
        self._scan = _JsonScan(self._close, depth=1)
        return _Read(num, "again", events)

    def _head(self, text: str) -> _Read:
        if self._calls.head and (found := self._calls.head.match(text)):
            named = found.groupdict()
            return self._began(found.end(), _Began(named.get("fenced") or named["name"], named.get("id")))
        if not self._calls.has_objects:
            is_over = bool(self._close) and self._close in text
            return _Read(0, "wrong" if is_over else "wait")
        begin = _OBJECT_HEAD.match(text)
        name = None
        with suppress(ValueError):
            name = str(json.loads(begin["quoted"])) if begin else None
        if begin and name and name.isprintable():
            self._is_object = True
            self._is_list = self._is_list or "[" in text[: begin.start("quoted")]
            return self._began(begin.end(), _Began(name))
        return self._whole(text)

    def _began(self, num_chars: int, call: _Began) -> _Read:
        self._phase, self._has_begun = "arguments", True
        self._scan = _JsonScan(self._close)
        return _Read(num_chars, "again", (call,))

    def _whole(self, text: str) -> _Read:
        """Reads a complete call whose object has another order of keys."""
        opening = re.match(r"[\s\[,;]*(\{)?", text)
        assert opening is not None  # it matches nothing, too
        if opening[1] is None:
            # A name outside of the JSON has no spaces.
            may_be_name = self._calls.head is not None and re.fullmatch(r"\s*\S*\s*", text) is not None
            return _Read(0, "wait" if opening.end() == len(text) or may_be_name else "wrong")
        start = opening.start(1)
        if self._scanned == 0:
            self._scanned = start
        self._scanned += self._scan.feed(text[self._scanned :])
        if not self._scan.is_done:
            return _Read(0, "wait")
        try:
            call = styles.call_of(json.loads(text[start : self._scanned]))
            arguments = "" if call is None else _json_text(call.arguments)
        except (ValueError, RecursionError):
            call = None
        if call is None:
            return _Read(0, "wrong")
        self._is_list = self._is_list or "[" in text[:start]
        self._phase, self._has_begun, self._is_object = "end", True, True
        return _Read(self._scanned, "again", (_Began(call.name), arguments))

    def _end(self, text: str, is_last: bool) -> _Read:
        """Skips the text after a call, and finds whether another one follows."""
        between = _BETWEEN.match(text.replace("`", " "))
        assert between is not None  # it matches nothing, too
        skipped, rest = between[0], text[between.end() :]
        if not self._close and not self._is_object:
            return _Read(0, "done")
        if not self._close and self._is_list and "]" in skipped:
            return _Read(skipped.index("]") + 1, "done")
        if self._close and rest.startswith(self._close):
            return _Read(between.end() + len(self._close), "done")
        if rest.startswith("{") and (self._close or "," in skipped or ";" in skipped):
            self._phase, self._scan, self._scanned = "head", _JsonScan(self._close), 0
            return _Read(between.end(), "again")
        if not is_last and (not rest or (self._close and self._close.startswith(rest))):
            return _Read(0, "wait")
        return _Read(between.end() if self._close else 0, "done")


class _TagReader:
    """Reads calls with a pair of tags for each parameter; each event is a whole parameter."""

    def __init__(self, calls: styles.TagCalls, schemas: Schemas) -> None:
        self._calls, self._schemas = calls, schemas
        self._name: str | None = None
        self._num_parameters = 0
        self._num_calls = 0
        self._searched = 0
        self._tags = (calls.parameter_begin, *calls.ends, calls.marks.close)

    def read(self, text: str, is_last: bool) -> _Read:
        if self._name is not None:
            return self._parameters(text, is_last)
        if found := self._calls.head.match(text):
            self._name, self._num_parameters, self._searched = found["name"], 0, 0
            self._num_calls += 1
            return _Read(found.end(), "again", (_Began(self._name),))
        return self._no_head(text, is_last)

    def _no_head(self, text: str, is_last: bool) -> _Read:
        """Waits for the name, or finds that there is none: the end after a call, else wrong."""
        stripped, close = text.lstrip(), self._calls.marks.close
        if self._num_calls and stripped.startswith(close):
            return _Read(len(text) - len(stripped) + len(close), "done")
        lead = self._calls.lead
        if stripped.startswith(lead):
            may_come = self._calls.unfinished.fullmatch(stripped[len(lead) :]) is not None
        else:
            may_come = lead.startswith(stripped)
        may_close = bool(self._num_calls) and close.startswith(stripped)
        if (may_come or may_close) and not is_last:
            return _Read(0, "wait")
        return _Read(0, "done" if self._num_calls else "wrong")

    def _parameters(self, text: str, is_last: bool) -> _Read:
        stripped = text.lstrip()
        num_spaces = len(text) - len(stripped)
        for end in self._calls.ends:
            if stripped.startswith(end):
                return self._ended(num_spaces + len(end), is_closed=end == self._calls.marks.close)
        if stripped.startswith(self._calls.marks.close):
            return self._ended(num_spaces + len(self._calls.marks.close), is_closed=True)
        if stripped.startswith(self._calls.parameter_begin):
            at = stripped.find(self._calls.value_end, self._searched)
            if at < 0:
                # The next search begins here: a value may be long.
                self._searched = max(0, len(stripped) - len(self._calls.value_end))
                return _Read(num_spaces, "done" if is_last else "wait")
            self._searched = 0
            if found := self._calls.parameter.match(stripped[: at + len(self._calls.value_end)]):
                return _Read(num_spaces + found.end(), "again", (self._pair(found),))
        elif any(tag.startswith(stripped) for tag in self._tags):
            return _Read(num_spaces, "done" if is_last else "wait")
        # Anything else between parameters is no part of the call.
        junk = stripped.find("<", 1)
        return _Read(num_spaces + (junk if junk > 0 else len(stripped)), "again")

    def _pair(self, found: re.Match[str]) -> str:
        """Returns a parameter as text of a JSON object, with the brace or the comma before it."""
        key, value, is_string = found["key"].strip(), found["value"], found.groupdict().get("string")
        if self._calls.trims_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        schema = self._schemas.get(self._name or "", {}).get(key)
        if is_string is not None:
            schema = {"type": "string"} if is_string == "true" else None
        self._num_parameters += 1
        pair = f"{_json_text(key)}: {json_value(value, schema)}"
        return f", {pair}" if self._num_parameters > 1 else f"{{{pair}"

    def _ended(self, num_chars: int, is_closed: bool) -> _Read:
        self._name = None
        return _Read(num_chars, "done" if is_closed else "again", ("}" if self._num_parameters else "{}",))


class _WholeReader:
    """Reads calls that are complete."""

    def __init__(self, calls: styles.WholeCalls, schemas: Schemas) -> None:
        self._calls, self._schemas = calls, schemas
        self._searched = 0

    def read(self, text: str, is_last: bool) -> _Read:
        close = self._calls.marks.close
        at = text.find(close, self._searched)
        if at < 0:
            self._searched = max(0, len(text) - len(close))
            return _Read(0, "wrong" if is_last else "wait")
        calls = self._calls.read(text[:at])
        events: list[_Began | str] = []
        try:
            for call in calls or ():
                events += [_Began(call.name), _json_text(self._typed(call))]
        except (ValueError, RecursionError):
            events = []
        if not events:
            return _Read(0, "wrong")
        return _Read(at + len(close), "done", tuple(events))

    def _typed(self, call: styles.Call) -> dict[str, object]:
        """Returns the arguments; those that are still text get the types of their schemas."""
        read_value = self._calls.read_value
        if read_value is None:
            return call.arguments
        schemas = self._schemas.get(call.name, {})
        return {
            key: _typed(text if _types(schemas.get(key)) == {"string"} else read_value(text), schemas.get(key))
            for key, text in call.arguments.items()
            if isinstance(text, str)
        }


class _Deltas:
    """Collects deltas; neighbours of a kind become one."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._num_calls = 0
        self._found: list[Delta] = []

    def text(self, text: str, is_reasoning: bool) -> None:
        if not text:
            return
        kind = ReasoningDelta if is_reasoning else ContentDelta
        last = self._found[-1] if self._found else None
        if isinstance(last, kind):
            self._found[-1] = kind(last.text + text)
        else:
            self._found.append(kind(text))

    def event(self, event: _Began | str) -> None:
        last = self._found[-1] if self._found else None
        if isinstance(event, _Began):
            self._found.append(ToolCallDelta(self._num_calls, event.own_id or self._new_id(), event.name, ""))
            self._num_calls += 1
        elif isinstance(last, ToolCallDelta):
            self._found[-1] = replace(last, arguments=last.arguments + event)
        elif event:
            self._found.append(ToolCallDelta(self._num_calls - 1, None, None, event))

    def take(self) -> list[Delta]:
        found, self._found = self._found, []
        return found


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, marks), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _num_unsure(text: str, marks: tuple[str, ...]) -> int:
    """Returns how many characters at the end may be the beginning of a mark."""
    longest = max(map(len, marks), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


class _MarkParser:
    """Parses answers in which marks stand around reasoning and calls."""

    def __init__(
        self,
        style: styles.AnswerStyle,
        prompt_end: str,
        calls: styles.Calls | None,
        schemas: Schemas,
        new_id: Callable[[], str],
    ) -> None:
        self._calls, self._schemas = calls, schemas
        self._think, self._end_think = style.reasoning or ("", "")
        self._opens = calls.marks.opens if calls else ()
        self._sections = dict(calls.marks.sections) if calls else {}
        self._dropped = style.dropped
        self._deltas = _Deltas(new_id)
        self._buffer = ""
        self._in_reasoning = bool(self._think) and _is_open(prompt_end, self._think, self._end_think)
        self._section_end = ""
        self._reader: _Reader | None = None
        self._before = ""  # the mark that began the call that is being read, and the spaces before it
        self._skips_spaces = self._in_reasoning
        self._may_be_bare = isinstance(calls, styles.JsonCalls) and calls.is_bare

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._step(is_last=False):
            pass
        return self._deltas.take()

    def finish(self) -> list[Delta]:
        while self._step(is_last=True):
            pass
        return self._deltas.take()

    def _step(self, is_last: bool) -> bool:
        """Uses up some of the text; False if there is nothing to do until more comes."""
        if self._reader is not None:
            return self._read_call(self._reader, is_last)
        if self._skips_spaces:
            self._buffer = self._buffer.lstrip()
            self._skips_spaces = not self._buffer
        if self._may_be_bare and not self._in_reasoning and self._buffer.lstrip().startswith("{"):
            start = len(self._buffer) - len(self._buffer.lstrip())
            self._begin_call(self._buffer[:start], start)
            return True
        marks = self._marks()
        if found := _pattern(marks).search(self._buffer):
            self._at_mark(found)
            return True
        num = len(self._buffer)
        if marks and not is_last:  # spaces before a mark belong to the mark
            num = len(self._buffer[: num - _num_unsure(self._buffer, marks)].rstrip())
        self._text(self._buffer[:num])
        self._buffer = self._buffer[num:]
        return False

    def _marks(self) -> tuple[str, ...]:
        if self._section_end:
            return (self._section_end, *self._opens)
        calls = tuple(self._sections) or self._opens
        thinking = (self._end_think,) if self._in_reasoning else (self._think, self._end_think)
        return tuple(filter(None, (*thinking, *calls, *self._dropped)))

    def _text(self, text: str) -> None:
        if text.strip() and not self._in_reasoning:
            self._may_be_bare = False
        self._deltas.text(text, self._in_reasoning)

    def _at_mark(self, found: re.Match[str]) -> None:
        mark, text = found[0], self._buffer[: found.start()]
        kept = text.rstrip()
        self._text(kept)
        if mark in self._opens:
            self._begin_call(text[len(kept) :] + mark, found.end())
            return
        self._buffer = self._buffer[found.end() :]
        self._skips_spaces = True
        if mark == self._section_end:
            self._section_end = ""
        elif mark in self._sections:
            self._section_end, self._in_reasoning = self._sections[mark], False
        elif mark in (self._think, self._end_think):
            self._in_reasoning = mark == self._think

    def _begin_call(self, before: str, num_chars: int) -> None:
        self._before, self._buffer = before, self._buffer[num_chars:]
        if isinstance(self._calls, styles.TagCalls):
            self._reader = _TagReader(self._calls, self._schemas)
        elif isinstance(self._calls, styles.WholeCalls):
            self._reader = _WholeReader(self._calls, self._schemas)
        elif self._calls is not None:
            self._reader = _JsonReader(self._calls)

    def _read_call(self, reader: _Reader, is_last: bool) -> bool:
        found = reader.read(self._buffer, is_last)
        for event in found.events:
            self._deltas.event(event)
        if found.events:
            self._in_reasoning = False  # models forget to end their reasoning before a call
        self._buffer = self._buffer[found.num_chars :]
        if found.state == "done":
            self._reader, self._skips_spaces = None, True
        elif found.state == "wrong":
            self._reader, self._may_be_bare = None, False
            self._text(self._before)
        return found.state != "wait"


def _is_open(prompt_end: str, opened: str, closed: str) -> bool:
    """Whether a prompt ends inside of reasoning: no end of it, and no other turn, follows its beginning."""
    _, mark, after = prompt_end.rpartition(opened)
    return bool(mark) and closed not in after and re.search(r"<[|\uff5c]|[|\uff5c]>|\[/?INST\]|\]~b\]", after) is None


_MESSAGE = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_HEADER_BEGINS = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, " to=", "to=")


class _ChannelParser:
    """Parses answers of messages with a header each, which names a channel and perhaps a function.

    A header is the text before `<|message|>`. The channel `analysis` is reasoning, a message to `functions.name` is a
    call, a message to another recipient (a tool of the model's own) is reasoning too; all others are content.
    """

    def __init__(self, prompt_end: str, tools: bool, new_id: Callable[[], str]) -> None:
        self._has_tools = tools
        self._deltas = _Deltas(new_id)
        self._buffer = ""
        self._state: Literal["start", "header", "body"] = "start"
        self._kind: Literal["content", "reasoning", "call"] = "content"
        self._is_empty = True  # the call has no arguments yet
        # The prompt may have begun a message, or its header.
        _, _, begun = prompt_end.rpartition("<|start|>")
        self._prompt_header, message, _ = begun.partition(_MESSAGE)
        if message:
            self._begin_body(self._prompt_header)
        elif "<|channel|>" in self._prompt_header:
            self._state = "header"

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._step():
            pass
        return self._deltas.take()

    def finish(self) -> list[Delta]:
        if self._state == "body":
            self._body(self._buffer)
            self._end_body()
        else:
            self._deltas.text(self._buffer, is_reasoning=False)
        self._buffer = ""
        return self._deltas.take()

    def _step(self) -> bool:
        """Uses up some of the text; False if there is nothing to do until more comes."""
        if self._state == "start":
            if self._buffer.startswith(_HEADER_BEGINS):
                self._state = "header"
                return True
            if any(mark.startswith(self._buffer) for mark in _HEADER_BEGINS):
                return False
            self._state = "body"
            return True
        if self._state == "header":
            header, mark, rest = self._buffer.partition(_MESSAGE)
            if mark:
                self._buffer = rest
                self._begin_body(self._prompt_header + header)
            return bool(mark)
        if found := _pattern(_BODY_ENDS).search(self._buffer):
            self._body(self._buffer[: found.start()])
            self._end_body()
            begins_header = found[0] in _HEADER_BEGINS
            self._buffer = self._buffer[found.start() if begins_header else found.end() :]
            self._state, self._prompt_header = "header", ""
            return True
        num = len(self._buffer) - _num_unsure(self._buffer, _BODY_ENDS)
        self._body(self._buffer[:num])
        self._buffer = self._buffer[num:]
        return False

    def _begin_body(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=(functions\.)?([^\s<]+)", header)
        self._state, self._kind, self._is_empty = "body", "content", True
        if recipient and recipient[1] and self._has_tools:
            self._kind = "call"
            self._deltas.event(_Began(recipient[2]))
        elif (channel and channel[1] == "analysis") or (recipient and recipient[2] != "user" and self._has_tools):
            self._kind = "reasoning"

    def _body(self, text: str) -> None:
        if self._kind == "call":
            self._deltas.event(text)
            self._is_empty = self._is_empty and not text.strip()
        else:
            self._deltas.text(text, self._kind == "reasoning")

    def _end_body(self) -> None:
        if self._kind == "call" and self._is_empty:
            self._deltas.event("{}")
        self._kind = "content"
