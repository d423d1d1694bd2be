"""Thresholds measured on one text hold on another of its kind that they have not seen.

The sample's end is of the same kinds as the sample; another novel is of the kind of the sample's prose.
"""

from importlib.resources import files
from pathlib import Path

import pytest
from support.cases import case
from support.models import BOOK, DEMO_MODEL, pack
from support.profiles import Recorder
from support.sparsities import realized_sparsity

from moe_pack.calib.evaluate import ThresholdRule
from moe_pack.calib.evaluate.thresholds import measure_thresholds
from moe_pack.calib.forward import read_tokens, unseen_tokens
from moe_pack.formats import Pack, Selector
from moe_pack.runtime import Text

PROSE = str(files("moe_pack.calib.forward").joinpath("sample", "prose.txt"))
# What is measured on, what is unseen, and how far the sparsity of all and of one expert may be from that asked for.
SAMPLE = (None, None, 0.002, 0.015)
NOVEL = (PROSE, str(BOOK), 0.01, 0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selector", "width", "sparsity", "texts"),
    [("up", 16, 0.7, [SAMPLE, NOVEL]), ("gate", 4, 0.5, [SAMPLE]), ("both", 2, 0.9, [NOVEL])],
)
def test_sparsity_on_unseen_text_is_that_asked_for(
    selector: Selector,
    width: int,
    sparsity: float,
    texts: list[tuple[str | None, str | None, float, float]],
    tmp_path: Path,
) -> None:
    pack(DEMO_MODEL, tmp_path / "packed", selector=selector, width=width, group=64)
    for text, unseen_text, overall, alone in texts:
        with case(text, unseen_text):
            with Pack(tmp_path / "packed") as opened:
                tokens = read_tokens(text, None, Text(opened), 16384, 512)
                measure_thresholds(opened, tokens, ThresholdRule(sparsity=sparsity), Recorder())
            with Pack(tmp_path / "packed") as opened:
                model_text = Text(opened)
                if unseen_text is None:
                    unseen = unseen_tokens(model_text, 16384, 512)
                else:
                    unseen = read_tokens(unseen_text, None, model_text, 16384, 512)
                found = realized_sparsity(opened, unseen)
            assert found.overall == pytest.approx(sparsity, abs=overall)
            for shares, numbers in zip(found.experts, found.tokens, strict=True):
                for share, number in zip(shares, numbers, strict=True):
                    if number >= 1000:
                        assert share == pytest.approx(sparsity, abs=alone)
