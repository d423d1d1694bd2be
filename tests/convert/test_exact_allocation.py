"""The knapsack on the losses of a trained model: against an exact solution, and the codecs that it chooses."""

from dataclasses import replace

import numpy as np
import pytest
from support.allocation import least_loss
from support.models import BOOK, DEMO_MODEL
from support.profiles import profiled

from moe_pack.calib.forward import read_tokens
from moe_pack.calib.profile import Losses, ProfileOptions, losses_of
from moe_pack.convert.plan.search import FormatChoices, expert_choices
from moe_pack.formats import ModelSpec, part_format, uniform_plan
from moe_pack.formats.families import model_spec
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.formats.pack.layouts import expert_layout
from moe_pack.runtime import Text

pytestmark = pytest.mark.slow  # the demo model is profiled


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    tokens = read_tokens(str(BOOK), None, Text(FolderFiles(DEMO_MODEL)), 512, 128)
    return losses_of(profiled(DEMO_MODEL, tmp_path_factory.mktemp("demo") / "profile", tokens, ProfileOptions("fast")))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return model_spec(str(DEMO_MODEL))


def least_of_all(choices: FormatChoices, losses: Losses, max_bytes: int) -> float:
    """The least that any choice for each expert loses within so many bytes: dynamic programming, no expert after
    another forgotten, bytes in units of their greatest common divisor."""
    unit = int(np.gcd.reduce(choices.extent_bytes))
    sizes = (choices.extent_bytes // unit).tolist()
    room = max_bytes // unit
    best = np.zeros(room + 1)  # of the experts so far, within so many units
    for expert in choices.losses(losses):
        within = np.full(room + 1, np.inf)
        for size, lost in zip(sizes, expert.tolist(), strict=True):
            np.minimum(within[size:], best[: room + 1 - size] + lost, out=within[size:])
        best = within
    return float(best[-1])


@pytest.mark.parametrize("width", [2, 3, 4])
def test_at_a_uniform_plans_bytes_the_knapsack_is_within_its_gap_of_the_exact_best(
    losses: Losses, spec: ModelSpec, width: int
) -> None:
    part = part_format(width, 64)
    expert = expert_layout(uniform_plan(spec, "up", part, part).experts[0][0], "up", spec.expert, spec.hidden_size)
    max_bytes = 32 * expert.num_bytes
    found = least_loss(spec, "up", losses, max_bytes)
    assert found is not None
    best = least_of_all(expert_choices(spec, "up", losses), losses, max_bytes)
    assert found.solution.bound <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= found.loss <= best / (1 - found.solution.gap) * (1 + 1e-12)
    assert found.solution.gap < 1e-3


def test_at_few_bits_the_demo_models_experts_are_trellises_and_lose_less_than_by_hqq(
    losses: Losses, spec: ModelSpec
) -> None:
    """2.4 bits a weight, all bytes of extents; rows of 128 end in a CRC and padding besides."""
    num_weights = 4 * 8 * 3 * spec.expert.intermediate_size * spec.hidden_size
    found = least_loss(spec, "none", losses, int(2.4 * num_weights / 8))
    assert found is not None and found.decision.plan.quantizer == "calibrated"
    parts = [part for layer in found.decision.plan.experts for e in layer for part in (e.gate, e.up, e.down)]
    assert {part.codec for part in parts if part} == {"trellis"}
    plain = least_loss(spec, "none", replace(losses, quantizer="hqq"), int(2.6 * num_weights / 8))
    assert plain is not None and found.loss < plain.loss
