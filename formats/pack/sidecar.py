"""Sidecars: files in a pack's folder with measurements of the pack. They are not part of its content.

A sidecar names the root digest of the content that it was measured for. If the pack has another root now, the sidecar
is stale and read as missing. JSON sidecars are sealed (`json_files`). Tensor sidecars are safetensors files whose
metadata has two digests: `root`, and `sha256` of the whole file with zeros in its place. docs/pack.md specifies both.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.base import json_files
from moe_pack.formats.base.errors import PackError
from moe_pack.formats.pack import manifests, safetensors

MAX_SIDECAR_BYTES = 16_000_000
_CONTENT = "content"

if TYPE_CHECKING:
    from moe_pack.formats.pack.writer import SteppedFolder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Frame:
    """The keys of a JSON sidecar without its content."""

    root: str
    sha256: str


@contextmanager
def locked_for(folder: Path, name: str) -> "Iterator[SteppedFolder]":
    """Locks a pack's folder while its sidecar `name` is written. Raises ConversionError if it is in use."""
    from moe_pack.formats.pack.writer import SteppedFolder, pass_step

    assert name not in (manifests.MANIFEST_FILE, *manifests.REQUIRED_FILES, *manifests.COPIED_FILES), (
        f"{name} is content"
    )
    disk = SteppedFolder(folder, pass_step)
    disk.lock(f"another command is writing in this folder; wait for it or stop it, then write {name} again")
    try:
        yield disk
    finally:
        disk.close()


def write_sidecar(folder: Path, name: str, values: Any, root: str) -> None:
    """Writes a JSON sidecar, or replaces it.

    Args:    values: a dataclass with finite numbers, for `json_files.load`.   root: of the measured content.
    Raises:  PackError if it is too long for a reader; ConversionError if the folder is in use, or the disk fails.
    """
    raw = sidecar_bytes(name, values, root)
    with locked_for(folder, name) as disk:
        disk.replace(name, raw)


def sidecar_bytes(name: str, values: Any, root: str) -> bytes:
    """Returns the bytes of a JSON sidecar. Arguments and PackError as for `write_sidecar`."""
    raw = json_files.sealed({_CONTENT: json_files.dump(values), "root": root})
    if len(raw) > MAX_SIDECAR_BYTES:
        raise PackError(f"{name}: {len(raw):,} bytes, at most {MAX_SIDECAR_BYTES:,}")
    return raw


def read_sidecar(folder: Path, name: str, kind: type[T], root: str) -> T | None:
    """Reads a JSON sidecar; returns None if there is none for this root digest.

    Raises:  PackError if it is damaged, or its content does not fit the dataclass `kind`.
    """
    if not (folder / name).exists():
        return None
    raw = safetensors.read_small(folder / name, MAX_SIDECAR_BYTES, PackError).tobytes()
    values = json_files.parse(raw, name, PackError)
    json_files.check_seal(raw, name)
    if not isinstance(values, dict) or _CONTENT not in values:
        raise PackError(f"{name}: key {_CONTENT!r} is missing")
    content = values.pop(_CONTENT)
    if json_files.load(_Frame, values, name, PackError).root != root:
        return None
    return json_files.load(kind, content, f"{name}: {_CONTENT}", PackError)


MAX_TENSOR_SIDECAR_BYTES = 1 << 32
_ALIGN = 64
_ZERO_DIGEST = "0" * 64
_HASHED_AT_ONCE = 8 << 20
_START = re.compile(
    rf'\{{"{safetensors.METADATA_KEY}":\{{"root":"([0-9a-f]{{64}})","sha256":"([0-9a-f]{{64}})"\}}[,}}]'.encode()
)
_START_BYTES = len(f'{{"{safetensors.METADATA_KEY}":{{"root":"{_ZERO_DIGEST}","sha256":"{_ZERO_DIGEST}"}},')
Array = NDArray[Any]


class TensorSidecar:
    """A tensor sidecar, open for reading, whose digest was checked. Owns its file: `close` it, or use it in a `with`.

    `root`, `sha256`: the digests in its header.   `entries`: its tensors by name.
    Args:    sha256: a digest that was checked before; a file with it is not checked again.
    Raises:  PackError if it is missing, damaged, or not a tensor sidecar.
    """

    def __init__(self, folder: Path, name: str, sha256: str | None = None) -> None:
        self._name = name
        self._reader = safetensors.RangeReader(folder / name, PackError)
        try:
            self.num_bytes = self._reader.num_bytes
            if self.num_bytes > MAX_TENSOR_SIDECAR_BYTES:
                raise PackError(f"{name}: {self.num_bytes} bytes, at most {MAX_TENSOR_SIDECAR_BYTES}")
            entries = safetensors.read_header(folder / name, PackError)
            start = self._reader.read(8, min(_START_BYTES, self.num_bytes - 8)).tobytes()
            match = _START.fullmatch(start)
            if match is None:
                raise PackError(f"{name}: header does not begin with root and sha256; the file is damaged")
            self.root, self.sha256 = match[1].decode(), match[2].decode()
            if self.sha256 != sha256 and self._digest(8 + match.start(2)) != self.sha256:
                raise PackError(f"{name}: SHA-256 does not match its bytes; the file is damaged")
        except PackError:
            self.close()
            raise
        self.entries = {entry.name: entry for entry in entries if not entry.name.startswith("pad.")}

    def read(self, name: str) -> Array:
        """Reads a tensor: a little-endian array, own memory; bfloat16 as the u16 of its bits.

        Raises:  PackError if there is no such tensor, or no array has its dtype.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise PackError(f"{self._name}: tensor {name!r} is missing")
        if entry.dtype not in safetensors.NUMPY_DTYPES:
            raise PackError(f"{self._name}: tensor {name!r} is {entry.dtype}, a dtype that sidecars do not have")
        raw = self._reader.read(entry.offset, entry.num_bytes)
        return raw.view(safetensors.NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __enter__(self) -> "TensorSidecar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _digest(self, place: int) -> str:
        """Returns the SHA-256 of the file with zeros at `place`, where the header has the digest."""
        end = place + len(_ZERO_DIGEST)
        digest = hashlib.sha256(self._reader.read(0, place).data)
        digest.update(_ZERO_DIGEST.encode())
        for offset, size in safetensors.split_bytes(end, self.num_bytes - end, _HASHED_AT_ONCE):
            digest.update(self._reader.read(offset, size).data)
        return digest.hexdigest()


def open_tensor_sidecar(folder: Path, name: str, root: str) -> TensorSidecar | None:
    """Opens and checks a tensor sidecar; None if there is none for this root digest. Raises PackError."""
    if not (folder / name).exists():
        return None
    sidecar = TensorSidecar(folder, name)
    if sidecar.root == root:
        return sidecar
    sidecar.close()
    return None


def write_tensor_sidecar(folder: Path, name: str, tensors: Iterable[tuple[str, str, Array]], root: str) -> None:
    """Writes a tensor sidecar, or replaces it.

    Args:    tensors: name, dtype by its name in safetensors, and values of each.   root: of the measured content.
    Raises:  PackError if it is too long for a reader; ConversionError if the folder is in use, or the disk fails.
    """
    arrays = list(tensors)
    for tensor, dtype, values in arrays:
        assert values.dtype == safetensors.NUMPY_DTYPES[dtype], f"{tensor}: {values.dtype} for {dtype}"
    layout = _lay_out([(tensor, dtype, values.shape) for tensor, dtype, values in arrays], root)
    if layout.num_bytes > MAX_TENSOR_SIDECAR_BYTES:
        raise PackError(f"{name}: {layout.num_bytes} bytes, at most {MAX_TENSOR_SIDECAR_BYTES}")
    with locked_for(folder, name) as disk:
        _write(disk, f"{name}.tmp", layout, {tensor: values for tensor, _, values in arrays})
        disk.rename(f"{name}.tmp", name)


def tensor_sidecar_bytes(tensors: Iterable[safetensors.StoredTensor]) -> int:
    """Returns the size of a tensor sidecar with these arrays."""
    return _lay_out(tensors, _ZERO_DIGEST).num_bytes


def _lay_out(tensors: Iterable[safetensors.StoredTensor], root: str) -> safetensors.TensorFileLayout:
    return safetensors.lay_out([[tensor] for tensor in tensors], _ALIGN, {"root": root, "sha256": _ZERO_DIGEST})


def _write(disk: "SteppedFolder", name: str, layout: safetensors.TensorFileLayout, values: dict[str, Array]) -> None:
    """Writes and syncs the whole file; the header last, with its digest."""
    digest = hashlib.sha256(layout.header)
    disk.open(name)
    disk.truncate(name, 0)  # removes the rest of a killed write
    for entry in layout.entries:
        array = values.get(entry.name, np.zeros(entry.num_bytes, np.uint8))  # zeros: padding
        raw = np.ascontiguousarray(array).ravel().view(np.uint8)
        digest.update(raw.data)
        disk.write(name, raw.data, entry.offset)
    start = _START.match(layout.header, 8)
    assert start is not None, "the root is a digest"
    header = layout.header[: start.start(2)] + digest.hexdigest().encode() + layout.header[start.end(2) :]
    disk.write(name, memoryview(header), 0)
    disk.sync(name)
