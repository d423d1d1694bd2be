"""The styles in which answers write reasoning and tool calls, found by the marks in a model's chat template.

    style             calls                                                        families
    json              <tool_call>{"name": …, "arguments": {…}}</tool_call>         Hermes, Qwen 2.5 and 3, Granite 4,
                                                                                   ERNIE 4.5, LongCat, Ling, EXAONE
    json-list         <tool_calls>[{…}]</tool_calls>, <TOOLCALL>[{…}]</TOOLCALL>,  Hunyuan, Jamba, Nemotron Nano 2,
                      <|tool_call|>[{…}], <|START_ACTION|>[{…}]<|END_ACTION|>      Granite 3, Phi 4, Command A
    json-bare         {"name": …, "parameters": {…}} as the whole answer           Llama 3 and 4
    brackets          [TOOL_CALLS][{…}], [TOOL_CALLS]name[ARGS]{…}                 Mistral
    sections          <tool▁call▁begin>name<tool▁sep>{…}, with bars, …              DeepSeek V3, R1 and V3.1, Kimi K2,
                                                                                   Solar Open
    functions         <tool_call><function=name><parameter=key>value</parameter>…  Qwen3-Coder, Qwen3.5, Nemotron 3,
                                                                                   Step 3.5, MiMo, Seed-OSS
    keys              <tool_call>name<arg_key>key</arg_key><arg_value>…            GLM 4.5 and later, Laguna,
                                                                                   Hunyuan 3 and 4
    invoke            <invoke name="name"><parameter name="key">value</parameter>  MiniMax M2, DeepSeek V3.2 and V4
    elements          <invoke name="name"><key>value</key></invoke>, namespaced    MiniMax M3
    python            <|tool_call_start|>[name(key="value")]<|tool_call_end|>      LFM 2
    quoted            <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>       Gemma 4
    channels          <|channel|>commentary to=functions.name<|message|>{…}        gpt-oss

Reasoning stands between <think> and </think> with any prefix or suffix in the name, [THINK] and [/THINK],
<|START_THINKING|> and <|END_THINKING|>, <|think|> and <|end|> (Solar Open), <|channel>thought and <channel|> (Gemma 4),
or in the analysis channel (gpt-oss).

Sources of the formats: the models' published chat templates; for DeepSeek V3.2 and MiniMax M3, whose templates build
their marks, the documentation of vLLM's parsers.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# What may be a function's name: no spaces, quotes or brackets.
_NAME = r"[\w.:/@$-]+"
_BAR = "\uff5c"  # the full-width bar of DeepSeek's marks
# Texts of tokens that end a turn. They are dropped if a tokenizer does not call them the end of an answer.
_TURN_ENDS = (
    *["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>"],
    *f"<{_BAR}end▁of▁sentence{_BAR}> <|user|> <|observation|> <turn|> [e~[".split(),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call: the function's name and its arguments, any values of JSON by name."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks around calls."""

    opens: tuple[str, ...]  # each begins a call
    close: str  # ends it; an empty one: a call ends with its JSON
    sections: tuple[tuple[str, str], ...] = ()  # around all calls: outside of such a pair, `opens` are text


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls whose arguments are JSON."""

    marks: CallMarks
    head: re.Pattern[str] | None = None  # with the group `name`, perhaps `id`, if the name is outside of the JSON
    has_objects: bool = False  # calls may be objects with name and arguments, or a list of them
    is_bare: bool = False  # an answer that is such an object is a call, without any mark
    has_short_ids: bool = False  # ids have nine characters


@dataclass(frozen=True, slots=True)
class TagCalls:
    """Calls with a pair of tags for each parameter."""

    marks: CallMarks
    lead: str  # the text before the name
    head: re.Pattern[str]  # the lead and the group `name`
    unfinished: re.Pattern[str]  # the text after the lead while `head` is not complete
    parameter: re.Pattern[str]  # with the groups `key`, `value` and perhaps `string`
    parameter_begin: str  # its first text
    value_end: str  # the tag behind a value
    ends: tuple[str, ...]  # of a call
    trims_lines: bool = False  # one line break on both sides of a value does not belong to it


@dataclass(frozen=True, slots=True)
class WholeCalls:
    """Calls that are read when they are complete."""

    marks: CallMarks
    read: Callable[[str], list[Call] | None]  # returns None for text that is no call
    # Reads a value that `read` left as text, unless its schema says that it is a string; None if `read` leaves none.
    read_value: Callable[[str], object] | None = None


Calls = JsonCalls | TagCalls | WholeCalls


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The form of a model's answers: how they write reasoning and tool calls."""

    name: str
    reasoning: tuple[str, str] | None = None  # the marks around reasoning, if the model reasons
    calls: Calls | None = None  # None if the template has no calls that we know
    dropped: tuple[str, ...] = ()  # marks that are not part of any text
    has_channels: bool = False  # the answer is messages with a channel each, and the other fields are empty

    @property
    def keeps_special(self) -> bool:
        """Whether the text needs the special tokens, which are marks in some tokenizers."""
        return self.has_channels or self.reasoning is not None or self.calls is not None


def style_of(template_source: str) -> AnswerStyle:
    """Returns the style of the answers to prompts of a chat template; without marks in it, plain text."""
    if "<|channel|>" in template_source and "<|message|>" in template_source:
        return AnswerStyle("channels", has_channels=True)
    name, calls = next(_known_calls(template_source), ("text", None))
    reasoning = _reasoning(template_source)
    if calls is None and reasoning is None:
        return AnswerStyle("text")
    wrappers: tuple[str, ...] = ("<answer>", "</answer>", "<|begin|>assistant", "<|content|>", "<|end|>")
    if name == "json":  # in other formats they stand around the results of calls
        wrappers += ("<response>", "</response>")
    if name == "keys" and calls is not None:  # some models write all calls between two marks more
        lists = tuple(mark.replace("tool_call", "tool_calls") for mark in (*calls.marks.opens, calls.marks.close))
    else:
        lists = ()
    pairs = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|/tool_call|>")
    python = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
    dropped = tuple(mark for mark in (*wrappers, *pairs, *python) if mark in template_source)
    taken = (*(reasoning or ()), *(calls.marks.opens if calls else ()), calls.marks.close if calls else "")
    return AnswerStyle(name, reasoning, calls, tuple(m for m in (*dropped, *lists, *_TURN_ENDS) if m not in taken))


def _reasoning(source: str) -> tuple[str, str] | None:
    """Returns the marks around reasoning; `<think>` may have a prefix, as `seed:`, or a suffix, as `:tag`."""
    for opened, closed in (
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|think|>", "<|end|>"),
        ("<|channel>thought", "<channel|>"),
    ):
        if opened in source and closed in source:
            return opened, closed
    found = re.search(r"</?((?:\w+[:_])?think(?::\w+)?)>", source)
    return (f"<{found[1]}>", f"</{found[1]}>") if found else None


def _known_calls(source: str) -> Iterator[tuple[str, Calls]]:
    """Yields the kinds of calls that the template has, the most certain first."""
    yield from _special_calls(source)
    if namespace := re.search(r"\]<\](\w+)\[>\[", source):
        mark = namespace[0]
        marks = CallMarks((f"{mark}<tool_call>",), f"{mark}</tool_call>")
        yield "elements", WholeCalls(marks, lambda body: _read_elements(body.replace(mark, "")), _elements)
    tag = re.search(r"<((?:\w+[:_])?tool_call(?::\w+)?)>", source)
    name = tag[1] if tag else "tool_call"
    if argument := re.search(r"<(\w*)arg_key(:\w+)?>", source):
        yield "keys", _key_calls(name, argument[1], argument[2] or "")
    elif tag and "<invoke name=" in source:
        yield "invoke", _invoke_calls("", ((f"<{name}>", f"</{name}>"),))
    elif tag and "<function=" in source:
        yield "functions", _function_calls(name)
    elif "<tool_calls>" in source:
        yield "json-list", JsonCalls(CallMarks(("<tool_calls>",), "</tool_calls>"), has_objects=True)
    elif tag:
        yield "json", JsonCalls(CallMarks((f"<{name}>",), f"</{name}>"), has_objects=True)
    if "parameters" in source and re.search(r"<\|python_(?:tag|start)\|>|ipython", source):
        yield "json-bare", JsonCalls(CallMarks((), ""), has_objects=True, is_bare=True)


def _special_calls(source: str) -> Iterator[tuple[str, Calls]]:
    """Yields the kinds of calls whose marks are special tokens, which no other format has."""
    prefix = f"{_BAR}DSML{_BAR}"
    if prefix in source:
        lists = ("function_calls", "tool_calls")
        yield "invoke", _invoke_calls(prefix, tuple((f"<{prefix}{name}>", f"</{prefix}{name}>") for name in lists))
    if f"<{_BAR}tool▁call▁begin{_BAR}>" in source:
        separator = f"<{_BAR}tool▁sep{_BAR}>"
        fenced = rf"function{separator}(?P<fenced>{_NAME})\s*```(?:json)?\s*(?=\{{)"
        head = rf"\s*(?:{fenced}|(?P<name>{_NAME}){separator}\s*(?=\{{))"
        call, calls = (f"<{_BAR}tool▁{word}{{}}{_BAR}>" for word in ("call", "calls"))
        yield "sections", _section(call, "▁begin", "▁end", calls, head)
    if "<|tool_call_argument_begin|>" in source:
        head = rf"\s*(?P<id>(?:functions\.)?(?P<name>{_NAME}?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"
        yield "sections", _section("<|tool_call{}|>", "_begin", "_end", "<|tool_calls_section{}|>", head)
    if "<|tool_call:begin|>" in source:
        head = rf"[^<]*<\|tool_call:name\|>\s*(?P<name>{_NAME})\s*<\|tool_call:args\|>\s*(?=\{{)"
        marks = CallMarks(("<|tool_call:begin|>",), "<|tool_call:end|>", (("<|tool_calls|>", "<|calls|>"),))
        yield "sections", JsonCalls(marks, re.compile(head))
    if "[TOOL_CALLS]" in source:
        head = rf"\s*(?P<name>{_NAME})(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{{)"
        yield "brackets", JsonCalls(CallMarks(("[TOOL_CALLS]",), ""), re.compile(head), True, has_short_ids=True)
    if "<|tool_call>call:" in source:
        yield "quoted", WholeCalls(CallMarks(("<|tool_call>",), "<tool_call|>"), _read_quoted)
    if "<|tool_call_start|>" in source or "<|tool_list_start|>" in source:
        yield "python", WholeCalls(CallMarks(("<|tool_call_start|>",), "<|tool_call_end|>"), _read_python)
    for opened, closed in (
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        ("<TOOLCALL>", "</TOOLCALL>"),
        ("<|tool_call|>", ""),
    ):
        if opened in source:
            yield "json-list", JsonCalls(CallMarks((opened,), closed), has_objects=True)


def _section(call: str, begin: str, end: str, section: str, head: str) -> JsonCalls:
    marks = CallMarks((call.format(begin),), call.format(end), ((section.format(begin), section.format(end)),))
    return JsonCalls(marks, re.compile(head))


def _key_calls(name: str, prefix: str, suffix: str) -> TagCalls:
    """Returns calls `<name>function<arg_key>…`, with a prefix and a suffix of `arg_key` in the tags."""
    key, value, separator = (f"{prefix}{word}{suffix}" for word in ("arg_key", "arg_value", "tool_sep"))
    following = rf"(?=\s*<(?:{key}|/{name})>|\n)"
    return TagCalls(
        marks=CallMarks((f"<{name}>",), f"</{name}>"),
        lead="",
        head=re.compile(rf"\s*(?P<name>{_NAME})[ \t]*(?:<{separator}>|{following})"),
        unfinished=re.compile(rf"(?:{_NAME})?\s*(?:<[^<>]*)?"),
        parameter=re.compile(rf"<{key}>(?P<key>[^<]*)</{key}>\s*<{value}>(?P<value>.*?)</{value}>", re.DOTALL),
        parameter_begin=f"<{key}>",
        value_end=f"</{value}>",
        ends=(f"</{name}>",),
    )


def _function_calls(name: str) -> TagCalls:
    """Returns calls `<name><function=f><parameter=key>…</parameter></function></name>`."""
    return TagCalls(
        marks=CallMarks((f"<{name}>",), f"</{name}>"),
        lead="<function=",
        head=re.compile(rf"\s*<function=\s*(?P<name>{_NAME})\s*>"),
        unfinished=re.compile(r"[^<>\n]*"),
        parameter=re.compile(r"<parameter=(?P<key>[^<>]+)>(?P<value>.*?)</parameter>", re.DOTALL),
        parameter_begin="<parameter=",
        value_end="</parameter>",
        ends=("</function>",),
        trims_lines=True,
    )


def _invoke_calls(prefix: str, sections: tuple[tuple[str, str], ...]) -> TagCalls:
    """Returns calls `<invoke name="f"><parameter name="key">…</parameter></invoke>` with a prefix in each tag."""
    parameter = (
        rf'<{prefix}parameter\s+name="(?P<key>[^"<>]*)"(?:\s+string="(?P<string>true|false)")?[^<>]*>'
        rf"(?P<value>.*?)</{prefix}parameter>"
    )
    return TagCalls(
        marks=CallMarks((f"<{prefix}invoke name=",), f"</{prefix}invoke>", sections),
        lead="",
        head=re.compile(r'\s*"?(?P<name>[^"<>\n]+?)"?\s*>'),
        unfinished=re.compile(r'"?[^"<>\n]*"?\s*'),
        parameter=re.compile(parameter, re.DOTALL),
        parameter_begin=f"<{prefix}parameter",
        value_end=f"</{prefix}parameter>",
        ends=(f"</{prefix}invoke>",),
    )


def _read_python(body: str) -> list[Call] | None:
    """Reads `[name(key=value, …), …]` with literals of Python or JSON; or a JSON list of calls."""
    try:
        with warnings.catch_warnings():  # about backslashes in texts that a model wrote
            warnings.simplefilter("ignore")
            tree = _Words().visit(ast.parse(body.strip(), mode="eval")).body
        return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


class _Words(ast.NodeTransformer):
    """Replaces JSON's words for true, false and null by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _python_call(node: ast.expr) -> Call:
    """Returns a call with named literals, or a literal object of a call; raises ValueError for anything else."""
    call = None
    if isinstance(node, ast.Dict):
        call = call_of(ast.literal_eval(node))
    elif isinstance(node, ast.Call) and not node.args:
        arguments = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords if item.arg}
        call = Call(ast.unparse(node.func), arguments) if len(arguments) == len(node.keywords) else None
    if call is None:
        raise ValueError("no call")
    json.dumps(call.arguments)  # refuses sets and bytes
    return call


def _read_quoted(body: str) -> list[Call] | None:
    """Reads `call:name{key:value, …}`; strings stand between `<|"|>`, and keys have no quotes."""
    found = re.fullmatch(rf"\s*call:(?P<name>{_NAME})(?P<object>\{{.*\}})\s*", body, re.DOTALL)
    if found is None:
        return None
    pieces = found["object"].split('<|"|>')
    for number, piece in enumerate(pieces):
        if number % 2:  # inside of the quotes
            pieces[number] = json.dumps(piece, ensure_ascii=False)
        else:
            quoted = re.sub(r"([{,]\s*)([^\s{}\[\]:,\"]+)(\s*):", r'\1"\2"\3:', piece)
            pieces[number] = re.sub(r"\b(None|True|False)\b", lambda word: _JSON_WORDS[word[0]], quoted)
    try:
        arguments = json.loads("".join(pieces))
    except (ValueError, RecursionError):
        return None
    return [Call(found["name"], arguments)] if isinstance(arguments, dict) else None


_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}


def _read_elements(body: str) -> list[Call] | None:
    """Reads `<invoke name="name"><key>value</key>…</invoke>…`; the values stay text."""
    calls = []
    for found in re.finditer(r'<invoke\s+name="(?P<name>[^"]+)"\s*>(?P<inside>.*?)</invoke>', body, re.DOTALL):
        elements = _ELEMENT.finditer(found["inside"])
        calls.append(Call(found["name"], {element["key"]: element["value"] for element in elements}))
    return calls or None


_ELEMENT = re.compile(r"\s*<(?P<key>[^<>/\s]+)>(?P<value>.*?)</(?P=key)>\s*", re.DOTALL)


def _elements(text: str) -> object:
    """Returns the values of elements by name, or a list if all are named `item`; a text without elements as it is."""
    found = list(_ELEMENT.finditer(text))
    if not found or sum(len(element[0]) for element in found) != len(text):
        return text
    if all(element["key"] == "item" for element in found):
        return [_elements(element["value"]) for element in found]
    return {element["key"]: _elements(element["value"]) for element in found}


def call_of(value: object) -> Call | None:
    """Returns the call that a JSON object describes, if it describes one."""
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict):
        return None
    return Call(name, arguments)
