"""The machine for which a plan is made: the rates from which a pack's speed is estimated.

A CPU's rates come from `moe-pack doctor`. A GPU's rates come from its data sheet, by name, so that one can plan for a
GPU that is not in this machine; `--gpu measure` measures the memory and the link of this machine's GPU.

Assumed, not measured: which share of a data sheet's rates programs reach (`BANDWIDTH_SHARE`, `LINK_SHARE`), the times
of a token, a launch and a call of the CPU in a CUDA graph (`GPU_TOKEN_S`, `LAUNCH_S`, `CALL_S`), and the rate of a
GPU's host where `doctor` has not run (`HOST_RATE`).

Source:  NVIDIA's data sheets and architecture papers (Ampere GA102, A100, Ada, Hopper, L4, H200, RTX Blackwell).
"""

import time
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

from moe_pack import formats, runtime
from moe_pack.formats.base.commands import did_you_mean

if TYPE_CHECKING:
    import torch

USUAL_LINK_RATE = 16e9  # bytes a second: half of PCIe 4.0 x16, or the maximum of 3.0 x16


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor that computes and the memory and disk from which it fetches. Rates are bytes a second."""

    kind: Literal["cpu", "cuda"]
    name: str
    # expert_rates, dense_rates: of matrices multiplied for one token, by width
    expert_rates: tuple[runtime.WidthRate, ...]
    dense_rates: tuple[runtime.WidthRate, ...]
    row_s: float  # additional seconds for each row of an expert
    memory_rate: float  # reads of fast memory
    fixed: runtime.FixedCosts
    disk: runtime.DiskFacts
    link_rate: float | None = None  # from host memory to the GPU; None on the CPU, which fetches from the disk
    ram_bytes: int | None = None  # host memory for a pack; the rest of the pack stays on disk
    # The same for experts' trellises, by the width of two weights; empty if none was measured.
    trellis_rates: tuple[runtime.WidthRate, ...] = ()
    cores: int = 1  # of the CPU; they compute, and they read from the disk
    # The CPU that computes what a GPU lacks; None on a CPU. On a GPU `fixed.miss_s` is for each layer with a call of
    # the CPU.
    host: "Machine | None" = None

    def expert_rate(self, part: formats.PartFormat) -> float:
        """Returns the rate of an expert's matrix in a format, bytes a second.

        If no trellis was measured, a trellis counts as affine codes of as many bits, rounded up.
        """
        if part.codec != "trellis":
            return rate_of(self.expert_rates, part.width)
        if self.trellis_rates:
            return rate_of(self.trellis_rates, part.width)
        return rate_of(self.expert_rates, ceil(part.bits))


def machine_of_cpu(facts: runtime.MachineFacts) -> Machine:
    """Returns this machine's CPU and disk as `doctor` measured them.

    Raises:  RunError if the native kernels or the fixed costs were not measured.
    """
    cpu = facts.cpu
    if not cpu.experts or cpu.read_all is None or cpu.row_s is None or facts.fixed is None:
        raise formats.RunError(
            "doctor: the speed of experts was not measured; build the native kernels and run moe-pack doctor"
        )
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
        cores=cpu.cores,
    )


def assumed_cpu() -> Machine:
    """Returns a CPU of two cores with AVX-512 and the usual disk, if no machine was measured.

    Rates: docs/benchmarks/cpu.md, "Experts against memory" (machine A, two threads), rounded.
    """
    rates = tuple(
        runtime.WidthRate(width, 1e9 * rate) for width, rate in ((2, 30), (3, 31), (4, 33), (8, 36), (16, 38))
    )
    fixed = runtime.FixedCosts(token_s=3e-4, layer_s=1.5e-4, expert_s=1e-5, miss_s=5e-5, rows_s=1e-4)
    return Machine("cpu", "a CPU of 2 cores, assumed", rates, rates, 0.0, 4e10, fixed, runtime.USUAL_DISK, cores=2)


def assumed_host() -> Machine:
    """Returns the CPU and the disk of a GPU's host, if no machine was measured.

    Rates: two thirds of two channels of DDR5-5600 (89.6 GB/s), as in docs/benchmarks/gpu.md.
    """
    rates = (runtime.WidthRate(4, HOST_RATE),)
    name = f"a CPU that computes experts at {HOST_RATE / 1e9:.0f} GB/s, assumed"
    return replace(assumed_cpu(), name=name, expert_rates=rates, dense_rates=rates, memory_rate=HOST_RATE)


def rate_of(rates: tuple[runtime.WidthRate, ...], width: int) -> float:
    """Returns the rate at a width, or at the nearest measured width; of two equally near ones, at the wider."""
    return min(rates, key=lambda measured: (abs(measured.width - width), -measured.width)).rate


BANDWIDTH_SHARE, LINK_SHARE = 0.8, 0.8
MEASURE = "measure"
HOST_RATE = 60e9
# A layer has some ten launches, and one that writes what the CPU needs before a call (docs/benchmarks/gpu.md).
GPU_TOKEN_S, LAUNCH_S = 50e-6, 1e-6
# Two edges of the graph, a number's way over the link, the thread's look and zeros, and the way of the GPU's look back.
CALL_S = 2 * 0.93e-6 + 0.5e-6 + 0.6e-6 + 1.0e-6
_GPU_FIXED = runtime.FixedCosts(GPU_TOKEN_S, 10 * LAUNCH_S, expert_s=0.0, miss_s=CALL_S + LAUNCH_S, rows_s=0.0)
_WIDTHS = (1, 2, 3, 4, 8, 16)
_LANE_RATES = {
    3: 0.985e9,
    4: 1.969e9,
    5: 3.938e9,
}  # by PCIe generation: bytes a second of a lane in one direction, after line coding
_COPY_BYTES, _COPIES = 256 << 20, 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with the figures of its data sheet, or as measured: bytes, bytes a second, operations a second."""

    name: str
    memory_bytes: int
    memory_rate: float
    link_rate: float  # in one direction
    flops: float  # of float32, where a multiplication and an addition count as two


def _gpu(name: str, gibibytes: float, gb_s: float, pcie: tuple[int, int], teraflops: float) -> Gpu:
    generation, lanes = pcie
    return Gpu(name, int(gibibytes * 2**30), gb_s * 1e9, lanes * _LANE_RATES[generation], teraflops * 1e12)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("RTX 3060 12G", 12, 360, (4, 16), 12.7),
        _gpu("RTX 3090", 24, 936, (4, 16), 35.6),
        _gpu("RTX 4060 Ti 16G", 16, 288, (4, 8), 22.1),
        _gpu("RTX 4090", 24, 1008, (4, 16), 82.6),
        _gpu("RTX 5090", 32, 1792, (5, 16), 104.8),
        _gpu("L4", 24, 300, (4, 16), 30.3),
        _gpu("A100 80G", 80, 1935, (4, 16), 19.5),
        _gpu("H100", 80, 3350, (5, 16), 67.0),
        _gpu("H200", 131.3, 4800, (5, 16), 67.0),  # 141 GB
    )
}


def find_gpu(name: str) -> Gpu:
    """Returns the GPU of this name in any spelling, or this machine's GPU for the name `measure`.

    Raises:  RunError if the name is unknown, or this machine has no GPU to measure.
    """
    if name == MEASURE:
        return measure_gpu()
    gpu = known_gpu(name)
    if gpu is not None:
        return gpu
    names = f"{', '.join(GPUS)}, or {MEASURE} for this machine's GPU"
    raise formats.RunError(f"--gpu: {name!r} is not known; give one of {names}{did_you_mean(name, GPUS)}")


def known_gpu(name: str) -> Gpu | None:
    """Returns the GPU of this name in any spelling, or the only GPU whose name contains it; otherwise None."""
    wanted = _plain(name).removeprefix("geforce")
    exact = [gpu for gpu in GPUS.values() if _plain(gpu.name) == wanted]
    like = [gpu for gpu in GPUS.values() if wanted and wanted in _plain(gpu.name)]
    return exact[0] if exact else like[0] if len(like) == 1 else None


def machine_of_gpu(gpu: Gpu, link_rate: float | None, ram_bytes: int | None, host: Machine | None = None) -> Machine:
    """Returns the machine of a GPU and its host.

    Args:    link_rate: bytes a second; None takes the GPU's own link.   ram_bytes: host memory for a pack; None means
             that all of it fits.   host: its CPU and disk; None takes `assumed_host`.
    """
    host = host or assumed_host()
    read = BANDWIDTH_SHARE * gpu.memory_rate
    # A weight takes two operations; they limit narrow weights first.
    rates = tuple(runtime.WidthRate(width, min(read, gpu.flops / 2 * width / 8)) for width in _WIDTHS)
    return Machine(
        "cuda",
        gpu.name,
        rates,
        rates,
        0.0,
        read,
        _GPU_FIXED,
        host.disk,
        LINK_SHARE * gpu.link_rate if link_rate is None else link_rate,
        ram_bytes,
        host=host,
    )


def measure_gpu() -> Gpu:
    """Measures this machine's first GPU: its memory and, with copies from page-locked memory, its link.

    The rates are scaled up so that `machine_of_gpu`, which takes a share of them, arrives at the measured ones. `flops`
    are infinite, because they were not measured.
    Raises:  RunError if torch finds no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise formats.RunError(f"--gpu {MEASURE}: torch finds no GPU in this machine; name one of {', '.join(GPUS)}")
    properties = torch.cuda.get_device_properties(0)
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    source, target = (torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    within = 2 * _copy_rate(target, source)  # each byte is read and written
    link = _copy_rate(target, host)
    return Gpu(properties.name, properties.total_memory, within / BANDWIDTH_SHARE, link / LINK_SHARE, float("inf"))


def _copy_rate(target: "torch.Tensor", source: "torch.Tensor") -> float:
    """Returns bytes a second of copies, without the first one, which warms up."""
    import torch

    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()  # the time begins when no copy is running
    began = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()  # the calls above only start the copies
    return _COPIES * _COPY_BYTES / (time.perf_counter() - began)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")
