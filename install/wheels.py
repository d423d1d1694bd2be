"""Builds a wheel for each Linux that is supported, on any of them: `make wheels`, or `python install/wheels.py FOLDER`.

The compiler is zig's, which brings the headers and the C++ library of every target; the C++ library is linked into the
extension, and of the system only glibc is needed. One wheel serves every Python from 3.11 on. `auditwheel` reads the
symbols that the extension needs, and names the oldest systems that have them in the wheel's name.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"  # of 2018: Debian 10, Ubuntu 18.10, RHEL 8; torch needs it too


MACHINES = ("x86_64", "aarch64")  # as in wheels' names


def environment_for(machine: str) -> dict[str, str]:
    """Returns the variables with which setuptools builds for a machine."""
    zig = f"{sys.executable} -m ziglang"
    compiler = f"{zig} c++ -target {machine}-linux-gnu.{GLIBC}"
    return {
        **os.environ,
        **dict.fromkeys(("CC", "CXX"), compiler),
        **dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{compiler} -shared"),
        "AR": f"{zig} ar",
        "CFLAGS": "",
        "LDFLAGS": "-s",
        "MOE_PACK_NATIVE": "required",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }


def run_python(module: str, *arguments: str, environment: dict[str, str]) -> None:
    """Runs a module of this Python; raises subprocess.CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=environment)


def build(machine: str, folder: Path) -> Path:
    """Builds the wheel for a system from the files that git lists, and returns its path in `folder`.

    Raises:  subprocess.CalledProcessError if a program fails; ValueError if the wheel needs a newer system.
    """
    environment = environment_for(machine)
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "built"
        subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
        options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", str(built))
        run_python("pip", "wheel", *options, str(source), environment=environment)
        (plain,) = built.iterdir()
        before = set(folder.glob("*.whl"))
        run_python("auditwheel", "repair", "--plat", "auto", "-w", str(folder), str(plain), environment=environment)
        tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        tagged = f"{plain.name.removesuffix(f'-linux_{machine}.whl')}-{tag}.whl"
        wheel = folder / tagged
        if not wheel.is_file():
            made = sorted(path.name for path in set(folder.glob("*.whl")) - before)
            raise ValueError(f"{', '.join(made) or 'no wheel'}: expected {tagged}; a source needs a newer glibc")
    check(wheel, machine)
    return wheel


def check(wheel: Path, machine: str) -> None:
    """Raises ValueError unless the extension in a wheel is for this machine and needs no library but glibc's."""
    with ZipFile(wheel) as files:
        name = next((name for name in files.namelist() if name.endswith("/_native.abi3.so")), None)
        if name is None or "-abi3-" not in wheel.name:
            raise ValueError(f"{wheel.name}: has no extension for every Python")
        raw = files.read(name)
    found = {62: "x86_64", 183: "aarch64"}.get(int.from_bytes(raw[18:20], "little"))  # e_machine of the ELF header
    if found != machine:
        raise ValueError(f"{wheel.name}: its extension is for {found}")
    others = set(re.findall(rb"\0(lib[\w+-]+\.so[.\d]*)(?=\0)", raw)) - {b"libm.so.6", b"libc.so.6"}
    if others := {name for name in others if not name.startswith((b"libpthread", b"libdl", b"librt"))}:
        raise ValueError(f"{wheel.name}: needs {', '.join(sorted(name.decode() for name in others))}")


def main() -> None:
    """Builds all wheels into the folder that the command line names."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "wheels").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for machine in MACHINES:
        wheel = build(machine, folder)
        sys.stdout.write(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
