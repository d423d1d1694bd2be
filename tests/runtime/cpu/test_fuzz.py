"""The native kernels on random bytes under sanitizers, for a few seconds; `make fuzz` takes longer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "native"


@pytest.mark.slow
def test_random_layouts_bytes_and_arguments_break_nothing() -> None:
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("no g++ and make: kernels cannot be built with sanitizers")
    command = ["make", "-C", str(FOLDER), "-j2", "SECONDS=5", f"PYTHON={sys.executable}", "run"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
