"""Safetensors files, read and laid out as bytes; ranges of files by `pread`, and maps of files.

A file has 8 bytes of little-endian header length, a JSON header, then the tensors' bytes without holes.
"""

import hashlib
import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import base
from moe_pack.formats.base import errors, json_files

_HASH_CHUNK_BYTES = 8 << 20
CONTENT_BYTES = 64  # of a file's beginning, by which `check_content` knows what it is
_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<error")


def check_content(head: bytes, place: str, error: type[errors.MoePackError]) -> None:
    """Refuses what downloads leave in a file's place: nothing, a pointer of Git LFS, or the page of a server's error.

    Args:    head: the file's first bytes, eight or more if it has as many.   place: the file, for messages.
    """
    if not head:
        raise error(f"{place}: is empty; the download failed, or the file is damaged")
    begin = head.lstrip().lower()
    if len(begin) >= 8 and _POINTER.startswith(begin[: len(_POINTER)]):
        raise error(f"{place}: is a Git LFS pointer, not the file; run git lfs pull, or download the file again")
    if len(begin) >= 5 and any(page.startswith(begin[:8]) or begin.startswith(page) for page in _PAGES):
        raise error(f"{place}: is a page of HTML or XML, not the file; the download failed: download the file again")


class RangeReader:
    """One file, open for reading. Owns its descriptor: `close` it, or use it in a `with`.

    Raises:  `error` if the file cannot be opened.
    """

    def __init__(self, path: Path, error: type[errors.MoePackError]) -> None:
        self._place = path.name
        self._error = error
        try:
            self._fd = os.open(path, base.READ_FLAGS)
        except FileNotFoundError as fault:
            raise error(f"{self._place}: file is missing") from fault
        except OSError as fault:
            raise error(f"{self._place}: cannot be opened ({fault.strerror})") from fault
        except ValueError as fault:  # a name with a zero byte
            raise error(f"{errors.shortened(self._place)}: is no file's name") from fault
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise error(f"{self._place}: is not a regular file")

    @property
    def num_bytes(self) -> int:
        """The file's size now."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a range of the file, in memory of its own: u8 [num_bytes].

        Raises:  the reader's error if the file ends before the range, memory is too small, or the disk fails.
        """
        out = self._room(offset, num_bytes)
        self.read_into(offset, out.data)
        return out

    def read_hashed(self, num_bytes: int) -> tuple[NDArray[np.uint8], str]:
        """Returns the first bytes of the file as `read`, and their SHA-256 in hexadecimal, while a thread reads ahead.

        Raises:  as `read`.
        """
        out, digest = self._room(0, num_bytes), hashlib.sha256()
        starts = range(0, num_bytes, _HASH_CHUNK_BYTES)
        pieces = [(start, out.data[start : start + _HASH_CHUNK_BYTES]) for start in starts]
        with ThreadPoolExecutor(1, "read ahead") as ahead:
            reading = [ahead.submit(self.read_into, *piece) for piece in pieces[:1]]
            for number, (_, view) in enumerate(pieces):
                reading.pop().result()
                reading = [ahead.submit(self.read_into, *piece) for piece in pieces[number + 1 : number + 2]]
                digest.update(view)
        return out, digest.hexdigest()

    def _room(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns memory for a range of the file, which has it; raises as `read`."""
        if num_bytes > self.num_bytes - offset:
            raise self._error(f"{self._place}: ends at byte {self.num_bytes}, expected {offset + num_bytes}")
        try:
            return np.empty(num_bytes, np.uint8)
        except MemoryError as fault:
            raise self._error(f"{self._place}: {num_bytes:,} bytes of it do not fit into memory") from fault

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills memory with a range of the file. Raises as `read`."""
        num_bytes, done = len(view), 0
        while done < num_bytes:
            try:
                num_read = base.read_at(self._fd, view[done:], offset + done)
            except OSError as fault:
                raise self._error(f"{self._place}: read failed at byte {offset + done} ({fault.strerror})") from fault
            if not num_read:
                raise self._error(f"{self._place}: ends at byte {offset + done}, expected {offset + num_bytes}")
            done += num_read

    def read_each(self, offsets: Sequence[int], num_bytes: int) -> NDArray[np.uint8]:
        """Returns `num_bytes` from each offset: u8 [offsets, num_bytes], own memory. Raises as `read`."""
        out = np.empty((len(offsets), num_bytes), np.uint8)
        for place, offset in enumerate(offsets):
            out[place] = self.read(offset, num_bytes)
        return out

    def map(self) -> NDArray[np.uint8]:
        """Maps the whole file for reading: u8 [num_bytes], valid as long as the array exists.

        If the file is cut later, reading a missing byte raises SIGBUS: only code that catches it (the native kernels)
        may read the map.
        Raises:  the reader's error if the file is empty or cannot be mapped.
        """
        try:
            return np.frombuffer(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as fault:
            raise self._error(f"{self._place}: cannot be mapped ({fault})") from fault

    def read_ahead(self, offset: int, num_bytes: int) -> None:
        """Has the system begin to read a range into its cache, where it can be asked; nothing waits for it."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system without it
                os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def check_content(self) -> None:
        """Refuses what downloads leave in the file's place, as the function `check_content`."""
        check_content(self.read(0, min(CONTENT_BYTES, self.num_bytes)).tobytes(), self._place, self._error)

    def sha256(self) -> str:
        """Returns the SHA-256 of the whole file, in hexadecimal."""
        digest, offset, size = hashlib.sha256(), 0, self.num_bytes
        while offset < size:
            chunk = self.read(offset, min(_HASH_CHUNK_BYTES, size - offset))
            digest.update(chunk.data)
            offset += len(chunk)
        return digest.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_small(path: Path, most_bytes: int, error: type[errors.MoePackError]) -> NDArray[np.uint8]:
    """Returns a whole file: u8 [bytes], own memory. Raises `error` if it has more than `most_bytes`."""
    with RangeReader(path, error) as reader:
        if reader.num_bytes > most_bytes:
            raise error(f"{path.name}: {reader.num_bytes:,} bytes, at most {most_bytes:,}")
        return reader.read(0, reader.num_bytes)


DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# NumPy has no bfloat16: arrays have its bits as u16.
NUMPY_DTYPES = {
    "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
METADATA_KEY = "__metadata__"  # the header's key for strings; all other keys are tensors
_MAX_DIMENSIONS = 16
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
StoredTensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path, error: type[errors.MoePackError]) -> tuple[TensorEntry, ...]:
    """Returns the tensors of a file, in the order of their offsets.

    Raises:  `error` if the file is missing or cut short, or its tensors do not cover it without overlaps and holes.
    """
    place = path.name
    with RangeReader(path, error) as reader:
        file_bytes = reader.num_bytes
        length = header_length(reader.read(0, min(8, file_bytes)).tobytes(), place, file_bytes, error)
        return header_entries(reader.read(8, length).tobytes(), place, file_bytes, error)


def header_length(raw: bytes, place: str, file_bytes: int, error: type[errors.MoePackError]) -> int:
    """Returns the length of a file's JSON header by its first 8 bytes. Raises `error` if no file can have it."""
    length = int.from_bytes(raw, "little") if file_bytes >= 8 else 0
    check_content(raw, place, error)
    if length > file_bytes and raw.isascii() and raw.decode("ascii").isprintable():
        raise error(
            f"{place}: begins with the text {raw.decode('ascii')!r}, which no safetensors file does; download the file "
            "again"
        )
    if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise error(f"{place}: header of {length} bytes in a file of {file_bytes}; the file is cut or damaged")
    return length


def header_entries(
    raw: bytes, place: str, file_bytes: int, error: type[errors.MoePackError]
) -> tuple[TensorEntry, ...]:
    """Returns the tensors of a file, in the order of their offsets, by its JSON header alone.

    Args:    raw: the header, without its length in front.   place: the file, for messages.   file_bytes: its size.
    Raises:  `error` as `read_header`.
    """
    header, start = json_files.parse(raw, f"{place}: header", error), 8 + len(raw)
    if not isinstance(header, dict):
        raise error(f"{place}: header is not a JSON object")
    entries = [_entry(name, value, place, start, error) for name, value in header.items() if name != METADATA_KEY]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = start
    for entry in entries:
        if entry.offset != end:
            kind = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise error(
                f"{place}: tensor {errors.shortened(entry.name)} {kind} (offset {entry.offset - start}, expected "
                f"{end - start})"
            )
        end += entry.num_bytes
    if end != file_bytes:
        raise error(f"{place}: file has {file_bytes} bytes, its header describes {end}; the file is cut or damaged")
    return tuple(entries)


def _entry(name: str, value: Any, place: str, start: int, error: type[errors.MoePackError]) -> TensorEntry:
    def fault(text: str) -> errors.MoePackError:
        return error(f"{place}: tensor {errors.shortened(name)}: {text}")

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise fault("expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fault(f"unknown dtype {errors.shortened(dtype)}")
    if not _whole_numbers(shape):
        raise fault("shape is not a list of whole numbers")
    if len(shape) > _MAX_DIMENSIONS:
        raise fault(f"{len(shape)} dimensions, at most {_MAX_DIMENSIONS}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault("data_offsets is not a pair of rising whole numbers")
    num_bytes = DTYPE_BYTES[dtype] * math.prod(shape)
    if num_bytes != offsets[1] - offsets[0]:
        raise fault(f"{dtype} {shape} needs {num_bytes} bytes, data_offsets give {offsets[1] - offsets[0]}")
    return TensorEntry(name, dtype, tuple(shape), start + offsets[0], num_bytes)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


@dataclass(frozen=True, slots=True)
class TensorFileLayout:
    """A safetensors file before it is written: its header's bytes and every tensor's place."""

    header: bytes
    entries: tuple[TensorEntry, ...]
    num_bytes: int

    def by_name(self) -> dict[str, TensorEntry]:
        """Returns the entries by name, padding included."""
        return {entry.name: entry for entry in self.entries}


def lay_out_plain(tensors: Iterable[StoredTensor], metadata: Mapping[str, str] | None = None) -> TensorFileLayout:
    """Returns the layout of a file without padding between tensors, as other programs expect.

    The widest values come first: each tensor begins on a multiple of its value's size.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor[1]])
    return lay_out([ordered], 1, metadata, header_align=8)


def lay_out(
    groups: Iterable[Sequence[StoredTensor]],
    align: int,
    metadata: Mapping[str, str] | None = None,
    header_align: int | None = None,
) -> TensorFileLayout:
    """Returns the layout of a file with these tensors in order; each group begins on a multiple of `align`.

    Gaps between groups, and at the end, become tensors `pad.N` of zero bytes, so that the file has no holes. Spaces pad
    the header.
    Args:    groups: name, dtype and shape of each tensor.   align: bytes, a power of two.   metadata: strings that
             begin the header, under `__metadata__`.   header_align: of the first tensor, if it is not `align`.
    """
    placed: list[TensorEntry] = []
    end = num_pads = 0
    for group in [*groups, ()]:  # the empty last group pads the file's end
        gap = -end % align
        if gap:
            placed.append(TensorEntry(f"pad.{num_pads}", "U8", (gap,), end, gap))
            num_pads += 1
        end += gap
        for name, dtype, shape in group:
            num_bytes = DTYPE_BYTES[dtype] * math.prod(shape)
            placed.append(TensorEntry(name, dtype, shape, end, num_bytes))
            end += num_bytes
    fields: dict[str, Any] = {} if metadata is None else {METADATA_KEY: dict(metadata)}
    fields |= {
        t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.offset, t.offset + t.num_bytes]}
        for t in placed
    }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    padded = text + b" " * (-(8 + len(text)) % (header_align or align))
    header = len(padded).to_bytes(8, "little") + padded
    entries = tuple(replace(entry, offset=entry.offset + len(header)) for entry in placed)
    return TensorFileLayout(header, entries, len(header) + end)


def assemble(tensors: Iterable[tuple[str, str, NDArray[Any]]], align: int = 64) -> bytes:
    """Returns a small safetensors file, whole.

    Args:    tensors: name, dtype and values of each; BF16 as the u16 of its bits.   align: bytes, a power of two.
    """
    arrays = [(name, dtype, np.asarray(values, NUMPY_DTYPES[dtype])) for name, dtype, values in tensors]
    layout = lay_out([[(name, dtype, values.shape)] for name, dtype, values in arrays], align)
    places = layout.by_name()
    out = bytearray(layout.num_bytes)
    out[: len(layout.header)] = layout.header
    for name, _, values in arrays:
        entry = places[name]
        out[entry.offset : entry.offset + entry.num_bytes] = values.tobytes()
    return bytes(out)


def split_bytes(offset: int, num_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields consecutive (offset, size) pieces of a range, none larger than `chunk_bytes`."""
    end = offset + num_bytes
    while offset < end:
        size = min(chunk_bytes, end - offset)
        yield offset, size
        offset += size
