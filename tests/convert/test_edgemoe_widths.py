"""EdgeMoE's choice of widths, against its steps worked by hand."""

import numpy as np
import pytest
from support.cases import case
from support.models import DEMO_MODEL

from moe_pack.convert.plan.papers import edgemoe_plan, widths_for_loss
from moe_pack.formats import PlanError, part_format
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack.plans import plan_fault

# The order, least important first: (1, 0), (0, 1), (1, 2), (0, 2), (1, 1), (0, 0).
IMPORTANCE = np.array([[0.9, 0.2, 0.5], [0.1, 0.7, 0.4]])


def loss(widths: np.ndarray) -> float:
    """An expert at 2 bits costs its importance, at 4 bits a tenth of it, at 8 a hundredth."""
    factor = np.select([widths == 2, widths == 4, widths == 8], [1.0, 0.1, 0.01], 0.0)
    return float((factor * IMPORTANCE).sum())


def test_as_many_of_the_least_important_are_lowered_as_the_loss_allows() -> None:
    # All at 4 bits lose 0.28, all at 2 bits 2.8; lowering 0.1, 0.2 and 0.4 loses 0.28 + 0.9 * 0.7 = 0.91.
    assert widths_for_loss(IMPORTANCE, lambda widths: loss(widths) <= 0.92).tolist() == [[4, 2, 4], [2, 4, 2]]


def test_bisecting_ends_where_lowering_one_expert_after_the_other_does() -> None:
    for allowed in [0.0, 0.01, 0.02, 0.05, 0.1, 0.25, 0.28, 0.3, 0.5, 1.0, 1.8, 2.7, 2.8]:
        with case(allowed):

            def holds(widths: np.ndarray) -> bool:
                return loss(widths) <= allowed + 1e-12

            found = widths_for_loss(IMPORTANCE, holds)
            assert holds(found)
            lower = {16: 8, 8: 4, 4: 2}
            upper = int(found.max())
            if upper > 2:
                raised = np.where(found == upper, IMPORTANCE, np.inf)
                found[np.unravel_index(raised.argmin(), found.shape)] = lower[upper]
                assert not holds(found), "one more of the least important could have been lowered"


def test_a_loss_that_holds_at_the_smallest_width_lowers_all_experts() -> None:
    assert widths_for_loss(IMPORTANCE, lambda widths: True).tolist() == [[2, 2, 2], [2, 2, 2]]


def test_a_loss_that_nothing_holds_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        widths_for_loss(IMPORTANCE, lambda widths: False)
    assert str(error.value) == ("--max-loss: --search edgemoe loses more even with all experts at 16 bits; allow more")


def test_the_plan_stores_experts_with_one_absmax_scale_a_row() -> None:
    checkpoint = Checkpoint(DEMO_MODEL)
    checkpoint.close()
    widths = np.full((4, 8), 2)
    widths[3, 5] = 16
    plan = edgemoe_plan(checkpoint.spec, widths, "up")
    assert plan_fault(plan, checkpoint.spec) is None
    assert plan.quantizer == "absmax"
    assert not any(plan.dense)
    assert plan.experts[0][0].up == part_format(2, 0)
    assert plan.experts[3][5].down == part_format(16, 0)
