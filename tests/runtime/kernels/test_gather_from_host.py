"""Rows pulled into pages: the bytes of the pack, each once, against the twin."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpu_cache_layers import SmallLayer, random_selection, small_layer
from kernel_twins import gather_plain, lru_update_plain

from moe_pack.runtime.gpu.kernels.cache import (
    BYTES,
    ROWS,
    Selection,
    gather_records_from_host,
    gather_selectors_from_host,
    lru_update,
)

Ids = Callable[..., torch.Tensor]


@pytest.fixture
def ids(kernel_device: torch.device) -> Ids:
    """Experts' numbers where kernels read them."""
    return lambda *experts: torch.tensor(experts, dtype=torch.int32, device=kernel_device)


def on(device: torch.device, selection: Selection) -> Selection:
    return Selection(selection.a.to(device), selection.neurons.to(device), selection.counts.to(device))


def check(layer: SmallLayer, e: int, neurons: list[int], of_selector: bool) -> None:
    """That these rows are where the table says."""
    layout, at = layer.layouts[e], layer.tables.selector_at if of_selector else layer.tables.record_at
    rows = layout.selector if of_selector else layout.records
    assert at is not None and rows is not None
    begin = 0 if of_selector else layout.selector_bytes
    for neuron in neurons:
        place = 16 * int(at[e, neuron])
        assert place >= 0, f"neuron {neuron} of expert {e} is not there"
        expected = layer.extents[e][begin + neuron * rows.row_bytes :][: rows.row_bytes]
        assert torch.equal(layer.tables.arena[place : place + rows.row_bytes].cpu(), expected)


def listed(selection: Selection, place: int) -> list[int]:
    blocks = selection.neurons[place].split(64)
    return [
        n for block, count in zip(blocks, selection.counts[place].tolist(), strict=True) for n in block[:count].tolist()
    ]


@pytest.mark.parametrize("has_selector", [True, False])
@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_steps_do_what_the_twin_does_and_bring_the_packs_bytes(
    has_selector: bool, num_programs: int, share: float, ids: Ids, kernel_device: torch.device
) -> None:
    twin = small_layer(num_experts=6, num_active=2, has_selector=has_selector)
    layer = twin.copy().to(kernel_device)
    draw = np.random.default_rng(0)
    for step in range(3):
        experts = ids(*draw.permutation(6)[:2].tolist())
        selection = random_selection(2, 150, share, step)
        lru_update(experts, layer.state, layer.tables)
        lru_update_plain(experts.cpu(), twin.state, twin.tables)
        gather_selectors_from_host(experts, layer.tables, layer.state, layer.host, num_programs)
        there = on(kernel_device, selection)
        gather_records_from_host(experts, there, layer.tables, layer.state, layer.host, num_programs)
        for of_selector in (True, False):
            chosen = None if of_selector else selection
            gather_plain(experts.cpu(), chosen, twin.tables, twin.state, twin.host, of_selector)
        assert torch.equal(layer.tables.arena.cpu(), twin.tables.arena)
        assert torch.equal(layer.tables.record_at.cpu(), twin.tables.record_at)
        assert torch.equal(layer.state.counters.cpu(), twin.state.counters)
        for place, e in enumerate(experts.tolist()):
            check(layer, e, listed(selection, place), of_selector=False)
            if has_selector:
                check(layer, e, list(range(150)), of_selector=True)


def test_rows_that_are_there_are_not_copied_again(ids: Ids, kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=4, num_active=2).to(kernel_device)
    experts, selection = ids(0, 1), random_selection(2, 150, 0.3, 5)
    for _ in range(2):
        lru_update(experts, layer.state, layer.tables)
        gather_records_from_host(experts, on(kernel_device, selection), layer.tables, layer.state, layer.host, 4)
        counted = layer.state.counters[[ROWS, BYTES]].tolist()
    first = layer.state.first_dynamic.tolist()
    expected = [
        layer.layouts[place].records.row_bytes
        for place in (0, 1)
        for n in listed(selection, place)
        if n >= first[place]
    ]
    assert counted == [len(expected), sum(expected)]


def test_without_a_selection_all_records_come(ids: Ids, kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=4, num_active=2).to(kernel_device)
    for e in range(4):
        lru_update(ids(e), layer.state, layer.tables)
        gather_records_from_host(ids(e), None, layer.tables, layer.state, layer.host, 4)
        check(layer, e, list(range(150)), of_selector=False)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65])
def test_sizes_off_the_block_and_one_neuron(num_rows: int, ids: Ids, kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=3, num_rows=num_rows, num_active=1).to(kernel_device)
    for e in range(3):
        lru_update(ids(e), layer.state, layer.tables)
        gather_selectors_from_host(ids(e), layer.tables, layer.state, layer.host, 4)
        gather_records_from_host(ids(e), None, layer.tables, layer.state, layer.host, 4)
        check(layer, e, list(range(num_rows)), of_selector=False)
        check(layer, e, list(range(num_rows)), of_selector=True)


def test_rows_longer_than_a_tile_come_whole(ids: Ids, kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=2, num_rows=5, num_cols=16384, num_active=1, page_bytes=32768).to(kernel_device)
    assert layer.layouts[0].records.row_bytes > 8192 or layer.layouts[1].records.row_bytes > 8192
    for e in range(2):
        lru_update(ids(e), layer.state, layer.tables)
        gather_records_from_host(ids(e), None, layer.tables, layer.state, layer.host, 4)
        check(layer, e, list(range(5)), of_selector=False)


def test_an_empty_selection_brings_nothing(ids: Ids, kernel_device: torch.device) -> None:
    layer = small_layer().to(kernel_device)
    before = layer.tables.record_at.clone()
    lru_update(ids(0), layer.state, layer.tables)
    gather_records_from_host(
        ids(0), Selection.allocate(1, 150, kernel_device), layer.tables, layer.state, layer.host, 4
    )
    assert torch.equal(layer.tables.record_at, before)
