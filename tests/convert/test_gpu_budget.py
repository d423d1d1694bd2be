"""A GPU's memory, divided: every published model, every target; FloE's figures; the knapsack against brute force."""

import re

import numpy as np
import pytest
from cases import case
from published import PUBLISHED

from moe_pack.convert.plan.machines import GPUS, find_gpu, machine_of_gpu
from moe_pack.convert.plan.speed import estimate_on_gpu, fastest_gpu_plan
from moe_pack.formats import BF16, ModelSpec, PackLayout, RunError, dense_roles, part_format
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.layout import pack_layout
from moe_pack.runtime.offload import GPU_PAGE_BYTES, GpuMemoryPlan
from moe_pack.runtime.offload.budget import best_gpu_plan, expert_compression

GIB = 1 << 30
CONTEXT = 4096


def layout(spec: ModelSpec, selector_width: int = 2, record_width: int = 16) -> PackLayout:
    parts = [BF16 if width == 16 else part_format(width, 64) for width in (selector_width, record_width)]
    return pack_layout(spec, plan_of(spec, "up", *parts), ["BF16"] * len(dense_roles(spec)))


def heat_of(made: PackLayout, num_slices: int = 4) -> np.ndarray:
    """A tenth of the neurons run, the hottest quarter most of them."""
    shape = (len(made.experts), len(made.experts[0]), num_slices)
    return np.broadcast_to(np.array([0.25, 0.1, 0.04, 0.01])[:num_slices], shape)


def popularity_of(made: PackLayout) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.ones(len(made.experts[0])), len(made.experts))


def divided(made: PackLayout, target: int, context: int, page_share: float = 0.25) -> GpuMemoryPlan:
    return best_gpu_plan(made, target, context, 8 << 20, popularity_of(made), heat_of(made), page_share)


NAMES = [model.name for model in PUBLISHED if not model.name.startswith("switch")]  # a GPU runs no encoder
FEW = ["mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b"]


@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_parts_come_to_no_more_than_the_target_from_just_enough_to_all(names: list[str]) -> None:
    for name in names:
        with case(name):
            spec = model_spec(name)
            made, context = layout(spec, 4, 4), min(CONTEXT, spec.max_position_embeddings)
            with pytest.raises(RunError) as raised:
                divided(made, GIB >> 4, context)
            found = re.match(r"--target-vram: 64.0 MiB .* model needs at least ([\d.]+) (\w+): ", str(raised.value))
            assert found is not None, raised.value
            least = int((float(found[1]) + 0.1) * (GIB if found[2] == "GiB" else 1 << 20))
            experts = sum(expert.num_bytes for layer in made.experts for expert in layer)
            most = divided(made, least + experts + 4 * GIB, context)
            assert (most.pages, most.selectors + most.hot_rows) == (0, experts), "all are there"
            for target in np.linspace(least, most.spent, 30).astype(np.int64).tolist():
                plan = divided(made, target, context)
                assert plan.spent <= target
                assert plan.pages == 0 or plan.pages >= made.experts[0][0].num_bytes


def test_the_least_that_is_named_is_enough_and_less_is_not() -> None:
    made = layout(model_spec("olmoe-1b-7b"))
    plan = divided(made, 8 * GIB, CONTEXT)
    fixed = plan.spent - plan.selectors - plan.hot_rows - plan.pages
    largest = -(-made.experts[0][0].num_bytes // GPU_PAGE_BYTES) * GPU_PAGE_BYTES
    short = divided(made, fixed, CONTEXT)  # prompts go in shorter passes then
    least = short.spent - short.selectors - short.hot_rows - short.pages + largest
    assert divided(made, least, CONTEXT).pages == largest
    with pytest.raises(RunError, match=r"^--target-vram: .* shorten the context with --context$"):
        divided(
            made,
            least - 1 - (short.fixed.workspace - divided(made, least, CONTEXT).fixed.workspace) - (64 << 20),
            CONTEXT,
        )


def test_floe_fits_mixtral_into_eleven_gibibytes_with_all_selectors_there() -> None:
    """INT2 `up` resident, 16-bit records, a tenth of which run; experts alike in popularity."""
    made = layout(model_spec("mixtral-8x7b"))
    plan = best_gpu_plan(made, 11 * GIB, CONTEXT, 8 << 20, np.ones((32, 8)), heat_of(made), 0.25)
    assert plan.spent <= 11 * GIB
    assert (plan.selector_share == 1).all() and plan.selectors == 256 * 14336 * 1296
    assert plan.hot_rows > 0 and plan.pages > 0


def test_floes_compression_is_as_the_paper_says_without_metadata_and_less_with_it() -> None:
    """By hand at 90%: 6 d bytes a neuron in 16 bit; codes d / 4 + 0.1 * 4 d; rows of 1,296 and 0.1 * 16,400 bytes."""
    expert = layout(model_spec("mixtral-8x7b")).experts[0][0]
    found = expert_compression(expert, 0.9)
    assert found.codes == pytest.approx(6 / 0.65) and f"{found.codes:.1f}" == "9.2"
    assert found.stored == pytest.approx(6 * 4096 / (1296 + 1640)) and f"{found.stored:.1f}" == "8.4"


def test_what_is_held_is_what_a_greedy_choice_of_single_rows_holds() -> None:
    """Brute force over all rows, most probable per byte first; the same bytes but for what a slice leaves."""
    made = layout(model_spec("granite-3.0-1b-a400m", 1))
    popularity, heat = popularity_of(made), heat_of(made)
    whole = divided(made, 1 * GIB, 16)  # forward passes cannot be made shorter
    plan = divided(made, whole.spent - (whole.selectors + whole.hot_rows) // 3, 16, 0.0)
    assert plan.hot_rows > 0 and plan.pages > 0
    chance = popularity / popularity.sum(axis=1, keepdims=True)
    rows = [
        (
            chance[0, e] * (1.0 if i < 0 else heat[0, e, i]),
            expert.selector.row_bytes if i < 0 else expert.records.row_bytes,
        )
        for e, expert in enumerate(made.experts[0])
        if expert.selector
        for i in range(-1, 4)
        for _ in range(expert.num_rows if i < 0 else expert.num_rows // 4)
    ]
    rows.sort(key=lambda row: -row[0])
    room, best = plan.selectors + plan.hot_rows, 0.0
    for worth, num_bytes in rows:
        if room >= num_bytes:
            room -= num_bytes
            best += worth * num_bytes
    expert = made.experts[0][0]
    held = (chance[0] * plan.selector_share[0]).sum() * expert.selector_bytes
    held += (chance[0][:, None] * heat[0] * plan.row_shares[0]).sum() * expert.records_bytes / 4
    assert held == pytest.approx(best, rel=1e-3)


@pytest.mark.slow
def test_more_memory_pulls_no_more_and_all_of_it_nothing() -> None:
    made = layout(model_spec("olmoe-1b-7b", 2))
    machine = machine_of_gpu(find_gpu("RTX 3090"), None, None)
    popularity, heat = popularity_of(made), heat_of(made)
    found = [
        fastest_gpu_plan(made, target * GIB // 8, CONTEXT, 0, machine, popularity, heat)[1] for target in (9, 10, 80)
    ]
    rates = [one.tokens_per_second for one in found]
    assert rates == sorted(rates) and found[0].fetched_bytes > found[1].fetched_bytes > 0
    assert (found[-1].fetched_bytes, found[-1].seconds.waiting) == (0, 0)


@pytest.mark.slow
def test_what_memory_cannot_hold_costs_the_drive() -> None:
    """A pack twice as long as memory, a disk of 1 GB/s and a link of 16: half of each byte by each."""
    made = layout(model_spec("olmoe-1b-7b", 2))
    total = sum(expert.num_bytes for layer in made.experts for expert in layer)
    popularity, heat = popularity_of(made), heat_of(made)
    plan = divided(made, GIB * 5 // 4, CONTEXT, 1.0)
    waiting = [
        estimate_on_gpu(made, plan, machine_of_gpu(find_gpu("L4"), 16e9, ram_bytes), popularity, heat).seconds.waiting
        for ram_bytes in (None, total, total // 2)
    ]
    assert waiting[0] == waiting[1] > 0
    assert waiting[2] / waiting[0] == pytest.approx(0.5 + 0.5 * 16, rel=0.2)  # what is hidden differs a little


def test_without_a_selector_every_row_is_pulled_and_computed() -> None:
    spec, part = model_spec("olmoe-1b-7b", 2), part_format(4, 64)
    made = pack_layout(spec, plan_of(spec, "none", part, part), ["BF16"] * len(dense_roles(spec)))
    machine, popularity, heat = machine_of_gpu(find_gpu("L4"), None, None), popularity_of(made), heat_of(made)
    plan = divided(made, GIB * 5 // 4, CONTEXT, 1.0)
    few, all_rows = (estimate_on_gpu(made, plan, machine, popularity, given) for given in (heat, np.ones_like(heat)))
    assert few.fetched_bytes == all_rows.fetched_bytes > 0
    assert few.seconds == all_rows.seconds


def test_a_card_is_found_however_it_is_spelled() -> None:
    for name in ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090"]:
        with case(name):
            assert find_gpu(name) == GPUS["RTX 4090"]


def test_a_card_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(
        RunError, match=r"^--gpu: 'Voodoo 2' is not known; give one of RTX 3060 12G, .*, or measure for this"
    ):
        find_gpu("Voodoo 2")


def test_a_link_is_what_the_slot_gives_unless_it_is_said() -> None:
    gpu = GPUS["RTX 4060 Ti 16G"]
    assert gpu.link_rate == pytest.approx(15.75e9, rel=0.01)  # PCIe 4.0 x8
    assert machine_of_gpu(gpu, 10e9, None).link_rate == 10e9
    assert machine_of_gpu(gpu, None, None).link_rate == pytest.approx(12.6e9, rel=0.01)
