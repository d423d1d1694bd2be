"""Engines on a GPU and the packs that they run: synthetic ones with a model's dimensions, or the demo model's.

All cores make a pack, in memory if it fits, else on the disk, and it stays for later parts.
"""

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from support.gpu_runs import GpuRun, gpu_decoder
from support.models import DEMO_MODEL
from support.synthetic import shrunk

from gpu.measuring import Clock, Results
from gpu.packs import CORRELATION, SKEW, PackRequest
from moe_pack.convert import SyntheticTraits, skewed_popularity, synthesize
from moe_pack.formats import ModelSpec, Pack, dense_roles
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.formats.parts import GroupedQuerySpec
from moe_pack.runtime import Engine, EngineOptions, random_prompt, report
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.engine.options import MissesOption
from moe_pack.runtime.gpu.devices import HostArena, host_bytes
from moe_pack.runtime.gpu.fit import GpuCounts
from moe_pack.runtime.gpu.placements import Misses
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.model import Decoder, EncoderDecoder
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.offload import PRESETS, PolicyName, Sequences
from moe_pack.runtime.offload.prefetch import methods_by_layer

MEMORY = Path("/dev/shm")
_SPARE_BYTES = 2 << 30  # that stay free in a file system
_DEMO_BYTES = 10 << 20
_TINY_VOCABULARY = 256
_ROOT = Path(__file__).parents[3]


def make_synthetic(results: Results, wanted: PackRequest, is_tiny: bool = False) -> Path:
    """Makes a pack and returns its folder; if tiny, and in a rehearsal, of a model with two narrow layers."""
    spec = _tiny(wanted.model) if is_tiny or results.is_rehearsal else model_spec(wanted.model, None)
    plan = wanted.plan(spec)
    files = pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec))).files()
    folder = folder_for(wanted.name, sum(file.num_bytes for _, file in files), results.is_rehearsal)
    if not (folder / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        character = SyntheticTraits(wanted.sparsity, skewed_popularity(spec, SKEW, 0), CORRELATION, 0)
        synthesize(spec, plan, character, folder, len(os.sched_getaffinity(0)))
    return folder


def _tiny(model: str) -> ModelSpec:
    spec = shrunk(model, 2, vocab_size=_TINY_VOCABULARY)
    router = replace(spec.router, num_experts=8, num_experts_per_tok=2)
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec), "as all models have it that are run here"
    return replace(spec, router=router, attention=replace(attention, num_heads=4, num_kv_heads=2))


def make_demo(results: Results, sparsity: float) -> Path:
    """The demo model in 4 bits, with this share of its neurons below their thresholds."""
    folder = folder_for(f"demo-{sparsity:g}", _DEMO_BYTES, results.is_rehearsal)
    if not (folder / "manifest.json").exists():
        command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(DEMO_MODEL), "--quantizer", "nearest"]
        command += ["--selector-bits", "4", "--record-bits", "4", "--dense-bits", "source"]
        command += ["--sparsity", str(sparsity), "-o", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command[2:])}: {done.stderr.strip()[-1000:]}"
    return folder


def remove_packs(is_rehearsal: bool, keep: tuple[str, ...] = ()) -> None:
    for folder in _folders(is_rehearsal):
        for path in folder.iterdir() if folder.exists() else ():
            if path.is_dir() and path.name not in keep:
                shutil.rmtree(path)


def _folders(is_rehearsal: bool) -> list[Path]:
    """Returns the places for packs, the best first."""
    on_disk = _ROOT / "build" / "gpu-packs"
    has_memory = not is_rehearsal and os.access(MEMORY, os.W_OK)
    return [*([MEMORY / f"moe-pack-gpu-{os.getuid()}"] if has_memory else []), on_disk]


def folder_for(name: str, num_bytes: int, is_rehearsal: bool) -> Path:
    """Returns a pack's folder: where it exists, else the first place with enough free space.

    Raises:  OSError if no place has enough.
    """
    folders = _folders(is_rehearsal)
    for folder in folders:
        if (folder / name / "manifest.json").exists():
            return folder / name
    free = {}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        free[folder] = shutil.disk_usage(folder).free - _SPARE_BYTES
        if free[folder] >= num_bytes:
            return folder / name
    listed = ", ".join(f"{folder} {max(num_free, 0):,}" for folder, num_free in free.items())
    raise OSError(f"{name}: needs {num_bytes:,} bytes; free are {listed}")


_MIB = 1 << 20
_CHUNK_TOKENS = 16  # of a forward pass of an engine that is built for a share
_SMALL_SHARE = 0.3  # of the experts, for which a rehearsal has memory in place of any budget


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The options of a run of a pack.

    `budget_bytes`: of the GPU, None for what is free.   `kv_dtype`: of keys and values, None for the engine's own.
    `ram_bytes`: of the host, for experts; None: enough for all.   `share`: of all experts' bytes that fit beyond the
    least that an engine runs in; the engine is built over so much memory, and no budget is measured. None: it is.
    """

    misses: MissesOption
    policy: Literal["auto"] | PolicyName = "auto"
    budget_bytes: int | None = None
    kv_dtype: KvDtype | None = None
    ram_bytes: int | None = None
    share: float | None = None

    def options(self, ram_bytes: int) -> EngineOptions:
        """Returns the engine's options; `ram_bytes` is the host's, if the request has none."""
        return EngineOptions(
            device="cuda",
            misses=self.misses,
            policy=self.policy,
            budget_bytes=self.budget_bytes,
            ram_bytes=self.ram_bytes or ram_bytes,
            kv_dtype=self.kv_dtype,
        )

    def run(self, pack: Pack, context_tokens: int) -> GpuRun:
        """Returns the request for an engine that is built for a share; policies predict by the next router."""
        policy: PolicyName = "lru" if self.policy == "auto" else self.policy
        num_predicted = PRESETS[policy].num_predicted(pack.spec.router.num_experts_per_tok)
        prediction = PredictionPlan(methods_by_layer("router", pack.spec, None), num_predicted, None)
        misses: Misses = "pull" if self.misses == "pull" else "split"
        usual_share = 1.0 if self.budget_bytes is None and self.ram_bytes is None else _SMALL_SHARE
        return GpuRun(
            share=usual_share if self.share is None else self.share,
            misses=misses if self.ram_bytes is None else "disk",
            pulled_share=0.0 if self.misses == "cpu" else 0.5,
            prediction=prediction if num_predicted and self.ram_bytes is None else None,
            chunk_tokens=_CHUNK_TOKENS,
            context_tokens=context_tokens,
            cache_dtype=self.kv_dtype or "f32",
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """A prompt of random tokens, then random tokens one by one; after each the likeliest next one is found.

    The next token is drawn, because synthetic weights would soon repeat one token, and so one route.
    """

    pack: str
    wanted: EngineRequest
    prompt_tokens: int
    decode_tokens: int
    prefill_per_s: float
    decode_per_s: float
    median_token_ms: float
    worst_token_ms: float
    resident: float  # share of decoding's running neurons that were computed from GPU memory
    pulled: float  # over the link
    left: float  # by the CPU, without those of the experts of `whole_per_token`
    whole_per_token: float  # experts that the CPU computed whole
    ahead_per_token: float  # records that were pulled before their layer
    ahead_needed: float  # share of these that ran
    bytes_per_token: float  # over the link
    disk_bytes_per_token: float  # that the CPU's own engine asked for
    link_share: float  # of the time, that the link's bytes take at its measured copy rate
    cpu_share: float  # of the time, in which the CPU computed
    driver_bytes: int  # of the GPU that the driver says are in use


@dataclass(frozen=True, slots=True)
class Opened:
    pack: str
    wanted: EngineRequest
    seconds: float
    driver_bytes: int
    facts: str
    fallbacks: tuple[str, ...]


class SharedEngine:
    """The GPU's engine with memory for a share of the experts; in a rehearsal, over plain memory. `close` it."""

    fallbacks: Sequence[str] = ()

    def __init__(self, folder: Path, run: GpuRun, device: torch.device) -> None:
        self._given, self._opened = (folder, run, device), ExitStack()
        self.take()

    def take(self) -> None:
        """Takes the memory again, as `Engine.take`."""
        self.decoder: Decoder = self._opened.enter_context(gpu_decoder(*self._given))

    def release(self) -> None:
        """Gives the memory back."""
        del self.decoder
        self._opened.close()

    def close(self) -> None:
        self._opened.close()


Running = Engine | SharedEngine


def open_engine(
    pack: Pack, wanted: EngineRequest, context_tokens: int, clock: Clock, host: HostArena | None = None
) -> Running:
    """Opens the requested engine; in a rehearsal it is built for a share, and the interpreter runs its kernels.

    Args:    host: the pack's experts, if host memory is not limited; None: the engine reads them.
    """
    if wanted.share is not None or clock.is_rehearsal:
        assert wanted.misses == "pull" or is_available(), "the CPU's share needs the native kernels, and g++ for them"
        return SharedEngine(pack.folder, wanted.run(pack, context_tokens), clock.device)
    host = host if wanted.ram_bytes is None else None
    return Engine(pack, wanted.options(host_bytes(pack)), context_tokens, host=host)


def link_rate(clock: Clock) -> float:
    num_bytes = _MIB if clock.is_rehearsal else 256 * _MIB
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not clock.is_rehearsal)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    rate = num_bytes / clock.direct(lambda: there.copy_(host, non_blocking=True))
    if not clock.is_rehearsal:
        del host, there
        torch.cuda.empty_cache()  # what follows counts the driver's bytes
    return rate


def driver_bytes(clock: Clock) -> int:
    if clock.is_rehearsal:
        return 0
    free, total = torch.cuda.mem_get_info(clock.device)
    return total - free


class EngineBench:
    """A pack, its experts in host memory, and engines on it, one after the other. Owns pack and memory: `close` it.

    Args:    rate: `link_rate`, measured before.
    """

    def __init__(self, results: Results, clock: Clock, folder: Path, rate: float) -> None:
        self._results, self._clock, self._rate, self.name = results, clock, rate, folder.name
        with ExitStack() as opened:
            self.pack = opened.enter_context(Pack(folder))
            self._host = opened.enter_context(HostArena(self.pack, clock.device))
            self.close = opened.pop_all().close

    def measure(self, wanted: EngineRequest, prompt_tokens: Sequence[int], decode_tokens: int) -> list[Speed]:
        """Opens an engine; adds a row for each prompt and continuation from an empty context; the first warms up."""
        with closing(self._open(wanted, max(prompt_tokens) + decode_tokens)) as engine:
            return [
                self._measure(engine, wanted, count, decode_tokens, seed) for seed, count in enumerate(prompt_tokens)
            ]

    def _open(self, wanted: EngineRequest, context_tokens: int) -> Running:
        clock = self._clock
        if not clock.is_rehearsal:  # the memory of the engine before goes back to the driver
            gc.collect()
            torch.cuda.empty_cache()
        start = time.perf_counter()
        engine = open_engine(self.pack, wanted, context_tokens, clock, self._host)
        seconds, taken = time.perf_counter() - start, driver_bytes(clock)
        facts = str(report(engine)) if isinstance(engine, Engine) else "a rehearsal"
        self._results.add(Opened(self.name, wanted, seconds, taken, facts, tuple(engine.fallbacks)))
        return engine

    def _measure(
        self, engine: Running, wanted: EngineRequest, prompt_tokens: int, decode_tokens: int, seed: int
    ) -> Speed:
        decoder, draws = engine.decoder, self._drawn(decode_tokens, 1000 + seed)
        decoder.reset()
        start = time.perf_counter()
        int(decoder.next_logits(self._drawn(prompt_tokens, seed)).argmax())
        prefill_s, before, read_before = time.perf_counter() - start, counts(engine), disk_bytes(engine)
        times = [self._timed(decoder, token) for token in draws]
        found, decode_s = _since(counts(engine), before), sum(times)
        running = max(found.resident + found.pulled + found.left, 1)
        speed = Speed(
            pack=self.name,
            wanted=wanted,
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            prefill_per_s=prompt_tokens / prefill_s,
            decode_per_s=decode_tokens / decode_s,
            median_token_ms=1000 * sorted(times)[len(times) // 2],
            worst_token_ms=1000 * max(times),
            resident=found.resident / running,
            pulled=found.pulled / running,
            left=found.left / running,
            whole_per_token=found.whole / decode_tokens,
            ahead_per_token=found.ahead / decode_tokens,
            ahead_needed=found.ahead_ran / max(found.ahead, 1),
            bytes_per_token=found.link_bytes / decode_tokens,
            disk_bytes_per_token=(disk_bytes(engine) - read_before) / decode_tokens,
            link_share=found.link_bytes / self._rate / decode_s,
            cpu_share=found.cpu_seconds / decode_s,
            driver_bytes=driver_bytes(self._clock),
        )
        self._results.add(speed)
        return speed

    def _timed(self, decoder: Decoder | EncoderDecoder, token: int) -> float:
        start = time.perf_counter()
        int(decoder.next_logits([token]).argmax())
        return time.perf_counter() - start

    def _drawn(self, count: int, seed: int) -> list[int]:
        spec = self.pack.spec
        return random_prompt(count, spec.vocab_size, spec.max_position_embeddings, seed)


@dataclass(frozen=True, slots=True)
class Live:
    """Memory that is given back and taken again, with four sequences: the driver's bytes, and medians of seconds."""

    pack: str
    budget_bytes: int | None  # None: what is free
    taken_bytes: int
    released_bytes: int
    release_seconds: float
    take_seconds: float
    is_same: bool  # whether a prompt has the same logits, but for rounding


_LIVE_CONTEXT, _LIVE_PROMPT, _LIVE_TIMES, _SAME_LOGITS = 4096, 24, 3, 1e-3


def measure_live(results: Results, clock: Clock, folder: Path, budget_bytes: int | None) -> None:
    """Adds a row of memory that is given back and taken again, as a server does it."""
    is_rehearsal, wanted = clock.is_rehearsal, EngineRequest("auto", budget_bytes=budget_bytes)
    context, num_prompt, times = (64, 2, 1) if is_rehearsal else (_LIVE_CONTEXT, _LIVE_PROMPT, _LIVE_TIMES)
    with Pack(folder) as pack, ExitStack() as opened:
        engine: Running = SharedEngine(folder, wanted.run(pack, context), clock.device) if is_rehearsal else Engine(
            pack, wanted.options(host_bytes(pack)), context, sequences=Sequences(4)
        )  # fmt: skip
        opened.enter_context(closing(engine))
        ids = random_prompt(num_prompt, pack.spec.vocab_size, pack.spec.max_position_embeddings, 0)
        expected, seconds = _logits_of(engine, ids), list[tuple[float, float]]()
        taken = driver_bytes(clock)
        for _ in range(times):
            begin = time.perf_counter()
            engine.release()
            middle, released = time.perf_counter(), driver_bytes(clock)
            engine.take()
            seconds.append((middle - begin, time.perf_counter() - middle))
        is_same = bool((_logits_of(engine, ids) - expected).abs().max() < _SAME_LOGITS * expected.abs().max())
    given, took = (sorted(each)[times // 2] for each in zip(*seconds, strict=True))
    results.add(Live(folder.name, budget_bytes, taken, released, given, took, is_same))
    if not is_same or (not is_rehearsal and released >= taken):
        results.fail("memory that is given back", "other logits" if not is_same else "nothing was given back")


def _logits_of(engine: Running, ids: list[int]) -> torch.Tensor:
    engine.decoder.reset()
    return engine.decoder.logits(ids).cpu().clone()


def counts(engine: Running) -> GpuCounts:
    assert isinstance(engine.decoder, GpuDecoder), "a GPU's decoder counts"
    return engine.decoder.counts()


def _since(after: GpuCounts, before: GpuCounts) -> GpuCounts:
    return GpuCounts(*(late - early for late, early in zip(astuple(after), astuple(before), strict=True)))


def disk_bytes(engine: Running) -> int:
    """Returns the bytes that the CPU's own engine asked for in decoding since the start; 0 where there is none."""
    stream = report(engine).stream if isinstance(engine, Engine) else None
    return 0 if stream is None else stream.decode.asked_bytes
