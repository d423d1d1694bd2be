"""What the host's decisions on a GPU's slots cost: milliseconds a token, in which the GPU computes the next one.

python tests/bench/host_decisions.py

The engine's own `Residency` decides on drawn tokens, as between the tokens of `GpuDecoder`; nothing is computed.
Experts are drawn by a skewed popularity, and neurons as placement assumes that they run: the first ones of an expert
most often. A share of a token's missing records is pulled into landing slots, as the link brings them; the others are
left to the CPU, and the host promotes as many of them as it ever does. Where nothing is pulled, all others are.

Times are of the thread on its CPU, so that a busy machine changes them less.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median

import click
import numpy as np
from benchlib import finish, json_option, table
from gpu.packs import MIXTRAL, QWEN3
from gpu.roofline import CPU_RATES, Misses, Subject, rates_of
from numpy.typing import NDArray
from support.played_slots import residency_of, static_table
from tqdm import tqdm

from moe_pack.convert.plan.speed import drawn_passes
from moe_pack.formats import size_text
from moe_pack.formats.base.commands import read_size
from moe_pack.runtime.gpu.kernels.tables import WHOLE
from moe_pack.runtime.gpu.placements import NUM_TURNS, GpuPlacement
from moe_pack.runtime.gpu.residency import MOST_KEPT, Promotion, Residency, TableChanges, TokenRoutes
from moe_pack.runtime.offload import PRESETS

_SPARSITY = 0.8
_REQUESTS = {each.name: replace(each, sparsity=_SPARSITY) for each in (MIXTRAL, QWEN3)}
_PULLED_SHARE = rates_of("RTX 4090", CPU_RATES["DDR5"]).pulled_share


@dataclass(frozen=True, slots=True, eq=False)
class Lacking:
    """What a token lacked: `experts`, `left_counts`, `pulled_counts` int64 [L, k], and which neurons these are.

    `left`: int32 [L, k, f].   `pulled`: of each layer int32 [k, landing slots].
    """

    experts: NDArray[np.int64]
    left_counts: NDArray[np.int64]
    left: NDArray[np.int32]
    pulled_counts: NDArray[np.int64]
    pulled: list[NDArray[np.int32]]

    @property
    def routes(self) -> TokenRoutes:
        """Returns what `decide` looks at."""
        counts = self.left_counts
        return TokenRoutes(self.experts, counts, lambda l, place: self.left[l, place, : counts[l, place]], None)


class DrawnTokens:
    """A model's tokens in a placement, with the table of records that the GPU has."""

    def __init__(self, subject: Subject, placement: GpuPlacement, pulled_share: float) -> None:
        self.num_rows = subject.layout.spec.expert.intermediate_size
        self._placement, self._pulled_share = placement, pulled_share
        runs = subject.runs("falling")
        self._runs, self._slice = runs, runs.shape[2] * np.arange(self.num_rows) // self.num_rows
        self._draw = np.random.default_rng(0)
        self._at = static_table(placement, self.num_rows)

    def enter(self, changes: TableChanges) -> None:
        """Changes the table before a token."""
        self._at.reshape(-1)[changes.places] = changes.values

    def run(self, experts: NDArray[np.int64]) -> Lacking:
        """Draws the running neurons of a token's experts [L, k], and divides those that are missing."""
        shape, f = experts.shape, self.num_rows
        found = Lacking(
            experts,
            np.zeros(shape, np.int64),
            np.zeros((*shape, f), np.int32),
            np.zeros(shape, np.int64),
            [np.zeros((shape[1], number), np.int32) for number in self._placement.num_landing],
        )
        for l, place in np.ndindex(*shape):
            expert = experts[l, place]
            if not self._placement.has_selector[l, expert]:
                found.left_counts[l, place] = WHOLE
                continue
            is_running = self._draw.random(f) < self._runs[l, expert, self._slice]
            missing = np.flatnonzero(is_running & (self._at[l, expert] < 0)).astype(np.int32)
            number = min(int(self._pulled_share * len(missing)), int(self._placement.num_landing[l]))
            found.pulled_counts[l, place], found.left_counts[l, place] = number, len(missing) - number
            found.pulled[l][place, :number] = missing[:number]
            found.left[l, place, : len(missing) - number] = missing[number:]
        return found


@dataclass(frozen=True, slots=True)
class Decided:
    """A token's decisions: their milliseconds, and the records that were entered in the tables and taken out."""

    ms: float
    entered: int
    evicted: int


def decide(residency: Residency, turn: int, last: Lacking, coming: list[Promotion]) -> tuple[TableChanges, float]:
    """Decides on what the last token lacked, as `GpuDecoder` does; returns the changes, and the seconds.

    Args:    coming: promotions of the call before, which have been copied; replaced by those of this call.
    """
    start = time.thread_time()
    residency.pulled(turn, last.experts, last.pulled_counts, lambda l: last.pulled[l])
    residency.arrived(coming)
    coming[:] = residency.decide(last.routes, MOST_KEPT)
    changes = residency.changes()
    return changes, time.thread_time() - start


def decided_tokens(subject: Subject, memory_bytes: int, is_pulled: bool, num_tokens: int) -> Iterator[Decided]:
    """Plays tokens, from empty slots on, and yields what each token's decisions cost."""
    misses: Misses = "auto" if is_pulled else "cpu"
    spec, placement = subject.layout.spec, subject.place(memory_bytes, misses)
    tokens = DrawnTokens(subject, placement, _PULLED_SHARE if is_pulled else 0.0)
    residency = residency_of(placement, PRESETS["lru"], subject.popularity, tokens.num_rows)
    routes = drawn_passes(subject.popularity, spec.router.num_experts_per_tok, num_tokens + 1).routes.astype(np.int64)
    coming = list[Promotion]()
    last = tokens.run(routes[0])
    for number, experts in enumerate(routes[1:], 1):
        running = tokens.run(experts)
        changes, seconds = decide(residency, (number - 1) % NUM_TURNS, last, coming)
        tokens.enter(changes)
        last = running
        entered = int((changes.values >= 0).sum())
        yield Decided(1e3 * seconds, entered, len(changes.values) - entered)


@dataclass(frozen=True, slots=True)
class Figure:
    """The milliseconds of a token's decisions, and the records entered: median and most over the tokens."""

    model: str
    memory_bytes: int
    is_pulled: bool
    median_ms: float
    most_ms: float
    median_entered: int
    most_entered: int
    median_evicted: int


@click.command(help=__doc__)
@click.option("--memory", default="11G", show_default=True, help="Of the GPU for experts.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1), help="That are played.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(_REQUESTS)), help="[default: all]")
@json_option
def main(memory: str, tokens: int, models: tuple[str, ...], as_json: bool) -> None:
    """Runs the benchmark."""
    load, figures = os.getloadavg()[0], list[Figure]()
    memory_bytes = read_size(memory)
    subjects = [Subject.of(_REQUESTS[name]) for name in models or _REQUESTS]
    for subject, is_pulled in tqdm(list(product(subjects, (False, True))), disable=None):
        found = list(decided_tokens(subject, memory_bytes, is_pulled, tokens))
        ms, entered = [each.ms for each in found], [each.entered for each in found]
        evicted = round(median(each.evicted for each in found))
        times = (median(ms), max(ms), round(median(entered)), max(entered), evicted)
        figures.append(Figure(subject.request.name, memory_bytes, is_pulled, *times))
    rows = [
        (x.model, "yes" if x.is_pulled else "no", f"{x.median_ms:.2f}", f"{x.most_ms:.2f}", f"{x.median_entered:,}",
         f"{x.most_entered:,}", f"{x.median_evicted:,}")
        for x in figures
    ]  # fmt: skip
    header = ("model", "pulled", "ms, median", "ms, most", "entered, median", "entered, most", "evicted, median")
    head = f"{size_text(memory_bytes)} for experts, {tokens} tokens, load before {load:.2f}"
    finish({"load_before": load, "figures": [asdict(x) for x in figures]}, f"{head}\n\n{table(header, rows)}", as_json)


if __name__ == "__main__":
    main()
