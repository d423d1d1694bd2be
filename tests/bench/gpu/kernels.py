"""Parts `timings` and `ncu`: how fast the kernels are at real models' dimensions.

`timings` compares the time of an operation with the bytes it must read; launches read other copies of random experts
each time, more than the L2 cache holds. `ncu` runs the main kernels once each in a process of their own, in a known
order, under NVIDIA's profiler, and reads its report back. Run as a program (`kernels.py DEVICE MODEL`), this module
launches them, and prints the order as JSON.
"""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu.checks import find_tool
from gpu.measuring import ByteClock, Clock, Results, Timed, copies_beyond
from gpu.transfers import Experts, Model, Stored, make_experts, make_matrices, one_pull
from moe_pack.formats import Selector
from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, attend
from moe_pack.runtime.gpu.kernels.elementwise import reduce
from moe_pack.runtime.gpu.kernels.grouped import Group, PassMemory, combine, run_group, sort_pairs
from moe_pack.runtime.gpu.kernels.halves import Halves, round_rows
from moe_pack.runtime.gpu.kernels.matmul import gemm, gemv
from moe_pack.runtime.gpu.kernels.neurons import compact, neurons, select
from moe_pack.runtime.gpu.kernels.rows import num_partials
from moe_pack.runtime.gpu.kernels.tables import Landing, LeftToCpu, RunningNeurons
from moe_pack.runtime.gpu.slicing import Slicing
from moe_pack.runtime.model.caches import KvDtype, RowStorage

MIXTRAL, QWEN3 = Model("Mixtral-8x7B", 4096, 14336, 2), Model("Qwen3-30B-A3B", 2048, 768, 8)
_GPT_OSS, _TINY = Model("gpt-oss-120b", 2880, 2880, 4), Model("tiny", 128, 96, 2)
_SPARSITIES, _TABLE_1 = (0.0, 0.8), (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
_KV_DTYPES: tuple[KvDtype, ...] = ("bf16", "q8", "q4")
_TOKENS = (16, 128, 512, 2048)
_SCRATCH_BYTES = 256 << 20  # of a pass of 2,048 tokens


@dataclass(frozen=True, slots=True)
class Stores:
    model: Model
    selector: Selector
    selector_bits: Stored
    record_bits: Stored

    def __str__(self) -> str:
        return f"{self.model.name} x{self.model.k} {self.selector} {self.selector_bits}/{self.record_bits}"


# FloE's Table 1: one expert as the paper stores it, at six sparsities.
_FLOE = Stores(Model("Mixtral-8x7B", 4096, 14336, 1), "up", 2, 16)
EXPERTS = (_FLOE, Stores(MIXTRAL, "up", 2, 4), Stores(QWEN3, "up", 4, 4), Stores(_GPT_OSS, "both", "mxfp4", "e5m2"))
_REHEARSED = (
    Stores(_TINY, "up", 2, 4),
    Stores(_TINY, "up", 2, 16),
    Stores(_TINY, "both", "mxfp4", "e5m2"),
    Stores(_TINY, "up", "t4", "t7"),
)
_MATRICES = ((4096, 4096, 4), (32000, 4096, 4), (4096, 4096, 16), (2048, 4096, 4), (151936, 2048, 4))


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """An operation on a token's experts. `running`: share of the neurons."""

    experts: str
    sparsity: float
    running: float
    operation: str
    timed: Timed


@dataclass(frozen=True, slots=True)
class DenseTime:
    """A matrix [rows, cols] times so many vectors, or experts of so many tokens. `tflops`: of their multiplications."""

    operation: str
    rows: int
    cols: int
    bits: Stored
    tokens: int
    tflops: float
    timed: Timed


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """A token's attention over a cache of `context` tokens, all seen."""

    heads: int
    kv_heads: int
    head_dim: int
    cache: str
    context: int
    timed: Timed


def timings(results: Results, clock: Clock) -> None:
    """Runs every case apart, so that one that fails costs no other."""
    timer, tiny = ByteClock(clock, clock.copy_rate()), clock.is_rehearsal
    for stores in _REHEARSED if tiny else EXPERTS:
        results.section(str(stores), partial(_token, results, timer, stores))
    for rows, cols, bits in ((96, 128, 4), (96, 128, "t4")) if tiny else _MATRICES:
        results.section(f"gemv {rows}x{cols} {bits}", partial(_gemv, results, timer, rows, cols, bits))
    for rows, cols, bits in ((96, 128, 4),) if tiny else ((4096, 4096, 4), (4096, 4096, 16)):
        results.section(f"gemm {rows}x{cols} {bits}", partial(_gemm, results, timer, rows, cols, bits))
    for model, num_experts in ((_TINY, 3),) if tiny else ((MIXTRAL, 8), (QWEN3, 128)):
        results.section(f"experts of many tokens, {model.name}", partial(_many, results, timer, model, num_experts))
    for heads, kv_heads in ((4, 2),) if tiny else ((32, 8), (32, 4)):
        results.section(f"attention {heads}/{kv_heads}", partial(_attention, results, timer, heads, kv_heads))


_ENTRY_BYTES = 16  # of a running neuron: read, with its record's place, and written, with its record's place


@dataclass(frozen=True, slots=True, eq=False)
class _Lists:
    """A token's running neurons and what `compact` needs, without memory for rows: none is missing."""

    experts: Experts
    running: RunningNeurons
    landing: Landing
    left: LeftToCpu

    @classmethod
    def allocate(cls, experts: Experts, model: Model, device: torch.device) -> "_Lists":
        k, f = model.k, model.f

        def locked(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        left = LeftToCpu(
            counts=locked(torch.int32, k),
            neurons=locked(torch.int32, k, f),
            a=locked(torch.float32, k, f),
            pulled_counts=locked(torch.int32, k),
            pulled=locked(torch.int32, k, 0),
        )
        slots = torch.zeros((k, 0), dtype=torch.int32, device=device)
        landing = Landing(slots, 0, f, experts.tables.kinds[0].record_units)
        return cls(experts, RunningNeurons.allocate(k, f, device), landing, left)

    def compact(self, batch: Tensor, is_split: bool) -> None:
        share = self.experts.tables.thresholds[:1]  # not read: nothing is missing
        compact(batch, self.experts.tables, self.running, self.landing, share, self.left, is_split)


def _token(results: Results, timer: ByteClock, stores: Stores) -> None:
    """The operations on a token's experts, and all one after the other, at each sparsity; no row is missing."""
    model, device = stores.model, timer.clock.device
    experts = make_experts(timer.clock, model, stores.selector, stores.selector_bits, stores.record_bits)
    x = torch.randn(model.d, generator=torch.Generator().manual_seed(0)).to(device)
    listed = _Lists.allocate(experts, model, device)
    select(x, experts.batches[0], experts.tables, listed.running)
    a = listed.running.a[0].abs()
    for sparsity in _TABLE_1 if stores == _FLOE else _SPARSITIES:
        experts.tables.thresholds.fill_(float(torch.quantile(a, sparsity)) if sparsity else 0.0)
        select(x, experts.batches[0], experts.tables, listed.running)
        _times(results, timer, stores, sparsity, x, experts, listed)


def _times(
    results: Results, timer: ByteClock, stores: Stores, sparsity: float, x: Tensor, experts: Experts, listed: _Lists
) -> None:
    model, device, num_running = stores.model, timer.clock.device, int(listed.running.counts[0].sum())
    partials = torch.zeros((model.k, num_partials(model.k, model.f, timer.clock.num_sms), model.d), device=device)
    weights, out = torch.full((model.k,), 1 / model.k, device=device), torch.zeros(model.d, device=device)

    def selects(batch: int) -> None:
        select(x, experts.batches[batch], experts.tables, listed.running)

    def lists(batch: int, is_split: bool = False) -> None:
        listed.compact(experts.batches[batch], is_split)

    def sums(batch: int) -> None:
        neurons(x, experts.batches[batch], experts.tables, listed.running, partials, "here")

    def reduces(batch: int) -> None:
        reduce(partials, weights, out)

    def everything(batch: int) -> None:
        selects(batch)
        lists(batch)
        sums(batch)
        reduces(batch)

    selected, recorded = model.k * experts.selector_bytes, num_running * experts.record_bytes
    entries_bytes = _ENTRY_BYTES * num_running
    for operation, num_bytes, launch in (
        ("select", selected, selects),
        ("compact, split", entries_bytes, partial(lists, is_split=True)),
        ("compact", entries_bytes, lists),
        ("neurons", recorded, sums),
        ("reduce", 4 * partials.numel(), reduces),
        ("all", selected + entries_bytes + recorded, everything),
    ):
        timed = timer.timed(num_bytes, launch, len(experts.batches))
        results.add(ExpertTime(str(stores), sparsity, num_running / model.k / model.f, operation, timed))


def _gemv(results: Results, timer: ByteClock, rows: int, cols: int, bits: Stored) -> None:
    device, (matrices, num_bytes) = timer.clock.device, make_matrices(timer.clock, rows, cols, bits)
    x, out, copies = torch.randn(cols).to(device), torch.zeros(rows, device=device), len(matrices)
    timed = timer.timed(num_bytes, lambda i: gemv(x, matrices[i], out), copies)
    results.add(DenseTime("gemv", rows, cols, bits, 1, _tflops(rows * cols, timed), timed))
    if bits == 16:
        half = x.to(torch.bfloat16)
        timed = timer.timed(num_bytes, lambda i: torch.mv(matrices[i].rows, half), copies)
        results.add(DenseTime("torch.mv, bf16", rows, cols, bits, 1, _tflops(rows * cols, timed), timed))


def _gemm(results: Results, timer: ByteClock, rows: int, cols: int, bits: Stored) -> None:
    matrices, num_bytes = make_matrices(timer.clock, rows, cols, bits)
    copies = len(matrices)
    for tokens in (3,) if timer.clock.is_rehearsal else _TOKENS:
        x = torch.randn(tokens, cols).to(timer.clock.device)
        out, work = torch.zeros(tokens, rows, device=x.device), rows * cols * tokens

        scratch = torch.empty(2 * rows * cols, dtype=torch.float16, device=x.device)

        def product(i: int, x: Tensor = x, out: Tensor = out, scratch: Tensor = scratch) -> None:
            gemm(x, matrices[i], out, scratch, 2)

        timed = timer.timed(num_bytes, product, copies)
        results.add(DenseTime("gemm", rows, cols, bits, tokens, _tflops(work, timed), timed))
        if bits == 16:
            half = x.to(torch.bfloat16)
            timed = timer.timed(num_bytes, lambda i, half=half: half @ matrices[i].rows.T, copies)  # type: ignore[misc] # a default
            results.add(DenseTime("torch.matmul, bf16", rows, cols, bits, tokens, _tflops(work, timed), timed))


def _many(results: Results, timer: ByteClock, model: Model, num_experts: int) -> None:
    """All experts of a layer in a pass of so many tokens: as exact as float32's products, and with one float16."""
    device, experts, k = timer.clock.device, make_experts(timer.clock, model, "up", 2, 4), model.k
    # Activations are about normal, of deviation 1: 0.8 of them lie below this.
    experts.tables.thresholds.fill_(1.28)
    tables, draw = experts.tables, np.random.default_rng(0)
    assert tables.selector_at is not None
    copies = torch.arange(num_experts, device=device) % len(tables.record_at)
    layer = replace(
        tables, selector_at=tables.selector_at[copies], record_at=tables.record_at[copies],
        thresholds=tables.thresholds[copies], kind=tables.kind[copies],
    )  # fmt: skip
    order = torch.arange(num_experts, dtype=torch.int32, device=device)
    for tokens in (3,) if timer.clock.is_rehearsal else _TOKENS:
        routes = torch.from_numpy(np.stack([draw.permutation(num_experts)[:k] for _ in range(tokens)])).to(device)
        num_bytes = len(routes.unique()) * (experts.selector_bytes + model.f * experts.record_bytes)
        x, weights = torch.randn(tokens, model.d).to(device), torch.full((tokens, k), 1 / k, device=device)
        y = torch.zeros_like(x)
        for num_halves in (1, 2):
            sizes = (model.f, model.d, num_experts, num_halves, _SCRATCH_BYTES)
            slicing = Slicing.of(*sizes)
            memory = PassMemory.allocate(*slicing, model.d, tokens * k, num_halves, device)
            rounded = Halves.allocate(num_halves, tokens, model.d, device)

            def runs(
                number: int, x: Tensor = x, routes: Tensor = routes, weights: Tensor = weights, y: Tensor = y,
                memory: PassMemory = memory, rounded: Halves = rounded, together: int = slicing.num_experts
            ) -> None:  # fmt: skip
                pairs = sort_pairs(routes, order, num_experts)
                round_rows(x, rounded)
                for first in range(0, num_experts, together):
                    run_group(rounded, Group(pairs, layer, first, min(together, num_experts - first)), memory)
                combine(memory.outputs, weights, y)

            timed = timer.timed(num_bytes, runs, 1)
            work = 3 * model.d * model.f * tokens * k
            name = f"{num_experts} experts of many tokens, {model.name}{', fast' if num_halves == 1 else ''}"
            results.add(DenseTime(name, model.f, model.d, "2/4", tokens, _tflops(work, timed), timed))


def _attention(results: Results, timer: ByteClock, heads: int, kv_heads: int) -> None:
    tiny = timer.clock.is_rehearsal
    head_dim = 16 if tiny else 128
    for context, dtype in product((48,) if tiny else (4096, 32768), _KV_DTYPES):
        rows = RowStorage(dtype, (head_dim,))
        num_bytes = 2 * kv_heads * context * rows.row_bytes
        num_copies = copies_beyond(timer.clock.l2_bytes, num_bytes)
        drawn = torch.randn((num_copies, 2, kv_heads, context, head_dim), device=timer.clock.device)
        timed = timer.timed(num_bytes, attends(rows.encode(drawn), rows, heads), num_copies)
        results.add(AttentionTime(heads, kv_heads, head_dim, dtype, context, timed))


def attends(caches: Tensor, rows: RowStorage, heads: int) -> Callable[[int], None]:
    """Attention of one token at the last position, over the copy [keys and values, heads, context, n] of a number."""
    (_, _, kv_heads, context, _), (head_dim,) = caches.shape, rows.parts
    q, out = (torch.randn(heads, head_dim, device=caches.device) for _ in range(2))
    position = torch.full((1,), context - 1, dtype=torch.int32, device=caches.device)
    workspace = AttentionWorkspace.allocate(heads, kv_heads, head_dim, context, caches.device)

    def attend_once(number: int) -> None:
        attend(q, (caches[number, 0], caches[number, 1]), position, head_dim**-0.5, None, workspace, out, rows=rows)

    return attend_once


def _tflops(multiplications: int, timed: Timed) -> float:
    return 2 * multiplications / timed.us / 1e6


_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy", "WarpStateStats", "InstructionStats")
_MODELS = {"mixtral": MIXTRAL, "qwen3": QWEN3, "tiny": _TINY}
_KERNELS = "regex:^(_select_kernel|_compact_kernel|_neurons_kernel|_gemv|_attend_kernel|_pull_records_kernel)$"
_SECONDS = 90  # that a model's launches may take
_SPARSITY = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A launch of a kernel. `case`: what it works on."""

    kernel: str
    case: str
    launch: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a kernel's launch, as ncu has it; numbers without their separators."""

    model: str
    kernel: str
    case: str
    metric: str
    unit: str
    value: str


def count(results: Results, clock: Clock) -> None:
    for name in ("tiny",) if clock.is_rehearsal else ("mixtral", "qwen3"):
        results.section(name, partial(_profile, results, clock, name))


def _profile(results: Results, clock: Clock, model: str) -> None:
    command = [sys.executable, str(Path(__file__)), clock.device.type, model]
    if clock.is_rehearsal:  # the launches are rehearsed, and that their order is told
        told = json.loads(_output(command))
        for kernel, case in told:
            results.add(Metric(model, kernel, case, "rehearsed", "", ""))
        return
    tool = find_tool("ncu")
    assert tool is not None, "ncu is not installed"
    report = results.path.with_name(f"{results.path.stem}-{model}.ncu-rep")
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    options += ["--kernel-name", _KERNELS, "--force-overwrite"]
    lines = _output([tool, *options, *sections, "--export", str(report), *command]).splitlines()
    (told,) = (json.loads(line) for line in lines if line.startswith("[["))
    page = _output([tool, "--import", str(report), "--csv", "--page", "details", "--print-units", "base"])
    for metric in read_metrics(page, model, told):
        results.add(metric)


def read_metrics(page: str, model: str, launches: list[list[str]]) -> list[Metric]:
    """Returns the metrics of ncu's `details` page as CSV; `launches` are kernels and cases, in their order.

    Raises:  AssertionError if the report has other kernels, or in another order.
    """
    begin = page.index('"ID"')
    rows = [row for row in csv.DictReader(io.StringIO(page[begin:])) if row["Metric Name"]]
    names = {row["ID"]: row["Kernel Name"].partition("(")[0] for row in rows}
    numbers, kernels = list(names), list(names.values())
    assert kernels == [kernel for kernel, _ in launches], f"ncu saw {kernels}, launched were {launches}"
    cases = {number: case for number, (_, case) in zip(numbers, launches, strict=True)}
    return [
        Metric(
            model, names[row["ID"]], cases[row["ID"]], row["Metric Name"], row["Metric Unit"],
            row["Metric Value"].replace(",", ""),
        )
        for row in rows
    ]  # fmt: skip


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    said = (done.stdout + done.stderr)[-800:]
    assert done.returncode == 0, f"{Path(command[0]).name} ended with {done.returncode}: {said}"
    return done.stdout


def launches(clock: Clock, model: Model) -> list[Launch]:
    """The kernels' launches, in the order in which they are to run."""
    device, is_tiny, is_mixtral = clock.device, model.name == _TINY.name, model.name == MIXTRAL.name
    experts = make_experts(clock, model, "up", 2 if is_mixtral else 4, 4)
    x, batch, tables = torch.randn(model.d).to(device), experts.batches[-1], experts.tables
    listed = _Lists.allocate(experts, model, device)
    select(x, batch, tables, listed.running)
    tables.thresholds.fill_(float(torch.quantile(listed.running.a[0].abs(), _SPARSITY)))
    partials = torch.zeros((model.k, num_partials(model.k, model.f, clock.num_sms), model.d), device=device)
    found = [
        Launch("_select_kernel", model.name, lambda: select(x, batch, tables, listed.running)),
        Launch("_compact_kernel", f"{model.name}, {_SPARSITY}", lambda: listed.compact(batch, is_split=False)),
        Launch(
            "_neurons_kernel",
            f"{model.name}, {_SPARSITY}",
            lambda: neurons(x, batch, tables, listed.running, partials, "here"),
        ),
    ]
    vocabulary = 32_000 if is_mixtral else 151_936
    for rows, cols in ((96, 128),) if is_tiny else ((model.d, model.d), (vocabulary, model.d)):
        (matrices, _), out = make_matrices(clock, rows, cols, 4), torch.zeros(rows, device=device)
        product = partial(gemv, torch.randn(cols).to(device), matrices[-1], out)
        found.append(Launch("_gemv", f"{rows}x{cols}, 4 bit", product))
    heads, kv_heads, context, dim = (4, 2, 48, 16) if is_tiny else (32, 8 if is_mixtral else 4, 4096, 128)
    for dtype in _KV_DTYPES:
        storage = RowStorage(dtype, (dim,))
        caches = storage.encode(torch.randn((1, 2, kv_heads, context, dim), device=device))
        name = f"{heads}/{kv_heads}, {context} tokens, {dtype}"
        found.append(Launch("_attend_kernel", name, partial(attends(caches, storage, heads), 0)))
    pull = one_pull(clock, replace(model, k=1), 4)
    return [*found, Launch("_pull_records_kernel", f"{model.name}, a fifth of an expert's records", pull)]


def main(device_name: str, name: str) -> None:
    device = torch.device(device_name)
    clock = Clock(device, device.type == "cpu")
    chosen = launches(clock, _MODELS[name])
    for each in chosen:
        each.launch()
    clock.synchronize()
    if device.type == "cuda":
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch has no types for it
    for each in chosen:
        each.launch()
    clock.synchronize()
    if device.type == "cuda":
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # likewise
    sys.stdout.write(json.dumps([[each.kernel, each.case] for each in chosen]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
