"""Times calibration and evaluation of a pack with the native kernels and in plain torch.

Three tasks on the model in the repository, packed at 4 bit: logits of text in windows of 512 tokens, as `verify
--against` and perplexity take them; the same token by token; the layer-by-layer pass of `moe-pack thresholds`. With the
kernels torch has one thread in the first two, as in `moe-run`. Runs are interleaved, figures are medians.
"""

import json
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import torch
from tqdm import tqdm

from moe_pack.calib import ThresholdRule, Tokens, measure_thresholds, read_tokens, realized_sparsity
from moe_pack.convert import convert
from moe_pack.formats import NO_PROGRESS, Checkpoint, Pack, part_format, uniform_plan
from moe_pack.runtime import (
    TORCH,
    Decoder,
    FolderFiles,
    Kernels,
    NativeOperations,
    Operations,
    Text,
    num_cpus,
    open_weights,
)

_TINY = Path(__file__).parents[1] / "tests" / "models" / "tiny-mixtral"
_TEXT = Path(__file__).parents[1] / "tests" / "data" / "books-valid.txt"
_WINDOW = 512
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of a task at a sparsity with so many threads, and how many times torch's the kernels' are."""

    task: str
    sparsity: float
    threads: int
    torch: float
    kernels: float
    ratio: float


def _evaluate(pack: Pack, tokens: Tokens, operations: Operations) -> int:
    decoder = Decoder(open_weights(pack, _CPU, operations), _WINDOW)
    for sequence in tokens.sequences.tolist():
        decoder.reset()
        decoder.logits(sequence)
    return int(tokens.sequences.size)


def _decode(pack: Pack, tokens: Tokens, operations: Operations) -> int:
    decoder = Decoder(open_weights(pack, _CPU, operations), _WINDOW)
    for token in tokens.sequences[0, :128].tolist():
        decoder.next_logits([token])
    return 128


def _calibrate(pack: Pack, tokens: Tokens, operations: Operations) -> int:
    realized_sparsity(pack, tokens, NO_PROGRESS, _CPU, operations)
    return int(tokens.sequences.size)


_TASKS: dict[str, Callable[[Pack, Tokens, Operations], int]] = {
    "windows of 512 tokens": _evaluate,
    "token by token": _decode,
    "pass of thresholds": _calibrate,
}


def _rate(task: str, pack: Pack, tokens: Tokens, operations: Operations, threads: int) -> float:
    """Tokens a second."""
    torch.set_num_threads(1 if operations is not TORCH and task != "pass of thresholds" else threads)
    start = time.perf_counter()
    return _TASKS[task](pack, tokens, operations) / (time.perf_counter() - start)


def measure(pack: Pack, tokens: Tokens, sparsity: float, threads: int, rounds: int) -> list[Speed]:
    """Every task, interleaved; the first round warms up."""
    rates: dict[tuple[str, bool], list[float]] = {}
    with closing(Kernels(threads)) as kernels:
        for number in range(rounds + 1):
            for task in _TASKS:
                for used in (TORCH, NativeOperations(kernels)):
                    rate = _rate(task, pack, tokens, used, threads)
                    if number:
                        rates.setdefault((task, used is not None), []).append(rate)
    medians = {case: median(found) for case, found in rates.items()}
    return [
        Speed(task, sparsity, threads, plain := medians[task, False], native := medians[task, True], native / plain)
        for task in _TASKS
    ]


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each case.")
@click.option("--tokens", "num_tokens", default=8192, show_default=True, type=click.IntRange(1024), help="Of text.")
@click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")
def main(rounds: int, num_tokens: int, as_json: bool) -> None:
    """Measures and prints."""
    speeds: list[Speed] = []
    with tempfile.TemporaryDirectory() as name, closing(Checkpoint(_TINY)) as checkpoint:
        stored, folder = part_format(4, 64), Path(name) / "packed"
        convert(checkpoint, uniform_plan(checkpoint.spec, "up", stored, stored), folder, num_cpus())
        tokens = read_tokens(str(_TEXT), None, Text(FolderFiles(_TINY)), num_tokens, _WINDOW)
        for sparsity in (0.0, 0.8):
            if sparsity:
                with Pack(folder) as pack:
                    measure_thresholds(pack, tokens, ThresholdRule(sparsity))
            with Pack(folder) as pack:
                for threads in tqdm(dict.fromkeys((1, num_cpus())), desc=f"sparsity {sparsity:g}", disable=as_json):
                    speeds += measure(pack, tokens, sparsity, threads, rounds)
    if as_json:
        click.echo(json.dumps([asdict(speed) for speed in speeds]))
        return
    click.echo("| task | sparsity | threads | torch, tokens/s | kernels, tokens/s | times as fast |")
    click.echo("| --- | --- | --- | --- | --- | --- |")
    for s in speeds:
        click.echo(f"| {s.task} | {s.sparsity:g} | {s.threads} | {s.torch:.0f} | {s.kernels:.0f} | {s.ratio:.2f} |")


if __name__ == "__main__":
    main()
