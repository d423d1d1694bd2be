"""Experts over the tokens of a layer: their inputs, their outputs, and the activations of their neurons.

`ExpertInputs` reads the inputs that a profile keeps for calibrated quantization, one file a layer: Hessians of every
expert would be terabytes for a large model. docs/profile.md specifies the file.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.calib import quantize
from moe_pack.calib.forward import layers, store
from moe_pack.formats.pack import safetensors
from moe_pack.runtime import model
from moe_pack.runtime.model.compute.expert import resting_output
from moe_pack.runtime.model.compute.weights import from_experts, to_experts

_MOST_WEIGHT, _MOST_NORM = 1e6, 1e15  # of a router, and of hidden states: their squares are numbers of float32
_MANTISSA_BITS = 10
_SHIFT = 23 - _MANTISSA_BITS
NUM_BINS = 1 << (31 - _SHIFT)
_INFINITY = 0x7F800000 >> _SHIFT  # the bin of infinity; NaNs are in the bins after it


class Histogram:
    """Counts magnitudes by bin, int64 [NUM_BINS]; counts of any batches add up.

    A bin is the float32 numbers that share the exponent and the first `_MANTISSA_BITS` bits of the mantissa, so a
    quantile of more values than memory can contain is known to one part in 1,024.
    """

    def __init__(self, counts: Tensor | None = None) -> None:
        self.counts = torch.zeros(NUM_BINS, dtype=torch.int64) if counts is None else counts

    def add(self, magnitudes: Tensor) -> None:
        """Counts float32 values from 0 up, of any shape; their memory is overwritten."""
        bins = magnitudes.view(torch.int32).bitwise_right_shift_(_SHIFT)
        counts = torch.bincount(bins.flatten())
        self.counts[: len(counts)] += counts.to(self.counts.device)

    def total(self) -> int:
        """Returns how many values were counted."""
        return int(self.counts.sum())

    def all_finite(self) -> bool:
        """Returns whether all values were finite."""
        return int(self.counts[_INFINITY:].sum()) == 0

    def quantiles(self, levels: Sequence[float]) -> NDArray[np.float32]:
        """Returns the least magnitudes that these shares of values do not exceed, interpolated in bins (FloE Eq. 6)."""
        by_exponent = self.counts.numpy().reshape(-1, 1 << _MANTISSA_BITS)
        used = np.flatnonzero(by_exponent.sum(axis=1))  # some twenty of 256: the bins of the others are skipped
        if not len(used):
            return np.zeros(len(levels), np.float32)
        counts = by_exponent[used[0] : used[-1] + 1].reshape(-1)
        below = np.cumsum(counts)
        ranks = np.maximum(np.ceil(np.asarray(levels, np.float64) * int(below[-1]) - 1e-9), 1)  # of rising values
        among = np.searchsorted(below, ranks)
        bins = among + (used[0] << _MANTISSA_BITS)
        place = (ranks - (below[among] - counts[among]) - 0.5) / counts[among]  # within the bin, 0 to 1
        low = (bins << _SHIFT).astype(np.uint32).view(np.float32)
        ends = np.minimum(bins + 1, _INFINITY - 1) << _SHIFT  # of finite bins: beyond the last there is no number
        high = np.where(bins < _INFINITY - 1, ends.astype(np.uint32).view(np.float32), low)
        values = low + (high - low) * np.where(high > low, place, 0.0) if self.all_finite() else low
        return np.where(bins == 0, 0.0, values).astype(np.float32)  # the first bin is zero and the numbers next to it


CHUNK_TOKENS = 2048  # tokens at once: bounds the memory of an expert's outputs and uses its weights well
HOT_SAMPLE_TOKENS = 256  # of an expert, evenly spread: the thresholds for hotness are taken from them
KINDS: tuple[formats.Selector, ...] = ("up", "gate", "both")  # `none` tests h, too, as `both` does
HOT_SPARSITIES: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class ExpertActivity:
    """The activations of an expert's neurons, counted over its tokens."""

    histograms: tuple[Histogram, ...]  # of abs(a), by kind
    hot_thresholds: NDArray[np.float32]  # [kinds, sparsities]: quantiles of abs(a) over `HOT_SAMPLE_TOKENS` tokens
    hot: Tensor  # int64 [kinds, sparsities, f]: tokens on which a neuron reached them
    input_squares: Tensor  # float64 [d]: sums over tokens of the squares of the expert's inputs
    hidden_squares: Tensor  # float64 [f]: the same of `h`, the inputs of down

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the activity as tensors: the used bins of the histograms, their counts, and the other fields."""
        bins = [histogram.counts.nonzero()[:, 0] for histogram in self.histograms]
        counts = [histogram.counts[used] for histogram, used in zip(self.histograms, bins, strict=True)]
        thresholds = torch.from_numpy(self.hot_thresholds)
        return *bins, *counts, thresholds, self.hot, self.input_squares, self.hidden_squares

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> tuple["ExpertActivity", Sequence[Tensor]]:
        """Returns the activity of which `tensors` are the first, and the tensors after these."""
        num_kinds, histograms = len(KINDS), tuple(Histogram() for _ in KINDS)
        for number, histogram in enumerate(histograms):
            histogram.counts[tensors[number]] = tensors[num_kinds + number]
        thresholds, hot, input_squares, hidden_squares, *others = tensors[2 * num_kinds :]
        return cls(histograms, thresholds.numpy(), hot, input_squares, hidden_squares), others

    @classmethod
    def empty(cls, num_inputs: int, num_neurons: int) -> "ExpertActivity":
        """Returns the activity without tokens."""
        shape = len(KINDS), len(HOT_SPARSITIES)
        squares = (torch.zeros(number, dtype=torch.float64) for number in (num_inputs, num_neurons))
        hot = torch.zeros((*shape, num_neurons), dtype=torch.int64)
        return cls(tuple(Histogram() for _ in KINDS), np.zeros(shape, np.float32), hot, *squares)

    def add_sample(self, magnitudes: Tensor) -> None:
        """Takes thresholds from abs(a) of all neurons, float32 [kinds, n, f], and counts it; overwrites it."""
        for kind, values in enumerate(magnitudes):
            histogram = Histogram()
            histogram.add(values.clone())
            self.hot_thresholds[kind] = histogram.quantiles(HOT_SPARSITIES)
            self._count(kind, 0, values)

    def add(self, start: int, values: model.Activations) -> None:
        """Counts the activations of some neurons, from number `start` on."""
        magnitudes = torch.empty_like(values.h)  # [n, neurons], one for all kinds: new pages take longer than abs
        for kind, selector in enumerate(KINDS):
            torch.abs(values.of(selector), out=magnitudes)
            self._count(kind, start, magnitudes)

    def _count(self, kind: int, start: int, magnitudes: Tensor) -> None:
        """Counts abs(a) of one kind, float32 [n, neurons]; overwrites it."""
        reached = torch.empty_like(magnitudes)
        ones, counts = reached.new_ones((1, len(reached))), []
        for threshold in self.hot_thresholds[kind].tolist():
            # As a product: sums of booleans down a column take many times as long. Exact below 2^24 tokens.
            torch.ge(magnitudes, threshold, out=reached)
            counts.append(ones @ reached)
        self.hot[kind, :, start : start + reached.shape[1]] += torch.cat(counts).to("cpu", torch.int64)
        self.histograms[kind].add(magnitudes)


def measure_expert(
    expert: model.Expert,
    function: formats.NeuronFunction,
    inputs: Tensor,
    token_idx: Tensor,
    num_neurons: int,
    add: Callable[[Tensor, Tensor], None],
    chunk_tokens: int = CHUNK_TOKENS,
    device: torch.device | None = None,
) -> ExpertActivity:
    """Runs an expert with all its neurons on its tokens, in chunks, and counts their activations.

    Args:    inputs: float32 [T, d], of the layer.   token_idx: int64 [n], rising: the expert's tokens among them.
             add: takes positions in `token_idx`, int64 [m], and the expert's output there, float32 [m, d].
    """
    counts = ExpertActivity.empty(inputs.shape[1], num_neurons)
    for number, places in enumerate(_chunks(len(token_idx), chunk_tokens)):
        x = inputs[token_idx[places]].to(device)
        counts.input_squares.add_(sums_of_squares(x))
        y = resting_output(x, expert)
        # Thresholds come from all neurons' activations on the sample; then these are counted. The sample is one
        # allocation: many small ones between the blocks of weights would fragment memory.
        sample = x.new_empty((len(KINDS), len(x), num_neurons)) if number == 0 else None
        start = 0
        for block in expert.blocks():
            values = model.activations(x, block, function)
            y.addmm_(values.h, block.down)
            stop = start + len(block.up)
            counts.hidden_squares[start:stop] += sums_of_squares(values.h)
            if sample is None:
                counts.add(start, values)
            else:
                for selector, magnitudes in zip(KINDS, sample[:, :, start:stop], strict=True):
                    torch.abs(values.of(selector), out=magnitudes)
            start = stop
        if sample is not None:
            counts.add_sample(sample)
        add(places, y)
    return counts


def sums_of_squares(values: Tensor) -> Tensor:
    """Returns the sums of squares of the columns of some thousand rows, float32 [n, m]: float64 [m], on the CPU."""
    # As a product: sums in float64 down a column take nine times as long, and are as good for some thousand squares.
    return (values.new_ones((1, len(values))) @ values.square())[0].to("cpu", torch.float64)


def sample_places(num_places: int, num_wanted: int) -> Tensor:
    """Returns at most `num_wanted` of the numbers below `num_places`, evenly spread: int64, rising."""
    number = min(num_places, num_wanted)
    return torch.arange(number) * num_places // max(number, 1)


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[Tensor]:
    """Yields all positions once: first the sample for hotness, then the others in order."""
    sample = sample_places(num_tokens, HOT_SAMPLE_TOKENS)
    rest = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, sample, False).nonzero().flatten()
    if num_tokens:
        yield sample
    for start in range(0, len(rest), chunk_tokens):
        yield rest[start : start + chunk_tokens]


def input_chunks(
    tokens: layers.LayerTokens, weights: model.Weights, layer_idx: int, token_idx: Tensor, device: torch.device
) -> Iterator[tuple[Tensor, slice]]:
    """Yields experts' inputs float32 [n, d] on the device, rotated if the layer is, and the slice of `token_idx`."""
    for start in range(0, len(token_idx), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        yield to_experts(tokens.expert_inputs(token_idx[rows]).to(device), weights, layer_idx), rows


def run_counted(
    states: layers.LayerStates,
    tokens: layers.LayerTokens,
    weights: model.Weights,
    number: tuple[int, int],
    threshold: float,
    on_tokens: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Adds an expert's weighted outputs to the hidden states of its tokens, by the reference semantics.

    Args:    number: MoE layer index and expert.   on_tokens: takes the number of tokens of each chunk when it is done.
    Returns: its tokens, rising int64 [n], and how many of its neurons did not run for each, int64 [n].
    """
    spec = weights.spec
    token_idx, router_weights = tokens.of_expert(number[1])
    dropped = torch.empty(len(token_idx), dtype=torch.int64)
    for x, rows in input_chunks(tokens, weights, number[0], token_idx, states.device):
        expert = weights.expert(*number)
        y, runs_of = resting_output(x, expert), torch.zeros(len(x), device=x.device)
        for block in expert.blocks():
            values = model.activations(x, block, spec.expert_function(number[0]))
            a = values.of(weights.selector)
            runs = model.running(a, threshold)
            y.addmm_(torch.where(runs, values.h, 0.0), block.down)
            runs_of += runs.to(torch.float32).sum(dim=1)
        states.add(tokens, token_idx[rows], router_weights[rows], from_experts(y, weights, number[0]))
        dropped[rows] = spec.expert.intermediate_size - runs_of.to("cpu", torch.int64)
        on_tokens(len(x))
    return token_idx, dropped


OTHERS_COUNT = 32  # the other tokens of the layer together count as many of the expert's own
_PIECE_TOKENS = 256  # written at once: 15 MiB for the widest model
_ALIGN_BYTES = 64


def num_kept_sequences(spec: formats.ModelSpec, num_learned: int, sequence_length: int) -> int:
    """Returns how many sequences a profile keeps: `MAX_OWN_TOKENS` tokens an expert on average, if it has them."""
    router = spec.router
    num_tokens = -(-quantize.MAX_OWN_TOKENS * router.num_experts // router.num_experts_per_tok)
    return min(num_learned, -(-num_tokens // sequence_length))


def input_bytes(spec: formats.ModelSpec, num_tokens: int) -> int:
    """Returns the size of a layer's file of this many tokens."""
    return safetensors.lay_out([[tensor] for tensor in _tensors(spec, num_tokens)], _ALIGN_BYTES).num_bytes


def input_pieces(
    spec: formats.ModelSpec, tokens: layers.LayerTokens, sequence_length: int, kept: Tensor
) -> Iterator[bytes]:
    """Yields a layer's file in pieces, from all tokens of the layer with its outputs added to `x`; `kept` is rising."""
    token_idx = (kept[:, None] * sequence_length + torch.arange(sequence_length)).flatten()  # [n S]
    split = torch.split(token_idx, _PIECE_TOKENS)
    return _file_pieces(
        spec,
        len(token_idx),
        inputs=(tokens.expert_inputs(rows) for rows in split),
        experts=(tokens.experts[token_idx].numpy(),),
        weights=(tokens.weights[token_idx].numpy(),),
        norms=(tokens.x[rows].square().mean(dim=1).sqrt().numpy() for rows in split),
    )


def joined_input_pieces(spec: formats.ModelSpec, kept: Sequence[tuple["ExpertInputs", Tensor]]) -> Iterator[bytes]:
    """Yields a layer's file in pieces, of the tokens at some places, int64 [n], of other files of the same layer."""
    return _file_pieces(
        spec,
        sum(len(token_idx) for _, token_idx in kept),
        inputs=(found.rows(rows) for found, token_idx in kept for rows in torch.split(token_idx, _PIECE_TOKENS)),
        experts=(found.experts[token_idx.numpy()] for found, token_idx in kept),
        weights=(found.weights[token_idx.numpy()] for found, token_idx in kept),
        norms=(found.norms[token_idx.numpy()] for found, token_idx in kept),
    )


def _file_pieces(
    spec: formats.ModelSpec,
    num_tokens: int,
    inputs: Iterable[Tensor],
    experts: Iterable[store.Array],
    weights: Iterable[store.Array],
    norms: Iterable[store.Array],
) -> Iterator[bytes]:
    raw: dict[str, Iterable[bytes]] = {
        "inputs": (piece.to(torch.bfloat16).view(torch.int16).numpy().tobytes() for piece in inputs),
        "experts": (piece.astype("<u2").tobytes() for piece in experts),
        "weights": (piece.astype("<f4").tobytes() for piece in weights),
        "norms": (piece.astype("<f4").tobytes() for piece in norms),
    }
    layout = safetensors.lay_out([[tensor] for tensor in _tensors(spec, num_tokens)], _ALIGN_BYTES)
    yield layout.header
    for entry in layout.entries:
        yield from raw.get(entry.name, (bytes(entry.num_bytes),))


@dataclass(frozen=True, slots=True, eq=False)
class KeptInputs:
    """The inputs of experts that a profile keeps of some sequences."""

    sequences: Tensor  # their numbers, rising int64 [n]
    sequence_length: int  # tokens of each in a layer
    open: Callable[[int], "ExpertInputs"]  # opens the file of a MoE layer; the caller closes it

    def split(self, num_judged: int) -> tuple[int, int]:
        """Returns the number of tokens to judge on, at most half, and the first token of a file after these."""
        S = self.sequence_length
        middle, place = divmod(len(self.sequences) * S // 2, S)
        judged = min(num_judged, int(self.sequences[middle]) * S + place)
        return judged, int((judged - self.sequences * S).clamp(0, S).sum())


class ExpertInputs(AbstractContextManager["ExpertInputs"]):
    """Opens a layer's file for several threads; PackError without the tensors of a profile of this model."""

    def __init__(self, path: Path, spec: formats.ModelSpec, num_tokens: int) -> None:
        entries = {
            entry.name: entry
            for entry in safetensors.read_header(path, formats.PackError)
            if not entry.name.startswith("pad.")
        }
        wanted = {name: (dtype, shape) for name, dtype, shape in _tensors(spec, num_tokens)}
        for name in [*wanted, *entries]:
            if name not in wanted:
                raise formats.PackError(f"{path.name}: unknown tensor {name!r}")
            if name not in entries:
                raise formats.PackError(f"{path.name}: tensor {name!r} is missing")
            entry, (dtype, shape) = entries[name], wanted[name]
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise formats.PackError(
                    f"{path.name}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected {dtype} {list(shape)}"
                )
        self._reader = formats.RangeReader(path, formats.PackError)
        self._hidden_size = spec.hidden_size
        self._first_byte = entries["inputs"].offset
        routes, weights, norms = (
            self._reader.read(entries[n].offset, entries[n].num_bytes) for n in ("experts", "weights", "norms")
        )
        self._place = path.name
        self.experts: store.Array = routes.view("<u2").reshape(wanted["experts"][1])
        self.weights: store.Array = weights.view("<f4").reshape(wanted["weights"][1])
        self.norms: store.Array = norms.view("<f4")
        rules = {
            "experts": store.ArrayRule("U16", self.experts.shape, most=spec.router.num_experts - 1),
            "weights": store.ArrayRule("F32", self.weights.shape, -_MOST_WEIGHT, _MOST_WEIGHT),
            "norms": store.ArrayRule("F32", self.norms.shape, 0, _MOST_NORM),
        }
        try:
            store.check_arrays({name: getattr(self, name) for name in rules}, rules, self._place)
        except formats.PackError:
            self.close()
            raise

    def rows(self, token_idx: Tensor) -> Tensor:
        """Reads the inputs of tokens int64 [n]: float32 [n, d]; PackError if some are not finite."""
        out = torch.empty((len(token_idx), self._hidden_size), dtype=torch.bfloat16)
        num_bytes = 2 * self._hidden_size
        for row, token in zip(out.view(torch.int16).numpy().view(np.uint8), token_idx.tolist(), strict=True):
            row[:] = self._reader.read(self._first_byte + token * num_bytes, num_bytes)
        if not torch.isfinite(out).all():
            raise formats.PackError(
                f"{self._place}: tensor 'inputs' has NaN or infinity; the file is damaged, make it again"
            )
        return out.to(torch.float32)

    def of_expert(self, expert: int, first_token: int = 0, stored: Tensor | None = None) -> quantize.ExpertTokens:
        """Reads the tokens that an expert is calibrated on, from `first_token` on: its own and a few of its layer.

        Meaning: at most `MAX_OWN_TOKENS` of its own tokens, evenly spread. Each counts as the square of router weight
                 over the norm of the hidden state after the layer, because the next layer's norm divides its error:
                 massive hidden states count little. At most `MAX_OTHER_TOKENS` of the layer's other tokens together
                 count as `OTHERS_COUNT` average tokens of its own; they draw an expert of few tokens towards its layer.
                 Without own tokens each counts 1.
        Args:    stored: the layer's inputs behind stored layers, float32 [T, d], if known; rounded like those in the
                 file.
        """
        runs = (self.experts == expert) & (self.weights != 0)  # [T, k]
        runs[:first_token] = False
        token_idx, rank = (torch.from_numpy(indices) for indices in np.nonzero(runs))
        own = sample_places(len(token_idx), quantize.MAX_OWN_TOKENS)
        token_idx, rank = token_idx[own], rank[own]
        shares = self._shares(first_token)
        squares = torch.from_numpy(self.weights)[token_idx, rank].square() * shares[token_idx]  # [n]
        others = torch.from_numpy(first_token + np.flatnonzero(~runs[first_token:].any(axis=1)))
        others = others[sample_places(len(others), quantize.MAX_OTHER_TOKENS)]
        other_weights = shares[others]
        if len(squares):
            other_weights *= float(squares.mean() / shares[token_idx].mean()) * OTHERS_COUNT / max(len(others), 1)
        weights = torch.cat((squares, other_weights))
        token_idx = torch.cat((token_idx, others))
        given = None if stored is None else stored[token_idx].to(torch.bfloat16).to(torch.float32)
        return quantize.ExpertTokens(self.rows(token_idx), weights, len(others), given)

    def _shares(self, first_token: int) -> Tensor:
        """Returns the inverse squared norms [T], relative to the median from `first_token` on; a norm is at least
        0.001.
        """
        norms = torch.from_numpy(self.norms)
        median = norms[first_token:].median() if first_token < len(norms) else torch.ones(())
        return 1 / (norms / median.clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1e-3).square()

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __exit__(self, *fault: object) -> None:
        self.close()


def _tensors(spec: formats.ModelSpec, num_tokens: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    k = spec.router.num_experts_per_tok
    return (
        ("experts", "U16", (num_tokens, k)),
        ("weights", "F32", (num_tokens, k)),
        ("norms", "F32", (num_tokens,)),
        ("inputs", "BF16", (num_tokens, spec.hidden_size)),
    )
