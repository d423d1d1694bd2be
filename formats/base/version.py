"""The versions of moe-pack and of the packages that it uses."""

VERSION = "0.1.0"  # pyproject.toml reads it here


def installed_version(package: str) -> str:
    """Returns a package's version; moe-pack's own also if it runs from source and is not installed.

    Raises:  PackageNotFoundError if the package is not installed.
    """
    from importlib.metadata import version  # takes longer to import than everything else that --version needs

    return VERSION if package == "moe-pack" else version(package)
