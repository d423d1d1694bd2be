"""Named arrays as safetensors files: the body of a profile. Little-endian; read back only as they were promised.

The folder a profile is written to, file by file, so that a killed run goes on with the files it has.

A file is written beside its place and renamed; the small JSON file that makes the folder a profile comes last. One
process at a time: the folder is locked from `open` to `close`.

Where figures come from: the checkpoint, told from others of its shape, and the packages that took part.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import ConversionError, Pack, PackError, RangeReader, canonical
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.manifest import SOURCE_FILE, PackageVersion, account_bytes
from moe_pack.formats.safetensors import assemble, read_header
from moe_pack.formats.version import installed_version

Array = NDArray[Any]

_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
_BF16_SUFFIX = "_weight"  # numpy has no bfloat16
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


def write_arrays(arrays: Mapping[str, Array]) -> bytes:
    """The whole safetensors file of some arrays; uint16 under a name that ends in `_weight` is bfloat16's bits."""
    return assemble(
        (name, _dtype_name(name, array), array.shape, np.ascontiguousarray(array).tobytes())
        for name, array in arrays.items()
    )


def _dtype_name(name: str, array: Array) -> str:
    return "BF16" if name.endswith(_BF16_SUFFIX) and array.dtype == np.uint16 else _NAMES[array.dtype]


def read_all_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file, whatever they are called.

    Raises:  PackError if the file is missing, damaged, or holds an array of a kind that profiles have not.
    """
    arrays = {}
    entries = read_header(path, PackError)
    with RangeReader(path, PackError) as reader:
        for entry in entries:
            if entry.name.startswith("pad."):
                continue
            is_bf16 = entry.dtype == "BF16" and entry.name.endswith(_BF16_SUFFIX)
            if entry.dtype not in _DTYPES and not is_bf16:
                raise PackError(f"{path.name}: tensor {entry.name!r} is {entry.dtype}, which no profile has")
            raw = reader.read(entry.offset, entry.num_bytes)
            arrays[entry.name] = raw.view(_DTYPES["U16" if is_bf16 else entry.dtype]).reshape(entry.shape)
    return arrays


def check_arrays(arrays: Mapping[str, Array], wanted: Mapping[str, tuple[str, tuple[int, ...]]], place: str) -> None:
    """Checks that the arrays are exactly those wanted, by name, dtype and shape.

    Raises:  PackError naming the first that is not.
    """
    for name in [*wanted, *arrays]:
        if name not in wanted:
            raise PackError(f"{place}: unknown tensor {name!r}")
        if name not in arrays:
            raise PackError(f"{place}: tensor {name!r} is missing")
        dtype, shape = wanted[name]
        found = arrays[name]
        if found.dtype != np.dtype(_DTYPES[dtype]) or found.shape != shape:
            raise PackError(
                f"{place}: tensor {name!r} is {_NAMES[found.dtype]} {list(found.shape)}, expected {dtype} {list(shape)}"
            )


PROFILE_FILE = "profile.json"
WORK_FOLDER = "work"
_IDENTITY_FILE = "profile.unfinished.json"


def tidy(folder: Path) -> None:
    """Removes what only a run under way needs; the caller has the folder to itself, or it is done."""
    shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
    (folder / _IDENTITY_FILE).unlink(missing_ok=True)  # last: it says whose the rest is


class ProfileStore:
    """The one writer of a profile folder. Owns the folder's lock; `close` it.

    Args:    folder: made if missing.   identity: digest of all that decides the profile.
             starts_anew: what was begun there for another identity is removed, not refused.
    Raises:  ConversionError if the folder holds something else, or another process is writing there.
    """

    def __init__(self, folder: Path, identity: str, starts_anew: bool = False) -> None:
        self.folder = folder
        self.work = folder / WORK_FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as fault:
            raise ConversionError(f"{folder}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            self._lock()
            if starts_anew:
                self._remove_other(canonical({"identity": identity}))
            self._claim(canonical({"identity": identity}))
            self.work.mkdir(exist_ok=True)
        except ConversionError:
            self.close()
            raise

    def has(self, name: str) -> bool:
        """Whether a file is there already."""
        return (self.folder / name).exists()

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Writes a safetensors file of these arrays."""
        self.replace(name, (write_arrays(arrays),))

    def replace(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a file of these pieces beside its place, then renames it there."""
        beside = self.folder / f"{name}.tmp"
        try:
            with beside.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            beside.rename(self.folder / name)
            os.fsync(self._lock_fd)
        except OSError as fault:
            raise ConversionError(
                f"{self.folder}: writing {name} failed ({fault.strerror}); mend that, then run the same command again"
            ) from fault

    def seal(self, raw: bytes) -> None:
        """Writes the file that makes the folder a profile, and removes what only a run under way needs."""
        self.replace(PROFILE_FILE, (raw,))
        tidy(self.folder)

    def close(self) -> None:
        """Releases the folder."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError as fault:
            raise ConversionError(
                f"{self.folder}: another profile is being written here; wait for it, or stop it"
            ) from fault

    def _remove_other(self, identity: bytes) -> None:
        """Removes what was begun here for something else; a folder that was never ours is left to be refused."""
        path = self.folder / _IDENTITY_FILE
        if not path.exists() or path.read_bytes() == identity:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        for held in self.folder.iterdir():
            if held != path:
                held.unlink()
        path.unlink()

    def _claim(self, identity: bytes) -> None:
        path = self.folder / _IDENTITY_FILE
        if path.exists():
            if path.read_bytes() != identity:
                raise ConversionError(
                    f"{self.folder}: holds an unfinished profile of another model, text or options; "
                    "repeat that command, or remove the folder"
                )
            return
        held = sorted(entry.name for entry in self.folder.iterdir() if entry.name != f"{_IDENTITY_FILE}.tmp")
        if held:
            raise ConversionError(f"{self.folder}: holds {held[0]!r}; give a new or empty folder for the profile")
        self.replace(_IDENTITY_FILE, (identity,))


_PACKAGES = ("hqq", "moe-pack", "numpy", "torch")


def source_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's account of files and tensors, then the bytes of its routers, layer by layer.

    Not of all weights, which would take as long as the statistics; but a model trained further has other routers.
    """
    digest = hashlib.sha256(account_bytes(*checkpoint.account()))
    for layer in checkpoint.spec.moe_layers:
        source = checkpoint.dense_source(f"layers.{layer}.router")
        digest.update(checkpoint.rows(source, 0, source.num_rows).data)
    return digest.hexdigest()


def packed_source_digest(pack: Pack) -> str:
    """The `source_digest` of the checkpoint that a pack was made from: routers are kept in the source's bytes."""
    digest = hashlib.sha256(pack.read_file(SOURCE_FILE).data)
    routers = {f"layers.{layer}.router" for layer in pack.spec.moe_layers}
    for held in pack.layout.dense:
        if held.role.name in routers:
            digest.update(pack.read_dense(held.entry, 0, held.entry.shape[0]).data)
    return digest.hexdigest()


def made_with() -> tuple[PackageVersion, ...]:
    """The installed versions, those of packages that are not there left out."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(PackageVersion(name, installed_version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
