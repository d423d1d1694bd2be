"""A pack's experts in host memory: one mapping of our own, page-locked where a card is to read it.

PyTorch's pinned allocator is not asked: it rounds up to powers of two. All is read once; a pack that does not fit
streams from the drive (`expert_store`).
"""

import mmap
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import NO_PROGRESS, Pack, PackError, Progress, RunError, Stage, size_text

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
