"""The folder of an export: shards of a bounded size, and small files. A kill costs at most a shard.

A shard is written under another name, flushed, and renamed when it is complete. `config.json`, without which no program
takes the folder for a checkpoint, comes last. Until then a file has the export's decisions, so that the same command
continues where it stopped, and another one is refused.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack import formats
from moe_pack.convert.export import weights
from moe_pack.convert.export.source import CONFIG_FILE
from moe_pack.formats.base.commands import Stage
from moe_pack.formats.pack import safetensors, writer

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MARK_FILE = "export.json"
SHARD_BYTES = 5 << 30
_FORMAT = {"format": "pt"}  # without it, transformers refuses a file


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A file of an export before it is written."""

    name: str
    units: tuple[weights.ExportUnit, ...]
    layout: safetensors.TensorFileLayout


class ShardFormat:
    """The format of an export's files: safetensors here, GGUF in gguf.py."""

    def num_bytes(self, tensors: tuple[safetensors.StoredTensor, ...]) -> int:
        """Returns the bytes of some tensors."""
        return weights.tensor_bytes(tensors)

    def shards(self, groups: Sequence[tuple[weights.ExportUnit, ...]]) -> list[Shard]:
        """Returns the files with these groups of units, in the order in which they are written."""
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        shards = []
        for name, group in zip(names if len(groups) > 1 else [SINGLE_FILE], groups, strict=True):
            layout = safetensors.lay_out_plain((tensor for unit in group for tensor in unit.tensors), _FORMAT)
            shards.append(Shard(name, group, layout))
        return shards

    def small_files(self, shards: Sequence[Shard]) -> dict[str, bytes]:
        """Returns the small files that the format needs: the index, which says the shard of each tensor."""
        if len(shards) == 1:
            return {}
        stored = {tensor: shard.name for shard in shards for unit in shard.units for tensor in unit.tensors}
        weight_map = {name: shard for (name, _, _), shard in stored.items()}
        values = {
            "metadata": {"total_size": weights.tensor_bytes(tuple(stored))},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return {INDEX_FILE: json.dumps(values, indent=2).encode() + b"\n"}


SAFETENSORS = ShardFormat()


def shards_of(units: Sequence[weights.ExportUnit], shard_bytes: int, form: ShardFormat) -> list[Shard]:
    """Returns the shards of some units: each as large as `shard_bytes` allows, but for a unit that is larger alone."""
    groups, size = list[list[weights.ExportUnit]](), 0
    for unit in units:
        num_bytes = form.num_bytes(unit.tensors)
        if not groups or size + num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += num_bytes
    return form.shards([tuple(group) for group in groups])


def write_folder(
    folder: Path,
    units: Sequence[weights.ExportUnit],
    files: Mapping[str, bytes],
    decisions: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
    progress: formats.Progress = formats.NO_PROGRESS,
    on_step: Callable[[writer.Step], None] = writer.pass_step,
    form: ShardFormat = SAFETENSORS,
) -> tuple[int, int]:
    """Writes a checkpoint folder; continues where a killed run stopped.

    Returns: the bytes of the tensors, and the bytes of shards that an earlier run has written.
    Args:    files: the small files with their bytes; `config.json` comes last if it is one.   decisions: what decides
             the bytes; a run that continues must have the same.   on_step: called before each change of the disk.
    Raises:  ConversionError if the folder has other files or lacks space, or if a write fails.
    """
    shards, disk = shards_of(units, shard_bytes, form), writer.SteppedFolder(folder, on_step)
    files = {**form.small_files(shards), **files}
    mark = json.dumps(dict(decisions), indent=1, sort_keys=True).encode() + b"\n"
    try:
        disk.make()
        disk.lock("another process writes this folder; wait for it, or give another --output")
        missing = _begin(disk, folder, shards, files, mark)
        total = sum(shard.layout.num_bytes for shard in shards)
        left = sum(shard.layout.num_bytes for shard in missing)
        if left > disk.free_bytes():
            raise formats.ConversionError(
                f"{folder}: needs {formats.size_text(left)}, but only {formats.size_text(disk.free_bytes())} are free; "
                "free some space, or give a folder on another disk"
            )
        progress.begin(Stage("exporting", total, "B", total - left))
        for shard in missing:
            _write_shard(disk, shard, progress, form)
        progress.end()
        for name in sorted(files, key=lambda name: (name == CONFIG_FILE, name)):
            disk.replace(name, files[name])
        disk.unlink(MARK_FILE)
        disk.sync_folder()
    finally:
        disk.close()
    return sum(form.num_bytes(unit.tensors) for unit in units), total - left


def _begin(
    disk: writer.SteppedFolder, folder: Path, shards: list[Shard], files: Mapping[str, bytes], mark: bytes
) -> list[Shard]:
    """Checks what is in the folder, marks it as an unfinished export, and returns the shards that it lacks."""
    found = {path.name for path in folder.iterdir()} - {f"{MARK_FILE}.tmp"}
    ours = {MARK_FILE, *files, *(shard.name for shard in shards)}
    ours |= {f"{name}{ending}" for name in ours for ending in (".part", ".tmp")}
    if found and MARK_FILE not in found:
        raise formats.ConversionError(f"{folder}: is not empty; give a new folder")
    if found and ((folder / MARK_FILE).read_bytes() != mark or found - ours):
        raise formats.ConversionError(
            f"{folder}: has an unfinished export of another pack or with other options; remove the folder, or give "
            "another"
        )
    if not found:
        disk.replace(MARK_FILE, mark)
    return [shard for shard in shards if shard.name not in found or not _is_complete(folder, shard)]


def _is_complete(folder: Path, shard: Shard) -> bool:
    """Returns whether a file has the size and the header of a shard; a file under a shard's name was flushed before."""
    with formats.RangeReader(folder / shard.name, formats.ConversionError) as reader:
        header = shard.layout.header
        return reader.num_bytes == shard.layout.num_bytes and reader.read(0, len(header)).tobytes() == header


def _write_shard(disk: writer.SteppedFolder, shard: Shard, progress: formats.Progress, form: ShardFormat) -> None:
    part, places = f"{shard.name}.part", shard.layout.by_name()
    disk.open(part)
    disk.truncate(part, 0)
    disk.truncate(part, shard.layout.num_bytes)
    disk.write(part, memoryview(shard.layout.header), 0)

    def put(tensor: str, start: int, raw: NDArray[np.uint8]) -> None:
        entry = places[tensor]
        assert start + len(raw) <= entry.num_bytes, f"{tensor}: {len(raw)} bytes at {start} of {entry.num_bytes}"
        disk.write(part, raw.data, entry.offset + start)

    progress.advance(len(shard.layout.header))
    for unit in shard.units:
        unit.write(put)
        progress.advance(form.num_bytes(unit.tensors), unit.name)
    disk.sync(part)
    disk.rename(part, shard.name)
