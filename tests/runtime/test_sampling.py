"""Sampling: greedy, every option against a twin that sorts everything, seeds, log-probabilities, and refusals."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case

from moe_pack.formats import CheckpointError, RunError
from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Sampler, SamplingOptions
from moe_pack.runtime.engine.options import AskedSampling, check_sampling, usual_sampling
from moe_pack.runtime.sampling import nucleus

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
GREEDY = SamplingOptions(temperature=0)


def options(**values: Any) -> SamplingOptions:
    """Options that change nothing but what is given: probabilities as the model has them, seed 0."""
    return SamplingOptions(**{"temperature": 1, "top_p": 1, "seed": 0, **values})


def draws(sampler: Sampler, number: int, logits: torch.Tensor = LOGITS) -> Counter[int]:
    return Counter(sampler.choose(logits) for _ in range(number))


def random_logits(size: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    """Logits with many ties: quarters."""
    return (spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))).mul(4).round().div(4)


@dataclass
class OnlyEven:
    """A grammar that allows the tokens of even numbers, and keeps what it was told."""

    accepted: list[int] = field(default_factory=list)

    def allow(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(logits)) % 2 == 0, logits, -math.inf)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


class Twin:
    """A sampler that sorts the whole vocabulary and goes through it token by token, with the same random numbers."""

    def __init__(self, chosen: SamplingOptions, prompt: tuple[int, ...] = (), only_even: bool = False) -> None:
        self.options, self.prompt, self.only_even = chosen, prompt, only_even
        self.answer: list[int] = []
        self.generator = torch.Generator().manual_seed(chosen.seed or 0)

    def changed(self, raw: list[float]) -> list[float]:
        chosen, logits = self.options, list(raw)
        if self.only_even:
            logits = [value if token % 2 == 0 else -math.inf for token, value in enumerate(logits)]
        for token, bias in chosen.logit_bias:
            logits[token] += bias
        for token in {*self.prompt, *self.answer}:
            factor = chosen.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(self.answer).items():
            logits[token] -= chosen.frequency_penalty * count + chosen.presence_penalty
        return logits

    def kept(self, raw: list[float]) -> dict[int, float]:
        """The tokens that are left with their scores, in rising order."""
        chosen, logits = self.options, self.changed(raw)
        ranked = sorted((token for token, x in enumerate(logits) if x > -math.inf), key=lambda t: (-logits[t], t))
        ranked = ranked[: chosen.top_k or None]
        scores = {token: math.exp((logits[token] - logits[ranked[0]]) / chosen.temperature) for token in ranked}
        whole, before, left = sum(scores.values()), 0.0, {}
        for token, score in scores.items():
            if chosen.top_p == 1 or before < chosen.top_p * whole:
                left[token] = score
            before += score
        return dict(sorted((token, score) for token, score in left.items() if score >= chosen.min_p))

    def choose(self, logits: torch.Tensor) -> int:
        raw = logits.tolist()
        if self.options.temperature == 0:
            changed = self.changed(raw)
            token = changed.index(max(changed))
        else:
            left = self.kept(raw)
            point = float(torch.rand(1, generator=self.generator, dtype=torch.float64)) * sum(left.values())
            total = 0.0
            for token, score in left.items():  # noqa: B007  (the last one is the answer)
                total += score
                if total > point:
                    break
        self.answer.append(token)
        return token


# What the sampler chose before it had more options than these: temperature, top_p, seed.
RELEASED = {
    (0.8, 0.95, 0): [464, 304, 194, 440, 265, 354, 112, 157],
    (1.0, 1.0, 7): [140, 140, 426, 294, 446, 394, 146, 242],
    (2.0, 0.5, 2**63 - 1): [454, 234, 453, 208, 309, 228, 363, 131],
}

# Powers of two where logits are multiplied or divided: float32 and float64 then agree, and ties stay ties.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"min_p": 0.07},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.03, "temperature": 1.5},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5, "top_k": 5},
    {"frequency_penalty": 0.5},
    {"frequency_penalty": -0.25, "presence_penalty": 1.5},
    {"logit_bias": ((3, 8.0), (10, -math.inf), (3, -1.0)), "top_p": 0.7},
    {
        "repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5, "logit_bias": ((0, 4.0),),
        "temperature": 0.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01,
    },
]  # fmt: skip


def test_every_option_chooses_as_a_twin_that_sorts_all_tokens() -> None:
    for number, values in enumerate(OPTIONS):
        for size, only_even, greedy in product([11, 300], [False, True], [False, True]):
            with case(values, size, only_even, greedy):
                chosen = options(**({**values, "temperature": 0} if greedy else values), seed=number)
                prompt = (1, 4, 4, 7)
                grammar = OnlyEven() if only_even else None
                sampler, twin = Sampler(chosen, prompt, grammar), Twin(chosen, prompt, only_even)
                steps = [random_logits(size, step) for step in range(20)]
                assert [sampler.choose(x) for x in steps] == [twin.choose(x) for x in steps]
                assert grammar is None or grammar.accepted == twin.answer


def test_temperature_zero_takes_the_likeliest_and_the_lowest_among_equals() -> None:
    assert Sampler(GREEDY).choose(LOGITS) == 1
    assert Sampler(GREEDY).choose(torch.tensor([1.0, 2.0, 2.0])) == 1


def test_the_same_seed_repeats_and_another_differs() -> None:
    first, again, other = ([s.choose(LOGITS) for _ in range(50)] for s in (Sampler(options(seed=n)) for n in (7, 7, 8)))
    assert first == again != other


def test_without_a_seed_every_sampler_has_its_own_and_says_it() -> None:
    sampler, other = Sampler(options(seed=None)), Sampler(options(seed=None))
    assert sampler.seed != other.seed
    assert draws(Sampler(options(seed=sampler.seed)), 50) == draws(sampler, 50)


def test_a_seed_means_the_same_tokens_as_in_earlier_releases() -> None:
    logits = random_logits(500, 1).mul(0.7)
    for values, expected in RELEASED.items():
        temperature, top_p, seed = values
        with case(values):
            sampler = Sampler(SamplingOptions(temperature, top_p, seed=seed))
            assert [sampler.choose(logits) for _ in range(8)] == expected


def test_draws_follow_the_probabilities() -> None:
    found = draws(Sampler(options()), 4000)
    for token, probability in enumerate([0.1, 0.5, 0.15, 0.25]):
        # Five standard deviations of a binomial with 4000 draws.
        assert abs(found[token] / 4000 - probability) < 5 * math.sqrt(probability * (1 - probability) / 4000)


def test_each_cut_keeps_the_tokens_that_it_promises() -> None:
    cuts: list[tuple[dict[str, Any], set[int]]] = [
        *(({"top_p": p}, kept) for p, kept in [(0.4, {1}), (0.5, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3})]),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        *(
            ({"top_k": k}, kept)
            for k, kept in [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3})]
        ),
        *(({"min_p": p}, kept) for p, kept in [(0.6, {1}), (0.4, {1, 3}), (0.25, {1, 2, 3}), (0.1, {0, 1, 2, 3})]),
        # Of the two likeliest, 0.5 and 0.25, the first has two thirds.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"logit_bias": ((1, -math.inf),)}, {0, 2, 3}),
        ({"logit_bias": ((0, 50.0),)}, {0}),
    ]
    for values, kept in cuts:
        with case(values):
            assert set(draws(Sampler(options(**values)), 500)) == kept


def test_the_nucleus_is_that_of_a_stable_sort_of_all_tokens() -> None:
    for spread, size in product([0.0, 1.0, 4.0, 12.0], [1, 2, 255, 256, 257, 5000]):
        with case(spread, size):
            scores = random_logits(size, size, spread).double().exp()
            for top_p in (1e-9, 0.3, 0.9, 0.999):  # at 1 it hangs on rounding; all are kept without asking
                ranked, tokens = scores.sort(descending=True, stable=True)
                expected = tokens[ranked.cumsum(0) - ranked < top_p * scores.sum()].sort().values
                assert torch.equal(nucleus(scores, top_p), expected), top_p


@pytest.mark.parametrize("spread", [1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_a_draw_sorts_a_small_part_of_the_vocabulary_at_most(
    top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = spread * torch.randn(151_936, generator=torch.Generator().manual_seed(0))
    sizes, sort = [0], torch.Tensor.sort

    def watched(scores: torch.Tensor, **how: bool) -> object:
        sizes.append(len(scores))
        return sort(scores, **how)

    monkeypatch.setattr(torch.Tensor, "sort", watched)
    Sampler(options(top_p=top_p, top_k=50)).choose(logits)
    for name in ("sort", "topk"):
        monkeypatch.setattr(torch, name, None)
    Sampler(options(top_p=top_p)).choose(logits)
    assert max(sizes) <= len(logits) / 50


def test_extreme_options_overflow_nothing() -> None:
    assert Sampler(options(temperature=1e-30)).choose(LOGITS) == 1
    huge = torch.tensor([3e38, -3e38, 1.0])
    for values in (
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e30},
        {"logit_bias": ((0, 3e38), (1, -3e38))},
    ):
        for temperature in (0.0, 1.0):
            with case(values, temperature):
                sampler = Sampler(options(**values, temperature=temperature), prompt_ids=[0, 1])
                assert sampler.choose(huge) in (0, 2)


def test_a_draw_never_takes_what_has_no_probability_even_if_rounding_leads_past_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *sizes, **how: torch.ones(1, dtype=torch.float64))
    assert Sampler(options()).choose(torch.tensor([0.0, 1.0, -1e6])) == 1


def test_the_logits_of_the_caller_stay_as_they_are() -> None:
    logits = LOGITS.clone()
    sampler = Sampler(options(repetition_penalty=3, presence_penalty=1, logit_bias=((1, 5.0),)), [0, 1], OnlyEven())
    for _ in range(5):
        sampler.choose(logits)
    assert torch.equal(logits, LOGITS)


def test_log_probabilities_are_those_of_a_softmax_before_any_option() -> None:
    for size, top in product([2, 50, 3000], [0, 1, 5, 20]):
        with case(size, top):
            logits = random_logits(size, size)
            expected = torch.log_softmax(logits.double(), 0)
            found = Sampler.logprobs(logits, 1, top)
            assert found.token == 1
            assert math.isclose(found.logprob, float(expected[1]), abs_tol=1e-9)
            ranked, tokens = expected.sort(descending=True, stable=True)
            assert [token for token, _ in found.top] == tokens[:top].tolist()
            assert torch.allclose(torch.tensor([p for _, p in found.top]).double(), ranked[:top], atol=1e-6)


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad, temperature in product([math.nan, math.inf, -math.inf], [0.0, 1.0]):
        with case(bad, temperature), pytest.raises(RunError, match="logits are NaN or infinite"):
            Sampler(options(temperature=temperature)).choose(torch.tensor([1.0, bad]))


def test_a_choice_without_any_token_left_is_refused() -> None:
    for temperature in (0.0, 1.0):
        chosen = options(temperature=temperature, logit_bias=((0, -math.inf), (2, -math.inf)))
        with pytest.raises(RunError, match="no token is left"):
            Sampler(chosen, grammar=OnlyEven()).choose(LOGITS)


def test_a_bias_of_a_token_that_the_vocabulary_lacks_is_refused() -> None:
    assert Sampler(options(logit_bias=((3, 90.0),))).choose(LOGITS) == 3
    with pytest.raises(RunError, match="logit_bias: the vocabulary has 4 tokens, and none is 4; remove it"):
        Sampler(options(logit_bias=((4, 90.0),))).choose(LOGITS)


def test_values_out_of_range_are_refused_by_name_and_their_neighbours_pass() -> None:
    tiny = 1e-9
    ranges: dict[str, tuple[list[Any], list[Any]]] = {
        "temperature": ([-0.1, math.nan, math.inf], [0, 100.0]),
        "top_p": ([0.0, 1.01, math.nan], [tiny, 1]),
        "top_k": ([-1], [0, 10**9]),
        "min_p": ([-tiny, 1.01, math.nan], [0, 1]),
        "repetition_penalty": ([0, -1, math.inf, math.nan], [tiny, 100.0]),
        "frequency_penalty": ([-2.01, 2.01, math.nan], [-2, 2]),
        "presence_penalty": ([-2.01, 2.01, math.nan], [-2, 2]),
        "logit_bias": ([((-1, 1.0),), ((1, math.nan),), ((1, math.inf),)], [((0, -math.inf),), ((5, 1e9),)]),
        "seed": ([-1, 2**63], [0, 2**63 - 1, None]),
    }
    for name, (wrong, right) in ranges.items():
        for value in wrong:
            with case(name, value), pytest.raises(RunError, match=f"^{name}: found "):
                Sampler(options(**{name: value}))
            with case(name, value), pytest.raises(RunError, match=f"^<{name}>: found "):
                check_sampling(options(**{name: value}), lambda field: f"<{field}>")
        for value in right:
            with case(name, value):
                Sampler(options(**{name: value}))


def usual(folder: Path, config: dict[str, Any] | None) -> SamplingOptions:
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if config is not None:
        path.write_text(json.dumps(config))
    return usual_sampling(FolderFiles(folder))


def test_the_publisher_says_how_unless_the_user_does(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    for config, expected in (
        (None, SamplingOptions(temperature=0.8, top_p=0.95)),
        ({}, SamplingOptions(temperature=0.8, top_p=0.95)),
        (given, SamplingOptions(**given)),
        ({"temperature": 0.6, "do_sample": False}, SamplingOptions(temperature=0.0, top_p=0.95)),
        ({"temperature": "hot", "top_k": True, "top_p": None}, SamplingOptions(temperature=0.8, top_p=0.95)),
        ({"top_k": -1}, SamplingOptions(top_k=0)),
    ):
        with case(config):
            assert usual(tmp_path, config) == expected
    found = AskedSampling(temperature=0.0, top_k=5).over(usual(tmp_path, given))
    assert found == SamplingOptions(**{**given, "temperature": 0.0, "top_k": 5})


def test_values_out_of_range_name_their_file_or_option(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p: found 2"):
        usual(tmp_path, {"top_p": 2})
    with pytest.raises(RunError, match="--repetition-penalty: found 0"):
        AskedSampling(repetition_penalty=0.0).over(SamplingOptions())
