"""The live picture of the engine: the experts that run and that are read from the disk, and the slots.

`LiveCounts` observes the engine and counts; the thread that computes calls it. Each watcher of `GET /engine` keeps its
last copy of the counts, and gets the difference. The server-sent events are

    engine   once: model, layers (numbers of those with experts: L of them), num_experts (E), experts_per_token,
             num_slots, context_tokens, mode (mapped, offloaded or gpu), budget_bytes, pages_total; pack: its bytes,
             bits_per_weight of the experts, loss (as it was measured; null if it was not), kv_dtype, numerics
    state    at most four times a second, and every five seconds if nothing changes: tokens_per_s,
             prefill_tokens_per_s, bytes_per_token, read_bytes_per_s and hit_rate of the last two seconds; running,
             waiting; resident (`bitmap`; null if the system or a GPU decides); chosen and read (`saturated`: how often
             each expert ran and came from the disk since the last event); slots: state, tokens and context of each,
             none while the engine's memory is given back

The page at `/` draws them. It is one file, which loads nothing from elsewhere; its Content-Security-Policy says so.
"""

import asyncio
import base64
import hashlib
import json
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files
from threading import Lock
from typing import Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from numpy.typing import NDArray
from sse_starlette import EventSourceResponse

from moe_pack import formats
from moe_pack.runtime import Engine
from moe_pack.runtime.quality import bits_per_weight, read_quality
from moe_pack.runtime.serve import requests
from moe_pack.runtime.serve.scheduler import BatchScheduler

Counts = NDArray[np.uint32]

_LOG = logging.getLogger(__name__)
_EVENT_S = 0.25
_QUIET_S = 5.0  # an event after so long shows that the server is there
RATE_S = 2.0  # rates are those of the last seconds; shorter ones jump with every token of a large model

# ---- counts ---------------------------------------------------------------------------------------------------------


class LiveCounts:
    """Counts how often each expert was chosen and read: an `ExpertObserver` for one thread, watched by others.

    Counts wrap at 2^32; a watcher subtracts its last copy, so that watchers do not disturb one another.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.shape = (num_layers, num_experts)
        self._chosen = np.zeros(self.shape, np.uint32)
        self._read = np.zeros(self.shape, np.uint32)
        self._lock = Lock()

    def routed(self, layer_idx: int, experts: NDArray[np.int64]) -> None:
        """Counts the experts int64 [T, k] that run in a layer; it takes 3 us for a token."""
        found = np.bincount(experts.ravel(), minlength=self.shape[1]).astype(np.uint32)
        with self._lock:
            self._chosen[layer_idx] += found

    def fetched(self, layer_idx: int, expert: int) -> None:
        """Counts that an expert is read from the disk."""
        with self._lock:
            self._read[layer_idx, expert] += np.uint32(1)

    def totals(self) -> tuple[Counts, Counts]:
        """Returns copies of all counts: how often each expert was chosen, and read, uint32 [L, E]."""
        with self._lock:
            return self._chosen.copy(), self._read.copy()

    def watch(self) -> "Watcher":
        """Returns a new watcher, which counts from now on."""
        return Watcher(self)


class Watcher:
    """A reader of the counts, for one thread."""

    def __init__(self, live: LiveCounts) -> None:
        self._live = live
        self._chosen, self._read = live.totals()

    def snapshot(self) -> tuple[Counts, Counts]:
        """Returns how often each expert was chosen, and read, since the last call, uint32 [L, E]."""
        chosen, read = self._live.totals()
        since = chosen - self._chosen, read - self._read
        self._chosen, self._read = chosen, read
        return since


def live_counts(engine: Engine) -> LiveCounts:
    """Returns counts that observe an engine from now on; on a GPU only the experts that the CPU reads from the disk."""
    spec = engine.pack.spec
    live = LiveCounts(len(spec.moe_layers), spec.router.num_experts)
    weights = engine.weights if engine.facts.gpu is None else engine.offloaded
    if weights is not None:
        weights.observer = live
    return live


# ---- readings and rates ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counts at a time."""

    at_s: float
    counts: requests.SchedulerCounts
    expert_bytes: int  # read from the disk; of a mapped pack, those of the experts that ran
    needed: int = 0  # as in `PhaseCounts`, and the hits too; 0 unless experts are offloaded
    hits: int = 0


def _read_gauges(engine: Engine, scheduler: BatchScheduler) -> _Reading:
    weights, counts = engine.offloaded, scheduler.counts()
    if weights is None:
        return _Reading(time.monotonic(), counts, engine.bytes_read())
    stats = weights.store.reads.stats()
    return _Reading(
        at_s=time.monotonic(),
        counts=counts,
        expert_bytes=stats.bytes_urgent + stats.bytes_prefetched,
        needed=weights.prefill.needed + weights.decode.needed,
        hits=weights.prefill.hits + weights.decode.hits,
    )


def _rates(first: _Reading, last: _Reading) -> dict[str, float | None]:
    """Returns the rates between two readings; those of tokens are per second of computation, as in a benchmark."""

    def ratio(number: float, whole: float) -> float:
        return round(number / whole, 3) if whole > 0 and number > 0 else 0.0

    before, after = first.counts, last.counts
    generated = after.generated_tokens - before.generated_tokens
    computed = (after.prompt_tokens - after.cached_tokens) - (before.prompt_tokens - before.cached_tokens)
    num_bytes, needed = last.expert_bytes - first.expert_bytes, last.needed - first.needed
    return {
        "tokens_per_s": ratio(generated, after.decode_s - before.decode_s),
        "prefill_tokens_per_s": ratio(computed, after.prefill_s - before.prefill_s),
        "bytes_per_token": ratio(num_bytes, generated + max(computed, 0)),
        "read_bytes_per_s": ratio(num_bytes, last.at_s - first.at_s),
        "hit_rate": (last.hits - first.hits) / needed if needed > 0 else None,
    }


# ---- events ---------------------------------------------------------------------------------------------------------


def engine_facts(engine: Engine, scheduler: BatchScheduler, model: str) -> dict[str, Any]:
    """Returns the values of the `engine` event; while the server runs, only the budget may change."""
    spec, plan, facts = engine.pack.spec, engine.plan, engine.facts
    return {
        "model": model,
        "layers": list(spec.moe_layers),
        "num_experts": spec.router.num_experts,
        "experts_per_token": spec.router.num_experts_per_tok,
        "num_slots": scheduler.counts().num_slots,
        "context_tokens": scheduler.context_tokens,
        "mode": facts.mode,
        "budget_bytes": facts.budget_bytes,
        "pages_total": None if plan is None else plan.num_pages,
        "pack": {
            "bytes": engine.pack.manifest.totals.content,
            "bits_per_weight": bits_per_weight(engine.pack),
            "loss": _measured_loss(engine.pack),
            "kv_dtype": engine.kv_dtype,
            "numerics": engine.numerics,
        },
    }


def _measured_loss(pack: formats.Pack) -> dict[str, Any] | None:
    """Returns the loss as `moe-pack inspect` prints it; None if it was not measured, or the file is damaged.

    `kl` (nats a token), `kl_half_width` and `perplexity_increase` (0.01 for 1%) are None without a comparison.
    """
    try:
        quality = read_quality(pack)
    except formats.PackError as fault:  # the server needs no figures to answer
        _LOG.warning("%s; the page shows no loss", fault)
        return None
    if quality is None:
        return None
    against = quality.against
    return {
        "perplexity": quality.perplexity.value,
        "perplexity_increase": None if against is None else against.perplexity_increase.value,
        "kl": None if against is None else against.kl.value,
        "kl_half_width": None if against is None else against.kl.half_width,
        "num_tokens": quality.num_tokens,
        "text": quality.text,
    }


class _Picture:
    """The states of the engine as one watcher sees them."""

    def __init__(self, live: LiveCounts, engine: Engine, scheduler: BatchScheduler) -> None:
        self._engine, self._scheduler, self._watcher = engine, scheduler, live.watch()
        self._readings = deque([_read_gauges(engine, scheduler)])
        self._decoded: dict[str, float | None] = {}  # the rates of the last decode that had a token

    def state(self) -> dict[str, Any]:
        """Returns the `state` event for the time since the last one."""
        last = _read_gauges(self._engine, self._scheduler)
        self._readings.append(last)
        while len(self._readings) > 2 and last.at_s - self._readings[1].at_s > RATE_S:
            self._readings.popleft()
        chosen, read = self._watcher.snapshot()
        rates, offloaded = _rates(self._readings[0], last), self._engine.offloaded
        if not last.counts.running:
            self._decoded = {}
        elif rates["tokens_per_s"]:
            self._decoded = {name: rates[name] for name in ("tokens_per_s", "bytes_per_token")}
        elif not rates["prefill_tokens_per_s"]:
            rates |= self._decoded  # a large model takes seconds for a token
        return {
            **rates,
            "running": last.counts.running,
            "waiting": last.counts.waiting,
            "resident": None if offloaded is None else bitmap(offloaded.resident_experts()),
            "chosen": saturated(chosen),
            "read": saturated(read),
            "slots": [
                {"state": slot.state, "tokens": slot.sequence.num_tokens, "context": self._scheduler.context_tokens}
                for slot in self._scheduler.slots
            ],
        }


def bitmap(flags: NDArray[np.bool_]) -> str:
    """Returns flags bool [L, E] as base64 of bits: expert e of layer l is bit l E + e, the lowest of a byte first."""
    return base64.b64encode(np.packbits(flags, bitorder="little").tobytes()).decode("ascii")


def saturated(counts: Counts) -> str:
    """Returns counts uint32 [L, E] as base64 of bytes [L, E], at most 255."""
    return base64.b64encode(np.minimum(counts, 255).astype(np.uint8).tobytes()).decode("ascii")


async def engine_events(
    live: LiveCounts, engine: Engine, scheduler: BatchScheduler, facts: dict[str, Any]
) -> AsyncIterator[dict[str, str]]:
    """Yields server-sent events without end: `engine` with the facts, then a `state` after each change.

    Each has the names `event` and `data`, as `EventSourceResponse` takes them.
    """

    def event(name: str, values: dict[str, Any]) -> dict[str, str]:
        return {"event": name, "data": json.dumps(values, separators=(",", ":"))}

    yield event("engine", facts)
    picture = _Picture(live, engine, scheduler)
    sent, sent_at = None, 0.0
    while True:
        state = picture.state()
        if state != sent or time.monotonic() - sent_at >= _QUIET_S:
            yield event("state", state)
            sent, sent_at = state, time.monotonic()
        await asyncio.sleep(_EVENT_S)


def engine_router(live: LiveCounts, engine: Engine, scheduler: BatchScheduler, model: str) -> APIRouter:
    """Returns the routes of `GET /engine`; `model` is the name under which the server offers the pack."""
    router = APIRouter()

    @router.get("/engine", response_class=EventSourceResponse)
    async def watch_engine() -> EventSourceResponse:
        """Watches the engine: server-sent events `engine` and `state`."""
        facts = engine_facts(engine, scheduler, model)
        return EventSourceResponse(engine_events(live, engine, scheduler, facts))

    return router


# ---- the page -------------------------------------------------------------------------------------------------------


def page_router() -> APIRouter:
    """Returns the routes of the page, `GET /`. It has no facts about the model, so it needs no key."""
    page = files("moe_pack.runtime.serve.http").joinpath("page.html").read_text("utf-8")
    headers = {
        "Content-Security-Policy": content_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> HTMLResponse:
        """Shows the page."""
        return HTMLResponse(page, headers=headers)

    return router


def content_policy(page: str) -> str:
    """Returns a policy with which a browser runs the page's own script and style alone, and connects nowhere else."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert found is not None, "the page has one script and one style"
        digest = base64.b64encode(hashlib.sha256(found.group(1).encode("utf-8")).digest()).decode("ascii")
        rules.append(f"{rule} 'sha256-{digest}'")
    return "; ".join([*rules, "frame-ancestors 'none'"])
