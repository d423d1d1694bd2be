"""Runs one part of `make gpu-check` in a process of its own: `gpu_part.py NAME FILE`; gpu_check.py calls it."""

import importlib
import os
import sys
import time
from pathlib import Path

import torch
from gpu_clock import Clock
from gpu_results import Results, now, setting


def main(name: str, path: Path, is_rehearsal: bool) -> int:
    """Runs a part and writes its file; 1 if something in it failed."""
    results = Results(path, name, is_rehearsal, setting(is_rehearsal), ["make", "gpu-check", f"PART={name}"], now())
    clock = Clock(torch.device("cpu" if is_rehearsal else "cuda"), is_rehearsal)
    start = time.perf_counter()
    results.write()
    results.section("part", lambda: importlib.import_module(f"gpu_{name}").run(results, clock))
    results.state, results.seconds = "failed" if results.errors else "done", time.perf_counter() - start
    results.write()
    return 1 if results.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), os.environ.get("TRITON_INTERPRET") == "1"))
