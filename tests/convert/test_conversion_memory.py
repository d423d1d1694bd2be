"""Conversions of large checkpoints take little more memory than an expert for each worker."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchlib import moe_pack_command
from benchlib.confined import Measured, MemoryCgroup, NoCgroupError, drop_page_cache, measure, tree_anonymous_bytes
from support.random_checkpoints import Shape, generate

from moe_pack.formats import Pack

CODED = Shape("deepseek-v3", layers=2, experts=2, hidden=3584, vocab=100_000)
PLAIN = Shape("mixtral-8x7b", layers=1, experts=3, hidden=2048, intermediate=7168, vocab=80_000)
CALIBRATED = Shape("mixtral-8x7b", layers=1, experts=2, hidden=1024, intermediate=1792, vocab=16_000)
NEEDED_DISK_BYTES = 2 * 10**9  # source 0.9 GB, pack 0.4 GB, and some space


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: these files are large."""
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED_DISK_BYTES:
        pytest.skip(f"{tmp_path} has {free:,} bytes free, {NEEDED_DISK_BYTES:,} are needed")
    yield tmp_path
    shutil.rmtree(tmp_path)


def converted(folder: Path, options: list[str], cgroup: MemoryCgroup | None = None) -> Measured:
    """Converts `source` in a folder, with samples of the memory that it takes."""
    command = moe_pack_command("convert", folder / "source", "-o", folder / "out", "--workers", "2", *options)
    drop_page_cache(folder / "source")
    if cgroup is None:
        found = measure(command, tree_anonymous_bytes)
    else:
        found = measure(cgroup.inside(command), lambda pid: cgroup.anonymous_bytes())
    assert found.exit_code == 0, found.errors
    Pack(folder / "out").close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["source", "4"])
def test_a_conversion_of_fp8_takes_less_than_the_embedding_alone(bits: str, folder: Path) -> None:
    """A checkpoint of 2 GB, most of it the embedding and the head: no whole one, and of an expert its codes."""
    limit_bytes = 5 << 27
    generate(folder / "source", CODED)
    options = ["--selector-bits", bits, "--record-bits", bits]
    options += ["--dense-bits", "4", "--quantizer", "nearest"] if bits == "4" else []
    found = converted(folder, options)
    embedding_bytes = next(tensor.num_bytes for tensor in CODED.tensors() if "embed" in tensor.name)
    assert found.num_samples > 10 and found.peak_bytes < limit_bytes < embedding_bytes


@pytest.mark.slow  # a minute, 2 GB of disk
@pytest.mark.parametrize("quantizer", ["hqq", "calibrated"])
def test_a_checkpoint_converts_inside_a_limit(quantizer: str, folder: Path) -> None:
    """The limit counts the page cache too, and HQQ's is less than the checkpoint. Python and torch take 0.25 GiB."""
    try:
        with MemoryCgroup(3 << 28) as cgroup:
            generate(folder / "source", PLAIN if quantizer == "hqq" else CALIBRATED)
            bits = "4" if quantizer == "hqq" else "2"
            options = ["--quantizer", quantizer, "--selector-bits", bits, "--record-bits", bits]
            if quantizer == "calibrated":  # two experts at once
                profile = ("profile", folder / "source", "-o", folder / "profile", "--tokens", 4096)
                made = measure(moe_pack_command(*profile, "--sensitivity", "none"), tree_anonymous_bytes)
                assert made.exit_code == 0, made.errors
                options += ["--codec", "trellis", "--profile", str(folder / "profile")]
            found = converted(folder, options, cgroup)
            assert cgroup.num_kills in (0, None)
    except NoCgroupError as reason:
        pytest.skip(str(reason))
    assert found.num_samples > 100, "sampled too rarely to tell"
    assert found.peak_bytes <= 0.6 * (1 << 30)
