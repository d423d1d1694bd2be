"""Rates at which kernels read rows on a GPU: by the bytes that their grids keep in flight, and by their instructions.

    seconds of a launch = START_S + bytes / rate
    rate = (copy^-2 + flight^-2 + issue^-2)^(-1/2)

`copy` is the rate of a copy; `flight` the bytes in flight on all multiprocessors, divided by memory's latency; `issue`
what a warp instruction a scheduler and clock allows. The start, the latency and the exponent are fitted to ten launches
that were timed on an H200 with the grids of 256 programs (`MEASURED`). Registers are those of `kernels.grids`, which
test_occupancy.py compares with compiled kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe_pack.convert.plan.machines import GPUS
from moe_pack.formats import PackLayout
from moe_pack.runtime.gpu.kernels.grids import Gpu, Registers
from moe_pack.runtime.model.mixers import projections_of

Grids = Literal["waves", "256 programs"]

START_S, LATENCY_S = 2.4e-6, 0.6e-6
# Of a launch that may start before the end of the one before it (`kernels.grids`). Assumed, not measured: the gap
# between two kernels of a graph goes, which takes 0.93 us (H200, docs/benchmarks/gpu.md).
DEPENDENT_START_S = START_S - 0.93e-6
DEPENDENT_CAPABILITY = 90
COPY_SHARE = 0.875  # of a data sheet's rate: 4.2 of 4.8 TB/s (docs/benchmarks/gpu.md)
INSTRUCTIONS = 3.3  # of a thread for a weight: 3.1 in `select` of 2 bits, 3.6 in `gemv` of 4 bits (as ncu counts them)
# Assumed, not measured: what a weight of a dense matrix takes for each further row of a pass, decoded once for all.
ROW_INSTRUCTIONS = 1.5
CLOCK = {"RTX 3090": 1.70e9, "RTX 4090": 2.52e9, "H100": 1.755e9, "H200": 1.755e9}
SMS = {"RTX 3090": (86, 82), "RTX 4090": (89, 128), "H100": (90, 132), "H200": (90, 132)}  # capability, number
_SCHEDULERS = 4
_AT_ONCE = 3  # matrices of a launch
_TILE_WARPS, _TILE_ROWS = 4, 4  # of a row of 4,096 columns; of 2,048 columns half the warps


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Bytes a second of the kernels of a model's token that read rows."""

    dense: float  # of layers
    head: float
    select: float
    records: float


def read_rate(gpu: str, flight_bytes: float, weights_a_byte: float) -> float:
    """Returns bytes a second. `flight_bytes`: of a multiprocessor."""
    _, number = SMS[gpu]
    copy = COPY_SHARE * GPUS[gpu].memory_rate
    flight = number * flight_bytes / LATENCY_S
    issue = number * _SCHEDULERS * CLOCK[gpu] * 32 / (INSTRUCTIONS * weights_a_byte)
    return float((copy**-2 + flight**-2 + issue**-2) ** -0.5)


def read_rates(layout: PackLayout, gpu: str, grids: Grids, num_rows: int = 1, rows_of_expert: float = 1.0) -> ReadRates:
    """Returns the rates of a model whose experts are alike in sizes.

    Args:    num_rows: of a pass.   rows_of_expert: of these, those that an expert serves, each by decoding it again.
    """
    spec, d = layout.spec, layout.spec.hidden_size
    sizes = {
        role.role.name: role.entry.num_bytes / role.role.shape[0] for role in layout.dense if len(role.role.shape) > 1
    }
    chip, again = _Chip(Gpu.of(*SMS[gpu]), grids), 1 + (num_rows - 1) * ROW_INSTRUCTIONS / INSTRUCTIONS
    num_bytes, seconds = 0.0, 0.0
    for rows, cols, row_bytes in _first_halves(layout):
        flight = chip.of_rows(rows, cols, row_bytes)
        num_bytes += rows * row_bytes
        seconds += rows * row_bytes / read_rate(gpu, flight, again * cols / row_bytes)
    head_row = sizes["embed" if spec.tied_head else "head"]
    experts = [each for layer in layout.experts for each in layer]
    selector = sum(each.selector.row_bytes if each.selector else 0 for each in experts) / len(experts)
    record = sum(each.records.row_bytes for each in experts) / len(experts)
    k, f = spec.router.num_experts_per_tok, spec.expert.intermediate_size
    return ReadRates(
        dense=num_bytes / seconds,
        head=read_rate(gpu, chip.of_rows(spec.vocab_size, d, head_row), again * d / head_row),
        select=read_rate(gpu, chip.of_selectors(k, f, d, selector), rows_of_expert * d / selector),
        records=read_rate(gpu, chip.of_records(d, record), rows_of_expert * 2 * d / record),
    )


def _first_halves(layout: PackLayout) -> Iterator[tuple[int, int, float]]:
    """Yields rows, columns and bytes of a row of the large products of attention and mixers, launch by launch."""
    matrices = {role.role.name: role for role in layout.dense}
    for layer in range(layout.spec.num_hidden_layers):
        mixer = layout.spec.mixer_of(layer)
        part, names = ("attention", "qkv") if mixer is None else ("mixer", projections_of(mixer).names)
        for group in (tuple(names)[:_AT_ONCE], ("o",)):
            each = [matrices[f"layers.{layer}.{part}.{name}"] for name in group]
            rows = sum(matrix.role.shape[0] for matrix in each)
            yield rows, each[0].role.shape[1], sum(matrix.entry.num_bytes for matrix in each) / rows


@dataclass(frozen=True, slots=True)
class _Chip:
    """The bytes in flight on a multiprocessor."""

    gpu: Gpu
    grids: Grids

    def of_rows(self, num_rows: int, d: int, row_bytes: float) -> float:
        warps, tiles = max(1, _TILE_WARPS * d // 4096), num_rows / _TILE_ROWS
        programs = tiles if self.grids == "waves" else max(256, tiles / 8)
        return self._flight(programs, Registers.ROWS, warps, _TILE_ROWS * row_bytes)

    def of_selectors(self, k: int, f: int, d: int, row_bytes: float) -> float:
        if self.grids == "waves":
            warps = max(1, _TILE_WARPS * d // 4096)
            return self._flight(k * f / 4, Registers.SELECT, warps, _TILE_ROWS * row_bytes)
        is_narrow = d / row_bytes > 2  # of fewer than four bits: two rows, and 64 values of x in a thread's registers
        block = max(each for each in (16, 32, 64) if each == 16 or k * f / each >= 256)
        rows, registers = (2, 160) if is_narrow else (4, 128)
        return self._flight(k * f / block, registers, 2, rows * row_bytes)

    def of_records(self, d: int, row_bytes: float) -> float:
        if self.grids == "waves":
            programs, warps, rows = 3.0 * self.gpu.number, 4, 2 * 4096 // d
        else:
            programs, warps, rows = 2.0 * self.gpu.number, 4 * d // 4096, 2
        return self._flight(programs, Registers.NEURONS, warps, rows * row_bytes)

    def _flight(self, programs: float, registers: int, warps: int, tile_bytes: float) -> float:
        return min(programs / self.gpu.number, self.gpu.resident(registers, warps)) * tile_bytes


@dataclass(frozen=True, slots=True)
class MeasuredLaunch:
    """A launch on an H200: its bytes, those in flight a multiprocessor, weights a byte, and the measured seconds."""

    name: str
    num_bytes: float
    flight_bytes: float
    weights_a_byte: float
    seconds: float


# Of docs/benchmarks/gpu-nvidia-h200-2026-11-26-5284965-call2.json.
MEASURED = (
    MeasuredLaunch("select, Mixtral", 37.2e6, 8.5 * 1024, 3.16, 31.2e-6),
    MeasuredLaunch("select, Qwen3", 7.18e6, 13.1 * 1024, 1.75, 7.01e-6),
    MeasuredLaunch("gemv 2048 x 4096", 4.75e6, 17.5 * 1024, 1.72, 5.0e-6),
    MeasuredLaunch("gemv 4096 x 4096", 9.5e6, 17.5 * 1024, 1.72, 7.32e-6),
    MeasuredLaunch("gemv 32000 x 4096", 74.2e6, 45 * 1024, 1.72, 26.9e-6),
    MeasuredLaunch("gemv 151936 x 2048", 177.5e6, 45 * 1024, 1.75, 54.2e-6),
    MeasuredLaunch("neurons, Mixtral", 137.2e6, 18 * 1024, 1.72, 60.1e-6),
    MeasuredLaunch("neurons, Mixtral, 80% sparse", 30.9e6, 18 * 1024, 1.72, 13.0e-6),
    MeasuredLaunch("neurons, Qwen3", 16.4e6, 9 * 1024, 1.75, 10.1e-6),
    MeasuredLaunch("neurons, Qwen3, 80% sparse", 5.0e6, 9 * 1024, 1.75, 4.66e-6),
)
