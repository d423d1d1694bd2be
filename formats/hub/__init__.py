"""Packs and checkpoints on the hub: their names, downloads, and checkpoints that are read without being downloaded."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.hub.names import LEAST_STREAM_BYTES, STREAM_BYTES, HubName, parse_name
    from moe_pack.formats.hub.repository import HubRepository, cached_snapshot, has_repository, import_client, patiently
    from moe_pack.formats.hub.streamed import StreamedFiles
else:
    __getattr__ = face(__name__)

__all__ = [
    "LEAST_STREAM_BYTES",
    "STREAM_BYTES",
    "HubName",
    "HubRepository",
    "StreamedFiles",
    "cached_snapshot",
    "has_repository",
    "import_client",
    "parse_name",
    "patiently",
]
