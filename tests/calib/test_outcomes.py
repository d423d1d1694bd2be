"""What is kept of predictions against the whole of them: KL by float64 over every token, and what must bound it."""

import pytest
import torch
from support.cases import case
from torch import Tensor

from moe_pack.calib.evaluate.reference import NUM_DRAWN, NUM_OUTCOMES, distances, kept_outcomes, whole_divergence

VOCABULARY = 1000


def predictions(number: int, vocab_size: int, seed: int, spread: float = 2.0) -> Tensor:
    logits = torch.randn(number, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.log_softmax(dim=1)


def shifted(log_probs: Tensor, size: float, seed: int = 1) -> Tensor:
    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return (log_probs + size * noise).log_softmax(dim=1)


def plain_divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL in float64, both renormalised there."""
    p, q = expected.double().log_softmax(dim=1), found.double().log_softmax(dim=1)
    return (p.exp() * (p - q)).sum(dim=1)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_divergence_of_whole_predictions_is_the_plain_sum() -> None:
    for size in [1e-3, 0.1, 1.0, 10.0]:
        with case(size):
            p = predictions(70, VOCABULARY, 0)
            q = shifted(p, size)
            torch.testing.assert_close(whole_divergence(p, q), plain_divergence(p, q), rtol=1e-4, atol=1e-9)


def test_no_difference_is_no_divergence() -> None:
    p = predictions(40, VOCABULARY, 0)
    found = distances(kept_outcomes(p, draws()), p)
    assert whole_divergence(p, p).abs().max() == 0
    assert found.estimate.abs().max() < 1e-9
    assert found.bound.abs().max() < 1e-9


@pytest.mark.parametrize("vocab_size", [1, 5, NUM_OUTCOMES])
def test_a_vocabulary_that_is_kept_whole_has_no_tail_and_an_exact_divergence(vocab_size: int) -> None:
    p = predictions(40, vocab_size, 0)
    q = shifted(p, 0.5)
    kept, exact = kept_outcomes(p, draws()), plain_divergence(p, q)
    found = distances(kept, q)
    assert kept.drawn_ids.shape == (40, 0) and (kept.log_tail == -torch.inf).all() and (found.tail == 0).all()
    torch.testing.assert_close(found.bound, exact, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.estimate, exact, rtol=1e-4, atol=1e-7)


def test_what_is_kept_are_the_likeliest_tokens_and_the_mass_of_all_others() -> None:
    p = predictions(40, VOCABULARY, 0)
    kept = kept_outcomes(p, draws())
    for row, ids, log_probs, log_tail, drawn in zip(
        p, kept.ids, kept.log_probs, kept.log_tail, kept.drawn_ids, strict=True
    ):
        order = row.argsort(descending=True)
        assert set(ids.tolist()) == set(order[:NUM_OUTCOMES].tolist())
        torch.testing.assert_close(log_probs, row[order[:NUM_OUTCOMES]])
        assert float(log_tail.exp()) == pytest.approx(float(row[order[NUM_OUTCOMES:]].exp().sum()), rel=1e-5)
        assert len(drawn) == NUM_DRAWN and not set(drawn.tolist()) & set(ids.tolist())


def test_a_tail_as_one_outcome_is_never_farther_than_the_whole() -> None:
    p = predictions(200, VOCABULARY, 0, spread=0.5)
    for size in (0.01, 0.3, 2.0):
        q = shifted(p, size)
        found = distances(kept_outcomes(p, draws()), q)
        assert (found.bound <= plain_divergence(p, q) * (1 + 1e-5) + 1e-9).all()
        assert found.bound.mean() < 0.9 * plain_divergence(p, q).mean()  # it can be much nearer: this tail is heavy


def test_the_estimate_is_right_in_the_mean_over_draws() -> None:
    p = predictions(1, VOCABULARY, 0, spread=0.5)
    q, number = shifted(p, 0.5), 4000
    kept = kept_outcomes(p.expand(number, -1), draws())
    found = distances(kept, q.expand(number, -1)).estimate
    error = float(found.std()) / number**0.5
    assert abs(float(found.mean()) - float(plain_divergence(p, q)[0])) < 4 * error
    assert error < 0.01 * float(found.mean())


def test_the_packs_tail_is_its_mass_outside_the_sources_outcomes() -> None:
    p, q = predictions(5, VOCABULARY, 0), predictions(5, VOCABULARY, 1)
    kept = kept_outcomes(p, draws())
    expected = 1 - q.double().exp().gather(1, kept.ids).sum(dim=1)
    torch.testing.assert_close(distances(kept, q).tail, expected, rtol=1e-5, atol=1e-6)


def test_a_tail_of_hardly_any_mass_is_drawn_from() -> None:
    logits = torch.full((3, VOCABULARY), -200.0)
    logits[:, 7] = 0.0
    p = logits.log_softmax(dim=1)
    kept = kept_outcomes(p, draws())
    found = distances(kept, shifted(p, 0.5))
    assert 7 not in kept.drawn_ids and torch.isfinite(found.estimate).all() and (found.estimate < 1e-6).all()
