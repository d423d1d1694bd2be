"""Packs with trellises by the GPU's engine, over plain memory: experts, selectors, and dense matrices."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu_runs import TOLERANCE, GpuRun, gpu_logits, reference_logits
from support.synthetic import made, small

from moe_pack.formats import ExpertFormat, Selector, part_format, trellis_format, uniform_plan
from moe_pack.runtime.gpu.placements import Misses


def packed(folder: Path, selector: Selector) -> Path:
    """A random pack in which every other expert of a layer has its matrices in trellises of other widths."""
    spec = replace(small(num_layers=1, num_experts=4, hidden_size=64), vocab_size=128)
    first = trellis_format(4, 64)
    plan = uniform_plan(spec, selector, first, trellis_format(7, 32, 8), trellis_format(8, 16), "nearest")
    other = ExpertFormat(part_format(3, 64), trellis_format(6, 0), trellis_format(5, 64))
    experts = tuple(tuple(other if e % 2 else held for e, held in enumerate(layer)) for layer in plan.experts)
    return made(spec, folder, plan=replace(plan, experts=experts))


@pytest.mark.slow
@pytest.mark.parametrize(("selector", "misses"), [("up", "pull"), ("both", "split"), ("none", "split")])
def test_they_run_as_in_plain_torch(selector: Selector, misses: Misses, tmp_path: Path) -> None:
    folder = packed(tmp_path / "pack", selector)
    assert (gpu_logits(folder, GpuRun(0.3, misses)) - reference_logits(folder)).abs().max() < TOLERANCE
