"""Drafts: the look-up, the loop that verifies, and --draft."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import case
from support.commands import moe_run as run
from support.families import NUM_POSITIONS, Tiny, token_ids, write
from support.models import PackMaker, pack
from support.streaming import budget_for
from torch import Tensor

from moe_pack.formats import Pack, RunError
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions
from moe_pack.runtime.cpu import is_available
from moe_pack.runtime.drafts import MOST_DRAFTED, Drafts, Gate, NgramDrafter
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import TORCH, Decoder, PackWeights, open_weights, operations_for
from moe_pack.runtime.offload import Approximations, least_budget
from moe_pack.runtime.offload.budgets import most_verified_tokens, workspace_bytes

CPU = torch.device("cpu")
CONTEXT, NUM_NEW = 96, 60
SAMPLING = (
    SamplingOptions(temperature=0),
    SamplingOptions(seed=5),
    SamplingOptions(temperature=1.2, top_k=7, min_p=0.05, repetition_penalty=1.1, frequency_penalty=0.3, seed=9),
    SamplingOptions(temperature=0.3, top_p=1, presence_penalty=0.5, logit_bias=((3, 2.0), (17, -4.0)), seed=2),
)

pytestmark = pytest.mark.skipif(not is_available(), reason="native kernels were not built")


class Oracle:
    """Proposes the text that is known to come, with a wrong token now and then: every length of agreement occurs."""

    needs_hidden = False

    def __init__(self, text: Sequence[int], wrong: Sequence[int], vocab_size: int) -> None:
        self._text, self._wrong, self._vocab_size = text, itertools.cycle(wrong), vocab_size
        self.accepted_each: list[int] = []

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        found, place = list(self._text[len(ids) : len(ids) + most]), next(self._wrong)
        if place < len(found):
            found[place] = (found[place] + 1) % self._vocab_size
        return found

    def accepted(self, number: int) -> None:
        self.accepted_each.append(number)

    def reset(self) -> None:
        self.accepted_each.clear()


def answer(decoder: Decoder, prompt: list[int], options: SamplingOptions, drafts: Drafts | None = None) -> list[int]:
    decoder.reset()
    sampler = Sampler(options, prompt)
    text = [*prompt, *generate(decoder, prompt, sampler, NUM_NEW, frozenset(), drafts)]
    assert decoder.sequences[0].ids == text[:-1] and decoder.cache.num_tokens == len(text) - 1
    return text


def prompt_of(vocab_size: int) -> list[int]:
    """A prompt with repetitions, so that there is something to look up."""
    some = torch.randint(vocab_size, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    return [*some, *some[:7], *some]


def drafters(text: Sequence[int], vocab_size: int) -> Iterator[tuple[str, Drafts]]:
    yield "look-up", Drafts(NgramDrafter(), None)
    yield "look-up, gate", Drafts(NgramDrafter(), Gate())
    yield "oracle", Drafts(Oracle(text, (99, 0, 3, 1, 7, 2), vocab_size), None)


@pytest.mark.slow
def test_a_text_is_the_same_with_drafts_mapped_and_offloaded(demo_pack: PackMaker) -> None:
    with Pack(demo_pack("up", 4)) as opened:
        vocab_size = opened.spec.vocab_size
        prompt = prompt_of(vocab_size)
        for budget, options in itertools.product((None, budget_for(opened, 6, CONTEXT)), SAMPLING):
            with Engine(opened, EngineOptions(budget_bytes=budget, draft="off"), CONTEXT) as engine:
                assert isinstance(engine.decoder, Decoder) and engine.drafts is None
                text = answer(engine.decoder, prompt, options)
                for name, drafts in drafters(text, vocab_size):
                    with case(name, budget, options):
                        assert answer(engine.decoder, prompt, options, drafts) == text
                    if name == "oracle":
                        counts = drafts.counts
                        assert counts.passes + counts.accepted == NUM_NEW - 1
                        assert counts.accepted > counts.passes, "most of what the oracle says is right"


FAMILIES = (
    ("mixtral", "window of 7"),
    ("gpt_oss", "as it comes"),  # rings and sinks
    ("qwen3_next", "as it comes"),  # states
    ("deepseek_v2", "as it comes"),  # latents
    ("deepseek_v4", "as it comes"),  # entries
    ("qwen4_exp_text", "as it comes"),  # n-gram tables
    ("phimoe", "as it comes"),
)


class Clock:
    """A clock that goes a millisecond further each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class SlowLookUp(NgramDrafter):
    """Looks up for as long as some passes take, and finds nothing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.num_calls, self._clock = 0, clock

    def propose(self, ids: Sequence[int], hidden: Tensor | None, most: int) -> list[int]:
        self.num_calls += 1
        self._clock.now_s += 0.005
        return []


def test_looking_up_rests_where_it_costs_and_gains_nothing(
    demo_pack: PackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    with Pack(demo_pack("none", 4)) as pack, Engine(pack, EngineOptions(read="map"), CONTEXT) as engine:
        assert isinstance(engine.decoder, Decoder)
        prompt, drafter = prompt_of(pack.spec.vocab_size), SlowLookUp(clock)
        drafts = Drafts(drafter, Gate())
        expected = answer(engine.decoder, prompt, SAMPLING[0])
        for calls in (8, 16):  # eight, then 64 tokens without one, then eight
            assert answer(engine.decoder, prompt, SAMPLING[0], drafts) == expected
            assert drafter.num_calls == calls
        assert drafts.counts.passes == 2 * (NUM_NEW - 1)
        always = Drafts(SlowLookUp(clock), None)
        assert answer(engine.decoder, prompt, SAMPLING[0], always) == expected
        assert always.counts.passes == NUM_NEW - 1


def test_every_kind_of_cache_leads_back_to_the_tokens_that_were_right(tmp_path: Path) -> None:
    for family, name in FAMILIES:
        folder = tmp_path / family / "packed"
        pack(write(Tiny(family, name), tmp_path / family / "source"), folder, width=8)
        with (
            case(family, name),
            Pack(folder) as opened,
            operations_for(CPU, 2) as operations,
            closing(open_weights(opened, CPU, operations)) as weights,
        ):
            check_verified(Decoder(weights, NUM_POSITIONS, chunk_tokens=16))


def check_verified(decoder: Decoder) -> None:
    """Wrong tokens behind right ones leave nothing: the logits afterwards are those of the right ones alone."""
    ids, sequence = token_ids(), decoder.sequences[0]
    decoder.next_logits(ids[:30])
    expected = torch.stack([decoder.next_logits([token]) for token in ids[30:60]])
    decoder.reset()
    decoder.next_logits(ids[:30])
    found, lengths, place = list[Tensor](), list[int](), 30
    for num_right, num_wrong in itertools.cycle(((1, 4), (3, 0), (2, 6), (5, 1), (1, 0))):
        right = ids[place : min(place + num_right, 60)]
        drafted = [*right, *((token + 1) % decoder.spec.vocab_size for token in ids[60 : 60 + num_wrong])]
        most = decoder.most_verified(sequence)
        lengths.append(min(most, len(drafted)))
        right, drafted = right[:most], drafted[:most]
        found += decoder.verify(sequence, drafted)[: len(right)]
        decoder.keep(sequence, place + len(right))
        place += len(right)
        assert sequence.ids == ids[:place] and sequence.num_tokens == place
        assert sequence.hidden is not None and len(sequence.hidden) == decoder.spec.stream_width
        if place == 60:
            break
    assert max(lengths) == 8 and sum(length > 1 for length in lengths) > 8, lengths
    # The project's bound: torch multiplies by states, and rounds rows of other than a multiple of 32 values, in another
    # way where several tokens enter at once.
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-4)


def test_torch_agrees_but_for_rounding(demo_pack: PackMaker) -> None:
    with Pack(demo_pack("none", 4)) as opened:
        decoder = Decoder(PackWeights(opened, CPU, TORCH), CONTEXT)
        ids = prompt_of(opened.spec.vocab_size)
        decoder.next_logits(ids[:20])
        expected = torch.stack([decoder.next_logits([token]) for token in ids[20:28]])
        decoder.sequences[0].cut_to(20)
        found = decoder.verify(decoder.sequences[0], ids[20:28])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


WORDS = "The cat saw the dog, and the dog saw the cat. The cat saw the dog, and the dog saw"
OPTION_CONTEXT = 80


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
            with case(why), Engine(opened, options, OPTION_CONTEXT) as engine:
                assert engine.drafts is None and engine.why_no_drafts is not None and why in engine.why_no_drafts
                assert not any("drafted" in fallback for fallback in engine.fallbacks), "nobody asked for it"
        with Engine(opened, replace(substituting, draft="ngram"), OPTION_CONTEXT) as engine:
            assert any(fallback.startswith("nothing is drafted: ") for fallback in engine.fallbacks)
        with pytest.raises(RunError, match="--strict: nothing is drafted: "):
            Engine(opened, replace(substituting, draft="ngram", is_strict=True), OPTION_CONTEXT)
        with Engine(opened, EngineOptions(kernels="torch", draft="ngram"), OPTION_CONTEXT) as engine:
            assert engine.drafts is not None, "the answer differs by rounding, as was asked for"
        with Engine(opened, EngineOptions(draft="off"), OPTION_CONTEXT) as engine:
            assert engine.drafts is None and engine.why_no_drafts is None


def test_a_budget_is_divided_as_without_drafts(demo: Path) -> None:
    with Pack(demo) as opened:
        for budget in (least_budget(opened.layout, OPTION_CONTEXT, 0), budget_for(opened, 9, OPTION_CONTEXT)):
            plans = []
            for draft in ("off", "ngram"):
                options = EngineOptions(budget_bytes=budget, draft=draft)  # type: ignore[arg-type]  # of the loop
                with Engine(opened, options, OPTION_CONTEXT) as engine:
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
