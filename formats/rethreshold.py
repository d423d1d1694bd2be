"""Rewrites the thresholds of a finished pack, which lie outside its experts, so that it can be killed at any moment.

Two files change, the thresholds and the manifest that has their digest, and only one rename is atomic: the manifest's
is the commit. The new thresholds lie beside their place before it, whole and on the drive, and readers take from there
what the manifest lists (`Pack`); after it they are renamed to their place. Specified in docs/format.md.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_pack.formats.errors import PlanError
from moe_pack.formats.index import NEW_THRESHOLDS_FILE, THRESHOLDS_FILE, thresholds_bytes, thresholds_fault
from moe_pack.formats.manifest import MANIFEST_FILE, ContentFile, Manifest, manifest_bytes, root_digest
from moe_pack.formats.pack import Pack, is_listed
from moe_pack.formats.spec import ModelSpec
from moe_pack.formats.steps import Step, SteppedFolder, pass_step


def rewrite_thresholds(
    folder: Path, thresholds: NDArray[np.float32], on_step: Callable[[Step], None] = pass_step
) -> str:
    """Gives a pack these thresholds and returns its new root digest; nothing changes if it has them already.

    Killed at any moment it leaves a pack with all of the old or all of the new ones. `conversion` stays: it tells what
    the experts are, and the same `convert` command still finds its pack.

    Args:    thresholds: [L, E].   on_step: called before each change to the drive.
    Raises:  PlanError for a threshold that is negative or no number, or another shape; PackError if the folder holds
             no sound pack; ConversionError if it is in use, or its drive refuses.
    """
    assert thresholds.dtype == np.float32, thresholds.dtype
    drive = SteppedFolder(folder, on_step)
    drive.lock("a conversion or another change of thresholds is writing here; wait for it, or stop it")
    try:
        with Pack(folder) as pack:  # all but the experts' bytes is checked before anything changes
            manifest = pack.manifest
        _check(thresholds, manifest.model)
        finish_rewrite(drive, manifest)
        raw = thresholds_bytes(thresholds)
        changed = _with_thresholds(manifest, raw)
        if changed.root != manifest.root:
            drive.write_file(NEW_THRESHOLDS_FILE, raw)
            drive.sync_folder()
            drive.replace(MANIFEST_FILE, manifest_bytes(changed))  # from here on the new ones are the pack's
            drive.rename(NEW_THRESHOLDS_FILE, THRESHOLDS_FILE)
        return changed.root
    finally:
        drive.close()


def finish_rewrite(drive: SteppedFolder, manifest: Manifest) -> None:
    """Ends what a killed rewrite left in a locked pack: in place what its manifest lists, else removed.

    Nothing is done, not even a step, where nothing is left.
    """
    if is_listed(drive.folder / NEW_THRESHOLDS_FILE, _listed(manifest)):
        drive.rename(NEW_THRESHOLDS_FILE, THRESHOLDS_FILE)
    for name in (NEW_THRESHOLDS_FILE, f"{MANIFEST_FILE}.tmp"):
        if (drive.folder / name).is_file():
            drive.unlink(name)  # not synced: should its name come back, no reader cares


def _listed(manifest: Manifest) -> ContentFile:
    return next(file for file in manifest.files if file.name == THRESHOLDS_FILE)


def _with_thresholds(manifest: Manifest, raw: bytes) -> Manifest:
    """The manifest of the same pack with these bytes as its thresholds."""
    old, new = _listed(manifest), ContentFile(THRESHOLDS_FILE, len(raw), hashlib.sha256(raw).hexdigest())
    files = tuple(new if file == old else file for file in manifest.files)
    grown, totals = new.bytes - old.bytes, manifest.totals  # not 0 where another program laid the old ones out
    return replace(
        manifest,
        files=files,
        totals=replace(totals, tables=totals.tables + grown, content=totals.content + grown),
        root=root_digest(files, manifest.expert_files),
    )


def _check(thresholds: NDArray[np.float32], spec: ModelSpec) -> None:
    shape = (len(spec.moe_layers), spec.router.num_experts)
    if thresholds.shape != shape:
        raise PlanError(f"thresholds: shape {list(thresholds.shape)}, expected {list(shape)}: layers and experts")
    fault = thresholds_fault(thresholds)
    if fault:
        raise PlanError(f"thresholds: {fault}")
