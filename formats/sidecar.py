"""Sidecars: what was measured on a pack, as JSON beside it. No part of its content, and worth nothing with another.

A sidecar names the root digest it was measured for; when the pack has another by now it is stale, as good as missing.
Those that hold arrays are in `tensor_sidecar`. Specified in docs/format.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moe_pack.formats import strict_json
from moe_pack.formats.errors import PackError
from moe_pack.formats.manifest import COPIED_FILES, MANIFEST_FILE, REQUIRED_FILES
from moe_pack.formats.ranges import RangeReader
from moe_pack.formats.seal import check_seal, sealed
from moe_pack.formats.steps import SteppedFolder, pass_step

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
    drive.lock(f"another command is writing here; wait for it, or stop it, before {name} is written")
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
