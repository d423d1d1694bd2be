"""The papers' packs, each by the paper's own sentence; EdgeMoE's widths by each step of its search; --preset."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from support.cases import case
from support.commands import moe_pack as run
from support.losses import random_losses
from support.models import BOOK, DEMO_MODEL, TinyMixtral
from support.specs import GROUPED

from moe_pack.calib.profile import Profile, losses_of
from moe_pack.convert.plan import PlanningModel, Target, preset_decision
from moe_pack.convert.plan.options import PRESET_NAMES, LossLimit, PresetName
from moe_pack.convert.plan.papers import edgemoe_decision, widths_for_loss
from moe_pack.convert.plan.planned import two_digits
from moe_pack.formats import (
    BF16,
    ExpertFormat,
    ExpertSpec,
    ModelSpec,
    Pack,
    PartFormat,
    PlanError,
    Quantizer,
    Selector,
    dense_roles,
    part_format,
)
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.formats.pack.plans import plan_fault


def model_of(spec: ModelSpec) -> PlanningModel:
    return PlanningModel(spec, ("BF16",) * len(dense_roles(spec)), random_losses(spec))


MODEL = model_of(GROUPED)
TWO_MATRICES = model_of(replace(GROUPED, expert=ExpertSpec("relu2", 48, ("up", "down"), bias=(), extra_floats=0)))
ODD_ROWS = model_of(replace(GROUPED, hidden_size=96))


def refusal(name: PresetName, model: PlanningModel, sparsity: float | None = None) -> str:
    with pytest.raises(PlanError) as error:
        preset_decision(name, model, sparsity)
    return str(error.value)


def test_every_preset_fits_the_model_and_leaves_dense_matrices_as_they_are() -> None:
    for name in PRESET_NAMES:
        with case(name):
            decision = preset_decision(name, MODEL)
            assert plan_fault(decision.plan, GROUPED) is None
            assert not any(decision.plan.dense)
            assert decision.sparsity.shape == MODEL.losses.popularity.shape
            assert MODEL.layout(decision.plan).experts


def test_floe_stores_up_in_int2_and_what_it_selects_in_16_bit() -> None:
    """§3.2: "we choose to apply the INT2 of HQQ method" to up; gate and down are made sparse, and stay."""
    decision = preset_decision("floe", MODEL)
    assert (decision.plan.selector, decision.plan.quantizer, decision.theta) == ("up", "hqq", None)
    assert {e for layer in decision.plan.experts for e in layer} == {ExpertFormat(BF16, part_format(2, 64), BF16)}
    assert (decision.sparsity == 0.9).all()


def test_floes_other_sparsity_may_be_asked_for() -> None:
    assert (preset_decision("floe", MODEL, 0.8).sparsity == 0.8).all()


def test_corm_stores_the_popular_half_in_int4_and_the_rest_in_int2() -> None:
    """Appendix: "4-bit with a group size of 64 ... and 2-bit with a group size of 16"; scales themselves in 8 bits."""
    popularity = np.array([[0.5, 0.1, 0.6, 0.2, 0.3, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]])
    model = replace(MODEL, losses=replace(MODEL.losses, popularity=popularity))
    decision = preset_decision("corm", model)
    assert (decision.plan.selector, decision.plan.quantizer, decision.theta) == ("gate", "hqq", 0.25)
    popular, rest = part_format(4, 64, 8), part_format(2, 16, 8)
    parts = [[expert.up for expert in layer] for layer in decision.plan.experts]
    assert parts == [
        [popular, rest, popular, rest, popular, rest],  # of equals, the lower number
        [rest, rest, rest, popular, popular, popular],
    ]
    assert all(e.gate == e.up == e.down for layer in decision.plan.experts for e in layer)


def test_corms_threshold_is_expected_to_leave_out_what_is_below_it() -> None:
    """Magnitudes made up evenly between 0 and 1: a quarter of them is below 0.25, and the loss is that between 0 and
    a half."""
    decision = preset_decision("corm", MODEL)
    np.testing.assert_allclose(decision.sparsity, 0.25, atol=1e-6)
    losses, plan = MODEL.losses, decision.plan
    number = [[losses.formats.index(expert.up) for expert in layer] for layer in plan.experts]
    stored = sum(losses.quantized[l, e, :, number[l][e]].sum() for l, e in np.ndindex(2, 6))
    assert MODEL.loss(decision) == pytest.approx(stored + losses.sparse[:, :, 1, 1].sum() / 2)


def test_what_corm_loses_is_not_estimated_where_no_activations_were_counted() -> None:
    model = replace(MODEL, losses=replace(MODEL.losses, quantiles=None))
    decision = preset_decision("corm", model)
    assert not decision.sparsity.any()
    assert math.isnan(model.loss(decision))


def test_what_is_more_sparse_than_was_measured_is_not_estimated() -> None:
    assert math.isnan(MODEL.loss(preset_decision("floe", MODEL, 0.95)))
    assert MODEL.loss(preset_decision("floe", MODEL, 0.9)) > MODEL.loss(preset_decision("floe", MODEL, 0.85)) > 0


def test_fiddler_keeps_16_bit_and_runs_all() -> None:
    """§4.1: "the Mixtral-8x7B model with 16-bit precision"."""
    decision = preset_decision("fiddler", MODEL)
    assert decision.plan.selector == "none" and not decision.sparsity.any()
    assert {e for layer in decision.plan.experts for e in layer} == {ExpertFormat(BF16, BF16, BF16)}
    assert MODEL.loss(decision) == 0


def edgemoe_loss(widths: np.ndarray) -> float:
    """By the table, without the model's own sum."""
    places = {2: 0, 4: 1, 8: 2, 16: 3}
    return sum(
        float(MODEL.losses.absmax[l, e, :, places[int(widths[l, e])]].sum()) for l, e in np.ndindex(widths.shape)
    )


def widths_of(experts: tuple[tuple[ExpertFormat, ...], ...]) -> np.ndarray:
    return np.array([[expert.up.width for expert in layer] for layer in experts])


def by_steps(max_loss: float) -> np.ndarray:
    """§III-B as it is told: bounds from all experts alike, then one expert after the other, the least important first,
    at the lower one until the goal is reached."""
    importance = MODEL.losses.importance
    alike = [width for width in (2, 4, 8, 16) if edgemoe_loss(np.full(importance.shape, width)) <= max_loss]
    upper = alike[0]
    if upper == 2:
        return np.full(importance.shape, 2)
    widths, lower = np.full(importance.shape, upper), {4: 2, 8: 4, 16: 8}[upper]
    for place in np.argsort(importance, axis=None):
        tried = widths.copy()
        tried.flat[place] = lower
        if edgemoe_loss(tried) > max_loss:
            break
        widths = tried
    return widths


def test_edgemoes_widths_are_those_of_its_steps() -> None:
    for max_loss in [0.0, 1e-4, 0.005, 0.01, 0.02, 0.04, 0.1, 0.3, 0.5, 0.6, 10.0]:
        with case(max_loss):
            decision = edgemoe_decision(MODEL, max_loss, "none")
            assert decision.plan.quantizer == "absmax" and not decision.sparsity.any()
            found = widths_of(decision.plan.experts)
            assert found.tolist() == by_steps(max_loss).tolist()
            assert MODEL.loss(decision) == pytest.approx(edgemoe_loss(found)) and MODEL.loss(decision) <= max_loss


def test_a_loss_that_edgemoes_widths_cannot_keep_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        widths_for_loss(MODEL.losses.importance, lambda widths: False)
    assert str(error.value) == "--max-loss: --search edgemoe loses more even with all experts at 16 bits; allow more"


def test_the_preset_edgemoe_allows_2_percent_of_perplexity() -> None:
    """§IV-A: "the tolerable accuracy loss is 2%"; the made-up model's perplexity grows half as fast as its KL."""
    decision = preset_decision("edgemoe", MODEL)
    assert decision.plan.selector == "none"
    assert widths_of(decision.plan.experts).tolist() == by_steps(2 * math.log(1.02)).tolist()
    assert {e.up.group for layer in decision.plan.experts for e in layer if e.up != BF16} == {0}


def test_a_sparsity_is_floes_alone() -> None:
    for name in ("corm", "fiddler", "edgemoe"):
        assert (
            refusal(name, MODEL, 0.8)
            == f"--sparsity does not apply to --preset {name}; remove it or give --preset floe"
        )
    assert refusal("floe", MODEL, 1.0) == "--sparsity: found 1.0, expected a share of at least 0 and less than 1"


def test_rows_that_are_no_multiple_of_a_block_are_refused_but_in_16_bit() -> None:
    for name in ("floe", "corm", "edgemoe"):
        assert refusal(name, ODD_ROWS) == (
            f"--preset {name}: rows of 96 values, expected a multiple of 64; give --preset fiddler, which "
            "stores 16 bits"
        )
    with pytest.raises(PlanError, match=r"^--search edgemoe: rows of 96 values, expected a multiple of 64; give "):
        edgemoe_decision(ODD_ROWS, 0.1, "none")
    assert preset_decision("fiddler", ODD_ROWS).plan.experts


def test_corm_needs_a_gate_and_the_others_do_not() -> None:
    assert refusal("corm", TWO_MATRICES) == (
        "--preset corm: this model's experts have no gate matrix; give floe, fiddler or edgemoe"
    )
    for name in ("floe", "fiddler", "edgemoe"):
        decision = preset_decision(name, TWO_MATRICES)
        assert decision.plan.experts[0][0].gate is None
        assert pack_layout(TWO_MATRICES.spec, decision.plan, TWO_MATRICES.dense_dtypes).experts


TEXT = ["--eval-data", str(BOOK), "--eval-tokens", "512"]
CPU = ["--target-vram", "16M", "--device", "cpu", "--context", "64"]

pytestmark = pytest.mark.usefixtures("unmeasured")


def done(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 128 neurons, one of which has two rows in a calibrated pack."""
    two = {"num_experts_per_tok": 2}
    shape = TinyMixtral(intermediate_size=128, num_layers=2, num_experts=4, vocab_size=4096, config=two)
    return shape.write_with_tokenizer(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def rotated(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile by which `--rotate auto` rotates all layers, and which has the inputs that calibrate."""
    folder = tmp_path_factory.mktemp("profiled") / "profile"
    done("profile", source, "-o", folder, "--tokens", 512, "--sequence-length", 64, "--rotate", "on")
    return folder


@dataclass(frozen=True)
class Paper:
    """The pack of a paper, by hand: the matrix that decides, the quantizer, and the formats of gate, up and down."""

    selector: Selector
    quantizer: Quantizer | None
    experts: frozenset[tuple[PartFormat, PartFormat, PartFormat]]


def affine(width: int, group: int, scale_bits: int = 16) -> PartFormat:
    return PartFormat("affine", width, group, scale_bits)


def alike(*parts: PartFormat) -> frozenset[tuple[PartFormat, PartFormat, PartFormat]]:
    return frozenset((part, part, part) for part in parts)


# FloE §3.2; CORM's appendix; Fiddler §4.1; EdgeMoE §III-B: one scale a row.
PAPERS: dict[PresetName, Paper] = {
    "floe": Paper("up", "hqq", frozenset({(BF16, affine(2, 64), BF16)})),
    "corm": Paper("gate", "hqq", alike(affine(4, 64, 8), affine(2, 16, 8))),
    "fiddler": Paper("none", None, alike(BF16)),
    "edgemoe": Paper("none", "absmax", alike(affine(2, 0), affine(4, 0), affine(8, 0), BF16)),
}


def test_a_papers_pack_has_the_papers_parts_and_none_of_ours(source: Path, rotated: Path, tmp_path: Path) -> None:
    """With a profile by which our own packs are calibrated, rotated and have neurons with two rows."""
    assert set(PAPERS) == set(PRESET_NAMES)
    own = tmp_path / "own"
    done("convert", source, "-o", own, "--profile", rotated, "--record-bits", 3)
    with Pack(own) as pack:
        ours = (pack.rotation is not None, pack.manifest.quantizer, pack.spec.expert.repeats > 0)
    assert ours == (True, "calibrated", True), "otherwise the profile shows nothing"
    for name, paper in PAPERS.items():
        with case(name):
            out = tmp_path / name
            result = done("convert", source, "-o", out, "--profile", rotated, *TEXT, "--preset", name)
            assert "note: 0 of 2 layers are rotated, but the profile predicts losses with 2 of them" in result.stderr
            with Pack(out) as pack:
                assert pack.rotation is None and not pack.spec.expert.repeats
                assert pack.manifest.selector == paper.selector
                assert paper.quantizer in (None, pack.manifest.quantizer)
                parts = {(e.gate, e.up, e.down) for layer in pack.index.experts for e in layer}
                assert parts <= paper.experts and (name == "edgemoe" or parts == paper.experts)
                assert {dense.dtype for dense in pack.layout.dense} == {"BF16"}, "as the source has them"
            assert f"run it: moe-run {out}\nas its paper runs it: moe-run {out} --policy {name} --budget SIZE\n" in (
                result.stdout
            )


def test_a_plan_of_a_paper_makes_the_same_pack_as_the_preset(source: Path, rotated: Path, tmp_path: Path) -> None:
    preset, plan, planned = tmp_path / "preset", tmp_path / "plan.json", tmp_path / "planned"
    done("convert", source, "-o", preset, "--profile", rotated, *TEXT, "--preset", "corm")
    asked = ("plan", source, "--profile", rotated, *CPU, "--preset", "corm")
    assert "note: 0 of 2 layers are rotated" in done(*asked, "-o", plan).stderr
    done("convert", source, "-o", planned, "--profile", rotated, "--plan", plan)
    with Pack(preset) as one, Pack(planned) as other:
        assert one.manifest.root == other.manifest.root
        assert one.thresholds.tolist() == other.thresholds.tolist()


def test_rotation_that_is_asked_for_is_there_and_is_said(source: Path, rotated: Path, tmp_path: Path) -> None:
    plan, note = tmp_path / "plan.json", "note: --rotate on rotates layers that this plan, a paper's or one for vLLM, "
    done("plan", source, "--profile", rotated, *CPU, "--preset", "corm", "-o", plan)
    for number, options in enumerate((["--preset", "corm", *TEXT], ["--plan", plan])):
        with case(options):
            out = tmp_path / f"{number}"
            result = done("convert", source, "-o", out, "--profile", rotated, *options, "--rotate", "on")
            assert f"{note}leaves as they are" in result.stderr
            with Pack(out) as pack:
                assert pack.rotation is not None and len(pack.rotation.layers(pack.spec)) == 2
    refused = run("convert", source, "-o", tmp_path / "vllm", *CPU, "--for", "vllm", "--rotate", "on")
    assert "--rotate on does not go with --for vllm, which runs no rotated layers; remove" in refused.stderr


def test_the_profile_of_a_papers_pack_is_made_without_rotation(source: Path, tmp_path: Path) -> None:
    """On a text of 256 tokens in place of the sample."""
    from moe_pack.convert import options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "CALIBRATION_TOKENS", 256)
        result = done("convert", source, "-o", tmp_path / "packed", *TEXT, "--preset", "floe")
    profile = Profile(tmp_path / "packed.profile")
    assert profile.rotation() is None and "note:" not in result.stderr.replace("note: the model", "")


def test_only_edgemoes_pack_has_a_limit_of_loss() -> None:
    """By hand: the planner's 1%, EdgeMoE's 2% (§IV-A), and what --max-loss says in place of them."""
    given = LossLimit("kl", 0.1)
    expected: dict[PresetName | None, LossLimit | None] = {
        None: LossLimit("perplexity", 0.01), "edgemoe": LossLimit("perplexity", 0.02),
        "floe": None, "corm": None, "fiddler": None,
    }  # fmt: skip
    assert {*expected} == {None, *PRESET_NAMES}
    for preset, limit in expected.items():
        with case(preset):
            assert Target(1 << 30, preset=preset).loss_limit == limit
            if limit is not None:
                assert Target(1 << 30, preset=preset, limit=given).loss_limit == given


def test_edgemoes_widths_follow_from_the_nats_of_an_attempt() -> None:
    model = PlanningModel(GROUPED, ("BF16",) * len(dense_roles(GROUPED)), random_losses(GROUPED))
    most = [max(model.loss(preset_decision("edgemoe", model, max_loss=nats)), 0.0) for nats in (0.5, 0.1, 0.02, 0.001)]
    assert all(loss <= nats for loss, nats in zip(most, (0.5, 0.1, 0.02, 0.001), strict=True))
    assert most == sorted(most, reverse=True) and len(set(most)) == 4
    by_paper = preset_decision("edgemoe", model, max_loss=math.log(1.02) / model.losses.nll_per_kl)
    assert preset_decision("edgemoe", model).plan == by_paper.plan
    for name in ("floe", "corm", "fiddler"):
        assert preset_decision(name, model, max_loss=0.001).plan == preset_decision(name, model).plan


def test_edgemoes_pack_is_made_again_until_its_measured_loss_is_within_the_limit(
    source: Path, rotated: Path, tmp_path: Path
) -> None:
    """A limit that the first plan, whose estimate is all of it, does not keep to once it is measured."""
    out, limit = tmp_path / "packed", 0.0002
    result = done("convert", source, "-o", out, "--profile", rotated, *TEXT, "--preset", "edgemoe", "--max-loss", limit)
    assert f"the limit is {limit:g} nats, for the upper end of the interval" in result.stdout
    made = json.loads((out / "made.json").read_text())["content"]
    attempts, taken = made["attempts"], made["attempts"][made["taken"]]
    assert len(attempts) > 1 and taken["measured"] <= limit
    kl = json.loads((out / "quality.json").read_text())["content"]["against"]["kl"]
    assert kl["value"] + kl["half_width"] == pytest.approx(taken["measured"])
    with Pack(out) as pack:
        model = PlanningModel(pack.spec, (), losses_of(Profile(rotated)))
        decision = preset_decision("edgemoe", model, max_loss=taken["nats"])
        assert pack.index.experts == decision.plan.experts
    first = preset_decision("edgemoe", model, max_loss=limit)
    assert f"attempt 1: planned with an estimated loss of {two_digits(model.loss(first))} nats\n" in result.stderr


def test_what_goes_with_a_preset_and_what_does_not(source: Path, tmp_path: Path) -> None:
    alone = "is a policy of moe-run and stores nothing of its own; convert without --preset, then run the pack with"
    fixed = "whose formats the paper has fixed; remove it: the loss is measured, and moe-pack check says whether a pack"
    cases = [
        ("convert", ["--preset", "importance"], f"'--preset': importance {alone} moe-run --policy importance"),
        ("plan", ["--target-vram", "1G", "--preset", "lru"], f"'--preset': lru {alone} moe-run --policy lru"),
        ("convert", ["--preset", "flow"], "did you mean floe?"),
        ("convert", ["--preset", "floe", "--max-loss", "1%"], f"--max-loss does not apply to --preset floe, {fixed}"),
        ("convert", ["--preset", "edgemoe", "--search", "uniform"], "--search does not apply to --preset edgemoe; "),
        ("convert", ["--preset", "floe", "--gpu", "L4"], "--gpu needs --target-vram; add it, or remove --gpu"),
        ("convert", ["--preset", "floe", "--context", "64"], "--context needs --target-vram; add it, or remove"),
        ("convert", ["--preset", "floe", "--device", "cpu"], "--device needs --target-vram; add it, or remove"),
        ("convert", ["--preset", "floe", "--part", "1/2"], "--part does not go with --preset floe; make the"),
        ("convert", ["--preset", "floe", "--repeats", "4"], "--preset floe makes a plan, which decides this; "),
        ("convert", ["--preset", "corm", "--sparsity", "0.5"], "--preset corm makes a plan, which decides this; "),
        ("convert", ["--preset", "corm", "--stream"], "--stream: --preset corm reads the source many times; "),
        ("plan", ["--preset", "floe"], "--target-vram is missing; give the memory to plan for, such as"),
    ]  # fmt: skip
    for command, options, says in cases:
        with case(command, options):
            result = run(command, source, *options, "-o", tmp_path / "packed")
            assert result.exit_code == 2 and says in " ".join(result.stderr.split()), result.stderr
            assert not (tmp_path / "packed").exists()


@pytest.mark.slow
def test_edgemoes_pack_of_the_demo_model_is_within_the_papers_2_percent(tmp_path: Path) -> None:
    profile, out = tmp_path / "profile", tmp_path / "packed"
    done("profile", DEMO_MODEL, "-o", profile, "--tokens", 4096, "--rotate", "off", "--no-inputs")
    done("convert", DEMO_MODEL, "-o", out, "--profile", profile, "--preset", "edgemoe")
    increase = json.loads((out / "quality.json").read_text())["content"]["against"]["perplexity_increase"]
    assert increase["value"] + increase["half_width"] <= 0.02
    with Pack(out) as pack:
        widths = np.array([[expert.up.width for expert in layer] for layer in pack.index.experts])
    assert set(np.unique(widths)) == {2, 4}, "a mixture: within 2% not all stand 2 bits, and some do"
