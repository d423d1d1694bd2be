"""The plans that ours is compared with at equal bytes: HQQ throughout, random halves, EdgeMoE's and PMQ's widths."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pmq import PUBLISHED, RELEASED, Exponents, Factors, pmq_widths

from moe_pack.convert import EDGEMOE_WIDTHS, edgemoe_plan, widths_for_bytes
from moe_pack.formats import ExpertFormat, ModelSpec, Plan, expert_layout, part_format, uniform_dense

GROUP = 64
PMQ_WIDTHS = (1, 2, 3)  # as published
WIDE_WIDTHS = (2, 3, 4, 8)
_SIZES = (2.0, 2.5, 3.0, 3.5, 4.0)  # mean widths


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of the experts, and the plans of HQQ in groups of 64 that set them: all alike, or random halves."""

    mean_width: float
    max_bytes: int
    plans: dict[str, Plan]


def stored_bytes(spec: ModelSpec, plan: Plan) -> int:
    """What the experts of a plan take in a pack, without the room between extents."""
    layouts = (
        expert_layout(expert, plan.selector, spec.expert, spec.hidden_size)
        for layer in plan.experts
        for expert in layer
    )
    return sum(layout.num_bytes for layout in layouts)


def hqq_plan(spec: ModelSpec, widths: NDArray[np.integer]) -> Plan:
    """The plan that stores all matrices of experts at these widths [L, E], HQQ in groups of 64."""
    parts = {width: part_format(width, GROUP) for width in np.unique(widths).tolist()}
    formats = {width: ExpertFormat(part, part, part) for width, part in parts.items()}
    experts = tuple(tuple(formats[width] for width in layer) for layer in widths.tolist())
    return Plan("none", "hqq", experts, uniform_dense(spec, None))


def uniform_plans(spec: ModelSpec, widths: tuple[int, ...]) -> dict[int, Plan]:
    """For each width the plan that stores all experts at it."""
    shape = (len(spec.moe_layers), spec.router.num_experts)
    return {width: hqq_plan(spec, np.full(shape, width)) for width in widths}


def sizes(spec: ModelSpec, num_seeds: int) -> Iterator[Size]:
    """The sizes to compare at: 2, 3 and 4 bits, and midway."""
    shape = (len(spec.moe_layers), spec.router.num_experts)
    num_experts = shape[0] * shape[1]
    for mean in _SIZES:
        lower = int(mean)
        if mean == lower:
            plans = {"uniform": hqq_plan(spec, np.full(shape, lower))}
        else:
            widths = np.where(np.arange(num_experts) < num_experts // 2, lower + 1, lower)
            plans = {
                f"half {seed}": hqq_plan(spec, np.random.default_rng(seed).permutation(widths).reshape(shape))
                for seed in range(1, num_seeds + 1)
            }
        yield Size(mean, stored_bytes(spec, next(iter(plans.values()))), plans)


def edgemoe_plans(spec: ModelSpec, max_bytes: int, importance: NDArray[np.floating]) -> dict[str, Plan]:
    """EdgeMoE's plans of at most so many bytes: as published, absmax of one scale a row, and its widths in HQQ.

    Args:    importance: [L, E], what each expert alone at 2 bits loses.
    """
    shape = importance.shape
    rows = {
        width: stored_bytes(spec, edgemoe_plan(spec, np.full(shape, width), "none")) // importance.size
        for width in EDGEMOE_WIDTHS
    }
    groups = _expert_bytes(spec, EDGEMOE_WIDTHS)
    return {
        "as published": edgemoe_plan(spec, widths_for_bytes(importance, rows, max_bytes), "none"),
        "its widths, hqq": hqq_plan(spec, widths_for_bytes(importance, groups, max_bytes)),
    }


def pmq_plans(spec: ModelSpec, max_bytes: int, factors: Factors) -> dict[str, Plan]:
    """PMQ's plans of at most so many bytes: as published where its widths allow that, and with wider ones."""
    num_experts, layer_bytes = spec.router.num_experts, max_bytes // len(spec.moe_layers)
    expert_bytes = _expert_bytes(spec, (1, *WIDE_WIDTHS))

    def pmq(exponents: Exponents, widths: tuple[int, ...], required: tuple[int, ...]) -> Plan:
        costs, width_bytes = factors.costs(exponents, widths), tuple(expert_bytes[width] for width in widths)
        return hqq_plan(spec, pmq_widths(costs, widths, width_bytes, layer_bytes, required))

    plans, required = {}, (2, 3)
    least = (num_experts - len(required)) * expert_bytes[1] + sum(expert_bytes[width] for width in required)
    if least <= layer_bytes < num_experts * expert_bytes[PMQ_WIDTHS[-1]]:
        plans["pmq"] = pmq(PUBLISHED, PMQ_WIDTHS, required)
        plans["pmq, released"] = pmq(RELEASED, PMQ_WIDTHS, required)
    if layer_bytes > num_experts * expert_bytes[WIDE_WIDTHS[0]]:
        plans["pmq, 2 to 8"] = pmq(PUBLISHED, WIDE_WIDTHS, ())
        plans["pmq, 2 to 8, released"] = pmq(RELEASED, WIDE_WIDTHS, ())
    return plans


def _expert_bytes(spec: ModelSpec, widths: tuple[int, ...]) -> dict[int, int]:
    """What one expert takes at each width."""
    num_experts = len(spec.moe_layers) * spec.router.num_experts
    return {width: stored_bytes(spec, plan) // num_experts for width, plan in uniform_plans(spec, widths).items()}
