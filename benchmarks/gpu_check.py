"""`make gpu-check`: all tests and measurements that need a GPU, in parts; each with a time limit and a file of its own.

Without a GPU it is a rehearsal: the same code at tiny sizes, kernels by Triton's interpreter; its files are marked, and
lie in build/. A rehearsal shows that the parts run, never how fast.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from gpu_results import card_slug, has_gpu, setting

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parent

# Seconds each part may take: on an H100 they take less; a part that hangs costs no more.
PARTS = {
    "tests": 420,
    "machine": 60,
    "kernels": 150,
    "dense": 150,
    "transfer": 90,
    "demo": 150,
    "qwen3": 300,
    "mixtral": 480,
    "accelerate": 420,
}
_LEAST_SECONDS = 5.0  # less is no time to start a part in


@dataclass(frozen=True, slots=True)
class Ended:
    """A part that ran: its file, and what that says of it."""

    name: str
    path: Path
    state: str
    num_rows: int
    seconds: float
    errors: dict[str, str]


@click.command()
@click.option("--part", "parts", default=",".join(PARTS), show_default=True, help="Which, with commas between.")
@click.option("--limit", type=float, default=None, help="Seconds for all parts together.  [default: each its own]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=None, help="Where the files go.")
@click.option("--rehearse", is_flag=True, help="As where there is no GPU.")
def main(parts: str, limit: float | None, out: Path | None, rehearse: bool) -> None:
    """Runs the parts one after the other."""
    names = [name for name in parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        raise click.UsageError(f"--part: found {unknown[0]}, expected some of {', '.join(PARTS)}")
    is_rehearsal = rehearse or not has_gpu()
    if is_rehearsal:
        why = "--rehearse" if rehearse else "torch finds no CUDA device here"
        click.echo(f"{why}: a rehearsal by Triton's interpreter at tiny sizes; its times mean nothing", err=True)
    folder = out or (_ROOT / "build" / "gpu-rehearsal" if is_rehearsal else _ROOT / "docs" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    found = setting(is_rehearsal)
    stem = f"gpu-{card_slug(found.card)}-{time.strftime('%Y-%m-%d')}"
    end = None if limit is None else time.monotonic() + limit
    ended = []
    for name in names:
        left = float(PARTS[name]) if end is None else min(PARTS[name], end - time.monotonic())
        ended.append(run_part(name, folder / f"{stem}-{name}.json", left, is_rehearsal))
    click.echo("\n".join(table(ended)))
    sys.exit(any(part.state != "done" for part in ended))


def run_part(name: str, path: Path, limit_s: float, is_rehearsal: bool) -> Ended:
    """Runs a part in a process of its own; ends that and its children when the time is up."""
    if limit_s < _LEAST_SECONDS:
        return Ended(name, path, "not begun: no time left", 0, 0.0, {})
    click.echo(f"== {name}, {limit_s:.0f} s at most", err=True)
    path.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if is_rehearsal:
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment["MOE_PACK_GPU"] = "1"
    command = [sys.executable, str(_FOLDER / "gpu_part.py"), name, str(path)]
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
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return _ended(name, path, state, time.monotonic() - start)


def _ended(name: str, path: Path, state: str | None, seconds: float) -> Ended:
    """What a part's file says; how it was ended, if it did not end of itself, is added to the file."""
    if not path.exists():
        return Ended(name, path, state or "failed before it began", 0, seconds, {})
    whole: dict[str, Any] = json.loads(path.read_text())
    if state is None and whole["state"] == "running":
        state = "died"
    if state is not None:
        whole |= {"state": state, "seconds": round(seconds, 1)}
        path.write_text(json.dumps(whole, indent=1) + "\n")
    return Ended(name, path, whole["state"], len(whole["rows"]), seconds, whole["errors"])


def table(ended: list[Ended]) -> list[str]:
    """A line a part, and one for each section that failed."""
    lines = ["| part | state | rows | seconds | file |", "| --- | --- | ---: | ---: | --- |"]
    lines += [f"| {p.name} | {p.state} | {p.num_rows} | {p.seconds:.0f} | {p.path.name} |" for p in ended]
    for part in ended:
        lines += [f"{part.name}, {name}: {text.splitlines()[-1]}" for name, text in part.errors.items()]
    return lines


if __name__ == "__main__":
    main()
