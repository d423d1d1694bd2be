"""Long runs in the smallest budget: memory does not grow."""

import pytest
from models import PackMaker
from soak import growth, soak

from moe_pack.formats import Pack

NUM_TOKENS = 2_000
MOST_GROWTH_BYTES = 4 << 20  # 2.5 KB a token after the first fifth; what the allocator moves about is under 1 MiB


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("policy", ["lru", "corm"])
def test_memory_stays_what_it_was_after_the_first_tokens(demo_pack: PackMaker, policy: str) -> None:
    with Pack(demo_pack("up", 4)) as held:
        slices = list(soak(held, policy, num_experts=1, num_tokens=NUM_TOKENS, seed=0))
    assert sum(one.num_tokens for one in slices) >= NUM_TOKENS
    assert growth(slices) <= MOST_GROWTH_BYTES
