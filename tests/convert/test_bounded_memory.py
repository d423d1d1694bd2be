"""A checkpoint of Mixtral-8x7B's dimensions converts in bounded memory: the benchmark's own run, judged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bounded_memory.py"
NEEDED_DISK_BYTES = 16 * 10**9  # source 6 GB, pack 2.5 GB, and room


@pytest.mark.slow  # some minutes, 9 GB of disk
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--quantizer", "hqq"), id="hqq, two layers"),
        pytest.param(
            ("--quantizer", "calibrated", "--codec", "trellis", "--bits", "2", "--layers", "1", "--experts", "2"),
            id="calibrated, two experts at once",
        ),
    ],
)
def test_a_checkpoint_of_mixtral_8x7bs_dimensions_converts_inside_3_gib_with_1_5_gib_anonymous(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED_DISK_BYTES:
        pytest.skip(f"{tmp_path} has {free:,} bytes free, {NEEDED_DISK_BYTES:,} are needed")
    command = [sys.executable, str(BENCHMARK), "--only", "cgroup", "--workers", "2", *options]
    ended = subprocess.run(
        [*command, "--folder", str(tmp_path), "--json"], capture_output=True, text=True, timeout=1800
    )
    assert ended.stdout, ended.stderr
    result = json.loads(ended.stdout)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    (run,) = result["runs"]
    print(json.dumps(run))  # noqa: T201  # shown by pytest -s and with a failure
    assert result["faults"] == []
    assert ended.returncode == 0
    assert run["cgroup_limit_bytes"] == 3 << 30
    assert run["num_samples"] > 100, "sampled too rarely to tell"
    assert run["peak_anonymous_bytes"] <= 1.5 * (1 << 30)
