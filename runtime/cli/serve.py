"""The command `moe-serve`: it serves a pack over HTTP, to clients of OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn

import click

from moe_pack import formats, runtime
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import PACK, pack_folder
from moe_pack.runtime.engine.machine import use_one_heap
from moe_pack.runtime.engine.options import AskedSampling, usual_sampling

if TYPE_CHECKING:
    from fastapi import FastAPI

    from moe_pack.runtime.offload import Sequences
    from moe_pack.runtime.serve.http.app import ServeOptions
    from moe_pack.runtime.serve.scheduler import BatchScheduler
    from moe_pack.runtime.serve.service import Service

_USUAL_PARALLEL = 4
_MOST_PARALLEL = 64
_CACHE_SHARE = 0.25  # of memory: more requests at once than their caches fit in it only run if they are asked for
_CHECKPOINTS = 3  # of each sequence, where it cannot be cut back: a turn's end, the one before, a shared beginning
_LOADING_S = 1.0  # how long a load may go on when the server has ended
_ENDING_S = 1.5  # after the time for answers, for everything else to end
_SAVING_S = 60.0  # more, where there are sessions to write
_KEY_VARIABLE = "MOE_SERVE_API_KEY"
_NEEDED = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "llguidance")


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The options of `moe-serve`."""

    host: str = field(
        default="127.0.0.1",
        metadata=formats.option(
            "--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every address of this machine."
        ),
    )
    port: int = field(
        default=8080, metadata=formats.option("--port", least=0, most=65535, help="Port; 0 takes a free one.")
    )
    api_key: str | None = field(
        default=None,
        metadata=formats.option(
            "--api-key",
            metavar="KEY",
            help=f"Refuse requests without this key; several are separated by commas.  [default: {_KEY_VARIABLE} from "
            "the environment, or none]",
        ),
    )
    cors_origins: str | None = field(
        default=None,
        metadata=formats.option(
            "--cors-origins",
            metavar="ORIGINS",
            help="Pages of these origins may use the server from a browser, separated by commas; * is every page.",
        ),
    )
    parallel: int | None = field(
        default=None,
        metadata=formats.option(
            "--parallel",
            "-np",
            least=1,
            most=_MOST_PARALLEL,
            metavar="N",
            help="Run up to N requests at once.  [default: 4, or fewer if their key-value caches would take more than "
            "a quarter of the memory]",
        ),
    )
    context: int | None = field(
        default=None,
        metadata=formats.option(
            "--context",
            "-c",
            least=16,
            metavar="TOKENS",
            help="Tokens of prompt and answer together, for each request.  [default: 4096, or all that the model has]",
        ),
    )
    queue: int = field(
        default=64,
        metadata=formats.option("--queue", least=0, metavar="N", help="Requests that may wait; more are refused."),
    )
    sessions: Path | None = field(
        default=None,
        metadata=formats.option(
            "--sessions",
            path="folder",
            metavar="FOLDER",
            help="Keep what requests computed in this folder: it survives a restart, and requests that come between.",
        ),
    )
    sessions_bytes: int = field(
        default=16 << 30,
        metadata=formats.option(
            "--sessions-size",
            parse=commands.read_size,
            default_text="16G",
            metavar="SIZE",
            help="The most bytes of --sessions; what was not used for longest is deleted.",
        ),
    )
    model_name: str | None = field(
        default=None,
        metadata=formats.option(
            "--model-name", metavar="NAME", help="The model's name in answers.  [default: the folder's]"
        ),
    )
    alias: str | None = field(
        default=None,
        metadata=formats.option(
            "--alias",
            metavar="NAMES",
            help="Other names of the model, separated by commas. Requests may then use these, the name in answers and "
            "the folder's name, and get status 404 for others. Without --alias they may use any name.",
        ),
    )
    max_body_bytes: int = field(
        default=8 << 20,
        metadata=formats.option(
            "--max-body",
            parse=commands.read_size,
            default_text="8M",
            metavar="SIZE",
            help="Refuse requests with larger bodies.",
        ),
    )
    idle_release: int | None = field(
        default=None,
        metadata=formats.option(
            "--idle-release",
            least=1,
            most=7 * 24 * 60,
            metavar="MINUTES",
            help="Give the GPU's memory back after so long without a request; the next one takes it again and waits "
            "for that.  [default: never]",
        ),
    )
    drain: int = field(
        default=5,
        metadata=formats.option(
            "--drain",
            least=0,
            most=3600,
            metavar="SECONDS",
            help="Time for answers to end when the server is told to stop; what is left is cut off.",
        ),
    )
    log_format: Literal["text", "json"] = field(
        default="text",
        metadata=formats.option("--log-format", help="How to write the log, which is on standard error."),
    )
    quiet: bool = field(
        default=False,
        metadata=formats.option("--quiet", help="Log warnings and errors alone, not a line for each request."),
    )
    sampling: AskedSampling = field(default_factory=AskedSampling)
    engine: runtime.EngineOptions = field(default_factory=runtime.EngineOptions)

    def server(self) -> ServeOptions:
        """Returns the limits of the server's use."""
        from moe_pack.runtime.serve.http.app import ServeOptions

        keys = tuple(_listed(self.api_key if self.api_key is not None else cli.environment_text(_KEY_VARIABLE)))
        is_open = not keys and _is_loopback(self.host)
        return ServeOptions(
            api_keys=keys,
            # A page of another site whose name leads here is refused.
            host_names=("127.0.0.1", "localhost", "[::1]", self.host) if is_open else (),
            cors_origins=tuple(_listed(self.cors_origins or "")),
            max_body_bytes=self.max_body_bytes,
            drain_s=self.drain,
        )


def _listed(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split(",") if part.strip())


@click.command(
    cls=cli.Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  moe-serve packed/
  moe-serve packed/ --budget 11G --parallel 8 --context 8192
  moe-serve packed/ --host 0.0.0.0 --api-key "$(openssl rand -hex 16)" --sessions ~/.moe-sessions
Then:
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'""",
)
@click.argument("pack", type=PACK)
@cli.options_from(ServeCommand)
@cli.common_options
@cli.command_errors(interrupted="stopped")
def main(pack: Path, options: ServeCommand, debug: bool) -> None:
    """Serve the model in PACK over HTTP.

    PACK is a folder that moe-pack convert wrote, or a pack on the hub, such as owner/repository:4bit, which is
    downloaded first.

    Clients of OpenAI's interface use http://HOST:PORT/v1, those of Anthropic's http://HOST:PORT. A browser finds a page
    to chat at http://HOST:PORT/. Requests run together, each with the answer that it would have alone.
    """

    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise formats.RunError(f"moe-serve needs {missing[0]}; pip install 'moe-pack[serve]'")
    if options.engine.device == "cpu":
        options.engine.check_cpu_alone()  # before a download, and before torch is loaded
    pack = pack_folder(pack)
    commands.check_is_folder(pack)
    options.sampling.over(runtime.SamplingOptions())  # a wrong one is refused before the pack is loaded
    use_one_heap()
    _Server(pack, options).run()


class _Server:
    """A listening server, and the engine that is loaded behind it."""

    def __init__(self, folder: Path, options: ServeCommand) -> None:
        from moe_pack.runtime.serve.access_log import write_log
        from moe_pack.runtime.serve.http.app import create_app, server_of

        write_log(sys.stderr, options.log_format, options.quiet)
        self._folder, self._options = folder, options
        allowed = options.server()
        self._app: FastAPI = create_app(None, allowed)
        self._server = server_of(self._app, options.host, options.port, allowed)
        # uvicorn installs this method while it serves, and would raise the signal again when it has ended.
        self._server.handle_exit = self._stop  # type: ignore[method-assign]  # on purpose
        self._has_key = bool(allowed.api_keys)
        self._fault: BaseException | None = None
        self._opened = ExitStack()
        self._is_stopping = False
        self._saves = threading.Event()  # sessions are being written

    def run(self) -> None:
        """Listens at once, loads the pack, and serves until a signal comes.

        Raises:  RunError if the address is taken, or the pack cannot be loaded.
        """
        with closing(_listening(self._options.host, self._options.port)) as listener:
            host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
            where = f"http://{host}:{listener.getsockname()[1]}"
            loader = threading.Thread(target=self._load, args=(where,), name="moe-serve loader", daemon=True)
            try:
                with _signals_call(self._stop):
                    loader.start()
                    self._server.run([listener])
                    loader.join(_LOADING_S)
                    if loader.is_alive():
                        _end_process()  # a load cannot be interrupted, and there is nothing to save before it is done
                    if self._options.sessions is not None:
                        self._saves.set()
                    self._opened.close()
            finally:
                self._opened.close()
        if self._fault is not None:
            raise self._fault
        if self._is_stopping:
            _end_process()  # without a wait for threads that compile or tokenize

    def _stop(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server after some seconds for answers; a second signal ends it at once."""
        if self._is_stopping:
            os._exit(128 + sig)
        self._is_stopping = self._server.should_exit = True
        threading.Thread(target=self._end_at_last, name="moe-serve stop", daemon=True).start()

    def _end_at_last(self) -> None:
        """Ends the process when its time is over; sessions that are being written get more."""
        _say("stopping", drain_s=self._options.drain)
        time.sleep(self._options.drain + _ENDING_S)
        if self._saves.is_set():
            time.sleep(_SAVING_S)
        _end_process()

    def _load(self, where: str) -> None:
        """Loads the pack; on an error the server ends."""
        try:
            from moe_pack.runtime.cli.main import import_torch

            import_torch()
            self._app.state.service = self._make_service()
            gc.collect()
            gc.freeze()  # what is there stays: a large body's values do not make the collector walk through it
            _say(f"ready on {where}, model {self._app.state.service.model_id}")
            if not self._has_key and not _is_loopback(self._options.host):
                _warn("anyone who can reach this address may use the model; --api-key KEY asks for a key")
        except BaseException as fault:
            self._fault = fault
            self._server.should_exit = True

    def _make_service(self) -> Service:
        """Opens pack, engine and scheduler, which `_opened` closes."""
        from moe_pack.runtime.cli.main import asked_context, open_engine
        from moe_pack.runtime.model import Decoder
        from moe_pack.runtime.serve.http.live import engine_router, live_counts
        from moe_pack.runtime.serve.memory import EngineMemory
        from moe_pack.runtime.serve.scheduler import BatchScheduler
        from moe_pack.runtime.serve.sessions import SessionOwner, SessionStore

        options, opened = self._options, self._opened
        pack = opened.enter_context(formats.Pack(self._folder))
        if pack.spec.encoder is not None:
            raise formats.RunError("moe-serve does not support models with an encoder; use moe-run")
        text = runtime.Text(pack)
        context = asked_context(pack, options.context)
        on_device, device_line = self._on_device(pack, context)
        if options.idle_release is not None and on_device.device != "cuda":
            raise formats.RunError("--idle-release is about a GPU's memory, and the model runs on the CPU; remove it")
        sequences = self._sequences(pack, context, on_device)
        sessions = None  # a wrong folder is refused before the engine takes its time
        if options.sessions is not None:
            kv_dtype = on_device.kv_dtype or "f32"
            owner = SessionOwner(pack.manifest.root, context, pack.spec.vocab_size, kv_dtype)
            sessions = SessionStore(options.sessions, owner, options.sessions_bytes)
        engine = opened.enter_context(open_engine(pack, on_device, context, sequences, "--context", keeps_facts=False))
        assert isinstance(engine.decoder, Decoder), "a model without an encoder"
        caches = sum(each.num_bytes for each in engine.decoder.sequences)
        requests = "1 request" if sequences.number == 1 else f"{sequences.number} requests"
        _say(f"{requests} at once, {context:,} tokens each: {formats.size_text(caches)} of key-value caches")
        if device_line is not None:
            _say(device_line)
        for fallback in engine.fallbacks:
            _warn(f"fallback: {fallback}")
        idle_s = None if options.idle_release is None else 60.0 * options.idle_release
        memory = EngineMemory(engine, idle_s) if engine.is_live else None
        scheduler = opened.enter_context(
            closing(BatchScheduler(engine.decoder, text, options.queue, sessions, engine.drafts, memory))
        )
        sampling = options.sampling.over(usual_sampling(pack))
        service = _service_of(pack, text, scheduler, options, sampling)
        live = live_counts(engine)
        self._app.include_router(engine_router(live, engine, scheduler, service.model_id))
        return service

    def _on_device(self, pack: formats.Pack, context: int) -> tuple[runtime.EngineOptions, str | None]:
        """Returns the engine's options with a device in place of `auto`, and the line that names it.

        Raises:  RunError if an option of the server does not go with the device.
        """
        from moe_pack.runtime.engine.engine import choose_device

        options = self._options
        needs_cpu = None if options.sessions is None else "--sessions"
        on_device, line = choose_device(pack, options.engine, context, needs_cpu)
        if on_device.device == "cuda" and needs_cpu is not None:
            raise formats.RunError("--sessions: with --device cuda nothing is kept in files; remove --sessions")
        return on_device, line

    def _sequences(self, pack: formats.Pack, context: int, engine: runtime.EngineOptions) -> Sequences:
        from moe_pack.runtime.offload import Sequences
        from moe_pack.runtime.offload.budgets import cache_bytes, checkpoint_bytes, most_chunk_tokens

        options, spec, is_on_gpu = self._options, pack.spec, engine.device == "cuda"
        chunk = most_chunk_tokens(context)
        kv_dtype = engine.kv_dtype or ("bf16" if is_on_gpu else "f32")
        each = cache_bytes(spec, context, chunk, kv_dtype)
        each += _CHECKPOINTS * checkpoint_bytes(spec, context, chunk, kv_dtype)
        number = options.parallel
        if number is None:
            memory = engine.whole_budget or (_gpu_bytes() if is_on_gpu else runtime.available_bytes())
            fits = _USUAL_PARALLEL if memory is None else int(_CACHE_SHARE * memory) // max(each, 1)
            number = max(1, min(_USUAL_PARALLEL, fits))
        return Sequences(number, _CHECKPOINTS)


def _gpu_bytes() -> int | None:
    from moe_pack.runtime.engine.machine import gpu_here

    gpu = gpu_here()
    return None if gpu is None else gpu.memory_bytes


def _service_of(
    pack: formats.Pack,
    text: runtime.Text,
    scheduler: BatchScheduler,
    options: ServeCommand,
    sampling: runtime.SamplingOptions,
) -> Service:
    from moe_pack.runtime.serve.grammars import GrammarCompiler
    from moe_pack.runtime.serve.parsers import parser_for
    from moe_pack.runtime.serve.service import ModelFacts, Service
    from moe_pack.runtime.serve.styles import style_of

    folder, template = pack.folder.resolve().name, text.chat_template
    style = style_of("" if template is None else template.source(has_tools=True))
    facts = ModelFacts(
        model_id=options.model_name or folder,
        folder_name=folder,
        created=int((pack.folder / "manifest.json").stat().st_mtime),
        sampling=sampling,
        aliases=tuple(dict.fromkeys(_listed(options.alias or ""))),
        chat_template="" if template is None else template.source(),
        bos_token=text.named_tokens.get("bos_token", ""),
        eos_token=text.named_tokens.get("eos_token", ""),
    )
    grammars = GrammarCompiler(text, text.answer_end_ids)
    return Service(facts, scheduler, text, template, partial(parser_for, style), grammars, style.keeps_special)


def _listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises: RunError if the address cannot be used."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's delay off where the protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(256)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as fault:
        raise formats.RunError(
            f"cannot listen on {host} port {port} ({fault.strerror or fault}); give another --host or --port"
        ) from fault


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextmanager
def _signals_call(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str, **fields: object) -> None:
    from moe_pack.runtime.serve.access_log import LOG

    LOG.info(text, extra={"fields": fields})


def _warn(text: str) -> None:
    from moe_pack.runtime.serve.access_log import LOG

    LOG.warning(text)


def _end_process() -> NoReturn:
    """Ends the process at once, with what was written so far."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads them, or they are closed
            stream.flush()
    os._exit(0)
