"""Every engine's division of memory, to the byte, for two models."""

from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import case
from support.specs import GROUPED

from moe_pack.formats import BF16, PackLayout, RunError, dense_roles, part_format
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.gpu.fit import GpuCosts, divide_gpu, gpu_needs, least_gpu_budget
from moe_pack.runtime.gpu.placements import Misses, least_placement, offset_bytes_for, place_experts, usual_heat
from moe_pack.runtime.model.caches import KvDtype
from moe_pack.runtime.model.kv_cache import KVCache
from moe_pack.runtime.offload import divide_budget, least_budget
from moe_pack.runtime.offload.budgets import FixedParts, MemoryNeeds, divide

MIB, GIB = 1 << 20, 1 << 30


def layout_of(name: str) -> PackLayout:
    """Mixtral as FloE stores it, and a model of a few kilobytes at 4 bits."""
    spec = model_spec(name) if name == "mixtral-8x7b" else GROUPED
    parts = (part_format(2, 64), BF16) if name == "mixtral-8x7b" else (part_format(4, 64),) * 2
    return pack_layout(spec, plan_of(spec, "up", *parts), ["BF16"] * len(dense_roles(spec)))


def cpu(made: PackLayout, budget: int) -> tuple[int, ...]:
    plan = divide_budget(made, budget, 4096, 8 * MIB)
    sizes = (plan.page_bytes, plan.head_bytes, plan.num_pages)
    return (plan.fixed.dense, plan.fixed.cache, plan.fixed.workspace, *sizes, plan.chunk_tokens, plan.left)


def planned_gpu(made: PackLayout, budget: int) -> tuple[int, ...]:
    division = divide_gpu(gpu_needs(made, 4096), budget, 4096)
    return (division.experts, division.chunk_tokens)


def gpu(made: PackLayout, num_bytes: int, misses: Misses) -> tuple[int, ...]:
    heat = usual_heat(made, np.ones((len(made.experts), len(made.experts[0]))))
    found = place_experts(made, num_bytes, misses, heat=heat, offset_bytes=offset_bytes_for(made, num_bytes))
    return (int(found.static_bytes.sum()), found.dynamic_bytes, found.scratch_bytes, found.other_bytes)


GPU = {misses: partial(gpu, misses=misses) for misses in ("pull", "split", "disk")}
# By model, engine and budget, or what experts have of it: what the functions above return.
EXPECTED: dict[tuple[str, str, int], tuple[int, ...]] = {
    ("mixtral-8x7b", "cpu", 6_442_450_944): (3211294080, 1073741824, 217993216, 1048576, 20480, 1806, 512, 318080),
    ("mixtral-8x7b", "cpu", 12_884_901_888): (3211294080, 1073741824, 217993216, 1048576, 20480, 7832, 512, 637568),
    ("mixtral-8x7b", "cpu", 42_949_672_960): (3211294080, 1073741824, 217993216, 1048576, 20480, 35955, 512, 346752),
    ("mixtral-8x7b", "cpu", 68_719_476_736): (3211294080, 1073741824, 217993216, 1048576, 20480, 60060, 512, 555648),
    ("mixtral-8x7b", "planned gpu", 6_442_450_944): (1751444096, 864),
    ("mixtral-8x7b", "planned gpu", 11_811_160_064): (6904257920, 2048),
    ("mixtral-8x7b", "planned gpu", 42_949_672_960): (38042770816, 2048),
    ("mixtral-8x7b", "planned gpu", 85_899_345_920): (80992443776, 2048),
    ("small", "cpu", 13_434_240): (242304, 47616, 4743424, 8192, 4096, 1, 16, 0),
    ("small", "cpu", 13_454_240): (242304, 47616, 4743424, 8192, 4096, 2, 16, 7712),
    ("small", "cpu", 15_021_568): (242304, 47616, 4743424, 8192, 4096, 12, 16, 1452160),
    ("small", "cpu", 16_608_896): (242304, 47616, 4743424, 8192, 4096, 12, 16, 3039488),
    ("small", "planned gpu", 505_032_864): (4273568, 16),
    ("small", "planned gpu", 505_082_864): (4323568, 16),
    ("small", "planned gpu", 513_421_472): (12662176, 16),
    ("mixtral-8x7b", "pull", 3_221_225_472): (2675441664, 507379712, 507379712, 29431808),
    ("mixtral-8x7b", "pull", 8_589_934_592): (8053085184, 507379712, 470220800, 29431808),
    ("mixtral-8x7b", "pull", 42_949_672_960): (40743352832, 2147483648, 470220800, 58791936),
    ("mixtral-8x7b", "pull", 85_899_345_920): (64944603136, 0, 0, 58791936),
    ("mixtral-8x7b", "split", 3_221_225_472): (2935554048, 253689856, 0, 29431808),
    ("mixtral-8x7b", "split", 8_589_934_592): (8130968832, 429496704, 0, 29431808),
    ("mixtral-8x7b", "split", 42_949_672_960): (40743352832, 2147483648, 0, 58791936),
    ("mixtral-8x7b", "split", 85_899_345_920): (64944603136, 0, 0, 58791936),
    ("mixtral-8x7b", "disk", 3_221_225_472): (2790588416, 253689856, 0, 29431808),
    ("mixtral-8x7b", "disk", 8_589_934_592): (8118075392, 429496704, 0, 29431808),
    ("mixtral-8x7b", "disk", 42_949_672_960): (40590376960, 2147483648, 0, 58791936),
    ("mixtral-8x7b", "disk", 85_899_345_920): (64944603136, 0, 0, 58791936),
    ("small", "pull", 40_000): (16128, 12288, 12288, 8992),
    ("small", "pull", 54_528): (32512, 12288, 7680, 8992),
    ("small", "pull", 82_719): (60800, 12288, 7680, 8992),
    ("small", "pull", 82_720): (73728, 0, 0, 8992),
    ("small", "split", 40_000): (23040, 6144, 0, 8992),
    ("small", "split", 54_528): (38400, 6144, 0, 8992),
    ("small", "split", 82_719): (66048, 6144, 0, 8992),
    ("small", "split", 82_720): (73728, 0, 0, 8992),
    ("small", "disk", 40_000): (18432, 6144, 0, 8992),
    ("small", "disk", 54_528): (36864, 6144, 0, 8992),
    ("small", "disk", 82_719): (61440, 6144, 0, 8992),
    ("small", "disk", 82_720): (73728, 0, 0, 8992),
}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "small"])
def test_every_division_comes_to_the_same_bytes_and_pages_as_ever(name: str) -> None:
    made, engines = layout_of(name), {"cpu": cpu, "planned gpu": planned_gpu, **GPU}
    for (model, engine, budget), expected in EXPECTED.items():
        if model == name:
            assert engines[engine](made, budget) == expected, (model, engine, budget)


def test_the_least_that_is_named_is_divided_and_a_byte_less_is_not() -> None:
    made = layout_of("small")
    engines: list[tuple[Any, int]] = [
        (cpu, least_budget(made, 4096, 8 * MIB)),
        (planned_gpu, least_gpu_budget(made, 4096)),
    ]
    engines += [(GPU[misses], least_placement(made, misses).num_bytes) for misses in GPU]
    for engine, budget in engines:
        engine(made, budget)
        with pytest.raises(RunError, match="at least"):
            engine(made, budget - 1)


@given(st.integers(0, 4000), st.integers(1, 600), st.integers(0, 900), st.integers(1, 9))
def test_passes_are_made_shorter_until_experts_have_enough(budget: int, chunk: int, largest: int, share: int) -> None:
    needs = MemoryNeeds(lambda tokens: FixedParts(300, cache=2 * tokens), chunk, min(chunk, 16), largest, 800, share)
    found = divide(budget, needs)
    assert found.experts + found.fixed.num_bytes == budget
    assert min(chunk, 16) <= found.chunk_tokens <= chunk
    enough = max(largest, budget // share)
    assert found.experts >= enough or found.chunk_tokens == needs.shortest_chunk
    if found.chunk_tokens < chunk:
        assert budget - 300 - 2 * min(chunk, 2 * found.chunk_tokens + 1) < enough, "no shorter than it must be"
    assert divide(needs.least_budget, needs).experts >= 0


def test_a_gpu_counts_the_bytes_that_its_cache_has() -> None:
    made = layout_of("tiny")
    for dtype in get_args(KvDtype):
        with case(dtype):
            fixed = gpu_needs(made, 300, GpuCosts(dtype)).fixed(16)
            cache = KVCache(made.spec, 300, torch.device("cpu"), dtype=dtype, chunk_tokens=16)
            assert fixed.cache == cache.num_bytes
            plain = gpu_needs(made, 300, GpuCosts("bf16")).fixed(16)
            assert (fixed.workspace > plain.workspace) == (dtype in ("q8", "q4")), "torch dequantizes codes"


def test_records_that_several_tokens_use_take_dynamic_memory_alone() -> None:
    made = layout_of("mixtral-8x7b")
    for num_bytes in (8_589_934_592, 42_949_672_960):
        for misses in get_args(Misses):
            with case((num_bytes, misses)):
                one, several = (place_experts(made, num_bytes, misses, num_rows=number) for number in (1, 8))
                kept = several.kept_bytes
                assert one.kept_bytes == 0 and (kept > 0) == (misses == "pull")
                assert several.num_bytes == one.num_bytes and several.scratch_bytes == one.scratch_bytes + kept
                assert kept <= (one.dynamic_bytes - one.scratch_bytes) / 2
                # A token pulls no more.
                assert kept <= several.num_rows * several.num_active * several.slot_bytes.max()
                assert several.scratch_bytes <= several.dynamic_bytes
