"""Budgets of several GPUs: how they are read, what is refused, and where they cut the layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.cases import case
from support.models import TinyMixtral, pack

from moe_pack import load
from moe_pack.formats import Pack, RunError
from moe_pack.formats.base.commands import read_sizes
from moe_pack.formats.pack.slices import PackSlice
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cli.main import main as moe_run
from moe_pack.runtime.engine import machine, stages
from moe_pack.runtime.engine.engine import choose_device
from moe_pack.runtime.engine.machine import GpuHere, gpu_fault
from moe_pack.runtime.gpu import fit

GIB = 1 << 30
CONTEXT, NUM_LAYERS = 64, 8
COSTS = fit.GpuCosts("f32", overhead_bytes=1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budgets")
    shape = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096)
    pack(shape.write_with_tokenizer(folder / "m"), folder / "packed")
    return folder / "packed"


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose layers are large next to its embedding and head."""
    folder = tmp_path_factory.mktemp("layered")
    pack(TinyMixtral(num_layers=NUM_LAYERS, num_experts=8).write(folder / "m"), folder / "packed")
    return folder / "packed"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[GpuHere]], None]:
    """Puts GPUs into this machine."""

    def put(gpus: Sequence[GpuHere]) -> None:
        monkeypatch.setattr(machine, "gpu_here", lambda number=0: gpus[number] if number < len(gpus) else None)
        monkeypatch.setattr(machine, "num_gpus", lambda: len(gpus))

    return put


def test_sizes_of_several_gpus_are_read() -> None:
    assert read_sizes("11G") == 11 * GIB
    assert read_sizes("11G,24G, 512M") == (11 * GIB, 24 * GIB, GIB // 2)
    for text in ("11G,", ",", "11G;24G", "11G,0"):
        with case(text), pytest.raises(ValueError, match=r"expected a size such as 11G, 1.5G or 512M"):
            read_sizes(text)


def test_one_budget_stays_a_number() -> None:
    assert EngineOptions(budget_bytes=GIB).gpu_budgets == () and EngineOptions().whole_budget is None
    several = EngineOptions(budget_bytes=(GIB, 2 * GIB))
    assert several.gpu_budgets == (GIB, 2 * GIB) and several.whole_budget == 3 * GIB


def test_several_budgets_are_refused_on_the_cpu(folder: Path) -> None:
    message = "--budget gives 2 budgets, and --device cpu has one memory; give one budget"
    found = CliRunner().invoke(moe_run, [str(folder), "--prompt", "a", "--budget", "1G,1G", "--device", "cpu"])
    assert found.exit_code == 1 and message in found.output
    with pytest.raises(RunError, match=message):
        load(folder, "1G,1G", options=EngineOptions(device="cpu"))


def test_the_gpus_have_to_be_there(folder: Path, here: Callable[[Sequence[GpuHere]], None]) -> None:
    large, small = GpuHere("NVIDIA H200", 139 * GIB), GpuHere("NVIDIA L4", 22 * GIB)
    old = GpuHere("Tesla T4", 15 * GIB, gpu_fault("Tesla T4", (7, 5)))
    for gpus, budgets, why in (
        ((large,), (GIB, GIB), "--budget has 2 sizes, and the number of GPUs found is 1"),
        ((large, small), (GIB, 24 * GIB), "--budget is 24.0 GiB, NVIDIA L4 has 22.0 GiB"),
        ((large, old), (GIB, GIB), str(old.fault)),
    ):
        with case(why), Pack(folder) as opened:
            here(gpus)
            with pytest.raises(RunError) as refused:
                Engine(opened, EngineOptions(device="cuda", budget_bytes=budgets), CONTEXT)
            assert str(refused.value) == f"{why}; give a budget for each GPU that is to run, at most its memory"
            with pytest.raises(RunError) as refused:
                choose_device(opened, EngineOptions(budget_bytes=budgets), CONTEXT)
            name = "--budget with several sizes"
            assert str(refused.value) == f"{name} needs a GPU, and --device auto is the CPU here ({why}); remove it"


def test_auto_takes_gpus_that_have_the_budgets(folder: Path, here: Callable[[Sequence[GpuHere]], None]) -> None:
    here([GpuHere("NVIDIA H200", 139 * GIB), GpuHere("NVIDIA L4", 22 * GIB)])
    with Pack(folder) as opened:
        found, _ = choose_device(opened, EngineOptions(budget_bytes=(24 * GIB, 11 * GIB)), CONTEXT)
    assert found.device == "cuda"


# ---- the division of layers -----------------------------------------------------------------------------------------


def shares(opened: Pack, given: Sequence[int], ends: Sequence[int]) -> list[float]:
    """The share of each stage's experts that its budget has space for, as the estimate of a smaller model says."""
    found = []
    for budget, (first, last) in zip(given, pairwise((0, *ends)), strict=True):
        needs = fit.gpu_needs(PackSlice(opened, first, last).layout, CONTEXT, COSTS)
        left = budget - needs.fixed(needs.shortest_chunk).num_bytes
        found.append(min(1.0, left / needs.all_experts))
    return found


def budgets_for(opened: Pack, *expert_shares: float) -> list[int]:
    """Budgets with space for these shares of all experts, and all else of a whole model."""
    needs = fit.gpu_needs(opened.layout, CONTEXT, COSTS)
    fixed = needs.fixed(needs.shortest_chunk).num_bytes
    return [fixed + int(share * needs.all_experts) for share in expert_shares]


def divided(opened: Pack, given: Sequence[int], rates: Sequence[float] = ()) -> tuple[int, ...]:
    return stages.divide_layers(opened.layout, given, CONTEXT, COSTS, rates or [1.0] * len(given))


def test_each_gpu_gets_the_same_share_of_its_experts(layered: Path) -> None:
    with Pack(layered) as opened:
        for wanted in ((0.3, 0.3), (0.15, 0.45), (0.5, 0.1), (0.2, 0.2, 0.2), (0.1, 0.3, 0.2)):
            with case(wanted):
                given = budgets_for(opened, *wanted)
                found = divided(opened, given)
                least = min(shares(opened, given, found))
                others = [
                    ends
                    for ends in ((*inner, NUM_LAYERS) for inner in inner_ends(len(given)))
                    if min(shares(opened, given, ends)) > least + 0.02
                ]
                assert found[-1] == NUM_LAYERS and others == []


def inner_ends(number: int) -> list[tuple[int, ...]]:
    if number == 2:
        return [(end,) for end in range(1, NUM_LAYERS)]
    return [(a, b) for a in range(1, NUM_LAYERS) for b in range(a + 1, NUM_LAYERS)]


def test_where_all_fits_layers_are_divided_by_the_rates_of_memory(layered: Path) -> None:
    with Pack(layered) as opened:
        given = budgets_for(opened, 2.0, 2.0)
        equal, fast_first = divided(opened, given), divided(opened, given, [3.0, 1.0])
        assert equal[0] == NUM_LAYERS // 2
        assert fast_first[0] > equal[0]
        assert divided(opened, given, [1.0, 3.0])[0] < equal[0]


def test_what_drafts_counts_for_the_last_layers(layered: Path) -> None:
    with Pack(layered) as opened:
        given = budgets_for(opened, 0.4, 0.4)
        alone = divided(opened, given)
        needs = fit.gpu_needs(opened.layout, CONTEXT, COSTS)
        drafts = replace(COSTS, sequences=replace(COSTS.sequences, draft_bytes=needs.all_experts // 5))
        assert stages.divide_layers(opened.layout, given, CONTEXT, drafts, [1.0, 1.0])[0] > alone[0]


def test_budgets_that_cannot_have_layers_are_refused(layered: Path) -> None:
    with Pack(layered) as opened:
        small = budgets_for(opened, 1.0)[0]
        with pytest.raises(RunError, match=r"^--budget: one of .* 1.0 MiB is too small for a layer: a GPU needs some "):
            divided(opened, [small, 1 << 20])
        with pytest.raises(
            RunError, match=r"^--budget has 9 sizes, and this model can be divided between 8 GPUs at mo"
        ):
            divided(opened, [small] * 9)


def test_rates_of_memory_count_where_all_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {0: (2619, 6144), 1: (9001, 192)}

    class Properties:
        def __init__(self, device: torch.device) -> None:
            self.memory_clock_rate, self.memory_bus_width = known[device.index]

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert stages.memory_rates(gpus) == [2619 * 6144, 9001 * 192]
    known[1] = (0, 192)
    assert stages.memory_rates(gpus) == [1.0, 1.0]
