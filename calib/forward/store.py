"""The folder of a profile while it is written: arrays as safetensors files, one after another, and their origin.

Each file is written under a temporary name and renamed, so a killed run goes on with the files it has. The small JSON
file that makes the folder a profile comes last.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.calib.forward.shared import publish_once
from moe_pack.formats import base
from moe_pack.formats.base import errors
from moe_pack.formats.base.commands import Part
from moe_pack.formats.base.version import installed_version
from moe_pack.formats.families import Checkpoint
from moe_pack.formats.pack import manifests, safetensors

Array = NDArray[Any]

_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
_BF16_SUFFIX = "_weight"  # numpy has no bfloat16
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


def write_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Returns the safetensors file of some arrays; uint16 under a name that ends in `_weight` is bfloat16."""
    return safetensors.assemble(
        (name, "BF16" if name.endswith(_BF16_SUFFIX) and array.dtype == np.uint16 else _NAMES[array.dtype], array)
        for name, array in arrays.items()
    )


def read_all_arrays(path: Path) -> dict[str, Array]:
    """Reads the arrays of a safetensors file; PackError if it is damaged or has a dtype that profiles do not use."""
    arrays = {}
    entries = safetensors.read_header(path, formats.PackError)
    with formats.RangeReader(path, formats.PackError) as reader:
        for entry in entries:
            if entry.name.startswith("pad."):
                continue
            is_bf16 = entry.dtype == "BF16" and entry.name.endswith(_BF16_SUFFIX)
            if entry.dtype not in _DTYPES and not is_bf16:
                raise formats.PackError(
                    f"{path.name}: tensor {entry.name!r} is {entry.dtype}, a dtype that profiles do not use"
                )
            raw = reader.read(entry.offset, entry.num_bytes)
            arrays[entry.name] = raw.view(_DTYPES["U16" if is_bf16 else entry.dtype]).reshape(entry.shape)
    return arrays


@dataclass(frozen=True, slots=True)
class ArrayRule:
    """The dtype and shape that an array of a file must have, and the range of its values."""

    dtype: str
    shape: tuple[int, ...]
    least: float | None = None  # None: any finite number; `most` likewise
    most: float | None = None
    has_nan: bool = False  # whether some values may be NaN, which stands for a figure that nothing measured

    def fault(self, array: Array) -> str | None:
        """Returns what is wrong with an array, or None."""
        if array.dtype != np.dtype(_DTYPES[self.dtype]) or array.shape != self.shape:
            return f"is {_NAMES[array.dtype]} {list(array.shape)}, expected {self.dtype} {list(self.shape)}"
        fits = array > -math.inf if self.least is None else array >= self.least
        fits &= array < math.inf if self.most is None else array <= self.most
        wrong = np.argwhere(~(fits | np.isnan(array) if self.has_nan else fits))
        if not len(wrong):
            return None
        place = tuple(wrong[0].tolist())
        return f"is {array[place]!s} at {list(place)}, expected {self._range()}; the file is damaged, make it again"

    def _range(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        bounds = [f" of at least {self.least:g}"] if self.least is not None else []
        bounds += [f" of at most {self.most:g}"] if self.most is not None else []
        return "a finite number" + "".join(bounds)


def check_arrays(arrays: Mapping[str, Array], expected: Mapping[str, ArrayRule], place: str) -> None:
    """Refuses, by PackError, the first array without the expected name, dtype, shape or values."""
    for name in [*expected, *arrays]:
        if name not in expected:
            raise formats.PackError(f"{place}: unknown tensor {errors.shortened(name)}")
        if name not in arrays:
            raise formats.PackError(f"{place}: tensor {name!r} is missing")
        if fault := expected[name].fault(arrays[name]):
            raise formats.PackError(f"{place}: tensor {name!r} {fault}")


PROFILE_FILE = "profile.json"
WORK_FOLDER = "work"
_IDENTITY_FILE = "profile.unfinished.json"


def tidy(folder: Path) -> None:
    """Removes what only an unfinished run needs; no other process may be writing to the folder."""
    shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)
    (folder / _IDENTITY_FILE).unlink(missing_ok=True)  # last: it identifies the rest


class ProfileStore:
    """Writes a profile folder under its lock; `close` it.

    Args:    identity: digest of everything that decides the profile.   replaces_other: remove an unfinished profile of
             another identity instead of refusing it.   part: the number of this writer among several that write the
             same files; None: the only one.
    Raises:  ConversionError if the folder contains something else, or another process is writing there.
    """

    def __init__(self, folder: Path, identity: str, replaces_other: bool = False, part: Part | None = None) -> None:
        self.folder = folder
        self.work = folder / WORK_FOLDER
        self._part = part
        self._part_fd = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = base.FolderLock(folder, is_shared=part is not None)
        except BlockingIOError as fault:
            what = "wait for it, or stop it"
            if part is not None:
                what = f"it was started without --part; {what}"
            raise formats.ConversionError(f"{folder}: another process is writing a profile here; {what}") from fault
        except OSError as fault:
            raise formats.ConversionError(f"{folder}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            if replaces_other:
                self._remove_other(formats.canonical({"identity": identity}))
            if part is not None:
                self.work.mkdir(exist_ok=True)
                self._lock_part(part)
            self._claim(formats.canonical({"identity": identity}))
            self.work.mkdir(exist_ok=True)
        except formats.ConversionError:
            self.close()
            raise

    def has(self, name: str) -> bool:
        """Returns whether a file is already written."""
        return (self.folder / name).exists()

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Writes a safetensors file of these arrays."""
        self.replace(name, (write_arrays(arrays),))

    def replace(self, name: str, pieces: Iterable[bytes]) -> None:
        """Writes a file of these pieces under a temporary name, then renames it; a part keeps another part's file."""
        unfinished = self.folder / f"{name}.tmp"
        if self._part is not None:
            if self.has(name):
                return
            unfinished = self.work / f"{Path(name).name}{self._part.suffix}.tmp"
        try:
            with unfinished.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            if self._part is None:
                unfinished.replace(self.folder / name)
            else:
                publish_once(unfinished, self.folder / name)
            self._lock.sync()
        except OSError as fault:
            raise formats.ConversionError(
                f"{self.folder}: writing {name} failed ({fault.strerror}); fix this, then run the same command again"
            ) from fault

    def seal(self, raw: bytes) -> None:
        """Writes the file that makes the folder a profile, and removes what only an unfinished run needs."""
        self.replace(PROFILE_FILE, (raw,))
        tidy(self.folder)

    def close(self) -> None:
        """Releases the folder."""
        if self._part_fd >= 0:
            os.close(self._part_fd)
            self._part_fd = -1
        self._lock.close()

    def _lock_part(self, part: Part) -> None:
        """Refuses a second process of this part: their files would have the same temporary names."""
        self._part_fd = os.open(self.work / f"part{part.suffix}.lock", os.O_RDWR | base.WRITE_FLAGS)
        try:
            base.lock_file(self._part_fd)
        except BlockingIOError as fault:
            raise errors.PartBusyError(
                f"{self.folder}: another process is making part {part}; give each process another number"
            ) from fault

    def _remove_other(self, identity: bytes) -> None:
        """Removes an unfinished profile of another identity; leaves any other folder for `_claim` to refuse."""
        path = self.folder / _IDENTITY_FILE
        if not path.exists() or path.read_bytes() == identity:
            return
        shutil.rmtree(self.work, ignore_errors=True)
        for file in self.folder.iterdir():
            if file != path:
                file.unlink()
        path.unlink()

    def _claim(self, identity: bytes) -> None:
        """Marks the folder as this identity's, or finds the mark of an earlier run."""
        path = self.folder / _IDENTITY_FILE
        if not path.exists():
            own = {f"{_IDENTITY_FILE}.tmp"} if self._part is None else {WORK_FOLDER, _IDENTITY_FILE}
            names = sorted(entry.name for entry in self.folder.iterdir() if entry.name not in own)
            if names and not path.exists():  # another part may have claimed the folder meanwhile
                raise formats.ConversionError(
                    f"{self.folder}: contains {names[0]!r}; give a new or empty folder for the profile"
                )
            self.replace(_IDENTITY_FILE, (identity,))
        if path.read_bytes() != identity:
            raise formats.ConversionError(
                f"{self.folder}: contains an unfinished profile of another model, text or options; "
                "repeat that command, or remove the folder"
            )


@contextmanager
def work_store(folder: Path, facts: Mapping[str, object], removes: bool = True) -> Iterator[ProfileStore]:
    """Opens a folder for work files, which a killed call with the same facts continues; `removes` it at the end."""
    store = ProfileStore(folder, hashlib.sha256(formats.canonical(facts)).hexdigest(), replaces_other=True)
    try:
        yield store
    finally:
        store.close()
    if removes:
        shutil.rmtree(folder)


class NamedArrays:
    """A dataclass whose fields are the arrays of a file."""

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by name, as stored."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}  # type: ignore[attr-defined]  # it is one


_PACKAGES = ("hqq", "moe-pack", "numpy", "torch")


def source_digest(checkpoint: Checkpoint) -> str:
    """Returns the SHA-256 of a checkpoint's account, then its routers' bytes: training changes routers too."""
    digest = hashlib.sha256(manifests.account_bytes(*checkpoint.account()))
    for layer in checkpoint.spec.moe_layers:
        source = checkpoint.dense_source(f"layers.{layer}.router")
        digest.update(checkpoint.rows(source, 0, source.num_rows).data)
    return digest.hexdigest()


def packed_source_digest(pack: formats.Pack) -> str:
    """Returns the `source_digest` of the checkpoint of a pack, which keeps the bytes of its routers."""
    digest = hashlib.sha256(pack.read_file(manifests.SOURCE_FILE).data)
    routers = {f"layers.{layer}.router" for layer in pack.spec.moe_layers}
    for tensor in pack.layout.dense:
        if tensor.role.name in routers:
            digest.update(pack.read_dense(tensor.entry, 0, tensor.entry.shape[0]).data)
    return digest.hexdigest()


def made_with() -> tuple[manifests.PackageVersion, ...]:
    """Returns the versions of the installed packages that decide a profile's figures."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(manifests.PackageVersion(name, installed_version(name)))
        except PackageNotFoundError:
            continue
    return tuple(versions)
