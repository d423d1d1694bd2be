"""Calibration of models with n-grams: sequences know their tokens in every pass, forward, back and branched."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import pack
from support.ngrams import CONFIG, TinyNgrams, known_family
from support.profiles import Recorder, profiled, random_tokens

from moe_pack.calib.evaluate import evaluate
from moe_pack.calib.forward import LayerStates, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.profile import ProfileOptions
from moe_pack.calib.sensitivity import roundable_roles
from moe_pack.calib.sensitivity.gradients import Tracked, half_gradient
from moe_pack.convert.account import Preparation
from moe_pack.convert.pipeline import convert
from moe_pack.formats import Pack, part_format, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import trellis_format
from moe_pack.runtime.model import CheckpointWeights, Decoder, PackWeights, embed, head, run_expert

CPU = torch.device("cpu")
S, N = 24, 6
TOKENS = random_tokens(N, S, 12)  # few tokens, so that pairs return and texts end


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with known_family():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = TinyNgrams(dtype=torch.float32, config=CONFIG | {"ple_embed_dim": 64})
    return model.write(tmp_path_factory.mktemp("ngrams") / "source")


@pytest.fixture
def checkpoint(source: Path) -> Iterator[Checkpoint]:
    opened = Checkpoint(source)
    yield opened
    opened.close()


def ids() -> torch.Tensor:
    return torch.from_numpy(TOKENS.sequences.astype(np.int64))


def states_of(checkpoint: Checkpoint, folder: Path) -> tuple[LayerStates, LayerwiseWeights]:
    weights, tokens = LayerwiseWeights(CheckpointWeights(checkpoint)), ids()
    first = lambda number: embed(tokens[number], weights)  # noqa: E731  # as short as it can be said
    return LayerStates(weights, Beginning(first, ids=lambda number: tokens[number]), N, S, folder, CPU), weights


def test_hidden_states_are_the_decoders(checkpoint: Checkpoint, tmp_path: Path) -> None:
    states, weights = states_of(checkpoint, tmp_path / "states")
    for layer in range(3):
        tokens = states.enter(layer)
        with torch.inference_mode():
            for expert in range(2):
                token_idx, router_weights = tokens.of_expert(expert)
                x = tokens.expert_inputs(token_idx)
                output = run_expert(x, weights.expert(layer, expert), "silu", "none", 0.0)
                states.add(tokens, token_idx, router_weights, output)
        states.leave(layer, tokens)
    decoder = Decoder(CheckpointWeights(checkpoint), S)
    for number, sequence in enumerate(ids().tolist()):
        decoder.reset()
        with torch.inference_mode():
            found = head(states.before(number), weights)
        torch.testing.assert_close(found, decoder.logits(sequence), atol=1e-4, rtol=0)  # the project's bound


def test_a_half_layers_gradient_is_that_of_finite_differences(checkpoint: Checkpoint, tmp_path: Path) -> None:
    states, weights = states_of(checkpoint, tmp_path / "states")
    generator = torch.Generator().manual_seed(1)
    x, step, *above = (torch.randn(S, 64, generator=generator) for _ in range(4))
    step *= 1e-3
    with torch.inference_mode():
        for layer in (0, 2):
            gradient, _ = half_gradient(states, layer, x, Tracked(weights), tuple(above), states.context(layer, 3))
            outputs = [states.half_of(layer, x + sign * step, weights, states.context(layer, 3)) for sign in (1, -1)]
            moved = sum(float(((one - two) * g).double().sum()) for one, two, g in zip(*outputs, above, strict=True))
            size = float(gradient.norm() * step.norm())
            assert float((2 * gradient * step).sum()) == pytest.approx(moved, abs=5e-3 * size)
            other = states.half_of(layer, x, weights, states.context(layer, 4))[0]
            assert (other - states.half_of(layer, x, weights, states.context(layer, 3))[0]).abs().max() > 0.1


def test_an_evaluation_is_that_of_the_decoder(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", width=16)
    with Pack(tmp_path / "pack") as opened:
        found = evaluate(opened, TOKENS, Recorder())
        decoder, losses = Decoder(PackWeights(opened, CPU), S), list[float]()
        for sequence in ids().tolist():
            decoder.reset()
            predicted = decoder.logits(sequence).log_softmax(dim=1)
            losses += [-float(predicted[place, token]) for place, token in enumerate(sequence[1:])]
    assert found.perplexity.value == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-4)


@pytest.mark.slow
def test_a_profile_and_a_sequential_calibration_of_it_run(source: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    profile = profiled(source, tmp_path / "profile", random_tokens(40, S, 12), ProfileOptions("exact"))
    assert [role for role in roundable_roles(checkpoint.spec, 2) if "ngrams" in role] == [
        "layers.2.ngrams.key",
        "layers.2.ngrams.value",
    ]
    assert (profile.layer_losses(2).dense[:2] > 0).all()
    part = trellis_format(4, 64)
    plan = uniform_plan(checkpoint.spec, "none", part, part_format(4, 64), quantizer="calibrated")
    convert(checkpoint, plan, tmp_path / "pack", 1, prepared=Preparation(calibration=profile))
    with Pack(tmp_path / "pack") as opened:
        assert opened.layout.ngrams and len(Decoder(PackWeights(opened, CPU), S).logits([1, 2, 3])) == 3
