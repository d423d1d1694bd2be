"""Rows of dense matrices: the same values however they are read."""

import pytest
import torch
from torch import Tensor

from moe_pack.runtime import matrix
from moe_pack.runtime.matrix import StoredMatrix, gather_rows

WEIGHT = torch.randn((100, 3), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


class Recorded(StoredMatrix):
    """A matrix that remembers which rows were asked for."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.asked: list[tuple[int, int]] = []

    def rows(self, start: int, stop: int) -> Tensor:
        self.asked.append((start, stop))
        return super().rows(start, stop)


def test_of_few_rows_each_is_read_once() -> None:
    held = Recorded(WEIGHT)
    ids = torch.tensor([7, 99, 7, 0, 7, 99])
    assert torch.equal(gather_rows(held, ids), WEIGHT[ids].to(torch.float32))
    assert held.asked == [(0, 1), (7, 8), (99, 100)]


@pytest.mark.parametrize("number", [0, 7, 99])
def test_of_one_row_that_alone_is_read(number: int) -> None:
    held = Recorded(WEIGHT)
    assert torch.equal(gather_rows(held, torch.tensor([number])), WEIGHT[[number]].to(torch.float32))
    assert held.asked == [(number, number + 1)]


def test_of_many_rows_all_are_read_at_once() -> None:
    held = Recorded(WEIGHT)
    ids = torch.tensor([7, 99, 7, 0, 50, 51, 52, 98])  # 7 of 100: a sixteenth and more
    assert torch.equal(gather_rows(held, ids), WEIGHT[ids].to(torch.float32))
    assert held.asked == [(0, 100)]


def test_of_a_matrix_beyond_the_bound_never_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(100).flip(0)
    for bound, calls in ((4 * 100 * 3, 1), (4 * 100 * 3 - 1, 100)):
        monkeypatch.setattr(matrix, "MAX_DECODED_BYTES", bound)
        held = Recorded(WEIGHT)
        assert torch.equal(gather_rows(held, ids), WEIGHT[ids].to(torch.float32))
        assert len(held.asked) == calls
