"""Thresholds measured on one text hold on another that neither they nor the model have seen."""

from pathlib import Path

import pytest
from models import BOOK, DEMO_MODEL, pack
from profiles import Recorder

from moe_pack.calib.evaluate import ThresholdRule, measure_thresholds
from moe_pack.calib.evaluate.thresholds import realized_sparsity
from moe_pack.calib.forward import read_tokens
from moe_pack.formats import Pack, Selector
from moe_pack.runtime import Text


@pytest.mark.slow
@pytest.mark.parametrize(("selector", "width", "sparsity"), [("up", 16, 0.7), ("gate", 4, 0.5), ("both", 2, 0.9)])
def test_sparsity_on_unseen_text_is_that_asked_for(
    selector: Selector, width: int, sparsity: float, tmp_path: Path
) -> None:
    pack(DEMO_MODEL, tmp_path / "packed", selector=selector, width=width, group=64)
    with Pack(tmp_path / "packed") as opened:
        tokens = read_tokens(None, None, Text(opened), 16384, 512)
        measure_thresholds(opened, tokens, ThresholdRule(sparsity=sparsity), Recorder())
    with Pack(tmp_path / "packed") as opened:
        unseen = read_tokens(str(BOOK), None, Text(opened), 16384, 512)
        found = realized_sparsity(opened, unseen, Recorder())
    assert found.overall == pytest.approx(sparsity, abs=0.01)
    for shares, numbers in zip(found.experts, found.tokens, strict=True):
        for share, number in zip(shares, numbers, strict=True):
            if number >= 1000:
                assert share == pytest.approx(sparsity, abs=0.03)
