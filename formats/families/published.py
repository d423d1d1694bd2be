"""The `config.json` of published models, shipped with the package: dimensions without a download.

configs/README.md names the source of each.
"""

from importlib.resources import files
from typing import Any

from moe_pack import formats
from moe_pack.formats.base.commands import did_you_mean
from moe_pack.formats.families.registry import short_names

_SUFFIX = ".json"


def published_names() -> tuple[str, ...]:
    """Returns the names of the models whose `config.json` is in the package, sorted."""
    names = (file.name for file in files("moe_pack.formats.families").joinpath("configs").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def published_name(source: str) -> str:
    """Returns the published model that a name means, in any of its spellings.

    Raises:  CheckpointError for a name of none, which is no path either.
    """
    names, hub_id = published_names(), short_names().get(source.lower())
    for name in names:
        if name == source.lower() or short_names()[name] == hub_id:
            return name
    similar = did_you_mean(source, names, "moe-pack synth --list prints all names")
    raise formats.CheckpointError(f"{source}: no such file or folder, and no known model has this name{similar}")


def published_config(name: str) -> dict[str, Any]:
    """Returns the values of a published `config.json`.

    Args:    name: one of `published_names`.
    """
    path = files("moe_pack.formats.families").joinpath("configs", f"{name}{_SUFFIX}")
    values: dict[str, Any] = formats.parse(path.read_bytes(), path.name, formats.CheckpointError)
    return values
