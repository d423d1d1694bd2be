"""The commands of `moe-pack` that calibrate: `profile`, `thresholds`, `report`, `attach`."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from moe_pack.calib import (
    Cost,
    MeasuredThresholds,
    Profile,
    ProfileOptions,
    RealizedSparsity,
    Sensitivity,
    ThresholdRule,
    Tokens,
    attach,
    make_profile,
    measure_thresholds,
    measured_pack,
    read_tokens,
    report_html,
)
from moe_pack.convert.hub import find_checkpoint
from moe_pack.convert.inspect import bits_per_weight
from moe_pack.formats import Checkpoint, ConversionError, ModelSpec, Pack, PlanError
from moe_pack.formats.cli import command_errors, size_text
from moe_pack.runtime import PREDICTORS, ROUTING_FILE, FolderFiles, Routing, Text, operations_for

F = TypeVar("F", bound=Callable[..., Any])
NUM_TOKENS, SEQUENCE_LENGTH = 16384, 512  # of text, where nothing else is asked for
_INTERRUPTED = "interrupted; what is done stays, run the same command again to go on"
LEVELS = ("none", "fast", "full", "exact")


class Bars:
    """A watcher: announces each stage on standard error, and shows a bar there with the time left on a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def begin(self, stage: str, cost: Cost) -> None:
        """Announces a stage."""
        self.close()
        foretold = f", about {time_text(cost.seconds)}" if cost.seconds else ""
        kept = f", {size_text(cost.kept_bytes)} of experts' inputs to keep" if cost.kept_bytes else ""
        click.echo(f"{stage}: {cost.multiplications / 1e9:,.1f} G multiplications{foretold}{kept}", err=True)
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

    def end(self) -> None:
        """Removes the bar."""
        self.close()

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


def text_options(body: F) -> F:
    """Adds the options that choose text."""
    body = click.option(
        "--sequence-length",
        type=click.IntRange(16),
        default=SEQUENCE_LENGTH,
        show_default=True,
        metavar="N",
        help="Tokens a sequence; each begins from an empty context.",
    )(body)
    body = click.option(
        "--tokens",
        "num_tokens",
        type=click.IntRange(256),
        default=NUM_TOKENS,
        show_default=True,
        metavar="N",
        help="How many tokens to take. The last fifth is held out, to check what the others say.",
    )(body)
    body = click.option(
        "--field",
        metavar="F",
        help="The field of JSONL, Parquet or a data set with the text.  [default: text]",
    )(body)
    return click.option(
        "--data",
        metavar="NAME_OR_FILE",
        help="A text, JSONL or Parquet file, or a data set's name (NAME:CONFIG:SPLIT).  [default: our sample]",
    )(body)


_device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
)


@click.command("profile", short_help="Measure the model at PATH on calibration text.")
@click.argument("path")
@text_options
@click.option(
    "--sensitivity",
    type=click.Choice(LEVELS),
    default="fast",
    show_default=True,
    help="What each width and sparsity costs: none; fast, on few tokens with plain rounding scaled to hqq; full, on "
    "more with hqq itself, each matrix on its own; exact, besides each expert at 2 bits alone, as EdgeMoE does.",
)
@click.option(
    "--inputs/--no-inputs",
    "keeps_inputs",
    default=True,
    show_default=True,
    help="Keep what experts were given of some of the text (of 2,048 tokens an expert on average, none held out): "
    "calibrated rounding needs it, nothing else does. 2 bytes a token, hidden value and layer.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default="profile",
    show_default=True,
    help="The profile's folder.",
)
@_device_option
@command_errors(interrupted=_INTERRUPTED)
def profile_command(
    path: str,
    data: str | None,
    field: str | None,
    num_tokens: int,
    sequence_length: int,
    sensitivity: Sensitivity,
    keeps_inputs: bool,
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
    began = time.perf_counter()
    try:
        tokens = read_tokens(data, field, Text(FolderFiles(folder)), num_tokens, sequence_length)
        say_text(checkpoint.spec, tokens)
        options = ProfileOptions(sensitivity, keeps_inputs=keeps_inputs)
        profile = make_profile(checkpoint, tokens, output, options, bars, chosen_device(device))
    finally:
        bars.close()
        checkpoint.close()
    num_bytes = sum(file.bytes for file in profile.facts.files)
    click.echo(f"{output}: {size_text(num_bytes)}, in {time_text(time.perf_counter() - began)}")
    for line in profile_lines(profile):
        click.echo(line)


@click.command("report", short_help="Draw a profile as one HTML file.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--pack",
    type=click.Path(path_type=Path),
    metavar="PACK",
    help="Draw what moe-pack eval measured of this pack, too; --prices there for what more losses would cost it.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default="report.html",
    show_default=True,
    help="The file to write.",
)
@command_errors(interrupted="interrupted")
def report_command(profile: Path, pack: Path | None, output: Path) -> None:
    """Draw PROFILE as one HTML file that needs no network; open it in a browser.

    Heat maps of popularity, sparsity and sensitivity, what each lossy choice costs, recall of the predictors, coverage
    of paths and of experts.
    """
    opened, measured = Profile(profile), None
    if pack is not None:
        with Pack(pack) as held:
            measured = measured_pack(held, opened, bits_per_weight(held))
    text = report_html(opened, measured)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise ConversionError(f"{output}: cannot be written ({fault.strerror}); give another --output") from fault
    click.echo(f"{output}: {size_text(len(text.encode()))}")


@click.command("thresholds", short_help="Measure thresholds on PACK, for a sparsity or one for all.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.option(
    "--sparsity", type=float, metavar="S", help="Share of an expert's neurons that shall not run: 0.8; 0: all run."
)
@click.option("--theta", type=float, metavar="T", help="One threshold for all experts, as CORM has it.")
@text_options
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@_device_option
@command_errors(interrupted=_INTERRUPTED)
def thresholds_command(
    pack: Path,
    sparsity: float | None,
    theta: float | None,
    data: str | None,
    field: str | None,
    num_tokens: int,
    sequence_length: int,
    as_json: bool,
    device: str,
) -> None:
    """Measure PACK's thresholds on text, as it is stored, and rewrite them; no expert is touched.

    A neuron whose activation is below its expert's threshold does not run. Layer by layer, every earlier layer with
    its new thresholds; what sparsity that gives is measured on the held-out last fifth of the text too.
    """
    rule = ThresholdRule(sparsity, theta)
    if fault := rule.fault():
        raise click.UsageError(fault)
    with Pack(pack) as held:
        tokens = read_tokens(data, field, Text(held), num_tokens, sequence_length)
        say_text(held.spec, tokens)
        measured, layers = measure_with_bar(held, tokens, rule, device), held.spec.moe_layers
    if as_json:
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
    bars, where = Bars(), chosen_device(device)
    try:
        with operations_for(where) as operations:
            return measure_thresholds(pack, tokens, rule, bars, where, operations)
    finally:
        bars.close()


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
