"""What tiers of every kind of machine share: what is known of routes, and what computing takes."""

from dataclasses import dataclass

from moe_pack.convert.choices import Floats
from moe_pack.convert.cost_model import Prediction, expert_seconds
from moe_pack.convert.machines import Machine, rate_of
from moe_pack.convert.tier import Foretold
from moe_pack.formats import ExpertLayout
from moe_pack.runtime import MemoryPart, Passes


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What is known of routes. `popularity`: float64 [L, E].

    `passes`: routes of text not used for calibration, to replay; None: independent draws.   `recall`: how many of the
    next layer's experts the best predictor foretells; None where no profile says it.   `predictor_bytes`: what
    foretells takes in memory.
    """

    popularity: Floats
    passes: Passes | None = None
    recall: float | None = None
    predictor_bytes: int = 0


class MachineTier:
    """A budget of a machine's fast memory: the part of a `Tier` that does not depend on what lies below."""

    def __init__(self, machine: Machine, traffic: Traffic, budget_bytes: int, context_tokens: int) -> None:
        self.budget_bytes = budget_bytes
        self._machine = machine
        self._traffic = traffic
        self._context_tokens = context_tokens

    def run_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What running an expert that is there takes for one token."""
        return expert_seconds(expert, 1 - sparsity, self._machine)[0]

    def dense_seconds(self, num_bytes: int, width: int) -> float:
        """What a dense matrix of so many bytes takes, every token."""
        return num_bytes / rate_of(self._machine.dense_rates, width)


def foretold(shares: tuple[MemoryPart, ...], found: Prediction, misses: Floats) -> Foretold:
    """A prediction as planners take it, with the shares of the budget it was made for.

    Args:    misses: [L, E], of whole experts.
    """
    return Foretold(
        shares, found.seconds.total, found.fetched_bytes, found.read_bytes, found.hit_rate, misses, found.policy
    )
