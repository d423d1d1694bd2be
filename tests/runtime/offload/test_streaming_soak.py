"""Long runs in the smallest budget: memory does not grow.

MOE_PACK_SOAK_TOKENS makes them longer, MOE_PACK_SEED repeats one.
"""

import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from benchlib.packs import budget_with
from support.cases import case
from support.models import BOOK, PackMaker

from moe_pack.formats import Pack
from moe_pack.runtime import Engine, EngineOptions, Sampler, SamplingOptions, Text
from moe_pack.runtime.engine.machine import anonymous_bytes
from moe_pack.runtime.generate import generate
from moe_pack.runtime.offload import PolicyName

NUM_TOKENS = int(os.environ.get("MOE_PACK_SOAK_TOKENS", "1000"))
# After the first fifth 2.5 KB a token, and what the allocator moves about, which is under 1 MiB.
MOST_GROWTH_BYTES = (1 << 20) + 2500 * NUM_TOKENS * 4 // 5
PROMPT_TOKENS, NEW_TOKENS, NUM_SLICES = 96, 64, 10


def memory_of_slices(pack: Pack, policy: PolicyName, seed: int) -> Iterator[int]:
    """Yields the process's anonymous bytes after each tenth of a run of prompts, each continued, with resets."""
    context, draw = PROMPT_TOKENS + NEW_TOKENS, np.random.default_rng(seed)
    ids, sampler, made = Text(pack).encode(BOOK.read_text("utf-8")[:100_000]), Sampler(SamplingOptions(seed=seed)), 0
    with Engine(pack, EngineOptions("cpu", budget_with(pack, 1, context), policy=policy), context) as engine:
        for number in range(1, NUM_SLICES + 1):
            while made < NUM_TOKENS * number // NUM_SLICES:
                length, start = int(draw.integers(1, PROMPT_TOKENS + 1)), int(draw.integers(len(ids) // 2))
                wanted, prompt = int(draw.integers(1, NEW_TOKENS + 1)), ids[start : start + length]
                engine.decoder.reset()
                made += sum(1 for _ in generate(engine.decoder, prompt, sampler, wanted, frozenset()))
            taken = anonymous_bytes()
            if taken is None:
                pytest.skip("the system does not say how much memory a process has")
            yield taken


@pytest.mark.slow  # some ten seconds each
@pytest.mark.parametrize("policy", ["lru", "corm"])
def test_memory_stays_what_it_was_after_the_first_tokens(demo_pack: PackMaker, policy: PolicyName) -> None:
    seed = int(os.environ.get("MOE_PACK_SEED", secrets.randbelow(1 << 31)))
    with case(f"MOE_PACK_SEED={seed}"), Pack(demo_pack("up", 4)) as opened:
        _, *warm = memory_of_slices(opened, policy, seed)
        assert max(warm) - warm[0] <= MOST_GROWTH_BYTES
