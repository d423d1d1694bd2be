"""What each expert and dense matrix shall be stored as: the knapsack's two questions, put and answered.

*Least loss in so many bytes* (`least_loss`): what a size can be. *Least time within a loss* (`least_time`): what a
budget can be; time is linear in bytes at given prices, which the planner finds by replay and asks again (`planner`).
"""

from dataclasses import dataclass

import numpy as np

from moe_pack.calib import Losses
from moe_pack.convert.choices import Choices, Ints, expert_choices
from moe_pack.convert.knapsack import Floats, Solution, Table, solve
from moe_pack.convert.plan_file import Decision
from moe_pack.formats import (
    ExpertFormat,
    ModelSpec,
    PartFormat,
    Plan,
    Selector,
    dense_roles,
    part_format,
    uniform_dense,
)

DENSE_GROUP = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """What storing something costs, in seconds a token.

    `runs`, `misses`: float64 [L * E], how often a token runs an expert, and finds it missing.   `run`, `fetch`:
    float64 [C, sparsities], seconds to run an expert of each choice, and to bring it.   `hold`: a byte of an expert,
    for the room it takes from others.   `dense`: float64 [roles, widths], each dense tensor at each width.
    """

    runs: Floats
    misses: Floats
    run: Floats
    fetch: Floats
    hold: float
    dense: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A decision, the nats it is expected to lose, and how near it is to the best at the prices given."""

    decision: Decision
    loss: float
    solution: Solution


def least_loss(
    spec: ModelSpec,
    selector: Selector,
    losses: Losses,
    max_expert_bytes: int,
    allowed: tuple[PartFormat, ...] | None = None,
) -> Allocation | None:
    """The formats that lose least where all experts together take so many bytes; dense matrices keep the source's.

    Args:    max_expert_bytes: of all extents, without what aligns them in files.   allowed: formats to choose from.
    Returns: None where even the smallest take more.
    """
    choices = expert_choices(spec, selector, losses, allowed)
    lost = choices.losses(losses)
    weights = np.broadcast_to(choices.extent_bytes.astype(np.float64), lost.shape)
    found = solve(Table(lost, weights), max_expert_bytes, search=True)
    if found is None:
        return None
    plan = Plan(selector, choices.quantizer, _experts(choices, found.choice, spec), uniform_dense(spec, None))
    return Allocation(Decision(plan, np.zeros(losses.popularity.shape)), found.cost, found)


def least_time(spec: ModelSpec, losses: Losses, max_loss: float, prices: Prices, choices: Choices) -> Allocation | None:
    """The formats, sparsities and dense widths that cost least at these prices and lose at most so many nats.

    Returns: None where even what loses least loses more.
    """
    experts = _expert_table(losses, prices, choices)
    dense = _dense_table(losses, prices)
    width = max(experts[0].shape[1], dense[0].shape[1])
    cost, lost = (np.concatenate([_widened(e, width), _widened(d, width)]) for e, d in zip(experts, dense, strict=True))
    found = solve(Table(cost, lost), max_loss)
    if found is None:
        return None
    num_experts, num_sparsities = losses.popularity.size, len(losses.sparsities)
    expert_choice, sparsity_idx = np.divmod(found.choice[:num_experts], num_sparsities)
    plan = Plan(
        choices.selector,
        choices.quantizer,
        _experts(choices, expert_choice, spec),
        _dense_formats(spec, losses, found.choice[num_experts:].tolist()),
    )
    sparsity = np.array(losses.sparsities)[sparsity_idx].reshape(losses.popularity.shape)
    return Allocation(Decision(plan, sparsity), found.weight, found)


def _expert_table(losses: Losses, prices: Prices, choices: Choices) -> tuple[Floats, Floats]:
    """Cost and loss of each choice with each sparsity, sparsities side by side: [L * E, C * sparsities] each."""
    kind_idx = losses.kinds.index("both" if choices.selector == "none" else choices.selector)
    held = np.repeat(prices.hold * choices.extent_bytes, len(losses.sparsities))
    cost = prices.runs[:, None] * prices.run.ravel() + prices.misses[:, None] * prices.fetch.ravel() + held
    sparse = losses.sparse[:, :, kind_idx].reshape(-1, 1, len(losses.sparsities))  # [L * E, 1, S]
    lost = choices.losses(losses)[:, :, None] + sparse  # [L * E, C, S]
    return cost, lost.reshape(len(cost), -1)


def _dense_table(losses: Losses, prices: Prices) -> tuple[Floats, Floats]:
    """Cost and loss of each dense tensor at each width: [roles, widths] each; infinite where it cannot be so stored."""
    possible = np.isfinite(losses.dense)
    return np.where(possible, prices.dense, np.inf), np.where(possible, losses.dense, 0.0)


def _dense_formats(spec: ModelSpec, losses: Losses, width_idx: list[int]) -> tuple[PartFormat | None, ...]:
    widths = [losses.dense_widths[idx] for idx in width_idx]
    assert len(widths) == len(dense_roles(spec)), "a width for each"
    return tuple(None if width == 16 else part_format(width, DENSE_GROUP) for width in widths)


def _experts(choices: Choices, choice: Ints, spec: ModelSpec) -> tuple[tuple[ExpertFormat, ...], ...]:
    E = spec.router.num_experts
    numbers = choice.tolist()
    return tuple(tuple(choices.formats[n] for n in numbers[at : at + E]) for at in range(0, len(numbers), E))


def _widened(table: Floats, width: int) -> Floats:
    """The table with as many columns: choices that no item has."""
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=np.inf)
