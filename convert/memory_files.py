"""Folders in memory: a pack in a file system that has no drive, with a link to it where it was asked for."""

import hashlib
import os
import re
from pathlib import Path

from moe_pack.formats import ConversionError

_MOUNTS = Path("/proc/mounts")
_MEMORY = Path("/proc/meminfo")
_PLACES = ("/dev/shm", "/run/shm", "/tmp")


def link_memory_folder(output: Path, needed_bytes: int) -> Path:
    """Makes `output` a link to a folder of its own in memory, and returns that folder; both may be there already.

    Args:    needed_bytes: what will be written there.
    Raises:  ConversionError if `output` is something else, or memory has no room or no file system for it.
    """
    place = _memory_place()
    name = hashlib.sha256(str(output.absolute()).encode()).hexdigest()[:12]
    folder = place / f"moe-pack-{os.getuid()}-{name}"
    if output.is_symlink():
        if output.readlink() != folder:
            raise ConversionError(f"{output}: links to {output.readlink()}, not to a pack in memory; remove it")
    elif output.exists():
        raise ConversionError(f"{output}: is there already; --in-memory makes a link of this name, give another one")
    if folder.is_symlink() or (folder.exists() and folder.stat().st_uid != os.getuid()):
        raise ConversionError(f"{folder}: belongs to somebody else; give another output folder")
    _check_room(place, needed_bytes - _held_bytes(folder))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not output.is_symlink():
            output.parent.mkdir(parents=True, exist_ok=True)
            output.symlink_to(folder)
    except OSError as fault:
        raise ConversionError(f"{output}: cannot be made a link to {folder} ({fault.strerror})") from fault
    return folder


def _memory_place() -> Path:
    lines = _MOUNTS.read_text("utf-8").splitlines() if _MOUNTS.exists() else []
    mounts = [line.split(" ") for line in lines]
    in_memory = {fields[1] for fields in mounts if fields[2] in ("tmpfs", "ramfs")}
    for place in _PLACES:
        if place in in_memory and os.access(place, os.W_OK):
            return Path(place)
    raise ConversionError(
        f"--in-memory: found no file system in memory to write to (tmpfs at {', '.join(_PLACES)}); leave it out"
    )


def _held_bytes(folder: Path) -> int:
    """What an earlier run has already taken."""
    return sum(512 * path.stat().st_blocks for path in folder.iterdir()) if folder.exists() else 0


def _check_room(place: Path, needed_bytes: int) -> None:
    drive = os.statvfs(place)
    room = drive.f_bavail * drive.f_frsize
    if room < needed_bytes:
        raise ConversionError(
            f"--in-memory: {place} has {room:,} bytes free, expected {needed_bytes:,}; "
            "give fewer --layers, or leave it out"
        )
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text("utf-8"), re.MULTILINE)
    if found and 1024 * int(found[1]) < needed_bytes:
        raise ConversionError(
            f"--in-memory: this machine has {1024 * int(found[1]):,} bytes of memory free, expected {needed_bytes:,}; "
            "give fewer --layers, or leave it out"
        )
