"""A real server under attack: a plain chat is answered during each attack, and SIGTERM ends it whatever runs."""

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.cases import case, random_seed
from support.chat_model import chat_source
from support.models import pack
from support.server_attacks import ATTACKS, CHAT, NASTY, chat, random_grammar
from support.server_process import SERVE, ServerProcess
from support.waiting import HANG_S, wait_until

PLAIN = {"prompt": "Hello", "max_tokens": 3}
DRAIN_S = 2
MEMORY_MIB = 500  # more than before: a prompt of 8 MB took 2,500


def few_descriptors(command: list[str]) -> list[str]:
    return ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *command]


def resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    pack(chat_source(folder / "source"), folder / "packed", group=64)
    return folder / "packed"


@pytest.fixture
def server(packed: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    options = ("--context", 64, "--drain", DRAIN_S)
    with ServerProcess(packed, tmp_path / "log", *options, inside=few_descriptors) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "nothing"])
def test_a_server_answers_beside_an_attack_and_ends(server: ServerProcess, name: str) -> None:
    with httpx2.Client(base_url=server.url, timeout=HANG_S) as http:
        assert http.post("/v1/completions", json=PLAIN).status_code == 200
    before = resident_mib(server.pid)
    with ATTACKS[name](server.url, server.port):
        for _ in range(3):
            with httpx2.Client(base_url=server.url, timeout=HANG_S) as http:
                assert http.post("/v1/completions", json=PLAIN).status_code == 200
                assert http.get("/health").status_code == 200
        assert resident_mib(server.pid) - before < MEMORY_MIB
        assert server.stop() == 0
    assert "Traceback" not in server.said()


@pytest.mark.slow
def test_nasty_grammars_are_answered_or_refused(server: ServerProcess) -> None:
    seed = random_seed()
    draw = random.Random(seed)
    bodies = [*NASTY.items(), *((f"random {number}", random_grammar(draw)) for number in range(60))]
    with httpx2.Client(base_url=server.url, timeout=HANG_S) as http:
        for name, fields in bodies:
            with case(name, seed):
                path, asked = (CHAT, chat("a", **fields)) if "response_format" in fields else ("/v1/completions", PLAIN)
                if path != CHAT:
                    asked = {**PLAIN, **fields}
                answer = http.post(path, json=asked)
                assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    assert "Traceback" not in server.said()


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once(packed: Path, tmp_path: Path) -> None:
    with (
        ServerProcess(packed, tmp_path / "log", "--drain", 3600) as server,
        httpx2.Client(base_url=server.url, timeout=HANG_S) as http,
        http.stream("POST", "/v1/completions", json={**PLAIN, "max_tokens": 4000, "ignore_eos": True, "stream": True}),
    ):
        server.signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.said())
        assert server.is_running
        server.signal(signal.SIGTERM)
        wait_until(lambda: not server.is_running)


def test_help_names_what_a_server_does_at_its_end() -> None:
    said = subprocess.run([*SERVE, "--help"], capture_output=True, text=True, timeout=HANG_S, check=True).stdout
    for option in ("--drain SECONDS", "--log-format", "--quiet", "--temperature", "--top-p", "--repetition-penalty"):
        assert option in said
