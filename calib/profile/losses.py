"""The losses of every choice that a plan can make, in nats of KL divergence a token; a plan's estimate is their sum.

`losses_of` scales a profile's figures to every format. Without a profile, `assumed_losses` spreads the losses of a
trained model evenly; plans say so (`Losses.origin`). `python tests/bench/plans.py assumed-losses` writes
`assumed_losses.json` from a profile of the demo model.
"""

import math
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib import forward, sensitivity
from moe_pack.calib.profile import profiles
from moe_pack.calib.quantize import needs_inputs
from moe_pack.calib.sensitivity import calibrated_formats
from moe_pack.calib.statistics import QUANTILE_LEVELS
from moe_pack.formats.base import errors, json_files
from moe_pack.formats.pack import plans
from moe_pack.formats.parts import specs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """The loss of each choice in nats of KL divergence, for E experts in each of L MoE layers."""

    quantizer: plans.Quantizer  # the one that plans made from these losses use for experts
    # F formats of expert matrices that the model's rows allow; bfloat16 is the last, and its loss is 0
    formats: tuple[plans.PartFormat, ...]
    quantized: Floats  # [L, E, 3, F], of gate, up and down with hqq; 0 for a gate that the family does not have
    calibrated_formats: tuple[plans.PartFormat, ...]  # only bfloat16 if calibrated quantization was not measured
    calibrated: Floats  # [L, E, 3, C], the same with calibrated quantization
    absmax: Floats  # [L, E, 3, 4], with absmax and one scale a row, at 2, 4 and 8 bits and in bfloat16
    importance: Floats  # [L, E], the loss of an expert at 2 bits, by which EdgeMoE orders experts
    kinds: tuple[specs.Selector, ...]  # the selectors of `sparse` (`none` drops the neurons that `both` does)
    sparsities: tuple[float, ...]  # 0 is the first, and its loss is 0
    sparse: Floats  # [L, E, kinds, sparsities]
    dense_widths: tuple[int, ...]  # 16 is the first, and its loss is 0
    dense: Floats  # [roles, widths] in the order of `dense_roles`, in groups of 64; infinite where not quantizable
    popularity: Floats  # [L, E], the share of tokens that choose the expert; a layer's sum is k
    nll_per_kl: float  # the growth of ln(perplexity) for each nat
    # float32 [L, E, kinds, 103], of abs(a) at `QUANTILE_LEVELS`; None without a profile
    quantiles: forward.Array | None
    origin: str  # the source of all these figures

    def of(self, quantizer: plans.Quantizer) -> tuple[tuple[plans.PartFormat, ...], Floats]:
        """Returns the formats of a quantizer and their losses, float64 [L, E, 3, formats]; bfloat16 is the last."""
        if quantizer == "hqq":
            return self.formats, self.quantized
        if quantizer == "calibrated":
            return self.calibrated_formats, self.calibrated
        if quantizer == "absmax":
            return (*sensitivity.ABSMAX_FORMATS, plans.BF16), self.absmax
        return (plans.BF16,), np.zeros_like(self.quantized[..., -1:])

    def sparsity_at(self, theta: float, selector: specs.Selector) -> Floats:
        """Returns the share [L, E] of neurons below the threshold `theta`; PlanError if the quantiles are not known."""
        if self.quantiles is None:
            raise errors.PlanError(
                f"theta {theta:g}: without a profile it is not known which share of neurons it drops; give --profile"
            )
        kind_idx = self.kinds.index("both" if selector == "none" else selector)
        levels = np.minimum(QUANTILE_LEVELS, QUANTILE_LEVELS[-2])
        shares = [[np.interp(theta, expert[kind_idx], levels) for expert in layer] for layer in self.quantiles]
        return np.array(shares, np.float64)


def losses_of(profile: profiles.Profile) -> Losses:
    """Estimates losses from a profile.

    Meaning: loss(expert, matrix, width) of groups of 64 * ratio(layer, matrix, format) / ratio of groups of 64. More
             bits of the same codec and groups never lose more, and neither does less sparsity. Calibrated formats count
             as their `base_width`. An expert without tokens gets the loss of one token of its layer: with a loss of 0,
             a plan would give it the fewest bits. Dense matrices were rounded plainly; hqq loses somewhat less. A
             profile of an importance file gives only the popularity.
    Raises:  PackError if the profile has no sensitivity, or is damaged.
    """
    if profile.facts.imatrix is not None:
        return _with_popularity(profile)
    spec, effects = profile.spec, profile.effects()
    layers = [profile.layer_losses(layer) for layer in range(spec.num_hidden_layers)]
    with_experts = [layers[layer] for layer in spec.moe_layers]
    statistics = [profile.statistics(layer_idx) for layer_idx in range(len(with_experts))]
    tokens = np.stack([layer.tokens for layer in statistics])
    text = profile.facts.text.name
    quantized, absmax = _quantized(with_experts, tokens, spec)
    is_calibrated = profile.has_inputs
    calibrated = calibrated_formats(spec.hidden_size) if is_calibrated else ()
    return Losses(
        quantizer="calibrated" if is_calibrated else "hqq",
        formats=(*sensitivity.quantized_formats(spec.hidden_size), plans.BF16),
        quantized=quantized,
        calibrated_formats=(*calibrated, plans.BF16),
        calibrated=_calibrated(calibrated, with_experts, tokens, spec),
        absmax=absmax,
        importance=_importance(profile, absmax),
        kinds=forward.KINDS,
        sparsities=(0.0, *sensitivity.SPARSITIES),
        sparse=_sparse(with_experts, tokens),
        dense_widths=(16, *sensitivity.DENSE_WIDTHS),
        dense=_dense(layers, effects, spec),
        popularity=np.stack([layer.chosen(profile.spec.router) for layer in statistics]).astype(np.float64)
        / profile.num_tokens,
        nll_per_kl=float(effects.nll_per_kl[0]),
        quantiles=np.stack([layer.quantiles for layer in statistics]),
        origin=f"profile of {text}, {profile.num_tokens:,} tokens",
    )


def _with_popularity(profile: profiles.Profile) -> Losses:
    losses = assumed_losses(profile.spec)
    tokens = [profile.moments(layer_idx).tokens for layer_idx in range(len(profile.spec.moe_layers))]
    counts = np.stack(tokens).astype(np.float64)
    popularity = counts * (profile.spec.router.num_experts_per_tok / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    origin = f"{losses.origin}; popularity from an importance file of {profile.facts.text.name}"
    return replace(losses, popularity=popularity, origin=origin)


def _quantized(
    layers: list[sensitivity.LayerLosses], tokens: forward.Array, spec: specs.ModelSpec
) -> tuple[Floats, Floats]:
    """Returns losses [L, E, 3, formats] of hqq and of absmax, each with bfloat16's."""
    formats = tuple(part for _, part in sensitivity.compared_formats(spec.hidden_size))
    num_solved = len(sensitivity.quantized_formats(spec.hidden_size))
    ratios = np.stack([layer.ratios for layer in layers]).astype(np.float64)  # [L, 3, F]
    losses = _estimated(ratios, [part.width for part in formats], layers, tokens, spec)
    solved, absmax = slice(num_solved), slice(num_solved, None)
    return _with_bf16(falling(losses[..., solved], formats[solved])), _with_bf16(
        falling(losses[..., absmax], formats[absmax])
    )


def _calibrated(
    formats: tuple[plans.PartFormat, ...],
    layers: list[sensitivity.LayerLosses],
    tokens: forward.Array,
    spec: specs.ModelSpec,
) -> Floats:
    """Returns losses [L, E, 3, formats] of calibrated quantization with bfloat16's."""
    if not formats:
        return np.zeros((*tokens.shape, len(specs.MATRICES), 1))
    ratios = np.stack([layer.calibrated for layer in layers]).astype(np.float64)  # [L, 3, C]
    widths, repeats = [sensitivity.base_width(part) for part in formats], [needs_inputs(part) for part in formats]
    return _with_bf16(falling(_estimated(ratios, widths, layers, tokens, spec, repeats), formats))


def _estimated(
    ratios: Floats,
    widths: list[int],
    layers: list[sensitivity.LayerLosses],
    tokens: forward.Array,
    spec: specs.ModelSpec,
    repeats: list[bool] | None = None,
) -> Floats:
    """Scales losses at `widths` by ratios [L, 3, F]: [L, E, 3, F]. Formats in `repeats` store some rows twice."""
    width_idx = [sensitivity.WIDTHS.index(width) for width in widths]
    losses = np.stack([layer.quantized for layer in layers]).astype(np.float64)[..., width_idx]  # [L, E, 3, F]
    if repeats is not None:
        repeated = np.stack([layer.repeated for layer in layers]).astype(np.float64)[..., width_idx]  # [L, E, F]
        down = specs.MATRICES.index("down")
        losses[:, :, down] = np.where(repeats, repeated, losses[:, :, down])
    solved = sensitivity.quantized_formats(spec.hidden_size)
    base_idx = [solved.index(plans.part_format(width, sensitivity.GROUP)) for width in widths]
    base = np.stack([layer.ratios for layer in layers]).astype(np.float64)[:, :, base_idx]  # losses contain it already
    scale = np.divide(ratios, base, out=np.ones_like(ratios), where=base > 0)
    return _reached(losses * scale[:, None], tokens)


def _importance(profile: profiles.Profile, absmax: Floats) -> Floats:
    """Returns EdgeMoE's own measure, or the losses at 2 bits if the profile lacks it."""
    if profile.has(profiles.EXACT_FILE):
        return profile.exact()["losses"].astype(np.float64)
    return np.asarray(absmax[..., 0].sum(axis=2))


def _sparse(layers: list[sensitivity.LayerLosses], tokens: forward.Array) -> Floats:
    """Returns losses [L, E, kinds, sparsities] with sparsity 0's."""
    losses = np.stack([layer.sparse for layer in layers]).astype(np.float64)
    losses = np.maximum.accumulate(_reached(losses, tokens), axis=3)
    return np.pad(losses, ((0, 0), (0, 0), (0, 0), (1, 0)))


def _dense(layers: list[sensitivity.LayerLosses], effects: sensitivity.Effects, spec: specs.ModelSpec) -> Floats:
    """Returns losses [roles, widths]; an embedding that is the head too has both losses."""
    known: dict[str, forward.Array] = {}
    for layer, losses in enumerate(layers):
        known |= zip(sensitivity.roundable_roles(spec, layer), losses.dense, strict=True)
    for name in sensitivity.roundable_roles(spec, None):
        known[name] = effects.head if name == "head" else effects.embedding + effects.head * spec.tied_head
    unknown = np.full(len(sensitivity.DENSE_WIDTHS), np.inf)
    table = np.stack([known.get(role.name, unknown).astype(np.float64) for role in specs.dense_roles(spec)])
    return np.pad(np.maximum.accumulate(np.maximum(table, 0.0), axis=1), ((0, 0), (1, 0)))


def _reached(losses: Floats, tokens: forward.Array) -> Floats:
    """Returns losses [L, E, ...] in which experts without any loss get a share of their layer's by `tokens` [L, E]."""
    L, E = losses.shape[:2]
    nothing = ~losses.reshape(L, E, -1).any(axis=2)
    shares = np.maximum(tokens, 1) / np.maximum(tokens.sum(axis=1, keepdims=True), 1)  # [L, E]
    in_all = losses.sum(axis=1, keepdims=True)  # [L, 1, ...]
    extra = (1,) * (losses.ndim - 2)
    return np.where(nothing.reshape(L, E, *extra), shares.reshape(L, E, *extra) * in_all, losses)


def falling(losses: Floats, formats: tuple[plans.PartFormat, ...]) -> Floats:
    """Returns losses [..., F] in which more bits of the same codec, groups and scales never lose more."""
    result, least = losses.copy(), dict[tuple[str, int, int], Floats]()
    for place in sorted(range(len(formats)), key=lambda place: formats[place].bits):
        groups = formats[place].codec, formats[place].group, formats[place].scale_bits
        result[..., place] = np.minimum(result[..., place], least.get(groups, np.inf))
        least[groups] = result[..., place]
    return result


def _with_bf16(losses: Floats) -> Floats:
    return np.concatenate([losses, np.zeros_like(losses[..., :1])], axis=-1)


FILE = "assumed_losses.json"
_DENSE_WIDTHS = (16, *sensitivity.DENSE_WIDTHS)


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """The loss in nats of all experts' gates, ups and downs in a format of `width` bits."""

    width: int
    group: int
    scale_bits: int
    gate: float
    up: float
    down: float


@dataclass(frozen=True, slots=True)
class KindLoss:
    """The loss in nats of all experts at each sparsity of a profile, with one selector."""

    kind: str
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AssumedLosses:
    """The content of `assumed_losses.json`: the loss of a whole model in nats."""

    origin: str
    formats: tuple[FormatLoss, ...]  # with hqq
    absmax: tuple[FormatLoss, ...]  # with absmax and a scale for each 128 weights
    sparse: tuple[KindLoss, ...]
    layers: tuple[float, ...]  # of dense matrices, at 8 and 4 bits; the next two too
    embed: tuple[float, ...]
    head: tuple[float, ...]
    nll_per_kl: float


def assumed_losses(spec: specs.ModelSpec) -> Losses:
    """Returns the losses of a model of this shape if it loses as much as a trained model, evenly over all experts.

    Meaning: an expert's matrix has 1 / (L E) of the loss of all such matrices; a dense matrix the share of its
             parameters; tokens choose experts evenly. A row as one group: loss(d) = loss(128) * (d / 128)^log2(hqq(128)
             / hqq(64)).
    """
    place = files("moe_pack.calib.profile").joinpath(FILE)
    return spread(
        json_files.load(
            AssumedLosses, json_files.parse(place.read_bytes(), FILE, errors.PackError), FILE, errors.PackError
        ),
        spec,
    )


def spread(assumed: AssumedLosses, spec: specs.ModelSpec) -> Losses:
    """The losses of a whole model, over this shape."""
    L, router = len(spec.moe_layers), spec.router
    E = router.num_experts
    formats = sensitivity.quantized_formats(spec.hidden_size)
    known = {(f.width, f.group, f.scale_bits): np.asarray([f.gate, f.up, f.down]) for f in assumed.formats}
    quantized = _spread([_loss(known, part, spec.hidden_size) for part in formats], formats, spec)
    rows = [np.asarray([f.gate, f.up, f.down]) * _growth(known, f.width, spec.hidden_size) for f in assumed.absmax]
    absmax = _spread(rows, sensitivity.ABSMAX_FORMATS, spec)
    by_kind = {kind_loss.kind: (0.0, *kind_loss.losses) for kind_loss in assumed.sparse}
    sparse = np.asarray([by_kind[kind] for kind in forward.KINDS])
    return Losses(
        quantizer="hqq",
        formats=(*formats, plans.BF16),
        quantized=quantized,
        calibrated_formats=(plans.BF16,),
        calibrated=np.zeros_like(quantized[..., -1:]),
        absmax=absmax,
        importance=absmax[..., 0].sum(axis=2),
        kinds=forward.KINDS,
        sparsities=(0.0, *sensitivity.SPARSITIES),
        sparse=np.tile(sparse / (L * E), (L, E, 1, 1)),
        dense_widths=_DENSE_WIDTHS,
        dense=_assumed_dense(assumed, spec),
        popularity=np.full((L, E), router.num_experts_per_tok / E),
        nll_per_kl=assumed.nll_per_kl,
        quantiles=None,
        origin=f"assumed: the losses of another model, spread evenly over all experts ({assumed.origin})",
    )


def _spread(in_all: list[Floats], formats: tuple[plans.PartFormat, ...], spec: specs.ModelSpec) -> Floats:
    """Spreads the sums of all gates, ups and downs [3] over experts: [L, E, 3, formats and bfloat16]."""
    L, E = len(spec.moe_layers), spec.router.num_experts
    totals = np.concatenate([falling(np.stack(in_all, axis=1), formats), np.zeros((len(specs.MATRICES), 1))], axis=1)
    totals[[matrix not in spec.expert.matrices for matrix in specs.MATRICES]] = 0
    return np.tile(totals / (L * E), (L, E, 1, 1))


def _loss(known: dict[tuple[int, int, int], Floats], part: plans.PartFormat, num_cols: int) -> Floats:
    if part.group != plans.ROW_GROUP:
        return known[part.width, part.group, part.scale_bits]
    return known[part.width, 128, part.scale_bits] * _growth(known, part.width, num_cols)


def _growth(known: dict[tuple[int, int, int], Floats], width: int, num_cols: int) -> Floats:
    """Returns the ratio of losses of a row as one group to those of groups of 128, [3]."""
    half, whole = known[width, 64, 16], known[width, 128, 16]
    growth = np.log2(np.divide(whole, half, out=np.ones_like(whole), where=half > 0))
    return np.asarray((num_cols / 128) ** growth)


def _assumed_dense(assumed: AssumedLosses, spec: specs.ModelSpec) -> Floats:
    roles = specs.dense_roles(spec)
    of_layers = {name for layer in range(spec.num_hidden_layers) for name in sensitivity.roundable_roles(spec, layer)}
    ends = {"embed": np.asarray(assumed.embed), "head": np.asarray(assumed.head)}
    if spec.tied_head:
        ends = {"embed": ends["embed"] + ends["head"]}
    num_all = sum(math.prod(role.shape) for role in roles if role.name in of_layers)
    losses = np.full((len(roles), len(_DENSE_WIDTHS)), np.inf)
    losses[:, 0] = 0
    for idx, role in enumerate(roles):
        if role.name in of_layers:
            losses[idx, 1:] = np.asarray(assumed.layers) * (math.prod(role.shape) / num_all)
        elif role.name in sensitivity.roundable_roles(spec, None):
            losses[idx, 1:] = ends[role.name]
    return losses
