"""Names of packs and checkpoints on the hub: `owner/repository:variant@revision`.

The variant is a folder of the repository; the revision is a branch, a tag or a commit. Both can be left out.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from moe_pack.formats import CheckpointError
from moe_pack.formats.base import commands

_REPOSITORY = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"({_REPOSITORY})(?::([A-Za-z0-9][\w.-]{{0,95}}))?(?:@([A-Za-z0-9][\w./-]{{0,127}}))?", re.ASCII)
NAME_FORM = "owner/repository[:variant][@revision]"

# Disk space for a checkpoint that is read without being downloaded: the default, and the least.
STREAM_BYTES, LEAST_STREAM_BYTES = 4 << 30, 8 << 20


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, or a folder of it."""

    repository: str
    variant: str = ""  # the folder; empty: the top one
    revision: str | None = None  # None: `main`

    def text(self) -> str:
        """Returns the name as a user types it."""
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.repository}{variant}" + ("" if self.revision is None else f"@{self.revision}")

    def path(self, file: str) -> str:
        """Returns the path within the repository of a file of the variant."""
        return f"{self.variant}/{file}" if self.variant else file


def parse_name(text: str) -> HubName | None:
    """Returns the name that a text is; None if it is none, such as an absolute path."""
    match = _NAME.fullmatch(text)
    return None if match is None else HubName(match[1], match[2] or "", match[3])


def source_name(source: str) -> HubName:
    """Returns the name on the hub that a source is, which is no path, or that its short name stands for.

    Raises:  CheckpointError if it is neither, or a path to a file that is no checkpoint.
    """
    from moe_pack.formats.families import short_names

    path = Path(source)
    if path.exists():
        raise CheckpointError(
            f"{source}: is a file, expected the folder with config.json and the weights, or a .gguf file"
        )
    name = parse_name(short_names().get(source.lower(), source))
    if name is not None:
        return name
    beside = commands.names_beside(path, ".gguf")
    if "/" in source or source.endswith(".gguf"):
        similar = commands.did_you_mean(path.name, beside)
        raise CheckpointError(f"{source}: no such file or folder, and no name of the hub (owner/name){similar}")
    similar = commands.did_you_mean(source, [*beside, *short_names()], "moe-pack convert --list prints all names")
    raise CheckpointError(f"{source}: no such file or folder, and no known model has this name{similar}")
