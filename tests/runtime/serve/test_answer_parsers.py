"""Answers as they come: text with marks, in any pieces, becomes content, reasoning and tool calls."""

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import case, random_seed

from moe_pack.runtime.serve import parsers
from moe_pack.runtime.serve.styles import style_of

TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": ["string", "null"]},
                    "where": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
WEATHER = ("get_weather", {"city": "Zürich <b>", "days": 3})
TIME: tuple[str, dict[str, object]] = ("get_time", {})
ARGUMENTS = '{"city": "Zürich <b>", "days": 3}'


@dataclass(frozen=True)
class Example:
    """An answer, and what is in it. `template`: the marks that a chat template of the style has."""

    name: str
    template: str
    answer: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, object]], ...] = ()
    prompt_end: str = "<|im_start|>assistant\n"
    ids: tuple[str, ...] | None = field(default=None)


def wide(text: str) -> str:
    """Text with the full-width bars of DeepSeek's marks."""
    return text.replace("|", "\uff5c")


JSON = "<think></think><tool_call>\n{'name': …}\n</tool_call>"
CODER = "<tool_call>\n<function=example>\n<parameter=x>\n1\n</parameter></function></tool_call>"
KEYS = "<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value></tool_call></think>"
V3 = wide("'<|tool▁calls▁begin|><|tool▁call▁begin|>' '<|tool▁sep|>' </think>")
DSML = wide("<|DSML|function_calls> dsml |DSML| <think>")
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|><think></think>"
M2 = '<minimax:tool_call>\n<invoke name="x">\n</invoke></minimax:tool_call></think><response>'
M3 = "{% set ns = ']<]minimax[>[' %}<mm:think>"
SEED = "<seed:think></seed:think><seed:tool_call>\n<function=example>"
GEMMA = "'<|tool_call>call:' '<tool_call|>' '<|channel>thought\\n<channel|>'"
COHERE = "<|START_THINKING|><|END_THINKING|><|START_ACTION|><|END_ACTION|><|START_RESPONSE|><|END_RESPONSE|>"
SOLAR = "<|begin|>assistant<|think|><|end|><|content|><|tool_calls|><|tool_call:begin|>"
HARMONY = "<|start|><|channel|>analysis<|message|>"
HARMONY_PROMPT = "<|end|><|start|>assistant"

# fmt: off
EXAMPLES = [
    Example("plain", "{{ messages }}", "Hi </think> <tool_call> there \n", content="Hi </think> <tool_call> there \n"),
    Example("json", JSON,
        "<think>\nLook.\n\nNow.\n</think>\n\nI look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_time", "arguments": {}}\n</tool_call><|im_end|>', content="I look.",
        reasoning="Look.\n\nNow.", calls=(WEATHER, TIME)),
    Example("json, reasoning began in the prompt and does not end before the call", JSON,
        f'Look.\n<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>', reasoning="Look.",
        calls=(WEATHER,), prompt_end="<|im_start|>assistant\n<think>\n"),
    Example("json, other order of keys, a list, arguments as text", JSON,
        f'<tool_call>[{{"arguments": {ARGUMENTS}, "name": "get_weather"}}, {{"name": "get_time"}},'
        '{"id": "7", "name": "get_time", "arguments": {"zone": "</tool_call>"}, "more": {"a": [1]}}, '
        '{"name": "get_time", "arguments": "{\\"a\\": 1}"}]</tool_call> Done.', content="Done.",
        calls=(WEATHER, TIME, ("get_time", {"zone": "</tool_call>"}), ("get_time", {"a": 1}))),
    Example("json, not a call", JSON, "<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>"),
    Example("json, no name", JSON, '<tool_call>{"a": 1}</tool_call>.', '<tool_call>{"a": 1}</tool_call>.'),
    Example("json, unfinished mark", JSON, "It is 1 <tool_c", "It is 1 <tool_c"),
    Example("json, unfinished call", JSON, 'A <tool_call>{"name": "get', 'A <tool_call>{"name": "get'),
    Example("json, mark in the reasoning", JSON, "<think>Use <tool_call> or not.</think>Yes.", content="Yes.",
        reasoning="Use <tool_call> or not."),
    Example("long tags", "<longcat_think></longcat_think><longcat_tool_call>",
        f'<longcat_think>A</longcat_think>B<longcat_tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
        "</longcat_tool_call>", content="B", reasoning="A", calls=(WEATHER,)),
    Example("json list", "<think></think><answer></answer><tool_calls>[{}]</tool_calls>",
        f'<think>\nA\n</think>\n<answer>\nB\n</answer><tool_calls>[{{"name": "get_weather", "arguments": {ARGUMENTS}}},'
        ' {"name": "get_time", "arguments": {}}]</tool_calls>', content="B", reasoning="A",
        calls=(WEATHER, TIME)),
    Example("list without an end", "<|tool_call|>",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "get_time", "arguments": {{}}}}]'
        " Done", content="Done", calls=(WEATHER, TIME)),
    Example("bare", "<|python_tag|> ipython parameters",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
        '{"name": "get_time", "parameters": {}}<|eom_id|>', calls=(WEATHER, TIME)),
    Example("bare, other JSON", "<|python_tag|> ipython parameters", ' {"a": {"b": 1}}\n', ' {"a": {"b": 1}}\n'),
    Example("bare, later", "ipython parameters", 'So: {"name": "f", "parameters": {}}',
        'So: {"name": "f", "parameters": {}}'),
    Example("brackets", "[TOOL_CALLS][THINK][/THINK]",
        f'[THINK]A[/THINK]B[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "get_time", "arguments": {}}]', content="B", reasoning="A", calls=(WEATHER, TIME)),
    Example("brackets, names", "[TOOL_CALLS]",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{{}}",
        calls=(WEATHER, TIME)),
    Example("brackets, more behind", "[TOOL_CALLS]", "[TOOL_CALLS]get_time{}] x", content="] x", calls=(TIME,)),
    Example("brackets, text", "[TOOL_CALLS]", "[TOOL_CALLS] is a mark.", "[TOOL_CALLS] is a mark."),
    Example("deepseek 3.1", V3,
        wide(f"A</think>B<|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>{ARGUMENTS}<|tool▁call▁end|>"
        "<|tool▁call▁begin|>get_time<|tool▁sep|>{}<|tool▁call▁end|><|tool▁calls▁end|><|end▁of▁sentence|>"),
        content="B", reasoning="A", calls=(WEATHER, TIME), prompt_end=wide("<|Assistant|><think>")),
    Example("deepseek 3", V3,
        wide("B<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n"
        f"{ARGUMENTS}\n```<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>get_time\n```json\n{{}}\n```"
        "<|tool▁call▁end|><|tool▁calls▁end|>"), content="B", calls=(WEATHER, TIME),
        prompt_end=wide("<|Assistant|></think>")),
    Example("dsml", DSML,
        wide('A</think>B\n\n<|DSML|function_calls>\n<|DSML|invoke name="get_weather">\n'
        '<|DSML|parameter name="city" string="true">Zürich <b></|DSML|parameter>\n'
        '<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n</|DSML|invoke>\n'
        '<|DSML|invoke name="get_time">\n</|DSML|invoke>\n</|DSML|function_calls>'), content="B", reasoning="A",
        calls=(WEATHER, TIME), prompt_end=wide("<|Assistant|><think>")),
    Example("kimi", KIMI,
        "<think>A<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>", reasoning="A", calls=(WEATHER, TIME),
        ids=("functions.get_weather:0", "functions.get_time:1")),
    Example("kimi, not a call", KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>no<|tool_call_end|><|tool_calls_section_end|>",
        content="<|tool_call_begin|>no<|tool_call_end|>"),
    Example("functions", CODER,
        "B\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich <b>\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        content="B", calls=(WEATHER, TIME)),
    Example("functions, values by schema", CODER,
        "<tool_call><function=get_weather><parameter=city>7</parameter>junk <i><parameter=units>null</parameter>"
        '<parameter=where>{"x": [1]}</parameter><parameter=new>True</parameter></function></tool_call>Done',
        content="Done", calls=(("get_weather", {"city": "7", "units": None, "where": {"x": [1]}, "new": True}),)),
    Example("functions, text", CODER, "A <tool_call> is\n a mark", "A <tool_call> is\n a mark"),
    Example("seed", SEED,
        "<seed:think>A</seed:think>B<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich <b></parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>", content="B", reasoning="A",
        calls=(WEATHER,)),
    Example("keys", KEYS,
        "\n<think>A</think>\nB\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich <b></arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time</tool_call>",
        content="B", reasoning="A", calls=(WEATHER, TIME)),
    Example("keys, text", KEYS, "The <tool_call> mark, </tool_call>.", "The <tool_call> mark, </tool_call>."),
    Example("keys in a list", "<think:a1></think:a1><tool_calls:a1><tool_call:a1><tool_sep:a1><arg_key:a1>",
        "<think:a1>A</think:a1><tool_calls:a1>\n<tool_call:a1>get_weather<tool_sep:a1>\n<arg_key:a1>city</arg_key:a1>\n"
        "<arg_value:a1>Zürich <b></arg_value:a1>\n<arg_key:a1>days</arg_key:a1><arg_value:a1>3</arg_value:a1>\n"
        "</tool_call:a1>\n</tool_calls:a1>", reasoning="A", calls=(WEATHER,)),
    Example("invoke", M2,
        'A\n</think>\n\nB <response>\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Zürich <b></parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>', content="B <response>", reasoning="A",
        calls=(WEATHER, TIME), prompt_end="]~b]ai\n<think>\n"),
    Example("invoke, a damaged parameter", M2,
        '<minimax:tool_call><invoke name="get_weather"><parameter name="cityX</parameter><parameter name="days">3'
        "</parameter></invoke></minimax:tool_call>", calls=(("get_weather", {"days": 3}),)),
    Example("elements", M3,
        '<mm:think>A</mm:think>B]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>'
        "Zürich]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<where>]<]minimax[>[<at>"
        "]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[<item>y]<]minimax[>[</item>]<]minimax[>[</at>"
        "]<]minimax[>[</where>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>", content="B", reasoning="A",
        calls=(("get_weather", {"city": "Zürich", "days": 3, "where": {"at": ["x", "y"]}}),)),
    Example("python", "<|tool_call_start|>",
        'A <|tool_call_start|>[get_weather(city="Zürich <b>", days=3), get_time()]<|tool_call_end|>', content="A",
        calls=(WEATHER, TIME)),
    Example("python, backslashes and words of JSON", "<|tool_call_start|>",
        r"<|tool_call_start|>[find(regex='\d', deep=true, last=None)]<|tool_call_end|>",
        calls=(("find", {"regex": r"\d", "deep": True, "last": None}),)),
    Example("numbers that JSON does not have", JSON,
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
        content='<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>'),
    Example("python, no call", "<|tool_call_start|>", "<|tool_call_start|>[get(1, x=open('a'))]<|tool_call_end|>",
        content="<|tool_call_start|>[get(1, x=open('a'))]<|tool_call_end|>"),
    Example("quoted", GEMMA,
        '<|channel>thought\nA\n<channel|>B<|tool_call>call:get_weather{city:<|"|>Zürich {b:"<|"|>,days:3,'
        'where:{a:[true,<|"|>q<|"|>],none:None}}<tool_call|><|tool_call>call:get_time{}<tool_call|><turn|>',
        content="B", reasoning="A",
        calls=(("get_weather", {"city": 'Zürich {b:"', "days": 3, "where": {"a": [True, "q"], "none": None}}), TIME)),
    Example("cohere", COHERE,
        "A<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGUMENTS}}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>', reasoning="A",
        calls=(WEATHER, TIME), prompt_end="<|CHATBOT_TOKEN|><|START_THINKING|>"),
    Example("cohere, answer", COHERE, "<|START_RESPONSE|>B<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", content="B"),
    Example("solar", SOLAR,
        "<|think|>A<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>get_weather"
        f"<|tool_call:args|>{ARGUMENTS}<|tool_call:end|><|calls|>", reasoning="A", calls=(WEATHER,),
        prompt_end="<|begin|>assistant"),
    Example("channels", HARMONY,
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>", content="I look.", reasoning="Look.", calls=(WEATHER,),
        prompt_end=HARMONY_PROMPT),
    Example("channels, recipient first, no arguments", HARMONY,
        " to=functions.get_time<|channel|>commentary json<|message|><|call|>", calls=(TIME,),
        prompt_end=HARMONY_PROMPT),
    Example("channels, final", HARMONY, "<|channel|>final<|message|>It is 1 < 2 <|ok|> \n<|return|>",
        content="It is 1 < 2 <|ok|> \n", prompt_end=HARMONY_PROMPT),
    Example("channels, continued", HARMONY, " and B", " and B",
        prompt_end="<|start|>assistant<|channel|>final<|message|>A"),
    Example("channels, reasoning continued", HARMONY, " B<|end|><|start|>assistant<|channel|>final<|message|>C",
        content="C", reasoning=" B", prompt_end="<|start|>assistant<|channel|>analysis<|message|>A"),
    Example("channels, a tool of the model's own", HARMONY,
        "<|channel|>commentary to=python code<|message|>1 + 1<|call|>", reasoning="1 + 1",
        prompt_end=HARMONY_PROMPT),
    Example("channels, no marks", HARMONY, "to be\n", "to be\n", prompt_end=HARMONY_PROMPT),
    Example("channels, unfinished", HARMONY, "<|channel|>fin", "<|channel|>fin", prompt_end=HARMONY_PROMPT),
]
# fmt: on


@dataclass
class Joined:
    """All deltas of an answer, joined."""

    content: str
    reasoning: str
    calls: list[tuple[str | None, str]]
    ids: list[str | None]


def joined(deltas: Iterable[parsers.Delta]) -> Joined:
    """Joins deltas, and checks that calls come one after the other, with their names first."""
    found = Joined("", "", [], [])
    for delta in deltas:
        if isinstance(delta, parsers.ContentDelta):
            found.content += delta.text
        elif isinstance(delta, parsers.ReasoningDelta):
            found.reasoning += delta.text
        elif delta.index == len(found.calls):
            assert delta.call_id and delta.name
            found.calls.append((delta.name, delta.arguments))
            found.ids.append(delta.call_id)
        else:
            assert delta.index == len(found.calls) - 1
            assert delta.call_id is None and delta.name is None and delta.arguments
            name, arguments = found.calls[-1]
            found.calls[-1] = (name, arguments + delta.arguments)
    return found


def parser(example: Example, tools: bool = True) -> parsers.AnswerParser:
    ids = iter(range(1000))
    style = style_of(example.template)
    return parsers.parser_for(style, example.prompt_end, TOOLS if tools else (), lambda: f"id{next(ids)}")


def parsed(example: Example, pieces: Iterable[str], tools: bool = True) -> Joined:
    one = parser(example, tools)
    return joined([delta for piece in pieces for delta in one.push(piece)] + one.finish())


def test_every_style_is_parsed() -> None:
    for example in EXAMPLES:
        with case(example.name, style_of(example.template)):
            found = parsed(example, [example.answer])
            assert (found.content, found.reasoning) == (example.content, example.reasoning)
            calls = [(name, json.loads(arguments)) for name, arguments in found.calls]
            assert calls == list(example.calls)
            assert found.ids == list(example.ids or (f"id{number}" for number in range(len(calls)))) or "CALL_ID" in (
                example.answer
            )


def test_where_an_answer_is_cut_changes_nothing() -> None:
    chosen = random.Random(random_seed())
    for example in EXAMPLES:
        answer, expected = example.answer, parsed(example, [example.answer])
        with case(example.name, "one character each"):
            assert parsed(example, answer) == expected
        for at in range(len(answer)):
            with case(example.name, answer[:at], answer[at:]):
                assert parsed(example, [answer[:at], answer[at:]]) == expected
        for _ in range(20):
            cuts = sorted(chosen.sample(range(len(answer)), min(4, len(answer))))
            pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
            with case(example.name, pieces):
                assert parsed(example, pieces) == expected


@pytest.mark.slow
def test_an_answer_that_ends_anywhere_is_no_error() -> None:
    """The rest is content; arguments may be unfinished, but no call loses its name."""
    for example in EXAMPLES:
        for at in range(len(example.answer)):
            with case(example.name, example.answer[:at]):
                whole = parsed(example, [example.answer[:at]])
                assert whole == parsed(example, example.answer[:at])
                assert len(whole.calls) <= len(example.calls)


FRAGMENTS = sorted({mark for example in EXAMPLES for mark in re.split(r"(?<=[>\]])|(?=[<\[{])", example.answer)})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(EXAMPLES),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12),
    st.integers(min_value=0, max_value=300),
    st.integers(min_value=0, max_value=9),
    st.integers(min_value=1, max_value=9),
)
def test_any_mixture_of_marks_is_parsed_the_same_in_any_pieces(
    example: Example, fragments: list[str], at: int, num_lost: int, size: int
) -> None:
    """Fragments stand in an answer, some of which is lost."""
    answer = example.answer[:at] + "".join(fragments) + example.answer[at + num_lost :]
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    assert parsed(example, pieces) == parsed(example, [answer]) == parsed(example, answer)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(EXAMPLES), st.text(st.characters(exclude_characters="<[{]"), max_size=40))
def test_text_without_marks_passes_unchanged(example: Example, answer: str) -> None:
    found = parsed(example, answer)
    if found.reasoning:  # the prompt had begun it
        assert example.prompt_end.rstrip().endswith((">", ">A")) and found.reasoning.strip() == answer.strip()
    elif answer.strip() and not example.prompt_end.rstrip().endswith(("<think>", "THINKING|>")):
        assert found.content == answer


def test_text_does_not_wait_longer_than_it_must() -> None:
    for example in EXAMPLES:
        if example.prompt_end != "<|im_start|>assistant\n":
            continue
        with case(example.name):
            assert parser(example).push("Some text, 1") == [parsers.ContentDelta("Some text, 1")]
    json_example = EXAMPLES[1]
    one = parser(json_example)
    assert one.push("a <") == [parsers.ContentDelta("a")]
    assert one.push("b") == [parsers.ContentDelta(" <b")]
    assert one.push('<tool_call>{"name": "f", "arguments": {"a": "b') == [
        parsers.ToolCallDelta(0, "id0", "f", '{"a": "b')
    ]
    assert one.push('c"') == [parsers.ToolCallDelta(0, None, None, 'c"')]
    assert one.push("}}</tool_call>") == [parsers.ToolCallDelta(0, None, None, "}")]


def test_calls_are_content_where_the_request_has_no_tools() -> None:
    example = EXAMPLES[1]
    answer = example.answer.removesuffix("<|im_end|>")
    found = parsed(example, [answer], tools=False)
    assert found.calls == [] and found.reasoning == example.reasoning
    assert found.content == answer[answer.index("I look") :]


def test_ids_are_random_and_as_long_as_the_family_needs() -> None:
    call = '{"name": "f", "arguments": {}}'
    for template, answer, form in (
        (JSON, f"<tool_call>{call}</tool_call>", r"call_[0-9a-f]{24}"),
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{call}]", r"[0-9a-f]{9}"),
        (HARMONY, "<|channel|>commentary to=functions.f<|message|>{}", r"call_[0-9a-f]{24}"),
    ):
        with case(template):
            ids = [joined(parsers.parser_for(style_of(template), "", TOOLS).push(answer)).ids[0] for _ in range(2)]
            assert ids[0] != ids[1] and all(re.fullmatch(form, found or "") for found in ids)


def test_marks_need_special_tokens_and_plain_text_does_not() -> None:
    for example in EXAMPLES:
        with case(example.name):
            assert style_of(example.template).keeps_special == (example.name != "plain")


def test_a_prompt_begins_reasoning_only_if_it_ends_in_it() -> None:
    for prompt_end, is_reasoning in (
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nSo far", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ):
        with case(prompt_end):
            found = joined(parsers.parser_for(style_of(JSON), prompt_end).push("word"))
            assert (found.reasoning, found.content) == (("word", "") if is_reasoning else ("", "word"))


def test_parameters_become_json_by_their_schema() -> None:
    for text, schema, expected in (
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", None, 12),
        ("twelve", {"type": "integer"}, "twelve"),
        ("12", {"type": ["string", "null"]}, "12"),
        ("null", {"type": ["string", "null"]}, None),
        ("12", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 12),
        ("12", {"enum": ["12", "13"]}, "12"),
        ("[1, {}]", {"type": "array"}, [1, {}]),
        (" False", {"type": "boolean"}, False),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ('"\\ud800"', {}, "\ud800"),
        ("[" * 100_000, {}, "[" * 100_000),
    ):
        with case(text, schema):
            found = parsers.json_value(text, schema)
            assert json.loads(found) == expected
            assert found.encode()
