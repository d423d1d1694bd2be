"""The papers' packs: how each stores experts, by name. What its policies are is `moe-run --policy` of the same name.

Where a paper leaves something open, our reading stands at the preset; docs/papers.md has them together.
"""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from moe_pack.convert.plan_file import Decision
from moe_pack.formats import (
    BF16,
    ROW_GROUP,
    ExpertFormat,
    ModelSpec,
    PartFormat,
    Plan,
    PlanError,
    part_format,
    uniform_plan,
)

PresetName = Literal["floe", "corm", "fiddler"]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)

FLOE_SPARSITY = 0.9  # of §3.2's two settings, 80 and 90%, the one of its compression of 9.3 times
CORM_THETA = 0.25  # Fig. 10
CORM_POPULAR_SHARE = 0.5  # our reading: the paper says "less frequently used experts" and no number
_INT2, _INT2_FINE, _INT4 = part_format(2, 64), part_format(2, 16, 8), part_format(4, 64, 8)

Shares = NDArray[np.float64]  # [L, E]


def preset_decision(name: PresetName, spec: ModelSpec, popularity: Shares, sparsity: float | None) -> Decision:
    """What a paper would store.

    Args:    popularity: [L, E].   sparsity: of FloE's, in place of its 90%; None: the paper's.
    Raises:  PlanError if the model has not the matrices, or its rows not the groups, that the paper needs; or for a
             sparsity where the paper has none.
    """
    if sparsity is not None and name != "floe":
        raise PlanError(f"--sparsity: preset {name} sets what runs itself; leave it out")
    return _PRESETS[name](spec, popularity, sparsity)


def _floe(spec: ModelSpec, popularity: Shares, sparsity: float | None) -> Decision:
    """FloE §3.2: `up` in HQQ's INT2 decides what runs, gate columns and down rows in 16 bit."""
    plan = uniform_plan(spec, "up", _INT2, BF16)
    return Decision(plan, np.full(popularity.shape, FLOE_SPARSITY if sparsity is None else sparsity))


def _corm(spec: ModelSpec, popularity: Shares, sparsity: float | None) -> Decision:
    """CORM §4.1, §4.4, appendix: `gate` decides at one threshold; popular experts in INT4 g64, the rest in INT2 g16.

    Its "scale groups", which keep scales in 8 bits, are our byte scales.
    """
    plan = uniform_plan(spec, "gate", _INT4, _INT4)
    for part in (_INT4, _INT2_FINE):
        uniform_plan(spec, "gate", part, part)  # refuses what rows cannot hold
    popular = _most_popular(popularity, CORM_POPULAR_SHARE)
    formats = {True: _uniform(spec, _INT4), False: _uniform(spec, _INT2_FINE)}
    experts = tuple(tuple(formats[held] for held in layer) for layer in popular.tolist())
    return Decision(Plan("gate", "hqq", experts, plan.dense), np.zeros(popularity.shape), CORM_THETA)


def _fiddler(spec: ModelSpec, popularity: Shares, sparsity: float | None) -> Decision:
    """Fiddler §3: the original's 16 bit; what it plans is where experts lie (`moe-run --policy fiddler`)."""
    plan = uniform_plan(spec, "none", BF16, BF16)
    return Decision(plan, np.zeros(popularity.shape))


_PRESETS: dict[PresetName, Callable[[ModelSpec, Shares, float | None], Decision]] = {
    "floe": _floe,
    "corm": _corm,
    "fiddler": _fiddler,
}


def edgemoe_formats() -> dict[int, PartFormat]:
    """EdgeMoE §III-B's formats by width: absmax, a scale a row ("channel-wise linear quantization")."""
    return {width: part_format(width, ROW_GROUP) for width in (2, 4, 8)}


def _uniform(spec: ModelSpec, part: PartFormat) -> ExpertFormat:
    return ExpertFormat(part if "gate" in spec.expert.matrices else None, part, part)


def _most_popular(popularity: Shares, share: float) -> NDArray[np.bool_]:
    """The most popular experts of each layer, so many of them: bool [L, E]; ties to the lower number."""
    number = round(share * popularity.shape[1])
    ranks = np.argsort(np.argsort(-popularity, axis=1, kind="stable"), axis=1)
    chosen: NDArray[np.bool_] = ranks < number
    return chosen
