"""The command `moe-pack convert`: a checkpoint and what is asked for become a pack."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import click
import numpy as np

from moe_pack.calib import Profile, ThresholdRule, Tokens, attach, hottest_first, read_tokens
from moe_pack.convert.hub import find_checkpoint
from moe_pack.convert.inspect import bits_per_weight
from moe_pack.convert.making import threshold_rule
from moe_pack.convert.making_cli import EVAL_TOKENS, MakeOptions, make_for_target
from moe_pack.convert.pack_cli import (
    PlanOptions,
    given_options,
    given_plan_options,
    large_bytes,
    memory_option,
    pack_bar,
    plan_options,
    workers_option,
)
from moe_pack.convert.pipeline import Conversion, convert, layout_for, memory_line
from moe_pack.convert.plan_file import Decision, read_plan
from moe_pack.convert.profile_cli import (
    NUM_TOKENS,
    SEQUENCE_LENGTH,
    attached_line,
    measure_with_bar,
    threshold_lines,
)
from moe_pack.convert.recipe import check_calibration
from moe_pack.convert.source_formats import kept_text
from moe_pack.convert.target import Target
from moe_pack.convert.target_cli import target_options
from moe_pack.formats import BF16, QUANTIZERS, Checkpoint, Pack, Quantizer
from moe_pack.formats.cli import command_errors, size_text
from moe_pack.runtime import FolderFiles, Text

AnyQuantizer = Quantizer | Literal["auto"]
_QUANTIZERS: tuple[AnyQuantizer, ...] = ("auto", "calibrated", *(name for name in QUANTIZERS if name != "calibrated"))


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What `convert` was asked for. `plan_file`: a plan, in place of what `plan`, `quantizer` and `sparsity` say."""

    plan: PlanOptions
    plan_file: Path | None
    quantizer: AnyQuantizer
    workers: int
    memory_bytes: int
    profile: Path | None
    sparsity: float | None

    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        if wrong := given_options("eval_data", "eval_tokens"):
            return f"{wrong[0]}: is of --target-vram, which measures what a pack loses; moe-pack eval measures any"
        if self.plan_file is not None:
            given = [*given_plan_options(), *given_options("quantizer", "sparsity")]
            return f"--plan: says all of a plan; leave {', '.join(given)} out" if given else None
        if self.sparsity is not None and (fault := ThresholdRule(sparsity=self.sparsity).fault()):
            return fault
        if self.profile is None and self.quantizer == "calibrated":
            return "--quantizer calibrated: rounds by what experts are given; give a --profile, which has kept it"
        if self.profile is not None and self.sparsity is None and self.quantizer not in ("auto", "calibrated"):
            return f"--profile: says nothing to {self.quantizer}, and orders neurons at a sparsity; give --sparsity too"
        return None

    def decision(self, checkpoint: Checkpoint, profile: Profile | None) -> Decision:
        """What the pack shall be.

        Raises:  PlanError if the plan does not fit the model.
        """
        spec = checkpoint.spec
        if self.plan_file is not None:
            return read_plan(self.plan_file, spec)
        shape = (len(spec.moe_layers), spec.router.num_experts)
        quantizer = self.quantizer
        if quantizer == "auto":
            quantizer = "hqq" if profile is None or not profile.has_inputs else "calibrated"
        return Decision(self.plan.plan_for(checkpoint, quantizer), np.full(shape, self.sparsity or 0.0))

    def rule(self, decision: Decision) -> ThresholdRule | None:
        """How thresholds are measured; None where all neurons run."""
        return threshold_rule(decision) if self.sparsity is None else ThresholdRule(sparsity=self.sparsity)


@click.command("convert", short_help="Convert the checkpoint at PATH into a pack.")
@click.argument("path")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default="packed",
    show_default=True,
    help="The pack's folder, new or empty.",
)
@target_options
@click.option(
    "--eval-data",
    metavar="NAME_OR_FILE",
    help="With --target-vram: the text that the loss is measured on, as for eval.  [default: the end of our sample]",
)
@click.option(
    "--eval-tokens",
    type=click.IntRange(256),
    default=EVAL_TOKENS,
    show_default=True,
    metavar="N",
    help="How many tokens of it: the more, the less of the limit goes to the interval of the estimate.",
)
@plan_options
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A plan (moe-pack plan -o): each expert's widths and sparsity, in place of the seven options above, "
    "--quantizer and --sparsity.",
)
@click.option(
    "--quantizer",
    type=click.Choice(_QUANTIZERS),
    default="auto",
    show_default=True,
    help="How codes are found. calibrated: by what experts were given in the profile's text, the best; hqq: by the "
    "weights alone, the best without a profile; nearest and absmax are plain and quick. auto: calibrated with a "
    "profile that has inputs, else hqq.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A profile of this model (moe-pack profile): experts are rounded by what they were given in its text, neurons "
    "are stored hottest first, at --sparsity, and what it knows of routes is put beside the pack (as moe-pack attach "
    "does).",
)
@click.option(
    "--sparsity",
    type=float,
    metavar="S",
    help="Share of an expert's neurons that shall not run: thresholds are measured on the finished pack, on the "
    "profile's text, or on our sample.  [default: all run]",
)
@workers_option
@memory_option
@command_errors(interrupted="interrupted; what is done stays, run the same command again to go on")
def convert_command(
    path: str,
    output: Path,
    target: Target | None,
    eval_data: str | None,
    eval_tokens: int,
    plan_options: PlanOptions,
    plan_file: Path | None,
    quantizer: AnyQuantizer,
    profile: Path | None,
    sparsity: float | None,
    workers: int,
    memory_bytes: int,
) -> None:
    """Convert the checkpoint at PATH into a pack.

    PATH is a Hugging Face folder (safetensors, one file or many), a hub id such as mistralai/Mixtral-8x7B-v0.1, or a
    short name such as mixtral; the last two are looked up in the local hub cache and downloaded if missing.

    With --target-vram it is one command: profile (where none is given), plan, convert, measure thresholds and loss, and
    again with another plan until the loss measured keeps to --max-loss.

    One expert a worker is in memory at a time, all of them within --memory: a checkpoint larger than RAM converts. A
    conversion that was stopped or killed goes on where it was when the same command is given again.
    """
    options = ConvertOptions(plan_options, plan_file, quantizer, workers, memory_bytes, profile, sparsity)
    if fault := options.fault() if target is None else _target_fault(target, options):
        raise click.UsageError(fault)
    checkpoint = Checkpoint(find_checkpoint(path))
    try:
        if target is None:
            _convert(checkpoint, output, options)
        else:
            chosen = (plan_options.selector,) if given_options("selector") else target.selectors
            wanted = replace(target, selectors=chosen, sparsity=sparsity)
            make = MakeOptions(output, wanted, profile, eval_data, eval_tokens, workers, memory_bytes)
            make_for_target(checkpoint, make)
    finally:
        checkpoint.close()


def _target_fault(target: Target, options: ConvertOptions) -> str | None:
    """Which option has no meaning beside a target, or None."""
    given = [name for name in given_plan_options() if name != "--selector"] + given_options("plan_file", "quantizer")
    if options.sparsity is not None and target.preset != "floe":
        given.append("--sparsity")
    if target.preset is not None:
        given += given_options("selector")
    names = ", ".join("--plan" if name == "--plan-file" else name for name in given)
    return f"--target-vram: a plan is made that decides this; leave {names} out" if given else None


def _convert(checkpoint: Checkpoint, output: Path, options: ConvertOptions) -> None:
    spec = checkpoint.spec
    profile = None if options.profile is None else Profile(options.profile)
    decision = options.decision(checkpoint, profile)
    plan, rule = decision.plan, options.rule(decision)
    check_calibration(checkpoint, plan, profile)
    order = None
    if profile is not None:
        order = hottest_first(profile, checkpoint, plan.selector, decision.sparsity)
    # Before hours of work: a text that cannot be read would be found after them.
    tokens = None if rule is None else _threshold_tokens(checkpoint, profile)
    layout = layout_for(checkpoint, plan)
    source_bytes = sum(file.bytes for file in checkpoint.account()[0])
    model = f"{spec.family}, {len(spec.moe_layers)} layers of {spec.router.num_experts} experts"
    _tell(f"{model}: {size_text(source_bytes)} become about {size_text(large_bytes(layout))}")
    if kept := kept_text(plan, checkpoint):
        _tell(kept)
    dtypes = {checkpoint.dtype(source) for source in checkpoint.claims.experts.values() if source.codec != "mxfp4"}
    narrowed = sorted(dtypes - {"BF16"})
    if narrowed and any(part == BF16 for layer in plan.experts for e in layer for part in (e.gate, e.up, e.down)):
        _tell(f"note: 16 bit is bfloat16; the source's {', '.join(narrowed)} expert weights lose their last bits")
    workers, memory_bytes = options.workers, options.memory_bytes
    if limited := memory_line(checkpoint, plan, layout, workers, memory_bytes):
        _tell(limited)
    start = time.perf_counter()
    with pack_bar(layout) as advance:
        done = convert(
            checkpoint,
            plan,
            output,
            workers,
            on_progress=advance,
            order=order,
            calibration=profile,
            memory_bytes=memory_bytes,
        )
    _say_converted(done, output, time.perf_counter() - start, source_bytes)
    if tokens is not None and rule is not None:
        _measure_thresholds(output, tokens, rule)
    if profile is not None:
        with Pack(output) as pack:
            click.echo(attached_line(output, attach(pack, profile)))


def _threshold_tokens(checkpoint: Checkpoint, profile: Profile | None) -> Tokens:
    """The text that thresholds are measured on: the profile's, else our sample."""
    if profile is not None:
        return profile.tokens()
    length = min(SEQUENCE_LENGTH, checkpoint.spec.max_position_embeddings)
    return read_tokens(None, None, Text(FolderFiles(checkpoint.folder)), NUM_TOKENS, length)


def _measure_thresholds(output: Path, tokens: Tokens, rule: ThresholdRule) -> None:
    with Pack(output) as pack:
        measured, layers = measure_with_bar(pack, tokens, rule), pack.spec.moe_layers
    for line in threshold_lines(output, layers, measured):
        click.echo(line)


def _say_converted(done: Conversion, output: Path, seconds: float, source_bytes: int) -> None:
    if not done.written:
        click.echo(f"{output}: holds the pack of this checkpoint with these options already; nothing to do")
        return
    with Pack(output) as pack:
        content = pack.manifest.totals.content
        bits = bits_per_weight(pack)
    # A rate would count what an earlier run has done: only a whole run has one.
    rate = f"({source_bytes / max(seconds, 1e-9) / 1e6:.0f} MB/s of source)"
    how = f"and {size_text(done.resumed_bytes)} of it from an earlier run" if done.resumed_bytes else rate
    click.echo(f"{output}: {size_text(content)}, {bits:.2f} bits an expert weight, in {seconds:.1f} s {how}")


def _tell(line: str) -> None:
    click.echo(line, err=True)
