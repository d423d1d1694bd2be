"""Full chat templates: tools, calls in the history, variables and continued answers, as transformers has them."""

import json
from pathlib import Path

import pytest
from support.cases import case
from support.models import DEMO_MODEL
from transformers import PreTrainedTokenizerFast

from moe_pack.formats import RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import ChatTemplate, Text

TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ARGUMENTS = {"city": "Zürich"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
TALK: list[dict[str, object]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "How is it in Zürich?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sun": true}'},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "And now?"},
]
SHORT = TALK[:2]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# After the template of Qwen3: tools, reasoning of the last turn, a switch for reasoning.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
# After the template of Mistral: contents are stripped, calls are written as a list of objects.
MISTRAL = """
{{- bos_token }}
{%- if tools is not none %}{{- "[AVAILABLE_TOOLS]" }}{{- tools | tojson }}{{- "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}{{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message["tool_calls"] is defined and message["tool_calls"] is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message["tool_calls"] %}
            {{- call["function"] | tojson }}{{- ", " if not loop.last }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}{{- "[TOOL_RESULTS]" + message["content"] + "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
# After the template of DeepSeek-V3.1: arguments have to be text.
DEEPSEEK = """
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|User|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] + '</call>' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}{{- '<|Assistant|>' + message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '<output>' + message['content'] + '</output>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{{- '<think>' if thinking else '</think>' }}{%- endif %}
"""
# After the template of gpt-oss: reasoning under another name, an effort, calls in a channel.
HARMONY = """
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Reasoning: " + reasoning_effort + "<|end|>" }}
{%- if tools %}{{- "<|start|>developer<|message|>" }}
    {%- for tool in tools %}{{- "type " + tool.function.name + " = () => any;" }}{%- endfor %}{{- "<|end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- if message.tool_calls %}
            {{- "<|start|>assistant to=functions." + message.tool_calls[0].function.name }}
            {{- "<|channel|>commentary json<|message|>" }}
            {{- message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
        {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- endif %}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "qwen": QWEN, "mistral": MISTRAL, "deepseek": DEEPSEEK, "harmony": HARMONY}


def folder_of(folder: Path, template: object, **files: str) -> Path:
    """A folder with the demonstration tokenizer and this template."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", "/")).with_suffix(".jinja").parent.mkdir(exist_ok=True)
        (folder / name.replace("__", "/")).with_suffix(".jinja").write_text(text)
    return folder


def both(folder: Path) -> tuple[ChatTemplate, PreTrainedTokenizerFast]:
    """Our template, and transformers' tokenizer with its own."""
    found = ChatTemplate.of(FolderFiles(folder))
    assert found is not None
    return found, PreTrainedTokenizerFast.from_pretrained(folder)


def with_text_arguments(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """The conversation as clients send it: arguments are JSON text."""
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    call = {**CALL, "function": {"name": "get_weather", "arguments": text}}
    return [{**message, "tool_calls": [call]} if "tool_calls" in message else message for message in messages]


def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    switches: list[dict[str, object]] = [
        {},
        {"enable_thinking": False},
        {"thinking": True},
        {"reasoning_effort": "low"},
    ]
    for name, template in TEMPLATES.items():
        ours, reference = both(folder_of(tmp_path / name, template))
        talks = [SHORT] if name == "chatml" else [SHORT, TALK]
        for messages in talks:
            # Only DeepSeek's kind of template takes text; the others write an object.
            theirs = with_text_arguments(messages) if name == "deepseek" else messages
            for tools in (None, TOOLS):
                for extra in switches:
                    for goes_on in (False, True):
                        with case(name, len(messages), tools, extra, goes_on):
                            expected = reference.apply_chat_template(
                                theirs, tools=tools, tokenize=False, add_generation_prompt=goes_on, **extra
                            )
                            for given in (messages, with_text_arguments(messages)):
                                found = ours.render(given, goes_on, tools=tools, extra=extra)
                                assert found == expected


def test_the_last_message_is_continued_as_transformers_continues_it(tmp_path: Path) -> None:
    for name, template in TEMPLATES.items():
        ours, reference = both(folder_of(tmp_path / name, template))
        for beginning in ("It is", "It is ", "It is\n\n", "It"):
            messages = [*SHORT, {"role": "assistant", "content": beginning}]
            with case(name, beginning):
                expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
                found = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
                assert found == expected
                assert found.endswith(beginning.rstrip() if name == "mistral" else beginning)


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    silent = "{% for m in messages %}{{ m.role }}{% endfor %}"
    for template, messages, expected in (
        (CHATML, [], "the last message has no text to continue"),
        (CHATML, [{"role": "assistant", "content": None}], "the last message has no text to continue"),
        (silent, [{"role": "assistant", "content": "A"}], "does not write the last message"),
    ):
        with case(template, messages), pytest.raises(RunError, match=expected):
            ChatTemplate(template).render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RunError, match="ask for one of them"):
        ChatTemplate(CHATML).render(SHORT, add_generation_prompt=True, continue_final_message=True)


def test_the_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": QWEN}]
    for number, folder in enumerate(
        [
            folder_of(tmp_path / "named", several),
            folder_of(tmp_path / "files", None, chat_template=CHATML, additional_chat_templates__tool_use=QWEN),
        ]
    ):
        ours, reference = both(folder)
        for tools in (None, TOOLS, []):
            with case(number, tools):
                expected = reference.apply_chat_template(SHORT, tools=tools, tokenize=False)
                assert ours.render(SHORT, add_generation_prompt=False, tools=tools) == expected
                assert ours.source(has_tools=tools is not None) == (CHATML if tools is None else QWEN)


def test_documents_and_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ documents[0].text }}{{ style }}{{ bos_token }}{{ messages | length }}", bos_token="<s>")
    documents = [{"title": "T", "text": "D"}]
    extra = {"style": "x", "messages": "not these", "bos_token": "<b>"}
    assert template.render(SHORT, add_generation_prompt=False, documents=documents, extra=extra) == "Dx<b>2"


def test_parts_of_a_message_are_joined_unless_the_template_reads_parts() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}, "C"]
    reads = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    messages: list[dict[str, object]] = [{"role": "user", "content": parts[:2]}]
    assert ChatTemplate(reads).render(messages, add_generation_prompt=False) == "[A][B]"
    messages = [{"role": "user", "content": parts}]
    assert "user\nA\nB\nC<|im_end|>" in ChatTemplate(CHATML).render(messages, add_generation_prompt=False)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RunError, match="part of type 'image_url'"):
        ChatTemplate(CHATML).render(messages, add_generation_prompt=False)


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    for arguments in ("not JSON", "[1]", "", None, "{}"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        with case(arguments):
            found = ChatTemplate(QWEN).render(messages, add_generation_prompt=False)
            written = "{}" if arguments == "" else "null" if arguments is None else arguments
            assert f'"arguments": {written}}}' in found
            assert call["function"] == {"name": "f", "arguments": arguments}, "what the caller gave is changed"


def test_special_tokens_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    """But for those that end an answer, which belong to no text."""
    folder = folder_of(tmp_path / "model", CHATML)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    number = max(tokenizer["model"]["vocab"].values()) + 1
    added = {"id": number, "content": "<|call|>", "special": True, "single_word": False}
    tokenizer["added_tokens"].append({**added, "lstrip": False, "rstrip": False, "normalized": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = Text(FolderFiles(folder))
    prompt = text.encode("It was")
    answer = text.encode("a <|call|>fox 🦊</s>", special_tokens=False)
    assert number in answer and answer[-1] in text.answer_end_ids
    for keeps, expected in ((False, "a fox 🦊"), (True, "a <|call|>fox 🦊")):
        with case(keeps):
            stream = text.stream(prompt, keeps_special=keeps)
            pieces = [stream.push(token) for token in answer]
            assert "".join(pieces) + stream.finish() == expected
            unfinished = text.stream(prompt, keeps_special=keeps)
            pieces = [unfinished.push(token) for token in answer[:-2]]
            assert "".join(pieces) + unfinished.finish() == expected[:-1] + "\N{REPLACEMENT CHARACTER}"
