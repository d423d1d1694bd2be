"""What a token costs beside its bytes: measured on the real engine, nothing left behind."""

import tempfile
from pathlib import Path

import pytest

from moe_pack.convert.fixed_costs import measure_fixed_costs
from moe_pack.convert.machines import machine_of_cpu, rate_of, steady_drive
from moe_pack.formats import RunError
from moe_pack.runtime import CpuFacts, MachineFacts, WidthRate


def test_tokens_layers_and_experts_cost_time_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = measure_fixed_costs(0.01)
    assert min(found.token_s, found.layer_s, found.expert_s, found.miss_s) >= 0
    assert 0 < found.token_s + found.layer_s + found.expert_s < 1
    assert not list(tmp_path.iterdir())


def test_without_measured_experts_no_cpu_is_planned_for() -> None:
    facts = MachineFacts("2026-11-22", steady_drive(1e9), CpuFacts(2, None, None, None, (), (), None), None)
    with pytest.raises(RunError, match=r"^doctor: how fast experts are computed was not measured; run moe-pack doctor"):
        machine_of_cpu(facts)


def test_a_width_that_was_not_measured_goes_by_the_nearest_and_of_two_by_the_wider() -> None:
    rates = (WidthRate(2, 20.0), WidthRate(4, 40.0), WidthRate(16, 160.0))
    assert [rate_of(rates, width) for width in (1, 2, 3, 4, 8, 16)] == [20, 20, 40, 40, 40, 160]


def test_a_steady_drive_reads_at_one_rate_whatever_is_asked() -> None:
    drive = steady_drive(2e9)
    assert drive.seconds(3, 1 << 20) == pytest.approx(3 * 2**20 / 2e9)
    assert drive.seconds_for_few(1, 1 << 20) == pytest.approx(2**20 / 2e9)
