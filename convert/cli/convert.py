"""`moe-pack convert --target-vram`: from a checkpoint to a pack whose loss was measured, told as it goes.

The command `moe-pack convert`: a checkpoint and what is asked for become a pack.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from math import log1p
from pathlib import Path

import click
import numpy as np
import torch

from moe_pack.calib.evaluate import Quality, ThresholdRule
from moe_pack.calib.forward import Tokens, read_tokens, unseen_tokens
from moe_pack.calib.profile import Profile, ProfileOptions, attach, hottest_first, losses_of, make_profile
from moe_pack.convert import (
    AutoPacker,
    AutoPackResult,
    ConversionResult,
    PackGoal,
    bits_per_weight,
    check_calibration,
    convert,
    find_checkpoint,
    kept_text,
    layout_for,
    lossless_formats,
    memory_line,
    threshold_rule,
    with_kept,
)
from moe_pack.convert.cli.options import ConvertOptions, known_facts, large_bytes
from moe_pack.convert.cli.profile import (
    NUM_TOKENS,
    SEQUENCE_LENGTH,
    attached_line,
    measure_with_bar,
    say_text,
    threshold_lines,
)
from moe_pack.convert.plan import (
    Decision,
    LossLimit,
    Planner,
    PlanningModel,
    Target,
    check_budget,
    defaults_text,
    planner_for,
    preset_decision,
    read_plan,
)
from moe_pack.formats import BF16, Pack, Progress, canonical, dense_roles, dump, size_text
from moe_pack.formats.cli import TerminalProgress, command_errors, options_from
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.version import installed_version
from moe_pack.runtime import FolderFiles, Text
from moe_pack.runtime.model import operations_for


def make_for_target(checkpoint: Checkpoint, target: Target, options: ConvertOptions) -> None:
    """Makes the pack, or goes on with it, and says what it came to.

    Raises:  what profiling, planning and `AutoPacker.make` raise.
    """
    check_budget(target, checkpoint.spec, dense_dtypes(checkpoint))
    text = Text(FolderFiles(checkpoint.folder))
    length = min(SEQUENCE_LENGTH, checkpoint.spec.max_position_embeddings)
    tokens = _eval_tokens(text, options, length)
    with ExitStack() as opened:
        progress = opened.enter_context(TerminalProgress())
        operations = opened.enter_context(operations_for(torch.device("cpu")))
        profile = _profile(checkpoint, text, options, progress, length)
        model = PlanningModel(
            checkpoint.spec, dense_dtypes(checkpoint), with_kept(losses_of(profile), lossless_formats(checkpoint))
        )
        wish = _wish(model, _planner(model, profile, target, options.output), profile, tokens, target)
        maker = AutoPacker(
            checkpoint,
            profile,
            tokens,
            options.output,
            wish,
            options.workers,
            progress,
            operations,
            memory_bytes=options.memory_bytes,
        )
        made = maker.make()
    for line in made_lines(made, options.output, target):
        click.echo(line)


def _eval_tokens(text: Text, options: ConvertOptions, length: int) -> Tokens:
    if options.eval_data is None:
        return unseen_tokens(text, options.eval_tokens, length)
    return read_tokens(options.eval_data, None, text, options.eval_tokens, length)


def _profile(checkpoint: Checkpoint, text: Text, options: ConvertOptions, progress: Progress, length: int) -> Profile:
    """The profile given, or one of our sample, made beside the output or gone on with there."""
    if options.profile is not None:
        return Profile(options.profile)
    folder = options.output.with_name(f"{options.output.name}.profile")
    tokens = read_tokens(None, None, text, NUM_TOKENS, length)
    click.echo(f"{folder}: the profile, kept for the next plan (--profile {folder})", err=True)
    say_text(checkpoint.spec, tokens)
    return make_profile(checkpoint, tokens, folder, ProfileOptions(), progress)


def _planner(model: PlanningModel, profile: Profile, target: Target, output: Path) -> Planner:
    facts = known_facts(output)
    for line in defaults_text(target, model.spec, facts):
        click.echo(f"by default {line}", err=True)
    return planner_for(target, model.spec, model.dense_dtypes, model.losses, profile, facts)


def dense_dtypes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The dtype of each dense tensor in a checkpoint, in the order of `dense_roles`."""
    return tuple(checkpoint.dtype(checkpoint.dense_source(role.name)) for role in dense_roles(checkpoint.spec))


def _wish(model: PlanningModel, planner: Planner, profile: Profile, tokens: Tokens, target: Target) -> PackGoal:
    def decide(nats: float) -> Decision:
        if target.preset is not None:
            return preset_decision(target.preset, model, target.sparsity)
        return planner.plan(nats).decision

    limit = target.limit
    identity = {
        "source": profile.facts.source,
        "profile": profile.facts.sha256,
        "text": tokens.sha256,
        "target": canonical(dump(target)).decode(),
        **{name: installed_version(name) for name in ("moe-pack", "hqq", "torch")},
    }
    return PackGoal(
        identity,
        decide,
        limit.nats(model.losses.nll_per_kl),
        None if target.preset is not None else log1p(limit.value) if limit.kind == "perplexity" else limit.value,
        lambda quality: measured_loss(quality, limit),
        verdict,
    )


def measured_loss(quality: Quality, limit: LossLimit) -> float:
    """What counts against a limit, in nats: the upper end of the 95% interval; of perplexity, its logarithm's."""
    found = quality.against
    assert found is not None, "measured against the source"
    estimate = found.perplexity_increase if limit.kind == "perplexity" else found.kl
    upper = estimate.value if estimate.upper is None else estimate.upper
    return log1p(upper) if limit.kind == "perplexity" else upper


def verdict(quality: Quality) -> str:
    """What a pack measured, in a line."""
    found = quality.against
    assert found is not None, "measured against the source"
    grown, kl = found.perplexity_increase, found.kl
    return (
        f"measured: perplexity {grown.value:+.2%} ± {grown.half_width or 0:.2%}, KL {kl.value:.4g} ± "
        f"{kl.half_width or 0:.2g} nats, {size_text(quality.content_bytes)}"
    )


def made_lines(made: AutoPackResult, output: Path, target: Target) -> list[str]:
    """What was made, as lines for people."""
    lines = [f"{output}: {verdict(made.quality)}"]
    if len(made.attempts) > 1:
        lines.append(f"attempt {made.taken + 1} of {len(made.attempts)}; the limit is {target.limit.text()}, upper end")
    lines.append(f"run it: moe-run {output} --budget {_budget_text(target.budget_bytes)}")
    return lines


def _budget_text(num_bytes: int) -> str:
    """Bytes as an option takes them, to the byte: 11G, 24M, 12345678."""
    units = ((1 << 30, "G"), (1 << 20, "M"))
    return next((f"{num_bytes // unit}{name}" for unit, name in units if num_bytes % unit == 0), str(num_bytes))


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


def _say_converted(done: ConversionResult, output: Path, seconds: float, source_bytes: int) -> None:
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
