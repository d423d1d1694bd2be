"""What operating systems do differently: the only modules that ask for a function of one of them."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.formats.base.files import (
        DIRECT_FLAG,
        READ_FLAGS,
        WRITE_FLAGS,
        FolderLock,
        drop_cached,
        lock_file,
        read_at,
        sync_folder,
        write_at,
    )
    from moe_pack.formats.base.memory import anonymous_memory, peak_resident_bytes, user_number
else:
    __getattr__ = face(__name__)

__all__ = [
    "DIRECT_FLAG",
    "READ_FLAGS",
    "WRITE_FLAGS",
    "FolderLock",
    "anonymous_memory",
    "drop_cached",
    "lock_file",
    "peak_resident_bytes",
    "read_at",
    "sync_folder",
    "user_number",
    "write_at",
]
