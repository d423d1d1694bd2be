"""Part `kernels`: each operation's time and bytes, and their share of the rate at which the card copies its memory.

Experts at FloE Table 1's sparsities, dense matrices, prefill, attention. Bytes are those of the parts that must be
read: of the selector all rows, of the records those of neurons that run. Launches follow one another in a CUDA graph
and read other copies each time, more than the L2 cache holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu_clock import Clock, Launch
from gpu_experts import Experts, Matrices, Model, make_experts, make_matrices
from gpu_results import Results
from torch import Tensor

from moe_pack.formats import Selector
from moe_pack.runtime.kernels.tables import Selection

_SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
_MIXTRAL, _MIXTRAL_2 = Model("Mixtral-8x7B", 4096, 14336, 1), Model("Mixtral-8x7B", 4096, 14336, 2)
_QWEN3 = Model("Qwen3-30B-A3B", 2048, 768, 8)
_TINY = Model("tiny", 128, 96, 2)
_LAUNCHES = 48  # in a graph, at least


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """An operation on a token's `k` experts. `share`: of the copy rate."""

    model: str
    k: int
    selector: Selector
    selector_bits: int
    record_bits: int
    sparsity: float
    operation: str
    num_bytes: int
    us: float
    gb_a_second: float
    share: float


@dataclass(frozen=True, slots=True)
class DenseTime:
    """A matrix [rows, cols] times `tokens` vectors. `share`: of the copy rate; `tflops`: 2 rows cols tokens a second."""

    operation: str
    rows: int
    cols: int
    bits: int
    tokens: int
    num_bytes: int
    us: float
    gb_a_second: float
    share: float
    tflops: float


def run(results: Results, clock: Clock) -> None:
    """Runs all sections; each case apart, so that one that fails costs no other."""
    copy_rate = clock.copy_rate()
    for model, selector, selector_bits, record_bits in _expert_cases(clock.is_rehearsal):
        bench = _ExpertBench(results, clock, copy_rate, model, selector, selector_bits, record_bits)
        results.section(f"experts {model.name} x{model.k} {selector} {selector_bits}/{record_bits}", bench.run)
    for rows, cols, bits in _dense_cases(clock.is_rehearsal):
        body = partial(_gemv, results, clock, copy_rate, rows, cols, bits)
        results.section(f"gemv {rows}x{cols} {bits} bit", body)
    for rows, cols, bits in _gemm_cases(clock.is_rehearsal):
        body = partial(_gemm, results, clock, copy_rate, rows, cols, bits)
        results.section(f"gemm {rows}x{cols} {bits} bit", body)


def _expert_cases(is_rehearsal: bool) -> list[tuple[Model, Selector, int, int]]:
    if is_rehearsal:
        return [(_TINY, "up", 2, 4)]
    cases: list[tuple[Model, Selector, int, int]] = [(_MIXTRAL, "up", 2, bits) for bits in (16, 4, 2)]
    cases += [(_MIXTRAL_2, "up", 2, bits) for bits in (4, 2)]
    cases += [(_MIXTRAL_2, "both", 2, 4), (_MIXTRAL_2, "up", 4, 3)]
    return [*cases, (_QWEN3, "up", 2, 4), (_QWEN3, "up", 4, 4), (_QWEN3, "none", 4, 4)]


def _dense_cases(is_rehearsal: bool) -> list[tuple[int, int, int]]:
    if is_rehearsal:
        return [(96, 128, 4)]
    shapes = ((4096, 4096), (32000, 4096), (2048, 4096), (151936, 2048), (8, 4096))
    return [(rows, cols, bits) for rows, cols in shapes for bits in (16, 8, 4)]


def _gemm_cases(is_rehearsal: bool) -> list[tuple[int, int, int]]:
    return [(96, 128, 4)] if is_rehearsal else [(rows, 4096, bits) for rows in (4096, 14336) for bits in (16, 4, 2)]


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertBench:
    """One expert format, at all sparsities."""

    results: Results
    clock: Clock
    copy_rate: float
    model: Model
    selector: Selector
    selector_bits: int
    record_bits: int

    def run(self) -> None:
        """Times `select`, `neurons`, `reduce` and all three."""
        model, device = self.model, self.clock.device
        experts = make_experts(self.clock, model, self.selector, self.selector_bits, self.record_bits)
        x = torch.randn(model.d, generator=torch.Generator().manual_seed(0)).to(device)
        chosen = Selection.room(model.k, model.f, device)
        self._select(x, experts, chosen, 0)
        a = chosen.a.abs()
        for sparsity in (0.0,) if self.selector == "none" else _SPARSITIES:
            experts.tables.thresholds.fill_(float(torch.quantile(a, sparsity)) if sparsity else 0.0)
            self._times(x, experts, chosen, sparsity)

    def _select(self, x: Tensor, experts: Experts, chosen: Selection, batch: int) -> None:
        from moe_pack.runtime.kernels.select import select

        select(x, experts.batches[batch], experts.tables, chosen)

    def _times(self, x: Tensor, experts: Experts, chosen: Selection, sparsity: float) -> None:
        from moe_pack.runtime.kernels.neurons import neurons, num_partials
        from moe_pack.runtime.kernels.reduce import reduce

        model, device = self.model, self.clock.device
        partials = torch.zeros((model.k, num_partials(model.k, model.f, self.clock.num_sms), model.d), device=device)
        weights, out = torch.full((model.k,), 1 / model.k, device=device), torch.zeros(model.d, device=device)
        self._select(x, experts, chosen, 0)
        running = int(chosen.counts.sum())
        selector_bytes, record_bytes = model.k * experts.selector_bytes, running * experts.record_bytes

        def only_neurons(batch: int) -> None:
            neurons(x, experts.batches[batch], experts.tables, chosen, partials)

        def only_reduce(batch: int) -> None:
            reduce(partials, weights, out)

        def whole(batch: int) -> None:
            self._select(x, experts, chosen, batch)
            only_neurons(batch)
            only_reduce(batch)

        self._add("neurons", sparsity, record_bytes, [partial(only_neurons, b) for b in range(len(experts.batches))])
        if selector_bytes:
            launches = [partial(self._select, x, experts, chosen, b) for b in range(len(experts.batches))]
            self._add("select", sparsity, selector_bytes, launches)
        self._add("reduce", sparsity, partials.numel() * 4, [partial(only_reduce, 0)])
        launches = [partial(whole, b) for b in range(len(experts.batches))]
        self._add("all", sparsity, selector_bytes + record_bytes, launches)

    def _add(self, operation: str, sparsity: float, num_bytes: int, launches: Sequence[Launch]) -> None:
        model, seconds = self.model, self.clock.graphed(_enough(launches, self.clock))
        rate = num_bytes / seconds
        self.results.add(
            ExpertTime(
                model.name,
                model.k,
                self.selector,
                self.selector_bits,
                self.record_bits,
                sparsity,
                operation,
                num_bytes,
                1e6 * seconds,
                rate / 1e9,
                rate / self.copy_rate,
            )
        )


def _enough(launches: Sequence[Launch], clock: Clock) -> Sequence[Launch]:
    """The launches again and again, until a graph of them takes longer than starting it."""
    return launches if clock.is_rehearsal else list(launches) * -(-_LAUNCHES // len(launches))


def _gemv(results: Results, clock: Clock, copy_rate: float, rows: int, cols: int, bits: int) -> None:
    from moe_pack.runtime.kernels.gemv import gemv

    held = make_matrices(clock, rows, cols, bits)
    x, out = torch.randn(cols).to(clock.device), torch.zeros(rows, device=clock.device)
    launches: list[Launch] = [partial(gemv, x, each, held.part, out) for each in held.rows]
    results.add(_dense_time("gemv", clock, copy_rate, held, (rows, cols, bits, 1), launches))
    if bits == 16 and not clock.is_rehearsal:
        there = x.to(torch.bfloat16)
        launches = [partial(torch.mv, each, there) for each in held.rows]
        results.add(_dense_time("torch.mv, bf16", clock, copy_rate, held, (rows, cols, bits, 1), launches))


def _gemm(results: Results, clock: Clock, copy_rate: float, rows: int, cols: int, bits: int) -> None:
    from moe_pack.runtime.kernels.gemm import gemm

    held = make_matrices(clock, rows, cols, bits)
    for tokens in (3,) if clock.is_rehearsal else (2, 8, 16, 64, 128, 256, 512):
        x, out = torch.randn(tokens, cols).to(clock.device), torch.zeros(tokens, rows, device=clock.device)
        launches: list[Launch] = [partial(gemm, x, each, held.part, held.row_units, out) for each in held.rows]
        case = (rows, cols, bits, tokens)
        results.add(_dense_time("gemm", clock, copy_rate, held, case, launches[:8]))
        if bits == 16 and not clock.is_rehearsal:
            there = x.to(torch.bfloat16)
            launches = [partial(torch.matmul, there, each.T) for each in held.rows]
            results.add(_dense_time("torch.matmul, bf16", clock, copy_rate, held, case, launches[:8]))


def _dense_time(
    operation: str,
    clock: Clock,
    copy_rate: float,
    held: Matrices,
    case: tuple[int, int, int, int],
    launches: Sequence[Launch],
) -> DenseTime:
    rows, cols, bits, tokens = case
    seconds = clock.graphed(launches if tokens > 16 else _enough(launches, clock))
    rate = held.num_bytes / seconds
    flops = 2 * rows * cols * tokens / seconds
    return DenseTime(
        operation,
        rows,
        cols,
        bits,
        tokens,
        held.num_bytes,
        1e6 * seconds,
        rate / 1e9,
        rate / copy_rate,
        flops / 1e12,
    )
