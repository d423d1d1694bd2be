"""What is planned for after what was measured: played against packs whose loss is known."""

from collections.abc import Callable

import pytest
from support.cases import case

from moe_pack.convert.autopack import MAX_ATTEMPTS, Attempt, best_of, next_nats


def attempt(nats: float, measured: float) -> Attempt:
    return Attempt(nats, measured, content_bytes=1)


def played(lost: Callable[[float], float], allowed: float, first: float) -> list[Attempt]:
    """All attempts, where a plan of so many nats loses `lost` of them."""
    attempts: list[Attempt] = []
    while len(attempts) < MAX_ATTEMPTS and (nats := next_nats(attempts, allowed, first)) is not None:
        attempts.append(attempt(nats, lost(nats)))
    return attempts


def test_it_ends_with_a_pack_that_holds_and_uses_most_of_what_is_allowed() -> None:
    for factor in [0.05, 0.3, 0.9, 1.0, 1.1, 2.0, 20.0]:
        for power in [0.7, 1.0, 1.3]:
            with case(factor, power):
                allowed, first = 0.01, 0.01
                attempts = played(lambda nats: factor * allowed * (nats / first) ** power, allowed, first)
                best = best_of(attempts, allowed)
                assert best is not None
                assert len(attempts) < MAX_ATTEMPTS
                assert 0.5 * allowed <= attempts[best].measured <= allowed


def test_a_first_attempt_that_holds_and_uses_nearly_all_is_kept() -> None:
    assert next_nats([attempt(0.02, 0.0095)], 0.01, 0.02) is None


def test_a_pack_that_lost_too_much_is_followed_by_one_planned_with_less_in_proportion() -> None:
    assert next_nats([attempt(0.02, 0.02)], 0.01, 0.02) == pytest.approx(0.02 * 0.95 / 2)


def test_one_that_leaves_much_unused_is_followed_by_one_with_more_below_what_failed() -> None:
    assert next_nats([attempt(0.01, 0.002)], 0.01, 0.01) == pytest.approx(0.04)
    attempts = [attempt(0.03, 0.02), attempt(0.01, 0.005)]
    assert next_nats(attempts, 0.01, 0.03) == pytest.approx((0.01 * 0.03) ** 0.5)


def test_of_those_that_hold_the_one_planned_with_the_most_is_best() -> None:
    attempts = [
        attempt(0.03, 0.02),
        attempt(0.01, 0.005),
        attempt(0.017, 0.009),
        attempt(0.02, 0.011),
    ]
    assert best_of(attempts, 0.01) == 2
    assert best_of(attempts, 0.001) is None


def test_where_less_nats_lose_as_much_it_gives_up_at_the_last_attempt() -> None:
    assert len(played(lambda nats: 0.02, 0.01, 0.02)) == MAX_ATTEMPTS


def test_a_loss_measured_below_zero_asks_for_no_more_than_four_times() -> None:
    assert next_nats([attempt(0.01, -0.001)], 0.01, 0.01) == pytest.approx(0.04)
