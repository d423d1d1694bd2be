"""`moe-pack convert --target-vram` killed at random moments and after a plan, and begun again until it ends."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.killing import different_files
from support.models import BOOK, TinyMixtral
from support.profiles import folder_bytes

NUM_KILLS = int(os.environ.get("MOE_PACK_KILLS", "2"))
SEED = int(os.environ.get("MOE_PACK_SEED", "7"))

pytestmark = pytest.mark.slow  # some ten processes that load torch, a minute or two


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyMixtral(num_layers=2, num_experts=4, vocab_size=4096, config={"num_experts_per_tok": 2})
    return shape.write_with_tokenizer(tmp_path_factory.mktemp("source"))


def begin(source: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """The command in a process of its own: it profiles, plans, converts and measures."""
    goal = ["--target-vram", "16M", "--device", "cpu", "--context", "64", "--max-loss", "0.02"]
    text = ["--eval-data", str(BOOK), "--eval-tokens", "512"]
    command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(source), "-o", str(folder / "packed")]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1"}
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen([*command, *goal, *text], stdout=log, stderr=log, env=environment)


def await_attempt(log: Path, num_seen: int, process: "subprocess.Popen[bytes]") -> None:
    """Waits until a process has made a plan, which it tells after the first `num_seen` characters, or has ended."""
    while process.poll() is None and "attempt " not in log.read_text()[num_seen:]:
        time.sleep(0.02)


def test_killed_at_random_moments_it_ends_in_the_pack_of_a_whole_run(source: Path, tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    assert begin(source, folders[0]).wait() == 0, (tmp_path / "whole.log").read_text()
    generator, kills = random.Random(SEED), 0
    print(f"MOE_PACK_SEED={SEED} MOE_PACK_KILLS={NUM_KILLS}")  # noqa: T201  # pytest shows it with a failure
    log = tmp_path / "killed.log"
    for number in range(NUM_KILLS + 1):
        num_seen = len(log.read_text()) if log.exists() else 0
        process, seconds = begin(source, folders[1]), generator.uniform(3, 12)
        if number == NUM_KILLS:  # the last time after a plan: what follows must not depend on it
            await_attempt(log, num_seen, process)
            seconds = 0.1
        try:
            assert process.wait(seconds) == 0, log.read_text()
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    assert kills > 0
    assert begin(source, folders[1]).wait() == 0, log.read_text()
    whole, killed = (folder_bytes(folder) for folder in folders)
    different = different_files(killed, whole)
    for name in different:  # which numbers, and after which stages it was killed, tells why
        old, new = (np.frombuffer(files.get(name, b""), np.uint8) for files in (whole, killed))
        places = np.flatnonzero(old != new) if len(old) == len(new) else []
        print(name, len(old), len(new), len(places), places[:20])  # noqa: T201  # pytest shows it with a failure
        if name.endswith(".json"):
            print(whole.get(name, b"").decode(), killed.get(name, b"").decode())  # noqa: T201  # likewise
    assert different == [], log.read_text()
