"""A GPU's memory, divided for a plan: every published model; FloE's figures; the knapsack against brute force; GPUs."""

import re

import numpy as np
import pytest
from support.cases import case
from support.published import PUBLISHED, spec_of

from moe_pack.convert.plan.machines import GPUS, find_gpu, machine_of_gpu
from moe_pack.formats import BF16, ModelSpec, PackLayout, RunError, dense_roles, part_format
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime.engine.options import cpu_only
from moe_pack.runtime.gpu.fit import divide_gpu, gpu_needs, least_gpu_budget
from moe_pack.runtime.gpu.placements import GpuPlacement, place_experts
from moe_pack.runtime.offload.budgets import Division, expert_compression, resident_rows

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


def divided(made: PackLayout, target: int, context: int) -> tuple[Division, GpuPlacement]:
    """The division of a target, and the placement in what it leaves for experts."""
    division = divide_gpu(gpu_needs(made, context), target, context)
    return division, place_experts(made, division.experts, "split", popularity_of(made), heat_of(made))


NAMES = [model.name for model in PUBLISHED if cpu_only(spec_of(model)) is None]  # that a GPU runs
FEW = ["mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b"]


@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_parts_come_to_no_more_than_the_target_from_just_enough_to_all(names: list[str]) -> None:
    for name in names:
        with case(name):
            spec = model_spec(name)
            made, context = layout(spec, 4, 4), min(CONTEXT, spec.max_position_embeddings)
            least = least_gpu_budget(made, context)
            with pytest.raises(RunError) as raised:
                divided(made, GIB >> 4, context)
            found = re.match(r"budget: 64.0 MiB .* model needs at least ([\d.]+) (\w+): ", str(raised.value))
            assert found is not None, raised.value
            assert float(found[1]) * (GIB if found[2] == "GiB" else 1 << 20) == pytest.approx(least, rel=0.05)
            expert, experts = made.experts[0][0], sum(each.num_bytes for layer in made.experts for each in layer)
            most, whole = divided(made, least + experts + 4 * GIB, context)
            assert whole.is_whole and whole.num_bytes >= experts
            num_targets = 30 if names is FEW else 12  # of many models fewer
            targets = np.linspace(least, most.fixed.num_bytes + whole.num_bytes, num_targets)
            for target in targets.astype(np.int64).tolist():
                division, placed = divided(made, target, context)
                assert division.budget == target == division.fixed.num_bytes + division.experts
                assert placed.num_bytes <= division.experts
                assert placed.is_whole or placed.dynamic_bytes >= expert.selector_bytes + expert.records_bytes


def test_the_least_that_is_named_is_enough_and_less_is_not() -> None:
    made = layout(model_spec("olmoe-1b-7b"))
    least = least_gpu_budget(made, CONTEXT)
    division, placed = divided(made, least, CONTEXT)
    assert placed.num_bytes == division.experts and not placed.first_dynamic.any()
    with pytest.raises(RunError, match=r"^budget: .* raise it, give dense weights fewer bits$"):
        divided(made, least - 1, CONTEXT)


def test_floe_fits_mixtral_into_eleven_gibibytes_with_all_selectors_there() -> None:
    """INT2 `up` resident, 16-bit records, a tenth of which run; experts alike in popularity."""
    made = layout(model_spec("mixtral-8x7b"))
    division = divide_gpu(gpu_needs(made, CONTEXT), 11 * GIB, CONTEXT)
    placed = place_experts(made, division.experts, "split", None, heat_of(made))
    assert placed.has_selector.all()
    assert 256 * 14336 * 1296 < placed.static_bytes.sum() < division.experts


def test_floes_compression_is_as_the_paper_says_without_metadata_and_less_with_it() -> None:
    """By hand at 90%: 6 d bytes a neuron in 16 bit; codes d / 4 + 0.1 * 4 d; rows of 1,296 and 0.1 * 16,400 bytes."""
    expert = layout(model_spec("mixtral-8x7b")).experts[0][0]
    codes, stored = expert_compression(expert, 0.9)
    assert codes == pytest.approx(6 / 0.65) and f"{codes:.1f}" == "9.2"
    assert stored == pytest.approx(6 * 4096 / (1296 + 1640)) and f"{stored:.1f}" == "8.4"


def test_the_rows_that_stay_are_those_of_a_greedy_choice_of_single_rows() -> None:
    """Brute force over all rows, most probable per byte first; the same bytes but for what a slice leaves."""
    made = layout(model_spec("granite-3.0-1b-a400m", 1))
    popularity, heat = popularity_of(made), heat_of(made)
    num_bytes = sum(expert.num_bytes for expert in made.experts[0]) // 3
    resident = resident_rows(made, popularity, heat, num_bytes)
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
    left, best = num_bytes, 0.0
    for worth, row_bytes in rows:
        if left >= row_bytes:
            left -= row_bytes
            best += worth * row_bytes
    expert = made.experts[0][0]
    found = (chance[0] * resident.selector_share[0]).sum() * expert.selector_bytes
    found += (chance[0][:, None] * heat[0] * resident.row_shares[0]).sum() * expert.records_bytes / 4
    assert found == pytest.approx(best, rel=1e-3)


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
