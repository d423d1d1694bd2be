"""The papers' packs: EdgeMoE's choice of widths, and the presets that store experts as a paper does.

EdgeMoE gives the least important experts the lower of two widths and all others the higher one:

    order    all experts, the least important first
    bounds   the two neighbouring widths between which the target lies, if all experts had the same
    K        the first K experts of the order get the lower width

The paper's target is a tolerable loss; K is the largest number that stays within it.

A preset decides how experts are stored; `moe-run --policy` of the same name runs them as the paper does. A comment at
the preset says how we read an open point of its paper (docs/papers.md). A preset's pack has parts of ours only if they
change no answer:

    part of ours              by default                        in a preset's pack             asked for by
    rotated layers            those that the profile chose      none                           --rotate on
    neurons with two rows     1 of 128 of calibrated codes      none                           -
    calibrated codes          with a profile that has inputs    the paper's quantizer          -
    trellises                 of calibrated codes               affine codes and 16 bits       -
    fewer bits for dense      within the loss                   the source's bytes             -
    neurons in order of heat  with a profile                    the same: no answer changes    -
    routing data attached     with a profile                    the same: policies read it     -

Source: EdgeMoE §III-B, "Profiling expert importance" and "Selecting expert-wise bitwidths". The paper moves K step by
        step until the loss reaches the target; here K is bisected, which gives the same K if fewer bits lose more.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.sensitivity import ABSMAX_FORMATS
from moe_pack.convert.plan import options
from moe_pack.convert.plan.plan_file import Decision
from moe_pack.convert.plan.planned import PlanningModel
from moe_pack.formats import PlanError
from moe_pack.formats.pack import plans
from moe_pack.formats.parts import specs

EDGEMOE_WIDTHS = (2, 4, 8, 16)  # INT2, INT4, INT8, and not quantized

Widths = NDArray[np.int64]  # [L, E]: one width for all matrices of an expert


def widths_for_loss(
    importance: NDArray[np.floating], is_tolerable: Callable[[Widths], bool], choices: tuple[int, ...] = EDGEMOE_WIDTHS
) -> Widths:
    """Returns the widths of the smallest model, by the paper's steps, whose loss is tolerable.

    Args:    importance: [L, E], the loss with only that expert at 2 bits.   is_tolerable: whether the loss of a model
             with these widths is tolerable.   choices: widths, in ascending order.
    Raises:  PlanError if the loss is not tolerable at the largest width.
    """
    uniform = [np.full(importance.shape, width, np.int64) for width in choices]
    first = next((number for number, widths in enumerate(uniform) if is_tolerable(widths)), None)
    if first is None:
        raise PlanError(
            f"--max-loss: --search edgemoe loses more even with all experts at {choices[-1]} bits; allow more"
        )
    if first == 0:
        return uniform[0]
    # The flat indices of experts by rising importance; equally important ones stay in the model's order.
    order = np.argsort(importance, axis=None, kind="stable")
    lower, upper = choices[first - 1], choices[first]
    # K = 0 is tolerable and K = all is not; bisection finds how many K above 0 are.
    lowered = range(1, importance.size)
    most = bisect_left(lowered, True, key=lambda k: not is_tolerable(_mixed(order, k, lower, upper, importance.shape)))
    return _mixed(order, most, lower, upper, importance.shape)


def edgemoe_plan(spec: specs.ModelSpec, widths: Widths, selector: specs.Selector) -> plans.Plan:
    """Returns the plan that stores experts at these widths as the paper does: linear, with one scale a row."""
    parts = {width: plans.part_format(width, plans.ROW_GROUP) for width in EDGEMOE_WIDTHS}
    has_gate = "gate" in spec.expert.matrices
    formats = {width: plans.ExpertFormat(part if has_gate else None, part, part) for width, part in parts.items()}
    experts = tuple(tuple(formats[width] for width in layer) for layer in widths.tolist())
    return plans.Plan(selector, "absmax", experts, plans.uniform_dense(spec, None))


def edgemoe_decision(model: PlanningModel, max_loss: float, selector: specs.Selector) -> Decision:
    """Returns the smallest pack, by the paper's steps, that is estimated to lose at most `max_loss` nats.

    The paper measures the loss of a model; here it is estimated from a profile. Every neuron runs, and dense matrices
    keep the source's bytes.
    Raises:  PlanError if the model's rows cannot have these formats.
    """
    importance = model.losses.importance
    if fault := plans.format_fault(plans.part_format(EDGEMOE_WIDTHS[0], plans.ROW_GROUP), model.spec.hidden_size):
        raise PlanError(f"--search edgemoe: {fault}; give --search knapsack")

    def decision(widths: Widths) -> Decision:
        return Decision(edgemoe_plan(model.spec, widths, selector), np.zeros(importance.shape))

    return decision(widths_for_loss(importance, lambda widths: model.loss(decision(widths)) <= max_loss))


def _mixed(order: NDArray[np.intp], num_lowered: int, lower: int, upper: int, shape: tuple[int, ...]) -> Widths:
    """Returns widths with the first `num_lowered` experts of the order at the lower width, the others at the upper."""
    widths = np.full(order.size, upper, np.int64)
    widths[order[:num_lowered]] = lower
    return widths.reshape(shape)


FLOE_SPARSITY = 0.9  # §3.2 has 80 and 90%; 90% is the one with a compression of 9.3 times
CORM_THETA = 0.25  # Fig. 10
CORM_POPULAR_SHARE = 0.5  # our reading: the paper says "less frequently used experts" and no number
_INT2, _INT2_FINE, _INT4 = plans.part_format(2, 64), plans.part_format(2, 16, 8), plans.part_format(4, 64, 8)

Shares = NDArray[np.float64]  # [L, E]


def preset_decision(
    name: options.PresetName, model: PlanningModel, sparsity: float | None = None, max_loss: float | None = None
) -> Decision:
    """Returns what a paper would store.

    Args:    sparsity: for FloE, in place of the paper's 90%.   max_loss: for EdgeMoE, the nats that are estimated at
             most, in place of the paper's 2% of perplexity; other packs do not depend on a loss.
    Raises:  PlanError if the model does not have the matrices, or its rows the groups, that the paper needs; or if a
             sparsity is given for another paper.
    """
    if sparsity is not None and name != "floe":
        raise PlanError(f"--sparsity does not apply to --preset {name}; remove it or give --preset floe")
    if sparsity is not None and not 0 <= sparsity < 1:
        raise PlanError(f"--sparsity: found {sparsity}, expected a share of at least 0 and less than 1")
    return replace(_PRESETS[name](model, sparsity, max_loss), is_plain=True)


def _floe(model: PlanningModel, sparsity: float | None, max_loss: float | None) -> Decision:
    """Returns FloE's pack (§3.2): `up` in HQQ's INT2 decides what runs; gate columns and down rows have 16 bits."""
    _check_rows("floe", model.spec, _INT2)
    plan = plans.uniform_plan(model.spec, "up", _INT2, plans.BF16)
    return Decision(plan, np.full(model.losses.popularity.shape, FLOE_SPARSITY if sparsity is None else sparsity))


def _corm(model: PlanningModel, sparsity: float | None, max_loss: float | None) -> Decision:
    """Returns CORM's pack (§4.1, §4.4, appendix): `gate` decides at one threshold, experts have INT4 g64 or INT2 g16.

    Popular experts have INT4. The paper's "scale groups", which keep scales in 8 bits, are our byte scales. The share
    of neurons that the threshold drops is estimated if a profile counted activations.
    """
    spec, losses = model.spec, model.losses
    if "gate" not in spec.expert.matrices:
        raise PlanError("--preset corm: this model's experts have no gate matrix; give floe, fiddler or edgemoe")
    _check_rows("corm", spec, _INT4, _INT2_FINE)
    popular = _most_popular(losses.popularity, CORM_POPULAR_SHARE)
    formats = {
        True: plans.ExpertFormat(_INT4, _INT4, _INT4),
        False: plans.ExpertFormat(_INT2_FINE, _INT2_FINE, _INT2_FINE),
    }
    experts = tuple(tuple(formats[is_popular] for is_popular in layer) for layer in popular.tolist())
    is_known = losses.quantiles is not None
    sparsities = losses.sparsity_at(CORM_THETA, "gate") if is_known else np.zeros(losses.popularity.shape)
    return Decision(plans.Plan("gate", "hqq", experts, plans.uniform_dense(spec, None)), sparsities, CORM_THETA)


def _fiddler(model: PlanningModel, sparsity: float | None, max_loss: float | None) -> Decision:
    """Returns Fiddler's pack (§4.1): the original's 16 bits. The paper's placement is `moe-run --policy fiddler`."""
    plan = plans.uniform_plan(model.spec, "none", plans.BF16, plans.BF16)
    return Decision(plan, np.zeros(model.losses.popularity.shape))


def _edgemoe(model: PlanningModel, sparsity: float | None, max_loss: float | None) -> Decision:
    """Returns EdgeMoE's pack (§III-B): INT2, INT4 or INT8 by importance, within 2% of loss; experts are read whole."""
    _check_rows("edgemoe", model.spec, *ABSMAX_FORMATS)
    papers_loss = options.PAPERS_LIMITS["edgemoe"].nats(model.losses.nll_per_kl)
    return edgemoe_decision(model, papers_loss if max_loss is None else max_loss, "none")


_PRESETS: dict[options.PresetName, Callable[[PlanningModel, float | None, float | None], Decision]] = {
    "floe": _floe,
    "corm": _corm,
    "fiddler": _fiddler,
    "edgemoe": _edgemoe,
}


def _check_rows(name: options.PresetName, spec: specs.ModelSpec, *parts: plans.PartFormat) -> None:
    fault = next(filter(None, (plans.format_fault(part, spec.hidden_size) for part in parts)), None)
    if fault:
        raise PlanError(f"--preset {name}: {fault}; give --preset fiddler, which stores 16 bits")


def _most_popular(popularity: Shares, share: float) -> NDArray[np.bool_]:
    """Returns which experts are in the most popular share of their layer: bool [L, E]; of equal ones the first."""
    number = round(share * popularity.shape[1])
    ranks = np.argsort(np.argsort(-popularity, axis=1, kind="stable"), axis=1)
    chosen: NDArray[np.bool_] = ranks < number
    return chosen
