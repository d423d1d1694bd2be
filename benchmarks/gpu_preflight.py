"""Part `preflight`: is this machine fit for `make gpu-check`? A minute lost here saves half an hour.

Each check is a row that says what was found, and what to do where it is not enough. A required thing that is missing
ends the whole call; a missing tool only costs the part that needs it.
"""

import importlib
import mmap
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_clock import Clock
from gpu_packs import MEMORY
from gpu_results import Results

from moe_pack.runtime.engine import LEAST_CAPABILITY
from moe_pack.runtime.native_kernels import is_available, why_unavailable

_GIB = 1 << 30
_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "click", "tqdm")
_LEAST_VERSIONS = {"torch": (2, 6), "triton": (3, 6)}
# Of the largest pack, which is kept in memory once as files and once page-locked.
_PACK_BYTES = 20 * _GIB
_TOOL_FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*", "/opt/nvidia/nsight-compute/*/target/*")


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was looked at. `advice`: what to do where it is not `ok`."""

    name: str
    found: str
    ok: bool
    required: bool
    advice: str = ""


class UnfitError(Exception):
    """This machine cannot run the checks."""


def run(results: Results, clock: Clock) -> None:
    """Looks at everything, then fails if something required is missing.

    Raises:  UnfitError, with what to do about each.
    """
    checks: list[Callable[[], Check]] = [partial(_package, name) for name in _PACKAGES]
    checks += [_native_kernels, partial(_tool, "compute-sanitizer"), partial(_tool, "ncu"), _room, _host_memory]
    if not clock.is_rehearsal:
        checks = [*checks, _capability, partial(_card_memory, clock)]
    checks.append(partial(_page_lock, clock))
    wrong = []
    for check in checks:
        found = check()
        results.add(replace(found, advice="") if found.ok else found)
        if found.required and not found.ok:
            wrong.append(f"{found.name}: {found.found}; {found.advice}")
    if wrong:
        raise UnfitError("this machine is not fit: " + " | ".join(wrong))


def find_tool(name: str) -> str | None:
    """The path of one of NVIDIA's tools, on the PATH or where they are usually installed."""
    found = shutil.which(name)
    if found is not None:
        return found
    paths = [path for pattern in _TOOL_FOLDERS for path in sorted(Path("/").glob(f"{pattern[1:]}/{name}"))]
    return str(paths[-1]) if paths else None


def _package(name: str) -> Check:
    try:
        importlib.import_module(name)
        found = version(name)
    except (ImportError, PackageNotFoundError) as fault:
        return Check(f"package {name}", str(fault), False, True, f"install {name}")
    least = _LEAST_VERSIONS.get(name, (0,))
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    advice = f"install {name} {'.'.join(map(str, least))} or later"
    return Check(f"package {name}", found, numbers >= least, True, advice)


def _native_kernels() -> Check:
    why = "" if is_available() else why_unavailable()
    advice = "install g++ 9 or later; without them the CPU computes by torch, and reads wait for one another"
    return Check("native kernels", why or "built", not why, False, advice)


def _tool(name: str) -> Check:
    found = find_tool(name)
    return Check(name, found or "not found", found is not None, False, "install the CUDA toolkit, or add it to PATH")


def _room() -> Check:
    """Packs lie in /dev/shm, or where there is not enough of it on the disk."""
    free = {str(folder): shutil.disk_usage(folder).free for folder in (MEMORY, Path()) if folder.exists()}
    text = ", ".join(f"{folder} {num_bytes / _GIB:.0f} GiB" for folder, num_bytes in free.items())
    ok = max(free.values()) >= _PACK_BYTES
    return Check(
        "room for packs", text, ok, False, f"make {_PACK_BYTES // _GIB} GiB free, or leave out mixtral and qwen3"
    )


def _host_memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A virtual machine may be given more only as it is used: what it has now decides nothing.
    return Check("host memory", f"{total / _GIB:.0f} GiB now", total >= 2 * _PACK_BYTES, False, "fewer layers may fit")


def _capability() -> Check:
    facts = torch.cuda.get_device_properties(0)
    found, needed = (facts.major, facts.minor), ".".join(map(str, LEAST_CAPABILITY))
    text = f"{facts.name}, {facts.major}.{facts.minor}"
    return Check("compute capability", text, found >= LEAST_CAPABILITY, True, f"use a GPU of {needed} or later")


def _card_memory(clock: Clock) -> Check:
    free, total = torch.cuda.mem_get_info(clock.device)
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    return Check("GPU memory", text, free >= 14 * _GIB, False, "budgets that it does not have fail")


def _page_lock(clock: Clock) -> Check:
    """1 GiB of our own mapping is page-locked, and copied to the GPU as it was written."""
    num_bytes = (1 << 20) if clock.is_rehearsal else _GIB
    host = torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))
    host[:] = torch.arange(num_bytes // 256).to(torch.uint8).repeat_interleave(256)
    start = time.perf_counter()
    if not clock.is_rehearsal:
        status = int(cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0))
        if status:
            advice = "raise the limit of locked memory (ulimit -l)"
            return Check("page-locking 1 GiB", f"cudaHostRegister returned {status}", False, True, advice)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    there = host.to(clock.device, non_blocking=True).clone()
    clock.synchronize()
    rate = num_bytes / (time.perf_counter() - start)
    is_same = torch.equal(there.cpu(), host)
    if not clock.is_rehearsal:
        cudart().cudaHostUnregister(host.data_ptr())
    text = f"locked in {seconds:.2f} s, copied at {rate / 1e9:.1f} GB/s, {'the same' if is_same else 'other'} bytes"
    return Check("page-locking 1 GiB", text, is_same, True, "the link returns other bytes: use another machine")


def cudart() -> Any:
    """CUDA's runtime, as torch has it."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
