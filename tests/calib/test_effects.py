"""Growth of estimates by copies, worked by hand from made-up losses and divergences."""

from dataclasses import replace

import numpy as np
import pytest

from moe_pack.calib.forward import Array
from moe_pack.calib.sensitivity import LayerLosses, compared_formats, copies_of, effects_of
from moe_pack.calib.sensitivity.effects import Copy, Divergences
from moe_pack.formats import part_format

D = 64
EMBEDDING_KLS, HEAD_KLS = (np.asarray(kls, np.float32) for kls in ([0.5, 1.0], [0.125, 0.25]))


def losses_of(at_2: float, at_3: float, at_4: float, ratio: float = 1.0) -> LayerLosses:
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
    small = losses_of(0.01, 0.001, 0.0001)
    for number, expected in {
        1: [range(1)],
        2: [range(1), range(1, 2)],
        3: [range(1), range(1, 2), range(2, 3)],
        7: [range(2), range(2, 4), range(4, 7)],
    }.items():
        assert [copy.layers for copy in copies_of([small] * number, D)] == expected


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_copy_has_the_least_width_at_which_its_layers_lose_a_quarter_nat_by_plain_rounding(ratio: float) -> None:
    layers = [losses_of(0.2, 0.1, 0.05, ratio), losses_of(0.3, 0.2, 0.1, ratio), losses_of(9, 8, 7, ratio)]
    found = copies_of(layers, D)
    assert [(copy.layers, copy.width) for copy in found] == [(range(1), 2), (range(1, 2), 3), (range(2, 3), 4)]
    assert [copy.estimated for copy in found] == pytest.approx([0.2, 0.2, 7], rel=1e-5)


def test_a_width_that_hqq_stores_without_loss_counts_as_it_is() -> None:
    (copy,) = copies_of([losses_of(0.2, 0.1, 0.05, 0.0)], D)
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
