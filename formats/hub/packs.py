"""Packs on the hub: those of a repository, and their downloads, whole and checked.

A repository has a pack at its top, or several, each in a folder of its own, its variant. A downloaded pack is in the
hub's cache; a mark in its folder says that it was checked.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from moe_pack import formats
from moe_pack.formats.base import commands
from moe_pack.formats.hub import names
from moe_pack.formats.hub.repository import HubRepository, Patience, cached_snapshot
from moe_pack.formats.pack.manifests import MANIFEST_FILE
from moe_pack.formats.pack.reader import audit


def find_pack(folder: Path, progress: formats.Progress = formats.NO_PROGRESS, patience: Patience | None = None) -> Path:
    """Returns the folder of the pack that a path or a name of the hub leads to.

    A path that exists, or is no name of the hub, is returned as it is. A name is looked up in the hub's cache; a pack
    that is not whole there is downloaded, and each of its bytes is checked.
    Raises:  PackError if the hub or its disk fails, the repository has no such pack, or the download is damaged.
    """
    name = None if folder.exists() else names.parse_name(str(folder))
    if name is None:
        return folder
    snapshot = cached_snapshot(name, formats.PackError)
    found = None if snapshot is None else _cached(name, snapshot)
    if found is not None:
        return found
    try:
        return _downloaded(name, progress, patience)
    except formats.PackError as fault:
        if not folder.parent.exists():
            raise
        similar = commands.did_you_mean(folder.name, commands.names_beside(folder))
        raise formats.PackError(f"{folder}: no such folder{similar} (as a name of the hub: {fault})") from fault


def _cached(name: names.HubName, snapshot: Path) -> Path | None:
    """Returns the pack's folder in a snapshot; None if it is not complete."""
    manifests = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob(MANIFEST_FILE)]
    variants = _variants(manifests)
    variant = name.variant or ("" if "" in variants else variants[0] if len(variants) == 1 else None)
    if variant is None or variant not in variants or not (snapshot / variant / _CHECKED).exists():
        return None
    return snapshot / variant


_CHECKED = ".moe-pack-checked"  # written in the snapshot when all bytes were checked


def _downloaded(name: names.HubName, progress: formats.Progress, patience: Patience | None) -> Path:
    repository = HubRepository(name, formats.PackError, patience)
    variant = _chosen(name, _variants(repository.files))
    top = f"{variant}/" if variant else ""
    listed = [path for path in repository.files if path.startswith(top) and "/" not in path.removeprefix(top)]
    _check_space(name, repository, listed)
    folder = repository.download(listed, progress=progress) / variant
    try:
        with formats.Pack(folder) as pack:
            audit(pack, progress)
    except formats.PackError as fault:
        for path in listed:  # otherwise the client takes them as downloaded
            link = folder.parent / path if variant else folder / path
            link.resolve().unlink(missing_ok=True)
            link.unlink(missing_ok=True)
        raise formats.PackError(
            f"{name.text()}: the download was damaged, and is removed ({fault}); run the same command again"
        ) from fault
    (folder / _CHECKED).touch()
    return folder


def _variants(paths: Iterable[str]) -> list[str]:
    """Returns the folders with a pack, sorted; the repository's own is the empty one."""
    return sorted(path[: -len(MANIFEST_FILE)].rstrip("/") for path in paths if Path(path).name == MANIFEST_FILE)


def _chosen(name: names.HubName, variants: list[str]) -> str:
    """Returns the folder of the pack that a name means. Raises PackError if there is none, or several."""
    others = ", ".join(f"{name.repository}:{variant}" for variant in variants if variant)
    if not variants:
        raise formats.PackError(
            f"{name.text()}: the repository has no pack; moe-pack convert makes one of a checkpoint"
        )
    if name.variant in variants:
        return name.variant
    if name.variant:
        raise formats.PackError(
            f"{name.text()}: the repository has no pack {name.variant}; it has {others or name.repository}"
        )
    if len(variants) > 1:
        raise formats.PackError(f"{name.text()}: the repository has {len(variants)} packs; give one of {others}")
    return variants[0]


def _check_space(name: names.HubName, repository: HubRepository, paths: list[str]) -> None:
    """Refuses a download that the cache's disk cannot take."""
    cache = repository.cache
    cache.mkdir(parents=True, exist_ok=True)
    present = cached_snapshot(name, formats.PackError)
    missing = [p for p in paths if present is None or not (present / p).exists()]
    needed, free = sum(repository.files[p].num_bytes for p in missing), shutil.disk_usage(cache).free
    if needed > free:
        raise formats.PackError(
            f"{name.text()}: the download needs {formats.size_text(needed)} in {cache}, where "
            f"{formats.size_text(free)} are free; free some, or set HF_HUB_CACHE to a folder on a larger disk"
        )
