"""What commands share that plan for a memory: what was measured of this machine."""

from pathlib import Path

from moe_pack.formats.cli import cache_folder
from moe_pack.runtime import MachineFacts, load_facts


def known_facts(folder: Path) -> MachineFacts | None:
    """What `doctor` measured of this machine and of the drive that holds a folder, which need not be there yet.

    Raises:  RunError if what was kept is damaged.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return load_facts(cache_folder(), there)
