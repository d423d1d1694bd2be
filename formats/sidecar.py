"""Sidecars: what was measured on a pack, as JSON beside it. No part of its content, and worth nothing with another.

A sidecar names the root digest it was measured for; when the pack has another by now it is stale, as good as missing.
Those that hold arrays are in `tensor_sidecar`. Specified in docs/format.md.

Sidecars that hold arrays: a safetensors file beside the pack, whose header begins with two digests.

`sha256` is that of the whole file with zeros in its place, `root` stands for the content that the file belongs to; of
another root it is stale, as good as missing. Other readers of safetensors find both as metadata. Specified in
docs/format.md.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import json_files as strict_json
from moe_pack.formats.errors import PackError
from moe_pack.formats.json_files import check_seal, sealed
from moe_pack.formats.manifest import COPIED_FILES, MANIFEST_FILE, REQUIRED_FILES
from moe_pack.formats.safetensors import METADATA_KEY, RangeReader, TensorFileLayout, lay_out, read_header, split_bytes
from moe_pack.formats.writer import SteppedFolder, pass_step

MAX_SIDECAR_BYTES = 16_000_000
_CONTENT = "content"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a sidecar holds beside its content."""

    root: str
    sha256: str


@contextmanager
def locked_for(folder: Path, name: str) -> Iterator[SteppedFolder]:
    """A pack's folder, locked as long as its sidecar `name` is being written.

    Raises:  ConversionError if somebody is writing in the folder.
    """
    assert name not in (MANIFEST_FILE, *REQUIRED_FILES, *COPIED_FILES), f"{name} is content"
    drive = SteppedFolder(folder, pass_step)
    drive.lock(f"another command is writing in this folder; wait for it or stop it, then write {name} again")
    try:
        yield drive
    finally:
        drive.close()


def write_sidecar(folder: Path, name: str, values: Any, root: str) -> None:
    """Writes a sidecar, in the place of one that is there.

    Args:    name: of the file, `quality.json`.   values: a dataclass that `strict_json.load` reads back; numbers in
             it are finite.   root: the digest of the content it was measured on.
    Raises:  PackError if it is too long to be read back; ConversionError if somebody is writing in the folder, or its
             drive refuses.
    """
    raw = sealed({_CONTENT: strict_json.dump(values), "root": root})
    _check_size(name, len(raw))
    with locked_for(folder, name) as drive:
        drive.replace(name, raw)


def read_sidecar(folder: Path, name: str, kind: type[T], root: str) -> T | None:
    """The content of a sidecar, or None where there is none for the content with this root digest.

    Raises:  PackError if it is damaged, or its content is not of this kind.
    """
    if not (folder / name).exists():
        return None
    with RangeReader(folder / name, PackError) as reader:
        _check_size(name, reader.num_bytes)
        raw = reader.read(0, reader.num_bytes).tobytes()
    values = strict_json.parse(raw, name, PackError)
    check_seal(raw, name)
    if not isinstance(values, dict) or _CONTENT not in values:
        raise PackError(f"{name}: key {_CONTENT!r} is missing")
    content = values.pop(_CONTENT)
    if strict_json.load(_Frame, values, name, PackError).root != root:
        return None
    return strict_json.load(kind, content, f"{name}: {_CONTENT}", PackError)


def _check_size(name: str, num_bytes: int) -> None:
    if num_bytes > MAX_SIDECAR_BYTES:
        raise PackError(f"{name}: {num_bytes} bytes, at most {MAX_SIDECAR_BYTES}")


MAX_TENSOR_SIDECAR_BYTES = 1 << 32
_ALIGN = 64
_ZERO_DIGEST = "0" * 64
_HASHED_AT_ONCE = 8 << 20
_START = re.compile(rf'\{{"{METADATA_KEY}":\{{"root":"([0-9a-f]{{64}})","sha256":"([0-9a-f]{{64}})"\}}[,}}]'.encode())
_START_BYTES = len(f'{{"{METADATA_KEY}":{{"root":"{_ZERO_DIGEST}","sha256":"{_ZERO_DIGEST}"}},')
# By their names in safetensors; numpy has no bfloat16, whose bits stand as u16.
_DTYPES = {
    "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip

Array = NDArray[Any]


class TensorSidecar:
    """A sidecar of arrays, open for reading and found whole. Owns its file: `close` it, or use it in a `with`.

    `root`, `sha256`: what its header says; `entries`: its tensors by name.
    Args:    sha256: the digest of a file that was checked before; if this is that file, it is not checked again.
    Raises:  PackError if it is missing, damaged, or no such file.
    """

    def __init__(self, folder: Path, name: str, sha256: str | None = None) -> None:
        self._name = name
        self._reader = RangeReader(folder / name, PackError)
        try:
            self.num_bytes = self._reader.num_bytes
            if self.num_bytes > MAX_TENSOR_SIDECAR_BYTES:
                raise PackError(f"{name}: {self.num_bytes} bytes, at most {MAX_TENSOR_SIDECAR_BYTES}")
            entries = read_header(folder / name, PackError)
            start = self._reader.read(8, min(_START_BYTES, self.num_bytes - 8)).tobytes()
            found = _START.fullmatch(start)
            if found is None:
                raise PackError(f"{name}: header does not begin with root and sha256; the file is damaged")
            self.root, self.sha256 = found[1].decode(), found[2].decode()
            if self.sha256 != sha256 and self._digest(8 + found.start(2)) != self.sha256:
                raise PackError(f"{name}: SHA-256 does not match its bytes; the file is damaged")
        except PackError:
            self.close()
            raise
        self.entries = {entry.name: entry for entry in entries if not entry.name.startswith("pad.")}

    def read(self, name: str) -> Array:
        """A tensor's values, in memory of their own: a little-endian array; bfloat16 as the u16 of its bits.

        Raises:  PackError if there is no such tensor, or its dtype is none that arrays have.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise PackError(f"{self._name}: tensor {name!r} is missing")
        if entry.dtype not in _DTYPES:
            raise PackError(f"{self._name}: tensor {name!r} is {entry.dtype}, a dtype that sidecars do not have")
        raw = self._reader.read(entry.offset, entry.num_bytes)
        return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def __enter__(self) -> "TensorSidecar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _digest(self, place: int) -> str:
        """SHA-256 of the file with zeros for the digest at `place`."""
        end = place + len(_ZERO_DIGEST)
        digest = hashlib.sha256(self._reader.read(0, place).data)
        digest.update(_ZERO_DIGEST.encode())
        for offset, size in split_bytes(end, self.num_bytes - end, _HASHED_AT_ONCE):
            digest.update(self._reader.read(offset, size).data)
        return digest.hexdigest()


def open_tensor_sidecar(folder: Path, name: str, root: str) -> TensorSidecar | None:
    """A sidecar of arrays, checked; None where there is none for the content with this root digest.

    Raises:  PackError if it is damaged.
    """
    if not (folder / name).exists():
        return None
    found = TensorSidecar(folder, name)
    if found.root == root:
        return found
    found.close()
    return None


def write_tensor_sidecar(folder: Path, name: str, tensors: Iterable[tuple[str, str, Array]], root: str) -> None:
    """Writes a sidecar of arrays, in the place of one that is there.

    Args:    tensors: name, dtype by its name in safetensors, and values of each.   root: the digest of the content
             that they belong to.
    Raises:  PackError if it is too long to be read back; ConversionError if somebody is writing in the folder, or its
             drive refuses.
    """
    held = list(tensors)
    for tensor, dtype, values in held:
        assert values.dtype == np.dtype(_DTYPES[dtype]), f"{tensor}: {values.dtype} for {dtype}"
    layout = _lay_out([(tensor, dtype, values.shape) for tensor, dtype, values in held], root)
    if layout.num_bytes > MAX_TENSOR_SIDECAR_BYTES:
        raise PackError(f"{name}: {layout.num_bytes} bytes, at most {MAX_TENSOR_SIDECAR_BYTES}")
    with locked_for(folder, name) as drive:
        _write(drive, f"{name}.tmp", layout, {tensor: values for tensor, _, values in held})
        drive.rename(f"{name}.tmp", name)


def tensor_sidecar_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """How long a sidecar of these arrays is, before they exist: name, dtype by its name in safetensors, and shape."""
    return _lay_out(tensors, _ZERO_DIGEST).num_bytes


def _lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], root: str) -> TensorFileLayout:
    return lay_out([[tensor] for tensor in tensors], _ALIGN, {"root": root, "sha256": _ZERO_DIGEST})


def _write(drive: SteppedFolder, name: str, layout: TensorFileLayout, values: dict[str, Array]) -> None:
    """The whole file, flushed: tensors in order, so that the digest is known when the header is written."""
    digest = hashlib.sha256(layout.header)
    drive.open(name)
    drive.truncate(name, 0)  # what a killed write left
    for entry in layout.entries:
        held = values.get(entry.name)  # None: padding
        raw = np.zeros(entry.num_bytes, np.uint8) if held is None else np.ascontiguousarray(held).ravel().view(np.uint8)
        digest.update(raw.data)
        drive.write(name, raw.data, entry.offset)
    start = _START.match(layout.header, 8)
    assert start is not None, "the root is a digest"
    header = layout.header[: start.start(2)] + digest.hexdigest().encode() + layout.header[start.end(2) :]
    drive.write(name, memoryview(header), 0)
    drive.sync(name)
