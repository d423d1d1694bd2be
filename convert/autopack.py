"""How much loss to plan for next, so that the loss measured holds: nothing is read or written here.

A plan's loss is foretold in nats; what its pack loses is measured. Of small losses the one is nearly a multiple of the
other, so the next plan's nats are the last one's times what is allowed over what was measured, and a little less. A
pack that holds but leaves much of what is allowed unused is tried once more with more.

One command from checkpoint to pack for a target: plan, convert, measure, and again until the loss measured holds.

    output.work/   wish.json, reference/, plan-N.json, attempt-N/ (a pack), attempt-N.json (what was measured of it)
    output/        the attempt that holds, renamed; its plan.json tells what it was made for

Every step can be killed: begun again with the same wish, it goes on with what is there. A later attempt copies from the
one before it what both store alike.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_pack.calib.evaluate import (
    QUALITY_FILE,
    Quality,
    Reference,
    ThresholdRule,
    evaluate,
    make_reference,
    measure_thresholds,
)
from moe_pack.calib.forward import Tokens
from moe_pack.calib.profile import Profile, attach, hottest_first
from moe_pack.convert.pipeline import MEMORY_BYTES, convert, layout_for, memory_line
from moe_pack.convert.plan import Decision, plan_bytes, read_plan
from moe_pack.formats import NO_PROGRESS, ConversionError, Pack, Progress, canonical, dump, load, parse
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.manifest import MANIFEST_FILE
from moe_pack.formats.sidecar import read_sidecar, write_sidecar
from moe_pack.formats.writer import SteppedFolder
from moe_pack.runtime.model import TORCH, Operations

MAX_ATTEMPTS = 10
_AIM = 0.95  # of what is allowed, aimed at
_ENOUGH = 0.85  # of what is allowed, from which a pack that holds is good enough
_ENOUGH_ATTEMPTS = 4  # after which one that holds is, whatever it leaves unused
_LEAST_STEP = 1.03  # a change of nats not worth a conversion
_MOST_LOOSER, _MOST_TIGHTER, _LEAST_TIGHTER = 4.0, 0.2, 0.93


@dataclass(frozen=True, slots=True)
class MeasuredAttempt:
    """A plan made into a pack and measured.

    `nats`: that were planned for.   `measured`: what counts against what is allowed, in the same unit: the upper end
    of the 95% interval.
    """

    nats: float
    measured: float


def best_of(attempts: Sequence[MeasuredAttempt], allowed: float) -> int | None:
    """Which attempt holds and was planned with the most nats; None where none holds."""
    holding = [number for number, attempt in enumerate(attempts) if attempt.measured <= allowed]
    return max(holding, key=lambda number: attempts[number].nats, default=None)


def next_nats(attempts: Sequence[MeasuredAttempt], allowed: float, first: float) -> float | None:
    """The nats to plan for next; None where the best attempt so far is the pack to keep.

    Args:    first: for the first attempt.
    """
    if not attempts:
        return first
    best = best_of(attempts, allowed)
    failing = min((attempt.nats for attempt in attempts if attempt.measured > allowed), default=None)
    if best is None:
        assert failing is not None, "one of the two"
        worst = min(attempts, key=lambda attempt: attempt.nats)
        return worst.nats * min(max(_AIM * allowed / worst.measured, _MOST_TIGHTER), _LEAST_TIGHTER)
    held = attempts[best]
    if held.measured >= _ENOUGH * allowed or len(attempts) >= _ENOUGH_ATTEMPTS:
        return None
    wanted = held.nats * min(_AIM * allowed / max(held.measured, 1e-12), _MOST_LOOSER)
    if failing is not None:
        wanted = min(wanted, (held.nats * failing) ** 0.5)
    return wanted if wanted >= _LEAST_STEP * held.nats else None


MADE_FILE = "made.json"
_WISH_FILE = "wish.json"


@dataclass(frozen=True, slots=True, eq=False)
class PackGoal:
    """What a pack shall be, and how it is told whether it is.

    `identity`: digests and values of all that decides the pack.   `decide`: the decision for so many nats of loss.
    `first_nats`: to begin with.   `allowed`: of what `measure` makes of a quality; None: whatever it loses.
    `verdict`: a line on a quality.
    """

    identity: Mapping[str, str]
    decide: Callable[[float], Decision]
    first_nats: float
    allowed: float | None
    measure: Callable[[Quality], float]
    verdict: Callable[[Quality], str]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan and what its pack lost, as the sidecar `made.json` lists them."""

    nats: float
    measured: float
    content_bytes: int


@dataclass(frozen=True, slots=True)
class AutoPackResult:
    """The sidecar `made.json` of a pack made for a target: all attempts, and which one it is."""

    wish: tuple[tuple[str, ...], ...]
    attempts: tuple[Attempt, ...]
    taken: int
    quality: Quality


class AutoPacker:
    """Makes one pack. Owns the work folder's lock while it runs.

    Args:    tokens: text to measure on, not used for calibration.   on_step: called before each change of its own to
             the drive; what it calls has steps of its own.   workers, memory_bytes: as `convert` takes them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        profile: Profile,
        tokens: Tokens,
        output: Path,
        wish: PackGoal,
        workers: int,
        progress: Progress = NO_PROGRESS,
        operations: Operations = TORCH,
        on_step: Callable[[str], None] = lambda step: None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._checkpoint = checkpoint
        self._profile = profile
        self._tokens = tokens
        self._output = output
        self._wish = wish
        self._workers = workers
        self._memory_bytes = memory_bytes
        self._progress = progress
        self._operations = operations
        self._on_step = on_step
        self._work = work_folder(output)
        self._drive = SteppedFolder(self._work, lambda step: on_step(f"{step.action} {step.path}"))
        self._identity = tuple(sorted((name, value) for name, value in wish.identity.items()))

    def make(self) -> AutoPackResult:
        """The pack in its output folder; what was there of it already is not made again.

        Raises:  ConversionError if the folder holds something else, or no pack within the loss was found; what making
                 and measuring packs raises.
        """
        if (found := self._finished()) is not None:
            self._remove(self._work)
            return found
        self._drive.make()
        self._drive.lock("another command is making this pack; wait for it, or stop it")
        try:
            self._claim()
            reference = make_reference(self._checkpoint, self._tokens, self._work / "reference", self._progress)
            attempts = self._attempts(reference)
            return self._finish(attempts)
        finally:
            self._drive.close()

    def _finished(self) -> AutoPackResult | None:
        """What the output folder holds, if it was made for this wish."""
        if not (self._output / MANIFEST_FILE).exists():
            if self._output.exists() and (not self._output.is_dir() or any(self._output.iterdir())):
                raise ConversionError(f"{self._output}: holds something else; give a new or empty folder")
            return None
        with Pack(self._output) as pack:
            found = read_sidecar(self._output, MADE_FILE, AutoPackResult, pack.manifest.root)
        if found is None or found.wish != self._identity:
            raise ConversionError(
                f"{self._output}: holds a pack made otherwise; give another output folder, or remove this one"
            )
        return found

    def _claim(self) -> None:
        path, wanted = self._work / _WISH_FILE, canonical(dict(self._identity))
        if not path.exists():
            self._drive.replace(_WISH_FILE, wanted)
        elif path.read_bytes() != wanted:
            raise ConversionError(
                f"{self._work}: holds what was begun for another target or with other options; repeat that command, "
                "or remove the folder"
            )

    def _attempts(self, reference: Reference) -> list[Attempt]:
        """All attempts, those of earlier runs among them, until one holds."""
        wish, tried = self._wish, list[Attempt]()
        if wish.allowed is None:
            return [self._attempt(0, wish.first_nats, reference)]
        while (nats := next_nats(_measures(tried), wish.allowed, wish.first_nats)) is not None:
            holds = best_of(_measures(tried), wish.allowed) is not None
            if len(tried) == MAX_ATTEMPTS and not holds:
                raise ConversionError(
                    f"{self._output}: {MAX_ATTEMPTS} packs were made and none keeps to the loss; allow more with "
                    "--max-loss, or measure on more text with --eval-tokens"
                )
            same = self._same_plan(len(tried), nats)
            if holds and (same is not None or len(tried) == MAX_ATTEMPTS):
                break  # more loss makes no other plan
            tried.append(
                self._attempt(len(tried), nats, reference) if same is None else replace(tried[same], nats=nats)
            )
            self._drop_superseded(tried)
        return tried

    def _same_plan(self, number: int, nats: float) -> int | None:
        """Which earlier attempt had the plan of this one."""
        decided = plan_bytes(self._decision(number, nats), self._checkpoint.spec)
        plans = (self._work / f"plan-{earlier}.json" for earlier in range(number))
        return next((earlier for earlier, plan in enumerate(plans) if plan.read_bytes() == decided), None)

    def _attempt(self, number: int, nats: float, reference: Reference) -> Attempt:
        """Plans, converts and measures; what an earlier run has done of it is read."""
        record = self._work / f"attempt-{number}.json"
        if record.exists():
            return load(Attempt, parse(record.read_bytes(), record.name, ConversionError), record.name, ConversionError)
        decision = self._decision(number, nats)
        folder = self._folder(number)
        self._progress.say(f"attempt {number + 1}: planned to lose {nats:.4g} nats")
        self._convert(decision, folder, self._earlier(number))
        quality = self._measured(decision, folder, reference)
        found = Attempt(nats, self._wish.measure(quality), quality.content_bytes)
        self._progress.say(self._wish.verdict(quality))
        self._drive.replace(record.name, canonical(dump(found)))
        return found

    def _decision(self, number: int, nats: float) -> Decision:
        """The plan of an attempt: decided once, for a machine measured anew would decide otherwise."""
        path = self._work / f"plan-{number}.json"
        if not path.exists():
            self._drive.replace(path.name, plan_bytes(self._wish.decide(nats), self._checkpoint.spec))
        return read_plan(path, self._checkpoint.spec)

    def _earlier(self, number: int) -> Path | None:
        """The last pack made before an attempt's that is still there."""
        folders = (self._folder(earlier) for earlier in reversed(range(number)))
        return next((folder for folder in folders if (folder / MANIFEST_FILE).exists()), None)

    def _convert(self, decision: Decision, folder: Path, earlier: Path | None) -> None:
        checkpoint = self._checkpoint
        order = hottest_first(self._profile, checkpoint, decision.plan.selector, decision.sparsity)
        layout = layout_for(checkpoint, decision.plan)
        if limited := memory_line(checkpoint, decision.plan, layout, self._workers, self._memory_bytes):
            self._progress.say(limited)
        convert(
            checkpoint,
            decision.plan,
            folder,
            self._workers,
            progress=self._progress,
            on_step=lambda step: self._on_step(f"{step.action} {step.path}"),
            order=order,
            earlier=earlier,
            calibration=self._profile,
            memory_bytes=self._memory_bytes,
        )

    def _measured(self, decision: Decision, folder: Path, reference: Reference) -> Quality:
        """Thresholds by the decision, then the loss; both are read where they are known."""
        progress, operations = self._progress, self._operations
        rule = threshold_rule(decision)
        if rule is not None:
            with Pack(folder) as pack:
                self._on_step("thresholds")
                measure_thresholds(pack, self._profile.tokens(), rule, progress, operations=operations)
        with Pack(folder) as pack:
            known = read_sidecar(folder, QUALITY_FILE, Quality, pack.manifest.root)
            if known is not None and known.text_sha256 == self._tokens.sha256:
                return known
            self._on_step("evaluate")
            found = evaluate(pack, self._tokens, progress, reference, operations=operations)
            write_sidecar(folder, QUALITY_FILE, found, pack.manifest.root)
        return found

    def _drop_superseded(self, tried: list[Attempt]) -> None:
        """Removes the packs that are neither the best nor the last one, which the next is copied from."""
        assert self._wish.allowed is not None, "one attempt supersedes nothing"
        best = best_of(_measures(tried), self._wish.allowed)
        for number in range(len(tried) - 1):
            if number != best:
                self._remove(self._folder(number))

    def _finish(self, tried: list[Attempt]) -> AutoPackResult:
        taken = 0 if self._wish.allowed is None else best_of(_measures(tried), self._wish.allowed)
        assert taken is not None, "attempts end with one that holds"
        folder = self._folder(taken)
        with Pack(folder) as pack:
            root = pack.manifest.root
            self._on_step("attach")
            attach(pack, self._profile)
        quality = read_sidecar(folder, QUALITY_FILE, Quality, root)
        assert quality is not None, "every attempt was measured"
        made = AutoPackResult(self._identity, tuple(tried), taken, quality)
        self._on_step(MADE_FILE)
        write_sidecar(folder, MADE_FILE, made, root)
        self._on_step("rename")
        try:
            folder.replace(self._output)
        except OSError as fault:
            raise ConversionError(
                f"{self._output}: the finished pack {folder} cannot be moved there ({fault.strerror}); mend that, then "
                "run the same command again"
            ) from fault
        self._remove(self._work)
        return made

    def _folder(self, number: int) -> Path:
        return self._work / f"attempt-{number}"

    def _remove(self, folder: Path) -> None:
        if folder.exists():
            self._on_step(f"remove {folder.name}")
            shutil.rmtree(folder)


def work_folder(output: Path) -> Path:
    """Where what is not yet a pack lies: beside the output, on the same drive."""
    return output.with_name(f"{output.name}.work")


def threshold_rule(decision: Decision) -> ThresholdRule | None:
    """How a decision's thresholds are measured; None where all neurons run."""
    if decision.theta is not None:
        return ThresholdRule(theta=decision.theta)
    if not decision.sparsity.any():
        return None
    return ThresholdRule(planned=tuple(map(tuple, decision.sparsity.tolist())))


def _measures(tried: list[Attempt]) -> list[MeasuredAttempt]:
    return [MeasuredAttempt(one.nats, one.measured) for one in tried]
