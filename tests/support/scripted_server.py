"""A server that plays scripted answers and events of an engine to the page, and keeps what was asked of it."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray
from sse_starlette import EventSourceResponse

from moe_pack.runtime.serve.http.live import bitmap, page_router, saturated
from moe_pack.runtime.serve.requests import SchedulerCounts
from support.served import running

Values = dict[str, Any]


@dataclass
class Script:
    """What the server does.

    `pieces`: of the answer, each with the name of its field, one every `piece_s`.   `fault`: a message in place of an
    answer, or, with `breaks_at`, after so many pieces.   `states`: the events of the engine, one every `state_s`; the
    first `num_cut` watchers lose their connection.   `health`: what /health says.   `defaults`: of /props; none: there
    is no such endpoint.   `asked`, `num_left`, `num_watched`: the bodies of requests, the clients that left before
    their answer's end, and the watchers of the engine, so far.
    """

    pieces: list[tuple[str, str]] = field(default_factory=lambda: [("content", "Hello")])
    piece_s: float = 0.01
    end: str = "stop"
    fault: str = ""
    breaks_at: int | None = None
    has_chat: bool = True
    key: str = ""
    engine: Values = field(default_factory=dict)
    states: list[Values] = field(default_factory=list)
    state_s: float = 0.05
    health: str = "ok"
    defaults: Values = field(default_factory=dict)
    model: str = "tiny-mixtral"
    asked: list[Values] = field(default_factory=list)
    num_left: int = 0
    num_cut: int = 0
    num_watched: int = 0


def app_of(script: Script, *routers: APIRouter) -> FastAPI:
    """The app of a script; routes of the given routers take the place of its own."""
    app = FastAPI()
    for router in (page_router(), *routers):
        app.include_router(router)

    @app.middleware("http")
    async def ask_for_key(request: Request, call_next: Any) -> Response:
        is_open = request.url.path in ("/", "/health") or not script.key
        if is_open or request.headers.get("authorization") == f"Bearer {script.key}":
            found: Response = await call_next(request)
            return found
        return JSONResponse({"error": {"message": "The API key is missing or wrong."}}, 401)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": script.health}, 200 if script.health == "ok" else 503)

    @app.get("/props")
    async def props() -> Response:
        if not script.defaults:
            return JSONResponse({"error": {"message": "There is no such endpoint."}}, 404)
        return JSONResponse({"default_generation_settings": {"params": script.defaults}})

    @app.get("/v1/models")
    async def models() -> Values:
        return {"data": [{"id": script.model, "chat": script.has_chat}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return answer(script, await request.json(), lambda name, text: {"delta": {name: text}})

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return answer(script, await request.json(), lambda _, text: {"text": text})

    @app.get("/engine")
    async def engine() -> Response:
        if not script.engine:
            return JSONResponse({"error": {"message": "There is no engine."}}, 404)
        return EventSourceResponse(engine_events(script))

    return app


def answer(script: Script, body: Values, choice: Any) -> Response:
    script.asked.append(body)
    if script.fault and script.breaks_at is None:
        return JSONResponse({"error": {"message": script.fault}}, 400)
    return EventSourceResponse(pieces_of(script, choice))


async def pieces_of(script: Script, choice: Any) -> AsyncIterator[Values]:
    is_whole = False
    try:
        for number, (name, text) in enumerate(script.pieces):
            if number == script.breaks_at:
                if script.fault:
                    yield {"data": json.dumps({"error": {"message": script.fault}})}
                is_whole = True
                return
            delta = choice(name, json.loads(text) if name == "tool_calls" else text)
            yield {"data": json.dumps({"choices": [{"index": 0, "finish_reason": None} | delta]})}
            await asyncio.sleep(script.piece_s)
        yield {"data": json.dumps({"choices": [{"index": 0, "finish_reason": script.end} | choice("content", "")]})}
        usage = {"prompt_tokens": 340, "completion_tokens": 42, "prompt_tokens_details": {"cached_tokens": 120}}
        yield {"data": json.dumps({"choices": [], "usage": usage, "timings": {"predicted_per_second": 18.25}})}
        yield {"data": "[DONE]"}
        is_whole = True
    finally:
        script.num_left += not is_whole


async def engine_events(script: Script) -> AsyncIterator[Values]:
    script.num_watched += 1
    is_cut = script.num_watched <= script.num_cut
    yield {"event": "engine", "data": json.dumps(script.engine)}
    for state in script.states:
        await asyncio.sleep(script.state_s)
        yield {"event": "state", "data": json.dumps(state)}
    await asyncio.sleep(0.1 if is_cut else 1000)


LOSS = {
    "perplexity": 24.1,
    "perplexity_increase": 0.0057,
    "kl": 0.00944,
    "kl_half_width": 0.0008,
    "num_tokens": 16352,
    "text": "prose",
}
PACK = {"bytes": 152 << 20, "bits_per_weight": 2.9, "loss": LOSS, "kv_dtype": "f32", "numerics": "fast"}


def engine_of(num_layers: int, num_experts: int, **others: Any) -> Values:
    """An `engine` event."""
    return {
        "model": "tiny-mixtral",
        "layers": list(range(num_layers)),
        "num_experts": num_experts,
        "experts_per_token": 2,
        "num_slots": 2,
        "context_tokens": 8192,
        "mode": "offloaded",
        "budget_bytes": 11 << 30,
        "pages_total": 5120,
        "pack": PACK,
    } | others


def state_of(chosen: NDArray[np.uint32], read: NDArray[np.uint32], resident: Any, **others: Any) -> Values:
    """A `state` event."""
    return {
        "tokens_per_s": 18.3,
        "prefill_tokens_per_s": 0.0,
        "bytes_per_token": 41.5 * (1 << 20),
        "running": 1,
        "waiting": 0,
        "hit_rate": 0.874,
        "read_bytes_per_s": 760.0 * (1 << 20),
        "resident": None if resident is None else bitmap(resident),
        "chosen": saturated(chosen),
        "read": saturated(read),
        "slots": [
            {"state": "decode", "tokens": 1204, "context": 8192},
            {"state": "idle", "tokens": 0, "context": 8192},
        ],
    } | others


def random_states(num_layers: int, num_experts: int, k: int, number: int, share: float) -> list[Values]:
    """States of a decode in which a share of the experts is resident and popular ones are chosen most."""
    rng, shape = np.random.default_rng(5), (num_layers, num_experts)
    weight = rng.gamma(0.6, size=shape)
    cut = np.quantile(weight, 1 - share)
    resident, states = weight > cut, []
    for place in range(number):
        chosen, read = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
        for layer in range(num_layers):
            experts = rng.choice(num_experts, k, replace=False, p=weight[layer] / weight[layer].sum())
            chosen[layer, experts] += 1
            missing = experts[~resident[layer, experts]]
            read[layer, missing] += 1
            if len(missing):
                resident[layer, missing] = True
                old = rng.choice(np.flatnonzero(resident[layer]), min(len(missing), resident[layer].sum() - k))
                resident[layer, old] = False
        speed = 18.3 + 2 * math.sin(place / 5)
        states.append(state_of(chosen, read, resident, tokens_per_s=speed))
    return states


COUNTS = SchedulerCounts(num_slots=2, running=1, num_requests=1)


class FixedScheduler:
    """A scheduler that runs nothing, and whose counts a test sets."""

    now = COUNTS
    context_tokens = 48
    slots = tuple(
        SimpleNamespace(state=state, sequence=SimpleNamespace(num_tokens=number))
        for state, number in (("prefill", 17), ("idle", 4))
    )

    def counts(self) -> SchedulerCounts:
        return self.now


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serves an app from a thread, and yields its address."""
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, lifespan="off")
    with running(uvicorn.Server(config)) as port:
        yield f"http://127.0.0.1:{port}/"
