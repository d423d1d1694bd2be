"""The formats that lose least within a number of bytes, found with the planner's knapsack."""

import numpy as np

from moe_pack.calib.profile import Losses
from moe_pack.convert.plan import Decision
from moe_pack.convert.plan.search import Allocation, KnapsackProblem, expert_choices, solve
from moe_pack.formats import ModelSpec, Plan, Selector
from moe_pack.formats.pack.plans import uniform_dense


def least_loss(spec: ModelSpec, selector: Selector, losses: Losses, max_expert_bytes: int) -> Allocation | None:
    """The formats of all experts that lose least within the bytes of their extents; dense matrices keep the source's.

    None if even the smallest formats need more bytes.
    """
    choices = expert_choices(spec, selector, losses)
    lost = choices.losses(losses)
    weights = np.broadcast_to(choices.extent_bytes.astype(np.float64), lost.shape)
    solution = solve(KnapsackProblem(lost, weights), max_expert_bytes)
    if solution is None:
        return None
    numbers = solution.choice.reshape(-1, spec.router.num_experts).tolist()
    experts = tuple(tuple(choices.formats[n] for n in layer) for layer in numbers)
    repeats = spec.expert.repeats if choices.quantizer == "calibrated" else 0
    plan = Plan(selector, choices.quantizer, experts, uniform_dense(spec, None), repeats)
    return Allocation(Decision(plan, np.zeros(losses.popularity.shape)), solution.cost, solution)
