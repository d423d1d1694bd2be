"""What errors cost, worked by hand from made-up errors and divergences, and the order of copies."""

from dataclasses import replace

import numpy as np
import pytest
from specs import GROUPED, LATENT

from moe_pack.calib.forward import Array
from moe_pack.calib.sensitivity import (
    DENSE_WIDTHS,
    Effects,
    LayerErrors,
    Level,
    all_copies,
    copies_of,
    factors,
    roundable_roles,
)
from moe_pack.calib.sensitivity.effects import Copy, Divergences
from moe_pack.calib.sensitivity.errors import QUANTIZED, SPARSE, Change
from moe_pack.formats import GroupedQuerySpec, ModelSpec

LEVELS = pytest.mark.parametrize("level", ["fast", "full"])
# GROUPED's layers: experts, experts, dense. All its dense matrices but those of 40 and 80 columns can be rounded.
HEAD_KLS = np.asarray([0.125, 0.25], np.float32)
AT_2 = tuple(Change(matrix_idx, 2) for matrix_idx in range(3))


def errors_of(spec: ModelSpec, level: Level, layer: int, copies: list[float]) -> LayerErrors:
    """Errors of a layer of which `factors` reads those of copies only; the others are nonsense."""
    assert len(copies) == len(copies_of(spec, level, layer))
    nonsense: Array = np.full((6, 3, 4) if layer in spec.moe_layers else 0, np.nan, np.float32)
    dense = np.full((len(roundable_roles(spec, layer)), 2), np.nan, np.float32)
    return LayerErrors(dense, np.asarray(copies, np.float32), nonsense, nonsense, nonsense, nonsense)


def measured(kls: Array, head: Array = HEAD_KLS, nll_per_kl: float = 1.0) -> Divergences:
    """Divergences of copies that lose so much log-likelihood for each nat, over very many tokens."""
    return Divergences(kls, (kls * nll_per_kl).astype(np.float32), head, 10**9)


def without_roundable(spec: ModelSpec) -> ModelSpec:
    """No matrix of a layer has columns in 64s: a hidden size of 96, and experts and heads as they were."""
    attention = spec.attention
    assert isinstance(attention, GroupedQuerySpec)
    return replace(spec, hidden_size=96, attention=replace(attention, num_heads=3, num_kv_heads=1))


def test_fast_copies_are_three_a_layer_of_experts_and_one_a_dense_layer() -> None:
    """Gate and up together, down apart."""
    rows, down = AT_2[:2], AT_2[2:]
    assert all_copies(GROUPED, "fast") == (
        Copy("embedding", -1, 8),
        Copy("embedding", -1, 4),
        Copy("dense", 0, 4),
        Copy("experts", 0, changes=rows),
        Copy("experts", 0, changes=down),
        Copy("dense", 1, 4),
        Copy("experts", 1, changes=rows),
        Copy("experts", 1, changes=down),
        Copy("dense", 2, 4),
    )


def test_full_copies_have_each_matrix_below_8_bits_and_each_kind_at_a_sparsity_of_80_percent() -> None:
    copies = copies_of(GROUPED, "full", 1)
    assert copies[:2] == (Copy("dense", 1, 4), Copy("experts", 1, changes=AT_2))
    matrices = [Change(matrix_idx, width) for matrix_idx in range(3) for width in (2, 3, 4)]
    kinds = [Change(kind_idx=kind_idx, sparsity=0.8) for kind_idx in range(3)]
    assert [copy.changes for copy in copies[2:]] == [(change,) for change in (*matrices, *kinds)]


@LEVELS
def test_all_copies_are_those_of_the_embedding_then_of_every_layer(level: Level) -> None:
    for spec in (GROUPED, LATENT, without_roundable(GROUPED)):
        layers: list[int | None] = [None, *range(spec.num_hidden_layers)]
        joined = [copy for layer in layers for copy in copies_of(spec, level, layer)]
        assert list(all_copies(spec, level)) == joined
        assert len(set(joined)) == len(joined)


def test_a_fast_pass_worked_by_hand() -> None:
    """KL over error: dense 0.5 / 2, 3 / 0.5, 1 / 4; gate, up, kinds 1 / 0.25 and 6 / 2, down 2 / 4 and 7 / 1."""
    errors = [errors_of(GROUPED, "fast", layer, held) for layer, held in enumerate([[2, 0.25, 4], [0.5, 2, 1], [4]])]
    kls = np.asarray([0.01, 0.02, 0.5, 1, 2, 3, 6, 7, 1], np.float32)
    found = factors(errors, measured(kls), GROUPED, "fast")
    assert found.dense.tolist() == [0.25, 6.0, 0.25]
    assert found.quantized.tolist() == [[[4.0] * 4, [4.0] * 4, [0.5] * 4], [[3.0] * 4, [3.0] * 4, [7.0] * 4]]
    assert found.sparse.tolist() == [[[4.0] * 4] * 3, [[3.0] * 4] * 3]
    assert found.embedding.tolist() == pytest.approx([0.01, 0.02], rel=1e-6)
    assert found.head.tolist() == [0.125, 0.25]
    assert all(array.dtype == np.float32 for array in found.arrays().values())
    assert list(found.arrays()) == ["quantized", "sparse", "dense", "embedding", "head", "copies", "nll_per_kl"]
    assert found.copies.tolist() == np.stack([kls, kls], axis=1).tolist()


def full_effects() -> Effects:
    """Layer 0's copies: dense 1, all at 2 bits 2, gate 3 4 5, up 6 7 8, down 9 10 11, kinds 12 13 14; layer 1's + 20.

    These are KL over error; errors are 1 or 2.
    """
    spec = replace(GROUPED, num_hidden_layers=2, dense_intermediate_size=None)
    prices = np.arange(1, 15, dtype=np.float32)
    errors = [errors_of(spec, "full", 0, [1.0] * 14), errors_of(spec, "full", 1, [2.0] * 14)]
    kls = np.concatenate([[0.5, 1.5], prices, (prices + 20) * 2]).astype(np.float32)
    return factors(errors, measured(kls), spec, "full")


def test_a_full_pass_worked_by_hand() -> None:
    """What was measured at 8 bits costs as at 4; a sparsity costs as its kind at 80%."""
    found = full_effects()
    first = [[3, 4, 5, 5], [6, 7, 8, 8], [9, 10, 11, 11]]
    assert found.quantized.tolist() == [first, (np.asarray(first) + 20).tolist()]
    assert found.sparse.tolist() == [[[12] * 4, [13] * 4, [14] * 4], [[32] * 4, [33] * 4, [34] * 4]]
    assert found.dense.tolist() == [1.0, 21.0]
    assert found.embedding.tolist() == [0.5, 1.5]


@LEVELS
def test_without_any_error_everything_costs_nothing(level: Level) -> None:
    """And not NaN, as of an expert that is all zeros."""
    copies = [[0.0] * len(copies_of(GROUPED, level, layer)) for layer in range(3)]
    errors = [errors_of(GROUPED, level, layer, held) for layer, held in enumerate(copies)]
    kls = np.zeros(len(all_copies(GROUPED, level)), np.float32)
    found = factors(errors, measured(kls, np.zeros(2, np.float32)), GROUPED, level)
    assert not any(array.any() for name, array in found.arrays().items() if name != "nll_per_kl")
    assert found.quantized.shape == found.sparse.shape == (2, 3, 4)


@LEVELS
def test_a_model_whose_dense_matrices_cannot_be_rounded_has_no_copies_of_them(level: Level) -> None:
    spec = without_roundable(GROUPED)
    per_layer = 13 if level == "full" else 2
    assert [len(copies_of(spec, level, layer)) for layer in (None, 0, 1, 2)] == [0, per_layer, per_layer, 0]
    errors = [errors_of(spec, level, layer, held) for layer, held in enumerate([[1] * per_layer, [1] * per_layer, []])]
    kls = np.ones(2 * per_layer, np.float32)
    found = factors(errors, measured(kls, np.zeros(2, np.float32)), spec, level)
    assert found.dense.tolist() == [0.0, 0.0, 0.0]
    assert found.embedding.tolist() == [0.0] * len(DENSE_WIDTHS)
    assert found.quantized.tolist() == [[[1.0] * 4] * 3] * 2


@LEVELS
def test_all_experts_of_a_layer_at_2_bits_are_predicted_as_their_copy_was_measured(level: Level) -> None:
    """By construction where no change cancels another: prices times errors add up to the copies' divergence.

    Fast: the errors of one layer's gates and ups at 2 bits add up to that of their copy. Full: each has its own copy.
    """
    generator = np.random.default_rng(0)
    quantized = generator.random((6, 3, 4)).astype(np.float32)  # [E, matrices, widths]
    singles = [float(quantized[:, c.matrix_idx, (2, 3, 4, 8).index(c.width)].sum()) for c in QUANTIZED if c.width < 8]
    rows, down = float(quantized[:, :2, 0].sum()), float(quantized[:, 2, 0].sum())
    copies = [1.0, rows + down, *singles, 1.0, 1.0, 1.0] if level == "full" else [1.0, rows, down]
    spec = replace(GROUPED, num_hidden_layers=1, moe_layers=(0,), dense_intermediate_size=None)
    kls = generator.random(2 + len(copies)).astype(np.float32)
    found = factors([errors_of(spec, level, 0, copies)], measured(kls), spec, level)
    predicted = float((found.quantized[0, :, 0] * quantized[:, :, 0]).sum())
    places = [4, 7, 10] if level == "full" else [3, 4]  # gate, up, down at 2 bits; gate and up, down
    assert predicted == pytest.approx(float(kls[places].sum()), rel=1e-5)


def nll_per_kl(kls: list[float], nlls: list[float], num_tokens: int) -> float:
    """By `factors`, of a model of one layer whose dense matrices cannot be rounded, and one embedding's copies."""
    spec = replace(GROUPED, num_hidden_layers=1, moe_layers=(0,), dense_intermediate_size=None)
    number = len(all_copies(spec, "fast"))
    held = (np.zeros(number, np.float32), np.zeros(number, np.float32))
    for place, values in zip(held, (kls, nlls), strict=True):
        place[: len(values)] = values
    errors = [errors_of(spec, "fast", 0, [1.0] * len(copies_of(spec, "fast", 0)))]
    return float(factors(errors, Divergences(*held, HEAD_KLS, num_tokens), spec, "fast").nll_per_kl[0])


def test_log_likelihood_is_lost_as_over_all_copies_together() -> None:
    """(0.1 + 0.05) / (0.2 + 0.1): large divergences are measured best and weigh most."""
    assert nll_per_kl([0.2, 0.1], [0.1, 0.05], 10**9) == pytest.approx(0.5, rel=1e-6)


def test_over_few_tokens_the_log_likelihood_lost_is_taken_to_be_nearer_the_divergence() -> None:
    """One of deviation 1/10 weighs 100; 500 tokens weigh 250 a nat: (100 + 250 * 0.05) / (100 + 250 * 0.1)."""
    assert nll_per_kl([0.1], [0.05], 500) == pytest.approx(0.9, rel=1e-6)
    assert nll_per_kl([0.1], [-0.5], 0) == 1.0
    assert nll_per_kl([0.1], [-0.5], 10**9) == pytest.approx(0.1)
    assert nll_per_kl([0.0], [0.0], 10**9) == 1.0


def test_the_lists_of_changes_are_those_of_the_arrays() -> None:
    assert len(QUANTIZED) == len(SPARSE) == 12
