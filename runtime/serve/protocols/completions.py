"""Answers as chat and text completions write them, with their log-probabilities and those of prompts.

OpenAI's form of text completions is four lists, one entry a token: the token's text, its log-probability, the likeliest
tokens by their text, and where in the choice's text it begins. With `echo` the prompt's tokens come first, of which the
first has no log-probability: nothing stands before it. Sources: OpenAI's API reference; vLLM's `prompt_logprobs`, a
list of objects from a token's number to `logprob`, `rank` and `decoded_token`.
"""

import codecs
import time
from collections.abc import Callable, Sequence
from typing import Any

from moe_pack.formats.base.version import VERSION
from moe_pack.runtime.sampling import TokenLogprob
from moe_pack.runtime.serve.protocols.answers import Answer, Block, BlockEvent
from moe_pack.runtime.serve.protocols.formed import new_id
from moe_pack.runtime.serve.requests import PromptLogprobs, Request, RequestError
from moe_pack.runtime.serve.service import Service

FINGERPRINT = f"moe-pack-{VERSION}"
LEAST_LOGPROB = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have
MAX_SCORED = 1 << 19  # log-probabilities of prompts in an answer: 43 MB of JSON, with 260 MiB while it is written

TokenBytes = Callable[[int], bytes]  # the bytes of a token in a text


def check_scored(requests: Sequence[Request]) -> None:
    """Refuses requests that ask for more log-probabilities of prompts than a server should write.

    Raises:  RequestError.
    """
    asked = [(len(each.prompt_ids), each.prompt_logprobs) for each in requests]
    number = sum(tokens * (top + 1) for tokens, top in asked if top is not None)
    if number > MAX_SCORED:
        raise RequestError(
            f"the prompts' tokens and the likeliest ones at their places are {number:,} log-probabilities, at most "
            f"{MAX_SCORED:,}; ask for fewer likeliest tokens, or for fewer prompts at once",
            "prompt_logprobs",
        )


def token_text(token_bytes: TokenBytes, token: int) -> str:
    """Returns a token's text; bytes that are a part of a character are its replacement."""
    return token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(token_bytes: TokenBytes, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns OpenAI's form of chat completions."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(raw),
        }

    content = [
        {
            **written(entry.token, entry.logprob),
            "top_logprobs": [written(token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    token_bytes: TokenBytes, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: list[int], top: int
) -> dict[str, Any]:
    """Returns OpenAI's form of text completions.

    Args:    tokens: those of `entries`, in which None stands for a token that has nothing before it.   offsets: where
             the tokens begin.   top: the likeliest tokens to write, at most.
    """
    return {
        "tokens": [token_text(token_bytes, token) for token in tokens],
        "token_logprobs": [None if entry is None else max(entry.logprob, LEAST_LOGPROB) for entry in entries],
        "top_logprobs": [None if entry is None else _by_text(token_bytes, entry, top) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(token_bytes: TokenBytes, entry: TokenLogprob, top: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in entry.top[:top]:
        # Parts of characters have the same text; the likeliest comes first and stays.
        found.setdefault(token_text(token_bytes, token), max(logprob, LEAST_LOGPROB))
    return found


def prompt_offsets(token_bytes: TokenBytes, tokens: Sequence[int], text: str) -> list[int]:
    """Returns where each token of a prompt begins in the prompt's text, in characters.

    A token that the tokenizer added, as one that begins a text, has no place of its own: the next one begins where it
    does. Neither have blanks that the tokenizer puts before a text.
    """
    raw, place, characters = b"".join(map(token_bytes, tokens)), 0, 0
    if raw.decode("utf-8", "replace") != text:
        raw = text.encode("utf-8", "replace")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    for token in tokens:
        offsets.append(characters)
        own = token_bytes(token)
        if not raw.startswith(own, place):
            own = own.lstrip(b" ")
        if raw.startswith(own, place):
            place += len(own)
            characters += len(decoder.decode(own))
    return offsets


def vllm_prompt_logprobs(
    token_bytes: TokenBytes, logprobs: PromptLogprobs, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Returns vLLM's form of a prompt: for each token itself first, then the `top` likeliest, by their numbers."""

    def written(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = token_text(token_bytes, token)
        return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": text}

    found: list[dict[str, dict[str, Any]] | None] = []
    for entry in logprobs:
        if entry is None:
            found.append(None)
            continue
        row = {str(entry.token): written(entry.token, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:top], start=1):
            row.setdefault(str(token), written(token, logprob, rank))
        found.append(row)
    return found


class ChatWriter:
    """Writes answers as chat completions."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    begins_with_prompt = False  # whether an answer's first chunk has what is known when its prompt has run

    def __init__(self, service: Service, logprobs: bool, prompt_logprobs: int | None = None) -> None:
        self.service, self._logprobs, self._prompt_logprobs = service, logprobs, prompt_logprobs
        self.frame = {
            "id": new_id("chatcmpl-"),
            "created": int(time.time()),
            "model": service.model_id,
            "system_fingerprint": FINGERPRINT,
        }

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Returns a whole answer."""
        content, reasoning = answer.text("content"), answer.text("reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if answer.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in answer.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._written_logprobs(answer.logprobs),
            "finish_reason": finish_reason(answer),
        }

    def about_prompt(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns what a request asks about the prompt, which all answers share."""
        top, found = self._prompt_logprobs, answers[0].prompt_logprobs
        if top is None or found is None:
            return {}
        return {"prompt_logprobs": vllm_prompt_logprobs(self.service.token_bytes, found, top)}

    def first(self, index: int, answer: Answer) -> dict[str, Any]:
        """Returns the choice of a stream's chunk that begins an answer."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def added(self, index: int, change: BlockEvent, answer: Answer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Returns the choice of a chunk that adds to an answer."""
        block = change.block
        delta: dict[str, Any] = {"content": change.text}
        if block.kind == "reasoning":
            delta = {"reasoning_content": change.text}
        elif block.kind == "call":
            delta = {"tool_calls": [_call_delta(answer.calls.index(block), change, block)]}
        written = self._written_logprobs(logprobs) if logprobs else None
        return {"index": index, "delta": delta, "logprobs": written, "finish_reason": None}

    def last(self, index: int, answer: Answer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Returns the choice of a chunk that ends an answer."""
        written = self._written_logprobs(logprobs) if logprobs else None
        return {"index": index, "delta": {}, "logprobs": written, "finish_reason": finish_reason(answer)}

    def _written_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.service.token_bytes, logprobs) if self._logprobs else None


def _call_delta(index: int, change: BlockEvent, block: Block) -> dict[str, Any]:
    if change.change == "open":
        function = {"name": block.name, "arguments": ""}
        return {"index": index, "id": block.call_id, "type": "function", "function": function}
    return {"index": index, "function": {"arguments": change.text}}


class TextWriter:
    """Writes answers as text completions, after what is echoed of the prompt.

    Args:    echoes: the texts before the answers.   top: how many likeliest tokens are written with each token; None:
             no log-probabilities.   has_echo: whether prompts are echoed.   prompt_top: as `top`, for the prompt in
             vLLM's form.
    """

    object_name, chunk_name = "text_completion", "text_completion"

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        echoes: list[str],
        top: int | None,
        has_echo: bool,
        prompt_top: int | None,
    ) -> None:
        self.service, self._requests, self._echoes = service, requests, echoes
        self._top, self._prompt_top = top, prompt_top
        self.begins_with_prompt = has_echo and top is not None
        self._offsets = [len(echo) for echo in echoes]
        self.frame = {
            "id": new_id("cmpl-"),
            "created": int(time.time()),
            "model": service.model_id,
            "system_fingerprint": FINGERPRINT,
        }

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Returns a whole answer."""
        text = self._echoes[index] + answer.text("content")
        choice = self._choice(index, text, answer.logprobs, finish_reason(answer), answer.prompt_logprobs)
        if self._prompt_top is not None and answer.prompt_logprobs is not None:
            written = vllm_prompt_logprobs(self.service.token_bytes, answer.prompt_logprobs, self._prompt_top)
            choice["prompt_logprobs"] = written
        return choice

    def about_prompt(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns nothing: prompts differ, and each choice says what is asked about its own."""
        return {}

    def first(self, index: int, answer: Answer) -> dict[str, Any]:
        """Returns the choice of a stream's chunk that begins an answer."""
        return self._choice(index, self._echoes[index], [], None, answer.prompt_logprobs)

    def added(self, index: int, change: BlockEvent, answer: Answer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Returns the choice of a chunk that adds to an answer."""
        return self._choice(index, change.text, logprobs, None)

    def last(self, index: int, answer: Answer, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Returns the choice of a chunk that ends an answer."""
        return self._choice(index, "", logprobs, finish_reason(answer))

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: str | None,
        prompt: PromptLogprobs | None = None,
    ) -> dict[str, Any]:
        written = None
        if self._top is not None:
            echoed = prompt if prompt is not None and self.begins_with_prompt else ()
            written = self._written_logprobs(index, logprobs, echoed, self._top)
        return {"index": index, "text": text, "logprobs": written, "finish_reason": reason}

    def _written_logprobs(
        self, index: int, logprobs: Sequence[TokenLogprob], echoed: PromptLogprobs, top: int
    ) -> dict[str, Any]:
        token_bytes, offsets = self.service.token_bytes, list[int]()
        tokens = self._requests[index].prompt_ids if echoed else ()
        if echoed:
            offsets += prompt_offsets(token_bytes, tokens, self._echoes[index])
        for entry in logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token_text(token_bytes, entry.token))
        tokens = (*tokens, *(entry.token for entry in logprobs))
        return text_logprobs(token_bytes, tokens, (*echoed, *logprobs), offsets, top)


def finish_reason(answer: Answer) -> str:
    """Returns why an answer ended, in OpenAI's words."""
    if answer.ended.reason == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"
