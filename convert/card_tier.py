"""A card's memory over host memory: the tier of `--device cuda`.

Rows are pulled over the link as `card_budget` holds them, which `moe-run`'s graph engine does; no figure from a GPU
exists yet.
"""

import numpy as np

from moe_pack.convert.choices import Floats
from moe_pack.convert.cost_model import best_card_plan, link_seconds
from moe_pack.convert.heats import Heats
from moe_pack.convert.machine_tier import MachineTier, Traffic, foretold
from moe_pack.convert.machines import Machine
from moe_pack.convert.tier import Foretold
from moe_pack.formats import ExpertLayout, PackLayout, Selector
from moe_pack.runtime import CardPlan, least_card

_ROUGH_PAGE_SHARES = (0.25,)  # of what experts have: with it alone plans are told apart


class CardTier(MachineTier):
    """A budget of a card's memory; what it cannot hold comes from host memory, and what that cannot from the drive."""

    def __init__(
        self, machine: Machine, traffic: Traffic, heats: Heats, budget_bytes: int, context_tokens: int
    ) -> None:
        assert machine.link_rate is not None, "a card has a link"
        super().__init__(machine, traffic, budget_bytes, context_tokens)
        self._heats = heats

    def foretell(self, layout: PackLayout, sparsity: Floats, less_bytes: int = 0, is_rough: bool = False) -> Foretold:
        """What a pack of this layout, so sparse [L, E], would do; in a budget smaller by some bytes, if given.

        Args:    is_rough: sooner, and less exactly: for a search.
        Raises:  RunError if it does not fit; it says what is needed.
        """
        traffic, heat = self._traffic, self._heats.at(_selector_of(layout), sparsity)
        plan, found = best_card_plan(
            layout,
            self.budget_bytes - less_bytes,
            self._context_tokens,
            traffic.predictor_bytes,
            self._machine,
            traffic.popularity,
            heat,
            traffic.passes,
            is_rough,
            *((_ROUGH_PAGE_SHARES,) if is_rough else ()),
        )
        return foretold(plan.parts, found, found.misses * _missing_share(layout, plan, heat))

    def least_bytes(self, layout: PackLayout) -> int:
        """The smallest budget that a pack of this layout runs in."""
        return least_card(layout, self._context_tokens, self._traffic.predictor_bytes)

    def fetch_seconds(self, expert: ExpertLayout, sparsity: float) -> float:
        """What pulling an expert takes of which nothing is held: its selector and running rows, or all of it."""
        running = 1.0 if expert.selector is None else 1 - sparsity
        total = expert.num_bytes * self._traffic.popularity.size  # were all experts stored so
        return (expert.selector_bytes + running * expert.records_bytes) * link_seconds(self._machine, total)


def _selector_of(layout: PackLayout) -> Selector:
    selected = layout.experts[0][0].selector
    if selected is None:
        return "none"
    names = {part.name for part in selected.parts}
    return "both" if len(names) == 2 else "gate" if "gate" in names else "up"


def _missing_share(layout: PackLayout, plan: CardPlan, heat: Floats) -> Floats:
    """Of what a token reads of each expert, the share that is not always there: float64 [L, E]."""
    selectors, records = (
        np.array([[getattr(expert, name) for expert in layer] for layer in layout.experts], np.float64)
        for name in ("selector_bytes", "records_bytes")
    )
    missing = (1 - plan.selector_share) * selectors + ((1 - plan.row_shares) * heat).mean(axis=2) * records
    found: Floats = missing / np.maximum(selectors + heat.mean(axis=2) * records, 1)
    return found
