"""The version of moe-pack, and those of the packages it works with."""

from importlib.metadata import version

VERSION = "0.1.0"  # pyproject.toml reads it here


def installed_version(package: str) -> str:
    """Returns a package's version; moe-pack's own also where it runs from its source folders, not installed.

    Raises:  PackageNotFoundError if the package is not installed.
    """
    return VERSION if package == "moe-pack" else version(package)
