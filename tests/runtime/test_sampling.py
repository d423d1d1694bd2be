"""Sampling: greedy, the nucleus, seeds, and logits that are no numbers."""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from cases import case

from moe_pack.formats import RunError
from moe_pack.runtime import Sampler
from moe_pack.runtime.generate import nucleus

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def draws(sampler: Sampler, number: int) -> Counter[int]:
    return Counter(sampler.choose(LOGITS) for _ in range(number))


def test_temperature_zero_takes_the_likeliest_and_the_lowest_among_equals() -> None:
    assert Sampler(0, 1, 0).choose(LOGITS) == 1
    assert Sampler(0, 1, 0).choose(torch.tensor([1.0, 2.0, 2.0])) == 1


def test_the_same_seed_repeats_and_another_differs() -> None:
    first, again, other = (
        [s.choose(LOGITS) for _ in range(50)] for s in (Sampler(1, 1, 7), Sampler(1, 1, 7), Sampler(1, 1, 8))
    )
    assert first == again != other


def test_draws_follow_the_probabilities() -> None:
    found = draws(Sampler(1, 1, 0), 4000)
    for token, probability in enumerate([0.1, 0.5, 0.15, 0.25]):
        # Five standard deviations of a binomial with 4000 draws.
        assert abs(found[token] / 4000 - probability) < 5 * math.sqrt(probability * (1 - probability) / 4000)


def test_top_p_keeps_the_smallest_set_with_that_mass() -> None:
    for top_p, kept in [(0.4, {1}), (0.5, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3}), (1.0, {0, 1, 2, 3})]:
        with case(top_p, kept):
            assert set(draws(Sampler(1, top_p, 0), 500)) == kept


def test_the_nucleus_is_that_of_a_stable_sort_of_all_tokens() -> None:
    for spread, size in product([0.0, 1.0, 4.0, 12.0], [1, 2, 255, 256, 257, 5000]):
        with case(spread, size):
            draw = torch.Generator().manual_seed(size)
            scores = (spread * torch.randn(size, generator=draw).mul(4).round().div(4)).double().exp()  # with many ties
            for top_p in (1e-9, 0.3, 0.9, 0.999):  # at 1 it hangs on rounding; all are kept without asking
                ranked, tokens = scores.sort(descending=True, stable=True)
                expected = tokens[ranked.cumsum(0) - ranked < top_p * scores.sum()].sort().values
                assert torch.equal(nucleus(scores, top_p), expected), top_p


@pytest.mark.parametrize("spread", [1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_a_draw_sorts_a_small_part_of_the_vocabulary_at_most(
    top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = spread * torch.randn(151_936, generator=torch.Generator().manual_seed(0))
    sizes, sort = [0], torch.Tensor.sort

    def watched(scores: torch.Tensor, **options: bool) -> object:
        sizes.append(len(scores))
        return sort(scores, **options)

    monkeypatch.setattr(torch.Tensor, "sort", watched)
    for name in ("sort", "topk"):
        monkeypatch.setattr(torch, name, None)
    Sampler(1, top_p, 0).choose(logits)
    assert max(sizes) <= len(logits) / 50


def test_a_low_temperature_sharpens() -> None:
    assert draws(Sampler(0.1, 1, 0), 200)[1] > 195


def test_a_tiny_temperature_overflows_nothing() -> None:
    assert Sampler(1e-30, 1, 0).choose(LOGITS) == 1


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad, temperature in product([math.nan, math.inf, -math.inf], [0.0, 1.0]):
        with case(bad, temperature), pytest.raises(RunError, match="logits are NaN or infinite"):
            Sampler(temperature, 1, 0).choose(torch.tensor([1.0, bad]))


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_a_temperature_out_of_range_is_refused(temperature: float) -> None:
    with pytest.raises(RunError, match="--temperature"):
        Sampler(temperature, 1, 0)


@pytest.mark.parametrize("top_p", [0.0, 1.01, math.nan])
def test_a_top_p_out_of_range_is_refused(top_p: float) -> None:
    with pytest.raises(RunError, match="--top-p"):
        Sampler(1, top_p, 0)
