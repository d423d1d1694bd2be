"""The command `moe-pack plan`: what would fit, how fast, at what loss; nothing is converted."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from moe_pack.calib.profile import Profile, assumed_losses, losses_of
from moe_pack.convert import find_checkpoint, lossless_formats, with_kept
from moe_pack.convert.cli.convert import dense_dtypes
from moe_pack.convert.cli.options import known_facts
from moe_pack.convert.plan import (
    EstimatedPlan,
    Planner,
    PlanningModel,
    PlanOption,
    Target,
    compression_text,
    decision_lines,
    defaults_text,
    gap_text,
    model_text,
    option_json,
    option_lines,
    plan_bytes,
    planner_for,
    preset_decision,
    share_lines,
)
from moe_pack.formats import (
    ConversionError,
    Matrix,
    ModelSpec,
    PartFormat,
    PlanError,
    Selector,
    UsageError,
    dense_roles,
    option,
)
from moe_pack.formats.cli import command_errors, options_from
from moe_pack.formats.errors import MoePackError
from moe_pack.formats.families import Checkpoint, model_spec
from moe_pack.runtime import MachineFacts

# What is offered beside the loss asked for, by how much of it.
_OTHERS = ((0.25, "a quarter of the loss"), (4.0, "four times the loss"))
_UNTRIED = "tokens/s are foretold for moe-run's graph engine, which pulls rows; no figure from a GPU exists yet"
_BOTH_STACKS = "tokens/s are of tokens that go through encoder and decoder; those of an answer go through the decoder"


@dataclass(frozen=True, slots=True, eq=False)
class PlanRequest:
    """What is planned, all of it: where the model is, and what is known of it."""

    name: str
    target: Target
    model: PlanningModel
    profile: Profile | None
    defaults: list[str]

    @property
    def origin(self) -> str:
        """What losses and routes rest on, in plain words."""
        if self.profile is not None:
            return f"losses and routes: {self.model.losses.origin}"
        return f"losses {self.model.losses.origin}; routes drawn evenly; moe-pack profile measures both"


@dataclass(frozen=True, slots=True)
class PlanCommandOptions:
    """What `plan` was asked for."""

    profile: Path | None = field(
        default=None,
        metadata=option(
            "--profile",
            metavar="DIR",
            help="A profile of this model (moe-pack profile). Without, losses are assumed and routes drawn.",
        ),
    )
    target: Target | None = None
    selector: Selector | None = field(
        default=None, metadata=option("--selector", help="This selector kind only.  [default: the fastest]")
    )
    sparsity: float | None = field(
        default=None,
        metadata=option("--sparsity", metavar="S", help="With --preset floe: the share of neurons that shall not run."),
    )
    output: Path | None = field(
        default=None,
        metadata=option(
            "--output",
            "-o",
            path="file",
            metavar="FILE",
            help="Write the first plan there, for moe-pack convert --plan.",
        ),
    )
    as_json: bool = field(default=False, metadata=option("--json", help="Print the plans as JSON."))

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
        if self.target is None:
            raise UsageError("--target-vram: says what memory to plan for; give it, such as 11G")
        if self.sparsity is not None and self.target.preset != "floe":
            raise UsageError("--sparsity: is of --preset floe; plans decide it by themselves, leave it out")
        if self.selector is not None and self.target.preset is not None:
            raise UsageError(f"--selector: preset {self.target.preset} decides by itself; leave it out")

    def narrowed(self) -> Target:
        """Returns the target for this machine, narrowed to the selector and the sparsity that were asked for."""
        assert self.target is not None, "`check` has seen it"
        selectors = self.target.selectors if self.selector is None else (self.selector,)
        return replace(self.target.resolved(), selectors=selectors, sparsity=self.sparsity)


@click.command("plan", short_help="Say what of PATH would fit a memory, how fast, at what loss.")
@click.argument("path")
@options_from(PlanCommandOptions)
@command_errors(interrupted="interrupted")
def plan_command(path: str, options: PlanCommandOptions) -> None:
    """Plan the pack of PATH that decodes fastest in --target-vram and loses at most --max-loss.

    PATH is a checkpoint, as for convert; or, since no weights are read, a config.json or the name of a published model.
    Three plans are made: for the loss asked, a quarter of it, and four times; the first is the one that is taken.
    """
    facts = known_facts(Path())
    wanted = _wanted(path, options.profile, options.narrowed(), facts)
    model = wanted.model
    planner = planner_for(wanted.target, model.spec, model.dense_dtypes, model.losses, wanted.profile, facts)
    offers = list(_offers(planner, wanted))
    taken = offers[0].planned
    assert taken is not None, "a plan that is asked for is there, or an error was raised"
    if options.output is not None:
        _write(options.output, plan_bytes(taken.decision, model.spec))
    if options.as_json:
        click.echo(json.dumps(_as_json(wanted, offers), indent=2))
        return
    for line in _lines(wanted, offers, taken):
        click.echo(line)
    if options.output is not None:
        click.echo(f"\n{options.output}: the first plan; moe-pack convert {path} --plan {options.output} makes it")


def _wanted(path: str, folder: Path | None, target: Target, facts: MachineFacts | None) -> PlanRequest:
    spec, dtypes, kept = _model(path)
    profile = None if folder is None else Profile(folder)
    if profile is not None and profile.spec != spec:
        raise PlanError(f"--profile {folder}: is of another model; profile {path}")
    losses = with_kept(assumed_losses(spec) if profile is None else losses_of(profile), kept)
    return PlanRequest(path, target, PlanningModel(spec, dtypes, losses), profile, defaults_text(target, spec, facts))


def _model(path: str) -> tuple[ModelSpec, tuple[str, ...], dict[Matrix, PartFormat]]:
    """The model, the dtype of each dense tensor, and what keeps its experts without loss.

    All is bfloat16, which a plan may have anyway, where only its dimensions are known.
    """
    folder = Path(path)
    is_hub_id = "/" in path and not folder.exists()
    if is_hub_id or (folder.is_dir() and any(folder.glob("*.safetensors"))):
        checkpoint = Checkpoint(find_checkpoint(path))
        try:
            return checkpoint.spec, dense_dtypes(checkpoint), lossless_formats(checkpoint)
        finally:
            checkpoint.close()
    spec = model_spec(path)
    return spec, ("BF16",) * len(dense_roles(spec)), {}


def _offers(planner: Planner, wanted: PlanRequest) -> Iterator[PlanOption]:
    """The plan asked for, and two beside it; of a paper's pack, that one alone.

    Raises:  PlanError or RunError if there is none as asked.
    """
    target, losses = wanted.target, wanted.model.losses
    if target.preset is not None:
        decision = preset_decision(target.preset, wanted.model, target.sparsity)
        yield PlanOption(f"preset {target.preset}", planner.estimate(decision))
        return
    nats = target.limit.nats(losses.nll_per_kl)
    yield PlanOption(f"asked: {target.limit.text()}", planner.plan(nats))
    for factor, name in _OTHERS:
        yield _other(planner, target.limit.times(factor).nats(losses.nll_per_kl), name)


def _other(planner: Planner, nats: float, name: str) -> PlanOption:
    try:
        return PlanOption(name, planner.plan(nats))
    except MoePackError as fault:  # the plan that was asked for is there all the same
        return PlanOption(name, None, str(fault))


def _lines(wanted: PlanRequest, offers: list[PlanOption], taken: EstimatedPlan) -> Iterator[str]:
    target, losses = wanted.target, wanted.model.losses
    yield model_text(wanted.model.spec, wanted.name)
    yield wanted.origin
    for line in wanted.defaults:
        yield f"by default {line}"
    yield ""
    yield from option_lines(offers, losses)
    if len(offers) > 1:
        yield "the first is taken; read a token: what is not in memory; bits: of an expert weight"
    yield ""
    yield from share_lines(taken)
    yield ""
    yield from decision_lines(taken)
    if (gap := gap_text(taken)) is not None:
        yield gap
    if target.preset == "floe":
        yield compression_text(taken)
    if target.device == "cuda":
        yield _UNTRIED
    if wanted.model.spec.encoder is not None:
        yield _BOTH_STACKS


def _as_json(wanted: PlanRequest, offers: list[PlanOption]) -> dict[str, Any]:
    return {
        "model": wanted.name,
        "origin": wanted.model.losses.origin,
        "is_assumed": wanted.profile is None,
        "target_bytes": wanted.target.budget_bytes,
        "device": wanted.target.device,
        "defaults": wanted.defaults,
        "plans": [option_json(offer, wanted.model.losses) for offer in offers],
    }


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as fault:
        raise ConversionError(f"{path}: cannot be written ({fault.strerror})") from fault
