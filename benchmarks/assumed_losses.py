"""Writes calib/assumed_losses.json: what the demo model loses in all, for plans of models that have no profile.

    python benchmarks/assumed_losses.py

The demo model is profiled (`fast`) on 16,384 tokens of the shipped sample in a temporary folder.
"""

import tempfile
from pathlib import Path

import click

from moe_pack.calib import ProfileOptions, assumed_figures, losses_of, make_profile, read_tokens
from moe_pack.formats import Checkpoint, canonical, dump
from moe_pack.runtime import FolderFiles, Text

_ROOT = Path(__file__).parents[1]
_NUM_TOKENS, _SEQUENCE_LENGTH = 16384, 512


@click.command(help=__doc__)
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), default=_ROOT / "tests" / "models" / "tiny-mixtral"
)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=_ROOT / "calib" / "assumed_losses.json")
def main(model: Path, output: Path) -> None:
    """Profiles, and writes."""
    tokens = read_tokens(None, None, Text(FolderFiles(model)), _NUM_TOKENS, _SEQUENCE_LENGTH)
    checkpoint = Checkpoint(model)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-pack-") as folder:
            losses = losses_of(make_profile(checkpoint, tokens, Path(folder) / "p", ProfileOptions("fast")))
            figures = assumed_figures(losses, checkpoint.spec, model.name)
    finally:
        checkpoint.close()
    output.write_bytes(canonical(dump(figures)))
    click.echo(f"{output}: written")


if __name__ == "__main__":
    main()
