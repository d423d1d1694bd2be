"""Chat templates that take any time or memory, or fail in any way, end in one line, and the next one runs."""

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
from support.models import DEMO_MODEL

import moe_pack.runtime.helper
from moe_pack.formats import RunError
from moe_pack.runtime import ChatTemplate
from moe_pack.runtime.helper import Helper, HelperBusyError, HelperError

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
