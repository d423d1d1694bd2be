"""Checkpoints in FP8 convert in bounded memory: no whole embedding, and of an expert little more than its codes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchlib.checkpoints import Shape, generate
from memory import run_measured

SHAPE = Shape("deepseek-v3", layers=2, experts=2, hidden=3584, vocab=100_000)
LIMIT_BYTES = 5 << 27


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 2 GB, most of it the embedding and the head."""
    folder = tmp_path_factory.mktemp("coded")
    generate(folder / "source", SHAPE)
    yield folder / "source"
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["source", "4"])
def test_a_conversion_holds_less_than_the_embedding_alone(bits: str, source: Path, tmp_path: Path) -> None:
    options = ["--selector-bits", bits, "--record-bits", bits, "--workers", "2"]
    options += ["--dense-bits", "4", "--quantizer", "nearest"] if bits == "4" else []
    found = run_measured(source, tmp_path / "out", 2, ["convert", *options], None, {})
    assert found.exit_code == 0, found.errors
    embedding_bytes = next(tensor.num_bytes for tensor in SHAPE.tensors() if "embed" in tensor.name)
    assert found.num_samples > 10 and found.peak_anonymous_bytes < LIMIT_BYTES < embedding_bytes
