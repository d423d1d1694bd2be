"""The papers' packs: how each stores experts, by name. What its policies are is `moe-run --policy` of the same name.

Where a paper leaves something open, our reading stands at the preset; docs/papers.md has them together.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import ABSMAX_FORMATS
from moe_pack.convert.edgemoe_widths import edgemoe_decision
from moe_pack.convert.plan_file import Decision
from moe_pack.convert.planned import Model
from moe_pack.formats import (
    BF16,
    ExpertFormat,
    ModelSpec,
    PartFormat,
    Plan,
    PlanError,
    format_fault,
    part_format,
    uniform_dense,
    uniform_plan,
)

PresetName = Literal["floe", "corm", "fiddler", "edgemoe"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)

FLOE_SPARSITY = 0.9  # of §3.2's two settings, 80 and 90%, the one of its compression of 9.3 times
CORM_THETA = 0.25  # Fig. 10
CORM_POPULAR_SHARE = 0.5  # our reading: the paper says "less frequently used experts" and no number
EDGEMOE_LOSS = 0.02  # §IV-A: the tolerable loss, of a task's accuracy; our reading: of perplexity
_INT2, _INT2_FINE, _INT4 = part_format(2, 64), part_format(2, 16, 8), part_format(4, 64, 8)

Shares = NDArray[np.float64]  # [L, E]


def preset_decision(name: PresetName, model: Model, sparsity: float | None = None) -> Decision:
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


def _floe(model: Model, sparsity: float | None) -> Decision:
    """FloE §3.2: `up` in HQQ's INT2 decides what runs, gate columns and down rows in 16 bit."""
    _check_rows("floe", model.spec, _INT2)
    plan = uniform_plan(model.spec, "up", _INT2, BF16)
    return Decision(plan, np.full(model.losses.popularity.shape, FLOE_SPARSITY if sparsity is None else sparsity))


def _corm(model: Model, sparsity: float | None) -> Decision:
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


def _fiddler(model: Model, sparsity: float | None) -> Decision:
    """Fiddler §4.1: the original's 16 bit; what it plans is where experts lie (`moe-run --policy fiddler`)."""
    plan = uniform_plan(model.spec, "none", BF16, BF16)
    return Decision(plan, np.zeros(model.losses.popularity.shape))


def _edgemoe(model: Model, sparsity: float | None) -> Decision:
    """EdgeMoE §III-B: INT2, INT4 or INT8 by importance, within 2% of loss; experts are read whole."""
    _check_rows("edgemoe", model.spec, *ABSMAX_FORMATS)
    return edgemoe_decision(model, math.log(1 + EDGEMOE_LOSS) / model.losses.nll_per_kl, "none")


_PRESETS: dict[PresetName, Callable[[Model, float | None], Decision]] = {
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
