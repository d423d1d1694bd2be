"""Part `kernels`: one token through its experts, each operation's time and bytes, at FloE Table 1's sparsities.

Bytes are those of the parts that must be read: of the selector all rows, of the records those of neurons that run.
Launches follow one another in a CUDA graph and read other copies each time, more than the L2 cache holds.
"""

from dataclasses import dataclass

import torch
from gpu_bytes import ByteBench, Timed
from gpu_clock import Clock
from gpu_experts import Experts, Model, Stored, make_experts
from gpu_results import Results
from torch import Tensor

from moe_pack.formats import Selector
from moe_pack.runtime.kernels.neurons import neurons
from moe_pack.runtime.kernels.reduce import reduce
from moe_pack.runtime.kernels.select import select
from moe_pack.runtime.kernels.tables import Selection
from moe_pack.runtime.kernels.tiles import num_partials

_SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
_MIXTRAL, _MIXTRAL_2 = Model("Mixtral-8x7B", 4096, 14336, 1), Model("Mixtral-8x7B", 4096, 14336, 2)
_QWEN3 = Model("Qwen3-30B-A3B", 2048, 768, 8)
_V3, _GPT_OSS = Model("DeepSeek-V3", 7168, 2048, 8), Model("gpt-oss-120b", 2880, 2880, 4)
_TINY = Model("tiny", 128, 96, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """A model's experts, and how they are stored."""

    model: Model
    selector: Selector
    selector_bits: Stored
    record_bits: Stored


_REHEARSED = [Case(_TINY, "up", 2, 4), Case(_TINY, "both", "mxfp4", "e5m2"), Case(_TINY, "up", "t4", "t7")]


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """An operation on a token's experts. `running`: share of the neurons."""

    case: Case
    sparsity: float
    running: float
    operation: str
    timed: Timed


def run(results: Results, clock: Clock) -> None:
    """Runs every case apart, so that one that fails costs no other."""
    bench = ByteBench(results, clock, clock.copy_rate())
    for case in _REHEARSED if clock.is_rehearsal else _cases():
        name = f"{case.model.name} x{case.model.k} {case.selector} {case.selector_bits}/{case.record_bits}"
        results.section(name, _CaseBench(bench, case).run)


def _cases() -> list[Case]:
    table_1 = [Case(_MIXTRAL, "up", 2, bits) for bits in (16, 4, 2)]
    others = [Case(_MIXTRAL_2, "up", 2, 4), Case(_MIXTRAL_2, "up", 2, 2), Case(_MIXTRAL_2, "both", 2, 4)]
    small = [Case(_QWEN3, "up", 2, 4), Case(_QWEN3, "up", 4, 4), Case(_QWEN3, "none", 4, 4)]
    kept = [Case(_V3, "up", "fp8", "fp8"), Case(_GPT_OSS, "both", "mxfp4", "e5m2")]  # as their sources have them
    # Beside affine codes of as many bits: 2/2 and 2/4, 4/4 and 4/3.
    trellises = [Case(_MIXTRAL_2, "up", "t4", record) for record in ("t4", "t8")]
    trellises += [Case(_QWEN3, "up", "t8", "t8"), Case(_MIXTRAL_2, "up", "t8", "t6")]
    others += [Case(_MIXTRAL_2, "up", 4, 3), Case(_MIXTRAL_2, "up", 8, 8)]
    return [*table_1, *others, *small, *trellises, *kept]


class _CaseBench:
    """One way to store experts, at all sparsities."""

    def __init__(self, bench: ByteBench, case: Case) -> None:
        self._bench, self._case = bench, case

    def run(self) -> None:
        """Times `select`, `neurons`, `reduce`, and all three one after the other."""
        case, clock = self._case, self._bench.clock
        model, device = case.model, clock.device
        experts = make_experts(clock, model, case.selector, case.selector_bits, case.record_bits)
        x = torch.randn(model.d, generator=torch.Generator().manual_seed(0)).to(device)
        chosen = Selection.room(model.k, model.f, device)
        select(x, experts.batches[0], experts.tables, chosen)
        a = chosen.a[0].abs()
        for sparsity in (0.0,) if case.selector == "none" else _SPARSITIES[-2:] if clock.is_rehearsal else _SPARSITIES:
            experts.tables.thresholds.fill_(float(torch.quantile(a, sparsity)) if sparsity else 0.0)
            select(x, experts.batches[0], experts.tables, chosen)
            self._times(x, experts, chosen, sparsity)

    def _times(self, x: Tensor, experts: Experts, chosen: Selection, sparsity: float) -> None:
        model, clock, running = self._case.model, self._bench.clock, int(chosen.counts.sum())
        shape = (model.k, num_partials(model.k, model.f, clock.num_sms), model.d)
        partials = torch.zeros(shape, device=clock.device)
        weights = torch.full((model.k,), 1 / model.k, device=clock.device)
        out = torch.zeros(model.d, device=clock.device)

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
            timed = self._bench.timed(num_bytes, launch, len(experts.batches))
            share = running / model.k / model.f
            self._bench.results.add(ExpertTime(self._case, sparsity, share, operation, timed))
