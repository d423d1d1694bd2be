"""How far predictions are from the original's: the KL divergence of next-token distributions, some tokens at a time.

What errors cost: the perturbed copies of a sensitivity pass, and the KL divergence of a unit of squared error.

A copy begins where something was changed and goes through the rest of the model unchanged (`sensitivity` carries it).
Its KL divergence from the original, over the squared error with which it began, is the price of an error there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib.forward import Array
from moe_pack.calib.sensitivity.errors import QUANTIZED, SPARSE, WIDTHS, Change, roundable_roles
from moe_pack.formats import MATRICES, ModelSpec
from moe_pack.runtime.model import Weights, head

_MOST_TOKENS = 256
_LOGITS_BYTES = 32 << 20  # of logits at once; where predictions are compared, some five times that is held


def head_tokens(vocab_size: int) -> int:
    """How many tokens are predicted at once: bounds what logits take, however large the vocabulary."""
    return max(1, min(_MOST_TOKENS, _LOGITS_BYTES // (4 * vocab_size)))


def head_pieces(start: int, stop: int, vocab_size: int) -> Iterator[slice]:
    """Tokens `start` to `stop` in pieces of as many as are predicted at once."""
    step = head_tokens(vocab_size)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def log_probabilities(hidden: Tensor, weights: Weights, device: torch.device) -> Tensor:
    """Log-probabilities of the next token, float32 [T, V], from hidden states after the last layer, float32 [T, d]."""
    return head(hidden.to(device), weights).log_softmax(dim=-1)


def divergence(expected: Tensor, found: Tensor) -> float:
    """The KL divergence in nats of log-probabilities float32 [T, V] from those expected, summed over tokens."""
    return float((expected.exp() * (expected - found)).sum(dim=-1).to(torch.float64).sum())


def likelihood_lost(expected: Tensor, found: Tensor, next_ids: Tensor) -> float:
    """How much less log-likelihood the tokens that really came next have under `found`: nats, summed over tokens.

    Args:    expected, found: log-probabilities float32 [T, V].   next_ids: int64 [n], n <= T: after the first n tokens.
    """
    places = torch.arange(len(next_ids), device=expected.device), next_ids.to(expected.device)
    return float((expected[places] - found[places]).to(torch.float64).sum())


Level = Literal["fast", "full"]
DENSE_WIDTHS = (8, 4)
_NLL_DEVIATION = 0.1  # between models, of log-likelihood lost for a nat of KL divergence, about 1
_LEAST_NLL_PER_KL = 0.1
# Copies of several changes at once. A change of gate or up goes through down's rows, one of down has directions of its
# own, and for its size costs less than half as much: they are priced apart.
_ALL_AT_2 = tuple(change for change in QUANTIZED if change.width == 2)
_DOWN_AT_2 = Change(MATRICES.index("down"), 2)
_ROWS_AT_2 = tuple(change for change in _ALL_AT_2 if change != _DOWN_AT_2)


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
        return (*dense, *(Copy("experts", layer, changes=held) for held in (_ROWS_AT_2, (_DOWN_AT_2,))))
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
    `sparse` f32 [E, 3, 4]: up, gate, both at the sparsities of hotness.   `ratios` f32 [3, F]: the errors in every
    format (`compared_formats`) over those measured at the same width, plain rounding's or hqq's own; `quantized` was
    multiplied by hqq's of groups of 64 with 16-bit scales.   `calibrated` f32 [3, C]: of calibrated rounding in every
    format (`calibrated_formats`) over those measured at its `base_width`; [0] where no inputs are kept.
    """

    dense: Array
    copies: Array
    quantized: Array
    sparse: Array
    ratios: Array
    calibrated: Array

    def arrays(self) -> dict[str, Array]:
        """All by name, as stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class Divergences:
    """How copies end, as means over tokens; the head alone at 8 and 4 bits besides.

    `kls` f32 [C]: KL divergences from the original.   `nlls` f32 [C]: what is lost of the log-likelihood of the tokens
    that really came next, of which there are `num_tokens`.   `head` f32 [2]: KL divergences.
    """

    kls: Array
    nlls: Array
    head: Array
    num_tokens: int


def factors(errors: list[LayerErrors], measured: Divergences, spec: ModelSpec, level: Level) -> "Effects":
    """What a squared error costs, layer by layer, from the copies' errors and divergences."""
    kls = measured.kls
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
        # What changes `h` goes through down's rows like what neurons that do not run leave out.
        rows = next(per_error[c] for c in by_layer[layer] if len(c.changes) > 1)
        quantized.append([_nearest_width(single, change, rows) for change in QUANTIZED])
        sparse.append([single.get(Change(kind_idx=c.kind_idx, sparsity=0.8), rows) for c in SPARSE])
    embedding = [float(kl) for copy, kl in zip(all_copies(spec, level), kls, strict=True) if copy.kind == "embedding"]
    L = len(spec.moe_layers)
    return Effects(
        quantized=np.asarray(quantized, np.float32).reshape(L, 3, 4),
        sparse=np.asarray(sparse, np.float32).reshape(L, 3, 4),
        dense=np.asarray(dense, np.float32),
        embedding=np.asarray(embedding or [0.0] * len(DENSE_WIDTHS), np.float32),
        head=measured.head,
        copies=np.stack([kls, measured.nlls], axis=1).astype(np.float32),
        nll_per_kl=np.asarray([_nll_per_kl(measured)], np.float32),
    )


def _nll_per_kl(measured: Divergences) -> float:
    """Nats of log-likelihood lost for a nat of KL divergence: one line through the origin for all copies.

    Meaning: of next tokens that follow the original's predictions, it is 1, and over n of them a copy's loss varies by
             2 KL / n. So copies weigh 1 / KL, which makes the line's slope the ratio of the sums; it is drawn to 1 as
             by one more measurement, of deviation 1/10, since all copies are of the same few tokens.
    """
    weight, held = measured.num_tokens / 2, 1 / _NLL_DEVIATION**2
    lost, diverged = (float(found.sum(dtype=np.float64)) for found in (measured.nlls, measured.kls))
    return max((held + weight * lost) / (held + weight * max(diverged, 0.0)), _LEAST_NLL_PER_KL)


def _nearest_width(single: dict[Change, float], change: Change, rows: float) -> float:
    """What the copy with this change found; of the next smaller width where there was none; else of gate and up."""
    smaller = (width for width in reversed(WIDTHS) if width <= change.width)
    found = (single.get(Change(change.matrix_idx, width)) for width in smaller)
    return next((price for price in found if price is not None), rows)


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """KL divergence in nats for each unit of squared error on a layer's output; KL itself for embedding and head.

    `quantized` f32 [L, 3, 4] and `sparse` f32 [L, 3, 4]: by MoE layer, for the errors of `LayerErrors`.   `dense` f32
    [layers].   `embedding`, `head` f32 [2]: KL at 8 and 4 bits.   `copies` f32 [C, 2]: of each copy its KL and what it
    lost of the log-likelihood of the tokens that came next.   `nll_per_kl` f32 [1]: how the two go together.
    """

    quantized: Array
    sparse: Array
    dense: Array
    embedding: Array
    head: Array
    copies: Array
    nll_per_kl: Array

    def arrays(self) -> dict[str, Array]:
        """All by name, as stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
