"""Long runs in the smallest budget: memory does not grow.

MOE_PACK_SOAK_TOKENS makes them longer, MOE_PACK_SEED repeats one.
"""

import os
import secrets

import pytest
from offloading import growth, soak
from support.cases import case
from support.models import PackMaker

from moe_pack.formats import Pack

NUM_TOKENS = int(os.environ.get("MOE_PACK_SOAK_TOKENS", "1000"))
# After the first fifth 2.5 KB a token, and what the allocator moves about, which is under 1 MiB.
MOST_GROWTH_BYTES = (1 << 20) + 2500 * NUM_TOKENS * 4 // 5


@pytest.mark.slow  # some ten seconds each
@pytest.mark.parametrize("policy", ["lru", "corm"])
def test_memory_stays_what_it_was_after_the_first_tokens(demo_pack: PackMaker, policy: str) -> None:
    seed = int(os.environ.get("MOE_PACK_SEED", secrets.randbelow(1 << 31)))
    with case(f"MOE_PACK_SEED={seed}"), Pack(demo_pack("up", 4)) as opened:
        slices = list(soak(opened, policy, num_experts=1, num_tokens=NUM_TOKENS, seed=seed))
        assert sum(one.num_tokens for one in slices) >= NUM_TOKENS
        assert growth(slices) <= MOST_GROWTH_BYTES
