"""A 16-bit pack is the original model: transformers' logits and greedy text, for every selector kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.cases import case
from support.models import BOOK, DEMO_MODEL, PackMaker

from moe_pack.formats import Pack
from moe_pack.formats.parts.specs import SELECTORS
from moe_pack.runtime import Sampler, SamplingOptions, Text
from moe_pack.runtime.generate import generate
from moe_pack.runtime.model import Decoder, PackWeights

if TYPE_CHECKING:
    from transformers import MixtralForCausalLM

# The project's bound on float32 logits; sums in another order differ by about 2e-5 here.
TOLERANCE = 1e-4
NUM_TOKENS = 512
NUM_STEPS = 128


@pytest.fixture(scope="module")
def original() -> MixtralForCausalLM:
    from transformers import MixtralForCausalLM

    return MixtralForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids(demo_pack: PackMaker) -> list[int]:
    """512 tokens of text the model has not seen."""
    with Pack(demo_pack("up", 16)) as opened:
        return Text(opened).encode(BOOK.read_text("utf-8")[10_000:14_000])[:NUM_TOKENS]


@pytest.fixture(scope="module")
def expected(original: MixtralForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = original(torch.tensor([ids])).logits[0]
    return logits


def decoder(folder: Path, context_tokens: int) -> tuple[Pack, Decoder]:
    held = Pack(folder)
    return held, Decoder(PackWeights(held, torch.device("cpu")), context_tokens)


def test_prefill_gives_the_logits_of_transformers(demo_pack: PackMaker, ids: list[int], expected: torch.Tensor) -> None:
    for selector in SELECTORS:
        with case(selector):
            held, model = decoder(demo_pack(selector, 16), NUM_TOKENS)
            with held:
                assert len(ids) == NUM_TOKENS
                assert (model.logits(ids) - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_token_by_token_gives_the_logits_of_transformers(
    demo_pack: PackMaker, ids: list[int], expected: torch.Tensor
) -> None:
    for selector in SELECTORS:
        with case(selector):
            held, model = decoder(demo_pack(selector, 16), NUM_TOKENS)
            with held:
                logits = torch.stack([model.next_logits([token]) for token in ids[:NUM_STEPS]])
            assert (logits - expected[:NUM_STEPS]).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def greedy(original: MixtralForCausalLM, ids: list[int]) -> list[int]:
    """Returns the tokens with which transformers goes on after 24 tokens, the likeliest each time."""
    made: list[int] = []
    given, cache = ids[:24], None
    with torch.no_grad():
        for _ in range(128):
            out = original(torch.tensor([given]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            given = [int(out.logits[0, -1].argmax())]
            made += given
    return made


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_for_128_tokens(
    demo_pack: PackMaker, ids: list[int], greedy: list[int]
) -> None:
    for selector in ("up", "none"):
        with case(selector):
            prompt = ids[:24]
            held, model = decoder(demo_pack(selector, 16), 200)
            with held:
                made = list(generate(model, prompt, Sampler(SamplingOptions(temperature=0)), 128, frozenset()))
            assert len(made) == 128
            assert made == greedy
