"""Sessions: sequences on the disk, so that they survive a restart of the server and the lack of a slot.

A session is one safetensors file. It has the tokens of a sequence, the keys and values of layers that keep the whole
context, the checkpoints (a copy of states and of windows), and as its last tensor a JSON object of facts: the pack's
root digest, how keys and values are stored, the positions of the checkpoints, and a CRC-32 of each tensor. It is
written to another name, synced and renamed. It belongs to one pack and one `--kv-dtype`: another one's is left alone
and never loaded.
"""

import errno
import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack.formats import RangeReader, RunError, canonical, parse
from moe_pack.formats.safetensors import TensorEntry, lay_out, read_header
from moe_pack.runtime.model.caches import CachedSequence, Checkpoint, KvDtype

LEAST_TOKENS = 64  # of a session; a shorter one is computed as fast
_SUFFIX, _VERSION = ".session", 2
_ALIGN = 64
_LOG = logging.getLogger("moe_pack.serve")

Ids = NDArray[np.int64]


class SessionError(RunError):
    """A session that is damaged, or belongs to another pack."""


@dataclass(slots=True)
class _Session:
    """A session's file. `checkpoints`: positions, rising; None if the sequence can be cut back anywhere."""

    path: Path
    ids: Ids
    checkpoints: tuple[int, ...] | None
    num_bytes: int

    def num_common(self, prompt: Ids) -> int:
        """Returns how many tokens of a prompt, at most all but the last, it could give."""
        most = min(len(self.ids), len(prompt) - 1)
        differs = np.flatnonzero(self.ids[:most] != prompt[:most])
        same = int(differs[0]) if len(differs) else most
        if self.checkpoints is None:
            return same
        return max((place for place in self.checkpoints if place <= same), default=0)


class SessionStore:
    """The sessions of a folder, at most so many bytes: those that were not used for longest are deleted.

    Args:    folder: is made if it is missing.   root_digest: of the pack.   most_bytes: of all sessions together.
             kv_dtype: of the caches.
    Raises:  RunError if the folder cannot be made or read.
    """

    def __init__(self, folder: Path, root_digest: str, most_bytes: int, kv_dtype: KvDtype = "f32") -> None:
        self._folder, self._root_digest, self._most_bytes = folder, root_digest, most_bytes
        self._kv_dtype = kv_dtype
        self._sessions: list[_Session] = []  # the one used last comes last
        self.num_saved = self.num_loaded = self.num_failed = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
            for leftover in folder.glob(f"*{_SUFFIX}.tmp"):  # of a server that was killed
                leftover.unlink(missing_ok=True)
        except OSError as fault:
            raise RunError(f"--sessions: {folder} cannot be used ({fault.strerror}); give another folder") from fault
        for path in paths:
            try:
                self._sessions.append(self._open(path))
            except RunError as fault:
                _LOG.warning("session %s is left alone: %s", path.name, fault)

    @property
    def num_bytes(self) -> int:
        """The bytes of all sessions."""
        return sum(session.num_bytes for session in self._sessions)

    def save(self, sequence: CachedSequence) -> bool:
        """Saves a sequence, in place of the sessions that it goes on from; returns whether it is on the disk.

        A disk that is full, or fails, is no error: the sequence will be computed again.
        """
        if sequence.num_tokens < LEAST_TOKENS:
            return False
        ids = np.array(sequence.ids[: sequence.num_tokens], np.int64)
        for session in self._sessions:
            if len(session.ids) >= len(ids) and np.array_equal(session.ids[: len(ids)], ids):
                return True
        try:
            self._write(sequence, ids)
        except OSError as fault:
            self.num_failed += 1
            what = "the disk is full" if fault.errno == errno.ENOSPC else fault.strerror
            _LOG.warning("a session of %d tokens was not saved: %s", len(ids), what)
            return False
        self.num_saved += 1
        return True

    def load(self, prompt_ids: Sequence[int], sequence: CachedSequence, kept: int) -> bool:
        """Loads the session that has most in common with a prompt, if that is well above `kept` tokens.

        Args:    sequence: is replaced; on an error it is empty.
        Raises:  SessionError if the session is damaged; it is deleted.
        """
        prompt = np.array(prompt_ids, np.int64)
        best = max(self._sessions, key=lambda session: session.num_common(prompt), default=None)
        if best is None or best.num_common(prompt) < kept + LEAST_TOKENS:
            return False
        self._sessions.remove(best)
        try:
            self._read(best, sequence)
        except RunError as fault:
            sequence.reset()
            best.path.unlink(missing_ok=True)
            raise SessionError(f"{best.path.name}: {fault}") from fault
        self._sessions.append(best)
        with suppress(OSError):  # its time says only which session was used last
            os.utime(best.path)
        self.num_loaded += 1
        return True

    # ---- files ------------------------------------------------------------------------------------------------------

    def _write(self, sequence: CachedSequence, ids: Ids) -> None:
        sequence.save_checkpoint()
        tensors = {"ids": torch.from_numpy(ids)}
        for number, part in enumerate(sequence.cache.whole_parts(len(ids))):
            tensors[f"whole.{number}"] = part
        checkpoints = None if sequence.cache.is_cut_anywhere else sequence.checkpoints
        for place, checkpoint in enumerate(checkpoints or ()):
            for number, part in enumerate(sequence.cache.used_parts(checkpoint)):
                tensors[f"checkpoint.{place}.{number}"] = part
        positions = None if checkpoints is None else tuple(checkpoint.num_tokens for checkpoint in checkpoints)
        facts_bytes = len(self._facts(positions, dict.fromkeys(tensors, 0)))
        stored = [[(name, _DTYPES[part.dtype], tuple(part.shape))] for name, part in tensors.items()]
        layout = lay_out([*stored, [("facts", "U8", (facts_bytes,))]], _ALIGN)
        name = hashlib.sha256(ids.tobytes()).hexdigest()[:24]
        path, temporary = self._folder / f"{name}{_SUFFIX}", self._folder / f"{name}{_SUFFIX}.tmp"
        self._make_room(layout.num_bytes)
        entries, crcs = layout.by_name(), dict[str, int]()
        try:
            with temporary.open("wb") as file:
                file.write(layout.header)
                for each, part in tensors.items():
                    file.write(bytes(entries[each].offset - file.tell()))
                    crcs[each] = 0
                    for piece in _pieces(part):
                        crcs[each] = zlib.crc32(piece, crcs[each])
                        file.write(piece)
                file.write(bytes(entries["facts"].offset - file.tell()))
                file.write(self._facts(positions, crcs))
                file.write(bytes(layout.num_bytes - file.tell()))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # a signal's exception too
            temporary.unlink(missing_ok=True)
            raise
        for session in [each for each in self._sessions if np.array_equal(each.ids, ids[: len(each.ids)])]:
            self._sessions.remove(session)  # this one goes on from it
            session.path.unlink(missing_ok=True)
        self._sessions.append(_Session(path, ids, positions, layout.num_bytes))

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            raise OSError(errno.EFBIG, "it is larger than all sessions may be; raise --sessions-size")
        while self._sessions and self.num_bytes + num_bytes > self._most_bytes:
            self._sessions.pop(0).path.unlink(missing_ok=True)

    def _facts(self, positions: tuple[int, ...] | None, crcs: dict[str, int]) -> bytes:
        return canonical(
            {
                "version": _VERSION,
                "root_digest": self._root_digest,
                "kv_dtype": self._kv_dtype,
                "checkpoints": None if positions is None else list(positions),
                "crc32": {name: f"{crc:08x}" for name, crc in crcs.items()},
            }
        )

    def _open(self, path: Path) -> _Session:
        entries = {entry.name: entry for entry in read_header(path, SessionError)}
        with RangeReader(path, SessionError) as reader:
            facts = self._read_facts(path, entries, reader)
            ids = reader.read(entries["ids"].offset, entries["ids"].num_bytes).view(np.int64)
        places = facts["checkpoints"]
        positions = None if places is None else tuple(places)
        return _Session(path, ids, positions, path.stat().st_size)

    def _read_facts(self, path: Path, entries: dict[str, TensorEntry], reader: RangeReader) -> dict[str, Any]:
        if "facts" not in entries or "ids" not in entries or entries["ids"].dtype != "I64":
            raise SessionError(f"{path.name}: is no session")
        raw = reader.read(entries["facts"].offset, entries["facts"].num_bytes).tobytes()
        facts: Any = parse(raw, f"{path.name}: facts", SessionError)
        if not isinstance(facts, dict) or facts.get("version") != _VERSION or not isinstance(facts.get("crc32"), dict):
            raise SessionError(f"{path.name}: was written by another version")
        if facts.get("root_digest") != self._root_digest:
            raise SessionError(f"{path.name}: belongs to another pack")
        if facts.get("kv_dtype") != self._kv_dtype:
            raise SessionError(f"{path.name}: its keys and values are of another --kv-dtype")
        return facts

    def _read(self, session: _Session, sequence: CachedSequence) -> None:
        """Fills a sequence with a session, straight from the disk."""
        sequence.reset()
        path, number = session.path, len(session.ids)
        entries = {entry.name: entry for entry in read_header(path, SessionError)}
        if number > sequence.cache.context_tokens:
            raise SessionError("its context is longer than this server's")
        with RangeReader(path, SessionError) as reader:
            crcs = self._read_facts(path, entries, reader)["crc32"]
            for place, part in enumerate(sequence.cache.whole_parts(number)):
                _fill(reader, f"whole.{place}", part, entries, crcs)
            rooms: list[Checkpoint] = []
            if session.checkpoints is not None:
                rooms = sequence.room_for(len(session.checkpoints))
                first = len(session.checkpoints) - len(rooms)
                for place, room in enumerate(rooms, start=first):
                    room.num_tokens = session.checkpoints[place]
                    for idx, part in enumerate(sequence.cache.used_parts(room)):
                        _fill(reader, f"checkpoint.{place}.{idx}", part, entries, crcs)
        sequence.ids = session.ids.tolist()
        if session.checkpoints is None:
            sequence.cache.num_tokens = number
        elif not rooms or rooms[-1].num_tokens != number:
            raise SessionError("it has no checkpoint at its end")
        else:
            sequence.cache.return_to_checkpoint(rooms[-1])


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in the order of its values, without a copy of the whole."""
    if tensor.is_contiguous():
        yield tensor.view(-1).view(torch.uint8).numpy().data
        return
    for part in tensor:
        yield from _pieces(part)


def _fill(
    reader: RangeReader, name: str, tensor: Tensor, entries: dict[str, TensorEntry], crcs: dict[str, Any]
) -> None:
    """Reads a tensor of a session into memory that is there.

    Raises:  SessionError if it has another shape, or another CRC-32.
    """
    entry = entries.get(name)
    if entry is None or entry.shape != tuple(tensor.shape) or entry.dtype != _DTYPES[tensor.dtype]:
        raise SessionError("its caches have another shape than this server's")
    offset, crc = entry.offset, 0
    for piece in _pieces(tensor):
        reader.read_into(offset, piece)
        crc, offset = zlib.crc32(piece, crc), offset + len(piece)
    if crcs.get(name) != f"{crc:08x}":
        raise SessionError(f"{name} is damaged")
