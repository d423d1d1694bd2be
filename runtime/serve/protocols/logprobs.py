"""Log-probabilities as OpenAI's protocols write them, and those of prompts as vLLM does.

OpenAI's form of text completions is four lists, one entry a token: the token's text, its log-probability, the likeliest
tokens by their text, and where in the choice's text it begins. With `echo` the prompt's tokens come first, of which the
first has no log-probability: nothing stands before it. Sources: OpenAI's API reference; vLLM's
`prompt_logprobs`, a list of objects from a token's number to `logprob`, `rank` and `decoded_token`.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from moe_pack.runtime.sampling import TokenLogprob
from moe_pack.runtime.serve.requests import PromptLogprobs, Request, RequestError

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
