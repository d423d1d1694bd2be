"""The machine a plan is for: the rates that a cost model reckons with, measured by `doctor` or taken from a card.

Graphics cards by name: what a plan for one that is not here reckons with; or this machine's, measured.

Source:  NVIDIA's data sheets and architecture papers (Ampere GA102, A100, Ada, Hopper, L4, H200, RTX Blackwell).
What of a card's rates programs see is assumed: `BANDWIDTH_SHARE`, `LINK_SHARE`. So are the times of a token and a layer
in one CUDA graph. Nothing of it was measured yet; `--gpu measure` measures memory and link.
"""

import time
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch

from moe_pack.formats import DISK_BLOCK_BYTES, PartFormat, RunError
from moe_pack.runtime import DiskFacts, FixedCosts, MachineFacts, ReadRate, SizedRate, WidthRate

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
    drive: DiskFacts
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
    drive = steady_disk(USUAL_DRIVE_RATE)
    return Machine("cpu", "a CPU of 2 cores, assumed", rates, rates, 0.0, 4e10, fixed, drive)


def steady_disk(rate: float) -> DiskFacts:
    """A drive that reads at this rate, whatever is asked: where none was measured."""
    point = SizedRate(DISK_BLOCK_BYTES, rate)
    # A read of less than a block takes as long as one of a block, above the rate stays.
    return DiskFacts(None, 0, "pread", 1, (point,), (point,), (ReadRate("pread", DISK_BLOCK_BYTES, 1, rate),))


def rate_of(rates: tuple[WidthRate, ...], width: int) -> float:
    """The rate at a width; of one that was not measured, that of the nearest in bits, of equals the wider."""
    return min(rates, key=lambda one: (abs(one.width - width), -one.width)).rate


BANDWIDTH_SHARE, LINK_SHARE = 0.8, 0.8
MEASURE = "measure"
_CARD_FIXED = FixedCosts(token_s=50e-6, layer_s=30e-6, expert_s=0.0, miss_s=0.0)
_WIDTHS = (1, 2, 3, 4, 8, 16)
_LANE_RATES = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # bytes a second and direction of a lane, after line coding
_COPY_BYTES, _COPIES = 256 << 20, 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card: bytes, bytes a second and operations a second, all as its maker says, or as measured.

    `link_rate`: in one direction.   `flops`: float32, multiplications and additions counted apart.
    """

    name: str
    memory_bytes: int
    memory_rate: float
    link_rate: float
    flops: float


def _card(name: str, gibibytes: float, gb_s: float, pcie: tuple[int, int], teraflops: float) -> Gpu:
    generation, lanes = pcie
    return Gpu(name, int(gibibytes * 2**30), gb_s * 1e9, lanes * _LANE_RATES[generation], teraflops * 1e12)


GPUS = {
    card.name: card
    for card in (
        _card("RTX 3060 12G", 12, 360, (4, 16), 12.7),
        _card("RTX 3090", 24, 936, (4, 16), 35.6),
        _card("RTX 4060 Ti 16G", 16, 288, (4, 8), 22.1),
        _card("RTX 4090", 24, 1008, (4, 16), 82.6),
        _card("RTX 5090", 32, 1792, (5, 16), 104.8),
        _card("L4", 24, 300, (4, 16), 30.3),
        _card("A100 80G", 80, 1935, (4, 16), 19.5),
        _card("H100", 80, 3350, (5, 16), 67.0),
        _card("H200", 131.3, 4800, (5, 16), 67.0),  # 141 GB
    )
}


def find_gpu(name: str) -> Gpu:
    """The card of this name, however it is spelled, or this machine's under `measure`.

    Raises:  RunError if there is no such card, or none here to measure.
    """
    if name == MEASURE:
        return measure_card()
    card = known_gpu(name)
    if card is not None:
        return card
    raise RunError(f"--gpu: found {name!r}, expected one of {', '.join(GPUS)}, or {MEASURE}")


def known_gpu(name: str) -> Gpu | None:
    """The card of this name, however it is spelled, or the only one with this in its name; None if there is none."""
    wanted = _plain(name).removeprefix("geforce")
    exact = [card for card in GPUS.values() if _plain(card.name) == wanted]
    like = [card for card in GPUS.values() if wanted and wanted in _plain(card.name)]
    return exact[0] if exact else like[0] if len(like) == 1 else None


def machine_of_gpu(
    card: Gpu, link_rate: float | None, ram_bytes: int | None, drive: DiskFacts | None = None
) -> Machine:
    """The machine that a card makes with its host.

    Args:    link_rate: bytes a second; None: what its slot gives it.   ram_bytes: for a pack; None: it all fits.
             drive: None: one of a steady 1 GB/s.
    """
    read = BANDWIDTH_SHARE * card.memory_rate
    # Two operations a weight; narrow ones are the first to be limited by them.
    rates = tuple(WidthRate(width, min(read, card.flops / 2 * width / 8)) for width in _WIDTHS)
    return Machine(
        "cuda",
        card.name,
        rates,
        rates,
        0.0,
        read,
        _CARD_FIXED,
        drive or steady_disk(USUAL_DRIVE_RATE),
        LINK_SHARE * card.link_rate if link_rate is None else link_rate,
        ram_bytes,
    )


def measure_card() -> Gpu:
    """This machine's first card: memory by copies within it, link by copies from page-locked memory.

    Its rates are as programs see them: given so that `machine_of_gpu` comes to what was measured. `flops` are
    unbounded.
    Raises:  RunError if torch finds none.
    """
    if not torch.cuda.is_available():
        raise RunError(f"--gpu {MEASURE}: torch finds no CUDA device here; name a card: {', '.join(GPUS)}")
    found = torch.cuda.get_device_properties(0)
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    within = 2 * _copy_rate(target, source)  # each byte is read and written
    link = _copy_rate(target, host)
    return Gpu(found.name, found.total_memory, within / BANDWIDTH_SHARE, link / LINK_SHARE, float("inf"))


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes a second of copies, the first of which does not count."""
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()  # time begins when nothing is under way
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()  # copies are only asked for until then
    return _COPIES * _COPY_BYTES / (time.perf_counter() - began)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")
