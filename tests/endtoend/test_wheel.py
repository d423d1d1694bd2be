"""The wheel, installed without extras into an empty virtual environment, runs packs."""

import subprocess
import sys
from pathlib import Path

import pytest
from models import TESTS, PackMaker

ROOT = TESTS.parent


def call(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow  # installs torch anew
def test_the_wheel_without_extras_runs_a_pack(demo_pack: PackMaker, tmp_path: Path) -> None:
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", tmp_path / "wheels", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "wheels").iterdir()
    call(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    call(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    installed = call(programs / "pip", "list", "--format=freeze", cwd=tmp_path)
    for extra in ("hqq", "transformers", "datasets", "pytest", "accelerate"):
        assert f"\n{extra}==" not in f"\n{installed}"
    packed = demo_pack("up", 4)
    text = call(programs / "moe-run", packed, "--prompt", "It was", "--temperature", 0, "-n", 12, cwd=tmp_path)
    assert len(text.split()) > 3
    assert "whole" in call(programs / "moe-pack", "verify", packed, cwd=tmp_path)
    assert "selector up" in call(programs / "moe-pack", "inspect", packed, cwd=tmp_path)
    site = call(programs / "python", "-c", "import moe_pack.runtime as r; print(r.__file__)", cwd=tmp_path)
    assert str(tmp_path / "venv") in site
