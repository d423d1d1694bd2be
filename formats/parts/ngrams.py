"""n-gram embeddings: some layers add to the hidden states from a few rows of a table that stays on the disk.

    rows = table[hash of the token and of those before it]          a row for each head
    x = x + gate(x, rows) * value(rows), and a short convolution of it

Rows follow from token ids alone, so they can be read before the layer runs. The table of a layer has billions of
weights; it is no dense role, but a file of its own in a pack. docs/model.md says what a layer computes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_pack.formats.parts import mixers, part

MAX_NGRAM_SIZE = 64
MAX_HEADS = 4096  # of all layers, so that a hostile config cannot make us look for many prime numbers
MAX_TABLE_ROWS = 2**48


@dataclass(frozen=True, slots=True)
class NgramSpec(part.Part):
    """The layers with n-gram embeddings, and how their rows are found and used.

    A token reads one row for each head. The rows together give a key for each residual stream of the model, and a
    value. The value, gated by each stream, goes through a causal convolution.
    Source: transformers, models/qwen4_exp, Qwen4ExpTextNGramEmbedding and Qwen4ExpTextPLELayer.
    """

    layers: tuple[int, ...]  # rising
    embed_dim: int  # values of all rows of a token together
    conv_kernel: int  # taps of the convolution
    dilation: int  # tokens between two taps
    ngram_size: int  # there are hashes of 2 to so many tokens
    heads_per_ngram: int  # of each hash
    eos_token: int  # a hash does not see beyond it; it also stands before the text
    head_sizes: tuple[tuple[int, ...], ...]  # by layer: rows of each head, which lie one head after another
    multipliers: tuple[tuple[int, ...], ...]  # by layer: of the hash, the token's own first
    num_rows: tuple[int, ...]  # by layer: rows of the table, of which the last may be unused

    @property
    def num_heads(self) -> int:
        """The rows that a token reads in a layer."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def row_values(self) -> int:
        """The values of a row."""
        return self.embed_dim // self.num_heads

    def table_shape(self, layer: int) -> tuple[int, int]:
        """Returns rows and columns of a layer's table."""
        return self.num_rows[self.layers.index(layer)], self.row_values

    def roles(self, hidden_size: int, stream_width: int, offset: float) -> Iterator[part.DenseRole]:
        """Yields the dense tensors of a layer; hidden states have `stream_width` values. `offset` is that of norms."""
        yield from part.matrices(key=(stream_width, self.embed_dim), value=(hidden_size, self.embed_dim))
        for name in ("key_norm", "query_norm", "conv_norm"):
            yield part.DenseRole(name, (stream_width,), False, offset)
        yield part.DenseRole("conv", (stream_width * self.conv_kernel,), False)

    def state(self, stream_width: int) -> mixers.StateShape:
        """Returns the shape of a layer's state: the last inputs of its convolution."""
        return mixers.StateShape(((self.conv_kernel - 1) * self.dilation, stream_width), ())

    def width(self, stream_width: int) -> int:
        """Returns the most floats of one token while a layer's embeddings are used."""
        return 2 * self.embed_dim + 10 * stream_width

    def fault(self, num_layers: int, stream_width: int, vocab_size: int) -> str | None:
        """Returns why n-gram embeddings cannot be those of a model with these sizes, or None."""
        names = ("embed_dim", "conv_kernel", "dilation", "ngram_size", "heads_per_ngram")
        if (fault := part.sizes_fault({name: getattr(self, name) for name in names}, "ngrams ")) is not None:
            return fault
        if not self.layers or not part.are_layers(self.layers, num_layers):
            return "ngrams layers must list decoder layers, at least one, in rising order"
        if not 2 <= self.ngram_size <= MAX_NGRAM_SIZE:
            return f"ngrams ngram_size is {self.ngram_size}, expected 2 to {MAX_NGRAM_SIZE}"
        if len(self.layers) * self.num_heads > MAX_HEADS:
            return f"ngrams have {len(self.layers) * self.num_heads} heads in all layers, expected at most {MAX_HEADS}"
        if self.embed_dim % self.num_heads:
            return f"ngrams embed_dim is {self.embed_dim}, expected a multiple of the {self.num_heads} heads"
        if self.conv_kernel > mixers.MAX_CONV_KERNEL:
            return f"ngrams conv_kernel is {self.conv_kernel}, expected at most {mixers.MAX_CONV_KERNEL}"
        if self.state(stream_width).num_values > mixers.MAX_STATE_VALUES:
            return f"the state of ngrams has {self.state(stream_width).num_values} values, expected at most 2^31"
        if not 0 <= self.eos_token < vocab_size:
            return f"ngrams eos_token is {self.eos_token}, expected 0 to {vocab_size - 1}"
        return self._hashes_fault(vocab_size)

    def _hashes_fault(self, vocab_size: int) -> str | None:
        L = len(self.layers)
        lists = (("head_sizes", self.head_sizes), ("multipliers", self.multipliers), ("num_rows", self.num_rows))
        for name, values in lists:
            if len(values) != L:
                return f"ngrams {name} has {len(values)} values, expected {L}: one for each layer"
        largest = (2**63 - 1) // max(vocab_size - 1, 1)  # products with token ids do not overflow
        for sizes, factors, num_rows in zip(self.head_sizes, self.multipliers, self.num_rows, strict=True):
            if len(sizes) != self.num_heads or min(sizes) < 1:
                return f"ngrams head_sizes must list {self.num_heads} sizes of 1 or more for each layer"
            if len(factors) != self.ngram_size or not all(0 < factor <= largest for factor in factors):
                return f"ngrams multipliers must list {self.ngram_size} numbers from 1 to {largest} for each layer"
            if not sum(sizes) <= num_rows <= MAX_TABLE_ROWS:
                return f"ngrams num_rows has {num_rows}, expected {sum(sizes)}, the rows of all heads, to 2^48"
        return None

    def lacks(self, runner: part.Runner) -> Iterator[str]:
        if runner == "gpu":
            yield "n-gram tables"


def hashed_ngrams(
    layers: Sequence[int],
    num_layers: int,
    *,
    embed_dim: int,
    conv_kernel: int,
    ngram_size: int,
    heads_per_ngram: int,
    eos_token: int,
    least_head_size: int,
    rows_multiple: int,
    vocab_size: int,
    seed: int,
) -> NgramSpec | None:
    """Returns the n-gram embeddings of a model from what its config has, or None if none of its layers has them.

    The heads of all layers, in their order, have the prime numbers from `least_head_size` on as sizes. A table's rows
    are rounded up to a multiple of `rows_multiple`. The taps of the convolution are `ngram_size` tokens apart.
    Args:    layers: rising, counted from 0; those from `num_layers` on are left out, and the others stay what they are.
             vocab_size, seed: decide the multipliers.
    Source:  transformers, models/qwen4_exp, Qwen4ExpTextNGramEmbedding and _build_layer_multipliers.
    """
    num_heads = (ngram_size - 1) * heads_per_ngram
    kept = [layer for layer in layers if layer < num_layers]
    if not kept:
        return None
    primes = _primes_from(least_head_size)
    sizes = [tuple(next(primes) for _ in range(num_heads)) for _ in kept]
    return NgramSpec(
        layers=tuple(kept),
        embed_dim=embed_dim,
        conv_kernel=conv_kernel,
        dilation=ngram_size,
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        eos_token=eos_token,
        head_sizes=tuple(sizes),
        multipliers=tuple(_multipliers(seed, place, ngram_size, vocab_size) for place in range(len(kept))),
        num_rows=tuple(-(-sum(each) // rows_multiple) * rows_multiple for each in sizes),
    )


def _primes_from(least: int) -> Iterator[int]:
    """Yields the prime numbers from `least` on."""
    number = max(least, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LAYER_STEP = 10007


def _multipliers(seed: int, place: int, ngram_size: int, vocab_size: int) -> tuple[int, ...]:
    """Returns the odd multipliers of the layer at a place among those with tables; products fit 63 bits."""
    half = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    begin = seed + _LAYER_STEP * place
    return tuple(2 * (_splitmix(begin + _STEP * (idx + 1)) % half) + 1 for idx in range(ngram_size))


def _splitmix(value: int) -> int:
    """Returns the number of SplitMix64 for a state, both 64 bits."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
