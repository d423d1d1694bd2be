"""Tokens, properties, versions and lists of the model, in the words of llama.cpp, vLLM and Ollama."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.cases import case
from support.scripted_scheduler import Characters
from support.served import Served, served

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served() as server:
        yield server


def test_a_text_has_the_tokens_that_each_protocol_asks_for(plain: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(tokenizer: Characters, text: str, special_tokens: bool = True) -> list[int]:
        return [1] * special_tokens + [ord(character) for character in text]

    monkeypatch.setattr(Characters, "encode", encode)
    for body, tokens in (
        ({"content": "ab"}, [97, 98]),
        ({"content": "ab", "add_special": True, "parse_special": True}, [1, 97, 98]),
        ({"prompt": "ab"}, [1, 97, 98]),
        ({"prompt": "ab", "add_special_tokens": False, "model": "any"}, [97, 98]),
        ({"content": ""}, []),
    ):
        with case(body):
            answer = plain.http.post("/tokenize", json=body)
            assert answer.json() == {"count": len(tokens), "max_model_len": 2048, "tokens": tokens}


def test_tokens_with_their_texts(plain: Served) -> None:
    """The scripted tokens above 127 are no text of their own."""
    pieces = plain.http.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()
    assert pieces["tokens"] == [{"id": 97, "piece": "a"}, {"id": 233, "piece": [233]}]
    strings = plain.http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert (strings["tokens"], strings["token_strs"]) == ([97, 233], ["a", "\ufffd"])
    back = plain.http.post("/detokenize", json={"tokens": [72, 105]}).json()
    assert back == {"content": "Hi", "prompt": "Hi"}


def test_a_conversation_has_the_tokens_of_its_prompt(plain: Served) -> None:
    tool = {"type": "function", "function": {"name": "clock"}}
    plain.http.post("/v1/chat/completions", json={"messages": HELLO, "tools": [tool]})
    found = plain.http.post("/tokenize", json={"messages": HELLO, "tools": [tool], "add_generation_prompt": True})
    assert found.json()["tokens"] == list(plain.scheduler.requests[-1].prompt_ids)


def test_what_cannot_be_tokenized_is_refused(plain: Served) -> None:
    for path, body, message in (
        ("/tokenize", {}, "found no text; send one of"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "found content and prompt"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special false is not supported"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}, "add_generation_prompt false"),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}, "of the assistant"),
        ("/detokenize", {"tokens": [256]}, "has token 256, and the model has 256 tokens"),
        ("/detokenize", {"tokens": [-1]}, "greater than or equal to 0"),
    ):
        with case(path, body):
            answer = plain.http.post(path, json=body)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_properties_and_versions(plain: Served) -> None:
    props = plain.http.get("/props").json()
    settings = props["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["temperature"], props["total_slots"]) == (2048, 1.0, 64)
    assert (props["model_path"], props["modalities"]) == ("packed", {"vision": False, "audio": False})
    assert plain.http.get("/tokenizer_info").json() == {"tokenizer_class": "moe-pack", "eos_token": "$"}
    versions = [plain.http.get(path).json() for path in ("/version", "/api/version")]
    assert versions[0] == versions[1] and versions[0].keys() == {"version"}


def test_clients_of_ollama_find_the_model() -> None:
    with served(aliases=("llama3",)) as server:
        models = server.http.get("/api/tags").json()["models"]
        assert [model["name"] for model in models] == ["demo-moe", "llama3"]
        shown = server.http.post("/api/show", json={"model": "llama3"}).json()
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 2048
        assert shown["capabilities"] == ["completion", "tools"]
        assert server.http.post("/api/show", json={"name": "qwen3"}).status_code == 404


def test_what_the_server_has_nothing_for_says_what_to_use(plain: Served, client: openai.OpenAI) -> None:
    for method, path, message in (
        ("POST", "/v1/embeddings", "embedding model"),
        ("POST", "/v1/rerank", "reranking model"),
        ("POST", "/completion", "use /v1/chat/completions or /v1/completions"),
        ("GET", "/slots", "use /metrics"),
    ):
        with case(path):
            answer = plain.http.request(method, path, json={"input": "a"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], message in error["message"]) == (501, "not_supported", True)
    for path in ("/api/chat", "/api/generate"):
        answer = plain.http.post(path, json={"model": "demo-moe"})
        assert (answer.status_code, "use OpenAI's at /v1" in answer.json()["error"]) == (501, True)
    with pytest.raises(openai.APIStatusError, match="makes no embeddings"):
        client.embeddings.create(model="demo-moe", input="a")
