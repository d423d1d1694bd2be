"""What a token costs besides its bytes: measured on the real engine, nothing left behind."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiers import steady_disk

from moe_pack.convert import measure_fixed_costs
from moe_pack.convert.plan.machines import assumed_cpu, machine_of_cpu, rate_of
from moe_pack.formats import RunError, part_format, trellis_format
from moe_pack.formats.pack.plans import TRELLIS_WIDTHS
from moe_pack.runtime import FixedCosts, MachineFacts, WidthRate
from moe_pack.runtime.engine.machine import CpuFacts


@pytest.mark.slow
def test_tokens_layers_and_experts_cost_time_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    facts = MachineFacts("2026-11-22", steady_disk(1e9), CpuFacts(2, None, None, None, (), (), None), None)
    found = measure_fixed_costs(facts, 0.01)
    assert min(found.token_s, found.layer_s, found.expert_s, found.miss_s, found.rows_s) >= 0
    assert 0 < found.token_s + found.layer_s + found.expert_s < 1
    assert not list(tmp_path.iterdir())


def test_without_measured_experts_no_cpu_is_planned_for() -> None:
    facts = MachineFacts("2026-11-22", steady_disk(1e9), CpuFacts(2, None, None, None, (), (), None), None)
    with pytest.raises(RunError, match=r"^doctor: the speed of experts was not measured; build the native kernels"):
        machine_of_cpu(facts)


def test_a_width_that_was_not_measured_goes_by_the_nearest_and_of_two_by_the_wider() -> None:
    rates = (WidthRate(2, 20.0), WidthRate(4, 40.0), WidthRate(16, 160.0))
    assert [rate_of(rates, width) for width in (1, 2, 3, 4, 8, 16)] == [20, 20, 40, 40, 40, 160]


def test_a_trellis_goes_by_trellises_measured_else_by_affine_codes_of_no_fewer_bits() -> None:
    """Bits of 2, 2.5, 3, 3.5 and 4."""
    affine = tuple(WidthRate(width, 10.0 * width) for width in (1, 2, 3, 4, 8, 16))
    machine = replace(assumed_cpu(), expert_rates=affine)
    parts = [trellis_format(width, 0) for width in TRELLIS_WIDTHS]
    assert [machine.expert_rate(part) for part in parts] == [20, 30, 30, 40, 40]
    measured = replace(machine, trellis_rates=(WidthRate(4, 7.0), WidthRate(5, 8.0), WidthRate(8, 9.0)))
    assert [measured.expert_rate(part) for part in parts] == [7, 8, 8, 9, 9]
    assert measured.expert_rate(part_format(8, 64)) == 80


def test_the_machine_of_a_cpu_has_its_trellises_rates() -> None:
    one = (WidthRate(4, 1e10),)
    cpu = CpuFacts(2, "avx2", 1e10, 1e10, one, one, 0.0, (WidthRate(4, 2e9),))
    facts = MachineFacts("2026-11-22", steady_disk(1e9), cpu, None, FixedCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    assert machine_of_cpu(facts).expert_rate(trellis_format(4, 0)) == 2e9


def test_a_steady_drive_reads_at_one_rate_whatever_is_asked() -> None:
    disk = steady_disk(2e9)
    assert disk.seconds(3, 1 << 20) == pytest.approx(3 * 2**20 / 2e9)
    assert disk.seconds_for_few(1, 1 << 20) == pytest.approx(2**20 / 2e9)
