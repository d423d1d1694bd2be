"""The native kernels in tests: each instruction set that this machine has."""

import shutil
from functools import cache
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.cpu import ExpertRows, Kernels, SelectedNeurons, is_available
from moe_pack.runtime.cpu.kernels import InstructionSet
from moe_pack.runtime.model import NativeOperations

INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("portable", "neon", "avx2", "avx512", "avx512vbmi")


@cache
def kernels_limited_to(instruction_set: str) -> Kernels:
    """Kernels with two threads and these instructions, kept for all tests; skips where there are none."""
    if not is_available():
        _skip("native kernels were not built: no C++ compiler")
    kernels = Kernels(2, cast(InstructionSet, instruction_set))
    if kernels.instruction_set != instruction_set:
        _skip(f"this machine has no {instruction_set}")
    return kernels


def _skip(why: str) -> NoReturn:
    import pytest  # here, because `make gpu-check` has kernels and no pytest

    pytest.skip(why)


def quick_compiler(folder: Path) -> Path:
    """Writes a `g++` that optimizes nothing, whatever it is told, and returns it: kernels build in a third of the time.

    For tests of what is built and where; the kernels that other tests run are built as setup.py says.
    """
    program = folder / "g++"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    program.chmod(0o755)
    return program


def operations_limited_to(instruction_set: str) -> NativeOperations:
    """The operations by these kernels."""
    return NativeOperations(kernels_limited_to(instruction_set))


def select(x: Tensor, rows: ExpertRows, kernels: Kernels) -> SelectedNeurons:
    """The neurons of one expert that run for all tokens."""
    return kernels.select_each(x, [(rows, np.arange(len(x)))])[0]


def work(
    rows: ExpertRows, tokens: Tensor, weights: Tensor
) -> tuple[ExpertRows, NDArray[np.int64], NDArray[np.float32]]:
    """An expert's share of a call of `Kernels.experts`."""
    return rows, tokens.numpy(), weights.numpy()
