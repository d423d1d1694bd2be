"""Predicted experts on a GPU, in plain memory: what is predicted, that it changes no answer, and what changes one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import case
from support.gpu_runs import CPU, TOLERANCE, GpuRun, gpu_decoder, reference_logits
from support.models import TinyMixtral, pack
from support.native import kernels_limited_to
from support.predicted_routes import PredictedRoutes
from support.routings import random_routing
from torch import Tensor

from moe_pack.formats import Pack
from moe_pack.formats.pack.writer import rewrite_thresholds
from moe_pack.runtime.gpu.token.decoder import GpuDecoder
from moe_pack.runtime.gpu.token.prefetch import PredictionPlan
from moe_pack.runtime.model import Decoder, ExpertRunner, NativeOperations, PackWeights
from moe_pack.runtime.model.compute.router import expert_scores, router_weights
from moe_pack.runtime.model.layers import router_logits, run_one_by_one
from moe_pack.runtime.offload.prefetch import MethodName, PredictionInput, make_prediction, methods_by_layer, ranked
from moe_pack.runtime.offload.split import substitute

pytestmark = pytest.mark.usefixtures("few_programs")
SHAPE = TinyMixtral(num_layers=3, num_experts=4, config={"num_experts_per_tok": 2})
ROUTING = random_routing(3, 4, 2, 64, best=(4, 3))
IDS = [(37 * i + 5) % 96 for i in range(3)]
# All selectors are resident, and a third of the records.
RUN = GpuRun(0.6, dynamic_share=0.3)


def packed(folder: Path, thresholds: list[float] | None = None) -> Path:
    """A pack of three layers of four experts, with a threshold for each layer."""
    pack(SHAPE.write(folder / "source"), folder / "packed", selector="up")
    values = np.array([0.02] * 3 if thresholds is None else thresholds, np.float32)
    rewrite_thresholds(folder / "packed", np.repeat(values[:, None], 4, axis=1))
    return folder / "packed"


def plan(*methods: MethodName, num_predicted: int = 2, runs_predicted: bool = False) -> PredictionPlan:
    """The methods of layers 1 and 2; one is for both."""
    return PredictionPlan({1: methods[0], 2: methods[-1]}, num_predicted, ROUTING, runs_predicted)


def run_tokens(folder: Path, run: GpuRun) -> tuple[Tensor, np.ndarray, Any]:
    """Logits of tokens one by one, what was pulled ahead for each [T, L, n, 3], and the counts."""
    ahead = []
    with gpu_decoder(folder, run) as decoder:
        logits = []
        for token in IDS:
            logits.append(decoder.logits([token]))
            ahead.append(decoder._step.ahead[1 - decoder._turn].numpy().copy())
        return torch.cat(logits), np.stack(ahead), decoder.counts()


class Predicting(PackWeights, ExpertRunner):
    """Weights that also predict each layer's experts from the layer before."""

    methods: tuple[MethodName, ...]
    num_predicted: int

    def run_experts(self, layer_idx: int, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        if not layer_idx:
            self.routes, self.predicted = [], []
        self.routes.append(experts.numpy())
        if layer_idx < 2:
            prediction = make_prediction(self.methods[layer_idx], self, ROUTING)
            assert prediction is not None
            routes = np.stack(self.routes[-2:], axis=1)
            scores = prediction.scores(layer_idx + 1, PredictionInput(x, routes))
            assert scores is not None
            self.predicted.append(ranked(scores, self.num_predicted)[0].tolist())
        return run_one_by_one(x, experts, weights, self, layer_idx)


def predicted_in_torch(folder: Path, methods: tuple[MethodName, ...], num_predicted: int) -> list[list[list[int]]]:
    """The experts that methods predict for layers 1 and 2, of each token."""
    found = []
    with Pack(folder) as opened:
        weights = Predicting(opened, CPU)
        weights.methods, weights.num_predicted = methods, num_predicted
        decoder = Decoder(weights, 64)
        for token in IDS:
            decoder.next_logits([token])
            found.append(weights.predicted)
    return found


def check_predicted(folder: Path, methods: tuple[MethodName, MethodName], num_predicted: int) -> None:
    run = replace(RUN, prediction=plan(*methods, num_predicted=num_predicted), num_sequences=2, num_rows=2)
    logits, ahead, counts = run_tokens(folder, run)
    assert ahead[:, 1:, :, 0].tolist() == predicted_in_torch(folder, methods, num_predicted)
    assert (logits - reference_logits(folder, IDS)).abs().max() < TOLERANCE
    assert counts.ahead == ahead[..., 1].sum() > 0
    assert counts.ahead_ran == ahead[..., 2].sum() and 0 < counts.ahead_ran <= counts.ahead
    assert not ahead[:, 0].any(), "nothing is pulled ahead for the first layer"


def test_the_experts_predicted_are_those_of_the_method(tmp_path: Path) -> None:
    check_predicted(packed(tmp_path), ("router", "paths"), 3)


@pytest.mark.slow
def test_the_experts_predicted_are_those_of_networks_and_popularity(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    check_predicted(folder, ("mlp", "mlp"), 2)
    check_predicted(folder, ("popularity", "popularity"), 1)


def test_a_share_of_what_predicted_experts_lack_is_pulled_ahead(tmp_path: Path) -> None:
    with gpu_decoder(packed(tmp_path), replace(RUN, prediction=plan("router"))) as decoder:
        found = []
        for share in (1.0, 0.1, 0.0):  # half would already fill the memory for such records
            decoder.reset()
            decoder._step.pull_ahead(share)
            decoder.next_logits([IDS[0]])
            found.append(decoder._step.ahead[1 - decoder._turn, 1:, :, 1].numpy().copy())
        assert (found[1] <= found[0]).all() and found[0].sum() > found[1].sum() > found[2].sum() == 0


@pytest.mark.parametrize(("seconds_without", "predicts"), [(0.9, False), (1.1, True)])
def test_a_tried_prediction_stays_where_tokens_are_faster_with_it(
    seconds_without: float, predicts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are fastest with a quarter of what predicted experts lack: 1 s."""

    def seconds(decoder: GpuDecoder) -> float:
        prefetch = decoder._step.prefetch
        return seconds_without if prefetch is None else 1.0 + abs(float(prefetch.share) - 0.25)

    monkeypatch.setattr(GpuDecoder, "_seconds", seconds)
    run = replace(RUN, prediction=replace(plan("router"), is_tried=True))
    with gpu_decoder(packed(tmp_path), run) as decoder:
        decoder.tune()
        prefetch = decoder._step.prefetch
        assert decoder.predicts == predicts and (prefetch is None or float(prefetch.share) == 0.25)
        found = torch.cat([decoder.logits([token]).clone() for token in IDS])
        assert bool(decoder.counts().ahead) == predicts
    assert (found - reference_logits(tmp_path / "packed", IDS)).abs().max() < TOLERANCE


@pytest.mark.slow
def test_what_is_pulled_ahead_changes_no_bit(tmp_path: Path) -> None:
    folder, run = packed(tmp_path), replace(RUN, misses="pull")
    expected, _, without = run_tokens(folder, run)
    found, _, counts = run_tokens(folder, replace(run, prediction=plan("router")))
    assert torch.equal(found, expected)
    assert counts.ahead_ran and counts.pulled < without.pulled
    assert counts.resident + counts.pulled == without.resident + without.pulled


@pytest.mark.slow
def test_a_partial_state_without_missing_experts_predicts_what_the_router_chooses(tmp_path: Path) -> None:
    folder = packed(tmp_path, [0.0, 0.02, 0.02])  # all rows of the first layer are read, and are all static
    run = replace(RUN, dynamic_share=0.1, prediction=plan("partial"))
    with gpu_decoder(folder, run) as decoder:
        launches = decoder._step._experts[1]
        assert launches[0].is_whole and not launches[1].is_whole
        for token in IDS:
            decoder.next_logits([token])
            ahead = decoder._step.ahead[1 - decoder._turn]
            assert ahead[1, :, 0].tolist() == decoder.routes[1].tolist()
        assert decoder.counts().ahead


@pytest.mark.slow
def test_a_partial_state_predicts_while_experts_are_missing(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    logits, _, counts = run_tokens(folder, replace(RUN, prediction=plan("partial")))
    assert (logits - reference_logits(folder, IDS)).abs().max() < TOLERANCE
    assert counts.ahead_ran


@pytest.mark.slow
def test_predicted_experts_run_where_they_are_trusted(tmp_path: Path) -> None:
    folder = packed(tmp_path)
    found, _, counts = run_tokens(folder, replace(RUN, prediction=plan("router", runs_predicted=True)))
    with Pack(folder) as opened:
        weights = PredictedRoutes(opened, NativeOperations(kernels_limited_to("portable")))
        decoder = Decoder(weights, 64)
        expected = torch.cat([decoder.logits([token]) for token in IDS])
    assert (found - expected).abs().max() < TOLERANCE
    assert counts.changed == weights.num_wrong > 0


@pytest.mark.slow
def test_routers_choose_for_several_tokens_also_where_predictions_are_trusted(tmp_path: Path) -> None:
    folder, prompts = packed(tmp_path), (IDS[:2], IDS[1:])
    run = replace(RUN, prediction=plan("router", runs_predicted=True), num_sequences=2, num_rows=2)
    with gpu_decoder(folder, run) as decoder:
        for sequence, ids in zip(decoder.sequences, prompts, strict=True):
            decoder.extend(sequence, ids)
        found, counts = decoder.extend_each(decoder.sequences, [7, 8]).clone(), decoder.counts()
    for logits, ids, token in zip(found, prompts, (7, 8), strict=True):
        assert (logits - reference_logits(folder, [*ids, token])[-1]).abs().max() < TOLERANCE
    assert counts.tokens == 2 and counts.changed == 0


class Substituting(PackWeights, ExpertRunner):
    """Weights whose missing experts are replaced."""

    is_resident: np.ndarray
    alpha: float
    num_changed = 0

    def run_experts(self, layer_idx: int, x: Tensor, experts: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        logits = router_logits(x, self, layer_idx)
        scores = expert_scores(logits, self.spec.router).numpy()
        chosen = substitute(scores, experts.numpy(), self.is_resident[layer_idx], self.alpha)
        self.num_changed += int((chosen != experts.numpy()).sum())
        found = torch.from_numpy(chosen)
        return run_one_by_one(x, found, router_weights(logits, found, self.spec.router), self, layer_idx)


def two_texts(decoder: Decoder) -> Tensor:
    """Logits of the tokens of two sequences, which go on together."""
    found = [decoder.extend(sequence, IDS[:1]).clone() for sequence in decoder.sequences]
    for token in IDS[1:]:
        found.extend(decoder.extend_each(decoder.sequences, [token, 90 - token]).clone())
    return torch.stack(found)


@pytest.mark.slow
def test_resident_experts_replace_missing_ones_also_of_two_sequences(tmp_path: Path) -> None:
    folder, run = packed(tmp_path, [0.0, 0.02, 0.02]), replace(RUN, alpha=0.9, num_sequences=2, num_rows=2)
    with gpu_decoder(folder, run) as decoder:
        substitution = decoder._step.inputs.substitution
        assert substitution is not None
        found, counts = two_texts(decoder), decoder.counts()
    assert substitution.is_resident[0].any() and not substitution.is_resident[0].all()
    with Pack(folder) as opened:
        weights = Substituting(opened, CPU)
        weights.is_resident, weights.alpha = substitution.is_resident, substitution.alpha
        expected = two_texts(Decoder(weights, 64, num_sequences=2))
    assert (found - expected).abs().max() < TOLERANCE
    assert counts.changed == weights.num_changed > 0


def test_methods_are_those_of_the_name(tmp_path: Path) -> None:
    with Pack(packed(tmp_path)) as opened:
        spec = opened.spec
    for name in ("router", "partial", "paths", "popularity", "mlp"):
        with case(name):
            assert methods_by_layer(name, spec, ROUTING) == {1: name, 2: name}
    assert methods_by_layer("best", spec, ROUTING) == {1: "mlp", 2: "mlp"}
    assert methods_by_layer("best", spec, None) == {1: "router", 2: "router"}
    assert methods_by_layer("none", spec, ROUTING) == {}
