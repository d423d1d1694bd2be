"""How fast the CPU computes what a GPU leaves to it: tokens/s of the host's share of experts alone.

python tests/bench/host_share.py

A layer's call computes the missing rows of one token's experts, as CUDA's host node does. Only some experts are in
memory, each in bytes of its own; a round takes each of them once, after a read of more memory than caches hold. Times
are scaled to the model's number of layers, without what the GPU does meanwhile.

Rows are missing in two ways: of each of a token's experts the last part of its running neurons, which the selector on
the GPU has found, or all of some experts, which the CPU then selects for itself.
"""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Literal

import click
import numpy as np
import torch
from benchlib import finish, json_option, table
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from moe_pack.convert.synthetic import WeightDistribution, random_rows, random_stream
from moe_pack.formats import ExpertFormat, ExpertLayout, ExpertSpec, part_format
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.runtime.cpu import ExpertRows, HostShare, HostShareBuffers, Kernels, extent_rows, num_cpus
from moe_pack.runtime.gpu.kernels.tables import WHOLE

_READ_BYTES = 1 << 29  # more than any cache holds
_EXPERTS_BYTES = 1 << 30  # of the experts in memory, about
_SPARSITIES = (0.0, 0.8)
_MISSES = (0.2, 0.5, 1.0)
Missing = Literal["rows", "experts"]
_MISSING: tuple[Missing, ...] = ("rows", "experts")


@dataclass(frozen=True, slots=True)
class Model:
    """Dimensions of a model: d columns, f neurons, `k` of a token's experts in each of `num_layers` MoE layers."""

    name: str
    d: int
    f: int
    k: int
    num_layers: int


_MODELS = (Model("Mixtral-8x7B", 4096, 14336, 2, 32), Model("Qwen3-30B-A3B", 2048, 768, 8, 48))
_FOUR = part_format(4, 64)
_FORMATS = {
    "4 bit": ExpertFormat(_FOUR, _FOUR, _FOUR),
    "up 2 bit, records 4 bit": ExpertFormat(_FOUR, part_format(2, 64), _FOUR),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is missing of a token: a share of the rows that run, as rows of every expert or as whole experts."""

    sparsity: float
    misses: float
    missing: Missing


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians: the CPU's milliseconds of a whole token, the bytes it reads a second, and their share of plain reads."""

    model: str
    stored_as: str
    sparsity: float
    misses: float
    missing: Missing
    token_mb: float
    token_ms: float
    tokens_per_s: float
    gb_per_s: float
    read_gb_per_s: float
    share: float


class Experts:
    """Random experts with selector `up` in groups of a token's k, each group a layer of a host's share."""

    def __init__(self, model: Model, stored: ExpertFormat) -> None:
        self.model = model
        spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
        self.layout: ExpertLayout = expert_layout(stored, "up", spec, model.d)
        spreads = dict.fromkeys(("gate", "up", "down"), WeightDistribution(0.0, model.d**-0.5))
        stream = random_stream(0)
        parts = [
            random_rows(rows, model.f, spreads, stream) for rows in (self.layout.selector, self.layout.records) if rows
        ]
        extent = np.concatenate([part.reshape(-1) for part in parts])
        self.num_groups = max(4, round(_EXPERTS_BYTES / extent.nbytes / model.k))
        copies = [extent.copy() for _ in range(self.num_groups * model.k)]
        rows = [extent_rows(self.layout, "up", "silu", 0.0, copy) for copy in copies]
        self.groups: list[list[ExpertRows]] = [rows[i : i + model.k] for i in range(0, len(rows), model.k)]

    def buffers(self, x: Tensor) -> HostShareBuffers:
        """Returns buffers in which nothing is asked for."""
        k, f = self.model.k, self.model.f
        return HostShareBuffers(
            x=x,
            weights=torch.full((k,), 1 / k),
            experts=torch.arange(k, dtype=torch.int32),
            counts=torch.zeros(self.num_groups, k, dtype=torch.int32),
            neurons=torch.zeros(self.num_groups, k, f, dtype=torch.int32),
            a=torch.zeros(k, f),
            y=torch.zeros(self.model.d),
        )


def ask(case: Case, running: Tensor, a: Tensor, buffers: HostShareBuffers) -> None:
    """Asks for what is missing. `running`: int32 [n], the neurons that run.   `a`: float32 [f]."""
    buffers.counts.zero_()
    if case.missing == "experts":
        places = buffers.counts.view(-1)
        whole = np.floor(np.arange(len(places) + 1) * case.misses)  # spread evenly over the places of all layers
        places[torch.from_numpy(np.diff(whole) > 0)] = WHOLE
        return
    missing = running[len(running) - round(len(running) * case.misses) :]
    buffers.counts.fill_(len(missing))
    buffers.neurons[:, :, : len(missing)] = missing
    buffers.a[:, : len(missing)] = a[missing.long()]


class Bench:
    """Shares over the same experts, one for each sparsity, and the cases that they are timed with."""

    def __init__(self, kernels: Kernels, model: Model, stored_as: str) -> None:
        self.experts = Experts(model, _FORMATS[stored_as])
        x = torch.randn(model.d, generator=torch.Generator().manual_seed(0))
        (selected,) = kernels.select_each(x[None], [(self.experts.groups[0][0], np.zeros(1, np.int64))])
        self._a = selected.a[0]
        self.buffers = self.experts.buffers(x)
        self._thresholds, self._shares = dict[float, float](), dict[float, HostShare]()
        for sparsity in _SPARSITIES:
            sizes = self._a.abs().sort().values
            self._thresholds[sparsity] = threshold = float(sizes[round(sparsity * model.f)]) if sparsity else 0.0
            layers = [[replace(rows, threshold=threshold) for rows in group] for group in self.experts.groups]
            self._shares[sparsity] = HostShare(kernels, layers, self.buffers)

    def time(self, case: Case, pause_us: float) -> tuple[float, int]:
        """Computes every group once; returns seconds a layer, and the bytes that a layer reads on average."""
        share, num_groups = self._shares[case.sparsity], self.experts.num_groups
        is_running = (self._a != 0) & (self._a.abs() >= self._thresholds[case.sparsity])
        ask(case, is_running.nonzero()[:, 0].to(torch.int32), self._a, self.buffers)
        before, seconds = share.counts(), 0.0
        for group_idx in range(num_groups):
            until = time.perf_counter() + pause_us / 1e6
            while time.perf_counter() < until:
                pass
            start = time.perf_counter()
            share.run(group_idx)
            seconds += time.perf_counter() - start
        share.check()
        num_bytes = share.counts().record_bytes - before.record_bytes
        num_whole = int((self.buffers.counts == WHOLE).sum())
        return seconds / num_groups, (num_bytes + num_whole * self.experts.layout.selector_bytes) // num_groups

    def close(self) -> None:
        """Ends the shares."""
        for share in self._shares.values():
            share.close()


def measure(
    kernels: Kernels, model: Model, stored_as: str, rounds: int, pause_us: float, spare: NDArray[np.uint8]
) -> Iterator[Figure]:
    """Times all cases of a model, interleaved with plain reads; the first round warms up."""
    cases = [Case(*each) for each in product(_SPARSITIES, _MISSES, _MISSING)]
    times: dict[Case, list[float]] = {case: [] for case in cases}
    num_bytes, reads = dict[Case, int](), list[float]()
    with closing(Bench(kernels, model, stored_as)) as bench:
        for number in range(rounds + 1):
            for case in cases if number % 2 else reversed(cases):
                start = time.perf_counter()
                kernels.read(spare)
                reads.append(time.perf_counter() - start)
                seconds, num_bytes[case] = bench.time(case, pause_us)
                times[case].append(seconds)
    read_rate = spare.nbytes / median(reads[len(cases) :])
    for case, seconds_each in times.items():
        taken, read = median(seconds_each[1:]), num_bytes[case]
        token_s = model.num_layers * taken
        yield Figure(
            *(model.name, stored_as, case.sparsity, case.misses, case.missing),
            *(model.num_layers * read / 1e6, 1e3 * token_s, 1 / token_s),
            *(read / taken / 1e9, read_rate / 1e9, read / taken / read_rate),
        )


@click.command(help=__doc__)
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1), help="Runs of each case.")
@click.option("--threads", default=num_cpus(), type=click.IntRange(1), help="Of the CPU.  [default: one a CPU]")
@click.option(
    "--pause-us", default=0.0, show_default=True, type=click.FloatRange(0), help="Between layers, as a GPU has."
)
@click.option("--model", "models", multiple=True, type=click.Choice([m.name for m in _MODELS]), help="[default: all]")
@json_option
def main(rounds: int, threads: int, pause_us: float, models: tuple[str, ...], as_json: bool) -> None:
    """Runs the benchmark."""
    spare, figures = np.ones(_READ_BYTES, np.uint8), list[Figure]()
    chosen = [model for model in _MODELS if not models or model.name in models]
    load = os.getloadavg()[0]
    with closing(Kernels(threads)) as kernels:
        name = kernels.instruction_set
        for model, stored_as in tqdm(list(product(chosen, _FORMATS)), disable=None):
            figures += measure(kernels, model, stored_as, rounds, pause_us, spare)
    rows = [
        (x.model, x.stored_as, f"{x.sparsity:.0%}", f"{x.misses:.0%}", x.missing, f"{x.token_mb:.0f}",
         f"{x.token_ms:.1f}", f"{x.tokens_per_s:.2f}", f"{x.gb_per_s:.1f}", f"{x.read_gb_per_s:.1f}", f"{x.share:.0%}")
        for x in figures
    ]  # fmt: skip
    text = table(
        ("model", "stored as", "sparsity", "misses", "missing", "MB", "ms a token", "tokens/s", "GB/s", "read GB/s",
         "share"),
        rows,
    )  # fmt: skip
    facts = {"instruction_set": name, "threads": threads, "pause_us": pause_us, "load_before": load}
    head = f"{name}, {threads} threads, {pause_us:g} us between layers, load before {load:.2f}"
    finish(facts | {"figures": [asdict(x) for x in figures]}, f"{head}\n\n{text}", as_json)


if __name__ == "__main__":
    main()
