"""Tokens chosen by kernels against the host's sampler: the same random number gives the same token."""

import random
from dataclasses import replace

import pytest
import torch
from gpu.comparing import random_values
from support.cases import case
from support.chosen_tokens import (
    EACH,
    FORBIDDEN,
    PLAIN,
    ChosenTokens,
    described,
    drawn_options,
    mismatches,
    samplers,
)

from moe_pack.formats import RunError
from moe_pack.runtime.model.choosing import NONE_LEFT, NOT_FINITE
from moe_pack.runtime.sampling import Sampler


def test_the_tokens_are_those_of_the_host(kernel_device: torch.device) -> None:
    draw = random.Random(0)
    for number, vocab_size in enumerate((1, 96, 1000, 1024, 2049)):
        with case(vocab_size):
            logits = draw.choice((0.5, 2, 6)) * random_values(4, vocab_size, seed=number)
            options = [drawn_options(draw) for _ in logits]
            if vocab_size == 1:
                options = [replace(each, logit_bias=()) for each in options]
            assert not mismatches(logits.to(kernel_device), options)


def test_of_equals_the_lowest_are_kept(kernel_device: torch.device) -> None:
    for step in (0.25, 1.0, 100.0):
        with case(step):
            logits = (2 * random_values(len(EACH), 700) / step).round() * step
            assert not mismatches(logits.to(kernel_device), [replace(each, seed=4) for each in EACH])


def test_a_vocabulary_of_a_published_model(kernel_device: torch.device) -> None:
    logits = 3 * random_values(len(EACH), 151_936)
    assert not mismatches(logits.to(kernel_device), [replace(each, seed=8) for each in EACH], num_tokens=1)


def test_extreme_temperatures_and_logits(kernel_device: torch.device) -> None:
    options = [replace(PLAIN, temperature=temperature, seed=1) for temperature in (1e-300, 1e-3, 50.0, 1e300)]
    for scale in (1e-30, 1.0, 1e30):
        with case(scale):
            assert not mismatches(scale * random_values(4, 300).to(kernel_device), options)


def test_draws_have_the_hosts_distribution(kernel_device: torch.device) -> None:
    """Chi-square of draws with fixed seeds, against the probabilities that the host draws by."""
    logits, num_draws = 1.2 * random_values(1, 10, seed=3), 160
    probabilities = torch.softmax(logits[0].double(), 0)
    order = probabilities.argsort(descending=True)
    for options, number in ((PLAIN, 10), (replace(PLAIN, top_k=4), 4), (replace(PLAIN, top_p=0.8), None)):
        with case(str(options)):
            kept = order[:number]
            if number is None:
                kept = order[probabilities[order].cumsum(0) - probabilities[order] < options.top_p]
            each = [Sampler(replace(options, seed=seed)) for seed in range(num_draws)]
            tokens = ChosenTokens(logits.expand(num_draws, -1).contiguous().to(kernel_device)).next(described(each))
            found = torch.bincount(torch.tensor(tokens), minlength=10)
            expected = num_draws * probabilities[kept] / probabilities[kept].sum()
            assert int(found[kept].sum()) == num_draws
            chi_square = float(((found[kept] - expected).square() / expected).sum())
            freedom = len(kept) - 1
            assert chi_square < freedom + 3 * (2 * freedom) ** 0.5, (chi_square, freedom)


def test_what_cannot_be_chosen_is_reported(kernel_device: torch.device) -> None:
    forbidden = replace(PLAIN, logit_bias=tuple((token, FORBIDDEN) for token in range(30)))
    for temperature in (0.0, 1.0):
        with case(temperature):
            logits = random_values(3, 30).to(kernel_device)
            logits[0, 29], logits[1, 0] = float("nan"), float("-inf")
            own = samplers([replace(each, temperature=temperature) for each in (PLAIN, PLAIN, forbidden)], 30)
            found = ChosenTokens(logits)
            found.begin(described(own))
            assert found.next(described(own)) == [NOT_FINITE, NOT_FINITE, NONE_LEFT]
    for token, words in ((NOT_FINITE, "NaN or infinite"), (NONE_LEFT, "no token is left")):
        with pytest.raises(RunError, match=words):
            own[0].accept(token)


def test_the_host_gets_the_logits_of_its_rows(kernel_device: torch.device) -> None:
    logits = random_values(2, 1500).to(kernel_device)
    found = ChosenTokens(logits)
    found.next(None)
    assert torch.equal(found.choice.host_logits, logits.cpu())
