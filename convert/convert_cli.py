"""The command `moe-pack convert`: a checkpoint and what is asked for become a pack."""

import time
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from moe_pack.calib import Profile, ThresholdRule, Tokens, attach, hottest_first, read_tokens
from moe_pack.convert.hub import find_checkpoint
from moe_pack.convert.inspect import bits_per_weight
from moe_pack.convert.making import threshold_rule
from moe_pack.convert.making_cli import make_for_target
from moe_pack.convert.pack_cli import ConvertOptions, large_bytes
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
from moe_pack.formats import BF16, Checkpoint, Pack
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from, size_text
from moe_pack.runtime import FolderFiles, Text


@click.command("convert", short_help="Convert the checkpoint at PATH into a pack.")
@click.argument("path")
@options_from(ConvertOptions)
@command_errors(interrupted="interrupted; what is done stays, run the same command again to go on")
def convert_command(path: str, options: ConvertOptions) -> None:
    """Convert the checkpoint at PATH into a pack.

    PATH is a Hugging Face folder (safetensors, one file or many), a hub id such as mistralai/Mixtral-8x7B-v0.1, or a
    short name such as mixtral; the last two are looked up in the local hub cache and downloaded if missing.

    With --target-vram it is one command: profile (where none is given), plan, convert, measure thresholds and loss, and
    again with another plan until the loss measured keeps to --max-loss.

    One expert a worker is in memory at a time, all of them within --memory: a checkpoint larger than RAM converts. A
    conversion that was stopped or killed goes on where it was when the same command is given again.
    """
    checkpoint = Checkpoint(find_checkpoint(path))
    try:
        if options.target is None:
            _convert(checkpoint, options)
        else:
            make_for_target(checkpoint, _target(options.target, options), options)
    finally:
        checkpoint.close()


def _target(target: Target, options: ConvertOptions) -> Target:
    """The target for this machine, narrowed to the selector and the sparsity that were asked for."""
    selector = options.plan.selector
    selectors = target.selectors if selector is None else (selector,)
    return replace(target.resolved(), selectors=selectors, sparsity=options.sparsity)


def _decision(options: ConvertOptions, checkpoint: Checkpoint, profile: Profile | None) -> Decision:
    """What the pack shall be.

    Raises:  PlanError if the plan does not fit the model.
    """
    spec = checkpoint.spec
    if options.plan_file is not None:
        return read_plan(options.plan_file, spec)
    quantizer = options.quantizer
    if quantizer == "auto":
        quantizer = "hqq" if profile is None or not profile.has_inputs else "calibrated"
    shape = (len(spec.moe_layers), spec.router.num_experts)
    return Decision(options.plan.plan_for(checkpoint, quantizer), np.full(shape, options.sparsity or 0.0))


def _rule(options: ConvertOptions, decision: Decision) -> ThresholdRule | None:
    """How thresholds are measured; None where all neurons run."""
    return threshold_rule(decision) if options.sparsity is None else ThresholdRule(sparsity=options.sparsity)


def _convert(checkpoint: Checkpoint, options: ConvertOptions) -> None:
    spec, output = checkpoint.spec, options.output
    profile = None if options.profile is None else Profile(options.profile)
    decision = _decision(options, checkpoint, profile)
    plan, rule = decision.plan, _rule(options, decision)
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
    with TerminalProgress() as progress:
        done = convert(
            checkpoint,
            plan,
            output,
            workers,
            progress=progress,
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
