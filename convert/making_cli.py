"""`moe-pack convert --target-vram`: from a checkpoint to a pack whose loss was measured, told as it goes."""

from contextlib import ExitStack
from math import log1p
from pathlib import Path

import click
import torch

from moe_pack.calib import (
    Profile,
    ProfileOptions,
    Quality,
    Tokens,
    losses_of,
    make_profile,
    read_tokens,
    unseen_tokens,
)
from moe_pack.convert.making import Made, Maker, Wish
from moe_pack.convert.pack_cli import ConvertOptions
from moe_pack.convert.plan_file import Decision
from moe_pack.convert.planned import Model
from moe_pack.convert.planner import Planner
from moe_pack.convert.presets import preset_decision
from moe_pack.convert.profile_cli import NUM_TOKENS, SEQUENCE_LENGTH, say_text
from moe_pack.convert.source_formats import lossless_formats, with_kept
from moe_pack.convert.target import Limit, Target, check_room, defaults_text, planner_for
from moe_pack.convert.target_cli import known_facts
from moe_pack.formats import Checkpoint, Progress, canonical, dense_roles, dump, installed_version
from moe_pack.formats.cli import TerminalProgress, size_text
from moe_pack.runtime import FolderFiles, Text, operations_for


def make_for_target(checkpoint: Checkpoint, target: Target, options: ConvertOptions) -> None:
    """Makes the pack, or goes on with it, and says what it came to.

    Raises:  what profiling, planning and `Maker.make` raise.
    """
    check_room(target, checkpoint.spec, dense_dtypes(checkpoint))
    text = Text(FolderFiles(checkpoint.folder))
    length = min(SEQUENCE_LENGTH, checkpoint.spec.max_position_embeddings)
    tokens = _eval_tokens(text, options, length)
    with ExitStack() as opened:
        progress = opened.enter_context(TerminalProgress())
        operations = opened.enter_context(operations_for(torch.device("cpu")))
        profile = _profile(checkpoint, text, options, progress, length)
        model = Model(
            checkpoint.spec, dense_dtypes(checkpoint), with_kept(losses_of(profile), lossless_formats(checkpoint))
        )
        wish = _wish(model, _planner(model, profile, target, options.output), profile, tokens, target)
        maker = Maker(
            checkpoint,
            profile,
            tokens,
            options.output,
            wish,
            options.workers,
            operations,
            progress,
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


def _planner(model: Model, profile: Profile, target: Target, output: Path) -> Planner:
    facts = known_facts(output)
    for line in defaults_text(target, model.spec, facts):
        click.echo(f"by default {line}", err=True)
    return planner_for(target, model.spec, model.dense_dtypes, model.losses, profile, facts)


def dense_dtypes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The dtype of each dense tensor in a checkpoint, in the order of `dense_roles`."""
    return tuple(checkpoint.dtype(checkpoint.dense_source(role.name)) for role in dense_roles(checkpoint.spec))


def _wish(model: Model, planner: Planner, profile: Profile, tokens: Tokens, target: Target) -> Wish:
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
    return Wish(
        identity,
        decide,
        limit.nats(model.losses.nll_per_kl),
        None if target.preset is not None else log1p(limit.value) if limit.kind == "perplexity" else limit.value,
        lambda quality: measured_loss(quality, limit),
        verdict,
    )


def measured_loss(quality: Quality, limit: Limit) -> float:
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


def made_lines(made: Made, output: Path, target: Target) -> list[str]:
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
