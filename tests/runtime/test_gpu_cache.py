"""The graph engine's expert cache on the CPU: its memory to the byte, and every row as in the pack."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpu_cache_layers import CPU, random_selection
from synthetic import made, plan_for, small

from moe_pack.formats import BF16, Pack, Plan, RunError, Selector, dense_roles, part_format, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.layout import pack_layout
from moe_pack.runtime.gpu.device import HostArena
from moe_pack.runtime.gpu.placement import page_bytes_for, place_experts, usual_heat
from moe_pack.runtime.gpu.weights import GpuCacheLayer, GpuExpertCache

NUM_ROWS = 96


def mixed(plan: Plan) -> Plan:
    """Every third expert's gate and down in 2 bits."""
    two = part_format(2, 64)
    layers = tuple(
        tuple(replace(expert, gate=two, down=two) if e % 3 == 0 else expert for e, expert in enumerate(layer))
        for layer in plan.experts
    )
    return replace(plan, experts=layers)


@pytest.fixture(scope="module", params=["up", "none"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pack, HostArena]]:
    """Two layers of six experts; `none` stores all parts of an expert alike."""
    spec = small(2, 6, 64, NUM_ROWS)
    selector: Selector = request.param
    folder = made(spec, tmp_path_factory.mktemp("gpu-cache") / "packed", plan=mixed(plan_for(spec, selector)))
    with Pack(folder) as pack, HostArena(pack, CPU) as host:
        yield pack, host


def whole(pack: Pack) -> int:
    """Room for everything."""
    return place_experts(pack.layout, 1 << 40).num_bytes


def least(pack: Pack) -> int:
    """The least room that is enough."""
    low, high = 0, whole(pack)
    while low < high:
        middle = (low + high) // 2
        try:
            place_experts(pack.layout, middle)
            high = middle
        except RunError:
            low = middle + 1
    return low


def check_row(pack: Pack, layer: GpuCacheLayer, l: int, e: int, neuron: int, of_selector: bool) -> None:
    layout = pack.layout.experts[l][e]
    at = layer.tables.selector_at if of_selector else layer.tables.record_at
    rows = layout.selector if of_selector else layout.records
    assert at is not None and rows is not None
    place = 16 * int(at[e, neuron])
    assert place >= 0
    begin = (0 if of_selector else layout.selector_bytes) + neuron * rows.row_bytes
    expected = pack.read_extent(l, e)[begin : begin + rows.row_bytes]
    assert np.array_equal(layer.tables.arena[place : place + rows.row_bytes].numpy(), expected)


def test_where_all_fits_all_is_there_and_nothing_is_pulled(opened: tuple[Pack, HostArena]) -> None:
    pack, host = opened
    cache = GpuExpertCache(pack, place_experts(pack.layout, whole(pack)), host, CPU)
    for l, layer in enumerate(cache.layers):
        assert not (layer.has_dynamic_selectors or layer.has_dynamic_records)
        layer.lru_update(torch.tensor([1, 4], dtype=torch.int32))
        for e in range(6):
            for neuron in (0, 1, NUM_ROWS - 1):
                check_row(pack, layer, l, e, neuron, False)
    assert cache.counters.tolist() == [[2, 2, 0, 0]] * 2


@pytest.mark.parametrize("part", [0.0, 0.2, 0.7, 0.95])
def test_rows_that_a_token_needs_are_the_packs_in_every_budget(opened: tuple[Pack, HostArena], part: float) -> None:
    pack, host = opened
    room = int(least(pack) + part * (whole(pack) - least(pack)))
    placement = place_experts(pack.layout, room)
    cache = GpuExpertCache(pack, placement, host, CPU)
    assert cache.num_bytes <= room
    assert part not in (0.0, 0.95) or placement.is_shared == (part == 0.0)
    draw = np.random.default_rng(0)
    for step in range(2):
        for l, layer in enumerate(cache.layers):
            experts = torch.tensor(draw.permutation(6)[:2].astype(np.int32))
            selection = random_selection(2, NUM_ROWS, 0.3, step)
            layer.lru_update(experts)
            layer.gather_selectors_from_host(experts, 2)
            layer.gather_records_from_host(experts, None if pack.manifest.selector == "none" else selection, 2)
            for place, e in enumerate(experts.tolist()):
                if pack.manifest.selector != "none":
                    check_row(pack, layer, l, e, step, True)
                for neuron in selection.neurons[place, : int(selection.counts[place, 0])].tolist():
                    check_row(pack, layer, l, e, neuron, False)


def test_rows_whose_places_are_entered_at_the_start_are_the_packs(opened: tuple[Pack, HostArena]) -> None:
    pack, host = opened
    placement = place_experts(pack.layout, int(0.75 * whole(pack)))
    cache = GpuExpertCache(pack, placement, host, CPU)
    assert placement.first_dynamic.any() and (placement.first_dynamic < NUM_ROWS).any()
    for l, layer in enumerate(cache.layers):
        for e in range(6):
            there = torch.nonzero(layer.tables.record_at[e] >= 0)[:, 0].tolist()
            assert there == list(range(int(placement.first_dynamic[l, e])))
            for neuron in there[:1] + there[-1:]:
                check_row(pack, layer, l, e, neuron, False)


def test_more_room_never_holds_less_and_never_more_than_there_is(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    rooms = np.linspace(least(pack), whole(pack), 40).astype(np.int64).tolist()
    for room in rooms:
        placement = place_experts(pack.layout, room)
        assert placement.num_bytes <= room
        assert (np.sort(placement.num_pages_of, axis=1)[:, -2:].sum(axis=1) <= placement.num_pages).all()
        assert placement.is_shared or (placement.num_pages <= placement.num_pages_of.sum(axis=1)).all()


def test_a_room_too_small_for_one_token_says_what_is_needed(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    with pytest.raises(
        RunError, match=r"^--engine graph: .* left for experts, which need at least .* or use --engine staged$"
    ):
        place_experts(pack.layout, least(pack) - 1)


def test_what_is_chosen_most_is_held_first(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    popularity = np.ones((2, 6))
    popularity[:, 3] = 5000
    placement = place_experts(pack.layout, int(0.75 * whole(pack)), popularity)
    assert (placement.first_dynamic[:, 3] == NUM_ROWS).all()
    assert not placement.selector_is_dynamic[:, 3].any()


@pytest.mark.parametrize("rows", [(0, 16), (1296, 16400), (16, 4096), (5136, 4112)])
def test_a_page_holds_a_row_and_wastes_little(rows: tuple[int, int]) -> None:
    page_bytes = page_bytes_for(np.array([rows]), 14336)
    assert max(rows) <= page_bytes <= 256 << 10 and page_bytes % 4096 == 0
    taken = sum(-(-14336 // (page_bytes // size)) * page_bytes for size in rows if size)
    assert taken <= 1.05 * sum(rows) * 14336


@pytest.mark.parametrize("page_share", [0.0, 0.25, 1.0])
def test_pages_take_their_share_and_what_a_token_needs(opened: tuple[Pack, HostArena], page_share: float) -> None:
    pack, _ = opened
    placement = place_experts(pack.layout, int(0.95 * whole(pack)), page_share=page_share)
    assert not placement.is_shared
    if page_share == 1.0:
        assert not placement.first_dynamic.any(), "nothing is always there"


def test_floes_sixteen_bit_records_fit_beside_all_selectors_of_mixtral() -> None:
    """Two experts' records are 449 MiB, a layer; with pages of each layer's own they would be 14 GiB."""
    spec = model_spec("mixtral-8x7b")
    plan = uniform_plan(spec, "up", part_format(2, 64), BF16)
    layout = pack_layout(spec, plan, ["BF16"] * len(dense_roles(spec)))
    placement = place_experts(layout, 8 << 30, heat=usual_heat(layout, np.ones((32, 8))))
    assert placement.is_shared and placement.num_bytes <= 8 << 30
    assert not placement.selector_is_dynamic.any()
    assert np.ptp(placement.first_dynamic) <= 14336 // 64, "what nobody has counted is held of all alike"


def test_an_arena_is_no_longer_than_offsets_reach() -> None:
    spec = model_spec("mixtral-8x7b")
    layout = pack_layout(spec, uniform_plan(spec, "up", BF16, BF16), ["BF16"] * len(dense_roles(spec)))
    placement = place_experts(layout, 33 << 30, heat=usual_heat(layout, np.ones((32, 8))))
    assert placement.is_shared and placement.num_bytes <= 32 << 30


@pytest.mark.parametrize("is_sparse", [True, False])
def test_more_gpu_memory_never_means_more_bytes_over_the_link(is_sparse: bool) -> None:
    """Experts of two and four bits by turns; at 13 GiB pages of two whole experts a layer once crowded out hot rows."""
    spec = model_spec("mixtral-8x7b")
    two, four = part_format(2, 64), part_format(4, 64)
    plan = uniform_plan(spec, "up", two, four, four)
    layout = pack_layout(spec, mixed(plan), ["BF16"] * len(dense_roles(spec)))
    popularity, heat = np.ones((32, 8)), usual_heat(layout, np.full((32, 8), float(is_sparse)))
    whole_bytes, taken = place_experts(layout, 1 << 40).num_bytes, []
    for room in np.linspace(4 << 30, whole_bytes, 30):
        taken.append(place_experts(layout, int(room), popularity, heat).link_bytes(layout, popularity, heat))
    assert taken[-1] == 0
    assert all(more <= less * 1.001 for less, more in pairwise(taken)), [f"{each / 1e9:.3f}" for each in taken]
