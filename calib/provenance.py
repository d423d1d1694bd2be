"""Where figures come from: the checkpoint, told from others of its shape, and the packages that took part."""

import hashlib
from importlib.metadata import PackageNotFoundError, version

from moe_pack.formats import Checkpoint, PackageVersion, account_bytes

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


def made_with() -> tuple[PackageVersion, ...]:
    """The installed versions, those of packages that are not there left out."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(PackageVersion(name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
