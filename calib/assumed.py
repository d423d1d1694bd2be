"""Losses for planning without a profile: those of a trained model, spread evenly over another's shape.

Not a measurement, and every plan made from them has to say so (`Losses.origin`). The figures lie in
`assumed_losses.json`, which `python benchmarks/assumed_losses.py` writes from a profile of the demo model.
"""

import math
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from moe_pack.calib.effects import DENSE_WIDTHS
from moe_pack.calib.expert_error import SPARSITIES, quantized_formats
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
    """The JSON: nats that a whole model loses. `layers`, `embed`, `head`: dense matrices, at 8 and 4 bits."""

    origin: str
    formats: tuple[FormatLoss, ...]
    sparse: tuple[KindLoss, ...]
    layers: tuple[float, ...]
    embed: tuple[float, ...]
    head: tuple[float, ...]
    nll_per_kl: float


def assumed_figures(losses: Losses, spec: ModelSpec, name: str) -> AssumedLosses:
    """What a model, whose head is not its embedding, loses in all: three digits of each figure. Not of rows as groups.

    Its hidden size is a multiple of 128, so that all other groups are there.
    """
    totals = losses.quantized.sum(axis=(0, 1))  # [3, F]
    held = [
        FormatLoss(part.width, part.group, part.scale_bits, *_digits(column))
        for part, column in zip(losses.formats, totals.T, strict=True)
        if part != BF16 and part.group != ROW_GROUP
    ]
    sparse = losses.sparse.sum(axis=(0, 1))[:, 1:]  # [kinds, sparsities]
    dense = {role.name: losses.dense[idx, 1:] for idx, role in enumerate(dense_roles(spec))}
    layers = sum((dense[n] for l in range(spec.num_hidden_layers) for n in roundable_roles(spec, l)), np.zeros(2))
    return AssumedLosses(
        origin=f"{name}: {losses.origin}",
        formats=tuple(held),
        sparse=tuple(KindLoss(kind, _digits(row)) for kind, row in zip(losses.kinds, sparse, strict=True)),
        layers=_digits(layers),
        embed=_digits(dense["embed"]),
        head=_digits(dense["head"]),
        nll_per_kl=_digits(np.asarray([losses.nll_per_kl]))[0],
    )


def assumed_losses(spec: ModelSpec) -> Losses:
    """The losses of a model of this shape if it loses in all what a trained model does, every expert alike.

    Meaning: an expert's matrix has 1 / (L E) of what all such matrices lose; a dense matrix the share of its
             parameters; tokens choose experts evenly. A row as one group goes on as groups of 64 and 128 begin:
             loss(d) = loss(128) * (d / 128)^log2(loss(128) / loss(64)).
    """
    place = files("moe_pack.calib").joinpath(FILE)
    return spread(load(AssumedLosses, parse(place.read_bytes(), FILE, PackError), FILE, PackError), spec)


def spread(assumed: AssumedLosses, spec: ModelSpec) -> Losses:
    """The losses of a whole model, over this shape."""
    L, router = len(spec.moe_layers), spec.router
    E = router.num_experts
    formats = quantized_formats(spec.hidden_size)
    known = {(f.width, f.group, f.scale_bits): np.asarray([f.gate, f.up, f.down]) for f in assumed.formats}
    totals = falling(np.stack([_loss(known, part, spec.hidden_size) for part in formats], axis=1), formats)
    totals = np.concatenate([totals, np.zeros((len(MATRICES), 1))], axis=1)  # bfloat16
    totals[[matrix not in spec.expert.matrices for matrix in MATRICES]] = 0
    by_kind = {held.kind: (0.0, *held.losses) for held in assumed.sparse}
    sparse = np.asarray([by_kind[kind] for kind in KINDS])
    return Losses(
        formats=(*formats, BF16),
        quantized=np.tile(totals / (L * E), (L, E, 1, 1)),
        kinds=KINDS,
        sparsities=(0.0, *SPARSITIES),
        sparse=np.tile(sparse / (L * E), (L, E, 1, 1)),
        dense_widths=_DENSE_WIDTHS,
        dense=_dense(assumed, spec),
        popularity=np.full((L, E), router.num_experts_per_tok / E),
        nll_per_kl=assumed.nll_per_kl,
        origin=f"assumed: every expert alike, in all what another model loses ({assumed.origin})",
    )


def _loss(known: dict[tuple[int, int, int], Floats], part: PartFormat, num_cols: int) -> Floats:
    """Of gate, up and down in a format, [3]."""
    if part.group != ROW_GROUP:
        return known[part.width, part.group, part.scale_bits]
    half, whole = (known[part.width, group, part.scale_bits] for group in (64, 128))
    growth = np.log2(np.divide(whole, half, out=np.ones_like(whole), where=half > 0))
    return np.asarray(whole * (num_cols / 128) ** growth)


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
