"""Part `qwen3`: a synthetic Qwen3-30B-A3B on 8 GiB of a card, its host memory at 25, 50 and 100% of the pack."""

from contextlib import closing
from functools import partial
from pathlib import Path

from gpu_clock import Clock
from gpu_engine import Ask, Bench, link_rate
from gpu_packs import Ask as PackAsk
from gpu_packs import even_plan, make_room, make_synthetic, pack_bytes
from gpu_results import Results

_NAME, _BUDGET = "qwen3-30b-a3b-4bit", 8 << 30


def run(results: Results, clock: Clock) -> None:
    """Makes the pack, then runs each engine on it, the fastest case first."""
    make_room(clock.is_rehearsal, (_NAME,))
    rate = link_rate(clock)
    folder = make_synthetic(results, PackAsk(_NAME, "qwen3-30b-a3b", even_plan(4, 4), 0.0))
    whole = pack_bytes(folder)
    asks = [Ask("graph", budget_bytes=_BUDGET), Ask("staged", "lru", _BUDGET)]
    asks += [Ask("staged", "lru", _BUDGET, whole * percent // 100) for percent in (50, 25)]
    for ask in asks:
        name = f"{ask.engine}, host memory {ask.ram_bytes or whole:,}"
        results.section(name, partial(_measure, results, clock, folder, ask, rate))


def _measure(results: Results, clock: Clock, folder: Path, ask: Ask, rate: float) -> None:
    tokens = 2 if clock.is_rehearsal else 128
    with closing(Bench(results, clock, folder, ask, 2 * tokens, rate)) as bench:
        for seed in range(2):  # the first compiles, and fills the cache
            bench.measure(tokens, tokens if ask.ram_bytes is None else tokens // 2, seed)
