"""Rows on their way to the device: gathered by threads into page-locked chunks, each copied as soon as it is full."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.runtime.device import Device, Mark

NUM_THREADS, NUM_CHUNKS = 4, 16
# FloE §3.4.2 copies 50 neurons at once, of 16 KB each. Quantized rows are shorter: what counts is bytes.
CHUNK_BYTES = 1 << 20

Bytes = NDArray[np.uint8]


class Piece(NamedTuple):
    """Rows `first` to `stop` of those that are sent, and where on the device they go: u8 [rows * row bytes]."""

    first: int
    stop: int
    target: Tensor


class ChunkRing:
    """`num_chunks` chunks of page-locked memory in turn, and threads that fill them. Owns both: `close` it.

    Args:    chunk_bytes: what one thread gathers at most, and one copy moves; no row that is sent is longer.
    Source:  FloE §3.4.2.
    """

    def __init__(
        self,
        device: Device,
        chunk_bytes: int = CHUNK_BYTES,
        num_chunks: int = NUM_CHUNKS,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._device = device
        self._chunks = device.on_host(num_chunks * chunk_bytes).view(num_chunks, -1)
        self._marks: list[Mark | None] = [None] * num_chunks
        self._next = 0
        self._threads = ThreadPoolExecutor(num_threads, "gather")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def rows_per_chunk(self, row_bytes: int) -> int:
        """How many rows of so many bytes a chunk holds."""
        num_rows = self._chunks.shape[1] // row_bytes
        assert num_rows > 0, f"a row of {row_bytes} bytes, in chunks of {self._chunks.shape[1]}"
        return num_rows

    def send(self, rows: Bytes, neurons: NDArray[np.int32], pieces: Sequence[Piece]) -> None:
        """Copies some rows to the device, in the copy queue's turn; by when, a mark after it tells.

        Args:    rows: u8 [f, row bytes].   neurons: int32 [n], which.   pieces: all n in order, at most
                 `rows_per_chunk` each.
        """
        filling = deque[tuple[int, Piece, Future[object]]]()
        for piece in pieces:
            if len(filling) == len(self._chunks):
                self._copy(*filling.popleft())
            chunk, self._next = self._next, (self._next + 1) % len(self._chunks)
            mark = self._marks[chunk]
            if mark is not None and not self._device.is_done(mark):
                self._device.synchronize(mark, "host memory is reused")
            wanted = neurons[piece.first : piece.stop]
            out = self._chunks[chunk, : len(wanted) * rows.shape[1]].numpy().reshape(-1, rows.shape[1])
            # Clipped as numpy gathers into `out` directly then; the neurons are the expert's own.
            filling.append((chunk, piece, self._threads.submit(np.take, rows, wanted, 0, out, "clip")))
        while filling:
            self._copy(*filling.popleft())

    def _copy(self, chunk: int, piece: Piece, gathered: Future[object]) -> None:
        gathered.result()
        self._device.copy(piece.target, self._chunks[chunk, : len(piece.target)], "copy")
        self._marks[chunk] = self._device.record("copy")
