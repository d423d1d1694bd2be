"""Parsers of answers whose form a grammar made: content as it is, and tool calls as objects of JSON."""

import json
import re
import uuid

from moe_pack.runtime.serve import parsers

# How a call begins, step by step: its first key, what follows the name, the second key.
_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"\s*:\s*(\S)')
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(\S)')
_SECOND = re.compile(_NAME.pattern + r'\s*"((?:[^"\\]|\\.)*)"')
_OTHER = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')  # no object with a key


def new_id(prefix: str) -> str:
    """Returns an identifier that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


class PlainParser:
    """A parser of answers that are content alone."""

    def push(self, text: str) -> list[parsers.Delta]:
        """Returns the piece as content."""
        return [parsers.ContentDelta(text)] if text else []

    def finish(self) -> list[parsers.Delta]:
        """Returns nothing: no text waits."""
        return []


class FormedCallParser:
    """Reads a tool call that a grammar made: the arguments of the one tool, or an object of name and arguments.

    Such an object is complete at the end alone; one that was cut off is content.
    Args:    names: of the tools.   can_be_content: the answer may be other JSON; then one tool's call has a name too.
    """

    def __init__(self, names: list[str], can_be_content: bool = False) -> None:
        self._names, self._can_be_content = names, can_be_content
        self._has_name = can_be_content or len(names) > 1
        self._call_id = new_id("call_")
        self._text = ""
        self._is_content = False

    def push(self, text: str) -> list[parsers.Delta]:
        """Returns the deltas of a piece of text."""
        if not text:
            return []
        if self._is_content:
            return [parsers.ContentDelta(text)]
        is_first, self._text = not self._text, self._text + text
        if not self._has_name:
            name, call_id = (self._names[0], self._call_id) if is_first else (None, None)
            return [parsers.ToolCallDelta(0, call_id, name, text)]
        if self._can_be_content and self._is_no_call():
            self._is_content = True
            return [parsers.ContentDelta(self._text)]
        return []

    def finish(self) -> list[parsers.Delta]:
        """Returns the deltas of the rest."""
        if self._is_content or not self._has_name:
            return []
        try:
            call = json.loads(self._text)
            if call["name"] in self._names:
                arguments = json.dumps(call["arguments"], ensure_ascii=False)
                return [parsers.ToolCallDelta(0, self._call_id, call["name"], arguments)]
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        return [parsers.ContentDelta(self._text)] if self._text else []

    def _is_no_call(self) -> bool:
        """Whether the text so far cannot become a call."""
        key, name, second = (step.match(self._text) for step in (_KEY, _NAME, _SECOND))
        if key is None:
            return _OTHER.match(self._text) is not None
        if (key[1], key[2]) != ("name", '"'):
            return True
        if name is None:
            return False
        is_ours = json.loads(name[1]) in self._names and name[2] == ","
        return not is_ours or (second is not None and second[3] != "arguments")
