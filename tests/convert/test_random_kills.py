"""The command killed from outside at random moments, and repeated, writes the bytes of one that ran undisturbed."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.killing import different_files, files_in
from support.models import DEMO_MODEL

NUM_KILLS = int(os.environ.get("MOE_PACK_KILLS", "3"))
SEED = int(os.environ.get("MOE_PACK_SEED", "2024"))
POLL_SECONDS = 0.002


def start(out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "moe_pack.convert.cli", "convert", str(DEMO_MODEL), "-o", str(out)]
    # Nearest: HQQ computes ten seconds between the same writes, in which a kill shows nothing.
    options = ["--workers", "2", "--quantizer", "nearest"]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_folder(process: "subprocess.Popen[str]", out: Path) -> None:
    """Waits out the start-up, which writes nothing: a kill there would show nothing."""
    while not out.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(POLL_SECONDS)


def finish(process: "subprocess.Popen[str]") -> None:
    _, said = process.communicate()
    assert process.returncode == 0, said


def killed_after(seconds: float, out: Path) -> bool:
    """Kills a conversion so long after it made its folder; False if it had ended by then."""
    process = start(out)
    wait_for_folder(process, out)
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return process.returncode != 0


@pytest.mark.slow
def test_killed_from_outside_at_random_moments_and_repeated_it_writes_the_same_bytes(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    undisturbed = start(whole)
    wait_for_folder(undisturbed, whole)
    began = time.monotonic()
    finish(undisturbed)
    duration = time.monotonic() - began
    expected = files_in(whole)
    assert "manifest.json" in expected

    print(f"MOE_PACK_SEED={SEED} MOE_PACK_KILLS={NUM_KILLS}")  # noqa: T201  # pytest shows it with a failure
    chance = random.Random(SEED)
    unlike: dict[int, list[str]] = {}
    unfinished = 0
    for number in range(NUM_KILLS):
        out = tmp_path / f"killed-{number}"
        # One moment in each part of the whole: early, amid the experts, and near the end.
        seconds = duration * (number + chance.random()) / NUM_KILLS
        # The machine may be quicker this time; the first kill is to meet an unfinished pack.
        while not killed_after(seconds, out) or (number == 0 and (out / "manifest.json").exists()):
            shutil.rmtree(out)
            seconds *= 0.8
        unfinished += not (out / "manifest.json").exists()
        finish(start(out))
        if different := different_files(files_in(out), expected):
            unlike[number] = different
    assert unlike == {}
    assert unfinished > 0
