"""Losses for planning without a profile: those of a trained model, spread evenly over another's shape.

Not a measurement, and every plan made from them has to say so (`Losses.origin`). The figures lie in
`assumed_losses.json`, which `python tests/bench/plans.py assumed-losses` writes from a profile of the demo model.
"""

import math
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from moe_pack.calib.effects import DENSE_WIDTHS
from moe_pack.calib.expert_error import ABSMAX_FORMATS, SPARSITIES, quantized_formats
from moe_pack.calib.expert_pass import KINDS
from moe_pack.calib.losses import Floats, Losses, falling
from moe_pack.calib.rounded import roundable_roles
from moe_pack.formats import BF16, MATRICES, ROW_GROUP, ModelSpec, PackError, PartFormat, dense_roles, load, parse

FILE = "assumed_losses.json"
_DENSE_WIDTHS = (16, *DENSE_WIDTHS)


@dataclass(frozen=True, slots=True)
class FormatLoss:
    """What all experts' gates, ups and downs lose in a format of `width` bits: nats."""

    width: int
    group: int
    scale_bits: int
    gate: float
    up: float
    down: float


@dataclass(frozen=True, slots=True)
class KindLoss:
    """What all experts lose at each sparsity of a profile, by a selector kind."""

    kind: str
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AssumedLosses:
    """The JSON: nats that a whole model loses.

    `formats`: by hqq.   `absmax`: by absmax, a scale for each 128 weights.   `layers`, `embed`, `head`: dense matrices,
    at 8 and 4 bits.
    """

    origin: str
    formats: tuple[FormatLoss, ...]
    absmax: tuple[FormatLoss, ...]
    sparse: tuple[KindLoss, ...]
    layers: tuple[float, ...]
    embed: tuple[float, ...]
    head: tuple[float, ...]
    nll_per_kl: float


def assumed_figures(losses: Losses, spec: ModelSpec, name: str) -> AssumedLosses:
    """What a model, whose head is not its embedding, loses in all: three digits of each figure. Not of hqq's rows.

    Its hidden size is 128: all groups are there, and a row is one of them.
    """
    totals = losses.quantized.sum(axis=(0, 1))  # [3, F]
    held = [
        FormatLoss(part.width, part.group, part.scale_bits, *_digits(column))
        for part, column in zip(losses.formats, totals.T, strict=True)
        if part != BF16 and part.group != ROW_GROUP
    ]
    absmax = [
        FormatLoss(part.width, spec.hidden_size, part.scale_bits, *_digits(column))
        for part, column in zip(ABSMAX_FORMATS, losses.absmax[..., :-1].sum(axis=(0, 1)).T, strict=True)
    ]
    sparse = losses.sparse.sum(axis=(0, 1))[:, 1:]  # [kinds, sparsities]
    dense = {role.name: losses.dense[idx, 1:] for idx, role in enumerate(dense_roles(spec))}
    layers = sum((dense[n] for l in range(spec.num_hidden_layers) for n in roundable_roles(spec, l)), np.zeros(2))
    return AssumedLosses(
        origin=f"{name}: {losses.origin}",
        formats=tuple(held),
        absmax=tuple(absmax),
        sparse=tuple(KindLoss(kind, _digits(row)) for kind, row in zip(losses.kinds, sparse, strict=True)),
        layers=_digits(layers),
        embed=_digits(dense["embed"]),
        head=_digits(dense["head"]),
        nll_per_kl=_digits(np.asarray([losses.nll_per_kl]))[0],
    )


def assumed_losses(spec: ModelSpec) -> Losses:
    """The losses of a model of this shape if it loses in all what a trained model does, every expert alike.

    Meaning: an expert's matrix has 1 / (L E) of what all such matrices lose; a dense matrix the share of its
             parameters; tokens choose experts evenly. A row as one group goes on as hqq's groups of 64 and 128
             begin, by absmax too: loss(d) = loss(128) * (d / 128)^log2(hqq(128) / hqq(64)).
    """
    place = files("moe_pack.calib").joinpath(FILE)
    return spread(load(AssumedLosses, parse(place.read_bytes(), FILE, PackError), FILE, PackError), spec)


def spread(assumed: AssumedLosses, spec: ModelSpec) -> Losses:
    """The losses of a whole model, over this shape."""
    L, router = len(spec.moe_layers), spec.router
    E = router.num_experts
    formats = quantized_formats(spec.hidden_size)
    known = {(f.width, f.group, f.scale_bits): np.asarray([f.gate, f.up, f.down]) for f in assumed.formats}
    quantized = _spread([_loss(known, part, spec.hidden_size) for part in formats], formats, spec)
    rows = [np.asarray([f.gate, f.up, f.down]) * _growth(known, f.width, spec.hidden_size) for f in assumed.absmax]
    absmax = _spread(rows, ABSMAX_FORMATS, spec)
    by_kind = {held.kind: (0.0, *held.losses) for held in assumed.sparse}
    sparse = np.asarray([by_kind[kind] for kind in KINDS])
    return Losses(
        quantizer="hqq",
        formats=(*formats, BF16),
        quantized=quantized,
        calibrated_formats=(BF16,),
        calibrated=np.zeros_like(quantized[..., -1:]),
        absmax=absmax,
        importance=absmax[..., 0].sum(axis=2),
        kinds=KINDS,
        sparsities=(0.0, *SPARSITIES),
        sparse=np.tile(sparse / (L * E), (L, E, 1, 1)),
        dense_widths=_DENSE_WIDTHS,
        dense=_dense(assumed, spec),
        popularity=np.full((L, E), router.num_experts_per_tok / E),
        nll_per_kl=assumed.nll_per_kl,
        quantiles=None,
        origin=f"assumed: every expert alike, in all what another model loses ({assumed.origin})",
    )


def _spread(in_all: list[Floats], formats: tuple[PartFormat, ...], spec: ModelSpec) -> Floats:
    """What each expert loses, [L, E, 3, formats and bfloat16], if all gates, ups and downs [3] lose this in all."""
    L, E = len(spec.moe_layers), spec.router.num_experts
    totals = np.concatenate([falling(np.stack(in_all, axis=1), formats), np.zeros((len(MATRICES), 1))], axis=1)
    totals[[matrix not in spec.expert.matrices for matrix in MATRICES]] = 0
    return np.tile(totals / (L * E), (L, E, 1, 1))


def _loss(known: dict[tuple[int, int, int], Floats], part: PartFormat, num_cols: int) -> Floats:
    """Of gate, up and down in a format of hqq, [3]."""
    if part.group != ROW_GROUP:
        return known[part.width, part.group, part.scale_bits]
    return known[part.width, 128, part.scale_bits] * _growth(known, part.width, num_cols)


def _growth(known: dict[tuple[int, int, int], Floats], width: int, num_cols: int) -> Floats:
    """How much more than groups of 128 a row loses as one group, [3]."""
    half, whole = known[width, 64, 16], known[width, 128, 16]
    growth = np.log2(np.divide(whole, half, out=np.ones_like(whole), where=half > 0))
    return np.asarray((num_cols / 128) ** growth)


def _dense(assumed: AssumedLosses, spec: ModelSpec) -> Floats:
    """Losses [roles, widths]."""
    roles = dense_roles(spec)
    of_layers = {name for layer in range(spec.num_hidden_layers) for name in roundable_roles(spec, layer)}
    ends = {"embed": np.asarray(assumed.embed), "head": np.asarray(assumed.head)}
    if spec.tied_head:
        ends = {"embed": ends["embed"] + ends["head"]}
    num_all = sum(math.prod(role.shape) for role in roles if role.name in of_layers)
    found = np.full((len(roles), len(_DENSE_WIDTHS)), np.inf)
    found[:, 0] = 0
    for idx, role in enumerate(roles):
        if role.name in of_layers:
            found[idx, 1:] = np.asarray(assumed.layers) * (math.prod(role.shape) / num_all)
        elif role.name in roundable_roles(spec, None):
            found[idx, 1:] = ends[role.name]
    return found


def _digits(values: Floats) -> tuple[float, ...]:
    """Three digits of each."""
    return tuple(float(f"{value:.3g}") for value in values.tolist())
