"""What commands share that take a pack: a folder, or a name of the hub."""

from pathlib import Path

from moe_pack.formats.cli import TerminalProgress
from moe_pack.formats.hub.packs import find_pack


def pack_folder(pack: Path) -> Path:
    """Returns the folder of a command's pack; one on the hub is downloaded and checked first, with progress.

    Raises:  PackError as `find_pack`.
    """
    with TerminalProgress() as progress:
        return find_pack(pack, progress)
