"""Multiplications against counts by hand; that seconds are found, not how many."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import DEMO_MODEL
from support.specs import GROUPED, LATENT

from moe_pack.calib.forward import LayerStates
from moe_pack.calib.forward.layers import Beginning
from moe_pack.calib.sensitivity import (
    Cost,
    Trial,
    compared_formats,
    costs,
    expert_multiplications,
    half_multiplications,
)
from moe_pack.calib.sensitivity.costs import prediction_cost
from moe_pack.formats import trellis_format
from moe_pack.formats.base.cli import StageTime
from moe_pack.formats.families import Checkpoint
from moe_pack.runtime.model import CheckpointWeights

S = 10
# The demo model: d = 128, f = 448, 8 experts; 4 heads of 32, 2 of keys and values; 4096 words.
HALF = 128 * 128 + 64 * 128 + 64 * 128 + 128 * 128 + 8 * 128 + S * 128  # q, k, v, o, router, attention to S / 2 tokens
EXPERT = 3 * 128 * 448


@pytest.fixture(scope="module")
def weights() -> Iterator[CheckpointWeights]:
    checkpoint = Checkpoint(DEMO_MODEL)
    yield CheckpointWeights(checkpoint)
    checkpoint.close()


@pytest.fixture(scope="module")
def states(weights: CheckpointWeights, tmp_path_factory: pytest.TempPathFactory) -> LayerStates:
    folder: Path = tmp_path_factory.mktemp("trial") / "states"
    return LayerStates(weights, Beginning(lambda number: torch.randn(S, 128)), 1, S, folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def trial(weights: CheckpointWeights, states: LayerStates) -> Trial:
    return Trial(weights, states)


def test_the_demo_model_is_counted_as_by_hand(trial: Trial) -> None:
    checkpoint = Checkpoint(DEMO_MODEL)
    spec = checkpoint.spec
    checkpoint.close()
    assert half_multiplications(spec, 0, S) == HALF
    assert expert_multiplications(spec) == EXPERT


def test_layers_without_experts_and_shared_experts_are_counted_as_by_hand() -> None:
    attention = 128 * 64 + 2 * 64 * 64 + 64 * 128 + 7 * 64
    assert half_multiplications(GROUPED, 1, 7) == attention + 6 * 64 + 3 * 40 * 64 + 64  # routers of 6 and 1
    assert half_multiplications(GROUPED, 2, 7) == attention + 3 * 80 * 64


def test_layers_whose_numbers_begin_alike_are_counted_apart() -> None:
    deep = replace(GROUPED, num_hidden_layers=12, moe_layers=tuple(range(12)), dense_intermediate_size=None)
    assert half_multiplications(deep, 1, 7) == half_multiplications(GROUPED, 1, 7)


def test_an_expert_of_two_matrices_costs_two_thirds() -> None:
    two = replace(GROUPED, expert=replace(GROUPED.expert, matrices=("up", "down")))
    assert expert_multiplications(two) * 3 == expert_multiplications(GROUPED) * 2 == 6 * 64 * 48


def test_predictors_cost_three_times_their_parameters_a_token_and_epoch() -> None:
    """d = 64, E = 6: 6 rows of 64 + 12 + 1; 512 of those and 6 rows of 513. 20 epochs."""
    cost = prediction_cost(GROUPED, 100)
    assert cost.seconds > 0
    assert cost.multiplications == 3 * 20 * 100 * (6 * 77 + 512 * 77 + 6 * 513)


def test_layers_of_a_kind_are_tried_once() -> None:
    assert costs.kinds_of_layers(GROUPED) == {0, 2}
    assert [costs.kind_of(GROUPED, layer) for layer in range(3)] == [0, 0, 2]
    assert [costs.kind_of(LATENT, layer) for layer in range(2)] == [0, 1]
    every = replace(GROUPED, moe_layers=(0, 1, 2))
    assert costs.kinds_of_layers(every) == {0}


def test_costs_add_and_scale() -> None:
    assert Cost(3, 0.5, 7) + Cost(4, 1.0, 2) * 2.5 == Cost(13, 3.0, 12)
    assert sum([Cost(1, 1.0)] * 3, start=Cost()) == Cost(3, 3.0)


@pytest.mark.slow
def test_every_trial_finds_seconds_and_counts_what_it_stands_for(trial: Trial) -> None:
    found = {
        trial.half(0): HALF * S,
        trial.counted(20): EXPERT * 20,
        trial.counted(2.5): EXPERT * 2.5,
        trial.plain(20): EXPERT * 20,
        trial.half_back(0): 2 * HALF * S,
        trial.back(20): 2 * EXPERT * 20,
        trial.predicted_back(100): 2 * 100 * 128 * 4096,
        trial.compared(compared_formats(128)[:2]): 0,  # of rounding nothing is counted
        trial.calibrated(16, (trellis_format(4, 0),)): 0,
        trial.predicted(100): 100 * 128 * 4096,
    }
    for cost, multiplications in found.items():
        assert cost.multiplications == multiplications
        assert cost.seconds > 0 and math.isfinite(cost.seconds)


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ([0.9, 0.01, 0.09, 0.02, 0.03, 0.04], 0.03),  # five after the first, which is not counted
        ([0.9, 0.1, 0.11], 0.105),  # then it is enough
        ([0.9, 0.3], 0.3),
        ([1.1], 1.1),  # not again
    ],
)
def test_announced_is_the_median_of_tries_after_the_first(
    tries: list[float], expected: float, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([time for taken in tries for time in (0.0, taken)])  # before and after each try
    monkeypatch.setattr(costs, "_MOST_TRIES", 5)  # all other tests try once
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    assert trial.half(0).seconds == pytest.approx(expected)
    assert not list(times)


def test_work_that_may_end_early_has_no_time_left_before_it_is_measured() -> None:
    cost = Cost(10**9, 600.0)
    stage, most = cost.stage("one"), cost.stage("other", is_most=True)
    assert (stage.note, most.note) == ("1.0 G multiplications, about 10 min", "1.0 G multiplications, at most 10 min")
    assert (StageTime(stage, 0.0).left(0.0), StageTime(most, 0.0).left(0.0)) == (600.0, None)


def test_more_tokens_than_are_tried_take_their_share_of_seconds(trial: Trial) -> None:
    cost = trial.plain(1_000_000)
    assert cost.multiplications == EXPERT * 1_000_000
    assert cost.seconds > trial.plain(1).seconds


def test_a_trial_leaves_the_states_where_they_were(trial: Trial, states: LayerStates) -> None:
    trial.half(0)
    assert states.next_layer == 0
