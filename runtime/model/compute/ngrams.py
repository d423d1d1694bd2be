"""The rows of n-gram tables: the row numbers of tokens, and reads that overlap with the pass of the model.

A token and those before it decide which rows are read in all layers. So all reads of a pass begin before its first
layer, and a layer waits for its own only when it runs:

    rows = NgramRows(spec, table_of, tokens, num_new)        before the pass, or while the pass before it runs
    embedded = rows.of(layer)                                in the layer

Tables are on the disk; the system's cache keeps pages that are read again. docs/model.md derives rows from tokens.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats.parts import NgramSpec

Numbers = NDArray[np.int64]

SLOT_TOKENS = 512  # whose rows fit one of a table's buffers; further rows are read piece by piece
SLOTS_PER_TABLE = 2  # the pass that runs, and the next one


class PendingRows(Protocol):
    """Rows that are being read."""

    def result(self) -> Tensor:
        """Waits for the rows, once, and returns them, float32 [n, values]; raises PackError or CheckpointError."""

    def cancel(self) -> None:
        """Gives the rows up, in place of `result`."""


RowTable = Callable[[Numbers], PendingRows]  # begins to read the rows of a table with these numbers, rising int64 [n]


class LaterRows:
    """Rows, float32 [n, values], that a function reads when somebody waits for them."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def result(self) -> Tensor:
        return self._read()

    def cancel(self) -> None:
        pass  # nothing has begun


def row_numbers(ngrams: NgramSpec, tokens: Numbers, num_new: int, layers: Iterable[int]) -> Numbers:
    """Returns the rows that tokens read in tables of layers, int64 [layers, num_new, heads].

    Args:    tokens: int64 [n], the new ones last; at least `ngram_size - 1` of those before them, or all.
    """
    places = [ngrams.layers.index(layer) for layer in layers]
    before = _earlier(ngrams, tokens, num_new)
    factors = np.array([ngrams.multipliers[place] for place in places], np.int64)
    sizes = np.array([ngrams.head_sizes[place] for place in places], np.int64)
    offsets = np.cumsum(sizes, axis=1) - sizes
    # [layers, ngram_size, T]: of each token the hash with j tokens before it.
    hashes = np.bitwise_xor.accumulate(before[None] * factors[:, :, None], axis=1)
    by_head = np.repeat(hashes[:, 1:], ngrams.heads_per_ngram, axis=1)
    rows: Numbers = by_head % sizes[:, :, None] + offsets[:, :, None]
    return rows.transpose(0, 2, 1)


def _earlier(ngrams: NgramSpec, tokens: Numbers, num_new: int) -> Numbers:
    """Returns each new token and the tokens 1, 2, ... places before it in its text, int64 [ngram_size, num_new]."""
    size, eos = ngrams.ngram_size, ngrams.eos_token
    padded = np.concatenate((np.full(size - 1, eos), tokens))
    start = len(padded) - num_new
    found = np.empty((size, num_new), np.int64)
    is_seen = np.ones(num_new, bool)
    for back in range(size):
        each = padded[start - back : len(padded) - back]
        if back:
            is_seen &= each != eos
        found[back] = np.where(is_seen, each, eos)
    return found


class NgramRows:
    """The rows of new tokens in the tables of layers, which are read from now on. `close` it if not all are taken.

    Args:    table_of: the table of a layer.   tokens: as of `row_numbers`.   layers: None: all that have tables.
    """

    def __init__(
        self,
        ngrams: NgramSpec,
        table_of: Callable[[int], RowTable],
        tokens: Tensor,
        num_new: int,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        layers = ngrams.layers if layers is None else layers
        self._pending: dict[int, tuple[PendingRows, Numbers]] = {}
        self._layer, self._embedded = -1, torch.empty(0)
        try:
            for layer, numbers in zip(layers, row_numbers(ngrams, tokens.numpy(), num_new, layers), strict=True):
                distinct, places = np.unique(numbers, return_inverse=True)
                self._pending[layer] = table_of(layer)(distinct), places.reshape(numbers.shape)
        except BaseException:
            self.close()
            raise

    def of(self, layer: int) -> Tensor:
        """Returns the tokens' embeddings in a layer, float32 [T, embed_dim]; layers are asked for in rising order."""
        if layer != self._layer:
            pending, places = self._pending.pop(layer)
            rows = pending.result()
            self._layer, self._embedded = layer, rows[torch.from_numpy(places)].flatten(1)
        return self._embedded

    def close(self) -> None:
        """Gives up the rows that were not taken."""
        for pending, _ in self._pending.values():
            pending.cancel()
        self._pending.clear()
