"""Conversions inside a memory cgroup: the benchmark's own run, at a fraction of the sizes.

`make bench` runs it with Mixtral-8x7B's sizes; docs/benchmarks.md has the figures.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import HANG_S

BENCHMARK = Path(__file__).parents[2] / "tests" / "bench" / "memory.py"
NEEDED_DISK_BYTES = 2 * 10**9  # source 0.9 GB, pack 0.4 GB, and some space
# The limits count the page cache too, and HQQ's is less than the checkpoint. Python and torch alone take 0.25 GiB.


@pytest.mark.slow  # a minute, 2 GB of disk
@pytest.mark.parametrize(
    ("options", "limit_gib", "anonymous_gib"),
    [
        pytest.param(
            "--quantizer hqq --experts 3 --hidden 2048 --intermediate 7168 --vocab 80000", 0.75, 0.6, id="hqq"
        ),
        pytest.param(
            "--quantizer calibrated --codec trellis --bits 2 "
            "--experts 2 --hidden 1024 --intermediate 1792 --vocab 16000",
            0.75,
            0.6,
            id="calibrated, two experts at once",
        ),
    ],
)
def test_a_checkpoint_converts_inside_a_limit(
    options: str, limit_gib: float, anonymous_gib: float, tmp_path: Path
) -> None:
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED_DISK_BYTES:
        pytest.skip(f"{tmp_path} has {free:,} bytes free, {NEEDED_DISK_BYTES:,} are needed")
    limits = ["--cgroup-gib", str(limit_gib), "--anonymous-gib", str(anonymous_gib), "--only", "cgroup"]
    command = [sys.executable, str(BENCHMARK), "convert", "--layers", "1", "--workers", "2"]
    ended = subprocess.run(
        [*command, *limits, *options.split(), "--folder", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.stdout, ended.stderr
    result = json.loads(ended.stdout)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    (run,) = result["runs"]
    print(json.dumps(run))  # noqa: T201  # shown by pytest -s and with a failure
    assert result["faults"] == []
    assert ended.returncode == 0
    assert run["cgroup_limit_bytes"] == int(limit_gib * (1 << 30))
    assert run["num_samples"] > 100, "sampled too rarely to tell"
    assert run["peak_anonymous_bytes"] <= anonymous_gib * (1 << 30)
