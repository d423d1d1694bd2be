"""`moe-serve --device cuda --parallel 4` over plain memory: real clients, some of which leave, and drafts."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import httpx2
import openai
import pytest
from support.chat_model import chat_source
from support.models import pack
from support.plain_gpu import PlainMemoryOfAGpu, plain_gpu

import moe_pack.runtime.gpu.token.engine as gpu_engine
from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, SamplingOptions, Text
from moe_pack.runtime.cli.serve import ServeCommand, _listening, _Server
from moe_pack.runtime.drafts import Drafts
from moe_pack.runtime.drafts.drafter import DraftCounts
from moe_pack.runtime.generate import generate
from moe_pack.runtime.sampling import Sampler

PROMPTS = ["It was a dark night", "The old man", "She said to", "In the morning the", "At last"]
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    pack(chat_source(folder / "source"), folder / "packed", group=64)
    return folder / "packed"


@pytest.fixture
def gpu(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> PlainMemoryOfAGpu:
    monkeypatch.setattr(gpu_engine, "run_everything", lambda *of_engine: None)  # `test_presets` runs it
    return plain_gpu(monkeypatch)


@contextmanager
def serving(packed: Path, **options: object) -> Iterator[str]:
    """The command's server with these options; gives its address."""
    command = ServeCommand(
        engine=EngineOptions(device="cuda", kernels="portable"), context=96, port=0, quiet=True, **options
    )
    server = _Server(packed, command)
    with closing(_listening("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server._load(url)
        assert server._fault is None, server._fault
        thread = threading.Thread(target=server._server.run, args=([listener],))
        thread.start()
        try:
            yield url
        finally:
            server._server.should_exit = True
            thread.join()
            server._opened.close()


def said(text: Text, ids: list[int], tokens: list[int]) -> str:
    stream = text.stream(ids)
    return "".join(map(stream.push, tokens)) + stream.finish()


def answers_of(packed: Path, prompts: list[str]) -> list[str]:
    """The answers of the engine on the CPU."""
    found = []
    with Pack(packed) as opened, Engine(opened, EngineOptions(device="cpu", draft="off"), 96) as engine:
        text = Text(opened)
        for prompt in prompts:
            engine.decoder.reset()
            sampler = Sampler(SamplingOptions(temperature=0))
            ids = text.encode(prompt)
            found.append(said(text, ids, list(generate(engine.decoder, ids, sampler, NUM_TOKENS, frozenset()))))
    return found


@pytest.mark.slow
def test_several_requests_get_the_answers_that_they_get_on_the_cpu(gpu: PlainMemoryOfAGpu, packed: Path) -> None:
    gpu.share = 1.0
    expected = answers_of(packed, PROMPTS)
    with serving(packed, parallel=4) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:

        def ask(prompt: str) -> str:
            answer = client.completions.create(model="packed", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
            return answer.choices[0].text

        def leave(prompt: str) -> None:
            """Reads the first tokens of a stream, and leaves."""
            body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "stream": True}
            with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data:") and json.loads(line[5:])["choices"][0]["text"]:
                        return

        with ThreadPoolExecutor(6) as pool:
            gone = [pool.submit(leave, PROMPTS[0])]
            answers = list(pool.map(ask, PROMPTS))
            assert [each.result() for each in gone] == [None]
    assert answers == expected


class Guesses:
    """A drafter that proposes the next tokens of a known text, the last of them wrong."""

    needs_hidden = False

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def propose(self, ids: Sequence[int], hidden: object, most: int) -> list[int]:
        right = self._ids[len(ids) : len(ids) + min(most, 3)]
        return [*right[:-1], *(token + 1 for token in right[-1:])]

    def accepted(self, number: int) -> None:
        pass

    def reset(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_drafts_give_the_same_tokens(share: float, gpu: PlainMemoryOfAGpu, packed: Path) -> None:
    gpu.share = share

    def tokens_of(device: Literal["cpu", "cuda"], guessed: list[int]) -> tuple[list[int], DraftCounts]:
        options = EngineOptions(device=device, kernels="portable", draft="ngram")
        with Pack(packed) as opened, Engine(opened, options, 96) as engine:
            assert engine.drafts is not None, "the option asks for them"
            drafts = Drafts(Guesses(guessed), None, 8) if guessed else engine.drafts
            ids, sampler = Text(opened).encode(PROMPTS[0]), Sampler(SamplingOptions(temperature=0))
            return [*ids, *generate(engine.decoder, ids, sampler, 8, frozenset(), drafts)], drafts.counts

    expected, _ = tokens_of("cpu", [])
    found, counts = tokens_of("cuda", expected)
    assert found == expected
    assert counts.passes < 8 and 0 < counts.accepted < counts.drafted
