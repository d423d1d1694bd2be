"""`--draft mtp`: an engine runs the prediction layer of its pack within the budget, or says why it does not."""

from pathlib import Path

import pytest
from support.cases import case
from support.families import token_ids
from support.models import DEMO_MODEL, pack
from support.prediction import write_table

from moe_pack.formats import Pack, RunError, size_text
from moe_pack.formats.families import PredictionLayer
from moe_pack.runtime import SamplingOptions
from moe_pack.runtime.drafts.prediction_layer import prediction_bytes
from moe_pack.runtime.engine.engine import Engine
from moe_pack.runtime.engine.options import DraftOption, EngineOptions
from moe_pack.runtime.engine.report import RunReport, report, report_lines
from moe_pack.runtime.generate import generate
from moe_pack.runtime.offload import Approximations, Sequences, routing_bytes
from moe_pack.runtime.offload.budgets import least_budget
from moe_pack.runtime.sampling import Sampler

CONTEXT, PROMPT = 100, token_ids()[:20]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    pack(write_table(folder / "source"), folder / "packed", width=16)
    return folder / "packed"


def answer(opened: Pack, options: EngineOptions) -> tuple[list[int], RunReport]:
    with Engine(opened, options, CONTEXT) as engine:
        sampler = Sampler(SamplingOptions(temperature=0))
        tokens = list(generate(engine.decoder, PROMPT, sampler, 60, frozenset(), engine.drafts))
        return tokens, report(engine)


def layer_bytes(opened: Pack) -> int:
    layer = PredictionLayer.find(opened)
    assert layer is not None
    return prediction_bytes(layer, CONTEXT)


def test_answers_come_from_fewer_passes(packed: Path) -> None:
    with Pack(packed) as opened:
        expected, _ = answer(opened, EngineOptions(draft="off"))
        budget = least_budget(opened.layout, CONTEXT, 0) + layer_bytes(opened) + (64 << 10)
        for options in (EngineOptions(draft="mtp"), EngineOptions(draft="mtp", budget_bytes=budget)):
            with case(options.budget_bytes):
                found, facts = answer(opened, options)
                assert found == expected
                drafts = facts.drafts
                assert drafts is not None and facts.fallbacks == ()
                assert drafts.accepted == drafts.drafted > 0
                assert ("prediction layer", size_text(layer_bytes(opened))) in report_lines(facts)


def test_a_budget_has_the_layer_to_the_byte(packed: Path) -> None:
    with Pack(packed) as opened:
        predictors = routing_bytes(packed)
        sequences = Sequences(draft_bytes=layer_bytes(opened))
        needed = least_budget(opened.layout, CONTEXT, predictors, sequences)
        assert needed == least_budget(opened.layout, CONTEXT, predictors) + layer_bytes(opened)
        with Engine(opened, EngineOptions(draft="mtp", budget_bytes=needed), CONTEXT) as engine:
            assert engine.plan is not None
            parts = {part.name: part.num_bytes for part in engine.plan.parts}
            assert parts["prediction layer"] == layer_bytes(opened)
            assert sum(parts.values()) == needed
        with pytest.raises(RunError) as refused:
            Engine(opened, EngineOptions(draft="mtp", budget_bytes=needed - 1), CONTEXT)
        assert " of the prediction layer and " in str(refused.value)
        with Engine(opened, EngineOptions(draft="ngram", budget_bytes=needed), CONTEXT) as engine:
            assert engine.plan is not None
            assert "prediction layer" not in {part.name for part in engine.plan.parts}


def test_what_cannot_draft_says_why(packed: Path, tmp_path: Path) -> None:
    pack(DEMO_MODEL, tmp_path / "demo")
    several = "a prediction layer follows one sequence, and several run; --draft ngram follows all"
    changed = "an option that CHANGES THE ANSWER makes it depend on which tokens run together"
    none = "the pack has no prediction layer that runs; --draft ngram needs none"
    approximate = EngineOptions(draft="mtp", approximations=Approximations(substitute=0.5), budget_bytes=1 << 30)
    cases: list[tuple[Path, EngineOptions, Sequences, str]] = [
        (packed, EngineOptions(draft="mtp"), Sequences(2), several),
        (packed, approximate, Sequences(), changed),
        (tmp_path / "demo", EngineOptions(draft="mtp"), Sequences(), none),
    ]
    for folder, options, sequences, why in cases:
        with case(why), Pack(folder) as opened, Engine(opened, options, CONTEXT, sequences=sequences) as engine:
            assert engine.drafts is None
            assert engine.fallbacks == [f"nothing is drafted: {why}"]
            assert engine.plan is None or engine.plan.drafts == 0
    strict = EngineOptions(draft="mtp", is_strict=True)
    with Pack(tmp_path / "demo") as opened, pytest.raises(RunError) as refused:
        Engine(opened, strict, CONTEXT)
    assert str(refused.value) == f"--strict: nothing is drafted: {none}"


def test_only_mtp_loads_the_layer(packed: Path) -> None:
    choices: tuple[DraftOption, ...] = ("auto", "off", "ngram")
    with Pack(packed) as opened:
        for draft in choices:
            with case(draft), Engine(opened, EngineOptions(draft=draft, budget_bytes=1 << 30), CONTEXT) as engine:
                assert engine.plan is not None and engine.plan.drafts == 0
                assert engine.decoder.sequences[0].follower is None  # type: ignore[union-attr]  # no encoder
