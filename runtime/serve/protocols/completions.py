"""Answers as chat and text completions, with log-probabilities of their tokens and of prompts.

OpenAI's form of text completions is four lists, one entry a token: the token's text, its log-probability, the likeliest
tokens by their text, and its offset in the choice's text. With `echo` the prompt's tokens come first; the first of them
has no log-probability. Sources: OpenAI's API reference; vLLM's `prompt_logprobs`, a list of objects from a token's
number to `logprob`, `rank` and `decoded_token`.
"""

import codecs
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from typing import Any

from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from moe_pack.formats.base.version import VERSION
from moe_pack.runtime.sampling import TokenLogprob
from moe_pack.runtime.serve.protocols import answers, formed
from moe_pack.runtime.serve.protocols.answers import Answer, BlockEvent
from moe_pack.runtime.serve.requests import PromptLogprobs, Request, RequestError
from moe_pack.runtime.serve.service import Generation, Service

FINGERPRINT = f"moe-pack-{VERSION}"
LEAST_LOGPROB = -9999.0  # OpenAI's number for minus infinity, which JSON does not have
MAX_SCORED = 1 << 19  # log-probabilities of prompts in an answer: 43 MB of JSON, with 260 MiB while it is written

DONE = ServerSentEvent("[DONE]", sep="\n")

TokenBytes = Callable[[int], bytes]  # the bytes of a token in a text


def check_scored(requests: Sequence[Request]) -> None:
    """Refuses requests for too many log-probabilities of prompts. Raises: RequestError."""
    asked = [(len(each.prompt_ids), each.prompt_logprobs) for each in requests]
    number = sum(tokens * (top + 1) for tokens, top in asked if top is not None)
    if number > MAX_SCORED:
        raise RequestError(
            f"the prompts' tokens and the likeliest ones at their places are {number:,} log-probabilities, at most "
            f"{MAX_SCORED:,}; ask for fewer likeliest tokens, or for fewer prompts at once",
            "prompt_logprobs",
        )


def token_text(token_bytes: TokenBytes, token: int) -> str:
    """Returns a token's text, with U+FFFD for parts of characters."""
    return token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(token_bytes: TokenBytes, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns OpenAI's form of chat completions."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        text, probability = raw.decode("utf-8", "replace"), max(logprob, LEAST_LOGPROB)
        return {"token": text, "logprob": probability, "bytes": list(raw)}

    content = [
        {**written(entry.token, entry.logprob), "top_logprobs": [written(*each) for each in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    token_bytes: TokenBytes, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: list[int], top: int
) -> dict[str, Any]:
    """Returns OpenAI's form of text completions.

    Args:    tokens: those of `entries`; the entry of a token with nothing before it is None.   offsets: of the tokens
             in the text.   top: the number of likeliest tokens to write, at most.
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
    """Returns the offset of each token of a prompt in the prompt's text, in characters.

    A token that the tokenizer added has the offset of the next one; a blank that it added counts for nothing.
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
    """Returns vLLM's form of a prompt: for each token itself, then the `top` likeliest ones, by their numbers."""

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


def _frame(service: Service, prefix: str) -> dict[str, Any]:
    frame = {"id": formed.new_id(prefix), "created": int(time.time()), "model": service.model_id}
    return {**frame, "system_fingerprint": FINGERPRINT}


class ChatWriter:
    """Writes answers as chat completions."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"
    begins_with_prompt = False  # whether an answer's first chunk needs the log-probabilities of its prompt

    def __init__(self, service: Service, logprobs: bool, prompt_logprobs: int | None = None) -> None:
        self.service, self._logprobs, self._prompt_logprobs = service, logprobs, prompt_logprobs
        self.frame = _frame(service, "chatcmpl-")

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
        """Returns the log-probabilities of the prompt, which all answers share, if they are asked for."""
        top, found = self._prompt_logprobs, answers[0].prompt_logprobs
        if top is None or found is None:
            return {}
        return {"prompt_logprobs": vllm_prompt_logprobs(self.service.token_bytes, found, top)}

    def piece(
        self, index: int, answer: Answer, logprobs: list[TokenLogprob], change: BlockEvent | None = None
    ) -> dict[str, Any]:
        """Returns the choice of a stream's chunk: it begins or ends an answer, or adds a `change` to it."""
        reason = finish_reason(answer) if change is None and answer.end is not None else None
        if change is None:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if reason is None else {}
        elif change.block.kind == "content":
            delta = {"content": change.text}
        elif change.block.kind == "reasoning":
            delta = {"reasoning_content": change.text}
        else:
            block = change.block
            call: dict[str, Any] = {"function": {"arguments": change.text}}
            if change.change == "open":
                call = {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": ""}}
            delta = {"tool_calls": [{"index": answer.calls.index(block), **call}]}
        written = self._written_logprobs(logprobs) if logprobs else None
        return {"index": index, "delta": delta, "logprobs": written, "finish_reason": reason}

    def _written_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.service.token_bytes, logprobs) if self._logprobs else None


class TextWriter:
    """Writes answers as text completions.

    Args:    echoes: the texts before the answers.   top: the number of likeliest tokens to write with each token; None:
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
        self.frame = _frame(service, "cmpl-")

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Returns a whole answer."""
        text = self._echoes[index] + answer.text("content")
        choice = self._choice(index, text, answer.logprobs, finish_reason(answer), answer.prompt_logprobs)
        if self._prompt_top is not None and answer.prompt_logprobs is not None:
            written = vllm_prompt_logprobs(self.service.token_bytes, answer.prompt_logprobs, self._prompt_top)
            choice["prompt_logprobs"] = written
        return choice

    def about_prompt(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns nothing: prompts differ, and each choice has the log-probabilities of its own."""
        return {}

    def piece(
        self, index: int, answer: Answer, logprobs: list[TokenLogprob], change: BlockEvent | None = None
    ) -> dict[str, Any]:
        """Returns the choice of a stream's chunk: it begins or ends an answer, or adds a `change` to it."""
        if change is not None:
            return self._choice(index, change.text, logprobs, None)
        if answer.end is not None:
            return self._choice(index, "", logprobs, finish_reason(answer))
        return self._choice(index, self._echoes[index], [], None, answer.prompt_logprobs)

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
    """Returns the reason of an answer's end in OpenAI's words."""
    if answer.ended.reason == "length":
        return "length"
    return "tool_calls" if answer.calls else "stop"


async def written(writer: ChatWriter | TextWriter, prepared: answers.Prepared, answers_each: int) -> Response:
    """Returns the response with whole answers; each `answers_each` of them share a prompt."""
    whole = await answers.whole_answers(writer.service, prepared)

    def response() -> Response:
        choices = [writer.choice(index, answer) for index, answer in enumerate(whole)]
        head = {"object": writer.object_name, **writer.frame, "choices": choices, **writer.about_prompt(whole)}
        took = {"usage": usage(whole, answers_each), "timings": timings(whole, answers_each)}
        return JSONResponse({**head, **took, **prepared.warned})

    # The log-probabilities of long prompts take seconds to write; others are served meanwhile.
    return response() if whole[0].prompt_logprobs is None else await run_in_threadpool(response)


async def streamed(
    writer: ChatWriter | TextWriter, prepared: answers.Prepared, with_usage: bool, answers_each: int
) -> AsyncGenerator[ServerSentEvent, None]:
    """Yields the chunks of a stream; the last one has `timings`, `warnings`, and `usage` where the request asks."""

    def chunk(choices: list[dict[str, Any]], **more: object) -> ServerSentEvent:
        nothing = {"usage": None} if with_usage else {}
        return answers.event_of({"object": writer.chunk_name, **writer.frame, "choices": choices, **nothing, **more})

    def first(index: int, answer: Answer) -> ServerSentEvent:
        return chunk([writer.piece(index, answer, [])])

    begun = [Answer() for _ in prepared.requests]
    waiting: list[list[TokenLogprob]] = [[] for _ in begun]  # of tokens whose text has not come yet
    with closing(Generation(writer.service.scheduler, prepared.requests)) as run:
        for index, answer in enumerate(begun):
            if not writer.begins_with_prompt:
                yield first(index, answer)
        async for step in answers.steps(run, prepared):
            index, answer = step.index, begun[step.index]
            if step.logprob is not None:
                waiting[index].append(step.logprob)
            for change in answer.take(step):
                if change.text or (change.change == "open" and change.block.kind == "call"):
                    yield chunk([writer.piece(index, answer, waiting[index], change)])
                    waiting[index] = []
            if step.prompt_logprobs is not None and writer.begins_with_prompt:
                yield await run_in_threadpool(first, index, answer)  # it may take long to write, as in `written`
            if step.end is not None:
                is_last = not with_usage and all(one.end is not None for one in begun)
                more = {"timings": timings(begun, answers_each), **prepared.warned} if is_last else {}
                yield chunk([writer.piece(index, answer, waiting[index])], **more)
    if with_usage:
        took = {"usage": usage(begun, answers_each), "timings": timings(begun, answers_each)}
        yield chunk([], **took, **prepared.warned)
    yield DONE


def usage(ended: Sequence[Answer], answers_each: int) -> dict[str, Any]:
    """Returns the tokens of answers in OpenAI's words."""
    found = answers.Usage.of(ended, answers_each)
    return {
        "prompt_tokens": found.prompt,
        "completion_tokens": found.completion,
        "total_tokens": found.prompt + found.completion,
        "prompt_tokens_details": {"cached_tokens": found.cached},
        "completion_tokens_details": {"reasoning_tokens": found.reasoning},
    }


def timings(ended: Sequence[Answer], answers_each: int) -> dict[str, float]:
    """Returns the times of answers in llama.cpp's words; the longest times of several answers at once."""
    found = answers.Usage.of(ended, answers_each)
    prefill_s = max(answer.ended.timings.prefill_s for answer in ended)
    decode_s = max(answer.ended.timings.decode_s for answer in ended)
    computed = found.prompt - found.cached
    return {
        "cache_n": found.cached,
        "prompt_n": computed,
        "prompt_ms": 1000 * prefill_s,
        "prompt_per_second": computed / prefill_s if prefill_s else 0.0,
        "predicted_n": found.completion,
        "predicted_ms": 1000 * decode_s,
        "predicted_per_second": found.completion / decode_s if decode_s else 0.0,
    }
