"""Writes a pack so that it can be killed at any moment: a machine of named states and numbered steps.

    CLOSED --open--> WRITING --seal--> SEALED
                 \\-> SEALED    (the folder already holds this very pack)

Every mkdir, truncate, write, fsync, rename and unlink is a step, announced to `on_step` before it is done. An item is
journaled after its bytes are on the drive; the manifest comes last: without one the folder is no pack, and the same
conversion started again goes on from the journal. Specified in docs/format.md.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats import strict_json
from moe_pack.formats.errors import ConversionError, PackError
from moe_pack.formats.index import Digests
from moe_pack.formats.journal import decode_lines, encode_line
from moe_pack.formats.layout import DENSE_FILE, UNUSED_FILE, Item, PackLayout
from moe_pack.formats.manifest import MANIFEST_FILE, ContentFile, Manifest, read_manifest
from moe_pack.formats.ranges import RangeReader
from moe_pack.formats.rethreshold import finish_rewrite
from moe_pack.formats.steps import Step, SteppedFolder, pass_step
from moe_pack.formats.tensor_file import split_bytes

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
        self._drive.lock("another conversion is writing here; wait for it, or stop it")
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
            raise ConversionError(f"{self.folder}: holds another pack; give another output folder, or remove this one")
        return found

    def _claim_folder(self) -> None:
        path = self.folder / CONVERSION_FILE
        if path.exists():
            if path.read_bytes() != self._conversion:
                raise ConversionError(
                    f"{self.folder}: holds an unfinished conversion of another source or with other options; "
                    "repeat that command, or remove the folder"
                )
            return
        for held in sorted(self.folder.iterdir()):
            if held.name != f"{CONVERSION_FILE}.tmp":
                raise ConversionError(
                    f"{self.folder}: holds {held.name!r}, which is no conversion; give a new or empty folder"
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
                f"{self.folder}: needs {needed:,} more bytes, the drive has {free:,} free; "
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
