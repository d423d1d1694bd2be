"""A real server on a free port of this machine, in a thread, for tests with real clients."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import httpx2
import openai
import uvicorn
from fastapi import FastAPI

from moe_pack.runtime.serve.http.app import ServeOptions, create_app, server_of
from support.scripted_scheduler import Script, ScriptedScheduler, scripted_service
from support.waiting import HANG_S, wait_until


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    url: str
    port: int
    app: FastAPI
    scheduler: ScriptedScheduler
    http: httpx2.Client  # a plain client of it, without a key
    num_connections: Callable[[], int]  # counts the open ones

    @property
    def prompt(self) -> str:
        """The text that the model was given last."""
        return "".join(map(chr, self.scheduler.requests[-1].prompt_ids))


def openai_client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@contextmanager
def running(server: uvicorn.Server, stop: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Runs a server in a thread, and yields its port; `stop` is called before the wait for its end."""
    # With its protocol named: asyncio turns off Nagle's delay, 40 ms for each answer, for such sockets alone.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            stop()
            thread.join(HANG_S)


@contextmanager
def raw(port: int, head: str, body: bytes = b"") -> Iterator[socket.socket]:
    """Sends bytes, and leaves the connection open for the block."""
    with socket.create_connection(("127.0.0.1", port), HANG_S) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + body)
        yield connection


def posted(port: int, path: str, body: object) -> AbstractContextManager[socket.socket]:
    """Sends a JSON body, and leaves the connection open for the block."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: {len(content)}\n\n"
    return raw(port, head, content)


@contextmanager
def served(
    *scripts: Script,
    options: ServeOptions | None = None,
    delay_s: float = 0.0,
    most: int = 64,
    loading: bool = False,
    aliases: tuple[str, ...] = (),
) -> Iterator[Served]:
    """Runs a server that says what the scripts say; `loading`: its model is not there yet."""
    options = options or ServeOptions(drain_s=1)
    scheduler = ScriptedScheduler(*scripts, delay_s=delay_s, most=most)
    app = create_app(None if loading else scripted_service(scheduler, aliases=aliases), options)
    server = server_of(app, "127.0.0.1", 0, options)
    with running(server, scheduler.close) as port:
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, timeout=HANG_S) as http:
            yield Served(url, port, app, scheduler, http, lambda: len(server.server_state.connections))
