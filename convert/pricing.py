"""What storing something costs in seconds a token, at a plan already foretold: the prices the next plan is decided at.

An expert costs what running it takes as often as it runs, what bringing it takes as often as it is missed, and the room
that its bytes take from others: what a smaller budget would cost, by a foretelling with a little less of it.
"""

from dataclasses import dataclass

import numpy as np

from moe_pack.convert.allocation import DENSE_GROUP, Prices
from moe_pack.convert.choices import Choices, expert_choices
from moe_pack.convert.knapsack import Floats
from moe_pack.convert.planned import Model, Planned
from moe_pack.convert.tier import Tier
from moe_pack.formats import (
    FP8,
    DenseRole,
    RunError,
    Selector,
    dense_roles,
    expert_layout,
    part_format,
    row_layout,
)

_PROBE = 0.05  # the share of the budget by which it is made smaller
_FIRST_MISSES = 0.5  # of runs, before anything was foretold


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """Choices of one selector kind with what they take: `run`, `fetch` float64 [C, sparsities], seconds each."""

    choices: Choices
    run: Floats
    fetch: Floats


def menu_of(tier: Tier, model: Model, selector: Selector) -> Menu:
    """The choices for experts under a selector kind, and their seconds on a tier."""
    spec, losses = model.spec, model.losses
    choices = expert_choices(spec, selector, losses)
    layouts = [expert_layout(held, selector, spec.expert, spec.hidden_size) for held in choices.formats]
    run, fetch = (
        np.array([[seconds(layout, sparsity) for sparsity in losses.sparsities] for layout in layouts])
        for seconds in (tier.run_seconds, tier.fetch_seconds)
    )
    return Menu(choices, run, fetch)


def price(
    tier: Tier, model: Model, menu: Menu, last: Planned | None, dearer: tuple[float, float] = (1.0, 1.0)
) -> Prices:
    """The prices at a plan; before any, those of a cache that half of the experts are missing from.

    Args:    dearer: what memory is worth to dense matrices, and to experts, is multiplied by it; above 1, and memory
             worth nothing yet, it is given a worth.
    """
    run, fetch, runs = menu.run, menu.fetch, model.losses.popularity.ravel()
    misses = _FIRST_MISSES * runs if last is None else last.foretold.misses.ravel()
    room, whole = _room_price(tier, last), float((runs * run.max()).sum() + (misses * fetch.max()).sum())
    dense, held = (room if factor == 1 else max(room, whole / tier.budget_bytes) * factor for factor in dearer)
    return Prices(
        runs,
        misses,
        run,
        fetch,
        hold=held * _held_share(tier, last),
        dense=_dense_prices(tier, model, dense),
    )


def _room_price(tier: Tier, last: Planned | None) -> float:
    """What a byte of fast memory is worth, seconds a token: found with a budget that is a little smaller."""
    if last is None:
        return 0.0
    less = int(_PROBE * tier.budget_bytes)
    try:
        smaller = tier.foretell(last.layout, last.decision.sparsity, less, is_rough=True)
    except RunError:
        return last.foretold.seconds / tier.budget_bytes  # hardly any room is left
    return max(smaller.seconds - last.foretold.seconds, 0.0) / less


def _held_share(tier: Tier, last: Planned | None) -> float:
    """How much of an expert's bytes takes room: all where all have room, less where they take turns."""
    return 1.0 if last is None else min(1.0, tier.budget_bytes / max(last.expert_bytes, 1))


def _dense_prices(tier: Tier, model: Model, room: float) -> Floats:
    """What each dense tensor costs at each width: [roles, widths]; of the embedding one row is read, or all as head."""
    spec, losses = model.spec, model.losses
    prices = np.zeros(losses.dense.shape)
    for role_idx, (role, dtype) in enumerate(zip(dense_roles(spec), model.dense_dtypes, strict=True)):
        for width_idx, width in enumerate(losses.dense_widths):
            if np.isfinite(losses.dense[role_idx, width_idx]):
                num_bytes = dense_bytes(role, dtype, width)
                is_looked_up = role.name == "embed" and not spec.tied_head
                read = num_bytes // role.shape[0] if is_looked_up else num_bytes
                prices[role_idx, width_idx] = tier.dense_seconds(read, width) + room * num_bytes
    return prices


def dense_bytes(role: DenseRole, dtype: str, width: int) -> int:
    """What a dense tensor takes at a width; at 16, what the source keeps it in."""
    if width == 16 and dtype == "F8_E4M3":
        return role.shape[0] * row_layout([("weight", FP8, False)], role.shape[1]).row_bytes
    if width == 16:
        return int(np.prod(role.shape)) * (4 if dtype == "F32" else 2)
    return role.shape[0] * row_layout([("weight", part_format(width, DENSE_GROUP), False)], role.shape[1]).row_bytes
