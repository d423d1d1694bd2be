"""The graph engine's launches under the interpreter, of every family, against the decoder in plain torch."""

from pathlib import Path

import pytest
from cards import TOLERANCE, graph_logits, reference_logits
from families import TINY, WITH_ENCODER, Tiny, write
from models import pack

# One of each kind of attention, router, norm and expert that decode knows; the other families are as slow as alike.
USUAL = (
    "mixtral: window of 7",
    "deepseek_v2: groups, query latent, yarn",
    "phimoe: as it comes",
    "qwen2_moe: as it comes",
)
_OF_USUAL = {name.partition(":")[0] for name in USUAL}


@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(tiny, marks=[] if str(tiny) in USUAL else [pytest.mark.slow])
        for tiny in TINY
        if str(tiny) in USUAL
        or (tiny.name == "as it comes" and tiny.family not in (*_OF_USUAL, *WITH_ENCODER))  # no card runs an encoder
    ],
    ids=str,
)
def test_every_family_runs_as_in_plain_torch(tiny: Tiny, tmp_path: Path) -> None:
    source = write(tiny, tmp_path / "source")
    folder = tmp_path / "packed"
    pack(source, folder, dense_width=8)
    assert (graph_logits(folder, 0.3) - reference_logits(folder)).abs().max() < TOLERANCE
