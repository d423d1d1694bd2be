"""The machine a plan is for: the rates that a cost model reckons with, measured by `doctor` or taken from a card."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from moe_pack.formats import DISK_BLOCK_BYTES, PartFormat, RunError
from moe_pack.runtime import DriveFacts, FixedCosts, MachineFacts, ReadRate, SizedRate, WidthRate

USUAL_LINK_RATE = 16e9  # bytes a second: half of PCIe 4.0 x16, or what 3.0 x16 has at most
USUAL_DRIVE_RATE = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes, and what it fetches from. Rates are bytes a second.

    `expert_rates`, `dense_rates`: matrices multiplied for one token, by width; `trellis_rates`: experts' as trellises,
    by width of two weights, empty where none was measured.   `row_s`: beside that, of each row of
    an expert.   `memory_rate`: fast memory read.   `link_rate`: from host memory to the card; None on the CPU, whose
    experts come from the drive.   `ram_bytes`: of host memory for a pack; the rest of it stays on the drive.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    expert_rates: tuple[WidthRate, ...]
    dense_rates: tuple[WidthRate, ...]
    row_s: float
    memory_rate: float
    fixed: FixedCosts
    drive: DriveFacts
    link_rate: float | None = None
    ram_bytes: int | None = None
    trellis_rates: tuple[WidthRate, ...] = ()

    def expert_rate(self, part: PartFormat) -> float:
        """Of an expert's matrix in a format.

        A trellis where none was measured counts as affine codes of as many bits, or of the next more.
        """
        if part.codec != "trellis":
            return rate_of(self.expert_rates, part.width)
        if self.trellis_rates:
            return rate_of(self.trellis_rates, part.width)
        return rate_of(self.expert_rates, ceil(part.bits))


def machine_of_cpu(facts: MachineFacts) -> Machine:
    """This machine's CPU tier, as `doctor` measured it.

    Raises:  RunError if the native kernels or the fixed costs were not measured.
    """
    cpu = facts.cpu
    if not cpu.experts or cpu.read_all is None or cpu.row_s is None or facts.fixed is None:
        raise RunError("doctor: how fast experts are computed was not measured; run moe-pack doctor with kernels built")
    name = f"CPU, {cpu.cores} cores, {cpu.instruction_set}"
    return Machine(
        "cpu",
        name,
        cpu.experts,
        cpu.dense,
        cpu.row_s,
        cpu.read_all,
        facts.fixed,
        facts.drive,
        trellis_rates=cpu.trellises,
    )


def assumed_cpu() -> Machine:
    """A CPU of two cores with AVX-512 and a drive of 1 GB/s, where nothing was measured.

    Rates: docs/benchmarks/cpu.md, "Experts against memory" (machine A, two threads), rounded.
    """
    rates = tuple(WidthRate(width, 1e9 * rate) for width, rate in ((2, 30), (3, 31), (4, 33), (8, 36), (16, 38)))
    fixed = FixedCosts(token_s=3e-4, layer_s=1.5e-4, expert_s=1e-5, miss_s=5e-5)
    drive = steady_drive(USUAL_DRIVE_RATE)
    return Machine("cpu", "a CPU of 2 cores, assumed", rates, rates, 0.0, 4e10, fixed, drive)


def steady_drive(rate: float) -> DriveFacts:
    """A drive that reads at this rate, whatever is asked: where none was measured."""
    point = SizedRate(DISK_BLOCK_BYTES, rate)
    # A read of less than a block takes as long as one of a block, above the rate stays.
    return DriveFacts(None, 0, "pread", 1, (point,), (point,), (ReadRate("pread", DISK_BLOCK_BYTES, 1, rate),))


def rate_of(rates: tuple[WidthRate, ...], width: int) -> float:
    """The rate at a width; of one that was not measured, that of the nearest in bits, of equals the wider."""
    return min(rates, key=lambda one: (abs(one.width - width), -one.width)).rate
