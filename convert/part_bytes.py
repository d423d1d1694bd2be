"""The bytes of one matrix's rows in a pack: quantized from what the source holds, or the source's own codes kept.

Kept codes are moved, never computed with: `fp8` and `mxfp4` side by side as the source has them, with the scales of
their blocks given to each row; MXFP4 blocks that lie across the neurons as `e5m2` (`E5M2_SPAN`).
"""

from collections.abc import Callable, Iterator
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.calib import RowQuantizer, UnholdableError, check_finite
from moe_pack.formats import Checkpoint, CheckpointError, PartFormat, Quantizer, SourceMatrix
from moe_pack.formats.codecs import E5m2, Fp8, Mxfp4, decode_part, e2m1_values
from moe_pack.runtime import read_codes, read_rows, read_scales, weights_dtype

_ROWS_AT_ONCE = 512  # rows of a matrix in memory at once, a multiple of every quantizer block and of every scale's
_MXFP4_BLOCK = 32
# E5M2 holds six doublings of E2M1's largest value, 6 * 2^13, and of its smallest, 0.5 * 2^-15: exponents of a neuron
# that lie so far apart have a power of two with which all its weights are exact.
_E5M2_TOP, E5M2_SPAN = 13, 28
_NO_NUMBER = 255  # of E8M0


class StoppedError(Exception):
    """The conversion is ending: whoever waits for this item no longer does."""


def next_rows(num_rows: int, stop: Event, at_once: int = _ROWS_AT_ONCE) -> Iterator[tuple[int, int]]:
    """(first, end) of consecutive runs of rows, `at_once` each.

    Raises:  StoppedError once `stop` is set.
    """
    for start in range(0, num_rows, at_once):
        if stop.is_set():
            raise StoppedError
        yield start, min(start + at_once, num_rows)


class MatrixRows:
    """The weights of a matrix of the source: a row an output, or an expert's neuron.

    Args:    stop: ends what is read at once.
    Raises:  CheckpointError as `weights`; StoppedError.
    """

    def __init__(self, checkpoint: Checkpoint, source: SourceMatrix, stop: Event) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._across: Tensor | None = None
        self.num_cols = source.num_cols
        if source.neurons == "columns":
            self._across = _transposed(read_checked, weights_dtype(checkpoint, source), checkpoint, source, stop)
            self.num_cols = source.num_rows

    def weights(self, first: int, end: int) -> Tensor:
        """Some rows, in a float dtype: [end - first, num_cols].

        Raises:  CheckpointError for a weight that is no number.
        """
        if self._across is not None:
            return self._across[first:end]
        return read_checked(self._checkpoint, self._source, first, end)

    def unholdable(self, first: int, fault: UnholdableError) -> CheckpointError:
        """That a row counted from `first` is more than a format holds."""
        row, col = _numbered(self._source, first)(fault.row, 0)
        line = f"column {col}" if self._across is not None else f"row {row}"
        return CheckpointError(f"{self._checkpoint.place(self._source)}: {line} has {fault.advice}")


class PartBytes:
    """A matrix of the source as rows of one part of a pack.

    Args:    part: the format; one that keeps a source only where the source is in these codes.
             quantizer: how scales are found otherwise.   stop: ends what is read at once.
    Raises:  CheckpointError as `rows`; StoppedError.
    """

    def __init__(
        self, checkpoint: Checkpoint, source: SourceMatrix, part: PartFormat, quantizer: Quantizer, stop: Event
    ) -> None:
        self._quantized: tuple[MatrixRows, RowQuantizer] | None = None
        if part.keeps_source:
            self._kept = KeptRows(checkpoint, source, part, stop)
        else:
            rows = MatrixRows(checkpoint, source, stop)
            self._quantized = rows, RowQuantizer(part, rows.num_cols, quantizer)

    def rows(self, first: int, end: int) -> NDArray[np.uint8]:
        """The bytes of some rows: u8 [end - first, part_bytes].

        Raises:  CheckpointError for a weight that is no number, or that the format cannot hold.
        """
        if self._quantized is None:
            return self._kept.rows(first, end)
        rows, quantizer = self._quantized
        try:
            return quantizer.encode(rows.weights(first, end)).numpy()
        except UnholdableError as fault:
            raise rows.unholdable(first, fault) from fault


class KeptRows:
    """A matrix whose codes are kept, as rows of the part that keeps them.

    Raises:  CheckpointError for exponents that `e5m2` does not hold; StoppedError.
    """

    def __init__(self, checkpoint: Checkpoint, source: SourceMatrix, part: PartFormat, stop: Event) -> None:
        self._checkpoint = checkpoint
        self._source = source
        self._part = part
        self._across: Tensor | None = None
        if source.neurons == "columns":
            self._across = _transposed(read_codes, torch.uint8, checkpoint, source, stop)
            self._across_scales = _scales_across(checkpoint, source)
            if part.codec == "e5m2" and (span := exponent_span(checkpoint, source)) > E5M2_SPAN:
                raise CheckpointError(
                    f"{checkpoint.place(source)}: exponents of a column lie {span} apart, e5m2 holds {E5M2_SPAN}; "
                    "store it in bf16"
                )

    def rows(self, first: int, end: int) -> NDArray[np.uint8]:
        """The bytes of some rows: u8 [end - first, part_bytes].

        Raises:  CheckpointError for a weight that is no number.
        """
        source, num_cols = self._source, self._source.num_cols
        if self._across is not None:
            num_cols = source.num_rows
            codes, scales = self._across[first:end], self._across_scales[torch.arange(first, end) // self._block]
        else:
            codes = read_codes(self._checkpoint, source, first, end)
            scales = read_scales(self._checkpoint, source, first, end)
        kept = _encoded(self._part, num_cols, codes, scales)
        weights = decode_part(self._part, num_cols, kept)
        check_finite(weights, self._checkpoint.place(source), CheckpointError, _numbered(source, first))
        return kept.numpy()

    @property
    def _block(self) -> int:
        """Neurons that share scales where neurons lie across."""
        return 128 if self._source.codec == "fp8" else _MXFP4_BLOCK


def _numbered(source: SourceMatrix, first: int) -> Callable[[int, int], tuple[int, int]]:
    """Where in the tensor the weights of rows from `first` on lie."""
    number = source.number
    if source.neurons == "columns":
        return lambda row, col: number(col, first + row)
    return lambda row, col: number(first + row, col)


def held_bytes(checkpoint: Checkpoint, source: SourceMatrix, part: PartFormat) -> int:
    """What `PartBytes` holds of a matrix, blocks apart: one that lies across, transposed."""
    if source.neurons == "rows":
        return 0
    value_bytes = 1 if part.keeps_source else weights_dtype(checkpoint, source).itemsize
    return source.num_rows * source.num_cols * value_bytes


def read_checked(checkpoint: Checkpoint, source: SourceMatrix, start: int, stop: int) -> Tensor:
    """Rows of a matrix as it lies, all of them numbers.

    Raises:  CheckpointError naming the first weight that is none.
    """
    weights = read_rows(checkpoint, source, start, stop)
    check_finite(weights, checkpoint.place(source), CheckpointError, lambda row, col: source.number(start + row, col))
    return weights


def exponent_span(checkpoint: Checkpoint, source: SourceMatrix) -> int:
    """How far the exponents of a neuron of MXFP4 blocks that lie across are apart, at most of all neurons."""
    scales = checkpoint.scales(source, 0, source.num_rows)  # [d, f / 32]
    return int((scales.max(axis=0).astype(np.int64) - scales.min(axis=0)).max())


def _transposed(
    read: Callable[[Checkpoint, SourceMatrix, int, int], Tensor],
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    source: SourceMatrix,
    stop: Event,
) -> Tensor:
    """A matrix whose neurons are columns, `[d, f]`, as `[f, d]`: made some rows at a time."""
    out = torch.empty((source.num_cols, source.num_rows), dtype=dtype)
    for first, end in next_rows(source.num_rows, stop):
        out[:, first:end] = read(checkpoint, source, first, end).T
    return out


def _scales_across(checkpoint: Checkpoint, source: SourceMatrix) -> Tensor:
    """The scales of codes whose neurons are columns, a row for each block of neurons: of FP8 one for 128 rows."""
    scales = read_scales(checkpoint, source, 0, source.num_rows)
    return (scales[::128] if source.codec == "fp8" else scales).T.contiguous()


def _e5m2(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 codes with a scale each, u8 [n, d], as E5M2 codes with one scale a row."""
    exponents = scales.to(torch.int64)
    row = (exponents.amax(dim=1, keepdim=True) - _E5M2_TOP).clamp_(min=0)
    values = e2m1_values(codes).mul_(torch.pow(2.0, (exponents - row).to(torch.float32)))
    values.masked_fill_(exponents == _NO_NUMBER, torch.nan)
    return values.to(torch.float8_e5m2).view(torch.uint8), row.to(torch.uint8)


def _encoded(part: PartFormat, num_cols: int, codes: Tensor, scales: Tensor) -> Tensor:
    """A part's bytes of codes u8 [n, num_cols] and scales as the source has them."""
    if part.codec == "fp8":
        return Fp8(part, num_cols).encode(codes, scales)
    if part.codec == "mxfp4":
        return Mxfp4(part, num_cols).encode(codes, scales)
    return E5m2(part, num_cols).encode(*_e5m2(codes, scales))
