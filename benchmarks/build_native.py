"""Builds the native kernels in place where nothing can be installed: as setup.py says, with all cores, no network."""

import runpy
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

_ROOT = Path(__file__).parents[1]
_OBJECTS = _ROOT / "build" / "native"


def main() -> None:
    """Compiles what is not newer than its sources, and links it into runtime/."""
    extension = _extension()
    target = _ROOT / "runtime" / "_native.abi3.so"
    native = [*(_ROOT / "runtime" / "native").iterdir(), _ROOT / "setup.py"]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in native):
        return
    _OBJECTS.mkdir(parents=True, exist_ok=True)
    defines = [f"-D{name}={value}" for name, value in extension.define_macros]
    options = [*extension.extra_compile_args, *defines, "-fPIC", f"-I{sysconfig.get_path('include')}"]

    def compiled(source: str) -> str:
        made = str(_OBJECTS / f"{Path(source).stem}.o")
        subprocess.run(["g++", *options, "-c", str(_ROOT / source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, extension.sources))
    beside = target.with_suffix(".partial")
    subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", str(beside)], check=True)
    beside.replace(target)


def _extension() -> SimpleNamespace:
    """The extension as setup.py describes it: by keyword, `sources` among them. No setuptools is needed for that."""
    described: list[SimpleNamespace] = []

    def describe(name: str, sources: list[str], **options: Any) -> SimpleNamespace:
        described.append(SimpleNamespace(name=name, sources=sources, **options))
        return described[0]

    stands_in = ModuleType("setuptools")
    stands_in.__dict__.update(Extension=describe, setup=lambda **options: None)
    with patch.dict(sys.modules, setuptools=stands_in):
        runpy.run_path(str(_ROOT / "setup.py"))
    return described[0]


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as fault:
        sys.exit(f"the native kernels could not be built; the runtime does without: {fault}")
