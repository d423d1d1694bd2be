"""On a system without Linux's calls a pack is made, checked and run, and its bytes and text are those of Linux."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.models import TESTS, PackMaker

# What Windows lacks, taken away before anything of ours is imported; other packages saw the whole system before.
ABSENT = """
import mmap, os, shutil, subprocess, sys, types
import torch, tqdm
shutil.disk_usage = lambda folder: types.SimpleNamespace(free=1 << 40)  # Python's own has another call on Windows
sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["readline"] = None
for name in (
    "preadv", "pread", "pwrite", "pwritev", "posix_fadvise", "sched_getaffinity", "statvfs", "fstatvfs", "getuid",
    "O_DIRECT", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK",
):
    delattr(os, name)
for name in ("MAP_PRIVATE", "MAP_ANONYMOUS"):
    delattr(mmap, name)
locked = {}
def locking(descriptor, mode, num_bytes):
    file = os.fstat(descriptor).st_ino
    if file in locked:
        raise PermissionError(13, "Permission denied")
    locked[file] = descriptor
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
if "--without-kernels" in sys.argv:
    sys.argv.remove("--without-kernels")
    sys.modules["moe_pack.runtime.cpu._native"] = None
"""
COMMAND = ABSENT + "from moe_pack.ROOM.cli.main import main; main()"
PLAIN = "from moe_pack.ROOM.cli.main import main; main()"


def call(room: str, *arguments: object, source: str = COMMAND) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source.replace("ROOM", room), *map(str, arguments)]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True)


@pytest.mark.slow
def test_a_pack_made_without_the_calls_of_linux_has_the_same_bytes(tiny_source: Path, tmp_path: Path) -> None:
    packs = {}
    for name, source in (("absent", COMMAND), ("linux", PLAIN)):
        folder = tmp_path / name / "packed"
        options = ("-o", folder, "--group-size", 16, "--quantizer", "nearest")
        made = call("convert", "convert", tiny_source, *options, source=source)
        assert made.returncode == 0, made.stderr
        assert [path.name for path in folder.parent.iterdir()] == ["packed"]  # no lock file is left
        packs[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert packs["absent"] == packs["linux"]


@pytest.mark.slow
def test_a_pack_runs_without_the_calls_of_linux_and_gives_the_same_text(demo_pack: PackMaker) -> None:
    options = ("--prompt", "It was", "--temperature", 0, "-n", 12, "--budget", "9M", "--stats")
    run = call("runtime", demo_pack("up", 4), *options, "--without-kernels")
    assert run.returncode == 0, run.stderr
    assert "torch" in run.stderr and "bypassing" not in run.stderr
    plain = call("runtime", demo_pack("up", 4), *options, source=PLAIN)
    assert run.stdout == plain.stdout and len(run.stdout.split()) > 3


@pytest.mark.slow
def test_direct_reads_are_refused_where_the_system_has_none(demo_pack: PackMaker) -> None:
    options = ("--prompt", "It was", "-n", 2, "--budget", "9M")
    refused = call("runtime", demo_pack("up", 4), *options, "--read", "direct")
    assert refused.returncode == 1
    assert "has no direct reads; use --read pread or auto" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["", ABSENT])
def test_a_folder_is_locked_for_one_writer(absent: str, tmp_path: Path) -> None:
    source = absent + (
        "from pathlib import Path; from moe_pack.formats.base import FolderLock; folder = Path(sys.argv[1])\n"
        "first = FolderLock(folder)\n"
        "try:\n    FolderLock(folder)\nexcept BlockingIOError:\n    print('busy')\n"
        "first.close()\n"
    )
    done = call("", tmp_path, source="import sys\n" + source)
    assert (done.stdout, done.returncode) == ("busy\n", 0), done.stderr
