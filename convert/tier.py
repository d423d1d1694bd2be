"""What a planner asks of the memory it plans for: how a budget divides, what bytes cost, how fast a pack would be."""

from dataclasses import dataclass
from typing import Protocol

from moe_pack.convert.choices import Floats
from moe_pack.formats import ExpertLayout, PackLayout
from moe_pack.runtime import MemoryPart


@dataclass(frozen=True, slots=True, eq=False)
class Foretold:
    """A pack inside a budget, before it exists: the steady state of decoding token by token.

    `shares` of the budget sum to no more than it.   `seconds` a token.   `fetched_bytes`, `read_bytes` a token: from
    the tier below, and of weights in fast memory.   `hit_rate`: of experts.   `misses`: float64 [L, E], how often a
    token finds the expert missing.   `policy`: of the runtime.
    """

    shares: tuple[MemoryPart, ...]
    seconds: float
    fetched_bytes: float
    read_bytes: float
    hit_rate: float
    misses: Floats
    policy: str

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, one token after the other."""
        return 1 / self.seconds


class Tier(Protocol):
    """Fast memory of so many bytes over a slower tier."""

    budget_bytes: int

    def foretell(self, layout: PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False) -> Foretold:
        """What a pack of this layout, so sparse [L, E], would do; in a budget smaller by some bytes, if given.

        Args:    is_rough: sooner, and less exactly: for a search.
        Raises:  RunError if it does not fit; it says what is needed.
        """
        ...

    def least_bytes(self, layout: PackLayout) -> int:
        """The smallest budget that a pack of this layout runs in."""
        ...

    def run_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What running an expert that is there takes for one token."""
        ...

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What bringing an expert takes, and a token waits for."""
        ...

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """What a dense matrix of so many bytes takes, every token."""
        ...
