"""One expert over its tokens: outputs, and on the way the distribution of what decides which of its neurons run.

Tokens go through in chunks and neurons in blocks, so that what is held is bounded whatever their numbers; sums do not
depend on the chunks but for the rounding of matrix products.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.histogram import Histogram
from moe_pack.formats import NeuronFunction, Selector
from moe_pack.runtime import Activations, Expert, activations

CHUNK_TOKENS = 2048  # tokens at once: bounds what an expert's outputs take, and uses weights well
HOT_SAMPLE_TOKENS = 256  # of an expert's tokens, evenly spread: what its thresholds for hotness are taken from
KINDS: tuple[Selector, ...] = ("up", "gate", "both")  # `none` tests h too, as `both` does
HOT_SPARSITIES = (0.5, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class ExpertActivity:
    """What an expert's neurons did over its tokens.

    `histograms`: of abs(a), by kind.   `hot_thresholds` float32 [kinds, sparsities]: quantiles of abs(a) over
    `HOT_SAMPLE_TOKENS` tokens.   `hot` int64 [kinds, sparsities, f]: tokens on which a neuron reached them.
    """

    histograms: tuple[Histogram, ...]
    hot_thresholds: NDArray[np.float32]
    hot: Tensor


def measure_expert(
    expert: Expert,
    function: NeuronFunction,
    inputs: Tensor,
    token_idx: Tensor,
    num_neurons: int,
    add: Callable[[Tensor, Tensor], None],
    chunk_tokens: int = CHUNK_TOKENS,
    device: torch.device | None = None,
) -> ExpertActivity:
    """Runs an expert, every neuron running, and counts.

    Args:    inputs: float32 [T, d].   token_idx: int64 [n], rising: which of them are the expert's.
             add: takes places in `token_idx`, int64 [m], and the expert's output there, float32 [m, d].
    """
    counts = _Counts(num_neurons)
    for number, places in enumerate(_chunks(len(token_idx), chunk_tokens)):
        x = inputs[token_idx[places]].to(device)
        y = torch.zeros_like(x)
        # Thresholds come from all neurons' activations for the sample, then these are counted. In one piece: many
        # between the blocks of weights would keep the memory of those from being used again.
        sample = x.new_empty((len(KINDS), len(x), num_neurons)) if number == 0 else None
        start = 0
        for block in expert.blocks():
            values = activations(x, block, function)
            y.addmm_(values.h, block.down)
            stop = start + len(block.up)
            if sample is None:
                counts.add(start, values)
            else:
                _keep(values, sample[:, :, start:stop])
            start = stop
        if sample is not None:
            counts.add_sample(sample)
        add(places, y)
    return ExpertActivity(counts.histograms, counts.thresholds, counts.hot)


def sample_places(num_places: int, num_wanted: int) -> Tensor:
    """At most `num_wanted` of the numbers below `num_places`, evenly spread: int64, rising."""
    number = min(num_places, num_wanted)
    return torch.arange(number) * num_places // max(number, 1)


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[Tensor]:
    """All places below `num_tokens` once: first the sample for hotness, then the others in order."""
    sample = sample_places(num_tokens, HOT_SAMPLE_TOKENS)
    rest = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, sample, False).nonzero().flatten()
    if num_tokens:
        yield sample
    for start in range(0, len(rest), chunk_tokens):
        yield rest[start : start + chunk_tokens]


class _Counts:
    """Sums over all tokens of an expert."""

    def __init__(self, num_neurons: int) -> None:
        self.histograms = tuple(Histogram() for _ in KINDS)
        self.thresholds = np.zeros((len(KINDS), len(HOT_SPARSITIES)), np.float32)
        self.hot = torch.zeros((len(KINDS), len(HOT_SPARSITIES), num_neurons), dtype=torch.int64)

    def add_sample(self, magnitudes: Tensor) -> None:
        """Takes thresholds from abs(a) of all neurons, float32 [kinds, n, f], and counts these; overwrites them."""
        for kind, held in enumerate(magnitudes):
            histogram = Histogram()
            histogram.add(held.clone())
            self.thresholds[kind] = histogram.quantiles(HOT_SPARSITIES)
            self._count(kind, 0, held)

    def add(self, start: int, values: Activations) -> None:
        """Counts some neurons, from `start` on."""
        magnitudes = torch.empty_like(values.h)  # [n, neurons], one for all: new pages take longer than abs
        for kind, selector in enumerate(KINDS):
            torch.abs(values.of(selector), out=magnitudes)
            self._count(kind, start, magnitudes)

    def _count(self, kind: int, start: int, magnitudes: Tensor) -> None:
        """Counts abs(a) of one kind, float32 [n, neurons] from `start` on; overwrites it."""
        reached = torch.empty_like(magnitudes)
        ones, counts = reached.new_ones((1, len(reached))), []
        for threshold in self.thresholds[kind].tolist():
            # As a product: sums of booleans down a column take many times as long. Exact below 2^24 tokens.
            torch.ge(magnitudes, threshold, out=reached)
            counts.append(ones @ reached)
        self.hot[kind, :, start : start + reached.shape[1]] += torch.cat(counts).to("cpu", torch.int64)
        self.histograms[kind].add(magnitudes)


def _keep(values: Activations, sample: Tensor) -> None:
    """Puts abs(a) of some neurons into their place, float32 [kinds, n, neurons]."""
    for selector, place in zip(KINDS, sample, strict=True):
        torch.abs(values.of(selector), out=place)
