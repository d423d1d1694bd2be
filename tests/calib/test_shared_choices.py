"""Layers that share what an earlier layer's indexer chose, in the pass layer by layer: a choice for each sequence."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import Tiny, write
from support.held_experts import RoundedExperts
from torch import Tensor

from moe_pack.calib.forward import LayerStates, LayerwiseWeights
from moe_pack.calib.forward.layers import Beginning, shared_choosers
from moe_pack.calib.sensitivity import ExactPass, LayerLosses, SensitivityPass, copies_of
from moe_pack.calib.sensitivity.errors import Rounding, plainly_rounded
from moe_pack.calib.statistics import PartialStates, Shares, measure_layer, partial
from moe_pack.formats import ROW_GROUP
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, Decoder, embed, head, router_scores

CPU = torch.device("cpu")
S, N = 21, 4  # no multiple of 8: the last byte of a token's choice has bits to spare
SHAPE = Tiny("glm_moe_dsa", "shared", {"indexer_types": ["full", "shared", "full", "shared"], "index_topk": 6})
IDS = torch.randint(90, (N, S), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LayerwiseWeights:
    return LayerwiseWeights(CheckpointWeights(Checkpoint(write(SHAPE, tmp_path_factory.mktemp("source")))))


@pytest.fixture(scope="module")
def expected(weights: LayerwiseWeights) -> Tensor:
    """The decoder's logits of each sequence, [N, S, vocabulary]."""
    decoder, found = Decoder(weights, S), []
    for sequence in IDS.tolist():
        decoder.reset()
        found.append(decoder.logits(sequence))
    return torch.stack(found)


def begun(
    weights: LayerwiseWeights, folder: Path, origin: Callable[[int], int] | None = None, **given: object
) -> LayerStates:
    beginning = Beginning(lambda number: embed(IDS[number % N], weights), origin=origin)
    return LayerStates(weights, beginning, N, S, folder, CPU, **given)  # type: ignore[arg-type]  # of any kind


def run(states: LayerStates, weights: LayerwiseWeights, end: int = 4, branching: int | None = None) -> LayerStates:
    """The layers before `end`; in layer `branching`, a copy of each sequence begins."""
    while states.next_layer < end:
        layer = states.next_layer
        tokens = states.enter(layer)
        if layer in weights.spec.moe_layers:
            measure_layer(states, tokens, weights, weights.spec.moe_layers.index(layer), (0.0, 0.0), 0)
        states.leave(layer, tokens, [tokens.x[: N * S].clone()] if layer == branching else [])
    return states


def logits(states: LayerStates, weights: LayerwiseWeights) -> Tensor:
    with torch.inference_mode():
        return torch.stack([head(states.before(number), weights) for number in range(states.num_sequences)])


def choices(folder: Path) -> list[str]:
    return sorted(path.name[:10] for path in folder.glob("chosen-*"))


@pytest.mark.parametrize("workers", [1, 3])
def test_logits_are_the_decoders_whatever_runs_in_parallel(
    workers: int, weights: LayerwiseWeights, expected: Tensor, tmp_path: Path
) -> None:
    assert shared_choosers(weights.spec, S) == {0, 2}
    states = run(begun(weights, tmp_path, workers=workers), weights)
    assert (logits(states, weights) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_choices_are_on_disk_while_later_layers_share_them(weights: LayerwiseWeights, tmp_path: Path) -> None:
    for keeps_all, left in ((False, [["chosen-000"], [], ["chosen-002"], []]), (True, None)):
        folder = tmp_path / str(keeps_all)
        states = begun(weights, folder, keeps_all=keeps_all)
        for layer in range(4):
            run(states, weights, layer + 1)
            kept = ["chosen-000", "chosen-002"][: 1 + layer // 2]
            assert choices(folder) == (kept if left is None else left[layer])
        assert not list(folder.glob("held-chosen*"))


def test_where_all_positions_are_chosen_nothing_is_kept(weights: LayerwiseWeights, tmp_path: Path) -> None:
    assert shared_choosers(weights.spec, 6) == frozenset() != shared_choosers(weights.spec, 7)
    states = LayerStates(weights, Beginning(lambda number: embed(IDS[number, :6], weights)), N, 6, tmp_path, CPU)
    assert states.chosen(run(states, weights, 1).next_layer, 0).positions is None
    assert choices(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("killed_after", range(1, 4))
def test_a_killed_pass_goes_on_with_the_same_choices(
    killed_after: int, keeps_all: bool, weights: LayerwiseWeights, tmp_path: Path
) -> None:
    whole = logits(run(begun(weights, tmp_path / "whole"), weights), weights)
    run(begun(weights, tmp_path / "killed", keeps_all=keeps_all), weights, killed_after)
    resumed = begun(weights, tmp_path / "killed", keeps_all=keeps_all)
    assert resumed.next_layer == killed_after
    assert torch.equal(logits(run(resumed, weights), weights), whole)


@pytest.mark.parametrize("keeps_all", [False, True])
def test_a_pass_whose_choice_is_lost_begins_before_it(
    keeps_all: bool, weights: LayerwiseWeights, tmp_path: Path
) -> None:
    whole = logits(run(begun(weights, tmp_path / "whole"), weights), weights)
    folder = tmp_path / "lost"
    run(begun(weights, folder, keeps_all=keeps_all), weights, 3)
    next(folder.glob("chosen-002-*")).write_bytes(b"half of it")
    resumed = begun(weights, folder, keeps_all=keeps_all)
    assert resumed.next_layer == (2 if keeps_all else 0)
    assert torch.equal(logits(run(resumed, weights), weights), whole)


@pytest.mark.parametrize("branching", range(4))
def test_a_sequence_that_branches_off_shares_the_choice_of_its_origin(
    branching: int, weights: LayerwiseWeights, expected: Tensor, tmp_path: Path
) -> None:
    states = begun(weights, tmp_path, origin=lambda number: number - N)
    found = logits(run(states, weights, branching=branching), weights)
    assert len(found) == 2 * N
    assert (found - expected.repeat(2, 1, 1)).abs().max() < 1e-5 * expected.abs().max()


def test_partial_states_share_the_choice_of_their_sequence(
    weights: LayerwiseWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all experts as resident, the scores are those of the whole state."""
    every = [True] * weights.spec.router.num_experts
    monkeypatch.setattr(partial, "resident_half", lambda experts, num_experts: every)
    states, judged = begun(weights, tmp_path / "states"), 2
    partial_states = PartialStates(tmp_path, weights.spec, Shares(N, S, N - judged, judged), judged * S)
    for layer in range(4):
        tokens = states.enter(layer)
        partial_states.run(layer, states, weights)
        if (scores := partial_states.scores(layer)) is not None:
            whole = router_scores(tokens.inputs[-judged * S :], weights, layer)
            torch.testing.assert_close(scores, whole, atol=1e-5, rtol=1e-4)
        partial_states.begin(layer, tokens)

        def on_output(
            expert: int, token_idx: Tensor, router_weights: Tensor, output: Tensor, layer: int = layer
        ) -> None:
            partial_states.add(layer, expert, token_idx, router_weights, output)

        if layer in weights.spec.moe_layers:
            measure_layer(
                states,
                tokens,
                weights,
                weights.spec.moe_layers.index(layer),
                (0.0, 0.0),
                judged * S,
                on_output=on_output,
            )
        partial_states.end(layer, states, weights)
        states.leave(layer, tokens)
    assert partial_states.is_judged(3) and weights.spec.chooser_of(3) == 2


# --- sensitivity


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write(SHAPE, tmp_path_factory.mktemp("source")))


def log_probs(weights: CheckpointWeights, num_sequences: int) -> Tensor:
    return torch.cat([Decoder(weights, S).logits(row.tolist()).double().log_softmax(1) for row in IDS[:num_sequences]])


def kl(expected: Tensor, found: Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(1).mean())


def test_copies_with_rounded_experts_diverge_as_the_whole_model_does(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A copy's own rounded layers change what its later layers choose, and share."""
    held, spec = LayerwiseWeights(CheckpointWeights(checkpoint)), checkpoint.spec
    limits = np.sort(np.random.default_rng(1).random((8, 3, 4)).astype(np.float32) * 0.3, axis=2)
    stage, losses = SensitivityPass(held, IDS, "full", lambda l: limits, tmp_path / "pass", CPU), list[LayerLosses]()
    for _ in range(4):
        stage.forward()
    for _ in range(4):
        losses.insert(0, stage.way_back.measure())
        stage.way_back.leave()
    losses = [losses[layer] for layer in spec.moe_layers]
    measured, number = stage.divergences(losses), stage.num_copied
    stage.close()
    expected = log_probs(CheckpointWeights(checkpoint), number)
    copies = copies_of(losses, spec.hidden_size)
    assert len(copies) == 3
    for idx, copy in enumerate(copies):

        def width_of(l: int, e: int, matrix: str) -> int:
            return copy.width if l in copy.layers else 16

        found = kl(expected, log_probs(RoundedExperts(checkpoint, width_of, plainly_rounded), number))
        assert measured.kls[idx] == pytest.approx(found, rel=2e-3, abs=1e-6)
        assert found > 1e-5, "there is something to compare"


def test_each_expert_at_2_bits_alone_costs_what_the_whole_model_loses(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Copies that branch off in one layer share what their origin chose in the layer before."""
    rounding, ids = Rounding("absmax", ROW_GROUP), IDS[:2]
    stage = ExactPass(LayerwiseWeights(CheckpointWeights(checkpoint)), ids, tmp_path / "pass", CPU)
    for layer in range(4):
        stage.layer(layer)
    found, expected = stage.losses(), log_probs(CheckpointWeights(checkpoint), 2)

    def loss(low: tuple[int, int] | None) -> float:
        weights = RoundedExperts(checkpoint, lambda l, e, name: 2 if (l, e) == low else 4, rounding)
        return kl(expected, log_probs(weights, 2))

    assert found["base"].tolist() == pytest.approx([loss(None)], rel=1e-3)
    for l, e in ((0, 1), (1, 5), (2, 3)):
        assert found["losses"][l, e] == pytest.approx(loss((l, e)), rel=1e-3)
