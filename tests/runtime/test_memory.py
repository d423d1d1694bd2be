"""What memory is said to be available: the machine's, and less in a control group."""

import subprocess
import sys
from pathlib import Path

import pytest

from moe_pack.runtime.memory import anonymous_bytes, available_bytes

GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


def test_there_is_memory_and_this_process_holds_some() -> None:
    available, held = available_bytes(), anonymous_bytes()
    if available is None or held is None:
        pytest.skip("this system does not say")
    assert available > MIB and held > MIB


def test_what_was_freed_between_things_in_use_is_given_back() -> None:
    script = """
from moe_pack.runtime.memory import anonymous_bytes, give_back_freed
held = [bytes(60_000) for _ in range(4_000)]  # 240 MB, below what glibc maps apart
kept = held[::50]
del held
before = anonymous_bytes()
give_back_freed()
print(before, anonymous_bytes())
"""
    command = [sys.executable, "-c", script]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if before == "None":
        pytest.skip("this system does not say")
    assert int(before) - int(after) > 100 * MIB


def test_a_control_group_leaves_less() -> None:
    group = GROUPS / "moe-pack-test-memory"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 * MIB))
    except OSError as fault:
        pytest.skip(f"no memory cgroup can be made: {fault}")
    try:
        script = (
            f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from moe_pack.runtime.memory import available_bytes; print(available_bytes())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert 0 < int(done.stdout) <= 300 * MIB
    finally:
        group.rmdir()
