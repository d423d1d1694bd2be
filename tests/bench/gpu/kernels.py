"""Parts `sweep` and `products`: kernels at real models' dimensions.

`sweep` runs the kernels of a token with grids of several sizes, and compares their times with the bytes that they must
read; launches read other copies of random experts each time, more than the L2 cache holds. `products` runs a layer's
experts of many tokens at several numbers of rows an expert, with torch's grouped product as their ceiling.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from support.chosen_tokens import ChosenTokens, described
from torch import Tensor
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from gpu.measuring import ByteClock, Clock, Results, Timed, copies_beyond, repeated
from moe_pack.convert.synthetic import WeightDistribution, random_rows, random_stream
from moe_pack.formats import ExpertFormat, ExpertLayout, ExpertSpec, part_format
from moe_pack.formats.pack.layouts import expert_layout, row_layout
from moe_pack.runtime.engine.options import SamplingOptions
from moe_pack.runtime.gpu.fit import EXACT_HALVES, FAST_HALVES, Slicing
from moe_pack.runtime.gpu.kernels import grids, matmul, neurons, tables
from moe_pack.runtime.gpu.kernels.attention import AttentionWorkspace, RowPositions, View, attend, splits
from moe_pack.runtime.gpu.kernels.elementwise import reduce
from moe_pack.runtime.gpu.kernels.grouped import Group, PassMemory, combine, run_group, sort_pairs
from moe_pack.runtime.gpu.kernels.halves import Halves, round_rows
from moe_pack.runtime.gpu.kernels.matmul import StoredRows, gemv
from moe_pack.runtime.gpu.kernels.rows import num_partials, part_of
from moe_pack.runtime.gpu.kernels.tables import Landing, LayerTables, LeftToCpu, RunningNeurons, kind_of
from moe_pack.runtime.model.caches import RowStorage
from moe_pack.runtime.sampling import Sampler

_GROUP = 64
_RECORD_BITS = 4  # of records and dense matrices


@dataclass(frozen=True, slots=True)
class Model:
    """A model's dimensions. `k`: of `num_experts`, that a token takes.   `sparsity`: of neurons, that do not run."""

    name: str
    d: int
    f: int
    k: int
    num_experts: int = 8
    vocabulary: int = 32_000
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    selector_bits: int = 4
    sparsity: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Copies of one random expert; a launch takes `k` of them."""

    tables: LayerTables
    batches: tuple[Tensor, ...]
    selector_bytes: int  # of all its rows' parts
    record_bytes: int  # of a record's


def _layout_of(model: Model) -> ExpertLayout:
    chosen, stored = part_format(model.selector_bits, _GROUP), part_format(_RECORD_BITS, _GROUP)
    spec = ExpertSpec("silu", model.f, ("gate", "up", "down"), (), 0)
    return expert_layout(ExpertFormat(stored, chosen, stored), "up", spec, model.d)


def _random_extent(layout: ExpertLayout) -> NDArray[np.uint8]:
    """An expert's selector and records: u8 [bytes]; activations of rms 1 for hidden states of rms 1."""
    d = layout.records.num_cols
    spreads = {name: WeightDistribution(0.0, d**-0.5) for name in ("gate", "up")} | {
        "down": WeightDistribution(0.0, layout.num_rows**-0.5)
    }
    stream = random_stream(1)
    halves = [random_rows(rows, layout.num_rows, spreads, stream) for rows in (layout.selector, layout.records) if rows]
    return np.concatenate([half.reshape(-1) for half in halves])


def _make_experts(clock: Clock, model: Model) -> Experts:
    """So many copies that what each operation reads of them exceeds the L2 cache four times."""
    layout, f = _layout_of(model), model.f
    records_bytes = sum(part.num_bytes for part in layout.records.parts)
    selected = 0 if layout.selector is None else f * sum(part.num_bytes for part in layout.selector.parts)
    least = min(selected or f * records_bytes, f * records_bytes // 10)
    num_batches = -(-copies_beyond(clock.l2_bytes, least) // model.k)
    num_experts = num_batches * model.k
    extent = torch.from_numpy(_random_extent(layout))
    arena = repeated(extent, num_experts, clock.device)
    device, stride = clock.device, arena.numel() // num_experts // 16
    first = torch.arange(num_experts, dtype=torch.int32, device=device)[:, None] * stride
    row = torch.arange(f, dtype=torch.int32, device=device)[None, :]
    kind = kind_of(layout, "up", "silu")
    tables = LayerTables(
        arena=arena,
        selector_at=None if layout.selector is None else first + row * kind.selector_units,
        record_at=first + layout.selector_bytes // 16 + row * kind.record_units,
        kind=torch.zeros(num_experts, dtype=torch.int32, device=device),
        thresholds=torch.zeros(num_experts, device=device),
        kinds=(kind,),
    )
    batches = torch.arange(num_experts, dtype=torch.int32, device=device).view(num_batches, model.k)
    return Experts(tables, tuple(batch.clone() for batch in batches), selected, records_bytes)


def _make_matrices(clock: Clock, num_rows: int, num_cols: int) -> tuple[list[StoredRows], int]:
    """Returns copies of a random matrix, four times the L2 cache in all, and the bytes of one's part."""
    spread = WeightDistribution(0.0, num_cols**-0.5)
    layout = row_layout([("weight", part_format(_RECORD_BITS, _GROUP), False)], num_cols)
    rows = torch.from_numpy(random_rows(layout, num_rows, {"weight": spread}, random_stream(2))).to(clock.device)
    num_bytes, part = num_rows * layout.parts[0].num_bytes, part_of(layout, "weight")
    return [StoredRows(rows.clone(), part) for _ in range(copies_beyond(clock.l2_bytes, num_bytes))], num_bytes


# ---- grids of a token's kernels -------------------------------------------------------------------------------------

MIXTRAL = Model("Mixtral-8x7B", 4096, 14336, 2, selector_bits=2, sparsity=0.8)
QWEN3 = Model("Qwen3-30B-A3B", 2048, 768, 8, num_experts=128, vocabulary=151_936, kv_heads=4)
_TINY = Model("tiny", 128, 96, 2, num_experts=3, vocabulary=96, heads=4, kv_heads=2, head_dim=16, sparsity=0.5)
_SCALES, _REHEARSED_SCALES = (1.0, 0.5, 2.0, 4.0), (1.0, 2.0)  # the usual grid first: not all may be reached in time
_SPARSITIES = (0.5, 0.6, 0.7, 0.9)  # besides a model's own
_CONTEXT, _REHEARSED_CONTEXT = 4096, 48  # tokens


@dataclass(frozen=True, slots=True)
class GridTime:
    """A token's kernel with a grid for `scale` times as many programs at once as usual.

    `programs`: of the launch.   `waves`: the launch's programs by those that the GPU runs at once; None where the
    driver does not say.
    """

    model: str
    operation: str
    scale: float
    programs: int
    waves: float | None
    timed: Timed


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    """A kernel of a token. `launch`: takes the number of a copy of what is read, of `num_copies`."""

    name: str
    num_bytes: int
    launch: Callable[[int], object]
    num_copies: int


def sweep(results: Results, clock: Clock) -> None:
    timer = ByteClock(clock, clock.copy_rate())
    for model in (_TINY,) if clock.is_rehearsal else (MIXTRAL, QWEN3):
        results.section(model.name, partial(_sweep_model, results, timer, model))


def _sweep_model(results: Results, timer: ByteClock, model: Model) -> None:
    experts = _make_experts(timer.clock, model)
    matrices = [_make_matrices(timer.clock, rows, model.d) for rows in (model.d, model.vocabulary)]
    for scale in _REHEARSED_SCALES if timer.clock.is_rehearsal else _SCALES:
        with _with_grids(scale):
            for operation in _operations(timer.clock, model, experts, matrices, scale):
                name = f"{model.name}, {operation.name}, {scale:g}"
                results.section(name, partial(_time, results, timer, model, operation, scale))
    for sparsity in _SPARSITIES if model.sparsity else ():
        sparse = replace(model, name=f"{model.name}, {sparsity:.0%} sparse", sparsity=sparsity)
        for operation in islice(_operations(timer.clock, sparse, experts, matrices, 1.0), 2):  # select and neurons
            name = f"{sparse.name}, {operation.name}"
            results.section(name, partial(_time, results, timer, sparse, operation, 1.0))


@contextmanager
def _with_grids(scale: float) -> Iterator[None]:
    """Sizes grids as for a GPU that runs `scale` times as many programs at once.

    All that is known here about how kernels choose their grids stands here and in `num_partials`.
    """

    def wave(registers: int, num_warps: int, shared_bytes: int = 0) -> int:
        return max(1, round(scale * grids.wave(registers, num_warps, shared_bytes)))

    with ExitStack() as stack:
        for module in (splits, matmul, neurons, tables):
            stack.enter_context(patch.object(module, "wave", wave))
        yield


def _operations(
    clock: Clock, model: Model, experts: Experts, matrices: list[tuple[list[StoredRows], int]], scale: float
) -> Iterator[_Operation]:
    """Yields the operations, with buffers for the grids of now; no row is missing."""
    device, k, f, batches = clock.device, model.k, model.f, experts.batches
    x = torch.randn(model.d, generator=torch.Generator().manual_seed(0)).to(device)
    listed = [_Lists.allocate(experts, model, device) for _ in batches]
    _set_thresholds(x, experts, listed[0].running, model.sparsity)
    for batch, one in zip(batches, listed, strict=True):
        neurons.select(x, batch, experts.tables, one.running)
        one.compact(batch)
    num_running, num_sums = int(listed[0].running.counts[0].sum()), num_partials(k, f, round(scale * clock.num_sms))
    partials = torch.zeros((len(batches), k, num_sums, model.d), device=device)
    weights, out = torch.full((k,), 1 / k, device=device), torch.zeros(model.d, device=device)

    def selects(number: int) -> None:
        neurons.select(x, batches[number], experts.tables, listed[number].running)

    def sums(number: int) -> None:
        neurons.neurons(x, batches[number], experts.tables, listed[number].running, partials[number], "here")

    yield _Operation("select", k * experts.selector_bytes, selects, len(batches))
    yield _Operation("neurons", num_running * experts.record_bytes, sums, len(batches))
    reduced = 4 * k * num_sums * model.d
    yield _Operation("reduce", reduced, lambda number: reduce(partials[number], weights, out), len(batches))
    for copies, num_bytes in matrices:
        y = torch.zeros(len(copies[0].rows), device=device)
        product = partial(_multiply, x, copies, y)
        yield _Operation(f"gemv {len(y)}x{model.d}", num_bytes, product, len(copies))
    context, rows = _REHEARSED_CONTEXT if clock.is_rehearsal else _CONTEXT, RowStorage("bf16", (model.head_dim,))
    cache_bytes = 2 * model.kv_heads * context * rows.row_bytes
    num_copies = copies_beyond(clock.l2_bytes, cache_bytes)
    caches = torch.randn((num_copies, 2, model.kv_heads, context, model.head_dim), device=device)
    yield _Operation(f"attend {context}", cache_bytes, _attends(rows.encode(caches), rows, model.heads), num_copies)
    yield _Operation("choose by top-p", 4 * model.vocabulary, _chooses(model.vocabulary, device), 1)


def _multiply(x: Tensor, copies: list[StoredRows], y: Tensor, number: int) -> None:
    gemv(x, copies[number], y)


def _set_thresholds(x: Tensor, experts: Experts, running: RunningNeurons, sparsity: float) -> None:
    """Sets the thresholds so that this share of the neurons does not run."""
    experts.tables.thresholds.zero_()
    neurons.select(x, experts.batches[0], experts.tables, running)
    experts.tables.thresholds.fill_(float(torch.quantile(running.a[0].abs(), sparsity)) if sparsity else 0.0)


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
        )
        landing = Landing(0, f, experts.tables.kinds[0].record_units)
        return cls(experts, RunningNeurons.allocate(k, f, device), landing, left)

    def compact(self, batch: Tensor) -> None:
        share = self.experts.tables.thresholds[:1]  # not read: nothing is missing
        neurons.compact(batch, self.experts.tables, self.running, self.landing, share, self.left, False)


def _attends(caches: Tensor, rows: RowStorage, heads: int) -> Callable[[int], None]:
    """Attention of one token at the last position, over the copy [keys and values, heads, context, n] of a number."""
    (_, _, kv_heads, context, _), (head_dim,) = caches.shape, rows.parts
    q, out = (torch.randn(1, heads, head_dim, device=caches.device) for _ in range(2))
    position = torch.full((1,), context - 1, dtype=torch.int32, device=caches.device)
    workspace = AttentionWorkspace.allocate(heads, kv_heads, head_dim, context, caches.device)
    at, view = RowPositions(position, torch.zeros_like(position)), View(head_dim**-0.5)

    def attend_once(number: int) -> None:
        attend(q, (caches[number, :1], caches[number, 1:]), at, view, workspace, out, rows=(rows, rows))

    return attend_once


def _chooses(vocab_size: int, device: torch.device) -> Callable[[int], None]:
    """The choice of one row's token."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((1, vocab_size), generator=draw).to(device)
    chosen, sampler = ChosenTokens(logits), Sampler(SamplingOptions(temperature=0.8, top_p=0.95, seed=0))
    chosen.next(described([sampler]))
    return lambda number: chosen.choice.launch(0, 1)


def _time(results: Results, timer: ByteClock, model: Model, operation: _Operation, scale: float) -> None:
    programs, waves = _first_grid(timer.clock, partial(operation.launch, 0))
    timed = timer.timed(operation.num_bytes, operation.launch, operation.num_copies)
    results.add(GridTime(model.name, operation.name, scale, programs, waves, timed))


def _first_grid(clock: Clock, launch: Callable[[], object]) -> tuple[int, float | None]:
    """Returns the programs and the waves of the first kernel that something launches, which is the large one here."""
    seen = list[tuple[int, Any]]()
    run = GridExecutor.__call__ if clock.is_rehearsal else JITFunction.run

    def observed(owner: Any, *arguments: Any, **named: Any) -> Any:
        kernel = run(owner, *arguments, **named)
        seen.append((prod(named.get("grid") or owner.grid), kernel))
        return kernel

    with patch.object(*((GridExecutor, "__call__") if clock.is_rehearsal else (JITFunction, "run")), observed):
        launch()
    clock.synchronize()
    programs, kernel = seen[0]
    waves = None
    if kernel is not None:
        with suppress(Exception):  # Triton's or the driver's face may have changed; times count without it
            waves = programs / (clock.num_sms * _resident(kernel))
    return programs, waves


def _resident(kernel: Any) -> int:
    """Returns how many programs of a compiled kernel a multiprocessor runs at once, by the driver."""
    found = ctypes.c_int()
    given = (ctypes.c_void_p(kernel.function), 32 * kernel.metadata.num_warps, ctypes.c_size_t(kernel.metadata.shared))
    fault = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(found), *given)
    assert fault == 0, f"the driver's error {fault}"
    return found.value


# ---- experts of many tokens -----------------------------------------------------------------------------------------

_EXPERT_ROWS = (4, 16, 64, 128, 256, 1024)
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class ProductTime:
    """All experts of a layer in a pass in which each has so many rows. `tflops`: of their multiplications."""

    model: str
    how: str
    expert_rows: int
    tokens: int
    ms: float
    tflops: float


Product = Callable[[], object]


def products(results: Results, clock: Clock) -> None:
    for model in (_TINY,) if clock.is_rehearsal else (MIXTRAL, QWEN3):
        for how, make in (("grouped", _grouped), ("torch._grouped_mm, bf16", _torch_grouped)):
            results.section(f"{model.name}, {how}", partial(_add_products, results, clock, model, how, make))


def _add_products(
    results: Results,
    clock: Clock,
    model: Model,
    how: str,
    make: Callable[[Clock, Model], Callable[[int], Iterator[tuple[str, Product]]]],
) -> None:
    """Adds a row for each number of rows and each product of `make`, which prepares the experts once."""
    products_of = make(clock, model)
    for expert_rows in (2, 4) if clock.is_rehearsal else _EXPERT_ROWS:
        tokens = expert_rows * model.num_experts // model.k
        for numerics, launch in products_of(tokens):
            seconds = clock.direct(launch, _ROUNDS)
            work = 6 * model.d * model.f * tokens * model.k
            row = (model.name, f"{how}{numerics}", expert_rows, tokens, 1000 * seconds, work / seconds / 1e12)
            results.add(ProductTime(*row))


def _routes(model: Model, tokens: int) -> NDArray[np.int64]:
    """Draws experts, [tokens, k], so that all have equally many rows where these divide evenly."""
    order = np.random.default_rng(0).permutation(model.num_experts)
    return order[np.arange(tokens * model.k) % model.num_experts].reshape(tokens, model.k)


_SCRATCH_BYTES = 256 << 20  # that passes have where no memory is left over


def _grouped(clock: Clock, model: Model) -> Callable[[int], Iterator[tuple[str, Product]]]:
    """Our kernels: with two float16 numbers a value, and with one."""
    device, k, experts = clock.device, model.k, _make_experts(clock, model)
    stored, number = experts.tables, model.num_experts
    assert stored.selector_at is not None, "these experts have a selector"
    copies = torch.arange(number, device=device) % len(stored.record_at)
    layer = replace(
        stored, selector_at=stored.selector_at[copies], record_at=stored.record_at[copies], kind=stored.kind[copies],
        thresholds=stored.thresholds[copies],
    )  # fmt: skip
    order = torch.arange(number, dtype=torch.int32, device=device)

    def products_of(tokens: int) -> Iterator[tuple[str, Product]]:
        routes, weights = torch.from_numpy(_routes(model, tokens)).to(device), torch.ones(tokens, k, device=device)
        x, y = (torch.randn(tokens, model.d, device=device) for _ in range(2))
        for num_halves, numerics in ((EXACT_HALVES, ", exact"), (FAST_HALVES, ", fast")):
            slicing = Slicing.of(model.f, model.d, number, num_halves, _SCRATCH_BYTES)
            memory = PassMemory.allocate(*slicing, model.d, tokens * k, num_halves, device)
            rounded = Halves.allocate(num_halves, tokens, model.d, device)

            def launch(memory: PassMemory = memory, rounded: Halves = rounded) -> None:
                pairs, together = sort_pairs(routes, order, number), memory.decoded.shape[2]
                round_rows(x, rounded)
                for first in range(0, number, together):
                    run_group(rounded, Group(pairs, layer, first, min(together, number - first)), memory)
                combine(memory.outputs, weights, y)

            yield numerics, launch

    return products_of


def _torch_grouped(clock: Clock, model: Model) -> Callable[[int], Iterator[tuple[str, Product]]]:
    """Torch's grouped product of bfloat16 weights, the ceiling: three products, and the neurons' function."""
    device, E = clock.device, model.num_experts
    gate, up, down = (
        torch.randn((E, *shape), device=device, dtype=torch.bfloat16).transpose(1, 2)
        for shape in ((model.f, model.d), (model.f, model.d), (model.d, model.f))
    )

    def products_of(tokens: int) -> Iterator[tuple[str, Product]]:
        counts = np.bincount(_routes(model, tokens).reshape(-1), minlength=E)
        ends = torch.from_numpy(counts.cumsum().astype(np.int32)).to(device)
        x = torch.randn(tokens * model.k, model.d, device=device, dtype=torch.bfloat16)

        def launch() -> None:
            h = torch.nn.functional.silu(torch._grouped_mm(x, gate, offs=ends)) * torch._grouped_mm(x, up, offs=ends)
            torch._grouped_mm(h, down, offs=ends)

        yield "", launch

    return products_of
