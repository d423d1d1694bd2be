"""Passes over models whose layers do not simply add to the hidden state, against the decoder and differences."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.random_weights import RandomWeights
from support.specs import RESIDUALS, ROUTED
from torch import Tensor

from moe_pack.calib.forward import LayerStates, LayerTokens, LayerwiseWeights, Sequences
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.sensitivity import SensitivityPass
from moe_pack.calib.sensitivity.exact import ExactPass
from moe_pack.calib.sensitivity.gradients import Tracked, end_gradient
from moe_pack.calib.statistics import PartialStates, Shares, measure_layer
from moe_pack.formats import ModelSpec
from moe_pack.formats.parts.specs import spec_fault
from moe_pack.runtime.model import Decoder, embed, head, run_expert

CPU = torch.device("cpu")
N, S = 3, 10
IDS = torch.randint(96, (N, S), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=[*RESIDUALS, *ROUTED], ids=lambda name: name.replace(" ", "-"))
def weights(request: pytest.FixtureRequest) -> LayerwiseWeights:
    spec = (RESIDUALS | ROUTED)[request.param]
    assert spec_fault(spec) is None
    return LayerwiseWeights(RandomWeights(spec))


def run_through(states: LayerStates, weights: LayerwiseWeights, to_layer: int) -> None:
    """Takes states to a layer."""
    spec: ModelSpec = weights.spec
    for layer in range(states.next_layer, to_layer):
        tokens = states.enter(layer)
        if layer in spec.moe_layers:
            measure_layer(states, tokens, weights, spec.moe_layers.index(layer), (0.0, 0.0), 0)
        states.leave(layer, tokens)


def begun(weights: LayerwiseWeights, folder: Path) -> LayerStates:
    return LayerStates(
        weights,
        Beginning(lambda number: embed(IDS[number], weights), ids=lambda number: IDS[number]),
        N,
        S,
        folder,
        CPU,
    )


def test_a_pass_by_layers_ends_in_the_decoders_logits(weights: LayerwiseWeights, tmp_path: Path) -> None:
    states = begun(weights, tmp_path / "states")
    run_through(states, weights, weights.spec.num_hidden_layers)
    decoder, by_token = Decoder(weights, S), Decoder(weights, S)
    for number in range(N):
        decoder.reset()
        by_token.reset()
        expected = decoder.logits(IDS[number].tolist())
        with torch.inference_mode():
            found = head(states.before(number), weights)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        singly = torch.stack([by_token.next_logits([token]) for token in IDS[number].tolist()])
        torch.testing.assert_close(singly, expected, atol=2e-4, rtol=2e-4)


def test_the_gradients_of_a_layers_end_are_those_of_finite_differences(
    weights: LayerwiseWeights, tmp_path: Path
) -> None:
    states, d = begun(weights, tmp_path / "states"), weights.spec.hidden_size
    run_through(states, weights, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        half = states.half(1, 0, weights)
        outputs = torch.randn((S, d), generator=generator)
        above = torch.randn((S, weights.spec.stream_width), generator=generator)
        found = end_gradient(states, 1, half, outputs, Tracked(weights), above)
        for place, gradient in enumerate(found):
            given = [*half, outputs]
            step = 1e-3 * torch.randn(given[place].shape, generator=generator)

            def moved(sign: int, place: int = place, step: Tensor = step) -> Tensor:
                x, inputs, routed = (each + sign * step if i == place else each for i, each in enumerate(given))
                return states.after(1, (x, inputs), routed, weights).double()

            expected = float(((moved(1) - moved(-1)) * above).sum())
            size = float(gradient.norm() * step.norm())
            assert float((2 * gradient * step).sum()) == pytest.approx(expected, abs=5e-3 * max(size, 1e-3))
    assert float(found[2].norm()) > 0, "what experts add changes the end of the layer"


@pytest.mark.slow
def test_gradients_through_whole_layers_predict_what_a_change_does(weights: LayerwiseWeights, tmp_path: Path) -> None:
    """The gradient before layer 0 that the pass stores, against what a step of the embedding changes."""
    spec = weights.spec
    thresholds = np.zeros((spec.router.num_experts, 3, 4), np.float32)
    stage = SensitivityPass(weights, IDS, "full", lambda layer_idx: thresholds, tmp_path / "pass", CPU)
    while stage.states.next_layer < spec.num_hidden_layers:
        stage.forward()
    while stage.way_back.next_layer >= 0:
        losses = stage.way_back.measure()
        assert np.isfinite(losses.dense).all() and (losses.dense >= 0).all()
        if stage.way_back.next_layer in spec.moe_layers:
            assert (losses.quantized.sum(axis=(0, 1)) > 0).all()
        stage.way_back.leave()
    step = 1e-3 * torch.randn(S, spec.stream_width, generator=torch.Generator().manual_seed(7))
    folder = tmp_path / "moved"

    def final(sign: int) -> Tensor:
        def first(number: int) -> Tensor:
            return embed(IDS[number], weights) + sign * step

        states = LayerStates(
            weights, Beginning(first, ids=lambda number: IDS[number]), stage.num_sequences, S, folder / str(sign), CPU
        )
        run_through(states, weights, spec.num_hidden_layers)
        return states.before(0)

    folder.mkdir()
    with torch.inference_mode():
        last = stage.way_back.prediction_gradients(_Silent())[:S]
        expected = float(((final(1) - final(-1)).double() * last).sum())
    found = float((2 * stage.way_back.above[:S].double() * step).sum())
    size = float(stage.way_back.above[:S].norm() * step.norm())
    assert found == pytest.approx(expected, abs=2e-2 * size)


class _Silent:
    def advance(self, done: float, note: str = "", kind: str = "") -> None:
        """Shows nothing."""


def test_a_copy_with_one_worse_expert_is_a_run_with_it(weights: LayerwiseWeights, tmp_path: Path) -> None:
    """In the exact pass: the copy of layer 0's first expert, before layer 1, by experts run one by one."""
    spec = weights.spec
    stage = ExactPass(weights, IDS, tmp_path / "exact", CPU)
    stage.layer(0)
    number = stage.num_copied
    given = Sequences.of(spec, IDS)
    states = LayerStates(weights, given.embedded(weights), number, S, tmp_path / "plain", CPU)
    tokens: LayerTokens = states.enter(0)
    with torch.inference_mode():
        for expert in range(spec.router.num_experts):
            token_idx, shares = tokens.of_expert(expert)
            model = stage._at_2 if expert == 0 else stage._at_4
            function = spec.expert_function(0)
            y = run_expert(tokens.expert_inputs(token_idx), model.expert(0, expert), function, "none", 0.0)
            states.add(tokens, token_idx, shares, y)
        states.leave(0, tokens)
    for place in range(number):
        torch.testing.assert_close(stage.states.before(2 * number + place), states.before(place), atol=1e-4, rtol=1e-4)


def test_partial_states_are_those_of_resident_experts_alone(weights: LayerwiseWeights, tmp_path: Path) -> None:
    spec, judged = weights.spec, 1
    partial = PartialStates(tmp_path, spec, Shares(N, S, N - judged, judged), judged * S)
    states = begun(weights, tmp_path / "states")
    tokens = states.enter(0)
    partial.begin(0, tokens)
    resident = set(np.flatnonzero(partial._is_resident))
    measure_layer(
        states, tokens, weights, 0, (0.0, 0.0), judged * S,
        on_output=lambda expert, places, shares, output: partial.add(0, expert, places, shares, output),
    )  # fmt: skip
    partial.end(0, states, weights)
    states.leave(0, tokens)
    partial_x = torch.from_numpy(np.fromfile(tmp_path / "partial-states-000.bin", np.float32)).view(S, -1)

    again = LayerStates(
        weights,
        Beginning(lambda number: embed(IDS[N - 1], weights), ids=lambda number: IDS[N - 1]),
        1,
        S,
        tmp_path / "again",
        CPU,
    )
    few = again.enter(0)
    with torch.inference_mode():
        for expert in sorted(resident):
            token_idx, shares = few.of_expert(expert)
            function = spec.expert_function(0)
            y = run_expert(few.expert_inputs(token_idx), weights.expert(0, expert), function, "none", 0.0)
            again.add(few, token_idx, shares, y)
        again.leave(0, few)
    torch.testing.assert_close(partial_x, again.before(0), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(partial_x, states.before(N - 1), atol=1e-3)
