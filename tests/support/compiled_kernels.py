"""Kernels compiled for GPUs that are not here: public operations called with CPU tensors compile, and launch nothing.

Run as a program without TRITON_INTERPRET, it writes a JSON line for each kernel that its calls compile:
`compiled_kernels.py [--only NAMES] [--widths 2,t4,fp8] [--dims 4096] [--instructions] CAPABILITY...`
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from moe_pack.formats import Selector
from support.named_formats import TRELLISES, Name

# GPUs by compute capability, and the most shared memory that one program may take there, in bytes (CUDA's programming
# guide, technical specifications per compute capability).
SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
CAPABILITIES = tuple(SHARED_BYTES)
# Multiprocessors of an A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090 (their data sheets).
NUM_SMS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}
SELECTORS: tuple[Selector, ...] = ("up", "gate", "both", "none")
WIDTHS: tuple[Name, ...] = (1, 2, 3, 4, 8, 16, "fp8", "mxfp4", *TRELLISES)
DIMS = (2048, 4096, 7168)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as a GPU would run it.

    `call`: what it was compiled for.   `programs`: of its launch.
    `stack_bytes`, `local_bytes`: not zero where registers are spilled.
    `loads`: how many loads of global memory, asynchronous ones too, by the jitted function in whose lines they stand
    and the bytes a thread loads at once (`load_words 16`).   `flushes`: additions and products of float32 that take
    subnormals for zeros.   `instructions`: how many of each, where asked for: disassembling takes as long as compiling.
    """

    call: str
    kernel: str
    capability: int
    num_warps: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int  # that are reserved, or known when it is compiled
    launched_bytes: int  # of shared memory that the launch asks for in addition
    flushes: int
    loads: dict[str, int]
    instructions: dict[str, int]
    # Of the innermost loop with products of tensor cores, where asked for: all its instructions, and these products.
    step: dict[str, int]
    # Loads of global memory, and stores and atomic operations, before the wait for earlier launches
    # (`kernels.grids`); None without a wait.
    before_wait: tuple[int, int] | None
    programs: int


def compiled(
    capabilities: tuple[int, ...],
    only: str,
    widths: tuple[Name, ...],
    dims: tuple[int, ...],
    selectors: tuple[Selector, ...] = SELECTORS,
    with_instructions: bool = False,
) -> list[Compiled]:
    """What all calls whose names contain one of `only`'s parts, between commas, compile to, in a process of its own."""
    options = ["--widths", _listed(widths), "--dims", _listed(dims), "--selectors", ",".join(selectors)]
    return _run(capabilities, only, [*options, *(["--instructions"] if with_instructions else [])])


def launched(capabilities: tuple[int, ...], only: str = "") -> list[Compiled]:
    """Every launch of calls of published models (`kernel_calls.model_calls`), in a process of its own."""
    return _run(capabilities, only, ["--models"])


def _run(capabilities: tuple[int, ...], only: str, options: list[str]) -> list[Compiled]:
    command = [sys.executable, __file__, "--only", only, *options]
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [*command, *map(str, capabilities)], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, done.stdout.splitlines())
    return [Compiled(**{**line, "before_wait": line["before_wait"] and tuple(line["before_wait"])}) for line in lines]


def _listed(numbers: tuple[Name, ...]) -> str:
    return ",".join(map(str, numbers))


# --- what is compiled: a call is a name and a function that makes tensors and calls the operation

Call = tuple[str, Callable[[], None]]


def calls(
    widths: tuple[Name, ...], dims: tuple[int, ...], selectors: tuple[Selector, ...] = SELECTORS
) -> Iterator[Call]:
    """Every call to compile; what does not depend on widths or hidden sizes comes with 16 bits, and with 4096."""
    from support import kernel_calls

    yield from kernel_calls.dense_calls(widths, dims)
    yield from kernel_calls.running_calls(widths, dims, selectors)
    yield from kernel_calls.many_calls(widths, dims, [each for each in selectors if each in ("up", "none")])
    bits = tuple(width for width in widths if isinstance(width, int))
    yield from kernel_calls.pull_calls(bits, dims)
    if 4096 in dims:
        yield from kernel_calls.latent_calls(bits)
        yield from kernel_calls.token_calls() if 16 in widths else ()
        yield from kernel_calls.mixer_calls() if 16 in widths else ()


def _model_calls() -> Iterator[Call]:
    from support import kernel_calls

    yield from kernel_calls.model_calls()


# --- how it is compiled


class _Utils:
    def __init__(self, built: list[Any]) -> None:
        self._built = built

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[device], "multiprocessor_count": NUM_SMS[device], "warpSize": 32}


class _NoLauncher:
    """Notes launches: a kernel's hash, and its number of programs."""

    noted: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, source: Any, metadata: Any) -> None:
        self._hash = metadata.hash

    def __call__(self, *args: Any, **options: Any) -> None:
        self.noted.append((self._hash, args[0] * args[1] * args[2]))


class RecordingDriver:
    """A Triton driver for a GPU of this capability: it compiles, and launches nothing."""

    launcher_cls = _NoLauncher

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = _Utils([])

    def get_current_device(self) -> int:
        """Device numbers are capabilities: each has its own compiled kernels."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_calls(
    capability: int, chosen: list[Call], with_instructions: bool, is_each: bool = False
) -> Iterator[Compiled]:
    """What each call compiles for a GPU, a kernel once; if `is_each`, for each of its launches."""
    import triton
    from triton.runtime.driver import driver

    found: dict[str, tuple[str, Any]] = {}
    driver.set_active(RecordingDriver(capability))

    def keep(**event: Any) -> None:
        fn, device = event["fn"].jit_function, event["compile"]["device"]
        built = fn.device_caches[device][0][event["key"]]
        found[built.metadata.hash] = (fn.__name__, built)

    triton.knobs.runtime.jit_post_compile_hook = keep
    for name, call in chosen:
        _NoLauncher.noted.clear()
        if not is_each:
            found.clear()
        call()
        programs = dict(_NoLauncher.noted)
        for hashed in dict(_NoLauncher.noted) if is_each else found:
            kernel, built = found[hashed]
            yield _described(name, kernel, capability, built, with_instructions, programs.get(hashed, 0))


def _described(call: str, kernel: str, capability: int, built: Any, with_instructions: bool, programs: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name) if with_instructions else ""
    usages = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    flushes = len(re.findall(r"\b(?:add|sub|mul|fma)(?:\.\w+)*\.ftz\.f32", built.asm["ptx"]))
    return Compiled(
        call, kernel, capability, built.metadata.num_warps, usages["REG"], usages["STACK"], usages["LOCAL"],
        usages["SHARED"], built.metadata.shared, flushes, loads_by_function(built.asm["ptx"]),
        dict(Counter(name for _, name, _ in instructions_of(sass))), product_step(sass),
        before_wait(built.asm["ptx"]), programs,
    )  # fmt: skip


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)([^;/]*)")
_PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA", "IMMA")  # of tensor cores: sm_90; sm_80 to 89 and 120; sm_100


def instructions_of(sass: str) -> list[tuple[int, str, str]]:
    """Address, name and the rest of each instruction."""
    return [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(sass)]


def product_step(sass: str) -> dict[str, int]:
    """Instructions of the shortest loop with products of tensor cores: "all" of them, and each kind of product."""
    instructions = instructions_of(sass)
    loops = []
    for at, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)(?:\s+\?\w+)?$", rest.strip())  # sm_120 has a note behind it
        if name == "BRA" and target is not None and int(target[1], 16) <= at:
            inside = [each for begin, each, _ in instructions if int(target[1], 16) <= begin <= at]
            if any(each in _PRODUCTS for each in inside):
                loops.append(inside)
    if not loops:
        return {}
    shortest = min(loops, key=len)
    return {"all": len(shortest), **{name: shortest.count(name) for name in _PRODUCTS if name in shortest}}


_LINE = re.compile(r"\.loc\s+\d+ \d+ \d+\s+// (\w+)\.py:(\d+)")
_LOAD = re.compile(r"ld\.global(?:[.:]+\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\s")
_STORE = re.compile(r"\b(?:st|atom|red)\.global")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+|\d+)")


def loads_by_function(ptx: str) -> dict[str, int]:
    """Loads of global memory in PTX, by the function and the bytes loaded at once; the compiler notes lines there."""
    function, found = "", Counter[str]()
    for line in ptx.splitlines():
        if noted := _LINE.search(line):
            function = _function_at(noted[1], int(noted[2]))
        if load := _LOAD.search(line):
            found[f"{function} {int(load[1] or 1) * int(load[2]) // 8}"] += 1
        elif copy := _COPY.search(line):
            found[f"{function} {int(copy[1], 0)}"] += 1
    return dict(found)


def before_wait(ptx: str) -> tuple[int, int] | None:
    """Loads of global memory, and stores and atomic operations, before the first wait for earlier launches."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return None
    return len(_LOAD.findall(before)) + len(_COPY.findall(before)), len(_STORE.findall(before))


def _function_at(module: str, line: int) -> str:
    """The function of a module of kernels in which a line stands; of other modules the module."""
    return next((name for name, begin, end in _functions(module) if begin <= line <= end), module)


@cache
def _functions(module: str) -> list[tuple[str, int, int]]:
    from moe_pack.runtime.gpu import kernels

    path = next(Path(kernels.__file__).parent.rglob(f"{module}.py"), None)
    if path is None:
        return []
    nodes = ast.parse(path.read_text()).body
    return [(n.name, n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, ast.FunctionDef)]


def _cuobjdump(option: str, path: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--widths", default=_listed(WIDTHS))
    parser.add_argument("--dims", default=_listed(DIMS))
    parser.add_argument("--selectors", default=",".join(SELECTORS))
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("capabilities", nargs="*", type=int, default=CAPABILITIES)
    given = parser.parse_args()
    widths = tuple(int(name) if name.isdigit() else name for name in given.widths.split(","))
    dims = tuple(map(int, given.dims.split(",")))
    selectors = tuple(selector for selector in SELECTORS if selector in given.selectors.split(","))
    parts = given.only.split(",")
    every = _model_calls() if given.models else calls(widths, dims, selectors)
    chosen = [call for call in every if any(part in call[0] for part in parts)]
    for capability in given.capabilities:
        for kernel in compile_calls(capability, chosen, given.instructions, given.models):
            sys.stdout.write(json.dumps(asdict(kernel)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
