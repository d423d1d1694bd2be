"""The cost of errors at the model's end: predictions, copies with real errors, and factors of the estimates.

`gradients` estimates divergences of small errors to second order. Larger ones cost more, because they change routes and
saturate: some *copies* of sequences go through the model with all experts of some layers rounded, and a copy's KL
divergence over its estimate is the `growth` in its layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moe_pack.calib import forward
from moe_pack.calib.sensitivity import errors
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
    """Returns the log-likelihood of the true next tokens that changed predictions [T, V] lose: nats, summed."""
    places = torch.arange(len(next_ids), device=original.device), next_ids.to(original.device)
    return float((original[places] - changed[places]).to(torch.float64).sum())


Level = Literal["fast", "full"]
DENSE_WIDTHS = (8, 4)
_NLL_DEVIATION = 0.1  # between models, of the log-likelihood lost for a nat of KL divergence, which is about 1
_LEAST_NLL_PER_KL = 0.1
MOST_COPIES = 3
_COPY_KL = 0.25  # nats: the most that a copy should diverge, so that it says something of usual losses
MOST_GROWTH = 4.0


@dataclass(frozen=True, slots=True)
class Copy:
    """Sequences in which all experts of consecutive MoE layers are rounded to `width` bits, and nothing else."""

    layers: range  # counts MoE layers
    width: int
    estimated: float  # its KL divergence by gradients


@dataclass(frozen=True, slots=True)
class LayerLosses(forward.NamedArrays):
    """KL divergences in nats, to second order, by changes in one layer; without experts all but `dense` are [0]."""

    dense: forward.Array  # f32 [M, 2]: for each of its M dense matrices (`roundable_roles`) at 8 and 4 bits
    quantized: (
        forward.Array
    )  # f32 [E, 3, 4]: for gate, up, down at 2, 3, 4, 8 bits by hqq in groups of 64 with 16-bit scales
    # f32 [E, 4]: that of down if the neurons that lose most lose nothing, as many as conversion repeats
    repeated: forward.Array
    sparse: forward.Array  # f32 [E, 3, 4]: for up, gate, both at the sparsities of hotness
    # f32 [3, F]: the losses in every format (`compared_formats`) over those of plain rounding at the same width.
    ratios: forward.Array
    # f32 [3, C]: the same for the calibrated quantizer (`calibrated_formats`), over plain rounding at its `base_width`,
    # of down without the repeated neurons if the format repeats them; [0] if no inputs are kept.
    calibrated: forward.Array

    def plain(self, num_cols: int) -> forward.Array:
        """Returns the loss of all experts by plain rounding at `WIDTHS`: float64 [4]."""
        ratios = errors.ratios_of_widths(self.ratios, num_cols).astype(np.float64)
        total: forward.Array = (self.quantized.sum(axis=0) / np.where(ratios > 0, ratios, 1.0)).sum(axis=0)
        return total


def copies_of(losses: Sequence[LayerLosses], num_cols: int) -> tuple[Copy, ...]:
    """Returns the copies for the MoE layers' losses: consecutive groups of layers, each at the least width it bears."""
    L = len(losses)
    bounds = [L * place // MOST_COPIES for place in range(MOST_COPIES + 1)]
    groups = [range(first, last) for first, last in pairwise(bounds) if first < last]
    copies = []
    for group in groups:
        plain = np.sum([losses[layer_idx].plain(num_cols) for layer_idx in group], axis=0)
        estimated = dict(zip(errors.WIDTHS, plain.tolist(), strict=True))
        width = next((width for width in errors.WIDTHS[:-2] if estimated[width] <= _COPY_KL), errors.WIDTHS[-2])
        copies.append(Copy(group, width, estimated[width]))
    return tuple(copies)


@dataclass(frozen=True, slots=True, eq=False)
class Divergences:
    """Divergences at the model's end, as means over tokens."""

    kls: forward.Array  # f32 [C]: KL divergences of the copies from the original
    nlls: forward.Array  # f32 [C]: the log-likelihood that the true next tokens lose
    num_tokens: int  # how many next tokens there are
    embedding: forward.Array  # f32 [2]: KL divergences with the embedding at 8 and 4 bits, to second order
    head: forward.Array  # f32 [2]: the same with the head, as measured


def effects_of(copies: Sequence[Copy], measured: Divergences, moe_layers: Sequence[int], num_layers: int) -> "Effects":
    """Returns the factors of estimates from copies; growth changes evenly between the middles of their layers."""
    growth = [
        min(max(float(kl) / copy.estimated, 1 / MOST_GROWTH), MOST_GROWTH) if copy.estimated > 0 else 1.0
        for copy, kl in zip(copies, measured.kls, strict=True)
    ]
    middles = [(moe_layers[copy.layers[0]] + moe_layers[copy.layers[-1]]) / 2 for copy in copies]
    return Effects(
        growth=np.interp(np.arange(num_layers), middles, growth).astype(np.float32),
        embedding=(measured.embedding * growth[0]).astype(np.float32),
        head=measured.head,
        copies=np.stack([measured.kls, measured.nlls], axis=1).astype(np.float32),
        nll_per_kl=np.asarray([_nll_per_kl(measured)], np.float32),
    )


def _nll_per_kl(measured: Divergences) -> float:
    """Returns the log-likelihood lost for a nat of KL divergence: a line's slope through the origin for all copies.

    Meaning: the slope is 1 if the next tokens follow the original's predictions. A copy's loss over n tokens then has
             the variance 2 KL / n, so copies weigh 1 / KL. A prior counts as one more measurement of 1 with the
             deviation 1/10.
    """
    weight, prior = measured.num_tokens / 2, 1 / _NLL_DEVIATION**2
    lost, diverged = (float(values.sum(dtype=np.float64)) for values in (measured.nlls, measured.kls))
    return max((prior + weight * lost) / (prior + weight * max(diverged, 0.0)), _LEAST_NLL_PER_KL)


@dataclass(frozen=True, slots=True, eq=False)
class Effects(forward.NamedArrays):
    """The factors of a model's losses, and the losses that are not in a layer."""

    growth: forward.Array  # f32 [layers]: multiplies the losses of a layer, because real errors are not small
    embedding: forward.Array  # f32 [2]: KL at 8 and 4 bits, as it is
    head: forward.Array  # f32 [2]: likewise
    copies: forward.Array  # f32 [C, 2]: the KL of each copy, and the log-likelihood that the true next tokens lost
    nll_per_kl: forward.Array  # f32 [1]: the ratio of the two over all copies
