"""Compiles llama.cpp's CUDA code for H100 and H200, without a GPU, and packs it for `make gpu-check PART=llama`.

    python tests/bench/llama_cuda.py

The sources are those of llama-cpp-python's source distribution; cuBLAS comes from its package, the compiler from CUDA
13. Compiled are llama-bench and the kernels that Mixtral and Qwen3 run in Q4_0 on one GPU: other operations, types and
head sizes are left out. A call of one that is left out ends llama-bench with the function's name. A run that was
stopped goes on where it was. The archive has the program, its libraries and the package gguf, which writes models.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "llama-cuda"
ARCHIVE = FOLDER / "llama-cuda.tar.xz"
PROGRAM, GGUF = "llama-bench", "gguf"  # in the archive
MOST_BYTES = 40 << 20  # of the archive
_SOURCE, _CUBLAS = "llama-cpp-python==0.3.36", "nvidia-cublas==13.0.0.19"
_ARCHITECTURE = "90a-real"
_TARGETS = ("ggml-cuda", "ggml-cpu-haswell", "ggml-cpu-zen4", PROGRAM)
_CPUS = ("haswell", "zen4")  # the CPU's code with AVX2, and with AVX-512
# Sources of a decoder layer with experts, and of those in template-instances. Attention has heads of 128 values, and 4
# (Mixtral) or 8 (Qwen3) query heads a head of keys.
_OPERATIONS = frozenset(
    (
        *(
            "argsort",
            "binbcast",
            "clamp",
            "convert",
            "cpy",
            "fattn",
            "fwht",
            "getrows",
            "ggml-cuda",
            "mmf",
            "mmid",
            "mmq",
        ),
        *("mmvf", "mmvq", "moe-weighted-reduction", "norm", "quantize", "rope", "scale", "set-rows", "softmax"),
        *("sumrows", "topk-moe", "unary"),
    )
)
_INSTANCES = frozenset(
    (
        "fattn-mma-f16-instance-ncols1_16-ncols2_4",
        "fattn-mma-f16-instance-ncols1_8-ncols2_8",
        "fattn-vec-instance-f16-f16",
        "mmq-instance-q4_0",
    )
)
_OTHER_HEADS = re.compile(r"^DECL_FATTN_MMA_F16_CASE\((?!128, 128,).*\n", re.MULTILINE)
_OTHER_CPUS = re.compile(rf"^ *ggml_add_cpu_backend_variant\((?!(?:{'|'.join(_CPUS)})\b).*\n", re.MULTILINE)


def fetch(folder: Path) -> None:
    """Downloads the sources and cuBLAS, unless they are there."""
    sources, cublas = folder / "llama.cpp", folder / "cublas"
    if not sources.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), _SOURCE], check=True)
        (package,) = folder.glob("llama_cpp_python-*.tar.gz")
        unpack(package, sources)
    if not cublas.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{cublas}.partial"]
        subprocess.run([*pip, _CUBLAS], check=True)
        Path(f"{cublas}.partial").rename(cublas)


def unpack(package: Path, sources: Path) -> None:
    """Unpacks llama.cpp from a source distribution, and removes what the table does not need."""
    partial = sources.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(package) as archive:
        for member in archive:
            top, _, name = member.name.partition("/vendor/llama.cpp/")
            if name and "/" not in top:
                archive.extract(member.replace(name=name), partial, filter="data")
    leave_out(partial)
    partial.rename(sources)


def leave_out(sources: Path) -> None:
    """Removes kernels and CPUs that the table does not need; libraries then load without the functions."""
    cuda = sources / "ggml" / "src" / "ggml-cuda"
    for folder, kept in ((cuda, _OPERATIONS), (cuda / "template-instances", _INSTANCES)):
        paths = {path.stem: path for path in folder.glob("*.cu")}
        if missing := sorted(kept - set(paths)):
            raise click.ClickException(f"{folder}: found no {', '.join(missing)}; this llama.cpp is not {_SOURCE}")
        for name in set(paths) - kept:
            paths[name].unlink()
    for path in (cuda / "template-instances").glob("fattn-mma-*.cu"):
        _edit(path, _OTHER_HEADS, "")
    _edit(sources / "ggml" / "src" / "CMakeLists.txt", _OTHER_CPUS, "")
    _edit(sources / "ggml" / "src" / "ggml-backend-dl.cpp", re.compile("RTLD_NOW"), "RTLD_LAZY")


def _edit(path: Path, pattern: re.Pattern[str], replacement: str) -> None:
    text, count = pattern.subn(replacement, path.read_text("utf-8"))
    if not count:
        raise click.ClickException(f"{path}: found no {pattern.pattern}; this llama.cpp is not {_SOURCE}")
    path.write_text(text, "utf-8")


def find_nvcc() -> Path:
    """Returns CUDA's compiler, on the PATH or in /usr/local.

    Raises:  ClickException if there is none.
    """
    found = sorted(Path("/usr/local").glob("cuda-13*/bin/nvcc"))
    if found:
        return found[-1]
    on_path = shutil.which("nvcc")
    if on_path is None:
        raise click.ClickException("found no nvcc; install CUDA 13's compiler, or add it to PATH")
    return Path(on_path).resolve()


def configure_command(folder: Path, nvcc: Path) -> list[str]:
    """Returns the command of CMake. The driver's library, which only a GPU's machine has, is an empty one here."""
    cuda = folder / "cublas" / "nvidia" / "cu13"
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": "$ORIGIN",
        "CMAKE_MODULE_LINKER_FLAGS": "-Wl,-z,lazy,--no-as-needed",
        "CMAKE_CUDA_COMPILER": nvcc,
        "CMAKE_CUDA_ARCHITECTURES": _ARCHITECTURE,
        "CMAKE_CUDA_FLAGS": f"-I{cuda / 'include'}",
        "CUDA_cublas_LIBRARY": cuda / "lib" / "libcublas.so.13",
        "CUDA_cuda_driver_LIBRARY": folder / "driver" / "libcuda.so",
        "GGML_CCACHE": "OFF",
        "GGML_NATIVE": "OFF",
        "GGML_BACKEND_DL": "ON",
        "GGML_CPU_ALL_VARIANTS": "ON",
        "GGML_CUDA": "ON",
        "GGML_CUDA_NCCL": "OFF",
        "GGML_CUDA_FA_QUANTS": "f16-f16",
        "GGML_CUDA_COMPRESSION_MODE": "size",
        "LLAMA_BUILD_SERVER": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_COMMIT": _SOURCE.replace("==", "-"),
        "LLAMA_BUILD_NUMBER": "0",
    }
    command = ["cmake", "-S", str(folder / "llama.cpp"), "-B", str(folder / "objects"), "-G", "Ninja"]
    return [*command, *(f"-D{name}={value}" for name, value in options.items())]


def compile_all(folder: Path, jobs: int) -> None:
    """Configures and compiles at the lowest priority; only what is not there yet."""
    driver = folder / "driver" / "libcuda.so"
    if not driver.exists():
        driver.parent.mkdir(exist_ok=True)
        link = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(driver)]
        subprocess.run(link, check=True)
    # llama.cpp would else take the commit of the repository around it for its own.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder)}
    if not (folder / "objects" / "build.ninja").exists():
        subprocess.run(configure_command(folder, find_nvcc()), check=True, env=environment)
    ninja = ["nice", "-n", "19", "ninja", "-C", str(folder / "objects"), "-j", str(jobs), *_TARGETS]
    subprocess.run(ninja, check=True, env=environment)


def left_out(cuda_library: Path) -> list[str]:
    """Returns llama.cpp's own functions that a library needs and nobody has, without their arguments.

    Raises:  ClickException if one of them is asked for every graph whether an operation may run.
    """
    listed = subprocess.run(["nm", "-DCu", str(cuda_library)], check=True, capture_output=True, text=True).stdout
    names = sorted(set(re.findall(r"\b((?:ggml_cuda|mul_mat)_\w+)[<(]", listed)))
    if asked := [name for name in names if re.search(r"_(?:use|should|can)_", name)]:
        raise click.ClickException(f"{cuda_library.name} needs {', '.join(asked)}; keep their sources")
    return names


def members(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields the files of the archive, and their names in it."""
    binaries, sources = folder / "objects" / "bin", folder / "llama.cpp"
    yield binaries / PROGRAM, PROGRAM
    for pattern in ("lib*.so.0", "libggml-c*.so", "libllama-bench-impl.so"):
        for path in sorted(binaries.glob(pattern)):
            yield path.resolve(), path.name
    for path in sorted((sources / "gguf-py" / "gguf").glob("*.py")):
        yield path, f"{GGUF}/{path.name}"
    yield sources / "LICENSE", "LICENSE"


def write_archive(folder: Path, target: Path) -> int:
    """Writes the archive, the same bytes for the same files; returns its size in bytes."""
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9) as archive:
        for path, name in members(folder):
            facts = archive.gettarinfo(path, name)
            facts.mode = 0o755 if facts.mode & 0o100 else 0o644
            facts.mtime, facts.uid, facts.gid, facts.uname, facts.gname = 0, 0, 0, "", ""
            with path.open("rb") as content:
                archive.addfile(facts, content)
    partial.rename(target)
    return target.stat().st_size


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=FOLDER,
    help="Where sources, objects and the archive lie.  [default: build/llama-cuda]",
)
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Compilers at a time.")
def main(folder: Path, jobs: int) -> None:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    fetch(folder)
    compile_all(folder, jobs)
    library = folder / "objects" / "bin" / "libggml-cuda.so"
    click.echo(f"left out: {', '.join(left_out(library))}")
    target = folder / ARCHIVE.name
    num_bytes = write_archive(folder, target)
    click.echo(f"{target}: {num_bytes / (1 << 20):.1f} MiB, {time.monotonic() - start:.0f} s")
    if num_bytes > MOST_BYTES:
        raise click.ClickException(f"the archive may have {MOST_BYTES >> 20} MiB to be carried")


if __name__ == "__main__":
    main()
