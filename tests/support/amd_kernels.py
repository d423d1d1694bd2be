"""Kernels compiled for GPUs of AMD that are not here: which calls compile to code, and why others do not.

`PYTHONPATH=tests python -m support.amd_kernels [--only NAMES] [--widths 2,t4,fp8] [--dims 4096] ARCHITECTURE`, without
TRITON_INTERPRET, writes a JSON line for each kernel, and one for each call that the compiler refuses. Triton comes with
all that this takes. Nothing runs: only a GPU shows whether the code is right.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from support.compiled_kernels import DIMS, SELECTORS, WIDTHS, RecordingDriver, calls
from support.named_formats import Name

WARPS = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32, "gfx1201": 32}  # threads of each; AMD calls them waves


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel as a GPU would run it, or a call's first kernel that is refused."""

    call: str
    kernel: str
    architecture: str
    fault: str = ""  # the error's last line; empty if it compiles
    stage: str = ""  # that failed
    warps: int = 0
    registers: int = 0  # of a thread, as the four below
    spilled: int = 0  # registers
    scratch_bytes: int = 0
    shared_bytes: int = 0  # of a program
    keeps_subnormals: bool = True  # of float32, which codes are that lie in their words


class _Driver(RecordingDriver):
    def __init__(self, architecture: str) -> None:
        super().__init__(90)  # whose number of multiprocessors grids get
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", self._architecture, WARPS[self._architecture])


def built(
    architecture: str, only: str, widths: tuple[Name, ...] = (16,), dims: tuple[int, ...] = (4096,)
) -> list[Built]:
    """The kernels of all calls whose names contain one of `only`'s parts, between commas, from another process."""
    options = ["--only", only, "--widths", ",".join(map(str, widths)), "--dims", ",".join(map(str, dims))]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-m", "support.amd_kernels", *options, architecture]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Built(**json.loads(line)) for line in done.stdout.splitlines()]


def build(architecture: str, only: str, widths: tuple[Name, ...], dims: tuple[int, ...]) -> Iterator[Built]:
    """Compiles kernels in this process: each once, with the name of the first call that launches it.

    Launches are those of a chain, so that options that AMD's GPUs lack would be refused.
    """
    import triton
    from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
    from triton.runtime.driver import driver

    from moe_pack.runtime.gpu.kernels.grids import chained

    found: list[Built] = []
    stages = _seen_stages()

    def keep(**event: Any) -> None:
        fn, device = event["fn"].jit_function, event["compile"]["device"]
        code = fn.device_caches[device][0][event["key"]]
        found.append(_described(name, fn.__name__, architecture, code))

    driver.set_active(_Driver(architecture))
    triton.knobs.runtime.jit_post_compile_hook = keep
    for name, call in calls(widths, dims, SELECTORS[:1]):
        if not any(part in name for part in only.split(",")):
            continue
        try:
            with chained():
                call()
        except (CompilationError, CompileTimeAssertionFailure, RuntimeError, KeyError) as fault:
            found.append(Built(name, "", architecture, str(fault).strip().splitlines()[-1], stages[-1]))
        yield from found
        found.clear()


def _seen_stages() -> list[str]:
    """Returns a list to which the compiler's stages are added as they begin, of all kernels."""
    from triton.backends.amd.compiler import HIPBackend

    begun, add_stages = ["launch"], HIPBackend.add_stages

    def add(self: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        add_stages(self, stages, options, language)
        for stage, compile_stage in list(stages.items()):

            def begin(*given: Any, stage: str = stage, compile_stage: Any = compile_stage) -> Any:
                begun.append(stage)
                return compile_stage(*given)

            stages[stage] = begin

    HIPBackend.add_stages = add
    return begun


def _described(call: str, kernel: str, architecture: str, code: Any) -> Built:
    listing: str = code.asm["amdgcn"]

    def number(name: str) -> int:
        (value,) = re.findall(rf"\.{name}:\s+(\d+)", listing)
        return int(value)

    assert code.asm["hsaco"], "the code itself"
    return Built(
        call, kernel, architecture, warps=code.metadata.num_warps, registers=number("vgpr_count"),
        spilled=number("vgpr_spill_count"), scratch_bytes=number("private_segment_fixed_size"),
        shared_bytes=code.metadata.shared, keeps_subnormals=".amdhsa_float_denorm_mode_32 3" in listing,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("architecture", choices=WARPS)
    given = parser.parse_args()
    widths = tuple(int(name) if name.isdigit() else name for name in given.widths.split(","))
    dims = tuple(map(int, given.dims.split(",")))
    for each in build(given.architecture, given.only, widths, dims):
        sys.stdout.write(json.dumps(asdict(each)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
