"""Runs one part of `make gpu-check` in a process of its own; gpu_check.py calls `part.py NAME FILE REVISION`."""

import importlib
import os
import sys
import time
from pathlib import Path

import torch
from gpu_check import PARTS, Part

from gpu.measuring import Clock, Results, now, setting


def main(name: str, path: Path, revision: str, is_rehearsal: bool) -> int:
    """Runs a part and writes its file; 1 if something in it failed."""
    part = PARTS.get(name) or Part(0, 0.0, f"gpu_{name}")
    command = ["make", "gpu-check", f"PART={name}"]
    results = Results(path, name, is_rehearsal, setting(is_rehearsal, revision), command, now())
    clock = Clock(torch.device("cpu" if is_rehearsal else "cuda"), is_rehearsal)
    start = time.perf_counter()
    results.write()
    results.section("part", lambda: getattr(importlib.import_module(part.module), part.function)(results, clock))
    results.state, results.seconds = "failed" if results.errors else "done", time.perf_counter() - start
    results.write()
    return 1 if results.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], os.environ.get("TRITON_INTERPRET") == "1"))
