r"""Writes a pack so that it can be killed at any moment and go on later; rewrites its thresholds in the same way.

    CLOSED --open--> WRITING --seal--> SEALED
                 \-> SEALED    (the folder already has this pack)

`SteppedFolder` announces each change of the disk (mkdir, open, truncate, write, fsync, rename, unlink) to `on_step`
before it is made, so that tests can stop it there. Its callers order the steps so that nothing is lost in between.

The journal lists the items on the disk. A line is `item crc32 sha256 note check`, written after the item's fsync;
`check` is the CRC-32 of the text before it, and the note, which may be missing, is the item's measurement in
hexadecimal digits. All from the first incomplete line on is dropped: it was being written when the process died. The
manifest comes last: without it the folder is no pack, and the same conversion continues from the journal.

Several processes that see the same folder may make its parts. Each writes items into the same files, has a journal of
its own, and reads those of the others. Items are deterministic: two parts may write the same one. The part that creates
the file `conversion.sealing` seals the pack.

A rewrite of the thresholds changes two files, but only one rename is atomic: that of the manifest is the commit. Before
it the new thresholds are on the disk in a file of their own, and readers take the file that the manifest lists; after
it they are renamed to their place. docs/pack.md specifies both procedures.
"""

import errno
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import base
from moe_pack.formats.base import errors, json_files, lock_file, sync_folder
from moe_pack.formats.base.commands import Part
from moe_pack.formats.pack import layouts, manifests, safetensors
from moe_pack.formats.pack.reader import Pack, is_listed
from moe_pack.formats.parts.specs import ModelSpec


def encode_line(item: int, digests: manifests.Digests, note: bytes = b"") -> bytes:
    """Returns the journal's line for an item whose bytes are on the disk."""
    text = f"{item} {digests.crc32:08x} {digests.sha256.hex()}" + (f" {note.hex()}" if note else "")
    return f"{text} {zlib.crc32(text.encode('ascii')):08x}\n".encode("ascii")


def decode_lines(raw: bytes) -> tuple[dict[int, tuple[manifests.Digests, bytes]], int]:
    """Returns the items in a journal's bytes with their notes, and the number of bytes of its complete lines."""
    done: dict[int, tuple[manifests.Digests, bytes]] = {}
    end = 0
    for line in raw.splitlines(keepends=True):
        text, _, check = line.rpartition(b" ")
        if check != f"{zlib.crc32(text):08x}\n".encode("ascii") or text.count(b" ") not in (2, 3):
            break
        item, crc32, sha256, *note = text.decode("ascii").split(" ")
        done[int(item)] = manifests.Digests(int(crc32, 16), bytes.fromhex(sha256)), bytes.fromhex("".join(note))
        end += len(line)
    return done, end


@dataclass(frozen=True, slots=True)
class Step:
    """A change of the disk that is about to be made."""

    number: int
    action: str
    path: str


def pass_step(step: Step) -> None:
    """Does nothing, as `on_step`."""


class SteppedFolder:
    """A folder under one process's lock, or shared by several parts. Owns the lock and the files: `close` it.

    Args:    on_step: called before each step.   part: whose names temporary files have; None: there is no other part.
    Raises:  ConversionError, from every method, if a step fails.
    """

    def __init__(self, folder: Path, on_step: Callable[[Step], None], part: Part | None = None) -> None:
        self.folder = folder
        self._on_step = on_step
        self._num_steps = 0
        self._lock: base.FolderLock | None = None
        self._fds: dict[str, int] = {}
        self._temporary = f"{part.suffix if part is not None else ''}.tmp"

    def make(self) -> None:
        """Creates the folder if it is missing."""
        if not self.folder.exists():
            self._do("mkdir", str(self.folder), lambda: self.folder.mkdir(parents=True, exist_ok=True))
            self._do("fsync", str(self.folder.parent), lambda: sync_folder(self.folder.parent))

    def lock(self, busy: str, is_shared: bool = False) -> None:
        """Locks the folder until `close`; `is_shared`: others may do so too. Raises ConversionError with `busy`."""
        try:
            self._lock = base.FolderLock(self.folder, is_shared)
        except BlockingIOError as fault:
            raise errors.ConversionError(f"{self.folder}: {busy}") from fault
        except OSError as fault:
            raise errors.ConversionError(
                f"{self.folder}: cannot be used as output folder ({fault.strerror})"
            ) from fault

    def lock_file(self, name: str, busy: str) -> None:
        """Locks an open file for this process alone. Raises PartBusyError with the message `busy`."""
        try:
            lock_file(self._fds[name])
        except BlockingIOError as fault:
            raise errors.PartBusyError(f"{self.folder}: {busy}") from fault

    def close(self) -> None:
        """Closes all files and unlocks the folder."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def free_bytes(self) -> int:
        """Returns the free bytes of the folder's disk."""
        return shutil.disk_usage(self.folder).free

    def open(self, name: str) -> None:
        """Opens a file for writing; creates it if it is missing."""
        path = self.folder / name
        self._open("open" if path.exists() else "create", name, os.O_RDWR | base.WRITE_FLAGS)

    def num_bytes(self, name: str) -> int:
        """Returns the size of an open file."""
        return os.fstat(self._fds[name]).st_size

    def read(self, name: str) -> bytes:
        """Reads all bytes of a small open file."""
        raw = bytearray(self.num_bytes(name))
        return bytes(raw[: base.read_at(self._fds[name], memoryview(raw), 0)])

    def write(self, name: str, view: memoryview, offset: int) -> None:
        """Writes all of `view` into an open file, from byte `offset` on."""

        def write_all() -> None:
            done = 0
            while done < len(view):
                done += base.write_at(self._fds[name], view[done:], offset + done)

        self._do("write", name, write_all)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Changes the size of an open file; added bytes read as zeros."""
        self._do("truncate", name, lambda: os.ftruncate(self._fds[name], num_bytes))

    def sync(self, name: str) -> None:
        """Flushes an open file's bytes to the disk."""
        self._do("fsync", name, lambda: os.fsync(self._fds[name]))

    def sync_folder(self) -> None:
        """Flushes the folder's names to the disk."""
        assert self._lock is not None, "the folder is locked"
        self._do("fsync", ".", self._lock.sync)

    def write_file(self, name: str, raw: bytes) -> None:
        """Writes a small file and flushes its bytes, without its name, to the disk."""
        self._open("create", name, os.O_WRONLY | os.O_TRUNC | base.WRITE_FLAGS)
        try:
            self.write(name, memoryview(raw), 0)
            self.sync(name)
        finally:
            os.close(self._fds.pop(name))

    def rename(self, name: str, target: str) -> None:
        """Renames a file, replaces another by it, and flushes the names to the disk."""
        self._do("rename", target, lambda: (self.folder / name).replace(self.folder / target))
        self.sync_folder()

    def replace(self, name: str, raw: bytes) -> None:
        """Writes a small file under a temporary name, then renames it."""
        self.write_file(f"{name}{self._temporary}", raw)
        self.rename(f"{name}{self._temporary}", name)

    def create_first(self, name: str) -> bool:
        """Creates an empty file; returns whether no other process had created it."""

        def created() -> None:
            os.close(os.open(self.folder / name, os.O_WRONLY | os.O_EXCL | base.WRITE_FLAGS, 0o644))

        if (self.folder / name).exists():
            return False
        try:
            self._do("create", name, created)
        except errors.ConversionError:
            if not (self.folder / name).exists():
                raise
            return False
        return True

    def unlink(self, name: str) -> None:
        """Removes a file. Without `sync_folder` its name may be back after a crash."""
        self._do("unlink", name, lambda: (self.folder / name).unlink(missing_ok=True))

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
            raise errors.ConversionError(
                f"{self.folder}: {action} {path} failed ({fault.strerror}); {advice}"
            ) from fault


def rewrite_thresholds(
    folder: Path, thresholds: NDArray[np.float32], on_step: Callable[[Step], None] = pass_step
) -> str:
    """Writes thresholds into a pack and returns its new root digest. Changes nothing if it already has them.

    If it is killed, the pack has all of the old or all of the new thresholds. `conversion` stays: the same `convert`
    command still recognizes its pack.
    Args:    thresholds: f32 [L, E].   on_step: called before each change of the disk.
    Raises:  PlanError for a threshold that is negative or not finite, or another shape; PackError if the folder has no
             intact pack; ConversionError if it is in use, or the disk fails.
    """
    assert thresholds.dtype == np.float32, thresholds.dtype
    disk = SteppedFolder(folder, on_step)
    disk.lock("a conversion or another change of thresholds is writing in this folder; wait for it or stop it")
    try:
        with Pack(folder) as pack:  # checks all but the experts' bytes before anything changes
            manifest = pack.manifest
        _check(thresholds, manifest.model)
        finish_rewrite(disk, manifest)
        raw = manifests.thresholds_bytes(thresholds)
        changed = _with_thresholds(manifest, raw)
        if changed.root != manifest.root:
            disk.write_file(manifests.NEW_THRESHOLDS_FILE, raw)
            disk.sync_folder()
            disk.replace(manifests.MANIFEST_FILE, manifests.manifest_bytes(changed))  # the commit
            disk.rename(manifests.NEW_THRESHOLDS_FILE, manifests.THRESHOLDS_FILE)
        return changed.root
    finally:
        disk.close()


def finish_rewrite(disk: SteppedFolder, manifest: manifests.Manifest) -> None:
    """Ends a killed rewrite in a locked pack: renames new thresholds that the manifest lists, and removes others."""
    if is_listed(disk.folder / manifests.NEW_THRESHOLDS_FILE, _listed(manifest)):
        disk.rename(manifests.NEW_THRESHOLDS_FILE, manifests.THRESHOLDS_FILE)
    for name in (manifests.NEW_THRESHOLDS_FILE, f"{manifests.MANIFEST_FILE}.tmp"):
        if (disk.folder / name).is_file():
            disk.unlink(name)  # not synced: if the name comes back, readers ignore it


def _listed(manifest: manifests.Manifest) -> manifests.ContentFile:
    return next(file for file in manifest.files if file.name == manifests.THRESHOLDS_FILE)


def _with_thresholds(manifest: manifests.Manifest, raw: bytes) -> manifests.Manifest:
    old = _listed(manifest)
    new = manifests.ContentFile(manifests.THRESHOLDS_FILE, len(raw), hashlib.sha256(raw).hexdigest())
    files = tuple(new if file == old else file for file in manifest.files)
    grown, totals = new.bytes - old.bytes, manifest.totals  # not 0 if another program laid out the old thresholds
    return replace(
        manifest,
        files=files,
        totals=replace(totals, tables=totals.tables + grown, content=totals.content + grown),
        root=manifests.root_digest(files, manifest.expert_files),
    )


def _check(thresholds: NDArray[np.float32], spec: ModelSpec) -> None:
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if thresholds.shape != shape:
        raise errors.PlanError(
            f"thresholds: shape {list(thresholds.shape)}, expected {list(shape)} (MoE layers, experts)"
        )
    if fault := manifests.thresholds_fault(thresholds):
        raise errors.PlanError(f"thresholds: {fault}")


JOURNAL_FILE = "conversion.journal"  # of parts: conversion-1-of-3.journal
CONVERSION_FILE = "conversion.json"
SEALING_FILE = "conversion.sealing"
_JOURNALS = "conversion*.journal"
_UNFINISHED = "*-of-*.tmp"  # small files that a part was writing
_CHUNK_BYTES = 8 << 20
_ANY_STAMP = ""  # of a conversion in parts


class State(Enum):
    """States of a `PackWriter`."""

    CLOSED = "closed"
    WRITING = "writing"
    SEALED = "sealed"


def digests_of(extent: NDArray[np.uint8]) -> manifests.Digests:
    """Returns CRC-32 and SHA-256 of an item's bytes."""
    return manifests.Digests(zlib.crc32(extent.data), hashlib.sha256(extent.data).digest())


class _OtherJournals:
    """The journals of other processes that write into a folder, read as far as their lines are whole."""

    def __init__(self, folder: Path, own: str) -> None:
        self._folder, self._own = folder, own
        self._ends: dict[str, int] = {}

    def new_lines(self) -> Iterator[tuple[int, manifests.Digests, bytes]]:
        """Yields number, digests and note of each item that was written since the last call."""
        for path in sorted(self._folder.glob(_JOURNALS)):
            if path.name == self._own:
                continue
            try:
                with path.open("rb") as file:
                    file.seek(self._ends.get(path.name, 0))
                    lines, whole = decode_lines(file.read())
            except FileNotFoundError:  # another part has sealed the pack
                continue
            self._ends[path.name] = self._ends.get(path.name, 0) + whole
            yield from ((number, digests, note) for number, (digests, note) in lines.items())


def journaled_bytes(folder: Path, layout: layouts.PackLayout) -> int:
    """Returns the bytes of a pack's items that are on the disk; all if the folder is a pack."""
    items = list(layout.items())
    numbers = {number for number, _, _ in _OtherJournals(folder, own="").new_lines() if number < len(items)}
    if (folder / manifests.MANIFEST_FILE).exists():
        return sum(item.num_bytes for item in items)
    return sum(items[number].num_bytes for number in numbers)


def await_parts(folder: Path, patience_s: float) -> bool:
    """Waits until no part has the folder open; returns whether that is so before the patience ends."""
    end = time.monotonic() + patience_s
    while True:
        try:
            base.FolderLock(folder, False).close()
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.1)


class PackWriter:
    """The only writer of an output folder, or of its part, from `open` to `close`.

    Args:    folder: created if missing.   conversion: hex digest of source, plan and versions.   stamp: changes when
             the source's files change; parts, whose sources may lie elsewhere, do not compare it.   on_step: called
             before each step.   part: None: this process writes everything.
    """

    def __init__(
        self,
        folder: Path,
        layout: layouts.PackLayout,
        conversion: str,
        stamp: str,
        on_step: Callable[[Step], None] = pass_step,
        part: Part | None = None,
    ) -> None:
        self.folder = folder
        self.part = part
        self.state = State.CLOSED
        self._layout = layout
        self._items = list(layout.items())
        self._numbers = {item: number for number, item in enumerate(self._items)}
        claims = [{"conversion": conversion, "source_stamp": known} for known in (stamp, _ANY_STAMP)]
        self._claims = [json_files.canonical(claim) for claim in (claims if part is None else claims[::-1])]
        self._identity = conversion
        self._disk = SteppedFolder(folder, on_step, part)
        self._journal = JOURNAL_FILE if part is None else f"conversion{part.suffix}.journal"
        self._others = _OtherJournals(folder, self._journal)
        self._done: dict[int, manifests.Digests] = {}
        self._notes: dict[int, bytes] = {}
        self.resumed_bytes = 0  # of items that an earlier run, or another part, has written

    def open(self) -> None:
        """Locks the folder, starts or resumes the conversion, and writes the headers.

        Raises:  ConversionError if the folder has other files, is in use, or the disk is too full.
        """
        assert self.state is State.CLOSED, self.state
        self._disk.make()
        self._disk.lock("another conversion is writing in this folder; wait for it or stop it", self.part is not None)
        try:
            complete = self._complete()
            if complete is not None:
                finish_rewrite(self._disk, complete)
                self._clean()
                self.state = State.SEALED
                self.resumed_bytes = sum(item.num_bytes for item in self._items)
                return
            self._claim_folder()
            self._open_journal()
            self._check_space()
            self._open_files()
        except (errors.ConversionError, errors.PackError):
            self.close()
            raise
        self.state = State.WRITING
        self.resumed_bytes = sum(item.num_bytes for item in self.written())
        headers = {name: file.header for name, file in self._layout.files()}
        for item in self.pending():
            if item.kind == "header":
                raw = np.frombuffer(headers[item.file], np.uint8)
                self.write(item, raw, digests_of(raw))

    def pending(self) -> list[layouts.Item]:
        """Returns the items that are not yet written, in order."""
        return [item for item in self._items if not self.is_written(item)]

    def is_written(self, item: layouts.Item) -> bool:
        """Returns whether an item is on the disk, as far as this process knows."""
        return self._numbers[item] in self._done

    def owns(self, item: layouts.Item) -> bool:
        """Returns whether this process writes an item before other parts do."""
        return self.part is None or self.part.owns(self._numbers[item])

    def written(self, start: int = 0) -> Iterator[layouts.Item]:
        """Yields the items on the disk from the `start`-th on, in the order in which this process learnt of them."""
        return (self._items[number] for number in islice(self._done, start, None))

    def refresh(self) -> None:
        """Learns which items other parts have written. Raises ConversionError if an item has other bytes there."""
        for number, digests, note in self._others.new_lines():
            if number >= len(self._items):
                continue
            if self._done.setdefault(number, digests) != digests:
                raise errors.ConversionError(
                    f"{self.folder}: two parts have made different bytes of the same {self._items[number].kind}; all "
                    "parts need processors with the same instructions, and the same packages; remove the folder"
                )
            if note:
                self._notes[number] = note

    def write(
        self, item: layouts.Item, extent: NDArray[np.uint8], digests: manifests.Digests, note: bytes = b""
    ) -> None:
        """Writes an item's bytes to the disk, then its line in the journal.

        Args:    extent: u8 [item.num_bytes].   digests: of these bytes.   note: what was measured of the item.
        """
        assert self.state is State.WRITING and len(extent) == item.num_bytes, (self.state, item, len(extent))
        for offset, size in safetensors.split_bytes(0, item.num_bytes, _CHUNK_BYTES):
            self._disk.write(item.file, extent.data[offset : offset + size], item.offset + offset)
        self._disk.sync(item.file)
        number = self._numbers[item]
        line = memoryview(encode_line(number, digests, note))
        self._disk.write(self._journal, line, self._disk.num_bytes(self._journal))
        self._disk.sync(self._journal)
        self._done[number] = digests
        if note:
            self._notes[number] = note

    def expert_digests(self) -> Mapping[tuple[int, int], manifests.Digests]:
        """Returns the digests of all extents, by MoE layer index and expert."""
        assert not self.pending(), "every item is written"
        return {
            (item.layer, item.expert): self._done[self._numbers[item]] for item in self._items if item.kind == "expert"
        }

    def expert_notes(self) -> Mapping[tuple[int, int], bytes]:
        """Returns the notes of experts, of earlier runs too, by MoE layer index and expert."""
        items = ((self._items[number], note) for number, note in self._notes.items())
        return {(item.layer, item.expert): note for item, note in items if item.kind == "expert"}

    def begins_sealing(self) -> bool:
        """Returns whether this process seals the pack, whose items are all written. One part does."""
        if self.part is None:
            return True
        if self.is_sealed() or not self._disk.create_first(SEALING_FILE):
            return False
        if self.is_sealed():  # another part has done so, and has removed its own file, in between
            self._disk.unlink(SEALING_FILE)
            return False
        return True

    def is_sealed(self) -> bool:
        """Returns whether the folder has the whole pack, which another part may have sealed."""
        if self.state is not State.SEALED and self._complete() is not None:
            self.state = State.SEALED
        return self.state is State.SEALED

    def seal(
        self,
        tables: Iterable[tuple[str, bytes]],
        manifest: Callable[[tuple[manifests.ContentFile, ...]], bytes],
        sidecars: Callable[[bytes], Iterable[tuple[str, bytes]]] = lambda manifest: (),
    ) -> None:
        """Writes the small files, the sidecars and, last, the manifest, which makes the folder a pack.

        Args:    tables: names and bytes.   manifest: returns the manifest's bytes for the list of all other files
                 except the experts'.   sidecars: returns names and bytes for the manifest's bytes.
        """
        assert self.state is State.WRITING and not self.pending(), (self.state, "every item is written")
        files = []
        for name, raw in tables:
            self._disk.replace(name, raw)
            files.append(manifests.ContentFile(name, len(raw), hashlib.sha256(raw).hexdigest()))
        unused = () if self._layout.unused_file is None else (layouts.UNUSED_FILE,)
        for name in (layouts.DENSE_FILE, *unused, *manifests.table_files(self._layout.spec)):
            with safetensors.RangeReader(self.folder / name, errors.ConversionError) as file:
                files.append(manifests.ContentFile(name, file.num_bytes, file.sha256()))
        raw = manifest(tuple(sorted(files, key=lambda file: file.name)))
        for name, sidecar in sidecars(raw):
            self._disk.replace(name, sidecar)
        self._disk.replace(manifests.MANIFEST_FILE, raw)
        self.state = State.SEALED
        self._clean()

    def close(self) -> None:
        """Unlocks the folder. The next run continues from the journal."""
        self._disk.close()
        if self.state is State.WRITING:
            self.state = State.CLOSED

    def _complete(self) -> manifests.Manifest | None:
        """Returns the manifest of this pack if the folder already has it, else None."""
        path = self.folder / manifests.MANIFEST_FILE
        if not path.exists():
            return None
        with safetensors.RangeReader(path, errors.PackError) as reader:
            manifest = manifests.read_manifest(
                reader.read(0, min(reader.num_bytes, manifests.MAX_MANIFEST_BYTES + 1)).tobytes()
            )
        if manifest.conversion != self._identity:
            raise errors.ConversionError(
                f"{self.folder}: contains another pack; give another output folder, or remove this one"
            )
        return manifest

    def _claim_folder(self) -> None:
        path = self.folder / CONVERSION_FILE
        if not path.exists():
            names = sorted(each.name for each in self.folder.iterdir())
            others = [
                n for n in names if not (n.startswith(CONVERSION_FILE) and n.endswith(".tmp"))
            ]  # unfinished claims
            if not others:
                self._disk.replace(CONVERSION_FILE, self._claims[0])  # other parts write the same
            elif not path.exists():  # no other part has claimed it meanwhile
                raise errors.ConversionError(
                    f"{self.folder}: contains {others[0]!r}, which is not part of a conversion; give a new or "
                    "empty folder"
                )
        if path.read_bytes() not in self._claims:
            raise errors.ConversionError(
                f"{self.folder}: contains an unfinished conversion of another source or with other options; "
                "repeat that command, or remove the folder"
            )

    def _open_journal(self) -> None:
        self._disk.open(self._journal)
        if self.part is not None:
            self._disk.lock_file(
                self._journal, f"another process is writing part {self.part} in this folder; wait for it or stop it"
            )
        raw = self._disk.read(self._journal)
        lines, whole = decode_lines(raw)
        known = {number: line for number, line in lines.items() if number < len(self._items)}
        self._done = {number: digests for number, (digests, _) in known.items()}
        self._notes = {number: note for number, (_, note) in known.items() if note}
        if whole != len(raw):
            self._disk.truncate(self._journal, whole)
        self.refresh()

    def _check_space(self) -> None:
        """Refuses a conversion for which the disk has not enough free space."""
        needed = sum(item.num_bytes for item in self.pending())
        free = self._disk.free_bytes()
        if free < needed:
            raise errors.ConversionError(
                f"{self.folder}: needs {needed:,} more bytes, the disk has {free:,} free; "
                "free some space, then run the same command again"
            )

    def _open_files(self) -> None:
        done_files = {self._items[number].file for number in self._done}
        for name, file in self._layout.files():
            if name in done_files and not (self.folder / name).exists():
                raise errors.ConversionError(
                    f"{self.folder}: {name} was removed from an unfinished conversion; remove the folder"
                )
            self._disk.open(name)
            if self._disk.num_bytes(name) != file.num_bytes:
                if name in done_files:
                    raise errors.ConversionError(f"{self.folder}: {name} has changed its size; remove the folder")
                # Sets the padding to zero: bytes that are never written read as zeros.
                self._disk.truncate(name, file.num_bytes)
                self._disk.sync(name)
        self._disk.sync_folder()

    def _clean(self) -> None:
        of_parts = sorted(path.name for pattern in (_JOURNALS, _UNFINISHED) for path in self.folder.glob(pattern))
        for name in (*of_parts, CONVERSION_FILE, SEALING_FILE):
            if (self.folder / name).exists():
                self._disk.unlink(name)
        self._disk.sync_folder()
