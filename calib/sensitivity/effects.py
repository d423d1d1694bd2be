"""The cost of errors: the perturbed copies of a sensitivity pass, and the KL divergence of a unit of squared error.

A copy begins where something was changed and goes through the rest of the model unchanged (`SensitivityPass` carries
it). Its KL divergence from the original, divided by the squared error with which it began, is the price of an error
there. The divergence of next-token distributions is computed for some tokens at a time.
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
_LOGITS_BYTES = 32 << 20  # of logits at once; a comparison of predictions takes some five times that


def head_tokens(vocab_size: int) -> int:
    """Returns how many tokens are predicted at once, which bounds the memory of logits for any vocabulary."""
    return max(1, min(_MOST_TOKENS, _LOGITS_BYTES // (4 * vocab_size)))


def head_pieces(start: int, stop: int, vocab_size: int) -> Iterator[slice]:
    """Yields tokens `start` to `stop` in pieces that are predicted at once."""
    step = head_tokens(vocab_size)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def log_probabilities(hidden: Tensor, weights: Weights, device: torch.device) -> Tensor:
    """Returns log-probabilities of the next token, float32 [T, V], from final hidden states, float32 [T, d]."""
    return head(hidden.to(device), weights).log_softmax(dim=-1)


def divergence(original: Tensor, changed: Tensor) -> float:
    """Returns the KL divergence of changed log-probabilities float32 [T, V] from the original, summed: nats."""
    return float((original.exp() * (original - changed)).sum(dim=-1).to(torch.float64).sum())


def likelihood_lost(original: Tensor, changed: Tensor, next_ids: Tensor) -> float:
    """Returns how much log-likelihood the true next tokens lose under the changed predictions: nats, summed.

    Args:    original, changed: log-probabilities float32 [T, V].   next_ids: int64 [n], n <= T: the tokens after the
             first n tokens.
    """
    places = torch.arange(len(next_ids), device=original.device), next_ids.to(original.device)
    return float((original[places] - changed[places]).to(torch.float64).sum())


Level = Literal["fast", "full"]
DENSE_WIDTHS = (8, 4)
_NLL_DEVIATION = 0.1  # between models, of the log-likelihood lost for a nat of KL divergence, which is about 1
_LEAST_NLL_PER_KL = 0.1
# Copies of several changes at once. A change of gate or up goes through the rows of down. A change of down has
# directions of its own and costs less than half as much for its size. So they have separate prices.
_ALL_AT_2 = tuple(change for change in QUANTIZED if change.width == 2)
_DOWN_AT_2 = Change(MATRICES.index("down"), 2)
_ROWS_AT_2 = tuple(change for change in _ALL_AT_2 if change != _DOWN_AT_2)


@dataclass(frozen=True, slots=True)
class Copy:
    """A perturbed copy of the first sequences: where it begins, and what is changed there.

    `kind`: `embedding` or `dense` at `width`; `experts` for all experts of a layer under the sum of `changes`.
    """

    kind: Literal["embedding", "dense", "experts"]
    layer: int
    width: int = 16
    changes: tuple[Change, ...] = ()


def copies_of(spec: ModelSpec, level: Level, layer: int | None) -> tuple[Copy, ...]:
    """Returns the copies that begin in a decoder layer, in order; for None, those before the first layer."""
    if layer is None:
        embedding = "embed" in roundable_roles(spec, None)
        return tuple(Copy("embedding", -1, width) for width in DENSE_WIDTHS if embedding)
    dense = (Copy("dense", layer, 4),) if roundable_roles(spec, layer) else ()
    if layer not in spec.moe_layers:
        return dense
    if level == "fast":
        return (*dense, *(Copy("experts", layer, changes=changes) for changes in (_ROWS_AT_2, (_DOWN_AT_2,))))
    single = (*(change for change in QUANTIZED if change.width < 8), *(c for c in SPARSE if c.sparsity == 0.8))
    return (*dense, Copy("experts", layer, changes=_ALL_AT_2), *(Copy("experts", layer, changes=(c,)) for c in single))


def all_copies(spec: ModelSpec, level: Level) -> tuple[Copy, ...]:
    """Returns all copies of a pass, in the order of their hidden states."""
    layers: tuple[int | None, ...] = (None, *range(spec.num_hidden_layers))
    return tuple(copy for layer in layers for copy in copies_of(spec, level, layer))


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Mean squared errors on a decoder layer's output, for a token and value.

    Without experts in the layer all but the first two are [0].
    `dense` f32 [M, 2]: for each of its M dense matrices (`roundable_roles`) at 8 and 4 bits.   `copies` f32 [C]: for
    the copies that begin here.   `quantized` f32 [E, 3, 4]: for gate, up, down at 2, 3, 4, 8 bits.   `sparse` f32
    [E, 3, 4]: for up, gate, both at the sparsities of hotness.   `ratios` f32 [3, F]: the errors in every format
    (`compared_formats`) over those measured at the same width, by plain rounding or by hqq itself; `quantized` is
    already multiplied by the ratios of hqq's groups of 64 with 16-bit scales.   `calibrated` f32 [3, C]: the errors of
    the calibrated quantizer in every format (`calibrated_formats`) over those measured at its `base_width`; [0] if no
    inputs are kept.
    """

    dense: Array
    copies: Array
    quantized: Array
    sparse: Array
    ratios: Array
    calibrated: Array

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by name, as stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class Divergences:
    """The divergences of copies at the model's end, as means over tokens, and those of the head.

    `kls` f32 [C]: KL divergences from the original.   `nlls` f32 [C]: the log-likelihood that the true next tokens
    lose, of which there are `num_tokens`.   `head` f32 [2]: KL divergences with the head at 8 and 4 bits.
    """

    kls: Array
    nlls: Array
    head: Array
    num_tokens: int


def factors(errors: list[LayerErrors], measured: Divergences, spec: ModelSpec, level: Level) -> "Effects":
    """Returns the cost of a squared error in each layer, from the copies' errors and divergences."""
    kls = measured.kls
    copied = np.concatenate([np.full(len(copies_of(spec, level, None)), np.nan), *(layer.copies for layer in errors)])
    per_error: dict[Copy, float] = {
        copy: float(kl / error) if error > 0 else 0.0
        for copy, kl, error in zip(all_copies(spec, level), kls, copied, strict=True)
    }
    by_layer = [[copy for copy in per_error if copy.layer == layer] for layer in range(spec.num_hidden_layers)]
    dense = [next((per_error[c] for c in copies if c.kind == "dense"), 0.0) for copies in by_layer]
    quantized, sparse = [], []
    for layer in spec.moe_layers:
        single = {c.changes[0]: per_error[c] for c in by_layer[layer] if c.kind == "experts" and len(c.changes) == 1}
        # A change of `h` goes through down's rows, as the output of neurons that do not run does.
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
    """Returns the log-likelihood lost for a nat of KL divergence: a line's slope through the origin for all copies.

    Meaning: if the next tokens follow the original's predictions, it is 1, and a copy's loss over n tokens has the
             variance 2 KL / n. So copies weigh 1 / KL, and the slope is the ratio of the sums. Because all copies are
             of the same few tokens, a prior counts as one more measurement of 1 with the deviation 1/10.
    """
    weight, prior = measured.num_tokens / 2, 1 / _NLL_DEVIATION**2
    lost, diverged = (float(values.sum(dtype=np.float64)) for values in (measured.nlls, measured.kls))
    return max((prior + weight * lost) / (prior + weight * max(diverged, 0.0)), _LEAST_NLL_PER_KL)


def _nearest_width(single: dict[Change, float], change: Change, rows: float) -> float:
    """Returns the price from the copy with this change, else with the next smaller width, else `rows`."""
    smaller = (width for width in reversed(WIDTHS) if width <= change.width)
    prices = (single.get(Change(change.matrix_idx, width)) for width in smaller)
    return next((price for price in prices if price is not None), rows)


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """KL divergence in nats for each unit of squared error on a layer's output; KL itself for embedding and head.

    `quantized` f32 [L, 3, 4] and `sparse` f32 [L, 3, 4]: by MoE layer, for the errors of `LayerErrors`.   `dense` f32
    [layers].   `embedding`, `head` f32 [2]: KL at 8 and 4 bits.   `copies` f32 [C, 2]: the KL of each copy, and the
    log-likelihood that the true next tokens lost.   `nll_per_kl` f32 [1]: the ratio of the two over all copies.
    """

    quantized: Array
    sparse: Array
    dense: Array
    embedding: Array
    head: Array
    copies: Array
    nll_per_kl: Array

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by name, as stored."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
