"""Inputs of MoE layers kept in files: cosines against numpy, which rows come back, and a layer written twice."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.forward import num_held_out
from moe_pack.calib.statistics import InputFiles, Shares

D, S = 8, 5


def inputs(layer_idx: int, num_sequences: int = 10) -> Tensor:
    """Float32 [T, d], with a direction all layers share."""
    generator = torch.Generator().manual_seed(layer_idx)
    return torch.randn(num_sequences * S, D, generator=generator) + torch.arange(D) / 2


def files(folder: Path, num_sequences: int = 10) -> InputFiles:
    return InputFiles(folder, D, Shares.of(num_sequences, S, num_held_out(num_sequences)))


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
    held = InputFiles(tmp_path, D, Shares(num_sequences=10, sequence_length=S, num_learned=3, num_judged=2))
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
    assert found.judged.shape == (0, D) and found.judged_routes.shape == (0, 2)


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
