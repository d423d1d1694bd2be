"""`make gpu-check`: what only a GPU can show, in two calls: eight minutes at most, then five; a third one by name.

Each part of a call has a process, a time limit and a file of its own, which is whole after every row: a part that dies
or runs out of time costs the others nothing. Nothing is installed: the rooms are linked under build/rooms, and the
native kernels are built in place where there is a compiler. Without a GPU it is a rehearsal at tiny sizes, with kernels
by Triton's interpreter: it shows that the parts run, never how fast.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
from gpu.measuring import combined, gpu_slug, has_gpu, setting

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[1]
_OBJECTS = _ROOT / "build" / "native"


def build_native() -> None:
    """Compiles what is not newer than its sources, and links it into runtime/."""
    extension = _extension()
    target = _ROOT / "runtime" / "cpu" / "_native.abi3.so"
    native = [*(_ROOT / "runtime" / "cpu" / "native").iterdir(), _ROOT / "setup.py"]
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
    partial = target.with_suffix(".partial")
    subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", str(partial)], check=True)
    partial.replace(target)


def _extension() -> SimpleNamespace:
    """The extension as setup.py describes it: by keyword, `sources` among them. No setuptools is needed for that."""
    described: list[SimpleNamespace] = []

    def describe(name: str, sources: list[str], **options: Any) -> SimpleNamespace:
        described.append(SimpleNamespace(name=name, sources=sources, **options))
        return described[0]

    names = ("setuptools", "setuptools.command", "setuptools.command.build_ext", "setuptools.errors")
    stands_in = {name: ModuleType(name) for name in names}
    stands_in["setuptools"].__dict__.update(
        Extension=describe, find_packages=lambda **options: [], setup=lambda **options: None
    )
    stands_in["setuptools.command.build_ext"].__dict__.update(build_ext=object)
    faults = ("BaseError", "CCompilerError", "CompileError")
    stands_in["setuptools.errors"].__dict__.update(dict.fromkeys(faults, Exception))
    with patch.dict(sys.modules, stands_in):
        runpy.run_path(str(_ROOT / "setup.py"))
    return described[0]


_CALL_SECONDS = {1: 480.0, 2: 300.0, 3: 300.0}  # the first builds the native kernels too
_USUAL_CALLS = (1, 2)
_LEAST_SECONDS = 5.0  # less is no time to start a part in
_ROOMS = ("formats", "runtime", "calib", "convert")
_REHEARSAL_TIMES = 12  # the time that the interpreter may take, on a machine that does something else too


@dataclass(frozen=True, slots=True)
class Part:
    call: int
    seconds: float
    module: str
    function: str = "run"


# In the order in which they run: what others depend on, and what matters most, comes first.
PARTS = {
    "preflight": Part(1, 15, "gpu.checks", "preflight"),
    "twins": Part(1, 120, "gpu.checks", "twins"),
    "families": Part(1, 80, "gpu.several_rows", "families"),
    "mixtral": Part(1, 180, "gpu.whole_models", "mixtral"),
    "demo": Part(1, 55, "gpu.whole_models", "demo"),
    "qwen36": Part(2, 130, "gpu.whole_models", "qwen36"),
    "llama": Part(2, 100, "gpu.llama"),
    "sanitizer": Part(2, 70, "gpu.checks", "sanitize"),
    "qwen3": Part(3, 110, "gpu.whole_models", "qwen3"),
    "sweep": Part(3, 60, "gpu.kernels", "sweep"),
    "products": Part(3, 60, "gpu.kernels", "products"),
}
CALLS = sorted({part.call for part in PARTS.values()})


@dataclass(frozen=True, slots=True)
class Ended:
    name: str
    path: Path
    state: str
    num_rows: int
    seconds: float
    errors: dict[str, str]


def _listed(call: int) -> str:
    return f"Call {call}: {', '.join(name for name, part in PARTS.items() if part.call == call)}."


@click.command(epilog="\n\n".join(map(_listed, CALLS)))
@click.option("--call", "calls", default=",".join(map(str, _USUAL_CALLS)), show_default=True, help="Which calls.")
@click.option("--part", "parts", default=None, help="Which parts, with commas between.  [default: all of the calls]")
@click.option("--limit", type=float, default=None, help="Seconds for each call.  [default: 480, 300, 300]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Where the files go.  [default: $OUT, else build/gpu; build/gpu-rehearsal for a rehearsal]",
)
@click.option("--revision", default="", help="The code's commit, where git cannot tell it.")
@click.option("--rehearse", is_flag=True, help="Run as where there is no GPU.")
def main(calls: str, parts: str | None, limit: float | None, out: Path | None, revision: str, rehearse: bool) -> None:
    """Runs the parts of each call one after the other, and writes one file a call.

    Exits with 1 if a part failed, or was not done in time.
    """
    chosen = _chosen(calls, parts)
    is_rehearsal = rehearse or not has_gpu()
    if is_rehearsal:
        why = "--rehearse" if rehearse else "torch finds no CUDA device here"
        click.echo(f"{why}: a rehearsal by Triton's interpreter at tiny sizes; its times mean nothing", err=True)
    folder = out or _usual_folder(is_rehearsal)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    _prepare()
    spent = time.monotonic() - start
    gpu = setting(is_rehearsal).gpu
    slug = gpu_slug(gpu.name if gpu else None)
    ended, times = [], _REHEARSAL_TIMES if is_rehearsal else 1
    for call, names in chosen.items():
        stem = folder / f"gpu-{slug}-{time.strftime('%Y-%m-%d')}-call{call}"
        limit_s = times * (_CALL_SECONDS[call] if limit is None else limit)
        ended += run_call(names, stem, limit_s - spent, revision, is_rehearsal)
        spent = 0.0
    click.echo("\n".join(table(ended)))
    sys.exit(any(part.state != "done" for part in ended))


def _chosen(calls: str, parts: str | None) -> dict[int, list[str]]:
    wanted = [name for name in parts.split(",") if name] if parts is not None else list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise click.UsageError(f"--part: found {unknown[0]}, expected some of {', '.join(PARTS)}")
    numbers = calls.split(",")
    if wrong := [number for number in numbers if number not in map(str, CALLS)]:
        raise click.UsageError(f"--call: found {wrong[0]!r}, expected some of {', '.join(map(str, CALLS))}")
    chosen = {call: [name for name in PARTS if name in wanted and PARTS[name].call == call] for call in CALLS}
    return {call: names for call, names in chosen.items() if names and (parts is not None or str(call) in numbers)}


def _prepare() -> None:
    """Links the rooms as the package that they are when installed, and builds the native kernels; parts find both."""
    rooms = _ROOT / "build" / "rooms"
    (rooms / "moe_pack").mkdir(parents=True, exist_ok=True)
    for room in _ROOMS:
        link = rooms / "moe_pack" / room
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(_ROOT / room)
    paths = [_FOLDER, rooms, _ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    try:
        build_native()
    except (OSError, subprocess.CalledProcessError) as fault:
        click.echo(f"the native kernels could not be built; the runtime does without: {fault}", err=True)


def _usual_folder(is_rehearsal: bool) -> Path:
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"])
    return _ROOT / "build" / ("gpu-rehearsal" if is_rehearsal else "gpu")


def run_call(names: list[str], stem: Path, limit_s: float, revision: str, is_rehearsal: bool) -> list[Ended]:
    """Runs parts within their own limits and the call's; their files become one, which is whole after every part.

    If `preflight` fails, nothing else runs.
    """
    end, ended = time.monotonic() + limit_s, list[Ended]()
    whole = stem.with_name(f"{stem.name}.json")
    for name in names:
        path = stem.with_name(f"{stem.name}-{name}.json")
        part_s = PARTS[name].seconds * (_REHEARSAL_TIMES if is_rehearsal else 1)
        left = min(part_s, end - time.monotonic())
        ended.append(run_part(name, path, left, revision, is_rehearsal))
        written = [part.path for part in ended if part.path.exists()]
        if written:
            _write(whole, combined(written))
        if name == "preflight" and ended[-1].state != "done":
            click.echo("this machine cannot run the checks; the other parts do not run", err=True)
            break
    for part in ended:
        part.path.unlink(missing_ok=True)
    return ended


def run_part(name: str, path: Path, limit_s: float, revision: str, is_rehearsal: bool) -> Ended:
    """Runs a part in a process of its own; ends that and all that it started when the time is up."""
    if limit_s < _LEAST_SECONDS:
        return Ended(name, path, "not begun: no time left", 0, 0.0, {})
    click.echo(f"== {name}, {limit_s:.0f} s at most", err=True)
    path.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if is_rehearsal:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(_FOLDER / "gpu" / "part.py"), name, str(path), revision]
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, cwd=_ROOT, start_new_session=True)
    state = None
    try:
        code = process.wait(limit_s)
        if code < 0:
            state = f"died of {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        state = f"stopped after {limit_s:.0f} s"
    finally:
        _kill_session(process.pid)
        process.wait()
    return _ended(name, path, state, time.monotonic() - start)


def _kill_session(session: int) -> None:
    """Ends every process of a session: a part's tools have groups of their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == session:
            with suppress(ProcessLookupError):
                os.kill(int(stat.parent.name), signal.SIGKILL)


def _ended(name: str, path: Path, state: str | None, seconds: float) -> Ended:
    """Reads a part's file; notes in it how the part was ended, if it did not end of itself."""
    if not path.exists():
        return Ended(name, path, state or "failed before it began", 0, seconds, {})
    whole: dict[str, Any] = json.loads(path.read_text())
    if state is None and whole["state"] == "running":
        state = "died"
    if state is not None:
        whole |= {"state": state, "seconds": round(seconds, 1)}
        _write(path, whole)
    return Ended(name, path, whole["state"], len(whole["rows"]), seconds, whole["errors"])


def _write(path: Path, whole: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    partial.replace(path)


def table(ended: list[Ended]) -> list[str]:
    lines = ["| part | state | rows | seconds |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {p.name} | {p.state} | {p.num_rows} | {p.seconds:.0f} |" for p in ended]
    for part in ended:
        lines += [f"{part.name}, {name}: {text.splitlines()[-1]}" for name, text in part.errors.items()]
    return lines


if __name__ == "__main__":
    main()
