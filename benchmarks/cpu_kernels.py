"""Times one token through experts of Mixtral's and Qwen3-30B-A3B's size on the CPU, beside what memory allows.

For every format and sparsity: the bytes that must be read (all selector rows, the records of running neurons) a second,
as a share of the rate at which the same threads do nothing but read; beside it the torch path, which reads everything
whatever the sparsity. Selector kind up, random weights: groups of 64 by width, beside them trellises with one scale a
row (trellis2: two bits a weight), and beside the widths of 4 and 8 bits the codecs that keep what sources have in as
many. Experts are taken in turn from more memory than any cache holds, as many a call as the model takes for a token.
Rounds are interleaved, figures are medians.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

import click
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.convert.random_weights import Spread, random_rows, random_stream
from moe_pack.formats import (
    E5M2,
    FP8,
    MXFP4,
    ROW_GROUP,
    ExpertFormat,
    ExpertLayout,
    ExpertSpec,
    PartFormat,
    Selector,
    expert_layout,
    format_text,
    part_format,
    trellis_format,
)
from moe_pack.runtime import ExpertRows, Kernels, PackedExpert, expert_numbers, num_cpus, run_expert

_GROUP = 64
_SOURCES = {"fp8": FP8, "e5m2": E5M2, "mxfp4": MXFP4}
_SPARSITIES = (0.0, 0.5, 0.8, 0.9)
_READ_BYTES = 1 << 29
_HELD_BYTES = 1 << 29  # of copies of an expert
_TORCH_ROUNDS = 3
_KIND: Selector = "up"


@dataclass(frozen=True, slots=True)
class Model:
    """Dimensions of an expert, and how many a token takes."""

    name: str
    d: int
    f: int
    experts: int


_MODELS = (Model("Mixtral-8x7B", 4096, 14336, 2), Model("Qwen3-30B-A3B", 2048, 768, 8))


@dataclass(frozen=True, slots=True)
class Figure:
    """One case: median milliseconds of a token's experts, its bytes, the bytes a second and their share of reading.

    `torch_ms`: the torch path for the same experts.
    """

    model: str
    stored_as: str
    sparsity: float
    threads: int
    num_bytes: int
    ms: float
    gb_a_second: float
    share: float
    torch_ms: float


class Experts:
    """Copies of a random expert in more memory than caches hold, taken in turn."""

    def __init__(self, model: Model, stored: PartFormat) -> None:
        spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
        self.layout = expert_layout(ExpertFormat(stored, stored, stored), _KIND, spec, model.d)
        extent = _random_extent(self.layout)
        self._copies = [extent.copy() for _ in range(max(2, _HELD_BYTES // extent.nbytes))]
        self._rows = [self._as_rows(copy) for copy in self._copies]
        self._next = 0

    def _as_rows(self, extent: NDArray[np.uint8]) -> ExpertRows:
        begin, f = self.layout.selector_bytes, self.layout.num_rows
        selector, records = extent[:begin].reshape(f, -1), extent[begin:].reshape(f, -1)
        return ExpertRows(expert_numbers(self.layout, _KIND, "silu"), selector, records, 0.0)

    def take(self, count: int, threshold: float) -> list[tuple[ExpertRows, NDArray[np.int64], NDArray[np.float32]]]:
        """The next `count` copies, all for the one token."""
        self._next += count
        places = [(self._next + i) % len(self._rows) for i in range(count)]
        token, weight = np.zeros(1, np.int64), np.ones(1, np.float32)
        return [(replace(self._rows[i], threshold=threshold), token, weight) for i in places]

    def packed(self) -> PackedExpert:
        """The next copy as torch computes it."""
        self._next += 1
        return PackedExpert(self.layout, torch.from_numpy(self._copies[self._next % len(self._copies)]))


def _format_of(name: str) -> PartFormat:
    """The format for a name as `--formats` has it."""
    if name.startswith("trellis"):
        return trellis_format(round(2 * float(name.removeprefix("trellis"))), ROW_GROUP)
    return _SOURCES.get(name) or part_format(int(name), _GROUP)


def _random_extent(layout: ExpertLayout) -> NDArray[np.uint8]:
    """An expert's bytes: weights evenly spread about zero."""
    spreads, stream = dict.fromkeys(("gate", "up", "down"), Spread(0.0, 0.02)), random_stream(0)
    halves = [random_rows(rows, layout.num_rows, spreads, stream) for rows in (layout.selector, layout.records) if rows]
    return np.concatenate([half.reshape(-1) for half in halves])


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _thresholds(experts: Experts, model: Model, x: torch.Tensor, kernels: Kernels) -> dict[float, float]:
    """The threshold for each sparsity, exact for this token."""
    ((rows, _, _),) = experts.take(1, 0.0)
    a = np.sort(kernels.select(x, rows).a.abs().numpy().ravel())
    return {s: float(a[round(s * model.f)]) if s else 0.0 for s in _SPARSITIES}


def _torch_seconds(experts: Experts, model: Model, x: torch.Tensor, threads: int) -> float:
    """Seconds of the torch path for a token's experts."""
    packed = [experts.packed() for _ in range(model.experts)]
    torch.set_num_threads(threads)
    seconds = _seconds(lambda: [run_expert(x, expert, "silu", _KIND, 0.0) for expert in packed])
    torch.set_num_threads(1)
    time.sleep(0.02)  # until its threads no longer spin
    return seconds


def measure(
    model: Model, stored: PartFormat, rounds: int, pools: dict[int, Kernels], spare: NDArray[np.uint8]
) -> list[Figure]:
    """All cases of one format, interleaved."""
    experts = Experts(model, stored)
    x = torch.randn(1, model.d, generator=torch.Generator().manual_seed(0))
    thresholds = _thresholds(experts, model, x, next(iter(pools.values())))
    cases = [(sparsity, threads) for threads in pools for sparsity in _SPARSITIES]
    times: dict[tuple[float, int], list[float]] = {case: [] for case in cases}
    reads: dict[int, list[float]] = {threads: [] for threads in pools}
    plain: dict[int, list[float]] = {threads: [] for threads in pools}
    for number in range(rounds + 1):  # the first warms up
        for threads, kernels in pools.items():
            if number <= _TORCH_ROUNDS:
                plain[threads].append(_torch_seconds(experts, model, x, threads))
            reads[threads].append(_seconds(partial(kernels.read, spare)))
            for sparsity in _SPARSITIES if number % 2 else reversed(_SPARSITIES):
                works = experts.take(model.experts, thresholds[sparsity])
                times[sparsity, threads].append(_seconds(partial(kernels.experts, x, works)))
    figures = []
    for sparsity, threads in cases:
        running = model.f - round(sparsity * model.f)
        layout = experts.layout
        num_bytes = model.experts * (layout.selector_bytes + running * layout.records.row_bytes)
        seconds, rate = median(times[sparsity, threads][1:]), spare.nbytes / median(reads[threads][1:])
        speed, torch_ms = num_bytes / seconds, 1e3 * median(plain[threads][1:])
        case = (model.name, format_text(stored), sparsity, threads, num_bytes)
        figures.append(Figure(*case, 1e3 * seconds, speed / 1e9, speed / rate, torch_ms))
    return figures


def _table(figures: list[Figure]) -> str:
    lines = [
        "| experts of | stored as | threads | sparsity | MB | ms | GB/s | share | torch, ms | times as fast |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {x.model} | {x.stored_as} | {x.threads} | {x.sparsity:.0%} | {x.num_bytes / 1e6:.1f} | {x.ms:.2f} "
        f"| {x.gb_a_second:.1f} | {x.share:.0%} | {x.torch_ms:.0f} | {x.torch_ms / x.ms:.0f} |"
        for x in figures
    ]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1), help="Runs of each case.")
@click.option(
    "--formats",
    default="2,trellis2,3,trellis3,4,trellis4,mxfp4,8,fp8,e5m2,16",
    show_default=True,
    help="Bits a weight, trellisBITS (1.5 to 4), or a codec that keeps a source.",
)
@click.option("--threads", default=f"1,{min(2, num_cpus())}", show_default=True, help="Numbers of threads.")
@click.option(
    "--limit", type=click.Choice(["avx512vbmi", "avx512", "avx2", "portable"]), help="Not beyond this instruction set."
)
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
def main(rounds: int, formats: str, threads: str, limit: str | None, as_json: bool) -> None:
    """Measures and prints."""
    spare = np.ones(_READ_BYTES, np.uint8)
    figures: list[Figure] = []
    with ExitStack() as stack:
        pools = {
            n: stack.enter_context(closing(Kernels(n, limit)))  # type: ignore[arg-type]  # click checked it
            for n in dict.fromkeys(int(number) for number in threads.split(","))
        }
        held = [_format_of(name) for name in formats.split(",")]
        cases = [(model, stored) for model in _MODELS for stored in held]
        for model, stored in tqdm(cases, disable=as_json):
            figures += measure(model, stored, rounds, pools, spare)
        name = next(iter(pools.values())).instruction_set
    if as_json:
        click.echo(json.dumps({"instruction_set": name, "figures": [asdict(figure) for figure in figures]}))
    else:
        click.echo(f"{name}\n{_table(figures)}")


if __name__ == "__main__":
    main()
