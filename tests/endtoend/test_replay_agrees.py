"""Replay against the engine: the same hits and the same experts read, whatever the policy, foretelling or not."""

from pathlib import Path

import pytest
from models import BOOK, DEMO_MODEL, PackMaker
from tokenizers import Tokenizer

from moe_pack.formats import Pack
from moe_pack.runtime import CacheFacts, PolicyName, expert_pages, read_record, replay
from moe_pack.runtime.engine import Engine, EngineOptions
from moe_pack.runtime.policies import PRESETS

NUM_PROMPT, NUM_DECODED = 24, 40


@pytest.fixture(scope="module")
def ids() -> list[int]:
    found: list[int] = (
        Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(BOOK.read_text("utf-8")[:2000]).ids
    )
    return found[: NUM_PROMPT + NUM_DECODED]


@pytest.mark.parametrize("foretells", [True, False], ids=["foretelling", "alone"])
@pytest.mark.parametrize("policy", PRESETS)
def test_a_recorded_run_is_replayed_with_the_same_hits(
    demo_pack: PackMaker, ids: list[int], tmp_path: Path, policy: PolicyName, foretells: bool
) -> None:
    options = EngineOptions(
        budget_bytes=46 << 20, policy=policy, foretells=foretells, record=tmp_path / "routes", threads=1
    )
    with Pack(demo_pack("up", 4)) as pack:
        with Engine(pack, options, context_tokens=128) as engine:
            engine.decoder.next_logits(ids[:NUM_PROMPT])
            for token in ids[NUM_PROMPT:]:
                engine.decoder.next_logits([token])
            plan = engine.plan
        assert plan is not None
        record = read_record(tmp_path / "routes")
        pages, passes = expert_pages(pack.layout, plan.page_bytes), record.passes
        facts = CacheFacts(pages, plan.num_pages, passes.routes.shape[2], passes.popularity)
        played = replay(passes, facts, pack.index.size, PRESETS[policy], record)
    is_decoding = passes.chunks == 1
    assert passes.chunks.tolist()[-NUM_DECODED:] == [1] * NUM_DECODED and passes.chunks.sum() == len(ids)
    assert played.decode.num_hits == record.hits[is_decoding].sum()
    assert played.decode.num_needed == record.needed[is_decoding].sum()
    assert played.prefill.num_hits == record.hits[~is_decoding].sum()
    assert played.foretelling == ("recorded" if foretells else "none")
