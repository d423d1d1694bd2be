"""Packs with trellises by the GPU's engines, over plain memory: experts, selectors, and dense matrices."""

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_runs import IDS, PROMPT, TOLERANCE, graph_logits, reference_logits
from gpu_staged_runs import staged_logits
from synthetic import made, small

from moe_pack.formats import ExpertFormat, Selector, part_format, trellis_format, uniform_plan


def packed(folder: Path, selector: Selector) -> Path:
    """A random pack in which every other expert of a layer has its matrices in trellises of other widths."""
    spec = replace(small(num_layers=1, num_experts=4, hidden_size=64), vocab_size=128)
    first = trellis_format(4, 64)
    plan = uniform_plan(spec, selector, first, trellis_format(7, 32, 8), trellis_format(8, 16), "nearest")
    other = ExpertFormat(part_format(3, 64), trellis_format(6, 0), trellis_format(5, 64))
    experts = tuple(tuple(other if e % 2 else held for e, held in enumerate(layer)) for layer in plan.experts)
    return made(spec, folder, plan=replace(plan, experts=experts))


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["up", pytest.param("both", marks=pytest.mark.slow)])
def test_the_graph_engine_runs_them_as_plain_torch_does(selector: Selector, tmp_path: Path) -> None:
    folder = packed(tmp_path / "pack", selector)
    assert (graph_logits(folder, 0.3) - reference_logits(folder)).abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["both", "none"])
def test_the_staged_engine_runs_them_as_plain_torch_does(selector: Selector, tmp_path: Path) -> None:
    folder = packed(tmp_path / "pack", selector)
    found = staged_logits(folder, "lru", True, IDS, PROMPT)
    assert (found - reference_logits(folder)).abs().max() < TOLERANCE
