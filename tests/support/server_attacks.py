"""Attacks on a running server, by clients without a key: each is a context manager, in whose block it goes on."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx2

from support.served import posted
from support.waiting import HANG_S

Attack = Callable[[str, int], "Any"]  # of a server's URL and port

CHAT = "/v1/chat/completions"
DOUBLING = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(900)) + '\nr900 ::= "a"'


def chat(words: str = "Hello", **more: Any) -> dict[str, Any]:
    """Returns the body of a chat of few tokens."""
    return {"messages": [{"role": "user", "content": words}], "max_tokens": 4, **more}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that ask for JSON of a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


# Grammars that are small for a client and large for a server; each with its name.
NASTY: dict[str, dict[str, Any]] = {
    "doubling rules": {"grammar": DOUBLING},
    "a million letters": {"grammar": 'root ::= "a"{1000000}'},
    "repetitions of repetitions": {"grammar": 'root ::= (("a"{1000}){1000}){1000}'},
    "a million of a rule": {"grammar": 'root ::= b{1000000}\nb ::= "a" | "b"'},
    "deep brackets": {"grammar": "root ::= " + "(" * 4000 + '"a"' + ")*" * 4000},
    "ambiguous rules": {"grammar": 'root ::= root root | root root root | "a" | ""'},
    "3,000 properties": schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
    "60 patterns at once": schema({"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(60)]}),
    "multiples": schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (10007, 10009, 10037)]}),
    "a long pattern": schema({"type": "string", "pattern": "((a{1000}){1000}){1000}"}),
    "a range": schema({"type": "number", "minimum": 1e-300, "maximum": 1e300}),
    "a long array": schema({"type": "array", "items": {"type": "string"}, "minItems": 100_000}),
    "references in a ring": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "18,000 values": schema({"enum": [str(i * 7919) for i in range(18_000)]}),
}


def random_grammar(random_source: random.Random) -> dict[str, Any]:
    """Returns a grammar that may be right, wrong, or much too large."""
    draw = random_source

    def pattern(depth: int) -> str:
        if depth == 0:
            return draw.choice(["a", ".", "[a-z]", r"\w", r"\d+", "ab|c", "[^\\n]", "é", r"\p{L}"])
        inner = pattern(depth - 1)
        end = draw.choice(["*", "+", "?", f"{{{draw.randint(0, 2000)}}}", f"{{0,{draw.randint(1, 500)}}}", "", "|"])
        return f"({inner}){end}{pattern(depth - 1) if draw.random() < 0.5 else ''}"

    def value(depth: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": draw.choice(["string", "integer", "number", "boolean", "null", "nothing"])},
            {"type": "string", "pattern": pattern(3)},
            {"type": "integer", "multipleOf": draw.choice([0, 7, 10007, -1]), "minimum": draw.randint(-(10**9), 10**9)},
            {"enum": [draw.choice([1, "a", None, 1e300]) for _ in range(draw.randint(0, 50))]},
            {"$ref": draw.choice(["#", "#/$defs/a", "#/nothing", "http://a.example/schema"])},
        ]
        if depth:
            several = [value(depth - 1) for _ in range(draw.randint(1, 4))]
            kinds += [
                {draw.choice(["allOf", "anyOf", "oneOf"]): several},
                {"type": "array", "items": several[0], "minItems": draw.randint(0, 10**6)},
                {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(several)}, "required": ["p0"]},
                {"not": several[0]},
            ]
        return draw.choice(kinds)

    def rule() -> str:
        words = [
            '"a"', '"b"{1000}', "[a-z]*", "root", "other", '("x" | other)+', ".", f"other{{{draw.randint(0, 999)}}}",
        ]  # fmt: skip
        return " | ".join(" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3)))

    kind = draw.choice(["gbnf", "schema", "regex"])
    if kind == "schema":
        return schema({**value(3), "$defs": {"a": value(2)}})
    if kind == "regex":
        return {"grammar": f"%llguidance {{}}\nstart: /{pattern(4)}/"}
    return {"grammar": f"root ::= {rule()}\nother ::= {rule()}"}


@contextmanager
def grammars_of_clients_that_left(url: str, port: int) -> Iterator[None]:
    """45 requests with doubling rules, each another text, whose clients leave at once."""
    for number in range(45):
        leave(port, chat(grammar=f"{DOUBLING}\n# {number}"))
    yield


@contextmanager
def grammars_of_clients_that_stay(url: str, port: int) -> Iterator[None]:
    """One of each nasty grammar and 30 with doubling rules, whose clients wait."""
    bodies = [chat(**one) for one in NASTY.values()]
    bodies += [chat(grammar=f"{DOUBLING}\n# {number}") for number in range(30)]
    with _asking(url, bodies):
        yield


@contextmanager
def long_prompts(url: str, port: int) -> Iterator[None]:
    """Four prompts of 8 MB at once, then four that are just not refused by their bytes."""
    with _asking(url, [chat(" a1" * 2_750_000)] * 4 + [chat(" a1" * 20_000)] * 4):
        yield


@contextmanager
def many_tokens(url: str, port: int) -> Iterator[None]:
    """Two bodies of a million tokens, and one of a million nested values."""
    bodies: list[dict[str, Any]] = [{"prompt": [5] * 1_000_000, "max_tokens": 1}] * 2
    with _asking(url, [*bodies, chat(chat_template_kwargs={"a": [[]] * 1_000_000})], "/v1/completions"):
        yield


@contextmanager
def idle_connections(url: str, port: int) -> Iterator[None]:
    """400 connections, half of which say nothing, and half the beginning of a head."""
    with ExitStack() as stack:
        for number in range(400):
            with suppress(OSError):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
                if number % 2:
                    one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Half: ")
        yield


@contextmanager
def clients_that_do_not_read(url: str, port: int) -> Iterator[None]:
    """Twenty clients that ask for the page again and again, and read nothing."""
    with ExitStack() as stack:
        for _ in range(20):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            one.setblocking(False)
            with suppress(OSError):
                one.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        yield


ATTACKS: dict[str, Attack] = {
    "nothing": lambda url, port: ExitStack(),
    "grammars, clients left": grammars_of_clients_that_left,
    "grammars, clients stay": grammars_of_clients_that_stay,
    "prompts of 8 MB": long_prompts,
    "a million tokens": many_tokens,
    "400 idle connections": idle_connections,
    "clients that do not read": clients_that_do_not_read,
}


def leave(port: int, body: dict[str, Any], path: str = CHAT) -> None:
    """Asks, and leaves without an answer."""
    with posted(port, path, body):
        pass


@contextmanager
def _asking(url: str, bodies: list[dict[str, Any]], path: str = CHAT) -> Iterator[None]:
    """Sends bodies at once, each by a client of its own, and leaves when the block ends."""

    def ask(body: dict[str, Any]) -> None:
        with suppress(httpx2.HTTPError):
            clients.enter_context(httpx2.Client(base_url=url, timeout=HANG_S)).post(path, json=body)

    with ExitStack() as clients:
        threads = [threading.Thread(target=ask, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        yield
