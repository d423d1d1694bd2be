"""Builds the native kernels in place where nothing can be installed: as setup.py says, with all cores, no network."""

import runpy
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

_ROOT = Path(__file__).parents[1]
_OBJECTS = _ROOT / "build" / "native"


def main() -> None:
    """Compiles what is not newer than its sources, and links it into runtime/."""
    with patch("setuptools.setup") as setup:  # which would read pyproject.toml, for a newer setuptools than may be here
        runpy.run_path(str(_ROOT / "setup.py"))
    (extension,) = setup.call_args.kwargs["ext_modules"]
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


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as fault:
        sys.exit(f"the native kernels could not be built; the runtime does without: {fault}")
