"""The command `moe-pack plan`: estimates which pack fits into a memory, how fast it decodes, and how much it loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import click

from moe_pack import formats
from moe_pack.convert import plan
from moe_pack.convert.cli.options import known_facts, write_output
from moe_pack.formats.base import cli
from moe_pack.formats.base.commands import stage_of
from moe_pack.formats.base.errors import MoePackError
from moe_pack.formats.hub.cli import MODEL
from moe_pack.formats.parts import specs
from moe_pack.runtime import MachineFacts

if TYPE_CHECKING:
    from moe_pack.calib.profile import Profile
    from moe_pack.convert.plan import PlanningModel, PlanOption

# Plans next to the one for the given loss: factors of that loss.
_OTHERS = ((0.25, "a quarter of the loss"), (4.0, "four times the loss"))
FOR_VLLM = (
    "for vLLM: moe-pack export --to compressed-tensors quantizes again what vLLM's codes cannot keep, and says what "
    "that loses; the loss here is the pack's"
)
_BOTH_STACKS = "tokens/s count encoder and decoder for every token; the tokens of an answer go through the decoder only"


@dataclass(frozen=True, slots=True, eq=False)
class PlanRequest:
    """A model as the user named it, the target, and what is known of the model.

    `profile`: None if routes and losses were not measured.   `defaults`: the choices that the target leaves open, as
    texts.   `notes`: which device `--device auto` is, and why, if none was given; whether the profile is rotated as the
    pack would be, if not.
    """

    name: str
    target: plan.Target
    model: PlanningModel
    profile: Profile | None
    defaults: list[str]
    notes: list[str]

    @property
    def origin(self) -> str:
        """Where losses and routes come from, in words."""
        import numpy as np

        if self.profile is not None:
            return f"losses and routes: {self.model.losses.origin}"
        drawn = "evenly" if not np.ptp(self.model.losses.popularity) else "by that popularity"
        return f"losses {self.model.losses.origin}; routes drawn {drawn}; moe-pack profile measures both"


@dataclass(frozen=True, slots=True)
class PlanCommandOptions:
    """The options of `plan`."""

    profile: Path | None = field(
        default=None,
        metadata=formats.option(
            "--profile",
            metavar="DIR",
            help="A profile of this model (moe-pack profile). Without one, losses are assumed and routes are "
            "drawn evenly.",
        ),
    )
    target: plan.Target | None = None
    selector: formats.Selector | None = field(
        default=None,
        metadata=formats.option("--selector", help="The only selector kind to choose.  [default: the fastest]"),
    )
    sparsity: float | None = field(
        default=None,
        metadata=formats.option(
            "--sparsity", metavar="S", help="With --preset floe: the share of neurons that do not run."
        ),
    )
    output: Path | None = field(
        default=None,
        metadata=formats.option(
            "--output",
            "-o",
            path="file",
            metavar="FILE",
            help="Write the first plan to FILE, for moe-pack convert --plan.",
        ),
    )
    as_json: bool = field(default=False, metadata=formats.option("--json", help="Print the plans as JSON."))

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:  UsageError.
        """
        if self.target is None or self.target.budget_bytes is None:
            raise formats.UsageError("--target-vram is missing; give the memory to plan for, such as --target-vram 11G")
        if self.sparsity is not None and self.target.preset != "floe":
            raise formats.UsageError("--sparsity needs --preset floe, because other plans decide it; remove --sparsity")
        if self.selector is not None and self.target.preset is not None:
            raise formats.UsageError(f"--selector: preset {self.target.preset} decides it; remove --selector")

    def narrowed(self) -> plan.Target:
        """Returns the target with the selector and the sparsity of the options."""
        assert self.target is not None, "`check` refuses that"
        selectors = self.target.selectors if self.selector is None else (self.selector,)
        return replace(self.target, selectors=selectors, sparsity=self.sparsity)


@click.command("plan")
@click.argument("path", type=MODEL)
@MODEL.list_option
@cli.options_from(PlanCommandOptions)
@cli.command_errors(interrupted="interrupted")
def plan_command(path: str, options: PlanCommandOptions) -> None:
    """Find the pack of PATH that decodes fastest in --target-vram and loses at most --max-loss.

    PATH is a checkpoint, as for convert; or a config.json, or the name of a published model, because no weights are
    read. Nothing is converted.

    Three plans are printed: for the given loss, a quarter of it, and four times it. The first is the one that --output
    writes and that convert --target-vram begins with.
    """
    from moe_pack.convert.plan import plan_bytes, planner_for

    facts = known_facts(Path())
    with cli.TerminalProgress() as progress:
        request = _request(path, options.profile, options.narrowed(), facts, progress)
        model = request.model
        planner = planner_for(request.target, model, request.profile, facts, progress)
        offers = list(_offers(planner, request))
    first = offers[0].planned
    assert first is not None, "without a plan for the given loss, an error was raised"
    for note in request.notes:
        click.echo(note, err=True)
    if options.output is not None:
        write_output(options.output, plan_bytes(first.decision, model.spec), "--output")
    if options.as_json:
        click.echo(json.dumps(_as_json(request, offers), indent=2))
        return
    for line in _lines(request, offers, first):
        click.echo(line)
    if options.output is not None:
        click.echo(
            f"\n{options.output}: the first plan; convert by it: moe-pack convert {path} --plan {options.output}"
        )


def _request(
    path: str, profile_folder: Path | None, target: plan.Target, facts: MachineFacts | None, progress: formats.Progress
) -> PlanRequest:
    from moe_pack.calib.profile import Profile, assumed_losses, losses_of
    from moe_pack.calib.quantize import usual_repeats
    from moe_pack.convert import with_kept
    from moe_pack.convert.plan import PlanningModel, choose_target_device, defaults_text, with_kv_dtype
    from moe_pack.convert.plan.rotation import PlanRotation

    spec, dtypes, lossless = _model(path, progress)
    profile = None if profile_folder is None else Profile(profile_folder)
    if profile is not None and profile.spec != spec:
        raise formats.PlanError(f"--profile {profile_folder}: is a profile of another model; give a profile of {path}")
    losses = with_kept(assumed_losses(spec) if profile is None else losses_of(profile), lossless)
    rotation = PlanRotation(None if profile is None or not target.has_our_parts else profile.rotation())
    is_repeated = losses.quantizer == "calibrated" and not lossless and target.has_our_parts
    repeats = usual_repeats(spec.expert.source_size) if is_repeated else 0
    model = PlanningModel(specs.with_repeats(spec, repeats), dtypes, losses, rotation)
    target, device_line = choose_target_device(target, spec, dtypes)
    notes = list(filter(None, [device_line, None if profile is None else rotation.note(profile)]))
    target = with_kv_dtype(target, spec, dtypes)
    if profile is not None and profile.facts.imatrix is not None:
        profile = None  # it has no routes, and its popularity is among the losses
    return PlanRequest(path, target, model, profile, defaults_text(target, spec, facts), notes)


def _model(
    path: str, progress: formats.Progress
) -> tuple[formats.ModelSpec, tuple[str, ...], dict[formats.Matrix, formats.PartFormat]]:
    """Returns the model, the dtype of each dense tensor, and the formats that keep its experts without loss.

    If only the model's dimensions are known, everything counts as bfloat16, which every plan may use.
    """
    from moe_pack.convert import dense_dtypes, find_checkpoint, lossless_formats
    from moe_pack.convert.hub import open_streamed
    from moe_pack.formats.families import Checkpoint, model_spec
    from moe_pack.formats.gguf import find_gguf

    folder = Path(path)
    is_on_hub = "/" in path and not folder.exists()
    has_weights = find_gguf(folder) is not None or (folder.is_dir() and any(folder.glob("*.safetensors")))
    if is_on_hub or has_weights:
        with stage_of(progress, "reading the checkpoint"):
            # On the hub, a plan needs the headers of the weights' files only.
            source = find_checkpoint(path) if has_weights else open_streamed(path, Path(gettempdir()))
            with closing(Checkpoint(source)) as checkpoint:
                return checkpoint.spec, dense_dtypes(checkpoint), lossless_formats(checkpoint)
    spec = model_spec(path)
    return spec, specs.usual_dtypes(spec), {}


def _offers(planner: plan.Planner, request: PlanRequest) -> Iterator[PlanOption]:
    """Yields the plan for the given loss and two others; with a preset, the paper's plan only.

    Raises:  PlanError or RunError if there is no plan for the given loss.
    """
    from moe_pack.convert.plan import PlanOption, preset_decision

    target, losses, limit = request.target, request.model.losses, request.target.loss_limit
    nats = None if limit is None else limit.nats(losses.nll_per_kl)
    if target.preset is not None:
        decision = preset_decision(target.preset, request.model, target.sparsity, nats)
        yield PlanOption(f"preset {target.preset}", planner.estimate(decision))
        return
    assert limit is not None and nats is not None, "only a paper's pack has no limit"
    yield PlanOption(f"asked: {limit.text()}", planner.plan(nats))
    for factor, name in _OTHERS:
        yield _other(planner, limit.times(factor).nats(losses.nll_per_kl), name)


def _other(planner: plan.Planner, nats: float, name: str) -> PlanOption:
    from moe_pack.convert.plan import PlanOption

    try:
        return PlanOption(name, planner.plan(nats))
    except MoePackError as fault:  # the plan for the given loss exists
        return PlanOption(name, None, str(fault))


def _lines(request: PlanRequest, offers: list[PlanOption], first: plan.EstimatedPlan) -> Iterator[str]:
    from moe_pack.convert.plan import (
        compression_text,
        decision_lines,
        gap_text,
        kv_text,
        model_text,
        option_lines,
        share_lines,
        speed_note,
    )

    target, losses = request.target, request.model.losses
    yield model_text(request.model.spec, request.name)
    yield request.origin
    for line in request.defaults:
        yield f"by default {line}"
    if (stored := kv_text(target)) is not None:
        yield stored
    yield ""
    yield from option_lines(offers, losses, target.kind)
    yield speed_note(target.kind)
    if len(offers) > 1:
        yield "the first is taken; bits: of an expert weight; read a token: bytes that are not in memory"
    yield ""
    yield from share_lines(first)
    yield ""
    yield from decision_lines(first)
    if (gap := gap_text(first)) is not None:
        yield gap
    if target.preset == "floe":
        yield compression_text(first)
    if target.purpose == "vllm":
        yield FOR_VLLM
    if request.model.spec.encoder is not None:
        yield _BOTH_STACKS


def _as_json(request: PlanRequest, offers: list[PlanOption]) -> dict[str, Any]:
    from moe_pack.convert.plan import option_json

    return {
        "model": request.name,
        "origin": request.model.losses.origin,
        "is_assumed": request.profile is None,
        "target_bytes": request.target.budget_bytes,
        "device": request.target.device,
        "defaults": request.defaults,
        "plans": [option_json(offer, request.model.losses, request.target.kind) for offer in offers],
    }
