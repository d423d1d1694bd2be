"""Finds a checkpoint: a folder, a GGUF file; or on the hub by name, downloaded if it is not cached, or streamed."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_pack import formats
from moe_pack.formats import hub
from moe_pack.formats.families import checkpoint_files, weight_files
from moe_pack.formats.gguf import files
from moe_pack.formats.gguf.header import part_paths
from moe_pack.formats.hub.names import source_name

_WANTED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")


def find_checkpoint(
    source: str, progress: formats.Progress = formats.NO_PROGRESS
) -> Path | checkpoint_files.CheckpointFiles:
    """Returns the folder of the checkpoint that `source` names; of GGUF, the open files, which `Checkpoint` closes.

    A folder is returned as it is, unless its weights are GGUF files. A hub id (`owner/name`, with a folder and a
    revision of it as `owner/name:folder@v1`, or with a quantization of GGUF files as `owner/name:Q4_K_M`) or a short
    name (`mixtral`) is looked up in the hub's local cache, and downloaded to it if it is missing or incomplete there.
    Raises:  CheckpointError with what was searched, and where.
    """
    path = Path(source)
    if (gguf := files.find_gguf(path)) is not None:
        others = [name for name in weight_files.file_names(path) if not name.endswith(".gguf")] if path.is_dir() else []
        return files.GgufFiles(gguf, weight_files.unused_notes(others, ()))
    if path.is_dir():
        return path
    name = source_name(source)
    searched = f"{source}: no such file or folder, and the hub id {name.text()} is not in the cache"
    snapshot = hub.cached_snapshot(name, formats.CheckpointError)
    if snapshot is not None:
        folder = snapshot / name.variant
        if is_complete(folder):
            return folder
        if (gguf := _cached_gguf(name, snapshot)) is not None:
            return files.GgufFiles(gguf)
        searched = f"{source}: the hub id {name.text()} is only partly in the cache"
    searched = f"{searched} {_cache()}"
    with _said(searched):
        repository = hub.HubRepository(name, formats.CheckpointError)
        if paths := _gguf_paths(name, repository.files):
            snapshot = repository.download(paths, progress=progress)
            gguf = files.find_gguf(snapshot / paths[0])
            assert gguf is not None, f"{paths[0]} is a GGUF file"
            return files.GgufFiles(gguf)
    wanted = (*_WANTED, *_shards(name, repository, searched))
    with _said(searched):
        patterns = [name.path(pattern) for pattern in wanted]
        folder = repository.download(patterns, (name.path("*/*"),), progress) / name.variant
    if not is_complete(folder):
        raise formats.CheckpointError(f"{searched}, and the hub does not have its config.json")
    return folder


@contextmanager
def _said(searched: str) -> Iterator[None]:
    """Says in the error of a download what was searched before."""
    try:
        yield
    except formats.CheckpointError as fault:
        raise formats.CheckpointError(f"{searched}; the download failed: {fault}") from fault


def _shards(name: hub.HubName, repository: hub.HubRepository, searched: str) -> tuple[str, ...]:
    """Returns the names of the files with the weights of a checkpoint on the hub.

    Raises:  CheckpointError as `find_weights`, or if the index cannot be fetched.
    """

    def read_index() -> object:
        path = name.path(weight_files.INDEX)
        with _said(searched):
            raw = repository.read(path, 0, repository.files[path].num_bytes)
        checkpoint_files.check_small_file(raw, weight_files.INDEX)
        return formats.parse(raw.tobytes(), weight_files.INDEX, formats.CheckpointError, is_foreign=True)

    return weight_files.find_weights(name.text(), repository.names(), read_index).shards


def _gguf_paths(name: hub.HubName, paths: Iterable[str]) -> list[str]:
    """Returns which of a repository's files are the GGUF model of a variant, which its name has as a word: Q4_K_M."""
    word = re.compile(rf"(^|[-.]){re.escape(name.variant)}([-.]|$)", re.IGNORECASE)
    return sorted(path for path in paths if name.variant and path.endswith(".gguf") and word.search(Path(path).name))


def _cached_gguf(name: hub.HubName, snapshot: Path) -> Path | None:
    """Returns the GGUF file of a variant in a snapshot of the cache; None if it is not there with all its parts."""
    for path in _gguf_paths(name, (str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf"))):
        with suppress(formats.CheckpointError):
            return part_paths(snapshot / path)[0]
    return None


def open_streamed(
    source: str, folder: Path, quota_bytes: int = hub.STREAM_BYTES
) -> Path | checkpoint_files.CheckpointFiles:
    """Returns the files of a checkpoint on the hub that is not downloaded whole; its folder if the cache has it.

    Args:    folder: on whose disk pieces of it are, at most `quota_bytes` at a time.
    Raises:  UsageError if the source is on this disk; CheckpointError if the hub does not have it, or has it as GGUF
             files that are not in the cache.
    """
    if Path(source).exists():
        raise formats.UsageError(f"--stream reads from the hub, and {source} is on this disk; remove --stream")
    name = source_name(source)
    snapshot = hub.cached_snapshot(name, formats.CheckpointError)
    if snapshot is not None and is_complete(snapshot / name.variant):
        return snapshot / name.variant
    if snapshot is not None and (gguf := _cached_gguf(name, snapshot)) is not None:
        return files.GgufFiles(gguf)
    repository = hub.HubRepository(name, formats.CheckpointError)
    if paths := _gguf_paths(name, repository.files):
        revision = "" if name.revision is None else f" --revision {name.revision}"
        raise formats.CheckpointError(
            f"{source}: GGUF files cannot be streamed; download them first: hf download {name.repository} "
            f"{' '.join(paths)}{revision}"
        )
    return hub.StreamedFiles(repository, folder, quota_bytes)


def _cache() -> Any:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def is_complete(folder: Path) -> bool:
    """Returns whether a cached snapshot has its config and every shard that its index names, or the single file."""
    if not (folder / "config.json").exists():
        return False
    index, shards = folder / weight_files.INDEX, {weight_files.SINGLE}
    if index.exists():
        shards = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text("utf-8", "replace")))
    is_single = (folder / weight_files.SINGLE).exists() and weight_files.SINGLE not in shards
    return is_single or all((folder / shard).exists() for shard in shards)
