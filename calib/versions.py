"""The packages that decide what is measured."""

from importlib.metadata import PackageNotFoundError, version

from moe_pack.formats import PackageVersion

_PACKAGES = ("hqq", "moe-pack", "numpy", "torch")


def made_with() -> tuple[PackageVersion, ...]:
    """The installed versions, those of packages that are not there left out."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(PackageVersion(name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
