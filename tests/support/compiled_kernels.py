"""Kernels compiled for GPUs that are not here: public operations called with CPU tensors compile, and launch nothing.

Run as a program (`compiled_kernels.py [--only NAME] [--widths 2,4] [--dims 4096] CAPABILITY...`), without
TRITON_INTERPRET, it writes a JSON line for each kernel that its calls compile.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 86, 89, 90, 100)
WIDTHS = (1, 2, 3, 4, 8, 16)
DIMS = (2048, 4096, 7168)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as a GPU would run it.

    `call`: what it was compiled for.   `loads`: how many loads of global memory of each width, by PTX's name
    (`v4.b32`: 128 bits).   `stack_bytes`, `local_bytes`: not zero where registers are spilled.
    """

    call: str
    kernel: str
    capability: int
    num_warps: int
    registers: int
    stack_bytes: int
    local_bytes: int
    spilled_bytes: int
    shared_bytes: int
    loads: dict[str, int]
    instructions: dict[str, int]


def compiled(
    capabilities: tuple[int, ...], only: str, widths: tuple[int, ...], dims: tuple[int, ...]
) -> list[Compiled]:
    """What all calls whose name contains `only` compile to, in a process of its own."""
    command = [sys.executable, __file__, "--only", only, "--widths", _listed(widths), "--dims", _listed(dims)]
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [*command, *map(str, capabilities)], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


# --- what is compiled: a call is a name and a function that makes tensors and calls the operation

Call = tuple[str, Callable[[], None]]


def calls(widths: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[Call]:
    """Every call to compile; a part of the kernels adds a generator here."""
    yield from _dense_calls(widths, dims)
    yield from _expert_calls(widths, dims)


def _dense_calls(widths: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[Call]:
    import torch

    from moe_pack.formats import part_format, row_layout
    from moe_pack.runtime.kernels.codes import Part, part_of, stored_part
    from moe_pack.runtime.kernels.gemv import gather_row, gemv

    def dense(d: int, rows: torch.Tensor, part: Part) -> None:
        x, out = torch.empty(d), torch.empty(64)
        gemv(x, rows, part, out)
        gather_row(rows, part, torch.zeros(1, dtype=torch.int32), x)

    for d in dims:
        for width in widths:
            layout = row_layout([("weight", part_format(width, 64, 16), False)], d)
            rows = torch.empty(64, layout.row_bytes, dtype=torch.uint8)
            yield f"dense w{width} d{d}", partial(dense, d, rows, part_of(layout, "weight"))
        if 16 in widths:
            for name, dtype in (("F16", torch.float16), ("F32", torch.float32)):
                plain = torch.empty(64, d, dtype=dtype)
                yield f"dense {name} d{d}", partial(dense, d, plain, stored_part(name, d))


def _expert_calls(widths: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[Call]:
    import torch

    from moe_pack.formats import ExpertFormat, ExpertSpec, Selector, expert_layout, part_format
    from moe_pack.runtime.kernels.neurons import neurons
    from moe_pack.runtime.kernels.reduce import reduce
    from moe_pack.runtime.kernels.select import select
    from moe_pack.runtime.kernels.tables import LayerTables, Selection, kind_of

    def experts(d: int, width: int, selector: Selector, f: int = 768, k: int = 8) -> None:
        part = part_format(width, 64, 16)
        spec = ExpertSpec("silu", f, ("gate", "up", "down"), (), 0)
        layout = expert_layout(ExpertFormat(part, part, part), selector, spec, d)
        at = torch.zeros(16, f, dtype=torch.int32)
        kind, thresholds = torch.zeros(16, dtype=torch.int32), torch.zeros(16)
        arena = torch.empty(128, dtype=torch.uint8)
        tables = LayerTables(arena, at, at, kind, thresholds, (kind_of(layout, selector),))
        numbers, x, partials = torch.zeros(k, dtype=torch.int32), torch.empty(d), torch.empty(k, 16, d)
        selection = Selection.room(k, f, torch.device("cpu"))
        select(x, numbers, tables, selection)
        neurons(x, numbers, tables, selection, partials)
        reduce(partials, torch.empty(k), x, residual=x)

    selectors: tuple[Selector, ...] = ("up", "both", "none")
    for d in dims:
        for width in widths:
            for selector in selectors:
                yield f"expert {selector} w{width} d{d}", partial(experts, d, width, selector)


# --- how it is compiled


class _Utils:
    def __init__(self, built: list[Any]) -> None:
        self._built = built

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """What the driver says of a module it loads: module, function, registers, spills, threads at most."""
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The largest shared memory, of sm_90."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class _NoLauncher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> None:
        pass


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
        """None to speak of."""
        return 0

    def get_current_target(self) -> Any:
        """The GPU compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_calls(capability: int, chosen: list[Call]) -> Iterator[Compiled]:
    """What each call compiles for a GPU; a kernel that an earlier call compiled is not told again."""
    import triton
    from triton.runtime.driver import driver

    found: list[tuple[str, Any]] = []
    driver.set_active(RecordingDriver(capability))

    def keep(**event: Any) -> None:
        fn, device = event["fn"].jit_function, event["compile"]["device"]
        found.append((fn.__name__, fn.device_caches[device][0][event["key"]]))

    triton.knobs.runtime.jit_post_compile_hook = keep
    for name, call in chosen:
        found.clear()
        call()
        for kernel, built in found:
            yield _described(name, kernel, capability, built)


def _described(call: str, kernel: str, capability: int, built: Any) -> Compiled:
    loads = Counter(re.findall(r"ld\.global(?:\.\w+)*?\.((?:v\d\.)?b\d+)", built.asm["ptx"]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    usages = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return Compiled(
        call,
        kernel,
        capability,
        built.metadata.num_warps,
        usages["REG"],
        usages["STACK"],
        usages["LOCAL"],
        sum("LDL" in line or "STL" in line for line in sass.splitlines()),
        usages["SHARED"],
        dict(loads),
        dict(Counter(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_]+)", sass))),
    )


def _cuobjdump(option: str, path: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Compiles, and writes a JSON line a kernel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--widths", default=_listed(WIDTHS))
    parser.add_argument("--dims", default=_listed(DIMS))
    parser.add_argument("capabilities", nargs="*", type=int, default=CAPABILITIES)
    given = parser.parse_args()
    widths, dims = (tuple(map(int, text.split(","))) for text in (given.widths, given.dims))
    chosen = [call for call in calls(widths, dims) if given.only in call[0]]
    for capability in given.capabilities:
        for kernel in compile_calls(capability, chosen):
            sys.stdout.write(json.dumps(asdict(kernel)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
