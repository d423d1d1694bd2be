"""Parts `token`, `mixtral`, `qwen3` and `sampling`: whole models of real dimensions, with synthetic weights.

`token`: a profile by kernel of whole tokens.   `mixtral`, `qwen3`: decoding and prompts with everything on the GPU,
then within 11, 12, 13 and 8 GiB of it.   `sampling`: what choosing a token costs the host.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from gpu_clock import Clock, host_seconds
from gpu_engine import EngineBench, EngineWanted, Speed, link_rate
from gpu_packs import MIXTRAL, QWEN3, PackWanted, make_synthetic, remove_packs
from gpu_results import Results

from moe_pack.runtime import Sampler

_CAP_GIB, _OTHER_GIB = 11, (12, 13, 8)
_LENGTHS = (128, 16, 512)  # of prompts; the first also warms up
_DECODED = 96
_SAMPLERS = {"greedy": (0.0, 1.0), "temperature 1": (1.0, 1.0), "temperature 0.8, top-p 0.95": (0.8, 0.95)}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Decoding under a cap, beside decoding with everything on the GPU (FloE: 0.91 with 2-bit experts resident)."""

    pack: str
    gib: int
    capped_per_s: float
    resident_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class SamplerTime:
    """The host's milliseconds to choose a token, the median."""

    sampler: str
    vocabulary: int
    ms: float


def profile(results: Results, clock: Clock) -> None:
    """Whole tokens under the profiler: Mixtral under the cap, Qwen3 with everything on the GPU."""
    remove_packs(clock.is_rehearsal, (MIXTRAL.name, QWEN3.name))
    rate = link_rate(clock)
    for wanted, engine in ((MIXTRAL, _graph(_CAP_GIB)), (QWEN3, _graph(None))):

        def body(wanted: PackWanted = wanted, engine: EngineWanted = engine) -> None:
            folder = make_synthetic(results, wanted)
            with closing(EngineBench(results, clock, folder, rate)) as bench:
                bench.profile(engine, 2 if clock.is_rehearsal else 128)

        results.section(wanted.name, body)


def mixtral(results: Results, clock: Clock) -> None:
    """Mixtral's dimensions: 11 GiB, all of it, other budgets; the staged engine for comparison, last."""
    remove_packs(clock.is_rehearsal, (MIXTRAL.name, QWEN3.name))
    _budgets(results, clock, MIXTRAL)


def qwen3(results: Results, clock: Clock) -> None:
    """Qwen3's dimensions."""
    remove_packs(clock.is_rehearsal, (QWEN3.name,))
    _budgets(results, clock, QWEN3)


def _budgets(results: Results, clock: Clock, wanted: PackWanted) -> None:
    lengths, decoded = ((2, 3), 3) if clock.is_rehearsal else (_LENGTHS, _DECODED)
    rate, folder = link_rate(clock), make_synthetic(results, wanted)
    with closing(EngineBench(results, clock, folder, rate)) as bench:
        found: dict[int | None, Speed] = {}

        def measure(gib: int | None) -> None:
            found[gib] = bench.measure(_graph(gib), lengths, decoded)[1]
            capped, resident = found.get(gib), found.get(None)
            if gib is not None and capped is not None and resident is not None:
                ratio = capped.decode_per_s / resident.decode_per_s
                results.add(Ratio(bench.name, gib, capped.decode_per_s, resident.decode_per_s, ratio))

        for gib in (None, _CAP_GIB) if clock.is_rehearsal else (None, _CAP_GIB, *_OTHER_GIB):
            results.section("resident" if gib is None else f"{gib} GiB", partial(measure, gib))
        staged = EngineWanted("staged", "lru", _CAP_GIB << 30)
        results.section(f"{_CAP_GIB} GiB, staged", partial(bench.measure, staged, lengths[:2], decoded // 3))


def _graph(gib: int | None) -> EngineWanted:
    return EngineWanted("graph", budget_bytes=None if gib is None else gib << 30)


def sampling(results: Results, clock: Clock) -> None:
    """A model's peaked predictions, and those of random weights, at both vocabularies."""
    for vocabulary in (32_000, 151_936):
        flat = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
        peaked = 2.5 * flat
        peaked[:50] += 12
        for name, (temperature, top_p) in _SAMPLERS.items():
            for kind, logits in (("peaked", peaked), ("flat", flat)):
                sampler = Sampler(temperature, top_p, 0)
                choose: Callable[[], object] = partial(sampler.choose, logits)
                ms = 1000 * host_seconds(choose, 3 if clock.is_rehearsal else 31)
                results.add(SamplerTime(f"{name}, {kind}", vocabulary, ms))
