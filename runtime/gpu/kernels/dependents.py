"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for it within.

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

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime.driver import driver

from moe_pack.runtime.gpu.kernels.grids import INTERPRETED

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


def launch_options() -> dict[str, bool]:
    """Returns the options of a launch of a kernel that calls `wait_for_earlier`."""
    return {"launch_pdl": True} if _is_chained else {}


def _is_supported() -> bool:
    return INTERPRETED or int(driver.active.get_current_target().arch) >= _LEAST_CAPABILITY


@triton.jit
def wait_for_earlier():
    """Waits until all earlier launches of the chain have ended, and lets the next one start."""
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()
