"""The commands of `moe-pack` that calibrate: `profile`, `thresholds`, `report`, `attach`."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import click
import numpy as np
import torch
from numpy.typing import NDArray

from moe_pack.calib.evaluate import MeasuredThresholds, RealizedSparsity, ThresholdRule, measure_thresholds
from moe_pack.calib.forward import Tokens, read_tokens
from moe_pack.calib.profile import Profile, ProfileOptions, attach, make_profile
from moe_pack.calib.report import measured_pack, report_html
from moe_pack.calib.sensitivity import time_text
from moe_pack.convert import bits_per_weight, find_checkpoint
from moe_pack.formats import ConversionError, ModelSpec, Pack, PlanError, UsageError, option, size_text
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime import DEVICE_OPTION, FolderFiles, Text
from moe_pack.runtime.model import operations_for
from moe_pack.runtime.offload import PREDICTORS, ROUTING_FILE, Routing

NUM_TOKENS, SEQUENCE_LENGTH = 16384, 512  # of text, where nothing else is asked for
_INTERRUPTED = "interrupted; what is done stays, run the same command again to go on"
FIELD_OPTION = option(
    "--field", metavar="F", help="The field of JSONL, Parquet or a data set with the text.  [default: text]"
)


def chosen_device(name: str) -> torch.device:
    """The device of this name.

    Raises:  PlanError if torch finds none here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: torch finds no CUDA device here; use cpu")
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The text to measure on."""

    data: str | None = field(
        default=None,
        metadata=option(
            "--data",
            metavar="NAME_OR_FILE",
            help="A text, JSONL or Parquet file, or a data set's name (NAME:CONFIG:SPLIT).  [default: our sample]",
        ),
    )
    field_name: str | None = field(default=None, metadata=FIELD_OPTION)
    num_tokens: int = field(
        default=NUM_TOKENS,
        metadata=option(
            "--tokens",
            least=256,
            metavar="N",
            help="How many tokens to take. The last fifth is held out, to check what the others say.",
        ),
    )
    sequence_length: int = field(
        default=SEQUENCE_LENGTH,
        metadata=option(
            "--sequence-length",
            least=16,
            metavar="N",
            help="Tokens a sequence; each begins from an empty context.",
        ),
    )

    def tokens(self, text: Text) -> Tokens:
        """Reads the text.

        Raises:  what `read_tokens` raises.
        """
        return read_tokens(self.data, self.field_name, text, self.num_tokens, self.sequence_length)


@dataclass(frozen=True, slots=True)
class ProfileCommandOptions:
    """What `profile` was asked for."""

    text: TextOptions = field(default_factory=TextOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    output: Path = field(default=Path("profile"), metadata=option("--output", "-o", help="The profile's folder."))
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=DEVICE_OPTION)


@click.command("profile", short_help="Measure the model at PATH on calibration text.")
@click.argument("path")
@options_from(ProfileCommandOptions)
@command_errors(interrupted=_INTERRUPTED)
def profile_command(path: str, options: ProfileCommandOptions) -> None:
    """Measure the model at PATH (as for convert) on calibration text, layer by layer in bounded memory.

    What is measured: which experts tokens go to and by which paths, which neurons run, what fewer bits and fewer
    neurons cost, and how well experts can be foretold. A profile that was stopped or killed goes on where it was when
    the same command is given again.
    """
    folder = find_checkpoint(path)
    checkpoint = Checkpoint(folder)
    began = time.perf_counter()
    with closing(checkpoint), TerminalProgress() as progress:
        tokens = options.text.tokens(Text(FolderFiles(folder)))
        say_text(checkpoint.spec, tokens)
        device = chosen_device(options.device)
        profile = make_profile(checkpoint, tokens, options.output, options.profile, progress, device)
    num_bytes = sum(file.bytes for file in profile.facts.files)
    click.echo(f"{options.output}: {size_text(num_bytes)}, in {time_text(time.perf_counter() - began)}")
    for line in profile_lines(profile):
        click.echo(line)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What `report` was asked for."""

    pack: Path | None = field(
        default=None,
        metadata=option(
            "--pack",
            metavar="PACK",
            help="Draw what moe-pack eval measured of this pack, too; --prices there for what more losses would cost "
            "it.",
        ),
    )
    output: Path = field(
        default=Path("report.html"), metadata=option("--output", "-o", path="file", help="The file to write.")
    )


@click.command("report", short_help="Draw a profile as one HTML file.")
@click.argument("profile", type=click.Path(path_type=Path))
@options_from(ReportOptions)
@command_errors(interrupted="interrupted")
def report_command(profile: Path, options: ReportOptions) -> None:
    """Draw PROFILE as one HTML file that needs no network; open it in a browser.

    Heat maps of popularity, sparsity and sensitivity, what each lossy choice costs, recall of the predictors, coverage
    of paths and of experts.
    """
    opened, measured, output = Profile(profile), None, options.output
    if options.pack is not None:
        with Pack(options.pack) as held:
            measured = measured_pack(held, opened, bits_per_weight(held))
    text = report_html(opened, measured)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise ConversionError(f"{output}: cannot be written ({fault.strerror}); give another --output") from fault
    click.echo(f"{output}: {size_text(len(text.encode()))}")


@dataclass(frozen=True, slots=True)
class ThresholdsOptions:
    """What `thresholds` was asked for."""

    sparsity: float | None = field(
        default=None,
        metadata=option(
            "--sparsity", metavar="S", help="Share of an expert's neurons that shall not run: 0.8; 0: all run."
        ),
    )
    theta: float | None = field(
        default=None,
        metadata=option("--theta", metavar="T", help="One threshold for all experts, as CORM has it."),
    )
    text: TextOptions = field(default_factory=TextOptions)
    as_json: bool = field(default=False, metadata=option("--json", help="Print what was measured as JSON."))
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata=DEVICE_OPTION)

    @property
    def rule(self) -> ThresholdRule:
        """How thresholds are measured."""
        return ThresholdRule(self.sparsity, self.theta)

    def check(self) -> None:
        """Refuses a rule that is none.

        Raises:  UsageError.
        """
        if fault := self.rule.fault():
            raise UsageError(fault)


@click.command("thresholds", short_help="Measure thresholds on PACK, for a sparsity or one for all.")
@click.argument("pack", type=click.Path(path_type=Path))
@options_from(ThresholdsOptions)
@command_errors(interrupted=_INTERRUPTED)
def thresholds_command(pack: Path, options: ThresholdsOptions) -> None:
    """Measure PACK's thresholds on text, as it is stored, and rewrite them; no expert is touched.

    A neuron whose activation is below its expert's threshold does not run. Layer by layer, every earlier layer with
    its new thresholds; what sparsity that gives is measured on the held-out last fifth of the text too.
    """
    with Pack(pack) as held:
        tokens, layers = options.text.tokens(Text(held)), held.spec.moe_layers
        say_text(held.spec, tokens)
        measured = measure_with_bar(held, tokens, options.rule, options.device)
    if options.as_json:
        click.echo(json.dumps(asdict(measured), indent=2))
        return
    for line in threshold_lines(pack, layers, measured):
        click.echo(line)


@click.command("attach", short_help="Put what a profile knows of routes beside PACK.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="A profile of the checkpoint that the pack was made from (moe-pack profile).",
)
@command_errors(interrupted="interrupted; the pack has what it had")
def attach_command(pack: Path, profile: Path) -> None:
    """Put what a profile knows of routes beside PACK, where moe-run looks for it.

    Popularity of experts, paths, trained predictors, and the routes of text that nothing was learned from: with them
    moe-run places experts in fast memory and foretells the next ones. What the pack answers does not change. Convert
    does the same where it is given a profile.
    """
    with Pack(pack) as held:
        click.echo(attached_line(pack, attach(held, Profile(profile))))


def attached_line(folder: Path, routing: Routing) -> str:
    """What was put beside a pack, as a line for people."""
    return f"{folder}: {routing_text(folder, routing)}"


def routing_text(folder: Path, routing: Routing) -> str:
    """What lies beside a pack, in a few words: bytes, tokens, and how well experts are foretold."""
    num_bytes, recall = (folder / ROUTING_FILE).stat().st_size, routing.best_recall
    words = f"routing, {size_text(num_bytes)}, routes of {len(routing.routes):,} tokens held out"
    if recall is None:
        return f"{words}; no predictors, the profile's text was too short"
    best = [PREDICTORS[routing.best[layer_idx]] for layer_idx in routing.judged_layers]
    return f"{words}; experts foretold: recall {recall:.2f} (mostly {max(set(best), key=best.count)})"


def measure_with_bar(pack: Pack, tokens: Tokens, rule: ThresholdRule, device: str = "cpu") -> MeasuredThresholds:
    """Measures a pack's thresholds and shows progress."""
    where = chosen_device(device)
    with operations_for(where) as operations, TerminalProgress() as progress:
        return measure_thresholds(pack, tokens, rule, progress, where, operations)


def threshold_lines(folder: Path, layers: Sequence[int], measured: MeasuredThresholds) -> list[str]:
    """What was measured, as lines for people.

    Args:    layers: the decoder layers that have experts.
    """
    rule = measured.rule
    asked = "the plan's sparsities" if rule.planned is not None else f"sparsity {rule.sparsity}"
    if rule.theta is not None:
        asked = f"theta {rule.theta}"
    lines = [f"{folder}: thresholds for {asked}; {_share(measured.learned.overall)} of neurons do not run"]
    if measured.held_out.overall is not None:
        lines[0] += f", {_share(measured.held_out.overall)} on the text held out"
    lines += ["", f"{'layer':>5} {'measured':>9} {'held out':>9}   experts, held out"]
    for layer_idx, layer in enumerate(layers):
        own, held = (_layer_share(part, layer_idx) for part in (measured.learned, measured.held_out))
        experts = [share for share in measured.held_out.experts[layer_idx] if share is not None]
        span = f"{_share(min(experts))} to {_share(max(experts))}" if experts else "-"
        lines.append(f"{layer:>5} {_share(own):>9} {_share(held):>9}   {span}")
    counted = zip(layers, measured.learned.tokens, strict=True)
    unreached = [(layer, e) for layer, row in counted for e, number in enumerate(row) if number == 0]
    if unreached and rule.theta is None:
        names = ", ".join(f"{l}.{e}" for l, e in unreached[:8]) + (", ..." if len(unreached) > 8 else "")
        lines.append(f"no token reached {len(unreached)} experts ({names}): they have their layer's threshold")
    return lines


def _layer_share(realized: RealizedSparsity, layer: int) -> float | None:
    pairs = zip(realized.experts[layer], realized.tokens[layer], strict=True)
    held = [(share, number) for share, number in pairs if share is not None]
    total = sum(number for _, number in held)
    return sum(share * number for share, number in held) / total if total else None


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def profile_lines(profile: Profile) -> list[str]:
    """What a profile found, in a few lines for people."""
    lines = []
    num_layers = len(profile.spec.moe_layers)
    reached = [profile.statistics(layer_idx).tokens for layer_idx in range(num_layers)]
    counted = zip(profile.spec.moe_layers, reached, strict=True)
    unreached = [(layer, int(e)) for layer, tokens in counted for e in np.flatnonzero(tokens == 0)]
    least = min(int(tokens.min()) for tokens in reached)
    lines.append(f"experts: {least:,} to {max(int(t.max()) for t in reached):,} tokens each")
    if unreached:
        names = ", ".join(f"{l}.{e}" for l, e in unreached[:8]) + (", ..." if len(unreached) > 8 else "")
        lines.append(
            f"no token reached {len(unreached)} experts ({names}): their layer's quantiles stand in; give more text"
        )
    lines += _beyond_capacity(profile, reached)
    judged = [l for l in range(1, num_layers) if profile.has_predictors(l)]
    if judged:
        tables = [profile.predictors(l) for l in judged]
        best = [PREDICTORS[int(table.best[0])] for table in tables]
        recall = sum(float(table.experts[:, 0].max()) for table in tables) / len(tables)
        name = max(set(best), key=best.count)
        lines.append(f"experts foretold: recall {recall:.2f} by the best predictor of each layer (mostly {name})")
    lines.append("see it: moe-pack report " + str(profile.folder))
    return lines


def _beyond_capacity(profile: Profile, reached: list[NDArray[np.uint32]]) -> list[str]:
    """A line on tokens that no expert ran for; none where there are none."""
    chosen = len(reached) * profile.num_tokens * profile.spec.router.num_experts_per_tok
    share = 1 - sum(int(tokens.sum()) for tokens in reached) / chosen
    if not share:
        return []
    return [
        f"{share:.1%} of choices were beyond an expert's capacity, {profile.spec.router.capacity} tokens of a half: "
        "it did not run for them; shorter sequences (--sequence-length) have fewer"
    ]


def say_text(spec: ModelSpec, tokens: Tokens) -> None:
    """Announces what will be measured, on standard error."""
    model = f"{spec.family}, {len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    number, length = tokens.sequences.shape
    click.echo(f"{model}; {number * length:,} tokens in sequences of {length}, from {tokens.name}", err=True)
    if spec.encoder is not None:
        half = length // 2
        click.echo(f"of each its encoder reads the first {half}, its decoder is given the next, predicting", err=True)
    for note in tokens.notes:
        click.echo(f"note: {note}", err=True)
