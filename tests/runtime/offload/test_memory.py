"""The memory that is said to be available: the machine's, and less in a control group."""

import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from moe_pack.runtime import available_bytes, give_back_freed
from moe_pack.runtime.engine.machine import anonymous_bytes

GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


def test_there_is_memory_and_this_process_holds_some() -> None:
    available, held = available_bytes(), anonymous_bytes()
    if available is None or held is None:
        pytest.skip("this system does not say")
    assert available > MIB and held > MIB


def test_what_was_freed_between_things_in_use_is_given_back() -> None:
    held = [bytes(60_000) for _ in range(1_000)]  # 60 MB, below what glibc maps apart
    kept = held[::50]
    del held
    before = anonymous_bytes()
    give_back_freed()
    after = anonymous_bytes()
    if before is None or after is None:
        pytest.skip("this system does not say")
    assert before - after > 25 * MIB and len(kept) == 20


HELD_AFTER_FREEING = """
import numpy as np
from moe_pack.runtime import give_back_large_at_once
from moe_pack.runtime.engine.machine import anonymous_bytes
{call}
first = np.ones(28 << 20, np.uint8)
del first  # glibc raises its bound
large, small = [], []
for _ in range(10):
    large.append(np.ones(8 << 20, np.uint8))
    small.append(bytes(1 << 20))  # too large for a hole that imports left
before = anonymous_bytes()
del large
print(before - anonymous_bytes() if before is not None else "unknown")
"""


@pytest.mark.parametrize(("call", "given_back"), [("", 0), ("give_back_large_at_once()", 80 * MIB)])
def test_large_memory_is_given_back_at_once_if_asked_for(call: str, given_back: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELD_AFTER_FREEING.format(call=call)], capture_output=True, text=True, check=True
    )
    if ended.stdout.strip() == "unknown" or platform.libc_ver()[0] != "glibc":
        pytest.skip("this system does not say, or does not need it")
    assert abs(int(ended.stdout) - given_back) < 16 * MIB


NUM_HEAPS = """
import ctypes, threading
from moe_pack.runtime.engine.machine import use_one_heap
{call}
libc, together = ctypes.CDLL(None), threading.Barrier(12)
def allocate():
    together.wait()
    libc.malloc(ctypes.c_size_t(1000))
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have one heap")
def test_threads_share_a_heap_if_asked_for() -> None:
    def heaps(call: str) -> int:
        command = [sys.executable, "-c", NUM_HEAPS.format(call=call)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("<heap nr=")

    assert heaps("use_one_heap()") <= 2 < heaps("")  # libraries may have made one before


def available_in(group: Path) -> int:
    """Returns the memory that is available to a child of this process in a control group."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads, which it leaves be
        child = os.fork()
    if child == 0:
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            os.write(writing, str(available_bytes()).encode())
        finally:
            os._exit(0)  # whatever happened, the child must not go on as its parent
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    os.waitpid(child, 0)
    return int(said)


def test_a_control_group_leaves_less() -> None:
    group = GROUPS / "moe-pack-test-memory"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 * MIB))
    except OSError as fault:
        pytest.skip(f"no memory cgroup can be made: {fault}")
    inner = group / "inner"  # of no limit of its own
    try:
        inner.mkdir()
        assert 0 < available_in(group) <= 300 * MIB
        assert 0 < available_in(inner) <= 300 * MIB
    finally:
        inner.rmdir()
        group.rmdir()
