"""A pack for a target: plan, convert, measure, and repeat until the loss is within the limit.

    output.work/   wish.json, reference/, plan-N.json, attempt-N/ (a pack), attempt-N.json (its measured loss)
    output/        the attempt that is kept, renamed; its made.json lists all attempts

A killed command continues from these files. An attempt copies from the one before it what both plans store alike.

A plan's loss is an estimate in nats; its pack's loss is measured. Small losses are nearly proportional, so the next
plan gets the last plan's nats times allowed over measured loss, and a little less. A pack that uses little of the
limit is followed by an attempt with more loss.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, log1p
from pathlib import Path

from moe_pack import formats
from moe_pack.calib.evaluate import Reference, evaluate, make_reference, measure_numerics, thresholds
from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile import attach, profiles
from moe_pack.convert import pipeline
from moe_pack.convert.account import Preparation
from moe_pack.convert.options import PackOrder
from moe_pack.convert.plan import Planner, options, plan_file, planned, preset_decision
from moe_pack.convert.plan.rotation import PlanRotation
from moe_pack.formats.base.json_files import Positive
from moe_pack.formats.base.version import installed_version
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import sidecar
from moe_pack.formats.pack.manifests import MANIFEST_FILE
from moe_pack.formats.pack.writer import SteppedFolder
from moe_pack.runtime.engine.numerics import NUMERICS_FILE
from moe_pack.runtime.model import TORCH, Operations
from moe_pack.runtime.quality import QUALITY_FILE, Quality, read_quality

MAX_ATTEMPTS = 10
_AIM = 0.95  # share of the allowed loss that the next plan aims at
_ENOUGH = 0.85  # share of the allowed loss from which a pack within the limit is kept
_ENOUGH_ATTEMPTS = 4  # after so many attempts, a pack within the limit is kept however little it uses
_LEAST_STEP = 1.03  # a smaller factor on the nats is not worth a conversion
_MOST_LOOSER, _MOST_TIGHTER, _LEAST_TIGHTER = 4.0, 0.2, 0.93


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan and the loss of its pack, as the sidecar `made.json` lists them."""

    nats: float  # the plan's estimated loss
    measured: float  # the upper end of the 95% interval of the pack's loss, in the unit of the allowed loss
    content_bytes: Positive


def best_of(attempts: Sequence[Attempt], allowed: float) -> int | None:
    """Returns the attempt within the allowed loss that has the most nats; None if no attempt is within it."""
    within = [number for number, attempt in enumerate(attempts) if attempt.measured <= allowed]
    return max(within, key=lambda number: attempts[number].nats, default=None)


def next_nats(attempts: Sequence[Attempt], allowed: float, first: float) -> float | None:
    """Returns the nats of the next plan, `first` for the first attempt; None if the best attempt is to be kept."""
    if not attempts:
        return first
    best = best_of(attempts, allowed)
    failing = min((attempt.nats for attempt in attempts if attempt.measured > allowed), default=None)
    if best is None:
        assert failing is not None, "an attempt is within the limit or fails"
        worst = min(attempts, key=lambda attempt: attempt.nats)
        return worst.nats * min(max(_AIM * allowed / worst.measured, _MOST_TIGHTER), _LEAST_TIGHTER)
    nats, measured = attempts[best].nats, attempts[best].measured
    if measured >= _ENOUGH * allowed or len(attempts) >= _ENOUGH_ATTEMPTS:
        return None
    following = nats * min(_AIM * allowed / max(measured, 1e-12), _MOST_LOOSER)
    if failing is not None:
        following = min(following, (nats * failing) ** 0.5)
    return following if following >= _LEAST_STEP * nats else None


MADE_FILE = "made.json"
_GOAL_FILE = "wish.json"  # its name is on users' disks


@dataclass(frozen=True, slots=True, eq=False)
class PackGoal:
    """The pack to make: how it is planned, and which loss is allowed."""

    identity: Mapping[str, str]  # digests and values of everything that decides the pack
    decide: Callable[[float], plan_file.Decision]  # returns the decision that loses so many nats
    # Returns the estimated loss of a decision in nats, NaN if there is none.
    estimate: Callable[[plan_file.Decision], float]
    first_nats: float  # of the first attempt
    allowed: float | None  # the largest value of `measure`; None: any
    measure: Callable[[Quality], float]
    rotation: PlanRotation = field(default_factory=PlanRotation)  # of the packs' layers


@dataclass(frozen=True, slots=True)
class AutoPackResult:
    """The sidecar `made.json` of a pack made for a target."""

    wish: tuple[tuple[str, ...], ...]  # the goal's identity, sorted by name
    attempts: tuple[Attempt, ...]  # all of them
    taken: int  # the attempt that became the pack
    quality: Quality


def pack_goal(
    model: planned.PlanningModel,
    planner: Planner | None,
    profile: profiles.Profile,
    tokens: Tokens,
    target: options.Target,
    is_sequential: bool,
) -> PackGoal:
    """Returns the goal of a pack for a target: its plans are the planner's, or a paper's if the target has a preset.

    Args:    planner: not used for a preset.   tokens: the text on which packs are measured.
    """

    def decide(nats: float) -> plan_file.Decision:
        if target.preset is not None:
            return preset_decision(target.preset, model, target.sparsity, nats)
        assert planner is not None, "only a preset decides without one"
        return planner.plan(nats).decision

    limit, measured_in = target.loss_limit, options.USUAL_LIMIT if target.loss_limit is None else target.loss_limit
    return PackGoal(
        identity={
            "source": profile.facts.source,
            "profile": profile.facts.sha256,
            "text": tokens.sha256,
            "target": formats.canonical(formats.dump(target)).decode(),
            "rotation": model.rotation.digest(),
            "sequential": str(is_sequential),
            **{name: installed_version(name) for name in ("moe-pack", "hqq", "torch")},
        },
        decide=decide,
        estimate=model.loss,
        first_nats=0.0 if limit is None else limit.nats(model.losses.nll_per_kl),
        allowed=None if limit is None else log1p(limit.value) if limit.kind == "perplexity" else limit.value,
        measure=lambda quality: measured_loss(quality, measured_in),
        rotation=model.rotation,
    )


def measured_loss(quality: Quality, limit: options.LossLimit) -> float:
    """Returns the upper end of the 95% interval of a loss, in nats: of KL, or of perplexity's growth in logarithm."""
    against = quality.against
    assert against is not None, "measured against the source"
    estimate = against.perplexity_increase if limit.kind == "perplexity" else against.kl
    upper = estimate.value if estimate.upper is None else estimate.upper
    return log1p(upper) if limit.kind == "perplexity" else upper


def loss_text(quality: Quality) -> str:
    """Returns a pack's measured loss as a line for people."""
    against = quality.against
    assert against is not None, "measured against the source"
    increase, kl = against.perplexity_increase, against.kl
    return (
        f"perplexity {increase.value:+.2%} ± {increase.half_width or 0:.2%}, KL {kl.value:.3g} ± "
        f"{kl.half_width or 0:.2g} nats, {formats.size_text(quality.content_bytes)}"
    )


def work_folder(output: Path) -> Path:
    """Returns the folder of unfinished work: next to the output, so that a rename stays on one disk."""
    return output.with_name(f"{output.name}.work")


def threshold_rule(decision: plan_file.Decision) -> thresholds.ThresholdRule | None:
    """Returns the rule for a decision's thresholds; None if all neurons run."""
    if decision.theta is not None:
        return thresholds.ThresholdRule(theta=decision.theta)
    if not decision.sparsity.any():
        return None
    return thresholds.ThresholdRule(planned=tuple(map(tuple, decision.sparsity.tolist())))


@dataclass(eq=False)
class AutoPacker:
    """Makes one pack. Owns the work folder's lock while it runs."""

    checkpoint: Checkpoint
    profile: profiles.Profile
    tokens: Tokens  # the text to measure on, which is not the profile's
    order: PackOrder
    goal: PackGoal
    progress: formats.Progress = formats.NO_PROGRESS
    operations: Operations = TORCH
    # Called before each change of its own to the disk; conversion and measurement announce their own.
    on_step: Callable[[str], None] = lambda step: None

    def __post_init__(self) -> None:
        self._work = work_folder(self.order.output)
        self._folder = SteppedFolder(self._work, lambda step: self.on_step(f"{step.action} {step.path}"))
        self._identity = tuple(sorted((name, value) for name, value in self.goal.identity.items()))

    def make(self) -> AutoPackResult:
        """Makes the pack in its output folder; returns at once if it is there already.

        Raises:  ConversionError if the folder contains something else, or no pack is within the allowed loss; and the
                 errors of conversion and measurement.
        """
        result = self._finished()
        if result is not None:
            self._remove(self._work)
            return result
        self._folder.make()
        self._folder.lock("another command is making this pack; wait for it, or stop it")
        try:
            self._claim()
            reference = make_reference(self.checkpoint, self.tokens, self._work / "reference", self.progress)
            attempts = self._attempts(reference)
            return self._finish(attempts)
        finally:
            self._folder.close()

    def _finished(self) -> AutoPackResult | None:
        """Returns the result of an earlier run with the same goal; None if the output folder is new or empty."""
        output = self.order.output
        if not (output / MANIFEST_FILE).exists():
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise formats.ConversionError(f"{output}: contains something else; give a new or empty folder")
            return None
        with formats.Pack(output) as pack:
            result = sidecar.read_sidecar(output, MADE_FILE, AutoPackResult, pack.manifest.root)
        if result is None or result.wish != self._identity:
            raise formats.ConversionError(
                f"{output}: contains a pack made with other options; give another output folder, or remove this one"
            )
        return result

    def _claim(self) -> None:
        path, content = self._work / _GOAL_FILE, formats.canonical(dict(self._identity))
        if not path.exists():
            self._folder.replace(_GOAL_FILE, content)
        elif path.read_bytes() != content:
            raise formats.ConversionError(
                f"{self._work}: contains unfinished work for another target or with other options; run that command "
                "again, or remove the folder"
            )

    def _attempts(self, reference: Reference) -> list[Attempt]:
        """Makes the attempts that no earlier run has made, and returns all; the best one is within the allowed loss."""
        goal, attempts = self.goal, list[Attempt]()
        if goal.allowed is None:
            return [self._attempt(0, goal.first_nats, reference)]
        while (nats := next_nats(attempts, goal.allowed, goal.first_nats)) is not None:
            number = len(attempts)
            is_within = best_of(attempts, goal.allowed) is not None
            if number == MAX_ATTEMPTS and not is_within:
                raise formats.ConversionError(
                    f"{self.order.output}: none of {MAX_ATTEMPTS} packs is within the allowed loss; allow more with "
                    "--max-loss, or measure on more text with --eval-tokens"
                )
            same = self._same_plan(number, nats)
            if is_within and (same is not None or number == MAX_ATTEMPTS):
                break  # more nats give the same plan
            if same is None:
                attempts.append(self._attempt(number, nats, reference))
            else:
                attempts.append(replace(attempts[same], nats=nats))
            self._drop_superseded(attempts)
        return attempts

    def _same_plan(self, number: int, nats: float) -> int | None:
        plan = plan_file.plan_bytes(self._decision(number, nats), self.checkpoint.spec)
        paths = (self._work / f"plan-{earlier}.json" for earlier in range(number))
        return next((earlier for earlier, path in enumerate(paths) if path.read_bytes() == plan), None)

    def _attempt(self, number: int, nats: float, reference: Reference) -> Attempt:
        """Plans, converts and measures; reads what an earlier run has finished."""
        record = self._work / f"attempt-{number}.json"
        if record.exists():
            return formats.load(
                Attempt,
                formats.parse(record.read_bytes(), record.name, formats.ConversionError),
                record.name,
                formats.ConversionError,
            )
        decision = self._decision(number, nats)
        folder = self._attempt_folder(number)
        estimate = self.goal.estimate(decision)
        how = (
            "no estimate of the loss"
            if isnan(estimate)
            else f"an estimated loss of {planned.two_digits(estimate)} nats"
        )
        self.progress.say(f"attempt {number + 1}: planned with {how}")
        self._convert(decision, folder, self._earlier(number))
        quality = self._measured(decision, folder, reference)
        attempt = Attempt(nats, self.goal.measure(quality), quality.content_bytes)
        self.progress.say(f"measured: {loss_text(quality)}")
        self._folder.replace(record.name, formats.canonical(formats.dump(attempt)))
        return attempt

    def _decision(self, number: int, nats: float) -> plan_file.Decision:
        """Returns the plan of an attempt. It is made once: if the machine is measured again, it would differ."""
        path = self._work / f"plan-{number}.json"
        if not path.exists():
            self._folder.replace(path.name, plan_file.plan_bytes(self.goal.decide(nats), self.checkpoint.spec))
        return plan_file.read_plan(path, self.checkpoint.spec)

    def _earlier(self, number: int) -> Path | None:
        folders = (self._attempt_folder(earlier) for earlier in reversed(range(number)))
        return next((folder for folder in folders if (folder / MANIFEST_FILE).exists()), None)

    def _convert(self, decision: plan_file.Decision, folder: Path, earlier: Path | None) -> None:
        checkpoint, order, plan = self.checkpoint, self.order, decision.plan
        hottest = profiles.hottest_first(self.profile, checkpoint, plan.selector, decision.sparsity)
        rotation = self.goal.rotation.of(plan)
        layout = pipeline.layout_for(checkpoint, plan, rotation)
        if limited := pipeline.memory_line(checkpoint, plan, layout, order.workers, order.memory_bytes):
            self.progress.say(limited)
        pipeline.convert(
            checkpoint,
            plan,
            folder,
            order.workers,
            self.progress,
            on_step=lambda step: self.on_step(f"{step.action} {step.path}"),
            prepared=Preparation(hottest, self.profile, rotation, order.sequential),
            earlier=earlier,
            memory_bytes=order.memory_bytes,
        )

    def _measured(self, decision: plan_file.Decision, folder: Path, reference: Reference) -> Quality:
        """Measures the decision's thresholds, then the loss; reads what an earlier run has measured."""
        progress, operations = self.progress, self.operations
        rule = threshold_rule(decision)
        if rule is not None:
            with formats.Pack(folder) as pack:
                self.on_step("thresholds")
                thresholds.measure_thresholds(pack, self.profile.tokens(), rule, progress, operations=operations)
        with formats.Pack(folder) as pack:
            quality = read_quality(pack)
            if quality is not None and quality.text_sha256 == self.tokens.sha256:
                return quality
            self.on_step("evaluate")
            quality = evaluate(pack, self.tokens, progress, reference, operations=operations)
            sidecar.write_sidecar(folder, QUALITY_FILE, quality, pack.manifest.root)
        return quality

    def _drop_superseded(self, attempts: list[Attempt]) -> None:
        """Removes all packs except the best one and the last one, which the next attempt copies from."""
        assert self.goal.allowed is not None, "one attempt supersedes nothing"
        best = best_of(attempts, self.goal.allowed)
        for number in range(len(attempts) - 1):
            if number != best:
                self._remove(self._attempt_folder(number))

    def _finish(self, attempts: list[Attempt]) -> AutoPackResult:
        taken = 0 if self.goal.allowed is None else best_of(attempts, self.goal.allowed)
        assert taken is not None, "attempts end with one within the allowed loss"
        folder = self._attempt_folder(taken)
        with formats.Pack(folder) as pack:
            root = pack.manifest.root
            self.on_step("attach")
            attach(pack, self.profile)
            self.on_step("numerics")
            numerics = measure_numerics(pack, self.tokens, self.progress)
            if numerics is not None:
                sidecar.write_sidecar(folder, NUMERICS_FILE, numerics, root)
        quality = sidecar.read_sidecar(folder, QUALITY_FILE, Quality, root)
        assert quality is not None, "every attempt was measured"
        result = AutoPackResult(self._identity, tuple(attempts), taken, quality)
        self.on_step(MADE_FILE)
        sidecar.write_sidecar(folder, MADE_FILE, result, root)
        self.on_step("rename")
        try:
            folder.replace(self.order.output)
        except OSError as fault:
            raise formats.ConversionError(
                f"{self.order.output}: the finished pack {folder} cannot be moved there ({fault.strerror}); correct "
                "that, then run the same command again"
            ) from fault
        self._remove(self._work)
        return result

    def _attempt_folder(self, number: int) -> Path:
        return self._work / f"attempt-{number}"

    def _remove(self, folder: Path) -> None:
        if folder.exists():
            self.on_step(f"remove {folder.name}")
            shutil.rmtree(folder)
