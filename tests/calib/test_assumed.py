"""Losses of models without a profile: what was measured of another model, spread over shapes of all kinds."""

from dataclasses import replace

import numpy as np
import pytest
from support.assumed import assumed_figures
from support.cases import case
from support.models import TinyMixtral
from support.profiles import profiled, random_tokens
from support.specs import GROUPED

from moe_pack.calib.profile import ProfileOptions, assumed_losses, losses_of
from moe_pack.calib.profile.losses import spread
from moe_pack.calib.sensitivity import quantized_formats
from moe_pack.formats import BF16, ROW_GROUP, ModelSpec, dense_roles, part_format


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
