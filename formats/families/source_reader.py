"""The reading of source matrices by rows, in a checkpoint's shards or kept in a pack."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.families import claiming, encodings
from moe_pack.formats.pack import safetensors


class SourceReader(ABC):
    """Tensors in a publisher's bytes, of which it reads the rows of matrices as their places say."""

    @abstractmethod
    def entry(self, tensor: str) -> safetensors.TensorEntry:
        """Returns what the header of its file says about a tensor."""

    @abstractmethod
    def raw(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads `num_bytes` of a tensor, from byte `start` on: u8, own memory. Raises as `rows`."""

    def dtype(self, source: claiming.SourceMatrix) -> str:
        """Returns the safetensors dtype of a matrix: BF16, F16, F32; of codes F8_E4M3, U8 (MXFP4), or I32 (packed)."""
        return self.entry(source.tensor).dtype

    def scale_dtype(self, source: claiming.SourceMatrix) -> str:
        """Returns the safetensors dtype of the scales of a matrix of codes."""
        assert source.scales is not None, f"{source}: has no scales"
        return self.entry(source.scales).dtype

    def num_bytes(self, source: claiming.SourceMatrix) -> int:
        """Returns a matrix's bytes in the source, without its scales."""
        return source.num_rows * source.num_cols * self.value_bits(source) // 8

    def rows(self, source: claiming.SourceMatrix, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads rows `start` to `stop` of a matrix (or elements of a vector) in the source's bytes: u8, own memory.

        Raises:  CheckpointError, or PackError for a pack's file, if it is cut short or cannot be read.
        """
        assert 0 <= start <= stop <= source.num_rows, f"{source}: rows {start} to {stop}"
        if source.transposed:
            whole = self.raw(source.tensor, 0, self.num_bytes(source)).reshape(source.num_cols, source.num_rows, -1)
            return whole[:, start:stop].swapaxes(0, 1).reshape(-1)
        bits, step = self.value_bits(source), source.row_step
        first = source.first_row + start * step
        read = self._strided(source.tensor, first, stop - start, step, source.row_size * bits // 8)
        if source.num_cols == source.row_size:
            return read.reshape(-1)
        last_col = source.first_col + source.num_cols * source.col_step
        values = read.reshape(stop - start, source.row_size, bits // 8)
        return values[:, source.first_col : last_col : source.col_step].reshape(-1)

    def scales(self, source: claiming.SourceMatrix, start: int, stop: int) -> NDArray[np.uint8]:
        """Reads the scales of rows `start` to `stop` of a matrix of codes: u8 [rows, bytes], own memory.

        With `fp8`, a row of scales belongs to 128 rows of codes; all that overlap `start` to `stop` are read.
        Raises:  as `rows`.
        """
        assert source.scales is not None and 0 <= start <= stop <= source.num_rows, f"{source}: rows {start} to {stop}"
        entry = self.entry(source.scales)
        row_bytes = entry.shape[-1] * safetensors.DTYPE_BYTES[entry.dtype]
        if source.codec == "fp8":
            first = start // encodings.SCALE_BLOCK
            return self._strided(source.scales, first, -(-stop // encodings.SCALE_BLOCK) - first, 1, row_bytes)
        step = source.row_step
        return self._strided(source.scales, source.first_row + start * step, stop - start, step, row_bytes)

    def _strided(self, tensor: str, first: int, count: int, step: int, row_bytes: int) -> NDArray[np.uint8]:
        """Reads every `step`-th row of a tensor from `first` on: u8 [count, row_bytes]."""
        span = max(0, (count - 1) * step + 1)  # rows of the tensor from the first to the last
        return self.raw(tensor, first * row_bytes, span * row_bytes).reshape(span, row_bytes)[::step]

    def value_bits(self, source: claiming.SourceMatrix) -> int:
        """Returns the bits of a value, or of its code, in the source."""
        if source.codec == "packed":
            return source.num_bits
        return 4 if source.codec == "mxfp4" else 8 * safetensors.DTYPE_BYTES[self.dtype(source)]
