"""Finds a checkpoint: a folder, a GGUF file; or a hub id or short name, downloaded if it is not in the cache."""

import re
from pathlib import Path

from moe_pack.formats import CheckpointError
from moe_pack.formats.families import SHORT_NAMES
from moe_pack.formats.families.checkpoint_files import CheckpointFiles
from moe_pack.formats.gguf import GgufFiles, find_gguf

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors"]
_UNWANTED = ["consolidated*", "original/*", "*/*"]  # other files with the same weights


def find_checkpoint(source: str) -> Path | CheckpointFiles:
    """Returns the folder of the checkpoint that `source` names; of GGUF, the open files, which `Checkpoint` closes.

    A folder is returned as it is, unless its weights are GGUF files. A hub id (`owner/name`) or a short name
    (`mixtral`) is looked up in the hub's local cache, and downloaded to it if it is missing or incomplete there.
    Raises:  CheckpointError with what was searched, and where.
    """
    path = Path(source)
    if (gguf := find_gguf(path)) is not None:
        return GgufFiles(gguf)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(
            f"{source}: is a file, expected the folder with config.json and the weights, or a .gguf file"
        )
    hub_id = SHORT_NAMES.get(source.lower(), source)
    if not _HUB_ID.fullmatch(hub_id):
        known = ", ".join(sorted(SHORT_NAMES))
        raise CheckpointError(f"{source}: is not a folder, a hub id (owner/name) or a short name ({known})")
    return _from_hub(source, hub_id)


def _from_hub(source: str, hub_id: str) -> Path:
    try:
        from huggingface_hub import constants, snapshot_download
    except ModuleNotFoundError as fault:
        raise CheckpointError(
            f"{source}: no such folder; to look up the hub id {hub_id}, pip install 'moe-pack[convert]'"
        ) from fault
    cache = constants.HF_HUB_CACHE

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                hub_id,
                cache_dir=cache,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=local_files_only,
            )
        )

    searched = f"{source}: no such folder, and the hub id {hub_id} is not in the cache {cache}"
    try:
        folder = snapshot(local_files_only=True)
        if is_complete(folder):
            return folder
        searched = f"{source}: the hub id {hub_id} is only partly in the cache {cache}"
    except OSError:
        pass  # it is not in the cache, or only partly: ask the hub
    try:
        folder = snapshot(local_files_only=False)
        if is_complete(folder):
            return folder
        raise OSError("the hub cannot be reached, or does not have the weights as safetensors")
    except (OSError, ValueError) as fault:  # no network, id or permission; an id that the hub does not allow
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        raise CheckpointError(f"{searched}; the download failed: {reason}") from fault


def is_complete(folder: Path) -> bool:
    """Returns whether a cached snapshot has its config and every shard that its index names (or the single file)."""
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists():
        return False
    if not index.exists():
        return (folder / "model.safetensors").exists()
    shards = set(re.findall(r'"([^"/]+\.safetensors)"', index.read_text(encoding="utf-8")))
    return all((folder / shard).exists() for shard in shards)
