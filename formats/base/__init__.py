"""The base of all rooms: errors, JSON, options of commands, and files of every operating system."""

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
