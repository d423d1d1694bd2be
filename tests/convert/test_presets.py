"""The papers' packs, each by the paper's own sentence; and EdgeMoE's widths by every step of its search."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.cases import case
from support.losses import random_losses
from support.specs import GROUPED

from moe_pack.convert.plan import PlanningModel, preset_decision
from moe_pack.convert.plan.options import PRESET_NAMES, PresetName
from moe_pack.convert.plan.papers import edgemoe_decision, widths_for_loss
from moe_pack.formats import BF16, ExpertFormat, ExpertSpec, ModelSpec, PlanError, dense_roles, part_format
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
