"""Rows of dense matrices: the same values however they are read, by as few operations as it takes."""

import pytest
import torch
from support.random_experts import random_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_pack.formats import part_format
from moe_pack.runtime.model import RowMatrix, StoredMatrix
from moe_pack.runtime.model.compute import operations
from moe_pack.runtime.model.compute.matrices import gather_rows

WEIGHT = torch.randn((100, 3), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


class FromDisk:
    """A matrix whose rows are read when they are asked for; it remembers which."""

    num_rows, num_cols = WEIGHT.shape

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def rows(self, start: int, stop: int) -> Tensor:
        self.asked.append((start, stop))
        return WEIGHT[start:stop].to(torch.float32)


class Operations(TorchDispatchMode):
    """Counts what torch is asked for: on a GPU each is a launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as torch has it
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_row_on_disk_is_read_once_however_often_its_token_comes() -> None:
    held = FromDisk()
    ids = torch.tensor([7, 99, 7, 0, 7, 99])
    assert torch.equal(gather_rows(held, ids), WEIGHT[ids].to(torch.float32))
    assert held.asked == [(0, 1), (7, 8), (99, 100)]


@pytest.mark.parametrize("number", [0, 7, 99])
def test_of_one_row_that_alone_is_read(number: int) -> None:
    held = FromDisk()
    assert torch.equal(gather_rows(held, torch.tensor([number])), WEIGHT[[number]].to(torch.float32))
    assert held.asked == [(number, number + 1)]


@pytest.mark.parametrize("bound", [4 * 3, 4 * 3 * 7, operations.MAX_DECODED_BYTES])
def test_stored_values_and_codes_give_the_rows_asked_for(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_DECODED_BYTES", bound)
    layout, codes = random_rows(part_format(4, 64), 100, 128)
    ids = torch.arange(100).flip(0)[::3].repeat(2)
    for held in (StoredMatrix(WEIGHT), RowMatrix(layout, torch.from_numpy(codes))):
        assert torch.equal(gather_rows(held, ids), held.rows(0, 100)[ids])


def test_a_long_prompts_embedding_takes_as_many_operations_as_a_short_ones() -> None:
    layout, codes = random_rows(part_format(4, 64), 1000, 128)
    held, counts = RowMatrix(layout, torch.from_numpy(codes)), []
    for num_tokens in (2, 512):
        with Operations() as operations:
            gather_rows(held, torch.arange(num_tokens))
        counts.append(operations.count)
    assert counts[0] == counts[1]
