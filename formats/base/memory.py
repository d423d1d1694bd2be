"""Memory and users on every operating system."""

import mmap
import os
import sys


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Returns zeroed memory of this process alone, which begins at a page.

    Raises:  OSError or OverflowError if there is not enough.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


def peak_resident_bytes() -> int | None:
    """Returns the peak memory of this process, including mapped files; None where the system does not say it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def user_number() -> int:
    """Returns the number of the user who runs this process; 0 where users have none."""
    return os.getuid() if hasattr(os, "getuid") else 0
