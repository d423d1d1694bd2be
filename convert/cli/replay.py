"""The command `moe-pack replay`: runs policies and budgets on recorded routes, without computing anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from moe_pack import formats
from moe_pack.calib import profile
from moe_pack.convert import plan
from moe_pack.convert.cli.options import known_facts
from moe_pack.formats.base import cli, commands
from moe_pack.formats.hub.cli import pack_folder
from moe_pack.formats.parts.specs import first_moe_layers
from moe_pack.runtime import USUAL_DISK, offload
from moe_pack.runtime.engine.machine import disk_cutover

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moe_pack.runtime.offload.replay import PathShares, ReplayResult

_PROFILE_CONTEXT = 4096  # tokens of key-value cache in a budget, if no run says how many
_NAMES: tuple[offload.PolicyName, ...] = get_args(offload.PolicyName)


@dataclass(frozen=True, slots=True)
class ReplayInput:
    """The routes that are replayed."""

    place: str
    passes: offload.Passes
    record: offload.Recording | None  # the recorded run that they come from; None: they come from a profile
    paths: PathShares | None  # predict experts from routes; None: nothing does
    context_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """The replays of one budget."""

    plan: offload.BudgetPlan
    num_pages: int
    alone: dict[offload.PolicyName, ReplayResult]  # by policy, without prediction
    predicted: dict[offload.PolicyName, ReplayResult]  # with prediction, of policies whose predictions can be replayed
    optimum: ReplayResult  # of Belady, which knows the future
    best: offload.PolicyName | None  # the policy that `auto` takes; None if only one was replayed


def _budgets(text: str) -> tuple[int, ...]:
    return tuple(commands.read_size(size) for size in text.split(","))


def _policies(text: str) -> tuple[offload.PolicyName, ...]:
    if text == "all":
        return _NAMES
    for name in text.split(","):
        if name not in offload.PRESETS:
            similar = commands.did_you_mean(name, offload.PRESETS)
            similar = commands.did_you_mean(name, offload.PRESETS)
            raise ValueError(f"found {name!r}, expected all, or some of {', '.join(offload.PRESETS)}{similar}")
    return tuple(offload.PRESETS[name].name for name in text.split(","))


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of `replay`."""

    pack: Path = field(
        metadata=formats.option("--pack", help="The pack of the run, with the thresholds that it had then.")
    )
    budgets: tuple[int, ...] = field(
        metadata=formats.option("--budget SIZE,...", parse=_budgets, help="Budgets to replay, such as 1G,512M.")
    )
    policies: tuple[offload.PolicyName, ...] = commands.option_field(
        _NAMES,
        "--policy NAME,...",
        parse=_policies,
        default_text="all",
        help=f"all, or some of {', '.join(offload.PRESETS)}.",
    )
    read_rate: int | None = commands.option_field(
        None,
        "--read-rate SIZE",
        parse=commands.read_size,
        help="Bytes that the disk reads a second, such as 1.5G: prints the tokens a second if only reads take time.",
    )
    as_json: bool = commands.option_field(False, "--json", help="Print everything as JSON.")


@click.command("replay")
@click.argument("record", type=click.Path(path_type=Path))
@cli.options_from(ReplayOptions)
@cli.command_errors(interrupted="interrupted")
def replay_command(record: Path, options: ReplayOptions) -> None:
    """Run policies with different budgets on the routes of RECORD, without computing anything.

    RECORD is a file of moe-run --record, or a profile. The held-out text of a profile counts as if it was decoded token
    by token.

    For each policy it prints how many experts would have been in memory when their router chose them (hits), and how
    many bytes would have been read for a token. The optimum evicts with knowledge of the future (Belady).
    """
    with formats.Pack(pack_folder(options.pack)) as pack:
        traffic = _replay_input(record, pack)
        with cli.TerminalProgress() as progress:
            progress.begin(
                commands.Stage("replaying", (2 * len(options.policies) + 1) * len(options.budgets), "replays")
            )
            outcomes = [_replayed(traffic, pack, budget, options.policies, progress) for budget in options.budgets]
            progress.end()
        total = int(pack.index.size.sum())
    if options.as_json:
        click.echo(json.dumps([_as_json(outcome) for outcome in outcomes], indent=2))
        return
    for line in _lines(traffic, outcomes, total, options.read_rate):
        click.echo(line)


def _replay_input(path: Path, pack: formats.Pack) -> ReplayInput:
    if path.is_dir():
        found = profile.Profile(path)
        if (found.spec.router, found.spec.moe_layers) != (pack.spec.router, pack.spec.moe_layers):
            raise formats.RunError(f"{path}: is a profile of another model; give a profile of the pack's model")
        context = min(_PROFILE_CONTEXT, pack.spec.max_position_embeddings)
        return ReplayInput(str(path), plan.held_out_passes(found), None, found.paths(), context)
    record = offload.read_recording(path)
    if record.facts.root != pack.manifest.root:
        raise formats.RunError(
            f"{path}: was recorded with another pack, or before its thresholds changed; record the run again"
        )
    passes, router = record.passes, pack.spec.router
    shape = (len(pack.spec.moe_layers), router.num_experts, router.num_experts_per_tok)
    recorded = (passes.routes.shape[1], passes.num_experts, passes.routes.shape[2])
    if recorded != shape:
        raise formats.RunError(
            f"{path}: found layers, experts and experts a token {recorded}, expected {shape}: the pack's"
        )
    routing = offload.Routing.open(pack)
    return ReplayInput(
        str(path), record.passes, record, routing.paths if routing else None, record.facts.context_tokens
    )


def _replayed(
    traffic: ReplayInput,
    pack: formats.Pack,
    budget_bytes: int,
    names: Sequence[offload.PolicyName],
    progress: formats.Progress,
) -> ReplayComparison:
    """Replays each policy with the pages of a budget; for the run's own budget, with the pages that the run had."""
    from moe_pack.runtime.offload import replay

    run = traffic.record
    is_of_run = run is not None and run.facts.budget_bytes == budget_bytes
    num_pages = run.facts.num_pages if run is not None and is_of_run else None
    division, has_selector = _division(pack, budget_bytes, traffic.context_tokens, num_pages)
    num_pages = division.num_pages if num_pages is None else num_pages
    pages = offload.expert_pages(pack.layout, division.page_bytes, has_selector)
    extents, passes = pack.index.size, traffic.passes
    if num_pages < pages.max():
        raise formats.RunError(
            f"{traffic.place}: found {num_pages} pages, expected {pages.max()} at least; record the run again"
        )
    k, num_encoder_layers = pack.spec.router.num_experts_per_tok, first_moe_layers(pack.spec)[-1]
    facts = offload.CacheFacts(pages, num_pages, k, passes.popularity, num_encoder_layers)
    alone, whole = dict[offload.PolicyName, replay.ReplayResult](), dict[offload.PolicyName, replay.ReplayResult]()
    for name in names:
        alone[name] = replay.replay(passes, facts, extents, offload.PRESETS[name].without_prediction())
        progress.advance(1, f"{name} without prediction")
        whole[name] = replay.replay(passes, facts, extents, offload.PRESETS[name], run, traffic.paths)
        progress.advance(1, name)
    predicted = {name: result for name, result in whole.items() if result.prediction in ("recorded", "routes")}
    judged = {name: result for name, result in alone.items() if name != "importance" or passes.scores is not None}
    best = replay.best_of(judged) if len(judged) > 1 else None
    least = replay.optimum(passes, facts, extents)
    progress.advance(1, "the optimum")
    return ReplayComparison(division, num_pages, alone, predicted, least, best)


def _division(
    pack: formats.Pack, budget_bytes: int, context_tokens: int, num_pages: int | None
) -> tuple[offload.BudgetPlan, NDArray[np.bool_]]:
    """Returns the budget's division, and the experts whose selectors stay in memory: bool [L, E].

    They are those of `--policy auto`, or of the run that had `num_pages`. A run that reads single rows has selectors in
    memory; a recording tells it by its number of pages alone.
    """
    from moe_pack.runtime.cpu import is_available
    from moe_pack.runtime.engine.offloaded import popularity_shares, runs_some_neurons
    from moe_pack.runtime.offload.budgets import named_budget, resident_selectors, selector_heat

    routing, predictors = offload.Routing.open(pack), offload.routing_bytes(pack.folder)
    machine = known_facts(pack.folder)
    disk = USUAL_DISK if machine is None else machine.drive
    reads_rows = is_available() and runs_some_neurons(pack) and disk_cutover(pack.layout, disk) > 0
    heat = selector_heat(popularity_shares(pack, routing), pack.thresholds > 0) if reads_rows else None
    heats = [heat, None]
    needs = (pack.layout, budget_bytes, context_tokens, predictors)
    with named_budget("--budget", None):  # the context is that of the recorded run
        plans = [offload.divide_budget(*needs, heat) for heat in heats]
    number = next((n for n, plan in enumerate(plans) if num_pages in (None, plan.num_pages)), 0)
    return plans[number], resident_selectors(pack.layout, heats[number], plans[number].num_selectors)


def _lines(
    traffic: ReplayInput, outcomes: list[ReplayComparison], total_bytes: int, read_rate: int | None
) -> Iterator[str]:
    chunks = traffic.passes.chunks
    prompts = chunks[chunks > 1]
    yield (
        f"{traffic.place}: {int(prompts.sum()):,} tokens of prompts in {len(prompts)} passes, "
        f"{len(chunks) - len(prompts):,} decoded"
    )
    if traffic.record is not None:
        yield _as_run(traffic.record)
    if traffic.passes.scores is None:
        yield "scores are not known; importance uses how often experts were chosen"
    for outcome in outcomes:
        yield ""
        share = outcome.num_pages * outcome.plan.page_bytes / total_bytes
        yield (
            f"budget {formats.size_text(outcome.plan.budget)}: {outcome.num_pages} pages of "
            f"{formats.size_text(outcome.plan.page_bytes)}, memory for {min(share, 1):.0%} of the experts"
        )
        rate = "" if read_rate is None else f" {'tokens/s':>9}"
        yield f"  {'policy':<11} {'in prompts':>10} {'hits':>6} {'read a token':>13}{rate}  with prediction"
        for name, result in outcome.alone.items():
            yield _line(name, result, outcome.predicted.get(name), read_rate)
        yield _line("optimum", outcome.optimum, None, read_rate)
        if outcome.best is not None:
            yield f"  best: {outcome.best}"


def _line(name: str, result: ReplayResult, predicted: ReplayResult | None, read_rate: int | None) -> str:
    decode = result.decode
    prompts = f"{result.prefill.hit_rate:.1%}" if result.prefill.num_needed else "-"
    rate = "" if read_rate is None else f" {decode.tokens_per_second(read_rate):9.1f}"
    prediction = "-"
    if predicted is not None:
        origin = "as in the run" if predicted.prediction == "recorded" else "from paths"
        prediction = f"{predicted.decode.hit_rate:.1%}, {formats.size_text(predicted.decode.bytes_per_token)}, {origin}"
    hits, fetched = f"{decode.hit_rate:>6.1%}", f"{formats.size_text(decode.bytes_per_token):>13}"
    return f"  {name:<11} {prompts:>10} {hits} {fetched}{rate}  {prediction}"


def _as_run(record: offload.Recording) -> str:
    is_decoding = record.passes.is_decode
    needed = max(int(record.needed[is_decoding].sum()), 1)
    facts = record.facts
    return (
        f"run with {facts.policy} in {formats.size_text(facts.budget_bytes)} ({facts.num_pages} pages): "
        f"{int(record.hits[is_decoding].sum()) / needed:.1%} hits in decode"
    )


def _as_json(outcome: ReplayComparison) -> dict[str, Any]:
    return {
        "budget_bytes": outcome.plan.budget,
        "num_pages": outcome.num_pages,
        "page_bytes": outcome.plan.page_bytes,
        "alone": {name: _result_json(result) for name, result in outcome.alone.items()},
        "predicted": {name: _result_json(result) for name, result in outcome.predicted.items()},
        "optimum": _result_json(outcome.optimum),
        "best": outcome.best,
    }


def _result_json(result: ReplayResult) -> dict[str, Any]:
    parts = {"prefill": result.prefill, "decode": result.decode}
    rates = {
        name: asdict(tally) | {"hit_rate": tally.hit_rate, "bytes_per_token": tally.bytes_per_token}
        for name, tally in parts.items()
    }
    return rates | {"prediction": result.prediction}
