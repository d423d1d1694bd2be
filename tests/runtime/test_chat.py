"""Chat templates: the pack's own, in a sandbox."""

import json
import re
from pathlib import Path

import pytest
from support.cases import case
from support.models import DEMO_MODEL, TinyMixtral, pack

from moe_pack.formats import Pack, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import ChatTemplate, Text, chat_prompt

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "[{{ message['role'] }}] {{ message['content'] | tojson }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
RENDERED = '<s>[user] "Hello, \\"you\\""</s>\n[assistant]'


def packed(folder: Path, **files: str) -> Pack:
    """A pack with these tokenizer files, `_` in their names standing for a dot before the ending."""
    source = TinyMixtral().write(folder / "source")
    for name, text in files.items():
        (source / ".".join(name.rsplit("__", 1))).write_text(text)
    pack(source, folder / "packed")
    return Pack(folder / "packed")


def config(template: object) -> str:
    return json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template})


def test_a_template_in_the_tokenizer_config_is_rendered(tmp_path: Path) -> None:
    with packed(tmp_path, tokenizer_config__json=config(TEMPLATE)) as opened:
        assert chat_prompt(opened, 'Hello, "you"') == RENDERED


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    with packed(tmp_path, tokenizer_config__json=config(several)) as opened:
        assert chat_prompt(opened, 'Hello, "you"') == RENDERED


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    files = {"tokenizer_config__json": config("no"), "chat_template__jinja": TEMPLATE}
    with packed(tmp_path, **files) as opened:
        assert chat_prompt(opened, 'Hello, "you"') == RENDERED


def test_templates_that_ask_for_tools_or_the_date_find_what_transformers_gives(tmp_path: Path) -> None:
    template = "{% if tools is not none %}tools{% endif %}{{ strftime_now('%d of %%') }}{{ messages[0].content }}"
    source = TinyMixtral().write(tmp_path / "source")
    (source / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    pack(source, tmp_path / "packed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    with Pack(tmp_path / "packed") as opened:
        assert chat_prompt(opened, "Hello") == expected
    assert " of %Hello" in expected and "tools" not in expected


def test_a_pack_without_template_is_refused(tmp_path: Path) -> None:
    with (
        packed(tmp_path, tokenizer_config__json=config(None)) as opened,
        pytest.raises(RunError, match=r"^--chat needs a chat template, and this pack has none; remove --chat$"),
    ):
        chat_prompt(opened, "Hello")


def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_refused(tmp_path: Path) -> None:
    for number, template in enumerate(
        [
            "{{ raise_exception('only pairs of messages') }}",
            "{% if %}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ 1 / 0 }}",
            "{{ undefined.deeply.so }}",
        ]
    ):
        case_folder = tmp_path / str(number)
        case_folder.mkdir()
        with (
            case(template),
            packed(case_folder, tokenizer_config__json=config(template)) as opened,
            pytest.raises(RunError, match=r"^the model's chat template failed \("),
        ):
            chat_prompt(opened, "Hello")


def test_conversations_are_written_as_transformers_writes_them(tmp_path: Path) -> None:
    """With answers in them, without the beginning of another; marks of answers for training change nothing."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content | tojson(ensure_ascii=True, separators=(',', ':')) }}{% endgeneration %}\n"
        "{% else %}<{{ message.role }}>{{ message.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Wie geht's?"},
        {"role": "assistant", "content": "Schön."},
    ]
    found = ChatTemplate.of(FolderFiles(tmp_path))
    assert found is not None
    for goes_on in (False, True):
        with case(goes_on):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=goes_on)
            assert found.render(messages, add_generation_prompt=goes_on) == expected
    assert r'"Sch\u00f6n."' in expected


def test_a_folder_without_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config(None))
    assert ChatTemplate.of(FolderFiles(tmp_path)) is None


def test_an_answer_also_ends_at_the_tokenizers_end_of_sequence(tmp_path: Path) -> None:
    """The configuration of a model that was trained further to chat may have the first model's end alone."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    whole = Text(FolderFiles(tmp_path))
    assert whole.answer_end_ids == whole.end_ids and len(whole.end_ids) == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    text = Text(FolderFiles(tmp_path))
    assert text.end_ids == whole.end_ids
    assert text.answer_end_ids == whole.end_ids | set(text.encode("<s>", special_tokens=False))
    assert len(text.answer_end_ids) == 2
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "no such token"}')
    assert Text(FolderFiles(tmp_path)).answer_end_ids == whole.end_ids


def test_the_demo_model_is_not_one_to_chat_with() -> None:
    assert "chat_template" not in json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())


# What templates of the Harmony format use: macros, names that may be undefined, namespaces, the date.
HARMONY = """
{%- macro system() -%}
    {%- if effort is not defined %}{%- set effort = "medium" %}{%- endif %}
    {{- "Today: " + strftime_now("%Y") + "\n" }}
    {{- "Effort: " + effort }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or tools %}{{- raise_exception("no tools here") }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == "user" -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
        {%- set last.name = message.role %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and last.name is not none -%}
<|start|>assistant
{%- endif -%}
"""


def test_a_template_of_the_harmony_format_is_rendered(tmp_path: Path) -> None:
    with packed(tmp_path, chat_template__jinja=HARMONY) as opened:
        found = chat_prompt(opened, "Hello")
    assert re.fullmatch(
        r"<\|start\|>system<\|message\|>Today: \d{4}\nEffort: medium<\|end\|>"
        r"<\|start\|>user<\|message\|>Hello<\|end\|><\|start\|>assistant",
        found,
    )
