"""Checkpoints in FP8 convert in bounded memory: no whole embedding, and of an expert little more than its codes."""

from pathlib import Path

import pytest
from coded_checkpoint import Fp8Shape
from coded_memory import make_coded, measured

GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("what", ["convert, kept", "convert, 4 bit"])
def test_a_conversion_holds_less_than_the_embedding_alone(what: str, tmp_path: Path) -> None:
    shape = Fp8Shape(experts=2, vocab=90_000)  # DeepSeek-V3's dimensions but for these two
    make_coded(tmp_path / "source", shape)
    found = measured(tmp_path / "source", tmp_path / "out", what, ("--workers", "2"))
    assert found.exit_code == 0, found.errors
    embedding_bytes = 2 * shape.vocab * shape.hidden
    assert found.num_samples > 10 and found.peak_bytes < GIB < embedding_bytes
