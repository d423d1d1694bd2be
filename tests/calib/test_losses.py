"""The table of losses against products worked by hand, and what makes it safe to choose by."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.assumed import assumed_figures
from support.cases import case
from support.models import Tensors, TinyMixtral
from support.profiles import profiled, random_tokens
from support.specs import GROUPED

from moe_pack.calib.forward import KINDS, Array
from moe_pack.calib.profile import Losses, Profile, ProfileOptions, assumed_losses, losses_of
from moe_pack.calib.profile.losses import falling, spread
from moe_pack.calib.sensitivity import (
    SPARSITIES,
    WIDTHS,
    LayerLosses,
    compared_formats,
    copies_of,
    effects_of,
    quantized_formats,
    roundable_roles,
)
from moe_pack.calib.sensitivity.effects import Copy, Divergences
from moe_pack.formats import BF16, ROW_GROUP, ModelSpec, PackError, PlanError, Selector, dense_roles, part_format
from moe_pack.formats.families import Checkpoint

MODEL = TinyMixtral(num_layers=2, num_experts=5)
TOKENS = random_tokens(4, 24, 96)


def plant_routes(tensors: Tensors) -> None:
    """At layer 0 no token chooses expert 3: all embeddings share a direction that its router alone looks away from."""
    tensors["model.embed_tokens.weight"][:, 0] = 4
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 0.1  # leaves that direction as it is
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"][:, 0] = 0
    tensors["model.layers.0.block_sparse_moe.gate.weight"][3, 0] = -3


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("losses")
    source = MODEL.write(folder / "source", plant_routes)
    return profiled(source, folder / "profile", TOKENS, ProfileOptions("fast"))


@pytest.fixture(scope="module")
def losses(profile: Profile) -> Losses:
    return losses_of(profile)


@pytest.mark.slow
def test_an_experts_loss_is_that_of_groups_of_64_times_the_formats_ratio(profile: Profile, losses: Losses) -> None:
    formats = quantized_formats(MODEL.hidden_size)
    for l, layer in enumerate(profile.spec.moe_layers):
        stored, layer_ratios = profile.layer_losses(layer), profile.layer_losses(layer).ratios
        for e in profile.statistics(l).tokens.nonzero()[0].tolist():
            for matrix, idx in np.ndindex(3, len(formats)):
                width = WIDTHS.index(formats[idx].width)
                scale = layer_ratios[matrix, idx] / layer_ratios[matrix, formats.index(part_format(WIDTHS[width], 64))]
                expected = stored.quantized[e, matrix, width] * scale
                found = losses.quantized[l, e, matrix, idx]
                assert found == pytest.approx(expected, rel=1e-5) or found < expected  # as a lesser width lost less


def test_losses_at_groups_of_64_are_those_the_profile_estimates(profile: Profile, losses: Losses) -> None:
    expected = np.stack([profile.layer_losses(layer).quantized for layer in profile.spec.moe_layers])
    places = [losses.formats.index(part_format(width, 64)) for width in WIDTHS]
    reached = np.stack([profile.statistics(l).tokens > 0 for l in range(2)])
    assert reached.sum() >= 8
    np.testing.assert_allclose(losses.quantized[reached][..., places], expected[reached], rtol=1e-5)


def test_rows_by_absmax_lose_what_the_profile_estimates(profile: Profile, losses: Losses) -> None:
    """The last three of a layer's ratios, at 2, 4 and 8 bits, over hqq's at the same width in groups of 64."""
    formats = quantized_formats(64)
    assert losses.absmax.shape == (2, 5, 3, 4) and not losses.absmax[..., 3].any()
    assert losses.of("absmax") == ((part_format(2, 0), part_format(4, 0), part_format(8, 0), BF16), losses.absmax)
    stored, tokens = profile.layer_losses(1), profile.statistics(1).tokens
    for e in tokens.nonzero()[0].tolist():
        for matrix, (place, width_idx) in product(range(3), enumerate((0, 2, 3))):
            ratio = (
                stored.ratios[matrix, place - 3]
                / stored.ratios[matrix, formats.index(part_format((2, 4, 8)[place], 64))]
            )
            expected = stored.quantized[e, matrix, width_idx] * ratio
            assert losses.absmax[1, e, matrix, place] == pytest.approx(expected, rel=1e-5)


def test_without_edgemoes_own_measure_an_experts_importance_is_what_its_rows_lose_at_2_bits(losses: Losses) -> None:
    np.testing.assert_allclose(losses.importance, losses.absmax[:, :, :, 0].sum(axis=2))


def test_edgemoes_own_measure_is_the_importance_where_it_was_made(tmp_path: Path) -> None:
    source = TinyMixtral(num_layers=1, num_experts=3).write(tmp_path / "source")
    profile = profiled(source, tmp_path / "profile", TOKENS, ProfileOptions("exact", keeps_inputs=False))
    assert losses_of(profile).importance == pytest.approx(profile.exact()["losses"], rel=1e-6)


@pytest.mark.parametrize("kind", ["up", "gate", "both"])
def test_one_threshold_leaves_out_the_share_of_neurons_below_it(
    profile: Profile, losses: Losses, kind: Selector
) -> None:
    """At a stored quantile its level; half way to the next, half way between levels."""
    quantiles = profile.statistics(1).quantiles[2, KINDS.index(kind)]
    theta, between = float(quantiles[40]), float(quantiles[40] + quantiles[41]) / 2
    assert quantiles[39] < quantiles[40] < quantiles[41]
    assert losses.sparsity_at(theta, kind)[1, 2] == pytest.approx(0.40)
    assert losses.sparsity_at(between, kind)[1, 2] == pytest.approx(0.405, abs=1e-4)


def test_no_threshold_leaves_out_all(losses: Losses) -> None:
    assert (losses.sparsity_at(1e9, "gate") == 0.999).all()


def test_without_activations_what_a_threshold_leaves_out_is_not_known(losses: Losses) -> None:
    with pytest.raises(PlanError) as error:
        replace(losses, quantiles=None).sparsity_at(0.25, "gate")
    assert str(error.value) == (
        "theta 0.25: without a profile it is not known which share of neurons it drops; give --profile"
    )


def test_formats_are_those_of_the_models_rows_and_bfloat16_without_loss(losses: Losses) -> None:
    assert losses.formats == (*quantized_formats(64), BF16)
    assert losses.quantized.shape == (2, 5, 3, len(losses.formats))
    assert (losses.quantized[..., -1] == 0).all()
    assert (losses.quantized[..., :-1] > 0).all()


def test_no_loss_grows_with_the_width_of_the_same_groups(losses: Losses) -> None:
    for group in (16, 32, 64, 0):
        for scale_bits in (16, 8) if group else (16,):
            places = [losses.formats.index(part_format(width, group, scale_bits)) for width in WIDTHS]
            assert (np.diff(losses.quantized[..., places], axis=3) <= 0).all()


def test_a_width_that_was_found_to_lose_more_loses_what_the_lesser_one_does() -> None:
    """Worked by hand: widths 2, 3, 4, 8 of groups of 64, and width 4 of groups of 32, which is another's affair."""
    formats = (*(part_format(width, 64) for width in WIDTHS), part_format(4, 32))
    found = falling(np.asarray([[4.0, 5.0, 2.0, 3.0, 9.0]]), formats)
    assert found.tolist() == [[4.0, 4.0, 2.0, 2.0, 9.0]]


def test_an_expert_that_no_token_reached_loses_what_one_token_of_the_layers_does(
    profile: Profile, losses: Losses
) -> None:
    tokens = profile.statistics(0).tokens
    assert tokens[3] == 0 and tokens.sum() == 2 * 96
    assert not profile.layer_losses(0).quantized[3].any()
    others = [0, 1, 2, 4]
    np.testing.assert_allclose(losses.quantized[0, 3], losses.quantized[0, others].sum(axis=0) / 192, rtol=0.05)
    np.testing.assert_allclose(losses.sparse[0, 3], losses.sparse[0, others].sum(axis=0) / 192, rtol=0.15)
    assert (losses.sparse[0, 3, :, 1:] > 0).all()


def test_sparsity_loses_what_the_profile_estimates_and_never_less_than_a_lesser_one(
    profile: Profile, losses: Losses
) -> None:
    assert losses.sparsities == (0.0, *SPARSITIES)
    assert losses.kinds == ("up", "gate", "both")
    assert (losses.sparse[..., 0] == 0).all()
    assert (np.diff(losses.sparse, axis=3) >= 0).all()
    expected = profile.layer_losses(0).sparse[1, :, -1]
    np.testing.assert_allclose(losses.sparse[0, 1, :, -1], expected, rtol=1e-5)


def test_dense_losses_are_in_the_order_of_roles_and_infinite_where_none_was_measured(
    profile: Profile, losses: Losses
) -> None:
    spec, effects = profile.spec, profile.effects()
    names = [role.name for role in dense_roles(spec)]
    assert losses.dense_widths == (16, 8, 4)
    assert losses.dense.shape == (len(names), 3)
    assert (losses.dense[:, 0] == 0).all()
    assert losses.dense[names.index("embed"), 1:] == pytest.approx(effects.embedding.tolist())
    assert losses.dense[names.index("head"), 1:] == pytest.approx(effects.head.tolist())
    row = roundable_roles(spec, 1).index("layers.1.attention.v")
    expected = profile.layer_losses(1).dense[row]
    assert losses.dense[names.index("layers.1.attention.v"), 1:] == pytest.approx(expected.tolist())
    assert np.isinf(losses.dense[names.index("layers.1.router"), 1:]).all()


def test_an_embedding_that_is_the_head_too_loses_both(tmp_path: Path) -> None:
    model = TinyMixtral(num_layers=1, num_experts=3, config={"tie_word_embeddings": True})
    source = model.write(tmp_path / "source", lambda tensors: tensors.pop("lm_head.weight"))
    checkpoint = Checkpoint(source)
    tied = checkpoint.spec.tied_head
    checkpoint.close()
    profile = profiled(source, tmp_path / "profile", TOKENS, ProfileOptions("fast", keeps_inputs=False))
    effects = profile.effects()
    assert tied and effects.head.any() and effects.embedding.any()
    assert losses_of(profile).dense[0, 1:] == pytest.approx((effects.embedding + effects.head).tolist())


def test_popularity_is_the_share_of_tokens_that_choose_an_expert(profile: Profile, losses: Losses) -> None:
    assert losses.popularity.sum(axis=1) == pytest.approx([2.0, 2.0])
    assert losses.popularity[1, 0] == profile.statistics(1).tokens[0] / 96


def test_losses_say_where_they_come_from(profile: Profile, losses: Losses) -> None:
    assert losses.origin == "profile of made up, 96 tokens"
    assert losses.nll_per_kl == profile.effects().nll_per_kl[0]


def test_a_profile_without_sensitivity_has_no_losses(tmp_path: Path) -> None:
    found = profiled(MODEL.write(tmp_path / "source"), tmp_path / "profile", TOKENS)
    with pytest.raises(PackError, match=r"has no effects\.safetensors; profile the model with the options"):
        losses_of(found)


def wide(hidden_size: int) -> ModelSpec:
    """GROUPED with other rows of experts; attention's stay."""
    return replace(GROUPED, hidden_size=hidden_size)


def test_a_whole_model_loses_what_the_measured_one_did(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Over the measured model's own shape, up to three digits; but for rows as one group, which is carried on."""
    folder = tmp_path_factory.mktemp("assumed")
    source = TinyMixtral(hidden_size=128, intermediate_size=32, num_layers=2, num_experts=3).write(folder / "source")
    profile = profiled(source, folder / "profile", random_tokens(2, 24, 96), ProfileOptions("fast", keeps_inputs=False))
    measured = losses_of(profile)
    found = spread(assumed_figures(measured, profile.spec, "tiny"), profile.spec)
    assert found.formats == measured.formats
    places = [idx for idx, part in enumerate(found.formats) if part.group != ROW_GROUP or part == BF16]
    for name, chosen in (("quantized", places), ("absmax", slice(None)), ("sparse", slice(None))):
        totals = [getattr(losses, name).sum(axis=(0, 1))[..., chosen] for losses in (found, measured)]
        np.testing.assert_allclose(*totals, rtol=6e-3)
    finite = np.isfinite(measured.dense).all(axis=1)
    np.testing.assert_array_equal(np.isfinite(found.dense).all(axis=1), finite)
    np.testing.assert_allclose(found.dense[finite].sum(axis=0), measured.dense[finite].sum(axis=0), rtol=6e-3)
    assert found.nll_per_kl == pytest.approx(measured.nll_per_kl, rel=6e-3)


def test_every_expert_is_assumed_to_lose_alike_and_to_be_chosen_alike() -> None:
    losses, spec = assumed_losses(GROUPED), GROUPED
    E, k = spec.router.num_experts, spec.router.num_experts_per_tok
    assert losses.quantized.shape[:3] == (2, E, 3)
    assert (losses.quantized == losses.quantized[0, 0]).all() and (losses.sparse == losses.sparse[0, 0]).all()
    assert (losses.popularity == k / E).all()


def test_wider_rows_by_absmax_lose_more_as_hqqs_rows_do() -> None:
    """At 2 bits, over rows of 4,096 against 128: by a power of the width, both alike."""
    narrow, wider = (assumed_losses(wide(width)) for width in (128, 4096))
    row = narrow.formats.index(part_format(2, 64)), narrow.formats.index(part_format(2, 128))
    half, whole = (narrow.quantized[0, 0, :, place] for place in row)
    np.testing.assert_allclose(wider.absmax[0, 0, :, 0] / narrow.absmax[0, 0, :, 0], 32 ** np.log2(whole / half))
    assert (wider.absmax[0, 0, :, 0] > narrow.absmax[0, 0, :, 0]).all()


def test_twice_the_experts_lose_half_each() -> None:
    doubled = replace(GROUPED, router=replace(GROUPED.router, num_experts=2 * GROUPED.router.num_experts))
    few, many = assumed_losses(GROUPED), assumed_losses(doubled)
    np.testing.assert_allclose(few.quantized[0, 0], 2 * many.quantized[0, 0])
    np.testing.assert_allclose(few.sparse.sum(axis=(0, 1)), many.sparse.sum(axis=(0, 1)))


def test_formats_are_those_of_the_models_rows() -> None:
    for hidden_size in [64, 192, 2880, 4096]:
        with case(hidden_size):
            losses = assumed_losses(wide(hidden_size))
            assert losses.formats == (*quantized_formats(hidden_size), BF16)
            assert losses.quantized.shape[3] == len(losses.formats)
            assert (losses.quantized[..., :-1] > 0).all() and (losses.quantized[..., -1] == 0).all()


def test_a_row_as_one_group_loses_as_much_as_the_group_of_its_length_and_longer_ones_more() -> None:
    for width in (2, 3, 4, 8):
        row = [
            losses.quantized[0, 0, :, losses.formats.index(part_format(width, ROW_GROUP))]
            for losses in map(assumed_losses, map(wide, (64, 128, 4096)))
        ]
        for held, group in zip(row, (64, 128), strict=False):
            losses = assumed_losses(wide(128))
            np.testing.assert_allclose(held, losses.quantized[0, 0, :, losses.formats.index(part_format(width, group))])
        assert (row[2] > row[1]).all()


def test_a_gate_that_the_family_has_not_loses_nothing() -> None:
    two = replace(GROUPED, expert=replace(GROUPED.expert, matrices=("up", "down"), bias=()))
    losses = assumed_losses(two)
    assert not losses.quantized[:, :, 0].any()
    assert (losses.quantized[:, :, 1:, :-1] > 0).all()


def test_dense_matrices_lose_by_their_parameters() -> None:
    losses, roles = assumed_losses(GROUPED), dense_roles(GROUPED)
    held = {role.name: (role, row) for role, row in zip(roles, losses.dense, strict=True)}
    (q, of_q), (k, of_k) = held["layers.0.attention.q"], held["layers.0.attention.k"]
    np.testing.assert_allclose(of_q[1:] / of_k[1:], q.shape[0] * q.shape[1] / (k.shape[0] * k.shape[1]))
    assert (of_q[1:] > 0).all() and (losses.dense[:, 0] == 0).all()
    assert np.isinf(held["layers.0.router"][1][1:]).all()


def test_an_embedding_that_is_the_head_too_is_assumed_to_lose_both() -> None:
    apart = replace(GROUPED, tied_head=False, head_bias=False)
    tied = replace(apart, tied_head=True)
    dense = assumed_losses(apart).dense
    names = [role.name for role in dense_roles(apart)]
    both = dense[names.index("embed")] + dense[names.index("head")]
    assert assumed_losses(tied).dense[0].tolist() == both.tolist()


def test_assumed_losses_say_that_they_are() -> None:
    losses = assumed_losses(GROUPED)
    assert losses.origin.startswith(
        "assumed: the losses of another model, spread evenly over all experts (tiny-mixtral: profile"
    )
    assert 0.1 <= losses.nll_per_kl <= 2


D = 64
EMBEDDING_KLS, HEAD_KLS = (np.asarray(kls, np.float32) for kls in ([0.5, 1.0], [0.125, 0.25]))


def losing(at_2: float, at_3: float, at_4: float, ratio: float = 1.0) -> LayerLosses:
    """A layer of two experts whose matrices lose so much together by plain rounding, and `ratio` of that by hqq."""
    plain = np.asarray([at_2, at_3, at_4, 0.0]) / 6
    formats = compared_formats(D)
    ratios = np.full((3, len(formats)), 7.0, np.float32)
    for width in (2, 3, 4, 8):
        ratios[:, formats.index(("hqq", part_format(width, 64)))] = ratio
    quantized = np.broadcast_to(plain * ratio, (2, 3, 4)).astype(np.float32)
    nothing: Array = np.zeros(0, np.float32)
    return LayerLosses(nothing, quantized, quantized[:, 2], nothing, ratios, nothing)


def measured(kls: list[float], nlls: list[float] | None = None, num_tokens: int = 10**9) -> Divergences:
    found = (np.asarray(values, np.float32) for values in (kls, nlls or kls))
    return Divergences(*found, num_tokens, EMBEDDING_KLS, HEAD_KLS)


def test_there_are_three_copies_of_consecutive_layers_and_fewer_in_small_models() -> None:
    small = losing(0.01, 0.001, 0.0001)
    for number, expected in {
        1: [range(1)],
        2: [range(1), range(1, 2)],
        3: [range(1), range(1, 2), range(2, 3)],
        7: [range(2), range(2, 4), range(4, 7)],
    }.items():
        assert [copy.layers for copy in copies_of([small] * number, D)] == expected


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_copy_has_the_least_width_at_which_its_layers_lose_a_quarter_nat_by_plain_rounding(ratio: float) -> None:
    layers = [losing(0.2, 0.1, 0.05, ratio), losing(0.3, 0.2, 0.1, ratio), losing(9, 8, 7, ratio)]
    found = copies_of(layers, D)
    assert [(copy.layers, copy.width) for copy in found] == [(range(1), 2), (range(1, 2), 3), (range(2, 3), 4)]
    assert [copy.estimated for copy in found] == pytest.approx([0.2, 0.2, 7], rel=1e-5)


def test_a_width_that_hqq_stores_without_loss_counts_as_it_is() -> None:
    (copy,) = copies_of([losing(0.2, 0.1, 0.05, 0.0)], D)
    assert (copy.width, copy.estimated) == (2, 0.0)


def test_growth_worked_by_hand() -> None:
    """Copies of layers 0 and 2, 4 and 6, 8: middles 1, 5 and 8; layer 3 lies half way between the first two."""
    moe_layers = (0, 2, 4, 6, 8)
    copies = [Copy(range(2), 2, 0.1), Copy(range(2, 4), 2, 0.2), Copy(range(4, 5), 3, 0.5)]
    found = effects_of(copies, measured([0.2, 0.2, 0.5]), moe_layers, 10)
    assert found.growth.tolist() == pytest.approx([2, 2, 1.75, 1.5, 1.25, 1, 1, 1, 1, 1])
    assert found.embedding.tolist() == [1.0, 2.0]
    assert found.head.tolist() == HEAD_KLS.tolist()
    assert found.copies.tolist() == pytest.approx(np.asarray([[0.2, 0.2], [0.2, 0.2], [0.5, 0.5]]))
    assert list(found.arrays()) == ["growth", "embedding", "head", "copies", "nll_per_kl"]
    assert all(array.dtype == np.float32 for array in found.arrays().values())


def test_growth_is_at_most_4_and_at_least_a_quarter_and_1_without_an_estimate() -> None:
    copies = [Copy(range(i, i + 1), 2, estimated) for i, estimated in enumerate([0.1, 0.1, 0.0])]
    assert effects_of(copies, measured([9.0, 0.0, 0.1]), (0, 1, 2), 3).growth.tolist() == [4.0, 0.25, 1.0]


def nll_per_kl(kls: list[float], nlls: list[float], num_tokens: int) -> float:
    copies = [Copy(range(i, i + 1), 2, 0.1) for i in range(len(kls))]
    return float(effects_of(copies, measured(kls, nlls, num_tokens), range(len(kls)), len(kls)).nll_per_kl[0])


def test_log_likelihood_is_lost_as_over_all_copies_together() -> None:
    """(0.1 + 0.05) / (0.2 + 0.1): large divergences are measured best and weigh most."""
    assert nll_per_kl([0.2, 0.1], [0.1, 0.05], 10**9) == pytest.approx(0.5, rel=1e-6)


def test_over_few_tokens_the_log_likelihood_lost_is_taken_to_be_nearer_the_divergence() -> None:
    """One of deviation 1/10 weighs 100; 500 tokens weigh 250 a nat: (100 + 250 * 0.05) / (100 + 250 * 0.1)."""
    assert nll_per_kl([0.1], [0.05], 500) == pytest.approx(0.9, rel=1e-6)
    assert nll_per_kl([0.1], [-0.5], 0) == 1.0
    assert nll_per_kl([0.1], [-0.5], 10**9) == pytest.approx(0.1)
    assert replace(measured([0.0]), num_tokens=5).num_tokens == 5
    assert nll_per_kl([0.0], [0.0], 10**9) == 1.0
