"""The HTTP application around the protocols.

Its layers, from the outside in: headers, counts, the log and unexpected exceptions; CORS; names, origins and keys;
bodies; the protocols. With keys, every path but `/health` and the page needs one, also a path that does not exist.

A new endpoint is a route of its protocol's router in `protocols`, and a line of the table in docs/serving.md. Routes of
a running server are in live.py and `_add_own_routes`; `OPEN_PATHS` names those that need no key.
"""

import hashlib
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_pack.formats import RunError
from moe_pack.formats.base.version import VERSION
from moe_pack.runtime.serve import access_log
from moe_pack.runtime.serve.http import bodies, connections
from moe_pack.runtime.serve.http.live import page_router
from moe_pack.runtime.serve.protocols import answers, anthropic_api, model_api, openai_api, responses_api
from moe_pack.runtime.serve.service import Service

OPEN_PATHS = frozenset({"/", "/health"})  # need no key: the page asks its user for one

_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The limits of a server's use."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)  # a request needs one of them, if there are any
    # The names by which requests may call the server; none: any name. A server for this machine alone without a key
    # needs them: else a page whose name is made to point to this machine can use it from a browser.
    host_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()  # pages of these origins may use the server from a browser; `*`: all
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0  # for a body to arrive
    drain_s: int = 5  # for answers to end when the server stops


def create_app(service: Service | None, options: ServeOptions) -> FastAPI:
    """Returns the application of a model.

    Args:    service: None while the model is being loaded; set `app.state.service` later. Until then the protocols
             answer with 503.
    """
    app = FastAPI(title="moe-serve", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service, app.state.has_keys = service, bool(options.api_keys)
    for router in (openai_api.router, responses_api.router, anthropic_api.router, model_api.router):
        app.include_router(router)
    app.include_router(page_router())
    requests = _add_own_routes(app)
    for kind in (RequestValidationError, HTTPException, RunError):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(
        bodies.Bodies, max_bytes=options.max_body_bytes, timeout_s=options.body_timeout_s, refusal=refusal
    )
    app.add_middleware(_Gate, options=options)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", "X-Request-Id"),
        )
    app.add_middleware(_Frame, requests=requests)
    return app


def server_of(app: FastAPI, host: str, port: int, options: ServeOptions) -> uvicorn.Server:
    """Returns a server that has not started; it does not name its software, and logs no requests."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=connections.Connection,
        ws="none",
        backlog=connections.most_connections() // 4,  # so many come at once, before the first of them is counted
        timeout_keep_alive=connections.KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=connections.MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=options.drain_s,
    )
    return uvicorn.Server(config)


def _add_own_routes(app: FastAPI) -> Counter:
    """Adds the state of health and the metrics; returns the counter of requests."""
    registry = CollectorRegistry()
    requests = Counter(
        "moe_serve_requests", "Requests by endpoint and status.", ("endpoint", "status"), registry=registry
    )
    registry.register(_Counts(app))
    unready = {"model": dict[str, str], "description": "The model is being loaded, or the engine has failed"}

    @app.get("/health", responses={503: unready})
    async def health() -> JSONResponse:
        """Says whether the model answers."""
        service: Service | None = app.state.service
        if service is None:
            return JSONResponse({"status": "loading"}, 503, headers={"Retry-After": str(answers.LOADING_RETRY_SECONDS)})
        if service.scheduler.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        memory = service.scheduler.memory
        if memory is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "ok", "memory": "released" if memory.state().is_released else "taken"})

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Returns counts in the format of Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return requests


class _Counts(Collector):
    """The scheduler's counts at the time of a request for metrics."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def collect(self) -> Iterator[Metric]:
        service: Service | None = self._app.state.service
        if service is None:
            return
        counts = service.scheduler.counts()
        yield GaugeMetricFamily("moe_serve_running", "Requests that are being answered.", counts.running)
        yield GaugeMetricFamily("moe_serve_waiting", "Requests that wait in the queue.", counts.waiting)
        yield GaugeMetricFamily("moe_serve_slots", "Requests that can be answered at once.", counts.num_slots)
        yield CounterMetricFamily("moe_serve_submitted", "Prompts that were submitted.", counts.num_requests)
        yield CounterMetricFamily("moe_serve_prompt_tokens", "Tokens of prompts.", counts.prompt_tokens)
        yield CounterMetricFamily(
            "moe_serve_cached_tokens", "Tokens of prompts that were not computed again.", counts.cached_tokens
        )
        yield CounterMetricFamily("moe_serve_generated_tokens", "New tokens.", counts.generated_tokens)
        yield CounterMetricFamily("moe_serve_prefill_seconds", "Seconds of prefill.", counts.prefill_s)
        yield CounterMetricFamily("moe_serve_decode_seconds", "Seconds of decode.", counts.decode_s)
        yield CounterMetricFamily("moe_serve_decode_steps", "Forward passes of decode.", counts.decode_steps)
        yield CounterMetricFamily("moe_serve_drafted_tokens", "Drafted tokens that were verified.", counts.drafted)
        yield CounterMetricFamily("moe_serve_accepted_tokens", "Drafted tokens that were right.", counts.accepted)
        if service.scheduler.memory is not None:
            state = service.scheduler.memory.state()
            yield GaugeMetricFamily("moe_serve_gpu_budget_bytes", "The budget of GPU memory.", state.budget_bytes)
            yield GaugeMetricFamily("moe_serve_gpu_used_bytes", "GPU memory at its last change.", state.used_bytes)
            yield GaugeMetricFamily("moe_serve_gpu_released", "1 if the memory is given back.", state.is_released)


async def _refuse(http: HttpRequest, fault: Exception) -> Response:
    """Returns the answer to a request that was refused."""
    if isinstance(fault, RequestValidationError):
        problem = _wrong_field(fault)
    elif isinstance(fault, HTTPException):
        where, method = f"{http.scope['method']} {http.scope['path']}", http.scope["method"]
        messages = {
            404: (f"{where}: there is no such endpoint", "not_found"),
            405: (f"{where}: this endpoint does not take {method}", "method_not_allowed"),
        }
        message, code = messages.get(fault.status_code, (str(fault.detail), None))
        problem = answers.Problem(fault.status_code, message, code=code)
    else:
        problem = answers.problem_of(fault)
    return refusal(http.scope, problem)


def _wrong_field(fault: RequestValidationError) -> answers.Problem:
    """Returns the problem of a body with a wrong value; of a value of several types, the type that fits best."""
    first: dict[str, Any] = max(fault.errors(), key=lambda error: len(error["loc"]))
    if first["type"] == "json_invalid":
        return answers.Problem(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    place = ""
    for part in first["loc"][1:]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif _is_field(part):
            place += f".{part}" if place else part
    what = str(first["msg"]).removeprefix("Value error, ")
    if not place and first["type"] == "value_error":
        return answers.Problem(400, f"the body cannot be used: {what}")
    if not place:
        return answers.Problem(400, "the body has to be a JSON object, sent with Content-Type: application/json")
    return answers.Problem(400, f"{place[:200]}: {what}", place[:200])


def _is_field(part: str) -> bool:
    """Whether a part of an error's place is a field; the other parts are types."""
    return not (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def refusal(scope: Scope, problem: answers.Problem) -> JSONResponse:
    """Returns a problem in the shape of the protocol that a request uses."""
    record = access_log.RECORD.get()
    if record is not None:
        record.refuse(problem.status, problem.message, problem.param, problem.code)
    is_anthropic = scope["path"].startswith("/v1/messages")
    content = anthropic_api.anthropic_error(problem) if is_anthropic else openai_api.openai_error(problem)
    return JSONResponse(content, problem.status, headers=problem.headers)


class _Frame:
    """Adds headers to every answer, counts it, logs it, and answers in place of unexpected exceptions.

    A HEAD request runs as a GET request, whose body is not sent.
    """

    def __init__(self, app: ASGIApp, requests: Counter) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, method = access_log.RequestRecord.of(Headers(scope=scope).get("x-request-id", "")), scope["method"]
        before = access_log.RECORD.set(record)
        is_head, status = method == "HEAD", 0
        if is_head:
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                await send(message)
                if is_head:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not is_head:
                await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as fault:
            problem = answers.problem_of(fault)
            if not status:
                await refusal(scope, problem)(scope, receive, send_with_headers)
        finally:
            access_log.RECORD.reset(before)
            route = getattr(scope.get("route"), "path", "other")
            if status:
                self._requests.labels(route, str(status)).inc()
            record.write(method, route, status)


class _Gate:
    """Refuses a request without a key, to another name, or from a page of another site, before its body is read."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self._app, self._names = app, frozenset(options.host_names)
        self._origins = frozenset(options.cors_origins)
        self._digests = tuple(_digest(key.encode()) for key in options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await refusal(scope, problem)(scope, receive, send)

    def _problem(self, path: str, headers: Headers) -> answers.Problem | None:
        """Returns the reason to refuse a request; None if it may pass."""
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()  # without the port
        if self._names and host not in self._names:
            allowed = ", ".join(sorted(self._names))
            return answers.Problem(403, f"this server is not called so; its names are {allowed}", code="wrong_host")
        if not self._digests and path != "/health" and self._is_foreign(headers):
            return answers.Problem(
                403,
                "a page of another site may not use this server; --cors-origins ORIGIN allows it, and --api-key asks "
                "for a key instead",
                code="foreign_origin",
            )
        if not self._digests or path in OPEN_PATHS or self._has_key(headers):
            return None
        return answers.Problem(
            401,
            "this server needs a key; send it as Authorization: Bearer KEY, or as x-api-key",
            code="invalid_api_key",
        )

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a browser sends the request for a page of another site; other clients name no origin."""
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return False
        return origin.partition("://")[2].lower() != headers.get("host", "").lower()

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), credentials.strip() if scheme.lower() == "bearer" else ""]
        # Digests have one length, and all are compared: the time says nothing about the keys.
        digests = [_digest(one.encode("latin-1")) for one in given if one]  # as Starlette decodes the header's bytes
        found = [hmac.compare_digest(one, digest) for one in digests for digest in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
