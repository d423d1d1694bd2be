"""What a profile foretells of every choice a plan can make, as one table of losses: a plan's loss is their sum.

All in nats of KL divergence from the original, a token. Nothing is measured here; what a profile measured is scaled to
every format that a plan may choose, and made safe to choose by. docs/profile.md says how far losses add up.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_pack.calib.arrays import Array
from moe_pack.calib.calibrated_error import base_width, calibrated_formats
from moe_pack.calib.effects import DENSE_WIDTHS, Effects, LayerErrors
from moe_pack.calib.expert_error import ABSMAX_FORMATS, GROUP, SPARSITIES, WIDTHS, compared_formats, quantized_formats
from moe_pack.calib.expert_pass import KINDS
from moe_pack.calib.profile import EXACT_FILE, Profile
from moe_pack.calib.rounded import roundable_roles
from moe_pack.calib.statistics import QUANTILE_LEVELS
from moe_pack.formats import (
    BF16,
    MATRICES,
    DenseRole,
    ModelSpec,
    PartFormat,
    PlanError,
    Quantizer,
    Selector,
    dense_roles,
    part_format,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Nats of KL divergence for each choice; E experts in each of L MoE layers.

    `quantizer`: how plans made from these round experts.
    `formats`: F formats of expert matrices, what the model's rows allow, bfloat16 last, whose loss is 0.
    `quantized` [L, E, 3, F]: gate, up, down of each expert, rounded as conversion does it with hqq; 0 for a gate the
    family has not.   `calibrated_formats`, `calibrated` [L, E, 3, C]: the same by calibrated rounding; bfloat16 alone
    where nothing was measured of it.
    `absmax` [L, E, 3, 4]: the same at 2, 4 and 8 bits by absmax, a scale a row, and bfloat16.
    `importance` [L, E]: of an expert at 2 bits, as EdgeMoE orders them.   `kinds`: of selectors, as `sparse` has them
    (`none` drops what `both` does).   `sparsities`: 0 first, whose loss is 0.   `sparse` [L, E, kinds, sparsities].
    `dense_widths`: 16 first, whose loss is 0.   `dense` [roles, widths], in the order of `dense_roles`, of groups of
    64; infinite for what cannot be quantized.   `popularity` [L, E]: the share of tokens that choose the expert; the
    sum over a layer's is k.   `nll_per_kl`: how much ln(perplexity) grows for a nat.   `quantiles` float32
    [L, E, kinds, 103]: of abs(a) at `QUANTILE_LEVELS`; None where no text was run.   `origin`: what all this rests on.
    """

    quantizer: Quantizer
    formats: tuple[PartFormat, ...]
    quantized: Floats
    calibrated_formats: tuple[PartFormat, ...]
    calibrated: Floats
    absmax: Floats
    importance: Floats
    kinds: tuple[Selector, ...]
    sparsities: tuple[float, ...]
    sparse: Floats
    dense_widths: tuple[int, ...]
    dense: Floats
    popularity: Floats
    nll_per_kl: float
    quantiles: Array | None
    origin: str

    def of(self, quantizer: Quantizer) -> tuple[tuple[PartFormat, ...], Floats]:
        """The formats a quantizer's losses are known of, and those, float64 [L, E, 3, formats]; bfloat16 last."""
        if quantizer == "hqq":
            return self.formats, self.quantized
        if quantizer == "calibrated":
            return self.calibrated_formats, self.calibrated
        if quantizer == "absmax":
            return (*ABSMAX_FORMATS, BF16), self.absmax
        return (BF16,), np.zeros_like(self.quantized[..., -1:])

    def sparsity_at(self, theta: float, selector: Selector) -> Floats:
        """The share of each expert's neurons that one threshold for all keeps from running: [L, E], less than 1.

        Meaning: the level at which theta is the quantile of abs(a), between levels interpolated.
        Raises:  PlanError if no quantiles are known.
        """
        if self.quantiles is None:
            raise PlanError(f"theta {theta:g}: what it leaves out is not known without a profile; give --profile")
        kind_idx = self.kinds.index("both" if selector == "none" else selector)
        levels = np.minimum(QUANTILE_LEVELS, QUANTILE_LEVELS[-2])
        shares = [[np.interp(theta, expert[kind_idx], levels) for expert in layer] for layer in self.quantiles]
        return np.array(shares, np.float64)


def losses_of(profile: Profile) -> Losses:
    """The losses that a profile foretells.

    Meaning: error(expert, matrix, width) of groups of 64 * ratio(layer, matrix, format) * effect(layer, matrix, width);
             never more in more bits of the same codec and groups, nor at a lesser sparsity. Calibrated formats count as
             the width they were compared with (`base_width`). An expert that no token reached
             where errors were measured loses its share of what its layer loses in all, as if one token at least had
             chosen it: 0 would have it stored in the fewest bits for nothing.
             Dense matrices were rounded plainly: hqq's lose somewhat less.
    Raises:  PackError if the profile has no sensitivity, or is damaged.
    """
    spec, effects = profile.spec, profile.effects()
    layers = [profile.errors(layer) for layer in range(spec.num_hidden_layers)]
    with_experts = [layers[layer] for layer in spec.moe_layers]
    statistics = [profile.statistics(layer_idx) for layer_idx in range(len(with_experts))]
    tokens = np.stack([layer.tokens for layer in statistics])
    text = profile.facts.text.name
    quantized, absmax = _quantized(with_experts, effects, tokens, spec)
    is_calibrated = profile.has_inputs
    calibrated = calibrated_formats(spec.hidden_size) if is_calibrated else ()
    return Losses(
        quantizer="calibrated" if is_calibrated else "hqq",
        formats=(*quantized_formats(spec.hidden_size), BF16),
        quantized=quantized,
        calibrated_formats=(*calibrated, BF16),
        calibrated=_calibrated(calibrated, with_experts, effects, tokens, spec),
        absmax=absmax,
        importance=_importance(profile, absmax),
        kinds=KINDS,
        sparsities=(0.0, *SPARSITIES),
        sparse=_sparse(with_experts, effects, tokens),
        dense_widths=(16, *DENSE_WIDTHS),
        dense=_dense(layers, effects, spec),
        popularity=np.stack([layer.chosen() for layer in statistics]).astype(np.float64) / profile.num_tokens,
        nll_per_kl=float(effects.nll_per_kl[0]),
        quantiles=np.stack([layer.quantiles for layer in statistics]),
        origin=f"profile of {text}, {profile.num_tokens:,} tokens",
    )


def _quantized(layers: list[LayerErrors], effects: Effects, tokens: Array, spec: ModelSpec) -> tuple[Floats, Floats]:
    """Losses [L, E, 3, formats] of hqq and of absmax, each with bfloat16's."""
    formats = tuple(part for _, part in compared_formats(spec.hidden_size))
    num_solved = len(quantized_formats(spec.hidden_size))
    ratios = np.stack([layer.ratios for layer in layers]).astype(np.float64)  # [L, 3, F]
    found = _foretold(ratios, [part.width for part in formats], layers, effects, tokens, spec)
    solved, absmax = slice(num_solved), slice(num_solved, None)
    return _with_bf16(falling(found[..., solved], formats[solved])), _with_bf16(
        falling(found[..., absmax], formats[absmax])
    )


def _calibrated(
    formats: tuple[PartFormat, ...], layers: list[LayerErrors], effects: Effects, tokens: Array, spec: ModelSpec
) -> Floats:
    """Losses [L, E, 3, formats] of calibrated rounding, with bfloat16's; of no formats, bfloat16's alone."""
    if not formats:
        return np.zeros((*tokens.shape, len(MATRICES), 1))
    ratios = np.stack([layer.calibrated for layer in layers]).astype(np.float64)  # [L, 3, C]
    found = _foretold(ratios, [base_width(part) for part in formats], layers, effects, tokens, spec)
    return _with_bf16(falling(found, formats))


def _foretold(
    ratios: Floats, widths: list[int], layers: list[LayerErrors], effects: Effects, tokens: Array, spec: ModelSpec
) -> Floats:
    """Losses [L, E, 3, F] by ratios [L, 3, F] to what was measured at `widths`."""
    width_idx = [WIDTHS.index(width) for width in widths]
    errors = np.stack([layer.quantized for layer in layers]).astype(np.float64)  # [L, E, 3, widths]
    errors *= np.maximum(effects.quantized, 0.0)[:, None]
    solved = quantized_formats(spec.hidden_size)
    base_idx = [solved.index(part_format(width, GROUP)) for width in widths]
    base = np.stack([layer.ratios for layer in layers]).astype(np.float64)[:, :, base_idx]  # that errors hold already
    scale = np.divide(ratios, base, out=np.ones_like(ratios), where=base > 0)
    return _reached(errors[..., width_idx] * scale[:, None], tokens)


def _importance(profile: Profile, absmax: Floats) -> Floats:
    """EdgeMoE's own measure where the profile has it; else what the expert's matrices lose at 2 bits."""
    if profile.has(EXACT_FILE):
        return profile.exact()["losses"].astype(np.float64)
    return np.asarray(absmax[..., 0].sum(axis=2))


def _sparse(layers: list[LayerErrors], effects: Effects, tokens: Array) -> Floats:
    """Losses [L, E, kinds, sparsities] with sparsity 0's."""
    found = np.stack([layer.sparse for layer in layers]) * np.maximum(effects.sparse, 0.0)[:, None].astype(np.float64)
    found = np.maximum.accumulate(_reached(found, tokens), axis=3)
    return np.concatenate([np.zeros_like(found[..., :1]), found], axis=3)


def _dense(layers: list[LayerErrors], effects: Effects, spec: ModelSpec) -> Floats:
    """Losses [roles, widths]; of an embedding that is the head too, both."""
    known: dict[str, Array] = {}
    for layer, errors in enumerate(layers):
        known |= zip(roundable_roles(spec, layer), errors.dense * effects.dense[layer], strict=True)
    for name in roundable_roles(spec, None):
        known[name] = effects.head if name == "head" else effects.embedding + effects.head * spec.tied_head
    return np.stack([_dense_role(role, known) for role in dense_roles(spec)])


def _dense_role(role: DenseRole, known: dict[str, Array]) -> Floats:
    found = known.get(role.name, np.full(len(DENSE_WIDTHS), np.inf))
    return np.concatenate([[0.0], np.maximum.accumulate(np.maximum(found.astype(np.float64), 0.0))])


def _reached(losses: Floats, tokens: Array) -> Floats:
    """Losses [L, E, ...] with those of experts that lose nothing anywhere by `tokens` [L, E] that chose them."""
    L, E = losses.shape[:2]
    nothing = ~losses.reshape(L, E, -1).any(axis=2)
    shares = np.maximum(tokens, 1) / np.maximum(tokens.sum(axis=1, keepdims=True), 1)  # [L, E]
    in_all = losses.sum(axis=1, keepdims=True)  # [L, 1, ...]
    extra = (1,) * (losses.ndim - 2)
    return np.where(nothing.reshape(L, E, *extra), shares.reshape(L, E, *extra) * in_all, losses)


def falling(losses: Floats, formats: tuple[PartFormat, ...]) -> Floats:
    """Losses [..., F] of which none is more than one in fewer bits of the same codec, groups and scales."""
    found, least = losses.copy(), dict[tuple[str, int, int], Floats]()
    for place in sorted(range(len(formats)), key=lambda place: formats[place].bits):
        groups = formats[place].codec, formats[place].group, formats[place].scale_bits
        found[..., place] = np.minimum(found[..., place], least.get(groups, np.inf))
        least[groups] = found[..., place]
    return found


def _with_bf16(losses: Floats) -> Floats:
    return np.concatenate([losses, np.zeros_like(losses[..., :1])], axis=-1)
