"""Converts a streamed source on a small disk of its own, killed again and again: a script for a mount namespace.

    unshare -rm python small_disk.py SOURCE OUTPUT

The disk is a tmpfs with the space for the pack, the pieces and little more; what needs more fails. It prints the number
of kills, the size of the disk and the most that was used, as JSON, and copies the pack to OUTPUT.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STREAM_BYTES = 8 << 20
PACK_BYTES = 45 << 20
SLACK_BYTES = 2 << 20
NUM_KILLS = 4


def used_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def main() -> None:
    source, output = sys.argv[1], Path(sys.argv[2])
    disk, chance = Path(tempfile.mkdtemp()), random.Random(31)
    size = PACK_BYTES + STREAM_BYTES + SLACK_BYTES
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", source, "-o", str(disk / "pack"), "--stream"]
    command += ["--stream-space", str(STREAM_BYTES), "--selector-bits", "2", "--record-bits", "2"]
    command += ["--dense-bits", "source", "--quantizer", "nearest", "--codec", "affine", "--group-size", "64"]
    command += ["--workers", "2"]
    kills = most = 0
    while True:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = None
        while process.poll() is None:
            most = max(most, used_bytes(disk))
            if until is None and (disk / "pack").exists():
                until = time.monotonic() + chance.uniform(0.05, 1.5)
            if kills < NUM_KILLS and until is not None and time.monotonic() > until:
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
            time.sleep(0.002)
        if process.returncode == 0:
            break
        if process.returncode != -signal.SIGKILL:
            assert process.stderr is not None
            sys.exit(process.stderr.read())
    shutil.copytree(disk / "pack", output)
    sys.stdout.write(json.dumps({"kills": kills, "disk_bytes": size, "most_bytes": most}))


if __name__ == "__main__":
    main()
