"""The real `moe-serve` process with the real clients of OpenAI and Anthropic: answers, refusals, and how it ends."""

import itertools
import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from click.testing import CliRunner
from support.cases import case
from support.chat_model import chat_source
from support.models import pack
from support.server_process import SERVE, ServerProcess
from support.waiting import HANG_S, wait_until

from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.cli.serve import main as moe_serve

KEY = "the-test-key"
CONTEXT = 1024
HELLO = "It was a dark night, and the old man said to his daughter:"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    pack(chat_source(folder / "source"), folder / "packed", group=64)
    return folder / "packed"


@pytest.fixture(scope="module")
def server(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ServerProcess(packed, log, "--api-key", f"other,{KEY}", "--context", CONTEXT, "--queue", 8) as running:
        yield running
        assert running.is_running, running.said()
        assert running.stop() == 0
        said = running.said()
        assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=HANG_S) as made:
        yield made


def asking(content: str, **more: Any) -> dict[str, Any]:
    """A chat request whose answer repeats."""
    return {"model": "packed", "messages": [{"role": "user", "content": content}], "seed": 7, "max_tokens": 24, **more}


def is_idle(server: ServerProcess) -> bool:
    found = server.metrics(KEY)
    return found["moe_serve_running"] == found["moe_serve_waiting"] == 0


def test_answers_are_those_of_moe_run(packed: Path, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "max_tokens": 32}
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]

    def written(*more: str) -> str:
        result = CliRunner().invoke(moe_run, [str(packed), "--prompt", HELLO, *given, *more])
        assert result.exit_code == 0, result.output
        return result.stdout.removesuffix("\n")

    chat = client.chat.completions.create(**asking(HELLO, **options))
    text = client.completions.create(model="packed", prompt=HELLO, **options)
    assert (chat.choices[0].message.content or "").removesuffix("\n") == written("--chat")
    assert text.choices[0].text.removesuffix("\n") == written()
    assert chat.usage is not None and text.usage.completion_tokens == 32


def test_a_stream_gives_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**asking(HELLO))
    chunks = list(client.chat.completions.create(**asking(HELLO), stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert sum(map(bool, pieces)) > 5
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_every_protocol_answers_alike(server: ServerProcess, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(**asking(HELLO, temperature=0)).choices[0].message.content
    response = client.responses.create(model="packed", input=HELLO, temperature=0, max_output_tokens=24)
    assert response.output_text == expected
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=HANG_S) as other:
        ask: Any = {"model": "packed", "max_tokens": 24, "messages": [{"role": "user", "content": HELLO}]}
        ask["extra_body"] = {"temperature": 0}
        message = other.messages.create(**ask)
        with other.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        for found in (message, streamed):
            assert "".join(block.text for block in found.content if block.type == "text") == expected
            assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 24


def test_answers_follow_a_schema_or_call_a_tool(server: ServerProcess, client: openai.OpenAI) -> None:
    for seed in range(3):
        with case(seed):
            schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
            answer = client.chat.completions.create(
                **asking("Who are you?", seed=seed, max_tokens=700, response_format=schema)
            )
            person = json.loads(answer.choices[0].message.content or "")
            assert set(person) == {"name", "age"} and len(person["name"]) <= 8 and 0 <= person["age"] <= 99
            tool: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
            ask = asking("Where?", seed=seed, max_tokens=700, tools=[tool], tool_choice="required")
            choice = client.chat.completions.create(**ask).choices[0]
            (call,) = choice.message.tool_calls or ()
            assert choice.finish_reason == "tool_calls"
            assert call.type == "function" and call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=HANG_S) as other:
        message = other.messages.create(
            model="packed",
            max_tokens=700,
            messages=[{"role": "user", "content": "Where?"}],
            tools=[{"name": "weather", "input_schema": CITY}],
            tool_choice={"type": "any"},
        )
        (block,) = message.content
        assert block.type == "tool_use" and message.stop_reason == "tool_use"
        assert block.name == "weather" and block.input["city"] in ("Rome", "Oslo")


def test_a_conversations_next_turn_computes_its_new_tokens_alone(client: openai.OpenAI) -> None:
    first: Any = {"role": "user", "content": f"Once more. {HELLO}"}
    said = client.chat.completions.create(**asking("", messages=[first]))
    assert said.usage is not None
    turns = [first, {"role": "assistant", "content": said.choices[0].message.content}, {"role": "user", "content": "?"}]
    answer = client.chat.completions.create(**asking("", messages=turns))
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens or 0
    assert said.usage.prompt_tokens <= cached < answer.usage.prompt_tokens
    assert answer.model_extra is not None and answer.model_extra["timings"]["cache_n"] == cached


def test_the_models_are_the_pack(server: ServerProcess, client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "packed"
    assert client.models.retrieve("packed") == model
    assert model.model_extra is not None and model.model_extra["max_model_len"] == CONTEXT
    with anthropic.Anthropic(base_url=server.url, api_key=KEY) as other:
        assert [each.id for each in other.models.list()] == ["packed"]


def test_wrong_requests_get_their_own_errors(server: ServerProcess, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(**asking(HELLO, model="gpt")).model == "packed", "any name will do"
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as long:
        client.chat.completions.create(**asking(HELLO * 200))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**asking(HELLO, temperature=-1))
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as other:
        ask: Any = {"max_tokens": 8, "messages": [{"role": "user", "content": HELLO * 200}]}
        with pytest.raises(anthropic.BadRequestError, match=str(CONTEXT)):
            other.messages.create(model="claude", **ask)
    for content in (b"", b"{", b"[]", b"\xff", b'{"messages": 1}'):
        with case(content):
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            answer = httpx2.post(f"{server.url}/v1/chat/completions", content=content, headers=headers, timeout=HANG_S)
            assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_without_the_right_key_everything_but_the_page_and_health_is_refused(server: ServerProcess) -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/metrics"]
    paths += ["/v1/models/packed", "/openapi.json", "/live", "/nowhere", "//", "/v1/messages/count_tokens", "/health/x"]
    keys: tuple[dict[str, str], ...] = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": f"other,{KEY}"},
        {"x-api-key": KEY[:-1]},
    )
    with httpx2.Client(base_url=server.url, timeout=HANG_S) as http:
        for path, headers, method in itertools.product(paths, keys, ("GET", "POST", "PUT")):
            with case(method, path, headers):
                assert http.request(method, server.url + path, headers=headers).status_code == 401
        assert http.get("/").status_code == http.get("/health").status_code == 200
        for right in ({"authorization": f"bearer {KEY}"}, {"x-api-key": "other"}):
            assert http.get("/v1/models", headers=right).status_code == 200
    wrong: dict[str, Any] = {"api_key": "wrong", "max_retries": 0}
    asked: dict[str, Any] = {"model": "packed", "max_tokens": 8, "messages": [{"role": "user", "content": HELLO}]}
    with openai.OpenAI(base_url=f"{server.url}/v1", **wrong) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(**asked)
    with anthropic.Anthropic(base_url=server.url, **wrong) as other, pytest.raises(anthropic.AuthenticationError):
        other.messages.create(**asked)


def test_a_client_that_leaves_frees_its_slot(server: ServerProcess, client: openai.OpenAI) -> None:
    ask: Any = asking(HELLO, max_tokens=900, extra_body={"ignore_eos": True})

    def leave_the_stream(_: float) -> None:
        stream = client.chat.completions.create(**ask, stream=True)
        for _ in itertools.islice(stream, 4):
            pass
        stream.close()

    def leave_after(seconds: float) -> None:  # one that does not stream leaves too
        with suppress(openai.APITimeoutError):
            client.chat.completions.create(**ask, timeout=httpx2.Timeout(HANG_S, read=seconds))

    for leave in (leave_the_stream, leave_after):
        with case(leave.__name__):
            # A busy machine may answer nothing before the client leaves, or everything: then another time is tried.
            for seconds in (0.2, 0.4, 0.8, 1.6, 3.2, 0.1, 0.05):
                before = server.metrics(KEY)["moe_serve_generated_tokens_total"]
                leave(seconds)
                wait_until(lambda: is_idle(server))
                if 0 < server.metrics(KEY)["moe_serve_generated_tokens_total"] - before < 900:
                    break
            else:
                pytest.fail("no answer was cut short")


def test_answers_of_several_at_once_are_those_alone(server: ServerProcess, client: openai.OpenAI) -> None:
    questions = [asking(f"{number}. {HELLO} " * (1 + 3 * (number % 3)), seed=number) for number in range(8)]

    def answered(question: dict[str, Any]) -> str | None:
        return client.chat.completions.create(**question).choices[0].message.content

    with ThreadPoolExecutor(len(questions)) as threads:
        together = list(threads.map(answered, questions))
    alone = [answered(question) for question in questions]
    assert together == alone and len(set(alone)) == len(alone)
    wait_until(lambda: is_idle(server))


@pytest.mark.slow
def test_what_cannot_start_says_why_in_one_line(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases: list[tuple[list[object], int, str]] = [
            ([packed, "--port", port], 1, f"cannot listen on 127.0.0.1 port {port}"),
            ([tmp_path / "nowhere", "--port", 0], 1, "no such folder"),
            ([tmp_path / "empty", "--port", 0], 1, "manifest.json"),
            ([packed, "--port", 0, "--context", 4096], 1, "--context 4096: this model has 2048 positions"),
            ([packed, "--port", 0, "--sessions", tmp_path / "file"], 2, "--sessions"),
            ([packed, "--port", 0, "--sessions", tmp_path / "file" / "in-it"], 1, "--sessions"),
            ([packed, "--port", 0, "--budget", "1M"], 1, "raise it or shorten the context with --context"),
            ([packed, "--port", "many"], 2, "--port"),
            ([packed, "--port", 0, "--parallel", 0], 2, "--parallel"),
        ]
        for given, code, words in cases:
            with case(given):
                result = CliRunner().invoke(moe_serve, list(map(str, given)), prog_name="moe-serve")
                assert (result.exit_code, result.stdout) == (code, ""), result.output
                assert words in result.stderr
                if code == 1:
                    assert result.stderr.startswith("moe-serve: ") and result.stderr.count("\n") == 1, result.stderr
        command = [*SERVE, str(packed), "--port", str(port)]  # the same in a process of its own
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr


@pytest.mark.slow
def test_the_first_signal_ends_a_busy_server_in_order(packed: Path, tmp_path: Path) -> None:
    with ServerProcess(packed, tmp_path / "log", "--parallel", 1) as busy, httpx2.Client(timeout=HANG_S) as http:
        body = asking(HELLO, max_tokens=1900, ignore_eos=True, stream=True)
        with http.stream("POST", f"{busy.url}/v1/chat/completions", json=body) as stream:
            next(stream.iter_lines())
            assert busy.stop() == 0, busy.said()
        assert "Traceback" not in busy.said()


@pytest.mark.slow
def test_a_signal_ends_a_server_that_still_loads(packed: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python, option, code = SERVE
    endless = "import moe_pack.runtime as r, time; r.Engine = lambda *a, **o: time.sleep(1e6); "
    command = [python, option, endless + code, str(packed), "--port", str(port)]
    loading = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: health_of(port) == (503, {"status": "loading"}))
        answer = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": HELLO}, timeout=HANG_S)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        loading.terminate()
        assert loading.wait(HANG_S) == 0
    finally:
        loading.kill()
        _, errors = loading.communicate()
    assert "stopping" in errors and "Traceback" not in errors


def health_of(port: int) -> tuple[int, dict[str, str]] | None:
    try:
        answer = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=HANG_S)
    except httpx2.ConnectError:
        return None
    return answer.status_code, answer.json()


@pytest.mark.slow
def test_sessions_outlive_the_server(packed: Path, tmp_path: Path) -> None:
    sessions, body = tmp_path / "sessions", asking(HELLO * 8)

    def started() -> ServerProcess:
        return ServerProcess(packed, tmp_path / "log", "--sessions", sessions)

    def cached(server: ServerProcess) -> int:
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S).json()
        texts.append(answer["choices"][0]["message"]["content"])
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    texts: list[str] = []
    with started() as first:
        assert cached(first) == 0
        assert first.stop() == 0
    assert len(list(sessions.glob("*.session"))) == 1
    (sessions / "0123.session.tmp").write_bytes(b"half")  # as of a server that was killed while it wrote
    with started() as second:
        assert not list(sessions.glob("*.tmp"))
        assert cached(second) > 100
        second.kill()
    with started() as third:
        assert cached(third) > 100
        assert third.stop() == 0
    assert len(set(texts)) == 1
