"""The share that the link brings of what a GPU lacks, chosen by the time of tokens."""

import pytest

from moe_pack.runtime.gpu.cpu_share import fastest_share


@pytest.mark.parametrize("best", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_share_is_near_the_best_where_the_slower_of_two_counts(best: float) -> None:
    found = fastest_share(lambda share: max(share * (1 - best), (1 - share) * best), 0.5)
    assert abs(found - best) <= 0.1


def test_one_alone_is_found_where_two_slow_each_other_down() -> None:
    assert fastest_share(lambda share: 4 * share * (1 - share) + 0.1 * share, 0.5) == 0.0
    assert fastest_share(lambda share: 4 * share * (1 - share) - 0.1 * share, 0.5) == 1.0


def test_an_estimate_is_kept_if_nothing_is_better() -> None:
    assert fastest_share(lambda share: abs(share - 0.47), 0.47) == 0.47
