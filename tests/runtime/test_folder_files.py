"""Texts and templates from the files of folders; templates have limits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.cases import case
from support.models import BOOK, DEMO_MODEL, TinyMixtral, pack

import moe_pack.runtime.helper
from moe_pack.formats import CheckpointError, Pack, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import ChatTemplate, Text
from moe_pack.runtime.helper import Helper, HelperBusyError, HelperError

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model's small files, to change."""
    for name in FILES:
        shutil.copy(DEMO_MODEL / name, tmp_path / name)
    return tmp_path


def test_a_checkpoint_and_its_pack_read_text_alike(tmp_path: Path) -> None:
    source = TinyMixtral(config={"eos_token_id": [1, 3]}).write(tmp_path / "source")
    shutil.copy(DEMO_MODEL / "tokenizer.json", source)
    pack(source, tmp_path / "packed")
    of_folder = Text(FolderFiles(source))
    with Pack(tmp_path / "packed") as opened:
        of_pack = Text(opened)
    book = BOOK.read_text("utf-8")[:5000]
    assert of_folder.encode(book) == of_pack.encode(book)
    assert of_folder.end_ids == of_pack.end_ids == {1, 3}
    assert of_folder.vocab_size == of_pack.vocab_size == 96


def test_a_folder_s_files_are_found_and_read_whole(folder: Path) -> None:
    held = FolderFiles(folder)
    assert held.has("config.json")
    assert not held.has("chat_template.jinja")
    assert held.read_file("config.json").tobytes() == (folder / "config.json").read_bytes()
    (folder / "empty.txt").touch()
    assert held.read_file("empty.txt").tobytes() == b""


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/nowhere: no such folder$"):
        FolderFiles(tmp_path / "nowhere")


def test_a_file_may_have_64_mib(folder: Path) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(64 * MIB)
    assert FolderFiles(folder).read_file("tokenizer.json").nbytes == 64 * MIB
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(64 * MIB + 1)
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: 67108865 bytes, at most 67108864$"):
        Text(FolderFiles(folder))


def test_a_checkpoint_without_tokenizer_is_told_how_to_get_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RunError) as caught:
        Text(FolderFiles(folder))
    assert str(caught.value) == (
        f"{folder}: has no tokenizer.json, so it cannot read text; download it, or create it with transformers: "
        "AutoTokenizer.from_pretrained(IN).save_pretrained(OUT)"
    )


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer.json", '{"version": "1.0"}', r"^tokenizer\.json: the tokenizers library cannot read it \("),
        ("tokenizer.json", "", r"^tokenizer\.json: is empty; the download failed, or the file is damaged$"),
        ("tokenizer_config.json", "{", r"^tokenizer_config\.json: not valid JSON"),
        (
            "generation_config.json",
            '{"eos_token_id": "no token"}',
            r"^generation_config\.json: eos_token_id is 'no token', expected a",
        ),
        ("generation_config.json", '{"eos_token_id": [1.5]}', r"^generation_config\.json: eos_token_id is \[1\.5\]"),
        ("generation_config.json", "", r"^generation_config\.json: is empty; the download failed"),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            r"^tokenizer_config\.json: chat_template is 5, expected a text",
        ),
        ("tokenizer_config.json", '{"eos_token": 5}', r"^tokenizer_config\.json: eos_token is 5, expected a text or"),
    ],
)
def test_a_damaged_file_of_a_checkpoint_is_the_checkpoint_s_fault(
    name: str, content: str, fault: str, folder: Path
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=fault):
        Text(FolderFiles(folder))


def test_a_folder_in_a_file_s_place_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is not a regular file$"):
        Text(FolderFiles(folder))


def test_a_multimodal_config_says_the_vocabulary_and_the_end_where_its_text_model_is(folder: Path) -> None:
    own = {"vocab_size": 77, "eos_token_id": [5, 6]}
    cases = (
        {"model_type": "qwen3_vl_moe", "text_config": own},
        {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": own}},
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    for config in cases:
        with case(config):
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps(config))
            text = Text(FolderFiles(folder))
            assert text.vocab_size == 77 and text.end_ids == {5, 6}


@pytest.mark.parametrize("config", [None, {}, {"vocab_size": "4096"}, {"vocab_size": True}, {"vocab_size": 0}, []])
def test_a_config_that_does_not_say_the_vocabulary_is_refused_when_it_is_asked(config: object, folder: Path) -> None:
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    text = Text(FolderFiles(folder))
    with pytest.raises(RunError, match=r"^config\.json: vocab_size is .*, expected a whole number from 1$"):
        text.vocab_size  # noqa: B018  # asking is what fails


def test_a_length_that_the_tokenizer_s_maker_chose_cuts_and_pads_nothing(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    values["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    words = "It was a dark night, and nobody was there to see it."
    assert Text(FolderFiles(folder)).encode(words) == Text(FolderFiles(DEMO_MODEL)).encode(words)


MESSAGES = [{"role": "user", "content": "Hello"}]
DEEP = "{% macro f(x) %}{{ f(x.a) if x.a is defined else 'end' }}{% endmacro %}{{ f(messages[0].deep) }}"


def test_a_template_that_fails_in_any_way_is_one_line() -> None:
    for template, expected in {
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
        "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f([x]) }}{% endmacro %}{{ g(1) }}": "recursion",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "",
        "{{ " + "[" * 150 + "]" * 150 + " }}": "",
        "{{ 'a' * 10**10 }}": "memory",
        "{% set n = messages | length %}{{ ('a' * 10000000 * n) * (1000 * n) }}": "memory",
        "{{ 10 ** (10 ** 3) * 1.5 }}": "",
        "{{ '%1000000000000d' % 1 }}": "",
        "{{ '{:>99999999999}'.format(1) }}": "",
        "{% for i in range(10**9) %}{% endfor %}": "Range too big",
        "{{ messages[0].content.encode('utf-9') }}": "utf-9",
        "{{ messages[5].content.x }}": "no element 5",
        "{{ strftime_now(5) }}": "argument",
        "{% if %}": "Expected an expression",
        "{{ raise_exception('no\n\nsystem') }}": "no system",
        "{% include 'x' %}": "loader",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    }.items():
        with case(template), pytest.raises(RunError, match=r"^the model's chat template failed \(.+\)$") as caught:
            ChatTemplate(template).render(MESSAGES, add_generation_prompt=True)
        with case(template):
            assert expected in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_template_that_never_ends_is_given_up_and_the_next_one_runs() -> None:
    helper, unending = (
        Helper(seconds=0.5),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    )
    try:
        for template in (unending, "{{ ('a ' * 3000000) | wordwrap(2) | wordwrap(1) | wordwrap(3) }}" * 10):
            with case(template), pytest.raises(HelperError, match=r"^it takes longer than 0\.5 seconds$"):
                helper.render(template, {})
        with pytest.raises(HelperError, match="longer"):
            helper.compile("{{ " + "'a'.lower()," * 400_000 + " }}")
    finally:
        helper.close()
    assert ChatTemplate("{{ messages[0].content }}").render(MESSAGES, add_generation_prompt=False) == "Hello"


def test_what_others_left_in_the_process_is_not_blamed_on_a_template() -> None:
    """Compiled templates are kept, and these take most of the process's memory."""
    helper, needs = Helper(memory_bytes=200 << 20), "{{ (a * n) | length }}"
    try:
        assert helper.render(needs, {"a": "a", "n": 10**8}) == "100000000"
        for number in range(6):
            helper.compile(f"{{{{ 'a' * 9000000 }}}}{number}")
        assert helper.render(needs, {"a": "a", "n": 10**8}) == "100000000"
        for _ in range(2):
            with pytest.raises(HelperError, match="memory"):
                helper.render(needs, {"a": "a", "n": 10**9})
    finally:
        helper.close()


def test_a_machine_that_is_busy_is_not_blamed_on_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(HelperBusyError, match="cannot start"):
        helper.render("a", {})


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(RunError, match=r"it writes more than 64 MiB\)$"):
        ChatTemplate("{{ 'abcd' * (17 * 2**20) }}").render(MESSAGES, add_generation_prompt=False)
    written = ChatTemplate("{{ 'abcd' * 2**20 }}").render(MESSAGES, add_generation_prompt=False)
    assert written == "abcd" * 2**20


def test_messages_of_any_depth_are_rendered_or_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"a": deep}
    messages = [{"role": "user", "content": "x", "deep": deep}]
    with pytest.raises(RunError, match=r"^the model's chat template failed "):
        ChatTemplate(DEEP).render(messages, add_generation_prompt=False)
    some: dict[str, object] = {"a": {"a": {"b": 5}}}
    assert "end" in ChatTemplate(DEEP).render([{"deep": some}], add_generation_prompt=False)


def test_what_is_no_text_reaches_the_template_as_it_is() -> None:
    values = {"a": [1, 2.5, None, True, {"b": "ü\ud800"}], "nan": float("nan"), "big": 10**30}
    written = ChatTemplate("{{ v | tojson }}").render(MESSAGES, add_generation_prompt=False, extra={"v": values})
    assert written == json.dumps(values, ensure_ascii=False)


def test_many_threads_may_render_at_once() -> None:
    template, found = ChatTemplate("{{ messages[0].content }}"), dict[int, str]()

    def render(number: int) -> None:
        for _ in range(20):
            found[number] = template.render([{"content": f"text {number}"}], add_generation_prompt=False)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"text {number}" for number in range(8)}


@pytest.mark.slow
def test_a_tokenizer_is_tried_within_the_same_limits() -> None:
    helper = Helper()
    whole = (DEMO_MODEL / "tokenizer.json").read_text("utf-8")
    try:
        helper.try_tokenizer(whole, ["Hello"])
        values = json.loads(whole)
        slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, values["pre_tokenizer"]]}
        with pytest.raises(HelperError, match="retry-limit"):
            helper.try_tokenizer(json.dumps(values), ["a" * 100 + "!"])
        huge = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}
        with pytest.raises(HelperError, match="lack of memory"):
            helper.try_tokenizer(json.dumps(json.loads(whole) | {"normalizer": huge}), ["a" * 10_000])
    finally:
        helper.close()


SCRIPT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from helper import HELPER
os.write(1, HELPER.render("{{ 'ready' }}", {}).encode())
signal.pause()
"""


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps to list processes")
def test_no_process_is_left_behind() -> None:
    folder = str(Path(moe_pack.runtime.helper.__file__).parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with case(number):
            started = [sys.executable, "-c", SCRIPT, folder]
            program = subprocess.Popen(started, stdout=-1, stderr=subprocess.DEVNULL, start_new_session=True)
            with program:
                assert program.stdout is not None and program.stdout.read(5) == b"ready"
                assert len(in_session(program.pid)) == 2
                os.kill(program.pid, number)
            while in_session(program.pid):  # the helper sees that nobody asks any more
                time.sleep(0.05)


def in_session(leader: int) -> list[str]:
    """The running processes of a session."""
    done = subprocess.run(["ps", "-o", "stat=", "-g", str(leader)], capture_output=True, text=True)
    return [state for state in done.stdout.split() if not state.startswith("Z")]
