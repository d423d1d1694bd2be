"""An engine on a card, timed: prompt and continuation, what it asked for, and what the driver says it held."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from gpu_clock import Clock
from gpu_results import Results

from moe_pack.formats import Pack
from moe_pack.runtime import Decoder, EncoderDecoder, Engine, EngineOptions, Sampler
from moe_pack.runtime.bench import random_prompt
from moe_pack.runtime.card_engine import Counting
from moe_pack.runtime.card_placement import least_placement
from moe_pack.runtime.graph_engine import GraphAtWork
from moe_pack.runtime.host_arena import HostArena
from moe_pack.runtime.run_report import report

EngineName = Literal["graph", "staged", "auto"]
_MIB = 1 << 20
_REHEARSED_CHUNK = 16  # tokens of a forward pass


@dataclass(frozen=True, slots=True)
class Ask:
    """How a pack is to be run. `budget_bytes`: of the card.   `ram_bytes`: of the host, None for as much as it gives.

    `kv_dtype`: of keys and values, None for the engine's own.
    """

    engine: EngineName
    policy: str = "auto"
    budget_bytes: int | None = None
    ram_bytes: int | None = None
    kv_dtype: Literal["f32", "bf16"] | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """What a run asked of its experts' cache since the start; bytes came over the link."""

    needed: int
    hits: int
    num_bytes: int

    def since(self, before: "Counters") -> "Counters":
        """What was asked after `before`."""
        return Counters(self.needed - before.needed, self.hits - before.hits, self.num_bytes - before.num_bytes)


@dataclass(frozen=True, slots=True)
class Speed:
    """A prompt of random tokens, then tokens one by one, chosen at random as the model says.

    `hit_rate`, `bytes_per_token`: of decoding.   `link_share`: what the missing bytes take at the link's measured copy
    rate, as a share of the time.   `driver_bytes`: that the driver says are taken of the card, by whomever.
    """

    pack: str
    ask: Ask
    prompt_tokens: int
    decode_tokens: int
    prefill_per_s: float
    decode_per_s: float
    median_token_ms: float
    worst_token_ms: float
    hit_rate: float
    bytes_per_token: float
    link_share: float
    driver_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that was opened, and what it says of itself."""

    pack: str
    ask: Ask
    seconds: float
    driver_bytes: int
    facts: str
    fallbacks: tuple[str, ...]


class Running(Protocol):
    """An engine at work."""

    @property
    def fallbacks(self) -> Sequence[str]:
        """What was wished and could not be had."""
        ...

    @property
    def decoder(self) -> Decoder | EncoderDecoder:
        """What runs the pack."""
        ...

    def close(self) -> None:
        """Gives all back."""
        ...


class Rehearsed:
    """The graph engine over plain memory, its kernels by the interpreter. Owns all but the pack: `close` it."""

    fallbacks: Sequence[str] = ()

    def __init__(self, pack: Pack, context_tokens: int) -> None:
        device = torch.device("cpu")
        room = 2 * least_placement(pack.layout).num_bytes
        with ExitStack() as opened:
            host = opened.enter_context(HostArena(pack, device))
            built = GraphAtWork(pack, host, device, room, context_tokens, _REHEARSED_CHUNK)
            opened.enter_context(closing(built))
            self.decoder: Decoder = built.decoder
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Lets go of the memory."""
        self._opened.close()


def open_engine(pack: Pack, ask: Ask, context_tokens: int, is_rehearsal: bool) -> Running:
    """The engine asked for; in a rehearsal the graph engine by the interpreter, or the CPU's own."""
    if not is_rehearsal:
        return Engine(pack, options_of(ask), context_tokens)
    if ask.engine == "graph":
        return Rehearsed(pack, context_tokens)
    wanted: dict[str, Any] = {"engine": ask.engine, "policy": ask.policy}
    return Engine(pack, EngineOptions(**wanted), context_tokens)


def options_of(ask: Ask) -> EngineOptions:
    """The engine's options, on a card."""
    wanted: dict[str, Any] = {"device": "cuda", "policy": ask.policy, "budget_bytes": ask.budget_bytes}
    return EngineOptions(engine=ask.engine, ram_bytes=ask.ram_bytes, kv_dtype=ask.kv_dtype, **wanted)


def link_rate(clock: Clock) -> float:
    """Bytes a second of a copy of 256 MiB from page-locked memory to the card."""
    num_bytes = _MIB if clock.is_rehearsal else 256 * _MIB
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not clock.is_rehearsal)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    rate = num_bytes / clock.direct(lambda: there.copy_(host, non_blocking=True))
    if not clock.is_rehearsal:
        del host, there
        torch.cuda.empty_cache()  # what follows counts the driver's bytes
    return rate


def driver_bytes(clock: Clock) -> int:
    """What is taken of the card, by the driver's count."""
    if clock.is_rehearsal:
        return 0
    free, total = torch.cuda.mem_get_info(clock.device)
    return total - free


class Bench:
    """An engine on a pack. Owns both: `close` it, or use it with `closing`."""

    def __init__(
        self, results: Results, clock: Clock, folder: Path, ask: Ask, context_tokens: int, rate: float
    ) -> None:
        """`rate`: `link_rate`, measured before."""
        self._results, self._clock, self._ask, self._rate = results, clock, ask, rate
        self.name = folder.name
        start = time.perf_counter()
        self.pack = Pack(folder)
        try:
            self.engine = open_engine(self.pack, ask, context_tokens, clock.is_rehearsal)
        except BaseException:
            self.pack.close()
            raise
        seconds, taken = time.perf_counter() - start, driver_bytes(clock)
        facts = str(report(self.engine)) if isinstance(self.engine, Engine) else "a rehearsal"
        results.add(Opened(self.name, ask, seconds, taken, facts, tuple(self.engine.fallbacks)))

    def close(self) -> None:
        """Closes the engine and the pack."""
        with closing(self.pack), closing(self.engine):
            pass
        if not self._clock.is_rehearsal:
            torch.cuda.empty_cache()

    def measure(self, prompt_tokens: int, decode_tokens: int, seed: int = 0) -> Speed:
        """Times a prompt and its continuation from an empty context, and adds the row.

        The experts' cache is as the last run left it: measure twice for a warm one.
        """
        decoder, spec = self.engine.decoder, self.pack.spec
        prompt = random_prompt(prompt_tokens, spec.vocab_size, spec.max_position_embeddings, seed)
        sampler = Sampler(1.0, 1.0, seed)
        decoder.reset()
        start = time.perf_counter()
        token = sampler.choose(decoder.next_logits(prompt))
        prefill_s, before = time.perf_counter() - start, counters(self.engine)
        times = []
        for _ in range(decode_tokens):
            start = time.perf_counter()
            token = sampler.choose(decoder.next_logits([token]))
            times.append(time.perf_counter() - start)
        asked, decode_s = counters(self.engine).since(before), sum(times)
        speed = Speed(
            pack=self.name,
            ask=self._ask,
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            prefill_per_s=prompt_tokens / prefill_s,
            decode_per_s=decode_tokens / decode_s,
            median_token_ms=1000 * sorted(times)[len(times) // 2],
            worst_token_ms=1000 * max(times),
            hit_rate=asked.hits / asked.needed if asked.needed else 1.0,
            bytes_per_token=asked.num_bytes / decode_tokens,
            link_share=asked.num_bytes / self._rate / decode_s,
            driver_bytes=driver_bytes(self._clock),
        )
        self._results.add(speed)
        return speed


def counters(engine: Running) -> Counters:
    """What an engine's cache of experts was asked since the start."""
    if isinstance(engine.decoder, Counting):  # the graph engine's are on the card
        counts = engine.decoder.counts()
        return Counters(counts.needed, counts.hits, counts.num_bytes)
    stream = report(engine).stream if isinstance(engine, Engine) else None
    if stream is None:
        return Counters(0, 0, 0)
    phases = (stream.prefill, stream.decode)
    needed, hits = (sum(getattr(phase, name) for phase in phases) for name in ("experts_needed", "hits"))
    return Counters(needed, hits, sum(phase.asked_bytes for phase in phases))
