"""Work side by side comes back in order, in inference mode, and never too much of it at once."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from support.specs import GROUPED

from moe_pack.calib.forward import in_order, num_workers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_their_items(workers: int) -> None:
    def work(item: int) -> int:
        time.sleep(0.002 * (item % 3))  # later ones are ready before earlier ones
        return item * item

    assert list(in_order(work, range(12), workers)) == [item * item for item in range(12)]


def test_no_more_is_begun_than_workers_and_one_that_waits() -> None:
    begun: list[int] = []
    results = in_order(lambda item: begun.append(item) or item, range(20), 2)  # type: ignore[func-returns-value]
    assert next(results) == 0
    time.sleep(0.05)
    assert len(begun) <= 4
    assert list(results) == list(range(1, 20))


def test_workers_are_in_inference_mode_with_their_share_of_torchs_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = list(in_order(lambda _: (torch.is_inference_mode_enabled(), torch.get_num_threads()), range(4), 2))
        assert found == [(True, 2)] * 4 and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_an_error_in_one_ends_all_and_leaves_no_thread() -> None:
    def work(item: int) -> int:
        if item == 3:
            raise ValueError("item 3")
        return item

    with pytest.raises(ValueError, match="item 3"):
        list(in_order(work, range(10), 2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("calib")]


@pytest.mark.parametrize(("d", "f", "expected"), [(64, 48, 4), (2048, 768, 3), (4096, 14336, 1)])
def test_large_experts_are_left_to_torchs_threads(d: int, f: int, expected: int) -> None:
    spec = replace(GROUPED, hidden_size=d, expert=replace(GROUPED.expert, intermediate_size=f))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert num_workers(spec) == expected  # of 64 MiB: 37 KB, 18.9 MB and 704 MB an expert
    finally:
        torch.set_num_threads(before)
