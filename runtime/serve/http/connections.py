"""Connections of HTTP with deadlines, and a limit to their number.

uvicorn's protocol class waits for ever for a request's head, and for a client that does not read its answer. Then some
hundred silent connections take all descriptors of the process, and nobody else is answered. Here a connection has a
deadline for each head, also for one that comes byte by byte, and a deadline for a client that reads nothing. If there
are too many connections, the one that has waited longest for its head is closed for a new one.
"""

import asyncio
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0  # for a request's head, from the connection's beginning, or from the end of the answer before
KEEP_ALIVE_SECONDS = 10  # for the first byte of another request
READ_SECONDS = 60.0  # in which a client has to read something, while an answer waits for it
MAX_HEAD_BYTES = 64 << 10
_USUAL_CONNECTIONS, _LEAST_CONNECTIONS = 1000, 16

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nX-Content-Type-Options: nosniff\r\n"
    b"Connection: close\r\n\r\n"
)


def most_connections() -> int:
    """Returns the limit of connections: half of the process's descriptors, at most 1,000.

    The other half is for the pack's files, sessions, helper processes, and connections that come together.
    """
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return max(_LEAST_CONNECTIONS, min(_USUAL_CONNECTIONS, soft // 2))
    return _USUAL_CONNECTIONS


class Connection(H11Protocol):
    """One connection, with deadlines."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self.waits_since: float | None = None  # for a request's head, by the loop's clock; None while it answers one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begins to wait for a head, and closes a connection if there are too many."""
        super().connection_made(transport)
        self._wait_for_head()
        others = (each for each in self.connections if isinstance(each, Connection))
        open_ones = [each for each in others if not each.transport.is_closing()]
        if len(open_ones) > most_connections():
            waiting = [each for each in open_ones if each is not self and each.waits_since is not None]
            if waiting:
                min(waiting, key=lambda each: each.waits_since or 0.0).transport.abort()
            else:
                transport.write(_BUSY)
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        self._stop_deadline()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Ends the time for a head when it is whole."""
        super().data_received(data)
        if self._answers:
            self.waits_since = None
            self._stop_deadline()

    def on_response_complete(self) -> None:
        """Begins to wait for the next head."""
        super().on_response_complete()  # may begin the next request, which has come already
        if not self._answers:
            self._wait_for_head()

    def pause_writing(self) -> None:
        """Begins the time for a client that reads nothing."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends that time."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        """Begins the time for a request's head, or for the last bytes of a connection that is being closed."""
        self._stop_deadline()
        self.waits_since = self.loop.time()
        seconds = READ_SECONDS if self.transport.is_closing() else HEAD_SECONDS
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
