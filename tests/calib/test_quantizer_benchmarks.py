"""The parts of two benchmarks of quantizers: grids without calibration, and what calibrated rounding costs."""

import pytest
import torch
from calibrated_speed import measure
from grids import expert_rows, lines, symmetric
from models import DEMO_MODEL


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_symmetric_grid_has_levels_at_half_steps_and_its_scale_is_the_best_of_those_tried(width: int) -> None:
    weights = torch.randn((3, 128), generator=torch.Generator().manual_seed(width))
    found, top = symmetric(weights, width, 32).view(-1, 32), (2**width - 1) / 2
    for given, stored in zip(weights.view(-1, 32), found, strict=True):
        tried = []
        for shrink in torch.linspace(0.5, 1.0, 26):
            scale = float((given.abs().max() / top * shrink).half())
            levels = (torch.arange(2**width) - top) * scale
            nearest = levels[(given[:, None] - levels).abs().argmin(dim=1)]
            tried.append((float((nearest - given).square().sum()), nearest))
        best = min(tried, key=lambda pair: pair[0])
        assert float((stored - given).square().sum()) == pytest.approx(best[0], rel=1e-5)
        torch.testing.assert_close(stored, best[1])


def test_every_grid_has_the_bits_of_its_codes_scales_and_zeros() -> None:
    rows = expert_rows(DEMO_MODEL)
    assert rows.shape == (4 * 3 * 64, 128)  # of each layer's first expert, each matrix
    found = {line.grid: line for line in lines(rows, 4096)}
    assert len(found) == 3 * (3 * 3 + 1)
    bits = {name: found[f"3 bit {name}"].bits for name in ("g64, zeros", "g64, symmetric", "trellis, row")}
    assert bits == {"g64, zeros": 3 + 32 / 64, "g64, symmetric": 3 + 16 / 64, "trellis, row": 3 + 16 / 4096}
    for name in ("g64, zeros", "g64, symmetric", "trellis, row"):
        errors = [found[f"{width} bit {name}"].error for width in (2, 3, 4)]
        assert errors == sorted(errors, reverse=True) and errors[0] < 0.3


def test_the_cost_of_an_expert_is_that_of_its_blocks_and_of_what_it_needs_once() -> None:
    found = measure(128, 64, 96)
    assert {"once", "hqq, 4 bit g64", "calibrated, 1.5 bit trellis row", "calibrated, 4 bit g64"} < set(found)
    once = found.pop("once")
    assert once > 0
    assert all(taken > once for name, taken in found.items() if name.startswith("calibrated"))
