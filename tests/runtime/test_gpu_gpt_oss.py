"""gpt-oss by the GPU's engines, over plain memory: MXFP4 as in the source, sinks, windows in a ring."""

from pathlib import Path

import pytest
import torch
from gpt_oss_pack import CHUNK, IDS, PROMPT, WINDOW, packed_gpt_oss
from gpu_runs import CPU, TOLERANCE, graph_decoder, graph_logits
from gpu_staged_runs import staged_logits

from moe_pack.formats import Pack, Selector
from moe_pack.formats.plan import E5M2, MXFP4
from moe_pack.runtime.model import Decoder, PackWeights


def reference(folder: Path) -> torch.Tensor:
    with Pack(folder) as opened:
        found = {form for layer in opened.index.experts for e in layer for form in (e.gate, e.up, e.down)}
        assert found == {MXFP4, E5M2} and opened.spec.expert.bias == ("gate", "up", "down")
        return Decoder(PackWeights(opened, CPU), 64, chunk_tokens=CHUNK).logits(IDS)


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["both", pytest.param("up", marks=pytest.mark.slow)])
def test_the_graph_engine_runs_it_as_plain_torch_does(selector: Selector, tmp_path: Path) -> None:
    folder = packed_gpt_oss(tmp_path, selector)
    found = graph_logits(folder, 0.3, IDS, PROMPT, CHUNK)
    assert (found - reference(folder)).abs().max() < TOLERANCE
    with graph_decoder(folder, 1.0, chunk_tokens=CHUNK) as decoder:
        assert [keys.shape[1] for keys in decoder.cache.keys] == [WINDOW - 1 + CHUNK, 64]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "selector"), [("lru", "up"), ("fiddler", "none")])
def test_the_staged_engine_runs_it_as_plain_torch_does(policy: str, selector: Selector, tmp_path: Path) -> None:
    folder = packed_gpt_oss(tmp_path, selector)
    found = staged_logits(folder, policy, True, IDS, PROMPT, CHUNK)  # type: ignore[arg-type]  # its name
    assert (found - reference(folder)).abs().max() < TOLERANCE
