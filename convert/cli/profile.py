"""The commands of `moe-pack` that use calibration text and profiles.

They are `profile`, `merge`, `report`, `thresholds` and `attach`.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import click

from moe_pack import formats
from moe_pack.calib.profile import ProfileOptions
from moe_pack.convert import MEMORY_BYTES
from moe_pack.convert.cli.options import (
    CALIBRATION_TOKENS,
    FIELD_OPTION,
    INTERRUPTED,
    SEQUENCE_LENGTH,
    PartOptions,
    StreamOptions,
    absolute_source,
    checkpoint_at,
    chosen_device,
    open_source,
    run_on_ray,
    write_output,
)
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import CHECKPOINT, PACK, pack_folder
from moe_pack.runtime import DEVICE_OPTION

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moe_pack.calib.evaluate import ThresholdRule
    from moe_pack.calib.forward import Tokens
    from moe_pack.calib.profile import Profile
    from moe_pack.formats.families import Checkpoint
    from moe_pack.runtime import Text


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The calibration text."""

    data: str | None = field(
        default=None,
        metadata=formats.option(
            "--data",
            metavar="NAME_OR_FILE",
            help="A text, JSONL or Parquet file, or the name of a data set (NAME:CONFIG:SPLIT), of text or of "
            "conversations (lists of messages), which the model's chat template writes.  [default: our sample]",
        ),
    )
    field_name: str | None = field(default=None, metadata=FIELD_OPTION)
    num_tokens: int = field(
        default=CALIBRATION_TOKENS,
        metadata=formats.option(
            "--tokens",
            least=256,
            metavar="N",
            help="Number of tokens. The last fifth is held out: it checks what was measured on the others.",
        ),
    )
    sequence_length: int = field(
        default=SEQUENCE_LENGTH,
        metadata=formats.option(
            "--sequence-length",
            least=16,
            metavar="N",
            help="Tokens of a sequence; each sequence begins with an empty context.",
        ),
    )

    def tokens(self, text: Text) -> Tokens:
        """Reads the text; raises what `read_tokens` raises."""
        from moe_pack.calib.forward import read_tokens

        return read_tokens(self.data, self.field_name, text, self.num_tokens, self.sequence_length)


@dataclass(frozen=True, slots=True)
class ProfileCommandOptions:
    """The options of `profile`."""

    text: TextOptions = field(default_factory=TextOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    stream: StreamOptions = field(default_factory=StreamOptions)
    output: Path = field(
        default=Path("profile"), metadata=formats.option("--output", "-o", help="The profile's folder.")
    )
    many: PartOptions = field(default_factory=PartOptions)
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=DEVICE_OPTION)
    imatrix: Path | None = field(
        default=None,
        metadata=formats.option(
            "--imatrix",
            path="file",
            metavar="FILE",
            help="Make the profile from an importance file of llama.cpp (llama-imatrix), in place of text. It says "
            "how often each expert was chosen and how large its inputs were; convert calibrates with it. It does not "
            "say what bits cost, nor which neurons run.",
        ),
    )

    def check(self) -> None:
        """Refuses options for text with an importance file, and --ray on a GPU.

        Raises:  UsageError.
        """
        if self.many.ray is not None and self.device == "cuda":
            raise formats.UsageError(
                "--ray makes profiles on CPUs; remove --device cuda, or start each part with --part I/N"
            )
        if self.many.ray is not None and self.stream.is_given:
            raise formats.UsageError("--stream does not go with --ray; start each part with --part I/N and --stream")
        if self.imatrix is not None and (names := commands.given(replace(self, output=Path("profile"), imatrix=None))):
            raise formats.UsageError(f"--imatrix takes all figures from the file; remove {', '.join(names)}")


@click.command("profile")
@click.argument("path", type=CHECKPOINT)
@CHECKPOINT.list_option
@cli.options_from(ProfileCommandOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def profile_command(path: str, options: ProfileCommandOptions) -> None:
    """Measure the model at PATH (as for convert) on calibration text, and write the results to a folder.

    A profile says which experts the routers choose and by which paths, which neurons run, what fewer bits and fewer
    neurons cost in KL divergence, and how well experts can be predicted. moe-pack plan, convert, report and attach use
    it.

    The model runs layer by layer in bounded memory. If the command is stopped or killed, run it again to continue.
    Several machines can share the work (--part, --ray).
    """
    from moe_pack.calib.profile import make_profile, profile_of_imatrix, read_imatrix
    from moe_pack.convert.cli.measure import say_text
    from moe_pack.runtime import Text

    checkpoint = open_source(path, options.stream, options.output)
    start = time.perf_counter()
    if options.imatrix is not None:
        with (
            closing(checkpoint),
            cli.TerminalProgress() as progress,
            commands.stage_of(progress, "reading the importance file"),
        ):
            profile = profile_of_imatrix(read_imatrix(options.imatrix), checkpoint, options.output)
        for line in _imatrix_lines(profile):
            click.echo(line)
        return
    with closing(checkpoint), cli.TerminalProgress() as progress:
        tokens = options.text.tokens(Text(checkpoint.files))
        say_text(checkpoint.spec, tokens)
        if options.many.ray is not None:
            profile = _made_by_ray(path, checkpoint, tokens, options, progress)
        else:
            device, part = chosen_device(options.device), options.many.part
            profile = make_profile(checkpoint, tokens, options.output, options.profile, progress, device, part)
    num_bytes = sum(file.bytes for file in profile.facts.files)
    click.echo(
        f"{options.output}: {formats.size_text(num_bytes)}, in {commands.time_text(time.perf_counter() - start)}"
    )
    for line in _profile_lines(profile):
        click.echo(line)


def _imatrix_lines(profile: Profile) -> list[str]:
    """Returns what a profile has that was made from an importance file, as lines for people."""
    imatrix, text = profile.facts.imatrix, profile.facts.text
    assert imatrix is not None, "the profile was made from an importance file"
    counts = [profile.moments(layer_idx).tokens for layer_idx in range(len(profile.spec.moe_layers))]
    lines = [f"{profile.folder}: from an importance file of {text.name}; it has no routes and no losses"]
    if not imatrix.has_counts:
        lines.append("the file is in the older format, which does not count the experts' tokens: all count as equal")
        return lines
    least, most = min(int(layer.min()) for layer in counts), max(int(layer.max()) for layer in counts)
    return [*lines, f"experts: {least:,} to {most:,} tokens each"]


def _made_by_ray(
    path: str, checkpoint: Checkpoint, tokens: Tokens, options: ProfileCommandOptions, progress: formats.Progress
) -> Profile:
    """Makes a profile on a Ray cluster."""
    import torch

    from moe_pack.calib.profile import Profile
    from moe_pack.calib.profile.profiles import layer_file
    from moe_pack.convert.ray_launcher import PROCESS_BYTES, ProfileJob, Resources

    output, threads = options.output.absolute(), torch.get_num_threads()
    job = ProfileJob(absolute_source(path), output, tokens, options.profile, threads)
    layers = checkpoint.spec.moe_layers

    def done() -> tuple[int, str]:
        finished = [layer for layer in layers if (output / layer_file("statistics", layer)).exists()]
        return len(finished), "" if len(finished) < len(layers) else "sensitivity and predictors follow"

    stage = commands.Stage("statistics", len(layers), "layers", done()[0])
    run_on_ray(job, options.many, Resources(threads, MEMORY_BYTES + PROCESS_BYTES), progress, stage, done)
    return Profile(output)


def _profile_lines(profile: Profile) -> list[str]:
    """Returns the main results of a profile as lines for people."""
    import numpy as np

    from moe_pack.convert.cli.measure import expert_names

    spec = profile.spec
    tokens = [profile.statistics(layer_idx).tokens for layer_idx in range(len(spec.moe_layers))]
    least, most = min(int(layer.min()) for layer in tokens), max(int(layer.max()) for layer in tokens)
    lines = [f"experts: {least:,} to {most:,} tokens each"]
    counted = zip(spec.moe_layers, tokens, strict=True)
    unreached = [(layer, int(e)) for layer, counts in counted for e in np.flatnonzero(counts == 0)]
    if unreached:
        lines.append(
            f"no token reached {len(unreached)} experts ({expert_names(unreached)}); the figures of their layer are "
            "used for them; give more text"
        )
    lines += [*_capacity_lines(profile, tokens), *_recall_lines(profile)]
    return [*lines, f"see it: moe-pack report {profile.folder}"]


def _capacity_lines(profile: Profile, tokens: list[NDArray[np.uint32]]) -> list[str]:
    """Returns a line on choices for which the expert did not run; none if there are no such choices."""
    num_chosen = len(tokens) * profile.num_tokens * profile.spec.router.num_experts_per_tok
    share = 1 - sum(int(layer.sum()) for layer in tokens) / num_chosen
    if not share:
        return []
    if profile.spec.router.num_identity:
        return [f"{share:.1%} of choices were experts that return their input, which need no weights"]
    return [
        f"{share:.1%} of choices were beyond an expert's capacity of {profile.spec.router.capacity} tokens in half a "
        "sequence, and the expert did not run; shorter sequences (--sequence-length) have fewer such choices"
    ]


def _recall_lines(profile: Profile) -> list[str]:
    """Returns a line on the recall of the predictors; none if the profile has no predictors."""
    from moe_pack.convert.cli.measure import recall_text
    from moe_pack.runtime.offload import PREDICTORS

    judged = [l for l in range(1, len(profile.spec.moe_layers)) if profile.has_predictors(l)]
    if not judged:
        return []
    tables = [profile.predictors(l) for l in judged]
    recall = sum(float(table.experts[table.best[0], 0]) for table in tables) / len(tables)
    return [f"experts predicted: {recall_text(recall, [PREDICTORS[int(table.best[0])] for table in tables])}"]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of `merge`."""

    output: Path = field(
        default=Path("profile"), metadata=formats.option("--output", "-o", help="The folder of the merged profile.")
    )


@click.command("merge")
@click.argument("profiles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PROFILE...")
@cli.options_from(MergeOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def merge_command(profiles: tuple[Path, ...], options: MergeOptions) -> None:
    """Merge profiles of one checkpoint on different texts into a profile of all texts.

    The profiles may come from different machines. All must be made with the same options, except --data and --tokens.
    A text counts as much as it has tokens. Counts and routes are those of one profile of all texts; other figures are
    averages (docs/profile.md says how close they are).
    """
    from moe_pack.calib.profile import Profile, merge_profiles, texts_of

    with cli.TerminalProgress() as progress:
        merged = merge_profiles([Profile(folder) for folder in profiles], options.output, progress)
    num_bytes = sum(file.bytes for file in merged.facts.files)
    click.echo(f"{options.output}: {formats.size_text(num_bytes)}")
    total = merged.facts.text.num_sequences
    for text in texts_of(merged.facts):
        num_tokens = text.num_sequences * text.sequence_length
        click.echo(f"{text.name}: {num_tokens:,} tokens, {text.num_sequences / total:.0%} of all")
    click.echo(f"see it: moe-pack report {merged.folder}")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options of `report`."""

    pack: Path | None = field(
        default=None,
        metadata=formats.option(
            "--pack",
            metavar="PACK",
            help="Also draw the loss of this pack, as moe-pack eval measured it, and the prices of eval --prices.",
        ),
    )
    output: Path = field(
        default=Path("report.html"), metadata=formats.option("--output", "-o", path="file", help="The file to write.")
    )


@click.command("report")
@click.argument("profile", type=click.Path(path_type=Path))
@cli.options_from(ReportOptions)
@cli.command_errors(interrupted="interrupted")
def report_command(profile: Path, options: ReportOptions) -> None:
    """Draw PROFILE as one HTML file. Open it in a browser; it needs no network.

    It has heat maps of popularity, sparsity and sensitivity, the cost of each lossy choice, the recall of the
    predictors, and how much of the paths and of the experts the text covers.
    """
    from moe_pack.calib.profile import Profile
    from moe_pack.calib.report import measured_pack, report_html
    from moe_pack.formats import Pack
    from moe_pack.runtime.quality import bits_per_weight

    opened, measured = Profile(profile), None
    if options.pack is not None:
        with Pack(pack_folder(options.pack)) as pack:
            measured = measured_pack(pack, opened, bits_per_weight(pack))
    with cli.TerminalProgress() as progress, commands.stage_of(progress, "drawing"):
        page = report_html(opened, measured).encode()
    write_output(options.output, page, "--output")
    click.echo(f"{options.output}: {formats.size_text(len(page))}")


@dataclass(frozen=True, slots=True)
class ImatrixOptions:
    """The options of `imatrix`."""

    output: Path = field(
        default=Path("imatrix.gguf"), metadata=formats.option("--output", "-o", path="file", help="The file to write.")
    )
    against: str | None = field(
        default=None,
        metadata=formats.option(
            "--against",
            metavar="PATH",
            help="The checkpoint of the profile. It runs once more on the profile's text, and the file also gets the "
            "matrices of attention, of routers, of shared experts and of layers without experts.",
        ),
    )


@dataclass(frozen=True, slots=True)
class ThresholdsOptions:
    """The options of `thresholds`."""

    sparsity: float | None = field(
        default=None,
        metadata=formats.option(
            "--sparsity", metavar="S", help="Share of an expert's neurons that do not run, such as 0.8; at 0 all run."
        ),
    )
    theta: float | None = field(
        default=None,
        metadata=formats.option("--theta", metavar="T", help="One threshold for all experts, as in CORM."),
    )
    text: TextOptions = field(default_factory=TextOptions)
    as_json: bool = field(default=False, metadata=formats.option("--json", help="Print what was measured as JSON."))
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=DEVICE_OPTION)

    @property
    def rule(self) -> ThresholdRule:
        """The rule by which thresholds are measured."""
        from moe_pack.calib.evaluate import ThresholdRule

        return ThresholdRule(self.sparsity, self.theta)

    def check(self) -> None:
        """Refuses a rule without a sparsity or a theta, or with both.

        Raises:  UsageError.
        """
        if fault := self.rule.fault():
            raise formats.UsageError(fault)


@click.command("thresholds")
@click.argument("pack", type=PACK)
@cli.options_from(ThresholdsOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def thresholds_command(pack: Path, options: ThresholdsOptions) -> None:
    """Measure the thresholds of PACK on text, and write them to it. Give --sparsity or --theta.

    A neuron whose activation is below its expert's threshold does not run, which saves reading and time and costs some
    accuracy. Experts do not change, so that other thresholds can be measured later; --sparsity 0 lets all neurons run.

    The pack is measured as it is stored, layer by layer; each layer is measured after the layers before it have their
    thresholds. The resulting sparsity is also printed for the held-out text.
    """
    from moe_pack.convert.cli.measure import measure_thresholds_of, say_text, threshold_lines
    from moe_pack.formats import Pack
    from moe_pack.runtime import Text

    with Pack(pack) as opened:
        tokens, layers = options.text.tokens(Text(opened)), opened.spec.moe_layers
        say_text(opened.spec, tokens)
        measured = measure_thresholds_of(opened, tokens, options.rule, options.device)
    if options.as_json:
        click.echo(json.dumps(asdict(measured), indent=2))
        return
    for line in threshold_lines(pack, layers, measured):
        click.echo(line)


@click.command("imatrix")
@click.argument("profile", type=click.Path(path_type=Path))
@cli.options_from(ImatrixOptions)
@cli.command_errors(interrupted="interrupted; no file was written")
def imatrix_command(profile: Path, options: ImatrixOptions) -> None:
    """Write what PROFILE knows of experts' inputs as an importance file (imatrix) in GGUF format.

    llama-quantize --imatrix FILE uses it for a GGUF file of the same model; llama-imatrix --in-file adds it to others.
    It has gate, up and down of all experts, and with --against most other matrices of layers. llama-quantize needs
    these for its types of about 2 bits.
    """
    from moe_pack.calib.profile import Profile, dense_entries, write_imatrix
    from moe_pack.convert.cli.measure import expert_names

    opened, dense = Profile(profile), None
    if options.against is not None:
        with ExitStack() as stack:
            checkpoint = stack.enter_context(closing(checkpoint_at(options.against)))
            progress = stack.enter_context(cli.TerminalProgress())
            folder = stack.enter_context(TemporaryDirectory(prefix=".imatrix-", dir=options.output.parent))
            dense = dense_entries(opened, checkpoint, Path(folder), progress)
    unreached = write_imatrix(opened, options.output, dense)
    num_experts = len(opened.spec.moe_layers) * len(opened.spec.expert.matrices)
    others = "" if dense is None else f" and {len(dense)} others"
    num_bytes = formats.size_text(options.output.stat().st_size)
    click.echo(
        f"{options.output}: {num_bytes}, {num_experts} matrices of experts{others}, on {opened.num_tokens:,} tokens"
    )
    if unreached:
        click.echo(f"no token reached {len(unreached)} experts ({expert_names(unreached)}); their sums are 0")


@click.command("attach")
@click.argument("pack", type=PACK)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="A profile of the checkpoint that the pack was made from (moe-pack profile).",
)
@cli.command_errors(interrupted="interrupted; the pack has not changed")
def attach_command(pack: Path, profile: Path) -> None:
    """Add the routing data of a profile to PACK.

    With it moe-run can place popular experts in fast memory, predict the experts of the next layer, and compare
    policies. The answers of the pack do not change. moe-pack convert --profile does the same at its end.

    The data are the popularity of experts, the paths of tokens, the trained predictors, and the routes of held-out
    text. They replace the data that the pack has.
    """
    from moe_pack.calib.profile import Profile, attach
    from moe_pack.convert.cli.measure import attached_line
    from moe_pack.formats import Pack

    with Pack(pack) as opened:
        click.echo(attached_line(pack, attach(opened, Profile(profile))))
