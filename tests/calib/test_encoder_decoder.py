"""Calibration of models with an encoder: each measure against whole models run by the runtime or by transformers."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.answers import start_token, their_answer
from support.cases import case
from support.families import Tiny, original, write
from support.held_experts import RoundedExperts
from support.models import pack
from support.profiles import QUICK, Recorder, StoppedError, folder_bytes, profiled, random_tokens
from support.sparsities import realized_sparsity
from torch import Tensor

from moe_pack.calib.evaluate import ThresholdRule, evaluate, make_reference, read_reference
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.forward import Array, LayerStates, LayerwiseWeights, Sequences
from moe_pack.calib.profile import ProfileOptions, attach, losses_of
from moe_pack.calib.report import report_html
from moe_pack.calib.sensitivity import ExactPass, LayerLosses, SensitivityPass, copies_of
from moe_pack.calib.sensitivity.effects import Copy, Divergences
from moe_pack.calib.sensitivity.errors import RoundedDense, Rounding, plainly_rounded
from moe_pack.formats import ROW_GROUP, Pack
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights, EncoderDecoder, PackWeights, Weights
from moe_pack.runtime.offload import Routing
from moe_pack.runtime.offload.prefetch import make_prediction

CPU = torch.device("cpu")
CAPACITY = 5
# Two MoE layers in each stack; half of a sequence of 48 tokens exceeds the capacity of some experts.
SHAPE = Tiny(
    "switch_transformers",
    "two layers with experts in each stack",
    {
        "expert_capacity": CAPACITY,
        "tie_word_embeddings": False,
        "num_decoder_layers": 4,
        "num_sparse_decoder_layers": 2,
        "num_experts": 4,
    },
)
ENCODER_LAYERS, MOE_LAYERS, E, F, V = 4, (1, 3, 5, 7), 4, 48, 96
TOKENS = random_tokens(5, 48, V)
HALF = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(SHAPE, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    return original(source)


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Iterator[Checkpoint]:
    held = Checkpoint(source)
    yield held
    held.close()


def halves() -> list[tuple[list[int], list[int]]]:
    """The tokens of encoder and decoder of each sequence, by the rule in docs/profile.md."""
    return [([*row[:HALF]], [0, *row[HALF : 2 * HALF - 1]]) for row in TOKENS.sequences.tolist()]


def log_probs(weights: Weights) -> Tensor:
    """Predictions of the runtime, float64 [N, HALF, V]."""
    found, runs = [], EncoderDecoder(weights, HALF)
    for text, answer in halves():
        runs.encode(text)
        found.append(runs.logits(answer).double().log_softmax(-1))
    return torch.stack(found)


def kl(expected: Tensor, found: Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())


# --- predictions


def test_a_reference_holds_what_transformers_predicts_of_the_second_half(
    source: Path, checkpoint: Checkpoint, model: Any, tmp_path: Path
) -> None:
    assert start_token(model) == 0
    made = make_reference(checkpoint, TOKENS, tmp_path, Recorder())
    found = read_reference(tmp_path)
    assert found.facts == made.facts and found.facts.num_predicted == HALF - 1
    expected = torch.stack([their_answer(model, *half) for half in halves()]).log_softmax(-1)[:, :-1]
    came = torch.tensor([answer[1:] for _, answer in halves()])
    np.testing.assert_allclose(found.next_log_probs, expected.gather(2, came[..., None])[..., 0], atol=1e-4)
    by_token = expected.gather(2, torch.from_numpy(found.ids.astype(np.int64)))
    np.testing.assert_allclose(found.log_probs, by_token, atol=1e-4)
    assert 0 < found.facts.noise_floor < 1e-9


def test_a_16_bit_pack_loses_nothing_against_source_and_reference(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    pack(source, tmp_path / "packed", width=16)
    reference = make_reference(checkpoint, TOKENS, tmp_path / "reference", Recorder())
    with Pack(tmp_path / "packed") as opened:
        for against in (reference, checkpoint):
            found = evaluate(opened, TOKENS, Recorder(), against)
            assert found.num_tokens == len(TOKENS.sequences) * (HALF - 1)
            assert found.against is not None and abs(found.against.kl.value) < 1e-6
            assert found.against.agreement.value == 1
            assert found.perplexity.value == pytest.approx(found.against.source_perplexity.value, rel=1e-5)


# --- hidden states, and what the encoder has read


def states_of(checkpoint: Checkpoint, folder: Path) -> LayerStates:
    weights = LayerwiseWeights(CheckpointWeights(checkpoint))
    given = Sequences.of(checkpoint.spec, torch.from_numpy(TOKENS.sequences.astype(np.int64)))
    return LayerStates(weights, given.embedded(weights), len(TOKENS.sequences), given.length, folder, CPU)


def test_what_was_read_stays_beside_the_hidden_states_and_damaged_all_begins_anew(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    for layer in range(6):
        states = states_of(checkpoint, tmp_path)
        assert states.next_layer == layer
        states.leave(layer, states.enter(layer))
        kept = sorted(path.name[:10] for path in tmp_path.glob("hidden-*"))
        wanted = {layer + 1} | ({ENCODER_LAYERS} if layer >= ENCODER_LAYERS else set())
        assert kept == [f"hidden-{number:03d}" for number in sorted(wanted)]
    (read,) = tmp_path.glob(f"hidden-{ENCODER_LAYERS:03d}-*")
    raw = read.read_bytes()
    read.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert states_of(checkpoint, tmp_path).next_layer == 0
    read.write_bytes(raw)
    assert states_of(checkpoint, tmp_path).next_layer == 6


# --- statistics


@dataclass(frozen=True)
class Seen:
    """The inputs [T, d], routes and weights [T] of a MoE layer of transformers, and the tokens that an expert ran for.

    `a[e]` float32 [n, f]: activations of those.
    """

    inputs: Tensor
    routes: Array
    mass: Array
    runs: Array
    a: list[Array]


@torch.no_grad()
def seen_by(model: Any) -> list[Seen]:
    stacks: list[Any] = [model.encoder, model.decoder]
    blocks = [held.layer[-1] for stack in stacks for held in stack.block]
    mlps: list[Any] = [block.mlp for block in blocks if hasattr(block.mlp, "router")]
    caught: list[list[Tensor]] = [[] for _ in mlps]
    hooks = [
        mlp.register_forward_pre_hook(lambda _, given, held=held: held.append(given[0].reshape(-1, 64)))
        for mlp, held in zip(mlps, caught, strict=True)
    ]
    for half in halves():
        their_answer(model, *half)
    for hook in hooks:
        hook.remove()
    return [_seen(mlp, held) for mlp, held in zip(mlps, caught, strict=True)]


def _seen(mlp: Any, sequences: list[Tensor]) -> Seen:
    inputs = torch.cat(sequences)
    shares = (inputs @ mlp.router.classifier.weight.T).softmax(-1)
    routes = shares.argmax(-1).tolist()
    runs = []
    for start in range(0, len(routes), HALF):  # counted again in each sequence
        used: Counter[int] = Counter()
        for expert in routes[start : start + HALF]:
            used[expert] += 1
            runs.append(used[expert] <= CAPACITY)
    a = []
    for e in range(E):
        own = [place for place, expert in enumerate(routes) if expert == e and runs[place]]
        a.append(torch.relu(inputs[own] @ mlp.experts[f"expert_{e}"].wi.weight.T).numpy())
    return Seen(inputs, np.asarray(routes), shares.max(-1).values.numpy(), np.asarray(runs), a)


@pytest.fixture(scope="module")
def profile_folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "profile"
    profiled(source, folder, TOKENS)
    return folder


@pytest.fixture(scope="module")
def seen(model: Any) -> list[Seen]:
    return seen_by(model)


def test_statistics_count_the_tokens_that_experts_run_for(source: Path, profile_folder: Path, seen: list[Seen]) -> None:
    profile = profiled(source, profile_folder, TOKENS)
    assert profile.num_tokens == len(TOKENS.sequences) * HALF
    assert any(not layer.runs.all() for layer in seen[:2]) and any(not layer.runs.all() for layer in seen[2:])
    for layer_idx, layer in enumerate(seen):
        found = profile.statistics(layer_idx)
        assert found.routes[:, 0].tolist() == layer.routes.tolist()
        for e in range(E):
            own = (layer.routes == e) & layer.runs
            assert found.tokens[e] == found.coactivation[e, e] == own.sum()
            assert found.held_out_tokens[e] == own[-HALF:].sum()
            assert found.mass[e] == pytest.approx(math.fsum(layer.mass[own].tolist()), rel=1e-5)
        assert found.coactivation.sum() == layer.runs.sum()


def test_quantiles_are_those_of_sorted_activations(source: Path, profile_folder: Path, seen: list[Seen]) -> None:
    profile = profiled(source, profile_folder, TOKENS)
    for layer_idx, layer in enumerate(seen):
        found = profile.statistics(layer_idx).at_sparsities((0.5, 0.8, 0.99))
        for e in range(E):
            ordered = np.sort(layer.a[e], axis=None)
            places = [max(math.ceil(level * len(ordered)), 1) - 1 for level in (0.5, 0.8, 0.99)]
            np.testing.assert_allclose(found[e, 0], ordered[places], rtol=2.0**-10, atol=1e-5)


def test_paths_lead_through_each_stack_and_not_from_one_to_the_other(
    source: Path, profile_folder: Path, seen: list[Seen]
) -> None:
    profile = profiled(source, profile_folder, TOKENS)
    paths, learned = profile.paths(), (len(TOKENS.sequences) - 1) * HALF
    routes = [layer.routes[:learned] for layer in seen]
    for later, expected in ((1, True), (2, False), (3, True)):
        pairs = Counter(zip(routes[later - 1].tolist(), routes[later].tolist(), strict=True))
        counted = [[pairs[before, own] * expected for own in range(E)] for before in range(E)]
        assert paths.after_one[later - 1].tolist() == counted
    assert not paths.after_two.any()  # two layers before is another stack's, everywhere
    assert paths.key_starts[1] == 0 and paths.key_starts[2] > 0
    assert paths.key_starts[2:].tolist() == [paths.key_starts[2]] * 3
    assert [profile.has_predictors(layer_idx) for layer_idx in range(4)] == [False, True, False, True]
    cosines = [np.isnan(profile.statistics(layer_idx).cosine).all() for layer_idx in range(4)]
    assert cosines == [True, False, True, False]


def test_what_a_profile_knows_is_put_beside_a_pack_and_drawn(
    source: Path, profile_folder: Path, seen: list[Seen], tmp_path: Path
) -> None:
    profile = profiled(source, profile_folder, TOKENS)
    pack(source, tmp_path)
    with Pack(tmp_path) as opened:
        found = attach(opened, profile)
        weights = PackWeights(opened, CPU)
        assert weights.spec == profile.spec
        read = Routing.open(opened)
        assert read is not None
        assert read.judged_layers == found.judged_layers == (1, 3)
        assert [read.network(layer_idx).num_previous for layer_idx in (1, 3)] == [1, 1]
        assert make_prediction("mlp", weights, read) is not None
    assert found.popularity.tolist() == [np.bincount(layer.routes, minlength=E).tolist() for layer in seen]
    assert "<html" in report_html(profile)


@pytest.mark.slow
def test_stopped_anywhere_a_profile_ends_in_the_same_bytes(source: Path, profile_folder: Path, tmp_path: Path) -> None:
    for number, stop_at in enumerate(range(2, 30, 10)):
        (case_folder := tmp_path / str(number)).mkdir()
        with case(stop_at):
            with pytest.raises(StoppedError):
                profiled(source, case_folder / "profile", TOKENS, QUICK, Recorder(stop_at))
            profiled(source, case_folder / "profile", TOKENS)
            assert folder_bytes(case_folder / "profile") == folder_bytes(profile_folder)


# --- sensitivity


@dataclass(frozen=True)
class Ran:
    losses: list[LayerLosses]
    measured: Divergences


def run_pass(checkpoint: Checkpoint, folder: Path, restarts: bool = False) -> Ran:
    """`full`, which compares formats in every layer; `restarts`: each layer by a new process."""
    limits = np.sort(np.random.default_rng(1).random((E, 3, 4)).astype(np.float32) * 0.3, axis=2)
    ids = torch.from_numpy(TOKENS.sequences.astype(np.int64))

    def stage() -> SensitivityPass:
        weights = LayerwiseWeights(CheckpointWeights(checkpoint))
        return SensitivityPass(weights, ids, "full", lambda l: limits, folder, CPU)

    running, losses, L = stage(), dict[int, LayerLosses](), checkpoint.spec.num_hidden_layers
    running.cost()
    for layer in range(L):
        running = stage() if restarts else running
        assert running.states.next_layer == layer
        running.forward()
    for layer in reversed(range(L)):
        running = stage() if restarts else running
        assert running.way_back.next_layer == layer
        losses[layer] = running.way_back.measure()
        running.way_back.leave()
    running = stage() if restarts else running
    measured = running.divergences([losses[layer] for layer in checkpoint.spec.moe_layers])
    running.close()
    return Ran([losses[layer] for layer in range(L)], measured)


@pytest.fixture(scope="module")
def ran(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_pass(checkpoint, tmp_path_factory.mktemp("pass") / "pass")


@pytest.mark.slow
def test_an_embedding_costs_about_what_the_whole_model_diverges_in_both_stacks(
    checkpoint: Checkpoint, ran: Ran
) -> None:
    """At 8 bits, which already turns routes of one expert a token: within a factor of 4."""
    weights = CheckpointWeights(checkpoint)
    rounded = log_probs(RoundedDense(weights, ("embed",), 8, plainly_rounded))
    expected = kl(log_probs(weights), rounded)
    assert 0.25 < ran.measured.embedding[0] / expected < 4
    assert expected > 1e-7, "there is something to compare"


def test_copies_of_experts_diverge_as_the_whole_model_does(checkpoint: Checkpoint, ran: Ran) -> None:
    """The first half of the sequences, with all experts of some layers rounded, in either stack."""
    number = -(-len(TOKENS.sequences) // 2)
    expected = log_probs(CheckpointWeights(checkpoint))
    per_sequence = len(expected) // len(TOKENS.sequences)
    copies = copies_of([ran.losses[layer] for layer in MOE_LAYERS], checkpoint.spec.hidden_size)
    assert len(copies) == 3
    for idx, copy in enumerate(copies):

        def width_of(l: int, e: int, name: str, copy: Copy = copy) -> int:
            return copy.width if l in copy.layers else 16

        rounded = log_probs(RoundedExperts(checkpoint, width_of, plainly_rounded))
        first = slice(0, number * per_sequence)
        assert ran.measured.kls[idx] == pytest.approx(kl(expected[first], rounded[first]), rel=2e-3, abs=1e-6)
        assert ran.measured.kls[idx] > 1e-5, "there is something to compare"


def test_experts_without_a_gate_lose_by_up_and_down(checkpoint: Checkpoint, ran: Ran, seen: list[Seen]) -> None:
    for layer_idx, layer in enumerate(seen):
        reached = [bool(((layer.routes == e) & layer.runs).any()) for e in range(E)]
        quantized = ran.losses[MOE_LAYERS[layer_idx]].quantized
        assert not quantized[:, 0].any(), "it has no gate"
        assert (quantized[:, 1:].all(axis=(1, 2)) == reached).all()


@pytest.mark.slow
def test_begun_anew_before_every_layer_sensitivity_is_the_same_bits(
    checkpoint: Checkpoint, ran: Ran, tmp_path: Path
) -> None:
    again = run_pass(checkpoint, tmp_path / "pass", restarts=True)
    assert again.measured.kls.tolist() == ran.measured.kls.tolist()
    assert again.measured.embedding.tolist() == ran.measured.embedding.tolist()
    for one, other in zip(again.losses, ran.losses, strict=True):
        for name, array in one.arrays().items():
            np.testing.assert_array_equal(array, other.arrays()[name])


@pytest.mark.slow
def test_each_expert_at_2_bits_alone_costs_what_the_whole_model_loses(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Measured by a new process for each layer."""
    ids, rounding = torch.from_numpy(TOKENS.sequences.astype(np.int64)), Rounding("absmax", ROW_GROUP)

    def stage() -> ExactPass:
        return ExactPass(LayerwiseWeights(CheckpointWeights(checkpoint)), ids, tmp_path / "pass", CPU)

    for layer in range(checkpoint.spec.num_hidden_layers):
        stage().layer(layer)
    found = stage().losses()
    expected = log_probs(CheckpointWeights(checkpoint))

    def loss(low: tuple[int, int] | None) -> float:
        return kl(
            expected, log_probs(RoundedExperts(checkpoint, lambda l, e, name: 2 if (l, e) == low else 4, rounding))
        )

    assert found["base"].tolist() == pytest.approx([loss(None)], rel=1e-3)
    wanted = [[loss((l, e)) for e in range(E)] for l in range(len(MOE_LAYERS))]
    np.testing.assert_allclose(found["losses"], wanted, rtol=1e-3)


# --- thresholds


def logits_of(folder: Path) -> Tensor:
    with Pack(folder) as opened:
        return log_probs(PackWeights(opened, CPU))


def test_at_sparsity_0_a_pack_selected_by_up_answers_as_its_source(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    pack(source, tmp_path, selector="up", width=16)
    with Pack(tmp_path) as opened:
        found = measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.0), Recorder())
    assert found.learned.overall is not None and 0.2 < found.learned.overall < 0.8, "ReLU leaves many out by itself"
    assert (logits_of(tmp_path) - log_probs(CheckpointWeights(checkpoint))).abs().max() < 1e-4


def test_the_sparsity_asked_for_holds_on_text_unseen(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path, selector="up", width=4)
    with Pack(tmp_path) as opened:
        measure_thresholds(opened, random_tokens(40, 48, V, seed=1), ThresholdRule(sparsity=0.8), Recorder())
    with Pack(tmp_path) as opened:
        found = realized_sparsity(opened, random_tokens(40, 48, V, seed=2))
    assert found.overall == pytest.approx(0.8, abs=0.01)


def test_thresholds_stopped_and_begun_again_are_the_same(source: Path, tmp_path: Path) -> None:
    for name, stops in (("whole", ()), ("stopped", (3, 11, 19))):
        folder = tmp_path / name
        pack(source, folder, selector="up")
        for stop_at in stops:
            with Pack(folder) as opened, pytest.raises(StoppedError):
                measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.7), Recorder(stop_at))
        with Pack(folder) as opened:
            measure_thresholds(opened, TOKENS, ThresholdRule(sparsity=0.7), Recorder())
    assert folder_bytes(tmp_path / "whole") == folder_bytes(tmp_path / "stopped")


@pytest.mark.slow
def test_losses_are_of_all_that_routers_choose_within_capacity_or_not(source: Path, tmp_path: Path) -> None:
    profile = profiled(source, tmp_path / "profile", TOKENS, ProfileOptions("exact", keeps_inputs=False))
    assert profile.exact()["losses"].shape == (4, E)
    assert all((profile.layer_losses(layer).dense > 0).all() for layer in range(profile.spec.num_hidden_layers))
    np.testing.assert_allclose(losses_of(profile).popularity.sum(axis=1), 1)
