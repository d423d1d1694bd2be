"""Where figures come from: the checkpoint, told from others of its shape, and the packages that took part."""

import hashlib
from importlib.metadata import PackageNotFoundError

from moe_pack.formats import SOURCE_FILE, Checkpoint, Pack, PackageVersion, account_bytes, installed_version

_PACKAGES = ("hqq", "moe-pack", "numpy", "torch")


def source_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's account of files and tensors, then the bytes of its routers, layer by layer.

    Not of all weights, which would take as long as the statistics; but a model trained further has other routers.
    """
    digest = hashlib.sha256(account_bytes(*checkpoint.account()))
    for layer in checkpoint.spec.moe_layers:
        source = checkpoint.dense_source(f"layers.{layer}.router")
        digest.update(checkpoint.rows(source, 0, source.num_rows).data)
    return digest.hexdigest()


def packed_source_digest(pack: Pack) -> str:
    """The `source_digest` of the checkpoint that a pack was made from: routers are kept in the source's bytes."""
    digest = hashlib.sha256(pack.read_file(SOURCE_FILE).data)
    routers = {f"layers.{layer}.router" for layer in pack.spec.moe_layers}
    for held in pack.layout.dense:
        if held.role.name in routers:
            digest.update(pack.read_dense(held.entry, 0, held.entry.shape[0]).data)
    return digest.hexdigest()


def made_with() -> tuple[PackageVersion, ...]:
    """The installed versions, those of packages that are not there left out."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(PackageVersion(name, installed_version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
