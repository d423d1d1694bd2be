"""The speed of a pack on a GPU and the division of its memory: by hand, and for every published model."""

import re
from dataclasses import replace

import numpy as np
import pytest
from support.cases import case
from support.profiles import SMALLEST, profiled, random_tokens
from support.published import PUBLISHED, spec_of
from support.synthetic import plan_for, small
from support.tiers import steady_disk

from moe_pack.calib.forward import HOT_SPARSITIES, KINDS
from moe_pack.calib.profile import Profile
from moe_pack.convert.plan.gpu_speed import NUM_SLICES, GpuTier, RowHeat, estimate_on_gpu, running_rows
from moe_pack.convert.plan.machines import GPUS, Machine, assumed_host, find_gpu, machine_of_gpu
from moe_pack.convert.plan.speed import RoutingFacts, SpeedEstimate, disk_seconds, drawn_passes, expert_seconds
from moe_pack.formats import BF16, ModelSpec, PackLayout, RunError, Selector, dense_roles, part_format
from moe_pack.formats import uniform_plan as plan_of
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import pack_layout
from moe_pack.runtime import FixedCosts, WidthRate
from moe_pack.runtime.engine.options import cpu_only
from moe_pack.runtime.gpu.fit import divide_gpu, gpu_needs, least_gpu_budget
from moe_pack.runtime.gpu.placements import GpuPlacement, Misses, place_experts
from moe_pack.runtime.offload import Passes
from moe_pack.runtime.offload.budgets import Division, expert_compression, resident_rows

SPEC = model_spec("olmoe-1b-7b", 3)
MIB = 1 << 20
SHAPE = (3, 64)
LINK = 16e9
POPULARITY = np.random.default_rng(0).dirichlet(np.full(64, 0.5), 3) * 8


def layout(selector: Selector = "up") -> PackLayout:
    part = part_format(4, 64)
    return pack_layout(SPEC, plan_of(SPEC, selector, part, part), ["BF16"] * len(dense_roles(SPEC)))


def tier(
    budget_bytes: int,
    ram_bytes: int | None = None,
    gpu: str = "RTX 3090",
    host_rate: float | None = None,
    link: float = LINK,
) -> GpuTier:
    host = assumed_host()
    if host_rate is not None:
        host = replace(host, expert_rates=(WidthRate(4, host_rate),))
    traffic = RoutingFacts(POPULARITY, drawn_passes(POPULARITY, 8, 100), None, MIB)
    return GpuTier(machine_of_gpu(GPUS[gpu], link, ram_bytes, host), traffic, RowHeat(None), budget_bytes, 256)


# --- by hand: a layer of three experts with 64 neurons, of which half run


def tiny() -> PackLayout:
    spec = small(num_layers=1, num_experts=3)
    return pack_layout(spec, plan_for(spec), ["BF16"] * len(dense_roles(spec)))


def slow_machine(ram_bytes: int | None = None) -> Machine:
    """A GPU of 1,000 bytes a second, its host of 100, its link of 50; 7 s a token, 2 a layer, 3 a call of the CPU."""
    rates, host_rates, disk = (WidthRate(4, 1000.0),), (WidthRate(4, 100.0),), steady_disk(10.0)
    free = FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0)
    host = Machine("cpu", "a host", host_rates, host_rates, 0.0, 100.0, free, disk)
    fixed = FixedCosts(7.0, 2.0, 0.0, 3.0, 0.0)
    return Machine("cuda", "a GPU", rates, rates, 0.0, 1000.0, fixed, disk, 50.0, ram_bytes, host=host)


def placement(misses: Misses = "split", num_first: int = 32) -> GpuPlacement:
    """The first expert has 32 static rows and the second not even its selector; the third is resident.

    Of each of a token's experts 6 records can be pulled.
    """
    first_dynamic, zeros = np.array([[num_first, 0, 64]]), np.zeros(1, np.int64)
    return GpuPlacement(
        misses, np.array([[True, False, True]]), first_dynamic, zeros, slot_bytes=zeros,
        num_scratch=zeros + 6 * (misses == "split"), num_ahead=zeros, scratch_bytes=0, ahead_bytes=0, dynamic_bytes=1,
        other_bytes=0, offset_bytes=4, num_rows=64, num_active=2, num_predicted=0,
    )  # fmt: skip


def estimated(placed: GpuPlacement, machine: Machine, *routes: tuple[int, int]) -> SpeedEstimate:
    passes = Passes(np.array(routes, "<u2")[:, None], np.ones(len(routes), np.uint32), None, np.ones((1, 3)))
    return estimate_on_gpu(tiny(), placed, machine, np.ones((1, 3)), np.full((1, 3, 4), 0.5), passes)


def test_a_layer_takes_the_longest_of_gpu_cpu_and_link_by_hand() -> None:
    """Half of the first expert's 32 missing records run. A third of those comes over the link, 50 / (50 + 100); if the
    CPU has the second expert as a whole, more: the 6 for which there is memory.
    """
    expert = tiny().experts[0][0]
    assert expert.selector is not None
    selector, row = expert.selector_bytes, expert.records.row_bytes
    pulled = {(0, 1): 6, (0, 2): 16 / 3}  # of the first expert
    left = {routes: (16 - number) * row / 100 for routes, number in pulled.items()}
    gpu = {(0, 1): 16 * row / 1000, (0, 2): (16 + 32) * row / 1000}
    cpu = {(0, 1): 3 + left[0, 1] + (selector + 32 * row) / 100, (0, 2): 3 + left[0, 2]}
    link = {routes: number * (row / 50 + row / 1000) for routes, number in pulled.items()}
    for routes in ([(0, 1)], [(0, 2)], [(0, 1), (0, 2)]):
        with case(routes):
            found = estimated(placement(), slow_machine(), *routes)
            waits = [max(cpu[each], link[each]) - gpu[each] for each in routes]
            assert min(waits) > 0, "so that all three count"
            selected = {(0, 1): selector / 1000, (0, 2): 2 * selector / 1000}
            assert found.seconds.fixed == 9
            assert found.seconds.experts == pytest.approx(np.mean([gpu[each] + selected[each] for each in routes]))
            assert found.seconds.waiting == pytest.approx(np.mean(waits))
    missing, needed = 16 * row + selector + 32 * row, 2 * (selector + 32 * row)
    found = estimated(placement(), slow_machine(), (0, 1))
    assert found.fetched_bytes == pytest.approx(missing)
    assert found.hit_rate == pytest.approx(1 - missing / needed)
    expected = [2 / 3 * 16 * row / (selector + 32 * row), 2 / 3, 0]  # each expert is chosen by two of three tokens
    np.testing.assert_allclose(found.misses, [expected], atol=1e-12)


def test_the_link_is_the_longest_by_the_products_of_what_it_brings() -> None:
    """Without a call's time, the CPU ends when the last record comes. A seventh of 32 is pulled, 100 / 6 of 700 / 6."""
    machine = replace(slow_machine(), link_rate=100 / 6, fixed=FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    placed, row = placement(num_first=0), tiny().experts[0][0].records.row_bytes
    np.testing.assert_allclose(running_rows(placed, np.full((1, 3, 4), 0.5)), [[[0, 0, 32]], [[32, 32, 0]]])
    found = estimated(placed, machine, (0, 2))
    link = 32 / 7 * (row / (100 / 6) + row / 1000)
    assert found.seconds.waiting == pytest.approx(link - 32 * row / 1000)


def test_no_more_is_pulled_than_there_is_memory_for() -> None:
    machine = replace(slow_machine(), link_rate=1e9, expert_rates=(WidthRate(4, 1e6),))
    row = tiny().experts[0][0].records.row_bytes
    found = estimated(placement(), machine, (0, 2))  # the link would bring 16 of 16
    assert found.seconds.waiting == pytest.approx(3 + 10 * row / 100 - 48 * row / 1e6)


def test_of_a_pack_larger_than_host_memory_the_cpu_reads_the_rest_by_hand() -> None:
    """The second expert is the only one that is not on the GPU; host memory has half of it."""
    expert, machine = tiny().experts[0][0], slow_machine(tiny().experts[0][0].num_bytes // 2)
    assert machine.host is not None
    found = estimated(placement("disk", num_first=64), machine, (0, 1))
    cpu = 3 + expert_seconds(expert, 0.5, machine.host)[0] + 0.5 * disk_seconds(expert, 0.5, machine.disk)
    assert found.seconds.waiting == pytest.approx(cpu - 32 * expert.records.row_bytes / 1000)
    found = estimated(placement("disk", num_first=64), replace(machine, ram_bytes=None), (0, 1))
    assert found.seconds.waiting == pytest.approx(
        3 + expert_seconds(expert, 0.5, machine.host)[0] - 32 * expert.records.row_bytes / 1000
    )


# --- of a model with 64 experts a layer


def test_more_memory_and_faster_parts_are_never_slower() -> None:
    """On a GPU that is much faster than its host: otherwise the CPU may help even where all fits."""
    made, sparsity = layout(), np.full(SHAPE, 0.5)
    least = tier(1).least_bytes(made)
    budgets = np.linspace(least, tier(1).least_bytes(made) + 800 * MIB, 9).astype(int).tolist()
    found = [
        [tier(budget, ram, host_rate=20e9).estimate(made, sparsity) for budget in budgets] for ram in (None, 64 * MIB)
    ]
    for ram, by_budget in zip(("all", "little"), found, strict=True):
        with case(ram):
            seconds, missing = zip(*((each.seconds.total, each.fetched_bytes) for each in by_budget), strict=True)
            assert list(seconds) == sorted(seconds, reverse=True) and seconds[0] > 1.2 * seconds[-1]
            assert list(missing) == sorted(missing, reverse=True) and missing[0] > missing[-1] == 0
            assert by_budget[-1].misses.sum() == 0 and by_budget[-1].hit_rate == 1
    for budget in (least, budgets[4]):
        usual = tier(budget).estimate(made, sparsity).seconds.total
        for name, other in (
            ("host", tier(budget, host_rate=120e9)),
            ("link", tier(budget, link=2 * LINK)),
            ("GPU", tier(budget, gpu="H200")),
        ):
            with case(budget, name):
                seconds = other.estimate(made, sparsity).seconds.total
                # In the least memory are no selectors, so that the link brings nothing.
                assert seconds == usual if (budget, name) == (least, "link") else seconds < usual
        with case(budget, "less host memory"):
            assert tier(budget, 64 * MIB).estimate(made, sparsity).seconds.total > usual


def test_the_link_makes_no_token_slower_than_the_cpu_alone() -> None:
    made, heat = layout(), np.full((*SHAPE, 4), 0.5)
    whole = place_experts(made, 1 << 40, "split").num_bytes
    for share in (0.3, 0.6, 0.9):
        placed = place_experts(made, int(share * whole), "split", POPULARITY, heat, is_pulled=True)
        for gpu in ("RTX 3060 12G", "H200"):
            with case(share, gpu):
                auto, alone = (
                    estimate_on_gpu(made, placed, machine_of_gpu(GPUS[gpu], link, None), POPULARITY, heat)
                    for link in (LINK, 1.0)
                )
                assert auto.seconds.total <= alone.seconds.total
                assert share == 0.9 or auto.seconds.total < alone.seconds.total, "nearly all is resident"
                assert auto.fetched_bytes == alone.fetched_bytes


def test_without_a_selector_all_rows_run() -> None:
    made = layout("none")
    placed = place_experts(made, 100 * MIB, "split", POPULARITY)
    machine = machine_of_gpu(GPUS["L4"], LINK, None)
    few, all_rows = (
        estimate_on_gpu(made, placed, machine, POPULARITY, np.full((*SHAPE, 4), share)) for share in (0.1, 1.0)
    )
    assert few.seconds == all_rows.seconds and few.fetched_bytes == all_rows.fetched_bytes > 0


def test_the_least_runs_and_a_byte_less_does_not() -> None:
    made = layout()
    for ram_bytes in (None, MIB):
        least = tier(1, ram_bytes).least_bytes(made)
        shares = tier(least, ram_bytes).estimate(made, np.full(SHAPE, 0.5)).shares
        assert sum(share.num_bytes for share in shares) == least
        assert min(share.num_bytes for share in shares) >= 0
        with pytest.raises(RunError, match=r"^budget: .* the model needs at least "):
            tier(least - 1, ram_bytes).estimate(made, np.full(SHAPE, 0.5))


def test_an_expert_that_is_missing_costs_what_the_cpu_takes() -> None:
    for selector in ["up", "gate", "both", "none"]:
        with case(selector):
            expert = layout(selector).experts[0][0]
            running = 1.0 if selector == "none" else 0.25
            by_hand = (expert.selector_bytes + running * expert.records_bytes) / 60e9
            assert tier(MIB).fetch_seconds(expert, 0.75) == pytest.approx(by_hand)


def test_what_host_memory_cannot_hold_is_read_from_the_disk_too() -> None:
    """All of it computed at 60 GB/s, half of it read at the disk's 1 GB/s."""
    expert = layout("none").experts[0][0]
    half = expert.num_bytes * 3 * 64 // 2
    assert tier(MIB, half).fetch_seconds(expert, 0) == pytest.approx(expert.num_bytes * (1 / 60e9 + 0.5 / 1e9))


GIB = 1 << 30
CONTEXT = 4096


def layout_of(spec: ModelSpec, selector_width: int = 2, record_width: int = 16) -> PackLayout:
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
            made, context = layout_of(spec, 4, 4), min(CONTEXT, spec.max_position_embeddings)
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


def test_floe_fits_mixtral_into_eleven_gibibytes_with_all_selectors_there() -> None:
    """INT2 `up` resident, 16-bit records, a tenth of which run; experts alike in popularity."""
    made = layout_of(model_spec("mixtral-8x7b"))
    division = divide_gpu(gpu_needs(made, CONTEXT), 11 * GIB, CONTEXT)
    placed = place_experts(made, division.experts, "split", None, heat_of(made))
    assert placed.has_selector.all()
    assert 256 * 14336 * 1296 < placed.static_bytes.sum() < division.experts


def test_floes_compression_is_as_the_paper_says_without_metadata_and_less_with_it() -> None:
    """By hand at 90%: 6 d bytes a neuron in 16 bit; codes d / 4 + 0.1 * 4 d; rows of 1,296 and 0.1 * 16,400 bytes."""
    expert = layout_of(model_spec("mixtral-8x7b")).experts[0][0]
    codes, stored = expert_compression(expert, 0.9)
    assert codes == pytest.approx(6 / 0.65) and f"{codes:.1f}" == "9.2"
    assert stored == pytest.approx(6 * 4096 / (1296 + 1640)) and f"{stored:.1f}" == "8.4"


def test_the_rows_that_stay_are_those_of_a_greedy_choice_of_single_rows() -> None:
    """Brute force over all rows, most probable per byte first; the same bytes but for what a slice leaves."""
    made = layout_of(model_spec("granite-3.0-1b-a400m", 1))
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


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile of two layers of three experts of 16 neurons."""
    source = SMALLEST.write(tmp_path_factory.mktemp("source"))
    return profiled(source, tmp_path_factory.mktemp("heats") / "profile", random_tokens(4, 32, 32))


def test_at_a_level_that_was_counted_slices_are_the_counted_shares_hottest_first(profile: Profile) -> None:
    for kind_idx, kind in enumerate(KINDS):
        for sparsity in HOT_SPARSITIES:
            found = RowHeat(profile).at(kind, np.full((2, 3), sparsity))
            for layer_idx in range(2):
                counted = -np.sort(-profile.statistics(layer_idx).hot_share(kind_idx, sparsity), axis=1)
                assert found.shape == (2, 3, NUM_SLICES) == (2, *counted.shape)  # a neuron a slice
                scale = (1 - sparsity) / counted.mean(axis=1, keepdims=True)
                np.testing.assert_allclose(found[layer_idx], np.minimum(counted * scale, 1), atol=1e-6)


def test_between_levels_each_expert_lies_between_them_and_runs_as_much_as_asked(profile: Profile) -> None:
    heats, sparsity = RowHeat(profile), np.array([[0.0, 0.6, 0.75], [0.85, 0.5, 0.9]])
    found = heats.at("up", sparsity)
    assert (np.diff(found, axis=2) <= 1e-9).all() and (found[0, 0] == 1).all()
    lost = (found == 1).any(axis=2)  # of slices that run always the rest is cut off
    np.testing.assert_allclose(found.mean(axis=2)[~lost], 1 - sparsity[~lost], atol=1e-9)


def test_without_a_selector_every_row_is_read(profile: Profile) -> None:
    for heats in (RowHeat(profile), RowHeat(None)):
        assert (heats.at("none", np.full((2, 3), 0.9)) == 1).all()


def test_without_a_profile_all_rows_run_as_often() -> None:
    sparsity = np.array([[0.0, 0.5]])
    assert RowHeat(None).at("gate", sparsity).tolist() == [[[1.0], [0.5]]]
