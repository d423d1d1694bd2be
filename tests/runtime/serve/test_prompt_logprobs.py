"""Log-probabilities of prompts: those of a plain forward pass and of transformers, in the forms of OpenAI and vLLM."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case
from support.families import NUM_POSITIONS, Tiny, oracle, token_ids, write
from support.models import PackMaker, pack
from support.running_scheduler import VOCAB, WORDS, Answer, NoText, plain_logits, request, served
from support.scripted_scheduler import Script
from support.served import Served as ServedHttp
from support.served import served as served_http
from support.waiting import HANG_S
from torch import Tensor

from moe_pack.runtime.drafts import Drafts, NgramDrafter
from moe_pack.runtime.model import Decoder
from moe_pack.runtime.sampling import Sampler, logprobs_of_rows
from moe_pack.runtime.serve.protocols.completions import prompt_offsets
from moe_pack.runtime.serve.requests import PromptEvent, PromptLogprobs


def check(found: PromptLogprobs | None, ids: list[int], logits: Tensor, top: int, tolerance: float = 1e-4) -> None:
    """Compares with logits [T, vocabulary] after each token of a whole pass."""
    assert found is not None and len(found) == len(ids) and found[0] is None
    expected = torch.log_softmax(logits.detach().double(), 1)
    for place, entry in enumerate(found[1:], start=1):
        row = expected[place - 1]
        assert entry is not None and entry.token == ids[place] and len(entry.top) == top
        assert abs(entry.logprob - float(row[entry.token])) < tolerance, place
        assert entry.rank is not None
        if top:
            ranked, tokens = row.sort(descending=True, stable=True)
            assert torch.allclose(torch.tensor([p for _, p in entry.top]).double(), ranked[:top], atol=tolerance)
            if float((ranked[: top + 1].diff().abs()).min()) > tolerance:
                assert [token for token, _ in entry.top] == tokens[:top].tolist()
            if abs(entry.logprob - entry.top[0][1]) > tolerance:
                assert entry.rank > 1


def test_prompts_have_the_log_probabilities_of_a_plain_pass(demo_pack: PackMaker) -> None:
    """Alone, next to others, with drafts, and whatever was computed before."""
    for drafts in (None, Drafts(NgramDrafter(), None)):
        with served(demo_pack("none", 4), drafts=drafts) as server:
            ids = server.text.encode(f"{WORDS}. {WORDS}. {WORDS}.")
            logits = plain_logits(demo_pack("none", 4), ids)
            plain = server.run(request(ids, 20))
            runs = [server.submit(replace(request(ids, 20), prompt_logprobs=top))[1] for top in (0, 3)]
            runs += [server.submit(replace(request(ids[:-5], 0), prompt_logprobs=20))[1]]
            for answer, top in zip(runs, (0, 3, 20), strict=True):
                with case(top, drafts is None):
                    length = len(ids) - 5 * (top == 20)
                    check(answer.wait().prompt, ids[:length], logits[:length], top)
                    assert answer.end.reason == "length" and not answer.end.cached_tokens
                    assert answer.tokens == ([] if top == 20 else plain.tokens)
            counts = server.scheduler.counts()
            assert counts.generated_tokens == 60 and counts.num_requests == 4 and counts.cached_tokens == 0
            assert counts.prompt_tokens == 4 * len(ids) - 5
            again = server.run(request(ids, 2))
            assert again.end.cached_tokens == len(ids) - 1, "it left what others may use"
            assert server.run(replace(request(ids, 1), prompt_logprobs=3)).prompt == runs[1].prompt, "to the bit"


def test_a_few_rows_at_a_time_give_the_same(demo_pack: PackMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_rows in (1, 3, 1000):
        monkeypatch.setattr("moe_pack.runtime.serve.scheduler.SCORED_BYTES", num_rows * 20 * VOCAB)
        with served(demo_pack("none", 4), number=1) as server:
            ids = server.text.encode(WORDS * 3)
            logits, decoder = plain_logits(demo_pack("none", 4), ids), server.engine.decoder
            assert isinstance(decoder, Decoder)
            passed: list[int] = []

            def logits_of(
                hidden: Tensor, passed: list[int] = passed, of: Callable[[Tensor], Tensor] = decoder.logits_of
            ) -> Tensor:
                passed.append(len(hidden))
                return of(hidden)

            monkeypatch.setattr(decoder, "logits_of", logits_of)
            check(server.run(replace(request(ids, 1), prompt_logprobs=2)).prompt, ids, logits, 2)
            assert sum(passed) == len(ids) - 1 and max(passed) == min(num_rows, 16), "a pass has 16 tokens"


def test_hybrid_models_and_long_contexts_have_those_of_transformers(tmp_path: Path) -> None:
    """States, windows, and angles that all change when the prompt outgrows the first context."""
    ids = token_ids()[:90]
    for family in ("qwen3_next", "gpt_oss", "phimoe"):
        folder = tmp_path / family
        source = write(Tiny(family, "as it comes"), folder / "source")
        pack(source, folder / "packed", width=16)
        with case(family), served(folder / "packed", 2, context=NUM_POSITIONS, text=NoText()) as server:
            scored = replace(request(ids, 1), prompt_logprobs=2, stable_tokens=37)
            first = server.run(scored).prompt
            check(first, ids, oracle(source)(ids), 2, tolerance=2e-3)
            server.run(request([*ids[:20], *ids[50:70]], 3))  # another beginning pauses no later prompt
            assert server.run(scored).prompt == first


def test_the_token_that_ends_an_answer_is_reported_with_its_prompt(demo_pack: PackMaker) -> None:
    """A client that scores texts drops the last entry, which has to be a token of the answer."""
    with served(demo_pack("none", 4), number=1) as server:
        ids = server.text.encode(WORDS)
        first = server.run(request(ids, 1)).tokens[0]
        ending = replace(request(ids, 5), end_ids=frozenset([first]), top_logprobs=1)
        plain = server.run(ending)
        assert (plain.tokens, plain.logprobs) == ([], []) and plain.end.reason == "stop"
        scored = server.run(replace(ending, prompt_logprobs=1))
        assert (scored.tokens, scored.text) == ([first], "") and scored.logprobs[0].token == first
        assert scored.end.reason == "stop" and scored.end.completion_tokens == 1


def test_a_cancelled_request_reports_no_prompt(demo_pack: PackMaker) -> None:
    with served(demo_pack("none", 4), number=1) as server:
        ids = server.text.encode(WORDS)
        blocker = Answer()
        job = server.scheduler.submit(request(ids, 100), blocker.take_in_steps)
        blocker.events.get(timeout=HANG_S)
        waiting, answer = server.submit(replace(request(ids, 3), prompt_logprobs=1))
        waiting.cancel()
        job.cancel()
        blocker.steps.release(100)
        assert answer.wait().end.reason == "cancelled" and answer.prompt is None
        found = Answer()
        cancelled: list[Any] = []

        def take(event: object) -> None:
            found.events.put(event)  # type: ignore[arg-type]  # events
            if isinstance(event, PromptEvent):
                cancelled[0].cancel()

        cancelled.append(
            server.scheduler.submit(replace(request(ids, 100), prompt_logprobs=1), lambda event: take(event))
        )
        assert found.wait().end.reason == "cancelled" and found.prompt is not None
        assert server.scheduler.failure is None


def test_rows_have_what_a_sampler_says_of_each() -> None:
    generator = torch.Generator().manual_seed(1)
    for size, top in ((3, 0), (50, 1), (50, 7), (50, 50), (3000, 20)):
        with case(size, top):
            logits = torch.randn((9, size), generator=generator)
            logits[4:] = logits[4:].round()  # many equal ones
            tokens = torch.randint(size, (9,), generator=generator).tolist()
            for row, token, found in zip(logits, tokens, logprobs_of_rows(logits, tokens, top), strict=True):
                expected = Sampler.logprobs(row, token, top)
                assert [each for each, _ in found.top] == [each for each, _ in expected.top]
                assert abs(found.logprob - expected.logprob) < 1e-9 and found.rank == int((row > row[token]).sum()) + 1
                if top and found.top[0][0] == token:
                    assert found.top[0][1] == found.logprob, "clients compare them to find out what is greedy"


# ---- as the protocols write them -------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ServedHttp]:
    with served_http(Script("Hi!")) as running:
        yield running


def posted(server: ServedHttp, path: str, **body: object) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected_echo(prompt: str, answer: str, top: int) -> dict[str, Any]:
    """Returns the log-probabilities of a prompt and an answer, by the rules of the scripted scheduler."""
    likeliest = [{chr(ord(c) + 2 - i): -0.25 - i for i in range(top)} for c in prompt[1:]]
    likeliest += [{chr(ord(c) + i): -0.5 - i for i in range(top)} for c in answer]
    return {
        "tokens": [*prompt, *answer],
        "token_logprobs": [None, *[-2.25] * (len(prompt) - 1), *[-0.5] * len(answer)],
        "top_logprobs": [None, *likeliest],
        "text_offset": list(range(len(prompt) + len(answer))),
    }


def test_an_echo_with_logprobs_has_prompt_and_answer(server: ServedHttp) -> None:
    for fields, prompts, answer, top in (
        ({"prompt": "Once", "logprobs": 1, "max_tokens": 1}, ["Once"], "H", 1),
        ({"prompt": "Once", "logprobs": 0, "max_tokens": 0}, ["Once"], "", 0),
        ({"prompt": [79, 110], "logprobs": 2}, ["On"], "Hi!", 2),
        ({"prompt": ["One", "Two"], "logprobs": 2, "n": 2, "max_tokens": 2}, ["One", "One", "Two", "Two"], "Hi", 2),
        ({"prompt": [[79, 110], [84]], "logprobs": 1}, ["On", "T"], "Hi!", 1),
    ):
        with case(fields):
            whole = posted(server, "/v1/completions", echo=True, **fields)
            for choice, prompt in zip(whole["choices"], prompts, strict=True):
                assert choice["text"] == prompt + answer
                assert choice["logprobs"] == expected_echo(prompt, answer, top)
                assert choice["finish_reason"] == ("stop" if answer == "Hi!" else "length")
            found: list[dict[str, list[Any]]] = [{} for _ in prompts]
            texts = [""] * len(prompts)
            raw = server.http.post("/v1/completions", json={"echo": True, "stream": True, **fields}).text
            for line in raw.splitlines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if not texts[choice["index"]]:
                    assert choice["text"] == prompts[choice["index"]], "the prompt comes first, whole"
                texts[choice["index"]] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    found[choice["index"]].setdefault(name, []).extend(values)
            assert texts == [prompt + answer for prompt in prompts]
            assert found == [expected_echo(prompt, answer, top) for prompt in prompts]


def test_prompt_logprobs_have_vllm_s_form(server: ServedHttp) -> None:
    def row(character: str) -> dict[str, Any]:
        likeliest = {
            str(ord(character) + 2 - i): {
                "logprob": -0.25 - i,
                "rank": i + 1,
                "decoded_token": chr(ord(character) + 2 - i),
            }
            for i in range(2)
        }
        return {str(ord(character)): {"logprob": -2.25, "rank": 3, "decoded_token": character}, **likeliest}

    answer = posted(server, "/v1/completions", prompt=["One", "Two"], prompt_logprobs=2)
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [
        [None, row("n"), row("e")],
        [None, row("w"), row("o")],
    ]
    assert all(choice["logprobs"] is None and choice["text"] == "Hi!" for choice in answer["choices"])
    both = posted(server, "/v1/completions", prompt="One", prompt_logprobs=2, logprobs=1, echo=True)["choices"][0]
    assert both["logprobs"] == expected_echo("One", "Hi!", 1) and both["prompt_logprobs"] == [None, row("n"), row("e")]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "One"}]}
    chat = posted(server, "/v1/chat/completions", **body, prompt_logprobs=2, n=2)
    prompt = "".join(map(chr, server.scheduler.requests[-1].prompt_ids))
    assert chat["prompt_logprobs"] == [None, *map(row, prompt[1:])] and len(chat["choices"]) == 2
    assert "prompt_logprobs" not in posted(server, "/v1/chat/completions", **body)


def test_what_does_not_go_together_is_refused(server: ServedHttp) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "One"}]}
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {**chat, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": ["a" * 2000] * 13, "prompt_logprobs": 20}, "prompt_logprobs"),  # 546,000 of them
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {**chat, "max_tokens": 0}, "max_tokens"),
    ):
        with case(path, body):
            answer = server.http.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_offsets_lead_into_the_prompt_s_text() -> None:
    euro = "€".encode()
    for pieces, text, offsets in (
        ((b"On", b"ce", b" upon"), "Once upon", [0, 2, 4]),
        ((b"<s>", b" Once", b" upon"), "Once upon", [0, 0, 4]),  # added by the tokenizer
        ((b"a", euro[:1], euro[1:2], euro[2:], b"b"), "a€b", [0, 1, 1, 1, 2]),
        ((b"a", b"", b"b", b"</s>"), "ab", [0, 1, 1, 2]),
        ((b"a", b"\xff", b"b"), "a\ufffdb", [0, 1, 2]),
        ((), "", []),
    ):
        with case(text):
            found = prompt_offsets(lambda token, pieces=pieces: pieces[token], range(len(pieces)), text)  # type: ignore[misc]  # bytes
            assert found == offsets
