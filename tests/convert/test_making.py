"""A pack made for a target, at one go and after being stopped before any of its steps."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.cases import case
from support.commands import done
from support.models import BOOK, TinyMixtral
from support.profiles import Recorder, StoppedError, folder_bytes, profiled, random_tokens

from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.profile import Profile, ProfileOptions, hottest_first
from moe_pack.convert import making
from moe_pack.convert.account import Preparation
from moe_pack.convert.autopack import MADE_FILE, AutoPacker, AutoPackResult, PackGoal, threshold_rule, work_folder
from moe_pack.convert.options import PackOrder, StreamOptions
from moe_pack.convert.pipeline import convert
from moe_pack.convert.plan import Decision, Target
from moe_pack.formats import ConversionError, Pack, UsageError, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.sidecar import read_sidecar
from moe_pack.runtime.quality import Quality

SHAPE = TinyMixtral(intermediate_size=16, num_layers=1, num_experts=2, vocab_size=64)
TEXT = random_tokens(3, 64, 64, seed=5)


@dataclass
class Workplace:
    """A checkpoint with its profile."""

    source: Path
    profile: Profile

    def make(self, output: Path, allowed: float | None, stop_at: int | None = None, name: str = "a goal") -> list[str]:
        """Makes a pack, stopped before a step if given; all steps that were announced."""
        steps: list[str] = []

        def on_step(step: str) -> None:
            steps.append(step)
            if len(steps) - 1 == stop_at:
                raise StoppedError(step)

        checkpoint = Checkpoint(self.source)
        goal = PackGoal({"name": name}, self.decide, lambda decision: 0.1, 0.1, allowed, kl_of)
        order = PackOrder(output=output, workers=1)
        try:
            AutoPacker(checkpoint, self.profile, TEXT, order, goal, Recorder(), on_step=on_step).make()
        finally:
            checkpoint.close()
        return steps

    def decide(self, nats: float) -> Decision:
        """The fewer nats, the more bits; the first expert always at 4."""
        width = 2 if nats > 0.05 else 3 if nats > 0.02 else 8
        four, other = (part_format(bits, 64) for bits in (4, width))
        spec = self.profile.spec
        plans = [uniform_plan(spec, "up", part, part, None, "nearest") for part in (four, other)]
        experts = ((plans[0].experts[0][0], plans[1].experts[0][1]),)
        sparsity = np.full((1, 2), 0.25)
        return Decision(type(plans[0])("up", "nearest", experts, plans[0].dense), sparsity)


def kl_of(quality: Quality) -> float:
    assert quality.against is not None
    return quality.against.kl.value


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("making")
    source = SHAPE.write(folder / "source")
    return Workplace(source, profiled(source, folder / "profile", random_tokens(4, 64, 64), ProfileOptions("none")))


@pytest.fixture(scope="module")
def losses(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the plans at 2, 3 and 8 bits."""
    found = []
    for number, nats in enumerate((0.1, 0.03, 0.01)):
        out = tmp_path_factory.mktemp("losses") / str(number)
        place = Workplace(workplace.source, workplace.profile)
        place.decide = lambda _, nats=nats: workplace.decide(nats)  # type: ignore[method-assign, misc]  # one plan whatever is asked
        place.make(out, None)
        found.append(made_of(out).attempts[0].measured)
    return found


def made_of(output: Path) -> AutoPackResult:
    with Pack(output) as pack:
        found = read_sidecar(output, MADE_FILE, AutoPackResult, pack.manifest.root)
    assert found is not None
    return found


def test_plans_are_tightened_until_the_loss_measured_holds(
    workplace: Workplace, losses: list[float], tmp_path: Path
) -> None:
    allowed = (losses[1] + losses[2]) / 2
    workplace.make(tmp_path / "packed", allowed)
    made = made_of(tmp_path / "packed")
    assert made.attempts[0].measured > allowed >= made.attempts[made.taken].measured
    assert made.quality.against is not None and made.quality.against.kl.value == made.attempts[made.taken].measured
    assert not work_folder(tmp_path / "packed").exists()


def test_a_tightened_pack_is_the_one_converted_directly_with_its_plan(
    workplace: Workplace, losses: list[float], tmp_path: Path
) -> None:
    workplace.make(tmp_path / "packed", (losses[1] + losses[2]) / 2)
    decision = workplace.decide(0.01)
    checkpoint, profile = Checkpoint(workplace.source), workplace.profile
    order = hottest_first(profile, checkpoint, "up", decision.sparsity)
    convert(checkpoint, decision.plan, tmp_path / "direct", 1, prepared=Preparation(order=order))
    checkpoint.close()
    rule = threshold_rule(decision)
    assert rule is not None
    with Pack(tmp_path / "direct") as pack:
        measure_thresholds(pack, profile.tokens(), rule, Recorder())
    made, direct = folder_bytes(tmp_path / "packed"), folder_bytes(tmp_path / "direct")
    assert {name: made[name] for name in direct} == direct


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["every ninth", "all"])
def test_stopped_before_any_step_it_ends_in_the_same_pack(
    workplace: Workplace, losses: list[float], tmp_path: Path, every: int
) -> None:
    allowed = (losses[0] + losses[1]) / 2
    steps = workplace.make(tmp_path / "whole", allowed)
    expected = folder_bytes(tmp_path / "whole")
    own = [n for n, step in enumerate(steps) if step.split()[0] not in ("write", "fsync", "open", "create", "truncate")]
    chosen = sorted({*own[::every], own[-1], *range(0, len(steps), 11 * every)})
    assert len(own) > 15 and {"thresholds", "evaluate", "attach", "rename"} <= set(steps)
    for stop_at in chosen:
        out = tmp_path / "stopped" / "packed"
        with pytest.raises(StoppedError):
            workplace.make(out, allowed, stop_at)
        workplace.make(out, allowed)
        assert folder_bytes(out) == expected, steps[stop_at]
        assert not work_folder(out).exists()
        shutil.rmtree(out.parent)


def test_a_finished_pack_is_not_made_again_and_another_goal_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    workplace.make(out, None)
    held = folder_bytes(out)
    assert workplace.make(out, None) == []
    assert folder_bytes(out) == held
    with pytest.raises(ConversionError) as caught:
        workplace.make(out, None, name="another goal")
    assert (
        str(caught.value)
        == f"{out}: contains a pack made with other options; give another output folder, or remove this one"
    )


def test_what_was_begun_for_another_goal_is_not_gone_on_with(workplace: Workplace, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    with pytest.raises(StoppedError):
        workplace.make(out, None, stop_at=20)
    with pytest.raises(ConversionError) as caught:
        workplace.make(out, None, name="another goal")
    assert str(caught.value) == (
        f"{work_folder(out)}: contains unfinished work for another target or with other options; run that command "
        "again, or remove the folder"
    )


def test_a_folder_that_holds_something_else_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "letter.txt").write_text("dear reader")
    with pytest.raises(ConversionError, match="contains something else; give a new or empty folder"):
        workplace.make(tmp_path / "packed", None)


def test_a_loss_that_no_pack_keeps_ends_in_a_line_that_says_so(workplace: Workplace, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"none of 10 packs is within the allowed loss; allow more with --max"):
        workplace.make(tmp_path / "packed", 1e-12)


def test_from_python_a_pack_is_made_as_by_the_command(tmp_path: Path) -> None:
    """By options, and for a memory; what the command refuses is refused."""
    source = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096).write_with_tokenizer(tmp_path / "source")
    done("convert", source, "-o", tmp_path / "command")
    made = making.convert(source, tmp_path / "python")
    assert isinstance(made, making.MadePack) and made.conversion.written and made.thresholds is None
    assert folder_bytes(tmp_path / "python") == folder_bytes(tmp_path / "command")
    profiled(source, tmp_path / "profile", random_tokens(4, 64, 4096), ProfileOptions("fast"))
    order = PackOrder(eval_data=str(BOOK), eval_tokens=256, target=Target(None, "cpu", context_tokens=64))
    small = making.convert(
        source, tmp_path / "small", target_vram="16M", max_loss="0.5", profile=tmp_path / "profile", order=order
    )
    assert isinstance(small, making.PackForTarget) and small.target.budget_bytes == 16 << 20
    against = small.result.quality.against
    assert against is not None and against.kl.value <= 0.5
    for arguments, fault in (
        ({"max_loss": "1%"}, "^max_loss needs target_vram or preset; add one of them or remove max_loss$"),
        ({"target_vram": "much"}, "convert: found 'much'"),
        ({"plan_file": "plan.json", "target_vram": 1 << 30}, "^target_vram makes .* decides this; remove plan_file$"),
        ({"order": PackOrder(quantizer="calibrated")}, "^order.quantizer calibrated needs .* has them with profile$"),
        (
            {"order": PackOrder(stream=StreamOptions(True)), "target_vram": "1G"},
            r"^order.stream.is_given: target_vram .* .moe-pack profile --stream, moe-pack plan., .* plan_file and ",
        ),
    ):
        with case(fault), pytest.raises(UsageError, match=fault):
            making.convert(source, tmp_path / "none", **arguments)


def test_from_python_a_fault_of_the_code_does_not_look_like_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("sizes differ")

    monkeypatch.setattr(making, "make_pack", broken)
    with pytest.raises(ValueError, match=r"^sizes differ$"):
        making.convert("source", tmp_path / "none")
