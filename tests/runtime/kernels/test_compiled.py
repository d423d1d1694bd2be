"""Kernels compiled for GPUs: no registers spilled, and codes loaded as wide as they lie."""

import pytest
from compiled_kernels import CAPABILITIES, DIMS, WIDTHS, Compiled, compiled

CODE_LOADS = {1: "v2.b32", 3: "v2.b32"}  # of the other widths: 128 bits; blocks of 3-bit codes are 24 bytes


def faults(kernels: list[Compiled]) -> list[str]:
    """What is wrong with kernels that read rows of the width their call names."""
    wrong = [
        f"{k.call}, {k.kernel}, sm_{k.capability}: spills"
        for k in kernels
        if k.stack_bytes or k.local_bytes or k.spilled_bytes
    ]
    for k in kernels:
        width = next((int(word[1:]) for word in k.call.split() if word[0] == "w" and word[1:].isdigit()), None)
        reads_rows = k.kernel in ("_gemv", "_gather_row", "_select", "_neurons")
        if width is not None and reads_rows and CODE_LOADS.get(width, "v4.b32") not in k.loads:
            wrong.append(f"{k.call}, {k.kernel}, sm_{k.capability}: loads {k.loads}")
    return wrong


def test_kernels_of_four_bits_compile_without_spills_and_load_128_bits() -> None:
    kernels = compiled((90,), "up", (4,), (4096,))
    assert {k.kernel for k in kernels} == {"_select", "_neurons", "_reduce"}
    assert faults(kernels) == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_compiles_for_every_gpu_without_spills_and_loads_codes_wide(capability: int, width: int) -> None:
    assert faults(compiled((capability,), "", (width,), DIMS)) == []
