r"""The journal of an unfinished pack: which items are on the drive, one line each, written after the item's fsync.

A line is `item crc32 sha256 check`; `check` is the CRC-32 of what stands before it. What follows the first line that
is not whole was being written when the process died, and is dropped.

A folder changed step by step: each mkdir, open, truncate, write, fsync, rename and unlink is announced, then made.

What writes packs is built of these steps, so that tests can stop it before any of them. Which step may follow which,
so that nothing is lost in between, is for the callers to know: `writer`, `rethreshold`, `sidecar`.

Rewrites the thresholds of a finished pack, which lie outside its experts, so that it can be killed at any moment.

Two files change, the thresholds and the manifest that has their digest, and only one rename is atomic: the manifest's
is the commit. The new thresholds lie beside their place before it, whole and on the drive, and readers take from there
what the manifest lists (`Pack`); after it they are renamed to their place. Specified in docs/format.md.

Writes a pack so that it can be killed at any moment: a machine of named states and numbered steps.

    CLOSED --open--> WRITING --seal--> SEALED
                 \-> SEALED    (the folder already holds this very pack)

Every mkdir, truncate, write, fsync, rename and unlink is a step, announced to `on_step` before it is done. An item is
journaled after its bytes are on the drive; the manifest comes last: without one the folder is no pack, and the same
conversion started again goes on from the journal. Specified in docs/format.md.
"""

import errno
import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import json_files as strict_json
from moe_pack.formats.errors import ConversionError, PackError, PlanError
from moe_pack.formats.layout import DENSE_FILE, UNUSED_FILE, Item, PackLayout
from moe_pack.formats.manifest import (
    MANIFEST_FILE,
    NEW_THRESHOLDS_FILE,
    THRESHOLDS_FILE,
    ContentFile,
    Digests,
    Manifest,
    manifest_bytes,
    read_manifest,
    root_digest,
    thresholds_bytes,
    thresholds_fault,
)
from moe_pack.formats.pack import Pack, is_listed
from moe_pack.formats.safetensors import RangeReader, split_bytes
from moe_pack.formats.spec import ModelSpec


def encode_line(item: int, digests: Digests) -> bytes:
    """The journal's line for an item that is safe on the drive."""
    text = f"{item} {digests.crc32:08x} {digests.sha256.hex()}"
    return f"{text} {zlib.crc32(text.encode('ascii')):08x}\n".encode("ascii")


def decode_lines(raw: bytes) -> tuple[dict[int, Digests], int]:
    """The items in a journal's bytes, and how many of the bytes are whole lines."""
    done: dict[int, Digests] = {}
    end = 0
    for line in raw.splitlines(keepends=True):
        text, _, check = line.rpartition(b" ")
        if check != f"{zlib.crc32(text):08x}\n".encode("ascii") or text.count(b" ") != 2:
            break
        item, crc32, sha256 = text.decode("ascii").split(" ")
        done[int(item)] = Digests(int(crc32, 16), bytes.fromhex(sha256))
        end += len(line)
    return done, end


_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the drive, about to be made."""

    number: int
    action: str
    path: str


def pass_step(step: Step) -> None:
    """The `on_step` of those who do not ask."""


class SteppedFolder:
    """A folder under one process's lock. Owns the lock and the files opened here: `close` it.

    Args:    on_step: called before each step.
    Raises:  ConversionError, from every method, if the drive refuses a step.
    """

    def __init__(self, folder: Path, on_step: Callable[[Step], None]) -> None:
        self.folder = folder
        self._on_step = on_step
        self._num_steps = 0
        self._lock_fd = -1
        self._fds: dict[str, int] = {}

    def make(self) -> None:
        """Makes the folder if it is missing."""
        if not self.folder.exists():
            self._do("mkdir", str(self.folder), lambda: self.folder.mkdir(parents=True, exist_ok=True))
            self._do("fsync", str(self.folder.parent), lambda: _sync_folder(self.folder.parent))

    def lock(self, busy: str) -> None:
        """Takes the folder for this process alone, until `close` or the process's end.

        Raises:  ConversionError with `busy` if another one has it.
        """
        try:
            self._lock_fd = os.open(self.folder, _READ_FOLDER)
        except OSError as fault:
            raise ConversionError(f"{self.folder}: cannot be used as output folder ({fault.strerror})") from fault
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError as fault:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise ConversionError(f"{self.folder}: {busy}") from fault

    def close(self) -> None:
        """Closes all files and gives the folder up."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def free_bytes(self) -> int:
        """What the folder's drive has room for."""
        drive = os.fstatvfs(self._lock_fd)
        return drive.f_bavail * drive.f_frsize

    def open(self, name: str) -> None:
        """Opens a file for writing, made empty if it is missing."""
        path = self.folder / name
        self._open("open" if path.exists() else "create", name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    def num_bytes(self, name: str) -> int:
        """The size of an open file."""
        return os.fstat(self._fds[name]).st_size

    def read(self, name: str) -> bytes:
        """All bytes of an open file, a small one."""
        return os.pread(self._fds[name], self.num_bytes(name), 0)

    def write(self, name: str, view: memoryview, offset: int) -> None:
        """Writes all of `view` at a place of an open file."""

        def whole() -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(self._fds[name], view[done:], offset + done)

        self._do("write", name, whole)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Gives an open file another size; what is added reads as zeros."""
        self._do("truncate", name, lambda: os.ftruncate(self._fds[name], num_bytes))

    def sync(self, name: str) -> None:
        """Brings an open file's bytes to the drive."""
        self._do("fsync", name, lambda: os.fsync(self._fds[name]))

    def sync_folder(self) -> None:
        """Brings the folder's names to the drive."""
        self._do("fsync", ".", lambda: os.fsync(self._lock_fd))

    def write_file(self, name: str, raw: bytes) -> None:
        """Writes a whole small file and brings its bytes, not its name, to the drive."""
        self._open("create", name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        try:
            self.write(name, memoryview(raw), 0)
            self.sync(name)
        finally:
            os.close(self._fds.pop(name))

    def rename(self, name: str, target: str) -> None:
        """Puts a file in the place of another, for good."""
        self._do("rename", target, lambda: (self.folder / name).rename(self.folder / target))
        self.sync_folder()

    def replace(self, name: str, raw: bytes) -> None:
        """Writes a small file beside its place, then renames it there."""
        self.write_file(f"{name}.tmp", raw)
        self.rename(f"{name}.tmp", name)

    def unlink(self, name: str) -> None:
        """Removes a file; its name may come back until the folder is synced."""
        self._do("unlink", name, (self.folder / name).unlink)

    def _open(self, action: str, name: str, flags: int) -> None:
        def opened() -> None:
            self._fds[name] = os.open(self.folder / name, flags, 0o644)

        self._do(action, name, opened)

    def _do(self, action: str, path: str, change: Callable[[], object]) -> None:
        self._num_steps += 1
        self._on_step(Step(self._num_steps, action, path))
        try:
            change()
        except OSError as fault:
            advice = "give another output folder" if action == "mkdir" else "fix this, then run the same command again"
            if fault.errno == errno.ENOSPC:
                advice = "free some space, then run the same command again"
            raise ConversionError(f"{self.folder}: {action} {path} failed ({fault.strerror}); {advice}") from fault


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, _READ_FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rewrite_thresholds(
    folder: Path, thresholds: NDArray[np.float32], on_step: Callable[[Step], None] = pass_step
) -> str:
    """Gives a pack these thresholds and returns its new root digest; nothing changes if it has them already.

    Killed at any moment it leaves a pack with all of the old or all of the new ones. `conversion` stays: it tells what
    the experts are, and the same `convert` command still finds its pack.

    Args:    thresholds: [L, E].   on_step: called before each change to the drive.
    Raises:  PlanError for a threshold that is negative or no number, or another shape; PackError if the folder holds
             no sound pack; ConversionError if it is in use, or its drive refuses.
    """
    assert thresholds.dtype == np.float32, thresholds.dtype
    drive = SteppedFolder(folder, on_step)
    drive.lock("a conversion or another change of thresholds is writing in this folder; wait for it or stop it")
    try:
        with Pack(folder) as pack:  # all but the experts' bytes is checked before anything changes
            manifest = pack.manifest
        _check(thresholds, manifest.model)
        finish_rewrite(drive, manifest)
        raw = thresholds_bytes(thresholds)
        changed = _with_thresholds(manifest, raw)
        if changed.root != manifest.root:
            drive.write_file(NEW_THRESHOLDS_FILE, raw)
            drive.sync_folder()
            drive.replace(MANIFEST_FILE, manifest_bytes(changed))  # from here on the new ones are the pack's
            drive.rename(NEW_THRESHOLDS_FILE, THRESHOLDS_FILE)
        return changed.root
    finally:
        drive.close()


def finish_rewrite(drive: SteppedFolder, manifest: Manifest) -> None:
    """Ends what a killed rewrite left in a locked pack: in place what its manifest lists, else removed.

    Nothing is done, not even a step, where nothing is left.
    """
    if is_listed(drive.folder / NEW_THRESHOLDS_FILE, _listed(manifest)):
        drive.rename(NEW_THRESHOLDS_FILE, THRESHOLDS_FILE)
    for name in (NEW_THRESHOLDS_FILE, f"{MANIFEST_FILE}.tmp"):
        if (drive.folder / name).is_file():
            drive.unlink(name)  # not synced: should its name come back, no reader cares


def _listed(manifest: Manifest) -> ContentFile:
    return next(file for file in manifest.files if file.name == THRESHOLDS_FILE)


def _with_thresholds(manifest: Manifest, raw: bytes) -> Manifest:
    """The manifest of the same pack with these bytes as its thresholds."""
    old, new = _listed(manifest), ContentFile(THRESHOLDS_FILE, len(raw), hashlib.sha256(raw).hexdigest())
    files = tuple(new if file == old else file for file in manifest.files)
    grown, totals = new.bytes - old.bytes, manifest.totals  # not 0 where another program laid the old ones out
    return replace(
        manifest,
        files=files,
        totals=replace(totals, tables=totals.tables + grown, content=totals.content + grown),
        root=root_digest(files, manifest.expert_files),
    )


def _check(thresholds: NDArray[np.float32], spec: ModelSpec) -> None:
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if thresholds.shape != shape:
        raise PlanError(f"thresholds: shape {list(thresholds.shape)}, expected {list(shape)} (MoE layers, experts)")
    fault = thresholds_fault(thresholds)
    if fault:
        raise PlanError(f"thresholds: {fault}")


JOURNAL_FILE = "conversion.journal"
CONVERSION_FILE = "conversion.json"
_CHUNK_BYTES = 8 << 20


class State(Enum):
    """Where the writer stands."""

    CLOSED = "closed"
    WRITING = "writing"
    SEALED = "sealed"


def digests_of(extent: NDArray[np.uint8]) -> Digests:
    """CRC-32 and SHA-256 of an item's bytes."""
    return Digests(zlib.crc32(extent.data), hashlib.sha256(extent.data).digest())


class PackWriter:
    """The one writer of an output folder, from `open` to `close`; a second one is refused while it lives.

    Args:    folder: made if missing.   layout: what will be written.   conversion: hex digest of source, plan and
             versions.   stamp: tells a source that changed since.   on_step: called before each step.
    """

    def __init__(
        self,
        folder: Path,
        layout: PackLayout,
        conversion: str,
        stamp: str,
        on_step: Callable[[Step], None] = pass_step,
    ) -> None:
        self.folder = folder
        self.state = State.CLOSED
        self._layout = layout
        self._items = list(layout.items())
        self._numbers = {item: number for number, item in enumerate(self._items)}
        self._conversion = strict_json.canonical({"conversion": conversion, "source_stamp": stamp})
        self._identity = conversion
        self._drive = SteppedFolder(folder, on_step)
        self._done: dict[int, Digests] = {}
        self.resumed_bytes = 0  # in items that an earlier run has written

    def open(self) -> None:
        """Locks the folder and starts or resumes the conversion; headers are written here.

        Raises:  ConversionError if the folder holds something else, is in use, or its drive is too full.
        """
        assert self.state is State.CLOSED, self.state
        self._drive.make()
        self._drive.lock("another conversion is writing in this folder; wait for it or stop it")
        try:
            complete = self._complete()
            if complete is not None:
                finish_rewrite(self._drive, complete)
                self._clean()
                self.state = State.SEALED
                self.resumed_bytes = sum(item.num_bytes for item in self._items)
                return
            self._claim_folder()
            self._open_journal()
            self._check_space()
            self._open_files()
        except (ConversionError, PackError):
            self.close()
            raise
        self.state = State.WRITING
        self.resumed_bytes = sum(self._items[number].num_bytes for number in self._done)
        headers = {name: file.header for name, file in self._layout.files()}
        for item in self.pending():
            if item.kind == "header":
                raw = np.frombuffer(headers[item.file], np.uint8)
                self.write(item, raw, digests_of(raw))

    def pending(self) -> list[Item]:
        """The items not yet written, in order."""
        return [item for item in self._items if self._numbers[item] not in self._done]

    def write(self, item: Item, extent: NDArray[np.uint8], digests: Digests) -> None:
        """Writes an item's bytes to the drive, then journals it.

        Args:    extent: u8 [item.num_bytes].   digests: of these bytes.
        """
        assert self.state is State.WRITING and len(extent) == item.num_bytes, (self.state, item, len(extent))
        for offset, size in split_bytes(0, item.num_bytes, _CHUNK_BYTES):
            self._drive.write(item.file, extent.data[offset : offset + size], item.offset + offset)
        self._drive.sync(item.file)
        number = self._numbers[item]
        line = memoryview(encode_line(number, digests))
        self._drive.write(JOURNAL_FILE, line, self._drive.num_bytes(JOURNAL_FILE))
        self._drive.sync(JOURNAL_FILE)
        self._done[number] = digests

    def expert_digests(self) -> Mapping[tuple[int, int], Digests]:
        """The digests of all extents, by MoE layer index and expert."""
        assert not self.pending(), "every item is written"
        return {
            (item.layer, item.expert): self._done[self._numbers[item]] for item in self._items if item.kind == "expert"
        }

    def seal(self, tables: Iterable[tuple[str, bytes]], manifest: Callable[[tuple[ContentFile, ...]], bytes]) -> None:
        """Writes the small files and, last, the manifest; then the folder is a pack.

        Args:    tables: names and bytes.   manifest: makes its bytes from the account of all other files but experts.
        """
        assert self.state is State.WRITING and not self.pending(), (self.state, "every item is written")
        files = []
        for name, raw in tables:
            self._drive.replace(name, raw)
            files.append(ContentFile(name, len(raw), hashlib.sha256(raw).hexdigest()))
        whole = (DENSE_FILE,) if self._layout.unused_file is None else (DENSE_FILE, UNUSED_FILE)
        for name in whole:
            with RangeReader(self.folder / name, ConversionError) as file:
                files.append(ContentFile(name, file.num_bytes, file.sha256()))
        self._drive.replace(MANIFEST_FILE, manifest(tuple(sorted(files, key=lambda file: file.name))))
        self.state = State.SEALED
        self._clean()

    def close(self) -> None:
        """Releases the folder; what is journaled stays for the next run."""
        self._drive.close()
        if self.state is State.WRITING:
            self.state = State.CLOSED

    def _complete(self) -> Manifest | None:
        """The manifest of this very pack, if the folder has it."""
        path = self.folder / MANIFEST_FILE
        if not path.exists():
            return None
        with RangeReader(path, PackError) as reader:
            found = read_manifest(reader.read(0, min(reader.num_bytes, 2_000_000)).tobytes())
        if found.conversion != self._identity:
            raise ConversionError(
                f"{self.folder}: contains another pack; give another output folder, or remove this one"
            )
        return found

    def _claim_folder(self) -> None:
        path = self.folder / CONVERSION_FILE
        if path.exists():
            if path.read_bytes() != self._conversion:
                raise ConversionError(
                    f"{self.folder}: contains an unfinished conversion of another source or with other options; "
                    "repeat that command, or remove the folder"
                )
            return
        for path in sorted(self.folder.iterdir()):
            if path.name != f"{CONVERSION_FILE}.tmp":
                raise ConversionError(
                    f"{self.folder}: contains {path.name!r}, which is not part of a conversion; give a new or "
                    "empty folder"
                )
        self._drive.replace(CONVERSION_FILE, self._conversion)

    def _open_journal(self) -> None:
        self._drive.open(JOURNAL_FILE)
        raw = self._drive.read(JOURNAL_FILE)
        lines, whole = decode_lines(raw)
        self._done = {number: digests for number, digests in lines.items() if number < len(self._items)}
        if whole != len(raw):
            self._drive.truncate(JOURNAL_FILE, whole)

    def _check_space(self) -> None:
        """Refuses to start what cannot end: better now than after hours."""
        needed = sum(item.num_bytes for item in self.pending())
        free = self._drive.free_bytes()
        if free < needed:
            raise ConversionError(
                f"{self.folder}: needs {needed:,} more bytes, the disk has {free:,} free; "
                "free some space, then run the same command again"
            )

    def _open_files(self) -> None:
        done_files = {self._items[number].file for number in self._done}
        for name, file in self._layout.files():
            if name in done_files and not (self.folder / name).exists():
                raise ConversionError(
                    f"{self.folder}: {name} was removed from an unfinished conversion; remove the folder"
                )
            self._drive.open(name)
            if self._drive.num_bytes(name) != file.num_bytes:
                if name in done_files:
                    raise ConversionError(f"{self.folder}: {name} has changed its size; remove the folder")
                # Sets all padding to zero without writing it: what is never written reads as zeros.
                self._drive.truncate(name, file.num_bytes)
                self._drive.sync(name)
        self._drive.sync_folder()

    def _clean(self) -> None:
        for name in (JOURNAL_FILE, CONVERSION_FILE):
            if (self.folder / name).exists():
                self._drive.unlink(name)
        self._drive.sync_folder()
