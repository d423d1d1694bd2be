"""Bodies of requests: read whole, within limits of size and time, and refused if they are no JSON in UTF-8.

A body may be compressed with gzip or deflate; the unpacked body has the same limit. Its Content-Type must be JSON: a
page of another site can send any other type from a browser without permission.

A body becomes several copies until its answer begins: bytes, values, a prompt. So large bodies are read while there is
room for their bytes together; the others wait, unread, and are refused after some time. Small ones never wait.
"""

import asyncio
import re
import zlib
from collections.abc import Callable

from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_pack.runtime.serve.protocols.answers import Problem

# Of a body: 4 million of them took 8 s, in which nobody was served. A context of 262,144 tokens fits.
MAX_VALUES = 300_000
SMALL_BYTES = 256 << 10  # bodies that need no room
ROOM_BODIES = 2  # of the largest size, and smaller ones instead
ROOM_SECONDS = 30.0
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_UNPACKED = ("gzip", "x-gzip", "deflate")
_ANY_HEADER, _NO_HEADER = 47, -15  # zlib's wbits: gzip or zlib by the header; deflate without one, as some send it


class RefusedError(Exception):
    """A body that cannot be used."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, code=code)


class Bodies:
    """Gives the application whole bodies, unpacked, and refuses the others.

    Args:    max_bytes: of a body, also when it is unpacked.   timeout_s: for it to arrive.   refusal: writes a problem
             in the shape of the request's protocol.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout_s: float, refusal: Callable[[Scope, Problem], Response]
    ) -> None:
        self._app, self._max_bytes, self._timeout_s, self._refusal = app, max_bytes, timeout_s, refusal
        self._room = _Room(ROOM_BODIES * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application on a request with its whole body, or refuses the body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        place = _Place(self._room)
        try:
            await self._run(scope, receive, send, place)
        finally:
            place.leave()

    async def _run(self, scope: Scope, receive: Receive, send: Send, place: "_Place") -> None:
        try:
            body = await self._body(scope, receive, place)
        except ConnectionError:
            return  # the client left
        except RefusedError as fault:
            response = self._refusal(scope, fault.problem)
            response.headers["Connection"] = "close"  # what is left of the body would be read as the next request
            await response(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # the application's alone

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        async def send_and_leave(message: Message) -> None:
            place.leave()
            await send(message)

        await self._app(scope, replay, send_and_leave)

    async def _body(self, scope: Scope, receive: Receive, place: "_Place") -> bytes:
        headers, most = Headers(scope=scope), self._max_bytes
        length = headers.get("content-length", "")
        num_bytes = int(length[:20]) if length.isdecimal() else 0
        if num_bytes > most:
            raise _too_large(most)
        await place.enter(num_bytes)
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await _read(receive, most, place)
        except TimeoutError as fault:
            late = f"the body did not arrive within {self._timeout_s:g} s; try again"
            raise RefusedError(408, late, code="body_too_slow") from fault
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            packed = body
            body = _unpacked(packed, encoding, min(most, SMALL_BYTES))
            if len(body) > SMALL_BYTES:
                await place.enter(most)
                body = _unpacked(packed, encoding, most)
            if len(body) > most:
                raise _too_large(most)
            changed = MutableHeaders(scope=scope)
            del changed["content-encoding"]
            changed["content-length"] = str(len(body))
        if body:
            _check_json(headers.get("content-type", ""), body)
        return body


class _Room:
    """The bytes that large bodies may have together, first come, first served."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        async with self._turn:
            while self._left < num_bytes:
                self._changed.clear()
                await self._changed.wait()
            self._left -= num_bytes

    def give(self, num_bytes: int) -> None:
        self._left += num_bytes
        self._changed.set()


class _Place:
    """The share of one body in the room."""

    def __init__(self, room: _Room) -> None:
        self._room, self.num_bytes = room, 0

    async def enter(self, num_bytes: int) -> None:
        """Takes room for a body, in place of its old room, unless it is small. Raises: RefusedError after a time."""
        if num_bytes <= max(SMALL_BYTES, self.num_bytes):
            return
        self.leave()  # a body that waits for more would keep others from it
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                await self._room.take(num_bytes)
        except TimeoutError as fault:
            full = "the server reads as many large bodies as it takes; try again later"
            raise RefusedError(429, full, code="queue_full") from fault
        self.num_bytes = num_bytes

    def leave(self) -> None:
        self._room.give(self.num_bytes)
        self.num_bytes = 0


async def _read(receive: Receive, most: int, place: _Place) -> bytes:
    """Returns a body. Raises: RefusedError if it has more than `most` bytes; ConnectionError if the client leaves."""
    pieces, total, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        piece = message.get("body", b"")
        total += len(piece)
        if total > most:
            raise _too_large(most)
        if total > place.num_bytes:  # of a body that does not say its size
            await place.enter(most if total > SMALL_BYTES else 0)
        pieces.append(piece)
        more = message.get("more_body", False)
    return b"".join(pieces)


def _too_large(most: int) -> RefusedError:
    return RefusedError(413, f"the body has more than {most} bytes; make it shorter", code="body_too_large")


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Returns an unpacked body, or one byte more than `most` of a larger one. Raises: RefusedError."""
    if encoding not in _UNPACKED:
        wrong = "this Content-Encoding is not supported; send the body with gzip or deflate, or as it is"
        raise RefusedError(415, wrong, code="unsupported_encoding")
    has_header = encoding != "deflate" or body[:1] == b"\x78"  # a zlib header with the usual window
    unpacker = zlib.decompressobj(_ANY_HEADER if has_header else _NO_HEADER)
    try:
        found = unpacker.decompress(body, most + 1)
    except zlib.error as fault:
        raise RefusedError(400, f"the body is no {encoding}; send it as its Content-Encoding says") from fault
    if len(found) > most:
        return found
    if not unpacker.eof or unpacker.unused_data:
        raise RefusedError(400, f"the body's {encoding} is not whole, or has more behind it; send it once more")
    return found


def _check_json(content_type: str, body: bytes) -> None:
    """Refuses a body of another Content-Type than JSON, or without UTF-8. Raises: RefusedError."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        wrong = "the body has to be a JSON object, sent with Content-Type: application/json"
        raise RefusedError(415, wrong, code="unsupported_media_type")
    try:
        body.decode()
    except UnicodeDecodeError as fault:
        wrong = f"the body is not UTF-8, from byte {fault.start} on; encode it as UTF-8"
        raise RefusedError(400, wrong, code="not_utf8") from fault
    if b"\0" in body[:4]:  # UTF-16 and UTF-32 of characters of ASCII
        raise RefusedError(400, "the body is not UTF-8; encode it as UTF-8", code="not_utf8")
    # The first count, which includes the texts, is small enough for most bodies.
    if _num_values(body) > MAX_VALUES and _num_values(_STRING.sub(b"", body)) > MAX_VALUES:
        wrong = f"the body has more than {MAX_VALUES} values; make it shorter"
        raise RefusedError(413, wrong, code="body_too_large")


def _num_values(body: bytes) -> int:
    """Returns the number of values in JSON, or some more."""
    return sum(map(body.count, (b",", b"[", b"{")))
