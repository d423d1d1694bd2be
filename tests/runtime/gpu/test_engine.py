"""The GPU's budget, kept next to a double of the driver that adds up allocations; refused GPUs and options."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from moe_pack.formats import Pack, RunError
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.gpu.fit import GpuRequest
from moe_pack.runtime.gpu.token.engine import fit_to_gpu
from moe_pack.runtime.model import Decoder, PackWeights

CPU = torch.device("cpu")
CONTEXT_BYTES, WORKING_BYTES, LEAST_BYTES, ROUNDING = 300 << 20, 50 << 20, 10 << 20, 4 << 20


@dataclass
class Driver:
    """A double of the driver, which charges for its context, for forward passes after the first, and for experts."""

    total: int = 2 << 30
    charged: int = CONTEXT_BYTES
    rooms: list[int] = field(default_factory=list)

    def used_bytes(self) -> int:
        return self.charged

    def free_bytes(self) -> int:
        return self.total - self.charged


class Work:
    """An engine that takes just the room for experts that it is given, and charges for its first forward pass."""

    def __init__(self, pack: Pack, driver: Driver, room: int) -> None:
        self.weights = PackWeights(pack, CPU)
        self.decoder = Decoder(self.weights, 64)
        self.expert_bytes, self.dynamic_bytes, self.pass_bytes = room, 0, 0
        self._driver = driver
        driver.charged += room + WORKING_BYTES
        driver.rooms.append(room)

    def run_rows(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def tune(self) -> None:
        pass

    def close(self) -> None:
        self._driver.charged -= self.expert_bytes + WORKING_BYTES


def fitted(folder: Path, driver: Driver, budget: int | None) -> int:
    """The room that experts get."""
    with Pack(folder) as pack:
        asked = GpuRequest(budget, 64, None, "f32")
        built, use = fit_to_gpu(
            pack, CPU, driver, asked, LEAST_BYTES, lambda expert_bytes, chunk: Work(pack, driver, expert_bytes)
        )
        assert use.spent + ROUNDING == use.budget, "what is not spent is what the driver may round up"
        assert use.experts == built.expert_bytes
    return built.expert_bytes


def test_experts_get_what_the_budget_leaves_beside_what_was_measured(tiny_pack: Path) -> None:
    driver, budget = Driver(), 1 << 30
    room = fitted(tiny_pack, driver, budget)
    assert room == budget - CONTEXT_BYTES - WORKING_BYTES - ROUNDING
    assert driver.charged <= budget
    assert driver.rooms == [LEAST_BYTES, room], "measuring takes the least room"


@pytest.mark.slow
def test_what_an_earlier_engine_left_is_given_back_before_anything_is_measured(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [200 << 20]  # what torch keeps of an engine that was closed
    driver = Driver(charged=CONTEXT_BYTES + kept[0])

    def empty_cache() -> None:
        driver.charged -= kept[0]
        kept[0] = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert fitted(tiny_pack, driver, 1 << 30) == (1 << 30) - CONTEXT_BYTES - WORKING_BYTES - ROUNDING


@pytest.mark.parametrize(("total", "left"), [(2 << 30, 256 << 20), (80 << 30, int(0.03 * (80 << 30)))])
def test_without_a_budget_something_is_left_to_a_display_and_to_others(total: int, left: int, tiny_pack: Path) -> None:
    driver = Driver(total)
    fitted(tiny_pack, driver, None)
    assert driver.total - driver.charged - left in range(2 * ROUNDING)


def test_a_budget_that_leaves_experts_too_little_is_refused_with_what_is_needed(tiny_pack: Path) -> None:
    budget = CONTEXT_BYTES + (55 << 20)
    with pytest.raises(RunError) as fault, Pack(tiny_pack) as pack:
        driver, asked = Driver(), GpuRequest(budget, 64, None, "f32")
        fit_to_gpu(pack, CPU, driver, asked, LEAST_BYTES, lambda room, chunk: Work(pack, driver, room))
    assert str(fault.value).startswith("budget: 355.0 MiB is too little; at least ")
    assert driver.charged == CONTEXT_BYTES, "the measured engine is closed"


@pytest.mark.parametrize(
    ("options", "name"),
    [(EngineOptions("cpu", misses="pull"), "--misses"), (EngineOptions("cpu", ram_bytes=1 << 30), "--ram")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_a_gpu_are_refused_on_the_cpu(options: EngineOptions, name: str, tiny_pack: Path) -> None:
    with (
        Pack(tiny_pack) as pack,
        pytest.raises(RunError, match=f"^{name} needs --device cuda; remove it or add --device cuda$"),
    ):
        Engine(pack, options, 64)
