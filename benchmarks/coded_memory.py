"""Measures how much memory checkpoints in FP8 and MXFP4 need: to convert (kept, and to 4 bit), and to profile.

Writes a random checkpoint of real dimensions (`coded_checkpoint`) and runs each command, sampling its anonymous memory.
Ends with exit code 1 if one fails, or exceeds the limit at any sample.
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
from coded_checkpoint import SHAPES, Coded, generate_coded
from memory_cgroup import Measured, drop_page_cache, measure, tree_anonymous_bytes

_TOKENIZER = Path(__file__).parents[1] / "tests" / "models" / "tiny-mixtral"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_GIB = 1 << 30
_KEPT = ("--selector-bits", "source", "--record-bits", "source")
_FOUR = ("--selector-bits", "4", "--record-bits", "4", "--dense-bits", "4", "--quantizer", "nearest")
RUNS = {
    "convert, kept": ("convert", *_KEPT),
    "convert, 4 bit": ("convert", *_FOUR),
    "profile": ("profile",),
}


def make_coded(folder: Path, shape: Coded) -> int:
    """A checkpoint of random weights that can read text; returns the bytes of its tensors."""
    num_bytes = generate_coded(folder, shape)
    for name in _TOKENIZER_FILES:
        shutil.copy(_TOKENIZER / name, folder)
    return num_bytes


def measured(source: Path, out: Path, what: str, options: tuple[str, ...]) -> Measured:
    """Runs a command on the checkpoint, removes what it made, and says what it held."""
    verb, *chosen = RUNS[what]
    drop_page_cache(source)
    try:
        command = [sys.executable, "-m", "moe_pack.convert.cli", verb, str(source), "-o", str(out), *chosen, *options]
        return measure(command, tree_anonymous_bytes)
    finally:
        shutil.rmtree(out, ignore_errors=True)


@click.command(help=__doc__)
@click.option("--model", type=click.Choice(list(SHAPES)), default="deepseek-v3", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="For temporary files.")
@click.option("--layers", default=2, show_default=True)
@click.option("--experts", default=None, type=int, help="Of a layer.  [default: the model's]")
@click.option("--workers", default=2, show_default=True)
@click.option("--tokens", default=512, show_default=True, help="To profile on.")
@click.option("--sensitivity", type=click.Choice(["none", "fast"]), default="fast", show_default=True)
@click.option("--only", type=click.Choice(list(RUNS)), multiple=True, help="Some of the runs.")
@click.option("--anonymous-gib", default=1.5, show_default=True, help="Most anonymous memory allowed, GiB.")
def main(
    model: str,
    folder: Path | None,
    layers: int,
    experts: int | None,
    workers: int,
    tokens: int,
    sensitivity: str,
    only: tuple[str, ...],
    anonymous_gib: float,
) -> None:
    """Measures, prints, and judges."""
    whole = SHAPES[model](layers=layers)
    shape = replace(whole, experts=experts or whole.experts)
    is_fault = False
    with tempfile.TemporaryDirectory(prefix="moe-pack-", dir=folder) as place:
        source = Path(place) / "checkpoint"
        num_bytes = make_coded(source, shape)
        click.echo(f"{model}, {layers} layers of {shape.experts} experts: {num_bytes:,} bytes")
        for what in only or RUNS:
            profiled = ("--tokens", str(tokens), "--sensitivity", sensitivity)
            options = profiled if what == "profile" else ("--workers", str(workers))
            found = measured(source, Path(place) / "out", what, options)
            verdict = found.errors.strip() if found.exit_code else "within"
            if not found.exit_code and found.peak_bytes > anonymous_gib * _GIB:
                verdict = f"over {anonymous_gib} GiB"
            click.echo(f"{what:16}{found.peak_bytes:>16,} bytes anonymous at most  {verdict}")
            is_fault |= verdict != "within"
    sys.exit(1 if is_fault else 0)


if __name__ == "__main__":
    main()
