"""Magnitudes counted in bins of 0.1%: quantiles of more values than memory holds, whatever order they come in.

A bin is all float32 numbers that share sign-less exponent and the first `_MANTISSA_BITS` bits of the mantissa. Counts
add, so that batches of any size give the same histogram, and a quantile is known to one part in 1,024.

One expert over its tokens: outputs, and on the way the distribution of what decides which of its neurons run.

Tokens go through in chunks and neurons in blocks, so that what is held is bounded whatever their numbers; sums do not
depend on the chunks but for the rounding of matrix products.

One expert over the tokens of a layer that go to it: its outputs added, and the neurons counted that did not run.

What a layer's experts were given of some of the text: kept in a profile, for rounding that minds what it does.

Second moments of every expert's inputs would be terabytes for a large model; the tokens they are made of are a file a
layer, and an expert's own are read from it when its turn comes. Specified in docs/profile.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib.forward.layers import LayerStates, LayerTokens
from moe_pack.calib.forward.store import Array
from moe_pack.calib.quantize import MAX_OTHER_TOKENS, MAX_OWN_TOKENS, ExpertTokens
from moe_pack.formats import ModelSpec, NeuronFunction, PackError, RangeReader, Selector
from moe_pack.formats.safetensors import lay_out, read_header
from moe_pack.runtime.model import Activations, Expert, Weights, activations, running
from moe_pack.runtime.model.expert import resting_output

_MANTISSA_BITS = 10
_SHIFT = 23 - _MANTISSA_BITS
NUM_BINS = 1 << (31 - _SHIFT)
_INFINITY = 0x7F800000 >> _SHIFT  # this bin and those after it hold what is no number
RESOLUTION = 2.0**-_MANTISSA_BITS  # relative


class Histogram:
    """Counts of magnitudes by bin, int64 [NUM_BINS]."""

    def __init__(self, counts: Tensor | None = None) -> None:
        self.counts = torch.zeros(NUM_BINS, dtype=torch.int64) if counts is None else counts

    def add(self, magnitudes: Tensor) -> None:
        """Counts float32 values from 0 up, of any shape; their memory is overwritten."""
        bins = magnitudes.view(torch.int32).bitwise_right_shift_(_SHIFT)
        found = torch.bincount(bins.flatten())
        self.counts[: len(found)] += found.to(self.counts.device)

    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    def all_finite(self) -> bool:
        """Whether all of them were numbers."""
        return int(self.counts[_INFINITY:].sum()) == 0

    def quantiles(self, levels: Sequence[float]) -> NDArray[np.float32]:
        """The least magnitude that at least this share of the values do not exceed, float32 [levels].

        Between the ends of a bin it is interpolated by rank; 0 where nothing was counted.
        Source: FloE Eq. 6.
        """
        by_exponent = self.counts.numpy().reshape(-1, 1 << _MANTISSA_BITS)
        used = np.flatnonzero(by_exponent.sum(axis=1))  # some twenty of 256: the bins of others are not gone through
        if not len(used):
            return np.zeros(len(levels), np.float32)
        counts = by_exponent[used[0] : used[-1] + 1].reshape(-1)
        below = np.cumsum(counts)
        ranks = np.maximum(np.ceil(np.asarray(levels, np.float64) * int(below[-1]) - 1e-9), 1)  # of rising values
        among = np.searchsorted(below, ranks)
        bins = among + (used[0] << _MANTISSA_BITS)
        place = (ranks - (below[among] - counts[among]) - 0.5) / counts[among]  # within the bin, 0 to 1
        low = (bins << _SHIFT).astype(np.uint32).view(np.float32)
        ends = np.minimum(bins + 1, _INFINITY - 1) << _SHIFT  # of finite bins: a step is no number beyond the last
        high = np.where(bins < _INFINITY - 1, ends.astype(np.uint32).view(np.float32), low)
        found = low + (high - low) * np.where(high > low, place, 0.0) if self.all_finite() else low
        return np.where(bins == 0, 0.0, found).astype(np.float32)  # the first bin is zero and what is next to it


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
        y = resting_output(x, expert)
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


def input_chunks(tokens: LayerTokens, token_idx: Tensor, device: torch.device) -> Iterator[tuple[Tensor, slice]]:
    """Inputs of these tokens [n, d] on the device, some at a time, and which of them they are."""
    for start in range(0, len(token_idx), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        yield tokens.inputs[token_idx[rows]].to(device), rows


def run_counted(
    states: LayerStates,
    tokens: LayerTokens,
    weights: Weights,
    number: tuple[int, int],
    threshold: float,
    on_tokens: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Adds an expert's outputs, weighted, to the hidden states of its tokens, by the reference semantics.

    Args:    number: MoE layer index and expert.   threshold: on `abs(a)`.   on_tokens: told of tokens done.
    Returns: its tokens, rising int64 [n], and how many of its neurons did not run for each, int64 [n].
    """
    spec = weights.spec
    token_idx, router_weights = tokens.of_expert(number[1])
    dropped = torch.empty(len(token_idx), dtype=torch.int64)
    for x, rows in input_chunks(tokens, token_idx, states.device):
        expert = weights.expert(*number)
        y, runs_of = resting_output(x, expert), torch.zeros(len(x), device=x.device)
        for block in expert.blocks():
            values = activations(x, block, spec.expert.function)
            a = values.of(weights.selector)
            runs = running(a, threshold)
            y.addmm_(torch.where(runs, values.h, 0.0), block.down)
            runs_of += runs.to(torch.float32).sum(dim=1)
        states.add(tokens, token_idx[rows], router_weights[rows], y)
        dropped[rows] = spec.expert.intermediate_size - runs_of.to("cpu", torch.int64)
        on_tokens(len(x))
    return token_idx, dropped


OTHERS_COUNT = 32  # as so many of its own they count together
_PIECE_TOKENS = 256  # written at once: 15 MiB of the widest model
_ALIGN_BYTES = 64


def num_kept_sequences(spec: ModelSpec, num_learned: int, sequence_length: int) -> int:
    """Of `num_learned` sequences of as many tokens a layer, how many are kept: `MAX_OWN_TOKENS` an expert, on average.

    Args:    num_learned: sequences that are not held out.
    """
    router = spec.router
    num_tokens = -(-MAX_OWN_TOKENS * router.num_experts // router.num_experts_per_tok)
    return min(num_learned, -(-num_tokens // sequence_length))


def input_bytes(spec: ModelSpec, num_tokens: int) -> int:
    """What a layer's file takes on the drive."""
    return lay_out([[one] for one in _tensors(spec, num_tokens)], _ALIGN_BYTES).num_bytes


def input_pieces(spec: ModelSpec, tokens: LayerTokens, sequence_length: int, kept: Tensor) -> Iterator[bytes]:
    """A layer's file in pieces, so that it is never in memory whole.

    Args:    kept: the sequences to keep, rising int64 [n].
    """
    places = (kept[:, None] * sequence_length + torch.arange(sequence_length)).flatten()  # [n S]
    layout = lay_out([[one] for one in _tensors(spec, len(places))], _ALIGN_BYTES)
    yield layout.header
    for entry in layout.entries:
        if entry.name == "inputs":
            for rows in torch.split(places, _PIECE_TOKENS):
                yield tokens.inputs[rows].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        elif entry.name == "experts":
            yield tokens.experts[places].numpy().astype("<u2").tobytes()
        elif entry.name == "weights":
            yield tokens.weights[places].numpy().astype("<f4").tobytes()
        else:
            yield bytes(entry.num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class KeptInputs:
    """What experts were given of some sequences of `sequence_length` tokens a layer.

    `sequences`: which they are, rising int64 [n].   `open`: a MoE layer's file, which the caller closes.
    """

    sequences: Tensor
    sequence_length: int
    open: Callable[[int], "ExpertInputs"]

    def split(self, num_judged: int) -> tuple[int, int]:
        """Tokens to judge on, and others to calibrate on.

        Args:    num_judged: of all tokens, how many of the first may be judged on.
        Returns: how many of the first are to be, and the first token of a file that is not among them: half of what
                 the files hold at least is left to calibrate on.
        """
        S = self.sequence_length
        middle, place = divmod(len(self.sequences) * S // 2, S)
        judged = min(num_judged, int(self.sequences[middle]) * S + place)
        return judged, int((judged - self.sequences * S).clamp(0, S).sum())


class ExpertInputs:
    """A layer's file of T tokens, open for reading. For several threads; `close` it, or use it in a `with`.

    `experts` u16 [T, k]: the experts of every token, best first.   `weights` f32 [T, k]: theirs, as the family has
    them; 0 where the expert was beyond its capacity and did not run.
    Raises:  PackError if the file is not what a profile of this model has there.
    """

    def __init__(self, path: Path, spec: ModelSpec, num_tokens: int) -> None:
        entries = {entry.name: entry for entry in read_header(path, PackError) if not entry.name.startswith("pad.")}
        wanted = {name: (dtype, shape) for name, dtype, shape in _tensors(spec, num_tokens)}
        for name in [*wanted, *entries]:
            if name not in wanted:
                raise PackError(f"{path.name}: unknown tensor {name!r}")
            if name not in entries:
                raise PackError(f"{path.name}: tensor {name!r} is missing")
            found, (dtype, shape) = entries[name], wanted[name]
            if (found.dtype, found.shape) != (dtype, shape):
                raise PackError(
                    f"{path.name}: tensor {name!r} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
                )
        self._reader = RangeReader(path, PackError)
        self._hidden_size = spec.hidden_size
        self._first_byte = entries["inputs"].offset
        routes, weights = (self._reader.read(entries[n].offset, entries[n].num_bytes) for n in ("experts", "weights"))
        self.experts: Array = routes.view("<u2").reshape(wanted["experts"][1])
        self.weights: Array = weights.view("<f4").reshape(wanted["weights"][1])
        if self.experts.max(initial=0) >= spec.router.num_experts:
            self.close()
            raise PackError(
                f"{path.name}: tensor 'experts' names expert {self.experts.max()}, expected less than "
                f"{spec.router.num_experts}; profile the model anew"
            )

    def rows(self, token_idx: Tensor) -> Tensor:
        """What experts were given of these tokens, read from the file: int64 [n] gives float32 [n, d]."""
        out = torch.empty((len(token_idx), self._hidden_size), dtype=torch.bfloat16)
        num_bytes = 2 * self._hidden_size
        for row, place in zip(out.view(torch.int16).numpy().view(np.uint8), token_idx.tolist(), strict=True):
            row[:] = self._reader.read(self._first_byte + place * num_bytes, num_bytes)
        return out.to(torch.float32)

    def of_expert(self, expert: int, first_token: int = 0) -> ExpertTokens:
        """The tokens an expert is calibrated on, of those from `first_token` on: its own, and a few of its layer's.

        Meaning: of the tokens it runs for at most `MAX_OWN_TOKENS`, evenly spread, each with the square of its router
                 weight: so an error of the expert's output enters the layer's. Of the other tokens of the layer at
                 most `MAX_OTHER_TOKENS`, evenly spread, which together count as `OTHERS_COUNT` of its own do on
                 average: an expert of few tokens is drawn towards its layer, one that no token reached has these
                 alone, and each counts 1.
        """
        runs = (self.experts == expert) & (self.weights != 0)  # [T, k]
        runs[:first_token] = False
        token_idx, place = (torch.from_numpy(found) for found in np.nonzero(runs))
        own = sample_places(len(token_idx), MAX_OWN_TOKENS)
        token_idx, place = token_idx[own], place[own]
        squares = torch.from_numpy(self.weights)[token_idx, place].square()  # [n]
        others = torch.from_numpy(first_token + np.flatnonzero(~runs[first_token:].any(axis=1)))
        others = others[sample_places(len(others), MAX_OTHER_TOKENS)]
        each = float(squares.mean()) * OTHERS_COUNT / max(len(others), 1) if len(squares) else 1.0
        weights = torch.cat((squares, torch.full((len(others),), each)))
        return ExpertTokens(self.rows(torch.cat((token_idx, others))), weights)

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __enter__(self) -> "ExpertInputs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tensors(spec: ModelSpec, num_tokens: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Name, dtype and shape of all that a layer's file holds of this many tokens."""
    k = spec.router.num_experts_per_tok
    return (
        ("experts", "U16", (num_tokens, k)),
        ("weights", "F32", (num_tokens, k)),
        ("inputs", "BF16", (num_tokens, spec.hidden_size)),
    )
