"""The GPU's memory for experts on the CPU: to the byte, and every row as in the pack, wherever it lies."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.synthetic import made, plan_for, small

from moe_pack.formats import BF16, Pack, PackLayout, Plan, RunError, Selector, dense_roles, part_format, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.gpu.devices import HostArena, Queues
from moe_pack.runtime.gpu.placements import (
    GpuPlacement,
    Misses,
    least_placement,
    offset_bytes_for,
    place_experts,
    usual_heat,
)
from moe_pack.runtime.gpu.prefill import ExpertStream
from moe_pack.runtime.gpu.weights import ExpertMemory
from moe_pack.runtime.offload import ExpertKey

CPU = torch.device("cpu")
NUM_ROWS, NUM_LAYERS, NUM_EXPERTS = 96, 2, 6
MISSES: tuple[Misses, ...] = ("split", "pull", "disk")


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
    spec = small(NUM_LAYERS, NUM_EXPERTS, 64, NUM_ROWS)
    selector: Selector = request.param
    folder = made(spec, tmp_path_factory.mktemp("gpu-memory") / "packed", plan=mixed(plan_for(spec, selector)))
    with Pack(folder) as pack, HostArena(pack, CPU) as host:
        yield pack, host


def placements(pack: Pack, misses: Misses) -> list[GpuPlacement]:
    """Placements from the least memory to enough for everything."""
    least, whole = least_placement(pack.layout, misses).num_bytes, place_experts(pack.layout, 1 << 40, misses).num_bytes
    found = []
    for num_bytes in np.linspace(least, whole, 12).astype(int).tolist():
        found.append(place_experts(pack.layout, num_bytes, misses))
        assert found[-1].num_bytes <= num_bytes
    return found


def check_row(pack: Pack, memory: ExpertMemory, key: ExpertKey, neuron: int, place: int, of_selector: bool) -> None:
    layout = pack.layout.experts[key.layer_idx][key.expert]
    rows = layout.selector if of_selector else layout.records
    assert rows is not None and place >= 0
    begin = (0 if of_selector else layout.selector_bytes) + neuron * rows.row_bytes
    expected = pack.read_extent(*key)[begin : begin + rows.row_bytes]
    arena = memory.layers[key.layer_idx].arena
    assert np.array_equal(arena[16 * place : 16 * place + rows.row_bytes].numpy(), expected)


@pytest.mark.parametrize("misses", MISSES)
def test_static_rows_are_the_packs_in_every_budget(misses: Misses, opened: tuple[Pack, HostArena]) -> None:
    pack, host = opened
    for placement in placements(pack, misses):
        with closing(ExpertMemory(pack, placement, None if misses == "disk" else host, CPU)) as memory:
            assert memory.num_bytes == placement.num_bytes
            for l, tables in enumerate(memory.layers):
                for e in range(NUM_EXPERTS):
                    there = torch.nonzero(tables.record_at[e] >= 0)[:, 0].tolist()
                    assert there == list(range(int(placement.first_dynamic[l, e])))
                    for neuron in there[:1] + there[-1:]:
                        check_row(pack, memory, ExpertKey(l, e), neuron, int(tables.record_at[e, neuron]), False)
                    if tables.selector_at is not None:
                        has_selector = bool(placement.has_selector[l, e])
                        assert bool((tables.selector_at[e] >= 0).all()) == has_selector
                        if has_selector:
                            check_row(pack, memory, ExpertKey(l, e), 95, int(tables.selector_at[e, 95]), True)


def test_static_rows_scratch_memory_and_records_ahead_do_not_overlap(opened: tuple[Pack, HostArena]) -> None:
    pack, host = opened
    for misses in MISSES:
        for placement in placements(pack, misses):
            assert placement.kept_bytes <= placement.scratch_bytes
            assert placement.scratch_bytes + placement.ahead_bytes <= placement.dynamic_bytes
            with closing(ExpertMemory(pack, placement, host, CPU)) as memory:
                lacks = (placement.first_dynamic < NUM_ROWS).any(axis=1) & (misses != "disk")
                for l in np.flatnonzero(lacks):
                    landing = memory.landing[l]
                    scratch_bytes = 16 * placement.num_active * landing.num_scratch * landing.slot_units
                    assert landing.scratch_at == memory.dynamic_at and scratch_bytes <= placement.scratch_bytes
                if not placement.is_whole:
                    assert int(memory.record_at.max()) < memory.dynamic_at


def test_experts_without_their_selector_have_no_records(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    for placement in placements(pack, "split"):
        assert not placement.first_dynamic[~placement.has_selector].any()


def test_whole_experts_are_static_where_the_disk_has_the_others(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    for placement in placements(pack, "disk"):
        is_static = placement.first_dynamic == NUM_ROWS
        assert (is_static | (placement.first_dynamic == 0)).all()


def test_what_is_chosen_most_is_static_first(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    popularity = np.ones((NUM_LAYERS, NUM_EXPERTS))
    popularity[:, 3] = 5000
    whole = place_experts(pack.layout, 1 << 40, "split").num_bytes
    for misses in MISSES:
        placement = place_experts(pack.layout, int(0.75 * whole), misses, popularity)
        assert (placement.first_dynamic[:, 3] == NUM_ROWS).all() and placement.has_selector[:, 3].all()


def test_of_layers_that_the_gpu_cannot_read_nothing_is_pulled(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    whole = place_experts(pack.layout, 1 << 40, "split").num_bytes
    has_link = np.array([True, False])
    found = place_experts(pack.layout, int(0.6 * whole), "split", has_link=has_link, is_pulled=True, num_predicted=2)
    assert found.num_scratch[0] and found.num_ahead[0] and not found.num_scratch[1] and not found.num_ahead[1]


def test_too_little_memory_is_refused_with_what_is_needed(opened: tuple[Pack, HostArena]) -> None:
    pack, _ = opened
    for misses in MISSES:
        least = least_placement(pack.layout, misses).num_bytes
        with pytest.raises(
            RunError, match=r"^GPU memory: .* are left for experts, which need at least .*, or a shorter context$"
        ):
            place_experts(pack.layout, least - 1, misses)


def mixtral(selector_bits: int = 2) -> PackLayout:
    """Mixtral with records of two and four bits by turns."""
    spec = model_spec("mixtral-8x7b")
    plan = uniform_plan(spec, "up", part_format(selector_bits, 64), part_format(4, 64), part_format(4, 64))
    return pack_layout(spec, mixed(plan), ["BF16"] * len(dense_roles(spec)))


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("misses", ["split", "pull"])
def test_more_memory_never_has_fewer_rows(misses: Misses, is_sparse: bool) -> None:
    """Pages of two whole experts a layer once crowded out hot rows at 13 GiB; whole layers fit from some size on."""
    layout = mixtral()
    heat = usual_heat(layout, np.full((32, 8), float(is_sparse)))
    least = least_placement(layout, misses).num_bytes
    found = []
    for num_bytes in np.linspace(least, place_experts(layout, 1 << 40, misses).num_bytes, 30).astype(int).tolist():
        placement = place_experts(layout, num_bytes, misses, heat=heat)
        assert placement.num_bytes <= num_bytes
        found.append(int(placement.first_dynamic.sum()))
    assert found[-1] == 32 * 8 * 14336
    assert all(more >= 0.999 * less for less, more in pairwise(found)), found


def test_offsets_reach_all_of_the_memory() -> None:
    spec = model_spec("mixtral-8x7b")
    layout = pack_layout(spec, uniform_plan(spec, "up", BF16, BF16), ["BF16"] * len(dense_roles(spec)))
    reach = 16 * (2**31 - 1)
    assert [offset_bytes_for(layout, most) for most in (11 << 30, reach, reach + 1, 1 << 40)] == [4, 4, 8, 8]
    near, far = (place_experts(layout, 64 << 30, "split", offset_bytes=offset_bytes) for offset_bytes in (4, 8))
    num_neurons = 14336 * layout.spec.router.num_experts * len(layout.experts)
    assert far.other_bytes - near.other_bytes == 4 * 2 * num_neurons
    assert 63 << 30 < far.num_bytes <= 64 << 30


def test_experts_stream_through_the_ring_as_they_are_in_the_pack(opened: tuple[Pack, HostArena]) -> None:
    pack, host = opened
    keys = [ExpertKey(l, e) for l in range(NUM_LAYERS) for e in range(NUM_EXPERTS)]
    for placement in placements(pack, "split")[:-1]:
        queues = Queues(CPU)
        with closing(ExpertMemory(pack, placement, host, CPU)) as memory:
            stream = ExpertStream(pack, memory, host, queues)
            stream.begin_pass()
            waiting = [key for key in keys if not stream.is_static(key)]
            while waiting:
                number = stream.request(waiting)
                coming, waiting = waiting[:number], waiting[number:]
                assert coming, "the largest expert has space"
                for key in coming:
                    entry = stream.find(key)
                    assert entry is not None
                    layout = pack.layout.experts[key.layer_idx][key.expert]
                    selector, record = stream.rows_at(entry)
                    for neuron in (int(placement.first_dynamic[key]), NUM_ROWS - 1):
                        check_row(pack, memory, key, neuron, record + neuron * layout.records.row_bytes // 16, False)
                    if not placement.has_selector[key] and layout.selector is not None:
                        check_row(pack, memory, key, 3, selector + 3 * layout.selector.row_bytes // 16, True)
                stream.release(coming, queues.mark())
