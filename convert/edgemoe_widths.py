"""EdgeMoE's choice of widths: the least important experts at the lower of two widths, all others at the higher.

    order    all experts, the least important first
    bounds   the two neighbouring widths between which the goal lies, if all experts had the same
    K        so many of the order's first get the lower width, the rest the higher

The paper's goal is a tolerable loss, and K the largest that keeps it. A goal in bytes is ours: bounds are then the
widest that fits and the next, and K the smallest that fits.

Source: EdgeMoE §III-B, "Profiling expert importance" and "Selecting expert-wise bitwidths". It moves K step by step
        until the loss reaches the goal; here it is bisected, which ends at the same K where fewer bits lose more.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moe_pack.convert.plan_file import Decision
from moe_pack.convert.planned import Model
from moe_pack.formats import (
    ROW_GROUP,
    ExpertFormat,
    ModelSpec,
    Plan,
    PlanError,
    Selector,
    format_fault,
    part_format,
    uniform_dense,
)

EDGEMOE_WIDTHS = (2, 4, 8, 16)  # INT2, INT4, INT8, and not quantized

Widths = NDArray[np.int64]  # [L, E]: of all matrices of an expert


def widths_for_loss(
    importance: NDArray[np.floating], holds: Callable[[Widths], bool], choices: tuple[int, ...] = EDGEMOE_WIDTHS
) -> Widths:
    """The smallest model, by the paper's steps, whose loss is tolerable.

    Args:    importance: [L, E], the loss with that expert alone at 2 bits.   holds: measures a model of these widths
             and says whether its loss is tolerable.   choices: rising.
    Raises:  PlanError if not even the widest is.
    """
    uniform = [np.full(importance.shape, width, np.int64) for width in choices]
    first = next((number for number, widths in enumerate(uniform) if holds(widths)), None)
    if first is None:
        raise PlanError(f"--search edgemoe: the loss is not held with all experts at {choices[-1]} bits; allow more")
    if first == 0:
        return uniform[0]
    order, lower, upper = _order(importance), choices[first - 1], choices[first]
    # K = 0 holds and K = all does not: the number of K beyond 0 that hold, bisected.
    lowered = range(1, importance.size)
    most = bisect_left(lowered, True, key=lambda k: not holds(_mixed(order, k, lower, upper, importance.shape)))
    return _mixed(order, most, lower, upper, importance.shape)


def widths_for_bytes(importance: NDArray[np.floating], expert_bytes: Mapping[int, int], max_bytes: int) -> Widths:
    """The widths whose experts fit in `max_bytes`, as near to it as the paper's steps lead.

    Args:    importance: [L, E].   expert_bytes: of one expert by width; the widths to choose from.
    Raises:  PlanError if experts do not fit at the smallest width.
    """
    choices, E = sorted(expert_bytes), importance.size
    if expert_bytes[choices[0]] * E > max_bytes:
        raise PlanError(
            f"--search edgemoe: experts take {expert_bytes[choices[0]] * E:,} bytes at {choices[0]} bits, "
            f"expected at most {max_bytes:,}; allow more"
        )
    for lower, upper in pairwise(choices):
        if expert_bytes[upper] * E > max_bytes:
            raised = (max_bytes - expert_bytes[lower] * E) // (expert_bytes[upper] - expert_bytes[lower])
            return _mixed(_order(importance), E - raised, lower, upper, importance.shape)
    return np.full(importance.shape, choices[-1], np.int64)


def edgemoe_plan(spec: ModelSpec, widths: Widths, selector: Selector) -> Plan:
    """The plan that stores experts at these widths as the paper does: linear, one scale a row from its maximum."""
    parts = {width: part_format(width, ROW_GROUP) for width in EDGEMOE_WIDTHS}
    has_gate = "gate" in spec.expert.matrices
    formats = {width: ExpertFormat(part if has_gate else None, part, part) for width, part in parts.items()}
    experts = tuple(tuple(formats[width] for width in layer) for layer in widths.tolist())
    return Plan(selector, "absmax", experts, uniform_dense(spec, None))


def edgemoe_decision(model: Model, max_loss: float, selector: Selector) -> Decision:
    """The smallest pack of the paper's steps that is expected to lose at most so many nats.

    Its measure of a model's loss is here what a profile foretells of these widths; every neuron runs, and dense
    matrices keep the source's bytes.
    Raises:  PlanError if rows cannot be stored so.
    """
    importance = model.losses.importance
    if fault := format_fault(part_format(EDGEMOE_WIDTHS[0], ROW_GROUP), model.spec.hidden_size):
        raise PlanError(f"--search edgemoe: {fault}; use knapsack")

    def decision(widths: Widths) -> Decision:
        return Decision(edgemoe_plan(model.spec, widths, selector), np.zeros(importance.shape))

    return decision(widths_for_loss(importance, lambda widths: model.loss(decision(widths)) <= max_loss))


def _order(importance: NDArray[np.floating]) -> NDArray[np.intp]:
    """Experts by rising importance, flat; equal ones in the model's order."""
    return np.argsort(importance, axis=None, kind="stable")


def _mixed(order: NDArray[np.intp], num_lowered: int, lower: int, upper: int, shape: tuple[int, ...]) -> Widths:
    """The first `num_lowered` of the order at the lower width, the rest at the upper."""
    widths = np.full(order.size, upper, np.int64)
    widths[order[:num_lowered]] = lower
    return widths.reshape(shape)
