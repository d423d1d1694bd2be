"""What the driver charges this process for a card's memory: context, kernels and libraries included.

It is what nvidia-smi shows, and what a budget is kept against. PyTorch's own figures leave out what others allocated.

A GPU as the staged engine sees it: memory that is taken once, copies beside computing, and who waits for whom.

Two queues work side by side, each in the order of asking: `compute` runs what torch and the kernels launch, `copy` only
copies. A mark is a point in a queue; a queue may wait for the other's, which costs the host nothing, or the host may,
which it is to say why. `CudaDevice` is a GPU; tests put a recording one in its place.

Rows on their way to the device: gathered by threads into page-locked chunks, each copied as soon as it is full.

A pack's experts in host memory: one mapping of our own, page-locked where a card is to read it.

PyTorch's pinned allocator is not asked: it rounds up to powers of two. All is read once; a pack that does not fit
streams from the drive (`expert_store`).
"""

import ctypes
import mmap
import os
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import NO_PROGRESS, Pack, PackError, Progress, RunError, size_text
from moe_pack.formats.commands import Stage

_NAME_BYTES = 96  # of a card's UUID, as the library writes it


class GpuMemory:
    """A card's memory in use by this process. Make it before anything else uses the card.

    What was in use before is others'. Where that cannot be told (the driver's management library is missing, or this
    process used the card before), all that is in use counts as this process's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before torch is asked for anything, which might make the context that is to be counted.
        cards = [] if torch.cuda.is_initialized() else _cards()  # type: ignore[no-untyped-call]  # untyped in torch
        # torch counts the cards that CUDA_VISIBLE_DEVICES leaves, the library all: told apart by their names.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._card = next((card for card in cards if card.name == name), None)

    def used_bytes(self) -> int:
        """Bytes in use by now, once all that was asked of the card is done."""
        torch.cuda.synchronize(self._device)  # what is under way may still take memory
        if self._card is not None:
            return self._card.used_bytes() - self._card.before_bytes
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def free_bytes(self) -> int:
        """Bytes that nobody uses."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(slots=True)
class _NvmlGpu:
    """A card as the driver's management library knows it. `before_bytes`: in use when it was found."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    name: str
    before_bytes: int = 0

    def used_bytes(self) -> int:
        """Bytes in use."""
        held = _MemoryInfo()
        fault = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(held))
        assert fault == 0, "the card was there when it was found"
        return int(held.used)


def _cards() -> list[_NvmlGpu]:
    """All cards; none where the library is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    found = []
    for idx in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(idx, ctypes.byref(handle)):
            continue  # a card that this process may not use
        if not library.nvmlDeviceGetUUID(handle, name, _NAME_BYTES):
            card = _NvmlGpu(library, handle, name.value.decode())
            card.before_bytes = card.used_bytes()
            found.append(card)
    return found


Queue = Literal["compute", "copy"]
Reason = Literal["routes", "neurons", "predicted neurons", "host memory is reused", "reading", "measuring"]

_NUM_EVENTS = 4096  # a queue's marks that are told apart; older ones count as what was marked so much later


class StreamMark(NamedTuple):
    """A point in a queue: all that had been asked of it by then."""

    queue: Queue
    number: int


class Device(Protocol):
    """Memory, copies and waiting. `device`: where its tensors are, for torch."""

    device: torch.device

    def on_device(self, num_bytes: int) -> Tensor:
        """Memory of the device, u8 [num_bytes], its first byte at a multiple of 128; kept by whoever asks.

        Raises:  RunError if there is not so much.
        """
        ...

    def on_host(self, num_bytes: int) -> Tensor:
        """Page-locked memory of the host, u8 [num_bytes], which the device copies from and to while the host goes on.

        Raises:  RunError if there is not so much.
        """
        ...

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Asks a queue for a copy between host and device; both may be used again once a mark after it is reached.

        Args:    to, source: of one dtype and shape, contiguous, the host's page-locked.
        """
        ...

    def record(self, queue: Queue) -> StreamMark:
        """Marks the point that a queue has been asked to by now."""
        ...

    def wait(self, queue: Queue, mark: StreamMark) -> None:
        """Lets a queue go on only when the other's mark is reached; the host does not wait."""
        ...

    def is_done(self, mark: StreamMark) -> bool:
        """Whether a mark is reached."""
        ...

    def synchronize(self, mark: StreamMark, reason: Reason) -> None:
        """The host waits until a mark is reached."""
        ...


class CudaDevice:
    """A CUDA device: `compute` is torch's current stream, `copy` a stream of its own."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._copy = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's, without types
        self._events: dict[Queue, list[torch.cuda.Event]] = {"compute": [], "copy": []}
        self._numbers: dict[Queue, int] = {"compute": 0, "copy": 0}

    def on_device(self, num_bytes: int) -> Tensor:
        """Memory of the device; see `Device`."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as fault:
            raise RunError(f"--budget: {num_bytes:,} bytes cannot be had on the device; give less") from fault

    def on_host(self, num_bytes: int) -> Tensor:
        """Page-locked memory; see `Device`. PyTorch takes the next power of two of it."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as fault:  # torch has no class for it
            raise RunError(f"--ram: {num_bytes:,} bytes of page-locked memory cannot be had ({fault})") from fault

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Asks for a copy; see `Device`."""
        with torch.cuda.stream(self._stream(queue)):
            to.copy_(source, non_blocking=True)

    def record(self, queue: Queue) -> StreamMark:
        """Marks a point; see `Device`."""
        events, number = self._events[queue], self._numbers[queue]
        if len(events) < _NUM_EVENTS:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # likewise
        events[number % _NUM_EVENTS].record(self._stream(queue))
        self._numbers[queue] = number + 1
        return StreamMark(queue, number)

    def wait(self, queue: Queue, mark: StreamMark) -> None:
        """Lets a queue wait; see `Device`."""
        self._stream(queue).wait_event(self._event(mark))

    def is_done(self, mark: StreamMark) -> bool:
        """Whether a mark is reached; see `Device`."""
        return bool(self._event(mark).query())  # type: ignore[no-untyped-call]  # likewise

    def synchronize(self, mark: StreamMark, reason: Reason) -> None:
        """Waits for a mark; see `Device`."""
        self._event(mark).synchronize()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._copy if queue == "copy" else torch.cuda.current_stream(self.device)

    def _event(self, mark: StreamMark) -> torch.cuda.Event:
        # Where it has been recorded anew since, that was later in the same queue: whoever waits, waits long enough.
        return self._events[mark.queue][mark.number % _NUM_EVENTS]


NUM_THREADS, NUM_CHUNKS = 4, 16
# FloE §3.4.2 copies 50 neurons at once, of 16 KB each. Quantized rows are shorter: what counts is bytes.
CHUNK_BYTES = 1 << 20

Bytes = NDArray[np.uint8]


class RowRange(NamedTuple):
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
        self._marks: list[StreamMark | None] = [None] * num_chunks
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

    def send(self, rows: Bytes, neurons: NDArray[np.int32], pieces: Sequence[RowRange]) -> None:
        """Copies some rows to the device, in the copy queue's turn; by when, a mark after it tells.

        Args:    rows: u8 [f, row bytes].   neurons: int32 [n], which.   pieces: all n in order, at most
                 `rows_per_chunk` each.
        """
        filling = deque[tuple[int, RowRange, Future[object]]]()
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

    def _copy(self, chunk: int, piece: RowRange, gathered: Future[object]) -> None:
        gathered.result()
        self._device.copy(piece.target, self._chunks[chunk, : len(piece.target)], "copy")
        self._marks[chunk] = self._device.record("copy")


Array = NDArray[Any]

LINE_BYTES = 128  # extents begin on multiples of it: what a card reads over its link at once
_PAGE_BYTES = 4096  # of the system: what is mapped begins on one, and is locked in whole ones
_READ_THREADS = 8


class HostArena:
    """All experts' extents of a pack. Owns the mapping: `close` it, or use it in a `with`, after whoever reads it.

    `extent_at[l]`: int64 [E], where each expert of a MoE layer begins in `rows(l)`, in bytes, multiples of 128.
    `num_bytes`: of the mapping.   `locked_bytes`: of it that are page-locked, from the beginning on.
    """

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        progress: Progress = NO_PROGRESS,
        num_threads: int = _READ_THREADS,
        verify: bool = True,
    ) -> None:
        """Maps, reads and locks.

        Args:    device: the memory is locked for a card; for `cpu` it is not.   verify: whether experts are
                 checked.
        Raises:  RunError if there is not so much memory; PackError if an expert is damaged or cannot be read.
        """
        self.extent_at, self._layers, self.num_bytes = _places(pack)
        self.locked_bytes = 0
        self._locked: list[int] = []  # addresses of pieces
        try:
            self._memory = mmap.mmap(-1, self.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as fault:
            raise RunError(
                f"--ram: {size_text(self.num_bytes)} for the pack's experts cannot be had ({fault})"
            ) from fault
        self._bytes = torch.from_numpy(np.frombuffer(self._memory, np.uint8))
        self._fill(pack, progress, num_threads, verify)
        if device.type == "cuda":
            self._lock()

    def __enter__(self) -> "HostArena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_locked(self) -> bool:
        """Whether a card can read all of it."""
        return self.locked_bytes == self.num_bytes

    def rows(self, layer_idx: int) -> Tensor:
        """A layer's extents, u8; borrows the mapping, valid until close. It begins on a multiple of 4096."""
        begin, end = self._layers[layer_idx]
        return self._bytes[begin:end]

    def close(self) -> None:
        """Unlocks it and lets go of the memory, which goes with the last tensor that refers to it.

        Whatever a card was asked for is done before: a kernel or a copy may still read what is unlocked.
        """
        if self._locked:
            torch.cuda.synchronize()
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._locked.clear()
        self.locked_bytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _fill(self, pack: Pack, progress: Progress, num_threads: int, verify: bool) -> None:
        held = self._bytes.numpy()
        jobs = [(l, e) for l, layer in enumerate(pack.layout.experts) for e in range(len(layer))]

        def read(job: tuple[int, int]) -> int:
            layer_idx, expert = job
            begin = self._layers[layer_idx][0] + int(self.extent_at[layer_idx][expert])
            raw = held[begin : begin + pack.layout.experts[layer_idx][expert].num_bytes]
            _read_extent(pack, layer_idx, expert, files[layer_idx], raw, verify)
            return len(raw)

        files: list[int] = []
        try:
            for listed in pack.manifest.expert_files:
                files.append(_opened(pack, listed.name))
            with ThreadPoolExecutor(num_threads) as threads:
                progress.begin(Stage("experts", self.num_bytes, "B"))
                for num_bytes in threads.map(read, jobs):
                    progress.advance(num_bytes)
                progress.end()
        finally:
            for file in files:
                os.close(file)

    def _lock(self) -> None:
        """Page-locks it layer by layer, until one is refused.

        A copy must not span what was locked by two calls, or is locked in part: none spans two layers.
        """
        address, cudart = self._bytes.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        begins = [begin for begin, _ in self._layers]
        for begin, end in zip(begins, [*begins[1:], self.num_bytes], strict=True):
            if int(cudart.cudaHostRegister(address + begin, end - begin, 0)) != 0:
                _forget_cuda_error()
                return
            self._locked.append(address + begin)
            self.locked_bytes += end - begin


def host_bytes(pack: Pack) -> int:
    """What a `HostArena` of a pack takes."""
    return _places(pack)[2]


def _places(pack: Pack) -> tuple[list[Array], list[tuple[int, int]], int]:
    """Where each extent begins in its layer; where each layer begins and ends in the mapping; its length."""
    extent_at, layers, end = [], [], 0
    for layer in pack.layout.experts:
        sizes = np.array([-(-expert.num_bytes // LINE_BYTES) * LINE_BYTES for expert in layer], np.int64)
        extent_at.append(np.cumsum(sizes) - sizes)
        layers.append((end, end + int(sizes.sum())))
        end = -(-layers[-1][1] // _PAGE_BYTES) * _PAGE_BYTES
    return extent_at, layers, end


def _opened(pack: Pack, name: str) -> int:
    try:
        return os.open(pack.folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        raise PackError(f"{name}: cannot be opened ({fault.strerror})") from fault


def _read_extent(pack: Pack, layer_idx: int, expert: int, file: int, raw: NDArray[np.uint8], verify: bool) -> None:
    """Reads an expert to where it is to lie, and checks it if it is to be.

    Raises:  PackError if it is damaged or cannot be read.
    """
    name, begin = pack.manifest.expert_files[layer_idx].name, pack.layout.offsets[layer_idx][expert]
    view, done = raw.data, 0
    while done < len(raw):
        try:
            got = os.preadv(file, [view[done:]], begin + done)
        except OSError as fault:
            raise PackError(f"{name}: read failed at byte {begin + done} ({fault.strerror})") from fault
        if not got:
            raise PackError(f"{name}: ends at byte {begin + done}, expected {begin + len(raw)}")
        done += got
    if verify and zlib.crc32(view) != int(pack.index.crc32[layer_idx, expert]):
        raise PackError(f"{name}: expert {expert}: CRC-32 does not match its bytes; the file is damaged")


def _forget_cuda_error() -> None:
    """A refused call leaves its error for the next launch to report: a launch of nothing takes it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.cuda.synchronize()
