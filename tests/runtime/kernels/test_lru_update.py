"""Who has pages of a layer: against its twin, and against a model of the least recently used in plain Python."""

import numpy as np
import pytest
import torch
from gpu_cache_layers import CPU, SmallLayer, small_layer
from kernel_twins import lru_update_plain

from moe_pack.runtime.gpu.kernels.cache import HITS, NEEDED, lru_update


def drawn(layer: SmallLayer, seed: int, num_steps: int = 12) -> list[torch.Tensor]:
    """Experts of some steps: as many as a step may have, or fewer."""
    draw = np.random.default_rng(seed)
    E, k = len(layer.layouts), layer.state.num_active
    steps = (draw.permutation(E)[: draw.integers(1, k + 1)].astype(np.int32) for _ in range(num_steps))
    return [torch.tensor(experts, device=layer.tables.arena.device) for experts in steps]


def who_is_in(layer: SmallLayer) -> set[int]:
    """Experts that have pages."""
    has_pages = (layer.state.is_in == 1) & (layer.state.num_pages_of > 0)
    return set(torch.nonzero(has_pages)[:, 0].tolist())


def fill(layer: SmallLayer) -> None:
    """Enters every row of who is in, as if all had been pulled."""
    for at in (layer.tables.selector_at, layer.tables.record_at):
        if at is not None:
            rows = at[layer.state.is_in == 1]
            at[layer.state.is_in == 1] = torch.where(rows < 0, 7, rows)


def same(left: SmallLayer, right: SmallLayer) -> None:
    left = left.to(CPU)
    for name in ("last_used", "is_in", "num_free", "clock", "counters"):
        assert torch.equal(getattr(left.state, name), getattr(right.state, name)), name
    num_free = int(left.state.num_free)
    assert torch.equal(left.state.free[:num_free], right.state.free[:num_free])
    for e in torch.nonzero(left.state.is_in)[:, 0].tolist():
        count = int(left.state.num_pages_of[e])
        assert torch.equal(left.state.page_list[e, :count], right.state.page_list[e, :count])
    assert torch.equal(left.tables.record_at, right.tables.record_at)
    if left.tables.selector_at is not None:
        assert right.tables.selector_at is not None
        assert torch.equal(left.tables.selector_at, right.tables.selector_at)


@pytest.mark.parametrize("has_selector", [True, False])
@pytest.mark.parametrize("more_pages", [0, 5])
@pytest.mark.parametrize("seed", range(2))
def test_steps_do_what_the_twin_does(
    has_selector: bool, more_pages: int, seed: int, kernel_device: torch.device
) -> None:
    twin = small_layer(num_experts=7, more_pages=more_pages, has_selector=has_selector, num_active=3, seed=seed)
    layer = twin.copy().to(kernel_device)
    for experts in drawn(layer, seed):
        lru_update(experts, layer.state, layer.tables)
        lru_update_plain(experts.cpu(), twin.state, twin.tables)
        same(layer, twin)
        fill(layer)
        fill(twin)


@pytest.mark.parametrize("seed", range(3))
def test_the_least_recently_used_goes_and_the_lowest_among_equals(seed: int, kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=8, num_active=2, more_pages=4, seed=seed).to(kernel_device)
    pages = layer.state.num_pages_of.tolist()
    free, used, step = len(layer.state.free), {}, 0
    hits = needed = 0
    for experts in drawn(layer, seed):
        lru_update(experts, layer.state, layer.tables)
        step += 1
        chosen = experts.tolist()
        used |= {e: step for e in chosen if e in used}
        for e in chosen:
            needed += 1
            if e in used or pages[e] == 0:
                hits += 1
                continue
            while free < pages[e]:
                victim = min((e for e in used if used[e] < step), key=lambda e: (used[e], e))
                del used[victim]
                free += pages[victim]
            free -= pages[e]
            used[e] = step
        assert (who_is_in(layer), int(layer.state.num_free)) == ({e for e in used if pages[e]}, free)
    assert layer.state.counters[[NEEDED, HITS]].tolist() == [needed, hits]


def test_no_page_is_two_experts_at_once(kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=8, num_active=3, seed=1).to(kernel_device)
    for experts in drawn(layer, 1):
        lru_update(experts, layer.state, layer.tables)
        held = [
            page
            for e in torch.nonzero(layer.state.is_in)[:, 0].tolist()
            for page in layer.state.page_list[e, : int(layer.state.num_pages_of[e])].tolist()
        ]
        free = layer.state.free[: int(layer.state.num_free)].tolist()
        assert sorted(held + free) == list(range(len(layer.state.free)))


def test_who_loses_its_pages_keeps_what_is_always_there(kernel_device: torch.device) -> None:
    layer = small_layer(num_experts=8, num_active=2, more_pages=0, seed=2).to(kernel_device)
    before = layer.tables.record_at.clone()
    for experts in drawn(layer, 2):
        lru_update(experts, layer.state, layer.tables)
        fill(layer)
    out = layer.state.is_in == 0
    assert out.any()
    assert torch.equal(layer.tables.record_at[out], before[out])


@pytest.mark.parametrize("has_selector", [True, False])
def test_with_pages_that_other_layers_use_nothing_is_left_of_the_step_before(
    has_selector: bool, kernel_device: torch.device
) -> None:
    twin = small_layer(num_experts=7, num_active=3, more_pages=0, has_selector=has_selector, keeps=False)
    layer = twin.copy().to(kernel_device)
    before = layer.tables.record_at.clone()
    for experts in drawn(layer, 3):
        lru_update(experts, layer.state, layer.tables)
        lru_update_plain(experts.cpu(), twin.state, twin.tables)
        same(layer, twin)
        assert torch.equal(layer.tables.record_at, before)
        assert who_is_in(layer) == {e for e in experts.tolist() if layer.state.num_pages_of[e]}
        fill(layer)
        fill(twin)


def test_more_experts_than_the_pages_hold_are_refused() -> None:
    layer = small_layer(num_active=2)
    with pytest.raises(AssertionError, match=r"^no more experts fit"):
        lru_update(torch.arange(3, dtype=torch.int32), layer.state, layer.tables)
