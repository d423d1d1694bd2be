"""Conversations in the form that a model's chat template takes.

Protocols allow more than templates do: several system messages, some of them late; two messages of the user in turn;
text of the user right behind a tool's result. Templates refuse some of these forms, and some templates leave out texts
without an error. So each form is tried with a short conversation, whose texts must be in the output. If a template does
not take a form, the conversation is changed:

- system messages at the beginning become one, or the beginning of the user's first message
- a later system message becomes the user's
- neighbours of one role become one message
- text of the user behind a tool's result joins the result

No text is lost or moved. Sources: the templates of Qwen3.5, Mistral, Gemma and gpt-oss, as their publishers give them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moe_pack.formats import RunError
from moe_pack.runtime import ChatTemplate
from moe_pack.runtime.serve.requests import RequestError

Message = dict[str, Any]
Form = Literal[
    "system", "system alone", "late system", "users", "answers", "result", "user after result", "answer first", "tools"
]

_BREAK = "\n\n"
_CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_there", "description": "Looks.", "parameters": {"type": "object"}},
}


def _said(role: str, word: str = "so") -> Message:
    return {"role": role, "content": word}


def _after_call(*messages: Message) -> list[Message]:
    answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": "needle1"}
    return [_said("user"), answer, result, *messages]


# A conversation of each form; its needles have to be written.
_TRIALS: dict[Form, list[Message]] = {
    "system": [_said("system", "needle1"), _said("user")],
    "system alone": [_said("system", "needle1")],
    "late system": [_said("user"), _said("assistant"), _said("system", "needle1"), _said("user", "needle2")],
    "users": [_said("user", "needle1"), _said("user", "needle2")],
    "answers": [_said("user"), _said("assistant", "needle1"), _said("assistant", "needle2"), _said("user")],
    "result": _after_call(),
    "user after result": _after_call(_said("user", "needle2")),
    "answer first": [_said("assistant", "needle1"), _said("user", "needle2")],
    "tools": [_said("user")],
}


class Conversations:
    """Brings conversations to the form that one template takes. Several threads may use it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._takes: dict[tuple[Form, bool], bool] = {}

    def brought(self, messages: Sequence[Mapping[str, Any]], has_tools: bool) -> list[Message]:
        """Returns a conversation in the template's form.

        Args:    messages: with `content` as text.
        Raises:  RequestError if the template cannot have it in any form.
        """
        made = self._without_neighbours(self._without_system(_joined_beginning(messages), has_tools), has_tools)
        if made and made[0]["role"] == "assistant" and not self._does_take("answer first", has_tools):
            raise RequestError("messages: the chat template begins with the user; add a message before", "messages")
        if any(each["role"] == "tool" for each in made) and not self._does_take("result", has_tools):
            raise RequestError(
                "messages: the model's chat template cannot write results of tools; send them as the user's text",
                "messages",
            )
        return made

    def writes_tools(self) -> bool:
        """Whether the template writes tools; else the model never knows of them."""
        return self._does_take("tools", True)

    def _does_take(self, form: Form, has_tools: bool) -> bool:
        """Whether the template takes a form: it neither fails nor leaves out a text."""
        if (form, has_tools) not in self._takes:
            trial = _TRIALS[form]
            try:
                text = self._template.render(trial, add_generation_prompt=True, tools=[_TOOL] if has_tools else None)
            except RunError:
                text = ""
            needles = [each["content"] for each in trial if each["content"].startswith("needle")]
            needles += [_TOOL["function"]["name"]] if form == "tools" else []
            self._takes[form, has_tools] = all(needle in text for needle in needles)
        return self._takes[form, has_tools]

    def _without_system(self, messages: list[Message], has_tools: bool) -> list[Message]:
        """Returns the messages without the system messages that the template does not take."""
        made = messages
        if any(each["role"] == "system" for each in made[1:]) and not self._does_take("late system", has_tools):
            made = [made[0], *(_as_user(each) if each["role"] == "system" else each for each in made[1:])]
        if not made or made[0]["role"] != "system":
            return made
        form: Form = "system alone" if len(made) == 1 else "system"
        if self._does_take(form, has_tools):
            return made
        first = _as_user(made[0])
        if len(made) > 1 and made[1]["role"] == "user":
            return [_joined(first, made[1]), *made[2:]]
        return [first, *made[1:]]

    def _without_neighbours(self, messages: list[Message], has_tools: bool) -> list[Message]:
        """Returns the messages; neighbours that the template does not take are joined."""
        forms: dict[tuple[str, str], Form] = {
            ("user", "user"): "users",
            ("assistant", "assistant"): "answers",
            ("tool", "user"): "user after result",
        }
        made: list[Message] = []
        for message in messages:
            form = forms.get((made[-1]["role"], message["role"])) if made else None
            if form is not None and not self._does_take(form, has_tools):
                made[-1] = _joined(made[-1], message)
            else:
                made.append(message)
        return made


def _joined_beginning(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the messages; the system messages at the beginning become one."""
    made: list[Message] = []
    for message in messages:
        if message["role"] == "system" and len(made) == 1 and made[0]["role"] == "system":
            made[0] = _joined(made[0], message)
        else:
            made.append(dict(message))
    return made


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"}


def _joined(first: Message, second: Mapping[str, Any]) -> Message:
    """Returns two messages as one with the role of the first: texts in turn, calls in turn."""
    made = {**second, **first}
    for name in ("content", "reasoning_content"):
        texts = [text for text in (first.get(name), second.get(name)) if text]
        if texts:
            made[name] = _BREAK.join(texts)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    return {**made, "tool_calls": calls} if calls else made
