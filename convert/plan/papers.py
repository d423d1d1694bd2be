"""EdgeMoE's choice of widths: the least important experts at the lower of two widths, all others at the higher.

    order    all experts, the least important first
    bounds   the two neighbouring widths between which the goal lies, if all experts had the same
    K        so many of the order's first get the lower width, the rest the higher

The paper's goal is a tolerable loss, and K the largest that keeps it. A goal in bytes is ours: bounds are then the
widest that fits and the next, and K the smallest that fits.

Source: EdgeMoE §III-B, "Profiling expert importance" and "Selecting expert-wise bitwidths". It moves K step by step
        until the loss reaches the goal; here it is bisected, which ends at the same K where fewer bits lose more.

The papers' packs: how each stores experts, by name. What its policies are is `moe-run --policy` of the same name.

Where a paper leaves something open, our reading stands at the preset; docs/papers.md has them together.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.sensitivity import ABSMAX_FORMATS
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.planned import PlanningModel
from moe_pack.formats import (
    BF16,
    ROW_GROUP,
    ExpertFormat,
    ModelSpec,
    PartFormat,
    Plan,
    PlanError,
    Selector,
    part_format,
    uniform_plan,
)
from moe_pack.formats.plan import format_fault, uniform_dense

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


def edgemoe_decision(model: PlanningModel, max_loss: float, selector: Selector) -> Decision:
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


PresetName = Literal["floe", "corm", "fiddler", "edgemoe"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)

FLOE_SPARSITY = 0.9  # of §3.2's two settings, 80 and 90%, the one of its compression of 9.3 times
CORM_THETA = 0.25  # Fig. 10
CORM_POPULAR_SHARE = 0.5  # our reading: the paper says "less frequently used experts" and no number
EDGEMOE_LOSS = 0.02  # §IV-A: the tolerable loss, of a task's accuracy; our reading: of perplexity
_INT2, _INT2_FINE, _INT4 = part_format(2, 64), part_format(2, 16, 8), part_format(4, 64, 8)

Shares = NDArray[np.float64]  # [L, E]


def preset_decision(name: PresetName, model: PlanningModel, sparsity: float | None = None) -> Decision:
    """What a paper would store.

    Args:    sparsity: of FloE's, in place of its 90%; None: the paper's.
    Raises:  PlanError if the model has not the matrices, or its rows not the groups, that the paper needs; or for a
             sparsity where the paper has none.
    """
    if sparsity is not None and name != "floe":
        raise PlanError(f"--sparsity: preset {name} sets what runs itself; leave it out")
    if sparsity is not None and not 0 <= sparsity < 1:
        raise PlanError(f"--sparsity: found {sparsity}, expected a share from 0 up to, but not, 1")
    return _PRESETS[name](model, sparsity)


def _floe(model: PlanningModel, sparsity: float | None) -> Decision:
    """FloE §3.2: `up` in HQQ's INT2 decides what runs, gate columns and down rows in 16 bit."""
    _check_rows("floe", model.spec, _INT2)
    plan = uniform_plan(model.spec, "up", _INT2, BF16)
    return Decision(plan, np.full(model.losses.popularity.shape, FLOE_SPARSITY if sparsity is None else sparsity))


def _corm(model: PlanningModel, sparsity: float | None) -> Decision:
    """CORM §4.1, §4.4, appendix: `gate` decides at one threshold; popular experts in INT4 g64, the rest in INT2 g16.

    Its "scale groups", which keep scales in 8 bits, are our byte scales. What the threshold leaves out is foretold
    where a profile counted activations.
    """
    spec, losses = model.spec, model.losses
    if "gate" not in spec.expert.matrices:
        raise PlanError("--preset corm: this model's experts have no gate matrix; use floe, fiddler or edgemoe")
    _check_rows("corm", spec, _INT4, _INT2_FINE)
    popular = _most_popular(losses.popularity, CORM_POPULAR_SHARE)
    formats = {True: ExpertFormat(_INT4, _INT4, _INT4), False: ExpertFormat(_INT2_FINE, _INT2_FINE, _INT2_FINE)}
    experts = tuple(tuple(formats[held] for held in layer) for layer in popular.tolist())
    is_known = losses.quantiles is not None
    left_out = losses.sparsity_at(CORM_THETA, "gate") if is_known else np.zeros(losses.popularity.shape)
    return Decision(Plan("gate", "hqq", experts, uniform_dense(spec, None)), left_out, CORM_THETA)


def _fiddler(model: PlanningModel, sparsity: float | None) -> Decision:
    """Fiddler §4.1: the original's 16 bit; what it plans is where experts lie (`moe-run --policy fiddler`)."""
    plan = uniform_plan(model.spec, "none", BF16, BF16)
    return Decision(plan, np.zeros(model.losses.popularity.shape))


def _edgemoe(model: PlanningModel, sparsity: float | None) -> Decision:
    """EdgeMoE §III-B: INT2, INT4 or INT8 by importance, within 2% of loss; experts are read whole."""
    _check_rows("edgemoe", model.spec, *ABSMAX_FORMATS)
    return edgemoe_decision(model, math.log(1 + EDGEMOE_LOSS) / model.losses.nll_per_kl, "none")


_PRESETS: dict[PresetName, Callable[[PlanningModel, float | None], Decision]] = {
    "floe": _floe,
    "corm": _corm,
    "fiddler": _fiddler,
    "edgemoe": _edgemoe,
}


def _check_rows(name: PresetName, spec: ModelSpec, *parts: PartFormat) -> None:
    fault = next(filter(None, (format_fault(part, spec.hidden_size) for part in parts)), None)
    if fault:
        raise PlanError(f"--preset {name}: {fault}; use fiddler, which stores 16 bits")


def _most_popular(popularity: Shares, share: float) -> NDArray[np.bool_]:
    """The most popular experts of each layer, so many of them: bool [L, E]; ties to the lower number."""
    number = round(share * popularity.shape[1])
    ranks = np.argsort(np.argsort(-popularity, axis=1, kind="stable"), axis=1)
    chosen: NDArray[np.bool_] = ranks < number
    return chosen
