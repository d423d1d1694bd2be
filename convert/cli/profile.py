"""The commands of `moe-pack` that use calibration text and profiles."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import click

from moe_pack import formats, runtime
from moe_pack.calib import evaluate
from moe_pack.convert.cli.options import INTERRUPTED, checkpoint_at, quiet_ray, write_output
from moe_pack.convert.options import ProfileOrder, TextOptions, chosen_device
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import CHECKPOINT, PACK, pack_folder
from moe_pack.runtime import model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moe_pack.calib.profile import Profile


@click.command("profile")
@click.argument("path", type=CHECKPOINT)
@CHECKPOINT.list_option
@cli.options_from(ProfileOrder)
@cli.command_errors(interrupted=INTERRUPTED)
def profile_command(path: str, options: ProfileOrder) -> None:
    """Measure the model at PATH (as for convert) on calibration text, and write the results to a folder.

    A profile says which experts the routers choose and by which paths, which neurons run, what fewer bits and fewer
    neurons cost in KL divergence, and how well experts can be predicted. moe-pack plan, convert, report and attach use
    it.

    The model runs layer by layer in bounded memory. If the command is stopped or killed, run it again to continue.
    Several machines can share the work (--part, --ray).
    """
    from moe_pack.convert.making import make_profile

    if options.many.ray is not None:
        quiet_ray()
    start = time.perf_counter()
    with cli.TerminalProgress() as progress:
        profile = make_profile(replace(options, source=path), progress)
    if options.imatrix is not None:
        lines = _imatrix_lines(profile)
    else:
        num_bytes, seconds = sum(file.bytes for file in profile.facts.files), time.perf_counter() - start
        lines = [f"{options.output}: {formats.size_text(num_bytes)}, in {commands.time_text(seconds)}"]
        lines += _profile_lines(profile)
    for line in lines:
        click.echo(line)


def _imatrix_lines(profile: Profile) -> list[str]:
    imatrix, text = profile.facts.imatrix, profile.facts.text
    assert imatrix is not None, "the profile was made from an importance file"
    counts = [profile.moments(layer_idx).tokens for layer_idx in range(len(profile.spec.moe_layers))]
    lines = [f"{profile.folder}: from an importance file of {text.name}; it has no routes and no losses"]
    if not imatrix.has_counts:
        lines.append("the file is in the older format, which does not count the experts' tokens: all count as equal")
        return lines
    least, most = min(int(layer.min()) for layer in counts), max(int(layer.max()) for layer in counts)
    return [*lines, f"experts: {least:,} to {most:,} tokens each"]


def _profile_lines(profile: Profile) -> list[str]:
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

    output: Path = commands.option_field(Path("profile"), "--output", "-o", help="The folder of the merged profile.")


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

    pack: Path | None = commands.option_field(
        None,
        "--pack PACK",
        help="Also draw the loss of this pack, as moe-pack eval measured it, and the prices of eval --prices.",
    )
    output: Path = commands.option_field(Path("report.html"), "--output", "-o", path="file", help="The file to write.")


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
    from moe_pack.runtime.quality import bits_per_weight

    opened, measured = Profile(profile), None
    if options.pack is not None:
        with formats.Pack(pack_folder(options.pack)) as pack:
            measured = measured_pack(pack, opened, bits_per_weight(pack))
    with cli.TerminalProgress() as progress, commands.stage_of(progress, "drawing"):
        page = report_html(opened, measured).encode()
    write_output(options.output, page, "--output")
    click.echo(f"{options.output}: {formats.size_text(len(page))}")


@dataclass(frozen=True, slots=True)
class ImatrixOptions:
    """The options of `imatrix`."""

    output: Path = commands.option_field(Path("imatrix.gguf"), "--output", "-o", path="file", help="The file to write.")
    against: str | None = commands.option_field(
        None,
        "--against PATH",
        help="The checkpoint of the profile. It runs once more on the profile's text, and the file also gets the "
        "matrices of attention, of routers, of shared experts and of layers without experts.",
    )


@dataclass(frozen=True, slots=True)
class ThresholdsOptions:
    """The options of `thresholds`."""

    sparsity: float | None = commands.option_field(
        None, "--sparsity S", help="Share of an expert's neurons that do not run, such as 0.8; at 0 all run."
    )
    theta: float | None = commands.option_field(None, "--theta T", help="One threshold for all experts, as in CORM.")
    text: TextOptions = field(default_factory=TextOptions)
    as_json: bool = commands.option_field(False, "--json", help="Print what was measured as JSON.")
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=runtime.DEVICE_OPTION)

    @property
    def rule(self) -> evaluate.ThresholdRule:
        """The rule by which thresholds are measured."""
        return evaluate.ThresholdRule(self.sparsity, self.theta)

    def check(self) -> None:
        """Refuses a rule without a sparsity or a theta, or with both; raises UsageError."""
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
    from moe_pack.calib.evaluate import thresholds
    from moe_pack.convert.cli import measure

    with formats.Pack(pack) as opened:
        tokens, layers = options.text.tokens(runtime.Text(opened)), opened.spec.moe_layers
        measure.say_text(opened.spec, tokens)
        device = chosen_device(options.device)
        with model.operations_for(device) as operations, cli.TerminalProgress() as progress:
            measured = thresholds.measure_thresholds(opened, tokens, options.rule, progress, device, operations)
    if options.as_json:
        click.echo(json.dumps(asdict(measured), indent=2))
        return
    for line in measure.threshold_lines(pack, layers, measured):
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
    from moe_pack.convert.cli.measure import routing_text

    with formats.Pack(pack) as opened:
        click.echo(f"{pack}: {routing_text(pack, attach(opened, Profile(profile)))}")
