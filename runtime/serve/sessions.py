"""Sessions: sequences in files, which survive a restart of the server and a lack of slots.

A session is one safetensors file: the tokens of a sequence, the keys and values of layers that keep the whole context,
the checkpoints (copies of states and windows), and as its last tensor a JSON object of facts. The facts are the pack's
root digest, the `--kv-dtype`, the positions of the checkpoints, a CRC-32 of each tensor and the object's own SHA-256.
The file is written under another name, synced and renamed. A session of another pack or `--kv-dtype` is left alone.

A session contains conversations: its file and a new folder are for the server's user alone. It only saves time, so a
damaged file or disk costs no more than a warning.
"""

import errno
import hashlib
import logging
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_pack import formats
from moe_pack.formats import load
from moe_pack.formats.base import json_files
from moe_pack.formats.pack import safetensors
from moe_pack.runtime.model import caches, kv_cache

LEAST_TOKENS = 64  # of a session; a shorter one is computed as fast
_SUFFIX, _VERSION = ".session", 3
_ALIGN = 64
_MOST_JSON_BYTES = 4 << 20  # of the header, and of the facts; a model of a thousand layers needs less
_OTHERS = 0o077  # the permissions of a file that are not its owner's
_CRC = re.compile(r"[0-9a-f]{8}")
_LOG = logging.getLogger("moe_pack.serve")

Ids = NDArray[np.int64]


class SessionError(formats.RunError):
    """A session that is damaged, or belongs to another pack."""


@dataclass(frozen=True, slots=True)
class SessionOwner:
    """The pack of a session, and how the server runs it."""

    root_digest: str
    context_tokens: int  # of the longest sequence
    vocab_size: int
    kv_dtype: caches.KvDtype = "f32"


@dataclass(frozen=True, slots=True)
class _Facts:
    """The JSON object of a session, without the checksums of tensors."""

    version: int
    root_digest: str
    kv_dtype: str
    checkpoints: tuple[json_files.Positive, ...] | None
    sha256: str


@dataclass(frozen=True, slots=True)
class _Session:
    """A session's file."""

    path: Path
    ids: Ids
    checkpoints: tuple[int, ...] | None  # positions, rising; None if the sequence can be cut back anywhere
    num_bytes: int

    def num_common(self, prompt: Ids) -> int:
        """Returns how many tokens of a prompt the session has, at most all but the last."""
        most = min(len(self.ids), len(prompt) - 1)
        differs = np.flatnonzero(self.ids[:most] != prompt[:most])
        same = int(differs[0]) if len(differs) else most
        if self.checkpoints is None:
            return same
        return max((place for place in self.checkpoints if place <= same), default=0)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The places of the tensors in an open session, and the CRC-32 of each, by name."""

    reader: formats.RangeReader
    entries: dict[str, safetensors.TensorEntry]
    crcs: dict[str, str]


class SessionStore:
    """The sessions of a folder; those used least recently are deleted when they take more than `most_bytes`.

    Args:    folder: is made, for this user alone, if it is missing.   owner: the sessions have to fit it.
    Raises:  RunError if the folder cannot be made or read.
    """

    def __init__(self, folder: Path, owner: SessionOwner, most_bytes: int) -> None:
        self._folder, self._owner, self._most_bytes = folder, owner, most_bytes
        self._sessions: list[_Session] = []  # the one used last comes last
        self.num_failed = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = sorted(os.listdir(folder))
            is_open = os.name == "posix" and folder.stat().st_mode & _OTHERS
        except OSError as fault:
            raise formats.RunError(
                f"--sessions: {folder} cannot be used ({fault.strerror}); give another folder"
            ) from fault
        if is_open:  # not changed: it may be a folder that others need, as /tmp
            _LOG.warning("--sessions: other users can read or list %s; run chmod -R go= %s", folder, folder)
        for name in names:
            if name.endswith(f"{_SUFFIX}.tmp"):  # of a server that was killed
                _delete(folder / name)
        found: list[tuple[int, _Session]] = []
        for path in (folder / name for name in names if name.endswith(_SUFFIX)):
            try:
                with formats.RangeReader(path, SessionError) as reader:
                    found.append((path.stat().st_mtime_ns, self._content(path, reader)[0]))
            except Exception as fault:  # whatever a file is or has, the server starts
                _leave_alone(path, fault)
        self._sessions += [session for _, session in sorted(found, key=lambda each: each[0])]

    @property
    def num_bytes(self) -> int:
        """The bytes of all sessions."""
        return sum(session.num_bytes for session in self._sessions)

    def save(self, sequence: kv_cache.CachedSequence) -> bool:
        """Saves a sequence in place of the sessions that it continues; returns whether it is on the disk.

        A full or broken disk is no error: the sequence will be computed again.
        """
        if sequence.num_tokens < LEAST_TOKENS:
            return False
        ids = np.array(sequence.ids[: sequence.num_tokens], np.int64)
        for session in self._sessions:
            if len(session.ids) >= len(ids) and np.array_equal(session.ids[: len(ids)], ids):
                return True
        try:
            self._write(sequence, ids)
        except Exception as fault:  # as MemoryError
            self.num_failed += 1
            what = "the disk is full" if isinstance(fault, OSError) and fault.errno == errno.ENOSPC else _words(fault)
            _LOG.warning("a session of %d tokens was not saved: %s", len(ids), what)
            return False
        return True

    def load(self, prompt_ids: list[int], sequence: kv_cache.CachedSequence, kept: int) -> bool:
        """Loads the session that has most in common with a prompt, if that is well above `kept` tokens.

        A damaged session is left alone, and the next best one is loaded.
        Args:    sequence: is replaced; it is empty if all such sessions were damaged.
        """
        prompt = np.array(prompt_ids, np.int64)
        while True:
            best = max(self._sessions, key=lambda session: session.num_common(prompt), default=None)
            if best is None or best.num_common(prompt) < kept + LEAST_TOKENS:
                return False
            self._forget(best)
            try:
                self._read(best, sequence)
            except Exception as fault:
                sequence.reset()
                _leave_alone(best.path, fault)
                continue
            self._sessions.append(best)
            with suppress(OSError):  # its time says only which session was used last
                os.utime(best.path)
            return True

    def _forget(self, session: _Session) -> None:
        self._sessions = [each for each in self._sessions if each is not session]

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _write(self, sequence: kv_cache.CachedSequence, ids: Ids) -> None:
        sequence.save_checkpoint()
        tensors = {"ids": torch.from_numpy(ids)}
        for number, part in enumerate(sequence.cache.whole_parts(len(ids))):
            tensors[f"whole.{number}"] = part
        checkpoints = None if sequence.cache.is_cut_anywhere else sequence.checkpoints
        for checkpoint in checkpoints or ():
            for number, part in enumerate(sequence.cache.used_parts(checkpoint)):
                tensors[f"checkpoint.{checkpoint.num_tokens}.{number}"] = part
        positions = None if checkpoints is None else tuple(checkpoint.num_tokens for checkpoint in checkpoints)
        facts_bytes = len(self._facts(positions, dict.fromkeys(tensors, 0)))
        stored = [[(name, _DTYPES[part.dtype], tuple(part.shape))] for name, part in tensors.items()]
        layout = safetensors.lay_out([*stored, [("facts", "U8", (facts_bytes,))]], _ALIGN)
        name = hashlib.sha256(ids.tobytes()).hexdigest()[:24]
        path, temporary = self._folder / f"{name}{_SUFFIX}", self._folder / f"{name}{_SUFFIX}.tmp"
        self._make_room(layout.num_bytes)
        entries, crcs = layout.by_name(), dict[str, int]()
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
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
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        for session in [each for each in self._sessions if np.array_equal(each.ids, ids[: len(each.ids)])]:
            if _delete(session.path):  # this one goes on from it
                self._forget(session)
        self._sessions.append(_Session(path, ids, positions, layout.num_bytes))

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:  # before another one is deleted for it
            raise OSError(errno.EFBIG, "it is larger than all sessions may be; raise --sessions-size")
        while self._sessions and self.num_bytes + num_bytes > self._most_bytes:
            self._sessions[0].path.unlink(missing_ok=True)
            self._forget(self._sessions[0])

    def _facts(self, positions: tuple[int, ...] | None, crcs: dict[str, int]) -> bytes:
        return json_files.sealed(
            {
                "version": _VERSION,
                "root_digest": self._owner.root_digest,
                "kv_dtype": self._owner.kv_dtype,
                "checkpoints": None if positions is None else list(positions),
                "crc32": {name: f"{crc:08x}" for name, crc in crcs.items()},
            }
        )

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _content(self, path: Path, reader: formats.RangeReader) -> tuple[_Session, _Tensors]:
        """Reads a session without its keys, values and states; allocates at most the tokens of the context.

        Raises:  SessionError if it is damaged or does not fit.
        """
        place, owner = path.name, self._owner
        file_bytes = reader.num_bytes
        length = safetensors.header_length(
            reader.read(0, min(8, file_bytes)).tobytes(), place, file_bytes, SessionError
        )
        _check_json_bytes("header", length)
        raw = reader.read(8, length).tobytes()
        entries = {entry.name: entry for entry in safetensors.header_entries(raw, place, file_bytes, SessionError)}
        ids_entry, facts_entry = entries.get("ids"), entries.pop("facts", None)
        entries = {name: entry for name, entry in entries.items() if not name.startswith("pad.")}
        if facts_entry is None or ids_entry is None or ids_entry.dtype != "I64" or len(ids_entry.shape) != 1:
            raise SessionError("is no session")
        _check_json_bytes("facts", facts_entry.num_bytes)
        facts, crcs = self._checked_facts(reader.read(facts_entry.offset, facts_entry.num_bytes).tobytes())
        if not 0 < ids_entry.shape[0] <= owner.context_tokens:
            raise SessionError(f"it has {ids_entry.shape[0]:,} tokens, this server's context {owner.context_tokens:,}")
        if crcs.keys() != entries.keys():
            raise SessionError("facts: crc32 does not name exactly the file's tensors")
        ids = np.empty(ids_entry.shape[0], np.int64)
        tensors = _Tensors(reader, entries, crcs)
        _fill(tensors, "ids", torch.from_numpy(ids))
        if ids.min() < 0 or ids.max() >= owner.vocab_size:
            raise SessionError("ids: has tokens that are not in the vocabulary")
        positions = facts.checkpoints
        if positions is not None and (positions[-1:] != (len(ids),) or any(b <= a for a, b in pairwise(positions))):
            raise SessionError("facts: checkpoints do not rise to the number of tokens")
        return _Session(path, ids, positions, file_bytes), tensors

    def _checked_facts(self, raw: bytes) -> tuple[_Facts, dict[str, str]]:
        values: Any = formats.parse(raw, "facts", SessionError)
        if not isinstance(values, dict) or values.get("version") != _VERSION:
            raise SessionError("it was written by another version")
        try:
            json_files.check_seal(raw, "facts")
        except formats.PackError as fault:
            raise SessionError(str(fault)) from fault
        crcs = values.pop("crc32", None)
        if not isinstance(crcs, dict) or not all(isinstance(crc, str) and _CRC.fullmatch(crc) for crc in crcs.values()):
            raise SessionError("facts: crc32 is not an object of checksums")
        facts = load(_Facts, values, "facts", SessionError)
        if facts.root_digest != self._owner.root_digest:
            raise SessionError("it belongs to another pack")
        if facts.kv_dtype != self._owner.kv_dtype:
            raise SessionError("its keys and values are of another --kv-dtype")
        return facts, crcs

    def _read(self, session: _Session, sequence: kv_cache.CachedSequence) -> None:
        """Fills a sequence from a session's file.

        Raises:  SessionError if it is damaged, or its caches are not those of this server.
        """
        sequence.reset()
        cache, number, positions = sequence.cache, len(session.ids), session.checkpoints
        if cache.is_cut_anywhere != (positions is None):
            raise SessionError("its caches are of another kind than this server's")
        with formats.RangeReader(session.path, SessionError) as reader:
            found, tensors = self._content(session.path, reader)
            if found.checkpoints != positions or not np.array_equal(found.ids, session.ids):
                raise SessionError("it was changed by another program")
            parts = {f"whole.{place}": part for place, part in enumerate(cache.whole_parts(number))}
            rooms: list[kv_cache.Checkpoint] = sequence.room_for(len(positions or ()))
            read = (positions or ())[len(positions or ()) - len(rooms) :]
            for room, position in zip(rooms, read, strict=True):
                room.num_tokens = position
                parts |= {f"checkpoint.{position}.{idx}": part for idx, part in enumerate(cache.used_parts(room))}
            unread = tuple(f"checkpoint.{position}." for position in positions or () if position not in read)
            if {name for name in tensors.entries if not name.startswith(unread)} != {"ids", *parts}:
                raise SessionError("its caches have other tensors than this server's")
            for name, part in parts.items():
                _fill(tensors, name, part)
        sequence.ids = session.ids.tolist()
        if positions is None:
            cache.num_tokens = number
        elif not rooms:
            raise SessionError("this server has no room for its checkpoints")
        else:
            cache.return_to_checkpoint(rooms[-1])


def _delete(path: Path) -> bool:
    """Deletes a file; returns whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError as fault:
        _leave_alone(path, fault)
        return False
    return True


def _leave_alone(path: Path, fault: Exception) -> None:
    # A name may have line ends, or bytes that are no characters.
    name = path.name if path.name.isprintable() else ascii(path.name)
    _LOG.warning("session %s is left alone: %s", name, _words(fault).removeprefix(f"{path.name}: "))


def _words(fault: Exception) -> str:
    """Returns the message of a fault, without a path."""
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault) or type(fault).__name__


def _check_json_bytes(what: str, num_bytes: int) -> None:
    if num_bytes > _MOST_JSON_BYTES:
        raise SessionError(f"{what} of {num_bytes:,} bytes, at most {_MOST_JSON_BYTES:,}")


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in the order of its values, without a copy of all of them."""
    if tensor.is_contiguous():
        yield tensor.view(-1).view(torch.uint8).numpy().data
        return
    for part in tensor:
        yield from _pieces(part)


def _fill(tensors: _Tensors, name: str, tensor: Tensor) -> None:
    """Reads the values of a tensor from a session. Raises: SessionError if it has another shape, or another CRC-32."""
    entry = tensors.entries[name]
    if entry.shape != tuple(tensor.shape) or entry.dtype != _DTYPES[tensor.dtype]:
        raise SessionError("its caches have another shape than this server's")
    offset, crc = entry.offset, 0
    for piece in _pieces(tensor):
        tensors.reader.read_into(offset, piece)
        crc, offset = zlib.crc32(piece, crc), offset + len(piece)
    if tensors.crcs[name] != f"{crc:08x}":
        raise SessionError(f"{name} is damaged")
