"""The wheel, installed without extras into an empty virtual environment, runs packs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.models import TESTS, PackMaker
from support.native import quick_compiler

ROOT = TESTS.parent


NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}


def call(*command: object, cwd: Path, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | (more or {})
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def build(folder: Path, more: Mapping[str, str] | None = None) -> Path:
    """A wheel from a copy of the repository's tracked files, in which nothing was built before."""
    source = folder / "source"
    call("git", "clone", "--quiet", ROOT, source, cwd=folder)
    command = ("-m", "pip", "wheel", "--no-deps", "--quiet", "-w", folder / "wheels", source)
    call(sys.executable, *command, cwd=folder, more=more)
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new virtual environment, empty but for pip."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    return folder / "venv" / "bin"


def install(wheel: Path, programs: Path) -> None:
    """Installs the wheel without extras, in place of one that is there; what it requires is installed once."""
    pip = (programs / "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt")
    call(*pip, wheel, cwd=wheel.parent)
    call(*pip, "--force-reinstall", "--no-deps", wheel, cwd=wheel.parent)


@pytest.mark.slow  # installs torch
def test_the_wheel_without_extras_runs_a_pack(demo_pack: PackMaker, programs: Path, tmp_path: Path) -> None:
    compiler = str(quick_compiler(tmp_path)) if shutil.which("g++") else None
    wheel = build(tmp_path, {"CC": compiler, "CXX": compiler} if compiler else None)
    install(wheel, programs)
    installed = call(programs / "pip", "list", "--format=freeze", cwd=tmp_path).stdout
    for extra in ("hqq", "transformers", "datasets", "pytest", "accelerate"):
        assert f"\n{extra}==" not in f"\n{installed}"
    packed = demo_pack("up", 4)
    run = call(
        programs / "moe-run", packed, "--prompt", "It was", "--temperature", 0, "-n", 12, "--stats", cwd=tmp_path
    )
    assert len(run.stdout.split()) > 3
    if compiler:
        assert "-cp311-abi3-" in wheel.name  # one wheel for every Python from 3.11 on
        assert any(name.endswith("/_native.abi3.so") for name in ZipFile(wheel).namelist())
        assert "native kernels, " in run.stderr and "not built" not in run.stderr
    assert ": intact; " in call(programs / "moe-pack", "verify", packed, cwd=tmp_path).stdout
    assert "selector up" in call(programs / "moe-pack", "inspect", packed, cwd=tmp_path).stdout
    site = call(programs / "python", "-c", "import moe_pack.runtime as r; print(r.__file__)", cwd=tmp_path).stdout
    assert str(programs.parent) in site


@pytest.mark.slow  # installs torch
def test_without_a_compiler_the_installation_works_and_says_what_it_lacks(
    demo_pack: PackMaker, programs: Path, tmp_path: Path
) -> None:
    wheel = build(tmp_path, NO_COMPILER)
    assert not any("_native" in name and name.endswith(".so") for name in ZipFile(wheel).namelist())
    install(wheel, programs)
    command = (programs / "moe-run", demo_pack("up", 4), "--prompt", "It was", "--temperature", 0, "-n", 3, "--stats")
    run = call(*command, cwd=tmp_path)
    assert run.stdout.strip()
    assert "native kernels were not built; install a C++ compiler, then install moe-pack again" in run.stderr


def test_an_extension_that_does_not_compile_leaves_no_older_one_behind(tmp_path: Path) -> None:
    call("git", "clone", "--quiet", ROOT, tmp_path / "source", cwd=tmp_path)
    older = tmp_path / "source" / "runtime" / "cpu" / "_native.abi3.so"
    older.write_bytes(b"of other sources")
    build_there = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    done = call(*build_there, cwd=tmp_path / "source", more=NO_COMPILER)
    assert not older.exists()
    assert "_native.abi3.so, which was built from other sources" in done.stderr

    environment = os.environ | NO_COMPILER | {"MOE_PACK_NATIVE": "required"}
    must = subprocess.run(build_there, cwd=tmp_path / "source", env=environment, capture_output=True, text=True)
    assert must.returncode != 0 and "/nowhere/c++" in must.stderr
