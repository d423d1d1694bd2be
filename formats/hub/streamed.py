"""A checkpoint on the hub, read without downloading it whole: pieces come when they are read, and go for others.

A piece has some tensors that follow each other in a shard, or a part of a large one. It is fetched to a file without a
name, which the disk gives back even if the process is killed. The least recently used pieces go when all together would
exceed the quota; they are fetched again when they are read again.
"""

import hashlib
import os
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import IO

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.formats.families import checkpoint_files, weight_files
from moe_pack.formats.hub.names import LEAST_STREAM_BYTES, STREAM_BYTES
from moe_pack.formats.hub.repository import HubRepository
from moe_pack.formats.pack import safetensors
from moe_pack.formats.pack.manifests import SourceFile

_PIECES = 128  # pieces in the quota, at least: 32 MiB each by default
_HEADER_BYTES = 256 << 10  # most headers are shorter, and come with the first request
_HEADERS_AT_ONCE = 8

Key = tuple[str, int]  # shard and first byte


class StreamedFiles(checkpoint_files.ShardFiles):
    """A checkpoint of the hub, of which at most `quota_bytes` are on the disk at a time. Owns the repository.

    Args:    folder: on whose disk the pieces are.
    Raises:  CheckpointError as `Checkpoint`, and if the hub or the disk fails.
    """

    def __init__(self, repository: HubRepository, folder: Path, quota_bytes: int = STREAM_BYTES) -> None:
        assert quota_bytes >= LEAST_STREAM_BYTES, quota_bytes
        super().__init__()
        self.folder = Path(repository.name.text())
        self._repository, self._quota_bytes = repository, quota_bytes
        self._headers: dict[str, bytes] = {}
        self._starts: dict[str, list[int]] = {}  # of the pieces of each shard, and the shard's end
        self._small: dict[str, NDArray[np.uint8]] = {}
        self._pieces = _Pieces(repository, folder, quota_bytes)

    @property
    def fetched_bytes(self) -> int:
        """Returns how many bytes of weights were fetched so far."""
        return self._pieces.fetched_bytes

    @property
    def disk_bytes(self) -> int:
        """Returns how many bytes of pieces will be on the disk at most."""
        return min(self._quota_bytes, sum(self._num_bytes(shard) for shard in self._starts))

    def names(self) -> list[str]:
        """Returns the names of the files of the checkpoint's folder, and of those in its folders."""
        return self._repository.names()

    def has(self, name: str) -> bool:
        """Returns whether the checkpoint has this file."""
        return self._repository.name.path(name) in self._repository.files

    def read_file(self, name: str, most_bytes: int = checkpoint_files.MAX_FILE_BYTES) -> NDArray[np.uint8]:
        """Reads a whole file, the first time from the hub: u8 [bytes].

        Raises:  CheckpointError if it is larger than `most_bytes`, or cannot be fetched.
        """
        if name not in self._small:
            num_bytes = self._num_bytes(name)
            if num_bytes > most_bytes:
                raise formats.CheckpointError(f"{name}: {num_bytes} bytes, at most {most_bytes}")
            raw = self._repository.read(self._repository.name.path(name), 0, num_bytes)
            checkpoint_files.check_small_file(raw, name)
            self._small[name] = raw
        return self._small[name]

    def read(self, tensor: str, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Reads a range of a tensor: u8, own memory. Raises CheckpointError if it cannot be fetched."""
        entry, shard = self._entries[tensor], self._shards[tensor]
        assert 0 <= start <= start + num_bytes <= entry.num_bytes, (tensor, start, num_bytes)
        out = np.empty(num_bytes, np.uint8)
        starts, first, done = self._starts[shard], entry.offset + start, 0
        while done < num_bytes:
            place = bisect_right(starts, first + done) - 1
            begin, end = starts[place], starts[place + 1]
            size = min(num_bytes - done, end - first - done)
            self._pieces.read((shard, begin), end - begin, first + done - begin, out[done : done + size])
            done += size
        return out

    def account(self) -> list[SourceFile]:
        """Returns every shard, sorted by name."""
        return [
            SourceFile(shard, self._num_bytes(shard), hashlib.sha256(header).hexdigest())
            for shard, header in sorted(self._headers.items())
        ]

    def stamp(self) -> str:
        """Returns a digest of the shards' digests on the hub, whatever the commit."""
        paths = sorted(self._repository.name.path(shard) for shard in self._headers)
        facts = [(path, self._repository.files[path].digest) for path in paths]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def close(self) -> None:
        """Gives the disk back."""
        self._repository.close()
        self._pieces.close()

    def _num_bytes(self, name: str) -> int:
        return self._repository.files[self._repository.name.path(name)].num_bytes

    def _open(self, weights: weight_files.WeightFiles) -> weight_files.JoinedShards:
        with ThreadPoolExecutor(_HEADERS_AT_ONCE, "headers") as pool:
            self._headers = dict(zip(weights.shards, pool.map(self._header, weights.shards), strict=True))
        headers = {
            shard: safetensors.header_entries(raw[8:], shard, self._num_bytes(shard), formats.CheckpointError)
            for shard, raw in self._headers.items()
        }
        most = self._quota_bytes // _PIECES
        self._starts = {shard: list(_piece_starts(entries, most)) for shard, entries in headers.items()}
        return weight_files.join_shards(weights, headers)

    def _header(self, shard: str) -> bytes:
        """Returns the first bytes of a shard: the header's length and the header."""
        path, num_bytes = self._repository.name.path(shard), self._num_bytes(shard)
        raw = self._repository.read(path, 0, min(_HEADER_BYTES, num_bytes)).tobytes()
        end = 8 + safetensors.header_length(raw[:8], shard, num_bytes, formats.CheckpointError)
        if end > len(raw):
            raw += self._repository.read(path, len(raw), end - len(raw)).tobytes()
        return raw[:end]


def _piece_starts(entries: Iterable[safetensors.TensorEntry], most_bytes: int) -> Iterator[int]:
    """Yields the first byte of each piece of a shard, and the shard's end; pieces have at most `most_bytes`.

    Small tensors that follow each other are one piece, because requests take time; a large one is divided.
    """
    start = end = -1
    for entry in entries:
        if not entry.num_bytes:
            continue
        if start < 0 or entry.offset + entry.num_bytes - start > most_bytes:
            pieces = [offset for offset, _ in safetensors.split_bytes(entry.offset, entry.num_bytes, most_bytes)]
            yield from pieces
            start = pieces[-1]
        end = entry.offset + entry.num_bytes
    if end >= 0:
        yield end


def _disk_bytes(num_bytes: int) -> int:
    """Returns what a file of this size takes on the disk, in blocks of 4 KiB."""
    return -(-num_bytes // formats.DISK_BLOCK_BYTES) * formats.DISK_BLOCK_BYTES


class _Piece:
    """A piece on the disk, or on its way."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.disk_bytes = _disk_bytes(num_bytes)
        self.num_users = 0  # threads that read it or wait for it
        self.is_complete = False
        self.file: IO[bytes] | None = None


class _Pieces:
    """The pieces on the disk, at most `quota_bytes` together, for several threads. Owns their files."""

    def __init__(self, repository: HubRepository, folder: Path, quota_bytes: int) -> None:
        self._repository, self._folder, self._quota_bytes = repository, folder, quota_bytes
        self._pieces: OrderedDict[Key, _Piece] = OrderedDict()  # the most recently used last
        self._disk_bytes = 0
        self._changed = Condition()
        self.fetched_bytes = 0

    def read(self, key: Key, num_bytes: int, start: int, out: NDArray[np.uint8]) -> None:
        """Reads the bytes of a piece from its byte `start` on, as many as `out` has; fetches the piece if need be."""
        with self._used(key, num_bytes) as file:
            done = 0
            while done < len(out):
                num_read = os.preadv(file.fileno(), [out[done:].data], start + done)
                assert num_read, f"piece {key} of {num_bytes} bytes ends at {start + done}"
                done += num_read

    def close(self) -> None:
        """Closes all files, which the disk then gives back."""
        with self._changed:
            for piece in self._pieces.values():
                if piece.file is not None:
                    piece.file.close()
            self._pieces.clear()

    @contextmanager
    def _used(self, key: Key, num_bytes: int) -> Iterator[IO[bytes]]:
        """Keeps a piece on the disk for the time of a `with`."""
        piece, is_new = self._reserved(key, num_bytes)
        try:
            if is_new:
                self._fetch(key, piece)
            assert piece.file is not None, "a complete piece has a file"
            yield piece.file
        finally:
            with self._changed:
                piece.num_users -= 1
                if not piece.is_complete and key in self._pieces:  # it failed
                    self._remove(key)
                self._changed.notify_all()

    def _reserved(self, key: Key, num_bytes: int) -> tuple[_Piece, bool]:
        """Returns a complete piece; or a new one, for which others have gone, and which the caller has to fetch."""
        with self._changed:
            while True:
                piece = self._pieces.get(key)
                if piece is not None and piece.is_complete:
                    self._pieces.move_to_end(key)
                    piece.num_users += 1
                    return piece, False
                if piece is None and self._make_space(_disk_bytes(num_bytes)):
                    piece = self._pieces[key] = _Piece(num_bytes)
                    piece.num_users = 1
                    self._disk_bytes += piece.disk_bytes
                    return piece, True
                self._changed.wait()  # for the thread that fetches this piece, or for the users of others

    def _make_space(self, disk_bytes: int) -> bool:
        """Removes pieces, the least recently used first; returns whether there is space then."""
        for key in [key for key, piece in self._pieces.items() if not piece.num_users]:
            if self._disk_bytes + disk_bytes <= self._quota_bytes:
                break
            self._remove(key)
        return self._disk_bytes + disk_bytes <= self._quota_bytes

    def _remove(self, key: Key) -> None:
        piece = self._pieces.pop(key)
        self._disk_bytes -= piece.disk_bytes
        if piece.file is not None:
            piece.file.close()

    def _fetch(self, key: Key, piece: _Piece) -> None:
        shard, start = key
        try:
            piece.file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # owned by the piece
            self._repository.fetch(self._repository.name.path(shard), start, piece.num_bytes, piece.file.write)
            piece.file.flush()
        except OSError as fault:
            raise formats.CheckpointError(
                f"{self._folder}: a piece of {shard} cannot be written ({fault.strerror}); free some space, or give "
                "less with --stream-space"
            ) from fault
        with self._changed:
            piece.is_complete = True
            self.fetched_bytes += piece.num_bytes
            self._changed.notify_all()
