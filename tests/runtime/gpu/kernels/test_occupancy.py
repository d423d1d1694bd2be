"""Grids of a token's kernels for published models and GPUs: waves, and bytes in flight, from compiled kernels."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import pytest
from support.compiled_kernels import CAPABILITIES, NUM_SMS, Compiled, launched
from support.kernel_calls import CONTEXT, TOKENS, TokenShape

from moe_pack.runtime.gpu.kernels.grids import Gpu

WAVES, FLIGHT = 2.0, 24 * 1024
# Their programs share the work evenly. One more writes and reads a partial sum of d, or norms and rotates the queries.
ONE_WAVE = ("_neurons_kernel", "_attend_kernel")
READERS = {"_select_kernel", "_gemv", "_gated", *ONE_WAVE}
# Loads of a thread for one tile: four rows, of each matrix.
TILE_LOADS = {"_gemv": 4, "_gated": 8}
# KiB in flight a multiprocessor, where they are fewer than 24 although the launch has more.
FEW_BYTES = {
    # A thread has two rows of two matrices in registers, of half the bytes that 4 bits have.
    ("Mixtral-8x7B experts", "_neurons_kernel"): 15,
    # Keys of 256 values are read in pieces of 64, so that registers do not spill, and a multiprocessor has one program.
    ("Qwen3.6-35B-A3B attend", "_attend_kernel"): 6,
}
# Where a wave is not one: keys' norms take 176 registers on sm_80, and a multiprocessor runs two programs, not three.
MORE_WAVES = {(80, "Qwen3-30B-A3B attend"): 1.5}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch on one GPU. `waves`: of it.   `flight`: bytes in flight a multiprocessor, scales included.
    `work`: its bytes a multiprocessor.   `is_one_tile`: whether programs take a single tile, so that all rows that fit
    are in flight at once: more programs, of smaller tiles, would not bring more.
    """

    kernel: Compiled
    waves: float
    flight: float
    work: float
    is_one_tile: bool


def launches(capabilities: tuple[int, ...], only: str = "") -> Iterator[Launch]:
    for k in launched(capabilities, only):
        if k.kernel in READERS:
            yield launch_of(k)
        else:  # those that list neurons and combine splits, whose sizes follow from the grids
            assert k.local_bytes == k.stack_bytes == 0, f"{k.call}, {k.kernel}, sm_{k.capability}: spills"


def launch_of(k: Compiled) -> Launch:
    gpu, (model, _, role) = Gpu.of(k.capability, NUM_SMS[k.capability]), k.call.partition(" ")
    shape = TOKENS[model]
    resident = gpu.resident(k.registers, k.num_warps, k.launched_bytes)
    read = "_load_values" if k.kernel == "_attend_kernel" else "load_words"
    loads = {int(name.split()[1]): number for name, number in k.loads.items() if name.split()[0] == read}
    is_one_tile = sum(loads.values()) == TILE_LOADS.get(k.kernel)
    # Half of the loads of a loop are of the first tile, before it, and half of the next ones.
    tile = min(size * number for size, number in loads.items()) * 32 * k.num_warps / (1 if is_one_tile else 2)
    if k.kernel == "_attend_kernel":
        tile, scales = sum(size * number for size, number in loads.items()) * 16 * k.num_warps, 1.0
    else:
        scales = row_bytes(shape, k.kernel, role, 64) / (64 * bits_of(shape, k.kernel, role) / 8)
    if k.kernel == "_select_kernel":
        is_one_tile = k.programs == shape.k * shape.f // 4
    work = work_of(shape, k.kernel, role) / gpu.number
    flight = min(k.programs / gpu.number, resident) * tile * scales
    return Launch(k, k.programs / gpu.number / resident, min(flight, work), work, is_one_tile)


def bits_of(shape: TokenShape, kernel: str, role: str) -> int:
    if role == "plain":
        return 16
    return {"_select_kernel": shape.selector_bits, "_neurons_kernel": min(shape.record_bits)}.get(kernel, 4)


def row_bytes(shape: TokenShape, kernel: str, role: str, d: int) -> float:
    """Bytes of a row: its codes, and for 64 of them a scale and a zero of 16 bits each."""
    return d * (bits_of(shape, kernel, role) / 8 + (0 if role == "plain" else 4 / 64))


def work_of(shape: TokenShape, kernel: str, role: str) -> float:
    """Bytes that a launch reads, all neurons running."""
    heads, kv_heads, width = shape.attention
    if kernel == "_attend_kernel":
        return 2 * 2 * kv_heads * width * CONTEXT
    codes = {
        "experts": shape.k * shape.f * (1 if kernel == "_select_kernel" else 2),
        "qkv": (heads + 2 * kv_heads) * width,
        "head": shape.vocab,
        "plain": shape.vocab,
        "shared": 2 * shape.shared,
    }
    inner = {"o": heads * width, "shared down": shape.shared}.get(role, shape.d)
    rows = codes.get(role, shape.d)
    return rows * row_bytes(shape, kernel, role, inner)


def faults(found: list[Launch]) -> list[str]:
    wrong = []
    for each in found:
        k = each.kernel
        name = f"sm_{k.capability}, {k.call}, {k.kernel}: "
        if k.local_bytes or k.stack_bytes > 8:
            wrong.append(f"{name}{k.stack_bytes} bytes of registers spilled")
        if k.kernel in ONE_WAVE:
            if not 0.9 <= each.waves <= MORE_WAVES.get((k.capability, k.call), 1.0):
                wrong.append(f"{name}{each.waves:.2f} waves, and should be one")
        elif each.waves < WAVES and not each.is_one_tile:
            wrong.append(f"{name}{each.waves:.2f} waves")
        least = 1024 * FEW_BYTES.get((k.call, k.kernel), 24)
        if each.flight < min(least, each.work):
            wrong.append(f"{name}{each.flight / 1024:.1f} KiB in flight a multiprocessor of {each.work / 1024:.1f}")
    return wrong


@pytest.fixture(scope="module")
def mixtral() -> list[Launch]:
    return list(launches((90,), "Mixtral-8x7B experts,Mixtral-8x7B o"))


def test_grids_of_mixtral_fill_an_h200(mixtral: list[Launch]) -> None:
    assert faults(mixtral) == []
    select, neurons, gemv = mixtral
    assert [each.kernel.kernel for each in mixtral] == ["_select_kernel", "_neurons_kernel", "_gemv"]
    assert select.waves >= WAVES and not select.is_one_tile and select.flight >= FLIGHT
    assert 0.9 < neurons.waves <= 1
    # 4,096 rows are 1,024 tiles; smaller ones would have fewer bytes in flight.
    assert gemv.is_one_tile and gemv.kernel.programs == ceil(4096 / 4)


def test_the_first_rows_are_on_their_way_before_earlier_launches_end(mixtral: list[Launch]) -> None:
    *experts, gemv = (each.kernel.before_wait for each in mixtral)
    assert gemv == (4 * 3, 0)  # of four rows the codes, a scale and a zero
    assert experts == [(0, 0)] * 2  # which rows these read follows from the launches before


def test_grids_of_256_programs_are_faults(mixtral: list[Launch]) -> None:
    few = [launch_of(replace(each.kernel, programs=256)) for each in mixtral]
    assert [fault.split(", ")[2].split(":")[0] for fault in faults(few)] == [
        "_select_kernel", "_select_kernel", "_neurons_kernel", "_neurons_kernel", "_gemv"
    ]  # fmt: skip


def test_kernels_that_need_more_registers_or_spill_are_faults(mixtral: list[Launch]) -> None:
    select, neurons, gemv = (each.kernel for each in mixtral)
    assert len(faults([launch_of(replace(select, registers=97, stack_bytes=16))])) == 2
    assert len(faults([launch_of(replace(neurons, registers=169))])) == 2  # two programs a multiprocessor, not three
    assert faults([launch_of(replace(gemv, registers=128))]) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_grids_of_every_model_fill_every_gpu(capability: int) -> None:
    found = list(launches((capability,)))
    assert faults(found) == []
    assert {each.kernel.kernel for each in found} == READERS


def test_warps_that_run_at_once_are_those_that_ncu_counted_on_an_h200() -> None:
    """Of the grids of 256 programs; the achieved occupancy, in docs/benchmarks/gpu.md, is lower at a launch's end."""
    gpu = Gpu.of(90, 132)
    for programs, registers, warps, shared, percent in (
        (448, 157, 2, 0, 10.1), (384, 127, 2, 0, 9.0), (256, 96, 4, 0, 12.1), (256, 96, 2, 0, 5.5),
        (264, 168, 4, 0, 12.6), (256, 166, 4, 36864, 11.8), (1000, 96, 4, 0, 25.6), (4748, 96, 2, 0, 28.4),
    ):  # fmt: skip
        expected = 100 * min(programs / gpu.number, gpu.resident(registers, warps, shared)) * warps / gpu.warps
        assert 0.8 * expected < percent < 1.02 * expected, (programs, registers, warps)


def test_programs_are_limited_by_registers_warps_programs_and_shared_memory_of_a_multiprocessor() -> None:
    small, large = Gpu.of(86, 82), Gpu.of(90, 132)
    assert [gpu.resident(32, 1) for gpu in (small, large)] == [16, 32]
    assert [gpu.resident(32, 8) for gpu in (small, large)] == [6, 8]
    assert [gpu.resident(168, 4, 36864) for gpu in (small, large)] == [2, 3]
    assert large.resident(255, 8) == 1 and large.resident(255, 16) == 1
    # Capabilities between two known ones are as the lower, and those below all as the lowest.
    assert Gpu.of(121, 48) == Gpu.of(120, 48) and Gpu.of(103, 148) == Gpu.of(100, 148)
    assert Gpu.of(75, 40) == Gpu.of(80, 40)
