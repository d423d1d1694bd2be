"""How launches fill a GPU: the programs that each gets, and when it starts.

A grid that fills a GPU has as many programs as all multiprocessors run at once, or more. A multiprocessor runs programs
at the same time as far as its registers, warps and shared memory reach; that many on every multiprocessor are a wave.
Bytes of rows that programs have asked for and not received are in flight. Memory is busy where a wave has enough of
them: 24 KiB a multiprocessor. So `select`, `gemv` and `gated` get two waves or more, as far as each program has a tile
of rows; with a tile each, all rows that fit are in flight at once. `neurons` and `attend` get one wave: their programs
share the work evenly, and one more of them costs a partial sum, or the queries once more.

Registers are the fewest that the kernels at hand need when compiled (`Registers`), and not those of one kernel: buffers
are allocated before anything is compiled, and partial sums would depend on the compiler's version. A kernel that needs
more has more waves. `maxnreg` would make sure of a number, but by spilling registers in some formats.
`tests/runtime/gpu/kernels/test_occupancy.py` compares the numbers with compiled kernels.

Under the interpreter programs are few and large. Results depend on grids only in the order of partial sums.

Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it within.

The start of a launch then costs less, and a kernel can load its weights before it waits. `chained` turns it on for the
launches of one stream that follow one another without a fork, a join or a copy in between, on GPUs of compute
capability 9.0 or later. Each kernel that is launched there calls `wait_for_earlier` once in every program:

- Before it, a program loads only memory that no launch of the chain writes, and stores nothing.
- Kernels let the next one start after their own wait. So when a kernel starts, all but the one before it have ended.

On other GPUs, and under the interpreter, the function is empty; in a launch outside of a chain it returns at once.
**Untested on a GPU.** (CUDA's programming guide, programmatic dependent launch.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq, is_hip
from triton.runtime.driver import driver

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run in numpy, one program after the other


class Registers(IntEnum):
    """Registers of a thread, the fewest of a kernel's formats."""

    SELECT = 96
    ROWS = 96  # of `gemv` and `gated`
    PLAIN_ROWS = 40  # of 16 and 32 bits a value
    NEURONS = 168  # of two matrices
    NEURONS_OTHERS = 127  # of one or three
    ATTEND = 168


# Of a multiprocessor by compute capability: warps, programs, KiB of shared memory. (CUDA's programming guide, technical
# specifications per compute capability.) All have 65,536 registers, a quarter for each of four schedulers.
_LIMITS = {80: (64, 32, 164), 86: (48, 16, 100), 89: (48, 24, 100), 90: (64, 32, 228), 100: (64, 32, 228),
           120: (48, 24, 100)}  # fmt: skip
# The same of AMD's GPUs, by architecture, and the registers of a scheduler that each thread of a warp shares with the
# other warps. The driver counts pairs of compute units on gfx11. (ROCm's documentation, accelerator and GPU hardware
# specifications.) **Untested on a GPU.**
_AMD_LIMITS = {"gfx9": (32, 16, 64, 512), "gfx11": (64, 32, 128, 1536)}
_SCHEDULERS, _THREAD_REGISTERS = 4, 512
_RESERVED_BYTES = 1024  # of shared memory, for each program
_INTERPRETED_PROGRAMS = 32  # so that an engine's launches are those of a GPU


@dataclass(frozen=True, slots=True)
class Gpu:
    """The multiprocessors of a GPU."""

    number: int
    warps: int  # of one, as `programs` and `shared_bytes`
    programs: int
    shared_bytes: int
    registers: int = _THREAD_REGISTERS  # of one scheduler's resident warps together, for a thread of each

    @classmethod
    def of(cls, arch: int | str, number: int) -> "Gpu":
        """Returns the facts of a compute capability, or of the last one known before it; or of AMD's architecture."""
        if isinstance(arch, str):
            warps, programs, shared_kib, registers = _AMD_LIMITS["gfx9" if arch.startswith("gfx9") else "gfx11"]
            return cls(number, warps, programs, shared_kib << 10, registers)
        known = max((each for each in _LIMITS if each <= arch), default=min(_LIMITS))
        warps, programs, shared_kib = _LIMITS[known]
        return cls(number, warps, programs, shared_kib << 10)

    def resident(self, registers: int, num_warps: int, shared_bytes: int = 0) -> int:
        """Returns how many programs one multiprocessor runs at once, at least one."""
        by_registers = resident_warps(registers, self.registers) // num_warps
        by_memory = self.shared_bytes // (shared_bytes + _RESERVED_BYTES)
        return max(1, min(by_registers, self.warps // num_warps, self.programs, by_memory))

    def wave(self, registers: int, num_warps: int, shared_bytes: int = 0) -> int:
        """Returns how many programs run at once."""
        return self.number * self.resident(registers, num_warps, shared_bytes)


def resident_warps(registers: int, of_thread: int = _THREAD_REGISTERS) -> int:
    """Returns how many warps a multiprocessor has registers for; it hands them out by eights to a thread."""
    return _SCHEDULERS * (of_thread // (-(-registers // 8) * 8))


def wave(registers: int, num_warps: int, shared_bytes: int = 0) -> int:
    """Returns how many programs the current GPU runs at once."""
    if INTERPRETED:
        return _INTERPRETED_PROGRAMS
    return _current(driver.active.get_current_device()).wave(registers, num_warps, shared_bytes)


@cache
def _current(device: int) -> Gpu:
    number = driver.active.utils.get_device_properties(device)["multiprocessor_count"]
    return Gpu.of(driver.active.get_current_target().arch, number)


def warp_threads() -> int:
    """Returns the threads of a warp of the current GPU: 64 on some of AMD's."""
    return 32 if INTERPRETED else int(driver.active.get_current_target().warp_size)


ENABLED = True  # False: all launches start after the end of the one before
_INTERPRETED = tl.constexpr(INTERPRETED)
_LEAST_CAPABILITY = 90
_is_chained = False


@contextmanager
def chained(is_chain: bool = True) -> Iterator[None]:
    """Lets each launch in this context start before the end of the one before it.

    Args:    is_chain: whether the launches are such a chain; False changes nothing.
    """
    global _is_chained
    before, _is_chained = _is_chained, is_chain and ENABLED and _is_supported()
    try:
        yield
    finally:
        _is_chained = before


def launch_options(most_registers: int | None = None) -> dict[str, int]:
    """Returns the options of a launch of a kernel that calls `wait_for_earlier`.

    Args:    most_registers: of a thread, where the compiler takes such a number; ROCm's does not.
    """
    options: dict[str, int] = {"launch_pdl": True} if _is_chained else {}
    if most_registers is None or (not INTERPRETED and is_hip()):
        return options
    return {**options, "maxnreg": most_registers}


@triton.constexpr_function
def dot_precision() -> str:
    """Returns how tensor cores multiply float32: as three products, or on AMD's GPUs as it is."""
    return "ieee" if not INTERPRETED and is_hip() else "tf32x3"


def _is_supported() -> bool:
    if INTERPRETED:
        return True
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= _LEAST_CAPABILITY)


@triton.jit
def wait_for_earlier():
    """Waits until all earlier launches of the chain have ended, and lets the next one start."""
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()
