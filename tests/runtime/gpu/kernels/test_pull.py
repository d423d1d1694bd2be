"""Rows pulled from host memory: the bytes of the pack, where they are asked for, and no others; against the twins."""

import pytest
import torch
from support.gpu_layers import PartlyThere, RandomLayer, partly_there, random_layer, random_running, running_on
from support.kernel_twins import compact_plain, pull_records_plain, pull_selectors_plain
from support.named_formats import named_format
from support.random_experts import Shape

from moe_pack.formats import Selector
from moe_pack.runtime.gpu.kernels import pull
from moe_pack.runtime.gpu.kernels.pull import pull_records, pull_selectors
from moe_pack.runtime.gpu.kernels.tables import RunningNeurons

CPU = torch.device("cpu")
EXPERTS = (3, 0, 2)


def mixed_layer(num_rows: int = 150, num_cols: int = 64, selector: Selector = "up") -> RandomLayer:
    """A layer of experts of two formats, whose rows have different lengths."""
    two = [
        Shape(num_rows, num_cols, selector, *map(named_format, trio))
        for trio in ((4, 2, 4), (2, 8, 3))
    ]  # fmt: skip
    layer = random_layer([two[0], two[1], two[1], two[0]])
    units = {(kind.record_units, kind.selector_units) for kind in layer.tables.kinds}
    assert len(units) == 2
    return layer


def copies(layer: RandomLayer, share: float, num_kept: int, device: torch.device) -> tuple[PartlyThere, PartlyThere]:
    """The same layer for the kernels and for the twin."""
    kernels, twin = (partly_there(layer, on, share, 3, num_kept, (0, 3)) for on in (device, CPU))
    return kernels, twin


def listed(twin: PartlyThere, share: float, is_split: bool) -> RunningNeurons:
    """The list of records that run, three quarters of the missing ones pulled if the list is split."""
    found, left = random_running(twin.tables, EXPERTS, share, seed=1), twin.pinned(3)
    compact_plain(
        torch.tensor(EXPERTS), twin.tables, found, twin.landing, torch.tensor([0.75]), left, is_split, kept=twin.kept(3)
    )
    return found


def check_records(layer: RandomLayer, device: torch.device, share: float, is_split: bool) -> int:
    """Compares the arenas; returns how many rows came."""
    kernels, twin = copies(layer, 0.5, 40, device)
    running = listed(twin, share, is_split)
    before, record_at = twin.tables.arena.clone(), twin.tables.record_at.clone()
    experts = torch.tensor(EXPERTS, dtype=torch.int32)
    there = running_on(running, device)
    pull_records(experts.to(device), kernels.tables, there, kernels.host, is_split)
    pull_records_plain(experts, twin.tables, running, twin.host, is_split)
    assert torch.equal(kernels.tables.arena.cpu(), twin.tables.arena)
    assert torch.equal(kernels.tables.record_at.cpu(), record_at)
    return int((before != twin.tables.arena).sum())


@pytest.mark.parametrize("selector", ["up", "none"])
@pytest.mark.parametrize("num_programs", [1, 5, 12])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_records_are_the_packs_where_the_list_says(
    selector: Selector,
    num_programs: int,
    share: float,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pull, "NUM_PROGRAMS", num_programs)
    layer = mixed_layer(selector=selector)
    changed = [check_records(layer, kernel_device, share, is_split) for is_split in (False, True)]
    assert all(changed)


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33])
def test_sizes_off_the_block_and_one_neuron(num_rows: int, kernel_device: torch.device) -> None:
    layer = mixed_layer(num_rows)
    check_records(layer, kernel_device, 1.0, False)
    check_selectors(layer, kernel_device)


def test_rows_longer_than_a_tile_come_whole(kernel_device: torch.device) -> None:
    layer = mixed_layer(5, 16384)
    assert any(16 * kind.record_units > 2 * 8192 for kind in layer.tables.kinds)
    assert check_records(layer, kernel_device, 1.0, False)
    check_selectors(layer, kernel_device)


def test_an_empty_list_brings_nothing(kernel_device: torch.device) -> None:
    kernels, _ = copies(mixed_layer(), 1.0, 5, kernel_device)
    before = kernels.tables.arena.clone()
    found = running_on(random_running(kernels.tables, EXPERTS, 1.0, 0), kernel_device)
    found.totals.zero_()
    experts = torch.tensor(EXPERTS, dtype=torch.int32, device=kernel_device)
    for is_split in (False, True):
        pull_records(experts, kernels.tables, found, kernels.host, is_split)
    assert torch.equal(kernels.tables.arena, before)


def check_selectors(layer: RandomLayer, device: torch.device) -> None:
    kernels, twin = copies(layer, 0.0, 0, device)
    experts, expected = torch.tensor(EXPERTS, dtype=torch.int32), torch.full((3, layer.tables.record_at.shape[1]), -7)
    expected = expected.to(torch.int32)
    found = expected.to(device, copy=True)
    before = twin.tables.arena.clone()
    pull_selectors(experts.to(device), kernels.tables, kernels.host, kernels.selectors_at, found)
    pull_selectors_plain(experts, twin.tables, twin.host, twin.selectors_at, expected)
    assert torch.equal(kernels.tables.arena.cpu(), twin.tables.arena)
    assert torch.equal(found.cpu(), expected)
    changed = (before != twin.tables.arena).nonzero()[:, 0]
    assert len(changed) and changed.min() >= 16 * twin.selectors_at
    scratch_units = 3 * layer.tables.record_at.shape[1] * max(kind.selector_units for kind in layer.tables.kinds)
    assert changed.max() < 16 * (twin.selectors_at + scratch_units)
    assert (found[2].cpu() == twin.tables.selector_at[2]).all() if twin.tables.selector_at is not None else False


@pytest.mark.parametrize("num_programs", [1, 5, 12])
def test_missing_selectors_come_and_all_are_found(
    num_programs: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "NUM_PROGRAMS", num_programs)
    check_selectors(mixed_layer(), kernel_device)


def test_selectors_longer_than_all_tiles_of_a_turn_come_whole(kernel_device: torch.device) -> None:
    layer = mixed_layer(2100)
    assert all(16 * 2100 * kind.selector_units > 3 * 8192 for kind in layer.tables.kinds)
    check_selectors(layer, kernel_device)


def test_what_is_pulled_is_not_in_the_tables(kernel_device: torch.device) -> None:
    """A second token pulls the same rows again."""
    kernels, twin = copies(mixed_layer(), 1.0, 0, kernel_device)
    running = running_on(listed(twin, 0.3, is_split=False), kernel_device)
    experts = torch.tensor(EXPERTS, dtype=torch.int32, device=kernel_device)
    pull_records(experts, kernels.tables, running, kernels.host, is_split=False)
    pulled, begin = kernels.tables.arena.clone(), 16 * kernels.landing.scratch_at
    kernels.tables.arena[begin:] = 0
    pull_records(experts, kernels.tables, running, kernels.host, is_split=False)
    units = kernels.tables.kinds[int(kernels.tables.kind[EXPERTS[0]])].record_units
    for target in running.units[0, : int(running.totals[0, 0])].tolist():  # all are missing
        row = slice(16 * target, 16 * (target + units))
        assert target >= kernels.landing.scratch_at and torch.equal(kernels.tables.arena[row], pulled[row])
