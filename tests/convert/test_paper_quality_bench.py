"""The benchmark of the papers' quality: its rules against loops, its pass against the decoder, its questions."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from benchlib.pruning import AllRun, Batch, ByExpert, Cats, Chess, ChoiceTrees, OfPack, Rule, Theta, quantile, run_by
from paper_quality import TASKS, Suite, passages
from support.cases import case
from support.models import DEMO_MODEL, TinyMixtral
from support.profiles import Recorder, random_tokens

from moe_pack.calib.evaluate import ThresholdRule, read_tasks, task_score
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.forward import LayerwiseWeights
from moe_pack.calib.sensitivity import log_probabilities
from moe_pack.convert.pipeline import convert
from moe_pack.formats import BF16, Pack, uniform_plan
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.model import Activations, CheckpointWeights, Decoder, PackWeights, StreamedPackWeights

CPU = torch.device("cpu")
NUM_NEURONS = 5


def random_activations(num_tokens: int, seed: int) -> Activations:
    """Activations of an expert of five neurons, the last of which always adds nothing."""
    generator = torch.Generator().manual_seed(seed)
    up, gate = (torch.randn((num_tokens, NUM_NEURONS), generator=generator) for _ in range(2))
    up = up * torch.tensor([0.1, 1.0, 3.0, 0.5, 0.0])  # influences differ, which CHESS takes into account
    return Activations(up, gate, up * gate)


EXPERTS = [random_activations(30, 1), random_activations(0, 2), random_activations(17, 3)]  # one has no tokens
NEW = random_activations(40, 4)


def least_covering(values: list[float], sparsity: float) -> float:
    """The least of the values that so many of them do not exceed, found by trying each."""
    return min(v for v in values if sum(other <= v for other in values) >= sparsity * len(values) - 1e-9)


def numbers(values: Activations, name: str) -> list[list[float]]:
    rows: list[list[float]] = getattr(values, name).abs().tolist()
    return rows


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


# --- the rules


def expected(rule: str, expert: int, sparsity: float) -> list[list[bool]]:
    """Returns the neurons that run for the new tokens, by loops over tokens and neurons."""
    kind = {"up": "up", "gate": "gate", "down": "h", "cats": "gate", "chess": "gate"}[rule]
    learned = [numbers(values, kind) for values in EXPERTS]
    new, pooled = numbers(NEW, kind), least_covering(flat([row for rows in learned for row in rows]), sparsity)
    if rule == "cats" or not learned[expert]:
        limits = [pooled] * NUM_NEURONS
    elif rule == "chess":
        ups = numbers(EXPERTS[expert], "up")
        influence = [sum(row[i] for row in ups) / len(ups) for i in range(NUM_NEURONS)]
        importance = [row[i] * influence[i] for row in learned[expert] for i in range(NUM_NEURONS)]
        least = least_covering(importance, sparsity)
        limits = [least / each if each else math.inf for each in influence]
    else:
        limits = [least_covering(flat(learned[expert]), sparsity)] * NUM_NEURONS
    return [[value != 0 and value >= limit for value, limit in zip(row, limits, strict=True)] for row in new]


def test_rules_run_the_neurons_that_loops_over_all_activations_find() -> None:
    for sparsity in (0.5, 0.8, 0.9):
        rules: dict[str, Rule] = {
            "up": ByExpert("up", sparsity),
            "gate": ByExpert("gate", sparsity),
            "down": ByExpert("both", sparsity),
            "cats": Cats(sparsity),
            "chess": Chess(sparsity),
        }
        for name, rule in rules.items():
            rule.learn(0, EXPERTS)
            for expert in range(len(EXPERTS)):
                with case(name, sparsity, expert):
                    assert rule.runs(0, expert, NEW).tolist() == expected(name, expert, sparsity)


def test_chess_keeps_small_gates_of_neurons_whose_up_is_large() -> None:
    rule, cats = Chess(0.8), Cats(0.8)
    rule.learn(0, EXPERTS)
    cats.learn(0, EXPERTS)
    by_neuron = [(r.runs(0, 0, NEW)).float().mean(dim=0) for r in (rule, cats)]
    assert by_neuron[0][2] > by_neuron[1][2]
    assert by_neuron[0][0] < by_neuron[1][0]
    assert by_neuron[0][4] == 0  # it adds nothing


def test_a_rule_leaves_out_the_share_that_it_is_given() -> None:
    values = random_activations(2000, 5)
    for rule in (ByExpert("gate", 0.7), Cats(0.7), Chess(0.7)):
        rule.learn(0, [values])
        assert 1 - rule.runs(0, 0, values).float().mean() == pytest.approx(0.7, abs=1e-3)


def test_theta_compares_the_gate_with_one_number() -> None:
    assert Theta(0.25).runs(3, 1, NEW).tolist() == [[value >= 0.25 for value in row] for row in numbers(NEW, "gate")]


def test_a_quantile_is_one_of_the_values() -> None:
    values = torch.tensor([[0.3, 0.1], [0.4, 0.2]])
    found = [quantile(values, sparsity) for sparsity in (0.25, 0.26, 0.5, 1.0)]
    assert found == pytest.approx([0.1, 0.2, 0.2, 0.4])
    assert quantile(values, 0.0) == quantile(values[:0], 0.5) == 0.0


# --- the pass


TEXT = random_tokens(3, 24, 96).sequences
LEARNED = Batch.of_text(random_tokens(4, 24, 96).sequences)


def test_a_pass_without_a_rule_gives_the_decoders_logits(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TinyMixtral(num_layers=2, num_experts=3, num_heads=4, num_kv_heads=2).write(tmp_path))
    weights = LayerwiseWeights(CheckpointWeights(checkpoint))
    passed = run_by(weights, AllRun(), [LEARNED, Batch.of_text(TEXT)])
    decoder = Decoder(CheckpointWeights(checkpoint), 24)
    for ids, hidden in zip(TEXT.tolist(), passed.hidden[1], strict=True):
        decoder.reset()
        logits = decoder.logits(ids).log_softmax(dim=-1)
        torch.testing.assert_close(log_probabilities(hidden, weights, CPU), logits, rtol=1e-4, atol=1e-4)
    assert passed.running.tolist() == [1.0, 1.0]
    checkpoint.close()


def test_the_pass_learns_the_products_thresholds_and_gives_the_packs_logits(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TinyMixtral(num_layers=2, num_experts=3).write(tmp_path / "model"))
    convert(checkpoint, uniform_plan(checkpoint.spec, "up", BF16, BF16), tmp_path / "pack", 1)
    checkpoint.close()
    learned, rule = random_tokens(20, 64, 96), ByExpert("up", 0.7)
    with Pack(tmp_path / "pack") as pack:
        weights = LayerwiseWeights(StreamedPackWeights(pack, CPU))
        first = Batch.of_text(learned.sequences[:16])  # `measure_thresholds` holds the last fifth out
        pruned = run_by(weights, rule, [first, Batch.of_text(TEXT)])
        measure_thresholds(pack, learned, ThresholdRule(sparsity=0.7))
    with Pack(tmp_path / "pack") as pack:
        found = np.array([[rule.thresholds[layer, expert] for expert in range(3)] for layer in range(2)])
        np.testing.assert_allclose(found, pack.thresholds, rtol=0.002)  # the product's are of bins of 0.1%
        weights = LayerwiseWeights(StreamedPackWeights(pack, CPU))
        passed = run_by(weights, OfPack(pack), [Batch.of_text(TEXT), Batch.of_text(TEXT)])
        np.testing.assert_allclose(passed.running, pruned.running, atol=0.01)
        assert 0.25 < passed.running.mean() < 0.35
        decoder = Decoder(PackWeights(pack, CPU), 24)
        for ids, hidden in zip(TEXT.tolist(), passed.hidden[0], strict=True):
            decoder.reset()
            logits = decoder.logits(ids).log_softmax(dim=-1)
            torch.testing.assert_close(log_probabilities(hidden, weights, CPU), logits, rtol=1e-4, atol=1e-4)


# --- the questions


@pytest.mark.slow
def test_choices_in_one_sequence_have_the_likelihoods_of_choices_alone(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = passages((DEMO_MODEL.parents[1] / "data" / "books-valid.txt").read_text("utf-8")[:20_000], 20)
    file.write_text("\n".join([*lines, *TASKS.read_text("utf-8").splitlines()[:9]]), "utf-8")
    tasks = read_tasks(file, Text(FolderFiles(DEMO_MODEL)), 2048)
    checkpoint = Checkpoint(DEMO_MODEL)
    weights = LayerwiseWeights(CheckpointWeights(checkpoint))
    trees, decoder = ChoiceTrees(tasks), Decoder(CheckpointWeights(checkpoint), 128)
    hidden = run_by(weights, AllRun(), [LEARNED, trees.batch]).hidden[1]
    found = trees.log_likelihoods(hidden, weights)
    assert int((trees.batch.positions >= 0).sum()) < 0.6 * sum(choice.stop for choice in tasks.choices)
    for number in random.Random(1).sample(range(len(tasks.choices)), 12):
        choice = tasks.choices[number]
        ids = tasks.tokens.sequences[number, : choice.stop].tolist()
        decoder.reset()
        log_probs = decoder.logits(ids).log_softmax(dim=-1)
        alone = sum(float(log_probs[i - 1, ids[i]]) for i in range(choice.start, choice.stop))
        assert found[number] == pytest.approx(alone, abs=1e-3)
    product = task_score(checkpoint, tasks, tmp_path / "work", Recorder())
    assert Suite(tasks, normalized=False).right(found).mean() == product.accuracy.value
    assert Suite(tasks, normalized=True).right(found).mean() == product.normalized_accuracy.value
    checkpoint.close()


def test_passages_go_on_with_their_own_words() -> None:
    text = " ".join(f"w{number}" for number in range(400))
    tasks = [json.loads(line) for line in passages(text, 10)]
    assert len(tasks) == 10
    for number, task in enumerate(tasks):
        with case(number):
            assert len(set(task["choices"])) == 4
            right = [c for c in task["choices"] if int(c.split()[0][1:]) == int(task["prompt"].split()[-1][1:]) + 1]
            assert right == [task["choices"][task["answer"]]]
    assert passages(text, 10) == [json.dumps(task) for task in tasks]


def test_the_plain_questions_have_four_different_choices_and_answers_in_all_places() -> None:
    tasks = [json.loads(line) for line in TASKS.read_text("utf-8").splitlines()]
    assert all(len(set(task["choices"])) == 4 for task in tasks)
    assert all(choice.startswith(" ") for task in tasks for choice in task["choices"])
    assert len({task["prompt"] for task in tasks}) == len(tasks)
    places = np.bincount([task["answer"] for task in tasks])
    assert places.max() - places.min() <= 1
