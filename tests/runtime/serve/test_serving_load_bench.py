"""The benchmark of moe-serve under load: its verdict on a real server, and that it sees what is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchlib.asking import PATHS, Asked, Clients, Questions, answer_text
from click.testing import CliRunner
from serving_load import Memory, main
from support.cases import case


@pytest.mark.slow
def test_a_server_stands_a_small_load(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--requests", "200", "--folder", str(tmp_path), "--no-faults", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["faults"] == []
    assert found["statuses"]["200"] > 120
    assert found["marked"] > 40 and found["cached_tokens"] > 0 and found["tokens_a_step"] > 1
    assert {"leaves", "has no key", "is malformed"} <= found["conducts"].keys()


@pytest.mark.slow
def test_full_disks_and_kills_lose_no_answer(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--requests", "20", "--folder", str(tmp_path), "--parallel", "2"])
    assert result.exit_code == 0, result.output


def test_questions_repeat_and_are_of_all_kinds() -> None:
    words = [f"word{number}" for number in range(4000)]
    first, second = (list(Questions(words, 3).mixed(400, Questions(words, 3).marked(8))) for _ in range(2))
    assert first == second != list(Questions(words, 4).mixed(400, ()))
    assert {asked.protocol for asked in first} == set(PATHS)
    assert {asked.is_streamed for asked in first} == {True, False}
    assert len({asked.conduct for asked in first}) == 7


def test_a_growing_server_is_seen() -> None:
    size = 400 << 20
    for last, is_seen in ((size, False), (size + (19 << 20), False), (size + (21 << 20), True), (size // 2, False)):
        with case(last):
            assert ("grew" in Memory(size, last, last).fault()) == is_seen
    assert Memory(size, size, size, 0).fault() == ""
    assert "killed" in Memory(size, size, size, 1).fault()


def test_a_server_that_is_not_there_is_a_fault_of_every_request() -> None:
    words = ["word"] * 400
    outcomes = Clients("http://127.0.0.1:9", "key", 2).ask(iter(Questions(words, 1).marked(4)))
    assert len(outcomes) == 4 and all("no answer" in outcome.fault for outcome in outcomes)


def test_streams_without_an_end_are_no_answers() -> None:
    chat = Asked("chat", "waits", b"", True)
    chunk = 'data: {"choices": [{"index": 0, "delta": {"content": "Yes"}}]}\n\n'
    assert answer_text(chat, f"{chunk}data: [DONE]\n\n".encode()) == "Yes"
    message = replace(chat, protocol="messages")
    delta = 'data: {"type": "content_block_delta", "delta": {"text": "Yes"}}\n\n'
    assert answer_text(message, f'{delta}data: {{"type": "message_stop"}}\n\n'.encode()) == "Yes"
    for asked, raw in ((chat, chunk), (chat, ""), (message, delta), (message, "")):
        with case(asked.protocol, raw), pytest.raises(ValueError, match="no end"):
            answer_text(asked, raw.encode())
