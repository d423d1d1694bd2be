"""Predictors on planted rules, and every figure against its own recomputation."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.cases import case as named_case
from support.models import TinyMixtral
from torch import Tensor

from moe_pack.calib.forward import HOT_SPARSITIES, KINDS, Array, num_held_out, read_all_arrays
from moe_pack.calib.forward.store import write_arrays
from moe_pack.calib.statistics import InputFiles, LayerInputs, LayerPredictors, Shares, learn_paths, predict_layer
from moe_pack.calib.statistics.predictors import MaskCounts, mask_counts, recall_precision
from moe_pack.formats import PackError
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights
from moe_pack.runtime.offload import PREDICTORS, PathStatistics

CPU = torch.device("cpu")
E, D, F, LAYERS = 6, 64, 20, 3
NUM_LEARNED, NUM_JUDGED = 240, 300
Shape = tuple[str, int]
Arrays = dict[str, Array]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_inputs(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, D, generator=generator(seed))


def random_routes(num_tokens: int, k: int, seed: int, num_experts: int = E) -> Tensor:
    """Different experts in each row, best first."""
    return torch.rand(num_tokens, num_experts, generator=generator(seed)).argsort(1)[:, :k]


@dataclass(frozen=True)
class Planted:
    """Inputs and routes of three layers, and thresholds float32 [E, kinds, sparsities]."""

    history: list[LayerInputs]
    paths: PathStatistics
    thresholds: Array


def planted(rule: str, k: int = 2, layers: int = LAYERS) -> Planted:
    """`linear`: an expert's score is linear in the input before; `paths`: every expert is followed by the third after.

    `none`: no rule; expert 5 is chosen by no held-out token.
    """
    number = NUM_LEARNED + NUM_JUDGED
    inputs = [random_inputs(number, seed) for seed in range(layers)]
    routes = [random_routes(number, k, seed + 10) for seed in range(layers)]
    if rule == "linear":
        kind = torch.randint(E, (number,), generator=generator(30))  # a token lies near one of 6 directions
        directions = torch.linalg.qr(torch.randn(D, D, generator=generator(31))).Q[:E] * 8
        inputs[-2] = directions[kind] + random_inputs(number, 32)
        routes[-1] = (kind[:, None] + torch.arange(k)) % E
    if rule == "paths":
        routes[-1] = (routes[-2] + 3) % E
    if rule == "none":
        routes[-1][NUM_LEARNED:] = random_routes(NUM_JUDGED, k, 40, E - 1)
    history = [
        LayerInputs(x[:NUM_LEARNED], x[NUM_LEARNED:], chosen[:NUM_LEARNED], chosen[NUM_LEARNED:])
        for x, chosen in zip(inputs, routes, strict=True)
    ]
    learned = np.stack([held.learned_routes.numpy() for held in history], axis=1)
    limits = np.sort(np.random.default_rng(0).random((E, 3, 4)).astype(np.float32), axis=2)
    return Planted(history, learn_paths(learned, E, 1 << 20), limits)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointWeights]:
    shape = TinyMixtral(hidden_size=D, intermediate_size=F, num_layers=LAYERS, num_experts=E, dtype=torch.float32)
    checkpoint = Checkpoint(shape.write(tmp_path_factory.mktemp("predicted")))
    yield CheckpointWeights(checkpoint)
    checkpoint.close()


def predicted(held: Planted, weights: CheckpointWeights) -> LayerPredictors:
    layer_idx = len(held.history) - 1
    return predict_layer(weights, layer_idx, held.history, held.paths, held.thresholds, CPU)


CASES: list[Shape] = [("linear", 2), ("paths", 1), ("none", 2)]
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]} a token")


@pytest.fixture(scope="module")
def found(weights: CheckpointWeights) -> dict[Shape, LayerPredictors]:
    return {case: predicted(planted(*case), weights) for case in CASES}


Found = dict[Shape, LayerPredictors]


def test_a_network_wins_where_routes_are_a_function_of_the_input_before(found: Found) -> None:
    held = found["linear", 2]
    recalls = dict(zip(PREDICTORS, held.experts[:, 0].tolist(), strict=True))
    best = PREDICTORS[int(held.best[0])]
    assert best.startswith("MLP")
    assert recalls[best] == 1.0
    assert max(recalls[name] for name in ("popularity", "paths", "next router")) < 0.6  # 1/3 by chance


def test_paths_are_not_beaten_where_routes_follow_from_those_before(found: Found) -> None:
    held = found["paths", 1]
    recalls = dict(zip(PREDICTORS, held.experts[:, 0].tolist(), strict=True))
    assert recalls["paths"] == 1.0
    assert PREDICTORS[int(held.best[0])] == "paths"  # the first of equals
    assert max(recalls["popularity"], recalls["next router"]) < 0.6


@ALL
def test_every_row_of_the_table_is_recall_and_precision_of_its_scores(
    case: Shape, found: Found, weights: CheckpointWeights
) -> None:
    held = planted(*case)
    before, own, k = held.history[-2], held.history[-1], case[1]
    counts = torch.bincount(own.learned_routes.flatten(), minlength=E)
    told, _ = held.paths.predict(LAYERS - 1, np.stack([h.judged_routes.numpy() for h in held.history[:-1]], axis=1))
    router = before.judged @ weights.matrix(f"layers.{LAYERS - 1}.router").rows(0, E).T
    rows = [counts.float().expand(NUM_JUDGED, E), torch.from_numpy(told), router]
    table = found[case].experts
    assert table.shape == (len(PREDICTORS), 3) and table.dtype == np.float32
    for row, scores in zip(table, rows, strict=False):
        recall, precision = recall_precision(scores, own.judged_routes, k)
        assert recall == precision
        np.testing.assert_allclose(row, [recall, *recall_precision(scores, own.judged_routes, 2 * k)], rtol=1e-6)


@ALL
def test_the_network_kept_is_the_better_one_and_scores_as_its_row_says(case: Shape, found: Found) -> None:
    held, history = found[case], planted(*case).history
    previous = torch.stack([h.judged_routes for h in history[:-1]], dim=1)
    scores = held.network.scores(history[-2].judged, previous)
    recall, _ = recall_precision(scores, history[-1].judged_routes, case[1])
    row = 3 if held.network.out_weight is None else 4
    assert held.experts[row, 0] == pytest.approx(recall, rel=1e-6)
    assert held.experts[row, 0] == held.experts[3:5, 0].max()
    assert held.network.num_previous == 2


def test_scores_of_partial_states_are_judged_as_the_others(weights: CheckpointWeights) -> None:
    held = planted("none")
    own = held.history[-1].judged_routes
    truth = torch.zeros(NUM_JUDGED, E).scatter(1, own, 1.0)
    told = predict_layer(weights, 2, held.history, held.paths, held.thresholds, CPU, truth)
    assert told.experts[5].tolist() == [1.0, 1.0, 0.5] and told.best.tolist() == [5]
    wrong = predict_layer(weights, 2, held.history, held.paths, held.thresholds, CPU, -truth)
    assert wrong.experts[5, 0] == 0 and wrong.best[0] != 5


def test_the_best_is_the_first_predictor_of_largest_recall(found: Found) -> None:
    for held in found.values():
        assert np.isnan(held.experts[5]).all(), "there were no scores of partial states"
        recalls = held.experts[:5, 0].tolist()
        assert held.best.tolist() == [recalls.index(max(recalls))]
        assert held.best.dtype == np.uint8


def test_neurons_are_counted_as_with_whole_matrices(found: Found, weights: CheckpointWeights) -> None:
    """Brute force in numpy; expert 5 has no held-out token."""
    held = planted("none")
    before, own = held.history[-2], held.history[-1]
    assert not (own.judged_routes == 5).any()
    both, told, ran = (np.zeros((3, 4)) for _ in range(3))
    for expert in range(E):
        chosen = (own.judged_routes == expert).any(1)
        (block,) = weights.expert(LAYERS - 1, expert).blocks()
        assert block.gate is not None
        gate, up = block.gate.double().numpy(), block.up.double().numpy()
        magnitudes = []
        for x in (before.judged[chosen].double().numpy(), own.judged[chosen].double().numpy()):
            g, u = x @ gate.T, x @ up.T
            active = g / (1 + np.exp(-g))
            magnitudes.append({"up": abs(u), "gate": abs(active), "both": abs(active * u)})
        for kind_idx, kind in enumerate(KINDS):
            for level in range(len(HOT_SPARSITIES)):
                masks = [m[kind] >= held.thresholds[expert, kind_idx, level] for m in magnitudes]
                both[kind_idx, level] += (masks[0] & masks[1]).sum()
                told[kind_idx, level] += masks[0].sum()
                ran[kind_idx, level] += masks[1].sum()
    assert (both > 0).all() and (told != ran).any()
    # A neuron within rounding of its threshold may fall to either side: one in thousands.
    np.testing.assert_allclose(found["none", 2].neurons, np.stack([both / ran, both / told], axis=2), rtol=2e-3)


def test_neurons_are_judged_on_256_tokens_of_an_expert_evenly_spread(weights: CheckpointWeights) -> None:
    """All 300 tokens on expert 0; the first half of them runs everything, the second nothing."""
    held = planted("none", k=1)
    own = held.history[-1]
    judged = torch.cat([own.judged[:150] * 1e3, own.judged[150:] * 0])
    last = replace(own, judged=judged, judged_routes=torch.zeros(NUM_JUDGED, 1, dtype=torch.int64))
    before = replace(held.history[-2], judged=judged * 0 + own.judged * 1e3)
    limits = np.full((E, 3, 4), 1e-3, np.float32)
    told = predict_layer(weights, 2, [held.history[0], before, last], held.paths, limits, CPU).neurons
    assert told[0, :, 0] == pytest.approx(1.0, abs=0.01)  # all that runs is told
    assert told[0, :, 1] == pytest.approx(0.5, abs=0.01)  # half of what is told runs


def test_where_no_token_is_held_out_neurons_have_no_figures(weights: CheckpointWeights) -> None:
    held = planted("none")
    empty = [replace(h, judged=h.judged[:0], judged_routes=h.judged_routes[:0]) for h in held.history]
    told = predict_layer(weights, 2, empty, held.paths, held.thresholds, CPU)
    assert np.isnan(told.neurons).all()
    assert told.experts[:5].tolist() == [[1.0, 1.0, 1.0]] * 5 and np.isnan(told.experts[5]).all()


def test_the_second_layer_is_told_from_the_first_alone(weights: CheckpointWeights) -> None:
    told = predicted(planted("paths", k=1, layers=2), weights)
    assert told.network.num_previous == 1
    assert told.experts[1, 0] == 1.0


def test_the_same_tokens_give_the_same_bits(found: Found, weights: CheckpointWeights) -> None:
    again = predicted(planted("none"), weights).arrays()
    for name, array in found["none", 2].arrays().items():
        np.testing.assert_array_equal(again[name], array, name)


# --- arrays


@ALL
def test_a_layers_file_gives_back_every_array_and_the_network(case: Shape, found: Found, tmp_path: Path) -> None:
    held = found[case]
    path = tmp_path / "predictors.safetensors"
    path.write_bytes(write_arrays(held.arrays()))
    read = read_all_arrays(path)
    assert read.keys() == held.arrays().keys() >= {"experts", "neurons", "best", "x_weight", "route_weight", "bias"}
    for name, array in held.arrays().items():
        np.testing.assert_array_equal(read[name], array, name)
        assert read[name].dtype == array.dtype
    network = LayerPredictors.from_arrays(read, path.name).network
    for name, tensor in held.network.arrays().items():
        assert torch.equal(network.arrays()[name], tensor) and network.arrays()[name].dtype == tensor.dtype
    assert network.x_weight.dtype == torch.bfloat16


def without(name: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(name)


def setting(name: str, array: Array) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: array})


def test_a_file_that_is_no_layers_predictors_is_refused_by_name(found: Found) -> None:
    for change, message in [
        (without("bias"), r"found tensors \["),
        (without("neurons"), "tensor 'neurons' is missing"),
        (setting("more", np.zeros(1, np.float32)), "unknown tensor 'more'"),
        (setting("experts", np.zeros((6, 2), np.float32)), r"tensor 'experts' is F32 \[6, 2\], expected F32 \[6, 3\]"),
        (
            setting("best", np.asarray([6], np.uint8)),
            r"tensor 'best' is 6 at \[0\], expected a finite number of at most 5",
        ),
    ]:
        with named_case(change, message):
            arrays = found["none", 2].arrays()
            change(arrays)
            with pytest.raises(PackError, match=rf"^predictors-001: .*{message}"):
                LayerPredictors.from_arrays(arrays, "predictors-001")


def test_the_last_predictor_may_be_the_best(found: Found) -> None:
    arrays = found["none", 2].arrays() | {"best": np.asarray([5], np.uint8)}
    assert LayerPredictors.from_arrays(arrays, "predictors-001").best.tolist() == [5]


# Worked by hand. Token 0: experts 1, 2 and 3 are equal, so 1 then 2 come first. Token 1: 3, then 0 and 1 are equal.
SCORES = torch.tensor([[0.1, 0.5, 0.5, 0.5], [0.2, 0.2, 0.1, 0.9]])
ACTUAL = torch.tensor([[2, 3], [3, 1]])


def test_the_best_is_right_for_one_token_of_two() -> None:
    assert recall_precision(SCORES, ACTUAL, 1) == (1 / 4, 1 / 2)  # predicted 1 | 3


def test_ties_go_to_the_lowest_index() -> None:
    assert recall_precision(SCORES, ACTUAL, 2) == (2 / 4, 2 / 4)  # predicted 1 2 | 3 0
    assert recall_precision(SCORES, ACTUAL, 3) == (1.0, 4 / 6)  # predicted 1 2 3 | 3 0 1


def test_many_equal_scores_are_predicted_in_their_order() -> None:
    """More than 16 entries, where sorts that are not stable begin to shuffle."""
    scores = torch.zeros(3, 300)
    assert recall_precision(scores, torch.tensor([[0, 1], [1, 2], [298, 299]]), 2) == (3 / 6, 3 / 6)


def test_predicting_more_experts_than_there_are_predicts_all() -> None:
    assert recall_precision(SCORES, ACTUAL, 8) == (1.0, 0.5)


def test_one_token_of_one_expert_is_predicted() -> None:
    assert recall_precision(torch.tensor([[-3.0]]), torch.tensor([[0]]), 1) == (1.0, 1.0)


def test_all_tokens_on_one_expert_that_is_predicted_last_are_missed() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0]]).expand(5, 3)
    assert recall_precision(scores, torch.full((5, 1), 2), 2) == (0.0, 0.0)


def test_without_tokens_nothing_is_missed_and_nothing_wrong() -> None:
    assert recall_precision(torch.empty(0, 4), torch.empty(0, 2, dtype=torch.int64), 2) == (1.0, 1.0)


def test_recall_and_precision_are_those_of_sets() -> None:
    for num_experts, k, num_predicted in [(8, 2, 2), (8, 2, 4), (5, 1, 1), (64, 8, 16)]:
        with case(num_experts, k, num_predicted):
            rng = random.Random(num_experts)
            scores = [
                [rng.randrange(6) / 4 for _ in range(num_experts)] for _ in range(40)
            ]  # few values: ties everywhere
            actual = [rng.sample(range(num_experts), k) for _ in range(40)]
            hits = 0
            for row, chosen in zip(scores, actual, strict=True):
                best = [e for _, e in sorted((-score, e) for e, score in enumerate(row))][:num_predicted]
                hits += len(set(best) & set(chosen))
            found = recall_precision(torch.tensor(scores), torch.tensor(actual), num_predicted)
            assert found == (hits / (40 * k), hits / (40 * num_predicted))
            assert (found[0] == found[1]) == (k == num_predicted)


def test_masks_are_counted_entry_by_entry() -> None:
    predicted = torch.tensor([[True, True, False], [False, True, False]])
    actual = torch.tensor([[True, False, True], [False, True, True]])
    counts = mask_counts(predicted, actual)
    assert counts == MaskCounts(num_both=2, num_predicted=3, num_actual=4)
    assert (counts.recall, counts.precision) == (2 / 4, 2 / 3)


def test_counts_of_blocks_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted, actual = (torch.rand(50, 7, generator=generator) < share for share in (0.3, 0.6))
    blocks = [slice(0, 1), slice(1, 1), slice(1, 33), slice(33, 50)]
    added = sum((mask_counts(predicted[block], actual[block]) for block in blocks), MaskCounts())
    assert added == mask_counts(predicted, actual)
    assert added.num_predicted not in (0, added.num_actual)


def test_masks_with_nothing_in_them_have_recall_and_precision() -> None:
    nothing, everything = torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)
    assert (mask_counts(nothing, everything).recall, mask_counts(nothing, everything).precision) == (0.0, 1.0)
    assert (mask_counts(everything, nothing).recall, mask_counts(everything, nothing).precision) == (1.0, 0.0)
    assert (MaskCounts().recall, MaskCounts().precision) == (1.0, 1.0)


def test_masks_must_be_bool() -> None:
    """The bitwise and of 2 and 1 is 0, though both are true."""
    with pytest.raises(AssertionError, match="masks are bool"):
        mask_counts(torch.tensor([2]), torch.tensor([1]))


WIDTH, S = 8, 5


def inputs(layer_idx: int, num_sequences: int = 10) -> Tensor:
    """Float32 [T, d], with a direction all layers share."""
    generator = torch.Generator().manual_seed(layer_idx)
    return torch.randn(num_sequences * S, WIDTH, generator=generator) + torch.arange(WIDTH) / 2


def files(folder: Path, num_sequences: int = 10) -> InputFiles:
    return InputFiles(folder, WIDTH, Shares.of(num_sequences, S, num_held_out(num_sequences)))


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_predictors_take_the_first_sequences_and_the_last_as_far_as_they_need() -> None:
    for num_sequences, sequence_length, held_out, learned, judged in [
        (10, 5, 2, 8, 2),  # all of them
        (1, 5, 0, 1, 0),  # one sequence: nothing to be judged on
        (2, 5, 1, 1, 1),
        (100, 256, 20, 32, 16),  # 8192 tokens, 4096 tokens
        (100, 300, 20, 28, 14),  # as many, in whole sequences
        (3, 10_000, 1, 1, 1),
    ]:
        with case(num_sequences, sequence_length, held_out, learned, judged):
            assert num_held_out(num_sequences) == held_out
            shares = Shares.of(num_sequences, sequence_length, held_out)
            assert shares == Shares(num_sequences, sequence_length, learned, judged)
            first, last = shares.tokens()
            total = num_sequences * sequence_length
            assert (first.start, first.stop) == (0, learned * sequence_length)
            assert (last.start, last.stop) == (total - judged * sequence_length, total)
            assert first.stop <= total - held_out * sequence_length, "nothing that is held out is learned from"


def test_the_cosine_is_that_of_every_token_with_itself_a_layer_before(tmp_path: Path) -> None:
    held = files(tmp_path)
    first = held.keep(0, inputs(0))
    assert all(math.isnan(value) for value in first)
    for layer_idx in (1, 2, 3):
        mean, deviation = held.keep(layer_idx, inputs(layer_idx))
        own, before = (inputs(l).numpy().astype(np.float64) for l in (layer_idx, layer_idx - 1))
        norms = np.linalg.norm(own, axis=1) * np.linalg.norm(before, axis=1)
        cosines = (own * before).sum(axis=1) / norms
        assert mean == pytest.approx(cosines.mean(), abs=1e-6)  # float32 cosines
        assert deviation == pytest.approx(cosines.std(), abs=1e-6)
        assert deviation > 0.01


def test_the_cosine_of_a_layer_that_does_nothing_is_one(tmp_path: Path) -> None:
    held = files(tmp_path, 1)
    held.keep(0, inputs(0, 1))
    assert held.keep(1, inputs(0, 1) * 3) == (pytest.approx(1, abs=1e-6), pytest.approx(0, abs=1e-6))


def test_a_token_without_any_input_has_a_cosine_of_nothing(tmp_path: Path) -> None:
    held, zero = files(tmp_path, 1), inputs(0, 1)
    held.keep(0, zero)
    found = inputs(0, 1)
    found[2] = 0
    assert held.keep(1, found)[0] == pytest.approx((S - 1) / S, abs=1e-6)


def test_a_layer_is_read_as_the_rows_of_both_shares(tmp_path: Path) -> None:
    held = InputFiles(tmp_path, WIDTH, Shares(num_sequences=10, sequence_length=S, num_learned=3, num_judged=2))
    routes = torch.arange(50 * 2).view(50, 2)
    for layer_idx in range(3):
        held.keep(layer_idx, inputs(layer_idx))
    for layer_idx in range(3):
        found, expected = held.read(layer_idx, routes), inputs(layer_idx)
        assert torch.equal(found.learned, expected[:15]) and torch.equal(found.judged, expected[40:])
        assert torch.equal(found.learned_routes, routes[:15]) and torch.equal(found.judged_routes, routes[40:])


def test_one_sequence_is_learned_from_and_none_is_judged(tmp_path: Path) -> None:
    held = files(tmp_path, 1)
    held.keep(0, inputs(0, 1))
    found = held.read(0, torch.zeros(S, 2, dtype=torch.int64))
    assert torch.equal(found.learned, inputs(0, 1))
    assert found.judged.shape == (0, WIDTH) and found.judged_routes.shape == (0, 2)


def test_a_layer_kept_again_is_the_same(tmp_path: Path) -> None:
    """As after a run killed between keeping a layer's inputs and its hidden states."""
    held = files(tmp_path)
    for layer_idx in range(4):
        once = held.keep(layer_idx, inputs(layer_idx))
        on_drive = bytes_in(tmp_path)
        again = files(tmp_path).keep(layer_idx, inputs(layer_idx))
        np.testing.assert_array_equal(once, again)  # NaN is NaN here
        assert bytes_in(tmp_path) == on_drive


def test_all_tokens_of_two_layers_at_most_are_kept(tmp_path: Path) -> None:
    held = files(tmp_path)
    for layer_idx in range(5):
        held.keep(layer_idx, inputs(layer_idx))
    whole = sorted(path for path in tmp_path.iterdir() if path.stat().st_size == inputs(0).nbytes)
    samples = [name for name in bytes_in(tmp_path) if "whole" not in name]
    assert len([path for path in whole if "whole" in path.name]) == 2
    assert len(samples) == 5
    assert len(bytes_in(tmp_path)) == 7
