"""The commands of `moe-pack` that calibrate: `profile`."""

import time
from pathlib import Path

import click
import torch
from tqdm import tqdm

from moe_pack.calib import Cost, ProfileOptions, Sensitivity, Tokens, make_profile, read_tokens
from moe_pack.convert.hub import find_checkpoint
from moe_pack.formats import Checkpoint, PlanError
from moe_pack.formats.cli import command_errors, size_text
from moe_pack.runtime import FolderFiles, Text

LEVELS = ("none", "fast", "full", "exact")


class Bars:
    """A watcher: announces each stage on standard error, and shows a bar there with the time left on a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def begin(self, stage: str, cost: Cost) -> None:
        """Announces a stage."""
        self.close()
        foretold = f", about {time_text(cost.seconds)}" if cost.seconds else ""
        click.echo(f"{stage}: {cost.multiplications / 1e9:,.1f} G multiplications{foretold}", err=True)
        self._bar = tqdm(
            total=cost.multiplications,
            unit="mul",
            unit_scale=True,
            disable=None,
            leave=False,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining} {postfix}",
        )

    def advance(self, multiplications: int, what: str) -> None:
        """Moves the bar."""
        assert self._bar is not None, "a stage has begun"
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(multiplications)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def time_text(seconds: float) -> str:
    """Seconds as a person reads them: 0.4 s, 12 s, 3 min, 2.5 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def chosen_device(name: str) -> torch.device:
    """The device of this name.

    Raises:  PlanError if torch finds none here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: torch finds no CUDA device here; use cpu")
    return torch.device(name)


@click.command("profile", short_help="Measure the model at PATH on calibration text.")
@click.argument("path")
@click.option(
    "--data", metavar="NAME_OR_FILE", help="Text, JSONL or Parquet file, or a data set's name.  [default: our sample]"
)
@click.option(
    "--field", metavar="F", help="The field of JSONL, Parquet or a data set that holds text.  [default: text]"
)
@click.option("--tokens", "num_tokens", type=click.IntRange(256), default=16384, show_default=True, metavar="N")
@click.option("--sequence-length", type=click.IntRange(16), default=512, show_default=True, metavar="N")
@click.option(
    "--sensitivity",
    type=click.Choice(LEVELS),
    default="fast",
    show_default=True,
    help="What each width and sparsity costs: not at all, on few tokens with plain rounding, on more with hqq itself, "
    "or besides each expert at 2 bits on its own, as EdgeMoE does.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path), default="profile", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@command_errors(interrupted="interrupted; what is done stays, run the same command again to go on")
def profile_command(
    path: str,
    data: str | None,
    field: str | None,
    num_tokens: int,
    sequence_length: int,
    sensitivity: Sensitivity,
    output: Path,
    device: str,
) -> None:
    """Measure the model at PATH (as for convert) on calibration text, layer by layer in bounded memory.

    What is measured: which experts tokens go to and by which paths, which neurons run, what fewer bits and fewer
    neurons cost, and how well experts can be foretold. A profile that was stopped or killed goes on where it was when
    the same command is given again.
    """
    folder = find_checkpoint(path)
    checkpoint = Checkpoint(folder)
    bars = Bars()
    try:
        tokens = read_tokens(data, field, Text(FolderFiles(folder)), num_tokens, sequence_length)
        _announce(checkpoint, tokens)
        began = time.perf_counter()
        profile = make_profile(checkpoint, tokens, output, ProfileOptions(sensitivity), bars, chosen_device(device))
    finally:
        bars.close()
        checkpoint.close()
    num_bytes = sum(file.bytes for file in profile.facts.files)
    click.echo(f"{output}: {size_text(num_bytes)}, in {time_text(time.perf_counter() - began)}")


def _announce(checkpoint: Checkpoint, tokens: Tokens) -> None:
    spec = checkpoint.spec
    model = f"{spec.family}, {len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    number, length = tokens.sequences.shape
    click.echo(f"{model}; {number * length:,} tokens in sequences of {length}, from {tokens.name}", err=True)
    for note in tokens.notes:
        click.echo(f"note: {note}", err=True)
