"""Part `timings`: how long operations take at real models' dimensions, beside the bytes they must read.

Bytes are those of the parts that must be read: of the selector all rows, of the records those of neurons that run.
Launches follow one another in a CUDA graph and read other copies each time, more than the L2 cache holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpu_clock import ByteClock, Clock, Timed, copies_beyond
from gpu_experts import Experts, Model, Stored, make_experts, make_matrices
from gpu_results import Results
from torch import Tensor

from moe_pack.formats import Selector
from moe_pack.runtime.kernels.attend import AttendRoom, attend
from moe_pack.runtime.kernels.expert_many import expert_many, workspace_floats
from moe_pack.runtime.kernels.gemm import gemm
from moe_pack.runtime.kernels.gemv import gemv
from moe_pack.runtime.kernels.neurons import neurons
from moe_pack.runtime.kernels.reduce import reduce
from moe_pack.runtime.kernels.select import select
from moe_pack.runtime.kernels.tables import Selection
from moe_pack.runtime.kernels.tiles import num_partials

MIXTRAL, QWEN3 = Model("Mixtral-8x7B", 4096, 14336, 2), Model("Qwen3-30B-A3B", 2048, 768, 8)
_GPT_OSS, _TINY = Model("gpt-oss-120b", 2880, 2880, 4), Model("tiny", 128, 96, 2)
_SPARSITIES = (0.0, 0.8)
_TOKENS = (16, 128, 512)


@dataclass(frozen=True, slots=True)
class Stores:
    """A model's experts, and how they are stored."""

    model: Model
    selector: Selector
    selector_bits: Stored
    record_bits: Stored

    def __str__(self) -> str:
        return f"{self.model.name} x{self.model.k} {self.selector} {self.selector_bits}/{self.record_bits}"


EXPERTS = (Stores(MIXTRAL, "up", 2, 4), Stores(QWEN3, "up", 4, 4), Stores(_GPT_OSS, "both", "mxfp4", "e5m2"))
_REHEARSED = (Stores(_TINY, "up", 2, 4), Stores(_TINY, "both", "mxfp4", "e5m2"), Stores(_TINY, "up", "t4", "t7"))
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
    """A matrix [rows, cols] times so many vectors, or an expert of so many tokens. `tflops`: of its multiplications."""

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


def run(results: Results, clock: Clock) -> None:
    """Runs every case apart, so that one that fails costs no other."""
    timer, tiny = ByteClock(clock, clock.copy_rate()), clock.is_rehearsal
    for stores in _REHEARSED if tiny else EXPERTS:
        results.section(str(stores), partial(_token, results, timer, stores))
    for rows, cols, bits in ((96, 128, 4), (96, 128, "t4")) if tiny else _MATRICES:
        results.section(f"gemv {rows}x{cols} {bits}", partial(_gemv, results, timer, rows, cols, bits))
    for rows, cols, bits in ((96, 128, 4),) if tiny else ((4096, 4096, 4), (4096, 4096, 16)):
        results.section(f"gemm {rows}x{cols} {bits}", partial(_gemm, results, timer, rows, cols, bits))
    for model in (_TINY,) if tiny else (MIXTRAL, QWEN3):
        results.section(f"expert of many tokens, {model.name}", partial(_many, results, timer, model))
    for heads, kv_heads in ((4, 2),) if tiny else ((32, 8), (32, 4)):
        results.section(f"attention {heads}/{kv_heads}", partial(_attention, results, timer, heads, kv_heads))


def _token(results: Results, timer: ByteClock, stores: Stores) -> None:
    """`select`, `neurons`, `reduce`, and all three one after the other, at each sparsity."""
    model, device = stores.model, timer.clock.device
    experts = make_experts(timer.clock, model, stores.selector, stores.selector_bits, stores.record_bits)
    x = torch.randn(model.d, generator=torch.Generator().manual_seed(0)).to(device)
    chosen = Selection.room(model.k, model.f, device)
    select(x, experts.batches[0], experts.tables, chosen)
    a = chosen.a[0].abs()
    for sparsity in _SPARSITIES:
        experts.tables.thresholds.fill_(float(torch.quantile(a, sparsity)) if sparsity else 0.0)
        select(x, experts.batches[0], experts.tables, chosen)
        _times(results, timer, stores, sparsity, x, experts, chosen)


def _times(
    results: Results, timer: ByteClock, stores: Stores, sparsity: float, x: Tensor, experts: Experts, chosen: Selection
) -> None:
    model, device, running = stores.model, timer.clock.device, int(chosen.counts.sum())
    partials = torch.zeros((model.k, num_partials(model.k, model.f, timer.clock.num_sms), model.d), device=device)
    weights, out = torch.full((model.k,), 1 / model.k, device=device), torch.zeros(model.d, device=device)

    def selects(batch: int) -> None:
        select(x, experts.batches[batch], experts.tables, chosen)

    def sums(batch: int) -> None:
        neurons(x, experts.batches[batch], experts.tables, chosen, partials)

    def reduces(batch: int) -> None:
        reduce(partials, weights, out)

    def everything(batch: int) -> None:
        selects(batch)
        sums(batch)
        reduces(batch)

    selected, recorded = model.k * experts.selector_bytes, running * experts.record_bytes
    for operation, num_bytes, launch in (
        ("select", selected, selects),
        ("neurons", recorded, sums),
        ("reduce", 4 * partials.numel(), reduces),
        ("all", selected + recorded, everything),
    ):
        timed = timer.timed(num_bytes, launch, len(experts.batches))
        results.add(ExpertTime(str(stores), sparsity, running / model.k / model.f, operation, timed))


def _gemv(results: Results, timer: ByteClock, rows: int, cols: int, bits: Stored) -> None:
    device, matrices = timer.clock.device, make_matrices(timer.clock, rows, cols, bits)
    x, out, copies = torch.randn(cols).to(device), torch.zeros(rows, device=device), len(matrices.rows)
    timed = timer.timed(matrices.num_bytes, lambda i: gemv(x, matrices.rows[i], matrices.part, out), copies)
    results.add(DenseTime("gemv", rows, cols, bits, 1, _tflops(rows * cols, timed), timed))
    if bits == 16:
        half = x.to(torch.bfloat16)
        timed = timer.timed(matrices.num_bytes, lambda i: torch.mv(matrices.rows[i], half), copies)
        results.add(DenseTime("torch.mv, bf16", rows, cols, bits, 1, _tflops(rows * cols, timed), timed))


def _gemm(results: Results, timer: ByteClock, rows: int, cols: int, bits: Stored) -> None:
    matrices = make_matrices(timer.clock, rows, cols, bits)
    copies = len(matrices.rows)
    for tokens in (3,) if timer.clock.is_rehearsal else _TOKENS:
        x = torch.randn(tokens, cols).to(timer.clock.device)
        out, work = torch.zeros(tokens, rows, device=x.device), rows * cols * tokens

        def product(i: int, x: Tensor = x, out: Tensor = out) -> None:
            gemm(x, matrices.rows[i], matrices.part, matrices.row_units, out)

        timed = timer.timed(matrices.num_bytes, product, copies)
        results.add(DenseTime("gemm", rows, cols, bits, tokens, _tflops(work, timed), timed))
        if bits == 16:
            half = x.to(torch.bfloat16)
            timed = timer.timed(matrices.num_bytes, lambda i, half=half: half @ matrices.rows[i].T, copies)  # type: ignore[misc] # a default
            results.add(DenseTime("torch.matmul, bf16", rows, cols, bits, tokens, _tflops(work, timed), timed))


def _many(results: Results, timer: ByteClock, model: Model) -> None:
    device, experts = timer.clock.device, make_experts(timer.clock, model, "up", 2, 4)
    # Activations are about normal, of deviation 1: 0.8 of them lie below this.
    experts.tables.thresholds.fill_(1.28)
    kind, num_bytes = experts.tables.kinds[0], experts.selector_bytes + model.f * experts.record_bytes
    for tokens in (3,) if timer.clock.is_rehearsal else _TOKENS:
        x, y = torch.randn(tokens, model.d).to(device), torch.zeros(tokens, model.d, device=device)
        numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        weights, workspace = (
            torch.full((tokens,), 0.5, device=device),
            torch.zeros(workspace_floats(tokens, model.f), device=device),
        )

        def runs(
            number: int, given: tuple[Tensor, ...] = (x, numbers, weights), y: Tensor = y, workspace: Tensor = workspace
        ) -> None:
            expert_many(given[0], given[1], given[2], experts.tables, number, kind, y, workspace)

        timed = timer.timed(num_bytes, runs, len(experts.batches))
        work = 3 * model.d * model.f * tokens
        name = f"expert of many tokens, {model.name}"
        results.add(DenseTime(name, model.f, model.d, "2/4", tokens, _tflops(work, timed), timed))


def _attention(results: Results, timer: ByteClock, heads: int, kv_heads: int) -> None:
    tiny, dtype = timer.clock.is_rehearsal, torch.bfloat16
    head_dim = 16 if tiny else 128
    for context in (48,) if tiny else (4096, 32768):
        num_bytes = 2 * kv_heads * context * head_dim * dtype.itemsize
        num_copies = copies_beyond(timer.clock.l2_bytes, num_bytes)
        caches = torch.randn((num_copies, 2, kv_heads, context, head_dim), device=timer.clock.device).to(dtype)
        timed = timer.timed(num_bytes, attends(caches, heads), num_copies)
        results.add(AttentionTime(heads, kv_heads, head_dim, str(dtype), context, timed))


def attends(caches: Tensor, heads: int) -> Callable[[int], None]:
    """Attention of one token at the last position, over the copy [keys and values, heads, context, dim] of a number."""
    _, _, kv_heads, context, head_dim = caches.shape
    q, out = (torch.randn(heads, head_dim, device=caches.device) for _ in range(2))
    position = torch.full((1,), context - 1, dtype=torch.int32, device=caches.device)
    room = AttendRoom.room(heads, kv_heads, head_dim, context, caches.device)

    def attend_once(number: int) -> None:
        attend(q, (caches[number, 0], caches[number, 1]), position, head_dim**-0.5, None, room, out)

    return attend_once


def _tflops(multiplications: int, timed: Timed) -> float:
    return 2 * multiplications / timed.us / 1e6
