"""Substitution on the paper's cases worked by hand, and against the rule written out for one token at a time."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_pack.runtime.offload.split import substitute

Row = list[float]


def replaced(scores: list[Row], chosen: list[list[int]], is_resident: list[int], alpha: float) -> list[list[int]]:
    resident = np.zeros(len(scores[0]), bool)
    resident[is_resident] = True
    given_chosen = np.array(chosen)
    found = substitute(np.array(scores, np.float32), given_chosen, resident, alpha)
    assert given_chosen.tolist() == chosen, "what was given is not changed"
    result: list[list[int]] = found.tolist()
    return result


# k = 3, beta = 8/64 (rank 4). With alpha = 1/4 top is above 10/64, low down to 8, alternatives from 6/64.
SCORES = [score / 64 for score in (30, 10, 9, 8, 6, 1, 0, 0)]


def test_low_experts_not_in_fast_memory_give_way_lowest_first_to_the_best_there() -> None:
    assert replaced([SCORES], [[0, 1, 2]], [3, 4], 0.25) == [[0, 4, 3]]  # 2 is lowest: it gets 3, the best
    assert replaced([SCORES], [[0, 1, 2]], [4], 0.25) == [[0, 1, 4]]  # one alternative: the lowest goes


def test_what_is_in_fast_memory_stays() -> None:
    assert replaced([SCORES], [[0, 1, 2]], [2, 3], 0.25) == [[0, 3, 2]]


def test_a_top_expert_stays_wherever_it_is() -> None:
    assert replaced([SCORES], [[0, 1, 2]], [3, 4, 5, 6, 7], 0.25)[0][0] == 0


def test_an_expert_at_the_upper_bound_is_low_and_one_at_the_lower_bound_may_come() -> None:
    """10/64 is exactly (1 + 1/4) * 8/64, and 6/64 exactly (1 - 1/4) * 8/64."""
    assert replaced([SCORES], [[0, 1, 2]], [2, 4], 0.25) == [[0, 4, 2]]
    assert replaced([SCORES], [[0, 1, 2]], [2, 4], 0.2499) == [[0, 1, 2]]


def test_without_an_alternative_near_enough_all_stays() -> None:
    assert replaced([SCORES], [[0, 1, 2]], [5, 6, 7], 0.25) == [[0, 1, 2]]


def test_top_experts_of_one_token_serve_the_others() -> None:
    """Token 1's top expert 4 is computed anyway: token 0 may use it though nothing is in fast memory."""
    other = [score / 64 for score in (4, 0, 0, 3, 30, 20, 5, 2)]  # beta 4: top above 5: 4, 5; low: 6
    assert replaced([SCORES, other], [[0, 1, 2], [4, 5, 6]], [], 0.25) == [[0, 1, 4], [4, 5, 0]]


def test_what_serves_the_most_tokens_of_a_batch_comes_first() -> None:
    """The example of §5.4: tokens with the experts {1, 2, 4}, {1, 5, 4} and {2, 6, 7}; the third gets {2, 4, 7}.

    4 is a top expert of the others. Of the third token 6 is low; 3 is in fast memory, with a better score than 4, and
    no other token has chosen it. Alone, the third token would get 3.
    """
    first = [score / 64 for score in (0, 20, 18, 1, 16, 2, 2, 2)]
    second = [score / 64 for score in (0, 20, 2, 1, 16, 18, 2, 2)]
    third = [score / 64 for score in (0, 1, 20, 8, 7, 1, 9, 18)]  # beta 8: low up to 10, alternatives from 6
    batch = [[1, 2, 4], [1, 5, 4], [2, 6, 7]]
    assert replaced([first, second, third], batch, [2, 3, 5, 7], 0.25)[2] == [2, 4, 7]
    assert replaced([third], [[2, 6, 7]], [2, 3, 5, 7], 0.25) == [[2, 3, 7]]


def test_where_every_expert_is_chosen_nothing_can_be_replaced() -> None:
    assert replaced([[0.5, 0.3, 0.2]], [[0, 1, 2]], [], 1.0) == [[0, 1, 2]]


def test_with_everything_in_fast_memory_nothing_changes() -> None:
    assert replaced([SCORES], [[0, 1, 2]], list(range(8)), 1.0) == [[0, 1, 2]]


def by_rule(scores: list[Row], chosen: list[list[int]], resident: set[int], alpha: float) -> list[list[int]]:
    """The docstring's rule, token by token."""
    k, betas = len(chosen[0]), [sorted(row, reverse=True)[len(chosen[0])] for row in scores]
    top = [{e for e in row if scores[t][e] > (1 + alpha) * betas[t]} for t, row in enumerate(chosen)]
    free = resident | set().union(*top)
    num_tokens = [sum(e in row for row in chosen) for e in range(len(scores[0]))]
    made = []
    for t, row in enumerate(chosen):
        new = list(row)
        while True:
            leaving = [e for e in new if e in row and e not in top[t] and e not in free]
            fits = [e for e in free if e not in new and e not in row and scores[t][e] >= (1 - alpha) * betas[t]]
            if not leaving or not fits:
                break
            lowest = min(leaving, key=lambda e: (scores[t][e], -e))
            new[new.index(lowest)] = max(fits, key=lambda e: (num_tokens[e], scores[t][e], -e))
        made.append(new)
        assert len(set(new)) == k
    return made


@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
@settings(max_examples=200, deadline=None)
def test_random_scores_follow_the_rule(seed: int, alpha: float) -> None:
    rng = random.Random(seed)
    num_experts = rng.randint(2, 10)
    k = rng.randint(1, num_experts - 1)
    # Few different scores, exact in float32: many equals, many on the bounds.
    scores = [[rng.randint(0, 8) / 8 for _ in range(num_experts)] for _ in range(rng.randint(1, 4))]
    chosen = [sorted(range(num_experts), key=lambda e, row=row: (-row[e], e))[:k] for row in scores]
    resident = {e for e in range(num_experts) if rng.random() < 0.4}
    assert replaced(scores, chosen, sorted(resident), alpha) == by_rule(scores, chosen, resident, alpha)


def test_a_share_outside_0_to_1_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="alpha"):
        replaced([SCORES], [[0, 1, 2]], [], 1.5)
