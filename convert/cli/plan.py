"""The command `moe-pack plan`: estimates which pack fits into a memory, how fast it decodes, and how much it loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_pack.convert import plan
from moe_pack.convert.cli.options import known_facts, write_output
from moe_pack.convert.options import PlanOrder
from moe_pack.formats.base import cli
from moe_pack.formats.hub.cli import MODEL

if TYPE_CHECKING:
    from moe_pack.convert.making import MadePlans

FOR_VLLM = (
    "for vLLM: moe-pack export --to compressed-tensors quantizes again what vLLM's codes cannot keep, and says what "
    "that loses; the loss here is the pack's"
)
_BOTH_STACKS = "tokens/s count encoder and decoder for every token; the tokens of an answer go through the decoder only"


@click.command("plan")
@click.argument("path", type=MODEL)
@MODEL.list_option
@cli.options_from(PlanOrder)
@cli.command_errors(interrupted="interrupted")
def plan_command(path: str, options: PlanOrder) -> None:
    """Find the pack of PATH that decodes fastest in --target-vram and loses at most --max-loss.

    PATH is a checkpoint, as for convert; or a config.json, or the name of a published model, because no weights are
    read. Nothing is converted.

    Three plans are printed: for the given loss, a quarter of it, and four times it. The first is the one that --output
    writes and that convert --target-vram begins with.
    """
    from moe_pack.convert.making import make_plan

    with cli.TerminalProgress() as progress:
        made = make_plan(replace(options, source=path, machine=known_facts(Path())), progress)
    first = made.offers[0].planned
    assert first is not None, "without a plan for the given loss, an error was raised"
    for note in made.notes:
        click.echo(note, err=True)
    if options.output is not None:
        write_output(options.output, plan.plan_bytes(first.decision, made.model.spec), "--output")
    if options.as_json:
        click.echo(json.dumps(_as_json(path, made), indent=2))
        return
    for line in _lines(path, made, first):
        click.echo(line)
    if options.output is not None:
        click.echo(
            f"\n{options.output}: the first plan; convert by it: moe-pack convert {path} --plan {options.output}"
        )


def _lines(path: str, made: MadePlans, first: plan.EstimatedPlan) -> Iterator[str]:
    target, losses = made.target, made.model.losses
    yield plan.model_text(made.model.spec, path)
    yield made.origin
    for line in made.defaults:
        yield f"by default {line}"
    if (stored := plan.kv_text(target)) is not None:
        yield stored
    yield ""
    yield from plan.option_lines(made.offers, losses, target.kind)
    yield plan.speed_note(target.kind)
    if len(made.offers) > 1:
        yield "the first is taken; bits: of an expert weight; read a token: bytes that are not in memory"
    yield ""
    yield from plan.share_lines(first)
    yield ""
    yield from plan.decision_lines(first)
    if (gap := plan.gap_text(first)) is not None:
        yield gap
    if target.preset == "floe":
        yield plan.compression_text(first)
    if target.purpose == "vllm":
        yield FOR_VLLM
    if made.model.spec.encoder is not None:
        yield _BOTH_STACKS


def _as_json(path: str, made: MadePlans) -> dict[str, Any]:
    losses, target = made.model.losses, made.target
    return {
        "model": path,
        "origin": losses.origin,
        "is_assumed": not made.is_measured,
        "target_bytes": target.budget_bytes,
        "device": target.device,
        "defaults": made.defaults,
        "plans": [plan.option_json(offer, losses, target.kind) for offer in made.offers],
    }
