"""The formats of an expert that the planner considers, out of all formats."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.cases import case
from support.losses import calibrated_losses, random_losses
from support.specs import GROUPED

from moe_pack.calib.profile import assumed_losses
from moe_pack.convert.plan.search import LEAST_CHOICES, MAX_CHOICES, expert_choices
from moe_pack.formats import BF16, ExpertFormat, ExpertSpec, PartFormat, part_format
from moe_pack.formats.families import model_spec
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.formats.parts.specs import SELECTORS

LOSSES = random_losses(GROUPED)


def test_bytes_are_those_of_the_layout_that_conversion_writes() -> None:
    for selector in SELECTORS:
        with case(selector):
            choices = expert_choices(GROUPED, selector, LOSSES)
            assert 0 < len(choices.formats) <= MAX_CHOICES
            for n, held in enumerate(choices.formats):
                layout = expert_layout(held, selector, GROUPED.expert, 64)
                found = choices.extent_bytes[n], choices.selector_bytes[n], choices.record_bytes[n]
                assert found == (layout.num_bytes, layout.selector_bytes, layout.records_bytes)
            assert (np.diff(choices.extent_bytes) >= 0).all()


def test_a_choice_loses_what_its_three_matrices_do() -> None:
    choices = expert_choices(GROUPED, "up", LOSSES)
    table = choices.losses(LOSSES)
    assert table.shape == (12, len(choices.formats))
    for n in range(0, len(choices.formats), 7):
        held = choices.formats[n]
        places = [LOSSES.formats.index(part) for part in (held.gate, held.up, held.down) if part is not None]
        for expert in (0, 5, 11):
            by_matrix = LOSSES.quantized[expert // 6, expert % 6]
            assert table[expert, n] == pytest.approx(sum(by_matrix[m, place] for m, place in enumerate(places)))


def test_for_a_mean_expert_no_combination_of_as_few_bytes_loses_less_than_the_best_weighed() -> None:
    """Against all of them: each of three matrices in each of 25 formats."""
    for selector in SELECTORS:
        with case(selector):
            choices, mean = expert_choices(GROUPED, selector, LOSSES), LOSSES.quantized.mean(axis=(0, 1))
            weighed = choices.losses(LOSSES).mean(axis=0)
            number = range(len(LOSSES.formats))
            for parts in itertools.islice(itertools.product(number, number, number), 0, None, 11):
                formats = [LOSSES.formats[n] for n in parts]
                size = expert_layout(ExpertFormat(*formats), selector, GROUPED.expert, 64).num_bytes
                if size >= choices.extent_bytes[0]:
                    best = weighed[choices.extent_bytes <= size].min()
                    assert best <= mean[range(3), parts].sum() * (1 + 1e-9)


def test_lossless_and_smallest_are_among_them() -> None:
    choices = expert_choices(GROUPED, "both", LOSSES)
    assert choices.formats[-1] == ExpertFormat(BF16, BF16, BF16)
    smallest = part_format(2, 64, 8)
    assert (
        choices.extent_bytes[0]
        <= expert_layout(ExpertFormat(smallest, smallest, smallest), "both", GROUPED.expert, 64).num_bytes
    )


def test_an_expert_without_a_gate_has_no_format_for_it() -> None:
    spec = replace(GROUPED, expert=ExpertSpec("relu2", 48, ("up", "down"), bias=(), extra_floats=0))
    losses = random_losses(spec)
    choices = expert_choices(spec, "up", losses)
    assert {held.gate for held in choices.formats} == {None}
    assert len(set(choices.formats)) == len(choices.formats)


def test_of_thousands_of_experts_fewer_choices_are_weighed_each_the_best_of_its_bytes() -> None:
    spec = model_spec("qwen3-30b-a3b")
    losses = assumed_losses(spec)
    choices = expert_choices(spec, "up", losses)
    assert LEAST_CHOICES < len(choices.formats) < MAX_CHOICES
    lost = choices.losses(losses)[0]
    assert choices.formats[-1] == ExpertFormat(BF16, BF16, BF16) and lost[-1] == 0
    assert (np.diff(choices.extent_bytes) > 0).all() and (np.diff(lost) < 0).all()
    few = model_spec("qwen3-30b-a3b", 1)
    whole = expert_choices(few, "up", assumed_losses(few))
    assert len(whole.formats) == MAX_CHOICES and choices.extent_bytes[0] == whole.extent_bytes[0]


def test_of_losses_with_calibrated_ones_only_their_formats_are_weighed() -> None:
    losses = calibrated_losses(GROUPED)
    choices = expert_choices(GROUPED, "up", losses)
    found = {part for held in choices.formats for part in (held.gate, held.up, held.down)}
    assert choices.quantizer == "calibrated"
    assert found <= set(losses.calibrated_formats)
    assert {part.codec for part in found if part} == {"bf16", "affine", "trellis"}
    n = len(choices.formats) // 2
    places = [losses.calibrated_formats.index(part) for part in astuple_of(choices.formats[n])]
    by_matrix = losses.calibrated[1, 2]
    assert choices.losses(losses)[8, n] == pytest.approx(sum(by_matrix[m, place] for m, place in enumerate(places)))


def astuple_of(held: ExpertFormat) -> tuple[PartFormat, ...]:
    """All three formats."""
    assert held.gate is not None
    return held.gate, held.up, held.down
