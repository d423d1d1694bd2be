"""The command `moe-pack merge`: profiles of several texts become one."""

from dataclasses import dataclass, field
from pathlib import Path

import click

from moe_pack.calib.profile import Profile, merge_profiles, texts_of
from moe_pack.convert.cli.options import INTERRUPTED
from moe_pack.formats import option, size_text
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of `merge`."""

    output: Path = field(
        default=Path("profile"), metadata=option("--output", "-o", help="The folder of the merged profile.")
    )


@click.command("merge", short_help="Put profiles of several texts together.")
@click.argument("profiles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PROFILE...")
@options_from(MergeOptions)
@command_errors(interrupted=INTERRUPTED)
def merge_command(profiles: tuple[Path, ...], options: MergeOptions) -> None:
    """Merge profiles of one checkpoint on different texts into a profile of all texts.

    The profiles may come from different machines. All must be made with the same options, except --data and --tokens.
    A text counts as much as it has tokens. Counts and routes are those of one profile of all texts; other figures are
    averages (docs/profile.md says how close they are).
    """
    with TerminalProgress() as progress:
        merged = merge_profiles([Profile(folder) for folder in profiles], options.output, progress)
    num_bytes = sum(file.bytes for file in merged.facts.files)
    click.echo(f"{options.output}: {size_text(num_bytes)}")
    total = merged.facts.text.num_sequences
    for text in texts_of(merged.facts):
        num_tokens = text.num_sequences * text.sequence_length
        click.echo(f"{text.name}: {num_tokens:,} tokens, {text.num_sequences / total:.0%} of all")
    click.echo(f"see it: moe-pack report {merged.folder}")
