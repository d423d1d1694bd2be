"""The GPU as the engines see it: its memory, its queues, and page-locked host memory; importing this needs no Triton.

`GpuMemory` has the driver's figure, as nvidia-smi shows it, with context, kernels and libraries: a budget is compared
with it. `HostArena` is one mapping with all experts, page-locked if a GPU reads it. PyTorch's allocator of page-locked
memory rounds up to powers of two. The CPU's own engine computes packs that do not fit into host memory (`cpu_share`).
"""

import ctypes
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import base
from moe_pack.formats.base.commands import Stage

_NAME_BYTES = 96  # of a GPU's UUID, as the library writes it


class GpuMemory:
    """The memory of a GPU that this process uses. Make it before anything else uses the GPU.

    Memory in use before that belongs to other processes. If it cannot be known (the driver's management library is
    missing, or this process used the GPU before), all memory in use counts as this process's.
    """

    def __init__(self, device: torch.device, gpus: "Sequence[_NvmlGpu] | None" = None) -> None:
        self._device = device
        # This comes first: calls of torch may make the context, which has to be counted.
        gpus = _unused_gpus() if gpus is None else gpus
        # torch numbers the GPUs that CUDA_VISIBLE_DEVICES leaves, the library all of them: their names identify them.
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._gpu = next((gpu for gpu in gpus if gpu.name == name), None)

    @classmethod
    def of_each(cls, gpus: "Sequence[torch.device]") -> "list[GpuMemory]":
        """Returns the memory of several GPUs, all listed before any of them is used."""
        listed = _unused_gpus()
        return [cls(device, listed) for device in gpus]

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
    """A GPU as the driver's management library knows it."""

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    name: str
    before_bytes: int = 0  # in use when it was listed

    def used_bytes(self) -> int:
        memory = _MemoryInfo()
        fault = self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory))
        assert fault == 0, "the library listed this GPU"
        return int(memory.used)


def _unused_gpus() -> list[_NvmlGpu]:
    """Returns all GPUs; an empty list if the library is missing, or this process has used one of them."""
    return [] if torch.cuda.is_initialized() else _gpus()  # type: ignore[no-untyped-call]  # untyped in torch


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


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Fork = Literal["cpu", "link", "next"]


class Queues:
    """The order of work on a device: torch's current stream, forks of it, and a stream for copies.

    On a CPU, where the interpreter runs the kernels, everything runs at once, in the order of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._forks: dict[Fork, torch.cuda.Stream] = {}
        if self._is_cuda:
            self._forks = {fork: torch.cuda.Stream(device) for fork in get_args(Fork)}  # type: ignore[no-untyped-call]  # untyped in torch
        self._copy = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]  # likewise
        self._open = set[Fork]()

    def current(self) -> AbstractContextManager[None]:
        """Makes this device torch's current one, to which launches and marks go; other threads have their own."""
        return on_device(self._device)

    @contextmanager
    def forked(self, fork: Fork) -> Iterator[None]:
        """Launches the work in this context on a fork, after all that the current stream has got until now."""
        if not self._is_cuda:
            yield
            return
        stream = self._forks[fork]
        stream.wait_stream(torch.cuda.current_stream())
        self._open.add(fork)
        with torch.cuda.stream(stream):
            yield

    def join(self, *forks: Fork) -> None:
        """Makes the current stream wait for all that was launched on these forks."""
        for fork in forks:
            if fork in self._open:
                torch.cuda.current_stream().wait_stream(self._forks[fork])
                self._open.remove(fork)

    def beside(self, work: Callable[[], object], after: Sequence["Mark"]) -> "Mark":
        """Launches work in the stream for copies, after marks are reached; returns its end."""
        if self._copy is None:
            work()
            return Mark(None)
        for mark in after:
            if mark.event is not None:
                self._copy.wait_event(mark.event)
        with torch.cuda.stream(self._copy):
            work()
            return self.mark()

    def mark(self) -> "Mark":
        """Marks what the current stream has got until now."""
        if not self._is_cuda:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        return Mark(event)

    def wait_for(self, mark: "Mark") -> None:
        """Makes the current stream wait for a mark of another."""
        if mark.event is not None:
            torch.cuda.current_stream().wait_event(mark.event)


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A point in a stream: after all that it was given before."""

    event: "torch.cuda.Event | None"  # None on a CPU, where all is done at once

    def is_reached(self) -> bool:
        """Whether the device has done what was given before."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def wait(self) -> None:
        """Makes the host wait until it is reached; this takes a CPU, because a thread that sleeps wakes up late."""
        if self.event is not None:
            self.event.synchronize()


# Adds to torch's current stream: write a number to a flag, int32 [1] in page-locked memory, after all that was written
# before, and wait until the host has set it to 0. A graph that captures it repeats it.
Ask: TypeAlias = Callable[[Tensor, int], None]


class _MemoryOperation(ctypes.Structure):
    """`CUstreamBatchMemOpParams` of CUDA, of which the last words are the driver's."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint64 * 2),
    )


_WAIT_VALUE, _WRITE_VALUE, _IS_EQUAL = 1, 2, 1  # of CUDA: CU_STREAM_MEM_OP_* of 32 bits, CU_STREAM_WAIT_VALUE_EQ
_ANSWER_SECONDS = 5.0


def driver_ask() -> Ask | None:
    """Returns the driver's own operations on flags (`cuStreamBatchMemOp`); None if it has none that a graph repeats.

    Tries them once. Raises:  RunError if a wait does not end.
    """
    try:
        add = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    except (OSError, AttributeError):
        return None
    add.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)

    def ask(flag: Tensor, number: int) -> None:
        operations = (_MemoryOperation * 2)(
            _MemoryOperation(_WRITE_VALUE, flag.data_ptr(), number), _MemoryOperation(_WAIT_VALUE, flag.data_ptr(), 0)
        )
        operations[1].flags = _IS_EQUAL
        fault = add(torch.cuda.current_stream().cuda_stream, len(operations), operations, 0)
        if fault:
            raise formats.RunError(f"--misses: the driver does not wait for the CPU (error {fault}); use --misses pull")

    return ask if _is_answered(ask) else None


def _is_answered(ask: Ask) -> bool:
    """Whether a graph writes a number and waits; raises RunError if it waits although the flag is 0."""
    flag, graph = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            ask(flag, 1)
        graph.replay()
    except (formats.RunError, RuntimeError):  # some drivers refuse only the end of the capture
        _forget_cuda_error()
        return False
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
    end.record()
    until = time.monotonic() + _ANSWER_SECONDS
    while not flag.item() and not end.query() and time.monotonic() < until:  # type: ignore[no-untyped-call]  # likewise
        pass
    is_waiting = bool(flag.item()) and not end.query()  # type: ignore[no-untyped-call]  # likewise
    flag.zero_()
    while not end.query():  # type: ignore[no-untyped-call]  # likewise
        if time.monotonic() > until + _ANSWER_SECONDS:
            raise formats.RunError("--misses: the GPU does not see what the CPU writes; use --misses pull")
    return is_waiting


Array = NDArray[Any]

LINE_BYTES = 128  # extents begin on multiples of it: a GPU reads so many bytes over its link at once
_PAGE_BYTES = 4096  # of the system: mappings begin on a page, and whole pages are locked
_READ_THREADS = 8


class HostArena:
    """All experts' extents of a pack in host memory. Owns the mapping: `close` it after its readers, or use `with`.

    `extent_at[l]`: int64 [E], where each expert of a MoE layer begins in `rows(l)`, in bytes, a multiple of 128.
    `bytes`: u8, the mapping, valid until `close`.   `num_bytes`: of it.   `locked_bytes`: of its beginning that is
    page-locked.
    """

    def __init__(
        self,
        pack: formats.Pack,
        device: torch.device,
        progress: formats.Progress = formats.NO_PROGRESS,
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
            self._memory = base.anonymous_memory(self.num_bytes)
        except (OSError, OverflowError) as fault:
            raise formats.RunError(
                f"--ram: cannot map {formats.size_text(self.num_bytes)} of memory for the pack's experts "
                f"({fault}); give less"
            ) from fault
        self.bytes = torch.from_numpy(np.frombuffer(self._memory, np.uint8))
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

    def is_layer_locked(self, layer_idx: int) -> bool:
        """Whether a GPU can read a layer's extents: the first layers' are locked, as far as the system allows."""
        return self._layers[layer_idx][1] <= self.locked_bytes

    def rows(self, layer_idx: int) -> Tensor:
        """Returns a layer's extents, u8, a view of the mapping that is valid until `close`; it begins on a page."""
        begin, end = self._layers[layer_idx]
        return self.bytes[begin:end]

    def extent_begin(self, layer_idx: int, expert: int) -> int:
        """Returns where an expert's extent begins in `bytes`."""
        return self._layers[layer_idx][0] + int(self.extent_at[layer_idx][expert])

    def extent(self, layer_idx: int, expert: int, num_bytes: int) -> Tensor:
        """Returns an expert's extent, u8 [num_bytes], a view of the mapping that is valid until `close`."""
        begin = self.extent_begin(layer_idx, expert)
        return self.bytes[begin : begin + num_bytes]

    def close(self) -> None:
        """Unlocks the memory after the GPU has ended its work; it is freed with the last tensor that refers to it."""
        if self._locked:
            torch.cuda.synchronize()
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._locked.clear()
        self.locked_bytes = 0
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _fill(self, pack: formats.Pack, progress: formats.Progress, num_threads: int, verify: bool) -> None:
        memory = self.bytes.numpy()
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
        """Page-locks layers until the driver refuses one: a copy must not cross memory that two calls locked."""
        address, cudart = self.bytes.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        begins = [begin for begin, _ in self._layers]
        for begin, end in zip(begins, [*begins[1:], self.num_bytes], strict=True):
            if int(cudart.cudaHostRegister(address + begin, end - begin, 0)) != 0:
                _forget_cuda_error()
                return
            self._locked.append(address + begin)
            self.locked_bytes += end - begin


def host_bytes(pack: formats.Pack) -> int:
    """Returns the bytes of host memory that a `HostArena` of a pack takes."""
    return _arena_layout(pack).num_bytes


class _ArenaLayout(NamedTuple):
    extent_at: list[Array]  # int64 [E] for each layer, where extents begin in it
    layers: list[tuple[int, int]]  # where each layer begins and ends in the mapping
    num_bytes: int  # the mapping's length


def _arena_layout(pack: formats.Pack) -> _ArenaLayout:
    extent_at, layers, end = [], [], 0
    for layer in pack.layout.experts:
        sizes = np.array([-(-expert.num_bytes // LINE_BYTES) * LINE_BYTES for expert in layer], np.int64)
        extent_at.append(np.cumsum(sizes) - sizes)
        layers.append((end, end + int(sizes.sum())))
        end = -(-layers[-1][1] // _PAGE_BYTES) * _PAGE_BYTES
    return _ArenaLayout(extent_at, layers, end)


def _opened(pack: formats.Pack, name: str) -> int:
    try:
        return os.open(pack.folder / name, base.READ_FLAGS)
    except OSError as fault:
        raise formats.PackError(f"{name}: cannot be opened ({fault.strerror})") from fault


def _read_extent(
    pack: formats.Pack, layer_idx: int, expert: int, file: int, raw: NDArray[np.uint8], verify: bool
) -> None:
    """Reads an expert into `raw`; raises PackError if it cannot be read or, with `verify`, is damaged."""
    name, begin = pack.manifest.expert_files[layer_idx].name, pack.layout.offsets[layer_idx][expert]
    view, done = raw.data, 0
    while done < len(raw):
        try:
            num_read = base.read_at(file, view[done:], begin + done)
        except OSError as fault:
            raise formats.PackError(f"{name}: cannot be read at byte {begin + done} ({fault.strerror})") from fault
        if not num_read:
            raise formats.PackError(f"{name}: ends at byte {begin + done}, expected {begin + len(raw)}")
        done += num_read
    if verify and zlib.crc32(view) != int(pack.index.crc32[layer_idx, expert]):
        raise formats.PackError(f"{name}: expert {expert}: CRC-32 does not match its bytes; the file is damaged")


def _forget_cuda_error() -> None:
    """Clears the error that a refused call leaves for the next launch to report, by a launch of nothing."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.cuda.synchronize()
