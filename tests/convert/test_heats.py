"""Slices of rows by heat: as a profile counted them, between its levels, and without a profile."""

import numpy as np
import pytest
from support.profiles import SMALLEST, profiled, random_tokens

from moe_pack.calib.forward import HOT_SPARSITIES, KINDS
from moe_pack.calib.profile import Profile
from moe_pack.convert.plan.gpu_speed import NUM_SLICES, RowHeat


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of two layers of three experts of 16 neurons."""
    source = SMALLEST.write(tmp_path_factory.mktemp("source"))
    return profiled(source, tmp_path_factory.mktemp("heats") / "profile", random_tokens(4, 32, 32))


def test_at_a_level_that_was_counted_slices_are_the_counted_shares_hottest_first(profile: Profile) -> None:
    for kind_idx, kind in enumerate(KINDS):
        for sparsity in HOT_SPARSITIES:
            found = RowHeat(profile).at(kind, np.full((2, 3), sparsity))
            for layer_idx in range(2):
                counted = -np.sort(-profile.statistics(layer_idx).hot_share(kind_idx, sparsity), axis=1)
                assert found.shape == (2, 3, NUM_SLICES) == (2, *counted.shape)  # a neuron a slice
                scale = (1 - sparsity) / counted.mean(axis=1, keepdims=True)
                np.testing.assert_allclose(found[layer_idx], np.minimum(counted * scale, 1), atol=1e-6)


def test_between_levels_each_expert_lies_between_them_and_runs_as_much_as_asked(profile: Profile) -> None:
    heats, sparsity = RowHeat(profile), np.array([[0.0, 0.6, 0.75], [0.85, 0.5, 0.9]])
    found = heats.at("up", sparsity)
    assert (np.diff(found, axis=2) <= 1e-9).all() and (found[0, 0] == 1).all()
    lost = (found == 1).any(axis=2)  # of slices that run always the rest is cut off
    np.testing.assert_allclose(found.mean(axis=2)[~lost], 1 - sparsity[~lost], atol=1e-9)


def test_without_a_selector_every_row_is_read(profile: Profile) -> None:
    for heats in (RowHeat(profile), RowHeat(None)):
        assert (heats.at("none", np.full((2, 3), 0.9)) == 1).all()


def test_without_a_profile_all_rows_run_as_often() -> None:
    sparsity = np.array([[0.0, 0.5]])
    assert RowHeat(None).at("gate", sparsity).tolist() == [[[1.0], [0.5]]]
