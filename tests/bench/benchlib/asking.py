"""Requests of all kinds to a server, drawn at random, and what becomes of each.

Most are right. Others come without a key, are malformed, have a prompt that is too long, or come from a client that
leaves: before its body is sent, or before the answer is. Some are *marked*: their answers are known.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

Protocol = Literal["chat", "completion", "responses", "messages"]
Conduct = Literal["waits", "leaves", "leaves half a body", "has no key", "is malformed", "is too long", "is too large"]

PATHS: dict[Protocol, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
ALLOWED: dict[Conduct, frozenset[int]] = {
    "waits": frozenset({200, 429}),
    "leaves": frozenset({200, 429}),
    "leaves half a body": frozenset(),
    "has no key": frozenset({401}),
    "is malformed": frozenset({400}),
    "is too long": frozenset({400}),
    "is too large": frozenset({413}),
}
MAX_BODY_BYTES = 64 << 10  # what the server takes has to be less than a body that is too large
_PAUSE_S = 0.5  # of a client, when the queue is full
_MOST_TRIES = 40  # of a client, which then gives up; a full queue rarely has two places, as an answer twice needs
DEADLINE_S = 120.0  # of one request; a busy server answers in some seconds
_CHANCES: tuple[tuple[Conduct, float], ...] = (
    ("waits", 0.77),
    ("leaves", 0.1),
    ("leaves half a body", 0.02),
    ("has no key", 0.04),
    ("is malformed", 0.04),
    ("is too long", 0.02),
    ("is too large", 0.01),
)
_LONG_SHARE = 0.25  # of prompts
_WORDS = {"short": (4, 30), "long": (150, 350)}
_NUM_BEGINNINGS = 8  # of prompts: so few that many have one in common
_MOST_TOKENS = 40
_MALFORMED = (b"", b"{", b"[]", b"null", b'{"messages": 7, "prompt": {}, "input": 7}', b"\xff\xfe", b"[" * 5000)
_TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}}
_SCHEMA = {"type": "object", "properties": {"is_true": {"type": "boolean"}}, "required": ["is_true"]}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `leaves_s`: when its client leaves.   `mark`: which of the known answers it gets; None: any."""

    protocol: Protocol
    conduct: Conduct
    content: bytes
    is_streamed: bool
    leaves_s: float = 0.0
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    `status`: of HTTP; None if the client left before.   `num_full`: how often the queue was full; the client tried
    again.   `text`: of an answer, all its parts together.   `fault`: what is wrong; empty if nothing is.
    """

    asked: Asked
    status: int | None
    seconds: float
    num_full: int = 0
    text: str | None = None
    fault: str = ""


class Questions:
    """Draws requests; the same seed draws the same.

    Args:    words: of a text that prompts are taken from.
    """

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words, self._random = words, random.Random(seed)

    def marked(self, number: int) -> list[Asked]:
        """Returns requests with seeds, of all protocols in turn."""
        protocols = list(PATHS)
        made = []
        for mark in range(number):
            protocol = protocols[mark % len(protocols)]
            body = self._body(protocol, self._prompt("long" if mark % 3 == 0 else "short")) | {"seed": mark}
            made.append(Asked(protocol, "waits", _json(body), False, mark=mark))
        return made

    def mixed(self, number: int, marked: Sequence[Asked]) -> Iterator[Asked]:
        """Yields requests of all kinds, and each twentieth time or so one of the marked."""
        for _ in range(number):
            if marked and self._random.random() < 0.05:
                asked = self._random.choice(marked)
                yield self._streamed(asked) if self._random.random() < 0.5 else asked
                continue
            yield self._any()

    def _any(self) -> Asked:
        chance = self._random
        protocol: Protocol = chance.choice(list(PATHS))
        conduct = chance.choices([name for name, _ in _CHANCES], [share for _, share in _CHANCES])[0]
        if conduct == "is malformed":
            return Asked(protocol, conduct, chance.choice(_MALFORMED), False)
        is_long = chance.random() < _LONG_SHARE
        prompt = self._prompt("long" if is_long else "short")
        if conduct == "is too long":
            prompt *= 3000 // len(prompt.split())
        body = self._body(protocol, prompt)
        if conduct == "is too large":
            body["more"] = "x" * MAX_BODY_BYTES
        elif conduct == "leaves":
            body |= {"ignore_eos": True, _limit_name(protocol): 400}
        elif protocol == "chat":
            body |= chance.choice(_CHAT_OPTIONS)
        asked = Asked(protocol, conduct, _json(body), False, chance.expovariate(5.0))
        return self._streamed(asked) if chance.random() < 0.5 else asked

    @staticmethod
    def _streamed(asked: Asked) -> Asked:
        return replace(asked, content=_json(json.loads(asked.content) | {"stream": True}), is_streamed=True)

    def _prompt(self, kind: str) -> str:
        count = self._random.randint(*_WORDS[kind])
        start = self._random.randrange(_NUM_BEGINNINGS) * (len(self._words) // _NUM_BEGINNINGS)
        return " ".join(self._words[start : start + count])

    def _body(self, protocol: Protocol, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {_limit_name(protocol): self._random.randint(1, _MOST_TOKENS)}
        if protocol == "completion":
            return body | {"prompt": prompt}
        if protocol == "responses":
            return body | {"input": prompt}
        turns = [{"role": "user", "content": prompt}]
        if self._random.random() < 0.3:  # a later turn
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        return body | {"messages": turns}


_CHAT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 3},
    {"stop": [" the", "\n"]},
    {"temperature": 0},
    {"repetition_penalty": 1.2, "top_k": 40, "min_p": 0.05},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}},
    {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
)


def _limit_name(protocol: Protocol) -> str:
    return "max_output_tokens" if protocol == "responses" else "max_tokens"


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


class Clients:
    """Clients that ask at once, each one request after the other.

    Args:    url: of the server.   answers: those of the marked requests, in order.
    """

    def __init__(self, url: str, key: str, num_clients: int, answers: Sequence[str] = ()) -> None:
        self._url, self._key, self._num_clients, self._answers = url, key, num_clients, answers

    def ask(self, asked: Iterator[Asked]) -> list[Outcome]:
        """Asks all, and returns what became of each, in the order of their ends."""
        return asyncio.run(self._ask(asked))

    async def _ask(self, asked: Iterator[Asked]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._num_clients)
        async with httpx2.AsyncClient(base_url=self._url, timeout=DEADLINE_S, limits=limits) as http:

            async def work() -> None:
                for each in asked:  # all clients draw from one iterator
                    outcomes.append(await self._outcome(http, each))

            async with asyncio.TaskGroup() as group:
                for _ in range(self._num_clients):
                    group.create_task(work())
        return outcomes

    async def _outcome(self, http: httpx2.AsyncClient, asked: Asked) -> Outcome:
        began = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                if asked.conduct == "leaves half a body":
                    await self._send_half(asked)
                    return Outcome(asked, None, time.monotonic() - began)
                status, raw, num_full = await self._answer(http, asked)
        except TimeoutError:
            return Outcome(asked, None, time.monotonic() - began, fault=f"no answer within {DEADLINE_S:.0f} s")
        except httpx2.HTTPError as fault:
            return Outcome(asked, None, time.monotonic() - began, fault=f"no answer: {fault!r}")
        seconds = time.monotonic() - began
        if status is None:
            return Outcome(asked, None, seconds, num_full)
        what, text = self._judged(asked, status, raw)
        return Outcome(asked, status, seconds, num_full, text, what)

    async def _answer(self, http: httpx2.AsyncClient, asked: Asked) -> tuple[int | None, bytes, int]:
        """Returns status, body, and how often the queue was full; no status if the client left before the end."""
        headers = {"content-type": "application/json"}
        if asked.conduct != "has no key":
            headers |= {"authorization": f"Bearer {self._key}"}
        num_full = 0
        try:
            async with asyncio.timeout(asked.leaves_s if asked.conduct == "leaves" else None):
                while True:
                    answer = await http.post(PATHS[asked.protocol], content=asked.content, headers=headers)
                    is_full = answer.status_code == 429
                    num_full += is_full
                    if not is_full or (num_full == _MOST_TRIES and asked.mark is None):
                        return answer.status_code, answer.content, num_full
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            if asked.conduct != "leaves":
                raise
            return None, b"", num_full

    async def _send_half(self, asked: Asked) -> None:
        """Begins to send a body, and leaves."""
        where = urlsplit(self._url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"POST {PATHS[asked.protocol]} HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {self._key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(asked.content)}\r\n\r\n"
        writer.write(head.encode() + asked.content[: len(asked.content) // 2])
        await writer.drain()
        await asyncio.sleep(asked.leaves_s)
        writer.close()

    def _judged(self, asked: Asked, status: int, raw: bytes) -> tuple[str, str | None]:
        """Returns what is wrong with an answer, and its text."""
        if status not in ALLOWED[asked.conduct]:
            return f"status {status}: {raw[:200].decode(errors='replace')}", None
        try:
            if status != 200:
                return ("" if json.loads(raw)["error"]["message"] else "a refusal without a message"), None
            text = answer_text(asked, raw)
        except (ValueError, LookupError, TypeError) as fault:
            return f"an answer that cannot be read: {fault!r}", None
        if asked.mark is not None and self._answers and text != self._answers[asked.mark]:
            return f"marked request {asked.mark} got another answer than alone", text
        return "", text


def answer_text(asked: Asked, raw: bytes) -> str:
    """Returns the text of an answer, of all its choices.

    Raises:  ValueError if a stream has no proper end.   LookupError if the answer has another form.
    """
    if not asked.is_streamed:
        return _whole_text(asked.protocol, json.loads(raw))
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n") if line.startswith("data: ")]
    if asked.protocol in ("chat", "completion"):
        if not lines or lines.pop() != "[DONE]":
            raise ValueError("the stream has no end")
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        if asked.protocol == "completion":
            return "".join(choice["text"] for choice in choices)
        choices.sort(key=lambda choice: int(choice["index"]))
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    events = [json.loads(line) for line in lines]
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "message_stop"):
        raise ValueError("the stream has no end")
    if asked.protocol == "responses":
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def _whole_text(protocol: Protocol, answer: dict[str, Any]) -> str:
    if protocol == "chat":
        return "".join(choice["message"]["content"] or "" for choice in answer["choices"])
    if protocol == "completion":
        return "".join(choice["text"] for choice in answer["choices"])
    if protocol == "responses":
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    return "".join(block.get("text", "") for block in answer["content"])
