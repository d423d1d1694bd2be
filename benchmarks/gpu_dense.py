"""Part `dense`: matrices times one token and many, experts of many tokens, attention; beside torch where it can."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpu_bytes import ByteBench, Timed
from gpu_clock import Clock, copies_beyond
from gpu_experts import Matrices, Model, Stored, make_experts, make_matrices
from gpu_results import Results
from torch import Tensor

from moe_pack.runtime.kernels.attend import AttendRoom, attend
from moe_pack.runtime.kernels.expert_many import expert_many, workspace_floats
from moe_pack.runtime.kernels.gemm import gemm
from moe_pack.runtime.kernels.gemv import gemv
from moe_pack.runtime.kernels.tables import ExpertKind, LayerTables

_MIXTRAL, _QWEN3 = Model("Mixtral-8x7B", 4096, 14336, 1), Model("Qwen3-30B-A3B", 2048, 768, 1)
_TINY = Model("tiny", 128, 96, 1)


@dataclass(frozen=True, slots=True)
class DenseTime:
    """A matrix [rows, cols] times so many vectors. `tflops`: 2 rows cols tokens a second.

    `bits`: of codes in groups of 64, or a trellis by its name.
    """

    operation: str
    rows: int
    cols: int
    bits: Stored
    tokens: int
    tflops: float
    timed: Timed


@dataclass(frozen=True, slots=True)
class ManyTime:
    """An expert of `tokens` tokens: selector `up` of 2 bits, records of `bits`, sparsity 0.8 of the paper's rule."""

    model: str
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
    bench, tiny = ByteBench(results, clock, clock.copy_rate()), clock.is_rehearsal
    shapes = [(96, 128)] if tiny else [(4096, 4096), (32000, 4096), (1024, 4096), (4096, 2048), (151936, 2048)]
    for rows, cols in shapes:
        for bits in (4, "t4") if tiny else (16, 8, 4, 2, "t8", "t4"):
            results.section(f"gemv {rows}x{cols} {bits} bit", partial(_gemv, bench, rows, cols, bits))
    for rows, cols in shapes[:1]:
        for bits in (4, "t4") if tiny else (16, 4, 2, "t8", "t4"):
            results.section(f"gemm {rows}x{cols} {bits} bit", partial(_gemm, bench, rows, cols, bits))
    for model in (_TINY,) if tiny else (_MIXTRAL, _QWEN3):
        for bits in (4, "t4") if tiny else (4, 2, "t8", "t4"):
            results.section(f"expert_many {model.name} {bits} bit", partial(_many, bench, model, bits))
    for heads, kv_heads, dtype in ((4, 2, torch.float32),) if tiny else _caches():
        name = f"attention {heads}/{kv_heads} {dtype}"
        results.section(name, partial(_attention, bench, heads, kv_heads, 16 if tiny else 128, dtype))


def _caches() -> list[tuple[int, int, torch.dtype]]:
    return [(heads, kv, dtype) for heads, kv in ((32, 8), (32, 4)) for dtype in (torch.float32, torch.bfloat16)]


def _tokens(bench: ByteBench) -> tuple[int, ...]:
    return (3,) if bench.clock.is_rehearsal else (2, 8, 16, 64, 128, 256, 512)


def _gemv(bench: ByteBench, rows: int, cols: int, bits: Stored) -> None:
    device = bench.clock.device
    held = make_matrices(bench.clock, rows, cols, bits)
    x, out = torch.randn(cols).to(device), torch.zeros(rows, device=device)
    timed = bench.timed(held.num_bytes, lambda i: gemv(x, held.rows[i], held.part, out), len(held.rows))
    bench.results.add(DenseTime("gemv", rows, cols, bits, 1, _tflops(rows * cols, timed), timed))
    if bits == 16 and not bench.clock.is_rehearsal:
        there = x.to(torch.bfloat16)
        timed = bench.timed(held.num_bytes, lambda i: torch.mv(held.rows[i], there), len(held.rows))
        bench.results.add(DenseTime("torch.mv, bf16", rows, cols, bits, 1, _tflops(rows * cols, timed), timed))


def _gemm(bench: ByteBench, rows: int, cols: int, bits: Stored) -> None:
    held = make_matrices(bench.clock, rows, cols, bits)
    for tokens in _tokens(bench):
        x = torch.randn(tokens, cols).to(bench.clock.device)
        _gemm_of(bench, held, x, (rows, cols, bits))


def _gemm_of(bench: ByteBench, held: Matrices, x: Tensor, case: tuple[int, int, Stored]) -> None:
    rows, cols, bits = case
    out, work = torch.zeros(len(x), rows, device=x.device), rows * cols * len(x)
    timed = bench.timed(held.num_bytes, lambda i: gemm(x, held.rows[i], held.part, held.row_units, out), len(held.rows))
    bench.results.add(DenseTime("gemm", rows, cols, bits, len(x), _tflops(work, timed), timed))
    if bits == 16 and not bench.clock.is_rehearsal:
        for dtype in (torch.bfloat16, torch.float32):
            there, weights = x.to(dtype), [each.to(dtype) for each in held.rows]
            timed = bench.timed(held.num_bytes, partial(_matmul, there, weights), len(weights))
            bench.results.add(DenseTime(f"torch, {dtype}", rows, cols, bits, len(x), _tflops(work, timed), timed))


def _matmul(x: Tensor, weights: list[Tensor], number: int) -> None:
    torch.matmul(x, weights[number].T)


def _many(bench: ByteBench, model: Model, bits: Stored) -> None:
    device = bench.clock.device
    experts = make_experts(bench.clock, model, "up", 2, bits)
    # Activations are about normal, of deviation 1: 0.8 of them lie below this.
    experts.tables.thresholds.fill_(1.28)
    kind, num_bytes = experts.tables.kinds[0], experts.selector_bytes + model.f * experts.record_bytes
    for num_tokens in _tokens(bench):
        x, y = torch.randn(num_tokens, model.d).to(device), torch.zeros(num_tokens, model.d, device=device)
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
        weights = torch.full((num_tokens,), 0.5, device=device)
        workspace = torch.zeros(workspace_floats(num_tokens, model.f), device=device)
        launch = partial(_many_of, (x, tokens, weights), experts.tables, kind, y, workspace)
        timed = bench.timed(num_bytes, launch, len(experts.batches))
        work = 3 * model.d * model.f * num_tokens
        bench.results.add(ManyTime(model.name, bits, num_tokens, _tflops(work, timed), timed))


def _many_of(
    given: tuple[Tensor, Tensor, Tensor],
    tables: LayerTables,
    kind: ExpertKind,
    y: Tensor,
    workspace: Tensor,
    number: int,
) -> None:
    expert_many(*given, tables, number, kind, y, workspace)


def _attention(bench: ByteBench, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for context in (48,) if bench.clock.is_rehearsal else (1024, 4096, 8192, 32768):
        num_bytes = 2 * kv_heads * context * head_dim * dtype.itemsize
        num_copies = copies_beyond(bench.clock.l2_bytes, num_bytes)
        shape = (num_copies, 2, kv_heads, context, head_dim)
        caches = torch.randn(shape, device=bench.clock.device).to(dtype)
        timed = bench.timed(num_bytes, _attends(caches, heads), num_copies)
        bench.results.add(AttentionTime(heads, kv_heads, head_dim, str(dtype), context, timed))


def _attends(caches: Tensor, heads: int) -> Callable[[int], None]:
    """Attention of one token at the last position, over the copy of a number."""
    _, _, kv_heads, context, head_dim = caches.shape
    q, out = (torch.randn(heads, head_dim, device=caches.device) for _ in range(2))
    position = torch.full((1,), context - 1, dtype=torch.int32, device=caches.device)
    room = AttendRoom.room(heads, kv_heads, head_dim, context, caches.device)

    def attends(number: int) -> None:
        attend(q, (caches[number, 0], caches[number, 1]), position, head_dim**-0.5, None, room, out)

    return attends


def _tflops(multiplications: int, timed: Timed) -> float:
    return 2 * multiplications / timed.us / 1e6
