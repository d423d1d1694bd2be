"""The GPU as the engines see it: its memory, its queues, and page-locked host memory; importing this needs no Triton.

`GpuMemory` says what the driver charges this process for, context, kernels and libraries included. nvidia-smi shows the
same figure, and a budget is compared with it. PyTorch's own figures omit what others allocated.

`Device` is what the staged engine needs: memory that is allocated once, copies that run while the GPU computes, and
waiting. It has two queues, each of which runs in the order of its requests: `compute` runs what torch and the kernels
launch, `copy` only copies. A mark is a point in a queue. A queue may wait for a mark of the other queue, which costs
the host nothing; the host may wait too, and says why. `CudaDevice` is a GPU; tests use a recording device instead.

`ChunkRing` sends rows to the device: threads gather them into page-locked chunks, and each full chunk is copied.

`HostArena` has all experts of a pack in host memory, in one mapping that is page-locked if a GPU reads it. It does not
use PyTorch's allocator of page-locked memory, which rounds up to powers of two. A pack that does not fit into host
memory comes from disk (`DiskExperts` in `staged_store`).
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

_NAME_BYTES = 96  # of a GPU's UUID, as the library writes it


class GpuMemory:
    """The memory of a GPU that this process uses. Make it before anything else uses the GPU.

    Memory in use before that belongs to other processes. If it cannot be known (the driver's management library is
    missing, or this process used the GPU before), all memory in use counts as this process's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # This comes first: calls of torch may make the context, which has to be counted.
        gpus = [] if torch.cuda.is_initialized() else _gpus()  # type: ignore[no-untyped-call]  # untyped in torch
        # torch numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, the library all of them: their names identify them.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._gpu = next((gpu for gpu in gpus if gpu.name == name), None)

    def used_bytes(self) -> int:
        """Returns the bytes in use, after the GPU has done all that it was given."""
        torch.cuda.synchronize(self._device)  # work in progress may still allocate
        if self._gpu is not None:
            return self._gpu.used_bytes() - self._gpu.before_bytes
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def free_bytes(self) -> int:
        """Returns the bytes that no process uses."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(slots=True)
class _NvmlGpu:
    """A GPU as the driver's management library knows it. `before_bytes`: in use when it was listed."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    name: str
    before_bytes: int = 0

    def used_bytes(self) -> int:
        """Returns the bytes in use by all processes."""
        memory = _MemoryInfo()
        fault = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory))
        assert fault == 0, "the library listed this GPU"
        return int(memory.used)


def _gpus() -> list[_NvmlGpu]:
    """Returns all GPUs; an empty list if the library is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    gpus = []
    for idx in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        if library.nvmlDeviceGetHandleByIndex_v2(idx, ctypes.byref(handle)):
            continue  # this process may not use it
        if not library.nvmlDeviceGetUUID(handle, name, _NAME_BYTES):
            gpu = _NvmlGpu(library, handle, name.value.decode())
            gpu.before_bytes = gpu.used_bytes()
            gpus.append(gpu)
    return gpus


Queue = Literal["compute", "copy"]
Reason = Literal["routes", "neurons", "predicted neurons", "host memory is reused", "reading", "measuring"]

_NUM_EVENTS = 4096  # marks of a queue that are distinct; an older mark counts as the one that many later


class StreamMark(NamedTuple):
    """A point in a queue: after all that it was given before."""

    queue: Queue
    number: int


class Device(Protocol):
    """Memory, copies and waiting. `device`: torch's name for the place of its tensors."""

    device: torch.device

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocates memory of the device: u8 [num_bytes], its first byte at a multiple of 128; the caller owns it.

        Raises:  RunError if there is not enough.
        """
        ...

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Allocates page-locked host memory, u8 [num_bytes]; the host goes on while the device copies from and to it.

        Raises:  RunError if there is not enough.
        """
        ...

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Adds a copy between host and device to a queue; both may be used again once a later mark is reached.

        Args:    to, source: of one dtype and shape, contiguous; the host's is page-locked.
        """
        ...

    def record(self, queue: Queue) -> StreamMark:
        """Marks the point after all that a queue was given until now."""
        ...

    def wait(self, queue: Queue, mark: StreamMark) -> None:
        """Makes a queue wait until a mark of the other queue is reached; the host does not wait."""
        ...

    def is_done(self, mark: StreamMark) -> bool:
        """Whether a mark has been reached."""
        ...

    def synchronize(self, mark: StreamMark, reason: Reason) -> None:
        """Makes the host wait until a mark is reached."""
        ...


class CudaDevice:
    """A CUDA device: `compute` is torch's current stream, `copy` a stream of its own."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._copy = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's, without types
        self._events: dict[Queue, list[torch.cuda.Event]] = {"compute": [], "copy": []}
        self._numbers: dict[Queue, int] = {"compute": 0, "copy": 0}

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocates memory of the device; see `Device`."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as fault:
            raise RunError(f"--budget: the GPU has no {num_bytes:,} free bytes; give less") from fault

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Allocates page-locked memory, of which PyTorch takes the next power of two; see `Device`."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as fault:  # torch has no class for it
            raise RunError(
                f"--ram: cannot allocate {num_bytes:,} bytes of page-locked memory ({fault}); give less"
            ) from fault

    def copy(self, to: Tensor, source: Tensor, queue: Queue) -> None:
        """Adds a copy to a queue; see `Device`."""
        with torch.cuda.stream(self._stream(queue)):
            to.copy_(source, non_blocking=True)

    def record(self, queue: Queue) -> StreamMark:
        """Marks a point of a queue; see `Device`."""
        events, number = self._events[queue], self._numbers[queue]
        if len(events) < _NUM_EVENTS:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # likewise
        events[number % _NUM_EVENTS].record(self._stream(queue))
        self._numbers[queue] = number + 1
        return StreamMark(queue, number)

    def wait(self, queue: Queue, mark: StreamMark) -> None:
        """Makes a queue wait; see `Device`."""
        self._stream(queue).wait_event(self._event(mark))

    def is_done(self, mark: StreamMark) -> bool:
        """Whether a mark has been reached; see `Device`."""
        return bool(self._event(mark).query())  # type: ignore[no-untyped-call]  # likewise

    def synchronize(self, mark: StreamMark, reason: Reason) -> None:
        """Makes the host wait; see `Device`."""
        self._event(mark).synchronize()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._copy if queue == "copy" else torch.cuda.current_stream(self.device)

    def _event(self, mark: StreamMark) -> torch.cuda.Event:
        # The event may have been recorded again since, later in the same queue: then the wait is longer, not shorter.
        return self._events[mark.queue][mark.number % _NUM_EVENTS]


NUM_THREADS, NUM_CHUNKS = 4, 16
# FloE §3.4.2 copies 50 neurons of 16 KB at once. Quantized rows are shorter, so the size is given in bytes.
CHUNK_BYTES = 1 << 20

Bytes = NDArray[np.uint8]


class RowRange(NamedTuple):
    """Rows `first` to `stop` of a list that is sent, and their place on the device: u8 [rows * row bytes]."""

    first: int
    stop: int
    target: Tensor


class ChunkRing:
    """Chunks of page-locked memory that are used in turn, and threads that fill them. Owns both: `close` it.

    Args:    chunk_bytes: the most that one thread gathers and one copy moves; no row is longer.
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
        self._chunks = device.allocate_host(num_chunks * chunk_bytes).view(num_chunks, -1)
        self._marks: list[StreamMark | None] = [None] * num_chunks
        self._next = 0
        self._threads = ThreadPoolExecutor(num_threads, "gather")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def rows_per_chunk(self, row_bytes: int) -> int:
        """Returns how many rows of so many bytes fit into a chunk."""
        num_rows = self._chunks.shape[1] // row_bytes
        assert num_rows > 0, f"a row of {row_bytes} bytes, in chunks of {self._chunks.shape[1]}"
        return num_rows

    def send(self, rows: Bytes, neurons: NDArray[np.int32], pieces: Sequence[RowRange]) -> None:
        """Copies some rows to the device in the copy queue; a later mark says when they have arrived.

        Args:    rows: u8 [f, row bytes].   neurons: int32 [n], the rows to send.   pieces: ranges of these n rows in
                 order, each of at most `rows_per_chunk`.
        """
        filling = deque[tuple[int, RowRange, Future[object]]]()
        for piece in pieces:
            if len(filling) == len(self._chunks):
                self._copy(*filling.popleft())
            chunk, self._next = self._next, (self._next + 1) % len(self._chunks)
            mark = self._marks[chunk]
            if mark is not None and not self._device.is_done(mark):
                self._device.synchronize(mark, "host memory is reused")
            row_ids = neurons[piece.first : piece.stop]
            out = self._chunks[chunk, : len(row_ids) * rows.shape[1]].numpy().reshape(-1, rows.shape[1])
            # With "clip" numpy gathers into `out` directly; no neuron is out of range.
            filling.append((chunk, piece, self._threads.submit(np.take, rows, row_ids, 0, out, "clip")))
        while filling:
            self._copy(*filling.popleft())

    def _copy(self, chunk: int, piece: RowRange, gathered: Future[object]) -> None:
        gathered.result()
        self._device.copy(piece.target, self._chunks[chunk, : len(piece.target)], "copy")
        self._marks[chunk] = self._device.record("copy")


Array = NDArray[Any]

LINE_BYTES = 128  # extents begin on multiples of it: a GPU reads so many bytes over its link at once
_PAGE_BYTES = 4096  # of the system: mappings begin on a page, and whole pages are locked
_READ_THREADS = 8


class HostArena:
    """All experts' extents of a pack in host memory. Owns the mapping: `close` it after its readers, or use `with`.

    `extent_at[l]`: int64 [E], where each expert of a MoE layer begins in `rows(l)`, in bytes, a multiple of 128.
    `num_bytes`: of the mapping.   `locked_bytes`: of the mapping's beginning that is page-locked.
    """

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        progress: Progress = NO_PROGRESS,
        num_threads: int = _READ_THREADS,
        verify: bool = True,
    ) -> None:
        """Maps the memory, reads the experts and locks the memory.

        Args:    device: the memory is locked for a GPU, and not for `cpu`.   verify: whether checksums of experts
                 are checked.
        Raises:  RunError if there is not enough memory; PackError if an expert is damaged or cannot be read.
        """
        self.extent_at, self._layers, self.num_bytes = _arena_layout(pack)
        self.locked_bytes = 0
        self._locked: list[int] = []  # addresses of locked layers
        try:
            self._memory = mmap.mmap(-1, self.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as fault:
            raise RunError(
                f"--ram: cannot map {size_text(self.num_bytes)} of memory for the pack's experts ({fault}); give less"
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
        """Whether a GPU can read all of it."""
        return self.locked_bytes == self.num_bytes

    def rows(self, layer_idx: int) -> Tensor:
        """Returns a layer's extents, u8, a view of the mapping that is valid until `close`; it begins on a page."""
        begin, end = self._layers[layer_idx]
        return self._bytes[begin:end]

    def close(self) -> None:
        """Unlocks the memory and releases it; it is freed with the last tensor that refers to it.

        Waits for the GPU first, because a kernel or a copy may still read the memory.
        """
        if self._locked:
            torch.cuda.synchronize()
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._locked.clear()
        self.locked_bytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _fill(self, pack: Pack, progress: Progress, num_threads: int, verify: bool) -> None:
        memory = self._bytes.numpy()
        jobs = [(l, e) for l, layer in enumerate(pack.layout.experts) for e in range(len(layer))]

        def read(job: tuple[int, int]) -> int:
            layer_idx, expert = job
            begin = self._layers[layer_idx][0] + int(self.extent_at[layer_idx][expert])
            raw = memory[begin : begin + pack.layout.experts[layer_idx][expert].num_bytes]
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
        """Page-locks the memory layer by layer, until the driver refuses one.

        A copy must not cross memory that two calls locked, or that is locked in part; no copy crosses layers.
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
    """Returns the bytes of host memory that a `HostArena` of a pack takes."""
    return _arena_layout(pack).num_bytes


class _ArenaLayout(NamedTuple):
    """Where experts lie in a `HostArena`.

    `extent_at`: int64 [E] for each layer, where extents begin in it.   `layers`: where each layer begins and ends in
    the mapping.   `num_bytes`: the mapping's length.
    """

    extent_at: list[Array]
    layers: list[tuple[int, int]]
    num_bytes: int


def _arena_layout(pack: Pack) -> _ArenaLayout:
    extent_at, layers, end = [], [], 0
    for layer in pack.layout.experts:
        sizes = np.array([-(-expert.num_bytes // LINE_BYTES) * LINE_BYTES for expert in layer], np.int64)
        extent_at.append(np.cumsum(sizes) - sizes)
        layers.append((end, end + int(sizes.sum())))
        end = -(-layers[-1][1] // _PAGE_BYTES) * _PAGE_BYTES
    return _ArenaLayout(extent_at, layers, end)


def _opened(pack: Pack, name: str) -> int:
    try:
        return os.open(pack.folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        raise PackError(f"{name}: cannot be opened ({fault.strerror})") from fault


def _read_extent(pack: Pack, layer_idx: int, expert: int, file: int, raw: NDArray[np.uint8], verify: bool) -> None:
    """Reads an expert into `raw`, and checks its checksum if `verify`.

    Raises:  PackError if it is damaged or cannot be read.
    """
    name, begin = pack.manifest.expert_files[layer_idx].name, pack.layout.offsets[layer_idx][expert]
    view, done = raw.data, 0
    while done < len(raw):
        try:
            num_read = os.preadv(file, [view[done:]], begin + done)
        except OSError as fault:
            raise PackError(f"{name}: cannot be read at byte {begin + done} ({fault.strerror})") from fault
        if not num_read:
            raise PackError(f"{name}: ends at byte {begin + done}, expected {begin + len(raw)}")
        done += num_read
    if verify and zlib.crc32(view) != int(pack.index.crc32[layer_idx, expert]):
        raise PackError(f"{name}: expert {expert}: CRC-32 does not match its bytes; the file is damaged")


def _forget_cuda_error() -> None:
    """Clears the error that a refused call leaves for the next launch to report, by a launch of nothing."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.cuda.synchronize()
