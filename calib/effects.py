"""What errors cost: the perturbed copies of a sensitivity pass, and the KL divergence of a unit of squared error.

A copy begins where something was changed and goes through the rest of the model unchanged (`sensitivity` carries it).
Its KL divergence from the original, over the squared error with which it began, is the price of an error there.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_pack.calib.arrays import Array
from moe_pack.calib.expert_error import QUANTIZED, SPARSE, Change
from moe_pack.calib.rounded import roundable_roles
from moe_pack.formats import ModelSpec

Level = Literal["fast", "full"]
DENSE_WIDTHS = (8, 4)
_ALL_AT_2 = tuple(change for change in QUANTIZED if change.width == 2)  # one copy: all three matrices at once


@dataclass(frozen=True, slots=True)
class Copy:
    """A perturbed copy of the first sequences: where it begins, and what is changed there.

    `kind`: `embedding` or `dense` at `width`; `experts`: all of a layer's under `changes`, added up.
    """

    kind: Literal["embedding", "dense", "experts"]
    layer: int
    width: int = 16
    changes: tuple[Change, ...] = ()


def copies_of(spec: ModelSpec, level: Level, layer: int | None) -> tuple[Copy, ...]:
    """The copies that begin in a decoder layer, in order; None: before the first."""
    if layer is None:
        embedding = "embed" in roundable_roles(spec, None)
        return tuple(Copy("embedding", -1, width) for width in DENSE_WIDTHS if embedding)
    dense = (Copy("dense", layer, 4),) if roundable_roles(spec, layer) else ()
    if layer not in spec.moe_layers:
        return dense
    if level == "fast":
        return (*dense, Copy("experts", layer, changes=_ALL_AT_2))
    single = (*(change for change in QUANTIZED if change.width < 8), *(c for c in SPARSE if c.sparsity == 0.8))
    return (*dense, Copy("experts", layer, changes=_ALL_AT_2), *(Copy("experts", layer, changes=(c,)) for c in single))


def all_copies(spec: ModelSpec, level: Level) -> tuple[Copy, ...]:
    """All copies of a pass, in the order of their hidden states."""
    layers: tuple[int | None, ...] = (None, *range(spec.num_hidden_layers))
    return tuple(copy for layer in layers for copy in copies_of(spec, level, layer))


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Mean squared errors on a decoder layer's output, a token and value; in one without experts the last are [0].

    `dense` f32 [M, 2]: each of its M dense matrices (`roundable_roles`) at 8 and 4 bits.   `copies` f32 [C]: of the
    copies that begin here, as they were changed.   `quantized` f32 [E, 3, 4]: gate, up, down at 2, 3, 4, 8 bits.
    `sparse` f32 [E, 3, 4]: up, gate, both at the sparsities of hotness.   `ratio` f32 [3, 4]: hqq's error over that of
    plain rounding, by which `quantized` was scaled.
    """

    dense: Array
    copies: Array
    quantized: Array
    sparse: Array
    ratio: Array

    def arrays(self) -> dict[str, Array]:
        """All by name, as stored."""
        return {name: getattr(self, name) for name in ("dense", "copies", "quantized", "sparse", "ratio")}


def factors(errors: list[LayerErrors], kls: Array, head_kls: Array, spec: ModelSpec, level: Level) -> "Effects":
    """What a squared error costs, layer by layer, from the copies' errors and KL divergences."""
    copied = np.concatenate([np.full(len(copies_of(spec, level, None)), np.nan), *(layer.copies for layer in errors)])
    per_error: dict[Copy, float] = {
        copy: float(kl / error) if error > 0 else 0.0
        for copy, kl, error in zip(all_copies(spec, level), kls, copied, strict=True)
    }
    by_layer = [[copy for copy in per_error if copy.layer == layer] for layer in range(spec.num_hidden_layers)]
    dense = [next((per_error[c] for c in held if c.kind == "dense"), 0.0) for held in by_layer]
    quantized, sparse = [], []
    for layer in spec.moe_layers:
        single = {c.changes[0]: per_error[c] for c in by_layer[layer] if c.kind == "experts" and len(c.changes) == 1}
        whole = next(per_error[c] for c in by_layer[layer] if len(c.changes) > 1)
        quantized.append([_nearest_width(single, change, whole) for change in QUANTIZED])
        sparse.append([single.get(Change(kind_idx=c.kind_idx, sparsity=0.8), whole) for c in SPARSE])
    embedding = [float(kl) for copy, kl in zip(all_copies(spec, level), kls, strict=True) if copy.kind == "embedding"]
    L = len(spec.moe_layers)
    return Effects(
        quantized=np.asarray(quantized, np.float32).reshape(L, 3, 4),
        sparse=np.asarray(sparse, np.float32).reshape(L, 3, 4),
        dense=np.asarray(dense, np.float32),
        embedding=np.asarray(embedding or [0.0] * len(DENSE_WIDTHS), np.float32),
        head=head_kls,
    )


def _nearest_width(single: dict[Change, float], change: Change, whole: float) -> float:
    """What the copy with this change found; of the next smaller width where there was none; else of all at 2 bits."""
    for width in (change.width, change.width // 2):
        found = single.get(Change(change.matrix_idx, width))
        if found is not None:
            return found
    return whole


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """KL divergence in nats for each unit of squared error on a layer's output; KL itself for embedding and head.

    `quantized` f32 [L, 3, 4] and `sparse` f32 [L, 3, 4]: by MoE layer, for the errors of `LayerErrors`.   `dense` f32
    [layers].   `embedding`, `head` f32 [2]: KL at 8 and 4 bits.
    """

    quantized: Array
    sparse: Array
    dense: Array
    embedding: Array
    head: Array

    def arrays(self) -> dict[str, Array]:
        """All by name, as stored."""
        return {name: getattr(self, name) for name in ("quantized", "sparse", "dense", "embedding", "head")}
