"""Part `mixtral`: a synthetic Mixtral-8x7B, all layers, records of 2 and 4 bits, sparsity 0.8: FloE's Figures 6 and 8.

The figures that matter most come first: 11 GiB beside everything resident in 2 bits, then FloE's own preset, then the
other budgets.
"""

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_clock import Clock
from gpu_engine import Ask, Bench, Speed, link_rate
from gpu_packs import Ask as PackAsk
from gpu_packs import even_plan, make_room, make_synthetic, mixed_plan
from gpu_results import Results

_MIXED, _RESIDENT = "mixtral-8x7b-mixed", "mixtral-8x7b-2bit"
_SPARSITY = 0.8
_CAP, _OTHERS = 11, (8, 12, 16, 20, 24)  # GiB
_TOKENS = (16, 128, 512)  # in and out


@dataclass(frozen=True, slots=True)
class Ratio:
    """Decoding under the cap beside decoding with everything resident in 2 bits (FloE: 0.91)."""

    capped_per_s: float
    resident_per_s: float
    ratio: float


def run(results: Results, clock: Clock) -> None:
    """Makes the packs and runs the engines on them."""
    make_room(clock.is_rehearsal, (_MIXED, _RESIDENT))
    part = _Part(results, clock)
    results.section("11 GiB", part.capped)
    results.section("resident", part.resident)
    results.section("FloE's preset", partial(part.one, Ask("staged", "floe", _CAP << 30), 32))
    for gib in _OTHERS[:1] if clock.is_rehearsal else _OTHERS:
        results.section(f"{gib} GiB", partial(part.one, Ask("graph", budget_bytes=gib << 30), 64))
    results.section("11 GiB, staged", partial(part.one, Ask("staged", "lru", _CAP << 30), 32))


class _Part:
    """What the sections share."""

    def __init__(self, results: Results, clock: Clock) -> None:
        self._results, self._clock, self._rate = results, clock, link_rate(clock)
        self._mixed = make_synthetic(results, PackAsk(_MIXED, "mixtral-8x7b", mixed_plan, _SPARSITY))
        self._capped: Speed | None = None

    def capped(self) -> None:
        """Under the cap: the usual lengths, then all of Figure 6."""
        lengths = (2,) if self._clock.is_rehearsal else _TOKENS
        with self._bench(self._mixed, Ask("graph", budget_bytes=_CAP << 30), 2 * max(lengths)) as bench:
            for seed in range(2):  # the first compiles, and fills the cache
                self._capped = bench.measure(lengths[len(lengths) // 2], lengths[len(lengths) // 2], seed)
            for prompt_tokens in lengths:
                for decode_tokens in lengths:
                    bench.measure(prompt_tokens, decode_tokens)

    def resident(self) -> None:
        """All in 2 bits and in the card's memory, at the same sparsity: what a token costs without any link."""
        folder = make_synthetic(self._results, PackAsk(_RESIDENT, "mixtral-8x7b", even_plan(2, 2), _SPARSITY))
        speed = self._twice(folder, Ask("graph"), 2 if self._clock.is_rehearsal else 128)
        if self._capped is not None:
            capped, resident = self._capped.decode_per_s, speed.decode_per_s
            self._results.add(Ratio(capped, resident, capped / resident))

    def one(self, ask: Ask, tokens: int) -> None:
        """The mixed pack, run in one way."""
        self._twice(self._mixed, ask, 2 if self._clock.is_rehearsal else tokens)

    def _twice(self, folder: Path, ask: Ask, tokens: int) -> Speed:
        with self._bench(folder, ask, 2 * tokens) as bench:
            bench.measure(tokens, tokens)
            return bench.measure(tokens, tokens, seed=1)

    def _bench(self, folder: Path, ask: Ask, context_tokens: int) -> "closing[Bench]":
        return closing(Bench(self._results, self._clock, folder, ask, context_tokens, self._rate))
