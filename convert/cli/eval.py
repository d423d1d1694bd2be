"""The command `moe-pack eval`: measures a pack on text, alone or compared with its source."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moe_pack import formats, runtime
from moe_pack.calib import evaluate
from moe_pack.convert.cli.options import INTERRUPTED, EvalOptions, checkpoint_at
from moe_pack.convert.options import chosen_device
from moe_pack.formats.base import cli
from moe_pack.formats.hub.cli import PACK, pack_folder
from moe_pack.runtime import model
from moe_pack.runtime.engine.numerics import read_numerics

if TYPE_CHECKING:
    from moe_pack.runtime.quality import Estimate, Prices, Quality, SourceQuality

_MUCH_TAIL = 0.02  # of a prediction's mass outside the reference's outcomes


@click.command("eval")
@click.argument("pack", type=PACK)
@cli.options_from(EvalOptions)
@cli.command_errors(interrupted=INTERRUPTED)
def eval_command(pack: Path, options: EvalOptions) -> None:
    """Measure PACK on text: perplexity, the share of neurons that do not run, bytes.

    With --against, also measure how far its predictions are from the source's: KL divergence, growth of perplexity and
    agreement, each with a 95% confidence interval. These figures are written to quality.json in the pack's folder.

    The models run layer by layer in bounded memory. If the command is stopped or killed, run it again to continue.
    """
    from moe_pack.convert.cli import measure

    with formats.Pack(pack_folder(pack)) as opened:
        # Tasks are read first: a wrong line would otherwise be found after hours.
        tasks = None
        if options.tasks is not None:
            evaluate.check_continues(opened.spec)
            tasks = evaluate.read_tasks(options.tasks, runtime.Text(opened), opened.spec.max_position_embeddings)
        quality = measure.measure_loss(opened, options)
        scores = {} if tasks is None else _scores(opened, tasks, options)
        root, numerics = opened.manifest.root, read_numerics(opened)
    if options.as_json:
        by_model = {name: formats.dump(score) for name, score in scores.items()}
        found = {
            "root": root,
            "quality": formats.dump(quality),
            "numerics": formats.dump(numerics),
            "tasks": by_model or None,
        }
        click.echo(json.dumps(found, indent=2))
        return
    for line in [*quality_lines(quality), *score_lines(scores)]:
        click.echo(line)
    if numerics is not None:
        click.echo(f"{'numerics':12} {measure.numerics_summary(numerics)}")


def _scores(pack: formats.Pack, tasks: evaluate.TaskTokens, options: EvalOptions) -> dict[str, evaluate.TaskScore]:
    device = chosen_device(options.device)
    scores = {}
    with ExitStack() as stack:
        progress = stack.enter_context(cli.TerminalProgress())
        operations = stack.enter_context(model.operations_for(device))
        scores["pack"] = evaluate.task_score(pack, tasks, pack.folder / "tasks.work", progress, device, operations)
        if options.against is not None and options.reference_file is None:
            checkpoint = checkpoint_at(options.against)
            stack.callback(checkpoint.close)
            scores["source"] = evaluate.task_score(
                checkpoint, tasks, pack.folder / "tasks-source.work", progress, device
            )
    return scores


def quality_lines(quality: Quality) -> list[str]:
    """Returns a pack's quality as lines for people."""
    sparsity = "-" if quality.sparsity is None else f"{quality.sparsity:.1%} of neurons do not run"
    rows = [
        ("text", f"{quality.text}; {quality.num_tokens:,} tokens predicted, in sequences of {quality.sequence_length}"),
        ("bytes", f"{quality.content_bytes:,}, {formats.size_text(quality.content_bytes)}"),
        ("sparsity", sparsity),
        ("perplexity", _perplexity_text(quality.perplexity)),
    ]
    if quality.against is not None:
        rows += _against_rows(quality.against)
    if quality.prices is not None:
        rows += _price_rows(quality.prices)
    return [f"{name:12} {value}".rstrip() for name, value in rows]


def _perplexity_text(estimate: Estimate) -> str:
    half = "" if estimate.half_width is None else f" ± {estimate.half_width:.3f}"
    return f"{estimate.value:.3f}{half}"


def _against_rows(against: SourceQuality) -> list[tuple[str, str]]:
    from moe_pack.convert.cli.measure import nats, percent

    bound = f"at least {against.kl_bound.value:.3g}, over the {against.num_outcomes + 1} outcomes of a reference"
    is_whole = against.is_exact or not against.source_tail
    tails = f"{against.source_tail:.2%} of the source's mass and {against.pack_tail:.2%} of the pack's"
    rows = [
        ("", f"{_perplexity_text(against.source_perplexity)} of the source"),
        ("increase", percent(against.perplexity_increase)),
        ("KL", f"{nats(against.kl)}; {'over the whole vocabulary' if is_whole else bound}"),
        ("", f"noise floor {against.noise_floor:.1e}: the source compared with itself, rounded differently"),
        ("agreement", f"{percent(against.agreement)} of tokens with the same likeliest token"),
        ("tail", f"{tails} are outside the source's {against.num_outcomes} likeliest tokens"),
    ]
    if not against.is_exact and max(against.source_tail, against.pack_tail) > _MUCH_TAIL:
        rows.append(("", "that is much; --exact runs the source again and compares the whole vocabulary"))
    return rows


def _price_rows(prices: Prices) -> list[tuple[str, str]]:
    from moe_pack.convert.cli.measure import nats, percent

    substitution, fetched = prices.substitution, f"{prices.substitution.fetched:.1%} of experts fetched"
    return [
        ("prices", f"on {prices.num_tokens:,} tokens, compared with the same pack; sparsity: with all neurons running"),
        *(
            (
                f"  {price.sparsity:.0%} sparse",
                f"{nats(price.kl)}, perplexity {percent(price.perplexity_increase)}",
            )
            for price in prices.sparsity
        ),
        (
            "substitute",
            f"memory for {substitution.room:.0%} of experts, policy {substitution.policy}; without substitution "
            f"{fetched}",
        ),
        *(
            (
                f"  {price.alpha:g}",
                f"{nats(price.kl)}, perplexity {percent(price.perplexity_increase)}; {price.replaced:.1%} replaced, "
                f"{price.fetched:.1%} fetched",
            )
            for price in substitution.prices
        ),
    ]


def score_lines(scores: dict[str, evaluate.TaskScore]) -> list[str]:
    """Returns the scores of tasks as lines for people."""
    from moe_pack.convert.cli.measure import percent

    return [
        f"{'tasks':12} {percent(score.accuracy)} right by the {name}, {percent(score.normalized_accuracy)} by "
        f"likelihood divided by bytes; {score.num_tasks:,} tasks"
        for name, score in scores.items()
    ]
