"""`--draft` as a person meets it: the same text, what is reported, when nothing is drafted, and its memory."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import case
from support.commands import moe_run as run
from support.models import PackMaker
from support.streaming import budget_for

from moe_pack.formats import Pack, RunError
from moe_pack.runtime import Engine, EngineOptions
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.drafts import MOST_DRAFTED
from moe_pack.runtime.offload import Approximations, least_budget
from moe_pack.runtime.offload.budgets import most_verified_tokens, workspace_bytes

WORDS = "The cat saw the dog, and the dog saw the cat. The cat saw the dog, and the dog saw"
CONTEXT = 80

pytestmark = pytest.mark.skipif(not is_available(), reason="native kernels were not built")


@pytest.fixture
def demo(demo_pack: PackMaker) -> Path:
    return demo_pack("up", 4)


def test_the_text_is_the_same_and_stats_say_what_was_drafted(demo: Path) -> None:
    for seed in (("--temperature", 0), ("--seed", 3)):
        with case(*seed):
            texts = {}
            for draft in ("off", "auto", "ngram"):
                result = run(demo, "--prompt", WORDS, *seed, "-n", 80, "--draft", draft, "--stats")
                assert result.exit_code == 0, result.stderr
                texts[draft] = result.stdout
                line = re.search(r"^drafts +(.*)$", result.stderr, re.MULTILINE)
                assert (line is None) == (draft == "off")
                if line is not None:
                    assert re.fullmatch(
                        r"\d+ of \d+ drafted tokens were right; [\d.]+ tokens a pass in \d+ passes"
                        r"|none in \d+ passes, \d+ of which had a proposal",
                        line[1],
                    )
            assert texts["off"] == texts["auto"] == texts["ngram"]


def test_a_benchmark_drafts_only_if_asked(demo: Path) -> None:
    plain, drafted = (
        json.loads(run(demo, "--bench", "--json", "-n", 40, "--prompt-tokens", 9, "--seed", 7, *options).stdout)
        for options in ((), ("--draft", "ngram"))
    )
    assert plain["drafts"] is None and plain["why_no_drafts"] is None
    assert drafted["why_no_drafts"] is None
    counts = drafted["drafts"]
    assert counts["passes"] + counts["accepted"] == 39
    assert counts["accepted"] <= counts["drafted"] and counts["proposed"] <= counts["passes"]
    assert counts["tokens_per_pass"] == pytest.approx(39 / counts["passes"])


def test_where_nothing_is_drafted_the_engine_says_why(demo: Path) -> None:
    budget = 40 << 20
    substituting = EngineOptions(budget_bytes=budget, approximations=Approximations(substitute=0.5))
    rows = (
        (EngineOptions(kernels="torch"), "in torch, tokens of one pass differ by rounding"),
        (substituting, "an option that CHANGES THE ANSWER"),
        (EngineOptions(budget_bytes=budget, approximations=Approximations(runs_predicted=True)), "CHANGES THE ANSWER"),
    )
    with Pack(demo) as opened:
        for options, why in rows:
            with case(why), Engine(opened, options, CONTEXT) as engine:
                assert engine.drafts is None and engine.why_no_drafts is not None and why in engine.why_no_drafts
                assert not any("drafted" in fallback for fallback in engine.fallbacks), "nobody asked for it"
        with Engine(opened, replace(substituting, draft="ngram"), CONTEXT) as engine:
            assert any(fallback.startswith("nothing is drafted: ") for fallback in engine.fallbacks)
        with pytest.raises(RunError, match="--strict: nothing is drafted: "):
            Engine(opened, replace(substituting, draft="ngram", is_strict=True), CONTEXT)
        with Engine(opened, EngineOptions(kernels="torch", draft="ngram"), CONTEXT) as engine:
            assert engine.drafts is not None, "the answer differs by rounding, as was asked for"
        with Engine(opened, EngineOptions(draft="off"), CONTEXT) as engine:
            assert engine.drafts is None and engine.why_no_drafts is None


def test_a_budget_is_divided_as_without_drafts(demo: Path) -> None:
    with Pack(demo) as opened:
        for budget in (least_budget(opened.layout, CONTEXT, 0), budget_for(opened, 9, CONTEXT)):
            plans = []
            for draft in ("off", "ngram"):
                options = EngineOptions(budget_bytes=budget, draft=draft)  # type: ignore[arg-type]  # of the loop
                with Engine(opened, options, CONTEXT) as engine:
                    plans.append(engine.plan)
            assert plans[0] == plans[1]


def test_the_logits_of_a_draft_fit_what_its_pass_leaves_of_the_workspace(demo: Path) -> None:
    most = 1 + MOST_DRAFTED
    with Pack(demo) as opened:
        own = opened.spec
    found = []
    for spec in (own, replace(own, vocab_size=200_000)):
        for chunk in (1, 4, 16, 64, 512):
            number = most_verified_tokens(spec, chunk, most)
            found.append(number)
            more = [workspace_bytes(spec, n) + 4 * (n - 1) * spec.vocab_size for n in range(1, most + 1)]
            with case(spec.vocab_size, chunk):
                assert 1 <= number <= most
                assert number == 1 or more[number - 1] <= workspace_bytes(spec, chunk)
                assert number == most or more[number] > workspace_bytes(spec, chunk)
    assert {1, most} < set(found), "none, some and all"
